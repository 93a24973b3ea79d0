"""Mutations of the core: the reducer, the reduction of a bucket, events and errors."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_MISSING = "watchdog/test_missing_gradients.py"
_MODE = "core/test_mode.py"
_REDUCER = "core/test_reducer.py"
_FIND_UNUSED = "expectation/test_find_unused.py"
_STATIC = "expectation/test_static_graph.py"

MUTATIONS = (
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
        "give a static graph the words of another one",
        "core/errors.py",
        "if static_graph:",
        "if not static_graph:",
        f"{_MISSING}::test_ready_twice_names_the_parameter",
    ),
    Mutation(
        "bind the slow hook in every phase",
        "core/reducer.py",
        "if self.current is not None and self.phase is Phase.ACCUMULATING and not self.expectation.is_recording:",
        "if False:",
        f"{_REDUCER}::test_the_events_of_a_step",
    ),
    Mutation(
        "count hooks in a backward that is recorded",
        "core/reducer.py",
        "if self.current is not None and self.phase is Phase.ACCUMULATING and not self.expectation.is_recording:",
        "if self.current is not None and self.phase is Phase.ACCUMULATING:",
        f"{_STATIC}::test_a_layer_in_two_checkpoints_is_reduced_once_and_right",
    ),
    Mutation(
        "mark no use",
        "core/reducer.py",
        "self.hooks.handler = handler if opens_pass else self.expectation.wrap_hook(handler)",
        "self.hooks.handler = handler",
        f"{_FIND_UNUSED}::test_use_under_no_sync_counts",
    ),
    Mutation(
        "go on with a static graph that has changed",
        "core/reducer.py",
        "            self._enter(Phase.INCOMPLETE)  # what was recorded",
        "            pass  # what was recorded",
        f"{_REDUCER}::test_after_that_error_a_static_graph_does_not_go_on",
    ),
    Mutation(
        "keep what an interrupted backward has noted",
        "core/backward_pass.py",
        "        self.expectation.abandon()\n",
        "",
        "core/test_expectation.py::test_it_abandons_a_backward_that_an_exception_has_ended",
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
        "        self.backward_end.reset()\n        self.expectation.forward_begins()",
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
        "reduce one of two backwards through one forward",
        "core/reducer.py",
        "if is_rest and is_over and self.expectation.ends_with_each_backward:",
        "if False:",
        f"{_FIND_UNUSED}::test_a_second_backward_through_other_outputs_is_reduced_too",
    ),
    Mutation(
        "leave modes open when the ranks change",
        "core/reducer.py",
        "        if self.current is not None:\n            self.current.close()",
        "        if False:\n            self.current.close()",
        f"{_MODE}::test_a_backward_after_which_the_ranks_change",
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
)
