from __future__ import annotations

import math

import pytest
import torch

from minddp.train.gpt import GPT, continue_text, rotate, rotations
from minddp.train.settings import GPTOptions
from minddp.train.tasks import cross_entropy


@pytest.fixture
def model() -> GPT:
    """A GPT whose layers all do something: as built, the last ones are zero."""
    torch.manual_seed(0)
    model = GPT(GPTOptions(layers=2, heads=2, width=16, context=12))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return model


def test_the_default_model_has_two_thirds_of_a_million_parameters() -> None:
    assert sum(param.numel() for param in GPT(GPTOptions()).parameters()) == 655_360


def test_an_untrained_model_guesses() -> None:
    tokens = torch.randint(256, (2, 8))
    loss = cross_entropy(GPT(GPTOptions())(tokens), tokens)
    assert loss.item() == pytest.approx(math.log(256))


def test_a_prediction_depends_on_no_later_byte(model: GPT) -> None:
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:7], after[:7])
    assert not torch.allclose(before[7], after[7])
    assert not torch.allclose(before[11], after[11])  # but later positions depend on it


def test_rotary_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(8), torch.randn(8)
    turns = rotations(20, 8, torch.device("cpu"))
    turned_q, turned_k = rotate(q.expand(20, 8), turns), rotate(k.expand(20, 8), turns)
    scores = turned_q @ turned_k.T
    assert scores[5, 3] == pytest.approx(scores[15, 13].item(), abs=1e-4)
    assert scores[5, 3] != pytest.approx(scores[5, 4].item(), abs=1e-3)


def test_text_goes_on_beyond_the_context_and_repeats_with_the_seed(model: GPT) -> None:
    text = continue_text(model, b"def ", length=20, context=12, temperature=1.0, seed=3)
    assert text[:4] == b"def "
    assert len(text) == 24
    assert text == continue_text(model, b"def ", length=20, context=12, temperature=1.0, seed=3)
