"""Whose GPU is whose."""

from __future__ import annotations

from typing import Any

import pytest

from minddp.doctor.findings import Verdict
from minddp.doctor.verdicts.devices import Device, choose_device, judge_devices
from tests.doctor.made_up import GIB, cards, job, rank, rank_on, told, verdicts

TWO_CARDS = job(rank(0, devices=cards(0, 1)), rank(1, devices=cards(0, 1)))
ONE_CARD = job(rank(0, devices=cards(0)), rank(1, devices=cards(0)))
NO_CARD = job(rank(0), rank(1))


@pytest.mark.parametrize(
    ("facts", "wanted", "chosen"),
    [
        (TWO_CARDS, "auto", "cuda"),
        (TWO_CARDS, "cpu", "cpu"),
        (ONE_CARD, "auto", "cpu"),
        (NO_CARD, "auto", "cpu"),
    ],
)
def test_gpus_if_there_are_enough(facts: Any, wanted: Device, chosen: str) -> None:
    assert choose_device(wanted, facts) == chosen


def test_one_each_is_fine() -> None:
    found = judge_devices("auto", TWO_CARDS)
    assert verdicts(found) == [Verdict.FINE]
    assert found[0].fact == "Each of 2 ranks has a GPU of its own: H200."


def test_launchers_that_show_each_rank_its_own_gpu_only() -> None:
    facts = job(rank(0, devices=cards(0)), rank(1, devices=cards(1)))
    assert choose_device("auto", facts) == "cuda"
    assert verdicts(judge_devices("auto", facts)) == [Verdict.FINE]


@pytest.mark.parametrize(("wanted", "verdict"), [("auto", Verdict.NOTE), ("cuda", Verdict.BROKEN)])
def test_two_ranks_on_one_gpu(wanted: Device, verdict: Verdict) -> None:
    found = judge_devices(wanted, ONE_CARD)
    assert verdicts(found) == [verdict]
    assert "Ranks 0, 1 would share one GPU, H200 of a, which NCCL refuses." in found[0].fact
    assert ("use the CPU" in found[0].fact) == (wanted == "auto")


def test_the_cpu_as_asked_for_is_fine_whatever_gpus_there_are() -> None:
    assert verdicts(judge_devices("cpu", ONE_CARD)) == [Verdict.FINE]


def test_gpus_that_are_asked_for_and_missing() -> None:
    found = judge_devices("cuda", job(rank(0, devices=cards(0)), rank_on(1, "b", "10.0.0.2")))
    assert verdicts(found) == [Verdict.BROKEN]
    assert "Rank 1 has no GPU." in found[0].fact


@pytest.mark.parametrize(
    ("devices", "environment", "words"),
    [
        ({"driver_is_there": True}, {}, "its torch is built for CPUs"),
        (
            {"driver_is_there": True, "torch_has_cuda": True},
            {"CUDA_VISIBLE_DEVICES": ""},
            "CUDA_VISIBLE_DEVICES=''",
        ),
        ({"driver_is_there": True, "torch_has_cuda": True}, {}, "Run nvidia-smi there"),
    ],
)
def test_a_gpu_that_torch_does_not_see(devices: Any, environment: Any, words: str) -> None:
    facts = job(*(rank(number, devices=devices, software={"environment": environment}) for number in range(2)))
    found = judge_devices("auto", facts)
    assert verdicts(found) == [Verdict.NOTE]
    assert "a has an NVIDIA driver, but torch sees no GPU on ranks 0, 1" in found[0].fact
    assert words in told(found)


def test_unlike_and_occupied_gpus() -> None:
    facts = job(rank(0, devices=cards(0, name="A100")), rank(1, devices=cards(1, free_bytes=20 * GIB)))
    found = judge_devices("auto", facts)
    assert verdicts(found) == [Verdict.NOTE, Verdict.NOTE]
    assert "The GPUs are not alike: A100 on rank 0, H200 on rank 1." in told(found)
    assert "The GPU of rank 1 on a has 20.0 GiB free of 140.0 GiB: somebody else uses it." in told(found)
