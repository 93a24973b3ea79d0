"""What scripts do with gradients and wrappers, run with both classes: none of it may show a difference.

Each script is one habit of training loops, kept up for some steps: under the first plan and under the final one.
The model has gradients large enough to be aliased, and others that are too small ([Note: gradient aliasing]).
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import minddp
from tests.features.beside import Snapshot, Steps, Trail, Wrap, assert_same, play, random, snapshot

Script = Callable[..., Steps]

WIDTH = 128  # a weight of 128 x 128 floats is just large enough to be aliased
STEPS = 6
CALM_STEPS = 3  # before something changes: one per plan, and one more


def layers() -> nn.Sequential:
    """Two layers with large weights and one with a small one. All begin where a fresh allocation could."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 16)
    )


def loss_of(ddp: Any, rank: int, step: int) -> torch.Tensor:
    return ddp(random(4, WIDTH, rank=rank, step=step)).square().sum()


def losses(ddp: Any, rank: int) -> Iterator[tuple[int, torch.Tensor]]:
    """`(step, loss)` of each step, which begins without gradients."""
    for step in range(STEPS):
        ddp.zero_grad()
        yield step, loss_of(ddp, rank, step)


def trained(ddp: Any, rank: int) -> Steps:
    """Ordinary steps."""
    for _step, loss in losses(ddp, rank):
        loss.backward()
        yield snapshot(ddp)


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in module.parameters() if param.grad is not None]


def hook_all(ddp: nn.Module, hook: Callable[[Any], object]) -> None:
    for param in ddp.parameters():
        param.register_post_accumulate_grad_hook(hook)


def descend(ddp: nn.Module) -> None:
    for param, grad in zip(ddp.parameters(), grads(ddp), strict=True):
        param.data -= 0.01 * grad


def numbered(tensors: Sequence[torch.Tensor]) -> Snapshot:
    return {str(number): tensor.detach().clone() for number, tensor in enumerate(tensors)}


# ------------------------------------------------------------------ autograd.grad, and several backwards


def asks_for_gradients(wrap: Wrap, rank: int, of: str, and_goes_back: bool = True) -> Steps:
    """`autograd.grad` after a forward of the wrapper."""
    ddp = wrap(layers())
    for step in range(STEPS):
        ddp.zero_grad()
        x = random(4, WIDTH, rank=rank, step=step).requires_grad_()
        loss = ddp(x).square().sum()
        asked: Sequence[torch.Tensor] = []
        if step >= CALM_STEPS:
            wanted = [x] if of == "input" else list(ddp.parameters())
            asked = torch.autograd.grad(loss, wanted, retain_graph=True)
        if step < CALM_STEPS or and_goes_back:
            loss.backward()
        yield snapshot(ddp) | numbered(asked)


def penalises_slopes(wrap: Wrap, rank: int) -> Steps:
    """A backward through the gradient of the loss by the input."""
    ddp = wrap(layers())
    for step in range(STEPS):
        ddp.zero_grad()
        x = random(4, WIDTH, rank=rank, step=step).requires_grad_()
        loss = ddp(x).square().sum()
        if step >= CALM_STEPS:
            [slope] = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        loss.backward()
        yield snapshot(ddp)


def goes_back_twice(wrap: Wrap, rank: int) -> Steps:
    """A second backward through a retained graph stays local."""
    ddp = wrap(layers())
    for step, loss in losses(ddp, rank):
        loss.backward(retain_graph=step >= CALM_STEPS)
        yield snapshot(ddp)
        if step >= CALM_STEPS:
            loss.backward()
            yield snapshot(ddp)


def goes_forward_twice(wrap: Wrap, rank: int) -> Steps:
    """Two forwards, then their backwards."""
    ddp = wrap(layers())
    for step, loss in losses(ddp, rank):
        for each in [loss, loss_of(ddp, rank, step + STEPS)]:
            each.backward()
            yield snapshot(ddp)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


def goes_back_in_parts(wrap: Wrap, rank: int) -> Steps:
    """One backward for each output. Nothing reaches `.grad` before all gradients have come."""
    ddp = wrap(Heads())
    for step in range(STEPS):
        ddp.zero_grad()
        for output in ddp(random(4, WIDTH, rank=rank, step=step)):
            output.square().sum().backward()
            yield snapshot(ddp)


