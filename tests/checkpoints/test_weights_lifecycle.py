"""Trained here, taken away by the cookbook: weights.download, build_lora_adapter, build_hf_model.

What comes out is a model that transformers loads, and its log-probabilities are the server's.
"""

import base64
import json
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import tinsmith
import torch
from conftest import logprobs, make_datum
from safetensors.torch import load_file
from support import tiny_models
from tinker_cookbook import weights
from tinker_cookbook.exceptions import WeightsMergeError
from tinsmith.checkpoints import checkpoint
from tinsmith.checkpoints.export import export
from tinsmith.checkpoints.store import Store
from transformers import AutoModelForCausalLM

TOKENS = [5, 17, 40, 41, 9, 77, 120, 3]
PARTS = {
    "all": {},
    "attention": {"train_mlp": False, "train_unembed": False},
    "mlp": {"train_attn": False, "train_unembed": False},
}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")


def train(service_client: tinker.ServiceClient, **switches: bool) -> tinker.TrainingClient:
    """A run whose adapter is not what it began with."""
    client = service_client.create_lora_training_client("tiny", rank=4, seed=1, **switches).result()
    datum = make_datum(TOKENS[:-1], TOKENS[1:])
    for _ in range(3):
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    return client


@pytest.mark.parametrize("part", PARTS)
def test_the_cookbooks_merged_model_scores_as_the_server_does(
    part: str, server, service_client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    client = train(service_client, **PARTS[part])
    path = client.save_weights_external("final").result().path
    adapter = tmp_path / "adapter"
    weights.download(tinker_path=path, output_dir=str(adapter), base_url=server.url)
    merged = tmp_path / "merged"
    weights.build_hf_model(
        base_model=str(tiny_model_dir), adapter_path=str(adapter), output_path=str(merged)
    )
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    with torch.no_grad():
        scores = model(torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)
    expected = scores[range(len(TOKENS) - 1), TOKENS[1:]].numpy()
    result = client.forward([make_datum(TOKENS[:-1], TOKENS[1:])], "cross_entropy").result()
    np.testing.assert_allclose(logprobs(result)[0], expected, atol=2e-4)


def test_the_cookbook_makes_an_adapter_for_peft_and_vllm(
    server, service_client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    client = train(service_client, train_unembed=False)
    path = client.save_weights_external("final").result().path
    adapter = tmp_path / "adapter"
    weights.download(tinker_path=path, output_dir=str(adapter), base_url=server.url)
    built = tmp_path / "built"
    weights.build_lora_adapter(
        base_model=str(tiny_model_dir), adapter_path=str(adapter), output_path=str(built)
    )
    ours = load_file(adapter / checkpoint.ADAPTER_FILE)
    theirs = load_file(built / checkpoint.ADAPTER_FILE)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name].to(theirs[name].dtype), theirs[name]) for name in ours)
    assert json.loads((built / checkpoint.CONFIG_FILE).read_text())["r"] == 4


def test_the_cookbook_refuses_a_tied_models_trained_head_and_export_merges_it(
    tmp_path: Path,
) -> None:
    base, adapter = tiny_models.folder("llama-tied"), str(tmp_path / "a")
    tokens = tiny_models.tokens_of("llama-tied", 20)
    with tinsmith.Model(base, device="cpu") as model:
        made = model.lora(rank=2)
        tiny_models.randomize(made.core)
        made.save(adapter)
        wanted = model.logprobs(tokens, adapter=made)
    with pytest.raises(WeightsMergeError, match=r"lm_head\.weight.* does not exist"):
        weights.build_hf_model(
            base_model=str(base), adapter_path=adapter, output_path=str(tmp_path / "theirs")
        )
    export(base, tmp_path / "a", tmp_path / "ours")
    scores = tiny_models.logprobs(tiny_models.as_double(tmp_path / "ours"), tokens)
    found = scores[range(len(tokens) - 1), tokens[1:]].detach().numpy()
    np.testing.assert_allclose(wanted, found, atol=1e-4)


def test_a_training_state_is_downloaded_through_an_encrypted_export(
    server, service_client, tmp_path: Path
) -> None:
    client = train(service_client)
    path = client.save_state("state").result().path
    weights.download(tinker_path=path, output_dir=str(tmp_path), base_url=server.url)
    stored = Store(server.checkpoints).folder(path)
    for name in (checkpoint.ADAPTER_FILE, checkpoint.CONFIG_FILE):
        assert (tmp_path / name).read_bytes() == (stored / name).read_bytes()
    assert not list(server.checkpoints.glob("*/external_weights/download"))  # it was taken away


def test_an_encrypted_export_is_readable_by_its_owners_only(
    server, service_client, tmp_path: Path
) -> None:
    import pyrage

    *owners, other = (pyrage.x25519.Identity.generate() for _ in range(3))
    client = train(service_client)
    keys = [str(owner.to_public()) for owner in owners]
    path = client.save_weights_external("mine", age_encryption_recipients=keys).result().path
    urls = service_client.create_rest_client().get_external_weights_urls(path).result().urls
    assert set(urls) == {name + ".age" for name in (checkpoint.ADAPTER_FILE, "adapter_config.json")}
    sealed = httpx.get(urls["adapter_config.json.age"]).content
    assert b"LORA" not in sealed
    for owner in owners:
        assert json.loads(pyrage.decrypt(sealed, [owner]))["peft_type"] == "LORA"
    folder = Store(server.checkpoints).folder(path)
    assert {file.name for file in folder.iterdir()} == {*urls, checkpoint.META_FILE}
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(sealed, [other])
    with pytest.raises(tinker.RequestFailedError, match="is encrypted: decrypt its files"):
        service_client.create_training_client_from_state(path).result()


def part(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


# A key of SSH's, whose exponent is zero. age's own code ends with a panic there.
NO_EXPONENT = "ssh-rsa " + base64.b64encode(
    part(b"ssh-rsa") + part(b"") + part(b"\1" * 256)
).decode()  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (["age1abc"], "'age1abc' is not a public key"),
        (["age1"] * 11, "at most 10 age recipients"),
        ([NO_EXPONENT], "'ssh-rsa .* is not a public key for age"),
    ],
)
def test_bad_recipients_are_refused_before_anything_is_written(
    keys: list[str], sentence: str, server, service_client
) -> None:
    client = service_client.create_lora_training_client("tiny", rank=2).result()
    with pytest.raises(tinker.RequestFailedError, match=sentence):
        client.save_weights_external("never", age_encryption_recipients=keys).result()
    client.save_state("next").result()  # its turn has come
    assert not list(server.checkpoints.glob("*/external_weights/never*"))
