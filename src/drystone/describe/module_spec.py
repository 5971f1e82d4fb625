"""A module of somebody's own (`module.py:function`), as a job carries it: names and traced numbers.

The numbers were traced once, when the job was submitted (`estimate/module/probe.py`), and stay with
it in the log, so that planning it again needs neither torch nor the file. They hold for one length
of samples and one recipe.
"""

from __future__ import annotations

from dataclasses import dataclass

from drystone.errors import InvalidSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSpec:
    """What the layered engine and its planner must know of a module."""

    name: str
    path: str  # of the Python file
    function: str  # that returns the module
    block_list: str  # the list of its blocks, as in `model.layers`
    num_layers: int
    vocab_size: int
    seq_len: int  # that it was traced with
    block_params: int  # of the largest block
    outer_params: int  # of all that is no block
    num_params: int
    # Operations of one sample: a block forward and backward, and all that is no block, both ways.
    block_forward_flops: float
    block_backward_flops: float  # without computing the block again
    outer_flops: float
    # Bytes of one micro-batch: of one sample, and of each further one.
    first_hidden_bytes: float  # what passes from block to block
    further_hidden_bytes: float
    first_block_bytes: float  # the most that one block's backward pass needs above it
    further_block_bytes: float
    first_outer_bytes: float  # the same of head and loss
    further_outer_bytes: float

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.vocab_size < 1 or self.seq_len < 1:
            raise InvalidSpec(f"{self.name}: blocks, vocabulary and length must be above 0")

    @property
    def context_length(self) -> int:
        """The length of samples, as models have it."""
        return self.seq_len
