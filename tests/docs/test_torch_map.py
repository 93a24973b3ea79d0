"""The map of torch's internals against torch and against core/: no member is missing on one side or the other.

`torch_versions/` has the names that two versions of torch have. The installed torch is read in any case; by these
records the map is compared with one that is not installed, too. `python -m tests.docs.torch_members` renews the
record of the installed version.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from cogapp import Cog

from docs import torch_map
from docs.learning.quotes import FOLDER as LEARNING
from docs.torch_map import Place
from tests.docs.torch_members import INSTALLED, RECORDS, in_header, in_module, members_of, read_record

INSTALLED_VERSION = ".".join(torch.__version__.split(".")[:2])


def _of_ddp(members: dict[str, set[str]]) -> dict[str, set[str]]:
    return {of: names for of, names in members.items() if of not in torch_map.elsewhere()}


# ------------------------------------------------------------------ torch


@pytest.mark.parametrize("version", sorted(RECORDS))
def test_the_map_has_each_member_of_torch_and_no_other(version: str) -> None:
    assert torch_map.members(version) == _of_ddp(read_record(version))


def test_the_map_has_each_member_of_the_installed_torch() -> None:
    """Also of one that is newer than all records: its names must be added to the map."""
    installed, mapped = _of_ddp(members_of(INSTALLED)), torch_map.members(INSTALLED_VERSION)
    missing = {of: names - mapped.get(of, set()) for of, names in installed.items()}
    assert {of: names for of, names in missing.items() if names} == {}


def test_the_record_of_the_installed_torch_is_what_it_has() -> None:
    if INSTALLED_VERSION not in RECORDS:
        pytest.skip(f"There is no record of torch {INSTALLED_VERSION}.")
    assert members_of(INSTALLED) == read_record(INSTALLED_VERSION)


def test_versions_differ_by_what_the_map_says_and_nothing_has_gone() -> None:
    before, after = read_record("2.13"), read_record("2.15")
    added = {(of, name) for of, names in after.items() for name in names - before.get(of, set())}
    assert added == {(row.of, name) for row in torch_map.rows() if row.since == "2.15" for name in row.names}
    assert {of: names - after[of] for of, names in before.items() if names - after[of]} == {}


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


def test_a_function_that_is_gone_is_found() -> None:
    assert torch_map.exists(Place("core/reducer.py", "Reducer.prepare_for_backward"))
    assert torch_map.exists(Place("core/backward_pass.py", "BackwardPass.hooks_left"))
    for file, name in (
        ("core/reducer.py", "Reducer.unheard_of"),
        ("core/bucket_store.py", "BucketStore.move_grads_in"),  # called there, on another object
        ("core/gone.py", "Reducer"),
        ("core/plan.py", "gone"),
    ):
        assert not torch_map.exists(Place(file, name))


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


def test_the_command_says_what_the_map_does_not_have() -> None:
    with pytest.raises(SystemExit, match="no `unheard_of`"):
        torch_map.main(["unheard_of"])


def test_the_ten_questions_name_members_that_torch_has() -> None:
    page = (LEARNING / "ten_questions.md").read_text()
    assert len(re.findall(r"^## \d+\. .*\?$", page, re.MULTILINE)) == 10
    members = {of: {name.removesuffix("()") for name in names} for of, names in read_record("2.13").items()}
    named = re.findall(r"`(\w+)::(\w+)`", page)
    assert len(named) >= 10
    assert [f"{of}::{name}" for of, name in named if name not in members.get(of, ())] == []


# ------------------------------------------------------------------ the reader of headers

HEADER = """
#pragma once
template <typename T> struct Forward;
class TORCH_API Thing : public Base<int, long> {
 public:
  explicit Thing(std::vector<bool> flags = {}, int n = 0) : n_(n), flags_(std::move(flags)) {}
  ~Thing() override;  // a comment with ; and {
  virtual std::map<int, std::vector<long>> look(const std::function<bool(at::Tensor&)>& f) const = 0;
  inline bool is_on() const { if (n_ > 0) { return true; } return false; }
  using Callback = std::function<bool(int)>;
  friend class Other;
 protected:
  struct Inner {
    size_t count = 0; /* how many */
    std::optional<int> place{std::nullopt};
    void set(int place);
  };
  enum class Event : uint8_t { kStart, kEnd };
  std::vector<std::pair<int, Inner>> all_;
  mutable std::mutex mutex_;
  int n_;
};
constexpr int kLimit = 1024 * 1024;
TORCH_API void help(const std::vector<int>& sizes = {}, const Thing& thing);
"""


def test_members_are_read_from_a_header(tmp_path: Path) -> None:
    assert in_header(HEADER) == {
        "Thing": {"Thing()", "~Thing()", "look()", "is_on()", "all_", "mutex_", "n_"},
        "Thing::Inner": {"count", "place", "set()"},
        "functions": {"kLimit", "help()"},
    }


def test_members_are_read_from_a_module() -> None:
    source = "def free(): ...\nclass Thing:\n    x = 1\n    def look(self): ...\n"
    assert in_module(source) == {"nn/parallel/distributed.py": {"free()"}, "Thing": {"Thing", "look()"}}
