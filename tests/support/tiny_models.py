"""Small random models of every family, as transformers writes them, and what they are held to.

Sizes are odd, heads are shared and not width / heads wide, norms and biases are not ones and zeros:
whatever is mixed up changes the numbers. The oracle is transformers in float64 throughout (its own
RMSNorm computes in float32 whatever the type), with PEFT's adapters for LoRA.

A test file that uses the fixture `on` (conftest.py) runs each of its tests on every device that
this machine has; `loaded` then gives models of that device, and `assert_near` asks of each what it
can hold: of the CPU float32's error, of a GPU no more than the same model errs in torch's bf16.
"""

import copy
import functools
import json
import tempfile
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tinsmith import _core
from tinsmith.models import weight_dtypes
from tinsmith.models.registry import LoadedModel, load_model
from tinsmith.system.steps import finish
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.utils.logging import disable_progress_bar

from support.expert_models import LoraExperts, every_expert, fuse, route, turn

PADDING = 5  # ids at the vocabulary's end that stand for no token
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 48,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40,
}  # fmt: skip
MODULES = {
    "wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj", "w_gate": "mlp.gate_proj", "w_up": "mlp.up_proj",
    "w_down": "mlp.down_proj", "delta_q": "linear_attn.in_proj_q",
    "delta_k": "linear_attn.in_proj_k", "delta_v": "linear_attn.in_proj_v",
    "delta_z": "linear_attn.in_proj_z", "delta_out": "linear_attn.out_proj",
    "e_gate": "mlp.experts.w1", "e_up": "mlp.experts.w3", "e_down": "mlp.experts.w2",
}  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """One model: a family, what differs from the sizes below, and how its files are written.
    `kind` is transformers' model_type, where that is not the family's name; `seeing` models have a
    vision tower beside the text's, of the sizes `vision` and with an image processor, or else
    of sizes that nothing computes and without one; `fused` ones have all experts in one tensor,
    whatever transformers writes, and in `turned` ones inputs are its rows, as Qwen3-VL is
    published."""

    family: str
    config: Mapping[str, Any]
    dtype: torch.dtype = torch.float32
    shard: str = "1GB"
    kind: str = ""
    seeing: bool = False
    vision: Mapping[str, Any] = field(default_factory=dict)
    fused: bool = False
    turned: bool = False


