"""Your own model and loop on two unequal ranks; prints the losses that one device would:
torchrun --nproc-per-node 2 examples/train_uneven.py    # or: python examples/train_uneven.py
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from drystone.run.train.api import NamedBlocks, RankWork, SyntheticTokens, Trainer, joined


class MyModel(nn.Module):  # noqa: D101
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(97, 32), nn.Linear(32, 97)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList(copy.deepcopy(layer) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # noqa: D102
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


torch.manual_seed(0)
with joined() as wire:
    slow = RankWork(batch=2, micro_batch=1, state_share=0.75)  # slow, with much memory
    fast = RankWork(batch=6, micro_batch=3, state_share=0.25)
    works = [slow, fast] if wire.num_ranks == 2 else [RankWork(batch=8, micro_batch=8)]
    trainer = Trainer(NamedBlocks(MyModel(), "blocks"), works, wire=wire,
                      optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3))  # fmt: skip
    for batches in trainer.iterate(SyntheticTokens(seq_len=16, vocab_size=97).read, num_steps=20):
        report = trainer.step(batches)
        if wire.rank == 0:
            print(f"step {report.step}: loss {report.loss:.4f}")
