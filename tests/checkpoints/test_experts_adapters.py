"""Adapters of models with experts: how many numbers they have, and their files under every name
that the hosted service, the cookbook's tools and PEFT give their matrices."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tinker
import torch
from support.tiny_models import (
    MIXTURES,
    SPECS,
    Spec,
    as_double,
    call,
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
from tinsmith import _core
from tinsmith.checkpoints import checkpoint, peft
from tinsmith.checkpoints.export import export
from tinsmith.cli import commands
from tinsmith.formats import safetensors_io
from tinsmith.models import registry
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig
from tinsmith.system.format import readable

NAMES = MIXTURES

# ---- how many numbers ----

# The sizes of the published config.json that an adapter depends on.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-30B-A3B": (
        "Qwen3MoeForCausalLM",
        {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
         "num_attention_heads": 32, "head_dim": 128, "num_experts": 128},
    ),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": (
        "Qwen3MoeForCausalLM",
        {"vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 94,
         "num_attention_heads": 64, "head_dim": 128, "num_experts": 128,
         "moe_intermediate_size": 1536},
    ),
    "Qwen/Qwen3.5-35B-A3B": (
        "Qwen3_5MoeForConditionalGeneration",
        {"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
         "num_attention_heads": 16},
    ),
    "Qwen/Qwen3.5-397B-A17B": (
        "Qwen3_5MoeForConditionalGeneration",
        {"vocab_size": 248320, "hidden_size": 4096, "num_hidden_layers": 60,
         "num_attention_heads": 32, "linear_num_value_heads": 64, "num_experts": 512,
         "num_experts_per_tok": 10, "moe_intermediate_size": 1024,
         "shared_expert_intermediate_size": 1024},
    ),
    "openai/gpt-oss-20b": (
        "GptOssForCausalLM",
        {"vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 24,
         "num_local_experts": 32},
    ),
    "openai/gpt-oss-120b": (
        "GptOssForCausalLM",
        {"vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 36},
    ),
}  # fmt: skip
SAME = {
    "Qwen/Qwen3.6-35B-A3B": "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3-30B-A3B-Base": "Qwen/Qwen3-30B-A3B",
}


def written(name: str, path: Path) -> Path:
    """A published model's config.json, as much of it as says an adapter's sizes."""
    architecture, sizes = PUBLISHED[SAME.get(name, name)]
    sizes = {"max_position_embeddings": 40960, "norm_topk_prob": True, **sizes}
    content = {"architectures": [architecture], "tie_word_embeddings": False}
    content |= {"text_config": sizes} if "Conditional" in architecture else sizes
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", (*PUBLISHED, *SAME))
def test_an_adapter_has_as_many_numbers_as_the_hosted_one(name: str, tmp_path: Path) -> None:
    core = _core.Model(*registry.read_config(written(name, tmp_path)), threads=1)
    found, groups = {"attn": 0, "mlp": 0, "unembed": 0}, _core.slot_groups()
    for slot, _, index, rows, cols in core.slots:
        common = {"e_gate": cols, "e_up": cols, "e_down": rows}.get(slot, 0)
        if slot in groups:
            found[groups[slot]] += rows + cols - (common if index else 0)
    assert found == hyperparam_utils._LORA_PARAMS_PER_RANK_BY_COMPONENT[name]
    numbers = hyperparam_utils.get_lora_param_count(name, lora_rank=32)
    vectors = core.plan(32)["adapter"] / 4 / numbers  # weights, gradients, moments
    assert vectors == pytest.approx(4, rel=1e-6)


def test_the_switch_of_the_mlp_trains_the_experts_alone(tmp_path: Path) -> None:
    adapter = _core.Adapter(loaded("qwen3_5_moe").core, rank=3, attn=False, unembed=False)
    experts, ffn, shared, width = 8, 19, 23, 32
    layer = 3 * experts * ffn + 3 * width + 3 * (width + shared)
    assert adapter.size == 3 * 2 * layer


def test_info_says_what_an_adapter_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder("qwen3_moe")
    assert commands.main(["info", str(path), "--rank", "32"]) == 0
    shown = capsys.readouterr().out
    adapter = _core.Adapter(loaded("qwen3_moe").core, rank=32)
    held = adapter.bytes // 3 * 4  # weights and moments, with gradients
    assert held >= 4 * 4 * adapter.size
    assert f"{readable(held):>12}  one adapter of rank 32, with gradients" in shown


def test_a_run_that_can_not_fit_is_refused_with_its_sum(tmp_path: Path) -> None:
    path = folder("qwen3_moe")
    core = loaded("qwen3_moe").core
    plan = core.plan(32, core.plan(32)["step_tokens"], 1)
    need = plan["adapter"] + plan["sums"] // 4 + plan["scratch"] + plan["step"] * 9 // 8
    memory = 3 * core.weight_bytes
    options = {"device": "cpu", "threads": 1, "memory": memory}
    with (
        Backend(ServerConfig({"m": path}, checkpoints=tmp_path, **options)) as backend,
        backend.service_client() as service,
        pytest.raises(tinker.RequestFailedError) as caught,
    ):
        service.create_lora_training_client("m", rank=32).result()
    told = str(caught.value)
    assert f"a run of rank 32 needs {readable(need)}, and of the {readable(memory)} that" in told
    assert f"the base model m ({readable(core.weight_bytes)})" in told


# ---- files ----


def table(core: _core.Model, name: str) -> np.ndarray:
    """The engine's log-probabilities of a sequence."""
    (found,), _ = call(_core.Adapter(core, rank=1), [datum(tokens_of(name, 70))], backward=False)
    return found


