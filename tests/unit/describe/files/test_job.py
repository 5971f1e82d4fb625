import math
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drystone.describe.files.amounts import parse_count, parse_duration
from drystone.describe.files.cluster import ClusterSpec, load_cluster_file, parse_cluster
from drystone.describe.files.job import load_job, make_job, parse_job
from drystone.describe.files.job_parts import JobPart, TrainPart, options_of
from drystone.describe.files.json_shapes import from_plain, to_plain
from drystone.describe.job import TrainConfig, TrainingJob, find_shape, make_spec, recipe_of
from drystone.describe.recipe import Optimizer
from drystone.errors import RequestError
from drystone.run.control.notes import Described, render
from drystone.run.control.notes import parse as parse_note

HERE = Path("/somewhere")


def job(text: str) -> TrainingJob:
    return parse_job(text, folder=HERE)


def test_three_lines_are_a_job():
    found = job("model: gpt2\ntrain: {tokens: 2B, batch: 64}\n")

    assert (found.model, found.data, found.num_tokens) == ("gpt2", "synthetic", 2_000_000_000)
    spec = make_spec(found, find_shape(found), job_id="j1", submit_seconds=5.0)
    assert spec.total_samples == 64 * -(-2_000_000_000 // (64 * 1024))


def test_every_optimizer_that_is_trained_can_be_named():
    for kind in Optimizer:
        if kind is not Optimizer.LAMB:
            found = job(f"model: gpt2\ntrain: {{steps: 9, optimizer: {kind.value}}}\n")
            assert recipe_of(found, find_shape(found), ()).optimizer is kind
    assert job("model: gpt2\ntrain: {steps: 9, optimizer: adamw-8bit}\n").optimizer == "adam-8bit"


def test_a_word_alone_is_a_list_of_it():
    text = (
        "model: gpt2\ntrain: {steps: 9}\ntune: {method: lora, targets: TARGETS}\n"
        "report: REPORT\ngpus: {allow: ALLOW}\n"
    )
    for target in ("q_proj", "all-linear"):
        words = {"TARGETS": target, "REPORT": "wandb", "ALLOW": "T4"}
        alone = listed = text
        for name, word in words.items():
            alone, listed = alone.replace(name, word), listed.replace(name, f"[{word}]")
        assert job(alone) == job(listed)


def test_everything_can_be_said():
    found = job(
        """
name: the big one
owner: ada
model: shapes/mine.json
data: corpus.u32
train: {epochs: 1.5, batch: 8, sequence: 128, precision: fp32, learning_rate: 1e-3}
gpus: {allow: [A100, T4], deny: [V100], min: 2, max: 4}
priority: 2
deadline: 6h
max_cost: 12.5
max_duration: 1d 12h
environment: {A: "1"}
"""
    )

    assert found.model == "/somewhere/shapes/mine.json"
    assert found.data == "/somewhere/corpus.u32"
    assert found.allowed_gpus == ("A100-80GB-SXM", "T4-16GB")
    assert found.deadline_after_seconds == 6 * 3600
    assert found.max_duration_seconds == 36 * 3600
    assert found.train.learning_rate == 1e-3
    assert from_plain(TrainingJob, to_plain(found), where="") == found


def test_every_training_option_is_a_key_of_the_file_with_the_one_default():
    names = {option.name for option in fields(TrainConfig)}

    assert names == set(options_of("train", "optimizer", "data", "evaluate", "report").values())
    assert job("model: gpt2\ntrain: {steps: 1}").train == TrainConfig()
    given = job("model: gpt2\ntrain: {steps: 1, clip: 0, weight_decay: 2, checkpoint_every: 1k}")
    assert given.train == TrainConfig(clip=0.0, weight_decay=2.0, checkpoint_every=1000)


def test_a_recipe_is_written_in_sections():
    found = job(
        """
model: ./llama
from: scratch
train: {steps: 100, optimizer: {name: adamw, learning_rate: 2e-5, schedule: cosine, warmup: 3%}}
tune: {method: lora, rank: 8, targets: [q_proj, v]}
"""
    )

    assert found.train == TrainConfig(learning_rate=2e-5, schedule="cosine", warmup="3%")
    assert (found.optimizer, found.from_scratch) == ("adam", True)
    assert (found.tuning, found.lora.rank, found.lora.targets) == ("lora", 8, ("q", "v"))
    assert parse_note(render(described(found))).job == found  # what the log keeps of it


def described(found: TrainingJob) -> Described:
    return Described(time_seconds=1.0, job_id="j1", job=found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train: {steps: 9, warmup: 3, optimizer: {warmup: 4}}", "warmup stands in"),
        ("train: {steps: 9, optimizer: {warmup: 3x}}", "not a part of a training.*3%"),
        ("train: {steps: 9, optimizer: {warmup: 101%}}", "not a part of a training"),
        ("train: {steps: 9, optimizer: {schedule: exp}}", "cosine"),
        ("train: {steps: 9}\ntune: {method: lora, targets: [x_proj]}", "x_proj.*q_proj"),
        ("train: {steps: 9}\ntune: {method: lora, targets: []}", "targets"),
        ("train: {steps: 9}\ntune: {method: full, rank: 4}", "rank is of adapters"),
        ("train: {steps: 9}\ntune: {rank: 4}", "`method` is missing"),
        ("train: {steps: 9}\ntune: {method: lora, dropout: 1.5}", r"tune\.dropout"),
        ("train: {steps: 9}\nfrom: best", "from.*scratch"),
        ("train: {steps: 9}\nform: scratch", "'form'.*'from'"),
    ],
)
def test_a_wrong_recipe_is_refused_with_what_to_write(text: str, says: str):
    with pytest.raises(RequestError, match=says):
        job(f"model: gpt2\n{text}")


