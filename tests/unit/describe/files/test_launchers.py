"""A launcher before a script is taken off as the launcher itself would read its words."""

import shlex
from pathlib import Path

import pytest

from drystone.describe.files import launchers
from drystone.describe.files.job import parse_job
from drystone.describe.files.launchers import Launch, unwrap
from drystone.errors import InvalidSpec

REST = ("train.py", "--output_dir", "out", "--nnodes", "9")


def unwrapped(text: str) -> Launch:
    return unwrap((*shlex.split(text), *REST))


@pytest.mark.parametrize(
    ("text", "command", "ranks"),
    [
        ("torchrun", ("python", *REST), (1, 1)),
        ("torchrun --nproc-per-node 4 --nnodes=2", ("python", *REST), (8, 8)),
        ("torchrun --nproc_per_node=2 --nnodes 1:4 --rdzv-id 7", ("python", *REST), (2, 8)),
        ("torchrun --standalone --nproc_per_node gpu -t3", ("python", *REST), (None, None)),
        ("torchrun --no-python --nproc-per-node 2", REST, (2, 2)),
        ("/mine/bin/torchrun -r 3 -m", ("/mine/bin/python", "-m", *REST), (1, 1)),
        ("python3 -m torch.distributed.run --nnodes 2", ("python3", *REST), (2, 2)),
        ("accelerate launch", ("python", *REST), (None, None)),
        ("accelerate launch --multi_gpu --num_processes 4", ("python", *REST), (4, 4)),
        ("accelerate-launch --num_processes=8 --num_machines 2", ("python", *REST), (8, 8)),
        ("python", ("python", *REST), (None, None)),
        ("python -m my.module", ("python", "-m", "my.module", *REST), (None, None)),
    ],
)
def test_the_script_is_what_is_left(text: str, command: tuple[str, ...], ranks: tuple):
    found = unwrapped(text)

    assert found.command == command
    assert (found.min_ranks, found.max_ranks) == ranks


def test_what_accelerate_tells_the_script_is_told():
    found = unwrapped("accelerate launch --cpu --mixed_precision bf16 --num_processes 2")

    assert found.environment == {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torchrun --numa-binding node", "--numa-binding of torchrun is not taken over"),
        ("torchrun --nproc-per-node 0", "cannot start 0 processes"),
        ("torchrun --nnodes 4:1", "cannot start 1 processes on 4:1 nodes"),
        ("accelerate launch --use_fsdp", "--use_fsdp of accelerate launch is not taken over"),
        ("accelerate launch --config_file a.yaml", "--config_file of accelerate launch"),
        ("deepspeed", "deepspeed would start all ranks on each GPU"),
        ("python -m torch.distributed.launch", "would start all ranks"),
    ],
)
def test_what_cannot_be_done_is_refused(text: str, message: str):
    with pytest.raises(InvalidSpec, match=message) as error:
        unwrapped(text)
    assert error.value.hint


def test_a_launcher_without_a_script_is_refused():
    with pytest.raises(InvalidSpec, match="is given no script"):
        unwrap(("torchrun", "--nproc-per-node", "2"))


def test_its_number_of_ranks_counts_unless_the_file_names_one():
    text = "command: torchrun --nproc-per-node 2 train.py\ntrain: {steps: 3}\n"
    as_it_stands = parse_job(text, folder=Path("/tmp"))
    elastic = parse_job(text + "gpus: {max: 8}", folder=Path("/tmp"))

    assert as_it_stands.command == ("python", "train.py")
    assert (as_it_stands.min_gpus, as_it_stands.max_gpus) == (2, 2)
    assert (elastic.min_gpus, elastic.max_gpus) == (1, 8)


def test_variables_of_the_file_go_before_those_of_the_launcher():
    text = (
        "command: accelerate launch --mixed_precision fp16 a.py\ntrain: {steps: 3}\n"
        "environment: {ACCELERATE_MIXED_PRECISION: bf16}"
    )
    job = parse_job(text, folder=Path("/tmp"))

    assert dict(job.environment) == {"ACCELERATE_MIXED_PRECISION": "bf16"}


def takes_value(parser) -> dict[str, bool]:
    """By every name of an option, with underscores, whether a value follows."""
    return {
        name.removeprefix("--").replace("-", "_"): action.nargs != 0
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    }


@pytest.mark.torch
@pytest.mark.parametrize("name", ["torchrun", "accelerate"])
def test_options_are_those_that_the_launcher_itself_knows(name: str):
    if name == "torchrun":
        torchrun = pytest.importorskip("torch.distributed.run")
        known, ours = takes_value(torchrun.get_args_parser()), launchers._TORCHRUN
    else:
        accelerate = pytest.importorskip("accelerate.commands.launch")
        known, ours = takes_value(accelerate.launch_command_parser()), launchers._ACCELERATE

    assert {option: known[option] for option in sorted(ours.valued | ours.flags)} == {
        option: option in ours.valued for option in sorted(ours.valued | ours.flags)
    }
