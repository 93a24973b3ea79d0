from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from minddp.train.launch import check_before_start, parse
from minddp.train.settings import GPTOptions, Settings, SettingsError, WrapperOptions
from tests.train.runs import command_line, tiny


def test_the_command_line_makes_the_settings(tmp_path: Path) -> None:
    settings = tiny(
        tmp_path, ddp="torch", wrapper=WrapperOptions(bucket_cap_mb=0.5, static_graph=True), overwrite=True
    )
    assert parse(command_line(settings)) == settings


def test_only_changed_options_reach_the_wrapper() -> None:
    assert WrapperOptions().chosen() == {}
    chosen = WrapperOptions(bucket_cap_mb=3, broadcast_buffers=False).chosen()
    assert chosen == {"bucket_cap_mb": 3, "broadcast_buffers": False}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 0}, "--steps must be at least 1, but is 0"),
        ({"minutes": -1.0}, "--minutes must be a positive"),
        ({"minutes": float("nan")}, "--minutes must be a positive"),
        ({"nproc": 0}, "--nproc must be at least 1"),
        ({"learning_rate": float("inf")}, "--learning-rate must be a positive, finite"),
        ({"final_fraction": 1.5}, "--final-fraction must lie between 0 and 1"),
        ({"weight_decay": -0.1}, "--weight-decay must not be negative"),
        ({"seed": -1}, "--seed"),
        ({"gpt": GPTOptions(dropout=1.0)}, "--dropout"),
        ({"gpt": GPTOptions(width=100, heads=3)}, "--width 100 does not split into --heads 3"),
        ({"resume": True, "overwrite": True}, "--resume and --overwrite exclude"),
        ({"task": "digits", "gpt": GPTOptions(layers=2, width=64)}, "--layers, --width"),
        ({"ddp": "none", "wrapper": WrapperOptions(static_graph=True)}, "no use for --static-graph"),
        ({"wrapper": WrapperOptions(bucket_cap_mb=-2)}, "--bucket-cap-mb must not be negative"),
        ({"wrapper": WrapperOptions(bucket_cap_mb=1, bucket_cap_mb_list=(1, 2))}, "exclude each other"),
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


def test_an_option_that_the_wrapper_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OldWrapper:
        def __init__(self, module: object, bucket_cap_mb: float | None = None) -> None: ...

    with pytest.raises(SettingsError, match="no option transport"):
        check_before_start(tiny(tmp_path, ddp="torch", wrapper=WrapperOptions(transport="nccl")))
    monkeypatch.setattr("minddp.train.wrap.wrapper_class", lambda name: OldWrapper)
    with pytest.raises(SettingsError, match="no option batched_grad_copy"):
        check_before_start(tiny(tmp_path, ddp="torch", wrapper=WrapperOptions(batched_grad_copy=True)))


def test_several_ranks_without_a_wrapper(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="the models of 2 ranks would drift apart"):
        check_before_start(tiny(tmp_path, ddp="none", nproc=2))


def test_more_cuda_ranks_than_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SettingsError, match=r"needs a device for each of the 3 ranks.* has 1.*--nproc 1"):
        check_before_start(tiny(tmp_path, ddp="torch", device="cuda", nproc=3))


def test_the_number_of_ranks_is_torchruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name, value in {**dict.fromkeys(names, "0"), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    check_before_start(tiny(tmp_path, ddp="torch"))
    with pytest.raises(SettingsError, match="--nproc 2, but torchrun has started 4"):
        check_before_start(tiny(tmp_path, ddp="torch", nproc=2))
    with pytest.raises(SettingsError, match="the models of 4 ranks would drift apart"):
        check_before_start(tiny(tmp_path, ddp="none"))


def test_a_missing_extra_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    settings = dataclasses.replace(Settings(task="digits", ddp="torch"), out=tmp_path)
    with pytest.raises(SettingsError, match=r'pip install "minddp\[digits\]"'):
        check_before_start(settings)


def test_more_than_the_data_can_give(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="do not fill one batch of 200000 on each of 2 ranks"):
        check_before_start(tiny(tmp_path, ddp="torch", batch_size=200_000))
    with pytest.raises(SettingsError, match="--context 200000 is longer than the held-out text"):
        check_before_start(tiny(tmp_path, ddp="torch", gpt=GPTOptions(context=200_000, corpus_mib=1)))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_a_file_that_is_no_checkpoint(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"step": 3}, path) if content is None else path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"checkpoint\.pt is no checkpoint of this recipe"):
        check_before_start(tiny(tmp_path, ddp="torch", resume=True))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SettingsError, match="Cannot make the folder"):
        check_before_start(tiny(tmp_path / "file" / "run", ddp="torch"))
