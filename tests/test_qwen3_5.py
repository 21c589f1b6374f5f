"""Qwen3.5: what of its folders is read, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import changed
from models import folder
from tinsmith.files import families
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

# ---- config.json ----

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a linear layer's kind that is not known": (
        "qwen3_5",
        {"layer_types": ["linear_attention", "sliding_attention"]},
        "layer_types has sliding_attention for layer 1; it should be linear_attention or full_att",
    ),
    "linear layers of wrong types": (
        "qwen3_5-tied",
        {"layer_types": ["linear_attention", {}, 3]},
        "layer_types has {} for layer 1; it should be linear_attention or full_attention",
    ),
    "linear layers of another number": (
        "qwen3_5",
        {"layer_types": ["linear_attention"] * 3},
        "layer_types should name 2 layers",
    ),
    "an interval of full layers that is no number": (
        "qwen3_5",
        {"layer_types": None, "full_attention_interval": 0},
        "full_attention_interval should be a positive integer, found 0",
    ),
    "a longer convolution": (
        "qwen3_5",
        {"linear_conv_kernel_dim": 8},
        "linear_conv_kernel_dim is 8; only 4 is supported",
    ),
    "no gate": ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate is False; only True is"),
    "qwen3.5's attention bias": ("qwen3_5", {"attention_bias": True}, "attention_bias is True"),
    "key heads of an odd width": (
        "qwen3_5",
        {"linear_key_head_dim": 48},
        "linear_key_head_dim is 48; it should be a multiple of 32, at most 256",
    ),
    "value heads that are too wide": (
        "qwen3_5-tied",
        {"linear_value_head_dim": 288},
        "linear_value_head_dim is 288; it should be a multiple of 32, at most 256",
    ),
    "value heads that don't divide": (
        "qwen3_5",
        {"linear_num_value_heads": 5},
        "5 value heads can't share 2 key heads evenly",
    ),
    "no key heads": (
        "qwen3_5",
        {"linear_num_key_heads": 0},
        "linear_num_key_heads should be a positive integer, found 0",
    ),
    "a share of a head that is odd": (
        "qwen3_5-tied",
        {"rope_parameters": None, "partial_rotary_factor": 0.2},
        "partial_rotary_factor 0.2 of head_dim 16 is 3 elements; it should be an even number",
    ),
    "more than a head": (
        "qwen3_5-tied",
        {"rope_parameters": {"partial_rotary_factor": 1.5}},
        "partial_rotary_factor 1.5 of head_dim 16 is 24 elements",
    ),
    "a share that is no number": (
        "qwen3_5",
        {"rope_parameters": {"partial_rotary_factor": "all"}},
        "partial_rotary_factor should be a positive number, found 'all'",
    ),
    "qwen3.5's yarn": (
        "qwen3_5",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0}},
        "the rope type is 'yarn'; tinsmith knows default and llama3",
    ),
    "qwen3.5's experts": ("qwen3_5", {"num_experts": 256}, "num_experts is 256"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_the_engine_can_not_compute_is_refused(case: str, tmp_path: Path) -> None:
    name, config, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=rf"config\.json: {sentence}"):
        families.read_config(changed(tmp_path, name, **config))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"text_config": None}, "text_config should be an object, found None"),
        ({"text_config": [1]}, r"text_config should be an object, found \[1\]"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_method"),
    ],
)
def test_a_model_of_several_parts_that_can_not_be_read_is_refused(
    config: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = changed(tmp_path, "qwen3_5")
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(ValueError, match=rf"config\.json: {sentence}"):
        families.read_config(path)


HARMLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "kinds by their interval": (
        "qwen3_5-tied",
        {"layer_types": None, "full_attention_interval": 3},
    ),
    "sections of an image's axes": ("qwen3_5", {"mrope_section": [11, 11, 10]}),
    "a speculative head": ("qwen3_5", {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"}),
    "a gate, as published": ("qwen3_5", {"attn_output_gate": True}),
    "a share beside its rope": (
        "qwen3_5-tied",
        {"rope_parameters": {"rope_theta": 1e4}, "partial_rotary_factor": 0.5},
    ),
    "a quarter where the file does not say": (
        "qwen3_5",
        {"rope_parameters": None, "rope_theta": 1e4},
    ),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_a_config_that_says_the_same_is_read_the_same(case: str, tmp_path: Path) -> None:
    name, config = HARMLESS[case]
    found = families.read_config(changed(tmp_path, name, **config))
    wanted = families.read_config(folder(name))
    assert found[0] == wanted[0]
    np.testing.assert_array_equal(found[1], wanted[1])


def test_qwen3_5s_sizes_are_transformers_where_the_file_does_not_say(tmp_path: Path) -> None:
    missing = (
        "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads",
        "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "layer_types",
        "rope_parameters", "partial_rotary_factor", "rms_norm_eps",
    )  # fmt: skip
    path = changed(
        tmp_path,
        "qwen3_5-tied",
        num_hidden_layers=9,
        num_attention_heads=4,
        **dict.fromkeys(missing),
    )
    config, inv_freq = families.read_config(path)
    wanted = AutoConfig.from_pretrained(path)
    assert config["mixers"] == tuple(wanted.layer_types) and "full_attention" in config["mixers"]
    for size, key in {
        "kv_heads": "num_key_value_heads",
        "head_width": "head_dim",
        "key_heads": "linear_num_key_heads",
        "value_heads": "linear_num_value_heads",
        "key_width": "linear_key_head_dim",
        "value_width": "linear_value_head_dim",
        "norm_eps": "rms_norm_eps",
    }.items():
        assert config[size] == getattr(wanted, key), key
    rope = Qwen3_5TextRotaryEmbedding(wanted).inv_freq.numpy()
    assert config["rotary"] == 2 * len(rope) == 64
    np.testing.assert_allclose(inv_freq, rope, rtol=2e-7)
