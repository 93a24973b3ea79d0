"""All settings of a run, checked, as one frozen dataclass that tyro turns into the command line; without torch."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DEFAULT_MINUTES = 1.0
TASKS = {"gpt": "minddp.tools.tasks.gpt:task", "digits": "minddp.tools.tasks.digits:task"}
MAY_BE_ZERO = {"seed", "max_restarts", "workers", "warmup_steps", "weight_decay"}


class RunError(RuntimeError):
    """The run cannot continue. The message states the problem and a remedy."""

    exit_status = 1


class SettingsError(RunError):
    """The settings cannot work. The message has one line per problem: the fact and the remedy."""

    exit_status = 2


class AgreedError(RunError):
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
    """Folder for checkpoints and metrics.jsonl. Default: runs/<task>."""
    resume: Literal["no", "auto"] = "no"
    """auto: continue from the newest checkpoint in the folder, if there is one, with the same bits as an
    uninterrupted run; no: fail if there is a checkpoint."""
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
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if there is a device for every rank, else the CPU."""
    threads: int = 1
    """CPU threads per rank for torch's operators."""
    timeout_s: float = 300.0
    """Seconds after which a wait for other ranks is an error: for their start, or in a collective."""

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
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After warm-up: cosine; wsd: constant, then linear over the last fifth; both end at 2% of the peak."""
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
    """A communication hook: three of torch's, and minddp's bf16_wire and int8_wire. Checkpoints contain the errors
    that int8_wire has not sent yet, but not the errors of power_sgd."""

    log_every: int = 20
    """Steps between two training records in metrics.jsonl."""
    validate_every: int = 200
    """Steps between two validations; there is always one at the end."""
    validation_samples: int = 512
    """Validation samples, spread evenly over the held-out data."""
    checkpoint_every: int = 500
    """Steps between two checkpoints; there is always one at the end and on Ctrl-C."""
    keep: int = 3
    """Newest checkpoints to keep."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise SettingsError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        for name, value in vars(self).items():
            least = "at least 0" if name in MAY_BE_ZERO else "greater than 0"
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not (0 <= value < math.inf and (value > 0 or name in MAY_BE_ZERO)):
                yield f"--{name.replace('_', '-')} must be {least} and finite, but is {value}."
        if self.task not in TASKS and ":" not in self.task:
            yield f"--task {self.task} is neither {' nor '.join(TASKS)} nor FILE.py:FUNCTION nor PACKAGE:FUNCTION."
        if self.overwrite and self.resume != "no":
            yield "--overwrite excludes --resume."
        others = self.ddp == "torch" or self.accumulate > 1 or self.comm_hook != "none"
        if self.logical_ranks is not None and others:
            yield "--logical-ranks excludes --ddp torch, --accumulate and --comm-hook."

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / self.task.rpartition(":")[2]

    def progress(self, step: int, elapsed_s: float) -> float:
        """The fraction of the run that is done, by the nearer limit. Without a time limit it ignores the clock."""
        by_steps = 0.0 if self.steps is None else step / self.steps
        minutes = DEFAULT_MINUTES if self.steps is None and self.minutes is None else self.minutes
        by_time = 0.0 if minutes is None else elapsed_s / (60 * minutes)
        return min(1.0, max(by_steps, by_time))


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
