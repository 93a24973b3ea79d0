"""The training recipe: everything around DDP in a run on a cluster. Start with `loop.train`.

| file            | which question it answers |
|-----------------|---------------------------|
| `settings.py`   | Which settings does a run have? |
| `launch.py`     | How are ranks started, and which rank is this process under torchrun or SLURM? |
| `world.py`      | How does a rank join the group, and which device has it? |
| `task.py`       | Which data, model and loss? (built in: `minddp/tools/tasks/`) |
| `batches.py`    | Which rank gets which samples, and how does a run resume its position? |
| `optimizer.py`  | Which optimizer, and which learning rate does a step have? |
| `trainer.py`    | What does one rank do in a step, in low precision, too, and what is its state? |
| `loop.py`       | What happens before, between and after the steps, and how do all ranks end at the same one? |
| `checkpoint.py` | How are checkpoints written, verified and found again? |
| `metrics.py`    | How are averages taken over ranks, and where are they written? |
"""
