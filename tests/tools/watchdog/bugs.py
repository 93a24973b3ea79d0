"""Bugs that users have had, each rebuilt from its description: what minddp says of them.

Each function is one rank's part of a training. `test_watch.py` runs them with torch's classes on two ranks, and
`test_guard.py` some of them with minddp's on three. Where one rank does something else, it is rank 1, or rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 25
Script = TypeVar("Script", bound=Callable[[int], None])
Scripts = dict[str, tuple[Callable[[int], None], tuple[str, ...]]]  # and the words that are said of each
BUGS: Scripts = {}
OF_A_WRAPPER: Scripts = {}  # played with minddp's only
WAITS: Scripts = {}


def says(*words: str, among: Scripts = BUGS) -> Callable[[Script], Script]:
    def add(script: Script) -> Script:
        among[script.__name__] = script, words
        return script

    return add


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def batches(seed: int, number: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 16, generator=generator) for _ in range(number)]


def train(
    forward: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    data: list[Tensor],
    before_step: Callable[[int], object] = lambda step: None,
) -> None:
    for step, x in enumerate(data):
        optimizer.zero_grad()
        forward(x).square().mean().backward()
        before_step(step)
        optimizer.step()


def adam(module: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=lr)


def lr_of(rank: int) -> float:
    return 2e-2 if rank == 1 else 1e-2


# ---------------------------------------------------------------------- gradients that are not averaged

NEVER_SYNCHRONISED = "20 optimizer steps without a synchronised backward"


@says(NEVER_SYNCHRONISED, "Call the wrapper")
def forward_of_the_unwrapped_model(rank: int) -> None:
    """trl 7245 and 7246, minimind 853, sd-scripts 924: the loss is computed with `.module`."""
    ddp = DDP(network())
    train(ddp.module, adam(ddp), batches(rank))


@says("An optimizer made 2 steps for 1 synchronised backward", "Call the wrapper")
def a_method_of_the_module(rank: int) -> None:
    """trl 5282, icefall 226: a loss that is a method of the model, called beside the wrapper in some steps."""
    ddp, steps = DDP(network()), iter(range(STEPS))
    train(lambda x: (ddp.module if next(steps) % 5 == 4 else ddp)(x), adam(ddp), batches(rank))


@says("Every forward since was within `no_sync`")
def no_sync_that_never_ends(rank: int) -> None:
    """The last backward of an accumulation is within `no_sync`, too."""
    ddp = DDP(network())
    with ddp.no_sync():
        train(ddp, adam(ddp), batches(rank))


@says("they are not averaged. Wrap the module in DistributedDataParallel")
def never_wrapped(rank: int) -> None:
    """miles-credit 153: started on several ranks, but nothing averages."""
    model = network()
    train(model, adam(model), batches(rank, 60))


@says("The gradients of `0.bias`, `2.bias` differed when the optimizer stepped")
def averages_some_gradients(rank: int) -> None:
    """A loop that all-reduces by itself leaves out the biases."""
    model = network()

    def average(step: int) -> None:
        for param in model.parameters():
            if param.dim() > 1:
                dist.all_reduce(param.grad)

    train(model, adam(model), batches(rank, 60), average)


@says("communication hook `hook_that_forgets.<locals>.keeps_its_own` returns different ones", among=OF_A_WRAPPER)
def hook_that_forgets(rank: int) -> None:
    """A communication hook that returns each rank's own gradients."""

    def keeps_its_own(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp = DDP(network())
    ddp.register_comm_hook(None, keeps_its_own)
    train(ddp, adam(ddp), batches(rank))


# ---------------------------------------------------------------------- replicas and data

OTHER_LR = "but 0.02 on rank 1. Set the same"


@says("`lr of group 0` is 0.01 on rank", OTHER_LR)
def another_learning_rate(rank: int) -> None:
    ddp = DDP(network())
    train(ddp, adam(ddp, lr_of(rank)), batches(rank))


@says("`lr of group 0` is 0.01 on rank", OTHER_LR)
def learning_rate_of_shards(rank: int) -> None:
    model = sharded(network())
    train(model, adam(model, lr_of(rank)), batches(rank))


@says("`lr of group 0` is 0.01 on rank", OTHER_LR)
def learning_rate_of_a_replicated_module(rank: int) -> None:
    model = replicate(network())
    train(model, adam(model, lr_of(rank)), batches(rank))


@says("or the optimizer's state differs (only one rank has loaded a checkpoint")
def a_checkpoint_of_rank_0(rank: int) -> None:
    """Only rank 0 has loaded the optimizer."""
    ddp = DDP(network())
    optimizer = adam(ddp)
    train(ddp, optimizer, batches(0, 3))
    if rank == 0:
        for state in optimizer.state.values():
            state["exp_avg"].mul_(3)
    train(ddp, optimizer, batches(rank))


@says("Rank 0 has other values of `0.bias`, `0.weight`, `2.bias`, `2.weight` than ranks", among=OF_A_WRAPPER)
def weights_of_rank_0(rank: int) -> None:
    """They are loaded after wrapping, where rank 0's are no longer broadcast."""
    ddp = DDP(network())
    if rank == 0:
        ddp.module.load_state_dict({name: value * 2 for name, value in ddp.module.state_dict().items()})
    train(ddp, adam(ddp), batches(rank))


@says(
    "equal in step 11, different in step 12). The averaged gradients were equal, and no hyperparameter",
    among=OF_A_WRAPPER,
)
def write_on_one_rank(rank: int) -> None:
    ddp = DDP(network())

    def clip(step: int) -> None:
        if rank == 1 and step == 12:
            ddp.module[0].weight.data.clamp_(-0.1, 0.1)

    train(ddp, adam(ddp), batches(rank), clip)


@says("`lr of group 0` is 0.01 on rank", OTHER_LR)
def learning_rate_with_zero(rank: int) -> None:
    """Each rank steps a part of the parameters and sends it to all: they stay equal."""
    ddp = DDP(network())
    train(ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=lr_of(rank)), batches(rank))


