"""What a search has covered: how often each feature of a scenario occurred, and how scenarios ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.parity import scenario as script
from tests.parity.hooks import HOOKS
from tests.parity.models import LAYERS
from tests.parity.scenario import Options, Scenario

_STEPS = (
    script.Train(),
    script.Train(forwards=2),
    script.Train(again=True),
    script.Train(forwards=2, separate=True),
    script.Accumulate(),
    script.Accumulate(batches=2),
    script.Accumulate(backward_only=True),
    script.Abandon(),
    script.Abandon(under_no_sync=True),
    script.ZeroGrad(),
    script.ZeroGrad(set_to_none=False),
    script.Optimize(),
    script.Evaluate(),
    script.Evaluate(no_grad=False),
    script.Interrupt(),
    script.Interrupt(depth=0),
    script.LoadState(),
    script.Pickle(),
)


def features_of(scenario: Scenario) -> set[str]:
    """Everything worth counting, as words."""
    model, options = scenario.model, scenario.options
    found = {f"world size {scenario.world_size}", f"output {model.output}", f"loss uses {model.loss_uses}"}
    found |= {f"layer {layer.kind}" for layer in model.layers}
    found |= {f"dtype {layer.dtype}" for layer in model.layers}
    found |= {f"frozen {layer.frozen}" for layer in model.layers}
    found |= {f"option {name}" for name in options.chosen()}
    found |= {f"step {step!r}" for step in scenario.script}
    found |= {name for name in ("reversed_use", "weights_per_rank") if getattr(model, name)}
    if scenario.keeps_gradients:
        found.add("keeps_gradients")
    if scenario.hook is not None:
        found.add(f"hook {scenario.hook}")
    return found


def all_features(world_sizes: tuple[int, ...]) -> Iterator[str]:
    """Every feature that a search should meet."""
    yield from (f"world size {n}" for n in world_sizes)
    yield from (f"output {kind}" for kind in ("tensor", "tuple", "dict", "dataclass"))
    yield from ("loss uses all", "loss uses main", "reversed_use", "weights_per_rank", "keeps_gradients")
    yield from (f"layer {kind}" for kind in LAYERS)
    yield from (f"dtype {name}" for name in ("float32", "float64", "bfloat16"))
    yield from (f"frozen {which}" for which in ("none", "first", "all"))
    yield from (f"option {name}" for name in Options.offered())
    yield from (f"step {step!r}" for step in _STEPS)
    yield from (f"hook {name}" for name in HOOKS)


@dataclass
class Census:
    """The tally of one search."""

    scenarios: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)

    def count(self, scenario: Scenario, ended_by: str | None) -> None:
        self.scenarios += 1
        self.seen.update(features_of(scenario))
        if ended_by is not None:
            error = ended_by.partition(": ")[2]
            self.failed[error[:80] + ("... torch alone" if error.endswith("(torch alone)") else "")] += 1

    def missing(self, world_sizes: tuple[int, ...]) -> list[str]:
        """Features that never occurred."""
        return [feature for feature in all_features(world_sizes) if not self.seen[feature]]

    def __str__(self) -> str:
        rows = [f"{self.scenarios} scenarios, {self.failed.total()} ended by an error of torch's"]
        rows += [f"{count:6}  {error}" for error, count in self.failed.most_common()]
        rows += [f"{count:6}  {feature}" for feature, count in sorted(self.seen.items())]
        return "\n".join(rows)
