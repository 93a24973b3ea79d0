"""Did the ranks meet? And if one did not get to the store, what stood in its way?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minddp.doctor.facts import RankFacts
from minddp.doctor.findings import Finding, Verdict, by_value, count, name_ranks
from minddp.doctor.interfaces import is_loopback
from minddp.doctor.meeting import Attempt
from minddp.doctor.place import Place

CHECK = "rendezvous"


def judge_attempt(attempt: Attempt, own_addresses: Mapping[str, str]) -> Finding:
    """Why a rank did not get to the store. `own_addresses` are its host's, by interface."""
    place = attempt.place
    fact, remedy = {
        "unknown name": _unknown_name,
        "refused": _refused,
        "no answer": _no_answer,
        "no route": _no_route,
        "no store": _no_store,
        "port in use": _port_in_use,
        "other": _other,
    }[attempt.obstacle](attempt)
    if place.rank == 0 and not _leads_here(attempt, own_addresses):
        fact += f" Rank 0 is on this host, whose addresses are {_listed(own_addresses)}."
        remedy = "MASTER_ADDR has to be an address of the host that rank 0 is on: set it so on every rank."
    return Finding(CHECK, Verdict.BROKEN, fact, remedy)


def _unknown_name(attempt: Attempt) -> tuple[str, str]:
    name = attempt.place.address
    return (
        f"The name {name} (MASTER_ADDR) has no address on this host: {attempt.detail}.",
        f"Set MASTER_ADDR to the IP address of the host of rank 0, or make {name} known here (DNS, /etc/hosts). "
        f"With a c10d rendezvous torchrun takes the host's own name, unless it is given --local-addr there.",
    )


def _refused(attempt: Attempt) -> tuple[str, str]:
    place = attempt.place
    fact = f"Nobody listens at {_endpoint(attempt)}: the connection is refused, for {attempt.waited_s:.0f} s."
    if any(map(is_loopback, attempt.resolved)) and place.rank != 0:
        return fact, (
            f"{place.address} leads to this host itself. Unless rank 0 is here too, set MASTER_ADDR to an address "
            f"of its host that the other hosts can reach. If it is here, see whether it runs, with MASTER_PORT="
            f"{place.port}."
        )
    return fact, (
        f"See whether rank 0 runs on that host, with the same MASTER_PORT={place.port}; it has to be started "
        f"within the time limit (--timeout-s)."
    )


def _no_answer(attempt: Attempt) -> tuple[str, str]:
    return (
        f"{_endpoint(attempt)} does not answer, for {attempt.waited_s:.0f} s: packets get lost on the way.",
        f"Open TCP port {attempt.place.port} in the firewall between the hosts, or set MASTER_ADDR to an address "
        f"of rank 0's host in a network that this host is in too (`ip addr` lists them).",
    )


def _no_route(attempt: Attempt) -> tuple[str, str]:
    return (
        f"There is no route from this host to {_endpoint(attempt)}: {attempt.detail}.",
        "Set MASTER_ADDR to an address of rank 0's host in a network that this host is in too (see `ip addr`).",
    )


def _no_store(attempt: Attempt) -> tuple[str, str]:
    return (
        f"Something listens at {_endpoint(attempt)}, but it is not the store of a torch job: {attempt.detail}.",
        f"Choose another port, the same on every rank (MASTER_PORT, torchrun --master-port), and see that nothing "
        f"between the hosts, such as a proxy, answers for {attempt.place.address}.",
    )


def _port_in_use(attempt: Attempt) -> tuple[str, str]:
    port = attempt.place.port
    return (
        f"Port {port} of this host, where rank 0 has to listen, is in use by another process.",
        f"Choose another one, the same on every rank (MASTER_PORT, torchrun --master-port); or end the process: "
        f"`ss -ltnp 'sport = :{port}'` names it, often an earlier job that did not end.",
    )


def _other(attempt: Attempt) -> tuple[str, str]:
    return (
        f"The store at {_endpoint(attempt)} cannot be had: {attempt.detail}.",
        "See whether rank 0 runs, and whether MASTER_ADDR and MASTER_PORT are the same on every rank.",
    )


def _endpoint(attempt: Attempt) -> str:
    """`node1:29500 (10.0.0.1)`."""
    resolved = [address for address in attempt.resolved if address != attempt.place.address]
    return f"{attempt.place.endpoint} ({', '.join(resolved)})" if resolved else attempt.place.endpoint


def _leads_here(attempt: Attempt, own_addresses: Mapping[str, str]) -> bool:
    if attempt.obstacle in ("port in use", "unknown name"):
        return True  # it is something else that is wrong
    return any(is_loopback(address) or address in own_addresses.values() for address in attempt.resolved)


def _listed(addresses: Mapping[str, str]) -> str:
    return ", ".join(f"{address} ({name})" for name, address in addresses.items()) or "those of the loopback only"


# ---------------------------------------------------------------------- who came


def judge_roll_call(
    place: Place,
    facts: Mapping[int, RankFacts],
    duplicates: Sequence[int],
    took_s: float,
    timeout_s: float,
    missing: Sequence[int] | None = None,
) -> Finding:
    """Whether all ranks are there, each once, and of one opinion on how many they are.

    By default all are `missing` that no facts are known of.
    """
    if missing is None:
        missing = [rank for rank in range(place.world_size) if rank not in facts]
    if duplicates:
        return Finding(
            CHECK,
            Verdict.BROKEN,
            f"Several processes claim to be {name_ranks(duplicates)}.",
            "Give each process a RANK of its own: with torchrun, each host another --node-rank.",
        )
    if missing:
        return Finding(CHECK, Verdict.BROKEN, _absent(place, facts, missing, timeout_s), _fetch(place, missing))
    sizes = by_value({rank: told.world_size for rank, told in facts.items()})
    if len(sizes) > 1:
        told = ", ".join(f"{size} according to {name_ranks(ranks)}" for size, ranks in sizes.items())
        return Finding(
            CHECK, Verdict.BROKEN, f"The ranks do not agree on how many they are: {told}.", "Set one WORLD_SIZE."
        )
    host = facts[0]
    interface = host.network.interface_of(host.network.store_address)
    hosts = len({told.network.identity for told in facts.values()})
    return Finding(
        CHECK,
        Verdict.FINE,
        f"{count(place.world_size, 'rank')} on {count(hosts, 'host')} met at {place.endpoint} "
        f"({host.network.store_address}, {interface}) in {took_s:.1f} s.",
    )


def _absent(place: Place, facts: Mapping[int, RankFacts], missing: Sequence[int], timeout_s: float) -> str:
    verb = "has" if len(missing) == 1 else "have"
    hosts = by_value({rank: told.machine.name for rank, told in facts.items()})
    here = ", ".join(f"{name_ranks(ranks)} on {host}" for host, ranks in hosts.items())
    return (
        f"{name_ranks(missing).capitalize()} {verb} not come within {timeout_s:g} s. {len(facts)} of "
        f"{count(place.world_size, 'rank')} met at {place.endpoint}: {here}."
    )


def _fetch(place: Place, missing: Sequence[int]) -> str:
    it = "it" if len(missing) == 1 else "them"
    return (
        f"Start {it} with WORLD_SIZE={place.world_size} MASTER_ADDR={place.address} MASTER_PORT={place.port}, "
        f"within the time limit (--timeout-s). If {it} did start, what minddp doctor prints there says what was in "
        f"the way."
    )
