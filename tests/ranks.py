"""Real ranks for tests: worker processes in one gloo group, reused from test to test.

`RankPool(3).run(fn, *args)` calls the module-level function `fn(rank, *args)` in three processes that share
a gloo process group, and returns the three results in rank order. They are those of `minddp.launch`: every wait has
a time limit, and when a rank dies, hangs or raises, all are killed and the next `run` starts new ones.
`torch._dynamo` is imported before they are forked: torch imports it, a second's work, in each process that wraps a
module or makes an optimizer. `@on_ranks(3)` makes a test of such a function.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import inspect
import logging
import multiprocessing as mp
from collections.abc import Callable
from functools import partial
from typing import Any

from minddp.platform import ranks
from minddp.platform.ranks import RankFailure

__all__ = ["CONTEXT", "RankFailure", "RankPool", "of_all_ranks", "on_one_thread", "on_ranks", "take_findings"]

CONTEXT = mp.get_context("forkserver")
ranks.PRELOAD.append("pytest")
CONTEXT.set_forkserver_preload(ranks.PRELOAD)


def take_findings(rank: int) -> list[str]:
    """What the guards of this process have reported since the last call. A finding of a calm script is a fault."""
    taken = list(_FINDINGS)
    del _FINDINGS[: len(taken)]
    return taken


_FINDINGS: list[str] = []
#: Those of the watchdog's loggers that tell of a fault in a script that does not wait.
FINDERS = ("minddp.tools.watchdog", "minddp.tools.watchdog.guard", "minddp.tools.watchdog.board")


def _keep_findings() -> None:
    """By filters: with a handler, what is logged without one would no longer be printed."""

    def keep(record: logging.LogRecord) -> bool:
        _FINDINGS.append(record.getMessage())
        return True

    for name in FINDERS:
        logging.getLogger(name).addFilter(keep)


def on_one_thread(rank: int) -> None:
    """And without all of torch's objects in each garbage collection, which is an eighth of a script's time."""
    import torch

    torch.set_num_threads(1)
    gc.freeze()


def _enter(
    prepare: Callable[[int], None], backend: str, timeout_s: float, rank: int, num_ranks: int, rendezvous: str
) -> None:
    prepare(rank)
    _keep_findings()
    ranks.join_group(rank, num_ranks, rendezvous, backend=backend, timeout_s=timeout_s)


class RankPool(ranks.RankPool):
    """`world_size` processes in one group, started at the first `run` and again after a failure.

    `prepare` is what each calls with its rank before it joins the group, whose backend is `backend`.
    """

    backend = "gloo"
    prepare: Callable[[int], None] = staticmethod(on_one_thread)

    def __init__(self, world_size: int, group_timeout_s: float = 90.0, grace_s: float = 5.0):
        super().__init__(world_size, ranks.join_group, grace_s)
        self.group_timeout_s = group_timeout_s
        atexit.register(self.kill)

    def _start(self) -> None:
        self.enter = partial(_enter, self.prepare, self.backend, self.group_timeout_s)
        super()._start()

    def run_each(self, fn: Callable[..., Any], args_of_rank: list[tuple[Any, ...]]) -> list[Any]:
        """Like `run`, with arguments of its own for each rank."""
        return self.run(partial(_with_args_of, fn, args_of_rank))

    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._ranks]


def _with_args_of(fn: Callable[..., Any], args_of_rank: list[tuple[Any, ...]], rank: int) -> Any:
    return fn(rank, *args_of_rank[rank])


def on_ranks(number: int | Callable[..., int]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorated test runs on each of so many ranks; it takes its rank, and then its parameters and fixtures.

    `number` may be computed from the latter. All of them are sent to the ranks.
    """

    def test_of(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(ranks: Callable[[int], RankPool], **arguments: Any) -> None:
            pool = ranks(number if isinstance(number, int) else number(**arguments))
            pool.run(_run_body, body.__module__, body.__name__, arguments)

        _, *parameters = inspect.signature(body).parameters.values()
        first = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
        return test

    return test_of


def of_all_ranks(value: Any) -> list[Any]:
    """The value of each rank, on every rank of a test on ranks."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _run_body(rank: int, module: str, test: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), test).__wrapped__(rank, **arguments)