@functools.cache
def opened(base: Path) -> registry.LoadedModel:
    return registry.load_model(base, threads=1)


def saved(base: Path, path: Path, **groups: bool) -> _core.Adapter:
    """A random adapter, and its checkpoint."""
    adapter = randomize(_core.Adapter(opened(base).core, rank=4, alpha=9.0, **groups))
    trained = {group: groups.get(group, True) for group in ("attn", "mlp", "unembed")}
    meta = checkpoint.Meta(
        str(base), 4, 9.0, 0, **trained, kind="weights", step=0, user_metadata={},
        created="2026-11-21T12:00:00+00:00", ttl_seconds=None,
    )  # fmt: skip
    checkpoint.save(path, opened(base).family, adapter, meta, optimizer=True)
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
def base_of(name: str) -> Path:
    """A folder that the cookbook knows how to merge into: tied ones under their published names."""
    if name != "qwen3_5_moe-tied":
        return folder(name)
    spec = Spec("qwen3_5_moe", SPECS[name].config, torch.float16, "40KB", seeing=True)
    return make(spec, folder(name).parent / f"{name}-seeing")


def test_a_checkpoint_has_the_names_and_shapes_of_the_hosted_service(tmp_path: Path) -> None:
    saved(folder("qwen3_moe"), tmp_path / "a")
    found = read(tmp_path / "a", checkpoint.ADAPTER_FILE)
    stem = "base_model.model.model.layers.0.mlp.experts"
    experts, rank, width, ffn = 8, 4, 34, 21
    for module, a, b in (
        ("w1", (1, rank, width), (experts, ffn, rank)),
        ("w3", (1, rank, width), (experts, ffn, rank)),
        ("w2", (experts, rank, ffn), (1, width, rank)),
    ):
        assert found[f"{stem}.{module}.lora_A.weight"].shape == a
        assert found[f"{stem}.{module}.lora_B.weight"].shape == b
    assert "base_model.model.model.layers.1.mlp.gate_proj.lora_A.weight" in found
    assert not any(".mlp.gate." in name for name in found)  # no router is trained


