"""Configs of other trainers: what is written is read back, what cannot be said is refused."""

import random
from dataclasses import replace

import pytest
import yaml

from drystone.describe.layout import Schedule, Sharding
from drystone.describe.recipe import (
    AttentionKernel,
    Loss,
    Offload,
    Optimizer,
    Precision,
    Recompute,
    Tuning,
)
from drystone.errors import DrystoneError, InvalidSpec
from drystone.plan.configs.read import read_configs
from drystone.plan.configs.setup import Setup
from drystone.plan.configs.torchtitan import named_configs
from drystone.plan.configs.write import write_config
from drystone.plan.configs.write_degrees import FLAG_TOOLS, flag_script

TRAINERS = ("axolotl", "llama-factory", "trl", "trainer")


def random_setup(dice: random.Random, tool: str) -> Setup:
    sharding = dice.choice(list(Sharding))
    tuning = dice.choice(list(Tuning)) if tool != "trainer" else Tuning.FULL
    offloads = [Offload.NONE]
    if sharding:
        offloads.append(Offload.OPTIMIZER)
    if sharding is Sharding.ZERO3:
        offloads.append(Offload.STATE)
    offload = dice.choice(offloads)
    can_keep = sharding is Sharding.ZERO3 and offload is not Offload.OPTIMIZER
    return Setup(
        model="gpt2",
        num_gpus=dice.choice([1, 2, 4, 8, 16]),
        seq_len=0 if tool == "trainer" else dice.choice([512, 2048, 8192]),
        micro_batch=dice.randint(1, 16),
        accumulation=dice.randint(1, 32),
        sharding=sharding,
        keep_gathered=can_keep and dice.random() < 0.5,
        recompute=Recompute.parse(dice.choice(["none", "full"])),
        precision=dice.choice([Precision.BF16_MIXED, Precision.FP16_MIXED, Precision.FP32]),
        optimizer=dice.choice([Optimizer.ADAM, Optimizer.ADAM_8BIT, Optimizer.LION]),
        attention=dice.choice(list(AttentionKernel)) if tool != "trainer" else "fused",
        loss=dice.choice([Loss.PLAIN, Loss.CHUNKED]),
        tuning=tuning,
        lora_rank=dice.choice([4, 16, 64]) if tuning is not Tuning.FULL else 16,
        offload=offload,
        compiled=dice.random() < 0.3,
    )


def written(folder, setup, *targets):
    paths = []
    for target in targets:
        name = "deepspeed.json" if target == "deepspeed" else f"{target}.yaml"
        (folder / name).write_text(yaml.safe_dump(write_config(setup, target), sort_keys=False))
        paths.append(folder / name)
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("tool", TRAINERS)
def test_what_is_written_is_read_back(tool, tmp_path):
    dice = random.Random(tool)
    for _ in range(500):
        setup = random_setup(dice, tool)
        if tool == "axolotl":
            if not setup.keep_gathered:
                written(tmp_path, setup, "deepspeed")  # the config names it where it needs it
            paths, num_gpus = written(tmp_path, setup, tool), setup.num_gpus
        else:
            paths, num_gpus = written(tmp_path, setup, tool, "accelerate"), 0
        asked = read_configs(paths, num_gpus=num_gpus)

        assert asked.setup == setup
        assert asked.unused == ()


def random_split(dice: random.Random, tool: str) -> Setup:
    """Any setup: degrees, hybrid sharding, schedules; not every tool can say each."""
    tp, pp, cp = (dice.choice(sizes) for sizes in ([1, 2, 4], [1, 1, 2, 4], [1, 1, 2]))
    dp, accumulation = dice.choice([2, 4, 8]), dice.choice([4, 8, 16])
    model = dice.choice([row["model"] for row in named_configs().values()])
    low = [Precision.FP8_MIXED, Precision.MXFP8_MIXED, Precision.NVFP4_MIXED]
    tuning = dice.choice([Tuning.FULL, Tuning.FULL, *Tuning])
    return Setup(
        model=model if tool in ("torchtitan", "nemo") else "",
        num_gpus=dp * tp * pp * cp,
        seq_len=dice.choice([2048, 4096, 8192]),
        micro_batch=dice.choice([1, 2, 4]),
        accumulation=accumulation,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=dice.choice([1, 1, 2]),
        sharding=dice.choice(list(Sharding)),
        replicas=dice.choice([0, 0, 2]) if dp > 2 else 0,
        keep_gathered=dice.random() < 0.3,
        sequence_parallel=tp > 1 and dice.random() < 0.7,
        virtual_stages=dice.choice([1, 2]) if pp > 1 else 1,
        schedule=dice.choice([Schedule.ONE_F_ONE_B, Schedule.ONE_F_ONE_B, Schedule.GPIPE]),
        recompute=Recompute.parse(dice.choice(["none", "full", "selective", "selective[mlp]"])),
        precision=dice.choice([Precision.BF16_MIXED, Precision.BF16_MIXED, Precision.BF16,
                               Precision.FP16_MIXED, Precision.FP32, *low]),
        optimizer=dice.choice([Optimizer.ADAM, Optimizer.ADAM, Optimizer.MUON]),
        attention=dice.choice([AttentionKernel.FUSED, *AttentionKernel]),
        loss=dice.choice(list(Loss)),
        tuning=tuning,
        lora_rank=dice.choice([4, 64]) if tuning is not Tuning.FULL else 16,
        offload=dice.choice([Offload.NONE, Offload.NONE, Offload.STATE, Offload.OPTIMIZER]),
        compiled=dice.random() < 0.2,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["torchtitan", "megatron", "megatron-bridge", "nemo"])
