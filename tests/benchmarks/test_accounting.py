"""Bytes are counted right: what an operation writes, what is held at the peak, what is shared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.accounting import WrittenBytes, highest, peak_memory, shared_bytes

KIB = 1024


def _kib() -> Tensor:
    return torch.ones(KIB // 4)


def _written(operation: Callable[[], object]) -> int:
    with WrittenBytes() as written:
        operation()
    return written.nbytes


def test_the_highest_level_counts_from_nothing():
    assert highest([3, -1, 4, -6, 2]) == 6
    assert highest([-5, 2]) == 0
    assert highest([]) == 0


@pytest.mark.parametrize(
    ("operation", "kib"),
    [
        (lambda a, b: a + b, 1),
        (lambda a, b: a.copy_(b), 1),
        (lambda a, b: torch.mul(a, 0.5, out=b), 1),
        (lambda a, b: torch._foreach_copy_([a, b], [b, a]), 2),
        (lambda a, b: torch.empty(1000), 0),
        (lambda a, b: a.view(2, -1), 0),
        (lambda a, b: a.detach(), 0),
        (lambda a, b: torch.cat([a, b]), 2),
    ],
)
def test_an_operation_writes_what_it_changes_and_what_it_makes(operation: Callable[..., object], kib: int):
    a, b = _kib(), _kib()
    assert _written(lambda: operation(a, b)) == kib * KIB


def test_what_autograd_writes_counts_too():
    layer = nn.Linear(16, 16, bias=False)
    loss = layer(torch.ones(1, 16)).sum()
    layer_bytes = layer.weight.nbytes
    assert _written(loss.backward) >= layer_bytes
    first = layer.weight.grad
    again = layer(torch.ones(1, 16)).sum()
    assert _written(again.backward) >= 2 * layer_bytes, "a gradient is made, then added to the one that is there"
    assert layer.weight.grad is first


def test_the_peak_is_the_most_memory_held_at_one_time():
    with peak_memory(torch.device("cpu")) as peak:
        first = torch.empty(100 * KIB, dtype=torch.uint8)
        del first
        second, third = (torch.empty(60 * KIB, dtype=torch.uint8) for _ in range(2))
        del second
    del third
    assert (peak.nbytes, peak.left) == (120 * KIB, 60 * KIB)


def test_memory_from_before_does_not_count_even_if_it_is_freed():
    before = torch.empty(500 * KIB, dtype=torch.uint8)
    with peak_memory(torch.device("cpu")) as peak:
        del before
        kept = torch.empty(10 * KIB, dtype=torch.uint8)
    del kept
    assert peak.nbytes == 10 * KIB


def test_shared_memory_is_read_from_the_kernel(tmp_path: Path):
    rollup = tmp_path / "smaps_rollup"
    rollup.write_text("0-f ---p 0 00:00 0 [rollup]\nRss:  90 kB\nPss_Anon:  50 kB\nPss_Shmem:   24 kB\n")
    assert shared_bytes(rollup) == 24 * KIB
    assert shared_bytes(tmp_path / "no such file") == 0
