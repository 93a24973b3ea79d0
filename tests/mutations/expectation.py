"""Mutations of `expectation/`: unused parameters and static graphs."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_FIND_UNUSED = "core/test_find_unused.py"
_STATIC = "core/test_static_graph.py"

MUTATIONS = (
    Mutation(
        "take used parameters for unused",
        "core/find_unused.py",
        "if not autograd.will_be_reached(node)]",
        "if autograd.will_be_reached(node)]",
        f"{_FIND_UNUSED}::test_an_unused_parameter_keeps_its_gradient_as_it_is",
    ),
    Mutation(
        "skip buckets unasked",
        "core/expectation.py",
        "return self.skips_buckets and all(",
        "return all(",
        f"{_FIND_UNUSED}::test_otherwise_they_are",
    ),
    Mutation(
        "believe a backward that has reached nothing",
        "core/find_unused.py",
        "    def backward_was_empty(self) -> None:\n        self._left_out = None",
        "    def backward_was_empty(self) -> None:\n        pass",
        f"{_FIND_UNUSED}::test_a_backward_that_reaches_no_parameter_says_nothing_of_the_next",
    ),
    Mutation(
        "count use in every later step",
        "core/find_unused.py",
        "        untouched = self.usage.finish_exchange()\n        self.usage.clear()",
        "        untouched = self.usage.finish_exchange()",
        f"{_FIND_UNUSED}::test_use_in_one_step_does_not_count_in_the_next",
    ),
    Mutation(
        "ask a penalty's backward for the loss's",
        "core/find_unused.py",
        "if self._output_nodes and self._left_out is None:",
        "if False:",
        f"{_FIND_UNUSED}::test_a_backward_that_does_not_come_in_at_the_outputs_settles_nothing",
    ),
    Mutation(
        "keep marks of an interrupted backward",
        "core/find_unused.py",
        "        self.usage.abandon()",
        "        pass",
        f"{_FIND_UNUSED}::test_marks_of_an_interrupted_backward_do_not_count",
    ),
    Mutation(
        "count one hook for many",
        "core/static_graph.py",
        "self._hook_counts[param] += 1",
        "self._hook_counts[param] = 1",
        f"{_STATIC}::test_hooks_are_counted_in_the_first_backward_and_expected_in_all_others",
    ),
    Mutation(
        "count an interrupted recording",
        "core/static_graph.py",
        "            self.usage.abandon()\n        if self.is_recording:",
        "            self.usage.abandon()\n        if False:",
        f"{_STATIC}::test_what_an_interrupted_recording_has_counted_is_forgotten",
    ),
    Mutation(
        "touch unused parameters from the second step on",
        "core/static_graph.py",
        "        return self._untouched",
        "        return None",
        f"{_STATIC}::test_a_parameter_that_no_rank_has_used_keeps_its_gradient",
    ),
    Mutation(
        "skip buckets of a recorded backward",
        "core/static_graph.py",
        "return self.usage is None and super().skips(bucket)",
        "return super().skips(bucket)",
        f"{_STATIC}::test_buckets_of_unused_parameters_are_reduced_unless_asked_otherwise",
    ),
    Mutation(
        "trust the order of the recording",
        "core/static_graph.py",
        "        return self.usage is not None\n\n    def armed",
        "        return False\n\n    def armed",
        f"{_STATIC}::test_the_order_of_the_second_backward_decides_the_rebuild",
    ),
    Mutation(
        "exchange marks in every step",
        "core/static_graph.py",
        "            self._untouched = self.usage.finish_exchange()\n            self.usage = None",
        "            self._untouched = self.usage.finish_exchange()",
        f"{_STATIC}::test_a_layer_in_two_checkpoints_is_reduced_once_and_right",
    ),
    Mutation(
        "count hooks that former ranks have seen",
        "core/static_graph.py",
        "            self.usage.clear()\n        if self.is_recording:",
        "            self.usage.clear()\n        if False:",
        f"{_STATIC}::test_hooks_of_an_unfinished_recording_are_not_counted_when_the_ranks_change",
    ),
    Mutation(
        "mark gradients that were thrown away",
        "core/usage_map.py",
        "int(mark and kept)",
        "int(mark)",
        "core/test_usage_map.py::test_a_mark_without_a_gradient_does_not_count",
    ),
    Mutation(
        "forget marks of an interrupted backward and all before",
        "core/usage_map.py",
        "self._marks = self._marks_before",
        "self._marks = [0] * len(self._marks)",
        f"{_FIND_UNUSED}::test_marks_from_before_an_interrupted_backward_count",
    ),
    Mutation(
        "show others what a shadow has accumulated",
        "core/usage_map.py",
        "nothing = UsageMap(self._params)",
        "nothing = self",
        f"{_FIND_UNUSED}::test_a_shadow_exchanges_marks_of_nothing",
    ),
)
