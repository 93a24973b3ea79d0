"""Judges the network: rendezvous, interfaces, connections between ranks, speed of collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minddp.platform import wording
from minddp.tools.doctor.fact_sheet import Sheets, is_loopback, outward
from minddp.tools.doctor.measurement import Measurement
from minddp.tools.doctor.report import CheckResult, Severity, differing, judged
from minddp.tools.job.place import Place
from minddp.tools.job.store_connection import Obstacle, StoreUnreachable

MOST_NAMED = 4
SLOW_BYTES_PER_S = 100e6  # about a gigabit a second
SLOW_LATENCY_S = 5e-3
EXAMPLE_PARAMETERS = 25_000_000

# Fact and remedy for each obstacle on the way to the store.
OBSTACLES: dict[Obstacle, tuple[str, str]] = {
    "unknown name": (
        "The name {place.address} (MASTER_ADDR) has no address on this host: {detail}.",
        "Set MASTER_ADDR to the IP address of rank 0's host, or make {place.address} known here (DNS, /etc/hosts). "
        "With a c10d rendezvous torchrun takes the host's own name, unless it gets --local-addr there.",
    ),
    "refused": (
        "Nothing listens at {endpoint}: the connection was refused for {limit_s:g} s.",
        "Check that {place.address} is an address of rank 0's host and not of this one, and that rank 0 was "
        "started with MASTER_PORT={place.port} within the time limit (--timeout-s).",
    ),
    "no answer": (
        "{endpoint} did not answer for {limit_s:g} s: {detail}.",
        "Open this port in the firewall between the hosts, or set MASTER_ADDR to an address of rank 0's host in a "
        "network that this host is in too (`ip addr` lists them).",
    ),
    "no store": (
        "A process listens at {endpoint}, but it is not the store of a torch job: {detail}.",
        "Choose another MASTER_PORT, the same on every rank (torchrun --master-port), and check that nothing "
        "between the hosts, such as a proxy, answers for {place.address}.",
    ),
    "cannot listen": (
        "Rank 0 cannot listen at port {place.port} of this host: {detail}.",
        "Choose another MASTER_PORT, the same on every rank (torchrun --master-port); or end the process that "
        "`ss -ltnp 'sport = :{place.port}'` names, often an earlier job that did not end.",
    ),
}


def judge_obstacle(
    place: Place, error: StoreUnreachable, addresses: Mapping[str, str], limit_s: float
) -> CheckResult:
    """This rank did not reach the store. `addresses` are those of its host, by interface."""
    resolved = f" ({', '.join(error.resolved)})" if error.resolved else ""
    fact, remedy = (
        text.format(place=place, endpoint=place.endpoint + resolved, detail=error.detail, limit_s=limit_s)
        for text in OBSTACLES[error.obstacle]
    )
    listed = ", ".join(f"{address} ({name})" for name, address in addresses.items())
    fact += f" This is rank {place.rank}; its host has {listed or 'no address but the loopback'}."
    return CheckResult("rendezvous", Severity.BROKEN, fact, remedy)


def judge_arrivals(place: Place, sheets: Sheets, missing: Sequence[int], limit_s: float) -> CheckResult:
    """All ranks have arrived at the store, with their fact sheets."""
    present = differing({rank: sheet.host for rank, sheet in sheets.items()}, "{ranks} on {value}")
    if not missing:
        ranks = wording.count(place.world_size, "rank")
        return CheckResult("rendezvous", Severity.FINE, f"{ranks} met at {place.endpoint}: {present}.")
    fact = (
        f"{wording.subject(missing, 'has', 'have')} not arrived at {place.endpoint} within {limit_s:g} s. "
        f"Present: {present}."
    )
    remedy = (
        f"Start all ranks with WORLD_SIZE={place.world_size} MASTER_ADDR={place.address} MASTER_PORT={place.port}, "
        f"within the time limit (--timeout-s). If a missing rank did start, see what minddp doctor printed there."
    )
    return CheckResult("rendezvous", Severity.BROKEN, fact, remedy)


def judge_interfaces(sheets: Sheets) -> list[CheckResult]:
    """The interfaces that GLOO_SOCKET_IFNAME names exist and are up."""
    problems = []
    variable = "GLOO_SOCKET_IFNAME"
    values = {rank: (s.host, s.environment[variable]) for rank, s in sheets.items() if s.environment.get(variable)}
    for (host, wanted), ranks in wording.by_value(values).items():
        interfaces = sheets[ranks[0]].interfaces
        if wrong := [name for name in wanted.split(",") if name not in interfaces]:
            fact = (
                f"{variable}={wanted} on {host} ({wording.ranks(ranks)}), but there is no {wording.joined(wrong)} "
                f"there that is up. Interfaces with an address: {', '.join(interfaces) or 'none'}."
            )
            remedy = f"Set {variable} on that host to the interface that leads to the others, or unset it."
            problems.append(CheckResult("interfaces", Severity.BROKEN, fact, remedy))
    fine = differing({rank: f"{sheet.gloo_address} ({sheet.host})" for rank, sheet in sheets.items()})
    return judged("interfaces", problems, f"gloo listens at {fine}.")


def judge_connections(
    sheets: Sheets, obstacles: Mapping[int, Mapping[int, str]], errors: Mapping[int, str]
) -> CheckResult:
    """Every rank can open a connection to every other, and the process group works.

    A connection that cannot be opened is a note if the group works: gloo needs one direction of each pair.
    """
    blocked = [
        f"rank {rank} on {sheets[rank].host} to rank {peer} at {sheets[peer].gloo_address} on {sheets[peer].host} "
        f"({obstacle})"
        for rank, by_peer in obstacles.items()
        for peer, obstacle in by_peer.items()
    ]
    facts = []
    if errors:
        failed = wording.joined([f"rank {rank} (pid {sheets[rank].pid} on {sheets[rank].host})" for rank in errors])
        facts.append(f"The process group failed on {failed}: {differing(errors)}.")
    if blocked:
        more = f" and {len(blocked) - MOST_NAMED} more" if len(blocked) > MOST_NAMED else ""
        facts.append(f"No connection from {'; '.join(blocked[:MOST_NAMED])}{more}.")
    if not facts:
        fine = f"Connections work between {wording.count(len(sheets), 'rank')}."
        return CheckResult("network", Severity.FINE, fine)
    remedy = _loopback_remedy(sheets) or (
        "Open all TCP ports between the hosts, since the system chooses where gloo and NCCL listen; or set "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to interfaces in a network that all hosts are in."
        if blocked
        else "See the output of these ranks, and whether the kernel killed them (dmesg). NCCL_DEBUG=WARN, or "
        "TORCH_CPP_LOG_LEVEL=INFO for gloo, makes a job say more. If small messages pass and large ones hang, "
        "compare the MTU of the interfaces on all hosts (`ip link`)."
    )
    return CheckResult("network", Severity.BROKEN if errors else Severity.NOTE, " ".join(facts), remedy)


def _loopback_remedy(sheets: Sheets) -> str:
    """The remedy where one of several hosts would listen at its loopback; empty if none would."""
    wrong = {s.host: list(outward(s.interfaces)) for s in sheets.values() if is_loopback(s.gloo_address)}
    if not wrong or len({sheet.network_identity for sheet in sheets.values()}) == 1:
        return ""
    exports = [f"GLOO_SOCKET_IFNAME={(names or ['<interface>'])[0]} on {host}" for host, names in wrong.items()]
    return (
        f"gloo listens at the loopback on {wording.joined(list(wrong))}, where other hosts cannot reach it. Export "
        f"{wording.joined(exports)}; or give each host's own name its true address in /etc/hosts."
    )


def judge_collectives(measured: Mapping[int, Measurement], is_busy: bool) -> list[CheckResult]:
    """The speed of an all-reduce by each transport, on the slowest rank."""
    if len(measured) == 1:
        return [CheckResult("collectives", Severity.FINE, "A single rank has nothing to exchange.")]
    remedy = (
        "Check that the hosts' fastest network is used (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME). Exchange less: "
        "accumulate under no_sync(), or compress with torch's bf16_compress_hook."
    )
    if is_busy:
        remedy = "The machine is busy, see load: check again when nothing else runs there."
    findings = []
    for name, (latency_s, bytes_per_s) in measured[0].links.items():
        example_s = latency_s + 4 * EXAMPLE_PARAMETERS / bytes_per_s
        fact = (
            f"All-reduce by {name}: {latency_s * 1e3:.2f} ms, then {bytes_per_s / 1e9:.2f} GB/s; "
            f"{example_s * 1e3:.0f} ms for {EXAMPLE_PARAMETERS // 10**6} million float32 gradients."
        )
        is_slow = latency_s > SLOW_LATENCY_S or bytes_per_s < SLOW_BYTES_PER_S
        severity = Severity.NOTE if is_slow else Severity.FINE
        findings.append(CheckResult("collectives", severity, fact, remedy if is_slow else ""))
    return findings
