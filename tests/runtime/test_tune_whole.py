"""A fine-tune from end to end: from a folder, resized twice, killed once, exported, and asked.

Its model has a million parameters. DRYSTONE_TUNE_WIDTH=832 DRYSTONE_TUNE_LAYERS=12 gives it a
hundred million, for a machine with minutes to spare.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.nn.functional import cross_entropy

from drystone.plan.plan import load_plan
from drystone.run.train.checkpoint.checkpoint import find_whole
from drystone.run.train.checkpoint.contents import SafeReader
from drystone.run.train.data import DataRequest, open_source
from drystone.run.train.models.transformer import Transformer, build_model
from drystone.run.train.sample_model import write_sample
from drystone.run.train.samples import inputs_of

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.filterwarnings("default")]

WIDTH = int(os.environ.get("DRYSTONE_TUNE_WIDTH", "128"))
LAYERS = int(os.environ.get("DRYSTONE_TUNE_LAYERS", "4"))
NUM_STEPS, SEQ_LEN, BATCH = 40, 32, 8
JOB = f"""
model: ./base
data: {{train: chats.jsonl, eval: held_out.jsonl}}
train:
  steps: {NUM_STEPS}
  batch: {BATCH}
  sequence: {SEQ_LEN}
  checkpoint_every: 5
  optimizer: {{learning_rate: {0.005 * (128 / WIDTH)}, schedule: cosine, warmup: 5%}}
evaluate: {{every: 20}}
"""
LONGEST_SECONDS = 900


class Run:
    """`drystone run` of the job in a folder, on so many ranks."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        words = ["run", str(folder / "tune.yaml"), "--cpu", str(num_ranks)]
        self.home = folder / "runs" / "tune"
        self.epoch = len(list(self.home.glob("epoch-*"))) + 1
        self.process = subprocess.Popen(
            [sys.executable, "-m", "drystone", *words], stderr=subprocess.PIPE, text=True
        )

    def events(self, epoch: int, name: str) -> list[dict]:
        path = self.home / f"epoch-{epoch}" / "rank-0.out"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        return [told for told in map(json.loads, whole) if told["event"] == name]

    def wait_for(self, name: str, *, more: int = 0) -> None:
        """Until that was told since the start, `more` launches of the ranks later."""
        until = time.monotonic() + LONGEST_SECONDS
        while not self.events(self.epoch + more, name):
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.02)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=LONGEST_SECONDS)
        assert self.process.returncode == 130, errors

    def kill_a_rank(self) -> None:
        words = ["ps", "-o", "pid=", "--ppid", str(self.process.pid)]
        found = subprocess.run(words, capture_output=True, text=True, check=True)
        os.kill(int(found.stdout.split()[-1]), signal.SIGKILL)

    def finish(self) -> None:
        _, errors = self.process.communicate(timeout=LONGEST_SECONDS)
        assert self.process.returncode == 0, errors


def first_loss_of_transformers(folder: Path) -> float:
    """Of the conversations that come first; only their order is asked of Drystone."""
    request = DataRequest(
        name=str(folder / "chats.jsonl"),
        seq_len=SEQ_LEN,
        vocab_size=512,
        seed=0,
        model=str(folder / "base" / "config.json"),
    )
    rows = inputs_of(open_source(request).read(range(BATCH)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    chats = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    whole = {chat["messages"][0]["content"]: chat["messages"] for chat in chats}
    total, count = 0.0, 0
    for row in rows:
        asked = tokenizer.decode(row).split("<|end|>")[0].removeprefix("<|user|>")
        messages = whole[asked]
        words = {"return_dict": False, "tokenize": True}
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, **words)
        tokens = torch.tensor(tokenizer.apply_chat_template(messages, **words))
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0]
        losses = cross_entropy(logits[:-1], tokens[1:], reduction="none")[len(prompt) - 1 :]
        total += losses.sum().item()
        count += len(losses)
    return total / count


def trained_model(home: Path, epoch: int) -> Transformer:
    """The last checkpoint in Drystone's own model."""
    model = build_model(load_plan(home / f"epoch-{epoch}" / "plan.json").model)
    checkpoint = find_whole(home / "checkpoints")
    assert checkpoint is not None
    values = {f"model.{name}": value for name, value in model.state_dict().items()}
    dcp.load(values, storage_reader=SafeReader(checkpoint), no_dist=True)
    return model


def said_by(model: Transformer, prompt: list[int], number: int, last: int) -> list[int]:
    """The likeliest next token, again and again, until the last one."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + number and (tokens == prompt or tokens[-1] != last):
        batch = torch.tensor([[*tokens, 0]])  # the last is only there to be predicted
        with torch.no_grad():
            hidden, places = model.embed(batch)
            for index in range(len(model.blocks)):
                hidden = model.run_block(index, hidden, places)
            tokens.append(int(model.head(model.final_norm(hidden))[0, -1].argmax()))
    return tokens


def test_a_fine_tune_survives_two_resizes_and_a_kill_and_says_the_same_after_export(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("DRYSTONE_CACHE", str(tmp_path / "cache"))
    write_sample(tmp_path, width=WIDTH, layers=LAYERS)
    (tmp_path / "tune.yaml").write_text(JOB, encoding="utf-8")

    alone = Run(tmp_path, 1)
    alone.wait_for("step")
    alone.interrupt()
    two = Run(tmp_path, 2)
    two.wait_for("checkpoint")
    two.kill_a_rank()
    two.wait_for("step", more=1)
    two.interrupt()
    last = Run(tmp_path, 1)
    last.finish()

    first = alone.events(1, "step")[0]
    assert first["loss"] == pytest.approx(first_loss_of_transformers(tmp_path), abs=1e-4)
    reached = [
        [told["step"] for told in last.events(epoch, "step")] for epoch in range(1, last.epoch + 1)
    ]
    assert len(reached) == 4
    assert reached[-1][-1] == NUM_STEPS
    for before, after in itertools.pairwise(reached):
        assert after[0] <= before[-1] + 1  # none is left out
        assert after[0] > before[0]
    evaluated = last.events(last.epoch, "evaluated")
    assert first["loss"] > 6
    assert evaluated[-1]["loss"] < 1.5

    prompt_words = [{"role": "user", "content": "Which colour has snow?"}]
    export = last.home / "export"
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    prompt = tokenizer.apply_chat_template(
        prompt_words, add_generation_prompt=True, return_dict=False
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export)
    said = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0].tolist()
    ours = trained_model(last.home, last.epoch)
    assert said == said_by(ours, prompt, 12, tokenizer.eos_token_id)
    assert tokenizer.decode(said[len(prompt) :]).startswith("The colour of")
