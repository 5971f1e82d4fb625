"""Folders with weights: what is wrong with one is said in a line, before anything starts."""

import json
import struct
from pathlib import Path

import pytest

from drystone.describe.families.huggingface import load_config
from drystone.describe.families.names import STYLES, stored_weights
from drystone.describe.model_source import MODELS_FILE
from drystone.describe.trainable import check_trainable
from drystone.describe.weights import find_weights, read_headers

CONFIG = json.loads(MODELS_FILE.read_text())["mini-llama"]["config"] | {
    "num_hidden_layers": 1, "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    spec = load_config(folder / "config.json")
    return {name: one.shape for name, one in stored_weights(spec, STYLES["llama"]).items()}


def write_tensors(file: Path, tensors: dict[str, tuple[int, ...]], dtype: str = "F32") -> None:
    """As the format has it: the length of a JSON object, the object, the numbers."""
    table, end = {}, 0
    for name, shape in tensors.items():
        size = 4
        for length in shape:
            size *= length
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(table).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(end))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def problems(folder: Path) -> str:
    found = check_trainable(load_config(folder))
    assert len(found) <= 1
    assert all("\n" not in one for one in found)
    return "".join(found)


def test_one_file_and_several_are_found(folder: Path):
    wanted = shapes(folder)
    write_tensors(folder / "model.safetensors", wanted)
    assert problems(folder) == ""
    spec = load_config(folder)
    assert Path(spec.weights) == folder.absolute()
    whole = find_weights(folder, spec)

    (folder / "model.safetensors").unlink()
    names = list(wanted)
    halves = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, some in halves.items():
        write_tensors(folder / file, {name: wanted[name] for name in some})
    index = {"weight_map": {name: file for file, some in halves.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    assert problems(folder) == ""
    assert find_weights(folder, spec).keys() == whole.keys()
    assert {one.file.name for one in read_headers(folder).values()} == set(halves)


def test_what_older_files_hold_besides_is_passed_over(folder: Path):
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    write_tensors(folder / "model.safetensors", shapes(folder) | more)

    assert problems(folder) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one.pop("model.norm.weight"), "lacks model.norm.weight"),
        (lambda one: one.pop("lm_head.weight"), "lacks lm_head.weight"),
        (lambda one: one.update({"model.extra.weight": (3,)}), "does not tell of: model.extra"),
        (lambda one: one.update({"model.norm.weight": (9,)}),
         "model.norm.weight has the shape [9], its config.json says [8]"),
    ],
)  # fmt: skip
def test_missing_odd_and_misshapen_tensors_are_named(folder: Path, change, words: str):
    wanted = shapes(folder)
    change(wanted)
    write_tensors(folder / "model.safetensors", wanted)

    assert words in problems(folder)


def test_types_that_are_no_numbers_to_train_from_are_refused(folder: Path):
    write_tensors(folder / "model.safetensors", shapes(folder), dtype="F8_E4M3")

    assert "F8_E4M3" in problems(folder)


def test_files_cut_short_or_damaged_are_told(folder: Path):
    file = folder / "model.safetensors"
    write_tensors(file, shapes(folder))
    whole = file.read_bytes()

    for damaged, words in (
        (whole[:-1], "bytes, its header says"),
        (whole[:20], "cut short"),
        (whole[:8] + b"x" + whole[9:], "not JSON"),
        (whole.replace(b'"shape": [8]', b'"shape": 8.5', 1), "damaged"),
        (b"PK" * 40, "cut short"),
    ):
        file.write_bytes(damaged)
        assert words in problems(folder)


def test_an_index_is_held_against_the_files(folder: Path):
    wanted = shapes(folder)
    write_tensors(folder / "a.safetensors", wanted)
    index = folder / "model.safetensors.index.json"

    index.write_text(json.dumps({"weight_map": dict.fromkeys(wanted, "b.safetensors")}))
    assert "names b.safetensors, which is not there" in problems(folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*wanted, "more"], "a.safetensors")}))
    assert "says that a.safetensors holds more" in problems(folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(wanted, "../a.safetensors")}))
    assert "not there" in problems(folder)
    index.write_text("[]")
    assert "no JSON object" in problems(folder)


def test_other_formats_and_adapters_say_what_to_do(folder: Path):
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "save_pretrained" in problems(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    assert "merge_and_unload" in problems(folder)
