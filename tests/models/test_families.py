"""Model families: what of config.json, weights and tokenizer is read, and what is refused."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.model_folders import changed, rewritten
from support.tiny_models import (
    LLAMA3,
    SPECS,
    YARN,
    as_double,
    call,
    datum,
    folder,
    loaded,
    logprobs,
    tokens_of,
)
from tinsmith import _core
from tinsmith.formats import config, safetensors_io
from tinsmith.models import registry, tensor_views
from transformers import AutoConfig, AutoModelForCausalLM


def test_every_family_has_models_here() -> None:
    for family in registry.FAMILIES:
        tied = {
            spec.config["tie_word_embeddings"]
            for spec in SPECS.values()
            if spec.family == family.name
        }
        assert tied == {False, True}, (
            f"{family.name} needs a tied and an untied model in tiny_models.py"
        )


# ---- config.json ----


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": (
        "qwen3",
        {"architectures": ["GemmaForCausalLM"]},
        "names GemmaForCausalLM; tinsmith knows Qwen3ForCausalLM, Qwen2ForCausalLM, Llama",
    ),
    "no architecture": ("qwen3", {"architectures": []}, "names no architecture; tinsmith knows"),
    "no window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 0},
        "sliding_window should be a positive integer, found 0",
    ),
    "a window of all layers that is no number": (
        "mistral",
        {"sliding_window": -1},
        "sliding_window should be a positive integer, found -1",
    ),
    "a number of layers below none": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": -1},
        "max_window_layers should be an integer of 0 or more, found -1",
    ),
    "sliding layers without a window": (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has sliding_attention for layer 1; the other keys say full_attention",
    ),
    "a kind that is not known": (
        "qwen3",
        {"use_sliding_window": True, "layer_types": ["full_attention", "linear_attention"]},
        "layer_types has linear_attention for layer 1",
    ),
    "kinds of too many layers": (
        "qwen3",
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 3},
        "layer_types should name 2 layers",
    ),
    "kinds of wrong types": (
        "qwen3",
        {"use_sliding_window": True, "layer_types": [["full_attention"], {}]},
        "layer_types has .* for layer 0; the other keys say full_attention",
    ),
    "a number that no float holds": (
        "qwen3",
        {"rms_norm_eps": 10**400},
        "rms_norm_eps should be a positive number, found 1000",
    ),
    "frequencies that are not finite": (
        "qwen3",
        {
            "rope_parameters": LLAMA3
            | {"rope_theta": 1e-30, "factor": 2e-38, "original_max_position_embeddings": 2e-38}
        },
        "with rope_theta 1e-30 not all frequencies are finite",
    ),
    "heads so wide that their frequencies take all memory": (
        "qwen3",
        {"head_dim": 2**31 - 2},
        "head_dim is 2147483646; it should be even, for rotary embeddings, and at most 256",
    ),
    "so many layers that their kinds take all memory": (
        "qwen3",
        {"num_hidden_layers": 2**31 - 1},
        "2147483647 layers are more than 65536",
    ),
    "kinds that are no list": (
        "qwen3",
        {"layer_types": "full_attention"},
        "layer_types should name 2 layers",
    ),
    "mistral's kinds": (  # transformers does not look at them
        "mistral",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has full_attention for layer 0; the other keys say sliding_attention",
    ),
    "longrope": (
        "qwen3",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}},
        "the rope type is 'longrope'; tinsmith knows default, llama3 and yarn",
    ),
    "yarn without a factor": (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        "factor should be a positive number, found None",
    ),
    "yarn's truncate that is no flag": (
        "qwen3",
        {"rope_parameters": YARN | {"truncate": "no"}},
        "truncate should be true or false, found 'no'",
    ),
    "yarn's mscale that is too large": (
        "qwen3",
        {"rope_parameters": YARN | {"factor": 1e30, "mscale": 3e38, "mscale_all_dim": 1e-3}},
        "YaRN would multiply rope's cosines by .*, which should be a positive float32",
    ),
    "transformers 4's linear": (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "the rope type is 'linear'",
    ),
    "rope per layer type": (
        "qwen3",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters per layer are not supported",
    ),
    "partial rotary": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "partial rotary in rope": (
        "llama",
        {"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.25}},
        "partial_rotary_factor is 0.25; only 1 is supported",
    ),
    "llama3 without a factor": (
        "llama",
        {"rope_parameters": {key: LLAMA3[key] for key in LLAMA3 if key != "factor"}},
        "factor should be a positive number, found None",
    ),
    "llama3 factors turned": (
        "llama",
        {"rope_parameters": LLAMA3 | {"low_freq_factor": 8.0}},
        "high_freq_factor 4.0 should exceed low_freq_factor 8.0",
    ),
    "experts": ("qwen3", {"num_experts": 8}, "num_experts is 8"),
    "gelu": ("qwen2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu is supported"),
    "llama's attention bias": ("llama", {"attention_bias": True}, "attention_bias is True"),
    "qwen3's attention bias": ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    "mlp bias": ("llama", {"mlp_bias": True}, "mlp_bias is True"),
    "quantized": (
        "qwen2",
        {"quantization_config": {"quant_method": "awq"}},
        "quantization_config is 'awq', which is not supported",
    ),
    "softcapping": ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    "logit scale": ("llama", {"logit_scale": 0.5}, "logit_scale is 0.5; only 1 is supported"),
    "no width": ("llama", {"hidden_size": None}, "hidden_size should be a positive integer"),
    "width a string": ("llama", {"hidden_size": "40"}, "positive integer, found '40'"),
    "no layers": ("llama", {"num_hidden_layers": 0}, "num_hidden_layers should be a positive"),
    "eps not a number": ("llama", {"rms_norm_eps": "x"}, "rms_norm_eps should be a positive"),
    "heads that don't divide": (
        "llama",
        {"num_key_value_heads": 3},
        "4 heads can't share 3 key-value heads evenly",
    ),
    "odd heads": ("llama", {"head_dim": 11}, "head_dim is 11; it should be even"),
    "eos beyond the vocabulary": (
        "llama",
        {"eos_token_id": 4000},
        r"config.json: eos_token_id 4000 is not an id below 107",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_changes_the_maths_is_refused(case: str, tmp_path: Path) -> None:
    name, config, sentence = REFUSED[case]
    path = changed(tmp_path, name, **config)
    (path / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=sentence) as caught:
        registry.load_model(path)
    assert str(path / "config.json") in str(caught.value)


# Every key of the tables REFUSED and FACTORS, with a value that some model has it with.
MATHS: dict[str, Any] = {
    "mlp_bias": True,
    "quantization_config": {"quant_method": "gptq"},
    "num_experts": 128,
    "num_local_experts": 8,
    "n_routed_experts": 64,
    "moe_intermediate_size": 768,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "logits_soft_cap": 30.0,
    "query_pre_attn_scalar": 256,
    "clip_qkv": 8.0,
    "no_rope_layers": [1, 1, 1, 0],
    "attention_chunk_size": 8192,
    "use_mrope": True,
    "rotary_pct": 0.25,
    "logit_scale": 0.0625,
    "logits_scaling": 8.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "is_causal": False,
}


def test_every_key_of_the_tables_is_tried_here() -> None:
    assert sorted(MATHS) == sorted(
        (*config.REFUSED, config.QUANTIZATION, *config.FACTORS, *config.SO)
    )


def names_of_sizes(family: registry.Family) -> set[str]:
    """The keys that are sizes to a family, by all of their names."""
    read = set(family.sizes.values())
    return read | {other for other, name in config.OTHER_NAMES.items() if name in read}


NOT_READ = [
    (key, family)
    for key in MATHS
    for family in registry.FAMILIES
    if key not in names_of_sizes(family)
]


@pytest.mark.parametrize(
    ("key", "family"), NOT_READ, ids=[f"{key}-{family.name}" for key, family in NOT_READ]
)
def test_a_key_that_changes_the_maths_is_refused_by_every_family(
    key: str, family: registry.Family, tmp_path: Path
) -> None:
    path = changed(tmp_path, family.name, **{key: MATHS[key]})
    with pytest.raises(ValueError, match=rf"config\.json: {key} is .* (not|only (1|True) is) supp"):
        registry.read_config(path)


HARMLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "a window that is off": ("qwen2", {"use_sliding_window": False, "sliding_window": 4096}),
    "no window switch": ("qwen3", {"use_sliding_window": None, "sliding_window": 4096}),
    "a switch without a window": ("qwen3", {"use_sliding_window": True}),
    "a window from beyond the last layer on": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    ),
    "mistral's kinds": ("mistral", {"layer_types": ["sliding_attention"] * 2}),
    "mistral's window switch": ("mistral", {"use_sliding_window": True}),
    "llama's sliding window": ("llama", {"sliding_window": 3, "use_sliding_window": True}),
    "full attention": ("qwen3", {"layer_types": ["full_attention"] * 2}),
    "no layer types": ("qwen3", {"layer_types": None}),
    "swish": ("llama", {"hidden_act": "swish"}),
    "unknown keys": ("llama", {"pretraining_tp": 2, "my_note": "hello", "torch_dtype": "int8"}),
    "qwen2 always has its bias": ("qwen2", {"attention_bias": True}),
    "factor one": ("llama", {"partial_rotary_factor": 1.0, "logit_scale": 1.0}),
    "transformers 4's rope": (
        "llama",
        {
            "rope_parameters": None,
            "rope_theta": 500.0,
            "rope_scaling": {key: LLAMA3[key] for key in LLAMA3 if key != "rope_theta"},
        },
    ),
    "transformers 4's plain rope": (
        "qwen2-tied",
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": None},
    ),
    "transformers 3's rope": (
        "llama",
        {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": LLAMA3 | {"type": "llama3"}},
    ),
    "no theta": ("qwen3", {"rope_parameters": None}),
    "derived head width": ("qwen2", {"head_dim": 14}),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_a_config_that_changes_nothing_is_read_the_same(case: str, tmp_path: Path) -> None:
    name, config = HARMLESS[case]
    found = registry.read_config(changed(tmp_path, name, **config))
    wanted = registry.read_config(folder(name))
    assert found[0] == wanted[0]
    np.testing.assert_array_equal(found[1], wanted[1])


def test_transformers_does_not_read_a_window_of_llama_either(tmp_path: Path) -> None:
    path = changed(tmp_path, "llama", **HARMLESS["llama's sliding window"][1])
    tokens = tokens_of("llama", 30)
    found, wanted = (logprobs(as_double(one), tokens) for one in (path, folder("llama")))
    assert torch.equal(found, wanted)


WINDOWS: dict[str, dict[str, Any]] = {
    "off": {"use_sliding_window": False, "sliding_window": 7},
    "the last layer": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "all layers": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    "by name": {
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "no layer by name": {
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 0,
        "layer_types": ["full_attention"] * 2,
    },
}


@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.parametrize("name", ("qwen2", "qwen3"))
def test_layers_have_the_kinds_that_transformers_gives_them(
    name: str, case: str, tmp_path: Path
) -> None:
    path = changed(tmp_path, name, **{"layer_types": None} | WINDOWS[case])
    config, _ = registry.read_config(path)
    wanted = AutoConfig.from_pretrained(path)
    assert config["mixers"] == tuple(wanted.layer_types)
    assert config["window"] == (wanted.sliding_window if "sliding_attention" in wanted.layer_types
                                else 0)  # fmt: skip
    assert config["feeds"] == ("mlp",) * 2


def test_the_defaults_of_windows_are_transformers(tmp_path: Path) -> None:
    path = changed(
        tmp_path, "qwen2", use_sliding_window=True, sliding_window=None, layer_types=None,
        num_hidden_layers=30, max_window_layers=None,
    )  # fmt: skip
    config, _ = registry.read_config(path)
    wanted = AutoConfig.from_pretrained(path)
    assert config["mixers"] == tuple(wanted.layer_types)
    assert (config["window"], config["mixers"][27:]) == (
        wanted.sliding_window,
        ("full_attention", "sliding_attention", "sliding_attention"),
    )


@pytest.mark.parametrize(
    "change",
    [{}, {"sliding_window": None}],
    ids=["null", "no key"],
)
def test_the_window_of_a_mistral(change: dict[str, Any], tmp_path: Path) -> None:
    path = changed(tmp_path, "mistral-tied", **change)
    wanted = AutoConfig.from_pretrained(path).sliding_window
    config, _ = registry.read_config(path)
    assert wanted == (4096 if change else None)
    assert config["window"] == (wanted or 0)
    assert config["mixers"] == ("sliding_attention" if change else "full_attention",) * 2


@pytest.mark.parametrize("scaling", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_the_original_context_beside_the_settings_goes_first(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    key = config.ORIGINAL
    path = changed(tmp_path, "llama", rope_parameters=scaling | {key: 64}, **{key: 12})
    _, found = registry.read_config(path)
    among = changed(tmp_path / "among", "llama", rope_parameters=scaling | {key: 12})
    np.testing.assert_array_equal(found, registry.read_config(among)[1])
    theirs = AutoModelForCausalLM.from_pretrained(path).model.rotary_emb.inv_freq
    np.testing.assert_allclose(found, theirs.numpy(), rtol=1e-6)
    without = changed(tmp_path / "without", "llama", rope_parameters=scaling | {key: 64})
    assert not np.allclose(found, registry.read_config(without)[1], rtol=1e-3)


def test_a_model_of_an_unknown_kind_of_layer_is_refused() -> None:
    config = dict(loaded("qwen3").core.config)
    freq = np.ones(5, np.float32)
    for changes, sentence in (
        ({"mixers": ("full_attention", "mlp")}, "no kind of mixer is called 'mlp'"),
        ({"feeds": ("mlp", "expert")}, "no kind of feed-forward part is called 'expert'"),
        ({"feeds": ("mlp",)}, "feeds names 1 layers, the model has 2"),
        ({"mixers": ("sliding_attention",) * 2}, "layer 0 has a sliding window, which must be at"),
    ):
        with pytest.raises(ValueError, match=sentence):
            _core.Model(config | changes, freq)
    assert _core.Model(config, freq).config == config


def test_qwen3_heads_are_128_wide_where_the_file_does_not_say(tmp_path: Path) -> None:
    config, inv_freq = registry.read_config(changed(tmp_path, "qwen3", head_dim=None))
    assert config["head_width"] == 128 and inv_freq.shape == (64,)


# ---- files ----


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (
            "model.layers.1.self_attn.q_proj.weight",
            "layer 1 wq: the file has no model.layers.1.self_attn.q_proj.weight",
        ),
        ("model.norm.weight", "final_norm: the file has no model.norm.weight"),
        ("lm_head.weight", "head: the file has no lm_head.weight"),
    ],
)
def test_a_missing_tensor_is_named(key: str, sentence: str, tmp_path: Path) -> None:
    path = rewritten(tmp_path, "qwen3", lambda tensors: tensors.pop(key))
    with pytest.raises(ValueError, match=sentence):
        registry.load_model(path)


@pytest.mark.parametrize(
    ("key", "shape", "sentence"),
    [
        (
            "model.layers.1.self_attn.q_proj.weight",
            (60, 30),
            r"layer 1 wq: file has \(60, 30\), the model needs \(60, 36\)",
        ),
        ("model.norm.weight", (37,), r"final_norm: file has \(37,\), the model needs \(36,\)"),
        ("model.embed_tokens.weight", (36, 131), r"embed: file has \(36, 131\), the model needs"),
    ],
)
def test_a_wrong_shape_is_named(
    key: str, shape: tuple[int, ...], sentence: str, tmp_path: Path
) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[key] = np.ones(shape, np.float32)

    with pytest.raises(ValueError, match=sentence):
        registry.load_model(rewritten(tmp_path, "qwen3", change))


def test_a_surplus_tensor_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(48, np.float32)
        tensors["model.layers.7.mlp.up_proj.weight"] = np.ones((67, 40), np.float32)

    sentence = r"has model.layers.0.self_attn.q_proj.bias and 1 more, which llama does not use"
    with pytest.raises(ValueError, match=sentence):
        registry.load_model(rewritten(tmp_path, "llama", change))


def test_old_rotary_buffers_and_a_tied_head_are_ignored(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(5, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    model = registry.load_model(rewritten(tmp_path, "llama-tied", change), threads=1)
    one = datum(tokens_of("llama-tied", 20))
    found, _ = call(_core.Adapter(model.core, rank=2), [one], backward=False)
    wanted, _ = call(_core.Adapter(loaded("llama-tied").core, rank=2), [one], backward=False)
    np.testing.assert_array_equal(found[0], wanted[0])


@pytest.mark.parametrize("row", [0, 100])
def test_a_tied_model_that_stores_another_head_is_refused(
    row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes both then; the merged model would lose one."""
    monkeypatch.setattr(tensor_views, "ROWS", 30)

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["lm_head.weight"][row, 7] += 1e-3

    path = rewritten(tmp_path, "llama-tied", change)
    said = "json has tie_word_embeddings, but the file's lm_head.weight is not model.embed_tokens"
    for use in (registry.load_model, registry.read_places):
        with pytest.raises(ValueError, match=said):
            use(path)


