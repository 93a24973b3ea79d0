"""The explorable page: its model beside `forecast`, what it quotes, and the page in a real Chromium."""

from __future__ import annotations

import json
import random
import re
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.forecast import BACKWARD
from docs.learning import explore, recorded
from minddp.core.plan import ParamSpec, plan_from_groups
from minddp.options import MIB
from minddp.tools.forecast.link import FREE, Link, all_reduce
from minddp.tools.forecast.planner import plan_buckets
from minddp.tools.forecast.step_model import Job, predicted_s
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.forecast_command import job_of_recording
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.result import Result
from tests.tools.xray.made_up import Rank, layout, recording

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SETTINGS = 200
PLANNED = 20  # of them: each is 64 plans
RECORDED = 10  # percent that the model may be off


def node() -> str:
    """Node from the machine, or the one that comes with playwright."""
    if (found := shutil.which("node")) is not None:
        return found
    driver = pytest.importorskip("playwright._impl._driver", reason="needs node, or playwright")
    return str(driver.compute_driver_executable()[0])


def run_model(expression: str, inputs: Any, tmp_path: Path) -> Any:
    """The value of a JavaScript expression of `inputs`, `constants` and the model as it is on the page."""
    text = explore.PAGE.read_text()
    model = re.search(r'<script id="model">(.*?)</script>', text, re.S)
    assert model is not None
    program = f"""{model[1]}
    const [inputs, constants] = JSON.parse(require("fs").readFileSync(0, "utf8"));
    process.stdout.write(JSON.stringify({expression}));"""
    path = tmp_path / "model.js"
    path.write_text(program)
    given = json.dumps([inputs, data_of(text)["constants"]])
    done = subprocess.run([node(), str(path)], input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def test_the_page_is_the_one_that_the_command_builds() -> None:
    assert explore.PAGE.read_text() == explore.build(), "run python -m docs.learning.explore"


def test_the_line_that_acts_is_in_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, (_, _, part) in explore.ACTS.items():
        code = explore.code_of(key)
        assert part in code["lines"][code["acts"]]
    monkeypatch.setitem(explore.ACTS, "ring", ("reference/ring.py", "ring", "no such line"))
    with pytest.raises(LookupError, match="has no line with `no such line`"):
        explore.code_of("ring")


# ------------------------------------------------------------------ the model is forecast's


def some_settings() -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [
        {
            "ranks": rng.randint(1, 8),
            "rate": 2 ** rng.uniform(-4, 8),
            "latencyUs": rng.choice([0.0, 2 ** rng.uniform(0, 12)]),
            "taken": rng.choice([0.0, rng.random(), 1.0]),
            "slow": rng.choice([1.0, rng.uniform(1, 3)]),
            "capMib": rng.choice([None, 2 ** rng.uniform(-4, 10)]),
            "layers": rng.randint(2, 40),
            "width": rng.randint(64, 4096),
            "embeddingMib": rng.choice([0, rng.randint(1, 1000)]),
            "layerMs": 2 ** rng.uniform(-5, 6),
            "accumulate": rng.randint(1, 8),
            "wireBytes": rng.choice([4, 2]),
            "job": None,
            "plans": number < PLANNED,  # also by the planner
        }
        for number in range(SETTINGS)
    ]


def forecast_of(s: dict[str, Any], rung: str) -> tuple[float, float]:
    """The step, and what it exposes, by forecast's own functions."""
    layer_s = s["slow"] * s["layerMs"] / 1e3
    backward_s = s["layers"] * layer_s
    sizes, ready = [], []
    if s["embeddingMib"]:
        sizes, ready = [s["embeddingMib"] * MIB // 4], [backward_s]
    for layer in range(s["layers"]):
        sizes += [s["width"] ** 2, s["width"]]
        ready += 2 * [(s["layers"] - layer) * layer_s]
    specs = [ParamSpec("", numel, torch.float32, torch.device("cpu")) for numel in sizes]
    link = all_reduce(s["ranks"], 1, Link(s["latencyUs"] / 1e6, s["rate"] * 1e9), FREE)
    link = replace(link, bytes_per_s=link.bytes_per_s * 4 / s["wireBytes"], taken=s["taken"])
    alone_s = s["accumulate"] * backward_s / BACKWARD
    job = Job(alone_s, backward_s, dict(enumerate(ready)), plan_from_groups(specs, [range(len(specs))], ""))
    order = sorted(range(len(specs)), key=ready.__getitem__)
    caps = [MIB, 25 * MIB] if s["capMib"] is None else [int(s["capMib"] * MIB)]
    at_the_end = replace(job, ready_s=dict.fromkeys(job.ready_s, backward_s))
    job = {
        "naive": replace(at_the_end, plan=plan_from_groups(specs, [[param] for param in range(len(specs))], "")),
        "flat": at_the_end,
        "overlapped": replace(job, plan=plan_from_groups(specs, [[param] for param in order], "")),
        "bucketed": job.with_caps(caps),
    }[rung]
    if s.get("plans") and rung == "bucketed":
        best = plan_buckets(specs, job.ready_s, link, backward_s)
        return job.step_s(link), predicted_s(best, link, job.ready_s, backward_s) - backward_s
    return job.step_s(link), job.exposed_s(link)


def test_the_model_of_the_page_is_that_of_forecast(tmp_path: Path) -> None:
    found = run_model(
        """inputs.map(s => Object.fromEntries(["naive", "flat", "overlapped", "bucketed"].map(rung => {
          const step = stepOf(s, constants, rung);
          if (!s.plans || rung !== "bucketed") return [rung, [step.length, step.exposed]];
          const best = planBuckets(step.sizes, step.ready, step.link, step.backward, constants.halvings);
          return [rung, [step.length, stepOf(s, constants, rung, best).exposed]];
        })))""",
        settings := some_settings(),
        tmp_path,
    )
    exposing = 0
    for s, by_page in zip(settings, found, strict=True):
        for rung, values in by_page.items():
            length_s, other_s = forecast_of(s, rung)
            assert values[0] == pytest.approx(length_s, rel=1e-6), (s, rung)
            assert values[1] == pytest.approx(other_s, rel=1e-6, abs=1e-6 * length_s), (s, rung)
            exposing += values[1] > 0.01 * length_s
    assert exposing > SETTINGS  # or they would not compare much


def test_what_the_page_reads_from_a_recording_is_what_forecast_reads(tmp_path: Path) -> None:
    made_up = [
        recording([Rank(), Rank(late_ms=5)], layout([[100, 1], [1]]), steps=4),
        recording([Rank(), Rank(), Rank(late_ms=2)], layout([[30], [1]]), steps=3),
    ]
    adds_late = recording([Rank(), Rank(late_ms=1)], layout([[1], [30]]))
    made_up.append(replace(adds_late, ranks=tuple(replace(r, adds_after_ns=3_000_000) for r in adds_late.ranks)))
    recordings = [*(result.recording for result in recorded.results()), *made_up]
    found = run_model(
        """inputs.map(recording => { const { job, hop, plan, world } = readRecording(recording, constants);
          const s = { ...hop, rate: hop.rate / 1e9, latencyUs: hop.latency * 1e6, ranks: world, job,
            slow: 1, taken: 0, accumulate: 1, wireBytes: 4, capMib: null };
          return { job, hop, length: stepOf(s, constants, "bucketed", plan).length }; })""",
        [one.to_dict() for one in recordings],
        tmp_path,
    )
    for one, read in zip(recordings, found, strict=True):
        job, hop = job_of_recording(Analysis(one))
        by_page = read["job"]
        assert by_page["ready"] == pytest.approx([job.ready_s[param] for param in range(len(job.ready_s))])
        assert by_page["backward"] == pytest.approx(job.backward_s)
        assert by_page["forward"] + by_page["backward"] + by_page["rest"] == pytest.approx(job.alone_s)
        assert read["hop"]["latency"] == pytest.approx(hop.latency_s, rel=1e-6, abs=1e-12)
        assert read["hop"]["rate"] == pytest.approx(hop.bytes_per_s)
        step_s = job.step_s(all_reduce(one.world_size, 1, hop, FREE))
        assert read["length"] == pytest.approx(step_s + by_page["copy"])
    for (name, error), read, one in zip(explore.errors().items(), found, recordings, strict=False):
        recorded_s = recorded.length_ns(Analysis(one).typical) / 1e9
        assert read["length"] / recorded_s - 1 == pytest.approx(error, abs=1e-6), name


def test_recorded_steps_are_as_long_as_the_model_says() -> None:
    errors = [abs(error) for error in explore.errors().values()]
    assert max(errors) < RECORDED / 100
    assert (
        f"is {statistics.median(errors):.0%} as the median and {max(errors):.0%} at worst"
        in explore.PAGE.read_text()
    )


def test_every_all_reduce_ends_with_every_rank_in_every_chunk_once() -> None:
    for algorithms in data_of(explore.PAGE.read_text())["collectives"].values():
        for n, run in enumerate(algorithms, start=2):
            assert run["steps"][-1]["masks"] == [[2**n - 1] * run["chunks"]] * n
            assert run["steps"][0]["masks"] == [[1 << rank] * run["chunks"] for rank in range(n)]
    twice = explore.Plan(1, [explore.Step("reduce", (explore.Transfer(0, 1, range(1)),))] * 2)
    with pytest.raises(ValueError, match="counts more than once"):
        explore.steps_of(twice, 2)


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


@pytest.fixture(params=["desk", "phone"])
def opened(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page. It must not complain, nor ask a network, nor be wider than the window."""
    size = {"desk": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}[request.param]
    scheme = {"desk": "light", "phone": "dark"}[request.param]
    seen = browser.new_context(viewport=size, color_scheme=scheme, has_touch=request.param == "phone")
    page, complaints, requests = seen.new_page(), [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: requests.append(asked.url))
    page.goto(explore.PAGE.as_uri())
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    seen.close()
    assert complaints == []
    assert all(url.startswith("file:") for url in requests)


def set_slider(page: Any, name: str, value: float) -> None:
    page.eval_on_selector(f"input[name={name}]", "(node, value) => { node.value = value; node.oninput(); }", value)


@pytest.mark.slow
def test_dragging_moves_the_red_and_the_best_size_is_shown_on_request(opened: Any) -> None:
    def exposed() -> str:
        return opened.inner_text("#step .figures .red b")

    seen = set()
    for mib_log2 in (-4, 3, 4.5, 10):
        set_slider(opened, "capMib", mib_log2)
        seen.add(exposed())
    assert len(seen) > 2
    assert opened.locator("#chart .dot").count() == 5  # the one of the start, too
    assert "best of equal sizes" not in opened.inner_text("#found")
    opened.click("#reveal")
    assert "best of equal sizes" in opened.inner_text("#found")
    set_slider(opened, "ranks", 8)
    assert opened.locator("#step .lanes text", has_text="rank 7").count() == 1
    assert opened.locator("#chart .dot").count() == 1  # another curve
    set_slider(opened, "ranks", 1)
    assert exposed() == "0 ms"


@pytest.mark.slow
def test_the_cursor_moves_by_keys_and_by_touch_and_shows_the_line_that_acts(opened: Any) -> None:
    lanes = opened.locator("#step .lanes")
    lanes.focus()
    opened.keyboard.press("Home")
    assert "Forward computes" in opened.inner_text("#step .says")
    assert "self.module(" in opened.inner_text("#step .acts")
    opened.keyboard.press("ArrowRight")
    assert "is ready. Its hook only counts" in opened.inner_text("#step .says")
    assert "ready_order.append" in opened.inner_text("#step .acts")
    box = lanes.bounding_box()
    opened.mouse.move(box["x"] + 0.95 * box["width"], box["y"] + 10)
    opened.mouse.down()
    opened.mouse.up()
    assert "The averages of bucket 3" in opened.inner_text("#step .says")


@pytest.mark.slow
def test_the_small_parts_act(opened: Any) -> None:
    opened.click("[data-rung=flat]")
    assert "Flat.synchronize" in opened.inner_text("#rungs .code b")
    before = opened.inner_text("#plans")
    opened.click("#restore")
    assert opened.inner_text("#plans") != before
    opened.click("#uses .chip >> nth=3")
    opened.click("[data-algorithm=tree]")
    opened.click("#reduce .next")
    assert "Step 1 of 4, reduce" in opened.inner_text("#reduce .says")


@pytest.mark.slow
def test_a_reader_loads_a_recording_and_tries_it_in_part_1(opened: Any, tmp_path: Path) -> None:
    flat = next(result for result in recorded.results() if recorded.name_of(result) == "flat")
    flat.save(tmp_path / "step.json")
    opened.set_input_files("#file", str(tmp_path / "step.json"))
    opened.wait_for_function("document.getElementById('recorded').textContent.includes('flat')")
    opened.click("#use")
    assert "1 bucket of 4.01 MiB" in opened.inner_text("#step .figures")
    assert opened.is_disabled("input[name=layers]")
    set_slider(opened, "capMib", 0)
    assert "4 buckets" in opened.inner_text("#step .figures")
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    opened.set_input_files("#file", str(tmp_path / "other.json"))
    opened.wait_for_function("document.getElementById('recorded').textContent.includes('cannot be read')")


def test_a_recording_without_messages_or_with_any_name_is_no_fault(tmp_path: Path) -> None:
    alone = recording([Rank()], layout([[1], [1]]), steps=2)
    evil = Recording("</script>{{MODEL}}", alone.ranks)
    page = explore.page(evil, "title", is_own=True)
    assert page.count("</script>") == 3
    found = run_model("readRecording(inputs, constants).hop", Result(alone).recording.to_dict(), tmp_path)
    assert found is None
