"""The training recipe: what surrounds DDP in a run that one would start on a cluster. `loop.train` is its contents.

| file                  | which question it answers |
|-----------------------|--------------------------------------------------------------------------------- |
| `settings.py`         | Which settings does a run have, and which of them cannot work? |
| `launch.py`           | What does `minddp train` do before and after the ranks run? |
| `cluster.py`          | Which rank is this process, and how does SLURM start and requeue a run? |
| `world.py`            | On which device is a rank, and have all others come? |
| `task.py`             | Which data, model and loss? (built in: `minddp/tools/tasks/`) |
| `batches.py`          | Which rank gets which samples, and how does a run resume its position? |
| `optimizer.py`        | Which optimizer, and which learning rate does a step have? |
| `precision.py`        | What changes in a step in 16 bits? |
| `trainer.py`          | How is the model wrapped, what does one rank do in a step, and which state does it have? |
| `loop.py`             | What happens before, between and after steps? |
| `stop.py`             | How do all ranks end at the same step, and with which status? |
| `checkpoint.py`       | From which checkpoint does a run go on, and how does it reach all ranks? |
| `checkpoint_files.py` | How are checkpoints written whole, checked, kept and paid for? |
| `metrics.py`          | How are averages taken over ranks, and where are they written? |
| `display.py`          | What does the terminal show, and at the end one picture? |
"""
