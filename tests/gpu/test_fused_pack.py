"""The fused pack's kernel on the card, beside torch's kernels: bits, launches, capture."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp.fused_pack import FusedPack, fused_pack_of
from minddp.packing import Scaling
from tests.parity.compare import same_bits

pytestmark = pytest.mark.usefixtures("only_on_a_card")
HALVES_AND_MORE = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def pack_for(
    numels: list[int], grad: torch.dtype, bucket: torch.dtype, shift: int = 0
) -> tuple[torch.Tensor, FusedPack]:
    flat = torch.zeros(sum(numels) + shift, dtype=bucket, device="cuda")[shift:]
    fused = fused_pack_of(flat.split(numels), grad)
    assert fused is not None, "CuPy is not there, or the kernel does not compile: the log says which"
    return flat, fused


@pytest.mark.timeout(300)
@settings(deadline=None, max_examples=150, database=None)
@given(
    numels=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 70_000)), min_size=2, max_size=8),
    grad=st.sampled_from(HALVES_AND_MORE),
    same=st.booleans(),
    shift=st.integers(0, 9),
    divisor=st.sampled_from([None, 1.0, 2.0, 3.0, 7.0, 12.0]),
    divides=st.booleans(),
    seed=st.integers(0, 99),
)
def test_bits_are_those_of_torchs_kernels(
    numels: list[int], grad: torch.dtype, same: bool, shift: int, divisor: float | None, divides: bool, seed: int
) -> None:
    bucket = grad if same else (torch.bfloat16 if grad is torch.float32 else torch.float32)
    rng = torch.Generator(device="cuda").manual_seed(seed)
    flat, fused = pack_for(numels, grad, bucket, shift)
    grads = [torch.randn(numel + shift, generator=rng, device="cuda")[shift:].to(grad) for numel in numels]
    scaling = Scaling(divisor, divide_copied=divides)
    expected = torch.empty_like(flat)
    torch._foreach_copy_(list(expected.split(numels)), grads)
    scaling.apply(expected, resident=False)
    assert fused.gather(grads, scaling.divisor if divides else scaling.factor, divides=divides)
    assert same_bits(flat, expected)
    back = [torch.empty_like(tensor) for tensor in grads]
    assert fused.scatter(back)
    assert all(same_bits(one, view.to(grad)) for one, view in zip(back, flat.split(numels), strict=True))


def test_a_whole_bucket_of_25_mib_and_two_thousand_small_gradients() -> None:
    for numels in ([2_000_003, 4_553_597, 1, 31], [64, 4096] * 1000):
        flat, fused = pack_for(numels, torch.float32, torch.float32)
        grads = [torch.randn(numel, device="cuda") for numel in numels]
        fused.gather(grads, 1 / 3)
        assert same_bits(flat, torch.cat(grads).mul_(1 / 3))
    assert fused.num_launches == 5


def test_every_half_precision_number_keeps_its_bits() -> None:
    patterns = torch.arange(65_536, dtype=torch.int32).sub(32_768).to(torch.int16).cuda()
    for dtype in (torch.float16, torch.bfloat16):
        grads = [patterns.view(dtype), patterns.flip(0).view(dtype)]
        flat, fused = pack_for([65_536] * 2, dtype, dtype)
        fused.gather(grads, None)
        assert torch.equal(flat.view(torch.int16), torch.cat(grads).view(torch.int16))
        for factor in (0.5, 1 / 3):
            fused.gather(grads, factor)
            assert torch.equal(flat.view(torch.int16), torch.cat(grads).mul_(factor).view(torch.int16)), factor


def test_denormal_numbers_are_not_flushed() -> None:
    """See [Note: denormal numbers]: CuPy would have them be zero."""
    tiny = torch.arange(1, 4097, dtype=torch.int32, device="cuda").mul(2047).view(torch.float32)
    assert 0 < tiny.max() < torch.finfo(torch.float32).tiny
    for bucket in (torch.float32, torch.float64, torch.bfloat16):
        flat, fused = pack_for([4096, 4096], torch.float32, bucket)
        fused.gather([tiny, -tiny], 1 / 3)
        expected = torch.cat([tiny, -tiny]).to(bucket).mul_(1 / 3)
        assert expected.count_nonzero() > 8000
        assert same_bits(flat, expected), bucket


def test_it_runs_on_the_stream_that_is_current_and_can_be_captured() -> None:
    numels = [1000] * 600
    flat, fused = pack_for(numels, torch.float32, torch.float32)
    grads = [torch.zeros(numel, device="cuda") for numel in numels]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        fused.gather(grads, 0.5)
    fused.gather([torch.full_like(grad, 99.0) for grad in grads], None)  # another table of addresses in between
    for number, grad in enumerate(grads):
        grad.fill_(number)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(flat, torch.cat(grads) / 2)
