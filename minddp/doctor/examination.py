"""The examination, step by step, as each rank goes through it. All come to one report; rank 0's is the one to read.

Each step needs the one before: the ranks meet at the store, tell what they are, reach each other, connect, and only
then measure. After a step that makes the next ones impossible, those are named as not checked.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from minddp.doctor.board import Board, Outcome, StoreLost, is_done
from minddp.doctor.facts import RankFacts
from minddp.doctor.findings import Finding, Verdict, count, is_broken
from minddp.doctor.fit import Reading
from minddp.doctor.interfaces import list_interfaces, outward
from minddp.doctor.measure import Connection, connect, on, read_clocks, time_collectives, time_step, time_work
from minddp.doctor.meeting import CannotMeet, Meeting, open_store
from minddp.doctor.patience import TimeUp, patiently
from minddp.doctor.place import Place
from minddp.doctor.progress import Progress
from minddp.doctor.reach import knock_at_all
from minddp.doctor.report import Report
from minddp.doctor.survey import survey
from minddp.doctor.verdicts import devices, load, machine, meeting, network, software, speed

_OF_THE_FACTS = (
    "versions",
    "environment",
    "devices",
    "cores",
    "memory",
    "shared memory",
    "open files",
    "interfaces",
)
_MARGIN_S = 5.0  # for ranks that wait for one that waits for others
_MEASURING_TAKES_AT_MOST_S = 60.0
_PARTING_TAKES_AT_MOST_S = 3.0


def examine(
    place: Place,
    wanted: devices.Device,
    timeout_s: float,
    environment: Mapping[str, str],
    progress: Progress,
    deliver: Callable[[Report], None],
) -> Report:
    """Go through all of it as one of the ranks.

    `deliver` is called with the report on the rank that has to tell: rank 0, or one that did not get to the others.
    """
    progress.stage(f"going to {place.endpoint}")
    try:
        met = open_store(
            place, timeout_s, lambda why, waited_s: progress.waiting(f"{place.endpoint} ({why})", waited_s)
        )
        return Examination(place, wanted, timeout_s, environment, progress, met).run(deliver)
    except CannotMeet as error:
        finding = meeting.judge_attempt(error.attempt, outward(list_interfaces()))
    except StoreLost as error:
        finding = Finding(
            meeting.CHECK,
            Verdict.BROKEN,
            f"The store at {place.endpoint} has gone ({error}): who hosts it, rank 0 or its launcher, has ended.",
            "See what that one printed.",
        )
    except _LeftAlone as error:
        finding = error.finding
    title = f"minddp doctor: rank {place.rank} of {place.world_size}, on {socket.gethostname()}, alone"
    report = Report(title, (finding,), not_checked=("all else",))
    deliver(report)
    return report


class _LeftAlone(Exception):
    """This rank got to the store, but not to the others; the finding says why."""

    def __init__(self, finding: Finding):
        self.finding = finding
        super().__init__(finding.fact)


class Examination:
    """One rank's way through the steps, and what it has learnt so far."""

    def __init__(
        self,
        place: Place,
        wanted: devices.Device,
        timeout_s: float,
        environment: Mapping[str, str],
        progress: Progress,
        met: Meeting,
    ):
        self._place = place
        self._wanted = wanted
        self._timeout_s = timeout_s
        self._environment = environment
        self._progress = progress
        self._met = met
        self._store = dist.PrefixStore(f"minddp/doctor/{place.round}", met.store)
        self._board = Board(self._store, place.rank, place.world_size)
        self._facts: dict[int, RankFacts] = {}
        self._findings: list[Finding] = []
        self._curves: dict[str, speed.Curve] = {}
        self._measured: dict[str, Any] = {}
        self._connection: Connection | None = None
        self._is_busy = False

    def run(self, deliver: Callable[[Report], None]) -> Report:
        """Take the steps, as far as they lead; deliver the report; part from the others."""
        steps: list[tuple[str, Callable[[], bool], tuple[str, ...]]] = [
            ("calling the roll", self._call_the_roll, (meeting.CHECK,)),
            ("comparing the ranks", self._compare, _OF_THE_FACTS),
            ("connecting", self._connect, ("network",)),
            ("comparing clocks", self._compare_clocks, ("clocks",)),
            ("timing each rank", self._time_ranks, ("load", "stragglers")),
            ("timing collectives", self._time_collectives, ("collectives",)),
            ("timing a step", self._time_step, ("step",)),
        ]
        while steps:
            what, step, _ = steps.pop(0)
            self._progress.stage(what)
            if not step():
                break
        not_checked = tuple(check for _, _, checks in steps for check in checks)
        report = self._report(not_checked)
        if self._place.rank == 0:
            deliver(report)
        self._part()
        return report

    # ------------------------------------------------------------------ steps; each tells whether others can follow

    def _call_the_roll(self) -> bool:
        """Rank 0 waits for all; the others wait for it, so that all agree on who is there."""
        place, board = self._place, self._board
        if not board.claim():
            board.post("duplicate", True)
            raise _LeftAlone(meeting.judge_roll_call(place, {}, [place.rank], self._met.took_s, self._timeout_s))
        own_facts = survey(place, self._environment, self._met.own_address, self._timeout_s)
        board.post("facts", own_facts.to_json())
        if place.rank == 0:
            came = board.gather("facts", self._timeout_s, self._progress.waiting_for_ranks)
            duplicates = [rank for rank in came if board.read("duplicate", rank)]
            board.post("roll", {"came": list(came), "duplicates": duplicates})
        roll = board.gather("roll", self._timeout_s + _MARGIN_S, ranks=[0]).get(0)
        if roll is None:
            present = {place.rank: own_facts}
            raise _LeftAlone(
                meeting.judge_roll_call(place, present, [], self._met.took_s, self._timeout_s, missing=[0])
            )
        self._facts = {rank: RankFacts.from_json(board.read("facts", rank) or {}) for rank in roll["came"]}
        finding = meeting.judge_roll_call(place, self._facts, roll["duplicates"], self._met.took_s, self._timeout_s)
        return self._found(finding)

    def _compare(self) -> bool:
        """What the ranks are, and where; only interfaces that do not exist make connecting useless."""
        on_gpu = self._device_type == "cuda"
        interfaces = network.judge_interfaces(self._facts, on_gpu)
        self._found(
            *software.judge_software(self._facts),
            *devices.judge_devices(self._wanted, self._facts),
            *machine.judge_machines(self._facts, on_gpu),
            *interfaces,
        )
        return not is_broken(interfaces)

    def _connect(self) -> bool:
        board, address = self._board, self._facts[self._place.rank].network.gloo_address or "127.0.0.1"
        reached = board.together(
            "reach", lambda: knock_at_all(board, address, self._timeout_s), self._timeout_s + _MARGIN_S
        )
        connected: Mapping[int, Outcome] = {}
        began = time.monotonic()
        if is_done(reached) and not network.cut_off(reached):
            connected = board.together("connect", self._make_group, self._timeout_s)
        return self._found(*network.judge_network(self._facts, reached, connected, time.monotonic() - began))

    def _compare_clocks(self) -> bool:
        told = self._measure("clocks", read_clocks)
        if told is None:
            return False
        readings = {rank: [Reading(*pair) for pair in pairs] for rank, pairs in told.items()}
        offsets = speed.clock_offsets(self._facts, readings)
        self._measured["clock_ahead_s"] = {host: offset.seconds for host, offset in offsets.items()}
        return self._found(speed.judge_clocks(self._facts, readings))

    def _time_ranks(self) -> bool:
        """Each for itself, before anything is exchanged: a busy machine is not to be taken for a slow network."""
        told = self._measure("stragglers", time_work)
        if told is None:
            return False
        seconds = {rank: work["seconds"] for rank, work in told.items()}
        denied = {rank: work["denied"] for rank, work in told.items()}
        self._measured["work_s"], self._measured["core_denied"] = seconds, denied
        self._is_busy = load.is_busy(denied)
        return self._found(*load.judge_load(self._facts, denied), *speed.judge_stragglers(self._facts, seconds))

    def _time_collectives(self) -> bool:
        if self._place.world_size == 1:
            return self._found(Finding("collectives", Verdict.FINE, "There is only one rank: nothing to exchange."))
        told = self._measure("collectives", time_collectives)
        if told is None:
            return False
        curves = [one["curves"] for one in told.values()]
        self._curves = {name: speed.slowest([one[name] for one in curves]) for name in curves[0]}
        same_host = len({one.network.identity for one in self._facts.values()}) == 1
        obstacle = told[0]["obstacle"] if same_host else ""
        return self._found(*speed.judge_curves(self._curves, obstacle, is_busy=self._is_busy))

    def _time_step(self) -> bool:
        told = self._measure("step", time_step)
        if told is None:
            return False
        self._measured["step_s"] = told
        return self._found(speed.judge_step(told, is_busy=self._is_busy))

    # ------------------------------------------------------------------ in the steps

    @property
    def _device_type(self) -> str:
        return devices.choose_device(self._wanted, self._facts)

    def _found(self, *findings: Finding) -> bool:
        """Put the findings down; whether none of them is broken."""
        self._findings += findings
        return not is_broken(findings)

    def _make_group(self) -> str:
        facts = self._facts[self._place.rank]
        device = torch.device("cpu")
        if self._device_type == "cuda":
            device = torch.device("cuda", facts.devices.gpus.index(facts.own_gpu))  # type: ignore[arg-type]
        store = dist.PrefixStore("group", self._store)
        self._connection = connect(self._place, store, device, self._timeout_s)
        return "connected"

    def _measure(self, check: str, part: Callable[[Connection], Any]) -> dict[int, Any] | None:
        """What `part` gives on each rank; `None`, and findings that say so, if it failed on any."""
        connection = self._connection
        assert connection is not None, "measured without being connected"

        def on_own_device() -> Any:
            with on(connection.device):
                return part(connection)

        outcomes = self._board.together(check, on_own_device, _MEASURING_TAKES_AT_MOST_S)
        if not is_done(outcomes):
            self._found(speed.judge_failure(check, outcomes, self._facts))
            return None
        return {rank: outcome.value for rank, outcome in outcomes.items()}

    def _report(self, not_checked: tuple[str, ...]) -> Report:
        hosts = len({told.network.identity for told in self._facts.values()})
        backend = "NCCL on GPUs" if self._device_type == "cuda" else "gloo on the CPU"
        title = f"minddp doctor: {count(len(self._facts), 'rank')} on {count(hosts, 'host')}, {backend}"
        return Report(title, tuple(self._findings), self._curves, self._facts, self._measured, not_checked)

    def _part(self) -> None:
        """Leave when all have come this far, so that the store outlives everybody's last question."""
        if self._connection is not None:
            self._connection = None
            with contextlib.suppress(TimeUp):  # a peer has ended, and everything is said
                patiently(dist.destroy_process_group, _PARTING_TAKES_AT_MOST_S)
        others_s = _MEASURING_TAKES_AT_MOST_S if self._place.rank else _PARTING_TAKES_AT_MOST_S
        with contextlib.suppress(StoreLost):
            self._board.post("parts", True)
            self._board.gather("parts", others_s, ranks=list(self._facts))