SIZES = {"num_hidden_layers": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 160}
SPECS = {
    "qwen3": Spec(
        "qwen3",
        {"vocab_size": 131, "hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 6,
         "num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": False},
    ),
    "qwen3-tied": Spec(
        "qwen3",
        {"vocab_size": 97, "hidden_size": 24, "intermediate_size": 41, "num_attention_heads": 3,
         "num_key_value_heads": 3, "head_dim": 16, "tie_word_embeddings": True},
        torch.bfloat16,
        "10KB",
    ),
    "qwen2": Spec(
        "qwen2",
        {"vocab_size": 113, "hidden_size": 42, "intermediate_size": 61, "num_attention_heads": 3,
         "num_key_value_heads": 1, "tie_word_embeddings": False},
        torch.float16,
    ),
    "qwen2-tied": Spec(
        "qwen2",
        {"vocab_size": 89, "hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4,
         "num_key_value_heads": 2, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "llama": Spec(
        "llama",
        {"vocab_size": 107, "hidden_size": 40, "intermediate_size": 67, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": False,
         "rope_parameters": LLAMA3},
        torch.bfloat16,
        "20KB",
    ),
    "llama-tied": Spec(
        "llama",
        {"vocab_size": 101, "hidden_size": 30, "intermediate_size": 33, "num_attention_heads": 3,
         "num_key_value_heads": 3, "tie_word_embeddings": True, "num_hidden_layers": 3,
         "rope_parameters": LLAMA3},
    ),
    "mistral": Spec(
        "mistral",
        {"vocab_size": 103, "hidden_size": 38, "intermediate_size": 53, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 14, "tie_word_embeddings": False,
         "sliding_window": 21},
    ),
    "mistral-tied": Spec(
        "mistral",
        {"vocab_size": 94, "hidden_size": 24, "intermediate_size": 35, "num_attention_heads": 2,
         "num_key_value_heads": 1, "tie_word_embeddings": True, "sliding_window": None},
        torch.bfloat16,
    ),
    "qwen2-window": Spec(
        "qwen2",
        {"vocab_size": 91, "hidden_size": 28, "intermediate_size": 39, "num_attention_heads": 2,
         "num_key_value_heads": 2, "tie_word_embeddings": False, "use_sliding_window": True,
         "sliding_window": 65, "max_window_layers": 1},
    ),
    "qwen3_5": Spec(
        "qwen3_5",
        {"vocab_size": 109, "hidden_size": 34, "intermediate_size": 47, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": False,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
         "linear_value_head_dim": 64, "layer_types": ["linear_attention", "full_attention"],
         "max_position_embeddings": 200,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True,
                             "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.25}},
        seeing=True,
    ),
    "qwen3_5-tied": Spec(
        "qwen3_5",
        {"vocab_size": 93, "hidden_size": 32, "intermediate_size": 39, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True,
         "num_hidden_layers": 3, "linear_num_key_heads": 1, "linear_num_value_heads": 3,
         "linear_key_head_dim": 64, "linear_value_head_dim": 32, "full_attention_interval": 3,
         "partial_rotary_factor": 0.5, "max_position_embeddings": 200},
        torch.bfloat16,
        "40KB",
        kind="qwen3_5_text",
    ),
    "qwen3_moe": Spec(
        "qwen3_moe",
        {"vocab_size": 105, "hidden_size": 34, "intermediate_size": 45, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": False,
         "num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 8, "num_experts_per_tok": 3,
         "moe_intermediate_size": 21, "norm_topk_prob": True},
    ),
    "qwen3_moe-tied": Spec(
        "qwen3_moe",
        {"vocab_size": 99, "hidden_size": 30, "intermediate_size": 26, "num_attention_heads": 3,
         "num_key_value_heads": 3, "head_dim": 10, "tie_word_embeddings": True,
         "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 18,
         "norm_topk_prob": False},
        torch.bfloat16,
        "30KB",
        fused=True,
    ),
    "qwen3_5_moe": Spec(
        "qwen3_5_moe",
        {"vocab_size": 95, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
         "head_dim": 16, "tie_word_embeddings": False, "linear_num_key_heads": 1,
         "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
         "layer_types": ["linear_attention", "full_attention"], "max_position_embeddings": 200,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                             "partial_rotary_factor": 0.5},
         "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 19,
         "shared_expert_intermediate_size": 23},
        seeing=True,
    ),
    "qwen3_5_moe-tied": Spec(
        "qwen3_5_moe",
        {"vocab_size": 92, "hidden_size": 28, "num_attention_heads": 2, "num_key_value_heads": 2,
         "head_dim": 16, "tie_word_embeddings": True, "linear_num_key_heads": 1,
         "linear_num_value_heads": 1, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
         "full_attention_interval": 2, "max_position_embeddings": 200, "num_experts": 6,
         "num_experts_per_tok": 1, "moe_intermediate_size": 17,
         "shared_expert_intermediate_size": 31},
        torch.float16,
        "40KB",
        kind="qwen3_5_moe_text",
    ),
    "qwen3_vl": Spec(
        "qwen3_vl",
        {"vocab_size": 106, "hidden_size": 34, "intermediate_size": 43, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True,
                             "mrope_section": [2, 2, 2]}},
        seeing=True,
    ),
    "qwen3_vl-tied": Spec(
        "qwen3_vl",
        {"vocab_size": 96, "hidden_size": 28, "intermediate_size": 37, "num_attention_heads": 3,
         "num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": True},
        torch.bfloat16,
        "20KB",
        seeing=True,
    ),
    "qwen3_vl_moe": Spec(
        "qwen3_vl_moe",
        {"vocab_size": 102, "hidden_size": 32, "intermediate_size": 29, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": False,
         "num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 7, "num_experts_per_tok": 3,
         "moe_intermediate_size": 18,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True,
                             "mrope_section": [1, 2, 2]}},
        seeing=True,
        turned=True,
    ),
    "qwen3_vl_moe-tied": Spec(
        "qwen3_vl_moe",
        {"vocab_size": 90, "hidden_size": 28, "intermediate_size": 31, "num_attention_heads": 2,
         "num_key_value_heads": 2, "tie_word_embeddings": True, "num_experts": 5,
         "num_experts_per_tok": 2, "moe_intermediate_size": 19,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        torch.bfloat16,
        "40KB",
        seeing=True,
    ),
    "gpt_oss": Spec(
        "gpt_oss",
        {"vocab_size": 98, "hidden_size": 32, "intermediate_size": 23, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": False,
         "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 32,
         "swiglu_limit": 1.5, "rope_parameters": YARN | {"truncate": False}},
    ),
    "gpt_oss-tied": Spec(
        "gpt_oss",
        {"vocab_size": 93, "hidden_size": 26, "intermediate_size": 31, "num_attention_heads": 3,
         "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True,
         "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 21,
         "layer_types": ["full_attention", "sliding_attention"], "attention_bias": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        torch.bfloat16,
        "30KB",
    ),
}  # fmt: skip
MIXTURES = [name for name, spec in SPECS.items() if "num_experts_per_tok" in spec.config]
VISION = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "patch_size": 2,
    "num_position_embeddings": 4,
}  # fmt: skip
IMAGE_IDS = {
    "image_token_id": 20, "video_token_id": 21, "vision_start_token_id": 22,
    "vision_end_token_id": 23,
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
    "image_mean": [0.5, 0.4, 0.45], "image_std": [0.5, 0.45, 0.4],
}  # fmt: skip
EXPERTS = ("MoeExperts", "MoeTextExperts", "OssExperts")  # ends of transformers' names of classes
disable_progress_bar()
_ROOT = tempfile.TemporaryDirectory(prefix="tinsmith-models-")


def make(spec: Spec, folder: Path, seed: int = 0) -> Path:
    """Writes a random model with its tokenizer as transformers does."""
    config: dict[str, Any] = {**SIZES, "eos_token_id": 7, **spec.config}
    vocab, loader = config["vocab_size"], AutoModelForCausalLM
    if spec.seeing:
        vision = VISION | {"out_hidden_size": config["hidden_size"]}
        vision |= {"deepstack_visual_indexes": [0]} if spec.family.startswith("qwen3_vl") else {}
        vision |= spec.vision
        tied = {"tie_word_embeddings": config["tie_word_embeddings"]}
        config = {"text_config": config, "vision_config": vision, **tied, **IMAGE_IDS}
        loader = AutoModelForImageTextToText
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = loader.from_config(AutoConfig.for_model(spec.kind or spec.family, **config))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape)
                if parameter.dim() in (2, 5):  # the latter's inputs are patches
                    parameter.copy_(noise * (1.3 / parameter[0].numel() ** 0.5))
                elif ".experts." in name:
                    inputs = parameter.shape[1 if spec.family == "gpt_oss" else 2]
                    parameter.copy_(noise * (1.3 / inputs**0.5))
                elif name.endswith(("norm.weight", "norm1.weight", "norm2.weight")):
                    parameter.add_(0.3 * noise)  # to ones, or to zeros where 1 + w multiplies
                elif name.endswith("A_log"):
                    parameter.copy_(noise - 3)  # some heads forget within a page, some do not
                else:
                    parameter.copy_(0.4 * noise)
    model.to(spec.dtype).save_pretrained(folder, max_shard_size=spec.shard)
    if spec.family.startswith("qwen3_5"):
        lay_out(folder, "model.language_model." if spec.seeing else "model.")
    if spec.fused:
        fuse(folder)
    if spec.turned:
        turn(folder)
    if spec.vision:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    words = {f"w{index}": index for index in range(vocab - PADDING)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def lay_out(folder: Path, prefix: str) -> None:
    """Gives a Qwen3.5's tensors the names of published folders, which transformers 5.5 does not
    write, and one with a vision tower the tensors of a speculative head."""
    nested, index = "model.language_model.", folder / "model.safetensors.index.json"

    def published(name: str) -> str:
        inner = name.removeprefix(nested)
        return name if inner == name else ("model." if "visual." in inner else prefix) + inner

    places = {}
    for file in folder.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(file)
        tensors = {published(name): tensor for name, tensor in tensors.items()}
        if "model.visual.pos_embed.weight" in tensors:
            tensors["mtp.fc.weight"] = torch.ones(3, 6)
        safetensors.torch.save_file(tensors, file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file.name)
    if index.is_file():
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))


