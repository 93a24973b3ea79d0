"""A stage: a process that imports one suite once, and forks itself for each test.

Importing torch's test modules takes several seconds, a fork takes hundredths of one. The ranks of a test are forked
as well, instead of being started anew and importing everything again; PyTorch's tests ran that way once, too.

[Note: second chance]
With torch's own class, tests under RPC hang now and then: where its C++ reducer holds the last reference to a gloo
group, the group is destroyed while the GIL is held; its destructor waits for the group's thread, and that thread
waits for the GIL if it has a tensor to release. So a test that has hung is run once more, and its verdict says so.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from tests.conformance import swap
from tests.conformance.selection import Suite, TestId
from tests.conformance.verdict import Report, Status, Verdict, judge

_POLL_S = 0.02
_NAME_CHARACTERS = 200  # file systems allow 255 bytes


@dataclass(frozen=True)
class Programme:
    """What a stage has to do.

    Attributes:
        suite: where the tests are.
        subject: the class under test, `package.module:Class`, or `swap.NATIVE`.
        tests: to run, one after another.
        limit_s: a test still running after so long is killed.
        logs: where to keep the logs of tests that fail, if anywhere.
    """

    suite: Suite
    subject: str
    tests: tuple[TestId, ...]
    limit_s: float
    logs: Path | None = None


def serve(programme: Programme, folder: str, results: Connection) -> None:
    """Body of a stage's process: send a `Verdict` for each test. Files go to `folder`, as it may be killed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that running tests are ended, too
    with tempfile.TemporaryDirectory(dir=folder) as scratch, results:
        try:
            module = _set(programme, Path(scratch))
        except (Exception, SystemExit):  # test files exit where the machine does not meet their requirements
            _give_up(programme, results)
            return
        for test in programme.tests:
            verdict = _run(test, programme, module, results, Path(scratch))
            if verdict.status is Status.TIMEOUT:  # see [Note: second chance]
                verdict = _run(test, programme, module, results, Path(scratch)).after_hanging()
            results.send(verdict)


def _set(programme: Programme, scratch: Path) -> ModuleType:
    """Everything that the tests have in common: environment, torch, the class under test, their module."""
    suite = programme.suite
    _set_environment(programme, scratch)
    _use_one_thread()
    _silence(scratch)
    if suite.on_cpu:
        _stand_in_for_gpus()
    swap.put_in_place(programme.subject)
    _let_ranks_be_forked()
    module = importlib.import_module(suite.module)
    gc.collect()
    gc.freeze()  # forks then share these pages for good
    return module


def _set_environment(programme: Programme, scratch: Path) -> None:
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(programme.suite.world_size),
        TEMP_DIR=str(scratch),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        TORCHINDUCTOR_COMPILE_THREADS="1",
        # PyTorch's own limit comes first: it knows which rank hangs, and where.
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(max(10, int(programme.limit_s) - 10)),
    )
    sys.argv = sys.argv[:1]


def _use_one_thread() -> None:
    """Set one thread: this process was forked after torch had read its environment.

    A forked process leaves its parent's pool of threads when it first sets their number. Of RPC's threads each sets
    it at its start: two at once, and torch finds no pool and aborts ("Invalid thread pool!").
    """
    import torch
    from torch._inductor import config as inductor

    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    inductor.compile_threads = 1


def _silence(scratch: Path) -> None:
    """What libraries print while they are imported is of no interest."""
    _print_to(scratch / "import.txt")


