"""Small models of `transformers`, of every family that is trained, saved as people publish them."""

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from cells_cases import CellCase, an_engine, an_optimizer, boxes_of
from engine_cases import tokens

from drystone.describe.families.huggingface import load_config
from drystone.describe.families.names import STYLES, stored_weights
from drystone.describe.model import ModelSpec
from drystone.run.train.checkpoint.checkpoint import Progress, load_latest, save_checkpoint
from drystone.run.train.data import RankWork, micro_batches
from drystone.run.train.models.transformer import Transformer, build_model
from drystone.run.train.uneven.engine import Engine

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "vocab_size": 61, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2, "layer_norm_epsilon": 1e-2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


def rope(kind: str = "default", theta: float = 500.0, **other) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **other}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)  # fmt: skip
LONG = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [1.5, 2.0, 3.0]}
GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
}
# Epsilons and windows such that wrong ones show.
CONFIGS = {
    "llama": ("LlamaConfig", SIZES | rope() | {"rms_norm_eps": 1e-2}),
    "llama, 3.1": ("LlamaConfig", SIZES | LLAMA3 | {"tie_word_embeddings": True}),
    "llama, linear": ("LlamaConfig", SIZES | rope("linear", factor=4.0)),
    "llama, biases": (
        "LlamaConfig", SIZES | {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "mistral": ("MistralConfig", SIZES | rope() | {"sliding_window": 5, "rms_norm_eps": 1e-3}),
    "qwen2": ("Qwen2Config", SIZES | rope() | {"rms_norm_eps": 1e-3}),
    "qwen2, window": (
        "Qwen2Config",
        SIZES | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", SIZES | rope() | {"head_dim": 16, "rms_norm_eps": 1e-2}),
    "phi3": ("Phi3Config", SIZES | rope() | {"rms_norm_eps": 1e-3}),
    "phi3, long": (
        "Phi3Config",
        SIZES | rope("longrope", **LONG, partial_rotary_factor=0.75)
        | {"original_max_position_embeddings": 8}),
    "phi3, short": (
        "Phi3Config",
        SIZES | rope("longrope", **LONG, partial_rotary_factor=0.75)
        | {"original_max_position_embeddings": 32, "sliding_window": 7}),
    "starcoder2": ("Starcoder2Config", SIZES | rope() | {"norm_epsilon": 1e-2}),
    "gpt2": ("GPT2Config", GPT2),
    "gemma": ("GemmaConfig", SIZES | {"head_dim": 16, "rms_norm_eps": 1e-2}),
    "gemma2": (
        "Gemma2Config",
        SIZES | {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 2.0,
                 "final_logit_softcapping": 1.0, "query_pre_attn_scalar": 24}),
    "gemma3_text": (
        "Gemma3TextConfig",
        SIZES | {"head_dim": 16, "sliding_window": 5, "rope_parameters": GEMMA3,
                 "_sliding_window_pattern": 3}),
    "olmo2": ("Olmo2Config", SIZES | rope() | {"rms_norm_eps": 1e-2}),
    "granite": (
        "GraniteConfig",
        SIZES | {"embedding_multiplier": 12.0, "logits_scaling": 8.0,
                 "residual_multiplier": 0.22, "attention_multiplier": 0.015625}),
    "mixtral": (
        "MixtralConfig",
        SIZES | rope() | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        SIZES | rope() | {"num_experts": 6, "num_experts_per_tok": 3, "head_dim": 16,
                          "moe_intermediate_size": 24, "mlp_only_layers": [1]}),
    "qwen3_moe, normed": (
        "Qwen3MoeConfig",
        SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                 "norm_topk_prob": True}),
    "olmoe": (
        "OlmoeConfig",
        SIZES | rope() | {"num_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-2}),
}  # fmt: skip
# One of each family, for what takes longer.
FAMILIES = [name for name in CONFIGS if "," not in name]
MIXTURES = ["mixtral", "qwen3_moe", "olmoe"]  # whose experts are not split


def config_of(name: str, **other: object) -> transformers.PretrainedConfig:
    kind, values = CONFIGS[name]
    return getattr(transformers, kind)(**values | other)


def their_model(name: str, **other: object) -> transformers.PreTrainedModel:
    """Weights that are nowhere what they began with: norms and biases show."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config_of(name, **other)).float()
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.data += noise * (0.1 if parameter.dim() < 2 else 0.02)
    return model


def saved(name: str, folder: Path, *, most: str = "20KB") -> Path:
    """The model in several files, as large ones are."""
    their_model(name).save_pretrained(folder, max_shard_size=most)
    return folder


def their_loss(model: transformers.PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """Each token but the first, predicted from those before it: as any script computes it."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


CLIP = 0.5
BATCH = 4  # samples of a step, at every layout
SPLIT = ((3, 2, 0.3), (1, 1, 0.7))  # batch, micro-batch and share of state of each uneven rank
WORKS = [RankWork(batch=b, micro_batch=m, state_share=s) for b, m, s in SPLIT]


@dataclass(frozen=True)
class FolderCase(CellCase):
    """A split of a model with its weights, from a folder."""

    folder: str = ""
    lora: bool = False

    @property
    def spec(self) -> ModelSpec:
        return load_config(self.folder)

    def model(self, *, on_meta: bool) -> Transformer:
        return build_model(self.spec, on_meta=on_meta)


def layout(folder: Path, *, tp: int, pp: int) -> FolderCase:
    stages = ((4 // pp, tp, (2,)),) * pp
    return FolderCase(stages=stages, num_micro=2, batch=BATCH, folder=str(folder), zero=1)


def train_folders(cases: list[FolderCase | Path], steps: int) -> list[tuple[list[float], list]]:
    """Losses, and the gradients of the first step; of a mere folder over uneven ranks."""
    found = []
    for case in cases:
        engine = _engine(case)
        found.append(_train(engine, _optimizer(engine), range(steps)))
    return found


def train_resized(
    many: list[list[FolderCase | Path]], checkpoints: Path, steps: int
) -> list[list[float]]:
    """Losses of jobs that go on with another split, from files, after as many steps on each."""
    found = []
    for number, cases in enumerate(many):
        losses: list[float] = []
        folder = checkpoints / str(number)
        for case in cases:
            engine = _engine(case)
            optimizer = _optimizer(engine)
            load_latest(folder, engine, optimizer)
            run = range(len(losses), len(losses) + steps)
            losses += _train(engine, optimizer, run)[0]
            save_checkpoint(folder, engine, optimizer, Progress(step=len(losses)), keep=1)
        found.append(losses)
    return found


def _engine(case: FolderCase | Path):
    if isinstance(case, FolderCase):
        return an_engine(case)
    model = build_model(load_config(case), on_meta=True)
    return Engine(model, [work.state_share for work in WORKS])


def _optimizer(engine) -> torch.optim.Optimizer:
    return an_optimizer(engine.parameter_groups(weight_decay=0.1))


def _train(engine, optimizer, steps: range) -> tuple[list[float], list]:
    losses, gradients = [], []
    for step in steps:
        if isinstance(engine, Engine):
            runs = micro_batches(WORKS, engine.wire.rank, step * BATCH)
        else:
            runs = engine.layout.samples(engine.seat, step * BATCH) if engine.reads_samples else []
        result = engine.compute_gradients([tokens().read(run) for run in runs])
        losses.append(result.loss)
        if not step:
            gradients = [
                (one.name, one.is_counted, box.offsets, values)
                for one in engine.owned
                for box, values in boxes_of(one, one.value.grad)
            ]
        engine.clip_gradients(result, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def train_theirs(name: str, spec: ModelSpec, steps: int) -> tuple[list[float], dict]:
    """The same with `transformers` and torch alone; gradients under our names."""
    model = their_model(name).train()
    matrices = [one for one in model.parameters() if one.dim() > 1]
    vectors = [one for one in model.parameters() if one.dim() <= 1]
    optimizer = an_optimizer([{"params": matrices, "weight_decay": 0.1},
                              {"params": vectors, "weight_decay": 0.0}])  # fmt: skip
    losses, gradients = [], {}
    for step in range(steps):
        loss = their_loss(model, tokens().read(range(step * BATCH, (step + 1) * BATCH)))
        loss.backward()
        losses.append(loss.item())
        if not step:
            found = {new: one.grad.clone() for new, one in model.named_parameters()}
            gradients = in_our_names(spec, found)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def in_our_names(spec: ModelSpec, theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a model of `transformers`, as our transformer has them."""
    ours = {}
    theirs = theirs | _experts_apart(theirs)
    for stored in stored_weights(spec, STYLES[spec.family]).values():
        whole = theirs[stored.name]
        whole = whole.t() if stored.is_transposed else whole
        sizes = [shape[0] for _, shape in stored.parts]
        ours |= dict(zip((part for part, _ in stored.parts), whole.split(sizes), strict=True))
    return ours


def _experts_apart(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts stand in one tensor in memory, and each for itself in files."""
    found = {}
    for name, whole in theirs.items():
        start = name.partition("mlp.experts.")[0]
        if name.endswith("experts.gate_up_proj"):
            halves = {
                ("gate_proj", "w1"): whole.chunk(2, 1)[0],
                ("up_proj", "w3"): whole.chunk(2, 1)[1],
            }
        elif name.endswith("experts.down_proj"):
            halves = {("down_proj", "w2"): whole}
        else:
            continue
        for (usual, mixtral), each in halves.items():
            for at, own in enumerate(each):
                found[f"{start}mlp.experts.{at}.{usual}.weight"] = own
                found[f"{start}block_sparse_moe.experts.{at}.{mixtral}.weight"] = own
    routers = {
        name.replace("mlp.gate.", "block_sparse_moe.gate."): one
        for name, one in theirs.items()
        if ".mlp.gate." in name
    }
    return found | routers
