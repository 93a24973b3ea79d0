r"""Other ways to carry out an all-reduce, beside the ring: which one is fastest depends on the message.

    python -m reference.collectives --algorithm halving --ranks 4 --per-host 1

All are plans of the same `Step`s that `ring.py` carries out and draws. A step takes a latency a and the time of its
bytes; for n ranks (a power of two), B bytes, a wire with bandwidth beta:

    ring          2(n-1) a     + 2 (n-1)/n B/beta     fewest bytes, most latencies
    tree          2 log2(n) a  + 2 log2(n) B/beta     whole buffers up to rank 0, and down again
    doubling      log2(n) a    + log2(n) B/beta       whole buffers, exchanged in pairs: fewest latencies
    halving       2 log2(n) a  + 2 (n-1)/n B/beta     halves, then quarters ...; and back: few of both
    hierarchical  a ring in each host, rings between hosts, a ring in each host (see below)

By these two terms `halving` is never worse than the ring (R. Thakur, R. Rabenseifner and W. Gropp,
"Optimization of collective communication operations in MPICH", 2005). But a rank of the ring sends only to its
neighbour, so the n messages of a step share no cable, while partners of `halving` are up to half the machine
apart. And n has to be a power of two: the ranks that are too many first add their buffers to a partner's and
get the result at the end, which costs 2 more steps of B bytes.

*Hierarchical* is for two kinds of wires. The wire between hosts is slow, and the ranks of a host share it. A ring
of all ranks sends 2 (n-1)/n B over it in 2(n-1) steps. With g ranks on each of h hosts: reduce-scatter in each
host; then rank i of each host all-reduces its g-th part with rank i of the others, which is 2 (h-1)/h B over the
wire in 2(h-1) steps; then all-gather in each host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tyro

from .ring import Plan, Step, Transfer, carry_out, digits, ring, show


def tree(n: int) -> Plan:
    """A binomial tree with rank 0 at its root."""
    up = []
    distance = 1
    while distance < n:
        senders = range(distance, n, 2 * distance)
        up.append(Step("reduce", tuple(Transfer(rank, rank - distance, range(1)) for rank in senders)))
        distance *= 2
    return Plan(1, [*up, *reversed_as("broadcast", up)])


def doubling(n: int) -> Plan:
    """Partners at distance 1, 2, 4 ... exchange what they have summed so far."""
    even = power_of_two(n)
    steps = []
    distance = 1
    while distance < even:
        steps.append(Step("reduce", tuple(Transfer(rank, rank ^ distance, range(1)) for rank in range(even))))
        distance *= 2
    return with_the_others(n, Plan(1, steps))


def halving(n: int) -> Plan:
    """Partners at distance n/2, n/4 ... exchange the half that the other one keeps; then back, as an all-gather."""
    even = power_of_two(n)
    kept = [range(even)] * even
    steps = []
    distance = even // 2
    while distance:
        transfers = []
        for rank in range(even):
            low, high = kept[rank][: len(kept[rank]) // 2], kept[rank][len(kept[rank]) // 2 :]
            kept[rank], given = (high, low) if rank & distance else (low, high)
            transfers.append(Transfer(rank, rank ^ distance, given))
        steps.append(Step("reduce-scatter", tuple(transfers)))
        distance //= 2
    return with_the_others(n, Plan(even, [*steps, *reversed_as("all-gather", steps)]))


def hierarchical(n: int, per_host: int) -> Plan:
    """Chunk (i, k) of `per_host` x hosts is summed by rank i of the hosts, at last on host k - 1."""
    if n % per_host:
        raise ValueError(f"{n} ranks are not a whole number of hosts with {per_host}. Choose a multiple.")
    hosts = n // per_host

    def within(step: Step) -> Step:
        """A step of a ring of `per_host`, in each host, with `hosts` chunks in place of one."""
        return Step(step.phase, tuple(
            Transfer(host * per_host + t.sender, host * per_host + t.receiver,
                     range(t.chunks[0] * hosts, (t.chunks[0] + 1) * hosts))
            for host in range(hosts) for t in step.transfers
        ))  # fmt: skip

    def between(step: Step) -> Step:
        """A step of a ring of `hosts`, for each rank of a host, with the chunks that its host's ring left there."""
        return Step(step.phase, tuple(
            Transfer(t.sender * per_host + i, t.receiver * per_host + i,
                     range(first := (i + 1) % per_host * hosts + t.chunks[0], first + 1))
            for i in range(per_host) for t in step.transfers
        ))  # fmt: skip

    inner, outer = ring(per_host).steps, ring(hosts).steps
    half = len(inner) // 2
    return Plan(n, [*map(within, inner[:half]), *map(between, outer), *map(within, inner[half:])])


def reversed_as(phase: str, steps: Sequence[Step]) -> list[Step]:
    """The same messages the other way: last step first, receiver to sender."""
    return [
        Step(phase, tuple(Transfer(t.receiver, t.sender, t.chunks) for t in step.transfers))
        for step in reversed(steps)
    ]


def power_of_two(n: int) -> int:
    """The largest that is not larger than n."""
    return 1 << (n.bit_length() - 1)


def with_the_others(n: int, plan: Plan) -> Plan:
    """A plan for the first ranks, a power of two, made one for n."""
    even = power_of_two(n)
    if even == n:
        return plan
    before = Step("reduce", tuple(Transfer(rank, rank - even, range(plan.chunks)) for rank in range(even, n)))
    return Plan(plan.chunks, [before, *plan.steps, *reversed_as("broadcast", [before])])


def algorithms(per_host: int) -> dict[str, Callable[[int], Plan]]:
    return {
        "ring": ring,
        "tree": tree,
        "doubling": doubling,
        "halving": halving,
        "hierarchical": lambda n: hierarchical(n, per_host),
    }


def main(algorithm: str = "halving", ranks: int = 8, per_host: int = 4) -> None:
    """Show an algorithm step by step.

    Args:
        algorithm: ring, tree, doubling, halving or hierarchical.
        ranks: 2 to 16.
        per_host: ranks of a host, which share its wire to other hosts.
    """
    makers = algorithms(per_host)
    if not 2 <= ranks <= 16 or per_host < 1 or ranks % per_host or algorithm not in makers:
        raise SystemExit(
            f"--algorithm {algorithm} --ranks {ranks} --per-host {per_host}: choose one of {', '.join(makers)}; "
            "2 to 16 ranks; a number of ranks per host that divides it."
        )
    plan = makers[algorithm](ranks)
    run = carry_out(plan, digits(ranks, plan.chunks))
    show(run)
    transfers = [t for step in run.steps for t in step.transfers]
    sent = [sum(t.nbytes for t in transfers if t.sender == rank) for rank in range(ranks)]
    print(f"\n{len(run.steps)} steps; to sum {run.results[0].nbytes} bytes a rank sent {max(sent)} bytes at most.")


if __name__ == "__main__":
    tyro.cli(main)
