"""Quantised copies of weights: they have the bits of weights that are quantised anew, are made anew
for whatever has changed, and cost a sentence where they can't be had."""

import errno
import fcntl
import json
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from support import ROOT, op_devices
from support.model_folders import rewritten
from support.tiny_models import call, datum, folder, randomize
from tinsmith import _core
from tinsmith.cli import argument_types, commands
from tinsmith.engine.loading import Loading
from tinsmith.models import registry, weight_cache
from tinsmith.models.registry import LoadedModel, inspect_model, load_model

NAMES = ("llama", "qwen3-tied", "qwen3_5", "qwen3_moe")
MASK = (1 << 64) - 1


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Small models get copies too; where they are."""
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 1)
    monkeypatch.setattr(weight_cache, "PIECE", 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/tinsmith/weights"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders whose files were read so far."""
    found, read = [], registry.read_weights

    def watched(model: registry.BaseModel, *arguments: object) -> Iterator[registry.WeightPart]:
        found.append(model.path)
        return read(model, *arguments)

    monkeypatch.setattr(registry, "read_weights", watched)
    monkeypatch.setattr("tinsmith.engine.loading.read_weights", watched)
    return found


def bits(model: LoadedModel) -> bytes:
    return model.core.memory().tobytes()


def anew(path: Path, kind: str = "int4") -> bytes:
    return bits(load_model(path, weights=kind, weights_copy=False))


def step(model: LoadedModel) -> list[np.ndarray]:
    """A training step's log-probabilities and gradients."""
    adapter = randomize(_core.Adapter(model.core, rank=3))
    found = call(adapter, [datum(np.arange(9, dtype=np.int32))])[0]
    return [*found, adapter.read("gradients")]


# ---- the bits ----


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_has_the_bits_of_weights_quantised_anew(name, kind, small, reads) -> None:
    first = load_model(folder(name), weights=kind)
    assert len(reads) == 1
    second = load_model(folder(name), weights=kind)
    assert len(reads) == 1  # it was mapped
    assert bits(first) == bits(second) == anew(folder(name), kind)
    [file] = weight_cache.copies()
    assert file.parent == small and f"-{kind}-" in file.name
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_mapped_model_trains_as_one_that_was_loaded() -> None:
    load_model(folder("llama"), weights="int4")
    mapped = load_model(folder("llama"), weights="int4", threads=2)
    other = load_model(folder("llama"), weights="int4", weights_copy=False)
    for got, wanted in zip(step(mapped), step(other), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_copy_is_mapped_read_only_and_shared() -> None:
    kept = [load_model(folder("llama"), weights="int8") for _ in range(2)]
    [file] = weight_cache.copies()
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if file.name in line]
    assert lines and all(line.split()[1] == "r--s" for line in lines)
    begins = {one.core.memory().ctypes.data for one in kept}
    assert len(begins) == 2 and all(f"{at:x}-" in " ".join(lines) for at in begins)
    file.unlink()
    assert bits(kept[0]) == bits(kept[1])  # what is mapped stays


def test_a_server_maps_the_copy_that_its_first_load_wrote(reads) -> None:
    def load() -> LoadedModel:
        woken = threading.Event()
        loading = Loading(inspect_model(folder("llama"), weights="int4"), threads=1, wake=woken.set)
        while (made := loading.take()) is None:
            woken.clear()
            if not loading.ready:
                woken.wait(1)
        assert loading.share == 1
        return made

    first, second = load(), load()
    assert len(reads) == 1 and len(weight_cache.copies()) == 1
    assert bits(first) == bits(second) == anew(folder("llama"))


# ---- what has changed ----


def test_another_content_makes_another_copy_whatever_its_mtime_says(
    tmp_path, reads, monkeypatch
) -> None:
    monkeypatch.setattr(weight_cache, "HEADER_BYTES", 100)  # of a large file, too, less than all
    place = rewritten(tmp_path, "llama", lambda tensors: None)
    before = bits(load_model(place, weights="int4"))
    file = place / "model.safetensors"
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 128  # the last number's sign: no header, no size
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = bits(load_model(place, weights="int4"))
    assert len(reads) == 2 and after == anew(place) != before
    assert len(weight_cache.copies()) == 1  # in the other's place


def test_another_config_makes_another_copy(tmp_path, reads) -> None:
    """It says how stored weights are quantised, which no other fact does."""
    place = rewritten(tmp_path, "llama", lambda tensors: None)
    for note in ("one", "two"):
        file = place / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"note": note}))
        for _ in range(2):
            load_model(place, weights="int4")
    assert len(reads) == 2


def test_files_that_change_while_they_are_read_are_not_kept(tmp_path, monkeypatch, told) -> None:
    place, read = rewritten(tmp_path, "llama", lambda tensors: None), registry.read_weights

    def change(*arguments: object) -> Iterator[registry.WeightPart]:
        yield from read(*arguments)
        (place / "model.safetensors").touch()

    monkeypatch.setattr(registry, "read_weights", change)
    load_model(place, weights="int4")
    assert not weight_cache.copies()
    assert told() and all("changed meanwhile" in one for one in told())


