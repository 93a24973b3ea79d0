"""The plan with the least exposed communication, against all plans there are."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp.plan import ParamSpec
from minddp.tune import Gradient, Link, least_exposed, plan_buckets, simulate

LINK = Link(latency_s=1e-3, bytes_per_s=1e6)
CPU = torch.device("cpu")

_gradients = st.lists(
    st.tuples(st.integers(1, 5000), st.floats(0, 5e-3)).map(lambda drawn: Gradient(*drawn)), min_size=1, max_size=8
).map(lambda gradients: sorted(gradients, key=lambda gradient: gradient.ready_s))
_links = st.builds(Link, st.floats(0, 2e-3), st.floats(1e5, 1e8))


def all_cuts(n: int) -> list[list[int]]:
    """Every way to cut n gradients into buckets, as where each bucket ends."""
    return [
        [*(place for place, is_cut in enumerate(cuts, 1) if is_cut), n]
        for cuts in itertools.product([False, True], repeat=n - 1)
    ]


@settings(max_examples=200, deadline=None)
@given(_gradients, _links)
def test_no_other_cut_is_over_sooner(gradients: list[Gradient], link: Link) -> None:
    best = min(simulate(gradients, ends, link) for ends in all_cuts(len(gradients)))
    assert simulate(gradients, least_exposed(gradients, link), link) == pytest.approx(best)


def test_a_latency_that_nothing_hides_makes_one_bucket() -> None:
    """All gradients are ready at once: a second message could only cost its latency."""
    assert least_exposed([Gradient(100, 0.0)] * 6, LINK) == [6]


def test_without_latency_every_gradient_leaves_when_it_is_ready() -> None:
    gradients = [Gradient(100, 1e-3 * turn) for turn in range(4)]
    assert simulate(gradients, least_exposed(gradients, Link(0.0, 1e6)), Link(0.0, 1e6)) == pytest.approx(3.1e-3)


def test_the_last_gradients_do_not_wait_for_company() -> None:
    """Backward hides the first messages; what is left over is one small one."""
    gradients = [Gradient(4000, 10e-3 * turn) for turn in range(5)]
    ends = least_exposed(gradients, LINK)
    assert ends[-2:] == [4, 5]


def test_messages_travel_one_at_a_time() -> None:
    gradients = [Gradient(2000, 0.0), Gradient(2000, 1e-3)]
    assert simulate(gradients, [1, 2], LINK) == pytest.approx(3e-3 + 3e-3)
    assert simulate(gradients, [2], LINK) == pytest.approx(1e-3 + 5e-3)


def test_kinds_are_planned_apart_and_leave_as_they_are_ready() -> None:
    specs = [
        ParamSpec("a", 1000, torch.float32, CPU),
        ParamSpec("b", 1000, torch.bfloat16, CPU),
        ParamSpec("c", 1000, torch.float32, CPU),
        ParamSpec("d", 10, torch.float32, CPU, sparse=True),
    ]
    plan = plan_buckets(specs, [3e-3, 2e-3, 1e-3, 0.0], Link(1.0, 1e6))
    assert [plan.names(bucket.index) for bucket in plan.buckets] == [["d"], ["b"], ["c", "a"]]
    assert [bucket.cap_bytes for bucket in plan.buckets] == [40, 2000, 8000]


def test_a_link_is_found_from_its_messages() -> None:
    link = Link.fitted([(nbytes, LINK.seconds(nbytes)) for nbytes in (1000, 10_000, 1_000_000)])
    assert link.latency_s == pytest.approx(LINK.latency_s)
    assert link.bytes_per_s == pytest.approx(LINK.bytes_per_s)


def test_one_size_says_nothing_of_a_bandwidth() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        Link.fitted([(1000, 1.0), (1000, 2.0)])


def test_a_slowed_link_takes_as_much_longer() -> None:
    assert LINK.slowed(3.0).seconds(5000) == pytest.approx(3 * LINK.seconds(5000))
