"""The plan with the least exposed communication, against all plans there are."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp.core.plan import ParamSpec
from minddp.tools.forecast.link import Link
from minddp.tools.forecast.planner import least_exposed, plan_buckets
from minddp.tools.forecast.step_model import Message, finish_s

LINK = Link(latency_s=1e-3, bytes_per_s=1e6)
CPU = torch.device("cpu")

_gradients = st.lists(
    st.tuples(st.integers(1, 5000), st.floats(0, 5e-3)).map(lambda drawn: Message(*drawn)), min_size=1, max_size=8
).map(lambda gradients: sorted(gradients, key=lambda gradient: gradient.ready_s))
_shares = st.sampled_from([0.0, 1.0]) | st.floats(0, 1)
_links = st.builds(Link, st.floats(0, 2e-3), st.floats(1e5, 1e8), _shares)
_tails = st.just(0.0) | st.floats(0, 10e-3)  # how long backward computes in all, where that says more than the last


def all_divisions(n: int) -> list[list[int]]:
    """Every way to divide n gradients into buckets, as where each bucket ends."""
    return [
        [*(place for place, is_end in enumerate(flags, 1) if is_end), n]
        for flags in itertools.product([False, True], repeat=n - 1)
    ]


def finish_by(gradients: list[Message], ends: list[int], link: Link, computed_s: float = 0.0) -> float:
    """When the model ends with the buckets that end at `ends`."""
    groups = [gradients[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    messages = [Message(sum(g.nbytes for g in group), max(g.ready_s for g in group)) for group in groups]
    return finish_s(messages, link, computed_s)


def second_by_second(gradients: list[Message], ends: list[int], link: Link, computed_s: float) -> float:
    """The same model as a simulation: the time, and how much backward has computed."""
    now = computed = 0.0
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        until_ready = max(0.0, gradients[end - 1].ready_s - computed)
        message_s = link.seconds(sum(gradient.nbytes for gradient in gradients[start:end]))
        now += until_ready + message_s
        computed += until_ready + (1 - link.taken) * message_s
    return now + max(0.0, computed_s - computed)


@settings(max_examples=200, deadline=None)
@given(_gradients, _links, _tails)
def test_no_other_division_ends_earlier(gradients: list[Message], link: Link, computed_s: float) -> None:
    """Whatever share the messages take from backward."""
    best = min(second_by_second(gradients, ends, link, computed_s) for ends in all_divisions(len(gradients)))
    ends = least_exposed(gradients, link, computed_s)
    assert finish_by(gradients, ends, link, computed_s) == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(_gradients, _links, _tails)
def test_the_closed_form_gives_the_end_of_the_simulation(
    gradients: list[Message], link: Link, computed_s: float
) -> None:
    for ends in all_divisions(len(gradients)):
        expected = second_by_second(gradients, ends, link, computed_s)
        assert finish_by(gradients, ends, link, computed_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("taken", "apart_s", "together_s"),
    [
        # Ready after 0 and 4 ms, and backward goes on to 5 ms. Apart: two messages of 3 ms, the first one hidden.
        (0.0, 7e-3, 4e-3 + 5e-3),
        # While the first one travels, backward computes half of 3 ms. The second leaves at 3 + 2.5 ms, and in the
        # 3 ms that it takes backward computes 1.5, more than what was left: that comes to 8.5 ms.
        (0.5, 8.5e-3, 4e-3 + 5e-3),
        # Nothing is hidden: 5 ms of backward and all messages, in two or in one.
        (1.0, 5e-3 + 6e-3, 5e-3 + 5e-3),
    ],
)
def test_what_messages_take_from_backward(taken: float, apart_s: float, together_s: float) -> None:
    gradients, link = [Message(2000, 0.0), Message(2000, 4e-3)], dataclasses.replace(LINK, taken=taken)
    assert finish_by(gradients, [1, 2], link, computed_s=5e-3) == pytest.approx(apart_s)
    assert finish_by(gradients, [2], link, computed_s=5e-3) == pytest.approx(together_s)
    better = [1, 2] if apart_s < together_s else [2]
    assert least_exposed(gradients, link, computed_s=5e-3) == better


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


def test_the_plan_of_each_kind_considers_what_messages_take_from_backward() -> None:
    """And when backward ends: either can make one bucket of each kind, though apart more of it would be hidden."""
    specs = [ParamSpec(f"p{i}", 500, [torch.float32, torch.float64][i % 2], CPU) for i in range(6)]
    ready = [10e-3 * turn for turn in range(6)]
    assert len(plan_buckets(specs, ready, LINK, 50e-3).buckets) > 2
    assert len(plan_buckets(specs, ready, LINK, 99e-3).buckets) == 2, "whatever they do is hidden"
    assert len(plan_buckets(specs, ready, dataclasses.replace(LINK, taken=1.0), 50e-3).buckets) == 2
