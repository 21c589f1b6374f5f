"""Model families: how a Hugging Face checkpoint fills the engine's weights. One row per family.

A row names the architecture, the kinds of its layers (config.py reads which), and the tensor for
each of the engine's slots (architecture.py); no other code asks for a family's name.
"""

from dataclasses import replace
from typing import Any

from tinsmith.formats import config as hugging_face
from tinsmith.formats import mxfp4
from tinsmith.formats.gguf_model import HALVES, PAIRS
from tinsmith.models.architecture import LLAMA_NAMES, NESTED, PREFIX, Family, Tower

# The keys of a mixture of experts, and its tensors, one for each matrix or one for all experts.
EXPERT_SIZES = {
    "experts": "num_experts", "chosen": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
}  # fmt: skip
EXPERTS = "model.layers.{layer}.mlp.experts."
APART = {
    "router": "model.layers.{layer}.mlp.gate.weight",
    "e_gate": EXPERTS + "{index}.gate_proj.weight",
    "e_up": EXPERTS + "{index}.up_proj.weight",
    "e_down": EXPERTS + "{index}.down_proj.weight",
}
FUSED = {
    "e_gate": EXPERTS + "gate_up_proj",
    "e_up": EXPERTS + "gate_up_proj",
    "e_down": EXPERTS + "down_proj",
}
# The hosted service's names of all experts' matrices, which share one factor.
EXPERT_MODULES = {"e_gate": EXPERTS + "w1", "e_up": EXPERTS + "w3", "e_down": EXPERTS + "w2"}

FUSED_BIASES = {
    "e_gate_bias": EXPERTS + "gate_up_proj_bias",
    "e_up_bias": EXPERTS + "gate_up_proj_bias",
    "e_down_bias": EXPERTS + "down_proj_bias",
}

# Qwen3-VL's vision tower, which Qwen3.5 has too.
BLOCK = "blocks.{index}."
QWEN_TOWER = Tower(
    names={
        "patch": "patch_embed.proj.weight", "patch_bias": "patch_embed.proj.bias",
        "pos": "pos_embed.weight",
        "norm1": BLOCK + "norm1.weight", "norm1_bias": BLOCK + "norm1.bias",
        "qkv": BLOCK + "attn.qkv.weight", "qkv_bias": BLOCK + "attn.qkv.bias",
        "proj": BLOCK + "attn.proj.weight", "proj_bias": BLOCK + "attn.proj.bias",
        "norm2": BLOCK + "norm2.weight", "norm2_bias": BLOCK + "norm2.bias",
        "fc1": BLOCK + "mlp.linear_fc1.weight", "fc1_bias": BLOCK + "mlp.linear_fc1.bias",
        "fc2": BLOCK + "mlp.linear_fc2.weight", "fc2_bias": BLOCK + "mlp.linear_fc2.bias",
        "merge_norm": "norm.weight", "merge_norm_bias": "norm.bias",
        "merge_fc1": "linear_fc1.weight", "merge_fc1_bias": "linear_fc1.bias",
        "merge_fc2": "linear_fc2.weight", "merge_fc2_bias": "linear_fc2.bias",
    },
    prefixes=("model.visual.", NESTED + "visual."),
    defaults={
        "depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304,
        "num_position_embeddings": 2304, "out_hidden_size": 3584, "patch_size": 16,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [],
    },
)  # fmt: skip

