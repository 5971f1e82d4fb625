"""A small tokenizer with a chat template, as `transformers` saves one."""

from pathlib import Path

TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{{ '<|' + m['role'] + '|> ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ ' </s>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)
# As some templates do: what an earlier answer was thinking is left out once another follows.
FORGETFUL = TEMPLATE.replace(
    "{{ '<|' + m['role'] + '|> ' + m['content'] }}",
    "{{ '<|' + m['role'] + '|> ' + ('' if loop.last or m['role'] != 'assistant' else 'old ') "
    "+ m['content'] }}",
)
_SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
_WORDS = (
    *("the", "a", "cat", "dog", "sat", "on", "mat", "red", "blue", "is", "what", "colour"),
    *("sky", "my", "name", "old"),
)


def save_tokenizer(folder: Path, *, template: str = TEMPLATE, words: int = 60) -> Path:
    """`tokenizer.json` and its config; `words` tokens in all."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<unk>", *_SPECIAL, *_WORDS]
    known += [f"w{number}" for number in range(words - len(known))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(known)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=list(_SPECIAL[2:]),
    )
    tokenizer.chat_template = template
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    return folder
