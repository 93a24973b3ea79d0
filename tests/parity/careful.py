"""Careful scripts from a seed: any layers, dtypes, options and communication hooks, in lines that torch completes.

See [Note: scripts that cannot hang]. These leave out, too:

* Beside `skip_all_reduce_unused_params` any branch: it wants the same parameters unused on all ranks and for ever.
* PowerSGD in several buckets: it sends from the callbacks of its futures, in whatever order they come, and so they,
  or the exchange of used parameters, may overtake each other.
* Torch's fp16 wrapper where a gradient may be undefined: it leaves one of half precision, and the next pass refuses
  that.
"""

from __future__ import annotations

import random

from tests.parity.arguments import ARGS
from tests.parity.hooks import HOOKS, MEAN_HOOKS
from tests.parity.layers import DTYPES, FROZEN, LAYERS
from tests.parity.script import TRANSPORTS, Line, Options, Script

CAP_LISTS_MB = ((0.02, 0.0001, 0.5), (0.07, 0.01), (0.0001,))
_CAPS_MB = (None, 0.02, 0.06, 0.001, 0.0001, 25)
_WORLD_SIZES = (2, 2, 3, 3, 4)

#: Lines of any careful script; those with which no static graph can begin; those that do not fit beside a branch.
_CAREFUL = {"reorder", "straight", "output_as", "two_forwards", "windows", "backward_in_no_sync", "local_step"}
_CAREFUL |= {"evaluate", "hook_before", "keep_grads", "put_grads", "zero_by", "clip", "optimizer", "put_data"}
_CAREFUL |= {"load_state"}
_NOT_RECORDED = {"windows", "backward_in_no_sync", "local_step", "abandon", "evaluate"}
_NOT_BESIDE_BRANCHES = {"abandon", "fail", "again", "two_forwards"}
BRANCHES = {"branch by rank", "branch by turn", "branch by input"}


def careful_script_from(seed: int) -> Script:
    rng = random.Random(seed)
    finding, static = rng.choice(
        ((False, False), (False, False), (True, False), (True, False), (False, True), (True, True))
    )
    hook = rng.choice(sorted(HOOKS)) if rng.random() < 0.5 else None
    if hook in ("power_sgd", "fp16_wrapped") and finding and not static:
        hook = None
    kinds = _careful_kinds(rng, hook, finding=finding, static=static)
    options = _careful_options(rng, kinds, finding=finding, static=static, one_bucket=hook == "power_sgd")
    names = _careful_lines(rng, kinds, hook, options)
    lines = [Line("comm_hook", (hook,))] if hook is not None else []
    for _ in range(rng.randrange(2, 6)):
        line = Line(name := rng.choice(names), ARGS[name](rng))
        if not _is_careful(line, kinds, options, is_first=not any(line.name == "train" for line in lines)):
            line = Line("train")
        lines += [line] + [Line("train")] * (1 if line.name in ("fail", "abandon") else rng.choice((0, 1, 1, 2)))
    return Script(
        layers=tuple(_with_traits(rng, kind, plain=hook == "power_sgd") for kind in kinds),
        options=options,
        lines=(*lines, Line("train")),
        seed=rng.randrange(100),
        world_size=rng.choice(_WORLD_SIZES),
        transport=rng.choice(TRANSPORTS[:2]),
        apart=rng.random() < 0.5,
        accelerated=rng.random() < 0.8,
    )


def _careful_kinds(rng: random.Random, hook: str | None, *, finding: bool, static: bool) -> list[str]:
    left_out = {"sparse", "halves", *BRANCHES, "unused", "reentrant"}
    special = {"reentrant"}
    if static:
        special = (
            {"unused", "branch by rank"}
            if hook != "fp16_wrapped" and rng.random() < 0.5
            else {"unused", "reentrant"}
        )
    elif finding:
        special = BRANCHES | {"unused"}
    if hook == "fp16_wrapped":
        left_out |= {"undefined"}
    kinds = sorted(set(LAYERS) - left_out)
    return [rng.choice(sorted(special) if rng.random() < 0.25 else kinds) for _ in range(rng.randrange(1, 6))]


def _with_traits(rng: random.Random, kind: str, *, plain: bool) -> str:
    dtype = None if plain else rng.choice((None, None, *DTYPES))
    frozen = rng.choice((None, None, None, None, *FROZEN))
    return ":".join(trait for trait in (kind, dtype, frozen) if trait is not None)


def _careful_options(
    rng: random.Random, kinds: list[str], *, finding: bool, static: bool, one_bucket: bool
) -> Options:
    cap_list = None if one_bucket else rng.choice((None, None, *CAP_LISTS_MB))
    drawn = Options(
        bucket_cap_mb=None if cap_list or one_bucket else rng.choice(_CAPS_MB),
        bucket_cap_mb_list=cap_list,
        gradient_as_bucket_view=rng.random() < 0.5,
        batched_grad_copy=rng.random() < 1 / 3,
        find_unused_parameters=finding,
        static_graph=static,
        skip_all_reduce_unused_params=not BRANCHES & {*kinds} and rng.random() < 1 / 3,
        broadcast_buffers=rng.choice((None, None, None, True, False)),
        forward_sync_buffers=rng.choice((None, None, None, True, False)),
        init_sync=rng.random() < 5 / 6,
    )
    return Options(**{name: getattr(drawn, name) for name in Options.offered()})


def _careful_lines(rng: random.Random, kinds: list[str], hook: str | None, options: Options) -> list[str]:
    names = {*_CAREFUL, "abandon", "again"}
    if hook in (None, *MEAN_HOOKS):
        names |= {"fail"}
    if hook is None and not options.static_graph:
        names |= {"copy_wrapper"}
    if BRANCHES & {*kinds}:
        names -= _NOT_BESIDE_BRANCHES
    if "reentrant" in kinds:  # makes gradients ready once for each forward
        names -= {"two_forwards", "again"}
    return sorted(names)


def _is_careful(line: Line, kinds: list[str], options: Options, *, is_first: bool) -> bool:
    """False where torch raises, or both differ deliberately."""
    name, args = line.name, line.args
    finding, static, views = options.find_unused_parameters, options.static_graph, options.gradient_as_bucket_view
    if name == "output_as":
        return args[0] in ("tensor", "tuple", "dict") or (args[0] == "dataclass" and not static)
    if static and is_first and name in _NOT_RECORDED:
        return False
    if name == "evaluate":
        return args[0] != "eval" or not (finding or static or BRANCHES & {*kinds})
    if name == "fail":
        return args[0] == "backward" and not (views and static)
    if name == "zero_by":
        return not (views and args[0] == "zeros")  # torch refuses to detach a view in place
    if name == "put_grads":
        return not (views and args[0] == "data")
    if name == "abandon":
        return not finding or args[0]
    if name in ("two_forwards", "again"):
        return not finding and not static
    return True
