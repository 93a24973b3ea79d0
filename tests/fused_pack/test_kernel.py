"""The packer and its kernel, on the CPU: see `on_cpu.py`. On a GPU: tests/gpu/."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minddp.cupy_beside_torch import NoCuPy
from minddp.fused_pack import FusedPack, packer
from minddp.fused_pack.chunks import TENSORS_PER_LAUNCH
from minddp.fused_pack.kernel import NAMES_IN_C, compiled
from minddp.fused_pack.packer import factor_of, fused_pack_of
from tests.fused_pack.on_cpu import COMPILER, CuPyOnCpu
from tests.parity.compare import same_bits

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile the kernel for the CPU")
PAIRS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float16, torch.float32),
    (torch.float64, torch.float64),
]
GUARD = 16  # elements around what may be written


@dataclass
class _Stream:
    cuda_stream: int = 5


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[CuPyOnCpu]:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: _Stream())
    yield CuPyOnCpu()
    compiled.cache_clear()


class Case:
    """Gradients at odd addresses, a bucket at an odd address, and guards around both."""

    def __init__(self, numels: list[int], shifts: list[int], pair: tuple[torch.dtype, torch.dtype], seed: int):
        rng = torch.Generator().manual_seed(seed)
        grad_dtype, bucket_dtype = pair
        self.grads = []
        for numel, shift in zip(numels, shifts, strict=True):
            memory = torch.randn(numel + 2 * GUARD, generator=rng, dtype=torch.float32).to(grad_dtype)
            self.grads.append(memory[GUARD - shift :][:numel])
        shift = shifts[0]
        self.memory = torch.full((sum(numels) + 2 * GUARD,), 77.0, dtype=bucket_dtype)
        self.flat = self.memory[GUARD - shift :][: sum(numels)]
        self.views = list(self.flat.split(numels))

    def guards(self) -> list[torch.Tensor]:
        outside = self.flat.storage_offset(), self.flat.storage_offset() + self.flat.numel()
        return [self.memory[: outside[0]], self.memory[outside[1] :]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    numels = draw(st.lists(st.one_of(st.integers(0, 20), st.integers(0, 9000)), min_size=2, max_size=6))
    shifts = draw(st.lists(st.integers(0, 9), min_size=len(numels), max_size=len(numels)))
    return Case(numels, shifts, draw(st.sampled_from(PAIRS)), draw(st.integers(0, 99)))


@needs_compiler
@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), divisor=st.sampled_from([None, 2.0, 3.0, 7.0]))
def test_gathering_has_the_bits_of_torchs_copy_and_multiplication(
    case: Case, divisor: float | None, cupy: CuPyOnCpu
) -> None:
    fused = FusedPack(cupy, case.views, case.grads[0].dtype)
    factor = None if divisor is None else 1.0 / divisor
    expected = torch.empty_like(case.flat)
    torch._foreach_copy_(list(expected.split([grad.numel() for grad in case.grads])), case.grads)
    if factor is not None:
        expected.mul_(factor)
    assert fused.gather(case.grads, factor)
    assert same_bits(case.flat, expected)
    assert all((guard == 77).all() for guard in case.guards())


@needs_compiler
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_scattering_puts_every_element_where_it_came_from(case: Case, cupy: CuPyOnCpu) -> None:
    fused = FusedPack(cupy, case.views, case.grads[0].dtype)
    case.flat.copy_(torch.randn(case.flat.numel()))
    bases = [grad.untyped_storage() for grad in case.grads]
    before = [base.tolist() for base in bases]
    assert fused.scatter(case.grads)
    for grad, view in zip(case.grads, case.views, strict=True):
        assert same_bits(grad, view.to(grad.dtype))
    for grad, base, bytes_before in zip(case.grads, bases, before, strict=True):
        first = grad.storage_offset() * grad.itemsize
        now, last = base.tolist(), first + grad.nbytes
        assert now[:first] + now[last:] == bytes_before[:first] + bytes_before[last:]


@needs_compiler
def test_accesses_to_vectors_are_aligned(cupy: CuPyOnCpu, capfd: pytest.CaptureFixture[str]) -> None:
    """Every offset of either side against the other. The sanitizer reports on stderr."""
    for pair, ours, theirs in itertools.product(PAIRS, range(8), range(8)):
        case = Case([37 + ours, 40, 70], [ours, theirs, 0], pair, seed=0)
        fused = FusedPack(cupy, case.views, case.grads[0].dtype)
        assert fused.gather(case.grads, 0.5)
        assert fused.scatter(case.grads)
    assert "misaligned" not in capfd.readouterr().err


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_odd_numbers_keep_their_bits(dtype: torch.dtype, cupy: CuPyOnCpu) -> None:
    """Infinities, NaN with any payload, denormals, -0: unscaled and of one dtype, a copy is a copy."""
    integers = torch.int16 if dtype.itemsize == 2 else torch.int32
    step = 1 if dtype.itemsize == 2 else 65_537
    low = torch.iinfo(integers).min
    patterns = (torch.arange(65_536, dtype=torch.int64) * step + low).to(integers).view(dtype)
    grads, flat = [patterns, patterns.flip(0)], torch.empty(2 * len(patterns), dtype=dtype)
    fused = FusedPack(cupy, flat.split(len(patterns)), dtype)
    fused.gather(grads, None)
    assert torch.equal(flat.view(integers), torch.cat(grads).view(integers))
    fused.gather(grads, 1 / 3)
    finite = torch.cat(grads).isfinite()
    assert same_bits(flat[finite], torch.cat(grads).mul(1 / 3)[finite])


@needs_compiler
def test_more_gradients_than_an_argument_holds_take_several_launches(cupy: CuPyOnCpu) -> None:
    count = 2 * TENSORS_PER_LAUNCH + 1
    grads = [torch.full((3,), float(number)) for number in range(count)]
    flat = torch.zeros(3 * count)
    fused = FusedPack(cupy, flat.split(3), torch.float32)
    assert fused.gather(grads, 0.5)
    assert torch.equal(flat, torch.cat(grads) / 2)
    assert cupy.launches == fused.num_launches == 3


@needs_compiler
def test_new_memory_of_the_same_layout_uploads_nothing(cupy: CuPyOnCpu) -> None:
    one, other = (FusedPack(cupy, torch.zeros(40).split(10), torch.float32) for _ in range(2))
    assert one._chunks is other._chunks
    assert FusedPack(cupy, torch.zeros(40).split(20), torch.float32)._chunks is not one._chunks


@needs_compiler
def test_views_need_not_be_neighbours(cupy: CuPyOnCpu) -> None:
    flat = torch.zeros(1000)
    between = [flat[3:40], flat[500:900], flat[100:100], flat[41:57]]
    grads = [torch.randn(view.numel()) for view in between]
    assert FusedPack(cupy, between, torch.float32).gather(grads, 0.5)
    assert all(torch.equal(view, grad / 2) for view, grad in zip(between, grads, strict=True))
    assert int((flat != 0).sum()) == sum(grad.numel() for grad in grads)


@needs_compiler
def test_channels_last_is_moved_as_it_lies_and_other_strides_are_left_alone(cupy: CuPyOnCpu) -> None:
    flat = torch.zeros(2 * 48)
    views = [part.view(2, 2, 3, 4).permute(0, 3, 1, 2) for part in flat.split(48)]
    grads = [torch.randn(2, 4, 2, 3).to(memory_format=torch.channels_last) for _ in views]
    fused = FusedPack(cupy, views, torch.float32)
    assert fused.gather(grads, None)
    assert all(torch.equal(view, grad) for view, grad in zip(views, grads, strict=True))
    before = flat.clone()
    assert not fused.gather([grads[0], torch.randn(2, 4, 2, 3)], None)
    assert not fused.scatter([grads[0], torch.randn(2, 4, 2, 3)])
    assert not fused.scatter([grads[0], grads[1].half()]), "it would write beyond its end"
    assert torch.equal(flat, before)


@needs_compiler
def test_the_bucket_may_get_other_memory(cupy: CuPyOnCpu) -> None:
    flat = torch.zeros(7)
    fused = FusedPack(cupy, flat.split([3, 4]), torch.float32)
    before = flat.data_ptr()
    flat.untyped_storage().resize_(2**20)
    assert flat.data_ptr() != before
    assert fused.gather([torch.ones(3), torch.full((4,), 2.0)], None)
    assert flat.tolist() == [1.0] * 3 + [2.0] * 4


def test_a_gpu_divides_by_multiplying_with_the_inverse_in_single_precision() -> None:
    for world_size in range(1, 200):
        assert factor_of(1 / world_size, torch.bfloat16) == torch.tensor(1 / world_size, dtype=torch.float32).item()
        inverse = torch.tensor(1.0) / torch.tensor(float(world_size))
        assert factor_of(world_size, torch.float16, divides=True) == inverse.item()
        assert factor_of(world_size, torch.float64, divides=True) == 1 / world_size


# ------------------------------------------------------------------ who gets one


@dataclass
class OnGpu:
    """As much of a view on a GPU as is looked at."""

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))


def test_only_several_gradients_of_plain_numbers_on_a_gpu_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(packer, "import_cupy", lambda: "cupy")
    monkeypatch.setattr(packer, "FusedPack", lambda *args: made.append(args) or "a pack")
    assert fused_pack_of([OnGpu()] * 2, torch.float32) == "a pack"  # type: ignore[list-item]
    assert fused_pack_of([OnGpu()], torch.float32) is None  # type: ignore[list-item]
    assert fused_pack_of([OnGpu(torch.complex64)] * 2, torch.complex64) is None  # type: ignore[list-item]
    assert fused_pack_of([torch.zeros(3)] * 2, torch.float32) is None
    assert len(made) == 1


def test_without_cupy_torchs_kernels_do_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_cupy() -> None:
        raise NoCuPy("CuPy is not installed")

    monkeypatch.setattr(packer, "import_cupy", no_cupy)
    with caplog.at_level(logging.INFO):
        assert fused_pack_of([OnGpu()] * 2, torch.float32) is None  # type: ignore[list-item]
    assert caplog.messages == ["Gradients are packed by torch's kernels: CuPy is not installed."]


def test_a_kernel_that_cannot_be_compiled_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot(*_args: object) -> None:
        raise RuntimeError("no NVRTC")

    monkeypatch.setattr(packer, "import_cupy", lambda: "cupy")
    monkeypatch.setattr(packer, "FusedPack", cannot)
    assert fused_pack_of([OnGpu()] * 2, torch.float32) is None  # type: ignore[list-item]
    assert caplog.records[0].levelno == logging.WARNING
    assert "no NVRTC" in caplog.messages[0]


def test_every_dtype_that_it_takes_has_a_name_in_c() -> None:
    assert set(NAMES_IN_C) == {torch.float16, torch.bfloat16, torch.float32, torch.float64}
