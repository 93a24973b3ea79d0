"""All settings of a run, as one frozen dataclass that tyro turns into the command line.

The constructor of `Settings` checks every field and the pairs that exclude each other. This file does not import
torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

DEFAULT_NPROC = 2
DEFAULT_MINUTES = 1.0


class SettingsError(ValueError):
    """Settings that cannot work. The message is one line per problem: what is wrong, and what to do."""


@dataclass(frozen=True)
class GPTOptions:
    """The GPT and the text it reads (--task gpt)."""

    layers: int = 3
    """Transformer blocks."""
    heads: int = 4
    """Attention heads per block; divides the width into even parts."""
    width: int = 128
    """Channels of the residual stream."""
    context: int = 64
    """Bytes in one sample."""
    dropout: float = 0.0
    """Share of activations dropped; a run of a minute reads no text twice and needs none."""
    corpus_mib: int = 16
    """At most this many MiB of training text are read."""


@dataclass(frozen=True)
class WrapperOptions:
    """Options of DistributedDataParallel, under its own names. Only changed options are passed on."""

    bucket_cap_mb: float | None = None
    """Gradients travel in buckets of about this many MiB; None leaves the wrapper's default of 25."""
    bucket_cap_mb_list: tuple[float, ...] = ()
    """A capacity for each bucket, the last one repeating."""
    gradient_as_bucket_view: bool = False
    """Let .grad be a view into its bucket, which saves a copy of all gradients."""
    static_graph: bool = False
    """Promise that every iteration uses the same parameters in the same way."""
    find_unused_parameters: bool = False
    """Walk the graph after every forward for parameters that will get no gradient."""
    skip_all_reduce_unused_params: bool = False
    """Leave out buckets that no rank has used (with find_unused_parameters)."""
    batched_grad_copy: bool = False
    """Pack a bucket's gradients in one batched copy."""
    broadcast_buffers: bool = True
    """Give every rank the buffers of rank 0 before a forward (BatchNorm's running statistics)."""
    init_sync: bool = True
    """At construction, verify that replicas agree and give them rank 0's weights."""
    transport: str = "process_group"
    """How minddp's gradients travel; torch's wrapper has no such choice."""

    def chosen(self) -> dict[str, Any]:
        """The options that differ from the default: keyword arguments for the wrapper's constructor."""
        return {name: getattr(self, name) for name in _changed(self)}


@dataclass(frozen=True)
class Settings:
    """Train a model data-parallel: one process per rank, the same model on each, other data on each.

    Starts its own ranks. Under torchrun it uses torchrun's ranks, and their number.
    """

    task: Literal["gpt", "digits"] = "gpt"
    """gpt: a small GPT on the bytes of Python's standard library; digits: a conv net with BatchNorm."""
    out: Path | None = None
    """Folder for checkpoint.pt and metrics.jsonl. Default: runs/<task>."""
    resume: bool = False
    """Continue from the checkpoint in the folder, to the same bits as if never interrupted."""
    overwrite: bool = False
    """Start anew although the folder holds a checkpoint."""

    minutes: float | None = None
    """Stop after this time by rank 0's clock, validation included. Default: 1 unless --steps is given."""
    steps: int | None = None
    """Stop after this many optimizer steps."""
    seed: int = 0
    """Decides the weights, the order of the data and dropout."""

    nproc: int | None = None
    """Ranks on this machine. Default: 2, or torchrun's number."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA when there is a device for every rank, else the CPU."""
    threads: int = 1
    """CPU threads per rank for torch's operators."""
    timeout_s: float = 300.0
    """Seconds after which a collective that waits is an error."""

    batch_size: int = 8
    """Samples per rank and backward pass."""
    accumulate: int = 1
    """Backward passes per optimizer step; gradients travel in the last one only."""
    learning_rate: float = 2e-3
    """Peak for one rank without accumulation; scaled by ranks x accumulate (Goyal et al. 2017)."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises to its peak."""
    final_fraction: float = 0.02
    """The cosine ends at this fraction of the peak."""
    weight_decay: float = 0.1
    """AdamW's, for parameters with two dimensions or more."""
    clip_norm: float = 1.0
    """The gradient's norm over all parameters is clipped to this."""

    log_every: int = 20
    """Steps between two training records in metrics.jsonl."""
    validate_every: int = 200
    """Steps between two validations; there is always one at the end."""
    validation_samples: int = 512
    """Validation samples, spread evenly over the held-out data."""
    checkpoint_every: int = 500
    """Steps between two checkpoints; there is always one at the end and on Ctrl-C."""
    xray: str | None = None
    """Record steps FIRST:LAST, LAST excluded, on every rank: xray.html and xray.json in the folder."""

    ddp: Literal["minddp", "torch", "none"] = "minddp"
    """Which DistributedDataParallel; none: the model without a wrapper, for one rank."""
    wrapper: Annotated[WrapperOptions, tyro.conf.OmitArgPrefixes] = WrapperOptions()
    gpt: Annotated[GPTOptions, tyro.conf.OmitArgPrefixes] = GPTOptions()

    def __post_init__(self) -> None:
        problems = [*_out_of_range(self), *_contradictions(self)]
        if problems:
            raise SettingsError("\n".join(problems))

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / self.task

    @property
    def limit_s(self) -> float:
        """Seconds the run may take; infinite when only steps limit it."""
        if self.minutes is not None:
            return 60 * self.minutes
        return math.inf if self.steps is not None else 60 * DEFAULT_MINUTES

    @property
    def recorded_steps(self) -> range:
        """The steps of --xray; none without it."""
        first, _, last = (self.xray or "0:0").partition(":")
        return range(int(first), int(last))

    @property
    def limit_steps(self) -> float:
        """Optimizer steps the run may take; infinite when only time limits it."""
        return math.inf if self.steps is None else self.steps


