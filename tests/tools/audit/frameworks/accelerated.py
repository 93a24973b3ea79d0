"""Accelerate with accumulation."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = TensorDataset(torch.randn(128, 12), torch.randint(0, 7, (128,)))
    model = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 7))
    parts = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=4))
    net, optimizer, loader = parts
    for x, y in loader:
        with accelerator.accumulate(net):
            accelerator.backward(cross_entropy(net(x), y))
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
