"""All tests and measurements on a GPU, by one command: `python -m tests.gpu`, which is `make gpu`.

Each part runs in processes of its own with a time limit of its own; one that fails, hangs or crashes the driver
does not keep the next from running. Their output goes to `gpu.log`, their outcomes to `gpu.json`, in the
folder that `--out` names, beside the benchmarks' own `gpu_benchmark.json`. Both JSON files are written after each
part and keep the outcomes of parts that are not run again. Each part is reported in one line, with the end of its
output below if it failed, and a table of all comes last. Without a GPU it says so in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[2]
SHOWN_LINES = 30  # of a failed part
LEAST_S = 20  # with less left, a part is not begun
NOT_RUN = "not run: no time left"
CUT_SHORT = "cut short: no time left"


@dataclass(frozen=True)
class Part:
    """A name, files of tests or a benchmark's arguments, and seconds at most."""

    name: str
    what: tuple[str, ...]
    limit_s: float

    @property
    def is_benchmark(self) -> bool:
        return self.name.startswith("bench")


#: First the parts that others depend on, then those that show most for their time.
PARTS = (
    Part("card", ("tests/gpu/test_card.py", "tests/gpu/test_alive.py"), 210),
    Part("nccl", ("tests/gpu/test_nccl_transport.py",), 240),
    Part("beside_torch", ("tests/gpu/test_beside_torch.py",), 240),
    Part("host_waits", ("tests/gpu/test_host_waits.py",), 150),
    Part("bench_many_small", ("many_small",), 240),
    Part("bench_convnet", ("convnet",), 180),
    Part("bench_transformer", ("transformer",), 180),
    Part("graph", ("tests/gpu/test_graph.py",), 120),
    Part("tune", ("tests/gpu/test_tune.py",), 120),
    Part("xray", ("tests/gpu/test_xray.py",), 120),
    Part("bad_input", ("tests/gpu/test_bad_input.py",), 120),
    Part("parity", ("tests/gpu/test_parity.py",), 300),
    Part("compile", ("tests/gpu/test_compile.py",), 240),
)


