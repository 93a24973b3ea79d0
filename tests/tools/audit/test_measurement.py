"""The sketch is linear; the weights are those by which the oracle's gradients add up to `.grad`."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import minddp
from minddp.tools.audit import auditing
from minddp.tools.audit.loss import Loss, read_loss
from minddp.tools.audit.report import Report
from minddp.tools.audit.sketch import Sketcher
from reference import oracle
from tests.logs import logged
from tests.ranks import of_all_ranks, on_ranks
from tests.tools.audit.wrappers import batches, small

SHAPES = (3,), (1024,), (5, 700), (1021,), (300, 1000), (1,)
PARAMS = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]


def sketch(sketcher: Sketcher, *grads: Tensor) -> Tensor:
    for place, grad in enumerate(grads):
        sketcher.add(place, grad)
    return sketcher.take()


def test_the_sketch_is_linear() -> None:
    sketcher = Sketcher(PARAMS)
    a, b = ([torch.randn_like(param) for param in PARAMS] for _ in range(2))
    both = sketch(sketcher, *(2 * one - 3 * other for one, other in zip(a, b, strict=True)))
    assert torch.allclose(both, 2 * sketch(sketcher, *a) - 3 * sketch(sketcher, *b), atol=1e-9)
    assert torch.equal(sketch(sketcher, *a), sketch(Sketcher(PARAMS), *a))  # as on another rank
    assert not sketch(sketcher).any()


def test_the_sketch_keeps_lengths() -> None:
    """On average over gradients, within the noise of 64 numbers."""
    grads = torch.randn(200, 5000, dtype=torch.float64)
    sketches = sketch(Sketcher([*grads]), *grads)
    assert float((sketches.norm(dim=1) / grads.norm(dim=1)).mean()) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sketch_is_exact_up_to_the_rounding_of_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under autocast, and of a gradient that is converted block by block."""
    monkeypatch.setattr("minddp.tools.audit.sketch.BLOCK_ROWS", 100)
    grad = torch.randn(300, 1000).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sketch(Sketcher([grad]), grad)
    exact = sketch(Sketcher([grad.double()]), grad.double())
    assert float((found - exact).norm() / exact.norm()) < 5e-7


def test_a_sparse_gradient_has_the_sketch_of_the_dense_one() -> None:
    dense = torch.zeros(500, 12, dtype=torch.float64)
    dense[[3, 40, 499]] = torch.randn(3, 12, dtype=torch.float64)
    sketcher = Sketcher([dense])
    assert torch.allclose(sketch(sketcher, dense.to_sparse(1)), sketch(sketcher, dense))
    assert torch.allclose(sketch(sketcher, dense.to_sparse()), sketch(sketcher, dense))


def test_the_factor_of_a_loss_and_its_elements() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    y = torch.tensor([0, -100, 2, 3])
    loss = read_loss(0.5 * cross_entropy(x, y) / 4)
    assert loss == Loss(factor=0.125, whole_factor=0.25, elements=3, is_mean=True)
    loss = read_loss(cross_entropy(x, y, reduction="sum") * 2 / torch.tensor(12))
    assert (loss.factor, loss.elements, loss.is_mean) == (pytest.approx(3 / 6), 3, False)
    loss = read_loss(cross_entropy(x, y, reduction="none").sum() / 3)
    assert (loss.factor, loss.elements, loss.is_mean) == (1, 3, False)
    loss = read_loss((x.square().mean() + 0.1 * x.sum()) * 2.0**10)
    assert (loss.factor, loss.elements, loss.is_mean) == (1024.0, 20, True)


def test_padding_does_not_count() -> None:
    """Of four labels one is ignored, or its loss is multiplied by 0."""
    x, y = torch.randn(4, 5, requires_grad=True), torch.tensor([0, -100, 2, 3])
    mask, of_classes = (y != -100).float(), torch.tensor([0.5, 1.0, 2.0, 3.0, 1.0])
    each = cross_entropy(x, y, reduction="none")
    known = cross_entropy(x, y.clamp(min=0), reduction="none")
    three = Loss(elements=3, is_mean=True)
    assert read_loss(cross_entropy(x, y)) == three
    assert read_loss(cross_entropy(x[None].mT, y[None], label_smoothing=0.1)) == three
    assert read_loss(known[mask.bool()].mean()) == three
    of_sum = Loss(elements=3)
    for loss in (each.sum() / 3, (known * mask).sum() / mask.sum(), (mask * known.view(2, 2).view(4)).sum() / 3):
        assert read_loss(loss) == of_sum
    assert read_loss((known.view(2, 2)[:, None] * mask.view(2, 1, 2)).mean()) == Loss(0.75, 0.75, elements=3)
    assert read_loss(cross_entropy(x, y, weight=of_classes)) == Loss(elements=5.5, is_mean=True)
    assert read_loss(cross_entropy(x, y, weight=of_classes, reduction="sum") / 5.5).factor == pytest.approx(1)
    assert read_loss(cross_entropy(x[0], y[0], reduction="none")) == Loss(elements=1)


