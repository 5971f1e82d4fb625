"""`drystone export`: a saved plan as Kubernetes manifests or configs, or trained model files."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drystone.cli.options import ClusterFile, words
from drystone.errors import DrystoneError, InvalidSpec, MissingExtra, UnknownName
from drystone.plan.configs.write import TARGETS

if TYPE_CHECKING:
    from drystone.run.kubernetes import ExportSettings

_MODEL_FILES = ("huggingface", "peft")


def export(
    plan: Annotated[Path, typer.Argument(help="A plan, as `drystone plan --save` writes it.")],
    to: Annotated[
        str,
        typer.Option(
            help=f"jobset, kueue, job or skypilot; {', '.join(TARGETS)}: a config; huggingface or "
            "peft: what was trained.",
            autocompletion=words("jobset", "kueue", "job", "skypilot", *TARGETS, *_MODEL_FILES),
        ),
    ] = "jobset",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="What to write: a file, or a new folder of model files."),
    ] = None,
    also: Annotated[
        list[Path] | None,
        typer.Option(help="Of skypilot: a plan of the same job for another GPU type; repeatable."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A config of that tool: only what the plan changes of it is written."),
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="Of model files: a checkpoint, or the folder that holds them."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of model files.", autocompletion=words("fp32", "bf16", "fp16"))
    ] = "fp32",
    name: Annotated[str, typer.Option(help="Of what is made; none: the model's.")] = "",
    image: Annotated[str, typer.Option(help="A container image with drystone[runtime].")] = "",
    namespace: Annotated[str, typer.Option(help="None: the one that kubectl uses.")] = "",
    command: Annotated[
        str, typer.Option(help="Your own script, started for each rank; none: our runtime.")
    ] = "",
    steps: Annotated[int, typer.Option(help="Optimizer steps in all.", min=1)] = 1000,
    data: Annotated[str, typer.Option(help="As for a job: synthetic, or a file in the image.")] = (
        "synthetic"
    ),
    gpus_per_pod: Annotated[
        int, typer.Option(help="None: as many as divide each type's number, up to 8.", min=0)
    ] = 0,
    node_label: Annotated[
        list[str] | None,
        typer.Option(help="GPU=KEY=VALUE: how nodes of a type are told; else drystone/gpu."),
    ] = None,
    cluster: ClusterFile = None,
    claim: Annotated[
        str, typer.Option(help="A volume claim, or a bucket's address, that is there; none: a new.")
    ] = "",
    queue: Annotated[str, typer.Option(help="Kueue's queue.")] = "drystone",
    queues: Annotated[bool, typer.Option(help="Make Kueue's flavours and queues too.")] = True,
    max_restarts: Annotated[int, typer.Option(help="From the checkpoint.", min=0)] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of YAML.")] = False,
) -> None:
    """Write a plan for Kubernetes or other trainers, or model files.

    One replicated job for each GPU type, torchrun's variables, a volume for checkpoints and the
    plan as a ConfigMap. Nothing is sent to a cluster: kubectl apply -f FILE does that.

    With --to skypilot: one task that takes whichever GPU type is free or cheapest of this plan and
    those of --also, and runs the plan made for it. `sky launch FILE` starts it.

    With --to axolotl, llama-factory, trl, trainer, accelerate or deepspeed: the config that means
    the plan, and how it is started. What the tool cannot express is refused. With --config
    FILE: that file with the plan in it, comments and order kept, shown as a diff; -o writes it.

    With --to huggingface: weights, configuration and tokenizer in a folder that transformers loads,
    adapters added in. With --to peft: the adapter alone.

    With --json: the manifests as one list.
    """
    if to in _MODEL_FILES:
        _write_model(plan, to, checkpoints, out, dtype)
        return
    if to in TARGETS and config is not None:
        _edit_config(plan, to, config, out)
        return
    if to in TARGETS:
        _write_config(plan, to, out, as_json)
        return
    if config is not None:
        raise InvalidSpec(f"there is no config for {to}", where="--config")
    from drystone.run.kubernetes import DEFAULT_IMAGE, ExportSettings, Target

    if cluster is not None:
        from drystone.describe.files.gpu_types import load_gpu_types

        load_gpu_types(cluster)
    if to not in (*Target, "skypilot"):
        raise UnknownName("target", to, [*Target, "skypilot", *TARGETS, *_MODEL_FILES])
    if checkpoints is not None:
        raise InvalidSpec("--checkpoints goes with --to huggingface or peft", where="--checkpoints")
    settings = ExportSettings(
        name=name,
        namespace=namespace,
        command=tuple(shlex.split(command)),
        num_steps=steps,
        data=data,
        gpus_per_pod=gpus_per_pod,
        node_labels=_node_labels(node_label or []),
        claim=claim,
        queue=queue,
        has_queues=queues,
        max_restarts=max_restarts,
        image=image or DEFAULT_IMAGE,
    )
    _write_manifests([plan, *(also or ())], to, settings, out, as_json=as_json)
    if to == "skypilot" and not (image or command):
        typer.echo("Its nodes need drystone[runtime]: name an --image that has it", err=True)
    elif to != "skypilot" and not image:
        typer.echo(
            f"The image is {settings.image}, which you have to build: docs/kubernetes.md", err=True
        )


def _write_manifests(
    paths: Sequence[Path], to: str, settings: ExportSettings, out: Path | None, *, as_json: bool
) -> None:
    from drystone.plan.plan import load_plan
    from drystone.run.kubernetes import Target, export_plan

    plans = [load_plan(path) for path in paths]
    if to == "skypilot":
        from drystone.run.skypilot_task import skypilot_task

        manifests, start = [skypilot_task(plans, settings)], "sky launch"
    elif len(plans) > 1:
        raise InvalidSpec("--also goes with --to skypilot", where="--also")
    else:
        manifests, start = export_plan(plans[0], Target(to), settings), "kubectl apply -f"
    text = _render(manifests, as_json=as_json)
    if out is None:
        print(text, end="")
    else:
        _write_text(out, text)
        typer.echo(f"Written: {out}. Start it with: {start} {out}", err=True)


def _write_config(plan: Path, to: str, out: Path | None, as_json: bool) -> None:
    import json

    from drystone.plan.configs.write import launch_words, setup_of, write_config
    from drystone.plan.configs.write_degrees import FLAG_TOOLS, flag_script
    from drystone.plan.plan import load_plan

    setup = setup_of(load_plan(plan), to)
    table = write_config(setup, to)
    if as_json or to == "deepspeed":
        text = json.dumps(table, indent=2) + "\n"
    elif to in FLAG_TOOLS:
        text = flag_script(setup, table, to)
    else:
        text = _render([table], as_json=False)
    if out is None:
        print(text, end="")
    else:
        _write_text(out, text)
    file = str(out) if out else "FILE"
    typer.echo(launch_words(setup, to, file), err=True)


def _edit_config(plan: Path, to: str, config: Path, out: Path | None) -> None:
    from drystone.plan.configs.edit import edit_config
    from drystone.plan.configs.write import launch_words, setup_of
    from drystone.plan.plan import load_plan

    setup = setup_of(load_plan(plan), to)
    text, difference = edit_config(config, setup, to)
    print(difference, end="")
    if not difference:
        typer.echo("The config means the plan already.", err=True)
    if out is None:
        typer.echo(f"Nothing was written: -o {config} changes the file itself.", err=True)
    else:
        _write_text(out, text)
        typer.echo(f"Written: {out}", err=True)
    typer.echo(launch_words(setup, to, str(out or config)), err=True)


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DrystoneError(f"cannot be written: {error.strerror}", where=str(path)) from None


def _write_model(
    plan: Path, to: str, checkpoints: Path | None, out: Path | None, dtype: str
) -> None:
    """In a process with torch, which the command line itself does without."""
    import importlib.util
    import subprocess
    import sys

    if checkpoints is None or out is None:
        raise InvalidSpec(
            f"--to {to} needs --checkpoints FOLDER and --out NEW_FOLDER", where="drystone export"
        )
    if dtype not in ("fp32", "bf16", "fp16"):
        raise UnknownName("dtype", dtype, ("fp32", "bf16", "fp16"), where="--dtype")
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("writing model files needs torch", "runtime")
    program = [sys.executable, "-P", "-m", "drystone.run.train.export"]
    words = [str(checkpoints), str(plan), str(out), "--dtype", dtype]
    code = subprocess.run(
        [*program, *words, *(["--adapter"] if to == "peft" else [])], check=False
    ).returncode
    if code:
        raise typer.Exit(code)
    typer.echo(f"Written: {out}", err=True)


def _node_labels(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """By GPU type, the label that its nodes have."""
    from drystone.describe.catalogue import find_gpu

    found = {}
    for word in words:
        gpu, _, label = word.partition("=")
        key, has_value, value = label.partition("=")
        if not (gpu and key and has_value and value):
            raise InvalidSpec(
                f"{word!r} is not a label of nodes",
                where="--node-label",
                hint="Write it like A100-80GB-SXM=nvidia.com/gpu.product=NVIDIA-A100-SXM4-80GB",
            )
        found[find_gpu(gpu).name] = (key, value)
    return found


def _render(manifests: Sequence[dict[str, Any]], *, as_json: bool) -> str:
    import json

    import yaml

    if as_json:
        return json.dumps(manifests, indent=2) + "\n"

    class Dumper(yaml.SafeDumper):
        """Scripts and plans as blocks of text, so that people can read them."""

    def block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, block)
    return "---\n".join(
        yaml.dump(manifest, Dumper=Dumper, sort_keys=False) for manifest in manifests
    )
