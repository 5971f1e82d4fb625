"""What the runtime cannot train is refused when it is submitted: never offered, priced or run."""

import json
from pathlib import Path

import pytest
from systems import TRAINER, running

from drystone.describe.files.job import make_job
from drystone.describe.model_source import MODELS_FILE
from drystone.errors import InvalidSpec
from drystone.run.control.notes import Described
from drystone.service.jobs import Planned
from drystone.service.submission import with_files

ZOO = json.loads(MODELS_FILE.read_text())
TRAIN = {"steps": 2, "batch": 4, "sequence": 16}
MOE = {
    "model_type": "qwen2_moe", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 256,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
}  # fmt: skip
BERT = ZOO["bert-base-uncased"]["config"] | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
SCALED = ZOO["mini-llama"]["config"] | {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}


def write(folder: Path, config: dict, *, has_weights: bool = False) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if has_weights:
        (folder / "model.safetensors").write_bytes(b"")


@pytest.fixture
def system(tmp_path: Path):
    with running(tmp_path / "s") as one:
        yield one


@pytest.mark.slow
def test_nothing_of_it_is_taken_in_and_scripts_are(system, tmp_path: Path):
    write(tmp_path / "moe", MOE)
    write(tmp_path / "bert", BERT)
    write(tmp_path / "scaled", SCALED)
    write(tmp_path / "tuned", ZOO["mini-llama"]["config"], has_weights=True)
    reasons = {
        "./moe": "no shared experts",
        "./bert": "no head but",
        "./scaled": "spiral",
        "./tuned": "is not a safetensors file",
        "tuned/../moe": "no shared experts",
        "mixtral-8x7b": "its rope_theta is not in the list",
    }
    for model, words in reasons.items():
        job = make_job({"model": model, "train": TRAIN}, folder=tmp_path)
        with pytest.raises(InvalidSpec, match=words):
            Planned.of(system.controller, job)
        with pytest.raises(InvalidSpec, match=words) as error:
            system.controller.submit(job)
        assert error.value.exit_code == 2
        assert "script of your own" in error.value.hint
    assert not [one for one in system.events() if isinstance(one, Described)]

    # What was refused is taken once it is mended: the file is read anew.
    (tmp_path / "tuned" / "model.safetensors").unlink()
    mended = make_job({"model": "./tuned", "train": TRAIN}, folder=tmp_path)
    assert Planned.of(system.controller, mended).options

    script = {"model": "./moe", "command": f"python {TRAINER}", "train": {"steps": 2, "batch": 4}}
    job, _ = system.controller.submit(make_job(script, folder=tmp_path))
    assert system.wait_over(job) == ["done"]


class _Elsewhere:
    """A service on another machine, which must not be sent what it would refuse."""

    is_remote = True

    def __init__(self) -> None:
        self.sent: list[str] = []

    def upload(self, bundle: str, name: str, path: Path) -> None:
        self.sent.append(name)


def test_weights_that_nobody_loads_are_not_sent_anywhere(tmp_path: Path):
    write(tmp_path / "tuned", ZOO["mini-llama"]["config"], has_weights=True)
    client = _Elsewhere()

    def send(**job: object) -> dict:
        return with_files(client, {"job": {"train": TRAIN, **job}, "folder": str(tmp_path)})

    with pytest.raises(InvalidSpec, match="is not a safetensors file"):
        send(model="./tuned")
    assert not client.sent
    send(model="./tuned/config.json")
    assert client.sent == ["tuned/config.json"]
    send(model="./tuned", command="python train.py")
    assert "tuned/model.safetensors" in client.sent