def uses_a_layer_by_itself(wrap: Wrap, rank: int) -> Steps:
    """A local backward through the layer whose gradients come first; the script keeps these gradients."""
    ddp, kept = wrap(layers()), []
    for step in range(STEPS):
        ddp.zero_grad()
        if step >= CALM_STEPS:
            loss_of(ddp.module[-1], rank, step + STEPS).backward()
            kept.append(ddp.module[-1].weight.grad.detach())
        loss_of(ddp, rank, step).backward()
        yield snapshot(ddp)
    yield numbered(kept)


# ------------------------------------------------------------------ gradients over several steps


def zeroes(wrap: Wrap, rank: int, how: str) -> Steps:
    """`set_to_none` in various orders; None is a step without zero_grad."""
    ddp = wrap(layers())
    for step in range(STEPS + 2):
        set_to_none = {
            "in place": False,
            "in place at first": step >= CALM_STEPS,
            "in place later": step < CALM_STEPS,
            "in place by turns": step % 2 == 1,
            "once": True if step == CALM_STEPS else None,
        }[how]
        if set_to_none is not None:
            ddp.zero_grad(set_to_none=set_to_none)
        loss_of(ddp, rank, step).backward()
        yield snapshot(ddp)


#: Ways of holding on to a gradient, and how to look at it later where it is no tensor any more.
ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "gradients": lambda grad: grad,
    "data": lambda grad: grad.data,
    "detached": lambda grad: grad.detach(),
    "flat views": lambda grad: grad.view(-1),
    "rows": lambda grad: grad[0],
    "storages": lambda grad: (grad.untyped_storage(), grad.storage_offset(), grad.size()),
    "arrays": lambda grad: grad.numpy(),
    "memoryviews": lambda grad: grad.numpy().data,
    "arrays by dlpack": lambda grad: np.from_dlpack(grad),
    "dlpacks": lambda grad: torch.utils.dlpack.to_dlpack(grad),
}
READERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "storages": lambda kept: torch.empty(0).set_(*kept),
    "arrays": torch.from_numpy,
    "memoryviews": lambda kept: torch.from_numpy(np.asarray(kept)),
    "arrays by dlpack": torch.from_numpy,
    "dlpacks": torch.utils.dlpack.from_dlpack,
}


def read(how: str, kept: Sequence[Any]) -> Snapshot:
    return numbered([READERS.get(how, torch.as_tensor)(item) for item in kept])


def keeps(wrap: Wrap, rank: int, how: str) -> Steps:
    """The gradients of all steps, looked at after the last."""
    ddp, kept = wrap(layers()), []
    for taken in trained(ddp, rank):
        yield taken
        kept += [ALIASES[how](grad) for grad in grads(ddp)]
        descend(ddp)
    yield read(how, kept)


def keeps_in_a_graph(wrap: Wrap, rank: int) -> Steps:
    """A graph needs the gradient for its own backward, which comes after that of the next step."""
    ddp = wrap(layers())
    factor = torch.ones(WIDTH, WIDTH, requires_grad=True)
    product = None
    for _step, loss in losses(ddp, rank):
        loss.backward()
        factor.grad = None
        if product is not None:
            product.backward()
        yield snapshot(ddp) | {"factor": factor.grad}
        product = (ddp.module[0].weight.grad * factor).sum()


def watches_gradients_go(wrap: Wrap, rank: int, small: bool = False) -> Steps:
    """A weak reference to a gradient is dead after zero_grad, also to a small one: nothing else refers to it."""
    ddp = wrap(narrow() if small else layers())
    for _step, loss in losses(ddp, rank):
        loss.backward()
        references = [weakref.ref(grad) for grad in grads(ddp)]
        ddp.zero_grad()
        yield {"gone": torch.tensor([reference() is None for reference in references])}


# ------------------------------------------------------------------ hooks on parameters


def keeps_in_hooks(wrap: Wrap, rank: int, how: str) -> Steps:
    """A hook keeps `.grad` or its memory: when backward has ended, the average is there."""
    ddp = wrap(layers())
    seen: list[Any] = []
    hook_all(ddp, lambda param: seen.append(ALIASES[how](param.grad)))
    for taken in trained(ddp, rank):
        yield taken
        yield read(how, seen)
        seen.clear()


