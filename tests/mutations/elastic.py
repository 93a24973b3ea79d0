"""Mutations of `tools/elastic/`: decisions, and what is put back.

The last ones are noticed by ranks in processes of their own: see tests/tools/elastic/test_survival_mutations.py.
"""

from __future__ import annotations

from tests.mutations.mutation import Mutation

SURVIVAL = "tools/elastic/test_survival.py"
MEMBERSHIP = "tools/elastic/test_membership.py"

MUTATIONS = (
    Mutation(
        "the source is the first member",
        "tools/elastic/membership.py",
        "source = max(members, key=lambda member: steps[member])",
        "source = members[0]",
        f"{MEMBERSHIP}::test_survivors_keep_their_order_and_the_furthest_member_is_the_source",
    ),
    Mutation(
        "the last proposal wins",
        "tools/elastic/membership.py",
        'self.store.compare_set(f"generation/{proposal.number}", "", proposal.to_json())',
        'self.store.set(f"generation/{proposal.number}", proposal.to_json()) or proposal.to_json()',
        f"{MEMBERSHIP}::test_one_proposal_wins_and_all_read_it",
    ),
    Mutation(
        "all sockets are shut down",
        "tools/elastic/connections.py",
        "if inode not in self._before if self._inodes is None else inode in self._inodes:",
        "if True:",
        f"{MEMBERSHIP}::test_hanging_up_ends_a_wait_and_spares_other_sockets",
    ),
    Mutation(
        "a zombie counts as alive",
        "platform/host.py",
        'not in ("Z", "X")',
        'not in ("X",)',
        f"{MEMBERSHIP}::test_a_process_of_this_host_that_is_gone_is_known_and_one_elsewhere_is_not",
    ),
)

IN_RANKS = (
    Mutation(
        "the verdict again is ignored",
        "tools/elastic/session.py",
        'if said == "again":',
        "if False:",
        f"{SURVIVAL}::test_a_connection_is_lost_and_no_rank",
    ),
    Mutation(
        "the first vote decides",
        "tools/elastic/session.py",
        '/{term.step}", 1) == len(members):',
        '/{term.step}", 1) >= 1:',
        f"{SURVIVAL}::test_a_connection_is_lost_and_no_rank",
    ),
    Mutation(
        "buffers stay as the broken step has left them",
        "tools/elastic/logical_ranks.py",
        "            buffers, earlier = self._before_step\n            self._overwrite_buffers(buffers)\n",
        "            buffers, earlier = self._before_step\n",
        f"{SURVIVAL}::test_a_rank_dies_in_a_step[backward]",
    ),
    Mutation(
        "no waits are ended",
        "tools/elastic/heartbeat.py",
        "            term.call_off(self._membership)",
        "            pass",
        f"{SURVIVAL}::test_a_rank_dies_in_a_step[vote]",
    ),
    Mutation(
        "attempts to connect are counted",
        "tools/elastic/session.py",
        "        dist.distributed_c10d._world.group_count = 0",
        "        pass",
        f"{SURVIVAL}::test_an_attempt_to_connect_has_failed_on_one_rank_only",
    ),
    Mutation(
        "a rank that comes late ends the others",
        "tools/elastic/session.py",
        '            raise RankLost(f"Generation',
        '            raise RuntimeError(f"Generation',
        f"{SURVIVAL}::test_a_rank_that_connects_too_late_is_waited_for_again",
    ),
    Mutation(
        "a new rank keeps its own step",
        "tools/elastic/session.py",
        "        self._ranks.step = generation.step\n",
        "",
        f"{SURVIVAL}::test_what_has_died_is_started_again_and_gets_its_state_from_the_living",
    ),
    Mutation(
        "ranks keep the buckets that they have",
        "ddp.py",
        "            self._reducer.store.begin_anew(self._transport.allocate)",
        "            pass",
        f"{SURVIVAL}::test_what_has_died_is_started_again_and_gets_its_state_from_the_living",
    ),
    Mutation(
        "a silent member counts as alive",
        "tools/elastic/heartbeat.py",
        "if self._last_change[member][1] < limit",
        "if False",
        f"{SURVIVAL}::test_a_stopped_process_counts_as_lost_and_joins_again_when_it_goes_on",
    ),
)
