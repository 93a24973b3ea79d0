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


def record_if_profiled(reduction: Reduction) -> None:
    """An event from now until `reduction` has landed, if anybody profiles."""
    if not torch.autograd._profiler_enabled():
        return
    event = record_function(NAME)
    event.__enter__()
    end: Any = torch.futures.Future()
    event._call_end_callbacks_on_future(cast(torch.futures.Future, end))
    reduction.when_landed(threading.Thread(target=end.set_result, args=(None,)).start)
