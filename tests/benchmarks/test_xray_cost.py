"""The cost of recording, on one rank."""

from __future__ import annotations

from benchmarks import xray_cost
from benchmarks.launch import run_ranks
from benchmarks.xray_cost import OFF_TOO, ON, Config, time_workloads


def test_a_small_run_answers_the_question() -> None:
    config = Config(workloads=("many_small",), size="smoke", world_size=1)
    (report,) = run_ranks(time_workloads, config, world_size=1, threads=1, timeout_s=100)
    row = report["workloads"]["many_small"]
    parameters = 16
    assert parameters < row["events_per_step"] < 3 * parameters
    assert row["wall"].keys() == row["cpu"].keys() == {OFF_TOO, ON}
    assert 0 < row["asking_share"] < 0.05
    assert row["events_dropped"] == 0
    assert row["events_kept"] > row["events_per_step"]
    (table,) = xray_cost.tables(report)
    assert [len(cells) for cells in table.rows] == [len(table.headings)]
