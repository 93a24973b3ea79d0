"""One process's term in a generation, whose waits end when another member is lost.

[Note: hanging up]
A rank that waits, in gloo, shared memory or the store, for a rank that waits for a dead one may wait for ever, and
gloo has no call to abort it. But such waits end with an error as soon as their sockets are shut down: here, and on
the ranks at the other ends, which hang up in turn. So the sockets are recorded that a generation opens.

[Note: sends that never complete]
When a pair of gloo's sockets fails, gloo reports the error to waiting buffers, but not to sends that are under way
(`op.ubuf` in `Pair::signalException`, gloo/transport/tcp/pair.cc): its thread waits for them until the group's
time limit. So `WatchedTransport.end_waits` interrupts a rank that waits for such a work. And the destructor of the
group, which waits for gloo's threads, must not run in a thread that is needed, such as in the garbage collector.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress

import torch.distributed as dist

from minddp.platform.repeating_thread import AT_EXIT_S, RepeatingThread
from minddp.tools.elastic.membership import Generation, Membership
from minddp.tools.watchdog import WatchedTransport
from minddp.transport.protocols import Transport

LOOK_EVERY_S = 0.1


class Term:
    """The membership of this process in one `generation`, from construction until `close`.

    The sockets that the process opens until `connections.complete` belong to the generation. When the process of a
    member has ended, a thread calls the generation off, so that all waits of the main thread end with an error. See
    [Note: hanging up].
    """

    def __init__(self, generation: Generation, membership: Membership):
        self.generation = generation
        self.connections = Connections()
        self.transport: Transport | None = None  # once the group is made
        self.step = -1  # the step being computed
        self.is_over = threading.Event()  # a rank was lost, or others join
        self._membership = membership
        self._thread = RepeatingThread(self._look, LOOK_EVERY_S, "minddp/elastic")

    def call_off(self) -> None:
        """End the step on all members without counting it, and all waits. Any thread may call this, repeatedly."""
        number = self.generation.number
        self.is_over.set()  # before `step` is read: see Session._vote
        self._membership.settle(True, "over", number)
        self._membership.settle("again", "verdict", number, self.step)
        self.connections.hang_up()
        if isinstance(self.transport, WatchedTransport):
            self.transport.end_waits(f"Generation {number} was called off.")

    def close(self) -> None:
        self._thread.close(AT_EXIT_S)

    def _look(self, is_last: bool) -> None:
        try:
            if not is_last and self._must_end():
                self.call_off()
        except RuntimeError:  # the store has ended
            self.is_over.set()
            self.connections.hang_up()
            raise

    def _must_end(self) -> bool:
        """True if another member is lost, or has called the generation off."""
        # Even if it is over: the first `call_off` may have missed later sockets, or a step that was not set yet.
        if self.is_over.is_set() or self._membership.settled("over", self.generation.number):
            return True
        is_complete = all(map(self._membership.takes_part, self.generation.members))
        return not is_complete and not self._membership.settled("finished")


class Connections:
    """The sockets that this process opens from now on, until `complete`."""

    def __init__(self) -> None:
        self._before = sockets().keys()
        self._inodes: frozenset[int] | None = None

    def complete(self) -> None:
        if self._inodes is None:
            self._inodes = frozenset(sockets().keys() - self._before)

    def hang_up(self) -> None:
        """Shut them down. May be called again, and by any thread."""
        for inode, descriptor in sockets().items():
            if inode not in self._before if self._inodes is None else inode in self._inodes:
                # Another thread may have closed it; then the descriptor may belong to another file now.
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as ours:
                    # From a listening TCP socket that was shut down, gloo's thread would accept for ever.
                    listens = ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if os.fstat(ours.fileno()).st_ino == inode and (ours.family == socket.AF_UNIX or not listens):
                        ours.shutdown(socket.SHUT_RDWR)


def drop(group: dist.ProcessGroup | None) -> None:
    """Destroy `group` in another thread, once nothing else refers to it. See [Note: sends that never complete]."""
    held = [group]

    def destroy() -> None:
        while sys.getrefcount(held[0]) > 2:  # the list's, and the argument
            time.sleep(1.0)
        held.clear()

    threading.Thread(target=destroy, name="minddp/old group", daemon=True).start()


def sockets() -> dict[int, int]:
    """The descriptor of each socket of this process, by inode: a number that the kernel does not reuse soon."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket":
                found[int(inode.strip("[]"))] = int(name)
    return found