def keeps_what_arrives(wrap: Wrap, rank: int) -> Steps:
    """A hook keeps what is on its way to the parameter, and may become its `.grad`."""
    ddp, kept = wrap(layers()), []
    for param in ddp.parameters():
        param.register_hook(lambda grad: kept.append(grad))
    yield from trained(ddp, rank)
    yield numbered(kept)


def changes_what_arrives(wrap: Wrap, rank: int) -> Steps:
    ddp = wrap(layers())
    for param in ddp.parameters():
        param.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    yield from trained(ddp, rank)


def scales_in_hooks(wrap: Wrap, rank: int) -> Steps:
    """A hook puts another tensor in the place of `.grad`."""
    ddp = wrap(layers())

    def scale(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad = param.grad * 0.5

    hook_all(ddp, scale)
    yield from trained(ddp, rank)


def looks_from_accumulators(wrap: Wrap, rank: int) -> Steps:
    """Hooks on the accumulators, beside DDP's own, see what this rank has computed."""
    ddp = wrap(layers())
    seen: list[torch.Tensor] = []
    nodes = [get_gradient_edge(param).node for param in ddp.parameters()]
    for node, param in zip(nodes, ddp.parameters(), strict=True):
        node.register_hook(lambda *_, param=param: seen.append(param.grad.clone()))
    for taken in trained(ddp, rank):
        yield taken | numbered(seen)
        seen.clear()


def looks_at_others(wrap: Wrap, rank: int) -> Steps:
    """The hook that comes last looks at gradients that have been packed, and perhaps reduced, before."""
    ddp = wrap(layers())
    seen: list[torch.Tensor] = []
    ddp.module[0].weight.register_post_accumulate_grad_hook(
        lambda _: seen.extend(grad.clone() for grad in grads(ddp))
    )
    for taken in trained(ddp, rank):
        yield taken | numbered(seen)
        seen.clear()


def flattens(wrap: Wrap, rank: int, wraps_first: bool) -> Steps:
    """Hooks move each gradient into one flat buffer. DDP's own hooks are there before them, or after."""
    module = layers()
    ddp = wrap(module) if wraps_first else None
    params = list(module.parameters())
    flat = torch.zeros(sum(param.numel() for param in params))
    for param, place in zip(params, flat.split([param.numel() for param in params]), strict=True):

        def move(param: torch.Tensor, place: torch.Tensor = place) -> None:
            assert param.grad is not None
            place.view_as(param).copy_(param.grad)
            param.grad = place.view_as(param)

        param.register_post_accumulate_grad_hook(move)
    for taken in trained(ddp or wrap(module), rank):
        yield taken | {"flat": flat.clone()}


def accumulates_into_its_own_memory(wrap: Wrap, rank: int) -> Steps:
    """The `.grad` of the only parameter is a view of the script's buffer from before each backward."""
    ddp = wrap(nn.Linear(WIDTH, WIDTH, bias=False))
    flat = torch.zeros(WIDTH * WIDTH)
    for step in range(STEPS):
        flat.zero_()
        ddp.module.weight.grad = flat.view(WIDTH, WIDTH)
        loss_of(ddp, rank, step).backward()
        yield snapshot(ddp, flat=flat)


# ------------------------------------------------------------------ what is done to gradients between steps


def put_data(param: Any) -> None:
    param.grad.data = param.grad.data * 0.5


def set_memory(param: Any) -> None:
    param.grad.set_(param.grad.clone())


def replace(param: Any) -> None:
    param.grad = param.grad * 0.5


def detach(param: Any) -> None:
    param.grad = param.grad.detach()


def transpose(param: Any) -> None:
    param.grad.t_()


def unsqueeze(param: Any) -> None:
    param.grad.unsqueeze_(0)


def require_grad(param: Any) -> None:
    param.grad.requires_grad_()


def mark(param: Any) -> None:
    param.grad.mark = True


def handles(wrap: Wrap, rank: int, what: Callable[[Any], None], zeroing: bool = True) -> Steps:
    """After each step, `what` is done to each parameter's gradient."""
    ddp = wrap(layers())
    for step in range(STEPS):
        if zeroing:
            ddp.zero_grad()
        loss_of(ddp, rank, step).backward()
        traces = torch.tensor([[hasattr(grad, "mark"), grad.requires_grad] for grad in grads(ddp)])
        yield snapshot(ddp, traces=traces)
        for param in ddp.parameters():
            what(param)
        yield snapshot(ddp)


# ------------------------------------------------------------------ several wrappers


def shares_a_weight(wrap: Wrap, rank: int, to_none: bool = True) -> Steps:
    """Between two wrappers: each of them averages it. Where it stays, it lies in the first one's bucket."""
    one, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    other.weight = one.weight
    first, second = wrap(one), wrap(other)
    for step in range(STEPS):
        first.zero_grad(set_to_none=to_none)
        second.zero_grad(set_to_none=to_none)
        loss_of(lambda x: second(torch.tanh(first(x))), rank, step).backward()
        yield snapshot(first)
        yield snapshot(second)


def wraps_within(wrap: Wrap, rank: int) -> Steps:
    module = layers()
    module[0] = wrap(module[0])
    yield from trained(wrap(module), rank)


def wraps_parts(wrap: Wrap, rank: int) -> Steps:
    module = layers()
    for index in (0, 2, 4):
        module[index] = wrap(module[index])
    yield from trained(module, rank)


def ties_weights(wrap: Wrap, rank: int) -> Steps:
    module = layers()
    module[2].weight = module[0].weight
    ddp = wrap(module)
    for taken in trained(ddp, rank):
        yield taken
        descend(ddp)


# ------------------------------------------------------------------ what changes on the way


def freezes(wrap: Wrap, rank: int) -> Steps:
    """A layer, for two steps."""
    ddp = wrap(layers())
    for step in range(STEPS + 2):
        ddp.module[0].requires_grad_(step not in (CALM_STEPS, CALM_STEPS + 1))
        ddp.zero_grad()
        loss_of(ddp, rank, step).backward()
        yield snapshot(ddp)


def turns_channels_last(wrap: Wrap, rank: int, turn: int) -> Steps:
    """Before step `turn`, so that gradients have other strides than in the step before."""
    ddp = wrap(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 16, 3, padding=1)))
    for step in range(STEPS):
        ddp.zero_grad()
        if step == turn:
            ddp.to(memory_format=torch.channels_last)
        layout = torch.channels_last if step >= turn else torch.contiguous_format
        ddp(random(2, 64, 4, 4, rank=rank, step=step).to(memory_format=layout)).square().sum().backward()
        yield snapshot(ddp)


