"""All settings of a run, checked, as one frozen dataclass that tyro turns into the command line; without torch."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DEFAULT_NPROC = 2
DEFAULT_MINUTES = 1.0
TASKS = {"gpt": "minddp.tools.tasks.gpt:task", "digits": "minddp.tools.tasks.digits:task"}


class SettingsError(ValueError):
    """The settings cannot work. The message has one line per problem: the fact and the remedy."""

    exit_status = 2


class RunError(RuntimeError):
    """The run cannot continue. The message states the problem and a remedy."""

    exit_status = 1


class AgreedError(Exception):
    """Some rank has failed, and all ranks raise this same error."""

    def __init__(self, message: str, exit_status: int):
        self.exit_status = exit_status
        super().__init__(message)


@dataclass(frozen=True)
class Settings:
    """Train a model data-parallel: one process per rank, the same model on each, other data on each.

    Starts its own ranks. Under torchrun, or as tasks of SLURM's srun, it uses those ranks, and their number.
    """

    task: str = "gpt"
    """gpt: a small GPT on the bytes of text files; digits: a small ResNet; FILE.py:FUNCTION or PACKAGE:FUNCTION:
    your own, a function that returns a minddp.tools.train.task.Task."""
    task_options: tuple[str, ...] = ()
    """NAME=VALUE ...: arguments of the task's function, such as layers=6 width=256."""
    out: Path | None = None
    """Folder for checkpoints, metrics.jsonl, settings.json and logs. Default: runs/<task>."""
    resume: Literal["no", "yes", "auto"] = "no"
    """yes: continue from the newest checkpoint in the folder, with the same bits as an uninterrupted run;
    no: fail if there is a checkpoint; auto: continue if there is one, start otherwise."""
    overwrite: bool = False
    """Discard the run that is in the folder."""

    minutes: float | None = None
    """Stop after this time by rank 0's clock, validation included. Default: 1 unless --steps is given."""
    steps: int | None = None
    """Stop after this many optimizer steps."""
    seed: int = 0
    """Seed of the weights, the order of the data and dropout."""

    nproc: int | None = None
    """Ranks on this machine. Default: 2, or the launcher's number."""
    max_restarts: int = 0
    """How often all ranks are restarted from the newest checkpoint when one fails."""
    survive: bool = False
    """With --logical-ranks: continue with the same bits when ranks are lost; --max-restarts counts per rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if there is a device for every rank, else the CPU."""
    threads: int = 1
    """CPU threads per rank for torch's operators."""
    start_timeout_s: float = 120.0
    """Seconds within which all ranks must start."""
    timeout_s: float = 300.0
    """Seconds after which a waiting collective is an error."""

    batch_size: int = 8
    """Samples per rank and backward pass."""
    accumulate: int = 1
    """Backward passes per optimizer step; only the last one communicates gradients."""
    logical_ranks: int | None = None
    """Split each step into this many micro-batches of --batch-size, for the same bits on any number of ranks."""
    workers: int = 0
    """Processes per rank that load data; 0 loads it in the rank."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """sgd has Nesterov momentum 0.9."""
    zero: bool = False
    """Keep each parameter's optimizer state on one rank only: torch's ZeroRedundancyOptimizer."""
    learning_rate: float = 2e-3
    """Peak for one rank without accumulation."""
    scale_rate: Literal["linear", "sqrt", "none"] = "linear"
    """How the peak grows with ranks x accumulate."""
    schedule: Literal["cosine", "wsd", "step", "constant"] = "cosine"
    """After warm-up: cosine; wsd: constant, then linear over the last fifth; both end at 2% of the peak; step: a
    tenth at 1/2 and at 3/4."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises to its peak."""
    weight_decay: float = 0.1
    """For parameters with two dimensions or more."""
    clip_norm: float | None = 1.0
    """Maximum norm of the averaged gradient over all parameters; None: no clipping."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast the forward to bfloat16 or float16; float16 also scales the loss."""
    deterministic: Literal["auto", "on", "off"] = "auto"
    """Refuse operators without repeatable bits; auto: on the CPU."""
    ddp: Literal["minddp", "torch"] = "minddp"
    """Which DistributedDataParallel."""
    ddp_options: tuple[str, ...] = ()
    """NAME=VALUE ...: arguments of its constructor, such as bucket_cap_mb=5 static_graph=True."""
    comm_hook: Literal["none", "fp16_compress", "bf16_compress", "power_sgd", "bf16_wire", "int8_wire"] = "none"
    """A communication hook: three of torch's, and minddp's bf16_wire and int8_wire. Checkpoints contain the
    errors that int8_wire has not sent yet, but not the errors of power_sgd."""
    compile: Literal["no", "inductor", "aot_eager", "eager"] = "no"
    """torch.compile the wrapped model with this backend; inductor needs a C++ compiler for the CPU."""

    log_every: int = 20
    """Steps between two training records in metrics.jsonl."""
    validate_every: int = 200
    """Steps between two validations; there is always one at the end."""
    validation_samples: int = 512
    """Validation samples, spread evenly over the held-out data."""
    checkpoint_every: int = 500
    """Steps between two checkpoints; there is always one at the end and on Ctrl-C."""
    checkpoint_minutes: float | None = None
    """Minutes between two checkpoints, in addition to --checkpoint-every."""
    keep: int = 3
    """Newest checkpoints to keep, besides best.pt."""
    track: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Also send the records of metrics.jsonl there; wandb reads them from tensorboard's files."""
    xray: str | None = None
    """Record steps FIRST:LAST, LAST excluded, on every rank: xray.html and xray.json in the folder."""

    print_sbatch: bool = False
    """Only print a file for SLURM's sbatch that runs this command on --nodes x --nproc ranks."""
    nodes: int = 1
    """Machines, for --print-sbatch."""

    def __post_init__(self) -> None:
        if problems := [*_out_of_range(self), *_contradictions(self)]:
            raise SettingsError("\n".join(problems))

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / self.task.rpartition(":")[2]

    @property
    def limit_s(self) -> float:
        """Time limit in seconds; infinite if only steps limit the run."""
        if self.minutes is not None:
            return 60 * self.minutes
        return math.inf if self.steps is not None else 60 * DEFAULT_MINUTES

    @property
    def limit_steps(self) -> float:
        """Limit of optimizer steps; infinite if only time limits the run."""
        return math.inf if self.steps is None else self.steps

    def progress(self, step: int, elapsed_s: float) -> float:
        """The fraction of the run that is done, by the nearer limit. Without a time limit it ignores the clock."""
        return min(1.0, max(step / self.limit_steps, elapsed_s / self.limit_s))


