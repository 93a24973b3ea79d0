"""The transport between hosts, and how it connects the ranks of a group."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from minddp.transport.hierarchical.multi_host_communicator import Hosts, Lane, MultiHostCommunicator
from minddp.transport.process_group import ProcessGroupTransport, time_limit_s
from minddp.transport.protocols import Transport
from minddp.transport.shared_memory import rendezvous
from minddp.transport.shared_memory.peer_sockets import Peer
from minddp.transport.shared_memory.rendezvous import CannotConnect
from minddp.transport.shared_memory.shared_memory_transport import (
    CONNECT_TIMEOUT_S,
    SharedMemoryTransport,
    connect_ranks,
    require_gloo,
)


class HierarchicalTransport(SharedMemoryTransport):
    """All-reduces in the memory of each host and between the hosts. The process group does the rest."""


def connect_hosts(
    group: ProcessGroupTransport, device: torch.device, name_of_host: Callable[[], str] = rendezvous.name_of_host
) -> Transport:
    """The transport between the ranks of `group`, for tensors on `device`. Collective.

    Raises:
        CannotConnect: on every rank, if ranks of a host cannot share memory, or hosts cannot connect.
        ValueError: the device or the group is not supported.
    """
    try:
        require_gloo(group, device)
    except CannotConnect as reason:
        raise ValueError(
            f'transport="hierarchical" adds on the CPU, and by gloo between hosts, but {reason}. Pass '
            f'transport="process_group".'
        ) from None
    hosts = Hosts.grouped(rendezvous.gather_hosts(group, name_of_host()))
    if len(hosts.ranks) == group.world_size:
        return group
    if len(hosts.ranks) == 1:
        return connect_ranks(group, device)
    timeout_s = time_limit_s(group.group, device)
    peers = rendezvous.connect(group, hosts.ranks_beside(group.rank), CONNECT_TIMEOUT_S)
    lane = _connect_lane(group, hosts, timeout_s, peers)
    return HierarchicalTransport(group, MultiHostCommunicator(hosts, group.rank, peers, timeout_s, lane))


def _connect_lane(
    group: ProcessGroupTransport, hosts: Hosts, timeout_s: float, peers: Mapping[int, Peer]
) -> Lane | None:
    """The lane of this rank, if it has one."""
    error_here, lane, local_rank = "", None, hosts.ranks_beside(group.rank).index(group.rank)
    token, *_ = rendezvous.gather_json(group, secrets.token_hex(8))  # for keys in the store that are not used yet
    if group.store is None:
        error_here = "the group has no store through which hosts could connect"
    elif local_rank < hosts.num_lanes:
        store = dist.PrefixStore(f"minddp/lane/{token}/{local_rank}", group.store)
        try:
            lane = Lane(store, hosts.lane(local_rank), group.rank, CONNECT_TIMEOUT_S, timeout_s)
        except RuntimeError as error:
            error_here = f"rank {group.rank} cannot connect to the other hosts: {error}"
    rendezvous.require_success(group, error_here, peers)
    return lane
