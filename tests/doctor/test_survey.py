"""The facts of this very process."""

from __future__ import annotations

import json
import os

import pytest
import torch

from minddp.doctor.facts import RankFacts
from minddp.doctor.place import Place
from minddp.doctor.survey import free_shared_memory_bytes, survey, telling
from minddp.platform.cores import cpu_quota


def test_facts_are_collected_and_survive_the_store() -> None:
    facts = survey(Place(1, 2, "localhost", 29500, local_rank=1), {"NCCL_DEBUG": "WARN"}, "127.0.0.1", 10.0)
    assert facts.software.versions["torch"] == torch.__version__
    assert facts.software.environment == {"NCCL_DEBUG": "WARN"}
    assert facts.machine.threads == torch.get_num_threads()
    assert 0 < facts.machine.cores <= (os.cpu_count() or 1)
    assert facts.machine.memory_bytes > 0
    assert facts.network.interface_of("127.0.0.1") in facts.network.interfaces
    assert RankFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_variables_that_tell_something() -> None:
    environment = {
        "HOME": "/",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # torchrun's own
        "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "2",
        "NCCL_ALGO": "Ring",
        "RANK": "0",
    }
    assert telling(environment) == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    ("v2", "v1_quota", "v1_period", "cores"),
    [
        ("150000 100000", "", "", 1.5),
        ("max 100000", "", "", None),
        ("", "200000", "100000", 2.0),
        ("", "-1", "100000", None),
        ("", "", "", None),
    ],
)
def test_quotas_of_containers(v2: str, v1_quota: str, v1_period: str, cores: float | None) -> None:
    assert cpu_quota(v2, v1_quota, v1_period) == cores


def test_no_shared_memory() -> None:
    assert free_shared_memory_bytes("/no/such/folder") is None
