"""Who may compute for an owner: a replica that would give other bits is refused, with why."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.replica_crew import replicated
from support.waiting import until
from tinsmith import _core
from tinsmith.engine.bases import inspect_models
from tinsmith.engine.decoding import SampleRequest
from tinsmith.formats import safetensors_io
from tinsmith.models.registry import load_model
from tinsmith.replicas import identity

NARROW = "generic"
needs_sets = pytest.mark.skipif(
    _core.computes_with("cpu") == NARROW, reason="this processor has one instruction set only"
)


def refusal(**settings) -> str:
    """Why a replica is refused."""
    with pytest.raises(RuntimeError) as refused, replicated(2, **settings):
        pass
    return str(refused.value)


@needs_sets
def test_another_instruction_set_is_refused_with_both(tiny_model_dir, monkeypatch) -> None:
    monkeypatch.setenv("TINSMITH_ISA", NARROW)  # the children's: this process has read it
    said, own = refusal(models={"tiny": tiny_model_dir}), _core.computes_with("cpu")
    assert said.startswith("replica 2 (cpu, 1 thread) is refused, because it would give other bits")
    assert f"its instruction set is {NARROW}, and the owner's is {own}" in said
    assert "--isa" in said and "--mixed" in said


@needs_sets
def test_mixed_bits_are_accepted_on_request_and_said(tiny_model_dir, monkeypatch, caplog) -> None:
    monkeypatch.setenv("TINSMITH_ISA", NARROW)
    caplog.set_level(logging.INFO, "tinsmith")
    with replicated(2, {"tiny": tiny_model_dir}, mixed=True) as found:
        assert [one.state for one in found.crew.all] == ["other bits"]
        assert found.crew.replicas[0].bases == {"tiny"}
        found.send_all_to(0)
        found.worker.sample("tiny", SampleRequest(np.asarray([5], np.int32), max_tokens=2)).result()
        until(lambda: "replica 2: " in caplog.text)  # its log's lines come here
    said = [record.getMessage() for record in caplog.records]
    assert any("gives other bits, as --mixed allows: its instruction set" in one for one in said)
    assert "replica 2 of 2: cpu, 1 thread, other bits" in said


def test_other_weights_are_refused_even_if_mixed(tiny_model_dir, tmp_path) -> None:
    """One number of them is enough."""
    other = tmp_path / "other"
    shutil.copytree(tiny_model_dir, other)
    file = other / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    models = {"tiny": tiny_model_dir}
    for mixed in (False, True):
        said = refusal(models=models, theirs={"tiny": other}, mixed=mixed)
        assert "its weights of tiny is " in said and "--mixed" not in said


def test_another_probe_is_refused(tiny_model_dir, monkeypatch) -> None:
    """Though all that is known of the two is equal."""
    probe = identity.probe
    monkeypatch.setattr(identity, "probe", lambda *of: {"probe": probe(*of)["probe"][::-1]})
    said = refusal(models={"tiny": tiny_model_dir})
    assert "its probe is " in said and "--mixed accepts other bits" in said


def test_other_code_is_another_identity(tiny_model_dir) -> None:
    models = inspect_models({"tiny": tiny_model_dir})
    own = identity.identity(models, "cpu")
    assert identity.differences(own, own) == []
    changed = {**own, "code": "0", "instruction set": "amx"}
    assert identity.differences(own, changed, mixed=True) == [
        f"its code is 0, and the owner's is {own['code']}"
    ]
    assert len(identity.differences(own, changed)) == 2


def test_a_probe_shows_a_change_of_any_matrix(tiny_model_dir, tmp_path) -> None:
    """It computes with all weights, though of the embedding only with its tokens' rows."""

    def probed(folder: Path) -> str:
        return identity.probe(load_model(folder, threads=1), 512)["probe"]

    own, found = probed(tiny_model_dir), []
    names = ["model.layers.1.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"]
    for number, name in enumerate(names):
        other = tmp_path / str(number)
        shutil.copytree(tiny_model_dir, other)
        with safetensors_io.open_folder(other) as tensors:
            arrays = {key: np.array(array) for key, array in tensors.items()}
        arrays[name].flat[0] += 0.5
        safetensors_io.write(other / "model.safetensors", arrays)
        found.append(probed(other))
    assert own not in found and probed(tiny_model_dir) == own
