"""Small faults put into a copy of minddp, to see whether the tests notice them.

A `Mutation` replaces one piece of source text. The text must occur exactly once in its file: when the core has
moved on, a mutation that no longer applies fails loudly instead of testing nothing. Each names the unit tests that
should fail, or a scenario in which real ranks should tell the faulty copy from torch.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.parity.runner import Report, run_scenario
from tests.parity.scenario import (
    Accumulate,
    Layer,
    Model,
    Optimize,
    Options,
    Scenario,
    Train,
    ZeroGrad,
)


class StaleMutation(AssertionError):
    """The text that a mutation replaces is not in the source, or not only once."""


@dataclass(frozen=True)
class Mutation:
    """Replace `old` by `new` in minddp/`file`.

    Then one of `tests` (a file below tests/, or one test in it as pytest names it) fails, or `scenario` reports
    what the pattern `shows` matches.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str = ""
    scenario: Scenario | None = None
    shows: str = r"gradient of .* differs in"

    def applied_to(self, source: str) -> str:
        """The mutated source.

        Raises:
            StaleMutation: `old` does not occur exactly once.
        """
        if source.count(self.old) != 1:
            raise StaleMutation(
                f"Mutation `{self.name}` replaces text that occurs {source.count(self.old)} times in "
                f"minddp/{self.file}, not once:\n{self.old}\nBring it up to date with the source."
            )
        return source.replace(self.old, self.new)


