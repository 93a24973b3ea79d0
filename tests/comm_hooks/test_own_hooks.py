"""minddp's own hooks on real ranks: their values, bits in any buckets, errors that count, refusals."""

from __future__ import annotations

import copy
import datetime
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import minddp
from minddp.comm_hooks import HOOKS
from minddp.comm_hooks.int8_compression import BLOCK, decode, encode
from tests.ranks import of_all_ranks, on_ranks

CLASSES = (TorchDDP, minddp.DistributedDataParallel)
NAMES = tuple(HOOKS)


def wrapped(cls: Any, module: nn.Module, name: str, group: Any = None, **options: Any) -> tuple[Any, Any]:
    """The wrapper with the hook of that name, and the hook's state."""
    ddp = cls(module, process_group=group, **options)
    make_state, hook = HOOKS[name]
    state = make_state(module, group)
    ddp.register_comm_hook(state, hook)
    return ddp, state


class Shuffled(nn.Module):
    """Layers that run in another order than that of their registration, so buckets are rebuilt to another plan."""

    def __init__(self, seed: int):
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        widths = [8, *(rng.randint(1, 40) for _ in range(rng.randint(2, 6))), 8]
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
        self.order = rng.sample(range(len(layers)), len(layers))
        self.layers = nn.ModuleList(layers[place] for place in self.order)
        self.kernel = nn.Parameter(torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place in range(len(self.order)):
            x = torch.tanh(self.layers[self.order.index(place)](x))
        return x.square().mean() + (self.kernel * x.sum()).sin().mean()


def gradients_of_steps(ddp: Any, rank: int, steps: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """All gradients of each step, flat."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(3, 8, generator=generator)).backward()
        yield torch.cat([param.grad.flatten() for param in ddp.parameters()])
        optimizer.step()


# ------------------------------------------------------------------ bits that no bucket decides


@on_ranks(lambda num_ranks, **_: num_ranks)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("num_ranks", "seed"),
    [(2, 1), (3, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(2, 2), (3, 4), (4, 5)])],
)
def test_bits_are_the_same_in_any_buckets_on_any_rank_with_torchs_class_and_ours(
    rank: int, name: str, num_ranks: int, seed: int
) -> None:
    rng = random.Random(seed)
    layouts: list[dict[str, Any]] = [
        {},
        {"find_unused_parameters": True},  # no rebuild
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        *({"bucket_cap_mb": cap} for cap in (0.0001, rng.uniform(0.0005, 0.01))),
        {"bucket_cap_mb": 0.002, "find_unused_parameters": True},
    ]
    results, buckets = [], []
    for options in layouts:
        for cls in CLASSES:
            ddp, _ = wrapped(cls, Shuffled(seed), name, **options)
            results.append(torch.cat(list(gradients_of_steps(ddp, rank, 4, seed))))
        buckets.append(len(ddp.plan.buckets))
    assert results[0].isfinite().all()
    assert len(set(buckets)) > 1, "the layouts differ"
    assert [torch.equal(result, results[0]) for result in results] == [True] * len(results)
    assert all(torch.equal(result, results[0]) for result in of_all_ranks(results[0]))


# ------------------------------------------------------------------ the values


def _averaged(rank: int, name: str, steps: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """What a hook makes of given gradients: `steps[rank][step]` is that of a single parameter."""
    module = nn.ParameterList([nn.Parameter(torch.zeros_like(steps[0][0]))])
    param = module[0]

    class Times(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.params = module

        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            return (self.params[0] * factor).sum()

    ddp, _ = wrapped(minddp.DistributedDataParallel, Times(), name)
    results = []
    for gradient in steps[rank]:
        param.grad = None
        ddp(gradient).backward()
        results.append(param.grad.clone())
    return results


def gradients(num_ranks: int, num_steps: int, *shape: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(*shape, generator=generator) for _ in range(num_steps)] for _ in range(num_ranks)]


@on_ranks(3)
def test_bf16_rounds_before_and_after_a_sum_in_float32(rank: int) -> None:
    given = gradients(3, 2, 5, 77)
    for result, *of_rank in zip(_averaged(rank, "bf16_wire", given), *given, strict=True):
        total = torch.zeros(5, 77)
        for gradient in of_rank:
            total += gradient.bfloat16().float()
        assert torch.equal(result, (total / 3).bfloat16().float())


@on_ranks(3)
def test_int8_is_double_squeeze_with_blocks(rank: int) -> None:
    """Beside the algorithm in one process, for one parameter, whose owners are known: see `shards.py`."""
    num_ranks, numel = 3, 1000
    given = gradients(num_ranks, 4, numel)
    per_rank = -(-numel // (num_ranks * BLOCK)) * BLOCK
    errors = torch.zeros(num_ranks, num_ranks * per_rank)
    results = _averaged(rank, "int8_wire", given)
    for step in range(4):
        due = errors.clone()
        for source in range(num_ranks):
            due[source, :numel] += given[source][step]
        sent = decode(encode(due.view(num_ranks, -1, BLOCK))).view(num_ranks, -1)
        errors = due - sent
        total = sent[0] + sent[1] + sent[2]
        rounded = decode(encode(total.view(-1, BLOCK))).view(-1)
        for owner in range(num_ranks):
            mine = slice(owner * per_rank, (owner + 1) * per_rank)
            errors[owner, mine] += (total - rounded)[mine]
        assert torch.equal(results[step], (rounded / num_ranks)[:numel]), step


@on_ranks(2)
def test_what_int8_keeps_back_is_sent_later(rank: int) -> None:
    """Small elements beside a large one: each step sends zero or too much, the sum over steps is right."""
    steps = 40
    constant = torch.full((2 * BLOCK,), 1e-3)
    constant[0] = 1.0
    given = [[constant * (1 + source)] * steps for source in range(2)]
    results = _averaged(rank, "int8_wire", given)
    wanted = 1.5 * constant
    assert results[0][1].item() == 0
    total = torch.stack(results).sum(0)
    one_quantum_on_each_way = 4 * 2 / 127
    assert ((total - steps * wanted).abs() <= one_quantum_on_each_way).all()
    assert (total[1:BLOCK] > 0).all()


# ------------------------------------------------------------------ errors that are kept


def _with_failed_backward(rank: int, fails: bool) -> list[torch.Tensor]:
    ddp, state = wrapped(minddp.DistributedDataParallel, Shuffled(7), "int8_wire", bucket_cap_mb=0.0001)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    first = ddp.module.layers[ddp.module.order.index(0)].weight  # its gradient is the last

    for step in range(5):
        ddp.zero_grad()
        x = torch.randn(3, 8, generator=generator)
        if fails and step == 2:
            before = state.state_dict()
            handle = first.register_hook(lambda _gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ddp(torch.full((3, 8), 5.0)).backward()
            handle.remove()
            state.load_state_dict(before)
            ddp.zero_grad()
        ddp(x).backward()
        seen.append(torch.cat([param.grad.flatten() for param in ddp.parameters()]))
    return seen


@on_ranks(2)
def test_a_failed_backward_can_be_undone(rank: int) -> None:
    """Torch's class cannot go on after one here: its next forward raises."""
    calm, failed = (_with_failed_backward(rank, fails) for fails in (False, True))
    assert [torch.equal(*pair) for pair in zip(calm, failed, strict=True)] == [True] * 5


class Checkpointed(nn.Module):
    """A head, and a body that is computed again in backward: its buckets are launched in nested backwards."""

    def __init__(self, how: str):
        super().__init__()
        torch.manual_seed(3)
        self.bodies = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head, self.how = nn.Linear(8, 8), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for body in self.bodies:
            x = torch.tanh(body(x) if self.how == "plain" else checkpoint(body, x, use_reentrant=True))
        return self.head(x).square().mean()


def _around_checkpoints(rank: int, how: str) -> list[torch.Tensor]:
    ddp, state = wrapped(minddp.DistributedDataParallel, Checkpointed(how), "int8_wire", bucket_cap_mb=0.0001)
    seen = []
    for step in range(4):
        ddp.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        ddp(torch.randn(3, 8, generator=generator).requires_grad_()).backward()
        seen.append(torch.cat([param.grad.flatten() for param in ddp.parameters()]))
    errors = state.state_dict()["errors"]
    return [*seen, torch.cat([errors[name].flatten() for name in sorted(errors)])]


@on_ranks(2)
def test_nested_backwards_neither_lose_nor_repeat_errors(rank: int) -> None:
    """The bucket of the head is launched in the outer backward, those of the body in nested ones."""
    plain, nested = (_around_checkpoints(rank, how) for how in ("plain", "nested"))
    assert [torch.equal(*pair) for pair in zip(plain, nested, strict=True)] == [True] * 5


@on_ranks(2)
def test_a_run_goes_on_with_the_errors_that_were_saved(rank: int) -> None:
    ddp, state = wrapped(minddp.DistributedDataParallel, Shuffled(7), "int8_wire", bucket_cap_mb=0.001)
    list(gradients_of_steps(ddp, rank, 3))
    saved = copy.deepcopy((ddp.module.state_dict(), state.state_dict()))
    rest = list(gradients_of_steps(ddp, rank, 3))
    for loads in (True, False):
        other, other_state = wrapped(TorchDDP, Shuffled(7), "int8_wire")
        other.module.load_state_dict(saved[0])
        if loads:
            other_state.load_state_dict(saved[1])
        pairs = zip(rest, gradients_of_steps(other, rank, 3), strict=True)
        assert [torch.equal(*pair) for pair in pairs] == [loads] * 3


@on_ranks(2)
def test_errors_of_other_ranks_or_models_are_refused(rank: int) -> None:
    _, state = wrapped(minddp.DistributedDataParallel, nn.Linear(2, 3), "int8_wire")
    saved = state.state_dict()
    other = 1 - rank
    wrong = (
        (
            {"rank": other},
            f"rank {other} of 2, but this is rank {rank} of 2. Parameters of another shape here: none",
        ),
        ({"num_ranks": 5}, f"by rank {rank} of 5"),
        (
            {"errors": {"weight": torch.zeros(3, 4), "scale": torch.zeros(3)}},
            "of another shape here: weight, scale",
        ),
    )
    for each, text in wrong:
        with pytest.raises(ValueError, match=text):
            state.load_state_dict(saved | each)


@on_ranks(2)
def test_what_is_sent_and_what_is_kept_back_add_up_under_join(rank: int) -> None:
    """Rank 0 has one input, rank 1 has two."""
    torch.manual_seed(0)
    ddp, state = wrapped(minddp.DistributedDataParallel, nn.Linear(40, 30), "int8_wire")
    weight = ddp.module.weight
    came, sent = torch.zeros(30, 40), torch.zeros(30, 40)
    with ddp.join():
        for step in range(1 + rank):
            x = torch.randn(3, 40, generator=torch.Generator().manual_seed(10 * rank + step))
            came += torch.autograd.grad(ddp.module(x).square().sum(), weight)[0]
            ddp.zero_grad()
            ddp(x).square().sum().backward()
            sent += 2 * weight.grad
    (came_0, _, kept_0), (came_1, sent, kept_1) = of_all_ranks((came, sent, state.state_dict()["errors"]["weight"]))
    assert kept_0.abs().max() > 1e-3
    torch.testing.assert_close(sent + kept_0 + kept_1, came_0 + came_1, rtol=0, atol=1e-4)


@on_ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_infinity_on_one_rank_is_seen_on_all_and_gone_in_the_next_step(rank: int, name: str) -> None:
    module = Shuffled(7)
    ddp, _ = wrapped(minddp.DistributedDataParallel, module, name)
    x = torch.ones(3, 8)
    finite = []
    for scale in (1.0, float("inf") if rank == 1 else 1.0, 1.0):
        ddp.zero_grad()
        (ddp(x) * scale).backward()
        finite.append(all(param.grad.isfinite().all() for param in module.parameters()))
    assert not finite[1]
    assert finite[2]


# ------------------------------------------------------------------ with the options of the wrapper


def _ran(rank: int, what: str, name: str) -> torch.Tensor:
    if what == "a group of some ranks":
        group = dist.new_group([1, 2])
        grads = [torch.zeros(1)]
        if rank > 0:
            for _ in range(2):  # the second hook has a group of its own, too
                ddp, _ = wrapped(minddp.DistributedDataParallel, Shuffled(3), name, group)
            grads = list(gradients_of_steps(ddp, rank, 3))
        dist.new_group()  # of all ranks, who must agree how many there are
        return torch.cat(grads)
    if what == "join":
        ddp, _ = wrapped(minddp.DistributedDataParallel, Shuffled(3), name, bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for _ in range(2 + rank):
                optimizer.zero_grad()
                ddp(torch.full((3, 8), 1.0 + rank)).backward()
                optimizer.step()
        return torch.cat([param.detach().flatten() for param in ddp.parameters()])
    if what == "bfloat16":
        ddp, _ = wrapped(minddp.DistributedDataParallel, nn.Linear(8, 5, dtype=torch.bfloat16), name)
        ddp(torch.full((3, 8), 1.0 + rank, dtype=torch.bfloat16)).sum().backward()
        return torch.cat([param.grad.flatten() for param in ddp.parameters()])
    if what == "autocast":
        ddp, _ = wrapped(minddp.DistributedDataParallel, Shuffled(3), name)
        with torch.autocast("cpu", torch.bfloat16):
            loss = ddp(torch.full((3, 8), 1.0 + rank))
        loss.backward()
        return torch.cat([param.grad.flatten() for param in ddp.parameters()])
    if what == "two wrappers in a backward":
        first, _ = wrapped(minddp.DistributedDataParallel, nn.Linear(8, 8), name, bucket_cap_mb=0.0001)
        second, _ = wrapped(minddp.DistributedDataParallel, nn.Linear(8, 8), name, bucket_cap_mb=0.0001)
        for _ in range(5):
            second(first(torch.full((3, 8), 1.0 + rank))).sum().backward()
        return torch.cat([p.grad.flatten() for ddp in (first, second) for p in ddp.parameters()])
    raise AssertionError(what)


@on_ranks(3)
def test_ranks_that_are_in_different_numbers_of_groups(rank: int) -> None:
    """Torch 2.13 would name a group of some ranks after that number, and ranks would wait under two names."""
    dist.new_group([0, 1])
    of_all_ranks(_ran(rank, "a group of some ranks", NAMES[0]))


@on_ranks(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "what", ["a group of some ranks", "join", "bfloat16", "autocast", "two wrappers in a backward"]
)
def test_ranks_agree(rank: int, what: str, name: str) -> None:
    *_, first, second = of_all_ranks(_ran(rank, what, name))
    assert first.isfinite().all()
    assert first.abs().max() > 0
    assert torch.equal(first, second)


def _with_unused(rank: int, cls: Any, name: str) -> list[Any]:
    """Every rank uses `shared`, rank 0 alone `left`, none `never`."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.shared, self.left, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.shared(x)
            return (self.left(x) if rank == 0 else x).sum()

    ddp, _ = wrapped(cls, Branches(), name, find_unused_parameters=True)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.full((3, 8), 1.0 + rank)).backward()
    return [None if param.grad is None else param.grad.clone() for param in ddp.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_unused_parameters(rank: int, name: str) -> None:
    torchs, ours = (_with_unused(rank, cls, name) for cls in CLASSES)
    assert ours[4] is ours[5] is None
    for our, other, torchs_own in zip(ours[:4], of_all_ranks(ours)[1 - rank], torchs, strict=False):
        assert torch.equal(our, other)
        assert torch.equal(our, torchs_own)
        assert our.abs().max() > 0


# ------------------------------------------------------------------ what is refused


@on_ranks(2)
@pytest.mark.parametrize(
    ("what", "name"),
    [
        *(("sparse", name) for name in NAMES),
        *(("complex64", name) for name in NAMES),
        ("float64", "bf16_wire"),
        ("float64", "int8_wire"),
    ],
)
def test_gradients_that_a_hook_cannot_take_are_refused(rank: int, what: str, name: str) -> None:
    if what == "sparse":
        module, inputs = nn.Embedding(8, 2, sparse=True), torch.arange(3)
        says = r"are sparse, of parameters of shape \[8, 2\]"
    else:
        dtype = getattr(torch, what)
        module, inputs, says = nn.Linear(8, 2, dtype=dtype), torch.ones(3, 8, dtype=dtype), f"are torch.{what}"
    ddp, _ = wrapped(minddp.DistributedDataParallel, module, name)
    takes = f"`{HOOKS[name][1].__name__}` takes dense gradients of torch.float32"
    with pytest.raises(TypeError, match=f"(?s){takes}.*{says}"):
        ddp(inputs).abs().sum().backward()


@on_ranks(2)
def test_a_hook_waits_no_longer_than_the_group_that_it_was_given(rank: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=77))
    _, state = wrapped(minddp.DistributedDataParallel, nn.Linear(2, 2), "bf16_wire", group)
    backends = (each._get_backend(torch.device("cpu")) for each in (group, state._group))
    assert [backend.options._timeout.total_seconds() for backend in backends] == [77, 77]


@on_ranks(2)
def test_an_error_in_the_hooks_thread_is_raised_by_backward_and_the_thread_goes_on(rank: int) -> None:
    ddp, collectives = wrapped(minddp.DistributedDataParallel, nn.Linear(2, 2), "bf16_wire")

    def lost(_shards: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("connection lost")

    collectives.all_gather = lost
    with pytest.raises(RuntimeError, match="connection lost"):
        ddp(torch.ones(1, 2)).sum().backward()
    del collectives.all_gather
    ddp(torch.ones(1, 2)).sum().backward()
