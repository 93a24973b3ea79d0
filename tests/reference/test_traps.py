"""Two traps of docs/learning: wrong rungs that run, raise nothing and even train. Only values show the fault.

See [Note: the hook receives the parameter] in reference/interface.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from docs.learning.traps import AveragesTheIncoming, AveragesTheParameter
from reference import oracle
from reference.interface import DataParallel, gradient
from reference.overlapped import Overlapped
from tests.reference.cases import build, loss_of, shards_for

WRONG: dict[str, type[DataParallel]] = {
    "parameter": AveragesTheParameter,
    "incoming": AveragesTheIncoming,
    "right": Overlapped,
}


def train_with(rank: int, rung: str, steps: int) -> tuple[float, list[float], dict[str, Tensor]]:
    """(difference of the first gradient from the oracle, loss at each step, weights at the end)."""
    shards = shards_for(2)
    expected = oracle.mean_over_ranks(build("plain", seed=0), shards, loss_of)
    ddp = WRONG[rung](build("plain", seed=rank))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses, differences = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(ddp, shards[rank])
        loss.backward()
        ddp.synchronize()
        differences.append(oracle.largest_difference({n: gradient(p) for n, p in ddp.trainable.items()}, expected))
        optimizer.step()
        losses.append(float(loss.detach()))
    return differences[0], losses, dict(ddp.module.state_dict())


def accumulate_with(rank: int, rung: str, micro_batches: int) -> float:
    """Difference from the oracle after `micro_batches`, all but the last under no_sync."""
    batches = [shards_for(2, seed=seed) for seed in range(micro_batches)]
    module = build("plain", seed=0)
    of_batch = [oracle.mean_over_ranks(module, shards, loss_of) for shards in batches]
    expected = {name: sum((grads[name] for grads in of_batch[1:]), of_batch[0][name]) for name in of_batch[0]}
    ddp = WRONG[rung](module)
    with ddp.no_sync():
        for shards in batches[:-1]:
            loss_of(ddp, shards[rank]).backward()
    loss_of(ddp, batches[-1][rank]).backward()
    ddp.synchronize()
    return oracle.largest_difference({n: gradient(p) for n, p in ddp.trainable.items()}, expected)


def test_averaging_the_parameter_trains_but_replicas_diverge_and_values_show_it(ranks):
    first, second = ranks(2).run(train_with, "parameter", 3)
    for difference, losses, _ in (first, second):
        assert losses[-1] < losses[0]  # nothing to be seen in the loss
        assert difference > 1e-3
    assert not torch.equal(first[2]["0.weight"], second[2]["0.weight"])


def test_the_same_check_passes_the_right_rung(ranks):
    first, second = ranks(2).run(train_with, "right", 3)
    assert first[0] == second[0] == 0
    assert torch.equal(first[2]["0.weight"], second[2]["0.weight"])


def test_averaging_what_comes_in_is_right_until_gradients_accumulate(ranks):
    assert max(ranks(2).run(accumulate_with, "incoming", 1)) == 0
    assert min(ranks(2).run(accumulate_with, "incoming", 2)) > 1e-3
    assert max(ranks(2).run(accumulate_with, "right", 2)) < 1e-14
