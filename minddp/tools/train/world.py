"""One rank's view of the process group: joining it, and the device of the rank."""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from minddp.platform import streams
from minddp.tools.train.settings import Settings


@dataclass(frozen=True)
class World:
    """The place of one rank in the process group.

    `control` is a gloo group, also beside NCCL: small agreements travel on the CPU, where they neither wait for the
    GPU nor interleave with the gradients.
    """

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup
    local_rank: int = 0


@contextmanager
def open_world(settings: Settings) -> Iterator[World]:
    """Join the group that torchrun's variables describe; leave it if the run succeeds.

    A rank that raises an error ends. The launcher then ends the others, whose collectives would wait for it.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
    on_cpu = settings.device == "cpu" or (settings.device == "auto" and streams.num_devices("cuda") < local_size)
    device = torch.device("cpu") if on_cpu else torch.device("cuda", local_rank)
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(message)s", force=True)
    logging.captureWarnings(True)
    torch.set_num_threads(settings.threads)
    if device.type == "cuda":
        torch.get_device_module(device).set_device(device)
    if settings.deterministic == "on" or (settings.deterministic == "auto" and on_cpu):
        # cuBLAS needs this variable for repeatable bits, and reads it at its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=settings.timeout_s)
    store, _, _ = next(rendezvous("env://", timeout=timeout))  # the launcher's, or one that rank 0 hosts
    store.set_timeout(timeout)
    # torch's launcher may keep its store: restarted ranks must not read the addresses of those before.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    yield World(rank, size, device, dist.new_group(backend="gloo", timeout=timeout), local_rank)
    # Not in a `finally`: after a failure the other ranks may be gone, and leaving would wait for them.
    dist.destroy_process_group()