def copy_of_minddp(directory: Path, mutation: Mutation | None = None) -> Path:
    """A folder to put first on the path, holding minddp with the mutation applied."""
    original = find_spec("minddp")
    assert original is not None
    assert original.origin is not None
    package = directory / "minddp"
    shutil.copytree(Path(original.origin).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    if mutation is not None:
        target = package / mutation.file
        target.write_text(mutation.applied_to(target.read_text()))
    return directory


def run_scenario_with(rank: int, directory: Path, scenario: Scenario) -> Report:
    """`run_scenario` on a fresh rank that imports minddp from `directory`."""
    if str(directory) not in sys.path:
        assert "minddp" not in sys.modules, "the rank has imported minddp before; it must be a fresh one"
        sys.path.insert(0, str(directory))
    report = run_scenario(rank, scenario)
    loaded_from = sys.modules["minddp"].__file__
    assert loaded_from is not None
    assert Path(loaded_from).is_relative_to(directory), f"minddp was imported from {loaded_from}"
    return report


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

_PACKING = "core/test_packing.py"
_BUCKET = "core/test_bucket.py"
_STORE = "core/test_bucket_store.py"
_PASS = "core/test_backward_pass.py"
_END = "core/test_backward_end.py"
_MISSING = "watchdog/test_missing_gradients.py"
_MODE = "core/test_mode.py"
_REDUCER = "core/test_reducer.py"
_READINESS = "core/test_readiness.py"
_ALIASING = "acceleration/test_gradient_aliasing.py"
_FIND_UNUSED = "expectation/test_find_unused.py"
_STATIC = "expectation/test_static_graph.py"

_AGAINST_TORCH = (
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
            bucket = self.store.buckets[len(self.reductions)]
""",
        """\
        unlaunched = self.store.buckets[len(self.reductions) :]
        for bucket in [bucket for bucket in unlaunched if self.groups_left[bucket.spec.index] == 0]:
            self.store.buckets.remove(bucket)
            self.store.buckets.insert(len(self.reductions), bucket)
""",
        scenario=_FINDING,
        shows=r"died with exit code|gave no answer in time|gradient of .* differs|rank 0 has .* elements",
    ),
    Mutation(
        "broadcast from rank 1",
        "ddp.py",
        "def synchronize(self, source: int = 0,",
        "def synchronize(self, source: int = 1,",
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
        "expectation/usage_map.py",
        "[total == 0 for total in self.sums.tolist()]",
        "[mark == 0 for mark in self._marks]",
        scenario=_FINDING,
        shows=r"gradient of .* should be float32.*, is None",
    ),
    Mutation(
        "forget to broadcast buffers",
        "ddp.py",
        "        if self._synchronizes_buffers(after_forward=False):\n",
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

_BY_UNIT_TESTS = (
    Mutation(
        "hook the gradient before it is accumulated",
        "core/autograd.py",
        "node.register_hook(",
        "node.register_prehook(",
        "core/test_autograd.py::test_a_hook_fires_once_after_the_gradient_has_its_value",
    ),
    Mutation(
        "report no error of a hook",
        "core/autograd.py",
        "            self.on_error(error)\n",
        "",
        "core/test_autograd.py::test_an_error_in_a_hook_is_reported_and_raised",
    ),
    Mutation(
        "keep the wrapper alive",
        "core/autograd.py",
        "weak_method = weakref.WeakMethod(method)",
        "weak_method = partial(getattr, method, '__call__')",
        "core/test_autograd.py::test_the_beginning_is_reported_for_each_output",
    ),
    Mutation(
        "leave hooks on old accumulators",
        "core/autograd.py",
        "        self.remove()\n        self._install()",
        "        self.remove()",
        "core/test_autograd.py::test_hooks_move_to_the_accumulators_of_another_dtype",
    ),
    Mutation(
        "take the end of a nested backward for the end",
        "core/backward_end.py",
        "autograd.inside_another_backward() and not self._forward_was_nested",
        "False",
        f"{_END}::test_the_end_of_a_nested_backward_is_reported_as_nested",
    ),
    Mutation(
        "take the backward of a nested forward for a nested one",
        "core/backward_end.py",
        "autograd.inside_another_backward() and not self._forward_was_nested",
        "autograd.inside_another_backward()",
        f"{_END}::test_within_a_nested_forward_the_end_of_its_backward_is_the_end",
    ),
    Mutation(
        "ask for the end twice",
        "core/backward_end.py",
        "if backward in self._awaited:",
        "if False:",
        f"{_END}::test_the_end_is_called_once_however_often_it_is_requested",
    ),
    Mutation(
        "await an end for ever",
        "core/backward_end.py",
        "        self._awaited.clear()",
        "        pass",
        f"{_END}::test_after_an_exception_the_end_is_awaited_until_it_is_forgotten",
    ),
    Mutation(
        "settle by a backward that does not come in at the outputs",
        "core/backward_end.py",
        "return not self._awaits_entrance",
        "return True",
        f"{_STATIC}::test_a_first_backward_that_does_not_come_in_at_the_outputs_is_part_of_the_recording",
    ),
    Mutation(
        "wait for no future",
        "core/backward_end.py",
        "            torch.futures.wait_all(futures)",
        "            pass",
        f"{_END}::test_futures_are_waited_for_once",
    ),
    Mutation(
        "launch a bucket that is not full",
        "core/backward_pass.py",
        " and self.groups_left[len(self.reductions)] == 0:",
        ":",
        f"{_PASS}::test_buckets_are_launched_from_the_head_of_the_plan",
    ),
    Mutation(
        "launch a bucket with its first pack group",
        "core/backward_pass.py",
        "if self.groups_left[index] == 0:",
        "if True:",
        f"{_PASS}::test_a_bucket_waits_for_all_of_its_pack_groups",
    ),
    Mutation(
        "record packing for a double backward",
        "core/backward_pass.py",
        "with torch.no_grad():  # backward(create_graph=True) enables it",
        "if True:",
        f"{_ALIASING}::test_nothing_is_aliased_while_backward_creates_a_graph",
    ),
    Mutation(
        "keep the last bucket's average",
        "core/backward_pass.py",
        "            if reduction is not None:",
        "            if reduction is not None and bucket is not self.store.buckets[-1]:",
        f"{_PASS}::test_gradients_are_scaled_while_packed_and_summed_when_waited_for",
    ),
    Mutation(
        "touch what no rank has used",
        "core/backward_pass.py",
        "here = None if untouched is None else",
        "here = None if True else",
        f"{_PASS}::test_what_no_rank_has_used_stays_as_it_is",
    ),
    Mutation(
        "leave what is under way to itself after an exception",
        "core/backward_pass.py",
        "                reduction.result()\n            except",
        "                pass\n            except",
        f"{_PASS}::test_abandoning_waits_for_launched_reductions_even_if_one_fails",
    ),
    Mutation(
        "leave modes open after an exception",
        "core/backward_pass.py",
        "        self.close()\n\n    def close",
        "\n    def close",
        f"{_MODE}::test_a_backward_that_an_exception_ends",
    ),
    Mutation(
        "open no mode",
        "core/backward_pass.py",
        "            mode.opened(param)",
        "            pass",
        f"{_MODE}::test_a_complete_backward",
    ),
    Mutation(
        "close modes before unpacking",
        "core/backward_pass.py",
        "            mode.before_unpack()",
        "            mode.before_unpack(), mode.closed()",
        f"{_MODE}::test_a_complete_backward",
    ),
    Mutation(
        "await unused parameters",
        "core/backward_pass.py",
        "        self.mark_unused(self.unused)",
        "        pass",
        f"{_PASS}::test_unused_parameters_are_ready_at_once_and_last_in_the_observed_order",
    ),
    Mutation(
        "observe where unused parameters were found",
        "core/backward_pass.py",
        "if param not in unused] + self.unused",
        "if True]",
        f"{_PASS}::test_unused_parameters_are_ready_at_once_and_last_in_the_observed_order",
    ),
    Mutation(
        "fill memory that something holds",
        "core/bucket.py",
        "if is_held or is_moved:",
        "if is_moved:",
        f"{_ALIASING}::test_memory_that_something_else_holds_is_replaced",
    ),
    Mutation(
        "overlook other memory under a view",
        "core/bucket.py",
        "if is_held or is_moved:",
        "if is_held:",
        f"{_BUCKET}::test_other_memory_under_a_view_is_noticed",
    ),
    Mutation(
        "alias again after memory was held",
        "core/bucket.py",
        "self._make_aliasing = None  #",
        "pass  #",
        f"{_ALIASING}::test_memory_that_something_else_holds_is_replaced",
    ),
    Mutation(
        "transpose views",
        "core/bucket.py",
        "strides = param.stride() if is_dense else",
        "strides =",
        f"{_BUCKET}::test_views_have_the_parameters_strides_where_those_are_dense",
    ),
    Mutation(
        "forget to copy averages",
        "core/bucket.py",
        "        self._copy(averages, places)\n",
        "",
        f"{_BUCKET}::test_complex_numbers_travel_as_pairs_of_real_ones",
    ),
    Mutation(
        "write averages where no rank has used the parameter",
        "core/bucket.py",
        "if not (untouched and untouched[k])]",
        "if True]",
        f"{_BUCKET}::test_an_untouched_gradient_stays_as_it_is",
    ),
    Mutation(
        "alias what a hook has returned",
        "core/bucket.py",
        "if self.aliasing is not None and average is self.wire:",
        "if self.aliasing is not None:",
        f"{_ALIASING}::test_an_average_that_lies_elsewhere_is_copied",
    ),
    Mutation(
        "adopt gradients without their values",
        "core/bucket.py",
        "                view.copy_(param.grad)\n",
        "",
        f"{_BUCKET}::test_gradients_that_exist_are_adopted_where_they_are_to_be_views",
    ),
    Mutation(
        "send complex numbers as they are",
        "core/bucket.py",
        "return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat",
        "return flat",
        f"{_BUCKET}::test_complex_numbers_travel_as_pairs_of_real_ones",
    ),
    Mutation(
        "leave a hook's tensor out of the views",
        "core/bucket.py",
        "            torch._foreach_copy_(self.views, averages)\n",
        "",
        f"{_BUCKET}::test_an_average_may_lie_elsewhere",
    ),
    Mutation(
        "accept a replaced gradient",
        "core/bucket.py",
        "if grad is not None and grad.numel() > 0 and not lies_at(grad, view):",
        "if False:",
        f"{_BUCKET}::test_a_gradient_replaced_during_backward_is_an_error_with_views",
    ),
    Mutation(
        "scale what lies between a group's gradients",
        "core/bucket.py",
        "are_neighbours = places[-1] - places[0] == len(places) - 1",
        "are_neighbours = True",
        f"{_PACKING}::test_a_resident_gradient_is_divided",
    ),
    Mutation(
        "rebuild after every backward",
        "core/bucket_store.py",
        "        self.has_rebuilt = True\n",
        "",
        f"{_STORE}::test_an_observed_order_leads_to_one_rebuild",
    ),
    Mutation(
        "rebuild by an order that has not arrived",
        "core/bucket_store.py",
        "transport.broadcast(order, source=0).wait()",
        "transport.broadcast(order, source=0)",
        f"{_REDUCER}::test_the_rebuild_follows_rank_0s_order",
    ),
    Mutation(
        "adopt gradients in backward",
        "core/bucket_store.py",
        "                    adopt_grads,\n",
        "                    True,\n",
        f"{_STORE}::test_gradients_move_into_new_memory_only_between_backwards",
    ),
    Mutation(
        "number pack groups anew in each bucket",
        "core/bucket_store.py",
        "for bucket, places in enumerate(by_group) for group in range(len(places))]",
        "for bucket, places in enumerate(by_group) for group in [0] * len(places)]",
        f"{_STORE}::test_pack_groups_are_numbered_through_all_buckets",
    ),
    Mutation(
        "keep an order that former ranks have seen",
        "core/bucket_store.py",
        "self.has_rebuilt, self._observed_order = False, None",
        "self.has_rebuilt = False",
        f"{_STORE}::test_other_ranks_agree_on_an_order_anew",
    ),
    Mutation(
        "let the last sink have all events",
        "core/events.py",
        "self._set_sinks((*self._sinks, sink))",
        "self._set_sinks((sink,))",
        "core/test_events.py::test_every_sink_gets_every_event_in_order",
    ),
    Mutation(
        "raise without a report",
        "core/events.py",
        "            self.report(error)\n            raise",
        "            raise",
        "core/test_events.py::test_errors_are_reported_and_raised",
    ),
    Mutation(
        "expect each hook twice",
        "core/expectation.py",
        "return Expected([1] * len(self.params), [])",
        "return Expected([2] * len(self.params), [])",
        "core/test_expectation.py::test_every_hook_fires_once_and_no_parameter_is_unused",
    ),
    Mutation(
        "give a static graph the words of another one",
        "core/errors.py",
        "if static_graph:",
        "if not static_graph:",
        f"{_MISSING}::test_ready_twice_names_the_parameter",
    ),
    Mutation(
        "let optimizers step on what is not averaged",
        "watchdog/missing_gradients.py",
        "any(id(param) in ours for param in stepped)",
        "False",
        f"{_MISSING}::test_the_optimizer_is_stopped_in_the_same_iteration",
    ),
    Mutation(
        "stop every optimizer",
        "watchdog/missing_gradients.py",
        "any(id(param) in ours for param in stepped)",
        "True",
        f"{_MISSING}::test_an_unrelated_optimizer_is_not_stopped",
    ),
    Mutation(
        "warn of the same parameters each time",
        "watchdog/missing_gradients.py",
        "if tuple(missing) not in self._warned_of:",
        "if True:",
        f"{_MISSING}::test_each_set_of_missing_parameters_is_one_warning",
    ),
    Mutation(
        "blame parameters that are not frozen",
        "watchdog/missing_gradients.py",
        "if not self._params[param].requires_grad]",
        "]",
        f"{_MISSING}::test_parameters_that_have_been_frozen_are_named",
    ),
    Mutation(
        "oblige modes to know every station",
        "core/mode.py",
        '"""The gradient of `param` is the first of this backward to arrive; none is packed yet."""',
        "raise NotImplementedError",
        f"{_MODE}::test_a_mode_may_leave_callbacks_out",
    ),
    Mutation(
        "multiply what is to be divided",
        "core/packing.py",
        "        if self.divide_resident if resident else self.divide_copied:",
        "        if False:",
        f"{_PACKING}::test_a_batched_copy_is_divided",
    ),
    Mutation(
        "multiply a lone gradient of a batched copy",
        "core/packing.py",
        "None if self.divisor is None or self.divide_copied else",
        "None if self.divisor is None else",
        f"{_PACKING}::test_a_batched_copy_is_divided",
    ),
    Mutation(
        "divide resident gradients only where copied ones are",
        "core/packing.py",
        "        if self.divide_resident if resident else self.divide_copied:",
        "        if self.divide_copied:",
        f"{_PACKING}::test_a_resident_gradient_is_divided",
    ),
    Mutation(
        "divide complex numbers as such",
        "core/packing.py",
        "parts = torch.view_as_real(tensor) if self.as_real and tensor.is_complex() else tensor",
        "parts = tensor",
        f"{_PACKING}::test_complex_numbers_are_divided_as_pairs_of_real_ones_if_asked",
    ),
    Mutation(
        "leave the last backward's values for a missing gradient",
        "core/packing.py",
        "                view.zero_()",
        "                pass",
        f"{_PACKING}::test_a_missing_gradient_counts_as_zero_and_stays_missing",
    ),
    Mutation(
        "copy a gradient onto itself before it is scaled",
        "core/packing.py",
        "            elif self.binds and lies_at(grad, view):",
        "            elif False:",
        f"{_PACKING}::test_a_replaced_gradient_is_copied_and_bound_anew_while_its_neighbours_are_divided",
    ),
    Mutation(
        "take one resident gradient for none",
        "core/packing.py",
        "        elif not all_there or any(map(operator.eq, addresses, self._addresses)):",
        "        elif not all_there:",
        f"{_PACKING}::test_a_replaced_gradient_is_copied_and_bound_anew_while_its_neighbours_are_divided",
    ),
    Mutation(
        "put a large gradient among small ones",
        "core/packing.py",
        "        if nbytes >= large_bytes:",
        "        if False:",
        f"{_PACKING}::test_a_group_that_is_not_contiguous_gets_the_same_bits",
    ),
    Mutation(
        "let a group of small gradients grow",
        "core/packing.py",
        "if not small or small_bytes >= group_bytes:",
        "if not small:",
        f"{_PACKING}::test_a_group_of_small_gradients_closes_once_it_reaches_its_size",
    ),
    Mutation(
        "accept another dtype",
        "core/packing.py",
        "    if grad.dtype != dtype:",
        "    if False:",
        f"{_PACKING}::test_a_gradient_of_another_dtype_is_an_error_in_every_step",
    ),
    Mutation(
        "leave gradients where they were",
        "core/packing.py",
        "            for param, grad, view in zip(self.params, grads, self.views, strict=True):",
        "            for param, grad, view in ():",
        f"{_PACKING}::test_a_replaced_gradient_is_copied_and_bound_anew_while_its_neighbours_are_divided",
    ),
    Mutation(
        "let slots overlap by one element",
        "core/plan.py",
        "slots.append(Slot(param, index, offset, specs[param].numel))",
        "slots.append(Slot(param, index, max(offset - 1, 0), specs[param].numel))",
        f"{_BUCKET}::test_views_lie_one_after_the_other_and_fill_the_buffer",
    ),
    Mutation(
        "fill a bucket beyond its capacity",
        "core/plan.py",
        "if group.nbytes >= group.cap_bytes:",
        "if group.nbytes > group.cap_bytes:",
        "core/test_plan.py::test_a_bucket_closes_once_it_reaches_its_capacity",
    ),
    Mutation(
        "launch by the first gradient of a bucket",
        "core/plan.py",
        "groups.sort(key=lambda group: max(position",
        "groups.sort(key=lambda group: min(position",
        "core/test_plan.py::test_the_launch_order_is_the_order_in_which_buckets_fill_up",
    ),
    Mutation(
        "count a hook that fires again",
        "core/readiness.py",
        "            if left < 0:",
        "            if False:",
        f"{_READINESS}::test_a_hook_that_fires_once_too_often_is_reported_and_not_counted",
    ),
    Mutation(
        "observe the reverse order",
        "core/readiness.py",
        "self.ready_order.append(param)",
        "self.ready_order.insert(0, param)",
        f"{_READINESS}::test_a_group_is_ready_with_the_last_of_its_parameters",
    ),
    Mutation(
        "await hooks of unused parameters",
        "core/readiness.py",
        "        self.hooks_left[param] = 1\n",
        "        self.hooks_left[param] = 2\n",
        f"{_READINESS}::test_a_parameter_without_hooks_is_not_missing_and_counts_once_it_is_marked_unused",
    ),
    Mutation(
        "count down what is expected of all backwards",
        "core/readiness.py",
        "self.hooks_left = list(hooks_left)",
        "self.hooks_left = hooks_left",
        f"{_READINESS}::test_the_expected_counts_are_not_changed",
    ),
    Mutation(
        "miss what has arrived",
        "core/readiness.py",
        "if left > 0]",
        "if left >= 0]",
        f"{_READINESS}::test_a_group_is_ready_with_the_last_of_its_parameters",
    ),
    Mutation(
        "pack a group with its first gradient",
        "core/readiness.py",
        "        if not self._params_left[group]:",
        "        if True:",
        f"{_READINESS}::test_a_group_is_ready_with_the_last_of_its_parameters",
    ),
    Mutation(
        "bind the slow hook in every phase",
        "core/reducer.py",
        "only_counts = self.phase is Phase.ACCUMULATING and not self.expectation.is_recording",
        "only_counts = False",
        f"{_REDUCER}::test_the_events_of_a_step",
    ),
    Mutation(
        "count hooks in a backward that is recorded",
        "core/reducer.py",
        "only_counts = self.phase is Phase.ACCUMULATING and not self.expectation.is_recording",
        "only_counts = self.phase is Phase.ACCUMULATING",
        f"{_STATIC}::test_a_layer_in_two_checkpoints_is_reduced_once_and_right",
    ),
    Mutation(
        "mark no use",
        "core/reducer.py",
        "self.hooks.handler = handler if opens else self.expectation.observing(handler)",
        "self.hooks.handler = handler",
        f"{_FIND_UNUSED}::test_use_under_no_sync_counts",
    ),
    Mutation(
        "go on with a static graph that has changed",
        "core/reducer.py",
        "            self._move_to(Phase.INCOMPLETE)  # what was recorded",
        "            pass  # what was recorded",
        f"{_REDUCER}::test_after_that_error_a_static_graph_does_not_go_on",
    ),
    Mutation(
        "keep what an interrupted backward has noted",
        "core/reducer.py",
        "            self.expectation.revert()\n",
        "",
        "core/test_expectation.py::test_it_reverts_a_backward_that_an_exception_has_ended",
    ),
    Mutation(
        "abandon nothing",
        "core/reducer.py",
        "            self.current.abandon()\n",
        "",
        f"{_REDUCER}::test_what_was_launched_before_the_exception_is_waited_for",
    ),
    Mutation(
        "allow a forward within a backward",
        "core/reducer.py",
        "if self.phase is Phase.ACCUMULATING and self.backward_end.is_awaited_here:",
        "if False:",
        f"{_REDUCER}::test_a_forward_within_a_backward_of_the_wrapper_is_an_error",
    ),
    Mutation(
        "await only the end of the nested backward",
        "core/reducer.py",
        "            self._await_end()  # also of the outer backward, if the first hook was in a nested one\n",
        "",
        f"{_STATIC}::test_the_end_of_a_nested_backward_does_not_end_the_recording",
    ),
    Mutation(
        "await no end when all buckets have left",
        "core/reducer.py",
        "        self._await_end()\n        self.expectation.all_launched(self.transport)",
        "        self.expectation.all_launched(self.transport)",
        f"{_REDUCER}::test_the_first_gradient_may_come_in_a_nested_backward",
    ),
    Mutation(
        "guard nothing after an unfinished backward",
        "core/reducer.py",
        "                self.unfinished.guard(self._unfinished)\n",
        "",
        f"{_MISSING}::test_the_optimizer_is_stopped_in_the_same_iteration",
    ),
    Mutation(
        "guard nothing before the caller has finalized",
        "core/reducer.py",
        "            self.unfinished.guard(not_finalized)\n",
        "",
        f"{_REDUCER}::test_the_caller_may_finalize",
    ),
    Mutation(
        "never lift a guard",
        "core/reducer.py",
        "        self.unfinished.lift_guard()\n",
        "",
        f"{_MISSING}::test_the_guard_is_lifted_when_the_rest_arrives",
    ),
    Mutation(
        "observe the order of a recorded backward",
        "core/reducer.py",
        "        if observes_order:",
        "        if self.awaits_order:",
        f"{_STATIC}::test_the_order_of_the_second_backward_decides_the_rebuild",
    ),
    Mutation(
        "return before the futures of buffer hooks are complete",
        "core/reducer.py",
        "        self.backward_end.wait_for_futures()\n",
        "",
        f"{_REDUCER}::test_the_end_of_backward_waits_for_the_futures_of_buffer_hooks",
    ),
    Mutation(
        "begin again in each gradient that enters",
        "core/reducer.py",
        "if self.phase is Phase.ARMED and not self.backward_end.is_awaited_here:",
        "if self.phase is Phase.ARMED:",
        f"{_MODE}::test_a_backward_that_enters_at_two_outputs_begins_once",
    ),
    Mutation(
        "search the outputs in every forward",
        "core/reducer.py",
        "is_first=is_first)",
        "is_first=True)",
        f"{_FIND_UNUSED}::test_what_only_one_of_two_forwards_uses_is_used_in_forward",
    ),
    Mutation(
        "never search the outputs",
        "core/reducer.py",
        "is_first=is_first)",
        "is_first=False)",
        f"{_FIND_UNUSED}::test_a_layer_used_beside_forward_is_an_error",
    ),
    Mutation(
        "end with a nested backward",
        "core/reducer.py",
        "            elif is_nested:\n",
        "            elif False:\n",
        f"{_REDUCER}::test_the_first_gradient_may_come_in_a_nested_backward",
    ),
    Mutation(
        "expect an end of a former backward",
        "core/reducer.py",
        "        self.backward_end.forget()\n        self.expectation.forward_begins()",
        "        self.expectation.forward_begins()",
        f"{_REDUCER}::test_after_an_interrupted_backward_others_may_stay_local",
    ),
    Mutation(
        "finalize what has not been launched",
        "core/reducer.py",
        "if self.current is None or not self.current.all_launched:\n                raise",
        "if self.current is None:\n                raise",
        f"{_REDUCER}::test_there_must_be_something_to_finalize",
    ),
    Mutation(
        "adopt a plan in backward",
        "core/reducer.py",
        "if self.phase not in (Phase.IDLE, Phase.ARMED):",
        "if False:",
        f"{_REDUCER}::test_another_plan_is_adopted_between_backwards_only",
    ),
    Mutation(
        "unpack before the sum is there",
        "core/reduction.py",
        "        self.work.wait()\n",
        "",
        "core/test_reduction.py::test_a_bucket_is_summed_where_it_lies_once_it_is_waited_for",
    ),
    Mutation(
        "send a NaN of weight zero",
        "core/reduction.py",
        "torch.zeros_like(bucket.wire) if self._weighs_nothing else bucket.wire",
        "bucket.wire",
        "core/test_reduction.py::test_a_rank_of_weight_zero_contributes_zeros_and_no_nan",
    ),
    Mutation(
        "divide what only a later torch divides",
        "core/reduction.py",
        "as_real=self._divides_copied",
        "as_real=False",
        "core/test_reduction.py::test_each_rank_divides_before_the_sum",
    ),
    Mutation(
        "reduce the bucket in place of the contents",
        "core/reduction.py",
        "        if contents is None:  #",
        "        if True:  #",
        "core/test_reduction.py::test_other_contents_leave_the_bucket_alone",
    ),
    Mutation(
        "take used parameters for unused",
        "expectation/find_unused.py",
        "if not autograd.will_be_reached(node)]",
        "if autograd.will_be_reached(node)]",
        f"{_FIND_UNUSED}::test_an_unused_parameter_keeps_its_gradient_as_it_is",
    ),
    Mutation(
        "skip buckets unasked",
        "expectation/find_unused.py",
        "return self._skips_buckets and all(",
        "return all(",
        f"{_FIND_UNUSED}::test_otherwise_they_are",
    ),
    Mutation(
        "believe a backward that has reached nothing",
        "expectation/find_unused.py",
        "    def forget_backward(self) -> None:\n        self._left_out = None",
        "    def forget_backward(self) -> None:\n        pass",
        f"{_FIND_UNUSED}::test_a_backward_that_reaches_no_parameter_says_nothing_of_the_next",
    ),
    Mutation(
        "count use in every later step",
        "expectation/find_unused.py",
        "        untouched = self.usage.finish_exchange()\n        self.usage.clear()",
        "        untouched = self.usage.finish_exchange()",
        f"{_FIND_UNUSED}::test_use_in_one_step_does_not_count_in_the_next",
    ),
    Mutation(
        "ask a penalty's backward for the loss's",
        "expectation/find_unused.py",
        "if self._output_nodes and self._left_out is None:",
        "if False:",
        f"{_FIND_UNUSED}::test_a_backward_that_does_not_come_in_at_the_outputs_settles_nothing",
    ),
    Mutation(
        "keep marks of an interrupted backward",
        "expectation/find_unused.py",
        "        self.usage.revert()",
        "        pass",
        f"{_FIND_UNUSED}::test_marks_of_an_interrupted_backward_do_not_count",
    ),
    Mutation(
        "count one hook for many",
        "expectation/static_graph.py",
        "self._hook_counts[param] += 1",
        "self._hook_counts[param] = 1",
        f"{_STATIC}::test_hooks_are_counted_in_the_first_backward_and_expected_in_all_others",
    ),
    Mutation(
        "count an interrupted recording",
        "expectation/static_graph.py",
        "            self.usage.revert()\n        if self.is_recording:",
        "            self.usage.revert()\n        if False:",
        f"{_STATIC}::test_what_an_interrupted_recording_has_counted_is_forgotten",
    ),
    Mutation(
        "touch unused parameters from the second step on",
        "expectation/static_graph.py",
        "        return self._untouched",
        "        return None",
        f"{_STATIC}::test_a_parameter_that_no_rank_has_used_keeps_its_gradient",
    ),
    Mutation(
        "trust the order of the recording",
        "expectation/static_graph.py",
        "        return self.usage is not None\n\n    def armed",
        "        return False\n\n    def armed",
        f"{_STATIC}::test_the_order_of_the_second_backward_decides_the_rebuild",
    ),
    Mutation(
        "exchange marks in every step",
        "expectation/static_graph.py",
        "            self._untouched = self.usage.finish_exchange()\n            self.usage = None",
        "            self._untouched = self.usage.finish_exchange()",
        f"{_STATIC}::test_a_layer_in_two_checkpoints_is_reduced_once_and_right",
    ),
    Mutation(
        "mark gradients that were thrown away",
        "expectation/usage_map.py",
        "int(mark and kept)",
        "int(mark)",
        "expectation/test_usage_map.py::test_a_mark_without_a_gradient_does_not_count",
    ),
    Mutation(
        "forget marks of an interrupted backward and all before",
        "expectation/usage_map.py",
        "self._marks = self._marks_before",
        "self._marks = [0] * len(self._marks)",
        f"{_FIND_UNUSED}::test_marks_from_before_an_interrupted_backward_count",
    ),
    Mutation(
        "show others what a shadow has accumulated",
        "expectation/usage_map.py",
        "nothing = UsageMap(self._params)",
        "nothing = self",
        f"{_FIND_UNUSED}::test_a_shadow_exchanges_marks_of_nothing",
    ),
    Mutation(
        "alias a gradient from before the backward",
        "acceleration/gradient_aliasing.py",
        "        if not self._owner.made_by_this_backward(param):\n            return False\n",
        "",
        f"{_ALIASING}::test_a_gradient_from_before_the_backward_is_copied",
    ),
    Mutation(
        "alias while a graph is created",
        "acceleration/gradient_aliasing.py",
        "if creates_graph or autograd",
        "if autograd",
        f"{_ALIASING}::test_nothing_is_aliased_while_backward_creates_a_graph",
    ),
    Mutation(
        "alias in a backward that was not seen to begin",
        "acceleration/gradient_aliasing.py",
        "if creates_graph or autograd.current_backward() != self._backward:",
        "if creates_graph:",
        f"{_ALIASING}::test_what_another_backward_began_with_does_not_count",
    ),
    Mutation(
        "alias gradients of other strides",
        "acceleration/gradient_aliasing.py",
        "or param.grad.stride() != view.stride() ",
        "",
        f"{_ALIASING}::test_a_gradient_of_other_strides_is_copied",
    ),
    Mutation(
        "alias what something else refers to",
        "acceleration/gradient_aliasing.py",
        " or not is_held_by_parameter_alone(param)",
        "",
        f"{_ALIASING}::test_a_gradient_that_something_else_refers_to_is_copied",
    ),
    Mutation(
        "count tensors but not references to them",
        "acceleration/gradient_aliasing.py",
        "return sys.getrefcount(grad), grad._use_count(), references_to_memory(grad)",
        "return 0, 0, references_to_memory(grad)",
        f"{_ALIASING}::test_a_gradient_that_something_else_refers_to_is_copied",
    ),
    Mutation(
        "alias at any address",
        "acceleration/gradient_aliasing.py",
        "_is_worth_it(view) and _is_aligned(view)",
        "_is_worth_it(view)",
        f"{_ALIASING}::test_a_gradient_at_an_odd_address_is_copied",
    ),
    Mutation(
        "alias small gradients",
        "acceleration/gradient_aliasing.py",
        "tensor.nbytes >= SMALLEST_BYTES and",
        "",
        f"{_ALIASING}::test_a_small_gradient_is_copied",
    ),
    Mutation(
        "take memory for free",
        "acceleration/gradient_aliasing.py",
        "return self._aliased and references_to_memory(self._flat) != self._references_of_ours",
        "return False",
        f"{_ALIASING}::test_memory_that_something_else_holds_is_replaced",
    ),
    Mutation(
        "take new memory after each aliasing",
        "acceleration/gradient_aliasing.py",
        "return self._aliased and references_to_memory(self._flat) != self._references_of_ours",
        "return self._aliased",
        f"{_ALIASING}::test_after_gradients_are_dropped_the_bucket_keeps_its_memory",
    ),
    Mutation(
        "make the view itself the gradient",
        "acceleration/gradient_aliasing.py",
        "param.grad = view_of(self._flat, self._slots[k], param)",
        "param.grad = view",
        f"{_ALIASING}::test_an_alias_is_a_tensor_of_its_own",
    ),
    Mutation(
        "weigh by the sum alone",
        "modes/divisor.py",
        "return total / weight if weight else math.inf",
        "return total if weight else math.inf",
        "modes/test_divisor.py::test_weights_are_summed_and_read_on_the_side_stream",
    ),
    Mutation(
        "weigh every later backward",
        "modes/divisor.py",
        "weights, self._weights = self._weights, None",
        "weights = self._weights",
        "modes/test_divisor.py::test_a_rank_of_weight_zero_divides_by_infinity",
    ),
    Mutation(
        "return before delayed parameters are averaged",
        "modes/delayed.py",
        "            self._under_way.wait()\n",
        "",
        "modes/test_delayed.py::test_the_end_of_backward_waits",
    ),
    Mutation(
        "sum delayed gradients",
        "modes/delayed.py",
        "            self._buffer.div_(self._transport.world_size)\n",
        "",
        "modes/test_delayed.py::test_the_end_of_backward_waits",
    ),
    Mutation(
        "let optimizers step on delayed gradients",
        "modes/delayed.py",
        "self._guard = OptimizerGuard(self._params, self._not_reduced)",
        "pass",
        "modes/test_delayed.py::test_gradients_without_a_sign_stop_the_optimizer",
    ),
    Mutation(
        "shadow without an order",
        "modes/join.py",
        "    if observes_order:",
        "    if False:",
        f"{_REDUCER}::test_a_shadow_makes_the_collectives_of_a_backward",
    ),
    Mutation(
        "shadow without marks",
        "modes/join.py",
        "    reducer.expectation.shadow(reducer.transport)\n",
        "",
        f"{_FIND_UNUSED}::test_a_shadow_exchanges_marks_of_nothing",
    ),
    Mutation(
        "sum in mixed precision",
        "modes/mixed_precision.py",
        "self._of_this_backward = self._divisor()",
        "self._of_this_backward = None",
        "core/test_reduction.py::test_a_sum_is_divided_afterwards_by_the_divisor_of_its_backward",
    ),
    Mutation(
        "leave gradients low",
        "modes/mixed_precision.py",
        "        _cast_grads(self._params.values())\n        self._is_lowered = self._awaits_backward = False",
        "        self._is_lowered = self._awaits_backward = False",
        "modes/test_mixed_precision.py::test_parameters_are_low_from_forward_to_the_end_of_backward_and_so_are_gradients",
    ),
    Mutation(
        "lose what was written to a low parameter",
        "modes/mixed_precision.py",
        "        if versions != self._versions:",
        "        if False:",
        "modes/test_mixed_precision.py::test_what_is_written_to_a_low_parameter_is_an_error",
    ),
    Mutation(
        "leave hooks behind in another dtype",
        "modes/mixed_precision.py",
        "            if has_lowered:",
        "            if False:",
        "modes/test_mixed_precision.py::test_parameters_are_low_from_forward_to_the_end_of_backward_and_so_are_gradients",
    ),
    Mutation(
        "step all parameters with each bucket",
        "modes/optimizer_overlap.py",
        '[param for param in group["params"] if param in chosen]',
        'group["params"]',
        "modes/test_optimizer_overlap.py::test_only_the_chosen_parameters_are_stepped",
    ),
    Mutation(
        "step twice",
        "modes/optimizer_overlap.py",
        "self._guard = optimizer.register_step_pre_hook(_refuse)",
        "self._guard = optimizer.register_step_pre_hook(lambda *_: None)",
        "modes/test_optimizer_overlap.py::test_the_loop_must_not_step_again",
    ),
    Mutation(
        "go on stepping in backward",
        "modes/optimizer_overlap.py",
        "            self._modes.remove(self)",
        "            pass",
        "modes/test_optimizer_overlap.py::test_each_bucket_is_stepped_when_it_is_unpacked",
    ),
    Mutation(
        "leave the context's gradients in .grad",
        "modes/rpc.py",
        "            self._params[param].grad = grad\n",
        "",
        "modes/test_rpc.py::test_gradients_of_the_context_are_shown_from_packing_to_the_end",
    ),
    Mutation(
        "keep averages from the context",
        "modes/rpc.py",
        "                tensor.copy_(average)",
        "                pass",
        "modes/test_rpc.py::test_gradients_of_the_context_are_shown_from_packing_to_the_end",
    ),
    Mutation(
        "show the context to an ordinary backward",
        "modes/rpc.py",
        " and self._params[param] in self._gradients()",
        "",
        "modes/test_rpc.py::test_an_ordinary_backward_is_left_alone",
    ),
    Mutation(
        "scale a sparse gradient in place",
        "modes/sparse.py",
        "grad.clone() if scaling.divisor is None else grad / scaling.divisor",
        "grad if scaling.divisor is None else grad.div_(scaling.divisor)",
        "modes/test_sparse.py::test_a_copy_of_the_gradient_is_divided_and_travels",
    ),
    Mutation(
        "send the last backward's rows",
        "modes/sparse.py",
        "        self.wire = _nothing(self.params[0])\n\n    def pack",
        "        pass\n\n    def pack",
        "modes/test_sparse.py::test_a_missing_gradient_travels_without_rows",
    ),
    Mutation(
        "write sparse averages where no rank has used the embedding",
        "modes/sparse.py",
        "if untouched and untouched[0]:",
        "if False:",
        "modes/test_sparse.py::test_the_average_becomes_the_gradient_or_is_copied_into_it",
    ),
    Mutation(
        "alias with find_unused_parameters",
        "strategies.py",
        " and copies and not self.options.finds_unused_each_pass",
        " and copies",
        "test_strategies.py::test_where_gradients_may_alias_the_bucket",
    ),
    Mutation(
        "alias although switched off",
        "strategies.py",
        "return acceleration_is_on() and copies",
        "return copies",
        "test_strategies.py::test_switched_off_buckets_do_not_alias_and_bits_are_the_same",
    ),
    Mutation(
        "make buckets that are to be lazy",
        "strategies.py",
        "        if not self.options.lazy_bucket_allocation:",
        "        if True:",
        "test_strategies.py::test_when_buckets_are_made",
    ),
    Mutation(
        "fire hooks of several devices at once",
        "core/autograd.py",
        "fire = self._fire_one_by_one if len({param.device for param in self.params}) > 1 else self._fire",
        "fire = self._fire",
        "core/test_autograd.py::test_hooks_of_several_devices_fire_one_by_one",
    ),
    Mutation(
        "begin anew at an output that was entered before",
        "core/autograd.py",
        "is_first = not reached",
        "is_first = True",
        "core/test_autograd.py::test_the_beginning_is_reported_for_each_output",
    ),
    Mutation(
        "await an end no more while it is called",
        "core/backward_end.py",
        "        try:\n            self._on_end(",
        "        try:\n            self._awaited.discard(backward)\n            self._on_end(",
        f"{_END}::test_an_end_is_awaited_until_it_has_been_called",
    ),
    Mutation(
        "reduce one of two backwards through one forward",
        "core/reducer.py",
        "if is_rest and is_over and self.expectation.ends_with_each_backward:",
        "if False:",
        f"{_FIND_UNUSED}::test_a_second_backward_through_other_outputs_is_reduced_too",
    ),
    Mutation(
        "reduce what comes again through one output",
        "core/backward_end.py",
        "self._on_begin(is_first and forward == self._last_awaited)",
        "self._on_begin(forward == self._last_awaited)",
        f"{_FIND_UNUSED}::test_a_second_backward_through_the_same_output_stays_local",
    ),
    Mutation(
        "leave modes open when the ranks change",
        "core/reducer.py",
        "        if self.current is not None:\n            self.current.close()",
        "        if False:\n            self.current.close()",
        f"{_MODE}::test_a_backward_after_which_the_ranks_change",
    ),
    Mutation(
        "count hooks that former ranks have seen",
        "expectation/static_graph.py",
        "            self.usage.clear()\n        if self.is_recording:",
        "            self.usage.clear()\n        if False:",
        f"{_STATIC}::test_hooks_of_an_unfinished_recording_are_not_counted_when_the_ranks_change",
    ),
)

MUTATIONS = (*_AGAINST_TORCH, *_BY_UNIT_TESTS)
