"""Where files are when nobody says where, and what `tinsmith doctor` and `info` say of the room."""

import argparse
import logging
import os
from pathlib import Path

import pytest
import tinsmith
from tinsmith import _core
from tinsmith.cli import commands, doctor
from tinsmith.demo.demo import MODEL
from tinsmith.system import home
from tinsmith.system.install_hints import pip_install


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_the_folders_follow_the_specification(monkeypatch, tmp_path) -> None:
    default = Path("tinsmith") / "checkpoints"
    assert home.checkpoints_folder() == tmp_path / "data" / default
    assert home.checkpoints_folder("named") == Path("named")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.delenv("HF_HUB_CACHE")
    for given in ("", "relative/path"):
        monkeypatch.setenv("XDG_DATA_HOME", given)
        assert home.checkpoints_folder() == tmp_path / "me" / ".local/share" / default
    assert home.cache_folder() == tmp_path / "me/.cache/huggingface/hub"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert home.cache_folder() == tmp_path / "cache/huggingface/hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert home.cache_folder() == tmp_path / "hf/hub"


def test_a_user_without_a_home_is_told(monkeypatch) -> None:
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(FileNotFoundError, match="set XDG_DATA_HOME"):
        home.checkpoints_folder()


def test_the_former_default_is_used_where_it_is_and_said(tmp_path, caplog) -> None:
    former = tmp_path / "here" / home.FORMER
    former.mkdir()
    with caplog.at_level(logging.WARNING, "tinsmith"):
        assert home.checkpoints_folder() == former
    assert str(former) in caplog.text and str(tmp_path / "data/tinsmith") in caplog.text
    assert home.checkpoints_folder("named") == Path("named")


def test_servers_share_the_default_folder_and_have_a_named_one_alone(tmp_path) -> None:
    models = {"m": MODEL}
    options = {"device": "cpu", "threads": 1, "preload": False}
    with tinsmith.serve(models, **options) as one, tinsmith.serve(models, **options) as two:
        assert one.checkpoints == two.checkpoints == tmp_path / "data/tinsmith/checkpoints"
        assert one.checkpoints.stat().st_mode & 0o777 == 0o700
        named = tmp_path / "named"
        with (
            tinsmith.serve(models, checkpoints=named, **options),
            pytest.raises(OSError, match="is used by another tinsmith server"),
        ):
            tinsmith.serve(models, checkpoints=named, **options)
    assert not list(Path().iterdir())


def test_doctor_shows_the_folders_their_sizes_and_the_room(tmp_path, capsys) -> None:
    run = tmp_path / "data/tinsmith/checkpoints/session%3Atrain%3A0/weights"
    for name in ("one", "two"):
        (run / name).mkdir(parents=True)
        (run / name / "meta.json").write_text("{}")
    (run / "one" / "data").write_bytes(bytes(3 << 20))
    os.link(run / "one" / "data", run / "two" / "data")  # a copy
    blobs = tmp_path / "hub/models--org--name/blobs"
    blobs.mkdir(parents=True)
    (blobs / "x").write_bytes(bytes(5 << 20))
    (blobs.parent / "snapshot").symlink_to(blobs / "x")
    assert commands.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert f"device cpu: ready, with {_core.computes_with('cpu')}\n" in shown
    folder = tmp_path / "data/tinsmith/checkpoints"
    assert f"checkpoints in {folder}: 3.00 MiB, 2 checkpoints of 1 run; " in shown
    assert f"models in {tmp_path / 'hub'}: 5.00 MiB, 1 model; " in shown
    assert "5.00 MiB  org/name\n" in shown and shown.count("of the disk are free") == 3


def test_what_is_free_is_said_and_not_what_is_there(tmp_path, monkeypatch, capsys) -> None:
    found = tmp_path / "meminfo"
    found.write_text("MemTotal: 9000000 kB\nMemAvailable:    1024 kB\n")
    monkeypatch.setattr(doctor, "MEMINFO", found)
    assert doctor.free_memory(1 << 40) == 1 << 20 and doctor.free_memory(5) == 5
    assert commands.main(["info", str(MODEL)]) == 0
    assert "1.00 MiB are free now, which is too little" in capsys.readouterr().out
    doctor.show(argparse.Namespace(ray=None))
    assert "memory: 1.00 MiB of " in capsys.readouterr().out
    found.unlink()
    assert doctor.free_memory(7) == 7


def test_doctor_names_the_extra_of_each_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(doctor, "version", lambda package: None)
    doctor.show(argparse.Namespace(ray=None))
    shown = capsys.readouterr().out
    for name in doctor.PACKAGES:
        extra = {"tinker-cookbook": "cookbook", "gguf": "gguf", "pillow": "images"}
        assert f"\n{name} is not installed: {pip_install(extra.get(name, 'server'))}\n" in shown