@functools.cache
def folder(name: str) -> Path:
    """The folder of one of SPECS, made once."""
    return make(SPECS[name], Path(_ROOT.name) / name)


def loaded(name: str) -> LoadedModel:
    """One of SPECS in the engine, on the device that the test runs on."""
    return loaded_on(name, DEVICE.get(), WEIGHTS.get())


def loaded_anew(name: str, threads: int) -> LoadedModel:
    """The same, which nothing else uses."""
    return load_model(place_of(name, WEIGHTS.get()), device=DEVICE.get(), threads=threads,
                      weights=asked_of(WEIGHTS.get()))  # fmt: skip


@functools.cache
def loaded_on(name: str, device_name: str, weights: str = "stored") -> LoadedModel:
    """One of SPECS in the engine, on a device."""
    kind = asked_of(weights)
    return load_model(place_of(name, weights), device=device_name, threads=1, weights=kind)


@functools.cache
def place_of(name: str, weights: str) -> Path:
    """Where a model is whose weights are kept so: of blocks that files have, a wider one."""
    if weights in weight_dtypes.WEIGHTS:
        return folder(name)
    from support import gguf_files, quantized_files

    make_kept = (quantized_files if weights in quantized_files.METHODS else gguf_files).make_kept
    return make_kept(SPECS[name], Path(_ROOT.name) / f"{name}-{weights}", weights)


