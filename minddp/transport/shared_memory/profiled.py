"""All-reduces in torch's profiler, where a backend's own stand.

Under the name that gloo gives to its own: that is what people search a profile for, and what tools add up. And as
the profiler marks what is asynchronous: an event that ends on another thread than it began on.
"""

from __future__ import annotations

import threading
from typing import Any, cast

import torch
from torch.autograd.profiler import record_function

from minddp.transport.shared_memory.exchange import Reduction

NAME = "gloo:all_reduce"


def record_if_profiled(reduction: Reduction) -> threading.Event | None:
    """An event from now until `reduction` has landed, if anybody profiles.

    What is returned tells that it has ended. Who waits for the reduction must wait for that, too: an event that
    ends after the profiler has stopped ends in freed memory.
    """
    if not torch.autograd._profiler_enabled():
        return None
    event, has_ended = record_function(NAME), threading.Event()
    event.__enter__()
    future: Any = torch.futures.Future()
    event._call_end_callbacks_on_future(cast(torch.futures.Future, future))

    def end() -> None:
        future.set_result(None)
        has_ended.set()

    reduction.when_landed(threading.Thread(target=end).start)
    return has_ended
