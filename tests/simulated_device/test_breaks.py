"""Faults in the order of streams, put into minddp. On a CPU all give the right bits; the device must notice each.

A communicator runs its collectives in order, so a wait for one is a wait for all before it: a wait left out shows
only where no later one makes up for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.breaks import Break, apply
from tests.ranks import RankPool
from tests.simulated_device.modes import MODES, run_on_device


@dataclass(frozen=True)
class Misorder(Break):
    """A break, the mode that shows it, and as what."""

    mode: str
    shows: str
    transport: str = "process_group"


BREAKS = (
    # ------------------------------------------------------------------ a wait left out
    Misorder(
        *("not wait for an all-reduce", "core/reduction.py"),
        *("        self.work.wait()\n", "", "default", "race: .*allreduce.*_foreach_copy_"),
    ),
    Misorder(
        *("take a hook's value without waiting", "comm_hooks/registered.py"),
        *("value = self.future.wait()", "value = self.future.value()", "fp16 hook", "race: aten.copy_.*callback's"),
    ),
    Misorder(
        *("not wait for a buffer hook's futures", "core/reducer.py"),
        *("            future.wait()\n", "            pass\n", "buffer hook", "race: aten.copy_"),
    ),
    Misorder(
        *("not wait for the marks of use", "core/usage_map.py"),
        *("        self._work.wait()\n        used", "        used", "unused", "race: .*allreduce.*tolist"),
    ),
    Misorder(
        *("not wait for buffers", "replicas/broadcast.py"),
        *("        work.wait()\n", "", "buffers", "race: .*broadcast"),
    ),
    Misorder(
        *("not wait for the sum of weights", "modes/divisor.py"),
        *("self._transport.all_reduce(weights).wait()", "self._transport.all_reduce(weights)"),
        *("weigh", "race: .*allreduce.*_local_scalar_dense"),
    ),
    Misorder(
        *("not wait for NCCL", "transport/nccl/communicator.py"),
        "        torch.cuda.current_stream(self._communicator.device).wait_event(self._done)\n",
        *("", "default", "race: a call of NCCL", "nccl"),
    ),
    Misorder(
        *("not let NCCL wait for what is packed", "transport/nccl/communicator.py"),
        *("        self.stream.wait_event(ready)\n", "", "default", "race: .*; a call of NCCL", "nccl"),
    ),
    # ------------------------------------------------------------------ an event too early, or of another stream
    Misorder(
        *("record `done` before the collective", "transport/nccl/communicator.py"),
        *("InFlight(operation, self.stream.record_event(),", "InFlight(operation, ready,"),
        *("default", "race: a call of NCCL", "nccl"),
    ),
    # ------------------------------------------------------------------ results used too soon
    Misorder(
        *("copy back before the wait", "core/backward_pass.py"),
        "average = reduction.result()",
        *("average = bucket.comm_buffer", "default", "race: .*allreduce.*_foreach_copy_"),
    ),
    # ------------------------------------------------------------------ a buffer used again too soon
    Misorder(
        *("fill buckets that an interrupted pass has sent", "core/backward_pass.py"),
        "                reduction.result()\n",
        *("                pass\n", "exception", "race: .*allreduce.*(mul|_foreach_copy_)"),
    ),
    # ------------------------------------------------------------------ memory given away
    Misorder(
        *("forget record_stream", "transport/nccl/communicator.py"),
        *("            tensor.record_stream(self.stream)\n", "            pass\n"),
        *("dropped in flight", "freed too early: a call of NCCL", "nccl"),
    ),
    Misorder(
        *("free gradients that another stream has moved to new buckets", "platform/streams.py"),
        "        tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))\n",
        *("        pass\n", "wrapped elsewhere, views, resident", "freed too early: aten.copy_"),
    ),
    # ------------------------------------------------------------------ the host waits
    Misorder(
        *("read a gradient in a hook", "core/packing.py"),
        "        all_there = self._check(grads)\n",
        "        all_there = self._check(grads)\n        all(map(torch.Tensor.item, map(torch.sum, grads)))\n",
        *("default", "_local_scalar_dense"),
    ),
    Misorder(
        *("copy marks from memory that is not pinned", "platform/streams.py"),
        *("pin_memory=has_streams(device)", "pin_memory=False", "unused", "a copy between host and device"),
    ),
    Misorder(
        *("read the clock in each step", "tools/forecast/gradient_clock.py"),
        "        return streams.timed_event(self._device)\n",
        "        event = streams.timed_event(self._device)\n        event.synchronize()\n        return event\n",
        *("auto", "an event"),
    ),
)


def run_mutated(rank: int, misorder: Misorder) -> tuple[str, ...]:
    """What the device notices that is not documented."""
    undo = apply(misorder)
    try:
        outcome = run_on_device(rank, misorder.mode, misorder.transport)
    finally:
        undo()
    documented = MODES[misorder.mode].waits
    return (*outcome.errors, *(wait for wait in outcome.waits if not any(known in wait for known in documented)))


@pytest.mark.slow
@pytest.mark.parametrize("misorder", BREAKS, ids=lambda misorder: misorder.name.replace(" ", "-"))
def test_the_device_notices(misorder: Misorder, ranks: Callable[[int], RankPool]) -> None:
    noticed = [text for texts in ranks(2).run(run_mutated, misorder) for text in texts]
    assert noticed, f"nothing is noticed although minddp was made to {misorder.name}"
    assert any(re.search(misorder.shows, text) for text in noticed), noticed


def test_each_applies() -> None:
    for misorder in BREAKS:
        apply(misorder)()