@pytest.mark.parametrize("code", ["_readers", "weights_code"])
def test_other_code_makes_another_copy(code, monkeypatch, reads) -> None:
    load_model(folder("llama"), weights="int4")
    load_model(folder("llama"), weights="int4")
    monkeypatch.setattr(*((weight_cache, code) if code == "_readers" else (_core, code)), lambda: 1)
    load_model(folder("llama"), weights="int4")
    assert len(reads) == 2 and len(weight_cache.copies()) == 1


def test_what_is_kept_side_by_side(tmp_path) -> None:
    place = rewritten(tmp_path, "llama", lambda tensors: None)
    for kind in ("int8", "int4", "stored", "bf16"):
        load_model(place, weights=kind)
    load_model(folder("llama"), weights="int4")
    assert len(weight_cache.copies()) == 3  # of wide weights none


# ---- what is damaged, or in the way ----

DAMAGE = {
    "its mark": lambda file: file.write_bytes(b"x" + file.read_bytes()[1:]),
    "a checksum": lambda file: flip(file, 70),
    "its first byte": lambda file: flip(file, weight_cache.PAGE),
    "its last": lambda file: flip(file, -weight_cache.TAIL - 1),
    "short": lambda file: os.truncate(file, file.stat().st_size - 1),
    "half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: file.write_bytes(b""),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
}


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 16
    file.write_bytes(content)


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_copy_is_made_anew_and_not_read(what, reads, told) -> None:
    wanted = bits(load_model(folder("llama"), weights="int4"))
    [file] = weight_cache.copies()
    whole = file.read_bytes()
    DAMAGE[what](file)
    before = len(told())
    assert bits(load_model(folder("llama"), weights="int4")) == wanted
    assert len(reads) == 2 and file.read_bytes() == whole
    if what in ("its first byte", "its last", "a checksum", "short"):
        assert "is not used" in told()[before]
    assert bits(load_model(folder("llama"), weights="int4")) == wanted and len(reads) == 2


def test_what_a_killed_writer_leaves_is_not_read_and_goes(small, monkeypatch) -> None:
    copy = inspect_model(folder("llama"), weights="int4").copy
    small.mkdir(parents=True)
    left = copy.file.with_name(f"{copy.file.name}~0123abcd")
    left.write_bytes(b"half")
    load_model(folder("llama"), weights="int4")
    assert list(weight_cache.copies()) == [copy.file]

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    copy.file.unlink()
    monkeypatch.setattr(weight_cache, "_in_pieces", killed)
    with pytest.raises(KeyboardInterrupt):
        load_model(folder("llama"), weights="int4")
    assert not weight_cache.copies()


def test_what_another_process_is_writing_is_left_to_it(small, reads, told) -> None:
    copy = inspect_model(folder("llama"), weights="int4").copy
    small.mkdir(parents=True)
    other = copy.file.with_name(f"{copy.file.name}~0123abcd")
    with other.open("wb") as file:
        assert weight_cache._lock(file)
        assert bits(load_model(folder("llama"), weights="int4")) == anew(folder("llama"))
        assert list(weight_cache.copies()) == [other] and not told()
    load_model(folder("llama"), weights="int4")
    assert list(weight_cache.copies()) == [copy.file]


@pytest.mark.parametrize("disk", ["NFS", "without locks"])
def test_a_killed_writers_file_is_in_nobodys_way(disk, small, monkeypatch) -> None:
    def flock(file: BinaryIO | int, how: int) -> None:
        if disk == "without locks":
            raise OSError(errno.ENOLCK, "No locks available")
        # Linux takes one of the server's locks, which wants a file that can be written.
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")

    copy = inspect_model(folder("llama"), weights="int4").copy
    small.mkdir(parents=True)
    left = copy.file.with_name(f"{copy.file.name}~0123abcd")
    left.write_bytes(b"half")
    monkeypatch.setattr(weight_cache.fcntl, "flock", flock)
    load_model(folder("llama"), weights="int4")
    # Where there are no locks nobody can know whether it is still being written.
    assert copy.file.is_file() and left.exists() == (disk != "NFS")


