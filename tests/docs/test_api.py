"""docs/api.md has every public name, with all that a reader needs of it, and its examples run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.docs import api_page
from tests.docs.api_page import Section, faults, faults_of, public, sections

WITH_CODE = [section for section in sections()[1] if section.code]


def test_every_public_name_has_signature_units_errors_source_and_an_example() -> None:
    assert list(faults()) == []


@pytest.mark.slow
@pytest.mark.parametrize("section", WITH_CODE, ids=lambda section: section.names[0])
def test_an_example_runs(section: Section) -> None:
    code = f"{sections()[0]}\n{section.code}"
    exec(compile(code, f"docs/api.md: {section.names[0]}", "exec"), {"__name__": "__main__"})


# ------------------------------------------------------------------ the check itself


def section_of(name: str) -> Section:
    return next(section for section in sections()[1] if name in section.names)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("::: minddp.platform.ranks.launch", "", "neither signature nor source are shown"),
        ("**Shapes, dtypes, units.**", "", "no shapes, dtypes, units"),
        ("minddp.launch(", "minddp.other(", "no example"),
    ],
)
def test_what_is_missing_is_found(old: str, new: str, fault: str) -> None:
    section = section_of("launch")
    assert list(faults_of("launch", public()["launch"], section)) == []
    without = replace(section, text=section.text.replace(old, new))
    assert fault in list(faults_of("launch", public()["launch"], without))


def test_a_method_without_an_example_is_found() -> None:
    section = section_of("DistributedDataParallel")
    without = replace(section, text=section.text.replace("ddp.weigh(", "ddp.wait("))
    wrapper = public()["DistributedDataParallel"]
    assert list(faults_of("DistributedDataParallel", wrapper, without)) == ["no example uses `weigh`"]


def test_a_name_that_is_new_or_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name: it for name, it in public().items() if name != "launch"} | {"brand_new": len}
    monkeypatch.setattr(api_page, "public", lambda: names)
    assert list(faults()) == ["launch: on the page, but not public", "brand_new: not on the page"]
