"""One copy of the model in its wrapper, and what each step of a script does to it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
from collections.abc import Iterator
from functools import singledispatch
from typing import Any

import torch

from tests.parity import scenario as script
from tests.parity.hooks import HOOKS
from tests.parity.models import VOCABULARY, WIDTH, Batch, InterruptedBackward, Network
from tests.parity.scenario import Scenario

BATCH_SIZE = 4


class Replica:
    """A model wrapped by torch's DDP or by the one under test, with its optimizer and its hook's state."""

    def __init__(self, wrapper: type, scenario: Scenario, rank: int):
        torch.manual_seed(scenario.seed + (rank if scenario.model.weights_per_rank else 0))
        self.wrapper, self.scenario, self.rank = wrapper, scenario, rank
        self.model = Network(scenario.model)
        self._wrap(scenario.options)
        self.optimizer = self._new_optimizer()
        self.kept_gradients: dict[str, torch.Tensor | None] = {}

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.ddp.parameters(), lr=0.05, momentum=0.9)

    def _wrap(self, options: script.Options) -> None:
        self.ddp = self.wrapper(self.model, **options.chosen())
        self.notes: Any = None
        if self.scenario.hook is not None:
            self.notes, hook = HOOKS[self.scenario.hook]()
            self.ddp.register_comm_hook(self.notes, hook)

    def start_over(self) -> None:
        """A new wrapper around the model as it is now, for torch's DDP only."""
        self.ddp._remove_autograd_hooks()
        self._wrap(dataclasses.replace(self.scenario.options, init_sync=False))

    def adopt(self, other: Replica) -> None:
        """Take over the weights, buffers, gradients and momentum of another copy that is close to this one."""
        with torch.no_grad():
            for ours, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
                ours.copy_(theirs)
                if ours.grad is not None:
                    ours.grad.copy_(theirs.grad)
            for ours, theirs in zip(self.model.buffers(), other.model.buffers(), strict=True):
                ours.copy_(theirs)
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    def become_a_pickled_copy(self) -> None:
        momentum = self.optimizer.state_dict()
        self.ddp = pickle.loads(pickle.dumps(self.ddp))
        self.model = self.ddp.module
        self.optimizer = self._new_optimizer()
        self.optimizer.load_state_dict(momentum)

    def keep_gradients(self) -> None:
        if self.scenario.keeps_gradients:
            self.kept_gradients = {name: param.grad for name, param in self.model.named_parameters()}

    def forward(self, turn: int, nth: int = 0) -> list[torch.Tensor]:
        """The tensors in the output, those that the loss reads first; inputs depend on rank, turn and nth."""
        batch = make_batch(self.scenario, self.rank, turn, nth)
        torch.manual_seed(turn)  # for dropout: both copies draw the same
        return tensors_in(self.ddp(batch))

    def loss(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        used = outputs if self.scenario.model.loss_uses == "all" else outputs[:1]
        return torch.stack([output.double().square().mean() for output in used]).sum()


def make_batch(scenario: Scenario, rank: int, turn: int, nth: int) -> Batch:
    """Random input of one forward.

    Everything that an input can decide is decided by `turn`, not by `nth`: forwards of one step take the same
    branch, because ranks that disagreed on whether a step is legal would hang.
    """
    generator = torch.Generator().manual_seed(hash((scenario.seed, rank, turn, nth)))
    x = torch.randn(BATCH_SIZE, WIDTH, generator=generator)
    x[0, 0] = x[0, 0].abs() * (1 if hash((scenario.seed, rank, turn)) % 2 else -1)
    tokens = torch.randint(VOCABULARY, (BATCH_SIZE,), generator=generator)
    # Reentrant checkpoints pass no gradient on unless their input wants one.
    x.requires_grad_(any(layer.kind == "checkpointed_reentrant" for layer in scenario.model.layers))
    return Batch(x, tokens, rank, turn + nth)


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


@contextlib.contextmanager
def _evaluating(replica: Replica) -> Iterator[None]:
    replica.ddp.eval()
    try:
        yield
    finally:
        replica.ddp.train()


@singledispatch
def perform(step: script.Step, replica: Replica, turn: int) -> list[torch.Tensor]:
    """Perform one step of the script, the `turn`-th; the outputs of its forwards come back to be compared."""
    raise NotImplementedError(f"no meaning given to {step!r}")


@perform.register
def _(step: script.Train, replica: Replica, turn: int) -> list[torch.Tensor]:
    outputs = [replica.forward(turn, nth) for nth in range(step.forwards)]
    losses = [replica.loss(output) for output in outputs]
    for loss in losses if step.separate else [torch.stack(losses).sum()]:
        loss.backward(retain_graph=step.again)
        if step.again:
            loss.backward()
    return [tensor for output in outputs for tensor in output]


@perform.register
def _(step: script.Accumulate, replica: Replica, turn: int) -> list[torch.Tensor]:
    outputs = []
    for nth in range(step.batches):
        if step.backward_only:
            outputs.append(replica.forward(turn, nth))
            with replica.ddp.no_sync():
                replica.loss(outputs[-1]).backward()
        else:
            with replica.ddp.no_sync():
                outputs.append(replica.forward(turn, nth))
                replica.loss(outputs[-1]).backward()
    return [tensor for output in outputs for tensor in output]


@perform.register
def _(step: script.Abandon, replica: Replica, turn: int) -> list[torch.Tensor]:
    with replica.ddp.no_sync() if step.under_no_sync else contextlib.nullcontext():
        return replica.forward(turn)


@perform.register
def _(step: script.ZeroGrad, replica: Replica, turn: int) -> list[torch.Tensor]:
    replica.optimizer.zero_grad(set_to_none=step.set_to_none)
    return []


@perform.register
def _(step: script.Optimize, replica: Replica, turn: int) -> list[torch.Tensor]:
    replica.optimizer.step()
    return []


@perform.register
def _(step: script.Evaluate, replica: Replica, turn: int) -> list[torch.Tensor]:
    with _evaluating(replica), torch.no_grad() if step.no_grad else contextlib.nullcontext():
        return replica.forward(turn)


@perform.register
def _(step: script.Interrupt, replica: Replica, turn: int) -> list[torch.Tensor]:
    replica.model.interrupt_depth = step.depth
    try:
        replica.loss(replica.forward(turn)).backward()
        raise AssertionError(f"{replica.wrapper.__name__} swallowed the exception of the interrupted backward")
    except InterruptedBackward:
        pass
    finally:
        replica.model.interrupt_depth = None
    # What gradients hold now is undefined: buckets that had left may land in them at any moment.
    replica.optimizer.zero_grad(set_to_none=True)
    return []


@perform.register
def _(step: script.LoadState, replica: Replica, turn: int) -> list[torch.Tensor]:
    state = replica.ddp.state_dict()
    halved = {name: value * 0.5 if value.is_floating_point() else value.clone() for name, value in state.items()}
    replica.ddp.load_state_dict(halved)
    return list(halved.values())


@perform.register
def _(step: script.Pickle, replica: Replica, turn: int) -> list[torch.Tensor]:
    replica.become_a_pickled_copy()
    return []
