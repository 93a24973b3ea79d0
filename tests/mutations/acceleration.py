"""Mutations of `acceleration/`: gradients that alias the bucket."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_ALIASING = "core/test_gradient_aliasing.py"

MUTATIONS = (
    Mutation(
        "alias a gradient from before the backward",
        "core/gradient_aliasing.py",
        "        if not self._owner.made_by_this_backward(param):\n            return False\n",
        "",
        f"{_ALIASING}::test_a_gradient_from_before_the_backward_is_copied",
    ),
    Mutation(
        "alias while a graph is created",
        "core/gradient_aliasing.py",
        "if creates_graph or autograd",
        "if autograd",
        f"{_ALIASING}::test_nothing_is_aliased_while_backward_creates_a_graph",
    ),
    Mutation(
        "alias in a backward that was not seen to begin",
        "core/gradient_aliasing.py",
        "if creates_graph or autograd.current_backward() != self._backward:",
        "if creates_graph:",
        f"{_ALIASING}::test_what_another_backward_began_with_does_not_count",
    ),
    Mutation(
        "alias gradients of other strides",
        "core/gradient_aliasing.py",
        "or param.grad.stride() != view.stride() ",
        "",
        f"{_ALIASING}::test_a_gradient_of_other_strides_is_copied",
    ),
    Mutation(
        "alias what something else refers to",
        "core/gradient_aliasing.py",
        " or not is_held_by_parameter_alone(param)",
        "",
        f"{_ALIASING}::test_a_gradient_that_something_else_refers_to_is_copied",
    ),
    Mutation(
        "count tensors but not references to them",
        "core/gradient_aliasing.py",
        "return sys.getrefcount(grad), grad._use_count(), references_to_memory(grad)",
        "return 0, 0, references_to_memory(grad)",
        f"{_ALIASING}::test_a_gradient_that_something_else_refers_to_is_copied",
    ),
    Mutation(
        "alias at any address",
        "core/gradient_aliasing.py",
        "_is_worth_it(view) and _is_aligned(view)",
        "_is_worth_it(view)",
        f"{_ALIASING}::test_a_gradient_at_an_odd_address_is_copied",
    ),
    Mutation(
        "alias small gradients",
        "core/gradient_aliasing.py",
        "tensor.nbytes >= SMALLEST_BYTES and",
        "",
        f"{_ALIASING}::test_a_small_gradient_is_copied",
    ),
    Mutation(
        "take memory for free",
        "core/gradient_aliasing.py",
        "return self._aliased and references_to_memory(self._flat) != self._references_of_ours",
        "return False",
        f"{_ALIASING}::test_memory_that_something_else_holds_is_replaced",
    ),
    Mutation(
        "take new memory after each aliasing",
        "core/gradient_aliasing.py",
        "return self._aliased and references_to_memory(self._flat) != self._references_of_ours",
        "return self._aliased",
        f"{_ALIASING}::test_after_gradients_are_dropped_the_bucket_keeps_its_memory",
    ),
    Mutation(
        "make the view itself the gradient",
        "core/gradient_aliasing.py",
        "param.grad = view_of(self._flat, self._slots[k], view)",
        "param.grad = view",
        f"{_ALIASING}::test_an_alias_is_a_tensor_of_its_own",
    ),
)
