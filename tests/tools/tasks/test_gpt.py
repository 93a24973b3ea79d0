from __future__ import annotations

import math

import pytest
import torch

from minddp.tools.tasks.gpt import GPT
from minddp.tools.train.task import cross_entropy


@pytest.fixture
def model() -> GPT:
    """A GPT whose layers all do something: as built, the last ones are zero."""
    torch.manual_seed(0)
    model = GPT(layers=2, heads=2, width=16, context=12)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return model


def test_the_default_model_has_two_thirds_of_a_million_parameters() -> None:
    assert sum(param.numel() for param in GPT().parameters()) == 668_800


def test_an_untrained_model_guesses() -> None:
    tokens = torch.randint(256, (2, 8))
    loss = cross_entropy(GPT()(tokens), tokens)
    assert loss.item() == pytest.approx(math.log(256))


def test_a_prediction_depends_on_no_later_byte(model: GPT) -> None:
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:7], after[:7])
    assert not torch.allclose(before[7], after[7])
    assert not torch.allclose(before[11], after[11])  # but later positions depend on it
