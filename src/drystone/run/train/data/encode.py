"""From records to tokens: text, prompts with completions, chats by the tokenizer's own template.

Of prompts and of what others than the assistant say nothing is predicted. Which tokens of a chat
are the assistant's is found by rendering its beginnings: what the template adds for an answer is
that answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from drystone.errors import InvalidSpec, UnreadableFile

FORMATS: Final = ("text", "chat", "prompt", "tokens")
_COLUMNS: Final = {  # of each format, by which it is also known
    "chat": ("messages", "conversations"),
    "prompt": ("prompt", "completion"),
    "tokens": ("input_ids",),
    "text": ("text",),
}
_ROLES: Final = {"human": "user", "gpt": "assistant"}  # names that `conversations` have
Document = tuple[list[int], bytes]  # tokens, and 1 for each that is not predicted
Beginning = tuple[list[int]]  # tokens of a document, all predicted, that goes on with what follows
Encode = Callable[[Sequence[dict[str, Any]]], list[Document]]


@dataclass(slots=True)
class Encoder:
    """A tokenizer of a model's folder."""

    path: Path
    tokenizer: Any = field(repr=False)
    num_rewritten: int = 0  # answers that the template writes otherwise once others follow

    @property
    def num_tokens(self) -> int:
        """Tokens that it knows."""
        return len(self.tokenizer)

    def lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Lines of one text, without marks of its beginning and end."""
        return list(self.tokenizer(list(lines), add_special_tokens=False)["input_ids"])

    def end(self) -> list[int]:
        """What ends a document, if the tokenizer has a mark for it."""
        end = self.tokenizer.eos_token_id
        return [] if end is None else [int(end)]

    def texts(self, texts: Sequence[str]) -> list[Document]:
        """Whole documents."""
        found = self.tokenizer(list(texts))["input_ids"]
        end = self.end()
        return [(ids := _ended(one, end), bytes(len(ids))) for one in found]

    def answers(self, prompts: Sequence[str], completions: Sequence[str]) -> list[Document]:
        """Prompts, of which nothing is predicted, and what completes them."""
        first = self.tokenizer(list(prompts))["input_ids"]
        second = self.lines(completions)
        end = self.end()
        documents = []
        for prompt, completion in zip(first, second, strict=True):
            prompt = prompt[:-1] if end and prompt[-1:] == end else prompt
            answer = _ended(completion, end)
            documents.append(([*prompt, *answer], b"\1" * len(prompt) + bytes(len(answer))))
        return documents

    def chat(self, messages: list[dict[str, Any]]) -> Document:
        """A conversation as the template writes it; what the assistant says is predicted."""
        whole = self._render(messages)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:index], is_asking=True)
            after = self._render(messages[: index + 1])
            if whole.startswith(after) and after.startswith(before):
                spans.append((len(before), len(after)))
            elif index == len(messages) - 1:
                raise InvalidSpec(
                    "its chat template does not write an answer after the prompt for one, so what "
                    "is to be predicted cannot be told",
                    where=str(self.path),
                    hint="Use format: prompt, with prompt and completion",
                )
            else:
                self.num_rewritten += 1
        found = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        marks = bytes(
            not any(start >= first and end <= last for first, last in spans)
            for start, end in found["offset_mapping"]
        )
        return list(found["input_ids"]), marks

    def _render(self, messages: list[dict[str, Any]], *, is_asking: bool = False) -> str:
        if not messages and not is_asking:
            return ""
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=is_asking
            )
        except Exception as error:  # templates raise what they like
            raise InvalidSpec(
                f"a conversation cannot be written by the chat template: {error}",
                where=str(self.path),
            ) from None
        return text


def _ended(tokens: list[int], end: list[int]) -> list[int]:
    return tokens if end and tokens[-1:] == end else [*tokens, *end]


def load_encoder(path: Path, *, vocab_size: int) -> Encoder:
    """The tokenizer of a folder, or a `tokenizer.json`; one too large for the model is refused.

    Nothing is looked up in the network, and no code of the folder is run.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if (path / "tokenizer_config.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        else:
            file = path / "tokenizer.json" if path.is_dir() else path
            json.loads(file.read_text(encoding="utf-8"))
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # its own errors are plain exceptions
        reason = str(error).strip().split("\n", 1)[0][:200]
        raise UnreadableFile(f"holds no readable tokenizer: {reason}", where=str(path)) from None
    if not getattr(tokenizer, "is_fast", False):
        raise InvalidSpec(
            "holds a tokenizer without tokenizer.json",
            where=str(path),
            hint="Save it anew: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    refuse_larger(len(tokenizer), vocab_size, path)
    tokenizer.model_max_length = int(1e30)  # long documents are cut here, not warned of
    return Encoder(path, tokenizer)


def refuse_larger(num_tokens: int, vocab_size: int, path: Path | None) -> None:
    """A tokenizer of another model would name tokens that this one does not have."""
    if num_tokens > vocab_size:
        raise InvalidSpec(
            f"its tokenizer knows {num_tokens} tokens, the model {vocab_size}",
            where=str(path),
            hint="Name the tokenizer that belongs to the model: data: {tokenizer: FOLDER}",
        )


def find_format(record: dict[str, Any], wanted: str, column: str, where: str) -> tuple[str, str]:
    """What the records are, and the column that says it; judged by the first one."""
    known = {name: columns for name, columns in _COLUMNS.items() if wanted in ("auto", name)}
    if column:
        if column not in record:
            raise _no_column(column, record, where)
        if wanted == "auto":
            wanted = next((n for n, columns in _COLUMNS.items() if column in columns), "text")
        return wanted, column
    for name, columns in known.items():
        needed = columns if name == "prompt" else columns[:1]
        if all(one in record for one in needed):
            return name, columns[0]
        if name == "chat" and columns[1] in record:
            return name, columns[1]
    if wanted != "auto":
        raise _no_column(" and ".join(_COLUMNS[wanted][: 1 + (wanted == "prompt")]), record, where)
    raise InvalidSpec(
        f"cannot tell what a record with {_listed(record)} is",
        where=where,
        hint="Say it: data: {format: text, column: NAME}",
    )


def _no_column(column: str, record: dict[str, Any], where: str) -> InvalidSpec:
    return InvalidSpec(
        f"has no column {column}; it has {_listed(record)}",
        where=where,
        hint="Name the one that is meant: data: {column: NAME}",
    )


def _listed(record: dict[str, Any]) -> str:
    return ", ".join(sorted(record)[:12]) or "no columns"


def record_encoder(name: str, column: str, encoder: Encoder | None, where: str) -> Encode:
    """What makes documents of records."""
    if name == "tokens":
        return lambda records: [_tokens(record, column, where) for record in records]
    assert encoder is not None
    match name:
        case "chat":
            return lambda records: [
                encoder.chat(_messages(record.get(column), where)) for record in records
            ]
        case "prompt":
            return lambda records: encoder.answers(
                [_text(record, "prompt", where) for record in records],
                [_text(record, "completion", where) for record in records],
            )
    return lambda records: encoder.texts([_text(record, column, where) for record in records])


def _text(record: dict[str, Any], column: str, where: str) -> str:
    text = record.get(column)
    if not isinstance(text, str):
        raise InvalidSpec(f"a record's {column} is {_kind(text)}, not text", where=where)
    return text


def _tokens(record: dict[str, Any], column: str, where: str) -> Document:
    """Token numbers, and `labels` beside them, in which -100 is not predicted."""
    tokens, labels = record.get(column), record.get("labels")
    if not isinstance(tokens, list) or not all(isinstance(one, int) for one in tokens):
        raise InvalidSpec(f"a record's {column} is {_kind(tokens)}, not token numbers", where=where)
    if labels is None:
        return tokens, bytes(len(tokens))
    if not isinstance(labels, list) or len(labels) != len(tokens):
        raise InvalidSpec(f"a record's labels are not as many as its {column}", where=where)
    return tokens, bytes(label == -100 for label in labels)


def _messages(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise InvalidSpec(f"a conversation is {_kind(messages)}, not a list", where=where)
    found = []
    for message in messages:
        if isinstance(message, dict) and "from" in message and "value" in message:
            role = _ROLES.get(message["from"], message["from"])
            message = {"role": role, "content": message["value"]}
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise InvalidSpec("a message has no role and content", where=where)
        found.append({key: value for key, value in message.items() if value is not None})
    return found


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
