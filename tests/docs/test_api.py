"""docs/api.md has every public name, with all that a reader needs of it, and its examples run."""

from __future__ import annotations

import pytest

from tests.docs.api_page import Section, faults, sections

WITH_CODE = [section for section in sections()[1] if section.code]


def test_every_public_name_has_signature_units_errors_source_and_an_example() -> None:
    assert list(faults()) == []


@pytest.mark.slow
@pytest.mark.parametrize("section", WITH_CODE, ids=lambda section: section.names[0])
def test_an_example_runs(section: Section) -> None:
    code = f"{sections()[0]}\n{section.code}"
    exec(compile(code, f"docs/api.md: {section.names[0]}", "exec"), {"__name__": "__main__"})
