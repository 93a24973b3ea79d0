"""Fact sheets of an imaginary job in which nothing is wrong, and changes to them."""

from __future__ import annotations

import dataclasses
from typing import Any

from minddp.tools.doctor.fact_sheet import FactSheet
from minddp.tools.doctor.report import CheckResult, Severity

GIB = 2**30

SHEET = FactSheet(
    pid=100,
    versions={"Python": "3.11.7", "torch": "2.13.0", "CUDA": "none", "minddp": "0.2.0 (12345678)"},
    environment={"OMP_NUM_THREADS": "1"},
    host="a",
    host_identity="boot of a",
    shared_memory_bytes=8 * GIB,
    gpu_uuid="",
    network_identity="network of a",
    interfaces={"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]},
    gloo_address="10.0.0.1",
)


def sheet(**changes: Any) -> FactSheet:
    """A rank on host a, changed as given."""
    return dataclasses.replace(SHEET, **changes)


def sheet_on(host: str, address: str, **changes: Any) -> FactSheet:
    """A rank on another host, where gloo listens at `address`."""
    interfaces = {"lo": ["127.0.0.1"], f"net{host}": [f"10.0.0.{ord(host)}"]}
    place = {"host": host, "host_identity": f"boot of {host}", "network_identity": f"network of {host}"}
    return sheet(**{**place, "interfaces": interfaces, "gloo_address": address, **changes})


def job(*sheets: FactSheet) -> dict[int, FactSheet]:
    return dict(enumerate(sheets))


def severities(findings: list[CheckResult]) -> list[Severity]:
    return [finding.severity for finding in findings]


def of(check: str, findings: list[CheckResult]) -> list[CheckResult]:
    return [finding for finding in findings if finding.check == check]
