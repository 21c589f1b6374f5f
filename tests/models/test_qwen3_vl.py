"""Qwen3-VL's language models: what of their config.json is read, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from support.model_folders import changed, rewritten
from support.quantized_files import FP8, fp8
from support.tiny_models import call, datum, error, folder, loaded, tokens_of
from tinsmith import _core
from tinsmith.models import registry
from transformers import AutoConfig

NAMES = ("qwen3_vl", "qwen3_vl_moe")

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a bias of attention": ("qwen3_vl", {"attention_bias": True}, "attention_bias is True, which"),
    "a window": ("qwen3_vl", {"use_sliding_window": True}, "use_sliding_window is True, which is"),
    "a mixture's window": ("qwen3_vl_moe", {"use_sliding_window": True}, "use_sliding_window is T"),
    "experts": ("qwen3_vl", {"num_experts": 4}, "num_experts is 4, which is not supported"),
    "shares that are not divided": (
        "qwen3_vl_moe",
        {"norm_topk_prob": False},
        "norm_topk_prob is False; only True is supported",
    ),
    "a part of a head": (
        "qwen3_vl",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5; only 1 is supported",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_the_engine_can_not_compute_is_refused(case: str, tmp_path: Path) -> None:
    name, config, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=rf"config\.json: {sentence}"):
        registry.read_config(changed(tmp_path, name, **config))


@pytest.mark.parametrize("name", NAMES)
def test_transformers_4s_rope_is_read_the_same(name: str, tmp_path: Path) -> None:
    """It has rope_theta beside the sections, as the published folders."""
    sections = {"mrope_interleaved": True, "rope_type": "default"}
    sections |= {"mrope_section": [2, 2, 2] if name == "qwen3_vl" else [1, 2, 2]}
    path = changed(tmp_path, name, rope_parameters=None, rope_theta=1e4, rope_scaling=sections)
    found, wanted = (registry.read_config(one) for one in (path, folder(name)))
    assert found[0] == wanted[0]
    np.testing.assert_array_equal(found[1], wanted[1])


def test_shares_that_are_said_to_be_divided_are(tmp_path: Path) -> None:
    path = changed(tmp_path, "qwen3_vl_moe", norm_topk_prob=True)
    found, wanted = (registry.read_config(one)[0] for one in (path, folder("qwen3_vl_moe")))
    assert found == wanted and found["norm_shares"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_transformers_where_the_file_does_not_say(name: str, tmp_path: Path) -> None:
    missing = "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters"
    sizes = {"hidden_size": 1024, "num_attention_heads": 32}
    path = changed(tmp_path, name, **sizes, **dict.fromkeys(missing))
    config, inv_freq = registry.read_config(path)
    wanted = AutoConfig.from_pretrained(path).text_config
    for size, key in {
        "kv_heads": "num_key_value_heads",
        "head_width": "head_dim",
        "norm_eps": "rms_norm_eps",
    }.items():
        assert config[size] == getattr(wanted, key), key
    assert config["head_width"] == (128 if name == "qwen3_vl" else 32)
    theta, pairs = wanted.rope_parameters["rope_theta"], config["head_width"] // 2
    np.testing.assert_allclose(inv_freq, theta ** -(np.arange(pairs) / pairs), rtol=1e-6)


def table(core: _core.Model, name: str) -> np.ndarray:
    """The engine's log-probabilities of a sequence that goes over a page's end."""
    (found,), _ = call(_core.Adapter(core, rank=1), [datum(tokens_of(name, 90))], backward=False)
    return found


@pytest.mark.parametrize("name", (*NAMES, "qwen3_vl-tied"))
def test_the_tensors_of_a_language_model_alone_are_read(name: str, tmp_path: Path) -> None:
    """Without a tower, and without its names' second part."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        for key in list(tensors):
            array = tensors.pop(key)
            if ".visual." not in key:
                tensors[key.replace("model.language_model.", "model.")] = array

    model = registry.load_model(rewritten(tmp_path, name, change), threads=1)
    np.testing.assert_array_equal(table(model.core, name), table(loaded(name).core, name))
    assert "no vision tower" in model.no_images


def test_experts_in_fp8_have_tensors_of_their_own(tmp_path: Path) -> None:
    """As a mixture in FP8 is published, whose tower is in bf16."""
    cores = []
    for narrow in (True, False):
        path = tmp_path / f"{narrow}"
        shutil.copytree(folder("qwen3_vl_moe"), path)
        tensors = safetensors.torch.load_file(path / "model.safetensors")
        for name in [name for name in tensors if ".experts." in name]:
            stem, _, kind = name.rpartition(".")
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for index, matrix in enumerate(tensors.pop(name)):  # whose rows are inputs
                for one, part in zip(kinds, matrix.T.chunk(len(kinds)), strict=True):
                    key = f"{stem}.{index}.{one}.weight"
                    tensors[key] = part.contiguous()
                    wide = fp8(tensors, key)
                    if not narrow:
                        del tensors[f"{key}_scale_inv"]
                        tensors[key] = torch.from_numpy(wide)
        safetensors.torch.save_file(tensors, path / "model.safetensors", {"format": "pt"})
        if narrow:
            content = json.loads((path / "config.json").read_text())
            content["quantization_config"] = FP8
            (path / "config.json").write_text(json.dumps(content))
        model = registry.load_model(path, threads=1)
        assert not model.family.other
        cores.append(model.core)
    found, wanted = (table(core, "qwen3_vl_moe") for core in cores)
    assert error(found, wanted) < 1e-6
    assert error(found, table(loaded("qwen3_vl_moe").core, "qwen3_vl_moe")) > 1e-3
