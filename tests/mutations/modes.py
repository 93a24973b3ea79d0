"""Mutations of `modes/`: options that change the step."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_REDUCER = "core/test_reducer.py"
_FIND_UNUSED = "core/test_find_unused.py"

MUTATIONS = (
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
        "self._guard.put_up()",
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
        '[param for param in whole["params"] if param in chosen]',
        'whole["params"]',
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
        "overlap an optimizer of parameters without a bucket",
        "modes/optimizer_overlap.py",
        "if param.requires_grad and id(param) not in self._params]",
        "if False]",
        "modes/test_optimizer_overlap.py::test_a_parameter_outside_of_the_wrapper_is_refused",
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
)
