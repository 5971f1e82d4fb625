"""The options that describe a recipe, shared by every verb that takes a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drystone.cli.names import complete_models, words

_PRECISIONS = words("auto", "fp32", "tf32", "bf16-mixed", "fp16-mixed", "bf16", "fp16",
                    "fp8-mixed", "amp-bf16", "amp-fp16")  # fmt: skip
_OPTIMIZERS = words("adam", "adam-8bit", "sgd", "sgd-momentum", "adafactor", "lion", "muon", "lamb")

ModelName = Annotated[
    str,
    typer.Argument(
        help="A name (see `drystone models`), a config.json or its folder, or module.py:function.",
        autocompletion=complete_models,
    ),
]
SeqLen = Annotated[
    int, typer.Option(help="Tokens in a sequence; 0: as the model's context, 4096 at most.")
]
PrecisionWord = Annotated[
    str,
    typer.Option(
        help="auto (bf16-mixed where the GPU knows it, else fp16-mixed), fp32, tf32, bf16-mixed, "
        "fp16-mixed, bf16, fp16, fp8-mixed, amp-bf16, amp-fp16.",
        autocompletion=_PRECISIONS,
    ),
]
OptimizerWord = Annotated[
    str,
    typer.Option(
        help="adam, adam-8bit, sgd, sgd-momentum, adafactor, lion, muon, lamb.",
        autocompletion=_OPTIMIZERS,
    ),
]
StepKernelWord = Annotated[str, typer.Option(help="fused, foreach or loop.")]
AttentionWord = Annotated[str, typer.Option(help="fused or eager.")]
LossWord = Annotated[str, typer.Option(help="plain, fused or chunked.")]
TuningWord = Annotated[
    str, typer.Option(help="full, lora or qlora.", autocompletion=words("full", "lora", "qlora"))
]
LoraRank = Annotated[int, typer.Option(help="Rank of the adapters.")]
OffloadWord = Annotated[str, typer.Option(help="none, optimizer, state or activations.")]
Compiled = Annotated[bool, typer.Option("--compile", help="With torch.compile.")]
Dropout = Annotated[float, typer.Option(help="Share of activations dropped.")]
LauncherName = Annotated[
    str, typer.Option(help="Whose conventions on bytes apply: see docs/launchers.md.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", help="A cluster file: GPU types of your own, and prices."),
]
