"""A family whose tensors have names of their own: loading, checkpoints, export and PEFT's folders
take them from its row. No family of today differs there from Llama, so a row that does is added.
"""

import dataclasses
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny_models import call, datum, folder, loaded, randomize, tokens_of
from tinsmith import _core
from tinsmith.checkpoints import checkpoint, peft
from tinsmith.checkpoints.export import export
from tinsmith.formats import safetensors_io
from tinsmith.models import registry
from tinsmith.models.architecture import LLAMA_NAMES
from transformers import AutoModelForCausalLM

NAME = "llama-tied"
OTHER = {
    "embed": "transformer.tokens.weight",
    "final_norm": "transformer.last.weight",
    "head": "output.weight",
    "attn_norm": "transformer.{layer}.before_attention.weight",
    "wq": "transformer.{layer}.attention.query.weight",
    "wk": "transformer.{layer}.attention.key.weight",
    "wv": "transformer.{layer}.attention.value.weight",
    "wo": "transformer.{layer}.attention.out.weight",
    "mlp_norm": "transformer.{layer}.before_swiglu.weight",
    "w_gate": "transformer.{layer}.swiglu.gate.weight",
    "w_up": "transformer.{layer}.swiglu.up.weight",
    "w_down": "transformer.{layer}.swiglu.down.weight",
}
META = checkpoint.Meta(
    "other", 3, 9.0, 0, True, True, True, "weights", 0, {}, "2026-11-21T12:00:00+00:00", None
)


def other_names(text: str) -> str:
    """A tensor's or a matrix's name in the other family."""
    for layer in range(3):
        for slot, name in OTHER.items():
            llamas = LLAMA_NAMES[slot].format(layer=layer).removesuffix(".weight")
            if f".{llamas}." in f".{text}":
                return text.replace(llamas, name.format(layer=layer).removesuffix(".weight"))
    raise KeyError(text)


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder under the other names, in a family of their own."""
    llama = loaded(NAME).family
    row = dataclasses.replace(llama, name="other", architecture="OtherForCausalLM", names=OTHER)
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, row))
    path = tmp_path / "other"
    shutil.copytree(folder(NAME), path)
    with safetensors_io.open_folder(folder(NAME)) as tensors:
        renamed = {other_names(name): tensors[name].copy() for name in tensors}
    safetensors_io.write(path / "model.safetensors", renamed)
    content = json.loads((path / "config.json").read_text())
    content["architectures"] = ["OtherForCausalLM"]
    (path / "config.json").write_text(json.dumps(content))
    return path


def scores(core: _core.Model, adapter: _core.Adapter | None = None) -> np.ndarray:
    """The log-probabilities of some tokens."""
    used = adapter or _core.Adapter(core, rank=1)
    return call(used, [datum(tokens_of(NAME, 30))], backward=False)[0][0]


def test_a_checkpoint_has_the_familys_names_and_is_read_by_them(
    other: Path, tmp_path: Path
) -> None:
    model = registry.load_model(other, threads=1)
    np.testing.assert_array_equal(scores(model.core), scores(loaded(NAME).core))
    adapter = randomize(_core.Adapter(model.core, rank=3, alpha=9.0))
    checkpoint.save(tmp_path / "a", model.family, adapter, META, optimizer=True)
    with safetensors_io.open_file(tmp_path / "a" / checkpoint.ADAPTER_FILE) as tensors:
        wanted = {name.removesuffix(".weight") for name in OTHER.values() if "before" not in name}
        wanted -= {"transformer.tokens", "transformer.last"}
        modules = {
            name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors
        }
        assert modules == {name.format(layer=layer) for name in wanted for layer in range(3)}
    said = json.loads((tmp_path / "a" / checkpoint.CONFIG_FILE).read_text())
    assert said["target_modules"] == [
        "query", "key", "value", "out", "gate", "up", "down", "output",
    ]  # fmt: skip
    again = checkpoint.load_adapter(tmp_path / "a", model, optimizer=True)
    np.testing.assert_array_equal(again.read("weights"), adapter.read("weights"))
    with pytest.raises(ValueError, match="is for other matrices"):
        checkpoint.load_adapter(tmp_path / "a", loaded(NAME), optimizer=True)


def test_an_export_has_the_familys_names(other: Path, tmp_path: Path) -> None:
    model = registry.load_model(other, threads=1)
    adapter = randomize(_core.Adapter(model.core, rank=3, alpha=9.0))
    checkpoint.save(tmp_path / "a", model.family, adapter, META, optimizer=False)
    export(other, tmp_path / "a", tmp_path / "out")
    with safetensors_io.open_folder(tmp_path / "out") as tensors:  # the head was tied and trained
        assert set(tensors) == {
            name.format(layer=layer) for name in OTHER.values() for layer in range(3)
        }
    merged = registry.load_model(tmp_path / "out", threads=1)
    np.testing.assert_allclose(scores(merged.core), scores(model.core, adapter), atol=1e-3)


def test_a_folder_of_pefts_has_the_familys_names(other: Path, tmp_path: Path) -> None:
    """Written by PEFT for the model as Llama names it, then renamed."""
    base = AutoModelForCausalLM.from_pretrained(folder(NAME))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"])
        model = get_peft_model(base, settings)
        with torch.no_grad():
            for key, matrix in model.named_parameters():
                if "lora_" in key:
                    matrix.copy_(0.2 * torch.randn(matrix.shape))
        model.save_pretrained(tmp_path / "llamas")
    shutil.copytree(tmp_path / "llamas", tmp_path / "others")
    with safetensors_io.open_file(tmp_path / "llamas" / checkpoint.ADAPTER_FILE) as tensors:
        renamed = {other_names(name): tensors[name].copy() for name in tensors}
    safetensors_io.write(tmp_path / "others" / checkpoint.ADAPTER_FILE, renamed)
    meta = peft.load_meta(tmp_path / "others")
    assert (meta.attn, meta.mlp, meta.unembed) == (True, True, False)
    own = registry.load_model(other, threads=1)
    found = peft.load_adapter(tmp_path / "others", own, optimizer=False)
    wanted = peft.load_adapter(tmp_path / "llamas", loaded(NAME), optimizer=False)
    assert found.read("weights").any()
    np.testing.assert_array_equal(found.read("weights"), wanted.read("weights"))
