"""minddp's own hooks on real ranks: their values, bits in any buckets, errors that count, refusals."""

from __future__ import annotations

import copy
import datetime
import itertools
import random
from collections.abc import Callable, Iterator
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
from tests.ranks import RankFailure, on_ranks

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


def _in_many_layouts(rank: int, name: str, seed: int) -> tuple[torch.Tensor, list[int]]:
    """All gradients of all steps in every layout and both classes `[layouts, numbers]`; the numbers of buckets."""
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
    return torch.stack(results), buckets


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("num_ranks", "seed"),
    [(2, 1), (3, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(2, 2), (3, 4), (4, 5)])],
)
def test_bits_are_the_same_in_any_buckets_on_any_rank_with_torchs_class_and_ours(
    ranks: Any, name: str, num_ranks: int, seed: int
) -> None:
    of_rank = ranks(num_ranks).run(_in_many_layouts, name, seed)
    first = of_rank[0][0][0]
    assert first.isfinite().all()
    for of_layout, buckets in of_rank:
        assert len(set(buckets)) > 1, "the layouts differ"
        assert [torch.equal(result, first) for result in of_layout] == [True] * len(of_layout)


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


def test_bf16_rounds_before_and_after_a_sum_in_float32(ranks: Any) -> None:
    given = gradients(3, 2, 5, 77)
    for of_step, *on_ranks in zip(
        zip(*given, strict=True), *ranks(3).run(_averaged, "bf16_wire", given), strict=True
    ):
        total = torch.zeros(5, 77)
        for gradient in of_step:
            total += gradient.bfloat16().float()
        for result in on_ranks:
            assert torch.equal(result, (total / 3).bfloat16().float())


def test_int8_is_double_squeeze_with_blocks(ranks: Any) -> None:
    """Beside the algorithm in one process, for one parameter, whose owners are known: see `shards.py`."""
    num_ranks, numel = 3, 1000
    given = gradients(num_ranks, 4, numel)
    per_rank = -(-numel // (num_ranks * BLOCK)) * BLOCK
    errors = torch.zeros(num_ranks, num_ranks * per_rank)
    of_rank = ranks(num_ranks).run(_averaged, "int8_wire", given)
    for step in range(4):
        due = errors.clone()
        for rank in range(num_ranks):
            due[rank, :numel] += given[rank][step]
        sent = decode(encode(due.view(num_ranks, -1, BLOCK))).view(num_ranks, -1)
        errors = due - sent
        total = sent[0] + sent[1] + sent[2]
        rounded = decode(encode(total.view(-1, BLOCK))).view(-1)
        for owner in range(num_ranks):
            mine = slice(owner * per_rank, (owner + 1) * per_rank)
            errors[owner, mine] += (total - rounded)[mine]
        for rank in range(num_ranks):
            assert torch.equal(of_rank[rank][step], (rounded / num_ranks)[:numel]), (rank, step)


def test_what_int8_keeps_back_is_sent_later(ranks: Any) -> None:
    """Small elements beside a large one: each step sends zero or too much, the sum over steps is right."""
    steps = 40
    constant = torch.full((2 * BLOCK,), 1e-3)
    constant[0] = 1.0
    given = [[constant * (1 + rank)] * steps for rank in range(2)]
    results = ranks(2).run(_averaged, "int8_wire", given)[0]
    wanted = 1.5 * constant
    assert results[0][1].item() == 0
    total = torch.stack(results).sum(0)
    one_quantum_on_each_way = 4 * 2 / 127
    assert ((total - steps * wanted).abs() <= one_quantum_on_each_way).all()
    assert (total[1:BLOCK] > 0).all()


# ------------------------------------------------------------------ errors that are kept


class Interrupted(Exception):
    pass


def _with_failed_backward(rank: int, fails: bool) -> list[torch.Tensor]:
    ddp, state = wrapped(minddp.DistributedDataParallel, Shuffled(7), "int8_wire", bucket_cap_mb=0.0001)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    first = ddp.module.layers[ddp.module.order.index(0)].weight  # its gradient is the last

    def interrupt(_gradient: torch.Tensor) -> None:
        raise Interrupted

    for step in range(5):
        ddp.zero_grad()
        x = torch.randn(3, 8, generator=generator)
        if fails and step == 2:
            before = state.state_dict()
            handle = first.register_hook(interrupt)
            with pytest.raises(Interrupted):
                ddp(torch.full((3, 8), 5.0)).backward()
            handle.remove()
            state.load_state_dict(before)
            ddp.zero_grad()
        ddp(x).backward()
        seen.append(torch.cat([param.grad.flatten() for param in ddp.parameters()]))
    return seen


def test_a_failed_backward_can_be_undone(ranks: Any) -> None:
    """Torch's class cannot go on after one here: its next forward raises."""
    calm = ranks(2).run(_with_failed_backward, False)
    failed = ranks(2).run(_with_failed_backward, True)
    for rank in range(2):
        for step, pair in enumerate(zip(calm[rank], failed[rank], strict=True)):
            assert torch.equal(*pair), step


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


def test_nested_backwards_neither_lose_nor_repeat_errors(ranks: Any) -> None:
    """The bucket of the head is launched in the outer backward, those of the body in nested ones."""
    for plain, nested in zip(*(ranks(2).run(_around_checkpoints, how) for how in ("plain", "nested")), strict=True):
        for step, pair in enumerate(zip(plain, nested, strict=True)):
            assert torch.equal(*pair), step


@on_ranks(2)
def test_a_run_goes_on_with_the_errors_that_were_saved(rank: int) -> None:
    ddp, state = wrapped(minddp.DistributedDataParallel, Shuffled(7), "int8_wire", bucket_cap_mb=0.001)
    list(gradients_of_steps(ddp, rank, 3))
    saved = copy.deepcopy((ddp.module.state_dict(), state.state_dict()))
    rest = list(gradients_of_steps(ddp, rank, 3))
    results = []
    for loads in (True, False):
        other, other_state = wrapped(TorchDDP, Shuffled(7), "int8_wire")
        other.module.load_state_dict(saved[0])
        if loads:
            other_state.load_state_dict(saved[1])
        results.append([torch.equal(*pair) for pair in zip(rest, gradients_of_steps(other, rank, 3), strict=True)])
    assert all(results[0]) and not any(results[1])


@on_ranks(2)
def test_errors_of_other_ranks_or_models_are_refused(rank: int) -> None:
    _, state = wrapped(minddp.DistributedDataParallel, nn.Linear(2, 3), "int8_wire")
    saved = state.state_dict()
    wrong = (
        saved | {"rank": 1 - rank},
        saved | {"num_ranks": 5},
        saved | {"errors": {"weight": torch.zeros(3, 4), "scale": torch.zeros(3)}},
    )
    messages = []
    for each in wrong:
        with pytest.raises(ValueError) as caught:
            state.load_state_dict(each)
        messages.append(str(caught.value))
    other_rank, other_number, other_model = messages
    assert "rank 1 of 2, but this is rank 0 of 2. Parameters of another shape here: none" in other_rank
    assert "by rank 0 of 5" in other_number
    assert "of another shape here: weight, scale" in other_model


def _accounts_under_join(rank: int) -> list[torch.Tensor]:
    """Rank 0 has one input, rank 1 has two. What came in, what was sent and what is kept back, on this rank."""
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
    return [came, sent, state.state_dict()["errors"]["weight"]]


def test_what_is_sent_and_what_is_kept_back_add_up_under_join(ranks: Any) -> None:
    (came_0, _, kept_0), (came_1, sent, kept_1) = ranks(2).run(_accounts_under_join)
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "what", ["a group of some ranks", "join", "bfloat16", "autocast", "two wrappers in a backward"]
)
def test_ranks_agree(ranks: Any, what: str, name: str) -> None:
    *_, first, second = ranks(3).run(_ran, what, name)
    assert first.isfinite().all()
    assert first.abs().max() > 0
    assert torch.equal(first, second)


