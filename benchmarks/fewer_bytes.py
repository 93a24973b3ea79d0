"""What do hooks that send fewer bytes save between two hosts, and what do they cost in loss?

    sudo python -m benchmarks fewer_bytes                # five minutes on two cores
    sudo python -m benchmarks fewer_bytes --size smoke   # to see that all runs

One rank on each of two hosts (`namespaces.py`) trains the GPT of `minddp train`, with each hook in turn: first some
steps at each rate of the cable, in paired rounds, then, at the last rate, `steps` for the loss.
Bytes are those that leave the host's interface, TCP's headers and acknowledgements included. The ranks share this
machine's cores. bf16_compress, which torch has for NCCL only, is not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks.display import Table, progress, table_of
from benchmarks.harness import compare, gathered, median_ms, timed_race
from benchmarks.namespaces import HOSTS, INTERFACE, limit_rate, settle, two_hosts
from benchmarks.question import RaceOptions, Report, ask, report_of
from minddp.comm_hooks import HOOKS
from minddp.tools.train.settings import Settings
from minddp.tools.train.task import load_task
from minddp.tools.train.trainer import Trainer
from minddp.tools.train.world import World

BASELINE = "fp32, no hook"


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    """Bytes, step times and losses of communication hooks, on two hosts."""

    LEAST = RaceOptions.LEAST | {"world_size": HOSTS, "steps": 1, "seeds": 1}

    rates: tuple[str, ...] = ("100mbit", "1gbit", "10gbit")
    """Rates of the cable in each direction, of kbit, mbit or gbit."""
    steps: int = 80
    """Steps of the runs whose losses are compared; each hook has `seeds` runs."""
    seeds: int = 2
    rounds: int = 5
    warmup_rounds: int = 1


def main(config: Config) -> None:
    with two_hosts(config.rates[0]) as hosts:
        ask("fewer_bytes", measure, config, tables, settle=partial(settle, hosts, 1))


# ------------------------------------------------------------------ on each rank


def register(name: str, ddp: Any) -> None:
    """PowerSGD of rank 1, from the third step on: torch's default begins after 1,000."""
    if name in HOOKS:
        make_state, hook = HOOKS[name]
        ddp.register_comm_hook(make_state(ddp.module), hook)
    elif name == "fp16_compress":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "power_sgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def measure(rank: int, config: Config) -> dict[str, Any]:
    steps, seeds = (4, 1) if config.size == "smoke" else (config.steps, config.seeds)
    world = World(rank, HOSTS, torch.device("cpu"), dist.distributed_c10d._get_default_group())
    task = load_task(Settings(task_options=("corpus_mib=4",)))

    def trainer_of(name: str, seed: int) -> Trainer:
        trainer = Trainer(Settings(device="cpu", steps=steps, seed=seed), world, task)
        register(name, trainer.ddp)
        return trainer

    trainers = {name: trainer_of(name, config.seed) for name in (BASELINE, "fp16_compress", "power_sgd", *HOOKS)}
    figures: dict[str, Any] = {name: {"bytes": bytes_per_step(one)} for name, one in trainers.items()}
    racers = {name: one.optimizer_step for name, one in trainers.items()}
    for rate in config.rates:
        limit_rate(rate)
        bar = partial(progress, rate)
        wall = timed_race(racers, [list(racers)], config.race_rounds, config.turn(2), bar)
        for name, of in figures.items():
            of[rate] = {"ms": median_ms(wall[name]), "ratio": compare(wall[name], wall[BASELINE], config.seed)}
    for name, of in figures.items():
        of["losses"] = [train(trainer_of(name, seed), steps) for seed in range(seeds)]
    return report_of("communication hooks that send fewer bytes, on two hosts", config, hooks=figures)


def bytes_per_step(trainer: Trainer, steps: int = 4) -> float:
    """The bytes that leave a host's interface, the larger number of both hosts, after PowerSGD has started."""
    counts = []
    for _ in range(2):
        for _ in range(steps):
            trainer.optimizer_step()
        dist.barrier()
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        counts += [int(line.split(":")[1].split()[8]) for line in lines if INTERFACE in line]
    return max(gathered((counts[1] - counts[0]) / steps))


def train(trainer: Trainer, steps: int) -> float:
    """The loss of validation after `steps`. Collective."""
    for _ in range(steps):
        trainer.optimizer_step()
    return trainer.validate().loss


# ------------------------------------------------------------------ tables


def tables(report: Report) -> Iterator[Table]:
    """In brackets: of fp32. The change of the loss is the mean over the seeds, and the least and the largest."""
    rates, base, rows = report["config"]["rates"], report["hooks"][BASELINE], {}
    for name, of in report["hooks"].items():
        change = np.array(of["losses"]) / np.array(base["losses"]) - 1
        values = {"loss": np.mean(of["losses"]), "mean": change.mean(), "low": change.min(), "high": change.max()}
        rows[name] = of | values | {"kb": of["bytes"] / 1e3, "share": of["bytes"] / base["bytes"]}
    columns = {"kB a step and host": "{kb:,.0f} ({share:.3f})"}
    columns |= {f"ms at {rate}": f"{{{rate}[ms]:.1f}} ({{{rate}[ratio][median]:.2f}})" for rate in rates}
    columns |= {"loss": "{loss:.4f}", "change of the loss": "{mean:+.1%} ({low:+.1%} to {high:+.1%})"}
    steps = report["config"]["steps"]
    yield table_of(f"Hooks between two hosts; validation loss after {steps} steps", "hook", columns, rows)
