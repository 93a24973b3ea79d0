"""A script from a seed.

[Note: scripts that cannot hang]
Torch hangs, by design, where ranks disagree about what there is to reduce. So all ranks play the same lines, and
only `drop_on_rank` treats them differently: it needs find_unused_parameters, takes the straight route, and no line
of its script may leave a trace in the usage map (`again`, `abandon`, a backward of another wrapper) or make a
parameter ready twice.

Lines on which torch raises are worth playing, but end a script, or cost torch its wrapper. `_is_trouble` says which
those are; one line in three may be one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.mid_training.changes.gradients import HOOKS_AFTER
from tests.mid_training.changes.outputs import IN_PLACE
from tests.mid_training.changes.routes import REUSES
from tests.mid_training.network import LAYERS, OUTPUTS
from tests.mid_training.script import TRANSPORTS, Line, Script
from tests.parity.scenario import Options

_CAP_LISTS_MB = ((0.02, 0.0001, 0.5), (0.07, 0.01), (0.0001,))
_WORLD_SIZES = (2,) * 15 + (3,) * 4 + (4,)
_REENTRANT = {how for how in REUSES if "reentrant" in how or "nested" in how}

_KEEPING = {"keep_grads", "keep_in_hook", "restore_grads"}
_FAILING = {"fail", "fail_and_step"}
_UNFINISHED = _FAILING | {"abandon"}

#: Lines that no script with `drop_on_rank` has, see [Note: scripts that cannot hang].
_TRACES = {"again", "abandon", "two_forwards", "heads", "inside_checkpoint", "wrap_again", "share"}

#: Scripts of a kind of their own, and what they leave out. "sparse": one layer has sparse gradients, which many
#: changes cannot treat. "overlap": minddp's backward steps the optimizer, so a line has one backward, and nothing
#: changes gradients after it. "double": minddp computes in float64, by `mixed_precision`; after an `autograd.grad`
#: parameters are those of full precision again, which the graph does not contain.
_KINDS: dict[str, set[str]] = {
    "ordinary": set(),
    "sparse": {"clip", "optimizer", "put_grads", "restore_grads", "weight_decay", "hessian", "call_at_end"},
    "overlap": {"again", "two_forwards", "heads", "windows", "clip", "wrap_again", "share", "backward_outside"}
    | {"call_at_end", "fail_and_step"},
    "double": {"copy_wrapper", "comm_hook", "hessian"} | _KEEPING,
}

#: How the backward may go that a static graph records.
_RECORDED = {"output_as", "change_output", "heads", "hook_output", "call_at_end"}
_RECORDED |= {"asks", "penalise", "hessian", "inside_checkpoint"}

Draw = Callable[[random.Random], tuple[Any, ...]]


def _any_of(*choices: Any) -> Draw:
    return lambda rng: (rng.choice(choices),)


def _layer(rng: random.Random) -> tuple[int]:
    return (rng.randrange(6),)


def _both(*draws: Draw) -> Draw:
    return lambda rng: tuple(arg for draw in draws for arg in draw(rng))


def _nothing(rng: random.Random) -> tuple[()]:
    return ()


#: For each change, how to draw its arguments.
_ARGS: dict[str, Draw] = {
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
    "abandon": _nothing,
    "fail": _both(_any_of("forward", "backward"), _layer),
    "fail_and_step": _both(_layer, _any_of(True, False, False), _any_of(True, False)),
    "windows": lambda rng: tuple(rng.randrange(4) for _ in range(rng.randrange(1, 4))),
    "backward_in_no_sync": _nothing,
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
    "copy_wrapper": _nothing,
    "copy_on_rank": lambda rng: (rng.randrange(4),),
    "move_group": _any_of("well", "stuck"),
    "overlap": _nothing,
    "wrap_again": _nothing,
    "share": _layer,
}

#: What is drawn more often than the rest: these have many variants, or have been the cause of faults.
_WEIGHTS = {
    "reuse": 9,
    "checkpoint": 3,
    "fail": 2,
    "fail_and_step": 4,
    "keep_grads": 2,
    "put_grads": 2,
    "drop_on_rank": 6,
    "backward_outside": 3,
    "drop": 2,
}


def script_from(seed: int) -> Script:
    """The script of that number."""
    rng = random.Random(seed)
    options = _options(rng)
    kind = rng.choice(["ordinary"] * 12 + ["sparse", "sparse", "overlap", "double"])
    if kind == "sparse":
        options = replace(options, gradient_as_bucket_view=False)
    calm_steps = rng.choice((0, 0, 4, 5) if options.static_graph else (0, 4, 4, 4, 5, 5))
    records = options.static_graph and not calm_steps
    lines = tuple(_lines(rng, options, kind, records=records))
    left_out = {"norm", "sparse"} if kind == "double" else {"sparse"}
    if any(line.name == "reuse" and line.args[1] in _REENTRANT for line in lines):
        left_out |= {"undefined"}  # torch does not notice that it comes again, see docs/differences.md
    kinds = [layer for layer in LAYERS if layer not in left_out]
    layers = ("large", *(rng.choice(kinds) for _ in range(rng.randrange(1, 4))))
    if kind == "sparse":
        layers = (*layers[:-1], "sparse")
    keeps_views = options.gradient_as_bucket_view and any(line.name in _KEEPING for line in lines)
    goes_on = not (keeps_views or records) and rng.random() < 0.4
    world_size = rng.choice(_WORLD_SIZES)
    transport = rng.choice(TRANSPORTS if world_size > 2 else TRANSPORTS[:2])
    return Script(
        seed=rng.randrange(100),
        world_size=world_size,
        transport=transport,
        layers=tuple(rng.sample(layers, len(layers))),
        options=options,
        calm_steps=calm_steps,
        lines=lines,
        goes_on=goes_on,
        accelerated=rng.random() < 0.8,
        in_double=kind == "double",
    )


def _options(rng: random.Random) -> Options:
    finding, static = rng.choice(((False, False),) * 3 + ((True, False),) * 2 + ((False, True),) * 2)
    drawn = Options(
        bucket_cap_mb_list=rng.choice((None, None, *_CAP_LISTS_MB)),
        gradient_as_bucket_view=rng.random() < 0.3,
        batched_grad_copy=rng.random() < 0.2,
        find_unused_parameters=finding,
        static_graph=static,
    )
    return Options(**{name: getattr(drawn, name) for name in Options.offered()})


def _lines(rng: random.Random, options: Options, kind: str, *, records: bool) -> list[Line]:
    """Two to six changes, each followed by one or two ordinary steps, or at once by the next one.

    `records`: the first backward of the script is the one that a static graph records.
    """
    lines = [Line("overlap")] if kind == "overlap" else []
    differs_by_rank = options.find_unused_parameters and rng.random() < (0.8 if kind == "sparse" else 0.3)
    left_out = _KINDS[kind] | {"overlap"}
    left_out |= _TRACES if differs_by_rank else {"drop_on_rank"}
    if options.gradient_as_bucket_view:
        left_out |= _FAILING if rng.random() < 0.5 else _KEEPING  # see [Note: after an error]
    if not differs_by_rank and rng.random() < 0.4:  # right after the calm steps, when all optimisations are in use
        lines += [Line("reuse", _ARGS["reuse"](rng)), Line("train")]
    for _ in range(rng.choice((2, 2, 3, 3, 4, 4, 5, 6)) - len(lines) // 2):
        may_be_trouble = not differs_by_rank and rng.random() < 1 / 3
        if records and not lines:
            may_be_trouble = True
        line = _line(rng, options, left_out, records, is_first=not lines, may_be_trouble=may_be_trouble)
        if line.name == "restore_grads":
            lines += [Line("keep_grads", ("tensors",)), Line("train")]
        if line.name == "comm_hook" and rng.random() < 0.5:
            lines += [line, Line("train")]
            line = Line("move_group", _ARGS["move_group"](rng))
        steps = rng.choice((0, 1, 1, 1, 1, 2))
        # A backward that failed, or never came, is over with the next forward. Until then a backward of another
        # wrapper on a shared layer belongs to it, in torch's old wrapper as in minddp's; torch has a new one after
        # a failure: see [Note: after an error].
        lines += [line] + [Line("train")] * (max(steps, 1) if line.name in _UNFINISHED else steps)
    return lines


def _line(
    rng: random.Random, options: Options, left_out: set[str], records: bool, *, is_first: bool, may_be_trouble: bool
) -> Line:
    names = [name for name in _ARGS if name not in left_out]
    if records and is_first and rng.random() < 0.9:
        names = [name for name in names if name in _RECORDED]
    while True:
        [name] = rng.choices(names, [_WEIGHTS.get(name, 1) for name in names])
        line = Line(name, _ARGS[name](rng))
        is_defined = _is_defined(line, options, records=records, is_first=is_first)
        if is_defined and (may_be_trouble or not _is_trouble(line, options)):
            return line


def _is_defined(line: Line, options: Options, *, records: bool, is_first: bool) -> bool:
    """False where torch and minddp differ deliberately, see docs/differences.md, or gradients are on their way.

    `records`: a static graph records the first backward of the script.
    """
    name, args, views = line.name, line.args, options.gradient_as_bucket_view
    if name == "call_at_end":  # torch's own callback comes first in a backward that is recorded
        _, by, does, late = args
        reads_means = records and is_first and by != "output"
        return late or (does == "halve" and not views) or (does == "read" and reads_means)
    if name == "share" and records:  # torch records the other wrapper's backward
        return False
    shares_memory = args in (("with view",), ("twice",)) or (name == "hook_forward" and args[1] == "kept")
    if shares_memory and (options.find_unused_parameters or records):  # torch copies outputs
        return False
    return not (views and name == "hook_backward" and args[2] == "read")


def _is_trouble(line: Line, options: Options) -> bool:
    """Torch raises, or may raise, on this line or on the step after it."""
    name, args = line.name, line.args
    finding, static, views = (
        options.find_unused_parameters,
        options.static_graph,
        options.gradient_as_bucket_view,
    )
    if static and name in ("reuse", "checkpoint", "backward_outside", "copy_wrapper"):
        return True
    if finding and (name in ("two_forwards", "abandon", "heads", "inside_checkpoint") or args == ("object",)):
        return True
    return (
        (name == "reuse" and args[1] in _REENTRANT)
        or (name == "checkpoint" and args[1] != "checkpoint" and finding)
        or (name in ("drop", "freeze") and not finding)
        or (name == "hook_after" and (args[1] == "clear" or views))
        or (name == "backward_outside" and args[1] == "between")
        or (name in ("wrap_again", "share") and views)
        or (name == "put_grads" and args[0] == "data" and views)
    )
