"""docs/hour.md: the table of phases has the members of the enum and their transitions."""

from __future__ import annotations

import re

from docs.site.recording import ROOT
from minddp.core.backward_pass import ALLOWED, Phase


def test_the_table_of_phases_is_the_enum_and_its_transitions() -> None:
    page = (ROOT / "docs" / "hour.md").read_text()
    rows = re.findall(r"^\| `([A-Z]+)` \|[^|]+\|([^|]+)\|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == [phase.name for phase in Phase]
    for name, following in rows:
        assert set(re.findall(r"`([A-Z]+)`", following)) == {phase.name for phase in ALLOWED[Phase[name]]}, name
