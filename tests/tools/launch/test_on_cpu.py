"""`--on-cpu`: scripts that ask for CUDA and NCCL run without either, with the bits of torch's own DDP."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from minddp.tools.launch.execute import environment_of
from minddp.tools.launch.run import make_parser
from tests.tools.launch.jobs import minddp

SCRIPTS = Path(__file__).parent / "on_cpu_scripts"
SAID = {
    "language_model": ("torch.compile", "bfloat16 in the place of float16"),
    "images_spawned": (),
    "teacher": ("SyncBatchNorm is BatchNorm", "memory figures"),
    "own_collectives": ("torch.compile",),
}


def digests(name: str, folder: Path, *options: str) -> tuple[set[str], str]:
    """Those of all ranks, and stderr."""
    folder.mkdir()
    script = str(SCRIPTS / f"{name}.py")
    if name == "images_spawned":  # it starts its ranks itself
        done = minddp("exec", "--on-cpu", *options, sys.executable, script, str(folder), cwd=folder)
    else:
        done = minddp("run", "--on-cpu", *options, "--nproc-per-node", "2", script, cwd=folder)
    # A process with torch's class has aborted at its exit, once, after its result: why is not known.
    has_aborted = "--native" in options and "terminate called without an active exception" in done.stderr
    assert done.returncode == 0 or has_aborted, done.stdout + done.stderr
    found = dict(re.findall(r"rank (\d) digest (\w{64})", done.stdout))
    assert sorted(found) == ["0", "1"], done.stdout
    return set(found.values()), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_a_script_for_gpus_ends_with_the_bits_of_torchs_ddp(name: str, tmp_path: Path) -> None:
    ours, said = digests(name, tmp_path / "minddp")
    theirs, _ = digests(name, tmp_path / "native", "--native")
    assert len(ours) == 1, "the ranks differ"
    assert ours == theirs
    notes = [line for line in said.splitlines() if line.startswith("minddp --on-cpu: ")]
    assert len(notes) == len(SAID[name]), notes
    for expected in SAID[name]:
        assert any(expected in note for note in notes)


def test_each_flag_is_passed_on_alone(tmp_path: Path) -> None:
    def asked_for(*arguments: str) -> set[str]:
        environment = environment_of(make_parser("minddp run").parse_args([*arguments, "train.py"]))
        return {"MINDDP_ON_CPU", "MINDDP_NATIVE", "MINDDP_XRAY"} & environment.keys()

    assert asked_for() == set()
    assert asked_for("--on-cpu") == {"MINDDP_ON_CPU"}
    assert asked_for("--native", "--on-cpu") == {"MINDDP_ON_CPU", "MINDDP_NATIVE"}
    assert asked_for("--xray", str(tmp_path), "--native") == {"MINDDP_NATIVE", "MINDDP_XRAY"}


ASK = """
import torch
from torch import nn

half = torch.full((2,), 1.5, device="cuda:1")
assert torch.cuda.device_count() == 2 and torch.cuda.get_device_properties(0).total_memory > 0

weights = nn.Parameter(torch.zeros(2, device=torch.device("cuda")))
assert weights.cuda() is weights and weights.to("cuda").is_leaf  # as on a GPU, where it lies already
kept = weights.cpu()
with torch.no_grad():
    weights += 1
assert kept.sum() == 0 and weights.to(weights.device) is weights

module = nn.Linear(2, 2)
before = module.weight
assert module.cuda(0).to("cuda").to(0).weight is before

rows = torch.zeros(2, 2)
rows[0].to("cuda").add_(1)
rows[0].cuda().add_(1)
torch.as_tensor(rows, device="cuda").add_(1)
assert rows.sum() == 0

torch.cuda.manual_seed(3)
first = torch.rand(2, device="cuda")
torch.cuda.manual_seed_all(3)
assert torch.equal(first, torch.rand(2))
torch.manual_seed(4)
torch.cuda.manual_seed(3)
second = torch.rand(2)
torch.manual_seed(4)
assert torch.equal(second, torch.rand(2))
torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())

@torch.jit.script
def scripted(x: torch.Tensor):
    return torch.zeros([2], device=x.device) + torch.ones_like(x) + torch.rand([2]) + torch.full([2], 1.0)
assert scripted(half).shape == (2,)

try:
    torch.cuda.CUDAGraph()
except RuntimeError:
    pass
else:
    raise AssertionError("a graph that records nothing")
torch.cuda.cudart()
"""


@pytest.mark.slow
def test_what_has_no_replacement_raises_and_what_has_one_means_what_it_does_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ASK)  # torch.jit reads the source
    done = minddp("exec", "--on-cpu", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().endswith(
        "RuntimeError: This call needs CUDA itself, and --on-cpu has no replacement for it: leave it out."
    ), done.stderr
