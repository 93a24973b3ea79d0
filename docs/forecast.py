"""Published figures of data-parallel training, predicted: `python -m docs.forecast` fills docs/forecast.md.

Inputs are facts that others have published, each with its source; they are the same for all figures and none is
fitted. The page's other table is what `python -m benchmarks forecast` has measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from minddp.core.plan import ParamSpec, plan_from_groups
from minddp.options import BucketCaps
from minddp.tools.forecast.link import Link, all_reduce
from minddp.tools.forecast.step_model import Job
from minddp.tools.xray.forecast_command import GBIT

PAGE = Path(__file__).parent / "forecast.md"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
GOODPUT = 1448 / 1538
HOP_US = {"PCIe": 5.7, "NVLink": 3.4, "network": 14.0}
INSIDE_GBYTE = {"PCIe": 12.0, "NVLink": 150.0}
BACKWARD = 2 / 3
CYCLE_S, FUSED_BYTES = 5e-3, 64 * 2**20
IMAGES_PER_S = {
    "Inception V3, P100": 142.0,
    "ResNet-50, P100": 219.0,
    "ResNet-152, P100": 91.8,
    "VGG-16, P100": 154.0,
    "ResNet-50, V100": 405.0,
    "BERT-large, V100": 5.48,
}
Layer = tuple[float, float]  # millions of parameters, and multiplications in any unit; the last layer first


# ---------------------------------------------------------------------- models


def vgg16() -> list[Layer]:
    sides = [(224, 3, 64), (224, 64, 64), (112, 64, 128), (112, 128, 128), (56, 128, 256), *[(56, 256, 256)] * 2]
    sides += [(28, 256, 512), *[(28, 512, 512)] * 2, *[(14, 512, 512)] * 3]
    convolutions = [(9 * before * after / 1e6, 9 * before * after * side**2 / 1e6) for side, before, after in sides]
    dense = [before * after / 1e6 for before, after in ((25_088, 4096), (4096, 4096), (4096, 1000))]
    return [*convolutions, *((millions, millions) for millions in dense)][::-1]


def resnet(blocks: Sequence[int]) -> list[Layer]:
    """Bottlenecks of three convolutions; a stage begins with a shortcut of its own."""
    layers, before = [(9408 / 1e6, 9408 * 112**2 / 1e6)], 64
    for stage, count in enumerate(blocks):
        width, side = 64 * 2**stage, 56 // 2**stage
        for block in range(count):
            sizes = [before * width, 9 * width**2, 4 * width**2]
            sizes += [before * 4 * width] if block == 0 else []
            layers += [(size / 1e6, size * side**2 / 1e6) for size in sizes]
            before = 4 * width
    return [*layers, (2.048, 2.048)][::-1]


def inception() -> list[Layer]:
    return [(23.9 / 94, 1.0)] * 94


def bert_large() -> list[Layer]:
    return [*[(12.6, 1.0)] * 24, (31.8, 0.0)]


def trained(layers: Sequence[Layer], batch: int, per_s: float) -> Job:
    """A step of one GPU, at so many examples per second."""
    step_s, total, done, gradients = batch / per_s, sum(work for _, work in layers), 0.0, []
    for millions, work in layers:
        done += work
        gradients.append((round(4e6 * millions), BACKWARD * step_s * done / total))
    return job_of(gradients, step_s, BACKWARD * step_s)


def job_of(gradients: Sequence[tuple[int, float]], alone_s: float, backward_s: float) -> Job:
    """A job of fp32 gradients, each with its bytes and seconds since backward began, with DDP's default buckets."""
    specs = [ParamSpec("", nbytes // 4, torch.float32, torch.device("cpu")) for nbytes, _ in gradients]
    together = plan_from_groups(specs, [range(len(specs))], "together")
    job = Job(alone_s, backward_s, dict(enumerate(at_s for _, at_s in gradients)), together)
    return job.with_caps(BucketCaps.from_mib(None, None).after_rebuild())


def fused(job: Job, link: Link) -> Job:
    """Horovod's messages: at each cycle at which the wire is free, what has become ready since."""
    order, groups, free_s = sorted(job.ready_s, key=job.ready_s.__getitem__), [], 0.0
    while order:
        begin_s = math.ceil(max(free_s, job.ready_s[order[0]]) / CYCLE_S) * CYCLE_S
        group = [order.pop(0)]
        while order and job.ready_s[order[0]] <= begin_s:
            if sum(job.plan.params[param].nbytes for param in [*group, order[0]]) > FUSED_BYTES:
                break
            group.append(order.pop(0))
        groups.append(group)
        free_s = begin_s + link.seconds(sum(job.plan.params[param].nbytes for param in group))
    return replace(job, plan=plan_from_groups(job.plan.params, groups, "fused"))


# ---------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figure:
    """`predicted(share)` is the figure if messages have this share of the wire's rate."""

    source: str
    what: str
    published: float
    predicted: Callable[[float], float]

    def needed_share(self) -> float | None:
        """The share of the rate with which the model would give the published figure."""
        shares = [10 ** (-k / 200) for k in range(-200, 401)]
        off = [self.predicted(share) - self.published for share in shares]
        crossings = [k for k in range(len(off) - 1) if off[k] * off[k + 1] <= 0]
        return shares[min(crossings, key=lambda k: abs(math.log(shares[k])))] if crossings else None


def link_of(ranks: int, hosts: int, gbit: float, share: float, bus: str, gloo: bool = False) -> Link:
    """A rank for each GPU; messages have this share of a hop's rate between hosts, and gloo's of each hop's."""
    between = Link(HOP_US["network"] / 1e6, share * gbit * GBIT * GOODPUT)
    if gloo:
        by_cores = Link(between.latency_s, share * gloo_bytes_per_s())
        return all_reduce(ranks, hosts, by_cores, between)
    return all_reduce(ranks, hosts, Link(HOP_US[bus] / 1e6, INSIDE_GBYTE[bus] * 1e9), between)


def gloo_bytes_per_s() -> float:
    """A ring of two passes all bytes once."""
    sizes = json.loads((RESULTS / "all_reduce.json").read_text())["sizes"]
    return sizes[-1]["kib"] * 1024 / (sizes[-1]["median_ms"]["process group"] / 1e3)


def figures() -> Iterator[Figure]:
    """All of them."""
    for name, layers, per_s, published in (
        ("Inception V3", inception(), IMAGES_PER_S["Inception V3, P100"], 0.90),
        ("ResNet-101", resnet([3, 4, 23, 3]), resnet_101_per_s(), 0.90),
        ("VGG-16", vgg16(), IMAGES_PER_S["VGG-16, P100"], 0.68),
    ):
        what = f"{name}: efficiency, 512 GPUs, 25 Gbit/s"
        yield Figure("Horovod", what, published, partial(efficiency, trained(layers, 64, per_s)))
    for backend, name, layers, batch, published in (
        ("NCCL", "ResNet-50", resnet([3, 4, 6, 3]), 32, 0.380),
        ("NCCL", "BERT-large", bert_large(), 2, 0.352),
        ("gloo", "ResNet-50", resnet([3, 4, 6, 3]), 32, 0.268),
        ("gloo", "BERT-large", bert_large(), 2, 0.215),
    ):
        what = f"{name}, {backend}: gain by overlap, 32 GPUs, 100 Gbit/s"
        job = trained(layers, batch, IMAGES_PER_S[f"{name}, V100"])
        yield Figure("DDP paper", what, published, partial(gain_by_overlap, job, backend == "gloo"))


def resnet_101_per_s() -> float:
    """Of which no figure is published: between those of ResNet-50 and -152, by their multiplications."""
    works = [sum(work for _, work in resnet(blocks)) for blocks in ([3, 4, 6, 3], [3, 4, 23, 3], [3, 8, 36, 3])]
    small_s, large_s = (1 / IMAGES_PER_S[f"{name}, P100"] for name in ("ResNet-50", "ResNet-152"))
    return 1 / (small_s + (works[1] - works[0]) / (works[2] - works[0]) * (large_s - small_s))


def efficiency(job: Job, share: float) -> float:
    link = link_of(512, 128, 25, share, "PCIe")
    return job.alone_s / fused(job, link).step_s(link)


def gain_by_overlap(job: Job, gloo: bool, share: float) -> float:
    link = link_of(32, 4, 100, share, "NVLink", gloo)
    without = replace(job, ready_s=dict.fromkeys(job.ready_s, job.backward_s))  # messages leave after backward
    return without.step_s(link) / job.step_s(link) - 1


# ---------------------------------------------------------------------- page


def inputs() -> Iterator[tuple[str, str, str]]:
    """Each with its source."""
    frames, gloo = (
        f"{GOODPUT:.3f} of a network's rate",
        f"{gloo_bytes_per_s() / 1e9:.2f} GB/s: a core moves and adds",
    )
    per_s = {name: f"{value:.3g}" for name, value in IMAGES_PER_S.items()}
    yield "payload of a frame", frames, "1448 of 1538 bytes: TCP in Ethernet's frames of 1500"
    latencies = ", ".join(f"{us:g} µs by {name}" for name, us in HOP_US.items())
    yield "latency of a hop", latencies, "NCCL, `src/graph/tuning.cc`: ring, Simple"
    rates = ", ".join(f"{rate:g} GB/s by {name}" for name, rate in INSIDE_GBYTE.items())
    yield "rate of a hop in a host", rates, "NCCL's PCIe width; six NVLinks of 25 GB/s"
    yield "gloo, each hop", gloo, "an all-reduce of 25 MiB by two ranks: not by their machines"
    yield "backward", "2/3 of a step", "two products of matrices for each one in forward"
    yield "VGG-16, ResNet", "by layer; time as multiplications", "the papers' tables (1409.1556, 1512.03385)"
    yield "Inception V3", "23.9 million parameters, evenly over 94 convolutions", "Keras' list of applications"
    yield "BERT-large", "24 equal layers of 12.6 million, then 31.8 million", "the paper (1810.04805)"
    for name, source in (
        ("P100", "TensorFlow's benchmarks, batches of 64; ResNet-101: between -50 and -152 by multiplications"),
        ("V100", "Lambda's benchmarks; NVIDIA's DeepLearningExamples, fp32 on 16 GB, batches of 2"),
    ):
        speeds = [f"{key.rpartition(', ')[0]} {value}" for key, value in per_s.items() if key.endswith(f", {name}")]
        yield f"examples/s, {name}", ", ".join(speeds), source
    yield (
        "DDP paper",
        "4 hosts of 8; ResNet-50 in batches of 32",
        "the paper (2006.15704) gives no batch: torch's example",
    )
    fuses = f"fuses what is ready every {1e3 * CYCLE_S:g} ms, at most {FUSED_BYTES // 2**20} MiB"
    yield "Horovod", f"{fuses}; 4 GPUs a host", "defaults HOROVOD_CYCLE_TIME, _FUSION_THRESHOLD; its benchmark page"


def published() -> str:
    """The figures, and the inputs of all."""
    lines = ["| from | figure | published | predicted | the model would need |", "|---|---|---|---|---|"]
    for one in figures():
        share = one.needed_share()
        needed = "no rate gives it" if share is None else f"{share:.0%} of the rate"
        lines.append(f"| {one.source} | {one.what} | {one.published:.0%} | {one.predicted(1.0):.0%} | {needed} |")
    lines += ["", "| input | value | source |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in inputs())])


def measured() -> str:
    """The last run of `python -m benchmarks forecast`."""
    report = json.loads((RESULTS / "forecast.json").read_text())
    machine, errors = report["machine"], [abs(row["error"]) for row in report["rows"].values()]
    lines = [f"| {report['config']['workload']} | cores | predicted ms | measured ms | error |", "|---" * 5 + "|"]
    for where, row in report["rows"].items():
        cells = (
            f"{row['cores']:.2f}",
            f"{row['predicted_ms']:.1f}",
            f"{row['measured_ms']:.1f}",
            f"{row['error']:+.1%}",
        )
        lines.append(f"| {where} | {' | '.join(cells)} |")
    words = (
        f"Errors: {np.median(errors):.1%} as the median, {max(errors):.1%} at worst. Measured on {machine['cpu']}, "
        f"{machine['cores']:g} cores, torch {machine['torch']}."
    )
    return "\n".join([*lines, "", words])


def filled(page: str) -> str:
    for name, table in (("published", published), ("measured", measured)):
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        page = page[: page.index(begin)] + begin + table() + page[page.index(end) :]
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
