"""What is made of the time in which ranks wanted a core and had none."""

from __future__ import annotations

from minddp.doctor.findings import Verdict
from minddp.doctor.verdicts.load import is_busy, judge_load
from tests.doctor.made_up import job, rank, rank_on, told, verdicts

ALONE = job(rank(0), rank(1))
CROWDED = job(*(rank(number, machine={"threads": 2}) for number in range(2)))
TWO_HOSTS = job(rank_on(0, "a", "10.0.0.1"), rank_on(1, "b", "10.0.0.2"), rank_on(2, "b", "10.0.0.3"))


def test_a_quiet_machine() -> None:
    (found,) = judge_load(ALONE, {0: 0.01, 1: 0.03})
    assert found.verdict is Verdict.FINE
    assert found.fact == "Ranks had a core for at least 97% of the time that they wanted one."
    assert not is_busy({0: 0.01, 1: 0.03})


def test_something_else_takes_the_cores() -> None:
    found = judge_load(ALONE, {0: 0.48, 1: 0.52})
    assert verdicts(found) == [Verdict.NOTE]
    assert "Ranks 0, 1 on a had no core for up to 52% of the time that they wanted one: something else" in told(
        found
    )
    assert is_busy({0: 0.48, 1: 0.52})


def test_ranks_that_take_each_others_cores() -> None:
    assert "they take turns, see cores" in told(judge_load(CROWDED, {0: 0.5, 1: 0.5}))


def test_one_busy_host_of_two() -> None:
    found = judge_load(TWO_HOSTS, {0: 0.0, 1: 0.4, 2: 0.3})
    assert verdicts(found) == [Verdict.NOTE]
    assert found[0].fact.startswith("Ranks 1, 2 on b had no core for up to 40%")
    assert is_busy({0: 0.0, 1: 0.4, 2: 0.3})


def test_each_busy_host_has_a_finding() -> None:
    found = judge_load(TWO_HOSTS, {0: 0.5, 1: 0.4, 2: 0.3})
    assert verdicts(found) == [Verdict.NOTE] * 2
    assert "Ranks 1, 2 on b had no core for up to 40%" in told(found)
    assert "Rank 0 on a had no core for up to 50%" in told(found)


def test_where_the_system_does_not_tell_nothing_is_said() -> None:
    assert judge_load(ALONE, {0: None, 1: None}) == []
    assert not is_busy({0: None, 1: None})
