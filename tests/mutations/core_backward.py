"""Mutations of the core: hooks, one backward and its end, and what it expects."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_PASS = "core/test_backward_pass.py"
_END = "core/test_backward_end.py"
_MODE = "core/test_mode.py"
_READINESS = "core/test_readiness.py"
_ALIASING = "acceleration/test_gradient_aliasing.py"
_FIND_UNUSED = "expectation/test_find_unused.py"
_STATIC = "expectation/test_static_graph.py"

MUTATIONS = (
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
        "await an end no more while it is called",
        "core/backward_end.py",
        "        try:\n            self._on_end(",
        "        try:\n            self._awaited.discard(backward)\n            self._on_end(",
        f"{_END}::test_an_end_is_awaited_until_it_has_been_called",
    ),
    Mutation(
        "reduce what comes again through one output",
        "core/backward_end.py",
        "self._on_begin(is_first and forward == self._last_awaited)",
        "self._on_begin(forward == self._last_awaited)",
        f"{_FIND_UNUSED}::test_a_second_backward_through_the_same_output_stays_local",
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
        "expect each hook twice",
        "core/expectation.py",
        "return Expected([1] * len(self.params), [])",
        "return Expected([2] * len(self.params), [])",
        "core/test_expectation.py::test_every_hook_fires_once_and_no_parameter_is_unused",
    ),
    Mutation(
        "oblige modes to know every station",
        "core/mode.py",
        '"""The gradient of `param` is the first of this backward to arrive; none is packed yet."""',
        "raise NotImplementedError",
        f"{_MODE}::test_a_mode_may_leave_callbacks_out",
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
)
