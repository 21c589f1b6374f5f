"""`tinsmith pull`: a model fetched from a hub, whole or not at all, and found by its name then."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import tinsmith
from conftest import Wire
from huggingface_hub import constants, file_download
from support import vision_models
from support.model_hub import TOKEN, Hub, files_of, running
from tinsmith.cli import commands
from tinsmith.cli.pull import find, pull
from tinsmith.models.registry import find_model, inspect_model
from tinsmith.system import home

NAME = "org/tiny"
OTHERS = {
    "README.md": b"#",
    "modeling.py": b"raise SystemExit",
    "pytorch_model.bin": bytes(9),
    "original/model.safetensors": bytes(9),
    "consolidated.safetensors": bytes(9),
}


def ask(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Has huggingface_hub ask a hub, as HF_ENDPOINT does before it is imported."""
    files = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def raised(error: Exception) -> None:
    raise error


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process asks, with an empty cache and without patience."""
    with running() as started:
        ask(monkeypatch, started.url)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # a whole one is kept
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
        yield started


@pytest.fixture(scope="module")
def files(tiny_model_dir: Path) -> dict[str, bytes]:
    return files_of(tiny_model_dir) | {"additional_chat_templates/tool_use.jinja": b"{{ tools }}"}


def test_a_pulled_model_is_served_by_its_name_without_a_network(
    files, tiny_model_dir, tmp_path, hub, monkeypatch
) -> None:
    """As a user does it; only what the model needs was fetched."""
    hub.add(NAME, files | OTHERS)
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "tinsmith.cli", "pull", NAME]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    folder = find_model(NAME, {})
    assert str(folder) in done.stdout and f"tinsmith serve {NAME}" in done.stdout
    assert folder.is_relative_to(tmp_path / "hub") and files_of(folder) == files
    assert hub.files_asked() == set(files)
    ask(monkeypatch, "http://127.0.0.1:9")
    asked = len(hub.asked)
    options = {"device": "cpu", "threads": 1, "checkpoints": tmp_path / "checkpoints"}
    with tinsmith.serve(NAME, **options) as backend:
        assert Wire(backend.url).create(NAME)
    assert len(hub.asked) == asked


def test_what_is_there_is_not_fetched_again(files, hub) -> None:
    hub.add(NAME, files)
    first = pull(NAME)
    hub.sent.clear()
    assert pull(NAME) == first and not hub.sent
    hub.asked.clear()
    assert find(NAME, fetch=True) == first and not hub.asked


def test_a_model_that_was_fetched_without_its_image_processor_gets_it(hub) -> None:
    files = files_of(vision_models.folder("qwen3_5-tied"))
    names = "preprocessor_config.json", "processor_config.json"
    files["processor_config.json"] = files[names[0]]
    hub.add(NAME, {name: data for name, data in files.items() if name not in names})
    without = inspect_model(pull(NAME))
    assert without.vision is None and "`tinsmith pull` fetches it" in without.no_images
    hub.models.clear()
    hub.add(NAME, files)
    found = pull(NAME)
    assert files_of(found) == files and inspect_model(found).vision


def test_a_broken_connection_is_resumed_where_it_was(files, hub) -> None:
    hub.add(NAME, files)
    weights = "model.safetensors"
    hub.cuts[weights] = [70_000, 200_000]
    assert files_of(pull(NAME)) == files
    assert hub.sent[weights] == len(files[weights])
    ranges = [asked for method, path, asked in hub.asked if path.endswith(weights) and asked]
    assert ranges == ["bytes=70000-", "bytes=200000-"]


def test_a_download_that_is_given_up_keeps_its_complete_files(files, hub) -> None:
    """Until all are there, no name leads to them."""
    hub.add(NAME, files)
    weights = "model.safetensors"
    hub.cuts[weights] = [70_000] * 6
    with pytest.raises(OSError, match=r"the connection broke .*; files that are complete are kept"):
        pull(NAME)
    with pytest.raises(FileNotFoundError, match=f"`tinsmith pull {NAME}` fetches it"):
        find_model(NAME, {})
    hub.sent.clear()
    assert files_of(pull(NAME)) == files
    assert set(hub.sent) == {weights, "config.json"}


def test_a_revision_can_be_a_branch_a_tag_or_a_commit(files, hub, tmp_path) -> None:
    old = hub.add(NAME, files | {"vocab.json": b"{}"}, "v1", "refs/pr/7")
    new = hub.add(NAME, files)
    for revision, commit in (("v1", old), ("refs/pr/7", old), (old, old), ("main", new)):
        name = f"{NAME}@{revision}"
        assert pull(name).name == commit and find_model(name, {}).name == commit
    assert find_model(NAME, {}).name == new
    assert not (home.model_folder(NAME) / "refs" / old).exists()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.json").write_text("{}")
    outside = f"{NAME}@../../../outside"
    for wrong in (f"{NAME}@v2", outside, f"{NAME}@", "@v1", f"{NAME}@/"):
        with pytest.raises(FileNotFoundError, match="there is no model"):
            find_model(wrong, {})


def test_an_update_that_breaks_off_leaves_the_old_one(files, hub) -> None:
    old = hub.add(NAME, files)
    assert pull(NAME).name == old
    changed = files | {"model.safetensors": files["model.safetensors"][:-1] + b"\1"}
    new = hub.add(NAME, changed)
    hub.cuts["model.safetensors"] = [9] * 6
    with pytest.raises(OSError, match="broke"):
        pull(NAME)
    assert find_model(NAME, {}).name == old and files_of(find_model(NAME, {})) == files
    with pytest.raises(FileNotFoundError):
        find_model(f"{NAME}@{new}", {})
    hub.cuts.clear()
    assert pull(NAME).name == new and files_of(find_model(NAME, {})) == changed


def test_shards_are_those_that_the_index_names(hub, tmp_path) -> None:
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    parts = {"part-1.safetensors": b"1", "part-2.safetensors": b"2", "part-3.safetensors": b"3"}
    content = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}
    hub.add(NAME, content | parts)
    assert set(files_of(pull(NAME))) == {*content, "part-1.safetensors", "part-2.safetensors"}
    for wrong, told in (
        (b'{"weight_map": {"a": "part-9.safetensors"}}', "names .'part-9.safetensors'"),
        (b"{}", "names no files"),
    ):
        hub.add("org/wrong", content | {"model.safetensors.index.json": wrong})
        with pytest.raises(ValueError, match=told):
            pull("org/wrong")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b""}, "has pytorch_model.bin, and no model.s"),
        ({"config.json": b"{}", "tiny-Q4.gguf": b""}, "has tiny-Q4.gguf, and no model.safetensors"),
        ({"config.json": b"{}"}, "has no weights at all"),
        ({"model.safetensors": b""}, "has no config.json"),
    ],
)
def test_a_model_without_safetensors_is_refused_before_anything_is_fetched(
    hub, content, told
) -> None:
    hub.add(NAME, content)
    with pytest.raises(ValueError, match=told):
        pull(NAME)
    assert not hub.sent


def test_a_gated_model_says_what_it_wants(files, hub, monkeypatch) -> None:
    hub.add(NAME, files)
    hub.gated.add(NAME)
    with pytest.raises(
        OSError, match=f"{NAME} is gated: accept its terms at {hub.url}/{NAME}, "
    ) as told:
        pull(NAME)
    assert "HF_TOKEN" in str(told.value) and "\n" not in str(told.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert files_of(pull(NAME)) == files


def test_what_is_not_there_or_not_reached_is_a_sentence(files, hub, monkeypatch) -> None:
    hub.add(NAME, files)
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    def told(name: str) -> str:
        with pytest.raises((OSError, ValueError)) as error:
            pull(name)
        text = str(error.value)
        assert "\n" not in text and TOKEN not in text
        return text

    assert f"there is no model org/none at {hub.url}" in told("org/none")
    assert told(f"{NAME}@v9") == f"{NAME} has no revision v9"
    for name in ("tiny", "a/b/c", "", "org/tiny@", "../x", "org/ti ny", "org/.."):
        assert "is no model's name on the hub" in told(name)
    shown = namedtuple("usage", "total used free")(9, 9, 1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda place: shown)
        assert "free; make room, or set HF_HUB_CACHE" in told(NAME) and not hub.sent
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: raised(full))
        assert "is full; make room, and pull again" in told(NAME)
    ask(monkeypatch, "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 can't be reached" in told(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in told(NAME)


def test_commands_fetch_what_is_missing_when_they_are_asked_to(
    files, hub, tiny_model_dir, tmp_path, capsys
) -> None:
    hub.add(NAME, files)
    arguments = ["the answer", "--device", "cpu", "--seed", "1", "--max-tokens", "4"]
    assert commands.main(["sample", NAME, *arguments]) == 1
    assert f"`tinsmith pull {NAME}` fetches it" in capsys.readouterr().err and not hub.asked
    assert commands.main(["sample", NAME, *arguments, "--pull"]) == 0
    fetched = json.loads(capsys.readouterr().out)
    assert commands.main(["sample", str(tiny_model_dir), *arguments]) == 0
    assert fetched["samples"] == json.loads(capsys.readouterr().out)["samples"]
    assert commands.main(["info", "org/none", "--pull"]) == 1
    assert "there is no model org/none at" in capsys.readouterr().err
    assert commands.main(["info", str(tmp_path / "none"), "--pull"]) == 1
    assert "there is no model '/" in capsys.readouterr().err


def test_a_recipes_models_are_fetched_before_it_starts(files, hub, tmp_path, monkeypatch) -> None:
    hub.add(NAME, files)
    given = {}
    monkeypatch.setattr(
        "tinsmith.cli.run.run_recipe", lambda _, models, *__, **___: given.update(models)
    )
    script = tmp_path / "recipe.py"
    script.write_text("model_name = 'org/tiny'\n")
    assert commands.main(["run", str(script)]) == 1 and not hub.asked
    assert commands.main(["run", "--pull", str(script)]) == 0
    assert given == {NAME: find_model(NAME, {})}
