"""Mutations of `tools/xray/`: playing steps again, and advice."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_REPLAY = "tools/xray/test_replay.py"
_WHAT_IF = "tools/xray/test_what_if.py"
_WORDS = "tools/xray/test_words.py"
_WRAPPERS = "tools/xray/test_wrappers.py"

MUTATIONS = (
    Mutation(
        "end a step with the first module's backward",
        "tools/xray/reading.py",
        "part.ended >= training and (",
        "(",
        f"{_WRAPPERS}::test_a_step_of_two_modules_has_the_buckets_of_both",
    ),
    Mutation(
        "give all modules one numbering of buckets",
        "tools/xray/reading.py",
        "**dict.fromkeys(_OF_BUCKETS, first)",
        "**dict.fromkeys(_OF_BUCKETS, 0)",
        f"{_WRAPPERS}::test_a_step_of_two_modules_has_the_buckets_of_both",
    ),
    Mutation(
        "let the last backward's end be every bucket's",
        "tools/xray/timeline.py",
        "return next((one for one in self.passes if bucket in one.buckets), one)",
        "return one",
        f"{_WRAPPERS}::test_a_step_of_two_modules_has_the_buckets_of_both",
    ),
    Mutation(
        "do not wait for the slowest rank's launch",
        "tools/xray/replay.py",
        "join_ns = max(max(t,",
        "join_ns = min(max(t,",
        f"{_REPLAY}::test_a_recording_played_unchanged_is_itself",
    ),
    Mutation(
        "begin every step together",
        "tools/xray/replay.py",
        "begins = [rank.interval.end_ns for rank in again.ranks]",
        "begins = [max(rank.interval.end_ns for rank in again.ranks)] * len(begins)",
        f"{_REPLAY}::test_a_recording_played_unchanged_is_itself",
    ),
    Mutation(
        "launch out of order",
        "tools/xray/replay.py",
        "now_ns = max(now_ns, min(packed_ns, self.complete_ns))",
        "now_ns = min(packed_ns, self.complete_ns)",
        f"{_REPLAY}::test_buckets_are_launched_in_the_order_of_the_plan",
    ),
    Mutation(
        "let buckets cost nothing",
        "tools/xray/replay.py",
        "1 + _longer_ns(rank, plan, costs) / max(1",
        "1 + 0 / max(1",
        f"{_REPLAY}::test_more_buckets_take_time_of_backward",
    ),
    Mutation(
        "let crowded cores cost nothing",
        "tools/xray/replay.py",
        "rank.crowded_ns * (then_s / recorded_s - 1) if recorded_s else 0.0",
        "0.0",
        f"{_REPLAY}::test_more_buckets_take_time_of_backward",
    ),
    Mutation(
        "take all waits for a core for those of messages",
        "tools/xray/host.py",
        "backward.had_ns * forward.waited_ns / max(1, forward.had_ns)",
        "0.0",
        "tools/xray/test_host.py::test_what_messages_take_from_a_core",
    ),
    Mutation(
        "add in shared memory at the launch",
        "tools/xray/replay.py",
        "latest_ns = max(times_ns) + step.adds_after_ns",
        "latest_ns = max(times_ns)",
        f"{_REPLAY}::test_in_shared_memory_the_bytes_move_when_all_ranks_wait",
    ),
    Mutation(
        "do not wait for buffers",
        "tools/xray/replay.py",
        "begins_ns = max(now_ns, sent_ns)",
        "begins_ns = now_ns",
        f"{_REPLAY}::test_buffers_are_waited_for_as_long_as_rank_0_is_late",
    ),
    Mutation(
        "trust the median message",
        "tools/xray/replay.py",
        "ratio = max(statistics.median(ratios), 1e-6)",
        "ratio = 1.0",
        f"{_REPLAY}::test_messages_take_as_long_in_all_as_they_did",
    ),
    Mutation(
        "take the difference of near sizes for latency",
        "tools/xray/replay.py",
        "max(self) >= SIZES_APART * min(self)",
        "len(self) > 1",
        f"{_REPLAY}::test_messages_of_about_one_size_do_not_show_a_latency",
    ),
    Mutation(
        "quicken the step in which the backward is",
        "tools/xray/what_if.py",
        "recorded_in = max(0, t - 1) if phase in EARLY else t",
        "recorded_in = min(t + 1, len(self.steps) - 1)",
        f"{_WHAT_IF}::test_a_delay_in_one_step_is_found_and_shown",
    ),
    Mutation(
        "take the loss for forward",
        "tools/xray/what_if.py",
        "else now)[phase] for phase in Phase}",
        "else now)[min(phase, Phase.FORWARD)] for phase in Phase}",
        f"{_WHAT_IF}::test_a_late_rank_is_named_with_its_phase_and_what_it_costs",
    ),
    Mutation(
        "say what hardly gains",
        "tools/xray/analysis.py",
        "if one.gain_ns >= least_ns and",
        "if",
        f"{_WHAT_IF}::test_advice_is_what_gains_most_in_order_and_one_plan",
    ),
    Mutation(
        "say all plans",
        "tools/xray/analysis.py",
        "(not one.of_plan or one is plans[0])",
        "True",
        f"{_WHAT_IF}::test_advice_is_what_gains_most_in_order_and_one_plan",
    ),
    Mutation(
        "count waiting for the last rank as communication",
        "tools/xray/timeline.py",
        "return max(0, rank.parts_ns[still] - self.last.parts_ns[still])",
        "return 0",
        f"{_WORDS}::test_the_last_ranks_wait_is_communication_and_the_others_wait_for_it",
    ),
    Mutation(
        "go on with other work after a batch",
        "tools/xray/reading.py",
        "begins = before_data if kind is EventKind.DATA_END",
        "begins = Activity.OTHER if kind is EventKind.DATA_END",
        "tools/xray/test_timeline.py::test_after_a_batch_the_step_goes_on_as_before",
    ),
    Mutation(
        "leave torch's methods replaced",
        "tools/xray/host.py",
        "self._patches.close()",
        "pass",
        "tools/xray/test_host.py::test_torch_is_as_before_afterwards",
    ),
    Mutation(
        "mark nothing as noise",
        "tools/xray/words.py",
        '"" if _is_seen(analysis, change) else ", within the noise"',
        '""',
        f"{_WORDS}::test_advice_says_what_is_gained_and_whether_that_is_noise",
    ),
)
