"""Records become samples: the right tokens are predicted, each once, and tokenised only once."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from tokenizer_cases import FORGETFUL, save_tokenizer

from drystone.errors import RequestError
from drystone.run.train.data import DataRequest, open_source
from drystone.run.train.data import source as source_module
from drystone.run.train.data.rows import cut_pieces, pack_rows
from drystone.run.train.samples import documents_of, inputs_of, num_predicted, targets_of

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRYSTONE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def request(path: Path, tokenizer: Path | str = "", **given: object) -> DataRequest:
    base = {"seq_len": 16, "vocab_size": 60, "tokenizer": str(tokenizer)}
    return DataRequest(name=str(path), **(base | given))


def words(tokenizer: Path, tokens: torch.Tensor) -> str:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer).decode(tokens[tokens >= 0])


CHAT = [
    {"role": "user", "content": "what colour is the sky"},
    {"role": "assistant", "content": "blue"},
]


def test_of_a_chat_the_answers_alone_are_predicted(tmp_path: Path, tokenizer: Path):
    more = [*CHAT, {"role": "user", "content": "my cat"}, {"role": "assistant", "content": "red"}]
    path = write_lines(tmp_path / "chats.jsonl", {"messages": CHAT}, {"messages": more})

    source = open_source(request(path, tokenizer, seq_len=32, is_shuffled=False))
    rows = source.read([0, 1])

    assert source.num_samples == 2
    assert words(tokenizer, targets_of(rows)[0]) == "blue </s>"
    assert words(tokenizer, targets_of(rows)[1]) == "blue </s> red </s>"
    assert "what colour is the sky" in words(tokenizer, inputs_of(rows)[0])


def test_answers_that_the_template_rewrites_are_not_predicted_and_counted(tmp_path: Path):
    folder = save_tokenizer(tmp_path / "forgetful", template=FORGETFUL)
    path = write_lines(tmp_path / "chats.jsonl", {"messages": [*CHAT, *CHAT]})

    source = open_source(request(path, folder, seq_len=32))

    assert words(folder, targets_of(source.read([0]))[0]) == "blue </s>"
    assert source.store.facts.num_rewritten == 1


def test_of_prompts_the_completions_are_predicted(tmp_path: Path, tokenizer: Path):
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "the cat sat", "completion": "on the mat"})

    rows = open_source(request(path, tokenizer)).read([0])

    assert words(tokenizer, targets_of(rows)[0]) == "on the mat </s>"


def test_labels_beside_token_numbers_say_what_is_predicted(tmp_path: Path):
    record = {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}

    rows = open_source(request(write_lines(tmp_path / "t.jsonl", record), seq_len=4)).read([0])

    assert targets_of(rows).tolist() == [[-100, 3, 4, -100]]


def test_packed_documents_keep_apart(tmp_path: Path, tokenizer: Path):
    texts = ["the cat sat", "a dog", "red mat", "the sky is blue"]
    path = write_lines(tmp_path / "t.jsonl", *({"text": text} for text in texts))

    source = open_source(request(path, tokenizer, is_packed=True, is_shuffled=False))
    rows = source.read(range(source.num_samples))

    assert source.num_samples == 1
    assert documents_of(rows).unique().tolist() == [0, 1, 2, 3]
    assert num_predicted(rows) == 3 + 2 + 2 + 4  # the first word of each has nothing before it
    starts = (documents_of(rows)[:, 1:] != documents_of(rows)[:, :-1]).nonzero()[:, 1]
    assert (targets_of(rows)[0, starts] == -100).all()


@given(
    lengths=st.lists(st.integers(2, 17), min_size=1, max_size=60).map(np.array),
)
def test_packing_loses_no_piece_and_overfills_no_row(lengths: np.ndarray):
    order, rows = pack_rows(lengths, 17)

    assert sorted(order.tolist()) == list(range(len(lengths)))
    filled = [int(lengths[order[a:b]].sum()) for a, b in pairwise(rows)]
    assert max(filled) <= 17
    assert min(filled) > 0
    least = -(-int(lengths.sum()) // 17)
    assert least <= len(filled) <= 1.5 * least + 1  # best fit decreasing: 11/9 and a little


@given(lengths=st.lists(st.integers(2, 50), min_size=1, max_size=20), seq_len=st.integers(1, 9))
def test_pieces_predict_every_token_of_a_document_but_its_first(lengths: list[int], seq_len: int):
    ends = np.cumsum([0, *lengths])

    starts, stops = cut_pieces(ends, seq_len)
    predicted = [at for a, b in zip(starts, stops, strict=True) for at in range(a + 1, b)]

    assert sorted(predicted) == sorted(set(range(ends[-1])) - set(ends[:-1].tolist()))
    assert (stops - starts).max() <= seq_len + 1


def test_tokens_are_made_once_for_the_same_contents(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_lines(tmp_path / "t.jsonl", {"text": "the cat"}, {"text": "a dog sat"})
    first = open_source(request(path, tokenizer)).read([0, 1])
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes())

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(source_module, "load_encoder", fail)

    assert torch.equal(open_source(request(copy, tokenizer)).read([0, 1]), first)
    write_lines(path, {"text": "the dog"})
    with pytest.raises(AssertionError, match="again"):
        open_source(request(path, tokenizer))


def test_ranks_that_start_together_get_one_store(tmp_path: Path, tokenizer: Path, cache: Path):
    path = write_lines(tmp_path / "t.jsonl", *({"text": "the cat sat"} for _ in range(200)))

    with ThreadPoolExecutor(4) as pool:
        sources = list(pool.map(lambda _: open_source(request(path, tokenizer)), range(4)))

    assert {source.num_samples for source in sources} == {200}
    assert len([one for one in (cache / "tokens").iterdir() if one.is_dir()]) == 1


def test_a_store_that_was_cut_off_or_damaged_is_made_anew(
    tmp_path: Path, tokenizer: Path, cache: Path
):
    path = write_lines(tmp_path / "t.jsonl", {"text": "the cat"})
    whole = open_source(request(path, tokenizer)).read([0])
    (store,) = [one for one in (cache / "tokens").iterdir() if one.is_dir()]
    (store.parent / f"{store.name}.99999999.part").mkdir()
    os.truncate(store / "tokens.u32", 4)

    assert torch.equal(open_source(request(path, tokenizer)).read([0]), whole)
    assert not list(store.parent.glob("*.part"))


def test_a_folder_of_files_is_read_in_the_order_of_names(tmp_path: Path, tokenizer: Path):
    folder = tmp_path / "shards"
    folder.mkdir()
    write_lines(folder / "b.jsonl", {"text": "a dog"})
    write_lines(folder / "a.jsonl", {"text": "the cat"})

    rows = open_source(request(folder, tokenizer, is_shuffled=False)).read([0, 1])

    assert [words(tokenizer, inputs_of(row[None])[0][:2]) for row in rows] == ["the cat", "a dog"]


def test_token_files_of_a_folder_are_one_source(tmp_path: Path):
    folder = tmp_path / "tokens"
    folder.mkdir()
    np.arange(9, dtype=np.uint16).tofile(folder / "a.bin")
    np.arange(20, 33, dtype=np.uint16).tofile(folder / "b.bin")

    rows = open_source(request(folder, seq_len=4, is_shuffled=False)).read(range(5))

    assert rows[:, 0].tolist() == [0, 4, 20, 24, 28]


def test_parquet_and_saved_data_sets_are_read(tmp_path: Path, tokenizer: Path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    table = arrow.table({"text": ["the cat sat", "a dog"]})
    parquet.write_table(table, tmp_path / "t.parquet")
    saved = tmp_path / "saved"  # as `Dataset.save_to_disk` writes it
    saved.mkdir()
    with ipc.new_stream(saved / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (saved / "state.json").write_text(json.dumps(state), encoding="utf-8")

    first, second = (
        open_source(request(path, tokenizer, is_shuffled=False)).read([0, 1])
        for path in (tmp_path / "t.parquet", saved)
    )

    assert torch.equal(first, second)
    assert words(tokenizer, inputs_of(first)[0][:3]) == "the cat sat"


def test_every_epoch_has_every_row_in_an_order_of_its_own(tmp_path: Path, tokenizer: Path):
    texts = [{"text": f"w{number} the cat"} for number in range(12)]
    source = open_source(request(write_lines(tmp_path / "t.jsonl", *texts), tokenizer))

    first, second = (source.read(range(at, at + 12))[:, 0].tolist() for at in (0, 12))

    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize(
    ("name", "content", "more", "says"),
    [
        ("a.jsonl", "", {}, "is empty"),
        ("a.jsonl", "\n\n", {}, "no records"),
        ("a.jsonl", '{"text": "the"}\n{"tex', {}, "line 2.*no JSON"),
        ("a.jsonl", "[1]\n", {}, "line 1.*no JSON object"),
        ("a.jsonl", b"\xff\xfe\n", {}, "cannot be read"),
        ("a.jsonl", '{"body": "the cat"}', {}, "body.*format: text"),
        ("a.jsonl", '{"body": "the cat"}', {"format": "chat"}, "no column messages.*body"),
        ("a.jsonl", '{"text": "the cat"}', {"column": "txt"}, "no column txt.*text"),
        ("a.jsonl", '{"text": 3}', {}, "text is a int, not text"),
        ("a.jsonl", '{"messages": "hi"}', {}, "conversation is a str"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', {}, "role and content"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "the"}]}', {}, "nothing to predict"),
        ("a.jsonl", '{"text": "the cat"}', {"vocab_size": 50}, "knows 60 tokens, the model 50"),
        ("a.jsonl", '{"text": "the cat"}', {"tokenizer": ""}, "needs a tokenizer"),
        ("a.jsonl", '{"text": "the cat"}', {"tokenizer": "/nowhere"}, "no readable tokenizer"),
        ("a.jsonl", '{"input_ids": [1, 2, 700]}', {}, "token 700"),
        ("a.jsonl", '{"input_ids": [1, "x"]}', {}, "not token numbers"),
        ("a.jsonl", '{"input_ids": [1], "labels": []}', {}, "labels are not as many"),
        ("a.parquet", "no parquet", {}, "damaged"),
        ("a.arrow", "no arrow", {}, "damaged"),
        ("a.bin", "abc", {"tokenizer": ""}, "cannot be read"),
        ("a.bin", "ab", {"tokenizer": ""}, "one sample needs 17"),
        ("a.bin", "ab" * 20, {"tokenizer": "", "is_packed": True}, "could be packed"),
        ("a.txt", "the cat", {"format": "chat"}, "holds text, not chat"),
        ("a.csv", "a,b", {}, "no data of a known kind"),
        (None, "", {}, "not there"),
    ],
)
def test_what_cannot_be_trained_on_is_said(
    tmp_path: Path, tokenizer: Path, name: str | None, content: str | bytes, more: dict, says: str
):
    path = tmp_path / (name or "missing.jsonl")
    if name is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    if path.suffix in (".parquet", ".arrow"):
        pytest.importorskip("pyarrow")

    with pytest.raises(RequestError, match=says) as caught:
        open_source(request(path, **({"tokenizer": tokenizer} | more)))

    assert "\n" not in str(caught.value)


def test_without_pyarrow_what_to_install_is_said(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(RequestError, match=r"pip install 'drystone\[data\]'"):
        open_source(request(tmp_path / "t.parquet", tokenizer))
