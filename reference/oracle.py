"""The oracle: the gradient data parallelism must reproduce, computed by one process and no communication.

The contract, exactly: after a step every rank holds the *mean over the ranks of each rank's own gradient*.

    gradient = 1/n * sum over ranks r of  d loss(weights, shard r) / d weights

Often that equals the gradient of one process that sees the whole batch, which is why data parallelism is said
to be "the same as a bigger batch". It is so when all of these hold:

- the loss is a mean over the examples (for a sum, the whole batch's gradient is n times as large);
- all shards have the same number of examples (else examples of a small shard count for more);
- no example is affected by the others in its batch (BatchNorm breaks this: a rank normalises by its shard).

Where they differ, the first is what DDP promises: `mean_over_ranks`. It leaves the module as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

Gradients = dict[str, Tensor]
LossOf = Callable[[nn.Module, Any], Tensor]  # (module, examples [n, ...]) -> loss []


def gradients(module: nn.Module, examples: Any, loss_of: LossOf) -> Gradients:
    """`{parameter name: gradient}` of one ordinary backward over `examples`, on a copy of `module`."""
    module = deepcopy(module)
    module.zero_grad()
    loss_of(module, examples).backward()
    return {name: param.grad for name, param in module.named_parameters() if param.grad is not None}


def mean_over_ranks(module: nn.Module, shards: Sequence[Tensor], loss_of: LossOf) -> Gradients:
    """What every rank must hold: the mean of the gradients of all `shards`, one shard per rank."""
    of_rank = [gradients(module, shard, loss_of) for shard in shards]
    return {name: mean([grads[name] for grads in of_rank]) for name in of_rank[0]}


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean computed as the rungs do it, divide and then add, so that on two ranks even the bits agree."""
    total = tensors[0] / len(tensors)
    for tensor in tensors[1:]:
        total = total + tensor / len(tensors)
    return total


def largest_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest absolute difference of any element of any gradient, NaN if there is one; names must agree."""
    if actual.keys() != expected.keys():
        raise ValueError(
            f"Only one side has a gradient for {sorted(actual.keys() ^ expected.keys())}. Compare by the "
            "names of the wrapped module, over the parameters that are trained."
        )
    differences = [(actual[name].double() - expected[name].double()).abs().reshape(-1) for name in expected]
    return float(torch.cat(differences).max())  # torch's max returns a NaN; Python's may not
