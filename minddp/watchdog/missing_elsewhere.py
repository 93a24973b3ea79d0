"""When this rank lacks gradients: what do the other ranks lack?"""

from __future__ import annotations

import time

from minddp.transport.protocols import Transport

PATIENCE_S = 1.0


def ask_what_is_missing(occasion: str, missing: str, transport: Transport, patience_s: float = PATIENCE_S) -> str:
    """Send the other ranks what is `missing` here and receive what is missing there, as lines of text.

    Goes through the store, since the collectives may be what is stuck. `occasion` is the same on every rank. A rank
    whose gradients are complete does not take part, so at most `patience_s` seconds are waited for it.
    """
    store, rank = transport.store, transport.rank
    if store is None or transport.world_size == 1:
        return ""
    keys = {other: f"minddp/unfinished/{occasion}/{other}" for other in range(transport.world_size)}
    store.set(keys.pop(rank), missing)
    deadline = time.monotonic() + patience_s
    while not store.check(list(keys.values())) and time.monotonic() < deadline:
        time.sleep(0.02)
    lines = []
    for other, key in keys.items():
        if store.check([key]):
            lines.append(f"Parameters which did not receive grad for rank {other}: {store.get(key).decode()}\n")
        else:
            lines.append(
                f"Rank {other} reports nothing missing: its gradients are complete and it waits, or it is late.\n"
            )
    return "".join(lines)
