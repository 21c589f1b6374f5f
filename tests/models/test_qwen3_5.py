"""Qwen3.5: what of its folders is read, what is refused, and its adapters under every name."""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.model_folders import changed, rewritten
from support.tiny_models import (
    SPECS,
    as_double,
    call,
    cut,
    datum,
    error,
    folder,
    loaded,
    logprobs,
    make,
    randomize,
    targets_of,
    tokens_of,
)
from tinker_cookbook import hyperparam_utils
from tinker_cookbook import weights as cookbook
from tinker_cookbook.exceptions import WeightsMergeError
from tinsmith import _core
from tinsmith.checkpoints import checkpoint, peft
from tinsmith.checkpoints.export import export
from tinsmith.cli import commands
from tinsmith.formats import safetensors_io
from tinsmith.models import registry
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
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
    "qwen3.5's dynamic rope": (
        "qwen3_5",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e7, "factor": 4.0}},
        "the rope type is 'dynamic'; tinsmith knows default, llama3 and yarn",
    ),
    "qwen3.5's experts": ("qwen3_5", {"num_experts": 256}, "num_experts is 256"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_the_engine_can_not_compute_is_refused(case: str, tmp_path: Path) -> None:
    name, config, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=rf"config\.json: {sentence}"):
        registry.read_config(changed(tmp_path, name, **config))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"text_config": None}, "text_config should be an object, found None"),
        ({"text_config": [1]}, r"text_config should be an object, found \[1\]"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is 'gptq'"),
    ],
)
def test_a_model_of_several_parts_that_can_not_be_read_is_refused(
    config: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = changed(tmp_path, "qwen3_5")
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(ValueError, match=rf"config\.json: {sentence}"):
        registry.read_config(path)


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
    found = registry.read_config(changed(tmp_path, name, **config))
    wanted = registry.read_config(folder(name))
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
    config, inv_freq = registry.read_config(path)
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


# ---- tensors ----


def table(core: _core.Model, name: str) -> np.ndarray:
    """The engine's log-probabilities of a sequence that goes over a page's end."""
    (found,), _ = call(_core.Adapter(core, rank=1), [datum(tokens_of(name, 90))], backward=False)
    return found


def beginning(old: str, new: str) -> Callable[[dict[str, np.ndarray]], None]:
    """A change of a folder's tensors: names that begin with `old` begin with `new`."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return change


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("qwen3_5", "model.visual.", "model.language_model.visual."),  # as transformers 5.5 saves
        ("qwen3_5", "model.language_model.", "model."),
        ("qwen3_5-tied", "model.", "model.language_model."),
    ],
)
def test_every_layout_of_names_is_the_same_model(
    name: str, old: str, new: str, tmp_path: Path
) -> None:
    path = rewritten(tmp_path, name, beginning(old, new))
    core = registry.load_model(path, threads=1).core
    np.testing.assert_array_equal(table(core, name), table(loaded(name).core, name))


def test_what_text_does_not_need_is_left_aside_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with safetensors.safe_open(folder("qwen3_5") / "model.safetensors", "np") as file:
        names = list(file.keys())
    seen = sum(name.startswith("model.visual.") for name in names)
    assert seen > 10 and registry.left_aside(folder("qwen3_5")) == {
        "model.visual.": seen,
        "mtp.": 1,
    }
    assert registry.left_aside(folder("qwen3_5-tied")) == {}
    assert commands.main(["info", str(folder("qwen3_5"))]) == 0
    shown = capsys.readouterr().out
    assert f"not need them: {seen} tensors of model.visual.*, 1 tensors of mtp.*" in shown


@pytest.mark.parametrize(
    ("key", "shape", "sentence"),
    [
        (
            "conv1d.weight",
            (384, 4),
            r"delta_conv: file has \(384, 4\), the model needs \(384, 1, 4\)",
        ),
        (
            "in_proj_qkv.weight",
            (320, 34),
            r"delta_q: file has \(320, 34\), the model needs \(384, 34\)",
        ),
        ("A_log", (2,), r"delta_rate: file has \(2,\), the model needs \(4,\)"),
        (
            "in_proj_z.weight",
            None,
            "delta_z: the file has no model.language_model.layers.0.linear_a",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    key: str, shape: tuple[int, ...] | None, sentence: str, tmp_path: Path
) -> None:
    name = f"model.language_model.layers.0.linear_attn.{key}"

    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors[name]
        if shape:
            tensors[name] = np.ones(shape, np.float32)

    with pytest.raises(ValueError, match=f"layer 0 {sentence}"):
        registry.load_model(rewritten(tmp_path, "qwen3_5", change))


def test_a_number_in_a_shared_tensor_that_is_not_finite_is_found_where_it_lies(
    tmp_path: Path,
) -> None:
    name = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors[name][200, 3] = np.inf

    with pytest.raises(ValueError, match=rf"{name} has inf at \[200, 3\]"):
        registry.load_model(rewritten(tmp_path, "qwen3_5", spoil))


# ---- adapters: how many numbers, and under which names ----

# What differs from the defaults in the published config.json of each size.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3.5-4B": {"hidden_size": 2560, "intermediate_size": 9216},
    "Qwen/Qwen3.5-9B": {"hidden_size": 4096, "intermediate_size": 12288},
    "Qwen/Qwen3.5-27B": {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "linear_num_value_heads": 48,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_adapter_has_as_many_numbers_as_the_hosted_one(name: str, tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 248320, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "max_position_embeddings": 262144, **PUBLISHED[name],
    }  # fmt: skip
    content = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": name.endswith("-4B"),
        "text_config": sizes,
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    core = _core.Model(*registry.read_config(tmp_path), threads=1)
    wanted = hyperparam_utils._LORA_PARAMS_PER_RANK_BY_COMPONENT[name]
    groups = _core.slot_groups()
    found = dict.fromkeys(wanted, 0)
    for slot, _, _, rows, cols in core.slots:
        if slot in groups:
            found[groups[slot]] += rows + cols
    found["unembed"] = found["unembed"] or 248320 + sizes["hidden_size"]  # a tied one has no slot
    assert found == wanted
    numbers = hyperparam_utils.get_lora_param_count(name, lora_rank=8)
    vectors = core.plan(8)["adapter"] / 4 / numbers  # weights, gradients, moments
    assert vectors == pytest.approx(round(vectors), rel=1e-6)


@functools.cache
def opened(base: Path) -> registry.LoadedModel:
    return registry.load_model(base, threads=1)


def saved(
    base: Path, path: Path, family: registry.Family | None = None, **groups: bool
) -> _core.Adapter:
    """A random adapter, and its checkpoint."""
    adapter = randomize(_core.Adapter(opened(base).core, rank=4, alpha=9.0, **groups))
    trained = {group: groups.get(group, True) for group in ("attn", "mlp", "unembed")}
    meta = checkpoint.Meta(
        str(base), 4, 9.0, 0, **trained, kind="weights", step=0, user_metadata={},
        created="2026-11-21T12:00:00+00:00", ttl_seconds=None,
    )  # fmt: skip
    checkpoint.save(path, family or opened(base).family, adapter, meta, optimizer=True)
    return adapter


def read(path: Path, file: str = "") -> dict[str, np.ndarray]:
    """All tensors of a model's folder, or of a file in it."""
    with (
        safetensors_io.open_file(path / file)
        if file
        else safetensors_io.open_folder(path) as tensors
    ):
        return {name: safetensors_io.widen(tensors[name]).copy() for name in tensors}


@functools.cache
def published(tied: bool) -> Path:
    """A model as it is published: of several parts, with the tensors' names that belong to it."""
    if not tied:
        return folder("qwen3_5")
    spec = dataclasses.replace(SPECS["qwen3_5-tied"], kind="", seeing=True)
    return make(spec, folder("qwen3_5-tied").parent / "qwen3_5-tied-seeing")


@pytest.mark.parametrize("unembed", (True, False))
@pytest.mark.parametrize("tied", (True, False))
def test_the_cookbook_merges_it_as_we_do(tied: bool, unembed: bool, tmp_path: Path) -> None:
    base = published(tied)
    saved(base, tmp_path / "a", unembed=unembed)
    paths = {"base_model": base, "adapter_path": tmp_path / "a", "output_path": tmp_path / "theirs"}
    if tied and unembed:  # it would change the embedding, which is another model
        with pytest.raises(WeightsMergeError, match=r"lm_head\.weight.* does not exist"):
            cookbook.build_hf_model(**{key: str(path) for key, path in paths.items()})
        return
    cookbook.build_hf_model(**{key: str(path) for key, path in paths.items()})
    export(base, tmp_path / "a", tmp_path / "ours")
    theirs, ours, before = (read(path) for path in (tmp_path / "theirs", tmp_path / "ours", base))
    assert set(theirs) == set(ours)
    step = 2.0**-7 if tied else 2e-6  # of bfloat16, where a sum's last bit may tip it
    for key, tensor in ours.items():
        np.testing.assert_allclose(theirs[key], tensor, rtol=step, atol=2e-6, err_msg=key)
    changed = {key for key in before if not np.array_equal(before[key], ours[key])}
    assert all(".layers." in key or key == "lm_head.weight" for key in changed)
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv.weight" in changed


@pytest.mark.parametrize("tied", (True, False))
def test_the_cookbooks_peft_adapter_of_it_is_the_adapter(tied: bool, tmp_path: Path) -> None:
    base = published(tied)
    adapter = saved(base, tmp_path / "a", unembed=not tied)
    paths = {"base_model": base, "adapter_path": tmp_path / "a", "output_path": tmp_path / "peft"}
    cookbook.build_lora_adapter(**{key: str(path) for key, path in paths.items()})
    again = peft.load_adapter(tmp_path / "peft", opened(base), optimizer=False)
    np.testing.assert_array_equal(again.read("weights"), adapter.read("weights"))


@pytest.mark.parametrize("name", ("qwen3_5", "qwen3_5-tied", "llama"))
def test_a_checkpoint_of_the_hosted_service_is_loaded(name: str, tmp_path: Path) -> None:
    """It names modules as the plain model does, but for the head, and has no meta.json."""
    adapter = randomize(_core.Adapter(loaded(name).core, rank=3, alpha=32.0))
    tensors = {
        key.replace("lm_head", "model.unembed_tokens").replace(".default.", "."): matrix.T.copy()
        for key, matrix in cut(adapter, adapter.read("weights")).items()
    }
    assert "base_model.model.model.unembed_tokens.lora_A.weight" in tensors
    safetensors.numpy.save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 32, "base_model_name_or_path": name}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    again = peft.load_adapter(tmp_path, loaded(name), optimizer=False)
    np.testing.assert_array_equal(again.read("weights"), adapter.read("weights"))
    if name != "llama":  # and ours has the same names, but for the head
        saved(folder(name), tmp_path / "ours")
        ours = read(tmp_path / "ours", "adapter_model.safetensors")
        assert {key.replace("lm_head", "model.unembed_tokens") for key in ours} == set(tensors)


