"""What is written is what the tools' own parsers read, where those tools are installed.

`pip install --no-deps torchtitan tyro typeguard docstring_parser shtab trl` in an environment of
its own is enough for all of it.
"""

import dataclasses
import random
import shlex

import pytest
import yaml

from drystone.describe.layout import Sharding
from drystone.describe.recipe import Loss, Precision, Recompute
from drystone.plan.configs.setup import Setup
from drystone.plan.configs.write import write_config
from drystone.plan.configs.write_degrees import flag_words

SPLIT = Setup(
    model="llama-3.1-8b", num_gpus=32, seq_len=4096, micro_batch=2, accumulation=4, tp=2, pp=2,
    cp=2, sharding=Sharding.ZERO3, sequence_parallel=True, recompute=Recompute.parse("full"),
    precision=Precision.BF16_MIXED, loss=Loss.CHUNKED, compiled=True,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torchtitan_reads_the_options_as_the_plan_means_them():
    tyro = pytest.importorskip("tyro", reason="left out: pip install --no-deps torchtitan tyro")
    configs = pytest.importorskip(
        "torchtitan.config.configs", reason="left out: pip install --no-deps torchtitan tyro"
    )

    @dataclasses.dataclass
    class Job:
        """The sections of torchtitan that need no GPU to be imported."""

        training: configs.TrainingConfig = dataclasses.field(default_factory=configs.TrainingConfig)
        parallelism: configs.ParallelismConfig = dataclasses.field(
            default_factory=configs.ParallelismConfig
        )
        compile: configs.CompileConfig = dataclasses.field(default_factory=configs.CompileConfig)

    table = write_config(SPLIT, "torchtitan")
    words = [word for text in flag_words(table, "torchtitan") for word in shlex.split(text)]
    start = words.index("--training.seq_len")  # --module and --config are taken off before
    assert words[-1] == "activation_checkpoint:full"
    job = tyro.cli(Job, args=words[start:-1])
    assert (job.training.seq_len, job.training.global_batch_size) == (4096, SPLIT.global_batch())
    assert job.training.local_batch_size == 2 * 4  # in a pipeline: all of its micro-batches
    assert job.parallelism.pipeline_parallel_microbatch_size == 2
    assert job.parallelism.data_parallel_shard_degree == 4
    assert job.parallelism.tensor_parallel_degree == 2
    assert job.parallelism.pipeline_parallel_degree == 2
    assert job.parallelism.context_parallel_degree == 2
    assert job.compile.enable


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trl_reads_its_yaml(tmp_path):
    trl = pytest.importorskip("trl", reason="left out: pip install --no-deps trl")
    setup = dataclasses.replace(
        SPLIT, tp=1, pp=1, cp=1, num_gpus=8, sharding=Sharding.NONE, sequence_parallel=False,
        compiled=False, loss=Loss.PLAIN, model="gpt2",
    )  # fmt: skip
    path = tmp_path / "sft.yaml"
    table = write_config(setup, "trl") | {"output_dir": str(tmp_path), "use_cpu": True}
    path.write_text(yaml.safe_dump(table))
    parser = trl.TrlParser((trl.SFTConfig, trl.ModelConfig))
    training, model = parser.parse_args_and_config(["--config", str(path)])
    assert training.per_device_train_batch_size == 2
    assert training.gradient_accumulation_steps == 4
    assert training.max_length == 4096
    assert training.gradient_checkpointing
    assert model.model_name_or_path == "gpt2"
    assert not model.use_peft


def test_a_random_order_of_flags_is_the_same(tmp_path):
    from drystone.plan.configs.read import read_configs

    table = write_config(dataclasses.replace(SPLIT, model="llama-3.1-8b"), "torchtitan")
    words = flag_words(table, "torchtitan")[:-1]
    found = []
    for seed in range(5):
        random.Random(seed).shuffle(words)
        path = tmp_path / f"{seed}.sh"
        path.write_text(
            f"torchrun -m torchtitan.train {' '.join(words)} activation_checkpoint:full\n"
        )
        found.append(read_configs([path], num_gpus=32).setup)
    assert all(setup == SPLIT for setup in found)
