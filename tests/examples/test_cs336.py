"""The course's adapters on the kinds of models that its tests train, beside one process with all of the data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from examples import cs336
from reference.checks import REQUIRED
from reference.grade import grade
from tests.ranks import on_ranks

STEPS, EXAMPLES = 4, 8


class Net(nn.Module):
    """With a bias, without one, and a parameter that is frozen; `tied`: two layers share a weight."""

    def __init__(self, tied: bool = False):
        super().__init__()
        self.first, self.second = nn.Linear(6, 10, bias=False), nn.Linear(10, 10)
        self.third, self.last = nn.Linear(10, 10, bias=False), nn.Linear(10, 3)
        self.fixed = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)
        if tied:
            self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.third(torch.relu(self.second(torch.relu(self.first(x)))))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(EXAMPLES, 6, generator=random), torch.randn(EXAMPLES, 3, generator=random)


def loss_of(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (module(x) - y).square().mean()


def alone(tied: bool) -> list[dict[str, Tensor]]:
    """The weights after each step of one process."""
    torch.manual_seed(0)  # rank 0's
    module = Net(tied)
    optimizer, weights = torch.optim.SGD(module.parameters(), lr=0.1), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(module, *batch(step)).backward()
        optimizer.step()
        weights.append({name: param.detach().clone() for name, param in module.named_parameters()})
    return weights


@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied"])
@pytest.mark.parametrize("make", ["get_ddp", "get_ddp_bucketed", "get_fsdp"])
@on_ranks(2)
def test_two_ranks_with_half_of_the_batch_each_train_as_one_process_does(rank: int, make: str, tied: bool) -> None:
    torch.manual_seed(rank)
    model = getattr(cs336, make)(Net(tied), *([0.0005] if make == "get_ddp_bucketed" else []))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, expected in enumerate(alone(tied)):
        if make == "get_ddp_bucketed":
            cs336.ddp_bucketed_on_train_batch_start(model, optimizer)
        optimizer.zero_grad()
        loss_of(model, *(half.chunk(2)[rank] for half in batch(step))).backward()
        getattr(cs336, f"{make.removeprefix('get_')}_on_after_backward")(model, optimizer)
        optimizer.step()
        found = dict(model.module.named_parameters())
        if make == "get_fsdp":
            assert sum(param.numel() for param in model.parameters()) < sum(w.numel() for w in expected.values())
            found = cs336.fsdp_gather_full_params(model)
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(found[name].detach(), weight, msg=f"{name} after step {step}")


@on_ranks(2)
def test_a_sharded_optimizer_steps_as_a_whole_one_and_keeps_half_of_the_state(rank: int) -> None:
    torch.manual_seed(0)
    whole, module = Net(), Net()
    module.load_state_dict(whole.state_dict())
    options = {"lr": 0.05, "weight_decay": 0.1, "betas": (0.9, 0.99)}
    expected = torch.optim.AdamW(whole.parameters(), **options)
    found = cs336.get_sharded_optimizer(module.parameters(), torch.optim.AdamW, **options)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 2, gamma=0.5) for one in (expected, found)]
    for step in range(STEPS):
        for net, optimizer, schedule in zip((whole, module), (expected, found), schedules, strict=True):
            optimizer.zero_grad()
            loss_of(net, *batch(step)).backward()
            optimizer.step()
            schedule.step()
        for name, param in module.named_parameters():
            torch.testing.assert_close(param, whole.get_parameter(name), msg=f"{name} after step {step}")
    numel = sum(param.numel() for param in module.parameters() if param.requires_grad)
    states = [state["exp_avg"].numel() for _, inner, _ in found.shards for state in inner.state.values()]
    assert sum(states) == -(-numel // 2)


@on_ranks(2)
def test_a_compute_dtype_is_an_error(rank: int) -> None:
    with pytest.raises(NotImplementedError, match=r"does not compute in torch\.bfloat16"):
        cs336.get_fsdp(Net(), torch.bfloat16)


@pytest.mark.slow
def test_the_grader_takes_a_solution_with_the_names_of_the_course(tmp_path) -> None:
    """As a student has it: `finish_gradient_synchronization` in place of `synchronize`."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from reference.bucketed import Bucketed\n\n\nclass Mine(Bucketed):\n"
        "    def finish_gradient_synchronization(self):\n        Bucketed.synchronize(self)\n\n"
        "    synchronize = property()\n"
    )
    faults = [verdict for verdict in grade(f"{path}:Mine", world_sizes=[2]) if verdict.fault]
    assert [verdict for verdict in faults if verdict.check in REQUIRED] == []
