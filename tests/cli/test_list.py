"""`tinsmith list`: models, servers and checkpoints, with sizes and ages."""

import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint import adapter_of, meta_of, save
from tinsmith.checkpoints.store import Store
from tinsmith.cli import commands
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

PATH = "tinker://one:train:0/weights/final"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with a checkpoint of three hours ago."""
    store, adapter = Store(tmp_path / "kept"), adapter_of()
    created = (datetime.now(UTC) - timedelta(hours=3, minutes=1)).isoformat()
    meta = meta_of(
        adapter, created=created, kind="weights", step=7, run_metadata={"name": "lights"}
    )
    save(store.folder(PATH), adapter, meta, optimizer=False)
    return store.root


@pytest.fixture
def cache(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with a model, and with the rest of one."""
    folder = tmp_path / "hub" / "models--Some--Tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("1" * 40)
    shutil.copytree(tiny_model_dir, folder / "snapshots" / ("1" * 40))
    (tmp_path / "hub" / "models--Some--Rest").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def listed(kept: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    capsys.readouterr()
    assert commands.main(["list", "--checkpoints", str(kept)]) == 0
    said = capsys.readouterr()
    return said.out, said.err


def test_models_and_checkpoints_have_sizes_and_ages(
    kept: Path, cache: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    said, _ = listed(kept, capsys)
    lines = said.splitlines()
    assert re.search(r"^ +[\d.]+ KiB +\d+ (s|min)  Some/Tiny$", said, re.M), said
    assert re.search(r"^ +0 bytes .* Some/Rest, of which no main revision is here$", said, re.M)
    assert f"1 checkpoint in {kept}" in lines and "server" not in said
    about = r"\(lights: \S+, rank \d+, step 7\)"
    assert re.search(rf"^ +[\d.]+ KiB +3 h  {re.escape(PATH)}  {about}$", lines[-1]), lines[-1]


def test_a_checkpoint_that_cant_be_read_is_named(
    kept: Path, cache: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (Store(kept).folder(PATH) / "meta.json").write_text("{")
    said, told = listed(kept, capsys)
    assert f"0 checkpoints in {kept}" in said and told == f"1 that can't be read: {PATH}\n"


def test_a_servers_models_are_those_that_it_says(
    kept: Path, cache: Any, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    models, key = {"tiny": tiny_model_dir, "other": tiny_model_dir}, "tml-of-the-list"
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with Backend(
        ServerConfig(models, checkpoints=kept, device="cpu", threads=1, api_key=key)
    ) as backend:
        said, _ = listed(kept, capsys)
        assert f"a server at {backend.url}: it does not say what it serves (this server n" in said
        monkeypatch.setenv("TINKER_API_KEY", key)
        said, _ = listed(kept, capsys)
        assert f"a server at {backend.url}: other, tiny\n" in said and PATH in said
    said, _ = listed(kept, capsys)
    assert "a server at" not in said  # the file still has its line
