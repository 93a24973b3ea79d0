"""The training recipe: every good practice around DDP, in files to read one at a time.

| file             | which question it answers                                                     |
|------------------|-------------------------------------------------------------------------------|
| `settings.py`    | What can a run be told, and which settings cannot work?                        |
| `launch.py`      | How do ranks start, and what becomes of them when one fails or Ctrl-C comes?   |
| `world.py`       | Who am I among the ranks, and on which device?                                 |
| `tasks.py`       | What is there to learn? (`corpus.py`, `gpt.py`; `digits.py`)                   |
| `batches.py`     | Which rank sees which samples, and how does a run find its place again?        |
| `wrap.py`        | Whose DistributedDataParallel is it?                                           |
| `schedule.py`    | How large is a step?                                                           |
| `trainer.py`     | What does one rank do in a step?                                               |
| `loop.py`        | What happens between steps?                                                    |
| `stop.py`        | How do all ranks end at the same step?                                         |
| `metrics.py`     | How are averages taken over ranks, and where are they written?                 |
| `checkpoint.py`  | What must be kept to continue to the same bits? (`atomic.py`: and kept whole?) |
| `display.py`     | What does a person see meanwhile?                                              |
| `demo.py`        | Does it work, is it equal to torch's DDP, and how fast? (`compare.py`)         |
"""
