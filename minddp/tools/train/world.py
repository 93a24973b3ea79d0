"""A rank's view of the group: its number, the number of ranks, its device, and that all have come."""

from __future__ import annotations

import datetime
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from minddp.platform import streams
from minddp.platform.store import Messages
from minddp.tools.elastic import Session, join
from minddp.tools.train.cluster import rank_variables, world_sizes
from minddp.tools.train.settings import Failed, Refused, RunError, Settings, SettingsError

T = TypeVar("T")

# What NCCL's process group reads, set unless it is set already.
NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # a collective that fails or exceeds --timeout-s ends the process
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # the flight recorder remembers so many collectives,
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # and writes them to a file when one exceeds its time
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600",  # seconds after which a hanging watchdog thread ends the process
}


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
    local_rank: int = 0
    restarts: int = 0  # of these ranks by torchrun, and of this job by SLURM
    session: Session | None = None  # with --survive

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def agreed(self, decide: Callable[[], T]) -> T:
        """What `decide` returns on this rank, if it returns on every rank. Collective.

        Raises Refused or Failed, with the same message on all ranks, if it has raised on some.
        """
        errors: list[tuple[type, str] | None] = [None] * self.size
        result, ours = None, None
        try:
            result = decide()
        except (SettingsError, RunError, OSError) as error:
            ours = Refused if isinstance(error, SettingsError) else Failed, str(error)
        except Exception:
            ours = Failed, traceback.format_exc()
        dist.all_gather_object(errors, ours, group=self.control)
        by_text = {error[1]: (rank, error[0]) for rank, error in reversed(list(enumerate(errors))) if error}
        if by_text:
            kind = Failed if Failed in [kind for _, kind in by_text.values()] else Refused
            raise kind("\n".join(f"(rank {rank}) {text}" if rank else text for text, (rank, _) in by_text.items()))
        return result  # type: ignore[return-value]


def check_world(settings: Settings, environment: Mapping[str, str]) -> None:
    """Raise SettingsError where the settings cannot work with these ranks and this machine's devices."""
    world_size, local_size = world_sizes(settings, environment)
    if settings.nproc not in (None, local_size):
        raise SettingsError(
            f"--nproc {settings.nproc}, but the launcher has started {local_size} ranks on this machine; leave "
            f"--nproc out and give torchrun --nproc-per-node, or srun --ntasks-per-node."
        )
    restarts = ("TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT")
    if settings.resume == "no" and any(environment.get(name, "0") != "0" for name in restarts):
        raise SettingsError(
            "This launcher starts ranks again, and then they must continue: pass --resume auto. An old run must be "
            "removed by hand, or left alone by another --out."
        )
    if settings.logical_ranks is not None and settings.logical_ranks < world_size:
        raise SettingsError(
            f"--logical-ranks {settings.logical_ranks} cannot be dealt to {world_size} ranks: some would compute "
            f"nothing. Raise it, or start at most {settings.logical_ranks} ranks."
        )
    if settings.comm_hook == "bf16_compress" and choose_device(settings, 0, local_size).type == "cpu":
        raise SettingsError("--comm-hook bf16_compress works with NCCL only; use fp16_compress on the CPU.")
    if settings.device == "cuda" and (has := streams.num_devices("cuda")) < local_size:
        raise SettingsError(
            f"--device cuda needs a device for each of the {local_size} ranks, but this machine has {has}; use "
            f"--nproc {max(1, has)} or --device cpu."
        )


def choose_device(settings: Settings, local_rank: int, local_size: int) -> torch.device:
    """CUDA device `local_rank` where asked for or, by default, where each rank can have one; else the CPU."""
    enough = streams.num_devices("cuda") >= local_size
    on_cuda = settings.device == "cuda" or (settings.device == "auto" and enough and not settings.survive)
    return torch.device("cuda", local_rank) if on_cuda else torch.device("cpu")


@contextmanager
def open_world(settings: Settings) -> Iterator[World]:
    """Join the group that the launcher's environment describes; leave it if the run succeeds."""
    os.environ.update(rank_variables(os.environ))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = choose_device(settings, local_rank, local_size)
    limits = {"start_limit_s": settings.start_timeout_s, "timeout_s": settings.timeout_s}
    session = join(**limits) if settings.survive else None
    log_with_rank(settings, rank if session is None else session.member)
    torch.set_num_threads(settings.threads)
    if device.type == "cuda":
        streams.make_current(device)
        for name, value in NCCL_VARIABLES.items():
            os.environ.setdefault(name, value)
    if settings.deterministic == "on" or (settings.deterministic == "auto" and device.type == "cpu"):
        # The same bits again on a GPU: cuBLAS reads this variable when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if session is not None:
        yield World(0, 1, device, dist.distributed_c10d._get_default_group(), session=session)
        return
    store = meet(rank, size, settings.start_timeout_s)
    timeout = datetime.timedelta(seconds=settings.timeout_s)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    check_health(rank, size, device)
    restarts = (int(os.environ.get(f"{by}_RESTART_COUNT", 0)) for by in ("TORCHELASTIC", "SLURM"))
    yield World(rank, size, device, control, local_rank, sum(restarts))
    # Not in a `finally`: after a failure the other ranks may be gone, and leaving would wait for them.
    dist.destroy_process_group()
    with suppress(RuntimeError):  # the launcher is gone, and its store
        messages = Messages(store, "minddp", rank, size)
        messages.post(True, "left")
        if rank == 0:  # it may hold the store, and a rank that finds it gone waits for its time limit
            messages.gather("left", limit_s=settings.start_timeout_s)


def log_with_rank(settings: Settings, rank: int) -> None:
    """Show every rank's warnings with its number, and write them to logs/rank-N.log, too."""
    folder = settings.folder / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    shown, kept = logging.StreamHandler(), logging.FileHandler(folder / f"rank-{rank}.log")
    shown.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
    kept.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[shown, kept], force=True)
    logging.captureWarnings(True)


def meet(rank: int, size: int, limit_s: float) -> dist.Store:
    """The store of the group, once all ranks have come to it. Raises RunError that names those that have not."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = datetime.timedelta(seconds=limit_s)
    try:
        store = dist.TCPStore(host, port, is_master=is_master, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        raise RunError(f"Rank {rank} cannot reach the store at {host}:{port} within {limit_s:g} s.") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefixed = dist.PrefixStore(f"minddp train/{attempt}", store)
    messages = Messages(prefixed, "minddp", rank, size)
    messages.post(True, "here")
    come = messages.gather("here", limit_s=limit_s)
    if missing := sorted(set(range(size)) - come.keys()):
        raise RunError(
            f"{len(missing)} of {size} ranks have not come within --start-timeout-s {limit_s:g}: "
            f"{', '.join(map(str, missing[:20]))}. See what their hosts say, or raise the limit."
        )
    return prefixed


def check_health(rank: int, size: int, device: torch.device) -> None:
    """One sum over all ranks, before anything expensive begins. Raises RunError for a wrong one."""
    numbers = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    if (found := numbers.unique().tolist()) != [size * (size + 1) / 2]:
        raise RunError(f"Rank {rank}: an all-reduce of rank + 1 gives {found}. See `minddp doctor`.")
