"""Models that read text and images: Qwen 2 to 3 VL, Llama 4.

The layers are those of the text part. The tower that sees is counted to the last parameter as one
part beside them; its time and activations, which depend on the images, are not estimated.
"""

from __future__ import annotations

from dataclasses import replace

from drystone.describe.families.experts import llama4_text, qwen3_moe
from drystone.describe.families.llama import qwen2, qwen3
from drystone.describe.families.reader import ConfigReader
from drystone.describe.model import ModelSpec

_TOWER = "vision tower"


def qwen2_vl(reader: ConfigReader) -> ModelSpec:
    """Qwen2-VL: a plain tower with layer norms."""
    text, vision = qwen2(_text(reader)), reader.table("vision_config")
    width = vision.size("embed_dim", default=1280)
    ffn_size = width * vision.size("mlp_ratio", default=4)
    block = _attention(width) + _mlp(width, ffn_size) + 4 * width
    merged = width * vision.size("spatial_merge_size", default=2) ** 2
    merger = 2 * width + _linear(merged, merged) + _linear(merged, text.hidden_size)
    depth = vision.size("depth", default=32)
    return _with_tower(text, _patches(vision, width, 14) + depth * block + merger)


def qwen2_5_vl(reader: ConfigReader) -> ModelSpec:
    """Qwen2.5-VL: a gated tower with RMS norms."""
    text, vision = qwen2(_text(reader)), reader.table("vision_config")
    width = vision.size("hidden_size", default=3584)
    ffn_size = vision.size("intermediate_size", default=3420)
    gated = 2 * _linear(width, ffn_size) + _linear(ffn_size, width)
    block = _attention(width) + gated + 2 * width
    merged = width * vision.size("spatial_merge_size", default=2) ** 2
    out = vision.size("out_hidden_size", default=3584)
    merger = width + _linear(merged, merged) + _linear(merged, out)
    depth = vision.size("depth", default=32)
    return _with_tower(text, _patches(vision, width, 14) + depth * block + merger)


def qwen3_vl(reader: ConfigReader) -> ModelSpec:
    """Qwen3-VL: learned positions, and four ways from the tower into the text."""
    return _with_tower(qwen3(_text(reader)), _qwen3_tower(reader))


def qwen3_vl_moe(reader: ConfigReader) -> ModelSpec:
    """Qwen3-VL with experts."""
    return _with_tower(qwen3_moe(_text(reader)), _qwen3_tower(reader))


def llama4(reader: ConfigReader) -> ModelSpec:
    """Llama 4 as published: text, tower and what joins them."""
    text, vision = llama4_text(_text(reader)), reader.table("vision_config")
    width = vision.size("hidden_size", default=768)
    ffn_size = vision.size("intermediate_size", default=5632)
    patch = vision.size("patch_size", default=14)
    num_patches = (vision.size("image_size", default=448) // patch) ** 2 + 1
    embedding = vision.size("num_channels", default=3) * patch**2 * width + width
    block = 4 * _linear(width, width) + _mlp(width, ffn_size) + 4 * width
    depth = vision.size("num_hidden_layers", default=34)
    projected = vision.size("projector_output_dim", default=4096)
    adapter = ffn_size * vision.size("projector_input_dim", default=4096) + projected**2
    joining = vision.size("vision_output_dim", default=7680) * text.hidden_size
    around = embedding + num_patches * width + 4 * width
    return _with_tower(text, around + depth * block + adapter + joining)


def _qwen3_tower(reader: ConfigReader) -> int:
    vision = reader.table("vision_config")
    width = vision.size("hidden_size", default=1152)
    block = _attention(width) + _mlp(width, vision.size("intermediate_size", default=4304))
    merged = width * vision.size("spatial_merge_size", default=2) ** 2
    out = vision.size("out_hidden_size", default=3584)
    joins = _linear(merged, merged) + _linear(merged, out)
    deep = len(vision.indices("deepstack_visual_indexes") or (8, 16, 24))
    positions = vision.size("num_position_embeddings", default=2304) * width
    mergers = joins + 2 * width + deep * (joins + 2 * merged)
    depth = vision.size("depth", default=27)
    return _patches(vision, width, 16) + width + positions + depth * (block + 4 * width) + mergers


def _text(reader: ConfigReader) -> ConfigReader:
    """The text part; older files have its keys beside everything else."""
    if reader.config.get("text_config") is None:
        return reader
    text = reader.table("text_config")
    tied = reader.config.get("tie_word_embeddings")
    reader.used.add("tie_word_embeddings")
    return replace(text, config={**text.config, "tie_word_embeddings": tied})


def _with_tower(text: ModelSpec, num_params: int) -> ModelSpec:
    return replace(text, other_params=(*text.other_params, (_TOWER, num_params)))


def _patches(vision: ConfigReader, width: int, patch_size: int) -> int:
    patch = vision.size("patch_size", default=patch_size)
    frames = vision.size("temporal_patch_size", default=2)
    return vision.size("in_channels", "in_chans", default=3) * frames * patch**2 * width


def _attention(width: int) -> int:
    return _linear(width, 3 * width) + _linear(width, width)


def _mlp(width: int, ffn_size: int) -> int:
    return _linear(width, ffn_size) + _linear(ffn_size, width)


def _linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs
