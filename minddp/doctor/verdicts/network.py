"""Can the ranks be reached, and were they? Interfaces, addresses, connections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from minddp.doctor.board import Outcome, is_done, to_blame
from minddp.doctor.facts import Network, RankFacts
from minddp.doctor.findings import Finding, Verdict, by_value, count, name_ranks
from minddp.doctor.interfaces import is_loopback, match_nccl_interfaces, outward

Facts = Mapping[int, RankFacts]
Outcomes = Mapping[int, Outcome]

_MANY = 4  # pairs that are named one by one


# ---------------------------------------------------------------------- interfaces, before anything is connected


def judge_interfaces(facts: Facts, on_gpu: bool) -> list[Finding]:
    """Whether the interfaces that gloo and NCCL are told to use exist."""
    found = [*_wrong_gloo_interfaces(facts), *_wrong_nccl_interfaces(facts, on_gpu)]
    return found or [Finding("interfaces", Verdict.FINE, f"gloo listens at {_addresses(facts)}.")]


def _wrong_gloo_interfaces(facts: Facts) -> Iterator[Finding]:
    for (host, wanted), ranks in _set_to(facts, "GLOO_SOCKET_IFNAME").items():
        network = facts[ranks[0]].network
        for name in wanted.split(","):
            interface = network.interfaces.get(name)
            if interface is None or not interface.is_up:
                yield Finding(
                    "interfaces",
                    Verdict.BROKEN,
                    f"GLOO_SOCKET_IFNAME={wanted} on {host} ({name_ranks(ranks)}), but {name} "
                    f"{'is down' if interface else 'does not exist there'}. {_choice(network)}",
                    "Set GLOO_SOCKET_IFNAME on that host to the one that leads to the others, or unset it.",
                )


def _wrong_nccl_interfaces(facts: Facts, on_gpu: bool) -> Iterator[Finding]:
    for (host, wanted), ranks in _set_to(facts, "NCCL_SOCKET_IFNAME").items():
        network = facts[ranks[0]].network
        if not match_nccl_interfaces(wanted, list(network.interfaces)):
            yield Finding(
                "interfaces",
                Verdict.BROKEN if on_gpu else Verdict.NOTE,
                f"NCCL_SOCKET_IFNAME={wanted} on {host} ({name_ranks(ranks)}) fits no interface there. "
                f"{_choice(network)}",
                "Set NCCL_SOCKET_IFNAME on that host to the one that leads to the others, or unset it.",
            )


def _set_to(facts: Facts, variable: str) -> dict[tuple[str, str], list[int]]:
    """Ranks by host and the value that the variable has there."""
    values = {
        rank: (told.machine.name, told.software.environment[variable])
        for rank, told in facts.items()
        if variable in told.software.environment
    }
    return by_value(values)


def _choice(network: Network) -> str:
    return f"There are {', '.join(network.interfaces)}." if network.interfaces else "There is none."


def _addresses(facts: Facts) -> str:
    """`10.0.0.1 (eth0, a), 10.0.0.2 (eth0, b)`."""
    shown = {
        f"{told.network.gloo_address} ({told.network.interface_of(told.network.gloo_address or '')}, "
        f"{told.machine.name})": None
        for told in facts.values()
    }
    listed = list(shown)
    return ", ".join(listed[:_MANY]) + (f" and {len(listed) - _MANY} more" if len(listed) > _MANY else "")


# ---------------------------------------------------------------------- connections


def cut_off(reached: Outcomes) -> list[tuple[int, int]]:
    """Pairs of ranks of which neither can connect to the other."""
    if not is_done(reached):
        return []
    return [
        (low, high)
        for low, high in combinations(sorted(reached), 2)
        if _obstacle(reached, low, high) and _obstacle(reached, high, low)
    ]


def judge_network(facts: Facts, reached: Outcomes, connected: Outcomes, took_s: float) -> list[Finding]:
    """Whether ranks reach each other. `connected` is empty where it was of no use to try."""
    broken = [*_no_doors(facts, reached), *_cut(facts, reached)]
    broken = broken or [*_not_made(facts, reached), *_not_made(facts, connected)]
    if broken:
        return broken
    notes = list(_one_way(facts, reached))
    fact = f"{count(len(facts), 'rank')} connected in {took_s:.1f} s, and ones added up to {len(facts)}."
    return [*notes, Finding("network", Verdict.FINE, fact)]


def _obstacle(reached: Outcomes, source: int, target: int) -> str:
    """Why `source` cannot connect to `target`; empty if it can."""
    return str(reached[source].value[str(target)])


def _no_doors(facts: Facts, reached: Outcomes) -> Iterator[Finding]:
    """Ranks that could not even try."""
    for rank, outcome in to_blame(reached).items():
        network = facts[rank].network
        if outcome.ended == "failed":
            yield Finding(
                "network",
                Verdict.BROKEN,
                f"Rank {rank} on {facts[rank].machine.name} cannot listen at {network.gloo_address}, where gloo "
                f"would: {outcome.error}.",
                f"Set GLOO_SOCKET_IFNAME there to an interface of that host. {_choice(network)}",
            )


def _cut(facts: Facts, reached: Outcomes) -> Iterator[Finding]:
    pairs = cut_off(reached)
    if not pairs:
        return
    tales = [
        f"rank {high} on {_door(facts, high)} and rank {low} on {_door(facts, low)} "
        f"({_obstacle(reached, high, low)}; the other way round: {_obstacle(reached, low, high)})"
        for low, high in pairs[:_MANY]
    ]
    more = f", and {len(pairs) - _MANY} more pairs" if len(pairs) > _MANY else ""
    yield Finding(
        "network",
        Verdict.BROKEN,
        f"Neither of these can connect to the other: {'; '.join(tales)}{more}.",
        _remedy(
            facts,
            "Let the hosts connect to each other at any TCP port, since the system chooses where gloo and "
            "NCCL listen; or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to interfaces in a network that all "
            "hosts are in.",
        ),
    )


def _not_made(facts: Facts, outcomes: Outcomes) -> Iterator[Finding]:
    """Ranks to blame for a step towards the group that was not done everywhere."""
    blamed = to_blame(outcomes)
    for error, ranks in by_value({rank: told.error or "it fell silent" for rank, told in blamed.items()}).items():
        yield Finding(
            "network",
            Verdict.BROKEN,
            f"The process group could not be made on {name_ranks(ranks)}: {error}.",
            _remedy(facts, "NCCL_DEBUG=WARN, or TORCH_CPP_LOG_LEVEL=INFO for gloo, has a job say more."),
        )


def _one_way(facts: Facts, reached: Outcomes) -> Iterator[Finding]:
    """Connections that cannot be opened in one direction. gloo may need the other, today."""
    closed = [
        (source, target, _obstacle(reached, source, target))
        for source in reached
        for target in reached
        if source != target and _obstacle(reached, source, target)
    ]
    if closed:
        source, target, why = closed[0]
        more = f" {count(len(closed) - 1, 'more connection')} likewise." if len(closed) > 1 else ""
        yield Finding(
            "network",
            Verdict.NOTE,
            f"Rank {source} on {_door(facts, source)} cannot connect to rank {target} on {_door(facts, target)} "
            f"({why}), only the other way round.{more} It depends on addresses which way gloo connects.",
            _remedy(facts, "Let the hosts connect to each other at any TCP port, in both directions."),
        )


def _remedy(facts: Facts, otherwise: str) -> str:
    """What to do where hosts of a job on several have the others come to their loopback, and otherwise."""
    if len({told.network.identity for told in facts.values()}) == 1:
        return otherwise
    misleading = {
        told.machine.name: told.network
        for told in facts.values()
        if told.network.gloo_address is not None and is_loopback(told.network.gloo_address)
    }
    if not misleading:
        return otherwise
    addresses = ", ".join(sorted({str(network.gloo_address) for network in misleading.values()}))
    exports = [
        f"GLOO_SOCKET_IFNAME={next(iter(outward(network.interfaces)), '<interface>')} on {host}"
        for host, network in misleading.items()
    ]
    return (
        f"{', '.join(misleading)} would have the others come to {addresses}, which leads every host to itself. "
        f"Export {', '.join(exports)}; or give each host's own name its true address in /etc/hosts."
    )


def _door(facts: Facts, rank: int) -> str:
    network = facts[rank].network
    return f"{facts[rank].machine.name} at {network.gloo_address}"