def moves_parameters(wrap: Wrap, rank: int) -> Steps:
    """To other memory, by `.data`: under the first plan and under the final one."""
    ddp = wrap(layers())
    for step, taken in enumerate(trained(ddp, rank)):
        yield taken
        if step in (0, CALM_STEPS):
            for param in ddp.parameters():
                param.data = param.data.clone()


class Blown(Exception):
    """Of a `Fuse`."""


class Fuse(torch.autograd.Function):
    """The identity. Its backward raises while it is `lit`."""

    lit = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        if Fuse.lit:
            raise Blown
        return grads[0]


class Fused(nn.Sequential):
    """Layers, with a fuse after the first and its activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self):
            x = layer(x if index != 2 else Fuse.apply(x))
        return x


def after_exception(wrap: Wrap, ddp: Any) -> Any:
    """The wrapper to go on with. Torch's is of no use any more, and a new one takes its place. minddp's goes on."""
    if isinstance(ddp, minddp.DistributedDataParallel):
        return ddp
    ddp._remove_autograd_hooks()
    return wrap(ddp.module)


def survives_an_exception(wrap: Wrap, rank: int, zeroing: bool) -> Steps:
    """In the middle of backward: the gradients so far are what this rank has computed, reduced or not."""
    ddp = wrap(Fused(*layers()))
    for step in range(STEPS + 2):
        if zeroing or step <= CALM_STEPS:
            ddp.zero_grad()
        Fuse.lit = step == CALM_STEPS
        try:
            loss_of(ddp, rank, step).backward()
        except Blown:
            ddp = after_exception(wrap, ddp)
        finally:
            Fuse.lit = False
        yield snapshot(ddp)


# ------------------------------------------------------------------ many small gradients


def narrow() -> nn.Sequential:
    """Twenty layers, none of them large, together more than one run holds ([Note: packing in runs])."""
    return nn.Sequential(*(nn.Linear(WIDTH, 64) if index % 2 == 0 else nn.Linear(64, WIDTH) for index in range(20)))


def steps_in_hooks(wrap: Wrap, rank: int, to_none: bool) -> Steps:
    """An optimizer in backward: what arrives is used up before it can be reduced."""
    ddp = wrap(narrow())

    def step(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.data -= 0.01 * param.grad
        if to_none:
            param.grad = None
        else:
            param.grad.zero_()

    hook_all(ddp, step)
    yield from trained(ddp, rank)


def replaces_all_at_the_end(wrap: Wrap, rank: int, what: str) -> Steps:
    """The hook that comes last does something to each gradient that has been packed, except those of its layer."""
    ddp = wrap(layers())
    others = list(ddp.module[2:].parameters())

    def change(_param: torch.Tensor) -> None:
        for other in others:
            match what:
                case "clears":
                    other.grad.zero_()
                case "drops":
                    other.grad = None
                case "replaces":
                    other.grad = torch.zeros_like(other)
                case "wraps anew":
                    other.grad = other.grad.detach()
                case "puts data":
                    other.grad.data = torch.zeros_like(other)

    ddp.module[0].weight.register_post_accumulate_grad_hook(change)
    yield from trained(ddp, rank)


def accumulates(wrap: Wrap, rank: int, locally: Sequence[int]) -> Steps:
    """Under `no_sync` in some steps, and with the next one together."""
    ddp = wrap(narrow())
    for step in range(STEPS + 2):
        if step - 1 not in locally:
            ddp.zero_grad()
        with ddp.no_sync() if step in locally else nullcontext():
            loss_of(ddp, rank, step).backward()
        yield snapshot(ddp)


def restores(wrap: Wrap, rank: int, how: str) -> Steps:
    """From the middle on, hooks move what arrives into a tensor that was the gradient once, and now is again."""
    ddp = wrap(layers())
    kept: dict[torch.Tensor, torch.Tensor] = {}

    def restore(param: torch.Tensor) -> None:
        if param in kept:
            param.grad = kept[param].copy_(param.grad)

    hook_all(ddp, restore)
    for step, taken in enumerate(trained(ddp, rank)):
        yield taken
        if step == CALM_STEPS:
            kept = {param: ALIASES[how](param.grad) for param in ddp.parameters()}


class Checkpointed(nn.Module):
    """Layers of which the first half, but for the very first, is computed again in a nested backward."""

    def __init__(self, inner: nn.Sequential):
        super().__init__()
        self.inner = inner
        self.nests = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = len(self.inner) // 2
        x = self.inner[0](x)
        x = checkpoint(self.inner[1:half], x, use_reentrant=True) if self.nests else self.inner[1:half](x)
        return self.inner[half:](x)


def nests(wrap: Wrap, rank: int, model: Callable[[], nn.Sequential], begin: int) -> Steps:
    """Backwards, from step `begin` on."""
    ddp = wrap(Checkpointed(model()))
    for step in range(STEPS):
        ddp.zero_grad()
        ddp.module.nests = step >= begin
        loss_of(ddp, rank, step).backward()
        yield snapshot(ddp)


def reduces_by_a_hook(wrap: Wrap, rank: int, kinds: Sequence[str]) -> Steps:
    """A communication hook that gives the bucket's own tensor, a copy, or another tensor of the same memory."""
    ddp = wrap(narrow())
    kind = itertools.cycle(kinds)

    def reduced(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        gives = next(kind)

        def after(future: torch.futures.Future) -> torch.Tensor:
            [tensor] = future.value()
            return {"itself": tensor, "copy": tensor / 2, "alias": tensor[:]}[gives]

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(after)

    ddp.register_comm_hook(None, lambda _state, bucket: reduced(bucket))
    yield from trained(ddp, rank)


def runs_out_of_inputs(wrap: Wrap, rank: int) -> Steps:
    """One rank before the other, twice."""
    ddp = wrap(narrow())
    for _epoch in range(2):
        with ddp.join():
            for step in range(CALM_STEPS + rank):
                ddp.zero_grad()
                loss_of(ddp, rank, step).backward()
                yield snapshot(ddp)


def raises_in_hooks(wrap: Wrap, rank: int) -> Steps:
    """A hook fails when some gradients have arrived and are not packed; see `after_exception`."""
    ddp = wrap(narrow())
    is_lit = False

    def fail(_param: torch.Tensor) -> None:
        if is_lit:
            raise Blown

    ddp.module[2].bias.register_post_accumulate_grad_hook(fail)
    for step in range(STEPS + 2):
        ddp.zero_grad()
        is_lit = step == CALM_STEPS
        try:
            loss_of(ddp, rank, step).backward()
        except Blown:
            ddp = after_exception(wrap, ddp)
        yield snapshot(ddp)


# ------------------------------------------------------------------ the scripts, played

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "buckets": {"bucket_cap_mb": 0.1},  # several
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
}
ALL = "default buckets static unused views"
NO_VIEWS = "default buckets static unused"  # those show what is reduced so far, or torch raises or is wrong
LARGE = "default buckets"  # where gradients alias the bucket

