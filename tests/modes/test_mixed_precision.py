"""mixed_precision: the same bits as torch's where torch's are right, the right ones where they are not.

Torch's first backward (of a static graph the first two) averages memory that was never written to, so parity is
looked for in the steps after; what that leaves out is compared with the arithmetic itself, `averages_of`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import minddp
from tests.features.beside import Trail, Wrap, play, random, snapshot, streams_of_a_cpu
from tests.ranks import on_ranks

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16}
FP16 = {"param_dtype": torch.float16, "reduce_dtype": torch.float16, "buffer_dtype": torch.float16}


class Net(nn.Module):
    """With a frozen parameter, a floating-point buffer in use and one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 3)
        self.register_buffer("shift", torch.randn(3))
        self.register_buffer("count", torch.tensor(300))

    def forward(self, x: torch.Tensor, give: Callable[[torch.Tensor], Any] = lambda output: output) -> Any:
        return give(self.last((self.norm(self.first(x)) + self.frozen).tanh()) + self.shift.to(x.dtype))


def build(dtypes: dict[str, Any], model: Callable[[], nn.Module] = Net, **options: Any) -> Any:
    torch.manual_seed(0)
    return minddp.DistributedDataParallel(model(), mixed_precision=_MixedPrecision(**dtypes), **options)


def inputs(model: Any, rank: int, step: int = 0) -> torch.Tensor:
    """In the dtype of the model, which only a plain one takes for granted."""
    return random(5, 6, rank=rank, step=step).to(next(model.parameters()).dtype)


def train(model: Any, rank: int, step: int = 0) -> None:
    """Forward and backward; of a wrapper, or of a plain model in low precision."""
    model(inputs(model, rank, step)).float().square().sum().backward()


# ------------------------------------------------------------------ beside torch


def _script(wrap: Wrap, rank: int, case: dict[str, Any]) -> Trail:
    torch.manual_seed(0)
    model = Net()
    del model.count  # torch casts it too
    ddp = wrap(model, mixed_precision=_MixedPrecision(**case["dtypes"]), **case.get("options", {}))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    trail = []
    for step in range(case["steps"]):
        train(ddp, rank, step)
        if step < case.get("garbage", 1):
            ddp.zero_grad()
            continue
        optimizer.step()
        trail.append(snapshot(ddp))
        if not case.get("accumulate"):
            optimizer.zero_grad(set_to_none=case.get("set_to_none", True))
    return trail


@on_ranks(lambda world_size, case: world_size)
@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (2, {"dtypes": BF16, "steps": 5}),
        (2, {"dtypes": FP16, "steps": 5, "set_to_none": False}),
        (2, {"dtypes": BF16 | {"reduce_dtype": torch.float32}, "steps": 5, "accumulate": True}),
        (2, {"dtypes": FP16 | {"buffer_dtype": None}, "steps": 4, "options": {"batched_grad_copy": True}}),
        (2, {"dtypes": BF16, "steps": 5, "garbage": 2, "options": {"static_graph": True}}),
        (2, {"dtypes": BF16, "steps": 2, "options": {"gradient_as_bucket_view": True}}),
        # Three ranks add in an order that depends on the place in the bucket.
        (3, {"dtypes": BF16, "steps": 4, "options": {"bucket_cap_mb": 0.0001}}),
        (3, {"dtypes": FP16 | {"reduce_dtype": torch.bfloat16}, "steps": 4}),
    ],
    ids=repr,
)
def test_bits_are_torchs_where_torch_reduces_gradients(rank: int, world_size: int, case: dict[str, Any]) -> None:
    with streams_of_a_cpu():
        play(rank, _script, case)


# ------------------------------------------------------------------ beside the arithmetic

Run = Callable[[nn.Module, int], object]


def averages_of(module: nn.Module, dtypes: dict[str, torch.dtype], run: Run) -> list[torch.Tensor | None]:
    """The gradients that two ranks must have when each has called `run(ddp, rank)`, found by one alone."""
    grads = []
    for rank in range(2):
        plain = copy.deepcopy(module)
        plain.zero_grad()
        for param in plain.parameters():
            param.data = param.data.to(dtypes.get("param_dtype"))
        run(plain, rank)
        grads.append([param.grad for param in plain.parameters()])
    reduce_dtype = dtypes.get("reduce_dtype") or dtypes.get("param_dtype")
    return [average(one, other, reduce_dtype) for one, other in zip(*grads, strict=True)]


