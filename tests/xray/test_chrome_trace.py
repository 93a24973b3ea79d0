from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from minddp.xray.analysis import Analysis
from minddp.xray.chrome_trace import BUCKETS, COMPUTES, chrome_trace
from minddp.xray.result import Comparison, Result, load
from tests.xray.made_up import MIB, Rank, Wire, layout, recording

MADE = recording(
    [Rank(pack_ms=0.5), Rank(late_ms=9)], layout([[1, 1], [2], [1]]), steps=2, wire=Wire(bytes_per_ms=MIB / 4)
)


def events(phase: str, **wanted: Any) -> list[dict[str, Any]]:
    trace = json.loads(json.dumps(chrome_trace([Analysis(MADE)])))
    return [e for e in trace["traceEvents"] if e["ph"] == phase and all(e[k] == v for k, v in wanted.items())]


def test_a_process_per_rank_with_a_track_for_computing_and_one_for_buckets() -> None:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events("M") if "name" in e["args"]}
    assert {name for (pid, tid), name in names.items() if tid == 0} == {"rank 0", "rank 1"}
    assert names[0, COMPUTES] == names[1, COMPUTES] == "computes"
    assert names[0, BUCKETS] == "buckets"


def test_slices_of_one_track_lie_beside_or_within_each_other() -> None:
    """Chrome's format has no others; viewers draw them wrong or drop them."""
    tracks = defaultdict(list)
    for event in events("X"):
        tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for slices in tracks.values():
        open_until: list[float] = []
        for begin, negative in sorted(slices):
            while open_until and open_until[-1] <= begin + 1e-6:
                open_until.pop()
            assert not open_until or begin - negative <= open_until[-1] + 1e-6
            open_until.append(begin - negative)


def test_a_bucket_has_its_parameters_bytes_and_bandwidth() -> None:
    (first, _), (wire, *_) = events("X", name="bucket 0", pid=0), events("X", name="on the wire", pid=0)
    assert first["args"]["parameters"] == ["layer0.weight", "layer1.weight"]
    assert first["args"]["bytes"] == 2 * MIB
    assert first["args"]["MiB per second"] == pytest.approx(2 / (wire["dur"] / 1e6), abs=0.1)
    assert first["ts"] <= wire["ts"]


def test_an_arrow_leads_from_the_last_gradient_to_the_bucket() -> None:
    starts = {e["id"]: e for e in events("s")}
    ends = {e["id"]: e for e in events("f")}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * 2 * 3
    ready = {e["ts"] for e in events("i", name="layer1.weight", pid=0)}
    slices = {e["ts"] for e in events("X", name="bucket 0", pid=0)}
    assert {starts[f"0.{step}.0"]["ts"] for step in range(2)} == ready
    assert {ends[f"0.{step}.0"]["ts"] for step in range(2)} == slices


def test_a_saved_trace_can_be_loaded_again(tmp_path: Path) -> None:
    Result(MADE).save(tmp_path / "step.json")
    loaded = load(tmp_path / "step.json")
    assert isinstance(loaded, Result)
    assert loaded.recording == MADE
    loaded.compare(Result(MADE)).save(tmp_path / "two.json")
    assert isinstance(load(tmp_path / "two.json"), Comparison)
    pids = {event["pid"] for event in json.loads((tmp_path / "two.json").read_text())["traceEvents"]}
    assert pids == {0, 1, 1000, 1001}


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no recording"):
        load(tmp_path / "other.json")