@says("ranks train on the same data", "DistributedSampler")
def same_data(rank: int) -> None:
    ddp = DDP(network())
    train(ddp, adam(ddp), batches(0))


@says("the batches of steps 12 to 19 are the first 8 again", "`sampler.set_epoch")
def set_epoch_forgotten(rank: int) -> None:
    data = torch.utils.data.TensorDataset(torch.cat(batches(0, 24)))
    sampler = torch.utils.data.DistributedSampler(data)
    ddp = DDP(network())
    optimizer = adam(ddp)
    for _ in range(2):
        train(ddp, optimizer, [x for (x,) in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)])


@says("In step 7 gradients of rank 1 are not finite, first that of `2.", "look at the batch")
def a_batch_with_nan(rank: int) -> None:
    ddp, data = DDP(network()), batches(rank)
    data[7][0] *= float("nan") if rank == 1 else 1.0
    train(ddp, adam(ddp), data)


def sharded(model: nn.Sequential) -> nn.Module:
    for module in (model[0], model[2], model):
        fully_shard(module)
    return model


# ---------------------------------------------------------------------- waits


BUSY = 1.0  # times as long


def busy(seconds: float) -> None:
    time.sleep(BUSY * seconds)


@says("`barrier` (bugs.py:", "backward, at its end", "make each on all ranks or on none", among=WAITS)
def collective_on_rank_0(rank: int) -> None:
    """autocast 386, Diffusion-Planner 256, Lightning 19106: rank 0 alone logs, and its log calls a collective."""
    ddp = DDP(network())

    def log(step: int) -> None:
        if rank == 0 and step == 5:
            dist.barrier()

    train(ddp, adam(ddp), batches(rank), log)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = network(), nn.Linear(4, 4)

    def forward(self, x: Tensor, uses_head: bool = False) -> Tensor:
        return self.head(self.body(x)) if uses_head else self.body(x)


@says("Rank 1 has not produced gradients for `head.weight`, `head.bias`: backward 6", among=WAITS)
def head_without_objects(rank: int) -> None:
    """ultralytics 24675, peft 951: on a batch without objects a rank does not use a head; then it validates."""
    ddp = DDP(Detector())
    for step, x in enumerate(batches(rank, 6)):
        ddp.zero_grad()
        ddp(x, rank == 0 or step < 5).square().mean().backward()
    busy(4.0)  # validates


@says("`barrier` (bugs.py:", "backward, at its end", "`drop_last=True`", "`ddp.join()`", among=WAITS)
def fewer_batches(rank: int) -> None:
    """Rank 1 has one batch fewer, and joins the others after the epoch."""
    ddp = DDP(network())
    train(ddp, adam(ddp), batches(rank, 10 - rank))
    dist.barrier()


@says("Rank 1 is between backwards", "bugs.py:", "in busy", among=WAITS)
def stops_to_evaluate(rank: int) -> None:
    """Rank 1 is busy for a long time, so the others wait."""
    ddp = DDP(network())
    train(ddp, adam(ddp), batches(rank, 10), lambda step: busy(4.0 * rank * (step == 5)))