def asked_of(weights: str) -> str:
    """The option `weights` of such a model."""
    return weights if weights in weight_dtypes.WEIGHTS else "stored"


@functools.cache
def reference(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """One of SPECS in transformers, in float64 or as it computes in bf16; copy it to change it."""
    if dtype == torch.float64:
        return as_double(folder(name))
    model = in_transformers(folder(name), dtype)
    return as_it_computes(model.to(dtype).eval())  # one that sees takes its parts' own types


def as_it_computes(model: PreTrainedModel) -> PreTrainedModel:
    """The model in bf16, but for experts in sizes that torch's product of bf16 does not take."""
    for module in model.modules():
        if type(module).__name__.endswith(EXPERTS):
            module.forward = types.MethodType(every_expert, module)
    return model


def in_transformers(path: Path, dtype: torch.dtype | str, **options: Any) -> PreTrainedModel:
    """A model's folder in transformers, without the part that sees. Of some transformers has only
    the whole."""
    if type(AutoConfig.from_pretrained(path)) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    return TextModel(AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, **options))


class TextModel(PreTrainedModel, GenerationMixin):
    """The language model of one with several parts, under the names that others have."""

    base_model_prefix, _supports_sdpa = "model", True

    def __init__(self, whole: PreTrainedModel) -> None:
        whole.config.text_config._experts_implementation = "eager"
        super().__init__(whole.config.text_config)
        self.config.tie_word_embeddings = whole.config.tie_word_embeddings
        self.model, self.lm_head = whole.model.language_model, whole.lm_head

    def forward(
        self, input_ids: torch.Tensor | None = None, **inputs: Any
    ) -> CausalLMOutputWithPast:
        rows = self.model(input_ids=input_ids, **inputs)[0]
        return CausalLMOutputWithPast(logits=self.lm_head(rows))


def as_double(path: Path) -> PreTrainedModel:
    """A model's folder in transformers, in float64 throughout."""
    model = in_transformers(path, torch.float64)
    return in_double(model.double()).eval()  # parts of a model that sees have their own type


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """The model, without the parts that compute in float32 whatever the type, or not in float64."""
    for module in model.modules():  # also those of a copied model, whose methods are the original's
        name = type(module).__name__
        if name.endswith(("RMSNorm", "RMSNormGated")):
            module.forward = types.MethodType(_rmsnorm, module)
        if isinstance(module, Qwen3_5GatedDeltaNet | Qwen3_5MoeGatedDeltaNet):
            module.chunk_gated_delta_rule = recurrence
        if name.endswith(("MoeTopKRouter", "MoeTextTopKRouter")):
            module.forward = types.MethodType(route, module)
        if name.endswith(EXPERTS):
            module.forward = types.MethodType(every_expert, module)
    return model