def average(one: torch.Tensor | None, other: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    """A rank without a gradient counts as zero."""
    used = [grad.to(dtype) for grad in (one, other) if grad is not None]
    return (sum(used, torch.zeros_like(used[0])) / 2).float() if used else None


def has_grads(ddp: nn.Module, expected: Sequence[torch.Tensor | None]) -> bool:
    return all(
        param.grad is grad is None or (param.grad is not None and torch.equal(param.grad, grad))
        for param, grad in zip(ddp.parameters(), expected, strict=True)
    )


@on_ranks(2)
@pytest.mark.parametrize(
    ("dtypes", "options"),
    [
        (BF16, {}),
        (BF16 | {"reduce_dtype": torch.float32}, {"gradient_as_bucket_view": True}),
        (BF16, {"find_unused_parameters": True}),
        (FP16, {"static_graph": True}),
        ({"param_dtype": torch.bfloat16}, {}),
        ({"reduce_dtype": torch.bfloat16}, {}),
        ({}, {}),
    ],
    ids=repr,
)
def test_every_step_averages_gradients(rank: int, dtypes: dict[str, torch.dtype], options: dict[str, Any]) -> None:
    ddp = build(dtypes, **options)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        averages = averages_of(ddp.module, dtypes, lambda model, rank, step=step: train(model, rank, step))
        train(ddp, rank, step)
        assert has_grads(ddp, averages), f"step {step}"
        optimizer.step()


class Odd(nn.Module):
    """One weight used twice, and recomputed; `rarely` is used on rank 1 only and `never` nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.rarely = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = checkpoint(lambda x: self.two(self.one(x).tanh()).tanh(), x, use_reentrant=False)
        return self.rarely(x) if rank == 1 else x


def _penalized(model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, forwards_first: bool) -> torch.Tensor:
    """The square of a gradient at the inputs joined with the output of another forward."""
    output = model(x.requires_grad_())
    other = model(y) if forwards_first else None
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return grad.float().square().sum() + (model(y) if other is None else other).float().square().sum()


@on_ranks(2)
@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, minddp.DistributedDataParallel])
def test_a_loss_of_forwards_before_and_after_autograd_grad_is_an_error(rank: int, wrap: Wrap) -> None:
    """The parameters were restored between them, so each forward has accumulators of its own."""
    with streams_of_a_cpu():
        ddp = wrap(Net(), mixed_precision=_MixedPrecision(**BF16))
        for step in range(2):
            train(ddp, rank, step)  # of which torch's first brings garbage
            ddp.zero_grad()
        loss = _penalized(ddp, inputs(ddp, rank), inputs(ddp, rank, 1), forwards_first=False)
        with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once"):
            loss.backward()


@on_ranks(2)
def test_a_penalty_on_gradients_is_averaged_if_all_forwards_come_first(rank: int) -> None:
    ddp = build(BF16)

    def run(model: nn.Module, rank: int) -> None:
        _penalized(model, inputs(model, rank), inputs(model, rank, 1), forwards_first=True).backward()

    averages = averages_of(ddp.module, BF16, run)
    run(ddp, rank)
    for param, average in zip(ddp.parameters(), averages, strict=True):  # equal but for the order of additions
        assert average is None or torch.allclose(param.grad, average, rtol=0.02, atol=0.02)


class Reentrant(Net):
    """Recomputed in a backward inside the backward."""

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


def _no_sync(model: nn.Module, rank: int) -> None:
    with model.no_sync() if isinstance(model, minddp.DistributedDataParallel) else nullcontext():
        train(model, rank, 0)
        assert all(param.grad.dtype == param.dtype for param in model.parameters() if param.requires_grad)
    train(model, rank, 1)


def _two_forwards(model: nn.Module, rank: int) -> None:
    (model(inputs(model, rank, 0)) + model(inputs(model, rank, 1))).float().square().sum().backward()


def _evaluation_between(model: nn.Module, rank: int) -> None:
    first = model(inputs(model, rank, 0))
    with torch.no_grad():
        model(inputs(model, rank, 1))
    (first + model(inputs(model, rank, 2))).float().square().sum().backward()


def _a_failed_forward_before(model: nn.Module, rank: int) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(3, 3).to(next(model.parameters()).dtype))
    train(model, rank)


def _a_gradient_asked_for_before(model: nn.Module, rank: int) -> None:
    """The first backward ends, parameters are restored, and the same graph is gone through again."""
    loss = model(inputs(model, rank)).float().square().sum()
    torch.autograd.grad(loss, list(model.parameters())[-1], retain_graph=True)
    loss.backward()


def _an_output_whose_tensors_are_not_found(model: nn.Module, rank: int) -> None:
    """With a gradient there already: nothing announces the backward before it reaches that."""
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    [output] = model(inputs(model, rank), give=lambda output: iter([output]))

    output.float().square().sum().backward()


def _a_second_order_graph(model: nn.Module, rank: int) -> None:
    model(inputs(model, rank)).float().square().sum().backward(create_graph=True)


def _through_an_older_graph(model: nn.Module, rank: int) -> None:
    """Older than that of the last forward."""
    one = model(inputs(model, rank))
    x = inputs(model, rank, 1).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    model(x)
    one.float().square().sum().backward()


def _tied_recomputed_and_unused(model: nn.Module, rank: int) -> None:
    model(inputs(model, rank), rank).float().square().sum().backward()
    assert all(param.grad is None for param in getattr(model, "module", model).never.parameters())


WAYS: list[tuple[Run, type[nn.Module]]] = [
    (_no_sync, Net),
    (_two_forwards, Net),
    (_evaluation_between, Net),
    (_a_failed_forward_before, Net),
    (_a_gradient_asked_for_before, Net),
    (_an_output_whose_tensors_are_not_found, Net),
    (_a_second_order_graph, Net),
    (_through_an_older_graph, Net),
    (_tied_recomputed_and_unused, Odd),
    (train, Reentrant),
]


@on_ranks(2)
@pytest.mark.parametrize(("run", "model"), WAYS)
def test_other_ways_to_go_through_a_step(rank: int, run: Run, model: type[nn.Module]) -> None:
    ddp = build(BF16, model, find_unused_parameters=model is Odd)
    for _ in range(2):
        ddp.zero_grad()
        averages = averages_of(ddp.module, BF16, run)
        run(ddp, rank)
        assert has_grads(ddp, averages)
        assert is_in_full_precision(ddp)


@on_ranks(2)
def test_two_forwards_with_a_backward_each(rank: int) -> None:
    """As without mixed precision: the first is reduced, the second stays local."""
    ddp = build(BF16)
    plain = copy.deepcopy(ddp.module).bfloat16()
    averages = averages_of(
        ddp.module, BF16, lambda model, rank: model(inputs(model, rank)).float().sum().backward()
    )
    losses = [ddp(inputs(ddp, rank, step)).float().sum() for step in range(2)]
    for loss in losses:
        loss.backward()
        assert is_in_full_precision(ddp)
    plain(inputs(plain, rank, 1)).float().sum().backward()
    sums = [
        None if both is None else (both.bfloat16() + mine.grad).float()
        for both, mine in zip(averages, plain.parameters(), strict=True)
    ]
    assert has_grads(ddp, sums)


@on_ranks(2)
def test_join(rank: int) -> None:
    ddp = build(BF16)
    with ddp.join():
        for step in range(1 + 2 * rank):
            ddp.zero_grad()
            train(ddp, rank, step)
    if rank == 1:
        alone = averages_of(ddp.module, BF16, lambda model, other: train(model, 1, 2) if other == 1 else None)
        assert has_grads(ddp, alone)
    assert is_in_full_precision(ddp)


# ------------------------------------------------------------------ what is in which precision, and when


def is_in_full_precision(ddp: nn.Module) -> bool:
    """And no copy takes up memory."""
    tensors = [t for param in ddp.parameters() for t in (param, param.grad, param._fp_param) if t is not None]
    return {t.dtype for t in tensors} == {torch.float32} and not any(p._mp_param.numel() for p in ddp.parameters())


class Seeing(Net):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        self.seen = {"x": x.dtype} | {name: tensor.dtype for name, tensor in self.state_dict().items()}
        return super().forward(x)


@on_ranks(2)
def test_what_is_in_which_dtype_when(rank: int) -> None:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "buffer_dtype": torch.float16}
    ddp = build(dtypes, Seeing)
    before = copy.deepcopy(ddp.module.state_dict())
    assert before["shift"].dtype == torch.float16
    assert before["count"] == 300
    assert before["count"].dtype == torch.int64
    assert is_in_full_precision(ddp)
    with torch.no_grad():
        ddp(torch.ones(1, 6))
    assert is_in_full_precision(ddp)
    with torch.inference_mode():
        ddp(torch.ones(1, 6))
    assert is_in_full_precision(ddp)
    output = ddp(torch.ones(1, 6))
    params = ["first.weight", "first.bias", "frozen", "norm.weight", "norm.bias", "last.weight", "last.bias"]
    expected = dict.fromkeys(["x", *params], torch.bfloat16) | {"shift": torch.float16, "count": torch.int64}
    assert ddp.module.seen == expected
    assert {param._mp_param.dtype for param in ddp.parameters()} == {torch.bfloat16}
    assert all(param.data_ptr() == param._mp_param.data_ptr() for param in ddp.parameters())
    output.sum().backward()
    assert is_in_full_precision(ddp)
    after = ddp.module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@on_ranks(2)
def test_parameters_have_full_precision_after_an_exception_in_backward(rank: int) -> None:
    ddp = build(BF16)
    failing = ddp.module.last.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(ddp, rank)
    assert is_in_full_precision(ddp)
    failing.remove()
    ddp.zero_grad()
    train(ddp, rank)
    assert is_in_full_precision(ddp)


@on_ranks(2)
def test_floating_point_tensors_in_arguments_are_cast(rank: int) -> None:
    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Any, *, more: Any, number: float) -> list[Any]:
            return [x[0].dtype, more["mask"].dtype, more["y"][0].dtype, number]

    ddp = build(FP16, Listing)
    seen = ddp((torch.ones(1),), more={"mask": torch.ones(1) > 0, "y": [torch.ones(1).double()]}, number=0.1)
    assert seen == [torch.float16, torch.bool, torch.float16, 0.1]


@on_ranks(2)
def test_what_is_ignored_is_not_cast(rank: int) -> None:
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.BatchNorm1d(2)})
    net._ddp_params_and_buffers_to_ignore = ["a.weight", "b.running_mean"]
    ddp = minddp.DistributedDataParallel(net, mixed_precision=_MixedPrecision(**FP16))
    assert not hasattr(net["a"].weight, "_mp_param")
    assert not hasattr(net["a"].weight, "_fp_param")
    assert net["b"].running_mean.dtype == torch.float32
    assert net["b"].running_var.dtype == torch.float16
    assert ddp.module["a"].bias._mp_param.dtype == torch.float16


@on_ranks(2)
def test_copies_and_pickles(rank: int) -> None:
    ddp = build(BF16)
    train(ddp, rank)
    ddp.zero_grad()
    averages = averages_of(ddp.module, BF16, train)
    for clone in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp)), ddp):
        train(clone, rank)
        assert has_grads(clone, averages)
        assert is_in_full_precision(clone)


# ------------------------------------------------------------------ what cannot work


@on_ranks(2)
def test_a_checkpoint_loaded_between_forward_and_backward_is_an_error(rank: int) -> None:
    ddp = build(BF16)
    state = copy.deepcopy(ddp.module.state_dict())
    ddp(torch.ones(1, 6))  # an evaluation, but not under no_grad
    ddp.module.load_state_dict(state)
    with pytest.raises(
        RuntimeError, match=r"the new values are lost: frozen, first.weight, first.bias, norm.weight"
    ):
        ddp(torch.ones(1, 6)).sum().backward()
    assert is_in_full_precision(ddp)


def _hook(state: object, bucket: Any) -> Any: ...


def _delayed() -> None:
    net = Net()
    minddp.DistributedDataParallel(
        net,
        mixed_precision=_MixedPrecision(**BF16),
        delay_all_reduce_named_params=[("last.weight", net.last.weight)],
        param_to_hook_all_reduce=net.first.weight,
    )


@on_ranks(2)
@pytest.mark.parametrize(
    ("attempt", "error", "says"),
    [
        (partial(build, {"param_dtype": torch.int8}), TypeError, "`param_dtype` .* but is torch.int8"),
        (partial(build, {"reduce_dtype": "fp16"}), TypeError, "`reduce_dtype` .* but is 'fp16'"),
        (partial(build, BF16, lambda: nn.Embedding(3, 3, sparse=True)), ValueError, ".* for weight: sparse"),
        (
            partial(build, BF16, lambda: nn.Linear(2, 2, dtype=torch.complex64)),
            ValueError,
            ".* bias, weight: complex",
        ),
        (_delayed, ValueError, "`delay_all_reduce_named_params` and `mixed_precision`"),
        (
            lambda: build(BF16).register_comm_hook(None, _hook),
            RuntimeError,
            "register_comm_hook and `mixed_precision`",
        ),
        (lambda: build(BF16).weigh(2.0), ValueError, "`weigh` and .*mixed_precision.* exclude each other"),
        (
            lambda: minddp.DistributedDataParallel(Net(), mixed_precision=torch.bfloat16),
            TypeError,
            "`mixed_precision` takes torch's _MixedPrecision.* but got torch.bfloat16",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    rank: int, attempt: Callable[[], object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=f"^{says}"):
        attempt()
