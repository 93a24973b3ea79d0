"""X-ray: see what data parallelism does in every step, on every rank.

    with minddp.xray(ddp) as x:
        train_step()
    x.explain()            # in the terminal: where the time goes, what costs most, predictions
    x.save("step.html")    # a page that needs no network; .json for Perfetto, .png for a README

| question | file |
|---|---|
| how is it used? | `xray.py`, `result.py`; in a shell: `command_line.py`, `worker.py` |
| what is recorded, and what does that cost? | `record.py`, from `sources.py` |
| how are the ranks' recordings gathered? | `peers.py` |
| what is a recording? | `recording.py` |
| what did each rank do when, and what happened to each bucket? | `timeline.py`; from events: `reading.py` |
| why does a bucket wait, and why a rank? | `waits.py` |
| how long would the step take under another plan, or with more ranks? | `what_if.py` |
| how is it explained? | `words.py`, in the terminal by `explain.py` |
| how is it shown? | `page/`, `chrome_trace.py`, `picture.py` |

The package itself can be called: `minddp.xray(ddp)` is `XRay(ddp)`.
"""

import sys
from types import ModuleType
from typing import Any

from minddp.xray.recording import Recording
from minddp.xray.result import Comparison, Result, load
from minddp.xray.xray import XRay

__all__ = ["Comparison", "Recording", "Result", "XRay", "load"]


class _CallablePackage(ModuleType):
    """A package is an attribute of the one around it, and there can be only one `minddp.xray`."""

    def __call__(self, *args: Any, **kwargs: Any) -> XRay:
        return XRay(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