def _rmsnorm(
    module: torch.nn.Module, x: torch.Tensor, gate: torch.Tensor | None = None
) -> torch.Tensor:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    plus_one = type(module).__name__ in ("Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
    weight = module.weight + plus_one
    normed = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))
    return normed if gate is None else normed * torch.nn.functional.silu(gate)


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule, token by token, in the type of its inputs: q, k (1, T, H, N), v
    (1, T, H, E), g and beta (1, T, H)."""
    q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state, rows = torch.zeros((*k.shape[2:], v.shape[-1]), dtype=v.dtype), []
    for t in range(v.shape[1]):
        state = state * g[0, t, :, None, None].exp()
        u = beta[0, t, :, None] * (v[0, t] - torch.einsum("hne,hn->he", state, k[0, t]))
        state = state + k[0, t, :, :, None] * u[:, None]
        rows.append(torch.einsum("hne,hn->he", state, q[0, t]) / q.shape[-1] ** 0.5)
    return torch.stack(rows)[None], state[None]


class Split:
    """One whose products of q, k and v are three modules, as the hosted service trains them."""

    def in_proj_qkv(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.in_proj_q(x), self.in_proj_k(x), self.in_proj_v(x)], dim=-1)


class SplitDeltaNet(Split, Qwen3_5GatedDeltaNet):
    """Of a model with one feed a layer."""


class SplitMoeDeltaNet(Split, Qwen3_5MoeGatedDeltaNet):
    """Of one with experts."""


SPLIT = {Qwen3_5GatedDeltaNet: SplitDeltaNet, Qwen3_5MoeGatedDeltaNet: SplitMoeDeltaNet}


def split(model: PreTrainedModel) -> PreTrainedModel:
    """The model with a module for each matrix that the engine trains."""
    for module in model.modules():
        if type(module) in SPLIT:
            whole = module.in_proj_qkv.weight
            del module.in_proj_qkv
            sizes = (module.key_dim, module.key_dim, module.value_dim)
            for letter, part in zip("qkv", whole.detach().split(sizes), strict=True):
                linear = torch.nn.Linear(*part.shape[::-1], bias=False, dtype=part.dtype)
                linear.weight.data = part.clone()
                module.add_module(f"in_proj_{letter}", linear)
            module.__class__ = SPLIT[type(module)]
    return model


def joined(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of a model that was split, as they are without."""
    found = dict(state)
    for name in state:
        if name.endswith(".in_proj_q.weight"):
            parts = [name.replace(".in_proj_q.", f".in_proj_{one}.") for one in "qkv"]
            whole = torch.cat([found.pop(part) for part in parts])
            found[name.replace(".in_proj_q.", ".in_proj_qkv.")] = whole
    return found


# ---- devices ----

DEVICE = ContextVar("DEVICE", default="cpu")  # set by the fixture `on`
# What base weights are kept in: kept.py's words, or a type of files with blocks (place_of).
# test_quantized_exact.py sets it.
WEIGHTS = ContextVar("WEIGHTS", default="stored")
F32_ERROR = 1e-5
# By how much more than torch in bf16 a device with bf16 may err where one draw is compared with one
# draw (test_cuda.py compares them over many), in times and in units of the result.
MORE, EPSILON = 2.0, 2.0**-9

LACKS_BF16 = _core.devices()["cpu-bf16"]  # why this processor has no such device; "": it has
needs_bf16 = pytest.mark.skipif(bool(LACKS_BF16), reason=LACKS_BF16)

# For a test in such a file that looks for less than bf16's error, or for what is the CPU's own.
cpu_only = pytest.mark.parametrize("on", ("cpu",), indirect=True)


def in_bf16() -> bool:
    """Whether the device that the test runs on computes in bf16."""
    return DEVICE.get().startswith("cuda")