QWEN3_5 = Family(
    "qwen3_5",
    "Qwen3_5ForCausalLM",
    mixers=hugging_face.some_linear,
    switches={"qk_norm": True, "q_gate": True},
    defaults={
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    fixed={"linear_conv_kernel_dim": 4, "attn_output_gate": True},
    refused=("attention_bias",),
    sizes={
        "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads",
        "key_width": "linear_key_head_dim", "value_width": "linear_value_head_dim",
    },
    partial=0.25,
    prefixes=(NESTED, PREFIX),
    names=LLAMA_NAMES | {
        "delta_q": "model.layers.{layer}.linear_attn.in_proj_qkv.weight",
        "delta_k": "model.layers.{layer}.linear_attn.in_proj_qkv.weight",
        "delta_v": "model.layers.{layer}.linear_attn.in_proj_qkv.weight",
        "delta_z": "model.layers.{layer}.linear_attn.in_proj_z.weight",
        "delta_b": "model.layers.{layer}.linear_attn.in_proj_b.weight",
        "delta_a": "model.layers.{layer}.linear_attn.in_proj_a.weight",
        "delta_conv": "model.layers.{layer}.linear_attn.conv1d.weight",
        "delta_rate": "model.layers.{layer}.linear_attn.A_log",
        "delta_bias": "model.layers.{layer}.linear_attn.dt_bias",
        "delta_norm": "model.layers.{layer}.linear_attn.norm.weight",
        "delta_out": "model.layers.{layer}.linear_attn.out_proj.weight",
    },
    tails={"delta_conv": (1, 4)},
    plus_one=("final_norm", "attn_norm", "q_norm", "k_norm", "mlp_norm"),
    # rmsnorm with these weights divides by a length: x / (|x| / √N) · 1/√N; q also by √N.
    constants={"delta_q_unit": lambda width: 1 / width, "delta_k_unit": lambda width: width**-0.5},
    aside=(*QWEN_TOWER.prefixes, "mtp."),
    # The hosted service's names: it trains separate matrices on q, k and v. The head has another
    # name there, under which the cookbook merges a tied model's head into its embedding.
    modules={
        "delta_q": "model.layers.{layer}.linear_attn.in_proj_q",
        "delta_k": "model.layers.{layer}.linear_attn.in_proj_k",
        "delta_v": "model.layers.{layer}.linear_attn.in_proj_v",
    },
)  # fmt: skip

# Of the same model beside a vision tower.
SEEING: dict[str, Any] = {
    "section": "text_config", "tower": QWEN_TOWER, "sections": (11, 11, 10),
}  # fmt: skip

QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    architecture="Qwen3_5MoeForCausalLM",
    feeds=hugging_face.all_experts_with_shared,
    switches={**QWEN3_5.switches, "norm_shares": "norm_topk_prob"},
    defaults=QWEN3_5.defaults | {
        "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    fixed=QWEN3_5.fixed | {"norm_topk_prob": True},
    sizes={
        **QWEN3_5.sizes, **EXPERT_SIZES, "ffn": "shared_expert_intermediate_size",
    },
    names={
        **QWEN3_5.names, **APART,
        "w_gate": "model.layers.{layer}.mlp.shared_expert.gate_proj.weight",
        "w_up": "model.layers.{layer}.mlp.shared_expert.up_proj.weight",
        "w_down": "model.layers.{layer}.mlp.shared_expert.down_proj.weight",
        "shared_gate": "model.layers.{layer}.mlp.shared_expert_gate.weight",
    },
    others=FUSED,
    modules={**QWEN3_5.modules, **EXPERT_MODULES},
)  # fmt: skip

QWEN3_VL = Family(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    switches={"qk_norm": True},
    section="text_config",
    defaults={"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000.0},
    refused=("attention_bias", "use_sliding_window"),
    prefixes=(NESTED, PREFIX),
    aside=QWEN_TOWER.prefixes,
    tower=replace(
        QWEN_TOWER, defaults={**QWEN_TOWER.defaults, "deepstack_visual_indexes": [8, 16, 24]}
    ),
    sections=(24, 20, 20),
)

FAMILIES = (
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        mixers=hugging_face.some_sliding,
        switches={"qk_norm": True},
        defaults={"head_dim": 128},
        refused=("attention_bias",),
        gguf=HALVES,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        mixers=hugging_face.some_sliding,
        switches={"qkv_bias": True},
        gguf=HALVES,
    ),
    Family(
        "llama",
        "LlamaForCausalLM",
        refused=("attention_bias",),
        gguf=PAIRS,
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        mixers=hugging_face.all_sliding,
    ),
    QWEN3_5,
    replace(QWEN3_5, architecture="Qwen3_5ForConditionalGeneration", **SEEING),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        feeds=hugging_face.some_experts,
        switches={"qk_norm": True, "norm_shares": "norm_topk_prob"},
        defaults={
            "num_key_value_heads": 4, "intermediate_size": 6144, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
        },
        refused=("attention_bias", "use_sliding_window"),
        sizes=EXPERT_SIZES,
        names={**LLAMA_NAMES, **APART},
        others=FUSED,
        modules=EXPERT_MODULES,
        gguf=HALVES,
    ),
    QWEN3_5_MOE,
    replace(QWEN3_5_MOE, architecture="Qwen3_5MoeForConditionalGeneration", **SEEING),
    QWEN3_VL,
    replace(
        QWEN3_VL,
        name="qwen3_vl_moe",
        architecture="Qwen3VLMoeForConditionalGeneration",
        feeds=hugging_face.some_experts,
        switches={"qk_norm": True, "norm_shares": True},
        defaults={
            "num_key_value_heads": 16, "intermediate_size": 5632, "num_experts": 60,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "rope_theta": 500000.0,
        },
        fixed={"norm_topk_prob": True},
        sizes=EXPERT_SIZES,
        names={**LLAMA_NAMES, **APART},
        others=FUSED,
        either_way=True,
        modules=EXPERT_MODULES,
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        mixers=hugging_face.turns_sliding,
        feeds=hugging_face.all_experts,
        switches={
            "qkv_bias": "attention_bias", "o_bias": "attention_bias", "sinks": True,
            "expert_bias": True, "norm_shares": True,
        },
        numbers={"expert_limit": "swiglu_limit"},
        defaults={
            "attention_bias": True, "head_dim": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "intermediate_size": 2880, "num_experts": 128,
            "num_experts_per_tok": 4, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        fixed={"swiglu_alpha": 1.702},
        sizes=EXPERT_SIZES | {"expert_ffn": "intermediate_size"},
        packed=(mxfp4.METHOD,),
        names={
            **LLAMA_NAMES, **APART, **FUSED_BIASES,
            "router": "model.layers.{layer}.mlp.router.weight",
            "router_bias": "model.layers.{layer}.mlp.router.bias",
            "bo": "model.layers.{layer}.self_attn.o_proj.bias",
            "sinks": "model.layers.{layer}.self_attn.sinks",
        },
        others={**FUSED, **FUSED_BIASES},
        other=True,
        in_turns=True,
        turned=True,
        heads=dict.fromkeys(FUSED_BIASES, "experts"),
        modules=EXPERT_MODULES | {  # the hosted service's names
            slot: f"model.layers.{{layer}}.attn.{letter}_proj"
            for slot, letter in (("wq", "q"), ("wk", "k"), ("wv", "v"), ("wo", "o"))
        },
        gguf=HALVES,
    ),
)  # fmt: skip
