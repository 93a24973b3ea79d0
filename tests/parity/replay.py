"""Play one scenario on all ranks; as a command, once more: python -m tests.parity.replay "Scenario(...)"."""

from __future__ import annotations

import os
import sys

from tests.parity import scenario as vocabulary
from tests.parity.runner import SUBJECT, run_scenario
from tests.parity.scenario import Scenario
from tests.ranks import RankFailure, RankPool

TIME_LIMIT_S = 100.0


class Differs(AssertionError):
    """Minddp did something else than torch."""


def play(scenario: Scenario, pool: RankPool) -> str | None:
    """Play one scenario on all ranks; the error by which torch, and minddp with it, ended it, if any.

    Raises:
        Differs: on some rank the two differed, or a rank hung or died.
    """
    subject = os.environ.get("MINDDP_PARITY_SUBJECT", SUBJECT)
    try:
        reports = pool.run(run_scenario, scenario, subject, timeout_s=TIME_LIMIT_S)
    except RankFailure as failure:
        raise Differs(f"{failure}\n{_how_to_replay(scenario)}") from None
    mismatches = [line for report in reports for line in report.mismatches]
    if mismatches:
        raise Differs("\n".join([*mismatches, _how_to_replay(scenario)]))
    if reports[0].findings and all(report.states == reports[0].states for report in reports):
        alarms = [f"a false alarm: {text}" for text in reports[0].findings]
        raise Differs("\n".join([*alarms, _how_to_replay(scenario)]))
    return reports[0].ended_by


def _how_to_replay(scenario: Scenario) -> str:
    return f'replay with:\npython -m tests.parity.replay "{scenario!r}"'


def main() -> int:
    """Exit status 0 where nothing differs, 1 where something does, 2 without a scenario."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    scenario = eval(sys.argv[1], vars(vocabulary))
    assert isinstance(scenario, Scenario)
    pool = RankPool(scenario.world_size)
    try:
        ended_by = play(scenario, pool)
    except Differs as difference:
        print(difference)
        return 1
    finally:
        pool.kill()
    print(f"no difference; both ended by {ended_by}" if ended_by else "no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
