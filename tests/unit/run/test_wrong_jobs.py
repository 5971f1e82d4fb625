"""Forty wrong job files: each refused in one clear line, and nothing is started."""

import json
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "runtime"))
from tokenizer_cases import save_tokenizer

from drystone.cli import main as cli
from drystone.run import data_look
from drystone.run.train.data import look

pytestmark = pytest.mark.torch

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
CHAT = {"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "cat"}]}
GOOD = (
    "model: ./llama\nfrom: scratch\ndata: chats.jsonl\ntrain: {steps: 2, batch: 2, sequence: 16}\n"
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    save_tokenizer(folder / "llama")
    save_tokenizer(folder / "large", words=90)
    (folder / "llama" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (folder / "llama" / "model.safetensors").write_bytes(b"\xff" * 64)
    (folder / "chats.jsonl").write_text(json.dumps(CHAT) + "\n", encoding="utf-8")
    (folder / "cut.jsonl").write_text(json.dumps(CHAT) + '\n{"mess', encoding="utf-8")
    (folder / "empty.jsonl").write_text("", encoding="utf-8")
    (folder / "other.jsonl").write_text('{"body": "the cat"}\n', encoding="utf-8")
    (folder / "user.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "the"}]}\n', encoding="utf-8"
    )
    (folder / "high.jsonl").write_text('{"input_ids": [1, 2, 99]}\n', encoding="utf-8")
    (folder / "short.bin").write_bytes(b"abcd")
    (folder / "odd.u32").write_bytes(b"abcdefg")
    (folder / "shard.parquet").write_bytes(b"PAR1 and no more")
    (folder / "table.csv").write_text("a,b\n", encoding="utf-8")
    mixed = folder / "mixed"
    mixed.mkdir()
    shutil.copy(folder / "chats.jsonl", mixed / "a.jsonl")
    (mixed / "b.txt").write_text("the cat", encoding="utf-8")
    (folder / "nothing").mkdir()
    bert = {**CONFIG, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (folder / "bert.json").write_text(json.dumps(bert), encoding="utf-8")
    (folder / "broken.json").write_text("{", encoding="utf-8")
    return folder


def data(text: str) -> str:
    return GOOD.replace("data: chats.jsonl", f"data: {text}")


def train(text: str) -> str:
    return GOOD.replace("steps: 2,", f"steps: 2, {text},")


WRONG = [
    (GOOD.replace("model:", "modle:"), "'modle'.*model"),
    (GOOD.replace("./llama", "./lama"), "lama"),
    (GOOD.replace("./llama", "broken.json"), "broken.json"),
    (GOOD.replace("./llama", "bert.json"), "bert"),
    (GOOD.replace("from: scratch\n", ""), "model.safetensors"),
    (GOOD.replace("scratch", "best"), "from.*scratch"),
    (GOOD.replace("steps: 2", "steps: 2, epochs: 1"), "contradict"),
    (GOOD.replace("steps: 2, ", ""), "how much"),
    (GOOD.replace("steps: 2", "steps: two"), "not a count"),
    (GOOD.replace("batch: 2", "batch: 0"), "count of 0"),
    (train("precision: fp64"), "precision.*bf16-mixed"),
    (train("learning_rate: -1"), "learning_rate.*greater than 0"),
    (train("clip: -1"), "clip"),
    (train("seed: -3"), "seed"),
    (train("optimizer: adamx"), "optimizer"),
    (train("optimizer: {name: adamw, lr: 1e-4}"), "'lr'"),
    (train("optimizer: {schedule: exponential}"), "schedule.*cosine"),
    (train("optimizer: {warmup: 3 percent}"), "3%"),
    (train("optimizer: {beta2: 1.5}"), "beta2"),
    (train("optimizer: {name: sgd, beta1: 0.8}"), "optimizer.beta1: sgd has no beta1"),
    (train("optimizer: adafactor, epsilon: 1e-6"), "train.epsilon: adafactor has no epsilon"),
    (train("on_bad_loss: ignore"), "on_bad_loss.*skip"),
    (GOOD + "tune: {method: lora, targets: [w_proj]}\n", "w_proj.*q_proj"),
    (
        GOOD + "tune: {method: lora, targets: qkv_proj}\n",
        "beside qkv_proj Write q_proj, k_proj, v_proj",
    ),
    (GOOD + "tune: {method: lorra}\n", "method.*lora"),
    (GOOD + "tune: {method: lora, rank: 0}\n", "rank"),
    (GOOD + "tune: {method: full, rank: 8}\n", "rank is of adapters"),
    (GOOD + "tune: {rank: 8}\n", "`method` is missing"),
    (GOOD + "evaluate: {every: 2}\n", "no held-out data"),
    (data("{train: chats.jsonl, eval: chats.jsonl}") + "evaluate: {keep_best: true}\n", "every"),
    (GOOD + "report: [tensorbord]\n", "report.*tensorboard"),
    (data("{train: chats.jsonl, format: chats}"), "format.*chat"),
    (data("nowhere.jsonl"), "is not there"),
    (data("table.csv"), "not a known kind of data"),
    (data("empty.jsonl"), "is empty"),
    (data("nothing"), "no data of a known kind"),
    (data("mixed"), "several kinds"),
    (data("cut.jsonl"), "line 2.*no JSON"),
    (data("other.jsonl"), "body.*format"),
    (data("{train: chats.jsonl, column: text}"), "no column text.*messages"),
    (data("{train: chats.jsonl, format: prompt}"), "no column prompt and completion"),
    (data("user.jsonl"), "nothing to predict"),
    (data("high.jsonl"), "token 99, the model knows 64"),
    (data("{train: chats.jsonl, tokenizer: large}"), "knows 90 tokens, the model 64"),
    (data("{train: chats.jsonl, tokenizer: nothing}"), "no readable tokenizer"),
    (data("{train: chats.jsonl, eval: empty.jsonl}"), "empty.jsonl.*is empty"),
    (data("short.bin"), "one sample needs 17"),
    (data("odd.u32"), "cannot be read"),
    (data("{train: short.bin, pack: true}"), "could be packed"),
    (data("shard.parquet"), "damaged|pyarrow"),
    (GOOD + "gpus: {max: 1, min: 2}\n", "min 2 is above"),
]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The look at the data, without the seconds that a process of its own takes to start."""

    def run(command: list[str], **_: object) -> object:
        from contextlib import redirect_stdout
        from io import StringIO
        from types import SimpleNamespace

        assert command[2:4] == ["-m", "drystone.run.train.data.look"]
        monkeypatch.setattr(sys, "argv", command[3:])
        with redirect_stdout(StringIO()) as out:
            look.main()
        return SimpleNamespace(stdout=out.getvalue(), stderr="", returncode=0)

    monkeypatch.setattr(data_look.subprocess, "run", run)
    monkeypatch.setenv("DRYSTONE_CACHE", str(tmp_path / "cache"))


def test_there_are_at_least_forty():
    assert len({text for text, _ in WRONG}) >= 40


def test_the_one_that_they_differ_from_is_right(shared: Path, tmp_path: Path):
    path = shared / "good.yaml"
    path.write_text(GOOD, encoding="utf-8")

    assert cli.run(["run", str(path), "--cpu", "1", "--folder", str(tmp_path), "--dry-run"]) == 0


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_a_wrong_job_file_is_refused_in_a_line(
    shared: Path, tmp_path: Path, text: str, says: str, capfd
):
    import re

    path = shared / "job.yaml"
    path.write_text(text, encoding="utf-8")
    folder = tmp_path / "run"

    assert cli.run(["run", str(path), "--cpu", "1", "--folder", str(folder)]) == 2

    told = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("Looking")]
    assert re.search(says, " ".join(told)), told
    assert len(told) <= 2  # what is wrong, and what to try
    assert not any("Traceback" in line for line in told)
    assert not folder.exists()
