"""Has each host room for its ranks? Cores, memory, shared memory, open files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from minddp.doctor.facts import Machine, RankFacts
from minddp.doctor.findings import Finding, Verdict, by_value, count, name_ranks, size

MEMORY_FOR_A_RANK = 2**30  # bytes; torch itself takes some 300 MiB
SHARED_MEMORY_FOR_A_RANK = 256 * 2**20
SHARED_MEMORY_AT_ALL = 16 * 2**20
OPEN_FILES_FOR_COMFORT = 1024
OPEN_FILES_AT_ALL = 64
CONNECTIONS_TO_A_RANK = 4  # each group that a program makes adds one


def judge_machines(facts: Mapping[int, RankFacts], on_gpu: bool) -> list[Finding]:
    """One line for each thing where all is well, and one for each host where it is not."""
    tenants = [
        {rank: facts[rank].machine for rank in ranks}
        for ranks in by_value({rank: told.machine.identity for rank, told in facts.items()}).values()
    ]
    checks = (
        ("cores", lambda ranks: _cores(ranks, on_gpu), _cores_are_fine),
        ("memory", _memory, _memory_is_fine),
        ("shared memory", _shared_memory, _shared_memory_is_fine),
        ("open files", lambda ranks: _open_files(ranks, len(facts)), _open_files_are_fine),
    )
    found: list[Finding] = []
    for check, look, is_fine in checks:
        wrong = [
            Finding(check, verdict, f"{_host(ranks)}: {fact}", remedy)
            for ranks in tenants
            for verdict, fact, remedy in look(ranks)
        ]
        found += wrong or [Finding(check, Verdict.FINE, "; ".join(is_fine(ranks) for ranks in tenants) + ".")]
    return found


def _host(ranks: Mapping[int, Machine]) -> str:
    return ", ".join(dict.fromkeys(machine.name for machine in ranks.values()))


# ---------------------------------------------------------------------- cores


def _cores(ranks: Mapping[int, Machine], on_gpu: bool) -> Iterator[tuple[Verdict, str, str]]:
    cores = max(machine.cores for machine in ranks.values())
    threads = sum(machine.threads for machine in ranks.values())
    share = max(1, int(cores / len(ranks)))
    crowd = f"{count(len(ranks), 'rank')} with {_threads(ranks)} on {count(cores, 'core')}"
    if len(ranks) > cores:
        yield Verdict.NOTE, f"{crowd}: they take turns.", f"Start at most {count(int(cores) or 1, 'rank')} there."
    elif threads > cores:
        yield (
            Verdict.NOTE,
            f"{crowd}: {threads} threads take turns, which is slower than fewer of them.",
            f"export OMP_NUM_THREADS={share}, or torch.set_num_threads({share}) in the script.",
        )
    elif not on_gpu and share >= 2 and threads <= cores / 2:
        yield (
            Verdict.NOTE,
            f"{crowd}: {cores - threads:g} have nothing to do.",
            f"export OMP_NUM_THREADS={share}. Unless told otherwise torchrun, and minddp doctor alike, sets 1.",
        )


def _cores_are_fine(ranks: Mapping[int, Machine]) -> str:
    cores = max(machine.cores for machine in ranks.values())
    return f"{_host(ranks)}: {count(len(ranks), 'rank')} with {_threads(ranks)} on {count(cores, 'core')}"


def _threads(ranks: Mapping[int, Machine]) -> str:
    numbers = sorted({machine.threads for machine in ranks.values()})
    return f"{count(numbers[0], 'thread')} each" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} threads"


# ---------------------------------------------------------------------- memory


def _memory(ranks: Mapping[int, Machine]) -> Iterator[tuple[Verdict, str, str]]:
    free = min(machine.memory_bytes for machine in ranks.values())
    if free < MEMORY_FOR_A_RANK * len(ranks):
        yield (
            Verdict.NOTE,
            f"{size(free)} of memory are free for {count(len(ranks), 'rank')}.",
            "Without memory the kernel kills ranks (exit code -9). Start fewer, end other programs, or raise the "
            "container's limit.",
        )


def _memory_is_fine(ranks: Mapping[int, Machine]) -> str:
    free = min(machine.memory_bytes for machine in ranks.values())
    return f"{_host(ranks)}: {size(free)} free for {count(len(ranks), 'rank')}"


def _shared_memory(ranks: Mapping[int, Machine]) -> Iterator[tuple[Verdict, str, str]]:
    remedy = (
        "DataLoader workers hand batches over there, and die of a bus error when it is full: give the container "
        "more (docker run --shm-size=8g, or --ipc=host). minddp's own shared-memory transport does not need it."
    )
    known = [machine.shared_memory_bytes for machine in ranks.values() if machine.shared_memory_bytes is not None]
    if not known:
        yield Verdict.NOTE, "there is no /dev/shm.", remedy
    elif min(known) < SHARED_MEMORY_FOR_A_RANK * len(ranks):
        verdict = Verdict.BROKEN if min(known) < SHARED_MEMORY_AT_ALL else Verdict.NOTE
        yield verdict, f"{size(min(known))} are free in /dev/shm for {count(len(ranks), 'rank')}.", remedy


def _shared_memory_is_fine(ranks: Mapping[int, Machine]) -> str:
    free = min(machine.shared_memory_bytes or 0 for machine in ranks.values())
    return f"{_host(ranks)}: {size(free)} free in /dev/shm"


# ---------------------------------------------------------------------- files


def _open_files(ranks: Mapping[int, Machine], world_size: int) -> Iterator[tuple[Verdict, str, str]]:
    for limit, limited in by_value({rank: machine.open_files for rank, machine in ranks.items()}).items():
        connections = CONNECTIONS_TO_A_RANK * world_size
        if limit < OPEN_FILES_FOR_COMFORT + connections:
            verdict = Verdict.BROKEN if limit < OPEN_FILES_AT_ALL + connections else Verdict.NOTE
            yield (
                verdict,
                f"{name_ranks(limited)} may have {limit} files open at once (ulimit -n); connections to "
                f"{count(world_size, 'rank')} and DataLoader workers count.",
                "Raise it where the job is started: ulimit -n 65536; docker run --ulimit nofile=65536.",
            )


def _open_files_are_fine(ranks: Mapping[int, Machine]) -> str:
    limit = min(machine.open_files for machine in ranks.values())
    shown = "any number" if limit >= 2**62 else f"{limit:,}"
    return f"{_host(ranks)}: {shown} a process"