@pytest.mark.parametrize("what", ("weights", "optimizer"))
def test_a_checkpoint_with_the_heads_old_name_is_loaded(what: str, tmp_path: Path) -> None:
    base = opened(folder("qwen3_5"))
    older = dataclasses.replace(
        base.family, modules=base.family.modules | {"head": "model.unembed_tokens"}
    )
    adapter = saved(folder("qwen3_5"), tmp_path / "a", older)
    names = read(tmp_path / "a", "adapter_model.safetensors")
    assert "base_model.model.model.unembed_tokens.lora_A.weight" in names
    again = checkpoint.load_adapter(tmp_path / "a", base, optimizer=what == "optimizer")
    np.testing.assert_array_equal(again.read("weights"), adapter.read("weights"))


def peft_on(base: Path, path: Path, loader: Any, modules: Sequence[str]) -> PeftModel:
    """A folder that PEFT itself has written of an adapter on transformers' own modules."""
    model = loader.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=3, lora_alpha=7, target_modules=list(modules)))
    with torch.no_grad():
        for key, matrix in adapted.named_parameters():
            if "lora_" in key:
                matrix.copy_(0.2 * torch.randn(matrix.shape))
    adapted.save_pretrained(path)
    return adapted


@pytest.mark.parametrize("loader", (AutoModelForCausalLM, AutoModelForImageTextToText))
def test_pefts_matrices_on_the_whole_of_q_k_and_v_are_loaded(loader: Any, tmp_path: Path) -> None:
    modules = ("in_proj_qkv", "in_proj_z", "q_proj", "up_proj")
    model = peft_on(folder("qwen3_5"), tmp_path / "p", loader, modules)
    one = datum(tokens_of("qwen3_5", 70))
    with torch.no_grad():
        wanted = targets_of(logprobs(model.eval(), one.tokens), one).numpy()
    adapter = peft.load_adapter(tmp_path / "p", loaded("qwen3_5"), optimizer=False)
    (found,), _ = call(adapter, [one], backward=False)
    assert error(found, wanted) < 1e-5
    export(folder("qwen3_5"), tmp_path / "p", tmp_path / "out")
    merged = targets_of(logprobs(as_double(tmp_path / "out"), one.tokens), one).detach().numpy()
    assert error(merged, wanted) < 1e-5
    assert error(table(loaded("qwen3_5").core, "qwen3_5")[:60], wanted[:60]) > 0.02


