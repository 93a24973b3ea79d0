"""The checks in their order, as every rank goes through them. Each needs the ones before."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from socket import create_connection

import torch
import torch.distributed as dist

from minddp.platform import streams
from minddp.platform.store import Messages
from minddp.tools.doctor import verdicts
from minddp.tools.doctor.measurement import MARGIN_S, Sheets, collect, listen_as_gloo, measure, run_on_all
from minddp.tools.doctor.verdicts import CheckResult, Severity
from minddp.tools.job.place import Place
from minddp.tools.job.store_connection import CONNECT_LIMIT_S, StoreUnreachable, first_line, open_store

LEAVE_LIMIT_S = 3.0


class BrokenCheck(Exception):
    """A broken check makes the next ones impossible."""


class Examination:
    """One rank's way through the checks. Each waits for other ranks at most about `limit_s`, a measurement thrice.

    `show` prints a result, on rank 0 and on a rank without the others.
    """

    def __init__(self, place: Place, limit_s: float, show: Callable[[CheckResult], None]):
        self._place = place
        self._device = choose_device(place)
        self._limit_s = limit_s
        self._server = listen_as_gloo(os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0], limit_s)
        self._show = show
        self._present: list[int] = []  # ranks, once this one is not alone

    def run(self) -> None:
        """All checks until one is broken, then raises BrokenCheck."""
        messages = self._meet()
        try:
            self._check(messages, self._exchange_sheets(messages))
        except dist.DistError as error:
            fact = f"The store at {self._place.endpoint} is lost: {first_line(error)}."
            remedy = "See the output of rank 0 and its launcher."
            self._tell(CheckResult("rendezvous", Severity.BROKEN, fact, remedy), is_alone=True)
        finally:
            self._leave(messages)

    def _check(self, messages: Messages, sheets: Sheets) -> None:
        self._tell(*verdicts.judge_settings(sheets))
        next_rank, limit_s = sheets[(self._place.rank + 1) % len(sheets)], self._limit_s
        connecting = partial(create_connection, next_rank.endpoint, CONNECT_LIMIT_S)
        _, blocked = run_on_all(messages, "connect", lambda: connecting().close(), limit_s)
        measuring = partial(measure, messages, self._device, limit_s)
        measured, errors = run_on_all(messages, "measure", measuring, 3 * limit_s)
        self._tell(verdicts.judge_network(sheets, blocked, errors))
        self._tell(*verdicts.judge_speed(sheets, measured))

    def _tell(self, *results: CheckResult, is_alone: bool = False) -> None:
        if is_alone or self._place.rank == 0:
            for result in results:
                self._show(result)
        if any(result.severity is Severity.BROKEN for result in results):
            raise BrokenCheck

    def _meet(self) -> Messages:
        place = self._place
        try:
            store = open_store(place, self._limit_s)
        except StoreUnreachable as error:
            self._show(verdicts.judge_obstacle(place, error))
            raise BrokenCheck from None
        # Ranks with another WORLD_SIZE, or from before a restart, are not in this job.
        topic = f"minddp/tools/doctor/{place.restarts}/{place.world_size}"
        return Messages(store, topic, place.rank, place.world_size)

    def _exchange_sheets(self, messages: Messages) -> Sheets:
        """Rank 0 waits for the sheets of all, and the others for rank 0, so all agree on who is present."""
        place, limit_s = self._place, self._limit_s
        own = collect(self._device, os.environ, self._server)
        number = messages.count("processes", place.rank)
        messages.post(own, "sheet", number)
        if number > 1:  # another process has registered as this rank
            sheets = messages.gather("sheet", 1, limit_s=limit_s)
            self._tell(verdicts.judge_arrivals(place, sheets, {place.rank: own}, limit_s), is_alone=True)
        if place.rank == 0:
            sheets = messages.gather("sheet", 1, limit_s=limit_s)
            messages.post((sheets, messages.gather("sheet", 2, limit_s=0)), "present")
        present = messages.gather("present", limit_s=limit_s + MARGIN_S, ranks=[0]).get(0)
        sheets, duplicates = present or (messages.gather("sheet", 1, limit_s=0), {})
        self._present = list(sheets) if present else []
        self._tell(verdicts.judge_arrivals(place, sheets, duplicates, limit_s), is_alone=not present)
        return sheets

    def _leave(self, messages: Messages) -> None:
        """End with the others: a launcher ends all ranks with the first, and the store has to outlive their use."""
        with suppress(dist.DistError):
            messages.post(True, "left")
            limit_s = LEAVE_LIMIT_S if self._place.rank == 0 else 4 * self._limit_s
            messages.gather("left", limit_s=limit_s, ranks=self._present)


def choose_device(place: Place) -> torch.device:
    """A GPU, if each rank of this host can have its own."""
    num_gpus = streams.num_devices("cuda")
    if num_gpus == 0 or num_gpus < place.local_world_size:
        return torch.device("cpu")
    return torch.device("cuda", (place.local_rank or 0) % num_gpus)
