"""What a person sees while it takes time: a line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status

from minddp.doctor.findings import name_ranks

_SPEAK_UP_AFTER_S = 5.0


class Progress:
    """One rank's. Only `is_main` says what goes on; the others speak when they have waited for a while."""

    def __init__(self, console: Console, is_main: bool, name: str):
        self._console = console
        self._name = name
        self._animated = is_main and console.is_terminal
        self._status = Status("", console=console)
        self._said: set[str] = set()
        if self._animated:
            self._status.start()

    def stop(self) -> None:
        """Leave the line empty."""
        self._status.stop()

    def stage(self, what: str) -> None:
        """Say what is going on now."""
        if self._animated:
            self._status.update(f"{what} ...")

    def waiting(self, what: str, waited_s: float) -> None:
        """Say what is waited for; where lines stay, once and not at once."""
        if self._animated:
            self._status.update(f"waiting for {what}, {waited_s:.0f} s so far")
        elif waited_s > _SPEAK_UP_AFTER_S and what not in self._said:
            self._said.add(what)
            self._console.print(f"{self._name}: waiting for {what}", markup=False, highlight=False, soft_wrap=True)

    def waiting_for_ranks(self, missing: list[int], waited_s: float) -> None:
        self.waiting(name_ranks(missing), waited_s)
