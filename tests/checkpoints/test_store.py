"""A folder of checkpoints that others use too: readers beside a save that overwrites, two servers,
files that anyone may have written, and who may read what is made."""

import json
import logging
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_models import folder as model_folder
from support.tiny_models import loaded
from test_checkpoint import adapter_of, load_into, meta_of, save, train
from tinsmith.checkpoints import checkpoint, export, peft
from tinsmith.checkpoints.meta import load_meta
from tinsmith.checkpoints.store import Store
from tinsmith.formats.folder_version import Version
from tinsmith.system import disk, lock

PATH = "tinker://run:1/weights/a"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """One checkpoint, of the adapter of seed 1."""
    made = Store(tmp_path / "root")
    overwrite(made, 1)
    return made


def overwrite(store: Store, seed: int, rank: int = 4) -> None:
    adapter = adapter_of(seed=seed, rank=rank)
    save(store.folder(PATH), adapter, meta_of(adapter, step=seed), optimizer=True, overwrite=True)


def seed_of(folder: Path) -> int:
    """The seed of the whole checkpoint that a folder holds; an error where it is not whole."""
    found = checkpoint.load_adapter(folder, loaded("qwen3"), optimizer=True)
    step = load_meta(folder).step
    np.testing.assert_array_equal(found.read("weights"), adapter_of(seed=step).read("weights"))
    return step


def before_first(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, action: Callable[[], None]
) -> None:
    """Does something once, when a function is about to be called for the first time."""
    function, left = getattr(owner, name), [action]

    def called(*arguments: Any, **options: Any) -> Any:
        if left:
            left.pop()()
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, called)


@pytest.fixture(params=("exchange", "aside"))
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which a folder takes another's place."""
    if request.param == "aside":
        monkeypatch.setattr(disk, "_exchange_at_once", lambda one, other: False)
    return request.param


# ---- readers beside a save that overwrites ----


def test_a_copy_that_is_overtaken_by_a_save_is_of_one_version(store, swap, monkeypatch):
    before_first(monkeypatch, Version, "share", lambda: overwrite(store, 2))
    copied = store.copy(PATH, "copy")
    assert seed_of(store.folder(copied)) == 2
    names = {file.name for file in store.folder(copied).parent.iterdir()}
    assert names == {"a"}


def test_a_load_that_is_overtaken_by_a_save_is_of_one_version(store, swap, monkeypatch):
    before_first(monkeypatch, Version, "tensors", lambda: overwrite(store, 2))
    adapter = adapter_of(seed=9)
    load_into(store.folder(PATH), adapter, optimizer=True)
    np.testing.assert_array_equal(adapter.read("weights"), adapter_of(seed=2).read("weights"))


def test_a_change_that_is_overtaken_by_a_save_is_of_one_version(store, swap, monkeypatch):
    """Its meta.json must land in the folder that took the place; the other is there for a while."""
    remove = disk.remove

    def save_slowly() -> None:
        monkeypatch.setattr(disk, "remove", lambda path: None)
        overwrite(store, 2)
        monkeypatch.setattr(disk, "remove", remove)

    before_first(monkeypatch, disk, "alone", save_slowly)
    store.update(PATH, public=True)
    assert load_meta(store.folder(PATH)).public and seed_of(store.folder(PATH)) == 2


def test_a_download_that_is_overtaken_by_a_save_is_of_one_version(store, swap, monkeypatch):
    before_first(monkeypatch, Version, "stat", lambda: overwrite(store, 2))
    version, files = store.open(PATH)
    overwrite(store, 3)
    contents = {name: file.read() for name, file in files.items()}
    for file in files.values():
        file.close()
    (store.root / "whole").mkdir()
    assert version != store.files(PATH)[0]
    overwrite(store, 2)
    assert contents == {name: (store.folder(PATH) / name).read_bytes() for name in contents}
    assert version == store.files(PATH)[0]


def test_an_expiry_that_is_overtaken_by_a_save_deletes_nothing(store, swap, monkeypatch):
    """The folder that was expired is gone; the one that took its place was acknowledged."""
    store.update(PATH, ttl_seconds=0)
    before_first(monkeypatch, Store, "_remove", lambda: overwrite(store, 2))
    assert store.delete_expired() == []
    assert seed_of(store.folder(PATH)) == 2
    store.update(PATH, ttl_seconds=0)
    assert store.delete_expired() == [PATH] and store.checkpoints("run:1") == []


