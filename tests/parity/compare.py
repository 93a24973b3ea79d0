"""Where two copies of a model differ in bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest

import torch

from tests.parity.steps import Replica

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


def differences(native: Replica, subject: Replica, *, exact: bool = True) -> Iterator[str]:
    """Every gradient, parameter and buffer of `subject` that is not the same as `native`'s."""
    others = dict(subject.model.named_parameters())
    for name, param in native.model.named_parameters():
        if found := difference(param.grad, others[name].grad, exact=exact):
            yield f"gradient of `{name}` {found}"
        if found := difference(param, others[name], exact=exact):
            yield f"parameter `{name}` {found}"
    for name, gradient in native.kept_gradients.items():
        if found := difference(gradient, subject.kept_gradients[name], exact=exact):
            yield f"what was the gradient of `{name}` before this step {found}"
    others = dict(subject.model.named_buffers())
    for name, buffer in native.model.named_buffers():
        if found := difference(buffer, others[name], exact=exact):
            yield f"buffer `{name}` {found}"
    if native.scenario.hook == "take_notes" and exact:
        yield from _different_notes(native, subject)


def different_outputs(
    expected: list[torch.Tensor], got: list[torch.Tensor], *, exact: bool = True
) -> Iterator[str]:
    for index, pair in enumerate(zip_longest(expected, got)):
        if found := difference(*pair, exact=exact):
            yield f"output {index} {found}"


def _different_notes(native: Replica, subject: Replica) -> Iterator[str]:
    """The buckets that a hook was shown: indices, sizes and shapes, in the order of its calls.

    Torch does not define the order of the last, incomplete buckets of several dtypes (a hash table's), and in
    the first pass of a static graph it calls every bucket number 0; there only their contents must agree.
    """
    expected, got = native.notes, subject.notes
    dtypes = {param.dtype for param in native.model.parameters() if param.requires_grad}
    if len(dtypes) > 1 or native.scenario.options.static_graph:
        same = Counter(note[2:] for note in expected) == Counter(note[2:] for note in got)
    else:
        same = expected == got
    if not same:
        yield f"the hook was shown other buckets:\n    torch:  {expected}\n    minddp: {got}"


def _close(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """To the precision of one step through a layer or a hook of half precision."""
    tolerance = 0.05
    return torch.allclose(expected, got, rtol=tolerance, atol=tolerance, equal_nan=True)


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
