"""Mutations of `strategies.py`: which options select which strategy."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS = (
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
        "            is_lazy=self.options.lazy_bucket_allocation,",
        "            is_lazy=False,",
        "test_strategies.py::test_when_buckets_are_made",
    ),
)