def _with_unused(rank: int, cls_index: int, name: str) -> list[Any]:
    """Every rank uses `shared`, rank 0 alone `left`, none `never`."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.shared, self.left, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.shared(x)
            return (self.left(x) if rank == 0 else x).sum()

    ddp, _ = wrapped(CLASSES[cls_index], Branches(), name, find_unused_parameters=True)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.full((3, 8), 1.0 + rank)).backward()
    return [None if param.grad is None else param.grad.clone() for param in ddp.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_unused_parameters(ranks: Any, name: str) -> None:
    torchs, ours = (ranks(2).run(_with_unused, cls_index, name) for cls_index in (0, 1))
    assert ours[0][4] is ours[0][5] is None
    for place in range(4):
        assert torch.equal(ours[0][place], ours[1][place])
        assert torch.equal(ours[0][place], torchs[1][place])
        assert ours[0][place].abs().max() > 0


# ------------------------------------------------------------------ what is refused


def _refused(rank: int, what: str, name: str) -> None:
    modules: dict[str, Callable[[], nn.Module]] = {
        "float64": lambda: nn.Linear(8, 2, dtype=torch.float64),
        "bfloat16": lambda: nn.Linear(8, 2, dtype=torch.bfloat16),
        "complex64": lambda: nn.Linear(8, 2, dtype=torch.complex64),
        "sparse": lambda: nn.Embedding(8, 2, sparse=True),
    }
    module = modules[what]()
    ddp, _ = wrapped(minddp.DistributedDataParallel, module, name)
    inputs = torch.arange(3) if what == "sparse" else torch.ones(3, 8, dtype=next(module.parameters()).dtype)
    ddp(inputs).abs().sum().backward()


@pytest.mark.parametrize(
    ("what", "name"),
    [
        *(("sparse", name) for name in NAMES),
        *(("complex64", name) for name in NAMES),
        ("float64", "bf16_wire"),
        ("float64", "int8_wire"),
    ],
)
def test_gradients_that_a_hook_cannot_take_are_refused(ranks: Any, what: str, name: str) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(_refused, what, name)
    text = failure.value.reports[0]
    assert "TypeError" in text
    assert f"`{HOOKS[name][1].__name__}` takes dense gradients of torch.float32" in text
    assert "are sparse, of parameters of shape [8, 2]" in text if what == "sparse" else f"are torch.{what}" in text


@on_ranks(2)
def test_a_hook_waits_no_longer_than_the_group_that_it_was_given(rank: int) -> None:
    """Seconds: of the group that a hook is given, and of the one that it makes."""
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
    with pytest.raises(RuntimeError) as caught:
        ddp(torch.ones(1, 2)).sum().backward()
    del collectives.all_gather
    ddp(torch.ones(1, 2)).sum().backward()
    message = str(caught.value)
    assert "connection lost" in message