def step_range(text: str | None) -> range:
    """`FIRST:LAST` as a range of steps, an empty one for None. Raises ValueError for anything else."""
    if text is None:
        return range(0)
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ValueError(f"{text} is not FIRST:LAST, two step numbers with FIRST smaller than LAST.")
    return range(int(first), int(last))


def arguments_for(function: Callable[..., Any], words: Sequence[str], flag: str) -> dict[str, Any]:
    """Parse NAME=VALUE words as keyword arguments of `function`. Values are Python literals, or else text.

    Raises:
        SettingsError: a word is not NAME=VALUE, or the function has no such parameter.
    """
    known = inspect.signature(function).parameters
    takes_any = any(param.kind is param.VAR_KEYWORD for param in known.values())
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (equals and (name in known or takes_any)):
            raise SettingsError(
                f"{flag} does not accept `{word}`; give NAME=VALUE, where NAME is one of {', '.join(known)}."
            )
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def _out_of_range(settings: Settings) -> Iterator[str]:
    """Problems of single fields."""
    counts = ["steps", "nproc", "nodes", "threads", "batch_size", "accumulate", "logical_ranks", "keep"]
    counts += ["log_every", "validate_every", "validation_samples", "checkpoint_every"]
    limits = ["minutes", "checkpoint_minutes", "start_timeout_s", "timeout_s", "learning_rate", "clip_norm"]
    others = ["weight_decay", "warmup_steps", "workers", "max_restarts"]
    for names, holds, complaint in (
        (counts, lambda n: n >= 1, "must be at least 1"),
        (limits, lambda x: 0 < x < math.inf, "must be a positive, finite number"),
        (others, lambda x: 0 <= x < math.inf, "must not be negative"),
        (["seed"], lambda n: 0 <= n < 2**32, "must lie between 0 and 2**32 - 1"),
    ):
        for name, value in ((name, getattr(settings, name)) for name in names):
            if value is not None and not holds(value):
                yield f"--{name.replace('_', '-')} {complaint}, but is {value}."


def _contradictions(settings: Settings) -> Iterator[str]:
    """Fields that exclude each other, and packages or programs that are missing on this machine."""
    is_logical = settings.logical_ranks is not None
    if settings.task not in TASKS and ":" not in settings.task:
        yield f"--task {settings.task} is neither {' nor '.join(TASKS)} nor FILE.py:FUNCTION nor PACKAGE:FUNCTION."
    if settings.overwrite and (settings.resume != "no" or settings.print_sbatch):
        yield "--overwrite excludes --resume, which every job of --print-sbatch has."
    if is_logical and settings.ddp == "torch":
        yield "--ddp torch has no logical ranks; remove --logical-ranks or --ddp."
    if is_logical and settings.accumulate > 1:
        yield "--accumulate and --logical-ranks exclude each other; raise --logical-ranks instead."
    if is_logical and settings.comm_hook != "none":
        yield "--comm-hook and --logical-ranks exclude each other: a hook changes the order of the sum."
    others = settings.zero or settings.track or settings.xray or settings.print_sbatch
    if settings.survive and (not is_logical or settings.device == "cuda" or others):
        yield "--survive needs --logical-ranks and the CPU, without --zero, --track, --xray, --print-sbatch."
    if settings.precision == "fp16" and "check_finite=True" in settings.ddp_options:
        yield "--precision fp16 needs infinite gradients to find its scale; remove check_finite=True."
    compiler = os.environ.get("CXX", "g++")
    if settings.compile == "inductor" and shutil.which(compiler) is None:
        yield f"--compile inductor needs a C++ compiler, but {compiler} is not found; set CXX or use aot_eager."
    try:
        if step_range(settings.xray).stop > settings.limit_steps:
            yield f"--xray {settings.xray} ends after --steps {settings.steps}; record earlier steps or take more."
    except ValueError as error:
        yield f"--xray {error}"
    for package in {"tensorboard", *settings.track} if settings.track else ():
        if importlib.util.find_spec(package) is None:
            flag = f"--track {' '.join(settings.track)}"
            yield f'{flag}: the package {package} is not installed. Run: pip install "minddp[train]"'