SCRIPTS: dict[str, tuple[Script, str]] = {
    "asks for gradients of parameters": (partial(asks_for_gradients, of="parameters"), ALL),
    "asks for gradients of the input": (partial(asks_for_gradients, of="input"), ALL),
    "only asks for gradients": (partial(asks_for_gradients, of="parameters", and_goes_back=False), ALL),
    "penalises slopes": (penalises_slopes, ALL),
    "goes back twice": (goes_back_twice, ALL),
    "goes forward twice": (goes_forward_twice, ALL),
    "goes back in parts": (goes_back_in_parts, LARGE),
    "uses a layer by itself": (uses_a_layer_by_itself, ALL),
    "zeroes in place": (partial(zeroes, how="in place"), ALL),
    "zeroes in place at first": (partial(zeroes, how="in place at first"), ALL),
    "zeroes in place later": (partial(zeroes, how="in place later"), ALL),
    "zeroes in place by turns": (partial(zeroes, how="in place by turns"), ALL),
    "zeroes once": (partial(zeroes, how="once"), ALL),
    **{f"keeps {how}": (partial(keeps, how=how), LARGE) for how in ALIASES},
    "keeps in a graph": (keeps_in_a_graph, LARGE),
    "watches gradients go": (watches_gradients_go, LARGE),
    **{f"keeps {how} in hooks": (partial(keeps_in_hooks, how=how), LARGE) for how in ALIASES},
    "keeps what arrives": (keeps_what_arrives, ALL),
    "changes what arrives": (changes_what_arrives, ALL),
    "scales in hooks": (scales_in_hooks, NO_VIEWS),
    "looks from accumulators": (looks_from_accumulators, NO_VIEWS),
    "looks at others": (looks_at_others, NO_VIEWS),
    "clears all at the end": (partial(replaces_all_at_the_end, what="clears"), NO_VIEWS),
    "flattens before wrapping": (partial(flattens, wraps_first=False), NO_VIEWS),
    "flattens after wrapping": (partial(flattens, wraps_first=True), NO_VIEWS),
    "accumulates into its own memory": (accumulates_into_its_own_memory, ALL),
    "puts data": (partial(handles, what=put_data), NO_VIEWS),
    "puts data and accumulates": (partial(handles, what=put_data, zeroing=False), NO_VIEWS),
    "sets memory": (partial(handles, what=set_memory), NO_VIEWS),
    "sets memory and accumulates": (partial(handles, what=set_memory, zeroing=False), NO_VIEWS),
    "replaces": (partial(handles, what=replace), ALL),
    "replaces and accumulates": (partial(handles, what=replace, zeroing=False), ALL),
    "detaches": (partial(handles, what=detach), ALL),
    "detaches and accumulates": (partial(handles, what=detach, zeroing=False), ALL),
    "transposes": (partial(handles, what=transpose), NO_VIEWS),
    "unsqueezes": (partial(handles, what=unsqueeze), NO_VIEWS),
    "requires grad of gradients": (partial(handles, what=require_grad), ALL),
    "marks gradients": (partial(handles, what=mark), ALL),
    "shares a weight": (shares_a_weight, NO_VIEWS),
    "shares a weight and zeroes in place": (partial(shares_a_weight, to_none=False), NO_VIEWS),
    "wraps within": (wraps_within, NO_VIEWS),
    "wraps parts": (wraps_parts, ALL),
    "ties weights": (ties_weights, ALL),
    "freezes": (freezes, "unused"),
    "turns channels last early": (partial(turns_channels_last, turn=1), "default buckets views"),
    "turns channels last late": (partial(turns_channels_last, turn=CALM_STEPS), "views"),
    "moves parameters": (moves_parameters, ALL),
    "watches small gradients go": (partial(watches_gradients_go, small=True), ALL),
    "steps in hooks": (partial(steps_in_hooks, to_none=True), ALL),
    "steps in hooks and zeroes": (partial(steps_in_hooks, to_none=False), ALL),
    **{
        f"{what} all at the end": (partial(replaces_all_at_the_end, what=what), LARGE)
        for what in ("drops", "replaces", "wraps anew", "puts data")
    },
    "accumulates early": (partial(accumulates, locally=[1]), ALL),
    "accumulates late": (partial(accumulates, locally=[CALM_STEPS, CALM_STEPS + 1]), ALL),
    "accumulates by turns": (partial(accumulates, locally=range(1, STEPS, 2)), ALL),
    "nests": (partial(nests, model=narrow, begin=0), "default buckets static views"),
    "nests late": (partial(nests, model=layers, begin=CALM_STEPS), "default buckets views"),
    "nests late in several runs": (partial(nests, model=narrow, begin=CALM_STEPS), "default buckets static views"),
    "reduces by a hook": (partial(reduces_by_a_hook, kinds=["itself"]), ALL),
    "reduces by a hook that gives others": (partial(reduces_by_a_hook, kinds=["copy", "itself", "alias"]), ALL),
    "runs out of inputs": (runs_out_of_inputs, "default buckets unused views"),
    "raises in hooks": (raises_in_hooks, NO_VIEWS),
    "survives an exception": (partial(survives_an_exception, zeroing=True), NO_VIEWS),
    "survives an exception and accumulates": (partial(survives_an_exception, zeroing=False), NO_VIEWS),
}


