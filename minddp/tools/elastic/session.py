"""A training that goes on when ranks are lost, seen from one of its processes.

[Note: the vote]
A rank that has the averages cannot know whether all others have. If one steps its optimizer, and another computes
the step again, they are not replicas any more. So at the end of `ddp.shares()`, when gradients and buffers are
there, each rank adds its vote in the store. The last one writes the verdict "counts". A rank that notices a loss
writes the verdict "again". `compare_set` lets the first verdict win, and all obey it: after "counts" those that
are left step their optimizers, whatever dies then; after "again" they regroup, and compute the same step anew.
"""

from __future__ import annotations

import atexit
import copy
import datetime
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from minddp.tools.elastic.connections import drop
from minddp.tools.elastic.heartbeat import LOOK_EVERY_S, Heartbeat, Term
from minddp.tools.elastic.logical_ranks import LogicalRanks
from minddp.tools.elastic.membership import Generation, Membership, next_generation
from minddp.tools.watchdog import Stuck

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

_log = logging.getLogger(__name__)
STORE = "MINDDP_ELASTIC_STORE"  # host:port
NUM_RANKS = "MINDDP_ELASTIC_RANKS"  # how many the first generation waits for
CONNECT_LIMIT_S = (2.0, 30.0)  # to make a group: the first attempt, and the longest
STATE_LIMIT_S = 60.0  # for each message of the state that a new rank gets; not all of these waits are watched
GRACE_S = 1.0  # beyond which no sign of a loss comes after the error that it causes
NO_LIMIT = datetime.timedelta(days=1)


class RankLost(RuntimeError):
    """This step does not count, since a rank was lost in it. `with step:` catches it, and the step comes again."""


class Finished(SystemExit):
    """The last step had counted before this process could join; it ends with status 0."""


def join(*, silent_limit_s: float = 2.0, start_limit_s: float = 60.0, timeout_s: float = 1800.0) -> Session:
    """Be one of the processes that `python -m minddp.elastic` has started. First of all, and once.

    The default group is one of this rank alone until `Session.steps` begins: model and wrapper are built without
    other ranks.

    Args:
        silent_limit_s: a process that shows no sign of life for so long, as when it is stopped, counts as lost.
        start_limit_s: how long the first ranks wait for all others before they begin without them.
        timeout_s: time limit of collectives, and of regrouping, for ranks that live but do not come.

    Raises:
        RuntimeError: not started so, or there is a default group, or this system is not Linux.
    """
    if STORE not in os.environ:
        raise RuntimeError(f"{STORE} is not set: start this script by `python -m minddp.elastic`.")
    if dist.is_initialized():
        raise RuntimeError("There is a default process group: leave init_process_group out, `join` does it.")
    if not os.path.isdir("/proc/self/fd"):
        raise RuntimeError("minddp.elastic finds the sockets of a process in /proc, which this system lacks.")
    host, _, port = os.environ[STORE].rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False)
    store.set_timeout(NO_LIMIT)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Session(store, silent_limit_s, start_limit_s, timeout_s)


