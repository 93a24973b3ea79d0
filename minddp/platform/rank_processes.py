"""Which ranks' processes have ended, or are stopped: a host's process table shows it for the ranks there."""

from __future__ import annotations

import os

from minddp.platform.host import host_identity, process_state
from minddp.platform.store import Messages


class RankProcesses:
    """The processes of the ranks that post messages under one topic of a store."""

    def __init__(self, messages: Messages):
        self.host = host_identity("pid")  # equal on ranks that share a process table
        self._messages = messages
        self._pid_here: dict[int, int | None] = {}  # of each rank seen so far; `None` on another host

    def post(self) -> None:
        """Let other ranks know the process of this rank."""
        self._messages.post((self.host, os.getpid()), "process")

    def has_ended(self, rank: int) -> bool:
        """True if the rank's process ran on this host and has ended. Other hosts' processes are not known."""
        return self._state(rank) in ("Z", "X")

    def is_stopped(self, rank: int) -> bool:
        """True if it is on this host, and a signal or a debugger has stopped it."""
        return self._state(rank) in ("T", "t")

    def _state(self, rank: int) -> str:
        if rank not in self._pid_here and (process := self._messages.read(rank, "process")) is not None:
            host, pid = process
            self._pid_here[rank] = pid if host == self.host else None
        pid_here = self._pid_here.get(rank)
        return "" if pid_here is None else process_state(pid_here)
