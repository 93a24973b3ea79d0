"""Classes that are wrong, each in its own way. The grader must tell each from the others."""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Right(nn.Module):
    """The base of the wrong ones: one message per parameter, after backward."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.params = [param for param in module.parameters() if param.requires_grad]
        self.n = dist.get_world_size()
        for tensor in self.broadcast_at_start():
            dist.broadcast(tensor.data, src=0)

    def broadcast_at_start(self) -> list[Tensor]:
        return [*self.module.parameters(), *self.module.buffers()]

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def no_sync(self) -> Any:
        return nullcontext()

    def synchronize(self) -> None:
        for param in self.params:
            self.reduce(param)

    def reduce(self, param: nn.Parameter) -> None:
        dist.all_reduce(param.grad)
        param.grad /= self.n


class StartsUnequal(Right):
    def broadcast_at_start(self) -> list[Tensor]:
        return []


class StartsWithOwnBuffers(Right):
    def broadcast_at_start(self) -> list[Tensor]:
        return [*self.module.parameters()]


class ChangesTheOutput(Right):
    def forward(self, *args: Any) -> Any:
        return self.module(*args) / self.n


class SendsNothing(Right):
    def synchronize(self) -> None:
        pass


class AveragesACopy(Right):
    def reduce(self, param: nn.Parameter) -> None:
        dist.all_reduce(param.grad / self.n)


class AveragesTheParameter(Right):
    def reduce(self, param: nn.Parameter) -> None:
        dist.all_reduce(param.data)
        param.data /= self.n


class ForgetsTheLast(Right):
    def synchronize(self) -> None:
        for param in self.params[:-1]:
            self.reduce(param)


class Sums(Right):
    def reduce(self, param: nn.Parameter) -> None:
        dist.all_reduce(param.grad)


class DividesTwice(Right):
    def reduce(self, param: nn.Parameter) -> None:
        param.grad /= self.n
        super().reduce(param)


class BroadcastsTheGradient(Right):
    def reduce(self, param: nn.Parameter) -> None:
        dist.broadcast(param.grad, src=0)


class Rounds(Right):
    def reduce(self, param: nn.Parameter) -> None:
        half = param.grad.bfloat16()
        dist.all_reduce(half)
        param.grad.copy_(half / self.n)


class ClearsGradients(Right):
    def reduce(self, param: nn.Parameter) -> None:
        super().reduce(param)
        param.grad = None


class DoesNotWait(Right):
    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.works: list[Any] = []

    def synchronize(self) -> None:
        for work in self.works:  # of the step before: a step late
            work.wait()
        self.works = []
        for param in self.params:
            param.grad /= self.n
            self.works.append(dist.all_reduce(param.grad, async_op=True))
        if dist.get_rank() != 0:
            for work in self.works:
                work.wait()


class RightOnce(Right):
    steps = 0

    def synchronize(self) -> None:
        self.steps += 1
        if self.steps == 1:
            super().synchronize()


class StartsUnequalAndSendsBuffers(StartsUnequal):
    """Before each forward, as torch's does."""

    def forward(self, *args: Any) -> Any:
        for buffer in self.module.buffers():
            dist.broadcast(buffer, src=0)
        return super().forward(*args)


class RightOnceOnRank1(RightOnce):
    def synchronize(self) -> None:
        own = [param.grad.clone() for param in self.params]
        Right.synchronize(self)
        self.steps += 1
        if self.steps > 1 and dist.get_rank() == 1:
            for param, grad in zip(self.params, own, strict=True):
                param.grad = grad


