"""Play one scenario again and print what differs: python -m tests.parity.replay "Scenario(...)"."""

from __future__ import annotations

import sys

from tests.parity import scenario as vocabulary
from tests.parity.scenario import Scenario
from tests.parity.test_parity import Differs, play
from tests.ranks import RankPool


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
