"""Errors of the core. They begin with torch's words if scripts match on them."""

from __future__ import annotations

from collections.abc import Sequence

from minddp.platform import wording


def ready_twice(index: int, name: str, *, static_graph: bool) -> RuntimeError:
    """The error for a parameter whose hook fired too often in one backward."""
    if static_graph:
        return RuntimeError(
            f"Your training graph has changed in this iteration, e.g., one parameter is unused in first "
            f"iteration, but then got used in the second iteration. this is not compatible with static_graph "
            f"set to True. The parameter is `{name}` (index {index}); pass static_graph=False."
        )
    return RuntimeError(
        f"Expected to mark a variable ready only once. Parameter at index {index} with name {name} has been "
        f"marked as ready twice: its gradient was accumulated more than once in this backward. That happens "
        f"when it is used outside `forward`, when several reentrant `checkpoint` calls share it, or when it "
        f"was found unused and then used in a nested backward. Use checkpoint(..., use_reentrant=False), or "
        f"static_graph=True if every iteration has the same graph. With mixed_precision also when a loss joins "
        f"forwards from before and after a backward or `autograd.grad`: run all forwards of a loss first."
    )


def second_backward(name: str) -> RuntimeError:
    """The error for a gradient from another output of a static graph whose gradients are already reduced."""
    return RuntimeError(
        f"Trying to backward a second time through one forward with static_graph=True: the first backward has been "
        f"reduced, and the gradient of `{name}`, from another output, would stay local to this rank. Add the "
        f"losses of all outputs and call backward once, or pass find_unused_parameters=True instead of "
        f"static_graph=True."
    )


def unequal_backwards(rank: int, is_further: bool, num_first: int, world_size: int) -> RuntimeError:
    """The error for a backward that is the first of a forward on `num_first` ranks, and not on the others."""
    here = "a further backward of a forward" if is_further else "the first backward of a forward"
    return RuntimeError(
        f"The ranks call backward different numbers of times. On rank {rank} this is {here}, but it is the first "
        f"one on {num_first} of {world_size} ranks, so the ranks reduce gradients of different steps. `.grad` is "
        f"not averaged. Call backward for the same outputs on every rank, or once on the sum of the losses."
    )


def skipped_but_used(names: Sequence[str], rank: int) -> RuntimeError:
    """The error for parameters in buckets that were not reduced, although some rank has used them."""
    return RuntimeError(
        f"skip_all_reduce_unused_params: rank {rank} has not reduced {wording.names(names)}, which it did not use "
        f"in this backward. But another rank did, or an earlier backward under no_sync. So the ranks' buckets do "
        f"not match, and `.grad` is not averaged. Leave that option out, on every rank, unless all ranks leave out "
        f"the same parameters."
    )


def still_running() -> RuntimeError:
    """The error for a forward or an optimizer step during a backward of the same wrapper."""
    return RuntimeError(
        "Expected to have finished reduction in the prior iteration before starting a new one: a backward of "
        "this wrapper is still running. Wait until it has ended, if it runs in another thread. If it has called "
        "the forward itself, in a hook perhaps, call the module there, without its wrapper."
    )


def cannot_finalize(*, is_required: bool, is_incomplete: bool) -> RuntimeError:
    """The error for `finish` if no backward awaits it, or some gradients have not arrived."""
    if not is_required:
        why = "but manual backward finalization is not required. Set require_manual_backward_finalization first."
    elif is_incomplete:
        why = "before all DDP buckets were ready: call it once all gradients of this module have arrived."
    else:
        why = "but no gradient reduction requires finalization: it has been finalized, or ran under no_sync()."
    return RuntimeError(f"finalize_backward() called {why}")


def interrupted(backward: int, rank: int, missing: Sequence[str]) -> str:
    before = f" before the gradients of {wording.names(missing)} had arrived" if missing else ""
    return f"An exception has ended backward {backward} on rank {rank}{before}"
