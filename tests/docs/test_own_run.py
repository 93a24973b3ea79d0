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

from docs.learning import own_run, recorded
from docs.learning.own_values import OfBucket, Values
from minddp.core.plan import BucketPlan
from minddp.tools.xray.result import Result
from tests.tools.xray.made_up import Rank, layout, recording

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "</script><b>&\"'"


def minddp_result() -> Result:
    return next(result for result in recorded.results() if recorded.name_of(result) == "minddp")


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def test_every_gradient_arrives_and_every_bucket_is_launched_after_it_is_full():
    data = data_of(own_run.page_of(minddp_result()))
    order = [(moment["kind"], moment["subject"]) for moment in data["moments"]]
    assert len([kind for kind, _ in order if kind == "PARAM_READY"]) == len(data["params"]) == 10
    for index, bucket in enumerate(data["buckets"]):
        last = max(order.index(("PARAM_READY", param)) for param in bucket["params"])
        stages = [order.index((kind, index)) for kind in ("BUCKET_READY", "BUCKET_LAUNCHED", "BUCKET_WAITED")]
        in_order = [last, *stages, order.index(("BUCKET_UNPACKED", index))]
        assert in_order == sorted(in_order)


@pytest.mark.parametrize("kind", own_run.ACTS, ids=lambda kind: kind.name)
def test_the_line_that_acts_is_in_the_source(kind):
    code = own_run.code_of(kind)
    assert own_run.ACTS[kind][1] in code["lines"][code["acts"]]
    assert "\n".join(line.strip() for line in code["lines"]).startswith("def ")


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


def test_a_rank_that_was_not_recorded_is_an_error():
    with pytest.raises(ValueError, match=r"Rank 5 is not in the recording. There are \[0, 1\]"):
        own_run.page_of(minddp_result(), rank=5)


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
    assert "<title>script.py, rank 0 of 2</title>" in page.read_text()
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
    data = data_of(own_run.page_of(minddp_result()))
    says = [moment["says"] for moment in data["moments"]]
    assert opened.inner_text("#says") == says[0]
    opened.click("#next")
    assert opened.inner_text("#says") == says[1]
    opened.focus("#next")
    opened.keyboard.press("ArrowRight")
    assert opened.inner_text("#says") == says[2]
    opened.keyboard.press("ArrowLeft")
    opened.click("#back")
    opened.click("#back")  # not before the first
    assert opened.inner_text("#says") == says[0]
    opened.fill("#place", str(len(says) - 1))
    assert opened.inner_text("#says") == says[-1]
    assert opened.locator(".bucket.unpacked").count() == len(data["buckets"])
    assert opened.locator(".gradient.ready").count() == len(data["params"])


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
