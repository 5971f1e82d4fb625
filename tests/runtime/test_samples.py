"""What is not predicted weighs nothing, in the loss and in the count."""

import pytest

pytest.importorskip("torch")

import torch

from drystone.describe.model_source import resolve_model
from drystone.run.train.models.transformer import build_model
from drystone.run.train.samples import DOCUMENT, SKIPPED, inputs_of, num_predicted, targets_of

pytestmark = pytest.mark.torch


def test_plain_tokens_are_samples():
    batch = torch.tensor([[5, 6, 7]])

    assert inputs_of(batch).tolist() == [[5, 6]]
    assert targets_of(batch).tolist() == [[6, 7]]
    assert num_predicted(batch) == 2


def test_a_prompt_is_read_and_not_predicted():
    batch = torch.tensor([[5, 6 | SKIPPED, 7]])

    assert inputs_of(batch).tolist() == [[5, 6]]
    assert targets_of(batch).tolist() == [[-100, 7]]
    assert num_predicted(batch) == 1


def test_the_loss_is_that_of_the_predicted_tokens_alone():
    model = build_model(resolve_model("mini-gpt"))
    batch = torch.randint(50, (2, 9))
    marked = batch.clone()
    marked[:, 1:6] |= SKIPPED

    with torch.no_grad():
        hidden, extras = model.embed(batch)
        for block in model.blocks:
            hidden = block(hidden, extras)
        logits = model.head(model.final_norm(hidden))[:, 5:].flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits, batch[:, 6:].flatten())

        assert torch.allclose(model(marked), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["mini-gpt", "mini-llama"])
def test_packed_documents_are_computed_as_if_each_were_alone(name: str):
    model = build_model(resolve_model(name))
    model.is_packed = True
    first, second = torch.randint(50, (1, 7)), torch.randint(50, (1, 5))
    packed = torch.cat((first, second + DOCUMENT), dim=1)
    packed[0, 7] |= SKIPPED  # nothing of its document comes before it

    with torch.no_grad():
        alone = [model(one) * num_predicted(one) for one in (first, second)]
        together = model(packed) * num_predicted(packed)

    assert num_predicted(packed) == 6 + 4
    assert torch.allclose(together, sum(alone), rtol=1e-5)
    model.is_packed = False
    with torch.no_grad():
        assert not torch.allclose(model(packed) * 10, sum(alone), rtol=1e-5)