def test_matrices_for_a_weight_and_for_rows_of_it_are_refused(tmp_path: Path) -> None:
    peft_on(folder("qwen3_5"), tmp_path / "p", AutoModelForCausalLM, ["in_proj_qkv", "in_proj_z"])
    file = tmp_path / "p" / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    for letter, shape in (("A", (3, 34)), ("B", (64, 3))):
        name = f"base_model.model.model.layers.0.linear_attn.in_proj_k.lora_{letter}.weight"
        tensors[name] = np.ones(shape, np.float32)
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(ValueError, match=r"in_proj_k\.lora_A.* and .*in_proj_qkv.* are one matrix"):
        peft.load_adapter(tmp_path / "p", loaded("qwen3_5"), optimizer=False)
    with pytest.raises(ValueError, match=r"matrices for .* and others for rows of it"):
        export(folder("qwen3_5"), tmp_path / "p", tmp_path / "out")


@pytest.mark.parametrize("module", ("in_proj_a", "in_proj_b"))
def test_matrices_that_are_not_trained_here_are_refused_by_name(
    module: str, tmp_path: Path
) -> None:
    peft_on(folder("qwen3_5"), tmp_path / "p", AutoModelForCausalLM, [module])
    with pytest.raises(ValueError, match=f"trains {module}, which tinsmith can't"):
        peft.load_adapter(tmp_path / "p", loaded("qwen3_5"), optimizer=False)
