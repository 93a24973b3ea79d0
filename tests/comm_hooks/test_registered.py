"""Communication hooks: what is refused, and what a failing hook leaves behind. Torch's own: tests/parity."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp.comm_hooks import CommHook, GradBucket, HookStrategy
from minddp.core.events import EventKind
from tests.fakes import FakeDDP
from tests.features.beside import Snapshot, play, random, snapshot
from tests.ranks import on_ranks

X = torch.ones(1, 2)
FutureOfTensor = torch.futures.Future[torch.Tensor]


def set_hook(ddp: FakeDDP, hook: CommHook) -> None:
    ddp.reducer.reduce_strategy = HookStrategy(hook, ddp.reducer.events, None)


def future_of(value: Any) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(value)
    return future


# The hooks below carry no annotations, since torch compares annotations with the one type it expects.


def identity(state, bucket):
    return future_of(bucket.buffer())


# ------------------------------------------------------------------ what is refused


def test_a_hook_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="must be callable"):
        CommHook.checked(None, "allreduce")  # type: ignore[arg-type]


def test_wrong_annotations_are_refused() -> None:
    def wrong_bucket(state, bucket: int) -> FutureOfTensor:
        return identity(state, bucket)

    def wrong_result(state, bucket: dist.GradBucket) -> torch.Tensor:
        return identity(state, bucket)

    with pytest.raises(ValueError, match=r"bucket annotation should be dist\.GradBucket"):
        CommHook.checked(None, wrong_bucket)
    with pytest.raises(ValueError, match=r"return annotation should be torch.futures.Future\[torch.Tensor\]"):
        CommHook.checked(None, wrong_result)


@pytest.mark.parametrize("bucket_type", [dist.GradBucket, "dist.GradBucket", GradBucket, None])
@pytest.mark.parametrize("result_type", [FutureOfTensor, "torch.futures.Future[torch.Tensor]", None])
def test_right_annotations_pass(bucket_type: Any, result_type: Any) -> None:
    def hook(state, bucket):
        return identity(state, bucket)

    hook.__annotations__ = {
        name: kind for name, kind in (("bucket", bucket_type), ("return", result_type)) if kind is not None
    }
    assert CommHook.checked(None, hook).function is hook


BF16_HOOKS = (default_hooks.bf16_compress_hook, default_hooks.bf16_compress_wrapper(identity))


@pytest.mark.parametrize(
    ("cuda", "nccl", "passes"), [(None, (2, 10), False), ("12.6", (2, 9), False), ("12.6", (2, 10), True)]
)
@pytest.mark.parametrize("hook", BF16_HOOKS)
def test_torchs_bf16_hooks_are_refused_where_torch_refuses_them(
    hook: Any, cuda: str | None, nccl: tuple[int, int], passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: cuda is not None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
    monkeypatch.setattr(dist, "is_xccl_available", lambda: False, raising=False)
    with nullcontext() if passes else pytest.raises(TypeError, match="BF16 all reduce communication hook required"):
        assert CommHook.checked(None, hook).function is hook


def test_a_hook_of_the_users_is_not_judged_by_its_name() -> None:
    def bf16_compress_my_way(state, bucket):
        return identity(state, bucket)

    CommHook.checked(None, bf16_compress_my_way)


# ------------------------------------------------------------------ what a hook is shown


def test_a_hook_sees_the_bucket_as_torch_shows_it() -> None:
    module = nn.Linear(2, 3)
    seen: list[tuple[Any, ...]] = []

    def look(state: Any, bucket: GradBucket) -> FutureOfTensor:
        grads = bucket.gradients()
        storage = bucket.buffer().untyped_storage().data_ptr()
        assert all(grad.untyped_storage().data_ptr() == storage for grad in grads)
        seen.append((state, bucket.index(), bucket.is_last(), [g.shape for g in grads]))
        owners = [module.bias if grad.dim() == 1 else module.weight for grad in grads]
        assert [id(param) for param in bucket.parameters()] == [id(owner) for owner in owners]
        return future_of(bucket.buffer())

    ddp = FakeDDP(module, bucket_cap_mb_list=[0])
    set_hook(ddp, CommHook.checked("state", look))
    ddp.step(X)
    assert seen == [("state", 0, False, [(3,)]), ("state", 1, True, [(3, 2)])]
    assert ddp.transport.calls == [], "only the hook reduces"
    assert torch.equal(module.bias.grad, torch.ones(3)), "nothing is divided"


def test_set_buffer_shows_in_buffer_and_gradients() -> None:
    ddp = FakeDDP(nn.Linear(2, 2))
    [reduced] = ddp.reducer.store.all()
    bucket = GradBucket(reduced, reduced.comm_buffer, is_last=True)
    other = torch.arange(6.0)
    bucket.set_buffer(other)
    assert bucket.buffer() is other
    assert [grad.flatten().tolist() for grad in bucket.gradients()] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t], lambda t: (t,)])
def test_a_hook_may_return_a_tensor_of_its_own(views: bool, wrap: Callable[[torch.Tensor], Any]) -> None:
    module = nn.Linear(2, 2)
    ddp = FakeDDP(module, gradient_as_bucket_view=views)
    set_hook(ddp, CommHook.checked(None, lambda state, bucket: future_of(wrap(bucket.buffer() * 10))))
    for _ in range(2):
        module.zero_grad()
        ddp.step(X)
        assert torch.equal(module.weight.grad, torch.full((2, 2), 10.0))


# ------------------------------------------------------------------ hooks that fail


def raises(state, bucket):
    raise KeyError("hook exploded")


def returns_a_tensor(state, bucket):
    return bucket.buffer()


def gives_too_few(state, bucket):
    return future_of(bucket.buffer()[1:])


def gives_no_tensor(state, bucket):
    return future_of("text")


def fails_later(state, bucket):
    return future_of(bucket.buffer()).then(lambda _: 1 / 0)


@pytest.mark.parametrize(
    ("hook", "error", "says"),
    [
        (raises, KeyError, "hook exploded"),
        (
            returns_a_tensor,
            RuntimeError,
            "callback must return a torch.futures.Future object, but got Tensor from `returns_a_tensor`",
        ),
        (
            gives_too_few,
            RuntimeError,
            "`gives_too_few` must give a tensor of 6 elements for bucket 0, but gave a t",
        ),
        (gives_no_tensor, RuntimeError, "`gives_no_tensor` must give a tensor of 6 elements .* gave 'text'"),
        (fails_later, RuntimeError, "ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("views", [False, True])
def test_a_failing_hook_is_named_and_the_next_step_works(hook: Any, error: type, says: str, views: bool) -> None:
    module = nn.Linear(2, 2)
    ddp = FakeDDP(module, gradient_as_bucket_view=views)
    calls = iter([hook, identity, identity])

    def chosen(state, bucket):
        return next(calls)(state, bucket)

    chosen.__qualname__ = hook.__name__
    set_hook(ddp, CommHook.checked(None, chosen))
    with pytest.raises(error, match=says):
        ddp.step(X)
    for _ in range(2):
        module.zero_grad()
        ddp.take_events()
        ddp.step(X)
        assert ddp.take_events(EventKind.BACKWARD_END) == ["backward ends"]
        assert torch.equal(module.bias.grad, torch.ones(2))


# ------------------------------------------------------------------ torch's hook of several buckets, on real ranks


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))


def _with_power_sgd(wrap: Any, rank: int, wraps: bool) -> Iterator[Snapshot]:
    """With torch's wrapper the hook waits."""
    ddp = wrap(_model(), bucket_cap_mb=0.001)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    hook = powerSGD_hook.powerSGD_hook
    hook = default_hooks.fp16_compress_wrapper(hook) if wraps else hook

    def waits(state, bucket):  # type: ignore[no-untyped-def]
        future = hook(state, bucket)
        future.wait()
        return future

    ddp.register_comm_hook(state, waits if wrap is TorchDDP else hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        ddp(random(3, 16, rank=rank, step=step)).square().sum().backward()
        yield snapshot(ddp)
        optimizer.step()
    assert wrap is TorchDDP or len(ddp.plan.buckets) > 1


@on_ranks(2)
@pytest.mark.parametrize("wraps", [False, True])
def test_powerSGD_works_with_several_buckets(rank: int, wraps: bool) -> None:
    """`wraps`: within torch's fp16 wrapper."""
    play(rank, _with_power_sgd, wraps)


@on_ranks(2)
def test_registering_raises_what_torch_raises(rank: int) -> None:
    outcomes = []
    for cls in (TorchDDP, minddp.DistributedDataParallel):
        ddp = cls(nn.Linear(2, 2))
        seen = []
        for hook in ("no", lambda state, grads: None, identity, identity):
            try:
                ddp.register_comm_hook(None, hook)
                seen.append("registered")
            except Exception as error:
                seen.append(type(error).__name__)
        outcomes.append(seen)
    theirs, ours = outcomes
    assert ours == theirs
    assert ours[-2:] == ["registered", "RuntimeError"]
