"""Tree, doubling, halving and hierarchical: the sum for any number of ranks, and costs counted from the steps."""

from __future__ import annotations

from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.learning.collectives import Cost, cost
from reference import collectives
from reference.collectives import algorithms, hierarchical
from reference.ring import carry_out

NAMES = sorted(algorithms(1))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(hosts=st.integers(1, 4), per_host=st.integers(1, 4), size=st.integers(0, 40), seed=st.integers(0, 1000))
def test_every_rank_gets_the_same_sum_and_inputs_are_left_alone(name, hosts, per_host, size, seed):
    n = hosts * per_host
    inputs = [*np.random.default_rng(seed).integers(-1000, 1000, (n, size))]
    before = [array.copy() for array in inputs]
    plan = algorithms(per_host)[name](n)
    for result in carry_out(plan, inputs).results:
        np.testing.assert_array_equal(result, np.sum(before, axis=0))
    np.testing.assert_array_equal(inputs, before)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=20)
@given(hosts=st.integers(1, 4), per_host=st.integers(1, 4), seed=st.integers(0, 1000))
def test_all_ranks_hold_the_same_bits_though_floats_round(name, hosts, per_host, seed):
    n = hosts * per_host
    inputs = [*np.random.default_rng(seed).standard_normal((n, 17)).astype(np.float32)]
    plan = algorithms(per_host)[name](n)
    assert len({result.tobytes() for result in carry_out(plan, inputs).results}) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 12])
def test_no_rank_sends_or_receives_two_messages_in_a_step(name, n):
    per_host = 2 if n % 2 == 0 else 1
    for step in algorithms(per_host)[name](n).steps:
        for end in ("sender", "receiver"):
            ranks = [getattr(transfer, end) for transfer in step.transfers]
            assert len(ranks) == len(set(ranks))


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_the_costs_of_a_power_of_two_are_those_of_the_docstring(n):
    log = int(log2(n))
    expected = {
        "ring": (2 * (n - 1), 2 * (n - 1) / n),
        "tree": (2 * log, 2 * log),
        "doubling": (log, log),
        "halving": (2 * log, 2 * (n - 1) / n),
    }
    for name, (latencies, shares) in expected.items():
        assert cost(algorithms(1)[name](n), per_host=n) == Cost(latencies, shares, 0, 0), name


@pytest.mark.parametrize("n", [3, 5, 6, 7, 12])
def test_ranks_beyond_a_power_of_two_cost_two_steps_of_the_whole_buffer(n):
    even = 2 ** int(log2(n))
    for name in ("halving", "doubling"):
        inner = cost(algorithms(1)[name](even), per_host=n)
        outer = cost(algorithms(1)[name](n), per_host=n)
        assert outer == Cost(inner.local_latencies + 2, inner.local_shares + 2, 0, 0)
    assert cost(algorithms(1)["tree"](n), per_host=n).local_latencies == 2 * ceil(log2(n))


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 4), (4, 2), (3, 3)])
def test_hierarchical_sends_over_the_network_what_a_ring_of_hosts_sends(hosts, per_host):
    n = hosts * per_host
    counted = cost(hierarchical(n, per_host), per_host)
    assert (counted.network_latencies, counted.network_shares) == (
        2 * (hosts - 1),
        pytest.approx(2 * (hosts - 1) / hosts),
    )
    assert (counted.local_latencies, counted.local_shares) == (
        2 * (per_host - 1),
        pytest.approx(2 * (per_host - 1) / per_host),
    )
    ring = cost(algorithms(per_host)["ring"](n), per_host)
    assert (ring.network_latencies, ring.local_latencies) == (2 * (n - 1), 0)


def test_hosts_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match="7 ranks are not a whole number of hosts with 2"):
        hierarchical(7, 2)


def test_the_command_shows_steps_and_costs(capsys):
    collectives.main(algorithm="tree", ranks=4, per_host=2)
    out = capsys.readouterr().out
    assert "step 1, reduce\n1 → 0: chunk 0   3 → 2: chunk 0" in out
    assert "4 steps; to sum 8 bytes a rank sent 16 bytes at most." in out


@pytest.mark.parametrize("arguments", [{"ranks": 1}, {"ranks": 17}, {"per_host": 3}, {"algorithm": "star"}])
def test_the_command_refuses_what_it_cannot_show(arguments):
    with pytest.raises(SystemExit, match="choose one of ring, tree"):
        collectives.main(**arguments)