class AveragesTheIncoming(SendsNothing):
    """Under `no_sync` and not: as the trap of docs/learning does."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.synchronizing = True
        for param in self.params:
            param.register_hook(self.on_incoming)

    def on_incoming(self, grad: Tensor) -> Tensor:
        if self.synchronizing:
            grad = grad / self.n
            dist.all_reduce(grad)
        return grad

    @contextmanager
    def no_sync(self) -> Any:
        self.synchronizing = False
        yield
        self.synchronizing = True


class ForgetsTheFirstMicroBatch(Right):
    @contextmanager
    def no_sync(self) -> Any:
        yield
        for param in self.params:
            param.grad = None


class ForgetsAllButTwoMicroBatches(Right):
    @contextmanager
    def no_sync(self) -> Any:
        for param in self.params:
            param.grad = None
        yield


class SumsEveryMicroBatch(Right):
    @contextmanager
    def no_sync(self) -> Any:
        yield
        for param in self.params:
            dist.all_reduce(param.grad)


class DividesTiedTwice(Right):
    def synchronize(self) -> None:
        super().synchronize()
        for _, param in [*self.module.named_parameters(remove_duplicate=False)]:
            shared = [p for _, p in self.module.named_parameters(remove_duplicate=False) if p is param]
            if len(shared) > 1:
                param.grad /= self.n


class TouchesFrozen(Right):
    def synchronize(self) -> None:
        super().synchronize()
        for param in self.module.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)


class LaunchesWhenReady(SendsNothing):
    def __init__(self, module: nn.Module):
        super().__init__(module)
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.reduce)


class RaisesWhenWrapped(Right):
    def __init__(self, module: nn.Module):
        super().__init__(module)
        raise ValueError("not today")


class Dies(Right):
    def synchronize(self) -> None:
        os._exit(3)


class Hangs(Right):
    """Rank 0 leaves its last message out; the others wait for it."""

    def synchronize(self) -> None:
        for param in self.params[: -1 if dist.get_rank() == 0 else None]:
            self.reduce(param)


class Buckets(Right):
    """Of 25 MiB, launched in their order, and unpacked after backward. A wrong one differs by a method."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.plan = self.planned(self.params[::-1])
        self.synchronizing = True
        self.reset()
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.on_grad)

    def planned(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        plan: list[list[nn.Parameter]] = [[]]
        for param in params:
            if sum(each.nbytes for each in plan[-1]) >= 25 * 2**20:
                plan.append([])
            plan[-1].append(param)
        return plan

    def reset(self) -> None:
        self.missing = [{*bucket} for bucket in self.plan]
        self.flights: list[tuple[list[nn.Parameter], Tensor, Any]] = []

    @contextmanager
    def no_sync(self) -> Any:
        self.synchronizing = False
        yield
        self.synchronizing = True

    def on_grad(self, param: nn.Parameter) -> None:
        if self.synchronizing:
            for missing in self.missing:
                missing.discard(param)
            self.launch_ready()

    def launch_ready(self) -> None:
        while len(self.flights) < len(self.plan) and not self.missing[len(self.flights)]:
            self.launch(self.plan[len(self.flights)])

    def launch(self, bucket: list[nn.Parameter]) -> None:
        buffer = torch.cat([param.grad.reshape(-1) for param in bucket]) / self.n
        self.flights.append((bucket, buffer, dist.all_reduce(buffer, async_op=True)))

    def synchronize(self) -> None:
        for flight in self.flights:
            self.land(*flight)
        self.reset()

    def land(self, bucket: list[nn.Parameter], buffer: Tensor, work: Any) -> None:
        work.wait()
        for param, part in zip(bucket, buffer.split([param.numel() for param in bucket]), strict=True):
            param.grad.copy_(part.view_as(param))


class UnpacksTheFirstBucket(Buckets):
    def land(self, bucket: list[nn.Parameter], buffer: Tensor, work: Any) -> None:
        if bucket is self.plan[0]:
            super().land(bucket, buffer, work)
        work.wait()


class LaunchesBucketsWhenReady(Buckets):
    def launch_ready(self) -> None:
        launched = [bucket for bucket, *_ in self.flights]
        for bucket, missing in zip(self.plan, self.missing, strict=True):
            if not missing and not any(bucket is each for each in launched):
                self.launch(bucket)


class MisplacesTheSecondDtype(Buckets):
    def land(self, bucket: list[nn.Parameter], buffer: Tensor, work: Any) -> None:
        super().land(bucket, buffer, work)
        start = 0
        for param in bucket:
            if param.dtype != bucket[0].dtype:
                param.grad.copy_(buffer[start - 1 :][: param.numel()].view_as(param))
            start += param.numel()


class SendsStaleWhereUnused(Right):
    """A parameter that is unused on this rank sends what is left in its buffer."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.buffer_of = {param: torch.zeros_like(param) for param in self.params}

    def reduce(self, param: nn.Parameter) -> None:
        buffer = self.buffer_of[param]
        if param.grad is not None:
            buffer.copy_(param.grad)
        dist.all_reduce(buffer)
        buffer /= self.n
        param.grad = buffer.clone()


class SendsUnderTheSecondNoSync(Right):
    times = 0

    @contextmanager
    def no_sync(self) -> Any:
        yield
        self.times += 1
        if self.times % 2 == 0:
            self.synchronize()


class Pairs(Buckets):
    """A bucket holds two parameters."""

    def planned(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        return [params[start : start + 2] for start in range(0, len(params), 2)]


class LeavesOutTheRemainder(Pairs):
    def planned(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        return [bucket for bucket in super().planned(params) if len(bucket) == 2]


class WaitsForAllButOne(Pairs):
    def land(self, bucket: list[nn.Parameter], buffer: Tensor, work: Any) -> None:
        if bucket is self.plan[-1]:
            work = SimpleNamespace(wait=lambda: None)
        super().land(bucket, buffer, work)


class LaunchesUnlikeBucketsWhenReady(LaunchesBucketsWhenReady):
    """A process ends where messages of different sizes meet."""

    def planned(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        return [bucket for bucket in (params[:3], params[3:]) if bucket]
