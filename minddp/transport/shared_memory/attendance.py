"""Who does a rank's share of the work: the thread that waits for it, or else a substitute.

[Note: who attends]
Somebody has to attend to an exchange: hear that all addends are in, add, tell. A thread of its own that does so at
once takes the core away from backward, and Python's lock from its hooks, for work that is not urgent yet. The best
moment is when the main thread has nothing else to do. So *whoever waits for an all-reduce attends*.

But the main thread may compute for long, or wait for something else, a barrier perhaps, while others need our
chunks. So there is a substitute: a thread that sleeps until there is news, gives the main thread the exchange's
`patience_s` to come and see to it, and then does so itself. To wake it costs 0.2 ms of a core on which backward
computes, so it had better wake once in a step than at each message. Progress never depends on what a rank waits
for, or in which order; it does not with gloo either, which has threads of its own.
"""

from __future__ import annotations

import threading
import time
import weakref

from minddp.transport.shared_memory.collective import Collective
from minddp.transport.shared_memory.exchange import Exchange

GRACE_S = 10.0  # for the substitute to end


class Attendance:
    """The turns that threads take at an exchange, and the substitute, which ends when this object does."""

    def __init__(self, exchange: Exchange):
        self._exchange = exchange
        self._turn = threading.Lock()
        substitute = threading.Thread(
            target=_substitute, args=(exchange, self._turn), name="minddp shared memory", daemon=True
        )
        substitute.start()
        self.end = weakref.finalize(self, _dismiss, exchange, substitute)

    def wait_for(self, collective: Collective, limit_s: float) -> bool:
        """Attend until `collective` has landed; whether it has, within the limit."""
        end = time.monotonic() + limit_s
        while not collective.has_landed and (time_left_s := end - time.monotonic()) > 0:
            if self._turn.acquire(
                timeout=min(time_left_s, self._exchange.patience_s)
            ):  # or else another thread attends
                try:
                    self._attend_until_landed(collective, end)
                finally:
                    self._turn.release()
        return collective.has_landed

    def _attend_until_landed(self, collective: Collective, end: float) -> None:
        while not collective.has_landed and (time_left_s := end - time.monotonic()) > 0:
            self._exchange.attend(time_left_s)


def _substitute(exchange: Exchange, turn: threading.Lock) -> None:
    while not exchange.is_closed:
        exchange.await_news()
        time.sleep(exchange.patience_s)
        with turn:
            while exchange.attend(limit_s=0) and not exchange.is_closed:
                pass
    with turn:
        exchange.leave()


def _dismiss(exchange: Exchange, substitute: threading.Thread) -> None:
    exchange.close()
    if substitute is not threading.current_thread():  # garbage is collected in any thread
        substitute.join(GRACE_S)
