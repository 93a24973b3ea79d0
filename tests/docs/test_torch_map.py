"""The map of torch's internals against torch and against core/: no member is missing on one side or the other.

`torch_versions/` has the names in the headers and the module of its DDP.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from cogapp import Cog

from docs import torch_map
from docs.learning.quotes import FOLDER as LEARNING

RECORDS = {path.stem: path for path in (Path(__file__).parent / "torch_versions").glob("*.json")}


def read_record(version: str) -> dict[str, set[str]]:
    return {owner: set(names.split()) for owner, names in json.loads(RECORDS[version].read_text()).items()}


def _of_ddp(members: dict[str, set[str]]) -> dict[str, set[str]]:
    return {of: names for of, names in members.items() if of not in torch_map.elsewhere()}


# ------------------------------------------------------------------ torch


@pytest.mark.parametrize("version", sorted(RECORDS))
def test_the_map_has_each_member_of_torch_and_no_other(version: str) -> None:
    assert torch_map.members(version) == _of_ddp(read_record(version))


def test_each_member_is_in_the_map_once() -> None:
    counts = Counter((row.of, name) for row in torch_map.rows() for name in row.names)
    assert {member: count for member, count in counts.items() if count > 1} == {}


def test_classes_that_are_left_out_are_there() -> None:
    assert torch_map.elsewhere() <= read_record("2.15").keys()


# ------------------------------------------------------------------ minddp


def test_each_counterpart_exists() -> None:
    assert [place for row in torch_map.rows() for place in row.here if not torch_map.exists(place)] == []


def test_what_has_no_counterpart_says_why_not() -> None:
    assert [row.names for row in torch_map.rows() if not row.here and not row.note] == []


def test_each_function_of_core_has_a_counterpart_or_a_reason() -> None:
    """Add a new function to the row of what it answers to in torch, or to `ours` in docs/torch_map.yaml."""
    mapped = {place for row in torch_map.rows() for place in row.here}
    assert [place for place in torch_map.functions_of_core() if place not in mapped | torch_map.ours().keys()] == []
    assert sorted(map(str, mapped & torch_map.ours().keys())) == []


def test_what_is_ours_alone_is_a_function_of_core_and_listed_once() -> None:
    assert torch_map.ours().keys() <= set(torch_map.functions_of_core())
    listed = Counter(
        (file, name)
        for file, groups in torch_map._data()["ours"].items()
        for names in groups.values()
        for name in names.split()
    )
    assert max(listed.values()) == 1


# ------------------------------------------------------------------ the pages and the command


def test_the_page_has_what_the_map_says() -> None:
    assert Cog().main(["cog", "--check", "--diff", "-P", "--verbosity=0", str(torch_map.PAGE)]) == 0


def test_the_page_shows_every_section_and_every_file_of_core() -> None:
    page = torch_map.PAGE.read_text()
    assert sorted(re.findall(r'cog section\("(.*?)"\)', page)) == sorted(torch_map.sections())
    assert {f"core/{file}" for file in re.findall(r'cog core\("(.*?)"\)', page)} == {
        place.file for place in torch_map.functions_of_core()
    }


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("mark_variable_ready", "minddp/core/backward_pass.py::BackwardPass.mark_ready"),
        ("Reducer::mark_variable_ready()", "minddp/core/backward_pass.py::BackwardPass.mark_ready"),
        ("BackwardPass._launch_ready_buckets", "Reducer: mark_bucket_ready(), next_bucket_"),
        ("get_param_from_index", "no counterpart"),
        ("finalize_backward_manual", "(from torch 2.15)"),
        ("Mode.first_gradient", "ours alone"),
    ],
)
def test_the_command_answers(query: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_map.main([query]) == 0
    assert expected in capsys.readouterr().out


def test_the_ten_questions_name_members_that_torch_has() -> None:
    page = (LEARNING / "ten_questions.md").read_text()
    assert len(re.findall(r"^## \d+\. .*\?$", page, re.MULTILINE)) == 10
    members = {of: {name.removesuffix("()") for name in names} for of, names in read_record("2.15").items()}
    named = re.findall(r"`(\w+)::(\w+)`", page)
    assert len(named) >= 10
    assert [f"{of}::{name}" for of, name in named if name not in members.get(of, ())] == []
