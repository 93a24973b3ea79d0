"""The arguments of lines: for each change, how to draw them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.parity.changes.gradients import HOOKS_AFTER
from tests.parity.changes.outputs import IN_PLACE
from tests.parity.changes.routes import REUSES
from tests.parity.network import OUTPUTS

Draw = Callable[[random.Random], tuple[Any, ...]]


def _any_of(*choices: Any) -> Draw:
    return lambda rng: (rng.choice(choices),)


def _layer(rng: random.Random) -> tuple[int]:
    return (rng.randrange(6),)


def _both(*draws: Draw) -> Draw:
    return lambda rng: tuple(arg for draw in draws for arg in draw(rng))


def _nothing(rng: random.Random) -> tuple[()]:
    return ()


ARGS: dict[str, Draw] = {
    "reuse": _both(_layer, _any_of(*REUSES)),
    "checkpoint": _both(_layer, _any_of("checkpoint", "reentrant", "nested")),
    "drop": _layer,
    "drop_on_rank": _both(_layer, lambda rng: (rng.randrange(4),)),
    "reorder": _layer,
    "straight": _nothing,
    "output_as": _any_of(*OUTPUTS),
    "change_output": _both(_any_of("tensor", "view"), _any_of(*IN_PLACE)),
    "heads": _both(
        _any_of("two heads", "with parameter", "with input", "with view"),
        _any_of("in order", "reversed", "at once"),
    ),
    "keep_outputs": _any_of("wrapper", "module"),
    "hook_forward": _both(_layer, _any_of("layer", "module", "kept")),
    "hook_output": _any_of("output", "module", "input"),
    "again": _nothing,
    "asks": _both(_any_of("before forward", "before backward", "instead"), _any_of("all", "layer")),
    "penalise": _nothing,
    "hessian": _any_of("before", "loss"),
    "inside_checkpoint": _both(
        _any_of("reentrant", "checkpoint"), _layer, _any_of("plain", "reentrant", "checkpoint")
    ),
    "create_graph": _nothing,
    "two_forwards": _any_of("summed", "in order", "reversed"),
    "abandon": _any_of(False, False, True),
    "fail": _both(_any_of("forward", "backward"), _layer),
    "fail_and_step": _both(_layer, _any_of(True, False, False), _any_of(True, False)),
    "windows": lambda rng: tuple(rng.randrange(4) for _ in range(rng.randrange(1, 4))),
    "backward_in_no_sync": _nothing,
    "local_step": _nothing,
    "weight_decay": _layer,
    "backward_outside": _both(_layer, _any_of("before", "between", "after")),
    "evaluate": _both(_any_of("no_grad", "inference_mode", "eval"), _any_of("before", "within")),
    "hook_before": _layer,
    "hook_after": _both(_layer, _any_of(*HOOKS_AFTER)),
    "keep_in_hook": _layer,
    "call_at_end": _both(
        _layer,
        _any_of("weight", "module", "input", "output", "inside", "inside"),
        _any_of("read", "read", "halve", "clip"),
        _any_of(False, False, False, True),
    ),
    "hook_backward": _both(_layer, _any_of("layer", "module"), _any_of("halve", "read")),
    "remove_hooks": _nothing,
    "keep_grads": _any_of("tensors", "detached", "rows"),
    "forget_grads": _nothing,
    "put_grads": _any_of("zeros", "none", "clone", "scaled", "detached", "data"),
    "restore_grads": _nothing,
    "zero_by": _any_of("none", "zeros", "keep"),
    "clip": _nothing,
    "optimizer": _any_of("sgd", "adamw", "one by one"),
    "put_data": _both(_layer, _any_of("new memory", "in place")),
    "freeze": _layer,
    "thaw": _nothing,
    "load_state": _nothing,
    "comm_hook": _any_of("allreduce", "fp16_compress", "set_buffer"),
    "copy_wrapper": _any_of("copied", "pickled"),
    "copy_on_rank": lambda rng: (rng.randrange(4),),
    "move_group": _any_of("well", "stuck"),
    "overlap": _nothing,
    "wrap_again": _nothing,
    "share": _layer,
}
