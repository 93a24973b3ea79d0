"""One copy of the model in its wrapper: torch's, minddp's, or none at all, the control that only computes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

from minddp.modes.optimizer_overlap import OverlappedOptimizer
from tests.parity.hooks import HOOKS, factor_of
from tests.parity.layers import VOCABULARY, WIDTH, Batch
from tests.parity.network import Network, OpaqueOutput, Use
from tests.parity.script import DEVICE

if TYPE_CHECKING:
    from tests.parity.script import Script

SUBJECT = os.environ.get("MINDDP_PARITY_SUBJECT", "minddp:DistributedDataParallel")
BATCH_SIZE = 3


class Unwrapped(nn.Module):
    """In the place of a wrapper: runs the module and averages nothing."""

    def __init__(self, module: nn.Module, **_options: Any):
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """`Side.mean_grads` knows what hooks compute."""

    process_group = None

    def _update_process_group(self, group: Any) -> None: ...


def subject_of(name: str, script: Script) -> Callable[..., nn.Module]:
    """What makes the wrapper under test; `name` is "module:class"."""
    module, _, attribute = name.partition(":")
    wrapper = getattr(importlib.import_module(module), attribute)
    more: dict[str, Any] = {} if issubclass(wrapper, TorchDDP) else {"transport": script.transport}
    if more and script.in_double:
        more["mixed_precision"] = _MixedPrecision(param_dtype=torch.float64, reduce_dtype=torch.float64)
    return lambda model, **options: wrapper(model, **options, **more)


class Side:
    """A model, the wrapper around it, and all that a script may set up around them."""

    def __init__(self, wrap: Callable[..., nn.Module], script: Script):
        torch.manual_seed(script.seed + (dist.get_rank() if script.apart else 0))
        self.make_wrapper, self.script = wrap, script
        self.use(self.wrap(Network(script.layers).to(DEVICE)))

        # The optimizer, its handle if minddp steps it in backward, and if it is to step on reduced gradients.
        self.optimizer = self.new_optimizer("sgd")
        self.overlapped: Any = None
        self.wants_step = False

        # How a step begins ("none", "zeros" or "keep" gradients; once it keeps them anyway), and if it clips.
        self.zeroing = "none"
        self.keeps_grads_once = False
        self.clips = False

        # Tensors that the script holds on to, and those that were gradients at the last `keep_grads`.
        self.kept: list[torch.Tensor] = []
        self.grads_once: dict[str, torch.Tensor | None] = {}

        # The communication hook; handles of other hooks; what is called with each first output and each input.
        self.hook_name: str | None = None
        self.hook_state: Any = None
        self.handles: list[Any] = []
        self.on_output: list[Callable[[torch.Tensor], Any]] = []
        self.on_input: list[Callable[[torch.Tensor], Any]] = []

        # The line that is played, and the way through the model that a static graph has recorded.
        self.turn = 0
        self.recorded: tuple[tuple[Use, ...], str] | None = None

    def wrap(self, module: nn.Module, **more: Any) -> Any:
        return self.make_wrapper(module, **(self.script.options.chosen() | more))

    def use(self, ddp: Any) -> None:
        """Go on with this wrapper, and the model in it."""
        self.ddp = ddp
        self.model: Network = ddp.module
        self.named_params = dict(self.model.named_parameters())

    # ------------------------------------------------------------------ what it consists of

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def layer(self, index: int) -> nn.Module:
        """The layer of that number, modulo their number: a shortened script stays valid."""
        return self.model.layers[index % len(self.model.layers)]

    @property
    def is_subject(self) -> bool:
        """True of minddp's side, for changes that torch's wrapper does not have."""
        return not (self.is_torch or isinstance(self.ddp, Unwrapped))

    @property
    def is_torch(self) -> bool:
        return isinstance(self.ddp, TorchDDP)

    def params_of(self, index: int) -> list[nn.Parameter]:
        return [param for param in self.layer(index).parameters() if param.requires_grad]

    def new_optimizer(self, kind: str) -> torch.optim.Optimizer:
        params = list(self.named_params.values())
        if kind == "adamw":
            return torch.optim.AdamW(params, lr=1e-3)
        if kind == "one by one":
            return torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=False)
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def use_optimizer(self, kind: str) -> None:
        """Go on with a new optimizer, overlapped like the one before."""
        self.optimizer = self.new_optimizer(kind)
        if self.overlapped is not None:
            self.overlapped.remove()
            self.overlap()

    def overlap(self) -> None:
        """From now on backward steps the optimizer. Not by the wrapper's method, which that of `ddp.py` lacks."""
        reducer = self.ddp._reducer
        self.overlapped = OverlappedOptimizer(self.optimizer, self.ddp.module, reducer.params, reducer.modes)

    # ------------------------------------------------------------------ the parts of a step

    def batch(self, nth: int = 0) -> Batch:
        """The input of one forward of this line; another one on each rank. Both copies draw the same dropout."""
        generator = torch.Generator().manual_seed(hash((self.script.seed, self.rank, self.turn, nth)))
        x = torch.randn(BATCH_SIZE, WIDTH, generator=generator).to(DEVICE)
        # Forwards of one line take the same branch: ranks that disagreed on whether a step is legal would hang.
        x[0, 0] = x[0, 0].abs() * (1 if hash((self.script.seed, self.rank, self.turn)) % 2 else -1)
        tokens = torch.randint(VOCABULARY, (BATCH_SIZE,), generator=generator).to(DEVICE)
        x.requires_grad_(bool(self.on_input) or self.model.needs_grad_of_input())
        torch.manual_seed(1000 * self.turn + nth)
        for act in self.on_input:
            act(x)
        return Batch(x, tokens, self.rank, self.turn)

    def zero(self) -> None:
        if self.zeroing != "keep" and not self.keeps_grads_once:
            for param in self.named_params.values():
                if self.zeroing == "none":
                    param.grad = None
                elif param.grad is not None:
                    param.grad.detach_().zero_()
        self.keeps_grads_once = False

    def forward(self, nth: int = 0) -> list[torch.Tensor]:
        outputs = self.outputs_of(self.ddp(self.batch(nth)))
        if outputs[0].requires_grad:
            for act in self.on_output:
                act(outputs[0])
        return outputs

    def outputs_of(self, output: Any) -> list[torch.Tensor]:
        """The tensors in what forward has returned, also where a wrapper does not find them."""
        return list(output.tensors) if isinstance(output, OpaqueOutput) else tensors_in(output)

    def loss(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([output.square().mean() for output in outputs]).sum()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.wants_step = True
        loss.backward(**options)
        if self.script.options.static_graph and self.recorded is None:
            self.recorded = self.model.route, self.model.output

    def train(self) -> list[torch.Tensor]:
        self.zero()
        outputs = self.forward()
        self.backward(self.loss(outputs))
        return outputs

    def optimize(self) -> None:
        self.wants_step = False
        if self.clips:
            nn.utils.clip_grad_norm_([p for p in self.named_params.values() if p.grad is not None], 0.1)
        if self.overlapped is None:
            self.optimizer.step()

    # ------------------------------------------------------------------ after an error

    def settle(self, *, straight: bool) -> None:
        """Give up the step that has failed: no gradients, nothing that fails again."""
        self.model.fails_in = None
        if straight:
            self.model.route, self.model.output = self.recorded or (self.model.straight, "tensor")
            self.remove_hooks()
            self.model.thaw()
        self.wants_step = False
        self.kept, self.grads_once = [], {}
        for param in self.named_params.values():
            param.grad = None
        self.use_optimizer("sgd")

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self.on_output, self.on_input = [], [], []

    def start_over(self, **more: Any) -> None:
        """A new wrapper around the model as it is now: torch's old one would raise after a backward that failed."""
        if isinstance(self.ddp, TorchDDP):
            self.ddp._remove_autograd_hooks()
        self.ddp = self.wrap(self.model, **more)
        gc.collect()  # minddp's old wrapper, which errors keep: its hooks would raise, on some ranks alone
        if self.hook_name is not None:
            self.register_hook(self.hook_name)

    def register_hook(self, name: str) -> None:
        self.hook_name = name
        self.hook_state, hook = HOOKS[name]()
        self.ddp.register_comm_hook(self.hook_state, hook)

    # ------------------------------------------------------------------ beside the other sides

    @torch.no_grad()
    def adopt(self, other: Side, *, grads: bool) -> None:
        """Take over the values of another side's parameters, buffers and, if asked to, gradients."""
        theirs = other.named_params
        for name, param in self.named_params.items():
            param.copy_(theirs[name])
            if grads:
                grad = theirs[name].grad
                param.grad = None if grad is None else grad.detach().clone()
        for ours, buffer in zip(self.model.buffers(), other.model.buffers(), strict=True):
            ours.copy_(buffer)

    def mean_grads(self, group: dist.ProcessGroup) -> dict[str, torch.Tensor | None]:
        """What a wrapper should leave in `.grad`: this side's gradients, combined as the communication hook does.

        Collective.
        """
        keeps_local, factor = factor_of(self.hook_name)
        params = self.named_params.values()
        has_grad = torch.tensor([float(param.grad is not None) for param in params], device=DEVICE)
        grads = [torch.zeros_like(param) if param.grad is None else param.grad.detach() for param in params]
        total = torch.cat([grad.to_dense().reshape(-1).double() for grad in grads])
        dist.all_reduce(has_grad, group=group)
        if not keeps_local:
            dist.all_reduce(total, group=group)
        means = (total * factor).split([grad.numel() for grad in grads])
        return {
            name: mean.view_as(grad).to(grad.dtype) if is_there else None
            for name, grad, mean, is_there in zip(self.named_params, grads, means, has_grad.tolist(), strict=True)
        }


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Tensors of a nested output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for part in output for tensor in tensors_in(part)]
    return []