def with_options(wrap: Wrap, rank: int, script: Script, options: dict[str, Any]) -> Trail:
    torch.manual_seed(0)
    return list(script(partial(wrap, **options), rank))


def _plays_alike(rank: int, script: Script, options: dict[str, Any]) -> None:
    play(rank, with_options, script, options)


@pytest.mark.parametrize("how", ["gradients", "detached"])
def test_what_lies_in_the_buffer_is_divided_as_torch_does(ranks: Any, how: str) -> None:
    """Also if this backward has put it there. On three ranks a division and a multiplication differ."""
    for setting in ("default", "views"):
        ranks(3).run(_plays_alike, partial(restores, how=how), SETTINGS[setting])


@pytest.mark.parametrize(
    ("script", "options"),
    [
        pytest.param(script, SETTINGS[setting], id=f"{name}, {setting}")
        for name, (script, settings) in SCRIPTS.items()
        for setting in settings.split()
    ],
)
def test_bits_are_torchs(ranks: Any, script: Script, options: dict[str, Any]) -> None:
    ranks(2).run(_plays_alike, script, options)


# ------------------------------------------------------------------ where torch is wrong


def _is_right_alone(rank: int, script: Script, options: dict[str, Any], right: dict[str, Any]) -> None:
    """With `options` torch is wrong. minddp has torch's strides, and the values that torch has with `right`."""
    expected = with_options(TorchDDP, rank, script, right)
    theirs = with_options(TorchDDP, rank, script, options)
    ours = with_options(minddp.DistributedDataParallel, rank, script, options)
    assert _strides(ours) == _strides(theirs)
    assert_same(_row_major(expected), _row_major(ours), f"rank {rank}")
    with pytest.raises(AssertionError, match=r"grad': 'differs in"):
        assert_same(_row_major(expected), _row_major(theirs), f"rank {rank}")


