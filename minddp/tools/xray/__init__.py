"""X-ray: see what data parallelism does in every step, on every rank.

    with minddp.xray(ddp) as x:
        train_step()
    x.explain()            # in the terminal: where the time goes, what costs most, predictions
    x.save("step.html")    # a page that needs no network; .json to load again

| question | file |
|---|---|
| how is it used? | `xray.py`, `result.py`; in a shell: `command_line.py`, `wrappers.py` |
| what is recorded, and what does that cost? | `record.py`, from `sources.py`; beside the wrapper: `host.py` |
| how are the ranks' recordings gathered? | `peers.py` |
| what is a recording? | `recording.py` |
| what did ranks do, what happened to buckets? | `timeline.py`; from events: `reading.py`; a table: `parts.py` |
| how long would a step take if one thing were different? | `replay.py` |
| what would make it shorter? | `what_if.py` |
| how is it explained? | `words.py`, in the terminal by `explain.py` |
| how is it shown? | `page/` |
"""

from minddp.tools.xray.recording import Recording
from minddp.tools.xray.result import Comparison, Result, load
from minddp.tools.xray.xray import XRay

__all__ = ["Comparison", "Recording", "Result", "XRay", "load"]
