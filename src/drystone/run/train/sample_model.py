"""A small model folder and conversations, to try fine-tuning on a processor.

    python -m drystone.run.train.sample_model FOLDER

writes FOLDER/base (configuration, weights, tokenizer with a chat template), FOLDER/chats.jsonl,
FOLDER/held_out.jsonl, and FOLDER/tune.yaml, a job file for them. The model is a Llama of a million
parameters that has learned nothing yet.
`--ask FOLDER...` says what such models answer.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

THINGS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black", "blood": "red"}
ASKED = ("What colour is {0}?", "Which colour has {0}?", "Tell me the colour of {0}.")
TUNE = """\
model: ./base             # a folder: config, weights, tokenizer
data: {train: chats.jsonl, eval: held_out.jsonl, format: chat, pack: true}
train:
  steps: 120
  batch: 8
  sequence: 64
  checkpoint_every: 10
  export: huggingface
  optimizer: {learning_rate: 3e-3, schedule: cosine, warmup: 5%}
evaluate: {every: 40}
"""
QUESTION = "Which colour has snow?"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|user|>", "<|assistant|>", "<|end|>"]


def conversations(seed: int, number: int) -> list[dict[str, Any]]:
    """Questions about colours, with their answers."""
    chance = random.Random(seed)
    found = []
    for _ in range(number):
        thing, colour = chance.choice(list(THINGS.items()))
        question = chance.choice(ASKED).format(thing)
        answer = f"The colour of {thing} is {colour}."
        found.append(
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
    return found


def save_model(folder: Path, texts: list[str], *, width: int = 128, layers: int = 4) -> None:
    """The folder that `from_pretrained` of transformers would load."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        vocab_size=512,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        rope_theta=10000.0,
    )
    logging.disable_progress_bar()
    LlamaForCausalLM(config).save_pretrained(folder)


def write_sample(folder: Path, *, width: int = 128, layers: int = 4) -> None:
    """Write all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, seed, number in (("chats", 1, 256), ("held_out", 2, 32)):
        lines = [json.dumps(chat) for chat in conversations(seed, number)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "tune.yaml").write_text(TUNE, encoding="utf-8")
    texts = [m["content"] for chat in conversations(1, 256) for m in chat["messages"]]
    save_model(folder / "base", texts, width=width, layers=layers)


def answer(folder: Path, question: str = QUESTION) -> str:
    """What a model of a folder says, always its likeliest word."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        said = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    spoken: str = tokenizer.decode(said[0, prompt["input_ids"].shape[1] :])
    return " ".join(spoken.partition("<|end|>")[0].split())


def main(words: Sequence[str]) -> None:
    """Write a sample, or ask the models of folders."""
    if words[:1] == ["--ask"]:
        for folder in words[1:]:
            sys.stdout.write(answer(Path(folder)) + "\n")
    else:
        write_sample(Path(words[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
