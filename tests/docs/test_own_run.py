"""The page that steps through a recorded backward: its data, and the page in a real Chromium."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import minddp
from docs.learning import own_run, recorded
from docs.learning.own_values import OfBucket, Values
from minddp.core.plan import BucketPlan
from minddp.tools.xray.result import Result
from tests.ranks import on_ranks
from tests.tools.xray.made_up import Rank, layout, recording

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "</script><b>&\"'"


def minddp_result() -> Result:
    return next(result for result in recorded.results() if recorded.name_of(result) == "minddp")


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def values_of(ranks: int, buckets: int = 4) -> list[Values]:
    """As if recorded: the largest element of each bucket is the third of its first gradient."""
    made = []
    for rank in range(ranks):
        values = Values.__new__(Values)
        values.of_bucket = {}
        for index, bucket in enumerate(plan_of_minddp().buckets[:buckets]):
            before = [torch.full((slot.numel,), 0.125 * (rank + 1)) for slot in bucket.slots]
            before[0][2] = float(rank + 1)
            mean = ranks * (ranks + 1) / 2
            values.of_bucket[index] = OfBucket(before, [torch.full_like(grad, mean) for grad in before])
        made.append(values)
    return made


def plan_of_minddp() -> BucketPlan:
    return minddp_result().recording.ranks[0].plan


@on_ranks(2)
def test_a_sparse_gradient_has_no_values_on_the_page(rank: int) -> None:
    values = Values()
    module = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    ddp = minddp.DistributedDataParallel(module)
    ddp(torch.tensor([rank, 2])).sum().backward()
    of_dense = {bucket.index for bucket in ddp.plan.buckets if not bucket.sparse}
    assert {index for index, of in values.of_bucket.items() if of.after} == of_dense


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ring_begins_with_what_was_recorded_and_ends_with_the_average(ranks):
    plan = plan_of_minddp()
    ring = own_run.ring_of(plan.buckets[1], plan, values_of(ranks))
    assert ring is not None
    rows = ring["rows"]
    assert ring["element"] == f"{plan.params[plan.buckets[1].slots[0].param].name}[2]"
    assert len(rows) == 2 + 2 * (ranks - 1)
    assert rows[0]["values"] == [rank + 1 for rank in range(ranks)]
    assert rows[-2]["values"] == rows[-1]["values"] == [ranks * (ranks + 1) / 2] * ranks
    assert [row["to"] for row in rows[1:-1]] == [(ring["chunk"] + 1 + s) % ranks for s in range(2 * (ranks - 1))]


SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))
for _ in range(6):
    ddp.zero_grad()
    ddp(torch.randn(5, 8)).square().mean().backward()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_command_runs_a_script_and_its_numbers_are_those_of_the_run(tmp_path):
    script, page = tmp_path / "script.py", tmp_path / "page.html"
    script.write_text(SCRIPT)
    own_run.main(["--step", "3", str(page), str(script)])
    assert "<title>script.py, step by step</title>" in page.read_text()
    [ring] = data_of(page.read_text())["rings"]
    first, *steps, last = [row["values"] for row in ring["rows"]]
    assert first[0] != first[1]
    assert last == steps[-1] == [pytest.approx(sum(first), rel=1e-6)] * 2


# ------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page of `request.param` (by default minddp's recorded step). It must not complain nor ask a network."""
    made, context = getattr(request, "param", (minddp_result, {}))
    path = tmp_path / "page.html"
    result = made()
    values = values_of(2) if made is minddp_result else ()
    path.write_text(own_run.page_of(result, values), encoding="utf-8")
    seen = browser.new_context(**{"viewport": {"width": 1200, "height": 1000}, **context})
    page, complaints, requests = seen.new_page(), [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: requests.append(asked.url))
    page.goto(path.as_uri())
    yield page
    seen.close()
    assert complaints == []
    assert all(url.startswith("file:") for url in requests)


def made_up() -> Result:
    return Result(recording([Rank(), Rank()], layout([[1, 1], [1]], names=[EVIL, "b", "c"]), steps=3))


@pytest.mark.slow
def test_a_reader_steps_through_with_buttons_keys_and_slider(opened):
    events = minddp_result().recording.ranks[0].events
    gradients = sum(event.kind.name == "PARAM_READY" for event in events)
    said = lambda: opened.inner_text("#says").partition(" ms ")[2]  # noqa: E731
    assert opened.evaluate("document.querySelector('main').firstElementChild.id") == "own"
    assert said() == "Forward computes. Nothing travels."
    opened.click("#next")
    assert said() == "Backward begins, from the last layer."
    opened.focus("#own .lanes")
    opened.keyboard.press("ArrowRight")
    assert said() == "The gradient of head.bias is ready. Its hook only counts."
    assert "ready_order.append" in opened.inner_text("#own .code .acts")
    opened.keyboard.press("ArrowLeft")
    opened.click("#back")
    opened.click("#back")  # not before the first
    assert said() == "Forward computes. Nothing travels."
    opened.keyboard.press("End")
    opened.eval_on_selector("#place", "node => { node.value = node.max; node.oninput(); }")
    assert said().startswith("The averages of bucket 3 go into .grad")
    assert opened.locator(".bucket.unpacked").count() == 4
    assert opened.locator(".gradient.ready").count() == gradients == 10
    assert opened.locator("#own .lanes text", has_text="rank 1").count() == 1
    assert opened.locator("#own .lanes .on").all_text_contents() == ["0", "1", "2", "3"] * 2
    assert opened.inner_text("#element").endswith("[2]")
    assert opened.locator("#ring tr").count() == 1 + 4


def queued() -> Result:
    """Bucket 1 is launched while bucket 0 travels."""
    return Result(recording([Rank(), Rank(late_ms=2)], layout([[30], [60]])))


@pytest.mark.slow
@pytest.mark.parametrize("opened", [(queued, {})], indirect=True)
def test_a_bucket_that_queues_is_not_drawn_over_the_one_that_travels(opened):
    bars = opened.locator("#own .lanes rect").evaluate_all(
        """all => all.filter(bar => /moves|waits/.test(bar.className.baseVal))
          .map(bar => ["x", "y", "width"].map(name => Number(bar.getAttribute(name))))"""
    )
    assert len(bars) >= 4
    for x, y, width in bars:
        assert all(other[0] <= x or other[0] >= x + width for other in bars if other[1] == y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "opened",
    [(made_up, {}), (made_up, {"viewport": {"width": 380, "height": 700}, "color_scheme": "dark"})],
    indirect=True,
    ids=["wide", "narrow"],
)
def test_names_are_text_and_nothing_is_wider_than_the_window(opened):
    assert EVIL in opened.locator(".gradient").all_inner_texts()
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
