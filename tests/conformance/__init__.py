"""PyTorch's own tests of DistributedDataParallel, run with any class in its place.

PyTorch ships most of its DDP tests in the wheel, as `torch.testing._internal.distributed`. Nothing of them is
copied here: the class under test is put in DDP's place, then they are imported, and each test runs in processes of
its own with a time limit. `python -m tests.conformance --help` says how.

| question | file |
|---|---|
| which suites are there, which tests are run? | `selection.py`, with `core.txt` |
| which tests are of collectives? | `collectives.txt`, for `--backend` |
| how does a class or a backend get into DDP's place? | `swap.py` |
| how does a test written for GPUs run on the CPU? | `stage.py`, by `minddp run --on-cpu` |
| where do test classes come from? | `wheel_ddp.py`, `wheel_rpc.py` |
| how is one test run, and within which time? | `stage.py` forks it |
| how are all of them run? | `runner.py` |
| what is the outcome of a test, in one line? | `verdict.py` |
| what is written? | `report.py` |
| are failures noticed? | `toy_suite.py` has a class that changes nothing, and one that never synchronises |
"""
