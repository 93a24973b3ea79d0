"""Mutations that a training script on real ranks notices, beside torch's class. They are in several folders."""

from __future__ import annotations

from tests.mutations.mutation import Mutation
from tests.parity.scenario import Accumulate, Evaluate, Layer, Model, Optimize, Options, Scenario, Train, ZeroGrad

_PLAIN = Model((Layer("linear"), Layer("batch_norm"), Layer("linear")), reversed_use=True)
_BRANCHING = Model((Layer("branch_rank"), Layer("linear")))
_MANY_BUCKETS = Options(bucket_cap_mb=0.01)
_TWO_STEPS = (Train(), Optimize(), Train(), Optimize(), Train())
_TRAINING = Scenario(3, _PLAIN, _MANY_BUCKETS, script=_TWO_STEPS)
_FINDING = Scenario(
    3,
    _BRANCHING,
    Options(bucket_cap_mb=0.01, find_unused_parameters=True),
    script=(Train(), Optimize(), ZeroGrad(), Train(), Optimize(), Train()),
)
_NOTING = Scenario(
    2,
    Model((Layer("linear"), Layer("linear"))),
    Options(bucket_cap_mb=0.01, find_unused_parameters=True),
    hook="take_notes",
    script=(Train(), Train()),
)
_ACCUMULATING = Scenario(2, _PLAIN, script=(Accumulate(), Train(), Optimize(), Accumulate(batches=2), Train()))
_STATIC_IN_NO_SYNC = Scenario(
    2,
    _PLAIN,
    Options(static_graph=True),
    script=(Evaluate(no_grad=False), Accumulate(), Train(), Optimize(), Train()),
)

MUTATIONS = (
    Mutation(
        "refuse a static graph's first backward under no_sync",
        "ddp.py",
        "self._reducer.phase is Phase.ARMED and self._reducer.expectation.is_recording",
        "False",
        scenario=_STATIC_IN_NO_SYNC,
        shows=r"torch went on, but minddp raised RuntimeError: Expected to have finished reduction",
    ),
    Mutation(
        "forget the rebuild",
        "core/bucket_store.py",
        "if observed is None:",
        "if True:",
        scenario=_TRAINING,
    ),
    Mutation(
        "launch in the order of readiness",
        "core/backward_pass.py",
        """\
        while not self.all_launched and self.groups_left[len(self.reductions)] == 0:
            bucket = self.store.bucket(len(self.reductions))
""",
        """\
        unlaunched = self.store.all()[len(self.reductions) :]
        for bucket in [bucket for bucket in unlaunched if self.groups_left[bucket.spec.index] == 0]:
            others = [other for other in self.store.all() if other is not bucket]
            others.insert(len(self.reductions), bucket)
            self.store.made = dict(enumerate(others))
""",
        scenario=_FINDING,
        shows=r"died with exit code|gave no answer in time|gradient of .* differs|rank 0 has .* elements",
    ),
    Mutation(
        "broadcast from rank 1",
        "ddp.py",
        "self, source: int = 0, *, buffers: bool = True, optimizer",
        "self, source: int = 1, *, buffers: bool = True, optimizer",
        scenario=_TRAINING,
        shows=r"construction: parameter .* differs",
    ),
    Mutation(
        "launch the first layers first",
        "core/plan.py",
        "return _plan(specs, reversed(groups),",
        "return _plan(specs, groups,",
        scenario=_NOTING,
        shows="the hook was shown other buckets",
    ),
    Mutation(
        "synchronise under no_sync",
        "ddp.py",
        "self.require_backward_grad_sync = False",
        "self.require_backward_grad_sync = True",
        scenario=_ACCUMULATING,
    ),
    Mutation(
        "take unused on this rank for unused on all",
        "core/usage_map.py",
        "[total == 0 for total in self.sums.tolist()]",
        "[mark == 0 for mark in self._marks]",
        scenario=_FINDING,
        shows=r"gradient of .* should be float32.*, is None",
    ),
    Mutation(
        "forget to broadcast buffers",
        "ddp.py",
        "        if synchronises_buffers:\n",
        "        if False:\n",
        scenario=_TRAINING,
        shows=r"buffer .*running_mean` differs",
    ),
    Mutation(
        "divide truly instead of multiplying by the inverse",
        "strategies.py",
        "divides_copied=self.options.batched_grad_copy,",
        "divides_copied=True,",
        scenario=_TRAINING,
    ),
)
