"""Models with experts: what of their folders is read, and what is refused."""

import dataclasses
import functools
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from support.expert_models import fuse
from support.model_folders import changed, rewritten
from support.tiny_models import (
    MIXTURES,
    SPECS,
    Spec,
    as_double,
    call,
    datum,
    folder,
    loaded,
    logprobs,
    make,
    needs_bf16,
    targets_of,
    tokens_of,
)
from tinsmith import _core
from tinsmith.formats import config as hugging_face
from tinsmith.models import registry
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssRotaryEmbedding

NAMES = [name for name in MIXTURES if "_moe" in name]  # whose experts have tensors of two kinds

# ---- config.json ----

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no experts": (
        "qwen3_moe",
        {"num_local_experts": 0},
        "num_experts should be a positive integer, found 0",
    ),
    "experts that are no number": (
        "qwen3_5_moe",
        {"num_experts": "many"},
        "num_experts should be a positive integer, found 'many'",
    ),
    "two numbers of experts": (
        "qwen3_moe",
        {"num_experts": 4},
        "num_experts is 4, but num_local_experts is 8; they are one number",
    ),
    "too many experts": (
        "qwen3_5_moe",
        {"num_experts": 1025},
        "num_experts is 1025; it should be at most 1024",
    ),
    "more chosen than there are": (
        "qwen3_moe",
        {"num_experts_per_tok": 9},
        "num_experts_per_tok is 9; it should be at most 8, the number of experts",
    ),
    "too many chosen": (
        "qwen3_5_moe",
        {"num_experts": 64, "num_experts_per_tok": 33},
        "num_experts_per_tok is 33; it should be at most 32",
    ),
    "none chosen": (
        "qwen3_5_moe",
        {"num_experts_per_tok": 0},
        "num_experts_per_tok should be a positive integer, found 0",
    ),
    "experts without a width": (
        "qwen3_moe",
        {"moe_intermediate_size": 0},
        "moe_intermediate_size should be a positive integer, found 0",
    ),
    "a shared expert without a width": (
        "qwen3_5_moe",
        {"shared_expert_intermediate_size": 0},
        "shared_expert_intermediate_size should be a positive integer, found 0",
    ),
    "a switch that is none": (
        "qwen3_moe",
        {"norm_topk_prob": "yes"},
        "norm_topk_prob should be true or false, found 'yes'",
    ),
    "shares that are not divided": (
        "qwen3_5_moe",
        {"norm_topk_prob": False},
        "norm_topk_prob is False; only True is supported",
    ),
    "a step of none": (
        "qwen3_moe",
        {"decoder_sparse_step": 0},
        "decoder_sparse_step should be a positive integer, found 0",
    ),
    "dense layers that are no list": (
        "qwen3_moe",
        {"mlp_only_layers": 1},
        "mlp_only_layers should be a list of layers, found 1",
    ),
    "a dense layer that there is not": (
        "qwen3_moe",
        {"mlp_only_layers": [3]},
        "mlp_only_layers has 3; the 3 layers are numbered from 0",
    ),
    "a window": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 64},
        "use_sliding_window is True, which is not supported",
    ),
    "experts of another kind": ("qwen3_moe", {"n_routed_experts": 8}, "n_routed_experts is 8"),
    "a limit of none": (
        "gpt_oss",
        {"swiglu_limit": 0},
        "swiglu_limit should be a positive number, found 0",
    ),
    "another slope": ("gpt_oss", {"swiglu_alpha": 2.0}, "swiglu_alpha is 2.0; only 1.702 is"),
    "a bias that is none": (
        "gpt_oss",
        {"attention_bias": 1},
        "attention_bias should be true or false, found 1",
    ),
    "sliding layers of no width": (
        "gpt_oss",
        {"sliding_window": -1},
        "sliding_window should be a positive integer, found -1",
    ),
    "layers of another kind": (
        "gpt_oss",
        {"layer_types": ["sliding_attention", "linear_attention"]},
        "layer_types has linear_attention for layer 1; it should be sliding_attention or full_att",
    ),
    "kinds of other layers": (
        "gpt_oss",
        {"layer_types": ["full_attention"]},
        "layer_types should name 2 layers",
    ),
    "quantised experts": (
        "qwen3_moe",
        {"quantization_config": {"quant_method": "gptq"}},
        "quantization_config is 'gptq', which is not supported",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_the_engine_can_not_compute_is_refused(case: str, tmp_path: Path) -> None:
    name, config, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=rf"config\.json: {sentence}"):
        registry.read_config(changed(tmp_path, name, **config))


HARMLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "published names": ("qwen3_moe", {"num_local_experts": None, "num_experts": 8}),
    "both names": ("qwen3_moe", {"num_experts": 8}),
    "a window that is off": ("qwen3_moe", {"sliding_window": 4096, "max_window_layers": 48}),
    "the router's loss": ("qwen3_5_moe", {"router_aux_loss_coef": 0.1, "mlp_only_layers": []}),
    "shares that are divided": ("qwen3_5_moe", {"norm_topk_prob": True}),
    "gpt-oss's slope": ("gpt_oss", {"swiglu_alpha": 1.702, "initial_context_length": 40}),
    "gpt-oss's turns": ("gpt_oss", {"layer_types": None}),
    "gpt-oss's other name": ("gpt_oss", {"num_local_experts": None, "num_experts": 8}),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_a_config_that_says_the_same_is_read_the_same(case: str, tmp_path: Path) -> None:
    name, config = HARMLESS[case]
    assert (
        registry.read_config(changed(tmp_path, name, **config))[0]
        == (registry.read_config(folder(name))[0])
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen3_moe", ""), ("qwen3_5_moe-tied", "_text"), ("qwen3_vl_moe-tied", "")],
)
def test_sizes_are_transformers_where_the_file_does_not_say(
    name: str, kind: str, tmp_path: Path
) -> None:
    missing = (
        "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
        "shared_expert_intermediate_size", "num_key_value_heads", "norm_topk_prob",
        "mlp_only_layers", "decoder_sparse_step", "intermediate_size",
    )  # fmt: skip
    path = changed(tmp_path, name, num_attention_heads=16, **dict.fromkeys(missing))
    config, _ = registry.read_config(path)
    wanted = AutoConfig.from_pretrained(path)
    assert wanted.model_type.endswith(f"_moe{kind}")
    wanted = wanted.get_text_config()
    shared = kind == "_text"
    for size, key in {
        "experts": "num_experts",
        "chosen": "num_experts_per_tok",
        "expert_ffn": "moe_intermediate_size",
        "kv_heads": "num_key_value_heads",
        "ffn": "shared_expert_intermediate_size" if shared else "intermediate_size",
    }.items():
        assert config[size] == getattr(wanted, key), key
    assert config["norm_shares"] == int(getattr(wanted, "norm_topk_prob", True))
    assert set(config["feeds"]) == {"experts_with_shared" if shared else "experts"}


def test_gpt_oss_is_transformers_where_the_file_does_not_say(tmp_path: Path) -> None:
    missing = (
        "num_local_experts", "num_experts_per_tok", "num_attention_heads", "num_key_value_heads",
        "head_dim", "intermediate_size", "sliding_window", "swiglu_limit", "attention_bias",
        "rms_norm_eps", "layer_types", "rope_parameters",
    )  # fmt: skip
    path = changed(tmp_path, "gpt_oss", num_hidden_layers=5, **dict.fromkeys(missing))
    config, inv_freq = registry.read_config(path)
    wanted = AutoConfig.from_pretrained(path)
    for size, key in {
        "experts": "num_local_experts",
        "chosen": "num_experts_per_tok",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_width": "head_dim",
        "expert_ffn": "intermediate_size",
        "window": "sliding_window",
        "norm_eps": "rms_norm_eps",
    }.items():
        assert config[size] == getattr(wanted, key), key
    assert config["mixers"] == tuple(wanted.layer_types)
    assert set(config["feeds"]) == {"experts"}
    switches = "qkv_bias", "o_bias", "sinks", "expert_bias", "norm_shares"
    assert [config[switch] for switch in switches] == [1] * 5
    assert config["expert_limit"] == GptOssExperts(wanted).limit
    rotary = GptOssRotaryEmbedding(wanted)
    assert config["rope_scale"] == pytest.approx(rotary.attention_scaling, rel=1e-6)
    np.testing.assert_allclose(inv_freq, rotary.inv_freq.numpy(), rtol=1e-6)