def test_two_at_once_are_fine() -> None:
    wanted, found = anew(folder("llama")), []
    threads = [
        threading.Thread(
            target=lambda: found.append(bits(load_model(folder("llama"), weights="int4")))
        )
        for _ in range(4)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == [wanted] * 4 and len(weight_cache.copies()) == 1
    assert bits(load_model(folder("llama"), weights="int4")) == wanted


@pytest.mark.parametrize("why", ["full", "filling", "no folder"])
def test_a_copy_that_cant_be_written_costs_one_sentence(why, small, monkeypatch, told) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    if why == "full":
        monkeypatch.setattr(weight_cache, "SPARE_BYTES", 1 << 60)
    elif why == "filling":
        monkeypatch.setattr(weight_cache.os, "pwrite", full)
    else:
        small.parent.mkdir(parents=True)
        small.write_text("")
    assert bits(load_model(folder("llama"), weights="int4")) == anew(folder("llama"))
    [sentence] = told()
    assert sentence.startswith("no copy of the int4 weights of ")
    assert "--no-weights-copy" in sentence
    reason = {"full": "to spare", "filling": "is full", "no folder": "Not a directory"}[why]
    assert reason in sentence
    assert not weight_cache.copies()


# ---- what is said, refused and deleted ----


def test_the_log_says_once_where_a_copy_is_and_how_large(caplog, told) -> None:
    for _ in range(2):
        load_model(folder("llama"), weights="int4")
    [sentence] = told()
    [(file, size)] = weight_cache.copies().items()
    assert str(file) in sentence and re.search(r"\(\d+\.\d\d [KM]iB\)", sentence)
    [level] = [one.levelno for one in caplog.records if one.getMessage() == sentence]
    assert level == logging.WARNING  # also where nobody has set up a log
    assert size == file.stat().st_size


def test_who_refuses_a_copy_gets_none(monkeypatch) -> None:
    assert inspect_model(folder("llama"), weights="int4", weights_copy=False).copy is None
    assert not weight_cache.worth("int4", "cuda", 1 << 40)  # nor does a GPU
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 1 << 28)  # and who has a small model
    assert inspect_model(folder("llama"), weights="int4").copy is None
    options = commands.command_line().parse_args(["serve", "m", "--weights", "int4"])
    assert options.weights_copy
    options = commands.command_line().parse_args(["serve", "m", "--no-weights-copy"])
    assert not argument_types.engine(options)["weights_copy"]


def test_doctor_lists_copies_and_prune_deletes_them(capsys) -> None:
    load_model(folder("llama"), weights="int4")
    load_model(folder("llama"), weights="int8")
    names = [file.name for file in weight_cache.copies()]
    assert commands.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "2 copies (`tinsmith prune --copies` deletes them)" in shown
    assert all(name in shown for name in names)
    assert commands.main(["prune", "--copies", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names) and "would be deleted" in shown
    assert commands.main(["prune", "--copies", "--keep", "1"]) == 1
    assert "--copies is about weights" in capsys.readouterr().err
    assert len(weight_cache.copies()) == 2
    assert commands.main(["prune", "--copies", "--yes"]) == 0
    assert "deleted: " in capsys.readouterr().out and not weight_cache.copies()
    assert commands.main(["prune", "--copies", "--yes"]) == 0
    assert "nothing to delete: 0 bytes in 0 copies" in capsys.readouterr().out


# ---- the engine ----


def test_the_codes_number_is_of_all_files_that_make_weights() -> None:
    root, setup = ROOT, op_devices.setup_py()
    assert _core.weights_code() == int(setup.CODE.rstrip("u"))
    found = {f"csrc/cpu/weights/{one}.c" for one in ("packed", "quantize", "repack", "weight_load")}
    for _ in range(5):
        for name in list(found):
            named = re.findall(r'^#include "(.+)"', (root / name).read_text(), re.MULTILINE)
            files = (((root / name).parent / one).resolve() for one in named)
            found |= {str(one.relative_to(root)) for one in files}
    elsewhere = {"csrc/cpu/runtime/pool.h", "csrc/device/status.h", "csrc/device/ops.inc"}
    assert found - elsewhere <= set(setup.PACKERS)


def reference(content: bytes) -> int:
    """binding/checksum.c, word by word."""

    def take(lane: int, word: int) -> int:
        lane ^= word
        return (lane << 29 | lane >> 35) * 0x9E3779B97F4A7C15 & MASK

    lanes, total = list(range(1, 9)), len(content)
    whole = content[: len(content) // 64 * 64]
    for stretch in (
        *(whole[at : at + 64] for at in range(0, len(whole), 64)),
        content[len(whole) :],
    ):
        words = np.frombuffer(stretch.ljust(64, b"\0"), "<u8")
        lanes = [take(lane, int(word)) for lane, word in zip(lanes, words, strict=True)]
    for lane in lanes:
        total = take(total, lane)
    return total ^ total >> 32


def test_a_checksum_is_its_formulas_and_no_changed_byte_leaves_it() -> None:
    content = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    for length in (0, 1, 63, 64, 65, 1000):
        assert _core.checksum(content[:length]) == reference(content[:length].tobytes())
    found = {_core.checksum(content)}
    for at in range(len(content)):
        content[at] ^= 1
        found.add(_core.checksum(content))
        content[at] ^= 1
    assert len(found) == 1001
    assert len({_core.checksum(np.zeros(n, np.uint8)) for n in range(200)}) == 200


def test_weights_are_mapped_once_and_read_once_they_are_there(tmp_path) -> None:
    model = load_model(folder("llama"), weights="int4")
    core = registry.open_core(inspect_model(folder("llama"), weights="int4"), threads=1)
    with pytest.raises(ValueError, match="not sealed"):
        core.memory()
    with pytest.raises(ValueError, match="has weights already"):
        model.core.map(0, 0)
    with (tmp_path / "x").open("wb") as file, pytest.raises(MemoryError, match="can't be mapped"):
        core.map(file.fileno(), 0)  # not open to be read
    memory = model.core.memory()
    assert not memory.flags.writeable and memory.size == model.core.weight_bytes
    del model
    assert memory.any()
