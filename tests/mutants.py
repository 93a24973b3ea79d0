"""Runs unit tests under mutations, each in a process of its own that begins where the tests have been collected.

Importing torch, minddp and the tests takes seconds and a test takes milliseconds. So one process collects the tests
once and forks for each mutation. The fork does not import a mutated copy: it compiles the mutated source and puts
the new code into the functions that exist, which everything that has imported them sees.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import io
import os
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.mutations import Mutation
from tests.ranks import CONTEXT, on_one_thread

ROOT = Path(__file__).resolve().parent.parent
NO_MUTATION = "none"


class Mutants:
    """One process that runs the tests of `mutations`, and first all of them without any."""

    def __init__(self, mutations: Sequence[Mutation], limit_s: float = 50.0):
        self._results: dict[str, str] = {}
        self._pipe, theirs = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=_serve, args=(theirs, mutations, limit_s), daemon=True)
        self._process.start()
        theirs.close()

    def first_failure(self, name: str, timeout_s: float = 100.0) -> str:
        """The test that fails under the mutation of that name, or what else has happened; "" if all pass."""
        while name not in self._results:
            if not self._pipe.poll(timeout_s):
                return "no answer in time"
            try:
                finished, result = self._pipe.recv()
            except EOFError:
                return "the process that collects the tests has died"
            self._results[finished] = result
        return self._results[name]

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._pipe.close()


def _serve(pipe: Connection, mutations: Sequence[Mutation], limit_s: float) -> None:
    """Body of the process."""
    on_one_thread(0)
    tests = [str(ROOT / "tests" / test) for test in dict.fromkeys(mutation.tests for mutation in mutations)]
    arguments = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", str(ROOT)]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exit_code = pytest.main([*arguments, *tests], [_ForkPerMutation(mutations, pipe, limit_s)])
    if exit_code != pytest.ExitCode.OK:
        pipe.send((NO_MUTATION, f"the tests cannot be collected: {exit_code!r}\n{output.getvalue()}"))


class _ForkPerMutation:
    """A pytest plugin in place of the loop over the tests."""

    def __init__(self, mutations: Sequence[Mutation], pipe: Connection, limit_s: float):
        self._mutations = mutations
        self._pipe = pipe
        self._limit_s = limit_s
        self._failed: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.freeze()  # a collection in a fork would look at all that has been imported, and copy its pages
        everything = 2 * self._limit_s
        self._pipe.send((NO_MUTATION, _in_a_fork(everything, self._first_failure, session.items, None)))
        for mutation in self._mutations:
            name = f"tests/{mutation.tests}"
            items = [item for item in session.items if item.nodeid.startswith(name)]
            self._pipe.send((mutation.name, _in_a_fork(self._limit_s, self._first_failure, items, mutation)))
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def _first_failure(self, items: Sequence[pytest.Item], mutation: Mutation | None) -> str:
        if mutation is not None:
            apply(mutation)
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                return self._failed[0]
        return ""


def _in_a_fork(limit_s: float, function: Any, *args: Any) -> str:
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


# ------------------------------------------------------------------ a mutation in place


def apply(mutation: Mutation) -> list[tuple[FunctionType, CodeType]]:
    """Give the functions of the mutation's module the code of the mutated source. Returns them with the old code.

    Raises:
        StaleMutation: the text that it replaces is not in the source.
        ValueError: it changes something else than what functions do.
    """
    module = importlib.import_module("minddp." + mutation.file.removesuffix(".py").replace("/", "."))
    file = inspect.getsourcefile(module)
    assert file is not None
    source = Path(file).read_text()
    before, after = (compile(text, file, "exec") for text in (source, mutation.applied_to(source)))
    old, new = dict(_functions_in(before)), dict(_functions_in(after))
    changed = [path for path in new if path in old and _differ(old[path], new[path])]
    if old.keys() != new.keys() or not changed:
        raise ValueError(f"mutation `{mutation.name}` changes no function")
    functions = [_function_at(module, path) for path in changed]
    before_it = [(function, function.__code__) for function in functions]
    for function, path in zip(functions, changed, strict=True):
        function.__code__ = new[path]
    return before_it


def _functions_in(code: CodeType, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], CodeType]]:
    """The code of functions and methods, by name; not of functions within functions, which belong to those."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and not constant.co_name.startswith("<"):
            if constant.co_flags & inspect.CO_OPTIMIZED:  # class bodies are not
                yield (*path, constant.co_name), constant
            else:
                yield from _functions_in(constant, (*path, constant.co_name))


def _differ(one: CodeType, other: CodeType) -> bool:
    """True if they do something else; lines may have moved."""
    constants = [[c for c in code.co_consts if not isinstance(c, CodeType)] for code in (one, other)]
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (one, other)]
    return (
        one.co_code != other.co_code
        or one.co_names != other.co_names
        or repr(constants[0]) != repr(constants[1])
        or len(inner[0]) != len(inner[1])
        or any(map(_differ, *inner))
    )


def _function_at(module: Any, path: tuple[str, ...]) -> FunctionType:
    found: Any = module
    for name in path:
        found = vars(found)[name]
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, functools.cached_property):
        found = found.func
    return inspect.unwrap(getattr(found, "__func__", found))