def _print_to(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _stand_in_for_gpus() -> None:
    """As `minddp run --on-cpu`, with more devices than any test wants, and with what torch.compile needs."""
    import torch
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
    from torch.testing._internal import common_utils

    from minddp.tools.launch import on_cpu

    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3,4,5,6,7"
    TorchInGraphFunctionVariable._get_handlers()  # cached, by the identity of functions that will be replaced
    compile, context = torch.compile, torch.cuda.StreamContext
    on_cpu.install()
    torch.compile, torch.cuda.StreamContext = compile, context
    torch.cuda.nccl.version = lambda: (9, 9)  # decorators ask for the version, and for the system
    common_utils.IS_LINUX, common_utils.TEST_CUDA = False, True
    # Without CUDA profilers do not wait for its events.
    torch.cuda.is_available = lambda: sys._getframe(1).f_globals["__name__"] != "torch.autograd.profiler"


def _let_ranks_be_forked() -> None:
    """PyTorch's multi-process tests would spawn theirs."""
    import torch.multiprocessing
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    def fork(self: MultiProcessTestCase) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    MultiProcessTestCase._spawn_processes = fork  # type: ignore[method-assign]


def _give_up(programme: Programme, results: Connection) -> None:
    """The suite cannot be imported: so fails each of its tests."""
    text = traceback.format_exc()
    for test in programme.tests:
        results.send(Verdict(test, Status.FAIL, 0.0, f"import: {text.strip().splitlines()[-1]}", text))


# ------------------------------------------------------------------ running


def _run(test: TestId, programme: Programme, module: ModuleType, results: Connection, scratch: Path) -> Verdict:
    """One attempt, in a fork that leads a session and is killed with it."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    began_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        results.close()  # or it would look open to the reader for as long as this test runs
        perform(module, test.case, folder)
    try:
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() - began_s >= programme.limit_s:
                break
            time.sleep(_POLL_S)
    finally:
        _kill_session(pid)  # while its number cannot be given to another process yet
        os.waitpid(pid, 0)
    log = (folder / LOG).read_text(errors="replace") if (folder / LOG).exists() else ""
    seconds = time.monotonic() - began_s
    verdict = judge(test, read_report(folder), seconds, log, programme.limit_s)
    if programme.logs is not None and verdict.status in (Status.FAIL, Status.TIMEOUT):
        name = str(test).replace("::", ".")[:_NAME_CHARACTERS]
        (programme.logs / f"{name}.txt").write_text(f"{log}\n{verdict.detail}")
    shutil.rmtree(folder, ignore_errors=True)
    return verdict


def _kill_session(pid: int) -> None:
    """A test and the ranks it may have left behind; the test alone, if it has not come to lead a session."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


# ------------------------------------------------------------------ one test, in its fork

LOG, REPORT = "log.txt", "report.json"


def perform(module: ModuleType, case: str, folder: Path) -> NoReturn:
    """Run `Class.method` of `module` in the empty `folder`, leave a log and a report there, and exit.

    The process leads a session of its own, so that the processes that it starts are killed with it.
    """
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ranks are ended by it
        _settle_in(folder)
        swap.start_tally(folder / "tally")
        report = _report_on(module, case)
        _write(report, folder)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _settle_in(folder: Path) -> None:
    """Output into the log, temporary files into the folder, which also becomes the working directory."""
    _print_to(folder / LOG)
    os.chdir(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def _report_on(module: ModuleType, case: str) -> Report:
    class_name, _, method = case.partition(".")
    if not hasattr(getattr(module, class_name, None), method):
        return Report(Status.ABSENT, "the installed torch has no such test", 0)
    try:
        suite = unittest.defaultTestLoader.loadTestsFromName(case, module)
        result = unittest.TextTestRunner(stream=sys.stderr, verbosity=2).run(suite)
    except BaseException:
        return Report(Status.FAIL, traceback.format_exc(), swap.constructions())
    return Report(*_outcome(result), swap.constructions())


def _outcome(result: unittest.TestResult) -> tuple[Status, str]:
    for _, text in (*result.errors, *result.failures):
        return Status.FAIL, text
    for _, why in result.skipped:
        return Status.SKIP, why
    if result.unexpectedSuccesses:
        return Status.FAIL, "passed, although it is marked as an expected failure"
    if not result.testsRun:
        return Status.FAIL, "no test ran"
    return Status.PASS, ""


def _write(report: Report, folder: Path) -> None:
    unfinished = folder / "report.unfinished"
    unfinished.write_text(json.dumps(asdict(report)))
    unfinished.rename(folder / REPORT)


def read_report(folder: Path) -> Report | None:
    """The report that `perform` wrote there, if it got so far."""
    with contextlib.suppress(FileNotFoundError):
        stored = json.loads((folder / REPORT).read_text())
        return Report(Status(stored.pop("status")), **stored)
    return None
