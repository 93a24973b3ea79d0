"""Where the last bits of a gradient come from: when and how it is divided, and the order of summation."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from docs.learning.small_net import CAP_MIB, examples_of, loss_of, small_net
from minddp import DistributedDataParallel
from minddp.tools.elastic.tree_sum import deal
from reference.ring import ring_all_reduce

NUMEL = 3000


def overflow(_rank: int) -> str:
    """Half precision, two ranks: the sum of two gradients overflows, their mean does not."""
    first, second = torch.tensor(40_000.0, dtype=torch.half), torch.tensor(48_000.0, dtype=torch.half)
    return (
        f"largest number of float16  {torch.finfo(torch.half).max:g}\n"
        f"(40000 + 48000) / 2        {((first + second) / 2).item():g}\n"
        f"40000 / 2 + 48000 / 2      {(first / 2 + second / 2).item():g}"
    )


def reciprocal(_rank: int) -> str:
    """How many of a thousand gradients differ if they are multiplied by 1/n instead of divided by n."""
    gradients = numbers(seed=0)[:1000]
    rows = ["ranks  differ"]
    for n in range(2, 9):
        differ = int((gradients * (1.0 / n) != gradients / n).sum())
        rows.append(f"{n:5}  {differ:6}")
    return "\n".join(rows)


def order_of_sum(_rank: int) -> str:
    """Three numbers added in two orders; and a ring all-reduce, which adds each chunk in another order."""
    a, b, c = np.float32(1.0), np.float32(2.0**-24), np.float32(2.0**-24)
    return (
        f"(a + b) + c = {(a + b) + c:.10f}\n"
        f"a + (b + c) = {a + (b + c):.10f}\n\n"
        f"{moved_in_the_ring(2)}\n{moved_in_the_ring(3)}\n{moved_in_the_ring(4)}"
    )


def moved_in_the_ring(n: int) -> str:
    """The same gradients reduced by a ring in two layouts: as given, and with the first tenth moved to the end."""
    gradients = [numbers(seed=rank).numpy() for rank in range(n)]
    moved = NUMEL // 10
    one = ring_all_reduce(gradients).results[0]
    other = np.roll(ring_all_reduce([np.roll(grad, -moved) for grad in gradients]).results[0], moved)
    return f"{n} ranks: {int((one != other).sum()):4} of {NUMEL} sums differ if the layout does"


def layout(_rank: int) -> str:
    """The same gradients under minddp, in one bucket and in two: how many averages differ."""
    n = dist.get_world_size()
    differ = torch.cat([a != b for a, b in zip(averaged(25.0), averaged(0.001), strict=True)])
    return (
        f"{n} ranks over gloo: {int(differ.sum()):4} of {differ.numel()} averages differ between one bucket and two"
    )


def averaged(cap_mib: float) -> list[Tensor]:
    """Two given gradients, averaged by minddp with buckets of `cap_mib`, after the buckets have been rebuilt."""
    module = nn.ParameterList([torch.zeros(NUMEL // 3), torch.zeros(NUMEL - NUMEL // 3)])
    given = numbers(seed=dist.get_rank()).split([param.numel() for param in module])
    ddp = DistributedDataParallel(_Weighted(module, given), bucket_cap_mb=cap_mib)
    for _ in range(2):
        ddp.zero_grad()
        ddp().backward()
    assert len(ddp.plan.buckets) == (1 if cap_mib > 1 else 2)
    return [param.grad for param in module if param.grad is not None]


class _Weighted(nn.Module):
    """A loss whose gradients are `given`."""

    def __init__(self, params: nn.ParameterList, given: tuple[Tensor, ...]):
        super().__init__()
        self.params = params
        self._given = given

    def forward(self) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.params, self._given, strict=True)]).sum()


def numbers(seed: int) -> Tensor:
    """NUMEL numbers of float32 that look like gradients, the same everywhere."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).normal(size=NUMEL).astype(np.float32))


def same_as_torch(rank: int) -> str:
    """Five steps of the small net under torch's DDP and under minddp, bit for bit, with equal and unequal caps."""
    theirs = weights_after_training(TorchDDP, CAP_MIB, rank)
    lines = []
    for cap_mib in (CAP_MIB, 2 * CAP_MIB):
        ours = weights_after_training(DistributedDataParallel, cap_mib, rank)
        equal = torch.equal(ours, theirs)
        verdict = "the same bits" if equal else "other bits"
        lines.append(f"minddp, buckets of {cap_mib:g} MiB; torch, of {CAP_MIB:g} MiB: {verdict}")
    return "\n".join([f"{dist.get_world_size()} ranks, {theirs.numel():,} weights after 5 steps", *lines])


def weights_after_training(wrapper: type[nn.Module], cap_mib: float, rank: int) -> Tensor:
    ddp = wrapper(small_net(), bucket_cap_mb=cap_mib)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    for _ in range(5):
        loss_of(ddp, examples_of(rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([param.detach().reshape(-1) for param in ddp.parameters()])


NUM_SHARES = 8
EXAMPLES = 16  # of a share


def number_of_ranks(rank: int) -> str:
    """Batches of eight shares, trained on 1, 2, 3 and 4 ranks: with DDP's addition, and with logical ranks."""
    lines = []
    for logical_ranks in (None, NUM_SHARES):
        of_one_rank = torch.empty(0)
        for n in range(1, dist.get_world_size() + 1):
            group = dist.new_group(list(range(n)))
            if rank >= n:
                continue
            weights = weights_with_shares(group, logical_ranks)
            if n == 1:  # rank 0, which compares
                of_one_rank = weights
            verdict = "the same bits" if torch.equal(weights, of_one_rank) else "other bits"
            how = "DDP" if logical_ranks is None else "logical ranks"
            lines.append(f"{how:13}  {n} of {dist.get_world_size()} ranks: {verdict}")
    return "\n".join(lines)


def weights_with_shares(group: dist.ProcessGroup | None, logical_ranks: int | None) -> Tensor:
    """After three steps. The mean over all shares is the same number, however they are dealt, but for rounding."""
    ddp = DistributedDataParallel(small_net(), process_group=group, logical_ranks=logical_ranks)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    for _ in range(3):
        if logical_ranks is None:
            for share in deal(NUM_SHARES, n)[rank]:  # a mean over ranks is one over shares if it is weighted so
                with ddp.no_sync() if share + 1 < deal(NUM_SHARES, n)[rank].stop else nullcontext():
                    (loss_of(ddp, examples_of(share)[:EXAMPLES]) * n / NUM_SHARES).backward()
        else:
            for share in ddp.shares():
                loss_of(ddp, examples_of(share)[:EXAMPLES]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([param.detach().reshape(-1) for param in ddp.parameters()])