def test_a_training_option_out_of_its_range_is_refused_wherever_it_comes_from():
    with pytest.raises(RequestError, match=r"train\.clip"):
        job("model: gpt2\ntrain: {steps: 1, clip: -1}")
    with pytest.raises(RequestError, match=r"clip is -1.*at least 0"):
        TrainConfig(clip=-1.0)
    with pytest.raises(RequestError, match=r"learning_rate is nan.*above 0"):
        TrainConfig(learning_rate=math.nan)


def test_a_time_is_a_deadline_too():
    assert job("model: gpt2\ntrain: {steps: 1}\ndeadline: 2026-11-20T18:00Z").deadline_at_seconds
    assert job("model: gpt2\ntrain: {steps: 1}\ndeadline: 2026-11-20").deadline_at_seconds


def test_a_command_is_split_into_words():
    found = job("command: python 'my train.py' --fast\ntrain: {steps: 10}")

    assert found.command == ("python", "my train.py", "--fast")
    assert found.is_command


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("modle: gpt2", r"unknown key 'modle'.*model"),
        ("model: gpt2\ntrain: {stesp: 1}", r"line 2.*'stesp'.*steps"),
        ("model: gpt2\n\ntrain: {steps: x}", r"line 3.*train\.steps.*not a count"),
        ("model: gpt2\ntrain: {steps: 1, tokens: 5}", "contradict"),
        ("model: gpt2", "how much"),
        ("model: gpt2\ntrain: {epochs: 2}", "made-up"),
        ("model: gpt2\ntrain: {steps: 1}\ngpus: {allow: [A1000]}", "A1000.*mean"),
        ("model: gpt2\ntrain: {steps: 1}\ngpus: {min: 4, max: 2}", "min 4 is above"),
        ("model: gpt2\ntrain: {steps: 1}\ndeadline: soon", r"line 3.*deadline.*6h"),
        ("model: gpt2\ntrain: {steps: 1}\npriority: '3'", r"line 3: priority"),
        ("model: gpt2\ntrain: {steps: 1}\nname: ../../etc", "is not a valid name"),
        ("model: gpt2\ntrain: {steps: 1}\nmodel: gpt2", "line 3.*twice"),
        ("model: &a gpt2\ntrain: {steps: 1}\nname: *a", "aliases"),
        ("model: !!python/object:os.system x", "tags"),
        ("- a", "table of keys"),
        ("model: gpt2\n  x: [", "no YAML"),
        ("[" * 5000, "YAML|deep"),
        ("train: {steps: 5}", "neither a model nor a command"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, says: str):
    with pytest.raises(RequestError, match=says):
        job(text)


def test_a_file_lends_its_name_and_folder(tmp_path: Path):
    path = tmp_path / "night run.yaml"
    path.write_text("command: python train.py\ntrain: {steps: 3}", encoding="utf-8")

    found = load_job(path, owner="ada")

    assert (found.name, found.owner, found.folder) == ("night-run", "ada", str(tmp_path.resolve()))
    with pytest.raises(RequestError, match="cannot be read"):
        load_job(tmp_path / "none.yaml")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
