"""`tinsmith prune`: which checkpoints go, what is said and asked before, and what happens where a
server has the folder."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker
from support.small_run import make_client
from test_checkpoint import adapter_of, meta_of, save
from tinsmith.checkpoints.meta import META_FILE
from tinsmith.checkpoints.quota import bytes_in
from tinsmith.checkpoints.store import Store
from tinsmith.cli import commands
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

# Runs with ages in days of their checkpoints, and a ttl in days: run/kind/name.
MADE = {
    "one:train:0/weights/a": (40, None),
    "one:train:0/weights/b": (20, None),
    "one:train:0/weights/c": (1, None),
    "one:train:0/sampler_weights/a": (40, 30),
    "one:train:0/sampler_weights/b": (35, 60),
    "two:train:0/weights/a": (50, 7),
}
Prune = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    store, adapter = Store(folder), adapter_of()
    for name, (days, ttl) in MADE.items():
        _, kind, _ = name.split("/")
        created = (datetime.now(UTC) - timedelta(days=days, minutes=1)).isoformat()
        fields = {"created": created, "kind": kind, "ttl_seconds": ttl and ttl * 86400}
        save(store.folder(f"tinker://{name}"), adapter, meta_of(adapter, **fields), optimizer=False)
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-a", str(template), str(tmp_path / "kept")], check=True)
    return tmp_path / "kept"


@pytest.fixture
def prune(folder: Path, capsys: pytest.CaptureFixture[str]) -> Prune:
    """Runs the command; its exit code and what it says."""

    def call(*options: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = commands.main(["prune", "--checkpoints", str(folder), *options])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def left(folder: Path) -> set[str]:
    store = Store(folder)
    paths = [path for run in store.runs() for path in store.checkpoints(run)]
    return {path.removeprefix("tinker://") for path in paths}


ONE = "one:train:0/"


@pytest.mark.parametrize(
    ("options", "gone"),
    (
        (["--older-than", "30d"], [f"{ONE}weights/a", f"{ONE}sampler_weights/a",
                                   f"{ONE}sampler_weights/b", "two:train:0/weights/a"]),
        (["--older-than", "6w"], ["two:train:0/weights/a"]),
        (["--older-than", "500h"], [f"{ONE}weights/a", f"{ONE}sampler_weights/a",
                                    f"{ONE}sampler_weights/b", "two:train:0/weights/a"]),
        (["--expired"], [f"{ONE}sampler_weights/a", "two:train:0/weights/a"]),
        (["--run", "two:train:0"], ["two:train:0/weights/a"]),
        (["--run", "two:train:0", "--run", "one:train:0"], list(MADE)),
        (["--keep", "1"], [f"{ONE}weights/a", f"{ONE}weights/b", f"{ONE}sampler_weights/a"]),
        (["--keep", "2"], [f"{ONE}weights/a"]),
        (["--older-than", "30d", "--keep", "1"], [f"{ONE}weights/a", f"{ONE}sampler_weights/a"]),
        (["--expired", "--run", "one:train:0"], [f"{ONE}sampler_weights/a"]),
        (["--older-than", "100d"], []),
    ),
)  # fmt: skip
def test_those_go_that_every_option_fits(options, gone, folder: Path, prune: Prune) -> None:
    before = bytes_in(*(path for path in folder.iterdir() if path.is_dir()))
    code, out, err = prune(*options, "--dry-run")
    assert (code, err) == (0, "") and left(folder) == set(MADE)
    told = {path for path in MADE if re.search(rf" tinker://{path}$", out, re.M)}
    assert told == set(gone)
    if not gone:
        assert out.startswith("nothing to delete: 6 checkpoints, ")
        return
    code, out, err = prune(*options, "--yes")
    assert (code, err) == (0, "") and left(folder) == set(MADE) - set(gone)
    after = bytes_in(*(path for path in folder.iterdir() if path.is_dir()))
    assert f"({before - after} bytes) freed; {6 - len(gone)} checkpoint" in out.splitlines()[-1]


def test_each_is_listed_with_its_size_and_age(folder: Path, prune: Prune) -> None:
    _, out, _ = prune("--run", "one:train:0", "--dry-run")
    rows = [line.split() for line in out.splitlines()[:-1]]
    assert [row[2:] for row in rows] == [
        ["40", "d", f"tinker://{ONE}weights/a"],
        ["40", "d", f"tinker://{ONE}sampler_weights/a"],
        ["35", "d", f"tinker://{ONE}sampler_weights/b"],
        ["20", "d", f"tinker://{ONE}weights/b"],
        ["1", "d", f"tinker://{ONE}weights/c"],
    ]
    size = bytes_in(Store(folder).folder(f"tinker://{ONE}weights/a"))
    assert rows[0][:2] == [f"{size / 1024:.2f}", "KiB"]


def test_without_an_option_nothing_goes_and_the_options_are_named(folder, prune) -> None:
    code, out, _ = prune("--yes")
    assert code == 0 and left(folder) == set(MADE)
    assert out.startswith("6 checkpoints, ") and "say which checkpoints: --older-than" in out


def test_what_a_copy_still_has_is_not_freed(folder: Path, prune: Prune) -> None:
    Store(folder).copy("tinker://two:train:0/weights/a", "copy")
    size = (folder / "copy" / "weights" / "a" / META_FILE).stat().st_size
    told = prune("--run", "two:train:0", "--dry-run")[1].splitlines()[-1]
    assert told.startswith(f"{size} bytes would be freed") and size < 1024
    assert f"({size} bytes) freed" in prune("--run", "two:train:0", "--yes")[1]
    _, out, _ = prune("--run", "copy", "--yes")
    freed = int(re.findall(r"\((\d+) bytes\) freed", out)[0])
    assert freed > 10 * size


def answer(monkeypatch: pytest.MonkeyPatch, text: str | None) -> list[str]:
    """Someone at a terminal who says this; the questions."""
    asked: list[str] = []

    def say(question: str) -> str:
        asked.append(question)
        if text is None:
            raise EOFError
        return text

    monkeypatch.setattr("builtins.input", say)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    return asked


@pytest.mark.parametrize("text", ("", "n", "no", "what", None))
def test_who_does_not_agree_loses_nothing(text, folder, prune, monkeypatch) -> None:
    asked = answer(monkeypatch, text)
    code, out, _ = prune("--run", "one:train:0")
    assert (code, out.splitlines()[-1]) == (1, "nothing was deleted")
    assert re.fullmatch(r"delete them, and free [\d.]+ [KM]iB\? \[y/N\] ", asked[0])
    assert left(folder) == set(MADE)


def test_who_agrees_is_asked_once(folder, prune, monkeypatch) -> None:
    asked = answer(monkeypatch, " Yes ")
    assert prune("--run", "two:train:0")[0] == 0 and len(asked) == 1
    assert left(folder) == {name for name in MADE if name.startswith("one")}


def test_where_nobody_can_be_asked_yes_must_be_said(folder, prune, monkeypatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    code, out, err = prune("--run", "two:train:0")
    assert code == 1 and "say --yes" in err and "tinker://two" in out
    assert left(folder) == set(MADE)


def test_a_run_that_is_not_there_is_a_sentence(folder: Path, prune: Prune) -> None:
    code, _, err = prune("--run", "three", "--run", "two:train:0", "--yes")
    assert code == 1 and "no checkpoint is of a run 'three'" in err and left(folder) == set(MADE)


def test_a_folder_that_is_not_there_stays_so(tmp_path: Path, capsys) -> None:
    assert commands.main(["prune", "--checkpoints", str(tmp_path / "nothing"), "--expired"]) == 0
    assert "nothing to delete: 0 checkpoints, 0 bytes" in capsys.readouterr().out
    assert not (tmp_path / "nothing").exists()


def test_the_default_folder_is_the_users(folder, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    default = tmp_path / "data" / "tinsmith" / "checkpoints"
    default.parent.mkdir(parents=True)
    folder.rename(default)
    assert commands.main(["prune", "--run", "two:train:0", "--yes"]) == 0
    assert f"are left in {default}" in capsys.readouterr().out
    assert left(default) == {name for name in MADE if name.startswith("one")}


# ---- what is not to go ----


def test_what_cant_be_read_stays_and_is_told_of(folder: Path, prune: Prune) -> None:
    odd = Store(folder).folder("tinker://two:train:0/weights/a") / META_FILE
    odd.write_text('{"version": 2}')  # as a newer tinsmith may write it
    code, _, err = prune("--older-than", "1m", "--yes")
    assert code == 0 and "1 that can't be read stay: tinker://two:train:0/weights/a" in err
    assert prune("--run", "two:train:0", "--yes")[0] == 1
    assert left(folder) == {"two:train:0/weights/a"}


def test_a_checkpoint_that_was_saved_again_meanwhile_stays(folder, prune, monkeypatch) -> None:
    path = "tinker://two:train:0/weights/a"

    def agree(question: str) -> str:
        adapter = adapter_of(seed=3)
        save(Store(folder).folder(path), adapter, meta_of(adapter), optimizer=False, overwrite=True)
        return "y"

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", agree)
    assert prune("--older-than", "30d")[0] == 0
    assert left(folder) == {f"{ONE}weights/b", f"{ONE}weights/c", path.removeprefix("tinker://")}


def test_what_a_killed_save_left_goes(folder: Path, prune: Prune) -> None:
    rest = Store(folder).run_folder("one:train:0") / "weights" / "d~0123abcd"
    rest.mkdir()
    (rest / "adapter_model.safetensors").write_bytes(bytes(5000))
    aside = Store(folder).folder("tinker://two:train:0/weights/a")
    aside.rename(aside.with_name("a~old"))  # which a save had moved for a moment
    code, out, _ = prune("--dry-run")
    assert code == 0 and f"{rest}, which was never finished" in out and "a~old" not in out
    assert rest.is_dir()
    code, out, _ = prune("--yes")
    assert code == 0 and "(5000 bytes) freed; 6 checkpoints" in out and not rest.exists()
    assert left(folder) == set(MADE) and aside.is_dir()


# ---- where a server has the folder ----


@pytest.fixture(params=(False, True), ids=("alone", "shared"))
def backend(tiny_model_dir: Path, folder: Path, request: Any) -> Iterator[Backend]:
    options = {"share_checkpoints": request.param, "device": "cpu", "threads": 1}
    with Backend(ServerConfig({"tiny": tiny_model_dir}, checkpoints=folder, **options)) as backend:
        yield backend


def test_a_server_that_has_the_folder_is_asked(backend, folder, prune) -> None:
    busy = Store(folder).run_folder("one:train:0") / "weights" / "d~0123abcd"
    busy.mkdir()  # what the server writes now
    with backend.service_client() as service:
        client = make_client(service)
        saved = client.save_state("a").result().path
        code, out, err = prune("--older-than", "30d", "--keep", "1", "--yes")
        assert (code, err) == (0, "") and "d~0123abcd" not in out and busy.is_dir()
        gone = {f"{ONE}weights/a", f"{ONE}sampler_weights/a"}
        assert left(folder) == {*MADE, saved.removeprefix("tinker://")} - gone
        rest = tinker.RestClient(base_url=backend.url, api_key="tml-local")
        listed = rest.list_user_checkpoints(limit=100).result().checkpoints
        assert {item.tinker_path.removeprefix("tinker://") for item in listed} == left(folder)
        client.save_state("b").result()  # the server goes on


def test_a_server_with_a_key_is_asked_with_the_users(tiny_model_dir, folder, prune, monkeypatch):
    key = "tml-the-right-one"
    options = {"api_key": key, "device": "cpu", "threads": 1}
    with Backend(ServerConfig({"tiny": tiny_model_dir}, checkpoints=folder, **options)) as backend:
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
        code, _, err = prune("--run", "two:train:0", "--yes")
        assert code == 1 and f"the server at {backend.url} did not delete" in err
        assert "needs the API key" in err and left(folder) == set(MADE)
        monkeypatch.setenv("TINKER_API_KEY", key)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which is not for this machine
        assert prune("--run", "two:train:0", "--yes")[0] == 0
        assert left(folder) == {name for name in MADE if name.startswith("one")}


def test_who_has_the_folder_and_cant_be_asked_is_told(folder: Path, prune: Prune) -> None:
    code = "import sys; from tinsmith.checkpoints.store import Store; store = Store(sys.argv[1]);"
    code += "store.claim(sys.argv[2]); print('claimed', flush=True); sys.stdin.read()"
    for address, wanted in (
        ("", "is used by another tinsmith server: process"),
        ("http://127.0.0.1:9", "the server at http://127.0.0.1:9 has the folder, and is silent"),
    ):
        command = [sys.executable, "-c", code, str(folder), address]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": os.environ}
        with subprocess.Popen(command, **pipes) as process:
            try:
                assert process.stdout.readline() == b"claimed\n"
                status, _, err = prune("--run", "two:train:0", "--yes")
                assert status == 1 and wanted in err and left(folder) == set(MADE)
            finally:
                process.kill()
    assert prune("--run", "two:train:0", "--yes")[0] == 0
