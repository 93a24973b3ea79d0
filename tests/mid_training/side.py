"""One copy of the model in its wrapper: torch's, minddp's, or none at all, the control that only computes."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

from minddp.modes.optimizer_overlap import OverlappedOptimizer
from tests.mid_training.network import VOCABULARY, WIDTH, Network, OpaqueOutput, Use
from tests.parity.hooks import HOOKS
from tests.parity.models import Batch
from tests.parity.steps import tensors_in

if TYPE_CHECKING:
    from tests.mid_training.script import Script

SUBJECT = "minddp:DistributedDataParallel"
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
        """Every hook of these scripts computes the mean."""

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
    """A model, the wrapper around it, and all that a script may set up around them.

    `zeroing` is what a step does to gradients first: "none", "zeros" or "keep". `kept` are tensors that the
    script holds on to, `grads_once` those that were gradients at the last `keep_grads`. `on_output` and `on_input`
    are called with the first output and with the input of each forward. `overlapped` is the handle of an optimizer
    that minddp's backward steps. `recorded` is the way through the model that a static graph has recorded.
    `wants_step` tells that a synchronised backward has run since the last optimizer's
    step.
    """

    def __init__(self, wrap: Callable[..., nn.Module], script: Script):
        torch.manual_seed(script.seed)
        self.make_wrapper, self.script = wrap, script
        self.use(self.wrap(Network(script.layers)))
        self.optimizer = self.new_optimizer("sgd")
        self.hook_name: str | None = None
        self.zeroing = "none"
        self.keeps_grads_once = False
        self.clips = False
        self.kept: list[torch.Tensor] = []
        self.grads_once: dict[str, torch.Tensor | None] = {}
        self.handles: list[Any] = []
        self.on_output: list[Callable[[torch.Tensor], Any]] = []
        self.on_input: list[Callable[[torch.Tensor], Any]] = []
        self.overlapped: Any = None
        self.recorded: tuple[tuple[Use, ...], str] | None = None
        self.turn = 0
        self.wants_step = False

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
        """The layer of that number, modulo their number: a shrunk script stays valid."""
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
        """The input of one forward of this line; another one on each rank."""
        generator = torch.Generator().manual_seed(hash((self.script.seed, self.rank, self.turn, nth)))
        x = torch.randn(BATCH_SIZE, WIDTH, generator=generator)
        tokens = torch.randint(VOCABULARY, (BATCH_SIZE,), generator=generator)
        # Reentrant checkpoints pass no gradient on unless their input wants one.
        x.requires_grad_(bool(self.on_input) or any(use.how in ("reentrant", "nested") for use in self.model.route))
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
            for layer, kind in zip(self.model.layers, self.script.layers, strict=True):
                layer.requires_grad_(True)
                if kind == "half_frozen":
                    layer.bias.requires_grad_(False)
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
        self.ddp.register_comm_hook(*HOOKS[name]())

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
        """What a wrapper should leave in `.grad`: this side's gradients, averaged over the ranks. Collective."""
        means: dict[str, torch.Tensor | None] = {}
        for name, param in self.named_params.items():
            has_grad = torch.tensor(float(param.grad is not None))
            total = torch.zeros_like(param) if param.grad is None else param.grad.detach().clone()
            total = total.to_dense().contiguous()
            dist.all_reduce(has_grad, group=group)
            dist.all_reduce(total, group=group)
            means[name] = total / dist.get_world_size() if has_grad else None
        return means