def _strides(trail: Trail) -> list[Any]:
    return [(name, tensor.stride()) for step in trail for name, tensor in step.items() if tensor is not None]


def _row_major(trail: Trail) -> Trail:
    return [{name: t if t is None else t.contiguous() for name, t in step.items()} for step in trail]


@pytest.mark.parametrize("zeroing", [True, False], ids=["zeroed", "accumulated"])
@pytest.mark.parametrize("what", [put_data, set_memory])
def test_other_memory_under_a_view_is_averaged(ranks: Any, what: Callable[[Any], None], zeroing: bool) -> None:
    """Torch goes on with the bucket's, and averages what is no gradient any more."""
    script = partial(handles, what=what, zeroing=zeroing)
    ranks(2).run(_is_right_alone, script, SETTINGS["views"], SETTINGS["default"])


@pytest.mark.parametrize("setting", ["default", "buckets", "static", "unused"])
def test_parameters_may_change_their_strides(ranks: Any, setting: str) -> None:
    """Under the final plan. Torch's buckets keep the old ones, and its averages come back in another order."""
    script = partial(turns_channels_last, turn=CALM_STEPS)
    ranks(2).run(_is_right_alone, script, SETTINGS[setting], SETTINGS["views"])


# ------------------------------------------------------------------ what the scripts rely on


