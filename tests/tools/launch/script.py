"""A training script that does not mention minddp, for `minddp run`: it trains, and starts child processes.

It leaves one file per rank in the folder that is its first argument.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

QUESTION = "from torch.nn.parallel import DistributedDataParallel as DDP; print(DDP.__module__)"


def answer(pipe: mp.connection.Connection) -> None:
    """In a child: where the class comes from."""
    from torch.nn.parallel import DistributedDataParallel as DDP

    pipe.send(DDP.__module__)


def ask_children() -> Callable[[], list[str]]:
    """Start three; the result receives their answers. One is forked from a process that has not imported torch."""
    assert "torch" not in sys.modules
    pipes = []
    for method in ("fork", "spawn"):
        ours, theirs = mp.Pipe()
        mp.get_context(method).Process(target=answer, args=(theirs,), daemon=True).start()
        pipes.append(ours)
    started = subprocess.Popen([sys.executable, "-c", QUESTION], stdout=subprocess.PIPE, text=True)
    return lambda: [*(pipe.recv() for pipe in pipes), started.communicate()[0].strip()]


def train(rank: int) -> dict:
    """A few steps; needs a process group."""
    import torch
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.manual_seed(0)
    ddp = DDP(torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        mse_loss(ddp(torch.randn(4, 6, generator=random)), torch.randn(4, 3, generator=random)).backward()
        optimizer.step()
    return {
        "class": type(ddp).__module__,
        "recognised": isinstance(ddp, torch.nn.parallel.DistributedDataParallel),
        "params": [param.detach() for param in ddp.parameters()],
    }


def main(folder: Path, *others: str) -> None:
    answers = ask_children() if os.environ["RANK"] == "0" else list

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    result = train(rank)
    result["children"] = answers()
    result["arguments"] = others
    torch.save(result, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
