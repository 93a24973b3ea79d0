"""What the rungs above DDP hold and send: counted while they run, and by arithmetic for larger models."""

from __future__ import annotations

import io

import torch.distributed as dist
from rich.console import Console

from reference.ladder import count_all, table_of

GIB = 2**30
MODELS = {"124M": 124e6, "1.3B": 1.3e9, "7B": 7e9, "70B": 70e9}
RANKS = (8, 64)


def counted(rank: int) -> str:
    """The table of `python -m reference`."""
    ranks = dist.get_world_size()
    console = Console(file=io.StringIO(), width=110, record=True)
    console.print(table_of(count_all(rank)))
    lines = console.export_text().splitlines()
    return "\n".join([f"MiB on rank 0 of {ranks}, Adam", *(line.strip() for line in lines)])


def arithmetic(_rank: int) -> str:
    """GiB a rank with parameters and gradients in 2 bytes, Adam's copy and moments in 3 times 4."""
    parameters, gradients, optimizer = 2, 2, 12
    rows = [
        f"{'model':6}" + "".join(f"{name:>12}" for name in ("ddp", "zero1", "zero2", "zero3")) + "   GiB a rank"
    ]
    for ranks in RANKS:
        rows.append(f"on {ranks} ranks")
        bytes_of = (
            parameters + gradients + optimizer,
            parameters + gradients + optimizer / ranks,
            parameters + (gradients + optimizer) / ranks,
            (parameters + gradients + optimizer) / ranks,
        )
        for name, number in MODELS.items():
            rows.append(f"{name:6}" + "".join(f"{number * nbytes / GIB:12.1f}" for nbytes in bytes_of))
    return "\n".join(rows)
