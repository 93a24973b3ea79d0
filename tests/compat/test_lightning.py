"""Lightning's Trainer with DDPStrategy, automatic and manual optimization, and Fabric."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from tests.compat.both import Trained, batches, expect_same_bits, tiny_model

pytestmark = pytest.mark.skipif(
    find_spec("pytorch_lightning") is None, reason="needs Lightning: pip install pytorch-lightning"
)


def lit_model(manual: bool) -> Any:
    """A LightningModule; the class is made here since importing Lightning takes seconds."""
    import pytorch_lightning as pl

    class LitModel(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_model()
            self.automatic_optimization = not manual
            self.wrapper: type | None = None

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            self.wrapper = type(self.trainer.strategy.model)
            loss = mse_loss(self.model(batch[0]), batch[1])
            if manual:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return LitModel()


def trainer_run(rank: int, folder: str, manual: bool, accumulate: int, options: dict[str, Any]) -> Trained:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy

    module = lit_model(manual)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(**options),
        max_steps=4,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=None if manual else 1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(batches(0, 20), batch_size=None, num_workers=0, sampler=range(rank, 20, 2)))
    assert trainer.global_step == 4
    checkpoint = Path(folder, f"{module.wrapper.__module__}.ckpt")
    trainer.save_checkpoint(checkpoint)
    saved = torch.load(checkpoint, weights_only=False)
    assert not any("module." in key for key in saved["state_dict"])
    return Trained(module.wrapper, module, [trainer.optimizers[0].state_dict(), saved["state_dict"]])


@pytest.mark.parametrize(
    ("accumulate", "options"),
    [
        (2, {}),
        (2, {"find_unused_parameters": True}),
        (1, {"static_graph": True, "gradient_as_bucket_view": True}),  # torch's cannot begin with no_sync here
    ],
)
def test_the_trainer_optimizes(pair, tmp_path: Path, accumulate: int, options: dict[str, Any]) -> None:
    expect_same_bits(pair, trainer_run, str(tmp_path), False, accumulate, options)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_the_module_optimizes_by_hand(pair, tmp_path: Path, options: dict[str, Any]) -> None:
    """Lightning then keeps the forward from preparing the reduction, and prepares it itself before the backward."""
    expect_same_bits(pair, trainer_run, str(tmp_path), True, 1, options)


def fabric_run(rank: int) -> Trained:
    """Fabric: a loop of one's own, with accumulation."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = tiny_model()
    wrapped, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for number, (inputs, targets) in enumerate(batches(rank, 8)):
        accumulating = number % 2 == 0
        with fabric.no_backward_sync(wrapped, enabled=accumulating):
            fabric.backward(mse_loss(wrapped(inputs), targets))
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
    keys = set(fabric.strategy.get_module_state_dict(wrapped._forward_module))
    assert keys == set(model.state_dict())
    return Trained(type(wrapped._forward_module), model, optimizer.optimizer.state_dict())


def test_fabric(pair) -> None:
    expect_same_bits(pair, fabric_run)
