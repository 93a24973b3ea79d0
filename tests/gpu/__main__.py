"""All tests and measurements on a GPU, by one command: `python -m tests.gpu`, which is `make gpu`.

Each part runs in processes of its own with a time limit of its own; one that fails, hangs or takes the driver down
with it does not keep the next from running. What they print goes to `gpu.log`, what came of them to `gpu.json`, in
the folder that `--out` names, beside the benchmarks' own `gpu_benchmark.json`. The end of a failed part's output is
shown at once, and a table of all parts last. Without a GPU it says so in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[2]
SHOWN_LINES = 30  # of a failed part


@dataclass(frozen=True)
class Part:
    """A name, what to run (files of tests, or a benchmark's arguments), and seconds at most."""

    name: str
    what: tuple[str, ...]
    limit_s: float

    @property
    def is_benchmark(self) -> bool:
        return self.name.startswith("bench")


#: What others depend on first, then what tells most for its time.
PARTS = (
    Part("card", ("tests/gpu/test_card.py", "tests/gpu/test_alive.py"), 150),
    Part("fused_pack", ("tests/gpu/test_fused_pack.py",), 120),
    Part("nccl", ("tests/gpu/test_nccl_transport.py",), 240),
    Part("beside_torch", ("tests/gpu/test_beside_torch.py",), 240),
    Part("beside_torch_fused", ("tests/gpu/test_beside_torch.py",), 240),
    Part("host_waits", ("tests/gpu/test_host_waits.py",), 150),
    Part("bench_copies", ("copies",), 60),
    Part("bench_many_small", ("many_small",), 120),
    Part("bench_resnet50", ("resnet50",), 180),
    Part("bench_gpt2", ("gpt2",), 180),
    Part("graph", ("tests/gpu/test_graph.py",), 120),
    Part("xray", ("tests/gpu/test_xray.py",), 90),
    Part("bad_input", ("tests/gpu/test_bad_input.py",), 120),
    Part("parity", ("tests/gpu/test_parity.py",), 300),
    Part("parity_fused", ("tests/gpu/test_parity.py",), 300),
    Part("compile", ("tests/gpu/test_compile.py",), 240),
)


@dataclass
class Outcome:
    """What became of a part. `failed` are its tests by name, each with the first line of its error."""

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
    parts = [part for part in PARTS if not options.parts or part.name in options.parts]
    outcomes: list[Outcome] = []
    with (out / "gpu.log").open("a") as log:
        for part in parts:
            left_s = deadline - time.monotonic()
            if left_s < 20:
                outcomes.append(Outcome(part.name, "not run: no time left"))
                continue
            outcomes.append(_run(part, min(part.limit_s, left_s), out, log, rehearses=rehearses))
            _write(out / "gpu.json", outcomes)
    _write(out / "gpu.json", outcomes)
    print(_table(outcomes))
    return int(any(outcome.status != "passed" for outcome in outcomes))


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--out", default="build/gpu", help="folder for the log and the results")
    parser.add_argument("--parts", nargs="*", choices=[part.name for part in PARTS], help="by default all")
    parser.add_argument("--budget-s", type=float, default=1500, help="parts that would begin later are left out")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, as far as no GPU is needed")
    return parser.parse_args(argv)


def _run(part: Part, limit_s: float, out: Path, log, *, rehearses: bool) -> Outcome:  # type: ignore[no-untyped-def]
    report = out / f".{part.name}.xml"
    command = _command(part, report, out, rehearses=rehearses)
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "MINDDP_GPU_REHEARSAL": "1" if rehearses else "0"}
    if part.name.endswith("_fused"):
        environment["MINDDP_FUSED_PACK"] = "1"
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
    _read_report(report, outcome)
    if code is None:
        outcome.status = f"ended after {limit_s:.0f} s"
    elif code != 0:
        outcome.status = "failed" if code > 0 else f"killed by signal {-code}"
    log.flush()
    print(f"{part.name}: {outcome.status}, {outcome.passed} passed, {outcome.seconds:.0f} s", flush=True)
    if outcome.status != "passed" or part.is_benchmark:
        with (out / "gpu.log").open() as written:
            written.seek(place)
            print("\n".join(f"    {line[:300]}" for line in written.read().splitlines()[-SHOWN_LINES:]), flush=True)
    return outcome


def _command(part: Part, report: Path, out: Path, *, rehearses: bool) -> list[str]:
    if part.is_benchmark:
        target = ["--out", str((out / "gpu_benchmark.json").resolve())]
        return [sys.executable, "-m", "benchmarks.gpu", *part.what, *target, *(["--rehearse"] if rehearses else [])]
    flags = ["-v", "-rfE", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={report.resolve()}"]
    return [sys.executable, "-m", "pytest", *flags, *part.what]


def _read_report(report: Path, outcome: Outcome) -> None:
    """Pytest writes it at the end: there is none after a benchmark, or where a time limit came first."""
    if not report.exists():
        return
    for case in ElementTree.parse(report).iter("testcase"):
        errors = [*case.iter("failure"), *case.iter("error")]
        if errors:
            message = (errors[0].get("message") or "").strip()
            outcome.failed[case.get("name", "?")] = _most_telling(message)
        elif next(case.iter("skipped"), None) is not None:
            outcome.skipped += 1
        else:
            outcome.passed += 1
    report.unlink()


def _most_telling(message: str) -> str:
    """The last line that says something of an error, within a rank's traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "differs" in line or "should" in line]
    return (errors or lines or ["?"])[-1][:300]


def _write(path: Path, outcomes: list[Outcome]) -> None:
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    about = {"card": card, "torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
    path.write_text(json.dumps(about | {"parts": [asdict(outcome) for outcome in outcomes]}, indent=1) + "\n")


def _table(outcomes: list[Outcome]) -> str:
    rows = [f"\n{'part':18} {'status':24} {'passed':>6} {'failed':>6} {'skipped':>7} {'seconds':>7}"]
    for outcome in outcomes:
        rows.append(
            f"{outcome.part:18} {outcome.status:24} {outcome.passed:6} {len(outcome.failed):6} "
            f"{outcome.skipped:7} {outcome.seconds:7.0f}"
        )
        rows += [f"    {name}: {error[:200]}" for name, error in list(outcome.failed.items())[:8]]
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
