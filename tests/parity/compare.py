"""Where two tensors, or two copies of a model, differ."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.parity.script import Script
    from tests.parity.side import Side

Tensor = torch.Tensor | None

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Like `torch.equal`, but NaN equals NaN where the bits do, and -0.0 differs from 0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        integer = _INTEGER_OF_SIZE[a.element_size()]
        a, b = (t.detach().contiguous().view(integer) for t in (a, b))
    return torch.equal(a, b)


def difference(expected: torch.Tensor | None, got: torch.Tensor | None, *, exact: bool = True) -> str | None:
    """What is different in `got`, in words; None where nothing is. Inexactly, a sum may round in another order."""
    if expected is None or got is None:
        return None if expected is got else f"should be {_kind(expected)}, is {_kind(got)}"
    if (expected.dtype, expected.shape) != (got.dtype, got.shape):
        return f"should be {_kind(expected)}, is {_kind(got)}"
    if expected.stride() != got.stride():
        return f"should have strides {expected.stride()}, has {got.stride()}"
    if expected.requires_grad != got.requires_grad:
        return f"should have requires_grad={expected.requires_grad}"
    if same_bits(expected, got) or (not exact and _close(expected, got)):
        return None
    gap = (expected.detach().double() - got.detach().double()).abs()
    return f"differs in {int((gap != 0).sum())} of {gap.numel()} elements, by {gap.max():.3g} at most"


def _close(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """To the precision of one step through a layer or a hook of half precision."""
    tolerance = 0.05
    return torch.allclose(expected, got, rtol=tolerance, atol=tolerance, equal_nan=True)


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def rounded_difference(expected: Tensor, got: Tensor, script: Script, *, exact: bool) -> str | None:
    """The same of sparse tensors' values; of scripts in float64, all but the rounding."""
    if expected is None or got is None or not (script.in_double or expected.is_sparse):
        return difference(expected, got, exact=exact)
    if expected.layout != got.layout:
        return f"should be {expected.layout}, is {got.layout}"
    expected, got = expected.detach().to_dense(), got.detach().to_dense()
    if script.in_double and expected.shape == got.shape:
        gap, size = ((expected - got).abs().sum().item(), expected.abs().sum().item())
        return None if gap <= 1e-3 * size + 3e-5 * expected.numel() else f"is off by {gap:.3g}, of {size:.3g}"
    return difference(expected, got, exact=exact)


def far(expected: Tensor, got: Tensor) -> str | None:
    """How far a gradient is from the control's mean. A zero gradient is as good as none: a rank may have made one
    for the sake of the others."""
    if expected is None or got is None:
        other = expected if got is None else got
        return None if other is None or not other.to_dense().any() else "is there on one side only"
    expected, got = expected.to_dense(), got.to_dense()
    if not expected.numel():
        return None
    size = expected.abs().max().item()
    tolerance = 2e-2 if expected.dtype == torch.bfloat16 else 1e-4
    if torch.allclose(expected, got, rtol=1e-2, atol=tolerance * max(1.0, size)):
        return None
    return f"is off by {(expected - got).abs().max():.3g}, of {size:.3g}"


# ------------------------------------------------------------------ of two sides


def differing_sides(theirs: Side, ours: Side, *, exact: bool) -> list[str]:
    """Every gradient, parameter, buffer and kept tensor that is not the same."""

    def plain(grad: Tensor) -> Tensor:
        """Where gradients are views, torch's stay part of the graph of an earlier `create_graph`."""
        return grad.detach() if theirs.script.options.gradient_as_bucket_view and grad is not None else grad

    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, param in theirs.named_params.items():
        pairs[f"gradient of `{name}`"] = plain(param.grad), plain(ours.named_params[name].grad)
        if not theirs.wants_step:  # else they are compared after that
            pairs[f"parameter `{name}`"] = param, ours.named_params[name]
    for (name, buffer), other in zip(theirs.model.named_buffers(), ours.model.buffers(), strict=True):
        pairs[f"buffer `{name}`"] = buffer, other
    for index, (kept, other) in enumerate(zip(theirs.kept, ours.kept, strict=True)):
        pairs[f"kept tensor {index}"] = kept, other
    found = {what: rounded_difference(*pair, theirs.script, exact=exact) for what, pair in pairs.items()}
    return [f"{what} {text}" for what, text in found.items() if text]


def different_notes(theirs: Side, ours: Side) -> list[str]:
    """The buckets that a hook was shown: indices, sizes and shapes, in the order of its calls.

    Torch does not define the order of the last, incomplete buckets of several dtypes (a hash table's), and in the
    first pass of a static graph it calls every bucket number 0; there only their contents must agree.
    """
    expected, got = theirs.hook_state, ours.hook_state
    dtypes = {param.dtype for param in theirs.model.parameters() if param.requires_grad}
    if len(dtypes) > 1 or theirs.script.options.static_graph:
        is_same = Counter(note[2:] for note in expected) == Counter(note[2:] for note in got)
    else:
        is_same = expected == got
    return [] if is_same else [f"the hook was shown other buckets:\n    torch:  {expected}\n    minddp: {got}"]