class Session:
    """Deals the steps of a training, again and again where ranks are lost. See `join` and `steps`."""

    def __init__(self, store: dist.Store, silent_limit_s: float, start_limit_s: float, timeout_s: float):
        self._silent_limit_s, self._start_limit_s, self._timeout_s = silent_limit_s, start_limit_s, timeout_s
        self._num_ranks = int(os.environ.get(NUM_RANKS, "1"))
        self._membership = Membership(store)
        self.member = self._membership.member
        self._heart = Heartbeat(self._membership, silent_limit_s)
        self._term: Term | None = None
        self.generation = Generation()  # the last one that this process knows; its members are the ranks, in order
        self._has_state = False  # that of the generation
        self._restore: Callable[[], None] | None = None  # the own state, while that of others is on its way
        self._has_left = False
        atexit.register(self.leave)

    def steps(
        self, ddp: Any, optimizer: torch.optim.Optimizer, last: int, also: Sequence[Stateful] = ()
    ) -> Iterator[Step]:
        """The steps of the wrapper `ddp` below number `last`; the same one again if a rank was lost in it.

        What comes before the end of the loop over shares may be done again, and what follows it is done once: steps
        of optimizers and schedulers, and logging, but no collectives. A process that joins later gets parameters,
        buffers, optimizer state, number of the step, and the state of what is in `also`, from one that is there.

        Raises:
            ValueError: a wrapper without logical ranks.
        """
        ranks: LogicalRanks | None = ddp.logical_ranks
        if ranks is None:
            raise ValueError("A training goes on with other ranks only with logical_ranks: pass it to the wrapper.")
        ranks.before_counting = self._vote
        self._trained = ddp, optimizer, also
        self._ranks, self._last = ranks, last
        try:
            while True:
                term = self._term or self._regroup()
                if ranks.step >= last:
                    break
                must_end = term.admits or term.is_over.is_set()
                step = Step(self, self._regroup() if must_end else term, ranks)
                yield step
                if not step.was_run:
                    raise RuntimeError(f"Step {step.number} was not computed: write `with step:` around all of it.")
            self._membership.store.set("finished", "")
        finally:
            ranks.before_counting = None
            self.leave()

    def leave(self) -> None:
        """Train no more. The others go on without this process. May be called again."""
        if self._has_left:
            return
        self._has_left = True
        atexit.unregister(self.leave)
        if self._heart.error is None:
            self._membership.store.set(f"left/{self._membership.member}", "")
            if self._term is not None and self._membership.read("finished") is None:
                self._term.call_off(self._membership)
                drop(dist.group.WORLD)  # the interpreter ends without it
        self._heart.stop()

    # ------------------------------------------------------------------ steps

    def end(self) -> None:
        """Within a step, in place of its shares: if it counts, no other one follows."""
        self._vote()
        self._ranks.step = self._last

    def _vote(self) -> None:
        """Return if the step counts. See [Note: the vote].

        Raises:
            RankLost: it does not.
        """
        term, store = self._term, self._membership.store
        assert term is not None
        number, members = term.generation.number, term.generation.members
        verdict = f"verdict/{number}/{term.step}"
        if term.is_over.is_set():  # perhaps before the heart knew this step
            said = store.compare_set(verdict, "", "again").decode()
        elif store.add(f"votes/{number}/{term.step}", 1) == len(members):
            others_wait = len(self._membership.knocks()) > term.generation.num_knocks
            has_room = len(members) < self._ranks.num_shares
            proposed = "counts, regroup" if others_wait and has_room else "counts"
            said = store.compare_set(verdict, "", proposed).decode()
            for key in ("votes", "verdict"):  # all have voted since, and so have read it
                store.delete_key(f"{key}/{number}/{term.step - 1}")
        else:
            said = store.get(verdict).decode()
        if said == "again":
            raise RankLost(f"Step {term.step} does not count, since a rank was lost: it is computed again.")
        term.admits = said == "counts, regroup"

    def is_loss(self, error: BaseException) -> bool:
        """True if the loss of a rank is the cause of `error`, or the generation is over anyway."""
        term = self._term
        assert term is not None
        if self._heart.error is not None:
            raise RuntimeError("The store has ended, and so has the job.") from self._heart.error
        if isinstance(error, (RankLost, Stuck)) or term.is_over.is_set():
            return isinstance(error, Exception)
        if not isinstance(error, (RuntimeError, OSError)):
            return False
        looks = range(int((self._silent_limit_s + GRACE_S) / LOOK_EVERY_S))  # a stop of this process costs one
        return any(term.is_over.wait(LOOK_EVERY_S) for _ in looks)

    # ------------------------------------------------------------------ generations

    def _regroup(self) -> Term:
        """Become a rank of the next generation that can work, with the state that all its ranks have."""
        began = time.monotonic()
        limit_s, longest_s = CONNECT_LIMIT_S
        while True:
            if self._term is not None:
                self._term.call_off(self._membership)
                self._term.connections.complete()
            self._ranks.undo()
            if self._restore is not None:
                self._restore()
                self._restore = None
            self._term = self._heart.term = self._next_term()
            try:
                self._connect(self._term, limit_s)
                self._synchronize(self._term)
                _limit_collectives(self._timeout_s)
                self._has_state = True
                self._term.connections.complete()
                return self._term
            except Exception as error:
                if not self.is_loss(error) or time.monotonic() - began > self._timeout_s:
                    raise
                limit_s = min(2 * limit_s, longest_s)

    def _next_term(self) -> Term:
        """Wait until a generation is decided of which this process is a member."""
        membership, last = self._membership, self.generation
        step = self._ranks.step
        place = 0  # of the request to join, if one is under way
        if membership.member in last.members:
            membership.announce(last.number + 1, step, has_state=self._has_state)
        else:
            place = membership.knock(step)
        began = time.monotonic()
        self._heart.watched = last.members
        while True:
            if self._heart.error is not None:
                raise RuntimeError("The store has ended, and so has the job.") from self._heart.error
            if membership.read("finished") is not None:
                _log.warning("The training had finished before this process could join.")
                raise Finished(0)
            latest = membership.latest(last)
            if latest.number == last.number:
                proposal = self._proposal(last, waited_s=time.monotonic() - began)
                if proposal is None:
                    time.sleep(0.01)
                    continue
                latest = membership.decide(proposal)
            last = self.generation = latest
            self._heart.watched = last.members
            if membership.member in latest.members:
                return Term(latest)
            self._has_state = False
            if place <= latest.num_knocks and len(latest.members) < self._ranks.num_shares:
                _log.warning("Process %d was taken for lost, and joins again.", membership.member)
                place = membership.knock(step)

    def _proposal(self, last: Generation, waited_s: float) -> Generation | None:
        """The next generation; `None` if a member of the last one may still announce itself, or all are to come."""
        survivors: dict[int, int] = {}
        joiners: dict[int, int] = {}  # also members of a generation that has not come to its first step
        for member in last.members:
            if not self._is_lost(member):
                announcement = self._membership.announced(last.number + 1, member)
                if announcement is None:
                    return None
                step, has_state = announcement
                (survivors if has_state else joiners)[member] = step
        knocks = self._membership.knocks()
        for member, step in knocks[last.num_knocks :]:
            if not self._is_lost(member):
                joiners[member] = step
        is_first = last.number == 0
        if is_first and len(joiners) < self._num_ranks and waited_s < self._start_limit_s:
            return None
        if self._membership.member not in {**survivors, **joiners}:
            return None
        return next_generation(last, survivors, joiners, len(knocks), self._ranks.num_shares)

    def _is_lost(self, member: int) -> bool:
        return (
            member in self._heart.silent
            or self._membership.process_is_gone(member)
            or self._membership.read(f"left/{member}") is not None
        )

    def _connect(self, term: Term, limit_s: float) -> None:
        """Make the default group one of all members, and the wrapper's.

        For a connection of a member that dies meanwhile gloo waits five times its limit (`Pair::waitUntil`), and to
        hang up does not end that. So members wait for slow ones before, in the store, longer in each attempt.

        Raises:
            RankLost: they have not come together, since one is lost or slow.
        """
        generation = term.generation
        if dist.is_initialized():
            drop(dist.group.WORLD)
            dist.destroy_process_group()
        dist.distributed_c10d._world.group_count = 0  # a part of the keys in the store; counts failures, too
        store = self._membership.store.clone()  # type: ignore[attr-defined]
        os.environ["LOCAL_WORLD_SIZE"] = str(len(generation.members))  # at most
        rank, world_size = generation.members.index(self.member), len(generation.members)
        come = [f"come/{generation.number}/{other}" for other in range(world_size)]
        limit = datetime.timedelta(seconds=limit_s)
        group_store = dist.PrefixStore(f"group/{generation.number}", store)
        try:
            store.set(come[rank], "")
            store.wait(come, limit)
            dist.init_process_group("gloo", store=group_store, rank=rank, world_size=world_size, timeout=limit / 5)
        except RuntimeError as error:
            raise RankLost(f"Generation {generation.number} has not come together: {error}") from error
        _limit_collectives(STATE_LIMIT_S)
        self._trained[0].move_to_group(dist.group.WORLD)
        term.transport = self._ranks.transport

    def _synchronize(self, term: Term) -> None:
        """Send the state of the source to the members that have joined; the others have it."""
        generation = term.generation
        if not generation.joined:
            return
        ddp, optimizer, also = self._trained
        source, member = generation.members.index(generation.source), self._membership.member
        if member in generation.joined:
            self._restore = _own_state((*ddp.module.parameters(), *ddp.module.buffers()), (optimizer, *also))
        ddp.synchronize(source, optimizer=optimizer)
        states: list[Any] = [[each.state_dict() for each in also]]
        dist.broadcast_object_list(states, source)
        for each, state in zip(also, states[0], strict=True):
            each.load_state_dict(state)
        self._ranks.agree_on_seed(source)
        self._ranks.step = generation.step
        self._restore = None


