"""One rank's view of the process group: joining it, its device, and agreements between all ranks."""

from __future__ import annotations

import datetime
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from minddp.platform import streams
from minddp.tools.train.settings import AgreedError, RunError, Settings

T = TypeVar("T")


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

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def agreed(self, decide: Callable[[], T]) -> T:
        """Call `decide` and return its result, or raise on every rank if it raises on any. Collective.

        A rank that raised alone would leave the others waiting in the next collective.

        Raises:
            AgreedError: with the messages of all ranks that have failed.
        """
        result, problem = None, None
        try:
            result = decide()
        except Exception as error:
            is_explained = isinstance(error, RunError | OSError)
            text = str(error) if is_explained else traceback.format_exc()
            problem = text, getattr(error, "exit_status", 1)
        problems: list[tuple[str, int] | None] = [None] * self.size
        dist.all_gather_object(problems, problem, group=self.control)
        ranks = {found: problems.index(found) for found in problems if found}  # equal messages once
        if ranks:
            texts = [f"(rank {rank}) {text}" if rank else text for (text, _), rank in ranks.items()]
            raise AgreedError("\n".join(texts), min(status for _, status in ranks))
        return result  # type: ignore[return-value]


@contextmanager
def open_world(settings: Settings) -> Iterator[World]:
    """Join the group that torchrun's variables describe; leave it if the run succeeds."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
    on_cpu = settings.device == "cpu" or (settings.device == "auto" and streams.num_devices("cuda") < local_size)
    device = torch.device("cpu") if on_cpu else torch.device("cuda", local_rank)
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(message)s", force=True)
    logging.captureWarnings(True)
    configure_torch(settings, device)
    timeout = datetime.timedelta(seconds=settings.timeout_s)
    # torch's launcher may keep its store: restarted ranks must not read the addresses of those before.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store_of_job(timeout))
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    yield World(rank, size, device, dist.new_group(backend="gloo", timeout=timeout), local_rank)
    # Not in a `finally`: after a failure the other ranks may be gone, and leaving would wait for them.
    dist.destroy_process_group()


def store_of_job(timeout: datetime.timedelta) -> dist.Store:
    """The store that torch's `env://` finds: the launcher's, or one that rank 0 hosts."""
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return store


def configure_torch(settings: Settings, device: torch.device) -> None:
    torch.set_num_threads(settings.threads)
    if device.type == "cuda":
        streams.make_current(device)
    if settings.deterministic == "on" or (settings.deterministic == "auto" and device.type == "cpu"):
        # cuBLAS needs this variable for repeatable bits, and reads it at its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
