from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from minddp.tools.train.checks import check_before_start
from minddp.tools.train.launch import parse
from minddp.tools.train.settings import Settings, SettingsError, arguments_for
from tests.tools.train.runs import command_line, tiny


def test_the_command_line_makes_the_settings(tmp_path: Path) -> None:
    settings = tiny(
        tmp_path, ddp="torch", ddp_options=("bucket_cap_mb=0.5", "static_graph=True"), overwrite=True, keep=2
    )
    assert parse(command_line(settings)) == settings


def test_options_are_literals_or_text() -> None:
    def function(number: float = 0, flag: bool = False, text: str = "") -> None: ...

    words = ["number=0.5", "flag=True", "text=a=b"]
    assert arguments_for(function, words, "--x") == {"number": 0.5, "flag": True, "text": "a=b"}
    for word in ("colour=red", "number"):
        with pytest.raises(SettingsError, match=f"--x does not accept `{word}`; .* one of number, flag, text"):
            arguments_for(function, [word], "--x")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 0}, "--steps must be at least 1, but is 0"),
        ({"minutes": -1.0}, "--minutes must be a positive"),
        ({"minutes": float("nan")}, "--minutes must be a positive"),
        ({"nproc": 0}, "--nproc must be at least 1"),
        ({"learning_rate": float("inf")}, "--learning-rate must be a positive, finite"),
        ({"weight_decay": -0.1}, "--weight-decay must not be negative"),
        ({"seed": -1}, "--seed"),
        ({"resume": "yes", "overwrite": True}, "--overwrite excludes --resume"),
        ({"resume": "auto", "overwrite": True}, "--overwrite excludes --resume"),
        (
            {"print_sbatch": True, "overwrite": True},
            "--overwrite excludes --resume, which every job",
        ),
        ({"task": "chess"}, "--task chess is neither gpt nor digits nor FILE.py:FUNCTION"),
        ({"checkpoint_minutes": 0.0}, "--checkpoint-minutes must be a positive"),
        ({"keep": 0}, "--keep must be at least 1"),
        ({"workers": -1}, "--workers must not be negative"),
        ({"ddp": "torch", "logical_ranks": 4}, "--ddp torch has no logical ranks"),
        ({"accumulate": 2, "logical_ranks": 4}, "--accumulate and --logical-ranks exclude"),
        ({"comm_hook": "fp16_compress", "logical_ranks": 4}, "--comm-hook and --logical-ranks exclude"),
        ({"steps": 5, "xray": "2:9"}, "--xray 2:9 ends after --steps 5"),
        ({"xray": "9:2"}, "--xray 9:2 is not FIRST:LAST"),
        ({"precision": "fp16", "ddp_options": ("check_finite=True",)}, "remove check_finite=True"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Settings(**changes)


def test_all_problems_are_in_one_message() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings(steps=0, nproc=0)
    assert "--steps" in str(caught.value)
    assert "--nproc" in str(caught.value)


def test_limits() -> None:
    assert Settings().limit_s == 60
    assert Settings().limit_steps == float("inf")
    assert Settings(minutes=2.0).limit_s == 120
    assert Settings(steps=5).limit_s == float("inf")
    assert Settings(steps=5, minutes=1.0).limit_steps == 5


def test_an_option_that_the_wrapper_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--ddp torch --ddp-options does not accept `transport=nccl`"):
        check_before_start(tiny(tmp_path, ddp="torch", ddp_options=("transport=nccl",)))


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        SettingsError, match=r'the package wandb is not installed\. Run: pip install "minddp\[train\]"'
    ):
        Settings(track=("wandb",))


def test_a_hook_that_needs_nccl(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--comm-hook bf16_compress needs NCCL"):
        check_before_start(tiny(tmp_path, comm_hook="bf16_compress"))


def test_more_cuda_ranks_than_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SettingsError, match=r"needs a device for each of the 3 ranks.* has 1.*--nproc 1"):
        check_before_start(tiny(tmp_path, ddp="torch", device="cuda", nproc=3))


def test_the_number_of_ranks_is_torchruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name, value in {**dict.fromkeys(names, "0"), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    check_before_start(tiny(tmp_path, ddp="torch"))
    with pytest.raises(SettingsError, match="--nproc 2 differs from the 4 ranks"):
        check_before_start(tiny(tmp_path, ddp="torch", nproc=2))


def test_a_missing_extra_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    settings = dataclasses.replace(Settings(task="digits", ddp="torch"), out=tmp_path)
    with pytest.raises(SettingsError, match=r'pip install "minddp\[digits\]"'):
        check_before_start(settings)


def test_more_than_the_data_can_give(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="do not fill one batch of 200000 for each of 2 ranks"):
        check_before_start(tiny(tmp_path, ddp="torch", batch_size=200_000))
    with pytest.raises(SettingsError, match="for each of 400000 ranks"):
        check_before_start(tiny(tmp_path, logical_ranks=400_000))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("context=200000", "corpus_mib=1"), "context=200000 is longer than the held-out text"),
        (("width=100", "heads=3"), "width=100 is not divisible by heads=3"),
        (("dropout=1.0",), "dropout between 0 and 1"),
        (("colour=red",), "--task-options does not accept `colour=red`"),
        (("folder=/nowhere/at/all",), "contains 0 files that end in `.py`"),
    ],
)
def test_options_of_a_task_that_cannot_work(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        check_before_start(tiny(tmp_path, task_options=words))


def test_inductor_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SettingsError, match=r"--compile inductor needs .* no-such-compiler is not found"):
        Settings(compile="inductor")
    assert Settings(compile="aot_eager").compile == "aot_eager"


@pytest.mark.parametrize("name", ["TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT"])
def test_ranks_that_a_launcher_starts_again_must_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """--overwrite would discard what has been trained, or continue an old run."""
    monkeypatch.setenv(name, "2")
    for overwrite in (False, True):
        with pytest.raises(SettingsError, match=r"restarts ranks, .*: pass --resume auto"):
            check_before_start(tiny(tmp_path, overwrite=overwrite))
    check_before_start(tiny(tmp_path, resume="auto"))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"])
def test_a_file_that_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "checkpoints" / "step-00000003-0123456789abcdef.pt"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(SettingsError, match="contains no undamaged checkpoint"):
        check_before_start(tiny(tmp_path, ddp="torch", resume="yes"))


@pytest.mark.parametrize("folder", ["/proc/self", "/sys"])
def test_a_folder_that_is_read_only(folder: str) -> None:
    with pytest.raises(SettingsError, match=r"Cannot write to .* Pass another --out"):
        check_before_start(tiny(Path(folder), ddp="torch"))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SettingsError, match=r"Cannot write to .* Pass another --out"):
        check_before_start(tiny(tmp_path / "file" / "run", ddp="torch"))
