"""`python -m reference.grade mine.py:MyDDP`: how far has your own DDP come?

The class is called with a module; it has a `forward`, and may have `synchronize()` (or
`finish_gradient_synchronization()`), to be called after backward, and `no_sync()`. It is run on two, three and four
ranks over gloo, and compared with the oracle and with torch's DDP. A rank that hangs is a verdict, too. The exit
status is 0 if its gradients are right: if it passes all of `checks.REQUIRED`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tyro
from rich.console import Console

from .checks import FURTHER, ONCE, REQUIRED, has_torchs_bits
from .comparison import Fault
from .ranks import RankFailure, Ranks
from .watched import join_watched

MOST_HANGS = 2

#: By name: what is wrong, and the chapter of a page in docs/learning.
TRAPS = {
    "start": ("Every rank keeps weights of its own. Broadcast rank 0's when you wrap.", "traps 5"),
    "start buffers": ("Every rank keeps buffers of its own. Broadcast rank 0's buffers as well.", "traps 5"),
    "forward": ("The output is not the module's own.", "traps 8"),
    "silent": ("No message was sent: each rank keeps its own gradient.", "traps 1"),
    "local": ("Messages were sent, but this rank's own gradient is left in `.grad`.", "traps 1"),
    "parameter": ("The parameter was averaged, not its gradient: it is what a hook is called with.", "traps 1"),
    "forgotten": ("This gradient is the rank's own, while others are averaged: a bucket was not sent.", "traps 8"),
    "summed": ("This is the sum over the ranks. Divide by their number.", "traps 8"),
    "divided twice": ("This is the mean, divided by the number of ranks once more.", "traps 8"),
    "scaled": ("This is the mean times a factor, such as a division by a wrong number of ranks.", "traps 8"),
    "rank 0's": ("This is rank 0's gradient: a broadcast is not an average.", "traps 8"),
    "rounded": ("This is the mean with lost digits: it has travelled in a smaller dtype.", "traps 8"),
    "none": ("The gradient is gone.", "traps 8"),
    "unwaited": ("It reads `.grad` before the all-reduce is complete. Wait for every work.", "traps 4"),
    "later": ("The first step is right: some state of it is left.", "traps 8"),
    "incoming": ("Only what the last backward added was averaged. Average the whole of `.grad`.", "traps 2"),
    "last only": ("The micro-batches before the last are lost.", "traps 2"),
    "first lost": ("The first micro-batch is lost.", "traps 2"),
    "every sum": ("Earlier micro-batches count once for each rank: sums were summed again.", "traps 8"),
    "in flight": ("The last micro-batch was never averaged.", "traps 2"),
    "tied": ("A weight under two names is one parameter: count and divide it once.", "traps 8"),
    "frozen": ("A frozen parameter takes no part.", "traps 8"),
    "readiness": ("Ranks ran their layers in different orders. Launch in the order of a plan.", "traps 3"),
    "messages": ("Every message costs a latency. Pack gradients into buckets.", "ladder 4"),
    "overlap": ("Nothing is hidden behind backward. Launch from a hook.", "ladder 3"),
    "no_sync": ("Micro-batches but the last need no messages.", "traps 7"),
    "buffers": ("Each rank's forward changes its own. DDP broadcasts rank 0's before every forward.", "traps 5"),
    "bits": ("It is right, but not to the bit: see where the bits come from.", "bits"),
    "unused": ("Rank 0 did not use a layer, others did: its part of the mean is zero.", "traps 6"),
    "other": ("None of the well-known mistakes makes this value.", "traps 8"),
    "raised": ("A rank raised an error.", "traps 8"),
    "died": ("A rank's process ended.", "traps 8"),
    "unknown": ("Name a class of a file or a module, as in `mine.py:MyDDP`.", "README"),
    "unwritten": ("This is still an exercise: write the body.", "ladder"),
    "hung": ("Some ranks wait for a message that others never send.", "traps 6"),
}


class Verdict(NamedTuple):
    """What one check found, on so many ranks; no fault: it passed."""

    check: str
    world_size: int
    fault: Fault | None


def grade(spec: str, world_sizes: Sequence[int] = (2, 3, 4), limit_s: float = 20.0) -> Iterator[Verdict]:
    """Verdicts as they come: all checks on the first number of ranks, and on the others if gradients are right."""
    for world_size in world_sizes:
        verdicts: list[Verdict] = []
        hangs = 0
        with Ranks(world_size, limit_s, join_watched) as ranks:
            for name, check in (REQUIRED | FURTHER).items():
                wrong = any(verdict.fault and verdict.check in REQUIRED for verdict in verdicts)
                if (name in ONCE and world_size != world_sizes[0]) or (check is has_torchs_bits and wrong):
                    continue
                try:
                    faults = [fault for fault in reversed(ranks.run(check, spec)) if fault]  # rank 0 is special
                except RankFailure as failure:
                    faults = [fault_of(failure, name)]
                    hangs += "hung" in failure.reports.values()
                verdicts.append(Verdict(name, world_size, faults[0] if faults else None))
                yield verdicts[-1]
                traps = {verdict.fault.trap for verdict in verdicts if verdict.fault}
                if hangs == MOST_HANGS or not traps.isdisjoint({"unwritten", "unknown"}):
                    return
        if any(verdict.fault and verdict.check in REQUIRED for verdict in verdicts):
            return


def fault_of(failure: RankFailure, check: str = "") -> Fault:
    """The most telling report of the ranks: an error, else a death, else a fault that was found, else a hang."""
    kinds = ("raised", "died", "hung")
    if "plan order" in check and "died" in failure.reports.values():
        return Fault("readiness", "A rank's process ended, as it does when messages of different sizes meet.")
    of_kind = [(kinds.index(what) if what in kinds else 0, rank, what) for rank, what in failure.reports.items()]
    kind, rank, report = min(of_kind)
    found = [result for result in failure.results.values() if isinstance(result, Fault)]
    if kinds[kind] == "hung" and found:
        return found[0]
    last = report.strip().splitlines()[-1]
    trap = "unwritten" if last.startswith("NotImplementedError") else kinds[kind]
    return Fault(trap, f"Rank {rank}: {last}")


def explained(fault: Fault) -> str:
    """What is wrong, which trap it is, and where to read on."""
    sentence, place = TRAPS[fault.trap]
    page, *chapter = place.split()
    return f"{fault.text}\n{sentence} See docs/learning/{', chapter '.join([f'{page}.md', *chapter])}."


def main(spec: tyro.conf.Positional[str], limit_s: float = 20.0) -> None:
    """Grade a class of your own.

    Args:
        spec: `mine.py:MyDDP`, or `package.module:Name`.
        limit_s: how long a rank may take for one check; then it hangs.
    """
    console = Console(highlight=False, soft_wrap=True)
    first_fault: dict[bool, str] = {}  # by whether the check is required: its name
    missing = dict.fromkeys(FURTHER, True)
    for verdict in grade(spec, limit_s=limit_s):
        required = verdict.check in REQUIRED
        mark = "[red]no[/red] " if verdict.fault else "yes"
        console.print(f"{mark}  {verdict.world_size} ranks  {verdict.check}")
        if verdict.fault and required not in first_fault:
            first_fault[required] = verdict.check
            console.print(f"\n{explained(verdict.fault)}\n", markup=False)
        missing[verdict.check] = verdict.fault is not None
    if True in first_fault:
        raise SystemExit(f"Not right yet: {first_fault[True]}.")
    still = ", ".join(filter(missing.get, missing)) or "nothing"
    console.print(f"The gradients are right. Still missing: {still}.")


if __name__ == "__main__":
    tyro.cli(main)
