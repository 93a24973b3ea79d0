"""Breaks of elastic training that only a training on several ranks notices; see `test_survival_breaks.py`."""

from __future__ import annotations

from dataclasses import dataclass

from tests.mutants.replaced import Break


@dataclass(frozen=True)
class SurvivalBreak(Break):
    """`test` is the test of `test_survival.py` whose training fails."""

    test: str


BREAKS = (
    SurvivalBreak(
        "the verdict again is ignored",
        "tools/elastic/session.py",
        'if verdict == "again":',
        "if False:",
        "test_a_connection_is_lost_and_no_rank",
    ),
    SurvivalBreak(
        "the first vote decides",
        "tools/elastic/session.py",
        '/{term.step}", 1) == len(members):',
        '/{term.step}", 1) >= 1:',
        "test_a_connection_is_lost_and_no_rank",
    ),
    SurvivalBreak(
        "buffers stay as the broken step has left them",
        "tools/elastic/logical_ranks.py",
        "            buffers, earlier = self._saved\n            self._overwrite_buffers(buffers)\n",
        "            buffers, earlier = self._saved\n",
        "test_a_rank_dies_in_a_step[backward]",
    ),
    SurvivalBreak(
        "no waits are ended",
        "tools/elastic/heartbeat.py",
        "                term.call_off(self._membership)",
        "                pass",
        "test_a_rank_dies_in_a_step[vote]",
    ),
    SurvivalBreak(
        "attempts to connect are counted",
        "tools/elastic/session.py",
        "        dist.distributed_c10d._world.group_count = 0",
        "        pass",
        "test_an_attempt_to_connect_has_failed_on_one_rank_only",
    ),
    SurvivalBreak(
        "a rank that comes late ends the others",
        "tools/elastic/session.py",
        '            raise RankLost(f"Not all',
        '            raise RuntimeError(f"Not all',
        "test_a_rank_that_connects_too_late_is_waited_for_again",
    ),
    SurvivalBreak(
        "a new rank keeps its own step",
        "tools/elastic/session.py",
        "        self._ranks.step = generation.step\n",
        "",
        "test_what_has_died_is_started_again_and_gets_its_state_from_the_living",
    ),
    SurvivalBreak(
        "ranks keep the buckets that they have",
        "tools/wrapper.py",
        "        ddp._reducer.store.begin_anew(ddp._transport.allocate)",
        "        pass",
        "test_what_has_died_is_started_again_and_gets_its_state_from_the_living",
    ),
    SurvivalBreak(
        "a silent member counts as alive",
        "tools/elastic/heartbeat.py",
        "if self._last_change[member][1] < now - self._silent_limit_s",
        "if False",
        "test_a_stopped_process_counts_as_lost_and_joins_again_when_it_goes_on",
    ),
)