def test_an_export_that_is_overtaken_by_a_save_is_of_one_version(store, monkeypatch, tmp_path):
    """Its scale and its matrices belong together."""

    def save_another() -> None:
        overwrite(store, 2, rank=8)

    before_first(monkeypatch, checkpoint, "open_adapter", save_another)
    export.export(model_folder("qwen3"), store.folder(PATH), tmp_path / "late")
    export.export(model_folder("qwen3"), store.folder(PATH), tmp_path / "plain")
    names = sorted(file.name for file in (tmp_path / "plain").iterdir())
    assert [file.name for file in sorted((tmp_path / "late").iterdir())] == names
    for name in names:
        assert (tmp_path / "late" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_a_checkpoint_is_there_at_every_step_of_a_save(store, swap, monkeypatch):
    seen = []

    def look(path: Path, target: Path) -> Path:
        found = rename(path, target)
        seen.append((store.checkpoints("run:1"), store.meta(PATH).step))
        return found

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", look)
    overwrite(store, 2)
    assert len(seen) == (3 if swap == "aside" else 0)
    assert all(paths == [PATH] and step in (1, 2) for paths, step in seen)


def test_a_save_that_does_not_read_back_replaces_nothing(store, monkeypatch):
    """As where the disk lies, or a file is changed while it is written."""
    write = checkpoint.safetensors_io.write

    def write_wrongly(path: Path, tensors: Any, *rest: Any) -> None:
        write(path, tensors, *rest)
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\1")

    monkeypatch.setattr(checkpoint.safetensors_io, "write", write_wrongly)
    with pytest.raises(OSError, match="does not give back what was written"):
        overwrite(store, 2)
    monkeypatch.undo()
    assert seed_of(store.folder(PATH)) == 1
    assert [file.name for file in store.folder(PATH).parent.iterdir()] == ["a"]


def test_a_run_that_begins_with_a_checkpoint_that_was_overtaken_is_a_sentence(store):
    """It was described with the rank of the one that was there."""
    created = store.meta(PATH).created
    adapter = adapter_of(seed=2, rank=8)
    meta = meta_of(adapter, created="2026-11-23T00:00:00+00:00")
    save(store.folder(PATH), adapter, meta, optimizer=True, overwrite=True)
    with pytest.raises(ValueError, match="is another checkpoint than the one that was asked for"):
        peft.load(store.folder(PATH), loaded("qwen3"), optimizer=True, created=created)
    found = peft.load(store.folder(PATH), loaded("qwen3"), optimizer=True, created=meta.created)
    assert (found.adapter.rank, found.meta) == (8, meta)


def test_what_is_no_adapters_folder_is_not_overwritten(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("one")
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    adapter = adapter_of()
    for name in ("thesis", "file"):
        with pytest.raises(FileExistsError, match="is no adapter's folder: it has neither"):
            save(tmp_path / name, adapter, meta_of(adapter), optimizer=False, overwrite=True)
    assert (tmp_path / "thesis" / "chapter").read_text() == "one"
    for _ in range(2):
        save(tmp_path / "empty", adapter, meta_of(adapter), optimizer=False, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 3


def test_numbers_that_could_not_be_loaded_replace_nothing(store):
    for what in ("weights", "m"):
        adapter = adapter_of(seed=2)
        train(adapter, steps=1)
        flat = adapter.read(what)
        flat[3] = np.nan

        class Poisoned:
            """An adapter as an overflow would leave it; the engine writes no such."""

            def __getattr__(self, name: str, adapter: Any = adapter) -> Any:
                return getattr(adapter, name)

            def read(self, name: str, what: str = what, flat: Any = flat) -> Any:
                return flat if name == what else adapter_of(seed=2).read(name)

        with pytest.raises(ValueError, match=f"was not written: the adapter's {what} has nan"):
            save(store.folder(PATH), Poisoned(), meta_of(adapter), optimizer=True, overwrite=True)
    assert seed_of(store.folder(PATH)) == 1


# ---- two servers ----


HOLD = """
import sys, time
from tinsmith.checkpoints.store import Store
store = Store(sys.argv[1])
try:
    store.claim("http://there:1", shared=sys.argv[2] == "shared")
except OSError as error:
    print(error, flush=True)
else:
    print("holds", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holders() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes that claim a folder; each has said how that ended."""
    started: list[subprocess.Popen[str]] = []

    def start(root: Path, how: str = "alone") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(root), how]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        started[-1].said = started[-1].stdout.readline()  # type: ignore[attr-defined]
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_server_is_told_who_holds_the_folder(store, holders):
    first = holders(store.root)
    assert first.said == "holds\n"
    with pytest.raises(OSError, match="is used by another tinsmith server") as caught:
        store.claim()
    assert f"process {first.pid} at http://there:1 since 20" in str(caught.value)
    assert "choose another folder with --checkpoints" in str(caught.value)
    first.send_signal(signal.SIGKILL)
    first.wait()
    store.claim()  # the kernel gave it back
    assert "is used by another tinsmith server" in holders(store.root).said
    store.close()
    assert holders(store.root).said == "holds\n"


def test_runs_share_a_folder_and_clear_nothing_of_each_other(store, holders):
    first = holders(store.root, "shared")
    unfinished = store.folder(PATH).with_name("b~0a1b2c3d")
    unfinished.mkdir()
    store.claim(shared=True)
    assert unfinished.is_dir()
    refused = holders(store.root).said
    assert f"process {first.pid} at http://there:1" in refused and f"{os.getpid()}" in refused
    store.close()
    first.kill()
    first.wait()
    store.claim(shared=True)  # alone: what is unfinished is nobody's
    assert not unfinished.exists()
    assert holders(store.root, "shared").said == "holds\n"
    store.close()


def test_a_child_that_is_forked_holds_no_lock(store):
    store.claim()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reading, 1)
        os._exit(0)
    try:
        store.close()
        again = Store(store.root)
        again.claim()
        again.close()
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_lock_outlives_a_child_that_was_forked(store):
    store.claim()
    child = os.fork()
    if child == 0:
        store.close()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(OSError, match="is used by another tinsmith server: this process"):
        Store(store.root).claim()
    store.close()


def test_a_file_system_without_locks_is_a_sentence_in_the_log(store, monkeypatch, caplog):
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    store.claim()
    assert "can't be locked (Function not implemented): nothing keeps a second" in caplog.text
    overwrite(store, 2)
    store.update(PATH, public=True)
    assert seed_of(store.folder(PATH)) == 2
    store.close()


@pytest.mark.parametrize("text", (b"", b"{", b"\xff\n[1]\n{}\n", b'{"pid": 1e999}\n', b"[" * 9999))
def test_a_lock_file_that_says_nonsense_is_no_harm(text, store, holders):
    assert holders(store.root).said == "holds\n"
    (store.root / lock.LOCK_FILE).write_bytes(text)
    with pytest.raises(OSError, match="is used by another tinsmith server: an unknown process"):
        store.claim()


# ---- what anyone may have written ----


def rewrite(folder: Path, **changes: Any) -> None:
    file = folder / "meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


FOREIGN = {"bytes": 6, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "name", ("../../../secret.txt", "secret.txt", "/etc/passwd", "", ".", "meta.json", "a\0b")
)
def test_a_file_that_is_not_a_checkpoints_own_is_refused(name, store):
    folder = store.folder(PATH)
    for place in (store.root.parent, folder):
        (place / "secret.txt").write_text("secret")
    rewrite(folder, files={name: FOREIGN})
    for use in (store.open, store.files, store.meta, lambda path: store.copy(path, "copy")):
        with pytest.raises(ValueError, match="can't be a file of a checkpoint"):
            use(PATH)
    with pytest.raises(ValueError, match="can't be a file of a checkpoint"):
        checkpoint.load_adapter(folder, loaded("qwen3"), optimizer=False)
    assert store.checkpoints("copy") == []


def test_a_file_that_was_cut_off_is_not_passed_on(store):
    file = store.folder(PATH) / checkpoint.OPTIMIZER_FILE
    size = file.stat().st_size
    os.truncate(file, size - 1)
    for use in (store.open, lambda path: store.copy(path, "copy")):
        with pytest.raises(ValueError, match=f"should be {size} bytes, found {size - 1}"):
            use(PATH)
    assert store.checkpoints("copy") == []


def test_a_link_is_not_followed(store, tmp_path):
    folder = store.folder(PATH)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for name in (checkpoint.ADAPTER_FILE, "adapter_config.json"):
        rewrite(folder, files={name: FOREIGN})
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
        for use in (store.open, lambda path: store.copy(path, "copy")):
            with pytest.raises(ValueError, match=r"is no regular file|should be 6 bytes"):
                use(PATH)
    assert store.checkpoints("copy") == []
    other = store.folder("tinker://run:1/weights/linked")
    other.symlink_to(folder)
    assert store.checkpoints("run:1") == [PATH]
    with pytest.raises(FileNotFoundError, match="there is no checkpoint tinker://run:1/weights/li"):
        store.meta("tinker://run:1/weights/linked")


PIPE = """
import sys
from tinsmith.checkpoints import peft
from tinsmith.checkpoints.store import Store
store = Store(sys.argv[1])
for read in (store.meta, lambda path: peft.load_meta(store.folder(path))):
    try:
        read(sys.argv[2])
    except ValueError as error:
        print(error)
print(store.delete_expired())
"""


def test_a_pipe_is_not_waited_for(store):
    file = store.folder(PATH) / "meta.json"
    file.unlink()
    os.mkfifo(file)
    command = [sys.executable, "-c", PIPE, str(store.root), PATH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"{file} is no regular file"] * 2 + ["[]"], done.stderr


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ttl_seconds": 10**300}, "ttl_seconds should be null, or seconds"),
        ({"ttl_seconds": "7"}, "ttl_seconds should be null, or seconds"),
        ({"ttl_seconds": 1.5}, "ttl_seconds should be null, or seconds"),
        ({"created": "2026-11-21"}, "created should be a time"),
        ({"created": "9999-12-31T23:59:59+00:00"}, "created should be a time"),
        ({"created": 7}, "created should be a time"),
        *(
            ({"created": f"2026-01-01{sign}00:00:00+00:00"}, "created should be a time")
            for sign in ("x", "\ud800", "\U0001f600")
        ),
        ({"created": "2026-W01-1T00:00:00+00:00"}, "created should be a time"),
        ({"kind": ["weights"]}, "kind should be weights or"),
        ({"rank": 0}, "rank should be a whole number"),
        ({"rank": True}, "rank should be a whole number"),
        ({"rank": 10**30}, "rank should be a whole number"),
        ({"alpha": 10**400}, "alpha should be a positive number"),
        ({"alpha": float("nan")}, "alpha should be a positive number"),
        ({"alpha": 1e-320}, "alpha should be a positive number"),
        ({"user_metadata": {"a": "\ud800"}}, "user_metadata should be an object of text"),
        ({"user_metadata": {"a": 1}}, "user_metadata should be an object of text"),
        ({"run_metadata": []}, "run_metadata should be an object of text"),
        ({"recipients": [1]}, "recipients should be a list of text"),
        ({"optimizer": "sgd"}, "optimizer should be adamw or dimuon"),
        ({"optimizer": ["adamw"]}, "optimizer should be adamw or dimuon"),
        ({"public": 1}, "public should be true or false"),
        ({"model": []}, "model should have the numbers layers"),
        ({"model": {}}, "model should have the numbers layers"),
        ({"files": []}, "files should be an object"),
        ({"files": {"adapter_config.json": {"bytes": -1}}}, "files should have bytes and sha256"),
        ({"average": {"decay": "much"}}, "average should have a decay"),
        ({"average": 3}, "average should have a decay"),
    ],
    ids=str,
)
def test_an_odd_meta_is_a_sentence_and_harms_no_other(changes, sentence, store):
    other = store.path("run:1", "weights", "other")
    adapter = adapter_of()
    save(store.folder(other), adapter, meta_of(adapter, ttl_seconds=0), optimizer=False)
    rewrite(store.folder(PATH), **changes)
    with pytest.raises(ValueError, match=sentence):
        store.meta(PATH)
    with pytest.raises(ValueError, match=sentence):
        checkpoint.load_adapter(store.folder(PATH), loaded("qwen3"), optimizer=True)
    assert store.delete_expired() == [other]
    store.delete(PATH)
    assert store.checkpoints("run:1") == []