def test_a_bf16_matrix_among_f32_ones_is_widened(tmp_path: Path) -> None:
    def bits(array: np.ndarray) -> np.ndarray:
        return (array.view(np.uint32) >> 16).astype(np.uint16)

    narrow = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]

    def mixed(tensors: dict[str, np.ndarray]) -> None:
        tensors.update({key: bits(tensors[key]) for key in narrow})

    def rounded(tensors: dict[str, np.ndarray]) -> None:
        for key in narrow:
            tensors[key] = (bits(tensors[key]).astype(np.uint32) << 16).view(np.float32)

    one = datum(tokens_of("qwen3", 20))
    results = []
    for label, change in (("mixed", mixed), ("rounded", rounded)):
        path = rewritten(tmp_path / label, "qwen3", change)
        assert registry.element_type(path) == "f32"
        model = registry.load_model(path, threads=1)
        results.append(call(_core.Adapter(model.core, rank=2), [one], backward=False)[0][0])
    np.testing.assert_array_equal(results[0], results[1])
    unchanged = call(_core.Adapter(loaded("qwen3").core, rank=2), [one], backward=False)[0][0]
    assert not np.array_equal(results[0], unchanged)


@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf), ids=str)
@pytest.mark.parametrize("kind", ("F32", "F16", "BF16"))
@pytest.mark.parametrize("name", ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"))
def test_a_number_that_is_not_finite_is_refused_by_its_tensors_name(
    name: str, kind: str, value: float, tmp_path: Path
) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        array = tensors[name].copy()
        array.flat[-1] = value
        bf16 = safetensors_io.narrow(array, np.dtype(np.uint16))
        tensors[name] = {"F32": array, "F16": array.astype(np.float16), "BF16": bf16}[kind]

    path = rewritten(tmp_path, "qwen3", spoil)
    at = ", ".join(str(size - 1) for size in safetensors_io.open_folder(path).entry(name).shape)
    with pytest.raises(ValueError, match=rf"safetensors: {name} has {value} at \[{at}\]: all"):
        registry.load_model(path, threads=1)


def test_a_number_that_bf16_can_not_hold_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"

    def enlarge(tensors: dict[str, np.ndarray]) -> None:
        tensors[name][2, 1] = -3.4e38

    path = rewritten(tmp_path, "qwen3", enlarge)
    registry.load_model(path, threads=1)
    model = dataclasses.replace(registry.inspect_model(path), kind="bf16")
    with pytest.raises(ValueError, match=rf"{name}, in bfloat16, has -inf at \[2, 1\]"):
        registry.load_weights(model, threads=1)


def test_bf16_is_kept_only_where_all_matrices_are_bf16() -> None:
    kinds = {name: registry.element_type(folder(name)) for name in SPECS}
    assert kinds == {
        name: "bf16" if spec.dtype == torch.bfloat16 else "f32" for name, spec in SPECS.items()
    }
    matrices = sum(math.prod(entry[-2:]) for entry in loaded("llama").core.slots)
    assert matrices * 2 <= loaded("llama").core.weight_bytes < matrices * 4


@pytest.mark.parametrize("cut", (3, 100, 5000, -1))
def test_a_truncated_file_is_refused(cut: int, tmp_path: Path) -> None:
    path = rewritten(tmp_path, "qwen3", lambda tensors: None)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"model\.safetensors.*the file has|found 3 bytes"):
        registry.load_model(path)


