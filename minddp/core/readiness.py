"""What happens once per parameter and backward, and therefore hardly anything.

[Note: the hot path]
A hook costs what it executes times the number of parameters, and it runs between two kernels that have just
filled the cache with other things. So in the common case (the plan is final, every parameter is used) a hook
does one thing: it strikes its parameter off the set of those that its run waits for. All the rest, from opening
the pass to recording orders, is in `Reducer.attend`, which is called first as long as the countdown `is_watched`.
And as a rule not even that happens for each parameter: see [Note: one hook per run].
Somebody who wants to know of each gradient is not a reason to call it: `tell_ready` alone is called then.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol


class Watcher(Protocol):
    """The reducer, as the countdown sees it."""

    def attend(self, param: int) -> bool:
        """A hook has fired. Whether the parameter is now to be struck off."""
        ...

    def on_run_ready(self, run: int) -> None:
        """The last gradient of a run has arrived."""
        ...

    def on_ready_twice(self, param: int) -> None:
        """A parameter was struck off before."""
        ...

    def note_error(self, error: Exception) -> None:
        """A hook fails: the engine raises the error past the wrapper."""
        ...


class Countdown:
    """For each run, the parameters whose gradients it still waits for.

    `run_of[i]` is the run of parameter i. `last_of_runs[r]` is the parameter whose gradient came last to run r in
    the last backward that counted them all. Where one hook speaks for a run, the run is struck off as a whole, and
    its parameters are not counted. The watcher is only referenced weakly: parameters outlive their wrapper, and
    their hooks must not keep it.
    """

    def __init__(self, watcher: Watcher):
        self._watcher = weakref.ref(watcher)
        self.is_watched = True
        self.tell_ready: Callable[[int], object] | None = None
        self.regroup([])

    def regroup(self, members: Sequence[Sequence[int]]) -> None:
        """`members[r]` are the parameters of run r; each parameter belongs to one run."""
        self._members = [frozenset(run) for run in members]
        self._awaited: list[set[int]] = [set() for _ in members]
        self._awaited_as_a_whole: set[int] = set()
        self.run_of = {param: run for run, params in enumerate(members) for param in params}
        self.last_of_runs = [run[-1] for run in members]
        self._awaited_beside = [self._awaited[self.run_of[param]] for param in range(len(self.run_of))]

    def restart(self, *, as_a_whole: bool) -> None:
        """Wait for every parameter, or for every run as a whole."""
        self._awaited_as_a_whole = set(range(len(self._members)))
        for awaited in self._awaited:
            awaited.clear()
        if not as_a_whole:
            self.count_each()

    def count_each(self) -> None:
        """From now on count the parameters of runs that are awaited as a whole."""
        while self._awaited_as_a_whole:
            run = self._awaited_as_a_whole.pop()
            self._awaited[run].update(self._members[run])

    def on_grad_accumulated(self, param: int, *_from_engine: object) -> None:
        """The hook: a backward has given the parameter's `.grad` its value. See [Note: the hot path]."""
        try:
            if self.is_watched:
                watcher = self._watcher()
                if watcher is None or not watcher.attend(param):
                    return
            elif self.tell_ready is not None:
                self.tell_ready(param)
            self.strike_off(param)
        except Exception as error:
            self._the_watcher().note_error(error)
            raise

    def strike_off(self, param: int) -> None:
        """The parameter's gradient is complete."""
        awaited = self._awaited_beside[param]
        try:
            awaited.remove(param)
        except KeyError:
            self._the_watcher().on_ready_twice(param)
        if not awaited:
            run = self.run_of[param]
            self.last_of_runs[run] = param
            self._the_watcher().on_run_ready(run)

    def strike_off_run(self, run: int) -> None:
        """The gradients of all parameters of a run that was awaited as a whole are complete."""
        try:
            self._awaited_as_a_whole.remove(run)
        except KeyError:
            self._the_watcher().on_ready_twice(self.last_of_runs[run])
        self._the_watcher().on_run_ready(run)

    def missing(self) -> list[int]:
        """The parameters that are still awaited, in order."""
        whole_runs = (self._members[run] for run in self._awaited_as_a_whole)
        return sorted(itertools.chain(*whole_runs, *self._awaited))

    def _the_watcher(self) -> Watcher:
        watcher = self._watcher()
        assert watcher is not None, "it lives at least as long as its backward"
        return watcher