def test_gpt_oss_without_sliding_layers_needs_no_window(tmp_path: Path) -> None:
    kinds = ["full_attention"] * 2
    config, _ = registry.read_config(
        changed(tmp_path, "gpt_oss", layer_types=kinds, sliding_window=-1)
    )
    assert (config["mixers"], config["window"]) == (tuple(kinds), 0)


@pytest.mark.parametrize("step", (1, 2, 3, 7))
@pytest.mark.parametrize("dense", (None, [], [1], [0, 3, 5]))
def test_layers_have_experts_where_transformers_gives_them(
    step: int, dense: list[int] | None, tmp_path: Path
) -> None:
    more = {"num_hidden_layers": 6, "decoder_sparse_step": step, "mlp_only_layers": dense}
    path = changed(tmp_path, "qwen3_moe", **more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    sparse = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    wanted = tuple("experts" if one else "mlp" for one in sparse)
    assert registry.read_config(path)[0]["feeds"] == wanted


# ---- tensors ----


def table(core: _core.Model, name: str) -> np.ndarray:
    """The engine's log-probabilities of a sequence."""
    (found,), _ = call(_core.Adapter(core, rank=1), [datum(tokens_of(name, 70))], backward=False)
    return found


def take_apart(tensors: dict[str, np.ndarray], *, turned: bool = False) -> None:
    """Gives each expert tensors of its own; in `turned` ones of all, inputs are rows."""
    for name in [name for name in tensors if ".experts." in name]:
        stem, _, kind = name.rpartition(".")
        whole = tensors.pop(name)
        for index, matrix in enumerate(whole.swapaxes(1, 2) if turned else whole):
            parts = {kind: matrix}
            if kind == "gate_up_proj":
                half = len(matrix) // 2
                parts = {"gate_proj": matrix[:half], "up_proj": matrix[half:]}
            for one, part in parts.items():
                tensors[f"{stem}.{index}.{one}.weight"] = part.copy()


@pytest.mark.parametrize("name", NAMES)
def test_experts_one_by_one_and_in_one_tensor_are_the_same_model(name: str, tmp_path: Path) -> None:
    if loaded(name).family.other:
        apart = functools.partial(take_apart, turned=loaded(name).family.turned)
        path = rewritten(tmp_path, name, apart)
    else:
        path = rewritten(tmp_path, name, lambda tensors: None)
        fuse(path)
    model = registry.load_model(path, threads=1)
    assert model.family.other is not loaded(name).family.other
    np.testing.assert_array_equal(table(model.core, name), table(loaded(name).core, name))


# Sizes with which the shape of one of the two tensors says nothing of the layout, or neither's
# number of axes does.
EITHER_WAY: dict[str, dict[str, int]] = {
    "square down": {"hidden_size": 32, "moe_intermediate_size": 32},
    "square gate and up": {"hidden_size": 32, "moe_intermediate_size": 16},
    "no square": {"hidden_size": 32, "moe_intermediate_size": 24},
}


@pytest.mark.parametrize("case", EITHER_WAY)
def test_inputs_as_rows_and_outputs_as_rows_are_the_same_model(case: str, tmp_path: Path) -> None:
    """Qwen3-VL's mixtures are published with inputs as rows, and saved the other way. transformers
    looks at one tensor at a time, and takes a square one as it is."""
    spec = SPECS["qwen3_vl_moe"]
    spec = dataclasses.replace(spec, config=spec.config | EITHER_WAY[case])
    found = []
    for turned in (False, True):
        one = dataclasses.replace(spec, turned=turned)
        model = registry.load_model(make(one, tmp_path / f"{turned}"), threads=1)
        assert model.family.turned is turned
        found.append(table(model.core, "qwen3_vl_moe"))
    np.testing.assert_array_equal(*found)
    with torch.no_grad():
        scores = logprobs(as_double(tmp_path / "False"), tokens_of("qwen3_vl_moe", 70))
    wanted = targets_of(scores, datum(tokens_of("qwen3_vl_moe", 70))).numpy()
    assert np.abs(found[0] - wanted).max() < 5e-5


def test_the_layout_of_a_speculative_head_says_nothing(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        take_apart(tensors)
        tensors["mtp.layers.0.mlp.experts.down_proj"] = np.ones((8, 32, 19), np.float32)

    model = registry.load_model(rewritten(tmp_path, "qwen3_5_moe", change), threads=1)
    wanted = table(loaded("qwen3_5_moe").core, "qwen3_5_moe")
    np.testing.assert_array_equal(table(model.core, "qwen3_5_moe"), wanted)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("name", ("qwen3_moe", "qwen3_5_moe", "gpt_oss"))
def test_every_type_of_weights_is_read(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = folder(name)
    file = next(path.glob("*.safetensors"))
    tensors = safetensors.torch.load_file(file)
    (tmp_path / "m").mkdir()
    for one in path.iterdir():
        (tmp_path / "m" / one.name).write_bytes(one.read_bytes())
    cast = {key: tensor.to(dtype) for key, tensor in tensors.items()}
    safetensors.torch.save_file(cast, tmp_path / "m" / file.name, {"format": "pt"})
    model = registry.load_model(tmp_path / "m", threads=1)
    assert model.kind == ("bf16" if dtype == torch.bfloat16 else "f32")
    one = datum(tokens_of(name, 40))
    with torch.no_grad():
        wanted = targets_of(logprobs(as_double(tmp_path / "m"), one.tokens), one).numpy()
    (found,), _ = call(_core.Adapter(model.core, rank=1), [one], backward=False)
    assert np.abs(found - wanted).max() < 5e-5


def shaped(name: str, shape: tuple[int, ...] | None) -> Callable[[dict[str, np.ndarray]], None]:
    """A change of a folder's tensors: one has another shape, or is not there."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors[name]
        if shape:
            tensors[name] = np.ones(shape, np.float32)

    return change


NESTED = "model.language_model.layers.0.mlp."
OSS = "model.layers.1.mlp."


@pytest.mark.parametrize(
    ("name", "key", "shape", "sentence"),
    [
        (
            "qwen3_moe",
            "model.layers.2.mlp.experts.7.up_proj.weight",
            None,
            r"layer 2 e_up 7: the file has no model\.layers\.2\.mlp\.experts\.7\.up_proj\.weight",
        ),
        (
            "qwen3_moe",
            "model.layers.0.mlp.experts.3.down_proj.weight",
            (21, 34),
            r"layer 0 e_down 3: file has \(21, 34\), the model needs \(34, 21\)",
        ),
        (
            "qwen3_moe",
            "model.layers.0.mlp.gate.weight",
            (7, 34),
            r"layer 0 router: file has \(7, 34\), the model needs \(8, 34\)",
        ),
        (
            "qwen3_5_moe",
            f"{NESTED}experts.gate_up_proj",
            (8, 32, 38),
            r"layer 0 e_gate: file has \(8, 32, 38\), the model needs \(8, 38, 32\)",
        ),
        (
            "qwen3_5_moe",
            f"{NESTED}experts.down_proj",
            (256, 19),
            r"layer 0 e_down: file has \(256, 19\), the model needs \(8, 32, 19\)",
        ),
        (
            "qwen3_5_moe",
            f"{NESTED}shared_expert_gate.weight",
            (32, 1),
            r"layer 0 shared_gate: file has \(32, 1\), the model needs \(32,\)",
        ),
        (
            "qwen3_5_moe",
            f"{NESTED}shared_expert.up_proj.weight",
            None,
            "layer 0 w_up: the file has no model.language_model.layers.0.mlp.shared_expert.up_proj",
        ),
        (
            "gpt_oss",
            f"{OSS}experts.gate_up_proj",
            (8, 46, 32),
            r"layer 1 e_gate: file has \(8, 46, 32\), the model needs \(8, 32, 46\)",
        ),
        (
            "gpt_oss",
            f"{OSS}experts.gate_up_proj_bias",
            (8, 23),
            r"layer 1 e_gate_bias: file has \(8, 23\), the model needs \(8, 46\)",
        ),
        (
            "gpt_oss",
            f"{OSS}experts.down_proj",
            None,
            r"layer 1 e_down: the file has no model\.layers\.1\.mlp\.experts\.down_proj",
        ),
        (
            "gpt_oss",
            "model.layers.0.self_attn.sinks",
            (3,),
            r"layer 0 sinks: file has \(3,\), the model needs \(4,\)",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    name: str, key: str, shape: tuple[int, ...] | None, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        registry.load_model(rewritten(tmp_path, name, shaped(key, shape)))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen3_moe", {"num_local_experts": 1024, "mlp_only_layers": []}),
        ("qwen3_5_moe", {"num_experts": 1024, "layer_types": None}),
    ],
)
def test_a_config_that_asks_for_more_matrices_than_there_are_makes_no_table_of_them(
    name: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took gigabytes before any tensor was looked at."""
    path = changed(tmp_path, name, num_hidden_layers=1 << 16, **config)
    monkeypatch.setattr(registry._core, "Model", lambda *_, **__: pytest.fail("it made a table"))
    said = r"asks for at least 67,108,864 matrices: of 65,536 of its 65,536 layers 1,024 experts; t"
    for read in (registry.inspect_model, registry.read_places):
        with pytest.raises(ValueError, match=rf"config\.json {said}"):
            read(path)


def test_sums_of_bytes_do_not_overflow() -> None:
    sizes = dict.fromkeys(("width", "expert_ffn"), 1 << 20)
    config = {"layers": 1 << 16, "experts": 1024, "mixers": ("full_attention",) * (1 << 16)}
    config |= {"feeds": ("experts",) * (1 << 16)}
    plain = dict(registry.inspect_model(folder("qwen3_moe")).config)
    with pytest.raises(ValueError, match=r"a model of \d+ TiB is more than 1024"):
        _core.Model(plain | config | sizes, np.ones(plain["rotary"] // 2, np.float32))


def test_a_long_list_of_dense_layers_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer was looked for in the whole list: 4 billion steps at 65,536 layers."""
    looked = 0

    class Counted(list[int]):
        def __contains__(self, item: object) -> bool:
            nonlocal looked
            looked += 1
            return super().__contains__(item)

    layers = Counted(range(64))
    made = hugging_face.some_experts(tmp_path, {"mlp_only_layers": layers}, 128)
    assert made == ("mlp",) * 64 + ("experts",) * 64 and looked == 0


@pytest.mark.parametrize(
    ("bad", "dtype", "said"),
    [
        (np.inf, None, "has inf"),
        pytest.param(3.4e38, "bfloat16", "in bfloat16, has inf", marks=needs_bf16),
    ],
)
def test_a_number_of_an_expert_that_is_not_finite_is_found_where_it_lies(
    bad: float, dtype: str | None, said: str, tmp_path: Path
) -> None:
    name = f"{NESTED}experts.gate_up_proj"

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors[name][5, 30, 3] = bad

    with pytest.raises(ValueError, match=rf"{name},? {said} at \[5, 30, 3\]"):
        registry.load_model(rewritten(tmp_path, "qwen3_5_moe", spoil), dtype=dtype)


@pytest.mark.parametrize(("name", "place"), [("down_proj", (5, 20, 3)), ("up_proj_bias", (7, 31))])
def test_a_number_of_a_turned_expert_is_found_where_it_lies(
    name: str, place: tuple[int, ...], tmp_path: Path
) -> None:
    name = f"{OSS}experts.{name}".replace(".up", ".gate_up")

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors[name][place] = np.nan

    at = ", ".join(map(str, place))
    with pytest.raises(ValueError, match=rf"{name} has nan at \[{at}\]"):
        registry.load_model(rewritten(tmp_path, "gpt_oss", spoil))


def test_experts_in_one_tensor_are_widened_one_by_one(tmp_path: Path) -> None:
    """Reading a float16 folder as float32 takes one matrix's memory more, not a tensor's."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 64}
    config = SPECS["qwen3_5_moe-tied"].config | sizes
    spec = Spec("qwen3_5_moe", config, torch.float16, kind="qwen3_5_moe_text")
    model = registry.inspect_model(make(spec, tmp_path / "wide"))
    slots = registry.open_core(model, threads=1).slots
    tracemalloc.start()
    try:
        largest = max(piece.array.nbytes for piece in registry.read_weights(model, slots))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    expert, tensor = 4 * 128 * 128, 64 * 4 * 256 * 128
    assert largest < 4 * expert and peak < tensor / 4
