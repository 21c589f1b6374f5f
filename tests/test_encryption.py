"""External weights that are encrypted with age: decrypted by the client, unreadable here."""

import subprocess
import sys
from pathlib import Path

import httpx
import pyrage
import pytest
import tinker
from tinker_cookbook import weights as cookbook
from tinsmith import checkpoint, encryption


@pytest.fixture
def training(service_client):
    return service_client.create_lora_training_client("tiny", rank=4, seed=1).result()


@pytest.fixture
def rest(server):
    return tinker.RestClient(base_url=server.url, api_key="tml-local")


def folder_of(server, path: str) -> Path:
    return checkpoint.Store(server.checkpoints).folder(path)


def test_each_recipient_decrypts_what_would_have_been_plain(server, training, rest):
    people = [pyrage.x25519.Identity.generate() for _ in range(2)]
    keys = [str(one.to_public()) for one in people]
    plain = training.save_weights_external("plain").result().path
    secret = training.save_weights_external("secret", age_encryption_recipients=keys).result().path
    names = {checkpoint.ADAPTER_FILE, checkpoint.CONFIG_FILE}
    stored = {file.name for file in folder_of(server, secret).iterdir()}
    assert stored == {name + ".age" for name in names} | {checkpoint.META_FILE}
    urls = rest.get_external_weights_urls(secret).result().urls
    assert set(urls) == {name + ".age" for name in names}
    for name in names:
        wanted = (folder_of(server, plain) / name).read_bytes()
        packed = httpx.get(urls[name + ".age"]).content
        assert packed.startswith(b"age-encryption.org/v1") and wanted[:64] not in packed
        for person in people:
            assert pyrage.decrypt(packed, [person]) == wanted
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(packed, [pyrage.x25519.Identity.generate()])


def test_an_ssh_key_is_a_recipient(server, training, tmp_path):
    key = tmp_path / "key"
    try:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    except FileNotFoundError:
        pytest.skip("there is no ssh-keygen")
    public = key.with_suffix(".pub").read_text().strip()
    path = training.save_weights_external("ssh", age_encryption_recipients=[public]).result().path
    packed = (folder_of(server, path) / (checkpoint.CONFIG_FILE + ".age")).read_bytes()
    identity = pyrage.ssh.Identity.from_buffer(key.read_bytes())
    assert b'"peft_type": "LORA"' in pyrage.decrypt(packed, [identity])


def test_the_cookbook_downloads_a_training_checkpoint(server, training, tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    path = training.save_state("state").result().path
    cookbook.download(tinker_path=path, output_dir=str(tmp_path), base_url=server.url)
    for name in (checkpoint.ADAPTER_FILE, checkpoint.CONFIG_FILE):
        assert (tmp_path / name).read_bytes() == (folder_of(server, path) / name).read_bytes()


def test_what_is_encrypted_can_not_be_loaded_here(training, service_client):
    key = str(pyrage.x25519.Identity.generate().to_public())
    path = training.save_weights_external("own", age_encryption_recipients=[key]).result().path
    with pytest.raises(tinker.RequestFailedError, match="encrypted with age: it can only be"):
        service_client.create_training_client_from_state(path).result()


@pytest.mark.parametrize(
    ("recipients", "sentence"),
    [
        (["age1abc"], r"'age1abc' is no age recipient \(age1... or an SSH public key\): invalid"),
        (["ssh-ed25519 AAAA"], "'ssh-ed25519 AAAA' is no age recipient"),
        (["AGE-SECRET-KEY-1"], "is no age recipient"),
        ([str(pyrage.x25519.Identity.generate().to_public())] * 11, "has 11 keys; at most 10"),
        ([7], "must be a string, 7 came"),
    ],
)
def test_a_recipient_that_is_none_is_told_of(recipients: list, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        encryption.check(recipients)


def test_a_server_without_pyrage_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    key = str(pyrage.x25519.Identity.generate().to_public())
    monkeypatch.setitem(sys.modules, "pyrage", None)
    assert encryption.check([]) == ()
    with pytest.raises(ValueError, match=r"pip install 'tinsmith\[server\]'; or leave"):
        encryption.check([key])
