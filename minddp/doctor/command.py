"""`minddp doctor`: start the ranks that are examined, or be one of them, and print the report."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import tyro
from rich.console import Console

from minddp.doctor.place import Place, PlaceError, place_of
from minddp.platform.launcher import RanksFailed, Stopped, launch

DEFAULT_RANKS = 2
_REPORT_WIDTH = 100  # where there is no terminal to ask


class SettingsError(ValueError):
    """Settings that cannot work; the message says what to do."""


@dataclass(frozen=True)
class Settings:
    """Check whether a distributed job will work here, and what to do if not.

    Starts its own ranks on this machine. Started by torchrun, also on several hosts, it is one of the ranks:

        torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m minddp doctor

    If torchrun itself gets no further, start one process on each host by hand, with RANK 0, 1, ...:

        RANK=0 WORLD_SIZE=2 MASTER_ADDR=HOST MASTER_PORT=29500 minddp doctor

    Exit status: 0 if nothing is broken, 1 if something is, 2 if it was called wrongly.
    """

    nproc_per_node: int | None = None
    """Ranks to start on this machine; by default one for each GPU, or 2 on the CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the job will compute on; by default GPUs if each rank can have one of its own."""
    timeout_s: float = 30.0
    """How long to wait for other ranks, in each step."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write all findings, times and facts there, too."""

    def __post_init__(self) -> None:
        if self.nproc_per_node is not None and self.nproc_per_node < 1:
            raise SettingsError(f"--nproc-per-node must be at least 1, but is {self.nproc_per_node}.")
        if not 0 < self.timeout_s < math.inf:
            raise SettingsError(f"--timeout-s must be a positive, finite number, but is {self.timeout_s}.")
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise SettingsError(f"--json {self.json}: there is no folder {self.json.absolute().parent}.")


def main(arguments: Sequence[str]) -> int:
    """Run `minddp doctor` with these arguments; returns the exit status. As a rank it ends the process."""
    try:
        settings = tyro.cli(Settings, prog="minddp doctor", args=list(arguments), config=(tyro.conf.DisallowNone,))
        place = place_of(os.environ)
        if place is None:
            return start_ranks(settings, arguments)
        check_number_of_ranks(settings, place)
    except (SettingsError, PlaceError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _complain(error)
        return 2
    return be_rank(settings, place)


def check_number_of_ranks(settings: Settings, place: Place) -> None:
    if settings.nproc_per_node not in (None, place.local_world_size):
        raise SettingsError(
            f"--nproc-per-node {settings.nproc_per_node}, but this is rank {place.rank} of {place.world_size} that "
            f"a launcher has started; leave it out, or give it to torchrun."
        )


# ---------------------------------------------------------------------- the launcher


def start_ranks(settings: Settings, arguments: Sequence[str]) -> int:
    """Have ranks examined that are started here; rank 0 prints the report."""
    nproc = settings.nproc_per_node or _default_ranks(settings)
    if nproc > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    with tempfile.TemporaryDirectory(prefix="minddp-doctor-") as folder:
        told = Path(folder) / "report.json"
        try:
            launch(nproc, "minddp", ["doctor", *arguments, "--json", str(told)])
        except RanksFailed as error:
            if not told.exists():
                _complain(error)
                return 1
        except Stopped as stopped:
            return 128 + stopped.signal_number
        if settings.json is not None:
            settings.json.write_bytes(told.read_bytes())
        return int(json.loads(told.read_text())["exit_status"])


def _default_ranks(settings: Settings) -> int:
    import torch

    return (torch.cuda.device_count() if settings.device != "cpu" else 0) or DEFAULT_RANKS


def _complain(error: Exception) -> None:
    Console(stderr=True).print(f"minddp doctor: {error}", markup=False, highlight=False, soft_wrap=True)


# ---------------------------------------------------------------------- a rank


def be_rank(settings: Settings, place: Place) -> NoReturn:
    """Be examined as one of the ranks, print what is to print, and end the process: also if threads hang in it."""
    from minddp.doctor.examination import examine
    from minddp.doctor.patience import TimeUp, patiently
    from minddp.doctor.progress import Progress
    from minddp.doctor.report import Report, show

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_REPORT_WIDTH)
    progress = Progress(console, place.rank == 0, f"minddp doctor, rank {place.rank}")

    def deliver(report: Report) -> None:
        progress.stop()
        show(report, console)
        if settings.json is not None and place.rank == 0:
            settings.json.write_text(json.dumps(report.to_json(), indent=1) + "\n")

    status = 1
    limit_s = 8 * settings.timeout_s + 300
    try:
        with hushed_stderr():
            report = patiently(
                lambda: examine(place, settings.device, settings.timeout_s, os.environ, progress, deliver), limit_s
            )
        status = report.exit_status
    except TimeUp:
        _complain(TimeUp(f"rank {place.rank} was not through after {limit_s:g} s, and gives up."))
    except KeyboardInterrupt:
        status = 130
    except Exception:
        traceback.print_exc()
    progress.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def hushed_stderr() -> Iterator[None]:
    """Keep off the terminal what torch's C++ writes to standard error: stacks, for errors that it raises too."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