def assert_rows_near(name: str, found: np.ndarray, compute: Callable[[torch.dtype], Any]) -> None:
    """assert_near of a model's rows. In bf16 a mixture's row near a tie goes to another expert, by
    luck, here or in torch's run: there nine rows of ten are compared, by the largest error."""
    if not (in_bf16() and any("experts" in key for key in SPECS[name].config)):
        assert_near(found, compute)
        return
    wanted = compute(torch.float64)
    sides = (
        np.reshape(side - wanted, (len(wanted), -1)) for side in (found, compute(torch.bfloat16))
    )
    ours, theirs = (np.quantile(np.linalg.norm(side, axis=1), 0.9) for side in sides)
    size = np.median(np.linalg.norm(np.reshape(wanted, (len(wanted), -1)), axis=1))
    assert np.shape(found) == np.shape(wanted)
    assert ours <= MORE * theirs + EPSILON * size


def assert_near(
    found: Any, compute: Callable[[torch.dtype], Any], what: str = "", f32_error: float = F32_ERROR
) -> None:
    """`found` errs against compute(float64) as its device may; compute gives torch's numbers."""
    wanted, allowed = compute(torch.float64), f32_error
    if in_bf16():
        allowed = MORE * error(compute(torch.bfloat16), wanted) + EPSILON
    assert np.shape(found) == np.shape(wanted), what
    errs = error(found, wanted)
    assert errs <= allowed, f"{what} errs by {errs:.3g}, {errs / allowed:.2f} of what it may"


# ---- LoRA ----


def module_of(slot: str, layer: int, index: int = 0, feed: str = "mlp") -> str:
    """transformers' name of the module behind a slot, in a layer with this feed; of experts, that
    of `LoraExperts`."""
    name = MODULES.get(slot, "")
    if slot.startswith("e_"):
        name += f".{index}" if index >= 0 else ".all"
    elif feed == "experts_with_shared":
        name = name.replace("mlp.", "mlp.shared_expert.")
    return "lm_head" if layer < 0 else f"model.layers.{layer}.{name}"


def randomize(adapter: _core.Adapter, seed: int = 0, scale: float = 0.1) -> _core.Adapter:
    """Gives an adapter random matrices, B too, so that every gradient is there to be seen."""
    rng = np.random.default_rng(seed)
    flat = np.zeros(adapter.size, np.float32)
    for *_, letter, offset, rows, cols in adapter.layout:
        size = scale if letter == "B" else 1 / rows**0.5
        flat[offset : offset + rows * cols] = rng.normal(0, size, rows * cols)
    adapter.write("weights", flat)
    return adapter


def with_peft(name: str, adapter: _core.Adapter, dtype: torch.dtype = torch.float64) -> PeftModel:
    """The reference model with the adapter's matrices in PEFT's layers, in float64; or in bf16 with
    matrices in float32, as PEFT trains it."""
    return trained(reference(name, dtype), adapter, dtype)


def trained(
    model: PreTrainedModel, adapter: _core.Adapter, dtype: torch.dtype = torch.float64
) -> PeftModel:
    """A copy of a model of transformers with them."""
    slots = {slot for slot, *_ in adapter.layout if not slot.startswith("e_")}
    names = {"lm_head" if slot == "head" else MODULES[slot].rpartition(".")[2] for slot in slots}
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=sorted(names),
        task_type="CAUSAL_LM",
    )
    base = split(copy.deepcopy(model))
    base = in_double(base) if dtype == torch.float64 else base
    matrices = torch.float64 if dtype == torch.float64 else torch.float32
    if any(slot == "e_gate" for slot, *_ in adapter.layout):
        base.config.model_type = "one whose modules PEFT leaves as they are"
        for layer in base.model.layers:
            if hasattr(layer.mlp, "experts"):
                layer.mlp.experts = LoraExperts(
                    layer.mlp.experts, adapter.rank, adapter.alpha / adapter.rank, matrices
                )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        model = get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    parameters = dict(model.named_parameters())
    for key, matrix in cut(adapter, adapter.read("weights")).items():
        parameters[key].data = torch.from_numpy(matrix.T.copy()).to(matrices)
        parameters[key].requires_grad_()  # which PEFT takes from all but its own layers
    return model


