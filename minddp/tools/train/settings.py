"""All settings of a run, checked, as one frozen dataclass that tyro turns into the command line; without torch."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TASKS = {"gpt": "minddp.tools.tasks.gpt:task"}
MAY_BE_ZERO = {"seed", "max_restarts", "workers", "warmup_steps", "weight_decay"}


class RunError(RuntimeError):
    """The run cannot continue. The message states the problem and a remedy."""

    exit_status = 1


class SettingsError(RunError):
    """The settings cannot work."""

    exit_status = 2


@dataclass(frozen=True)
class Settings:
    """Train a model data-parallel: one process per rank, the same model on each, other data on each.

    Starts its own ranks. Under torchrun, or as tasks of SLURM's srun, it uses those ranks, and their number.
    """

    task: str = "gpt"
    """gpt: a small GPT on the bytes of text files; FILE.py:FUNCTION or PACKAGE:FUNCTION: your own, a function that
    returns a minddp.tools.train.task.Task."""
    task_options: tuple[str, ...] = ()
    """NAME=VALUE ...: arguments of the task's function, such as layers=6 width=256."""
    out: Path | None = None
    """Folder for checkpoints and metrics.jsonl. Default: runs/<task>."""
    resume: Literal["no", "auto"] = "no"
    """auto: continue from the newest checkpoint in the folder, if there is one, with the same bits as an
    uninterrupted run; no: fail if there is a checkpoint."""

    steps: int = 1000
    """Optimizer steps of the run."""
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
    workers: int = 0
    """Processes per rank that load data; 0 loads it in the rank."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """sgd has Nesterov momentum 0.9."""
    learning_rate: float = 2e-3
    """Peak for one rank without accumulation. It is multiplied by ranks x accumulate."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After warm-up; cosine ends at 2% of the peak."""
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
        for name, value in vars(self).items():
            may_be_zero = name in MAY_BE_ZERO
            if isinstance(value, int | float) and not (0 < value < math.inf or (value == 0 and may_be_zero)):
                least = "at least 0" if may_be_zero else "greater than 0"
                raise SettingsError(f"--{name.replace('_', '-')} must be {least} and finite, but is {value}.")
        if self.task not in TASKS and ":" not in self.task:
            raise SettingsError(
                f"--task {self.task} is none of {', '.join(TASKS)}, FILE.py:FUNCTION, PACKAGE:FUNCTION."
            )

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / self.task.rpartition(":")[2]


def arguments_for(function: Callable[..., Any], words: Sequence[str], flag: str) -> dict[str, Any]:
    """Parse NAME=VALUE words as keyword arguments of `function`. Values are Python literals, or else text.

    Raises:
        SettingsError: a word is not NAME=VALUE, or the function has no such parameter.
    """
    try:
        arguments = {name: literal_or_text(value) for name, value in (word.split("=", 1) for word in words)}
        inspect.signature(function).bind_partial(**arguments)
    except (TypeError, ValueError) as error:
        names = ", ".join(inspect.signature(function).parameters)
        raise SettingsError(
            f"{flag} {' '.join(words)}: {error}; give NAME=VALUE, where NAME is one of {names}."
        ) from error
    return arguments


def literal_or_text(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word
