"""How hypothesis draws scenarios.

[Note: scenarios that cannot hang]
Torch's DDP hangs, by design, where ranks disagree about what there is to reduce. Every scenario must be one
that torch itself completes, or fails at the same point on all ranks. So:

* A branch taken by rank, or by the input, wants `find_unused_parameters`; by rank also `static_graph` will do,
  since no rank changes its mind. `skip_all_reduce_unused_params` wants the same ones unused on all ranks and
  for ever: no branch at all. Nor a loss that skips an output: torch would not call that unused.
* An unfinished reduction fails everywhere only if the ranks agree about what was unused.
* A forward without backward leaves torch expecting its gradients, even those of a later `no_sync`. If that
  takes another branch, ranks fail: not with a branch by input, nor with one by rank beside one by turn.
* A reentrant checkpoint makes gradients ready once per forward, which fails with several forwards: not beside
  a branch by rank.
* A second backward through a graph marks its parameters as used in the *next* pass; if that does not use them
  and their gradient is None, torch raises. On all ranks or none: not with a branch by input.
* PowerSGD sends from the callbacks of its futures, in whatever order they come. Two buckets, or the exchange
  of used parameters, may overtake each other: it needs a single bucket, and no `find_unused_parameters`.
* Torch's fp16 wrapper leaves a half-precision gradient where there was none before, and the next pass refuses
  it: not with `find_unused_parameters`, nor with a branch by rank.
* At an interruption ranks must have launched the same buckets: not with a branch by rank or input.

Two more are left out because torch is silently wrong or in error there and minddp is not: a dataclass as output
of a static graph (torch never reduces), or beside a loss that skips part of it (torch takes it for one leaf).

Combinations on which torch raises are worth testing, but end the scenario, so most scenarios avoid them; one
in ten is `daring`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.parity.hooks import HOOKS
from tests.parity.models import LAYERS
from tests.parity.scenario import (
    Abandon,
    Accumulate,
    Evaluate,
    Interrupt,
    Layer,
    LoadState,
    Model,
    Optimize,
    Options,
    Pickle,
    Scenario,
    Step,
    Train,
    ZeroGrad,
)

Draw = Callable[[st.SearchStrategy[Any]], Any]

_BRANCHES = {"branch_rank", "branch_turn", "branch_input"}
_CAREFUL_KINDS = st.sampled_from(sorted(set(LAYERS) - _BRANCHES - {"unused", "checkpointed_reentrant"}))
_CAPS_MB = st.sampled_from([None, 0.01, 0.03, 0.001, 0.0001, 0, 25])
_CAP_LISTS_MB = st.sampled_from([None, None, (0.02, 0.0001, 0.5), (0.001, 0.02), (0.0001,)])
# (find_unused_parameters, static_graph)
_REGIMES = [
    (False, False),
    (False, False),
    (True, False),
    (True, False),
    (True, False),
    (False, True),
    (True, True),
]


def one_in(n: int) -> st.SearchStrategy[bool]:
    """True once in n; shrinks to False."""
    return st.integers(0, n - 1).map(lambda i: i == n - 1)


@st.composite
def scenarios(draw: Draw, world_sizes: tuple[int, ...] = (2, 3, 4)) -> Scenario:
    daring = draw(one_in(10))
    finding, static = draw(st.sampled_from(_REGIMES))
    hooks = set(HOOKS) - ({"power_sgd", "fp16_wrapped"} if finding and not static else set())
    hook = draw(st.sampled_from(sorted(hooks))) if draw(st.booleans()) else None
    model = draw(models(finding, static, daring, hook))
    return Scenario(
        world_size=draw(st.sampled_from(world_sizes)),
        model=model,
        options=draw(options(model, finding, static, one_bucket=hook == "power_sgd")),
        hook=hook,
        script=draw(scripts(model, finding, static, daring, hook)),
        keeps_gradients=draw(one_in(4)),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def models(draw: Draw, finding: bool, static: bool, daring: bool, hook: str | None) -> Model:
    if daring:
        special = {"unused", "branch_turn", "checkpointed_reentrant"}
    elif static:
        special = {"unused", "checkpointed_reentrant"}
        if hook != "fp16_wrapped" and draw(st.booleans()):
            special = {"unused", "branch_rank"}
    elif finding:
        special = _BRANCHES | {"unused"}
    else:
        special = {"checkpointed_reentrant"}
    careful = _CAREFUL_KINDS
    if hook == "fp16_wrapped":  # torch gives a parameter whose gradient is undefined one in the hook's dtype
        careful = careful.filter(lambda kind: kind != "no_gradient")
    layer = st.builds(
        Layer,
        kind=st.one_of(careful, careful, careful, st.sampled_from(sorted(special))),
        dtype=st.sampled_from(
            ["float32"] if hook == "power_sgd" else ["float32", "float32", "float64", "bfloat16"]
        ),
        frozen=st.sampled_from(["none", "none", "none", "none", "first", "all"]),
    )
    output = draw(st.sampled_from(["tensor", "tuple", "dict"] + ["dataclass"] * (not static)))
    loss_may_skip = (daring or (finding and not static)) and not (finding and output == "dataclass")
    return Model(
        layers=tuple(draw(st.lists(layer, min_size=1, max_size=5))),
        reversed_use=draw(st.booleans()),
        output=output,
        loss_uses=draw(st.sampled_from(["all", "main"])) if loss_may_skip else "all",
        weights_per_rank=draw(st.booleans()),
    )


@st.composite
def options(draw: Draw, model: Model, finding: bool, static: bool, one_bucket: bool) -> Options:
    cap_list = None if one_bucket else draw(_CAP_LISTS_MB)
    same_ones_unused = not _kinds(model) & _BRANCHES and model.loss_uses == "all"
    drawn = Options(
        bucket_cap_mb=None if cap_list or one_bucket else draw(_CAPS_MB),
        bucket_cap_mb_list=cap_list,
        gradient_as_bucket_view=draw(st.booleans()),
        batched_grad_copy=draw(one_in(3)),
        find_unused_parameters=finding,
        static_graph=static,
        skip_all_reduce_unused_params=same_ones_unused and draw(one_in(3)),
        broadcast_buffers=draw(st.sampled_from([None, None, None, True, False])),
        forward_sync_buffers=draw(st.sampled_from([None, None, None, True, False])),
        init_sync=not draw(one_in(6)),
    )
    return Options(**{name: getattr(drawn, name) for name in Options.offered()})


@st.composite
def scripts(
    draw: Draw, model: Model, finding: bool, static: bool, daring: bool, hook: str | None
) -> tuple[Step, ...]:
    """Two to five rounds of a training loop, no two alike."""
    interludes = _interludes(model, static, daring, hook)
    trains = _trains(model, daring, finding and not static)
    script: list[Step] = []
    for nth in range(draw(st.integers(2, 5))):
        script += draw(st.sampled_from([[ZeroGrad()], [ZeroGrad()], [ZeroGrad(set_to_none=False)], []]))
        interlude = draw(st.sampled_from(interludes)) if draw(one_in(2)) else None
        script += [interlude] if interlude else []
        # A static graph cannot begin with accumulation. After an interruption torch has a new wrapper, which
        # does not know that a forward has run.
        accumulates = (daring or not static or nth > 0) and not isinstance(interlude, Interrupt)
        if accumulates and draw(one_in(3)):
            script.append(Accumulate(batches=draw(st.integers(1, 2)), backward_only=draw(one_in(4))))
        script.append(draw(st.sampled_from(trains)))
        script += [] if draw(one_in(5)) else [Optimize()]
    return tuple(script)


def _trains(model: Model, daring: bool, seeks_unused: bool) -> list[Step]:
    """Ways to train; torch objects to several forwards before one backward with some layers."""
    trains: list[Step] = [Train(), Train(), Train()]
    objects = {"checkpointed_reentrant"} | ({"branch_turn"} if seeks_unused else set())
    several = daring or not objects & _kinds(model)
    if several:
        trains += [Train(forwards=2)]
    if "branch_input" not in _kinds(model):
        trains += [Train(again=True)]
        trains += [Train(forwards=2, separate=True), Train(forwards=2, again=True)] if several else []
    return trains


def _interludes(model: Model, static: bool, daring: bool, hook: str | None) -> list[Step]:
    """What may happen in a round before training."""
    kinds = _kinds(model)
    interludes: list[Step] = [Evaluate(), LoadState(), Abandon(under_no_sync=True)]
    if "branch_input" not in kinds and not kinds >= {"branch_turn", "branch_rank"}:
        interludes += [Evaluate(no_grad=False), Abandon()]
    # Torch pickles neither the hook nor, beside the fact that the first pass is over, what that has shown.
    if not static and hook is None:
        interludes.append(Pickle())
    # Torch starts over after an interruption: a hook's state would be lost, and a graph that is not static new.
    graph_may_change = static and ("branch_turn" in kinds or model.loss_uses == "main" or daring)
    if not kinds & {"branch_rank", "branch_input"} and not graph_may_change and hook != "power_sgd":
        interludes += [Interrupt(depth) for depth in range(3)]
    return interludes


def _kinds(model: Model) -> set[str]:
    return {layer.kind for layer in model.layers}