def _out_of_range(settings: Settings) -> Iterator[str]:
    """Fields that make no sense whatever the others are."""
    counts = ("steps", "nproc", "threads", "batch_size", "accumulate", "validation_samples")
    intervals = ("log_every", "validate_every", "checkpoint_every")
    for name in counts + intervals:
        yield from _unless(lambda n: n >= 1, settings, name, "must be at least 1")
    for name in ("minutes", "timeout_s", "learning_rate", "clip_norm"):
        yield from _unless(lambda x: 0 < x < math.inf, settings, name, "must be a positive, finite number")
    for name in ("weight_decay", "warmup_steps"):
        yield from _unless(lambda x: 0 <= x < math.inf, settings, name, "must not be negative")
    yield from _unless(lambda x: 0 <= x <= 1, settings, "final_fraction", "must lie between 0 and 1")
    yield from _unless(lambda n: 0 <= n < 2**32, settings, "seed", "must lie between 0 and 2**32 - 1")
    for name in ("layers", "heads", "width", "context", "corpus_mib"):
        yield from _unless(lambda n: n >= 1, settings.gpt, name, "must be at least 1")
    yield from _unless(lambda x: 0 <= x < 1, settings.gpt, "dropout", "must lie between 0 and 1, 1 excluded")
    yield from _unless(lambda x: 0 <= x < math.inf, settings.wrapper, "bucket_cap_mb", "must not be negative")


def _unless(holds: Callable[[Any], bool], options: object, name: str, complaint: str) -> Iterator[str]:
    """The complaint about one field, unless it is unset or `holds` for it."""
    value = getattr(options, name)
    if value is not None and not holds(value):
        yield f"{_flags([name])} {complaint}, but is {value}."


def _contradictions(settings: Settings) -> Iterator[str]:
    """Fields that exclude each other."""
    gpt, wrapper = settings.gpt, settings.wrapper
    if settings.resume and settings.overwrite:
        yield "--resume and --overwrite exclude each other: continue the old run or discard it?"
    if settings.task == "gpt" and gpt.heads >= 1 and gpt.width % (2 * gpt.heads):
        yield (
            f"--width {gpt.width} does not split into --heads {gpt.heads} of an even size, which rotary "
            f"positions need; use a multiple of {2 * gpt.heads}."
        )
    if settings.task != "gpt" and gpt != GPTOptions():
        yield f"--task {settings.task} has no use for {_flags(_changed(gpt))}; leave that out."
    if settings.xray is not None:
        yield from _unfit_to_record(settings.xray, settings)
    if settings.ddp == "none" and wrapper != WrapperOptions():
        yield f"--ddp none has no use for {_flags(_changed(wrapper))}; leave that out."
    if wrapper.bucket_cap_mb is not None and wrapper.bucket_cap_mb_list:
        yield "--bucket-cap-mb and --bucket-cap-mb-list exclude each other: one capacity for all, or a list."


def _unfit_to_record(xray: str, settings: Settings) -> Iterator[str]:
    """Why these steps cannot be recorded."""
    first, _, last = xray.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        yield f"--xray {xray} is not FIRST:LAST, two numbers of steps, the first smaller."
    elif int(last) > settings.limit_steps:
        yield f"--xray {xray} ends after --steps {settings.steps}; record earlier steps or take more."
    if settings.ddp == "none":
        yield "--ddp none has no buckets to record; leave --xray out."


def _changed(options: GPTOptions | WrapperOptions) -> list[str]:
    """Names of the fields that differ from their defaults."""
    return [f.name for f in dataclasses.fields(options) if getattr(options, f.name) != f.default]


def _flags(names: list[str]) -> str:
    """Fields as they are spelled on the command line."""
    return ", ".join("--" + name.replace("_", "-") for name in names)