def cut(adapter: _core.Adapter, flat: np.ndarray) -> dict[str, np.ndarray]:
    """A flat vector as PEFT's parameter names and the engine's matrices."""
    feeds, found = adapter.model.config["feeds"], {}
    for slot, layer, index, letter, offset, rows, cols in adapter.layout:
        module = module_of(slot, layer, index, feeds[layer])
        name = f"base_model.model.{module}.lora_{letter}.default.weight"
        found[name] = flat[offset : offset + rows * cols].reshape(rows, cols)
    return found


# ---- calls ----


@dataclass(frozen=True)
class Datum:
    """One sequence: tokens (N,), targets (N,) or (N, K), and the loss's arrays of that shape."""

    tokens: np.ndarray
    targets: np.ndarray
    inputs: dict[str, np.ndarray] = field(default_factory=dict)


def datum(tokens: Sequence[int], targets: Any = None, **inputs: Any) -> Datum:
    """A datum; by default each token's target is the next one, the last one's is the first."""
    ids = np.asarray(tokens, np.int32)
    wanted = np.roll(ids, -1) if targets is None else np.asarray(targets, np.int32)
    arrays = {name: np.asarray(array, np.float32) for name, array in inputs.items()}
    return Datum(ids, wanted, arrays)


def call(
    adapter: _core.Adapter,
    data: Sequence[Datum],
    loss: str = "cross_entropy",
    config: dict[str, float] | None = None,
    *,
    backward: bool = True,
    between: Callable[[int, int], object] | None = None,
    **options: int,
) -> tuple[list[np.ndarray], float]:
    """Adapter.forward_backward on a list of datums: log-probabilities in the targets' shapes.

    An input that some datums lack is left to the engine where all lack it, and ones elsewhere.
    """
    inputs = {
        name: np.concatenate(
            [np.broadcast_to(one.inputs.get(name, 1.0), one.targets.shape).ravel() for one in data]
        ).astype(np.float32)
        for name in {name for one in data for name in one.inputs}
    }
    result: Any = adapter.forward_backward(
        np.concatenate([one.tokens for one in data]),
        np.array([len(one.tokens) for one in data], np.int32),
        np.concatenate([one.targets.ravel() for one in data]),
        np.array([one.targets[0].size for one in data], np.int32),
        loss,
        inputs,
        config or {},
        backward=backward,
        stepwise=between is not None,
        **options,
    )
    flat, total = result if between is None else finish(result, between)
    ends = np.cumsum([one.targets.size for one in data])
    parts = np.split(flat, ends[:-1])
    return [part.reshape(one.targets.shape) for part, one in zip(parts, data, strict=True)], total


def logprobs(model: torch.nn.Module, tokens: np.ndarray) -> torch.Tensor:
    """log-softmax in float64 of every position's logits (N, V)."""
    ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
    return torch.log_softmax(model(input_ids=ids).logits[0].double(), dim=-1)


def targets_of(table: torch.Tensor, one: Datum) -> torch.Tensor:
    """The targets' log-probabilities in their shape, out of an (N, V) table."""
    wanted = torch.from_numpy(one.targets.reshape(len(one.tokens), -1).astype(np.int64))
    return table.gather(1, wanted).reshape(one.targets.shape)


def _array(values: Any) -> np.ndarray:
    return values.detach().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def error(found: Any, wanted: Any) -> float:
    """Relative error in norm."""
    found, wanted = (_array(x).astype(np.float64) for x in (found, wanted))
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-300))


def tokens_of(name: str, length: int, seed: int = 0) -> np.ndarray:
    """Random tokens of a model's vocabulary."""
    rng = np.random.default_rng([seed, length])
    return rng.integers(0, SPECS[name].config["vocab_size"] - PADDING, length).astype(np.int32)


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Two results of a sampler, bit for bit, whatever of them was found in the cache."""
    for one, other in zip(found["samples"], wanted["samples"], strict=True):
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])
    for key in found.keys() - {"samples", "prompt_reused"}:
        np.testing.assert_array_equal(found[key], wanted[key])
