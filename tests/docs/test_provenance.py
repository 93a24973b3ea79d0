"""Correct schemes have no violation, and each classic bug has its own."""

from __future__ import annotations

import pytest

from docs.learning import provenance
from docs.learning.provenance import (
    BUGS,
    CORRECT,
    Replica,
    all_reduce_sum,
    run_scheme,
    violations,
)

PARAMETERS = ("w1", "b1", "w2", "b2")


def by_name(scheme) -> str:
    return scheme.__name__


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("scheme", CORRECT, ids=by_name)
def test_correct_schemes_are_proven(scheme, ranks, batches):
    assert run_scheme(scheme, ranks, batches, PARAMETERS) == []


@pytest.mark.parametrize(
    ("scheme", "fault"),
    [
        (provenance.sum_every_micro_batch, "rank 0, `w1`: rank 0's batch 0 of `w1` has weight 1, not 1/3"),
        (provenance.reduce_twice, "rank 2, `w1`: rank 1's batch 1 of `w1` has weight 1, not 1/3"),
        (provenance.forget_a_rank, "rank 0, `b1`: rank 2's batch 0 of `b1` has weight 0, not 1/3"),
        (provenance.forget_a_bucket, "rank 1, `b2`: rank 0's batch 0 of `b2` has weight 0, not 1/3"),
        (provenance.forget_the_division, "rank 1, `w2`: rank 0's batch 0 of `w2` has weight 1, not 1/3"),
        (
            provenance.average_the_last_backward_only,
            "rank 0, `w1`: rank 1's batch 0 of `w1` has weight 0, not 1/3",
        ),
        (provenance.launch_in_readiness_order, "rank 0, `w1`: rank 2's batch 0 of `b2` has weight 1/3, not 0"),
    ],
)
def test_each_bug_has_its_violation(scheme, fault):
    assert fault in run_scheme(scheme, 3, 2, PARAMETERS)


def test_a_gradient_without_any_reduction_is_no_average():
    replicas = [Replica(0, ["w"]), Replica(1, ["w"])]
    for replica in replicas:
        replica.backward(0)
    assert violations(replicas, 1) == [
        "rank 0, `w`: rank 0's batch 0 of `w` has weight 1, not 1/2",
        "rank 0, `w`: rank 1's batch 0 of `w` has weight 0, not 1/2",
        "rank 1, `w`: rank 0's batch 0 of `w` has weight 0, not 1/2",
        "rank 1, `w`: rank 1's batch 0 of `w` has weight 1, not 1/2",
    ]


@pytest.mark.parametrize("launches", [[[("w",)], []], [[("w", "b")], [("w",)]]])
def test_messages_that_do_not_pair_are_an_error(launches):
    with pytest.raises(ValueError):
        all_reduce_sum([Replica(0, ["w", "b"]), Replica(1, ["w", "b"])], launches)


def test_the_command_gives_every_scheme_its_verdict(capsys):
    provenance.main()
    out = capsys.readouterr().out
    assert out.count("proven") == len(CORRECT)
    assert out.count(" faults ") >= len(BUGS)
