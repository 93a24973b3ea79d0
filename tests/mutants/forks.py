"""Runs unit tests on mutants, each in a process of its own that begins where the tests have been collected.

Importing torch, minddp and the tests takes seconds and a test takes milliseconds. So one process collects the tests
once. A fork of it runs them all, and notes which functions of minddp each of them calls. Then a fork for each
mutant puts the changed code into the function that exists, which everything that has imported it sees, and runs the
tests that call the function, up to the first that fails.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.mutants.operators import PACKAGE, ROOT, Mutant
from tests.mutants.replaced import apply
from tests.ranks import CONTEXT, on_one_thread

ON_RANKS = {"ranks", "pools", "fresh_ranks"}  # fixtures of tests whose calls happen in other processes
LIMIT_S = 30.0
Place = tuple[str, str]  # file within minddp/, qualified name of a function
NOT_A_MUTANT = "not a mutant"  # the compiler makes the same code of it


@dataclass(frozen=True)
class Outcome:
    """How a mutant ended."""

    mutant: Mutant
    tests: int  # that call its function
    noticed: str  # the test that failed, or another end; "" if all tests passed

    @property
    def survived(self) -> bool:
        return not self.noticed


def outcomes(mutants: Sequence[Mutant], folders: Sequence[str]) -> Iterator[Outcome]:
    """Run each mutant under the unit tests in these folders of tests/.

    Raises:
        RuntimeError: the tests cannot be collected.
    """
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_serve, args=(theirs, mutants, folders), daemon=True)
    process.start()
    theirs.close()
    try:
        while True:
            received = ours.recv()
            if isinstance(received, str):
                raise RuntimeError(received)
            yield received
    except EOFError:
        return
    finally:
        process.kill()
        process.join(10)


def _serve(pipe: Connection, mutants: Sequence[Mutant], folders: Sequence[str]) -> None:
    """Body of the process that collects the tests."""
    on_one_thread(0)
    arguments = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", str(ROOT), "-m", "not slow"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        tests = [str(ROOT / "tests" / folder) for folder in folders]
        exit_code = pytest.main([*arguments, *tests], [_ForkPerMutant(mutants, pipe)])
    if exit_code != pytest.ExitCode.OK:
        pipe.send(f"the tests cannot be collected: {exit_code!r}\n{output.getvalue()}")


class _ForkPerMutant:
    """A pytest plugin in place of the loop over the tests."""

    def __init__(self, mutants: Sequence[Mutant], pipe: Connection):
        self._mutants = mutants
        self._pipe = pipe
        self._failed: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = [item for item in session.items if not ON_RANKS & set(getattr(item, "fixturenames", ()))]
        gc.freeze()  # a collection in a fork would look at all that has been imported, and copy its pages
        traced = _in_a_fork(20 * LIMIT_S, self._trace, items)
        if isinstance(traced, str):
            self._pipe.send(f"without a mutant: {traced}")
            return True
        by_name = {item.nodeid: item for item in items}
        for mutant in self._mutants:
            callers = [by_name[name] for name in traced.get((mutant.file, mutant.function), ())]
            noticed = _in_a_fork(LIMIT_S, self._first_failure, callers, mutant) if callers else ""
            if not noticed.startswith(NOT_A_MUTANT):
                self._pipe.send(Outcome(mutant, len(callers), noticed))
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def _first_failure(self, items: Sequence[pytest.Item], mutant: Mutant) -> str:
        try:
            apply(mutant)
        except ValueError as error:
            return f"{NOT_A_MUTANT}: {error}"
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                return self._failed[0]
        return ""

    def _trace(self, items: Sequence[pytest.Item]) -> dict[Place, list[str]]:
        """The tests that call each function, the fastest first. A test that fails in a fork tells nothing."""
        seconds: dict[str, float] = {}
        callers: dict[Place, list[str]] = defaultdict(list)
        for item, following in zip(items, [*items[1:], None], strict=True):
            begin = time.monotonic()
            with noting_calls() as codes:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            seconds[item.nodeid] = time.monotonic() - begin
            if not self._failed:
                for place in {place_of(code) for code in codes} - {None}:
                    callers[place].append(item.nodeid)
            self._failed.clear()
        return {place: sorted(tests, key=seconds.__getitem__) for place, tests in callers.items()}


@contextlib.contextmanager
def noting_calls() -> Iterator[set[CodeType]]:
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            codes.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield codes
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed


def place_of(code: CodeType) -> Place | None:
    """The place of a function of minddp; a function within a function has that of the outer one."""
    if not code.co_filename.startswith(f"{PACKAGE}/"):
        return None
    return code.co_filename[len(str(PACKAGE)) + 1 :], code.co_qualname.split(".<locals>")[0]


def _in_a_fork(limit_s: float, function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` returns in a copy of this process, or why it does not."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            theirs.send(function(*args))
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    theirs.close()
    try:
        return ours.recv() if ours.poll(limit_s) else "took too long"
    except EOFError:
        return "the process has died"
    finally:
        ours.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
