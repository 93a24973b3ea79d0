"""A script from a seed.

Two in five are careful: any layers, dtypes, options and communication hooks, in lines that torch completes. The
others have fewer layers and options, and lines of every kind.

[Note: scripts that cannot hang]
Torch hangs, by design, where ranks disagree about what there is to reduce. So all ranks play the same lines, and
only two things treat them differently, in scripts whose lines leave no trace in the usage map (`again`, `abandon`,
a backward of another wrapper) and make no parameter ready twice. `drop_on_rank` needs find_unused_parameters and
takes the straight route. So do layers with branches, in careful scripts; where the rank decides, a static graph
will do, too, since no rank changes its mind. Beside a branch no line may fail: ranks must have launched the same
buckets.

Lines on which torch raises are worth playing, but end a script, or cost torch its wrapper. `_is_trouble` says which
those are; one line in three may be one.
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.parity.arguments import ARGS
from tests.parity.careful import BRANCHES, CAP_LISTS_MB, careful_script_from
from tests.parity.changes.routes import REUSES
from tests.parity.layers import LAYERS
from tests.parity.script import TRANSPORTS, Line, Options, Script

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
    "sparse": {"clip", "optimizer", "put_grads", "restore_grads", "weight_decay", "hessian", "call_at_end"}
    | {"hook_backward"},  # which may read gradients that are on their way
    "overlap": {"again", "two_forwards", "heads", "windows", "clip", "wrap_again", "share", "backward_outside"}
    | {"call_at_end", "fail_and_step", "local_step"},
    "double": {"copy_wrapper", "comm_hook", "hessian"} | _KEEPING,
}

#: Layers that only careful scripts have.
_CAREFUL_LAYERS = BRANCHES | {"unused", "reentrant", "checkpointed", "sliced", "empty", "dropout", "running mean"}

#: How the backward may go that a static graph records.
_RECORDED = {"output_as", "change_output", "heads", "hook_output", "call_at_end"}
_RECORDED |= {"asks", "penalise", "hessian", "inside_checkpoint"}

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
    "freeze": 2,
}


def script_from(seed: int) -> Script:
    """The script of that number."""
    return careful_script_from(seed) if seed % 5 < 2 else _daring_script(random.Random(seed))


def _daring_script(rng: random.Random) -> Script:
    options = _options(rng)
    kind = rng.choice(["ordinary"] * 12 + ["sparse", "sparse", "overlap", "double"])
    if kind == "sparse":
        options = replace(options, gradient_as_bucket_view=False)
    calm_steps = rng.choice((0, 0, 4, 5) if options.static_graph else (0, 4, 4, 4, 5, 5))
    records = options.static_graph and not calm_steps
    lines = tuple(_lines(rng, options, kind, records=records))
    left_out = {"sparse", *_CAREFUL_LAYERS} | ({"norm"} if kind == "double" else set())
    nests = any(line.name == "checkpoint" and line.args[1] != "checkpoint" for line in lines)
    if nests or any(line.name == "reuse" and line.args[1] in _REENTRANT for line in lines):
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
        layers=tuple(rng.sample([_half_frozen(rng, layer) for layer in layers], len(layers))),
        options=options,
        lines=lines,
        calm_steps=calm_steps,
        goes_on=goes_on,
        accelerated=rng.random() < 0.8,
        in_double=kind == "double",
    )


def _half_frozen(rng: random.Random, layer: str) -> str:
    return f"{layer}:last" if layer in ("large", "wide") and rng.random() < 0.2 else layer


def _options(rng: random.Random) -> Options:
    finding, static = rng.choice(((False, False),) * 3 + ((True, False),) * 2 + ((False, True),) * 2)
    drawn = Options(
        bucket_cap_mb_list=rng.choice((None, None, *CAP_LISTS_MB)),
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
        # See [Note: after an error]. In another group minddp has new buckets; a kept view has old memory.
        left_out |= (_FAILING | {"move_group"}) if rng.random() < 0.5 else _KEEPING
    if not differs_by_rank and rng.random() < 0.4:  # right after the calm steps, when all optimisations are in use
        reuse = Line("reuse", ARGS["reuse"](rng))
        lines += [] if _is_apart(reuse, kind) else [reuse, Line("train")]
    for _ in range(rng.choice((2, 2, 3, 3, 4, 4, 5, 6)) - len(lines) // 2):
        may_be_trouble = not differs_by_rank and rng.random() < 1 / 3
        if records and not lines:
            may_be_trouble = True
        line = _line(rng, options, kind, left_out, records, is_first=not lines, may_be_trouble=may_be_trouble)
        if line.name == "restore_grads":
            lines += [Line("keep_grads", ("tensors",)), Line("train")]
        if line.name == "comm_hook" and "move_group" not in left_out and rng.random() < 0.5:
            lines += [line, Line("train")]
            line = Line("move_group", ARGS["move_group"](rng))
        steps = rng.choice((0, 1, 1, 1, 1, 2))
        # A backward that failed, or never came, is over with the next forward. Until then a backward of another
        # wrapper on a shared layer belongs to it, in torch's old wrapper as in minddp's; torch has a new one after
        # a failure: see [Note: after an error].
        lines += [line] + [Line("train")] * (max(steps, 1) if line.name in _UNFINISHED else steps)
    return lines


def _line(
    rng: random.Random,
    options: Options,
    kind: str,
    left_out: set[str],
    records: bool,
    *,
    is_first: bool,
    may_be_trouble: bool,
) -> Line:
    names = [name for name in ARGS if name not in left_out]
    if records and is_first and rng.random() < 0.9:
        names = [name for name in names if name in _RECORDED]
    while True:
        [name] = rng.choices(names, [_WEIGHTS.get(name, 1) for name in names])
        line = Line(name, ARGS[name](rng))
        is_defined = _is_defined(line, options, records=records, is_first=is_first) and not _is_apart(line, kind)
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
    if name in ("share", "local_step") and records:  # torch records the other wrapper's backward, or fails
        return False
    if name == "zero_by" and args == ("zeros",) and views:  # torch refuses to detach a view in place
        return False
    shares_memory = args in (("with view",), ("twice",), ("with detached",)) or (
        name == "hook_forward" and args[1] == "kept"
    )
    if shares_memory and (options.find_unused_parameters or records):  # torch copies outputs
        return False
    return not (views and name == "hook_backward" and args[2] == "read")


def _is_apart(line: Line, kind: str) -> bool:
    """True where a script of this kind differs from torch's as it says.

    An overlapped optimizer changes parameters in backward: torch's is later, so an output that is a parameter has
    another value, and autograd refuses a reentrant checkpoint whose parameter has been stepped already.
    `autograd.grad` ends the low precision, and a reentrant checkpoint that is computed again after it has
    accumulators without hooks: the backward warns, and the optimizer's step raises.
    """
    if kind == "overlap":
        return line.args in (("with parameter",),) or (line.name in ("reuse", "checkpoint") and _is_reentrant(line))
    return kind == "double" and (line.args[:1] == ("before backward",) or line.name in ("copy_on_rank", "penalise"))


def _is_reentrant(line: Line) -> bool:
    return any(arg in _REENTRANT or arg in ("reentrant", "nested") for arg in line.args)


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
