"""One process's part in a training that goes on when ranks are lost."""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from minddp.platform.host import is_running
from minddp.platform.store import own_connection
from minddp.replicas.broadcast import broadcast_coalesced
from minddp.tools.elastic.membership import Generation, Membership, next_generation
from minddp.tools.elastic.term import Term, drop
from minddp.tools.elastic.tree_sum import deal
from minddp.tools.watchdog import Stuck

_log = logging.getLogger(__name__)
STORE_PORT = "MINDDP_ELASTIC_PORT"  # of the store, on this host
NUM_RANKS = "MINDDP_ELASTIC_RANKS"  # how many the first generation waits for
START_LIMIT_S = 60.0  # for the first ranks to wait for all others before they begin without them
CONNECT_LIMIT_S = 10.0  # to make a group, once all ranks have come
STATE_LIMIT_S = 60.0  # for each message of the state that a new rank gets; not all of these waits are watched
TIMEOUT_S = 1800.0  # of collectives, as in torch, and of regrouping, for ranks that live but do not come
POLL_S = 0.01
GRACE_S = 3.0  # the longest time from an error until the loss that has caused it is noticed


class RankLost(RuntimeError):
    """This step does not count, since a rank was lost in it. `with step:` catches this; the step comes again."""


def join() -> Session:
    """Join the training as one of the processes that `minddp elastic` has started. Call it once, at the start.

    Until `Session.steps` begins, the default group is this rank alone: build model and wrapper without the others.

    Raises:
        RuntimeError: there is no launcher.
    """
    if STORE_PORT not in os.environ:
        raise RuntimeError(f"{STORE_PORT} is not set: start this script with `minddp elastic`.")
    store = dist.TCPStore("localhost", int(os.environ[STORE_PORT]), is_master=False)
    store.set_timeout(datetime.timedelta(days=1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Session(Membership(store))


class Session:
    """Yields the steps of a training, a step again if a rank was lost in it. See `join` and `steps`."""

    def __init__(self, membership: Membership):
        self._membership = membership
        self._of_thread = Membership(own_connection(membership.store))
        self._num_ranks = int(os.environ[NUM_RANKS])
        self.generation = Generation()  # the last one that this process knows; its members are the ranks, in order
        self._term: Term | None = None
        self._has_state = False  # that of the generation
        self._has_left = False
        atexit.register(self.leave)

    def steps(
        self, ddp: Any, optimizer: torch.optim.Optimizer, last: int, also: Sequence[Any] = ()
    ) -> Iterator[Step]:
        """The steps of the wrapper `ddp` below number `last`; the same one again if a rank was lost in it.

        Everything up to the end of the loop over shares may run again. Everything after it runs once: steps of
        optimizers and schedulers, and logging, but no collectives. A process that joins later gets parameters,
        buffers, optimizer state, number of the step, and the `state_dict` of each object in `also`, from another.

        Raises:
            ValueError: a wrapper without logical ranks, or with fewer than there are ranks.
        """
        self._ranks = ranks = ddp.logical_ranks
        if ranks is None:
            raise ValueError("A training goes on with other ranks only with logical_ranks: pass it to the wrapper.")
        deal(ranks.num_shares, self._num_ranks)  # raises an error if there are too few
        ranks.before_counting = self._vote
        self._trained = ddp, optimizer, also
        try:
            term = self._regroup()
            while ranks.step < last:
                if term.is_over.is_set():
                    term = self._regroup()
                    continue
                number = term.step = ranks.step
                step = Step(self, number)
                yield step
                if not step.has_ended or (ranks.step == number and not term.is_over.is_set()):
                    raise RuntimeError(f"Step {number} needs `with step:` around a loop over `ddp.shares()`.")
            self._membership.settle(True, "finished")
        except dist.DistNetworkError as error:
            raise RuntimeError("The store has ended, and with it the job.") from error
        finally:
            ranks.before_counting = None
            self.leave()

    def leave(self) -> None:
        """Stop training in this process. The others go on. May be called again."""
        if self._has_left:
            return
        self._has_left = True
        atexit.unregister(self.leave)
        if self._term is not None:
            self._term.close()
        with suppress(RuntimeError):  # the store has ended
            if self._membership.settled("finished"):
                return
            self._membership.settle(True, "left", self._membership.member)
            if self._term is not None:
                self._term.call_off()
                drop(dist.group.WORLD)  # the interpreter ends without it

    def _vote(self) -> None:
        """Return if the step counts, else raise `RankLost`. See [Note: the vote]."""
        term = self._term
        assert term is not None
        if term.is_over.is_set():  # perhaps before the watching thread knew this step
            verdict = self._membership.settle("again", "verdict", term.generation.number, term.step)
        else:
            verdict = self._membership.vote(term.generation, term.step)
        if verdict == "again":
            raise RankLost(f"Step {term.step} does not count, since a rank was lost. It is computed again.")
        if verdict == "counts, regroup":  # others join, as after a loss
            term.is_over.set()

    def is_loss(self, error: BaseException) -> bool:
        """True if the loss of a rank has caused `error`, or the generation is over anyway. It is over then."""
        term = self._term
        assert term is not None
        if isinstance(error, (RankLost, Stuck)):
            term.is_over.set()
        return isinstance(error, Exception) and term.is_over.wait(GRACE_S)

    def _regroup(self) -> Term:
        """Become a rank of the next generation that can work, with the state that all its ranks have."""
        began = time.monotonic()
        while True:
            if self._term is not None:
                self._term.call_off()
                self._term.close()
            self._ranks.undo()
            self._join_generation()
            self._term = term = Term(self.generation, self._of_thread)
            try:
                self._connect(term)
                self._synchronize(self.generation)
                _limit_collectives(TIMEOUT_S)
                self._has_state = True
                term.connections.complete()
                return term
            except Exception as error:
                if not self.is_loss(error) or time.monotonic() - began > TIMEOUT_S:
                    raise

    def _join_generation(self) -> None:
        """Wait for the first generation, after the last known one, that has this process as a member."""
        while True:
            number = self.generation.number + 1
            self._membership.request_join(number, has_state=self._has_state)
            self.generation = self._decision(number)
            if self._membership.member in self.generation.members:
                return
            self._has_state = False

    def _decision(self, number: int) -> Generation:
        """Wait for a proposal for generation `number`; propose one once all expected members have asked to join."""
        last, membership, began = self.generation, self._membership, time.monotonic()
        generation: Generation | None
        while (generation := membership.settled("generation", number)) is None:
            if membership.settled("finished"):
                _log.warning("The training had finished before this process could join.")
                sys.exit(0)
            waited_s, requests = time.monotonic() - began, membership.join_requests(number)
            present = {member: has_state for member, has_state in requests.items() if is_running(member)}
            missing = [each for each in last.members if each not in present and membership.takes_part(each)]
            if membership.member in last.members and waited_s > TIMEOUT_S:
                raise RuntimeError(f"Processes {missing} live, but have not regrouped in {waited_s:.0f} s.")
            is_early = last.number == 0 and waited_s < START_LIMIT_S
            if not missing and not (is_early and len(present) < self._num_ranks):
                membership.settle(next_generation(last, present), "generation", number)
            time.sleep(POLL_S)
        return generation

    def _connect(self, term: Term) -> None:
        """Make the default group one of all members, and the wrapper's, or raise `RankLost`.

        Gloo waits five times its limit for a member that dies meanwhile (`Pair::waitUntil`), even if its socket is
        shut down. So members first wait in the store for slow ones.
        """
        if dist.is_initialized():
            drop(dist.group.WORLD)
            dist.destroy_process_group()
        dist.distributed_c10d._world.group_count = 0  # a part of the keys in the store; counts failures, too
        number, world_size = term.generation.number, len(term.generation.members)
        rank = term.generation.members.index(self._membership.member)
        os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
        store = dist.PrefixStore(f"group/{number}", own_connection(self._membership.store))
        come = [f"come/{other}" for other in range(world_size)]
        limit = datetime.timedelta(seconds=CONNECT_LIMIT_S / 5)
        try:
            store.set(come[rank], "")
            store.wait(come, datetime.timedelta(seconds=TIMEOUT_S))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        except RuntimeError as error:
            raise RankLost(f"Not all ranks of generation {number} have connected: {error}") from error
        _limit_collectives(STATE_LIMIT_S)
        self._trained[0].move_to_group(dist.group.WORLD)
        term.transport = self._ranks.transport

    def _synchronize(self, generation: Generation) -> None:
        """Send the state of rank 0 to the members that have joined. They take it once they have all of it."""
        if not generation.joined:
            return
        (ddp, optimizer, also), ranks = self._trained, self._ranks
        tensors = [tensor.detach() for tensor in (*ddp.module.parameters(), *ddp.module.buffers())]
        state = tensors, [each.state_dict() for each in (optimizer, *also)], ranks.seed, ranks.step
        sent = pickle.dumps(state) if dist.get_rank() == 0 else b""
        size = torch.tensor([len(sent)])
        broadcast_coalesced(ranks.transport, [size])
        message = torch.frombuffer(bytearray(sent or int(size)), dtype=torch.uint8)
        broadcast_coalesced(ranks.transport, [message])
        if self._membership.member in generation.joined:
            values, states, ranks.seed, ranks.step = pickle.loads(message.numpy().tobytes())
            torch._foreach_copy_(tensors, values)
            for each, received in zip((optimizer, *also), states, strict=True):
                each.load_state_dict(received)


class Step:
    """One attempt at step `number`, within `with`."""

    def __init__(self, session: Session, number: int):
        self._session = session
        self.number = number
        self.has_ended = False

    def __enter__(self) -> Step:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """True if the step is to come again: a rank was lost before it counted."""
        self.has_ended = True
        if error is None:
            return False
        if self._session._ranks.step == self.number and self._session.is_loss(error):
            return True
        self._session.leave()
        return False


def _limit_collectives(seconds: float) -> None:
    assert dist.group.WORLD is not None
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), dist.group.WORLD)
