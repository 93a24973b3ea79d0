"""A language model, all at module level: accumulation, float16 with a scaler, torch.compile, pinned batches."""

import os
from contextlib import nullcontext

import torch
from digest import print_digest
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

init_process_group(backend="nccl")
rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
device = f"cuda:{local_rank}"
torch.cuda.set_device(device)
assert torch.cuda.current_device() == local_rank
assert torch.cuda.is_bf16_supported()
torch.manual_seed(1337 + rank)
torch.cuda.manual_seed(0)
assert torch.initial_seed() == 1337 + rank
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
device_type = "cuda" if "cuda" in device else "cpu"
half = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=torch.float16)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.project = nn.Linear(16, 48)
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], dtype=torch.long, device=tokens.device)
        query, key, value = self.project(self.embedding(tokens + positions)).split(16, dim=2)
        return self.head(F.scaled_dot_product_attention(query, key, value, is_causal=True))


model = Model()
model.to(device)
scaler = torch.cuda.amp.GradScaler(enabled=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=device_type == "cuda")
kept = model
model = torch.compile(model)
assert model._orig_mod is kept
assert all(key.startswith("_orig_mod.") for key in model.state_dict())
model = DDP(model, device_ids=[local_rank])
data = torch.randint(40, (400,))


def batch():
    starts = torch.randint(len(data) - 9, (4,))
    rows = torch.stack([data[start : start + 9] for start in starts]).pin_memory()
    return rows[:, :-1].to(device, non_blocking=True), rows[:, 1:].to(device, non_blocking=True)


for _step in range(3):
    for micro_step in range(2):
        model.require_backward_grad_sync = micro_step == 1
        tokens, targets = batch()
        with half:
            assert torch.is_autocast_enabled()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
torch.cuda.synchronize()
print_digest(rank, model)
destroy_process_group()
