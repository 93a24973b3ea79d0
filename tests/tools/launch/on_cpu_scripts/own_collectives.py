"""No wrapper at all: its own optimizer and collectives, torch.accelerator, events, numbers as devices."""

import os
import subprocess

import torch
import torch.distributed as dist
from digest import print_digest
from torch import nn
from torch.backends.cuda import enable_cudnn_sdp, enable_flash_sdp, enable_math_sdp
from torch.nn import functional as F

assert torch.accelerator.is_available()
local_rank = int(os.environ["LOCAL_RANK"])
torch.accelerator.set_device_index(local_rank)
accelerator = torch.accelerator.current_accelerator()
dist.init_process_group(torch.distributed.get_default_backend_for_device(accelerator))
dist.barrier()
subprocess.run(["nvidia-smi"], check=True, capture_output=True)
enable_cudnn_sdp(True)
enable_flash_sdp(False)
enable_math_sdp(False)


@torch.compile
def orthogonal(gradient):
    x = gradient.bfloat16() / (gradient.norm() + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x.to(gradient.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False, device=local_rank)

    def forward(self, x):
        x = self.inner(x)
        return F.scaled_dot_product_attention(x, x, x)


torch.manual_seed(local_rank)
model = torch.compile(Attention().to(local_rank), dynamic=False)
for param in model.parameters():
    dist.broadcast(param.detach(), 0)
tokens = torch.empty(64, dtype=torch.uint16, pin_memory=True)
tokens.numpy()[:] = range(64 * local_rank, 64 * local_rank + 64)
start, end = torch.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
for step in range(3):
    inputs = tokens.to(device="cuda", dtype=torch.float32, non_blocking=True).view(2, 4, 8) / (step + 64)
    model(inputs).square().mean().backward()
    works = [dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, async_op=True).get_future() for p in model.parameters()]
    torch.futures.collect_all(works).wait()
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(orthogonal(param.grad), alpha=0.1)
            param.grad = None
end.record()
torch.accelerator.synchronize()
assert start.elapsed_time(end) > 0
assert not torch.accelerator.current_stream().is_capturing()
print_digest(dist.get_rank(), model)
dist.destroy_process_group()