def test_the_page_says_it_too(tmp_path: Path) -> None:
    Report(["a"], [], ["Step 1 <is> left out."]).save(path := tmp_path / "new" / "audit.html")
    assert "No step could be audited." in path.read_text()
    assert "Step 1 &lt;is&gt; left out." in path.read_text()


@on_ranks(2)
def test_any_weights_are_found_and_agree_with_the_oracle(rank: int) -> None:
    """Two micro-batches a rank, added with four weights; what nothing explains is rounding."""
    weights = torch.tensor([[0.3, -1.2], [0.05, 2.0]], dtype=torch.float64)
    model = small().double()
    before = deepcopy(model)
    data = [(x.double(), y) for x, y in batches(rank, 2)]
    with minddp.audit(model) as audit:
        grads = [torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters())) for x, y in data]
        for param, *parts in zip(model.parameters(), *grads, strict=True):
            param.grad = sum(weight * part for weight, part in zip(weights[rank], parts, strict=True))
            dist.all_reduce(param.grad)
        audit.before_update()
    all_data = [one for of_rank in of_all_ranks(data) for one in of_rank]
    oracles = [
        oracle.gradients(before, one, lambda net, one: cross_entropy(net(one[0]), one[1])) for one in all_data
    ]
    for name, param in model.named_parameters():
        expected = sum(weight * grads[name] for weight, grads in zip(weights.reshape(-1), oracles, strict=True))
        assert torch.allclose(param.grad, expected)
    if rank == 0:
        (group,) = audit.report.steps[0].groups
        assert group.weights == pytest.approx(weights.reshape(1, 4).expand(2, 4).numpy(), rel=1e-6)
        assert group.residual < 1e-9


def test_optimizers_that_step_within_the_backward() -> None:
    """One for each parameter, as soon as its gradient is added: the rest of the backward is still to come."""
    model = small()
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)

        def step(param: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    with minddp.audit(model, warm_up=2) as audit:
        for x, y in batches(0, 4):
            cross_entropy(model(x), y).backward()
    assert audit.report.verdicts()[0].kind == "right", audit.report.verdicts()
    assert [group.params for group in audit.report.steps[0].groups] == [tuple(range(6))]


@on_ranks(2)
def test_what_trains_is_not_changed(rank: int) -> None:
    """The same bits with an audit, and no hook is left."""
    trained = []
    for is_audited in (False, True):
        model = small()
        ddp, optimizer = minddp.DistributedDataParallel(model), torch.optim.AdamW(model.parameters())
        audit = minddp.audit(model, optimizer, steps=2, warm_up=1)
        backward = torch.autograd._engine_run_backward
        if is_audited:
            audit.__enter__()
        for x, y in batches(rank, 6):
            optimizer.zero_grad()
            cross_entropy(ddp(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        trained.append(list(model.parameters()))
        assert torch.autograd._engine_run_backward is backward  # over after two steps
        if is_audited:
            audit.__exit__(None, None, None)
            assert not any(param._backward_hooks for param in model.parameters())
            assert rank > 0 or len(audit.report.steps) == 2
    assert all(map(torch.equal, *trained))


@pytest.mark.parametrize("num_steps", [1, 2])
def test_an_optimizer_may_compute_several_gradients_in_a_step(
    num_steps: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The audit ends before the first step after its warm-up has ended."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(auditing, "Finalize", lambda _object, finish, exitpriority: at_exit.append(finish))
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(layer.parameters(), lr=0.01, max_iter=8)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = layer(torch.ones(3, 2)).square().mean()
        loss.backward()
        return loss

    auditing.audit_process(f"1:4:{tmp_path}")
    with logged() as texts:
        for _ in range(num_steps):
            optimizer.step(closure)
        at_exit[0]()
    assert [text for text in texts if text.startswith("No audit")] == (
        ["No audit: the optimizer took 1 steps, and it begins after 1."] if num_steps == 1 else []
    )


@on_ranks(2)
def test_an_exception_discards_the_audit(rank: int) -> None:
    model = small()
    with pytest.raises(KeyError), minddp.audit(model) as audit:
        next(iter(model(x).sum().backward() for x, _ in batches(rank, 1)))
        audit.before_update()
        raise KeyError
    with pytest.raises(RuntimeError, match="There is no report"):
        _ = audit.report
