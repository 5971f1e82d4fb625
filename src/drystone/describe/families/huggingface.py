"""Reads a Hugging Face `config.json` into a `ModelSpec`, without the `transformers` package.

What a config leaves out is what the same class of `transformers` would assume. The model meant is
the one that is trained: a language model with its head, BERT with its masked-word head, ViT with
its classifier; of a model that also sees images, the text part, with its tower as one part beside
it where the family is known (`vision_language`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from drystone.describe.families import encoders, experts, gpt, hybrids, llama, vision_language
from drystone.describe.families.function import COMPARED, with_function
from drystone.describe.families.reader import ConfigReader, shorten
from drystone.describe.model import ModelSpec
from drystone.describe.weights import check_weights, holds_weights
from drystone.errors import InvalidSpec, UnknownName, UnreadableFile

LARGEST_FILE_BYTES = 10 * 10**6

FAMILIES: Mapping[str, Callable[[ConfigReader], ModelSpec]] = {
    "bert": encoders.bert,
    "bloom": gpt.bloom,
    "deepseek_v2": experts.deepseek_v2,
    "deepseek_v3": experts.deepseek_v3,
    "deepseek_v32": experts.deepseek_v32,
    "falcon": gpt.falcon,
    "gemma": llama.gemma,
    "gemma2": llama.gemma2,
    "gemma3": llama.gemma3,
    "gemma3_text": llama.gemma3_text,
    "glm4_moe": experts.glm4_moe,
    "gpt2": gpt.gpt2,
    "gpt_bigcode": gpt.gpt_bigcode,
    "gpt_neo": gpt.gpt_neo,
    "gpt_neox": gpt.gpt_neox,
    "gpt_oss": experts.gpt_oss,
    "gptj": gpt.gptj,
    "granite": llama.granite,
    "granitemoe": experts.granitemoe,
    "jamba": hybrids.jamba,
    "kimi_k2": experts.deepseek_v3,
    "llama": llama.llama,
    "llama4": vision_language.llama4,
    "llama4_text": experts.llama4_text,
    "minimax": hybrids.minimax,
    "minimax_m2": experts.minimax_m2,
    "mistral": llama.mistral,
    "mixtral": experts.mixtral,
    "mpt": gpt.mpt,
    "nemotron_h": hybrids.nemotron_h,
    "olmo2": llama.olmo2,
    "olmoe": experts.olmoe,
    "opt": gpt.opt,
    "phi": gpt.phi,
    "phi3": llama.phi3,
    "qwen": llama.qwen,
    "qwen2": llama.qwen2,
    "qwen2_5_vl": vision_language.qwen2_5_vl,
    "qwen2_moe": experts.qwen2_moe,
    "qwen2_vl": vision_language.qwen2_vl,
    "qwen3": llama.qwen3,
    "qwen3_moe": experts.qwen3_moe,
    "qwen3_next": hybrids.qwen3_next,
    "qwen3_vl": vision_language.qwen3_vl,
    "qwen3_vl_moe": vision_language.qwen3_vl_moe,
    "roberta": encoders.bert,
    "stablelm": llama.stablelm,
    "starcoder2": llama.starcoder2,
    "t5": encoders.t5,
    "vit": encoders.vit,
}

_OTHER_FAMILY = (
    "A family is never taken for another one: give the model itself, as module.py:function that "
    "returns its torch.nn.Module (docs/jobs.md), and it is traced"
)


def parse_config(config: Mapping[str, Any], *, where: str, name: str = "") -> ModelSpec:
    """Turn the object of a `config.json` into a model; `where` names its file in messages."""
    model_type = _model_type(config, where)
    reader = ConfigReader(config, where, name or _own_name(config) or model_type)
    try:
        spec = with_function(reader, replace(FAMILIES[model_type](reader), family=model_type))
    except InvalidSpec as error:
        if error.where:
            raise
        raise InvalidSpec(error.message, where=where, hint=error.hint) from None
    return replace(spec, source=where)


def load_config(path: str | Path) -> ModelSpec:
    """Read a `config.json`, or the one in a folder; training then begins with its weights."""
    file, has_weights = Path(path), False
    try:
        if file.is_dir():
            has_weights = holds_weights(file)
            file = file / "config.json"
        config = read_object(file)
    except (OSError, ValueError) as error:
        # ValueError: a path that no file system takes, such as one with a null byte.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UnreadableFile(
            f"cannot be read ({reason})",
            where=str(file)[:300],
            hint="Give the path of a config.json, or of the folder that holds it",
        ) from None
    name = _own_name(config) or (file.parent.name if file.name == "config.json" else file.stem)
    spec = parse_config(config, where=str(file), name=name)
    if not has_weights:
        return spec
    folder = file.parent.absolute()
    problem = check_weights(folder, spec) if spec.family in COMPARED else ""
    return replace(spec, weights=str(folder), weights_problem=problem)


def read_object(file: Path) -> Mapping[str, Any]:
    """The object in a file that should be a `config.json`; an `OSError` if it cannot be read."""
    where = str(file)
    if file.exists() and not file.is_file():
        raise UnreadableFile(
            "is not a regular file", where=where, hint="Give the path of a config.json"
        )
    with file.open("rb") as stream:
        content = stream.read(LARGEST_FILE_BYTES + 1)
    if len(content) > LARGEST_FILE_BYTES:
        raise UnreadableFile(
            f"is larger than {LARGEST_FILE_BYTES // 10**6} MB, which no config.json is",
            where=where,
            hint="Give the config.json, not the weights beside it",
        )
    try:
        config = json.loads(content.decode("utf-8-sig"))
    except RecursionError:
        problem = "is nested too deeply for a config.json"
    except UnicodeDecodeError:
        problem = "is not text in UTF-8"
    except ValueError as error:
        problem = f"is not JSON ({str(error)[:100]})"
    else:
        if isinstance(config, dict):
            return config
        problem = f"must hold a JSON object, not {shorten(config)}"
    raise UnreadableFile(
        problem, where=where, hint="Fetch it again: it may be truncated or another file"
    )


def _model_type(config: Mapping[str, Any], where: str) -> str:
    model_type = config.get("model_type")
    if model_type is None:
        raise InvalidSpec(
            "key 'model_type' is missing",
            where=where,
            hint="Use the config.json published with the model",
        )
    if not isinstance(model_type, str):
        raise InvalidSpec(
            f"model_type is {shorten(model_type)}, must be a string",
            where=where,
            hint='For example "model_type": "llama"',
        )
    if model_type not in FAMILIES:
        error = UnknownName("model_type", model_type[:60], FAMILIES, where=where)
        mark = "" if error.hint.endswith(("?", ".")) else "."
        error.hint = f"{error.hint}{mark} {_OTHER_FAMILY}" if error.hint else _OTHER_FAMILY
        raise error
    return model_type


def _own_name(config: Mapping[str, Any]) -> str:
    name = config.get("_name_or_path")
    if not isinstance(name, str):
        return ""
    last = name.rstrip("/").rsplit("/", 1)[-1]
    return "".join(char for char in last[:100] if char.isprintable())
