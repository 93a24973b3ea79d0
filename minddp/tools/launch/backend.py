"""`--backend minddp`: groups that a script makes with gloo, or with no backend on the CPU, are groups of minddp's.

They are still called "gloo": `dist.get_backend`, `dist.monitored_barrier` and scripts ask for that name.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.distributed.distributed_c10d as c10d

from minddp.transport import backend


def install() -> None:
    """Replace the function with which torch makes each group, for the rest of this process."""
    backend.register()
    make: Any = c10d._new_process_group_helper  # type: ignore[attr-defined]
    parameters = inspect.signature(make)

    @functools.wraps(make)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        asked = call.arguments["backend"]
        if set(c10d.BackendConfig(asked).get_device_backend_map().values()) == {"gloo"}:
            call.arguments["backend"] = backend.NAME
        group, store = make(*call.args, **call.kwargs)
        if group in c10d._world.pg_map:
            c10d._world.pg_map[group] = (asked, store)
        return group, store

    c10d._new_process_group_helper = make_group  # type: ignore[attr-defined]