def test_plans_that_split_models_are_read_back_from_what_is_written(tool, tmp_path):
    dice = random.Random(tool)
    num_written = num_refused = 0
    while num_written < 500:
        setup = random_split(dice, tool)
        if setup.pp == 1 or setup.virtual_stages > 1:
            setup = replace(setup, schedule=Schedule.ONE_F_ONE_B)
        if setup.sharding is not Sharding.ZERO3:
            setup = replace(setup, keep_gathered=False)
        if not setup.sharding:
            setup = replace(setup, replicas=0)
        try:
            table = write_config(setup, tool)
        except InvalidSpec:
            num_refused += 1
            assert num_refused < 200_000
            continue
        path = tmp_path / ("train.sh" if tool in FLAG_TOOLS else "train.yaml")
        is_script = tool in FLAG_TOOLS
        path.write_text(flag_script(setup, table, tool) if is_script else yaml.safe_dump(table))
        asked = read_configs([path], num_gpus=setup.num_gpus)

        assert asked.tools == (tool,)
        assert asked.setup == setup, table
        assert asked.unused == ()
        num_written += 1


@pytest.mark.parametrize(
    ("tool", "change", "told"),
    [
        ("trainer", {"tuning": Tuning.LORA}, "trainer has no key that says tuning"),
        ("trl", {"optimizer": Optimizer.LAMB}, "optimizer"),
        ("llama-factory", {"precision": Precision.NVFP4_MIXED}, "precision"),
        ("axolotl", {"offload": Offload.STATE}, "offload state with zero=0"),
        ("accelerate", {"offload": Offload.ACTIVATIONS}, "offload activations"),
    ],
)
def test_what_a_tool_cannot_say_is_refused(tool, change, told):
    with pytest.raises(InvalidSpec) as refusal:
        write_config(replace(Setup(model="gpt2", num_gpus=8), **change), tool)

    assert told in refusal.value.message
    assert "--tool" in refusal.value.hint


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("base_model: gpt2\nmicro_batch_size: 2\nrl: dpo\n", "rl"),
        ("base_model: gpt2\nmicro_batch_size: two\n", "micro_batch_size"),
        ("base_model: gpt2\nmicro_batch_size: 2\noptimizer: adamw_torch_4bit\n", "optimizer"),
        ("model_name_or_path: gpt2\nfinetuning_type: oft\n", "finetuning_type"),
        ("model_name_or_path: gpt2\nfinetuning_type: lora\nstage: ppo\n", "stage"),
        ("nothing: here\n", "tool"),
        ("distributed_type: FSDP\nnum_processes: 8\n", "what to train"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_its_key(config, told, tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text(config)

    with pytest.raises(DrystoneError) as refusal:
        read_configs([path])

    assert told in f"{refusal.value.where} {refusal.value.message}"


def test_words_that_configs_have_mean_what_their_tools_do(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text(
        "base_model: gpt2\nsequence_len: 500_000\nmicro_batch_size: 2\nbf16: auto\n"
        "gradient_checkpointing: offload\nfsdp: [full_shard, auto_wrap, offload]\n"
        "lora_target_modules: [q_proj]\nunfrozen_parameters: [lm_head]\nlearning_rate: 1e-4\n"
    )
    asked = read_configs([path], num_gpus=4)

    assert asked.setup.seq_len == 500_000
    assert asked.setup.precision is Precision.BF16_MIXED
    assert asked.setup.sharding is Sharding.ZERO3
    assert asked.setup.offload is Offload.STATE  # of both offloads the later key's
    assert set(asked.unused) == {"lora_target_modules", "unfrozen_parameters"}
    assert str(asked.setup.layout(4)) == "dp=4,tp=1,pp=1,micro=2,zero=3"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the tools' own coming changes
def test_the_tools_own_parsers_read_what_is_written(tmp_path):
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file
    from transformers import HfArgumentParser, TrainingArguments

    setup = replace(
        random_setup(random.Random(1), "trainer"),
        num_gpus=8, sharding=Sharding.ZERO3, offload=Offload.NONE, keep_gathered=True,
        precision=Precision.BF16_MIXED, micro_batch=3, accumulation=5, compiled=False,
    )  # fmt: skip
    [beside] = written(tmp_path, setup, "accelerate")
    cluster = load_config_from_file(str(beside))
    assert (cluster.num_processes, cluster.mixed_precision) == (8, "bf16")
    assert cluster.fsdp_config["fsdp_reshard_after_forward"] is False

    table = write_config(setup, "trainer") | {"output_dir": str(tmp_path), "use_cpu": True}
    del table["model_name_or_path"]
    [arguments] = HfArgumentParser(TrainingArguments).parse_dict(table)
    assert arguments.per_device_train_batch_size == 3
    assert arguments.gradient_accumulation_steps == 5
    assert arguments.bf16