def test_a_gpt_oss_checkpoint_has_the_names_of_the_hosted_service(tmp_path: Path) -> None:
    """There its attention is `attn`; as transformers and PEFT call it, it is read too."""
    adapter = saved(folder("gpt_oss"), tmp_path / "a")
    (tmp_path / "a" / "meta.json").unlink()
    found = read(tmp_path / "a", checkpoint.ADAPTER_FILE)
    stem = "base_model.model.model.layers.1"
    for letter in "qkvo":
        assert f"{stem}.attn.{letter}_proj.lora_A.weight" in found
    assert found[f"{stem}.mlp.experts.w1.lora_A.weight"].shape == (1, 4, 32)
    assert found[f"{stem}.mlp.experts.w3.lora_B.weight"].shape == (8, 23, 4)
    assert found[f"{stem}.mlp.experts.w2.lora_B.weight"].shape == (1, 32, 4)
    renamed = {name.replace(".attn.", ".self_attn."): array for name, array in found.items()}
    assert renamed.keys() != found.keys()
    safetensors.numpy.save_file(renamed, tmp_path / "a" / checkpoint.ADAPTER_FILE)
    again = peft.load_adapter(tmp_path / "a", loaded("gpt_oss"), optimizer=False)
    np.testing.assert_array_equal(again.read("weights"), adapter.read("weights"))


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_loaded_again(name: str, tmp_path: Path) -> None:
    adapter = saved(folder(name), tmp_path / "a")
    again = peft.load_adapter(tmp_path / "a", loaded(name), optimizer=True)
    np.testing.assert_array_equal(again.read("weights"), adapter.read("weights"))
    (tmp_path / "a" / "meta.json").unlink()  # as the hosted service's
    again = peft.load_adapter(tmp_path / "a", loaded(name), optimizer=False)
    np.testing.assert_array_equal(again.read("weights"), adapter.read("weights"))


@pytest.mark.parametrize("unembed", (True, False))
@pytest.mark.parametrize("name", NAMES)
def test_the_cookbook_merges_it_as_we_do(name: str, unembed: bool, tmp_path: Path) -> None:
    base, tied = base_of(name), SPECS[name].config["tie_word_embeddings"]
    saved(base, tmp_path / "a", unembed=unembed and not tied)
    paths = {"base_model": base, "adapter_path": tmp_path / "a", "output_path": tmp_path / "theirs"}
    cookbook.build_hf_model(**{key: str(path) for key, path in paths.items()})
    export(base, tmp_path / "a", tmp_path / "ours")
    theirs, ours, before = (read(path) for path in (tmp_path / "theirs", tmp_path / "ours", base))
    assert set(theirs) == set(ours) == set(before)
    step = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
    rtol = step[SPECS[name].dtype]  # where a sum's last bit may tip it
    for key, tensor in ours.items():
        np.testing.assert_allclose(theirs[key], tensor, rtol=rtol, atol=2e-6, err_msg=key)
    changed = {key for key in before if not np.array_equal(before[key], ours[key])}
    experts = {key for key in before if ".experts." in key and not key.endswith("_bias")}
    assert experts and experts <= changed
    frozen = ("mlp.gate.weight", "mlp.router.weight", "_expert_gate.weight", "bias", "sinks")
    assert not any(key.endswith(frozen) for key in changed)


@pytest.mark.parametrize("name", NAMES)
def test_the_cookbooks_peft_adapter_of_it_is_the_adapter(name: str, tmp_path: Path) -> None:
    """There each expert has its own A and B, of which some are alike."""
    base = base_of(name)
    adapter = saved(base, tmp_path / "a", unembed=not SPECS[name].config["tie_word_embeddings"])
    paths = {"base_model": base, "adapter_path": tmp_path / "a", "output_path": tmp_path / "peft"}
    cookbook.build_lora_adapter(**{key: str(path) for key, path in paths.items()})
    tensors = read(tmp_path / "peft", checkpoint.ADAPTER_FILE)
    assert any(".experts.3.up_proj.lora_B" in key for key in tensors)
    again = peft.load_adapter(tmp_path / "peft", opened(base), optimizer=False)
    np.testing.assert_array_equal(again.read("weights"), adapter.read("weights"))
    export(base, tmp_path / "a", tmp_path / "one")
    export(base, tmp_path / "peft", tmp_path / "other")
    one, other = read(tmp_path / "one"), read(tmp_path / "other")
    for key, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[key], err_msg=key)


@pytest.mark.parametrize("name", ("qwen3_moe", "qwen3_5_moe", "gpt_oss"))
def test_transformers_computes_the_adapters_logprobs_from_the_cookbooks_merged_folder(
    name: str, tmp_path: Path
) -> None:
    base = folder(name)
    adapter = saved(base, tmp_path / "a")
    paths = {"base_model": base, "adapter_path": tmp_path / "a", "output_path": tmp_path / "out"}
    cookbook.build_hf_model(**{key: str(path) for key, path in paths.items()})
    one = datum(tokens_of(name, 70))
    with torch.no_grad():
        wanted = targets_of(logprobs(as_double(tmp_path / "out"), one.tokens), one).numpy()
    (found,), _ = call(adapter, [one], backward=False)
    assert np.abs(found - wanted).max() < 5e-5
    assert error(table(opened(base).core, name)[:60], wanted[:60]) > 0.02


