"""Samples by number: the same whoever reads them, every one once an epoch."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from drystone.errors import InvalidSpec, UnreadableFile
from drystone.run.train.data import RankWork, SyntheticTokens, TokenFile, micro_batches, open_tokens

pytestmark = pytest.mark.torch


@given(
    splits=st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=5).filter(
            lambda ranks: sum(batch for batch, _ in ranks) > 0
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_job_that_is_resized_at_every_step_sees_each_sample_once(splits):
    position, seen = 0, []
    for ranks in splits:
        works = [RankWork(batch=b, micro_batch=m, state_share=1.0) for b, m in ranks]
        for rank, work in enumerate(works):
            runs = micro_batches(works, rank, position)
            assert all(0 < len(run) <= work.micro_batch for run in runs)
            seen += [sample for run in runs for sample in run]
        position += sum(work.batch for work in works)

    assert seen == list(range(position))


@given(cut=st.integers(0, 20), seed=st.integers(0, 5))
def test_made_up_tokens_do_not_depend_on_how_they_are_read(cut: int, seed: int):
    source = SyntheticTokens(seq_len=7, vocab_size=19, seed=seed)

    apart = torch.cat([source.read(range(cut)), source.read(range(cut, 20))])

    assert torch.equal(apart, source.read(range(20)))
    assert apart.shape == (20, 8)
    assert 0 <= apart.min() <= apart.max() < 19


def test_an_epoch_holds_every_sample_once_and_epochs_differ(tmp_path: Path):
    path = tmp_path / "tokens.bin"
    np.arange(10 * 8 + 3, dtype=np.uint16).tofile(path)
    source = TokenFile(path, seq_len=8, vocab_size=100, seed=1)

    first, second = source.read(range(10)), source.read(range(10, 20))

    for epoch in (first, second):
        assert sorted(epoch[:, 0].tolist()) == list(range(0, 80, 8))
        assert torch.equal(epoch, epoch[:, :1] + torch.arange(9))
    assert first[:, 0].tolist() != second[:, 0].tolist()


def test_a_text_is_read_as_bytes(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_text("dry stone wall", encoding="utf-8")
    source = open_tokens(str(path), seq_len=4, vocab_size=256)

    texts = {bytes(row.tolist()).decode() for row in source.read(range(3))}

    assert texts == {"dry s", "stone", "e wal"}


def test_a_text_is_tokenised_where_a_tokenizer_is_given(tmp_path: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"dry": 0, "stone": 1, "wall": 2, "?": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "text.txt"
    path.write_text("dry stone wall\nstone dry\nwet wall\n", encoding="utf-8")

    for one in (tmp_path, tmp_path / "tokenizer.json"):
        source = open_tokens(str(path), seq_len=6, vocab_size=4, tokenizer=one)
        assert source.read([0]).tolist() == [[0, 1, 2, 1, 0, 3, 2]]
    with pytest.raises(UnreadableFile, match="tokenizer"):
        open_tokens(str(path), seq_len=6, vocab_size=4, tokenizer=path)
    (tmp_path / "a.bin").write_bytes(b"ab")
    with pytest.raises(InvalidSpec, match="tokens already"):
        open_tokens(str(tmp_path / "a.bin"), seq_len=6, vocab_size=4, tokenizer=tmp_path)


def test_files_that_will_not_do_are_refused(tmp_path: Path):
    (tmp_path / "short.bin").write_bytes(b"ab")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "tokens.csv").write_bytes(b"1,2")
    (tmp_path / "large.txt").write_text("zzzzzz", encoding="utf-8")

    with pytest.raises(InvalidSpec, match="holds 1 tokens"):
        open_tokens(str(tmp_path / "short.bin"), seq_len=4, vocab_size=9)
    with pytest.raises(UnreadableFile):
        open_tokens(str(tmp_path / "empty.bin"), seq_len=4, vocab_size=9)
    with pytest.raises(UnreadableFile):
        open_tokens(str(tmp_path / "nowhere.bin"), seq_len=4, vocab_size=9)
    with pytest.raises(InvalidSpec, match=r"Known: .bin"):
        open_tokens(str(tmp_path / "tokens.csv"), seq_len=4, vocab_size=9)
    with pytest.raises(InvalidSpec, match="holds token 122"):
        open_tokens(str(tmp_path / "large.txt"), seq_len=4, vocab_size=100).read([0])
