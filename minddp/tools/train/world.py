"""One rank's view of the process group: joining it, its device, and agreements between all ranks."""

from __future__ import annotations

import datetime
import logging
import math
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from minddp.platform import streams
from minddp.platform.store import Messages
from minddp.tools.elastic import Session, join
from minddp.tools.job.place import Place, place_of
from minddp.tools.job.store_connection import StoreUnreachable, first_line, open_store
from minddp.tools.train.cluster import rank_variables
from minddp.tools.train.settings import AgreedError, RunError, Settings, SettingsError

T = TypeVar("T")

# Read by NCCL's process group. Values in the environment take precedence.
NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # a collective that fails or exceeds --timeout-s ends the process
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # the flight recorder remembers this many collectives,
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # and writes them to a file when one times out
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600",  # seconds after which a hanging watchdog thread ends the process
}


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
    restarts: int = 0  # by torchrun of these ranks, and by SLURM of this job
    session: Session | None = None  # with --survive

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def agreed(self, decide: Callable[[], T]) -> T:
        """Call `decide` and return its result, or raise on every rank if it raises on any. Collective.

        Raises:
            AgreedError: with the messages of all ranks that have failed.
        """
        result, problem = None, None
        try:
            result = decide()
        except (SettingsError, RunError) as error:
            problem = str(error), error.exit_status
        except OSError as error:
            problem = str(error), 1
        except Exception:
            problem = traceback.format_exc(), 1
        problems: list[tuple[str, int] | None] = [None] * self.size
        dist.all_gather_object(problems, problem, group=self.control)
        ranks = {found: problems.index(found) for found in problems if found}  # equal messages once
        if ranks:
            texts = [f"(rank {rank}) {text}" if rank else text for (text, _), rank in ranks.items()]
            raise AgreedError("\n".join(texts), min(status for _, status in ranks))
        return result  # type: ignore[return-value]


def choose_device(settings: Settings, local_rank: int, local_size: int) -> torch.device:
    """CUDA device `local_rank` if requested or, by default, if every rank can have one; else the CPU."""
    enough = streams.num_devices("cuda") >= local_size
    on_cuda = settings.device == "cuda" or (settings.device == "auto" and enough and not settings.survive)
    return torch.device("cuda", local_rank) if on_cuda else torch.device("cpu")


@contextmanager
def open_world(settings: Settings) -> Iterator[World]:
    """Join the group that the launcher's environment describes; leave it if the run succeeds."""
    os.environ.update(rank_variables(os.environ))
    place = place_of(os.environ)
    assert place is not None
    local_rank = place.local_rank or 0
    device = choose_device(settings, local_rank, place.local_world_size)
    limits = {"start_limit_s": settings.start_timeout_s, "timeout_s": settings.timeout_s}
    session = join(**limits) if settings.survive else None
    log_with_rank(settings, place.rank if session is None else session.member)
    configure_torch(settings, device)
    if session is not None:
        yield World(0, 1, device, dist.distributed_c10d._get_default_group(), session=session)
        return
    messages = meet(place, settings.start_timeout_s)
    timeout = datetime.timedelta(seconds=settings.timeout_s)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(
        backend, store=messages.store, rank=place.rank, world_size=place.world_size, timeout=timeout
    )
    control = dist.new_group(backend="gloo", timeout=timeout)
    restarts = place.restarts + int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    yield World(place.rank, place.world_size, device, control, local_rank, restarts)
    # Not in a `finally`: after a failure the other ranks may be gone, and leaving would wait for them.
    dist.destroy_process_group()
    with suppress(RuntimeError):  # the process that holds the store, rank 0 or the launcher, may have ended
        wait_for_all(messages, "left", settings.start_timeout_s)


def configure_torch(settings: Settings, device: torch.device) -> None:
    torch.set_num_threads(settings.threads)
    if device.type == "cuda":
        streams.make_current(device)
        for name, value in NCCL_VARIABLES.items():
            os.environ.setdefault(name, value)
    if settings.deterministic == "on" or (settings.deterministic == "auto" and device.type == "cpu"):
        # cuBLAS needs this variable for repeatable bits, and reads it at its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def log_with_rank(settings: Settings, rank: int) -> None:
    """Show the warnings of every rank with its number, and also write them to logs/rank-N.log."""
    folder = settings.folder / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    shown, kept = logging.StreamHandler(), logging.FileHandler(folder / f"rank-{rank}.log")
    shown.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
    kept.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[shown, kept], force=True)
    logging.captureWarnings(True)


def meet(place: Place, limit_s: float) -> Messages:
    """Messages in the store of the group, once all ranks have connected to it. Raises RunError with the missing."""
    try:
        store = open_store(place, limit_s)
    except StoreUnreachable as error:
        where = f"the store at {place.endpoint} within {limit_s:g} s ({error.obstacle}: {error.detail})"
        raise RunError(f"Rank {place.rank} cannot reach {where}.") from error
    prefixed = dist.PrefixStore(f"minddp train/{place.restarts}", store)
    messages = Messages(prefixed, "meeting", place.rank, place.world_size)
    try:
        wait_for_all(messages, "here", limit_s)
    except RuntimeError as error:
        raise RunError(
            f"Not all {place.world_size} ranks have started: {first_line(error).rstrip('.')}. Check the output of "
            f"their hosts, or raise the limit, --start-timeout-s."
        ) from error
    return messages


def wait_for_all(messages: Messages, key: str, limit_s: float) -> None:
    """Raises RuntimeError, with the absent ranks, if not all ranks have called this within `limit_s`."""
    messages.arrive(key, limit_s=limit_s)(math.inf)