def _aliased(rank: int) -> list[bool]:
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(layers())
    for _step, loss in losses(ddp, rank):
        loss.backward()
    return [grad.untyped_storage().nbytes() > grad.nbytes for grad in grads(ddp)]


def test_large_gradients_alias_the_bucket(ranks: Any) -> None:
    """Weight and bias of each layer. Otherwise some scripts would test nothing."""
    assert ranks(2).run(_aliased) == [[True, False, True, False, False, False]] * 2


class Parts(nn.Module):
    """Two parts, of which the second can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.uses_second = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if self.uses_second else x


def _skips_the_second_bucket(rank: int) -> list[bool]:
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.0005}
    ddp, gone = minddp.DistributedDataParallel(Parts(), **options), []
    for _ in range(STEPS):
        for ddp.module.uses_second in (True, False):
            with nullcontext() if not ddp.module.uses_second else ddp.no_sync():
                ddp(random(4, 8, rank=rank)).sum().backward()
        references = [weakref.ref(grad) for grad in grads(ddp)]
        ddp.zero_grad()
        gone += [reference() is None for reference in references]
    return gone


def test_gradients_of_a_skipped_bucket_are_not_kept_alive(ranks: Any) -> None:
    assert ranks(2).run(_skips_the_second_bucket) == [[True] * 6 * STEPS] * 2


def _fails_and_goes_on(rank: int) -> list[bool]:
    ddp = minddp.DistributedDataParallel(Fused(*narrow()))
    for step in range(CALM_STEPS + 1):
        ddp.zero_grad()
        Fuse.lit = step == CALM_STEPS
        with suppress(Blown):
            loss_of(ddp, rank, step).backward()
    Fuse.lit = False
    references = [weakref.ref(grad) for grad in grads(ddp)]
    ddp.zero_grad()
    loss_of(ddp, rank, 0)
    return [reference() is None for reference in references]


def test_gradients_of_an_interrupted_backward_are_released_by_the_next_forward(ranks: Any) -> None:
    for gone in ranks(2).run(_fails_and_goes_on):
        assert len(gone) > 30
        assert all(gone)


def _goes_forward_within(rank: int, no_sync: bool, step_of_trouble: int) -> None:
    ddp = minddp.DistributedDataParallel(narrow())
    is_trouble = False

    def forward(*_: Any) -> None:
        if is_trouble:
            with torch.enable_grad(), ddp.no_sync() if no_sync else nullcontext():
                loss_of(ddp, rank, STEPS)

    ddp.module[2].register_full_backward_hook(forward)
    for step, loss in losses(ddp, rank):
        is_trouble = step == step_of_trouble
        if is_trouble:
            with pytest.raises(RuntimeError, match="still running, and has called its forward"):
                loss.backward()
        else:
            loss.backward()
            alike = [torch.empty_like(ddp.module[0].weight.grad) for _ in range(2)]
            dist.all_gather(alike, ddp.module[0].weight.grad)
            assert torch.equal(*alike), step


@pytest.mark.parametrize("step", [0, CALM_STEPS])
@pytest.mark.parametrize("no_sync", [True, False])
def test_a_forward_within_its_own_backward_is_an_error(ranks: Any, no_sync: bool, step: int) -> None:
    """As in torch: or else the gradients of this backward would stay local without an error."""
    ranks(2).run(_goes_forward_within, no_sync, step)


def _finalizes_by_hand(rank: int) -> None:
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(layers())
    alone, theirs = copy.deepcopy(ddp.module), TorchDDP(copy.deepcopy(ddp.module))
    ddp.require_manual_backward_finalization = True
    everyone = [ddp, alone, theirs]
    for steps in zip(*(losses(each, rank) for each in everyone), strict=True):
        for _step, loss in steps:
            loss.backward()
        before, expected_before, expected_after = (numbered(grads(each)) for each in everyone)
        ddp.finalize_backward()
        assert_same([expected_before, expected_after], [before, numbered(grads(ddp))], f"rank {rank}")


def test_gradients_are_local_until_backward_is_finalized(ranks: Any) -> None:
    ranks(2).run(_finalizes_by_hand)