WORDS = st.sampled_from(["6h", "2B", "gpt2", "synthetic", "a.bin", "1e9", "fp32", "A100", "x.py:f"])


@given(st.text(max_size=300))
def test_no_text_breaks_the_readers(text: str):
    for read in (job, parse_cluster):
        with suppress(RequestError):
            assert isinstance(read(text), TrainingJob | ClusterSpec)


@given(
    st.dictionaries(st.sampled_from(list(JobPart.model_fields)), PLAIN | WORDS, max_size=6),
    st.dictionaries(st.sampled_from(list(TrainPart.model_fields)), PLAIN | WORDS, max_size=6),
)
def test_no_table_breaks_the_reader(table, train):
    with suppress(RequestError):
        found = make_job({"model": "gpt2", "train": train} | table, folder=HERE)
        assert from_plain(TrainingJob, to_plain(found), where="") == found


def test_the_examples_can_be_read():
    examples = Path(__file__).parents[4] / "examples"

    assert load_job(examples / "job.yaml").num_steps == 200
    assert load_job(examples / "job_script.yaml").is_command
    assert load_cluster_file(examples / "cluster_emulated.yaml").is_emulated


def test_amounts():
    assert parse_duration("1h 30m") == 5400
    assert parse_duration(60) == 60
    assert parse_count("1.5k") == 1500
    assert parse_count(1e9) == 10**9
    for wrong in ("1.5", "-3", "0", "x", "1e99", "nan"):
        with pytest.raises(RequestError):
            parse_count(wrong)


CLUSTER = """
nodes:
  - {gpu: A100, gpus_per_node: 2, emulate: {speed: 0.001, memory: 2GiB}}
  - {gpu: T4, count: 2, gpus_per_node: 1, emulate: {speed: 0.001, memory: 2GiB}}
prices: {T4: 0.25}
"""


def test_a_cluster_may_be_emulated():
    found = parse_cluster(CLUSTER)

    assert [node.id for node in found.nodes] == ["a100-0", "t4-1", "t4-2"]
    a100 = found.gpu("A100-80GB-SXM")
    assert a100.usable_bytes == 2 * 2**30
    assert a100.fp32_flops == pytest.approx(19.49e9)
    assert found.dollars_per_gpu_hour["T4-16GB"] == 0.25
    assert found.dollars_per_gpu_hour["A100-80GB-SXM"] > 0.25
    assert str(found.pool()) == "2xA100-80GB-SXM,2xT4-16GB"
    assert found.is_emulated


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes: []", "list `nodes`"),
        ("nodes: [{gpu: A100, cuont: 2}]", "cuont.*count"),
        ("nodes: [{gpu: A1O0}]", "unknown GPU"),
        ("nodes: [{gpu: A100, count: 0}]", "count.*greater than or equal to 1"),
        ("nodes:\n - {gpu: A100}\n - {gpu: A100, emulate: {}}", "line 3.*two ways"),
        ("nodes: [{gpu: A100, emulate: {speed: 2}}]", "speed.*less than or equal to 1"),
        ("nodes: [{gpu: A100, emulate: {memory: lots}}]", "emulate.memory.*lots"),
        ("nodes: [{gpu: A100}]\nprices: {A100: -1}", "dollars"),
        ("nodes: [{gpu: A100, name: x}, {gpu: T4, name: x}]", "same name"),
    ],
)
def test_a_wrong_cluster_is_refused_with_its_place(text: str, says: str):
    with pytest.raises(RequestError, match=says):
        parse_cluster(text)


def test_limits_reach_the_scheduler_where_a_length_is_known():
    table = {"model": "mini-gpt", "train": {"steps": 1}, "max_cost": 2.5, "max_duration": "1h"}
    found = make_job(table, folder=HERE)

    spec = make_spec(found, find_shape(found), job_id="1", submit_seconds=0.0)
    assert (spec.max_cost_dollars, spec.max_duration_seconds) == (2.5, 3600.0)
    script = make_spec(found, None, job_id="1", submit_seconds=0.0)
    assert (script.max_cost_dollars, script.max_duration_seconds) == (math.inf, math.inf)
