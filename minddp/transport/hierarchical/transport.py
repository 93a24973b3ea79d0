"""How ranks find out on which hosts they are and get connected, and the transport between them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from minddp.transport.hierarchical.exchange import HostExchange
from minddp.transport.hierarchical.hosts import Hosts, Neighbours
from minddp.transport.hierarchical.lane import Lane, open_lane
from minddp.transport.process_group import ProcessGroupTransport
from minddp.transport.protocols import Transport, Work
from minddp.transport.shared_memory.rendezvous import (
    LONGEST_OBSTACLE,
    CannotConnect,
    Peer,
    connect,
    gather_words,
    machine,
)
from minddp.transport.shared_memory.transport import (
    CONNECT_TIMEOUT_S,
    SharedMemoryTransport,
    connect_ranks,
    gloo_behind,
    time_limit_s,
)


class HierarchicalTransport(SharedMemoryTransport):
    """All-reduces in the memory of each host and between the hosts; all else is left to the process group.

    Tensors that `allocate` has made are added up where they lie, others are copied in and out. Dtypes that are not
    added up in shared memory, sparse tensors, broadcasts and all-gathers go the process group's way.
    """

    def __init__(self, group: ProcessGroupTransport, exchange: HostExchange, hosts: Hosts):
        super().__init__(group, exchange)
        self.hosts = hosts

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return self._group.broadcast(tensor, source)


def connect_hosts(
    group: ProcessGroupTransport, device: torch.device, name_of_host: Callable[[], str] = machine
) -> Transport:
    """The transport between the ranks of `group`, for tensors on `device`. Collective.

    All on one host is shared memory alone, and one on each host the process group alone. `name_of_host` tells what
    ranks on this host have in common, and only they.

    Raises:
        CannotConnect: ranks on one host cannot share memory, or hosts do not reach each other. On every rank, for
            the same reason.
        ValueError: the tensors, or the group, are not of a kind that is added up so.
    """
    backend = _checked(group, device)
    hosts, token = _get_acquainted(group, name_of_host())
    if len(hosts.ranks) == 1 and group.world_size > 1:
        return connect_ranks(group, device)
    if hosts.all_alone:
        return group
    peers = _connect_within_hosts(group, hosts)
    lane = _connect_between_hosts(group, hosts, token, time_limit_s(backend), peers)
    place = hosts.place_of(group.rank)
    ranks = hosts.ranks[place.host]
    exchange = HostExchange(place.seat, peers, time_limit_s(backend), ranks, lane, hosts.num_lanes)
    return HierarchicalTransport(group, exchange, hosts)


def _checked(group: ProcessGroupTransport, device: torch.device) -> Backend:
    try:
        return gloo_behind(group, device)
    except CannotConnect as obstacle:
        raise ValueError(
            f'transport="hierarchical" adds up on the CPU, and by gloo between hosts, but {obstacle}. Pass '
            f'transport="process_group".'
        ) from None


def _get_acquainted(group: ProcessGroupTransport, name: str) -> tuple[Hosts, str]:
    """Who is where; and a word that nobody has used before, for keys in the store."""
    everyone = gather_words(group, {"host": name, "token": secrets.token_hex(8)})
    for rank, words in enumerate(everyone):
        if not words["host"]:
            raise CannotConnect(f"rank {rank} runs on a system that cannot share memory as Linux does")
    return Hosts.grouped([words["host"] for words in everyone]), everyone[0]["token"]


def _connect_within_hosts(group: ProcessGroupTransport, hosts: Hosts) -> Mapping[int, Peer]:
    """Connections to the other ranks of this host, by their seats."""
    obstacle, peers = "", {}
    try:
        peers = connect(Neighbours(group, hosts.ranks[hosts.place_of(group.rank).host]), CONNECT_TIMEOUT_S)
    except CannotConnect as error:
        obstacle = str(error)
    _agree(group, obstacle, peers)
    return peers


def _connect_between_hosts(
    group: ProcessGroupTransport, hosts: Hosts, token: str, timeout_s: float, peers: Mapping[int, Peer]
) -> Lane | None:
    """Our end of a lane, if this seat has one."""
    obstacle, lane, seat = "", None, hosts.place_of(group.rank).seat
    if group.store is None:
        obstacle = "the group has no store through which a rank of each host could meet"
    elif seat < hosts.num_lanes:
        store = dist.PrefixStore(f"minddp/lane/{token}/{seat}", group.store)
        try:
            lane = open_lane(store, hosts.lane(seat), group.rank, CONNECT_TIMEOUT_S, timeout_s)
        except RuntimeError as error:
            obstacle = f"rank {group.rank} does not reach the other hosts: {error}"
    _agree(group, obstacle, peers)
    return lane


def _agree(group: ProcessGroupTransport, obstacle: str, peers: Mapping[int, Peer]) -> None:
    """Go on if no rank has met with an obstacle."""
    obstacles = [words for words in gather_words(group, obstacle[:LONGEST_OBSTACLE]) if words]
    if obstacles:
        for peer in peers.values():
            peer.close()
        raise CannotConnect(obstacles[0])
