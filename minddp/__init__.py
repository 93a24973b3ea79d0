"""minddp: PyTorch's DistributedDataParallel, written again from nothing in readable Python.

    import minddp
    ddp = minddp.DistributedDataParallel(model)   # instead of torch.nn.parallel.DistributedDataParallel

`README.md` has the map of the code: which file answers which question.
"""

from minddp.ddp import DistributedDataParallel
from minddp.plan import BucketPlan, BucketSpec, ParamSpec, Slot

__all__ = ["BucketPlan", "BucketSpec", "DistributedDataParallel", "ParamSpec", "Slot"]
