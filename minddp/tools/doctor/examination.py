"""The checks in their order, as every rank goes through them. Each needs the one before."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Literal

import torch
import torch.distributed as dist

from minddp.platform import streams, wording
from minddp.platform.store import Messages
from minddp.platform.time_limits import Unfinished, call_with_limit
from minddp.tools.doctor import network_verdicts, rank_verdicts
from minddp.tools.doctor.fact_sheet import FactSheet, collect, list_interfaces, outward, own_gpu_index
from minddp.tools.doctor.measurement import Measurement, measure, probe_connections
from minddp.tools.doctor.report import CheckResult, Report, Severity
from minddp.tools.job.place import Place
from minddp.tools.job.store_connection import StoreUnreachable, first_line, open_store

CHECKS = (
    *("rendezvous", "versions", "environment", "shared memory"),
    *("interfaces", "network", "load", "collectives"),
)
Device = Literal["auto", "cpu", "cuda"]
MARGIN_S = 5.0  # for ranks that wait for a rank that waits for others
MEASURE_LIMIT_S = 90.0
LEAVE_LIMIT_S = 3.0
SILENT = "no answer"
GAVE_UP = "gave up, since another rank has failed"


class _Stopped(Exception):
    """A broken check makes the next ones impossible."""


class Examination:
    """One rank's way through the checks. Each step waits at most about `limit_s`."""

    def __init__(self, place: Place, wanted: Device, limit_s: float):
        self._place = place
        self._wanted = wanted
        self._limit_s = limit_s
        self._is_alone = True  # without the facts of the other ranks
        self._messages: Messages | None = None
        self._findings: list[CheckResult] = []
        self._sheets: dict[int, FactSheet] = {}
        self._measured: dict[int, Measurement] = {}

    def run(self, deliver: Callable[[Report], None]) -> Report:
        """All checks, as far as possible. `deliver` gets the report on rank 0, and on a rank without the others."""
        try:
            messages = self._meet()
            self._exchange_sheets(messages)
            self._findings += rank_verdicts.judge_sheets(self._sheets)
            self._require(network_verdicts.judge_interfaces(self._sheets))
            self._connect(messages)
        except _Stopped:
            pass
        except dist.DistError as error:
            self._is_alone = True
            lost = f"The store at {self._place.endpoint} is lost ({first_line(error)})"
            fact = f"{lost}: the process that hosts it has ended."
            remedy = "See the output of rank 0 and its launcher."
            self._findings.append(CheckResult("rendezvous", Severity.BROKEN, fact, remedy))
        report = self._report()
        if self._is_alone or self._place.rank == 0:
            deliver(report)
        self._leave()
        return report

    def _require(self, findings: Sequence[CheckResult]) -> None:
        self._findings += findings
        if any(finding.severity is Severity.BROKEN for finding in findings):
            raise _Stopped

    def _meet(self) -> Messages:
        place = self._place
        try:
            store = open_store(place, self._limit_s)
        except StoreUnreachable as error:
            addresses = outward(list_interfaces())
            self._findings.append(network_verdicts.judge_obstacle(place, error, addresses, self._limit_s))
            raise _Stopped from None
        # Ranks with another WORLD_SIZE, or from before a restart, are not in this job.
        topic = f"minddp/tools/doctor/{place.restarts}/{place.world_size}"
        self._messages = Messages(store, topic, place.rank, place.world_size)
        self._messages.post(asdict(collect(place, os.environ, self._limit_s)), "sheet")
        return self._messages

    def _exchange_sheets(self, messages: Messages) -> None:
        """Rank 0 waits for the sheets of all, and the others for rank 0, so all agree on who is present."""
        place = self._place
        if place.rank == 0:
            messages.post(list(messages.gather("sheet", limit_s=self._limit_s)), "present")
        present = messages.gather("present", limit_s=self._limit_s + MARGIN_S, ranks=[0]).get(0)
        self._is_alone = present is None
        sheets = messages.gather("sheet", limit_s=self._limit_s, ranks=present or [place.rank])
        self._sheets = {rank: FactSheet(**sheet) for rank, sheet in sheets.items()}
        missing = [0] if present is None else [rank for rank in range(place.world_size) if rank not in present]
        self._require([network_verdicts.judge_arrivals(place, self._sheets, missing, self._limit_s)])

    def _connect(self, messages: Messages) -> None:
        """Connect every pair of ranks by plain sockets, then by a process group, which may find another way."""
        address = self._sheets[self._place.rank].gloo_address or "127.0.0.1"
        obstacles, errors = run_on_all(
            messages, "probe", lambda: probe_connections(messages, address, self._limit_s), 2 * self._limit_s
        )
        values: dict[int, Measurement] = {}
        if not errors:
            values, errors = run_on_all(
                messages, "measure", lambda: measure(messages, self._device(), self._limit_s), MEASURE_LIMIT_S
            )
        self._require([network_verdicts.judge_connections(self._sheets, obstacles, errors)])
        self._measured = values
        load = rank_verdicts.judge_load(self._sheets, self._measured)
        is_busy = load[0].severity is not Severity.FINE
        self._findings += [*load, *network_verdicts.judge_collectives(self._measured, is_busy)]

    def _device(self) -> torch.device:
        """By default a GPU, if each rank has its own. It becomes the current device of this thread."""
        gpus = {sheet.gpu_uuid for sheet in self._sheets.values()} - {""}
        if self._wanted == "cpu" or (self._wanted == "auto" and len(gpus) < len(self._sheets)):
            return torch.device("cpu")
        device = torch.device("cuda", own_gpu_index(self._place.local_rank) or 0)
        streams.make_current(device)
        return device

    def _report(self) -> Report:
        place = self._place
        scope = f"rank {place.rank} of {place.world_size}, alone, on {socket.gethostname()}"
        if not self._is_alone:
            hosts = len({sheet.network_identity for sheet in self._sheets.values()})
            scope = f"{wording.count(len(self._sheets), 'rank')} on {wording.count(hosts, 'host')}"
        checked = {finding.check for finding in self._findings}
        not_checked = [check for check in CHECKS if check not in checked]
        return Report(f"minddp doctor: {scope}", self._findings, not_checked, self._sheets, self._measured)

    def _leave(self) -> None:
        """End with the others: the store has to outlive every rank's last access."""
        with suppress(Unfinished, dist.DistError):
            if self._messages is not None:
                self._messages.post(True, "left")
                limit_s = LEAVE_LIMIT_S if self._place.rank == 0 else MEASURE_LIMIT_S
                self._messages.gather("left", limit_s=limit_s, ranks=list(self._sheets))
            if dist.is_initialized():
                call_with_limit(dist.destroy_process_group, LEAVE_LIMIT_S)


def run_on_all(
    messages: Messages, topic: str, part: Callable[[], Any], limit_s: float
) -> tuple[dict[int, Any], dict[int, str]]:
    """Run `part` on every rank until one fails. Returns the values and the errors by rank, to every rank.

    Only the errors that are causes: a rank that posts no outcome makes others fail, and a rank that has failed
    makes others give up.
    """
    value, error, deadline = None, "", time.monotonic() + limit_s
    try:
        value = call_with_limit(part, limit_s, lambda: GAVE_UP if messages.settled(topic, "failed") else "")
    except Unfinished as unfinished:
        error = str(unfinished)
    except Exception as raised:
        error = f"{type(raised).__name__}: {first_line(raised)}"
    if error not in ("", GAVE_UP):
        messages.settle(True, topic, "failed")
    messages.post((value, error), topic)
    outcomes = messages.gather(topic, limit_s=MARGIN_S + (0 if error else deadline - time.monotonic()))
    if silent := [rank for rank in range(messages.world_size) if rank not in outcomes]:
        return {}, dict.fromkeys(silent, SILENT)
    values = {rank: value for rank, (value, error) in outcomes.items() if not error}
    return values, {rank: error for rank, (_, error) in outcomes.items() if error not in ("", GAVE_UP)}