def test_a_missing_tokenizer_is_a_sentence(tmp_path: Path) -> None:
    path = changed(tmp_path, "qwen3")
    (path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"model has no tokenizer\.json"):
        registry.load_model(path)


@pytest.mark.parametrize("content", ("{}", "[]", '{"model": {"vocab": 3}}', '{"model"', "{}{}"))
def test_a_broken_tokenizer_is_a_sentence(content: str, tmp_path: Path) -> None:
    path = changed(tmp_path, "qwen3")
    (path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json (is not|should hold|has no)"):
        registry.load_model(path)


def test_a_missing_config_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        registry.load_model(tmp_path)


# ---- what a loaded model says of itself ----


def test_a_loaded_model_knows_its_tokenizer() -> None:
    for name, spec in SPECS.items():
        model = loaded(name)
        assert (model.family.name, model.context, model.vocab) == (
            spec.family,
            spec.config.get("max_position_embeddings", 160),
            spec.config["vocab_size"],
        )
        assert model.eos_ids == (7,)
        assert model.path == model.tokenizer_dir == folder(name).resolve()


@pytest.mark.parametrize(
    ("generation", "config", "token", "wanted"),
    [
        ([9, 3], 5, "w6", (9, 3, 6)),
        (None, 5, "w6", (5, 6)),
        (None, [5, 4], "w5", (5, 4)),
        (None, None, "w6", (6,)),
        (None, None, {"content": "w6"}, (6,)),
        (None, None, "unknown", (126,)),  # it is added, and has the next id
        (None, None, None, ()),
    ],
)
def test_eos_is_the_first_files_that_names_it_and_the_tokenizers(
    generation: Any, config: Any, token: Any, wanted: tuple[int, ...], tmp_path: Path
) -> None:
    path = changed(tmp_path, "qwen3", eos_token_id=config)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    assert registry.load_model(path).eos_ids == wanted


def eos_ids(tmp_path: Path, token: str, content: Any) -> tuple[int, ...]:
    path = changed(tmp_path, "qwen3", eos_token_id=None)
    (path / "generation_config.json").unlink()
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    (path / "tokenizer.json").write_text(json.dumps(content))
    return registry.inspect_model(path).eos_ids


def test_added_tokens_count(tmp_path: Path) -> None:
    """Each that is new has the next id, whatever the file says, as in the tokenizers package."""
    added = [{"id": 40, "content": "<end>"}, {"id": 2, "content": "w2"}]
    content = {"model": {"vocab": {"w0": 0, "w1": 1, "w2": 2}}, "added_tokens": added}
    assert eos_ids(tmp_path, "<end>", content) == (3,)


def test_a_unigram_vocabulary_is_a_list(tmp_path: Path) -> None:
    content = {"model": {"vocab": [["a", -1.0], ["b", -2.0], ["c", -3.0]]}}
    assert eos_ids(tmp_path, "b", content) == (1,)


def test_an_end_beyond_the_models_ids_is_none(tmp_path: Path) -> None:
    assert eos_ids(tmp_path, "b", {"model": {"vocab": {"a": 0, "b": 500}}}) == ()


# ---- finding a model ----


def test_a_model_is_found_by_name_path_and_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    cached = tmp_path / "hub" / "models--org--name"
    snapshot = cached / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc\n")
    (snapshot / "config.json").write_text("{}")
    registered = {"mine": Path("/somewhere")}
    assert registry.find_model("mine", registered) == Path("/somewhere")
    assert registry.find_model(str(snapshot), {}) == snapshot
    assert registry.find_model("org/name", registered) == snapshot
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HOME", "/nowhere")
    assert registry.find_model("org/name", {}) == snapshot
    (snapshot / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model 'org/name'.*\(those are: mine\)"):
        registry.find_model("org/name", registered)


@pytest.mark.parametrize("name", ("", "..", "../..", "a/../b", "no\0name", "a/b/c", "x/"))
def test_a_name_that_is_no_model_is_a_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no model"):
        registry.find_model(name, {})