class Step:
    """One attempt at step `number`, within `with`."""

    def __init__(self, session: Session, term: Term, ranks: LogicalRanks):
        self.number = ranks.step
        self._session = session
        self._term = term
        self._ranks = ranks
        self.was_run = False

    def __enter__(self) -> Step:
        self.was_run = True
        self._term.step = self.number
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """True if the step is to come again: a rank was lost before it counted."""
        has_counted = self._ranks.step > self.number
        if error is None:
            if not has_counted:
                raise RuntimeError(f"Step {self.number} has ended without a loop over `ddp.shares()`.")
            return False
        if not has_counted and self._session.is_loss(error):
            self._term.is_over.set()
            return True
        self._session.leave()
        return False


def _limit_collectives(seconds: float) -> None:
    assert dist.group.WORLD is not None
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), dist.group.WORLD)


def _own_state(tensors: Sequence[torch.Tensor], others: Sequence[Stateful]) -> Callable[[], None]:
    """Copy `tensors`, and the state of each of `others`. Returns what puts the copies back.

    The others may die while they send their state. A state that is half overwritten is then useless, and this
    process may be the only one left.
    """
    copies = [tensor.detach().clone() for tensor in tensors]
    states = [copy.deepcopy(each.state_dict()) for each in others]

    def restore() -> None:
        for tensor, value in zip(tensors, copies, strict=True):
            tensor.detach().copy_(value)
        for each, state in zip(others, states, strict=True):
            each.load_state_dict(state)

    return restore
