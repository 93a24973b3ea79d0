"""A rank's view of the group: its number, the number of ranks, its device."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from minddp.train.settings import DEFAULT_NPROC, Settings, SettingsError

# What torchrun sets for every process it starts, and `init_process_group` reads.
TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """One rank's place in the group.

    `control` is a gloo group of its own, also beside NCCL: small agreements between the ranks travel on the
    CPU, so they neither wait for the GPU nor mix with the gradients.
    """

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints, logs and writes checkpoints."""
        return self.rank == 0


def is_rank(environment: Mapping[str, str]) -> bool:
    """True if torchrun, or a launcher that sets the same variables, started this process as a rank."""
    return all(name in environment for name in TORCHRUN_VARIABLES)


def world_sizes(settings: Settings, environment: Mapping[str, str]) -> tuple[int, int]:
    """Ranks in all, and ranks on this machine: as the launcher has started, or will start."""
    if is_rank(environment):
        return int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
    nproc = settings.nproc or DEFAULT_NPROC
    return nproc, nproc


def check_world(settings: Settings, environment: Mapping[str, str]) -> None:
    """Raise SettingsError where the settings cannot work with these ranks and this machine's devices."""
    world_size, local_size = world_sizes(settings, environment)
    if settings.nproc not in (None, local_size):
        raise SettingsError(
            f"--nproc {settings.nproc}, but torchrun has started {local_size} ranks on this machine; "
            f"leave --nproc out and give torchrun --nproc-per-node."
        )
    if settings.ddp == "none" and world_size > 1:
        raise SettingsError(
            f"--ddp none does not exchange gradients, so the models of {world_size} ranks would drift apart; "
            f"use it with --nproc 1."
        )
    if settings.device == "cuda" and torch.cuda.device_count() < local_size:
        raise SettingsError(
            f"--device cuda needs a device for each of the {local_size} ranks, but this machine has "
            f"{torch.cuda.device_count()}; use --nproc {max(1, torch.cuda.device_count())} or --device cpu."
        )


def choose_device(settings: Settings, local_rank: int, local_size: int) -> torch.device:
    """CUDA device `local_rank` where asked for or, by default, where each rank can have one; else the CPU."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
    on_cuda = settings.device == "cuda" or (settings.device == "auto" and enough)
    return torch.device("cuda", local_rank) if on_cuda else torch.device("cpu")


@contextmanager
def open_world(settings: Settings) -> Iterator[World]:
    """Join the group that the launcher's environment describes; leave it if the run succeeds."""
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = choose_device(settings, local_rank, local_size)
    torch.set_num_threads(settings.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # The same bits again on a GPU: cuBLAS reads this variable when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    timeout = datetime.timedelta(seconds=settings.timeout_s)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    yield World(dist.get_rank(), dist.get_world_size(), device, control)
    # Not in a `finally`: after a failure the other ranks may be gone, and leaving would wait for them.
    dist.destroy_process_group()
