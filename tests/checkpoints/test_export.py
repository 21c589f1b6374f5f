"""Adapters that leave and come: merged into their base models, and PEFT's as training states."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from conftest import logprobs as returned
from conftest import make_datum
from peft import LoraConfig, PeftModel, get_peft_model
from support.expert_models import united
from support.tiny_models import (
    SPECS,
    as_double,
    call,
    datum,
    error,
    folder,
    in_double,
    in_transformers,
    joined,
    loaded,
    logprobs,
    randomize,
    tokens_of,
    with_peft,
)
from tinsmith import _core
from tinsmith.checkpoints import checkpoint, peft
from tinsmith.checkpoints.export import export
from tinsmith.checkpoints.lora import factors
from tinsmith.checkpoints.store import Store
from tinsmith.formats import safetensors_io
from tinsmith.models import registry
from transformers import AutoTokenizer

TIED = [name for name in SPECS if SPECS[name].config["tie_word_embeddings"]]


def saved(name: str, path: Path, **options: Any) -> _core.Adapter:
    """A random adapter, and its checkpoint."""
    adapter = randomize(_core.Adapter(loaded(name).core, rank=4, alpha=9.0, **options))
    groups = {group: options.get(group, True) for group in ("attn", "mlp", "unembed")}
    meta = checkpoint.Meta(
        str(folder(name)), 4, 9.0, 0, **groups, kind="weights", step=0, user_metadata={},
        created="2026-11-21T12:00:00+00:00", ttl_seconds=None,
    )  # fmt: skip
    checkpoint.save(path, loaded(name).family, adapter, meta, optimizer=True)
    return adapter


def made_by_peft(name: str, path: Path, **options: Any) -> PeftModel:
    """A folder that PEFT itself has written, with B not zero."""
    settings = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"], **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(as_double(folder(name)), LoraConfig(**settings)).double().eval()
        with torch.no_grad():
            for key, matrix in model.named_parameters():
                if "lora_" in key:
                    matrix.copy_((0.2 * torch.randn(matrix.shape)).float())
        model.float().save_pretrained(path)
    return model.double()


# ---- merged ----


@pytest.mark.parametrize("unembed", (True, False))
@pytest.mark.parametrize("name", SPECS)
def test_a_merged_model_gives_the_adapters_logits(
    name: str, unembed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft, "ROWS", 50)  # of a matrix at a time, which here has more
    adapter = saved(name, tmp_path / "a", unembed=unembed)
    assert export(folder(name), tmp_path / "a", tmp_path / "out") == len(factors(adapter)) // 2
    tokens = tokens_of(name, 40)
    wanted = logprobs(with_peft(name, adapter), tokens).detach()
    found = logprobs(as_double(tmp_path / "out"), tokens).detach()
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
    assert error(found, wanted) < tolerance[SPECS[name].dtype]
    assert error(logprobs(as_double(folder(name)), tokens).detach(), wanted) > 0.02
    merged = in_transformers(tmp_path / "out", "auto")
    assert merged.dtype == SPECS[name].dtype
    assert merged.config.tie_word_embeddings == (name in TIED and not unembed)
    # Each tensor is the exact sum, rounded once; what has no matrices is bit for bit the same.
    base = in_transformers(folder(name), "auto").state_dict()
    exact = joined(united(with_peft(name, adapter).merge_and_unload()).state_dict())
    if name in TIED:  # PEFT merges a head's matrices into the embedding too, which it shares
        exact["model.embed_tokens.weight"] = base["model.embed_tokens.weight"].double()
    for key, tensor in merged.state_dict().items():
        if torch.equal(exact[key], base[key].double()):
            assert torch.equal(tensor, base[key]), key
        else:
            distance = (tensor.double() - exact[key]).abs()
            step = torch.finfo(tensor.dtype).eps * exact[key].abs().clamp(min=1e-2)
            assert (distance <= 0.51 * step + 2e-7).all(), key
    again = registry.load_model(tmp_path / "out", threads=1)  # and it is a base model here too
    plain = _core.Adapter(again.core, rank=1)
    one = datum(tokens)
    (engine,), _ = call(plain, [one], backward=False)
    assert error(engine, logprobs(in_double(merged.double()), tokens).detach().gather(
        1, torch.from_numpy(one.targets.astype(np.int64))[:, None])[:, 0]) < 1e-4  # fmt: skip


def test_the_rest_of_the_folder_is_copied(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    base = registry.load_model(folder, threads=1)
    adapter = randomize(_core.Adapter(base.core, rank=2))
    meta = checkpoint.Meta(
        "tiny", 2, 32.0, 0, True, True, True, "weights", 0, {}, "2026-11-21T12:00:00+00:00", None
    )
    checkpoint.save(tmp_path / "a", base.family, adapter, meta, optimizer=False)
    export(folder, tmp_path / "a", tmp_path / "out")
    made, given = (
        {file.relative_to(root) for file in root.rglob("*")} for root in (tmp_path / "out", folder)
    )
    assert made == given
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer.encode("the dog")) == "the dog"


@pytest.mark.parametrize("rslora", (False, True))
def test_peft_and_we_agree_on_pefts_own_folder(rslora: bool, tmp_path: Path) -> None:
    model = made_by_peft("qwen3", tmp_path / "p", use_rslora=rslora)
    wanted = logprobs(model, tokens_of("qwen3", 30)).detach()
    export(folder("qwen3"), tmp_path / "p", tmp_path / "out")
    assert error(logprobs(as_double(tmp_path / "out"), tokens_of("qwen3", 30)).detach(), wanted) < (
        1e-6
    )
    adapter = peft.load_adapter(tmp_path / "p", loaded("qwen3"), optimizer=False)
    one = datum(tokens_of("qwen3", 30))
    (found,), _ = call(adapter, [one])
    picked = wanted.gather(1, torch.from_numpy(one.targets.astype(np.int64))[:, None])[:, 0]
    assert error(found, picked) < 1e-5
    # k_proj and o_proj, which PEFT's adapter lacks, have matrices of zeros that stay zeros.
    adapter.optim_step(
        learning_rate=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.0
    )
    for key, matrix in checkpoint.matrices(
        loaded("qwen3").family, adapter, adapter.read("weights")
    ):
        assert matrix.any() == ("q_proj" in key or "v_proj" in key), key


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', with which PEFT changes"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq', with which PEFT changes"),
        ({"alora_invocation_tokens": [3]}, r"alora_invocation_tokens is \[3\], which is not supp"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"r": 5}, "not of rank 5"),
        ({"lora_alpha": None}, "should be a positive"),
        ({"lora_alpha": 1e-320}, "should be a positive"),
    ],
)
def test_what_pefts_folders_may_not_have(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    made_by_peft("qwen3", tmp_path / "p")
    file = tmp_path / "p" / checkpoint.CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    for use in (
        lambda: export(folder("qwen3"), tmp_path / "p", tmp_path / "out"),
        lambda: peft.load_adapter(tmp_path / "p", loaded("qwen3"), optimizer=False),
    ):
        with pytest.raises(ValueError, match=sentence):
            use()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["p"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"target_modules": ["q_proj", "embed_tokens"]},
            r"trains an embedding \(.*embed_to",
        ),
        ({"modules_to_save": ["embed_tokens"]}, r"modules_to_save is \['embed_tokens'\]"),
        ({"trainable_token_indices": [1, 2]}, r"trainable_token_indices is \[1, 2\], which"),
        ({}, r"has .*lm_head\.weight, a whole matrix; .* save_embedding_layers=False"),
    ],
)
def test_an_adapter_of_the_embedding_is_told_so(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    settings = {"r": 2, "target_modules": ["q_proj"]} | settings
    made = get_peft_model(as_double(folder("qwen3")).float(), LoraConfig(**settings))
    made.save_pretrained(tmp_path, save_embedding_layers=True)
    for use in (peft.load_meta, lambda place: peft.load(place, loaded("qwen3"), optimizer=False)):
        with pytest.raises(ValueError, match=sentence):
            use(tmp_path)


@pytest.mark.parametrize("begins", ["gaussian", "orthogonal", True])
def test_adapters_that_began_otherwise_are_read(begins: Any, tmp_path: Path) -> None:
    tokens = tokens_of("qwen3", 40)
    wanted = logprobs(made_by_peft("qwen3", tmp_path / "p", r=4, init_lora_weights=begins), tokens)
    adapter = peft.load_adapter(tmp_path / "p", loaded("qwen3"), optimizer=False)
    one = datum(tokens)
    (found,), _ = call(adapter, [one], backward=False)
    index = torch.from_numpy(one.targets.astype(np.int64))[:, None]
    assert error(found, wanted.detach().gather(1, index)[:, 0]) < 1e-5


def test_a_base_weight_in_an_adapters_file_is_named(tmp_path: Path) -> None:
    made_by_peft("qwen3", tmp_path / "p")
    with safetensors_io.Tensors([tmp_path / "p" / checkpoint.ADAPTER_FILE]) as tensors:
        found = {name: tensors[name].copy() for name in tensors}
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    found[name] = np.ones((60, 36), np.float32)
    safetensors_io.write(tmp_path / "p" / checkpoint.ADAPTER_FILE, found)
    with pytest.raises(ValueError, match=f"has {name}, a whole matrix; only LoRA's A and B"):
        peft.load_adapter(tmp_path / "p", loaded("qwen3"), optimizer=False)


def test_all_of_a_merged_model_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("qwen3", tmp_path / "a")
    synced, fsync = set(), os.fsync

    def seen(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    export(folder("qwen3"), tmp_path / "a", tmp_path / "out")
    files = list((tmp_path / "out").iterdir())
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {file.name for file in files}
    for place in (*files, tmp_path / "out", tmp_path):
        assert place.stat().st_ino in synced, place


def test_pefts_folder_leaves_nothing_of_an_adapters_training(tmp_path: Path) -> None:
    made_by_peft("qwen3", tmp_path / "p")
    wanted, found = (
        peft.load_adapter(tmp_path / "p", loaded("qwen3"), optimizer=False) for _ in range(2)
    )
    for _ in range(2):
        call(found, [datum(tokens_of("qwen3", 9))])
        found.optim_step(
            learning_rate=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0, grad_clip_norm=0
        )
    call(found, [datum(tokens_of("qwen3", 9))])
    peft.load_into(tmp_path / "p", loaded("qwen3").family, found, optimizer=False)
    for what in ("weights", "gradients", "m", "v"):
        np.testing.assert_array_equal(found.read(what), wanted.read(what))
    assert (found.step, found.pending) == (wanted.step, wanted.pending) == (0, (0.0, 0.0, 0.0))


@pytest.mark.parametrize(("rank", "alpha"), [(3, 8.0), (4, 7.0)])
def test_pefts_folder_of_another_rank_or_alpha_is_refused(
    rank: int, alpha: float, tmp_path: Path
) -> None:
    made_by_peft("qwen3", tmp_path / "p")
    adapter = _core.Adapter(loaded("qwen3").core, rank=rank, alpha=alpha, mlp=False, unembed=False)
    told = f"has rank 3 and alpha 7, this adapter has {rank} and {alpha:g}"
    with pytest.raises(ValueError, match=told):
        peft.load_into(tmp_path / "p", loaded("qwen3").family, adapter, optimizer=False)


def test_an_adapter_of_another_model_is_a_sentence(tmp_path: Path) -> None:
    made_by_peft("qwen3", tmp_path / "p")
    with pytest.raises(ValueError, match="it belongs to another model"):
        export(folder("llama"), tmp_path / "p", tmp_path / "out")
    with pytest.raises(ValueError, match=r"file has .* the adapter needs"):
        peft.load_adapter(tmp_path / "p", loaded("llama"), optimizer=False)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["p"]


# ---- through the command and the SDK ----


def run_cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinsmith.cli", "export", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_trained_run_is_exported_and_comes_back(
    server, service_client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    client = service_client.create_lora_training_client("tiny", rank=4, seed=1).result()
    data = [make_datum([11, 12, 13], [12, 13, 14], weights=[1, 1, 1])]
    client.forward_backward(data, "cross_entropy")
    client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    wanted = returned(client.forward(data, "cross_entropy").result())[0]
    path = client.save_state("done").result().path
    options = ("--checkpoints", server.checkpoints)
    done = run_cli(tiny_model_dir, path, tmp_path / "out", *options)
    assert done.returncode == 0 and "matrices of" in done.stdout, done.stderr
    table = logprobs(as_double(tmp_path / "out"), np.array([11, 12, 13])).detach()
    np.testing.assert_allclose(table[range(3), [12, 13, 14]], wanted, atol=1e-5)
    for arguments, sentence in (
        ((tiny_model_dir, path, tmp_path / "out", *options), "exists; choose another folder"),
        ((tiny_model_dir, path + "x", tmp_path / "b", *options), "there is no checkpoint"),
        ((tiny_model_dir, tiny_model_dir, tmp_path / "b"), "has no adapter_config.json"),
    ):
        bad = run_cli(*arguments)
        assert bad.returncode == 1 and sentence in bad.stderr, bad.stderr
        assert "Traceback" not in bad.stderr
    # PEFT's two files alone, as they are downloaded, are a training state too.
    stored = Store(server.checkpoints).folder(path)
    (tmp_path / "peft").mkdir()
    for name in (checkpoint.ADAPTER_FILE, checkpoint.CONFIG_FILE):
        (tmp_path / "peft" / name).write_bytes((stored / name).read_bytes())
    start = service_client.create_training_client_from_state
    fresh = start(str(tmp_path / "peft")).result()
    np.testing.assert_array_equal(
        returned(fresh.forward(data, "cross_entropy").result())[0], wanted
    )
    assert fresh.get_info().lora_rank == 4
    with pytest.warns(FutureWarning):
        client.load_state(str(tmp_path / "peft")).result()
    resume = service_client.create_training_client_from_state_with_optimizer
    with pytest.raises(tinker.RequestFailedError, match="without an optimizer's state"):
        resume(str(tmp_path / "peft")).result()
    with pytest.raises(tinker.RequestFailedError, match="is not a checkpoint's path"):
        start(str(tmp_path / "nothing")).result()
