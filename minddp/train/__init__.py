"""The training recipe: good practices around DDP, in files to read one at a time.

| file             | which question it answers                                                     |
|------------------|-------------------------------------------------------------------------------|
| `settings.py`    | Which settings does a run have, and which of them cannot work?                 |
| `launch.py`      | What does `minddp train` do before and after the ranks run?                    |
| `world.py`       | Which rank is this process, and on which device?                               |
| `tasks.py`       | Which data and which model? (`corpus.py`, `gpt.py`; `digits.py`)               |
| `batches.py`     | Which rank gets which samples, and how does a run resume its position?         |
| `wrap.py`        | Which DistributedDataParallel wraps the model?                                 |
| `schedule.py`    | Which learning rate does a step have?                                          |
| `trainer.py`     | What does one rank do in a step?                                               |
| `loop.py`        | What happens between steps?                                                    |
| `stop.py`        | How do all ranks end at the same step?                                         |
| `metrics.py`     | How are averages taken over ranks, and where are they written?                 |
| `checkpoint.py`  | What is saved to continue to the same bits? (`atomic.py`: how is it written?)  |
| `display.py`     | What does the terminal show?                                                   |
| `demo.py`        | Is it equal to torch's DDP, and how fast? (`compare.py`)                       |
"""