def test_a_huge_meta_is_not_read(store):
    file = store.folder(PATH) / "meta.json"
    with file.open("r+b") as opened:
        opened.truncate(1 << 40)
    with pytest.raises(ValueError, match="has more than"):
        store.meta(PATH)


def test_folders_that_no_path_names_are_passed_over(store):
    for name in ("x" * 250, "a%3ab", "%ff", "lone\udcff"):
        (store.root / name / "weights" / "a").mkdir(parents=True)
    (store.root / "file").write_text("")
    (store.root / "run%3A1" / "weights" / "a b").mkdir()
    (store.root / "run%3A1" / "weights" / "file").write_text("")
    (store.root / "run%3A1" / "sampler_weights").write_text("")
    assert store.runs() == ["run:1"]
    assert store.checkpoints("run:1") == [PATH]


# ---- who may read what is made ----


def modes(root: Path) -> dict[str, int]:
    return {
        str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode) for path in root.rglob("*")
    }


@pytest.mark.parametrize("mask", (0, 0o777))
def test_what_is_made_is_its_owners_alone(mask, tmp_path):
    """But for an exported model, which has what the umask leaves, and its owner's rights."""
    before = os.umask(mask)
    try:
        store = Store(tmp_path / "deep" / "root")
        store.claim()
        overwrite(store, 1)
        store.copy(PATH, "copy")
        store.update(PATH, public=True)
        export.export(model_folder("qwen3"), store.folder(PATH), tmp_path / "out" / "model")
        store.close()
    finally:
        os.umask(before)
    found = modes(tmp_path)
    assert len(found) > 15
    for name, mode in found.items():
        left = 0o777 & ~mask if name.partition("/")[0] == "out" else 0
        assert mode == (0o700 | left if (tmp_path / name).is_dir() else 0o600 | left & 0o666), name


def test_a_folder_that_is_open_to_others_is_told_of_and_left(tmp_path, caplog):
    tmp_path.chmod(0o755)
    store = Store(tmp_path)
    with caplog.at_level(logging.WARNING, "tinsmith"):
        store.claim()
    store.close()
    assert "is open to other users of this machine (mode 755); chmod 700" in caplog.text
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
