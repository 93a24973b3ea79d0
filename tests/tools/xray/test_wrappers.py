"""Several wrapped modules in one recording: where steps begin, whose buckets are whose, and what is shown."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import minddp
from minddp.tools.xray.page.payload import payload
from minddp.tools.xray.reading import steps_of
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.result import Result, load
from minddp.tools.xray.timeline import Activity
from minddp.tools.xray.wrappers import Wrappers
from tests.ranks import RankPool
from tests.tools.xray.made_up import MS, Rank, layout, recording

ROOT = Path(__file__).resolve().parents[3]


def of_two(steps: int = 2) -> Recording:
    """A step of 38.5 ms of an actor, then one of 37 ms of a critic, and again; the optimizer of both is one."""
    first = recording([Rank(), Rank()], layout([[1], [2]]), steps=steps)
    second = recording([Rank(), Rank()], layout([[1, 1]]), steps=steps)
    ranks = []
    for a, b in zip(first.ranks, second.ranks, strict=True):
        length_ns = a.stopped_ns // steps
        of_b = b.stopped_ns // steps
        events = [e._replace(t_ns=e.t_ns + e.t_ns // length_ns * of_b) for e in a.events]
        events += [e._replace(module=1, t_ns=e.t_ns + (1 + e.t_ns // of_b) * length_ns) for e in b.events]
        layouts = (*a.layouts, b.layouts[0]._replace(module=1))
        stopped_ns = a.stopped_ns + b.stopped_ns
        events.sort(key=lambda event: event.t_ns)
        modules = ("actor", "critic")
        ranks.append(replace(a, events=tuple(events), layouts=layouts, stopped_ns=stopped_ns, modules=modules))
    return replace(first, ranks=tuple(ranks))


def test_a_step_of_two_modules_has_the_buckets_of_both() -> None:
    made = Recording.from_dict(json.loads(json.dumps(of_two().to_dict())))
    steps = steps_of(made)
    assert [step.number for step in steps] == [0, 1]
    for step in steps:
        assert step.complete
        for rank in step.ranks:
            assert [(one.module, list(one.buckets)) for one in rank.backwards] == [
                ("actor", [0, 1]),
                ("critic", [2]),
            ]
            assert sum(rank.parts_ns.values()) == rank.length_ns
            assert rank.module_ns(Activity.FORWARD, "critic") == 10 * MS
            assert rank.module_ns(Activity.BACKWARD, "actor") == 20 * MS
            launched = [bucket.launched_ns for bucket in rank.buckets]
            assert launched == sorted(launched)
            assert rank.buckets[1].completed_ns < rank.buckets[2].launched_ns
            assert rank.backward_of(0).complete_ns < rank.backward_of(2).complete_ns == rank.gradients_complete_ns
            assert step.passage(0, rank).wire.end_ns <= rank.backward_of(0).complete_ns + 10 * MS
    names = [param.name for param in steps[0].plan.params]
    assert names == [
        "actor: layer0.weight",
        "actor: layer1.weight",
        "critic: layer0.weight",
        "critic: layer1.weight",
    ]


def test_both_modules_are_in_the_table_and_on_the_page() -> None:
    result = Result(of_two())
    console = Console(file=io.StringIO(), width=120)
    result.explain(console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert printed.count("  actor ") == printed.count("  critic ") == 4
    assert "Steps of several modules are not simulated." in printed
    (exhibit,) = payload([result.analysis])["exhibits"]
    (rank, _) = exhibit["steps"][0]["ranks"]
    assert len(rank["backwardEnds"]) == 2
    assert [bucket["module"] for bucket in rank["buckets"]] == ["actor", "actor", "critic"]
    assert rank["spans"][0] == [0, 0, 10, -1, "actor"]


def alternating(rank: int, kind: str) -> list[Any]:
    kept: list[Any] = []
    wrappers = Wrappers(range(2, 4), "two", [], then=kept.append)
    wrap = minddp.DistributedDataParallel if kind == "minddp" else nn.parallel.DistributedDataParallel
    critic, actor = (wrap(nn.Linear(*sizes)) for sizes in ((8, 1), (4, 8)))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (critic, actor)]
    for _ in range(6):
        critic(torch.ones(2, 8)).sum().backward()
        optimizers[0].step()
        critic(actor(torch.ones(2, 4))).sum().backward()
        optimizers[1].step()
    wrappers.close()
    (xray,) = kept
    steps = steps_of(xray.result.recording)
    return [xray.result.recording.ranks[0].modules, *([b.module for b in s.ranks[0].backwards] for s in steps)]


@pytest.mark.parametrize("kind", ["minddp", "torch"])
def test_a_step_lasts_until_all_modules_have_stepped(ranks: Callable[[int], RankPool], kind: str) -> None:
    names, *steps = ranks(2).run(alternating, kind)[0]
    assert names == ("critic", "actor")
    assert steps == [["critic", "critic", "actor"]] * 2


def unnamed(rank: int) -> tuple[str, ...]:
    ddps = [minddp.DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2)]
    with minddp.xray({"": ddps[0], "second": ddps[1]}, limit_s=100) as x:
        x.add(minddp.DistributedDataParallel(nn.Linear(2, 2)))
        for ddp in ddps:
            ddp(torch.ones(1, 2)).sum().backward()
    return x.result.recording.ranks[0].modules


def test_a_module_without_a_name_has_its_class_and_number(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(unnamed)[0] == ("Linear #1", "second", "Linear #3")


def without_backward(rank: int) -> list[str]:
    import logging

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("minddp.tools.xray.wrappers").addHandler(handler)
    Wrappers(range(1), "none", []).close()
    wrappers = Wrappers(range(1, 3), "forward only", [])
    student = minddp.DistributedDataParallel(nn.Linear(2, 2))
    for _ in range(5):
        student(torch.ones(1, 2))
    wrappers.close()
    return messages


def test_what_was_seen_instead_of_a_step_is_said(ranks: Callable[[int], RankPool]) -> None:
    nothing, forwards = ranks(2).run(without_backward)[0]  # rank 1 may leave it to rank 0
    assert nothing == "No DistributedDataParallel trained in this process (none was made), so there is no x-ray."
    assert forwards == (
        "Steps 1:3 saw no synchronised backward begin, so there is no x-ray. Rank 0 saw student: 3 forwards with "
        "gradients enabled, 0 synchronised backwards; 0 steps of optimizers."
    )


@pytest.mark.slow
def test_ranks_that_a_command_starts_are_recorded(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("gan.py"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    command = [sys.executable, "-m", "minddp", "exec", "--xray", str(tmp_path), "--steps", "4:9", *launcher]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    result = load(tmp_path / "step.json")
    assert isinstance(result, Result)
    assert result.recording.ranks[1].modules == ("actor", "critic")
    assert [step.number for step in steps_of(result.recording)] == [4, 5]
