"""A model that no zoo knows: drystone traces it without allocating a weight.

    drystone estimate examples/my_module.py:build_model --gpu A100-80G --layout dp=8,micro=4

`build_model` takes no argument and returns a `torch.nn.Module`. Drystone guesses the input from
`forward` and from the first layer. Where a guess would be wrong, say it, as `example_batch` does
here: it returns the arguments of one forward pass.

Run the file itself to train the model for three steps on CPU, at a size that fits.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own custom

NUM_LETTERS = 512


class GatedConvolution(nn.Module):
    """Looks back `width` letters, channel by channel, and gates what it sees."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.norm = nn.LayerNorm(size)
        self.gate = nn.Linear(size, 2 * size)
        self.mix = nn.Conv1d(size, size, width, groups=size)
        self.out = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Letters by channels in, the same out."""
        value, gate = self.gate(self.norm(x)).chunk(2, dim=-1)
        past = F.pad(value.transpose(1, 2), (self.width - 1, 0))
        return x + self.out(self.mix(past).transpose(1, 2) * F.silu(gate))


class LetterModel(nn.Module):
    """Predicts the next letter; every third block looks further back."""

    def __init__(self, *, size: int, num_blocks: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(NUM_LETTERS, size)
        self.blocks = nn.ModuleList(
            GatedConvolution(size, 32 if index % 3 == 2 else 4) for index in range(num_blocks)
        )
        self.head = nn.Linear(size, NUM_LETTERS, bias=False)
        self.head.weight = self.letters.weight

    def forward(self, letters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The mean loss over all letters."""
        x = self.letters(letters)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), following.flatten())


def build_model(*, size: int = 4096, num_blocks: int = 48) -> LetterModel:
    """The model to be estimated: 2.4 billion parameters."""
    return LetterModel(size=size, num_blocks=num_blocks)


def build_small() -> LetterModel:
    """One that trains on a laptop: `drystone submit examples/job_function.yaml`."""
    return build_model(size=64, num_blocks=6)


def example_batch(micro_batch: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two arguments of one forward pass."""
    letters = torch.randint(NUM_LETTERS, (micro_batch, seq_len + 1))
    return letters[:, :-1], letters[:, 1:]


def main() -> None:
    """Train a small one for three steps."""
    torch.manual_seed(0)
    model = build_small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        loss = model(*example_batch(4, 128))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")  # a script


if __name__ == "__main__":
    main()
