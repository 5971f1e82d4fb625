"""Launch scripts are read and never run."""

import pytest

from drystone.errors import DrystoneError
from drystone.plan.configs.read import read_configs
from drystone.plan.configs.shell import options_of, read_script


def options(text):
    script = read_script(text, "run.sh")
    return options_of(script.words, script.variables)


def test_variables_arrays_sums_and_conditions_are_followed():
    found = options(
        """#!/bin/bash
GPUS=8 # of a node
NODES=${NODES:-2}
WORLD=$(($GPUS*$NODES))
TP=${TP:-"4"}
ARGS=(
    --tensor-model-parallel-size $TP   # a comment
    --world $WORLD
)
DTYPE="fp8"
if [[ "$DTYPE" == "fp8" ]]; then
    ARGS+=("--fp8-format hybrid")
else
    ARGS+=(--bf16)
fi
if [ -n "${WANDB_API_KEY}" ]; then ARGS+=(--wandb-project p); fi
mkdir -p out && rm -rf "$HOME"
torchrun --nproc_per_node $GPUS pretrain_gpt.py \\
    ${ARGS[@]} --recompute-modules mlp moe --data '$HOME/x'
"""
    )
    assert found["tensor_model_parallel_size"] == 4
    assert found["world"] == 16
    assert found["nproc_per_node"] == 8
    assert found["fp8_format"] == "hybrid"
    assert "bf16" not in found
    assert "wandb_project" not in found
    assert found["recompute_modules"] == ["mlp", "moe"]
    assert found["data"] == "$HOME/x"
    assert found["PROGRAM"] == "pretrain_gpt.py"


def test_the_first_round_of_a_loop_and_a_command_in_quotes_count():
    found = options(
        """CONFIGS=("2,4,True" "4,2,False")
for CONFIG in "${CONFIGS[@]}"; do
    IFS=',' read -r TP PP SP <<< "$CONFIG"
    CMD="python run_recipe.py --recipe qwen3_8b_sft_config"
    CMD="$CMD model.tensor_model_parallel_size=$TP model.sequence_parallel=$SP"
    srun bash -c "$CMD"
done
"""
    )
    assert found["recipe"] == "qwen3_8b_sft_config"
    assert found["model.tensor_model_parallel_size"] == 2
    assert found["model.sequence_parallel"] is True


def test_what_a_script_does_not_say_is_refused_by_its_key(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("torchrun pretrain_gpt.py --tensor-model-parallel-size $1 --bf16\n")
    with pytest.raises(DrystoneError) as refusal:
        read_configs([path])
    assert "tensor_model_parallel_size" in refusal.value.where


def test_a_quotation_that_never_ends_is_refused(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text('torchrun pretrain_gpt.py --bf16 "\n')
    with pytest.raises(DrystoneError, match="never ends"):
        read_configs([path])


def test_flags_describe_the_model(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --swiglu "
        "--ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --vocab-size 128256 --untie-embeddings-and-output-weights "
        "--micro-batch-size 1 --global-batch-size 64 --seq-length 8192 --bf16 "
        "--recompute-granularity full --recompute-method block --recompute-num-layers 16 "
        "--tensor-model-parallel-size 2\n"
    )
    setup = read_configs([path]).setup
    assert setup.shape is not None
    assert setup.shape.num_layers == 32
    assert setup.num_gpus == 8
    assert (setup.accumulation, str(setup.recompute)) == (16, "full/2")