@dataclass
class Outcome:
    """The outcome of a part. `failed` are its tests by name, each with the main line of its error."""

    part: str
    status: str
    seconds: float = 0.0
    passed: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    command: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all parts passed, or there is no GPU; 1 if some did not."""
    options = _parsed(argv)
    rehearses = options.rehearse
    if not (rehearses or torch.cuda.is_available()):
        print("No NVIDIA GPU here, so nothing was run; docs/gpu.md says what this would show.")
        return 0
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget_s
    known = _read(out / "gpu.json")
    chosen = [part for part in PARTS if not options.parts or part.name in options.parts]
    if options.rest:
        left_out = (NOT_RUN, CUT_SHORT)
        chosen = [part for part in chosen if part.name not in known or known[part.name].status in left_out]
    with (out / "gpu.log").open("a") as log:
        for part in chosen:
            left_s = deadline - time.monotonic()
            if left_s < LEAST_S:
                known.setdefault(part.name, Outcome(part.name, NOT_RUN))
            else:
                down = _worlds_down(known.get("card"))
                known[part.name] = _run(part, min(part.limit_s, left_s), out, log, down, rehearses=rehearses)
            _write(out / "gpu.json", known)
    outcomes = [known[part.name] for part in chosen]
    print(_table(outcomes))
    return int(any(outcome.status != "passed" for outcome in outcomes))


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--out", default="build/gpu", help="folder for the log and the results")
    parser.add_argument("--parts", nargs="*", choices=[part.name for part in PARTS], help="by default all")
    parser.add_argument(
        "--budget-s", type=float, default=1500, help="of all parts; a part without time left is not run"
    )
    parser.add_argument("--rest", action="store_true", help="only parts that the folder has no result of yet")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, as far as no GPU is needed")
    return parser.parse_args(argv)


def _run(part: Part, limit_s: float, out: Path, log: IO[str], down: Sequence[str], *, rehearses: bool) -> Outcome:
    report = out / f".{part.name}.xml"
    command = _command(part, report, out, limit_s, rehearses=rehearses)
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "MINDDP_GPU_REHEARSAL": "1" if rehearses else "0"}
    environment["MINDDP_GPU_WORLDS_DOWN"] = " ".join(down)
    began = time.monotonic()
    log.write(f"\n======== {part.name}: {' '.join(command)}\n")
    log.flush()
    place = log.tell()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also ranks that have outlived their test
    process.wait()
    outcome = Outcome(part.name, "passed", time.monotonic() - began, command=" ".join(command))
    with (out / "gpu.log").open() as written:
        written.seek(place)
        printed = written.read()
    if not _read_report(report, outcome):
        _read_progress(printed, outcome)
    if code is None:
        outcome.status = f"ended after {limit_s:.0f} s" if limit_s == part.limit_s else CUT_SHORT
    elif code != 0:
        outcome.status = "failed" if code > 0 else f"killed by signal {-code}"
    print(_line(outcome, part), flush=True)
    if outcome.status != "passed" or part.is_benchmark:
        print("\n".join(f"    {line[:300]}" for line in printed.splitlines()[-SHOWN_LINES:]), flush=True)
    return outcome


def _line(outcome: Outcome, part: Part) -> str:
    line = f"{part.name}: {outcome.status}, {outcome.seconds:.0f} s"
    if part.is_benchmark:
        return line
    return f"{line}; tests: {outcome.passed} passed, {len(outcome.failed)} failed, {outcome.skipped} skipped"


def _worlds_down(card: Outcome | None) -> list[str]:
    """The worlds of ranks that did not come up in the part `card`."""
    names = card.failed if card is not None else ()
    return [found[1] for name in names if (found := re.search(r"test_a_world_comes_up\[(\w+)\]", name))]


def _command(part: Part, report: Path, out: Path, limit_s: float, *, rehearses: bool) -> list[str]:
    if part.is_benchmark:
        target = ["--out", str((out / "gpu_benchmark.json").resolve())]
        limits = ["--timeout-s", f"{limit_s - 5:.0f}", "--race-s", f"{0.4 * limit_s:.0f}"]
        how = [*target, *limits, *(["--rehearse"] if rehearses else [])]
        return [sys.executable, "-m", "benchmarks.gpu", *part.what, *how]
    flags = ["-v", "-rPfE", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={report.resolve()}"]
    return [sys.executable, "-m", "pytest", *flags, *part.what]


def _read_report(report: Path, outcome: Outcome) -> bool:
    """True if there was one: pytest writes it at the end, so not after a benchmark, or a part that died or hung."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (FileNotFoundError, ElementTree.ParseError):
        return False
    for case in cases:
        errors = [*case.iter("failure"), *case.iter("error")]
        if errors:
            message = (errors[0].get("message") or "").strip()
            outcome.failed[case.get("name", "?")] = _main_line(message)
        elif next(case.iter("skipped"), None) is not None:
            outcome.skipped += 1
        else:
            outcome.passed += 1
    report.unlink()
    return True


def _read_progress(printed: str, outcome: Outcome) -> None:
    """The results that pytest has printed so far; the test that it was in counts as failed."""
    for line in printed.splitlines():
        found = re.match(r"tests/\S+?::(?P<name>.+?) (?P<result>PASSED|FAILED|ERROR|SKIPPED|$)", line)
        if found is None:
            continue
        if found["result"] == "PASSED":
            outcome.passed += 1
        elif found["result"] == "SKIPPED":
            outcome.skipped += 1
        else:
            outcome.failed[found["name"]] = "the part ended in it" if not found["result"] else "see the log"


def _main_line(message: str) -> str:
    """The last line that states an error, within a rank's traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "differs" in line or "should" in line]
    return (errors or lines or ["?"])[-1][:300]


def _read(path: Path) -> dict[str, Outcome]:
    """The outcomes of earlier runs into this folder."""
    if not path.exists():
        return {}
    return {outcome["part"]: Outcome(**outcome) for outcome in json.loads(path.read_text())["parts"]}


def _write(path: Path, known: Mapping[str, Outcome]) -> None:
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    about = {"card": card, "torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
    in_order = [asdict(known[part.name]) for part in PARTS if part.name in known]
    path.write_text(json.dumps(about | {"parts": in_order}, indent=1) + "\n")


def _table(outcomes: list[Outcome]) -> str:
    rows = [f"\n{'part':22} {'status':24} {'passed':>6} {'failed':>6} {'skipped':>7} {'seconds':>7}"]
    for outcome in outcomes:
        rows.append(
            f"{outcome.part:22} {outcome.status:24} {outcome.passed:6} {len(outcome.failed):6} "
            f"{outcome.skipped:7} {outcome.seconds:7.0f}"
        )
        rows += [f"    {name}: {error[:200]}" for name, error in list(outcome.failed.items())[:8]]
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