STEM = "base_model.model.model.layers.0.mlp.experts"


def spoiled(tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    """The cookbook's PEFT adapter of one of qwen3_moe, with other tensors."""
    base = folder("qwen3_moe")
    saved(base, tmp_path / "a", attn=False)
    paths = {"base_model": base, "adapter_path": tmp_path / "a", "output_path": tmp_path / "p"}
    cookbook.build_lora_adapter(**{key: str(path) for key, path in paths.items()})
    tensors = read(tmp_path / "p", checkpoint.ADAPTER_FILE)
    change(tensors)
    safetensors.numpy.save_file(tensors, tmp_path / "p" / checkpoint.ADAPTER_FILE)
    return tmp_path / "p"


def test_experts_that_have_not_one_factor_in_common_are_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{STEM}.5.gate_proj.lora_A.weight"][1, 2] += 1

    path = spoiled(tmp_path, change)
    with pytest.raises(ValueError, match=r"which differ: all experts of a layer have this matrix"):
        peft.load_adapter(path, loaded("qwen3_moe"), optimizer=False)
    assert export(folder("qwen3_moe"), path, tmp_path / "out") > 0  # a merge needs nothing alike


def test_an_adapter_of_some_experts_is_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for letter in "AB":
            del tensors[f"{STEM}.5.down_proj.lora_{letter}.weight"]

    path = spoiled(tmp_path, change)
    with pytest.raises(ValueError, match=r"but not all experts of layer 0: tinsmith trains all or"):
        peft.load_adapter(path, loaded("qwen3_moe"), optimizer=False)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ((7, 21, 4), r"lora_B\.weight: file has \(7, 21, 4\), the adapter needs \(8, 21, 4\)"),
        ((8, 21, 3), r"experts\.w1 has \(1, 4, 34\) and \(8, 21, 3\), which are not of rank 4"),
        ((21, 4), r"experts\.w1 has \(1, 4, 34\) and \(21, 4\), which are not of rank 4"),
    ],
)
def test_experts_of_another_shape_are_refused(
    shape: tuple[int, ...], sentence: str, tmp_path: Path
) -> None:
    saved(folder("qwen3_moe"), tmp_path / "a")
    (tmp_path / "a" / "meta.json").unlink()
    file = tmp_path / "a" / checkpoint.ADAPTER_FILE
    tensors = safetensors.numpy.load_file(file)
    tensors[f"{STEM}.w1.lora_B.weight"] = np.ones(shape, np.float32)
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(ValueError, match=sentence):
        peft.load_adapter(tmp_path / "a", loaded("qwen3_moe"), optimizer=False)


def test_an_adapter_whose_stack_is_empty_is_not_merged(tmp_path: Path) -> None:
    """It raised IndexError."""
    saved(folder("qwen3_moe"), tmp_path / "a")
    (tmp_path / "a" / "meta.json").unlink()
    file = tmp_path / "a" / checkpoint.ADAPTER_FILE
    tensors = safetensors.numpy.load_file(file)
    tensors[f"{STEM}.w1.lora_B.weight"] = tensors[f"{STEM}.w1.lora_B.weight"][:0]
    safetensors.numpy.save_file(tensors, file)
    path = make(Spec("qwen3_moe", SPECS["qwen3_moe"].config | {"num_experts": 1}), tmp_path / "one")
    with pytest.raises(ValueError, match=r"w1 has \(1, .*\) and \(0, .*\): one of them is empty"):
        export(path, tmp_path / "a", tmp_path / "out")


def test_an_adapter_of_another_number_of_experts_is_not_merged(tmp_path: Path) -> None:
    path = make(
        Spec("qwen3_moe", SPECS["qwen3_moe"].config | {"num_experts": 6}), tmp_path / "other"
    )
    saved(folder("qwen3_moe"), tmp_path / "a")
    with pytest.raises(ValueError, match=r"w1 is 8 matrices in the adapter, and 6 in .*other"):
        export(path, tmp_path / "a", tmp_path / "out")
