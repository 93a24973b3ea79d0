"""Lightning's Trainer with torch's DDP, accumulation and clipping."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 7))

    def training_step(self, batch, number):
        return cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(128, 12), torch.randint(0, 7, (128,)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=8,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Lit(), DataLoader(data, batch_size=4))


if __name__ == "__main__":
    main()
