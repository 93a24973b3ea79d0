"""Common mistakes with GPUs: each message gives the remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from minddp.transport.process_group import ProcessGroupTransport
from tests.gpu.ranks import WORLDS, GpuPool


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def over_nccl(device: str) -> object:
    return minddp.DistributedDataParallel(nn.Linear(3, 3).to(device), transport="nccl")


def on_the_cpu(rank: int) -> str:
    return error_of(lambda: over_nccl("cpu"))


def without_cupy(rank: int) -> str:
    with mock.patch.dict(sys.modules, {"cupy": None} if rank == 1 else {}):
        return error_of(lambda: over_nccl("cuda"))


def with_another_cupy(rank: int) -> str:
    with mock.patch.object(torch.version, "cuda", "12.8" if torch.version.cuda.startswith("13") else "13.0"):
        return error_of(lambda: over_nccl("cuda"))


def on_the_cards_there_are(rank: int) -> str:
    return error_of(lambda: over_nccl("cuda"))


def out_of_memory(rank: int) -> str:
    link = ProcessGroupTransport(dist.distributed_c10d._get_default_group())
    return error_of(lambda: link.allocate(2**50, torch.float32, torch.device("cuda", torch.cuda.current_device())))


def test_nccl_for_a_module_on_the_cpu(gpu_ranks: Callable[[str], GpuPool]) -> None:
    for message in gpu_ranks("gloo2").run(on_the_cpu, timeout_s=60):
        assert message.startswith("ValueError")
        assert "Move it to a GPU" in message


def test_no_cupy_on_one_rank(gpu_ranks: Callable[[str], GpuPool], only_on_a_card: None) -> None:
    for message in gpu_ranks("gloo2").run(without_cupy, timeout_s=60):
        assert "cannot be used on rank 1: CuPy is not installed" in message
        assert "pip install 'minddp[cuda" in message


def test_a_cupy_for_another_cuda(gpu_ranks: Callable[[str], GpuPool], only_on_a_card: None) -> None:
    for message in gpu_ranks("gloo2").run(with_another_cupy, timeout_s=60):
        assert "CuPy is made for CUDA" in message


@pytest.mark.timeout(150)
def test_two_ranks_on_one_card_by_mistake(only_on_a_card: None) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("each rank would get a card of its own")
    pool = GpuPool(WORLDS["gloo2"], NCCL_HOSTID="the same")
    try:
        for message in pool.run(on_the_cards_there_are, timeout_s=100):
            assert "NCCL did not connect the ranks" in message
            assert "LOCAL_RANK" in message
    finally:
        pool.kill()


def test_out_of_memory_while_buckets_are_made(gpu_ranks: Callable[[str], GpuPool], only_on_a_card: None) -> None:
    for message in gpu_ranks("gloo2").run(out_of_memory, timeout_s=60):
        assert message.startswith("OutOfMemoryError")
        assert "gradient_as_bucket_view=True" in message
