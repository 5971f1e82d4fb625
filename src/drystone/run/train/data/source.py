"""A source of samples for what `data` of a job names: tokens, text, records, folders of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from drystone.errors import InvalidSpec
from drystone.run.train.data.encode import (
    Document,
    Encoder,
    find_format,
    load_encoder,
    record_encoder,
    refuse_larger,
)
from drystone.run.train.data.records import Container, find_files, read_records, read_text
from drystone.run.train.data.rows import DocumentRows
from drystone.run.train.data.store import Store, StoreFacts, Yielded, file_digest, open_store
from drystone.run.train.data.token_file import SyntheticTokens, TokenFile

_BATCH_RECORDS: Final = 512


class TokenSource(Protocol):
    """Samples by number."""

    num_samples: int  # in an epoch

    def read(self, samples: Sequence[int]) -> torch.Tensor:
        """Samples of shape (samples, seq_len + 1), 64-bit, as `run/train/samples.py` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """What is to be read, and for which model."""

    name: str  # synthetic, a file or a folder
    seq_len: int
    vocab_size: int
    seed: int = 0
    tokenizer: str = ""  # a tokenizer.json, or the folder that has it
    model: str = ""  # the config.json, whose folder may have a tokenizer
    format: str = "auto"
    column: str = ""
    is_packed: bool = False
    is_shuffled: bool = True
    is_plain: bool = False  # every token is predicted and every row is full

    def tokenizer_path(self) -> Path | None:
        """The tokenizer that was named, or the one beside the model."""
        if self.tokenizer:
            return Path(self.tokenizer)
        beside = Path(self.model).parent if self.model.endswith(".json") else None
        has_one = beside is not None and (beside / "tokenizer.json").is_file()
        return beside if has_one else None

    @property
    def where(self) -> str:
        """For messages."""
        return self.name[:300]


def open_tokens(
    name: str, *, seq_len: int, vocab_size: int, seed: int = 0, tokenizer: Path | None = None
) -> TokenSource:
    """`synthetic`, a file of tokens, text or records, or a folder of such files.

    Without a tokenizer a text is taken as bytes.
    """
    request = DataRequest(
        name=name,
        seq_len=seq_len,
        vocab_size=vocab_size,
        seed=seed,
        tokenizer=str(tokenizer or ""),
    )
    return open_source(request)


def open_source(request: DataRequest) -> TokenSource:
    """The samples; whatever stands in the way is raised with its place."""
    if request.name == "synthetic":
        return SyntheticTokens(
            seq_len=request.seq_len, vocab_size=request.vocab_size, seed=request.seed
        )
    container, files = find_files(Path(request.name))
    is_stream = container is Container.TOKENS or (
        container is Container.TEXT and request.tokenizer_path() is None
    )
    if not is_stream:
        return _open_documents(request, container, files)
    _refuse_for_stream(request, container)
    return TokenFile(
        *files,
        seq_len=request.seq_len,
        vocab_size=request.vocab_size,
        seed=request.seed,
        is_shuffled=request.is_shuffled,
    )


def _refuse_for_stream(request: DataRequest, container: Container) -> None:
    if container is Container.TOKENS and request.tokenizer:
        raise InvalidSpec(
            "holds tokens already", where=request.where, hint="Leave out the tokenizer"
        )
    if request.is_packed:
        raise InvalidSpec(
            "has no documents that could be packed",
            where=request.where,
            hint="Leave out pack, or give records: .jsonl, .parquet, or text with a tokenizer",
        )
    expected = "tokens" if container is Container.TOKENS else "text"
    if request.format not in ("auto", expected):
        raise InvalidSpec(f"holds {expected}, not {request.format}", where=request.where)


def _open_documents(
    request: DataRequest, container: Container, files: Sequence[Path]
) -> DocumentRows:
    name, column = (
        ("text", "") if container is Container.TEXT else look_at_records(request, container, files)
    )
    if container is Container.TEXT and request.format not in ("auto", "text"):
        raise InvalidSpec(f"holds text, not {request.format}", where=request.where)
    tokenizer = request.tokenizer_path()
    if name != "tokens" and tokenizer is None:
        raise InvalidSpec(
            f"needs a tokenizer to become tokens ({name})",
            where=request.where,
            hint="Put tokenizer.json beside the model's config.json, or name data.tokenizer",
        )
    key: list[Any] = [_tokenizer_digest(tokenizer) if name != "tokens" else "", name, column]
    key += [file_digest(file) for file in files]

    def make() -> Iterator[Yielded]:
        encoder = None
        if name != "tokens" and tokenizer is not None:
            encoder = load_encoder(tokenizer, vocab_size=request.vocab_size)
        for file in files:
            if container is Container.TEXT:
                assert encoder is not None
                for lines in read_text(file):  # one document, tokenised line by line
                    yield (list(chain.from_iterable(encoder.lines(lines))),)
                yield encoder.end(), bytes(len(encoder.end()))
            else:
                yield from _encoded(name, column, encoder, container, file)
        yield StoreFacts(
            num_tokens=0,
            num_documents=0,
            num_rewritten=encoder.num_rewritten if encoder is not None else 0,
            tokenizer_size=encoder.num_tokens if encoder is not None else 0,
            is_text=name in ("text", "tokens"),
        )

    store = open_store(key, make)
    return _rows(request, store, name)


def _rows(request: DataRequest, store: Store, name: str) -> DocumentRows:
    facts = store.facts
    refuse_larger(facts.tokenizer_size, request.vocab_size, request.tokenizer_path())
    if facts.largest_token >= request.vocab_size:
        raise InvalidSpec(
            f"holds token {facts.largest_token}, the model knows {request.vocab_size}",
            where=request.where,
            hint="Tokens and model do not belong together",
        )
    if request.is_plain and (name not in ("text", "tokens") or request.is_packed):
        raise InvalidSpec(
            "a module of your own takes rows of plain tokens: no packing, nothing that is masked",
            where=request.where,
            hint="Leave out pack and give text or tokens, or train with a command",
        )
    rows = DocumentRows(
        store,
        seq_len=request.seq_len,
        seed=request.seed,
        is_packed=request.is_packed,
        is_shuffled=request.is_shuffled,
        needs_whole=request.is_plain,
    )
    if rows.num_samples < 1:
        what = f" of {request.seq_len + 1} tokens" if request.is_plain else " to predict"
        raise InvalidSpec(f"holds nothing{what}", where=request.where)
    return rows


def look_at_records(
    request: DataRequest, container: Container, files: Sequence[Path]
) -> tuple[str, str]:
    """What its records are, by the first of them."""
    for file in files:
        first = next(read_records(container, file), None)
        if first is not None:
            return find_format(first, request.format, request.column, str(file))
    raise InvalidSpec("is empty: it holds no records", where=request.where)


def _encoded(
    name: str, column: str, encoder: Encoder | None, container: Container, file: Path
) -> Iterator[Document]:
    encode = record_encoder(name, column, encoder, str(file))
    records = read_records(container, file)
    while some := list(islice(records, _BATCH_RECORDS)):
        yield from encode(some)


def _tokenizer_digest(path: Path | None) -> list[Any]:
    """Of all files that say what a tokenizer does."""
    if path is None or not path.is_dir():
        return [file_digest(path)] if path is not None and path.is_file() else []
    names = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt")
    found = {file.name: file for name in names for file in path.glob(name) if file.is_file()}
    return [[name, file_digest(file)] for name, file in sorted(found.items())]
