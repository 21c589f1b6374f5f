"""Checkpoints: bit for bit, loaded by PEFT, and whole or not at all whatever fails on the way."""

import dataclasses
import errno
import json
import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from peft import PeftModel
from support.tiny_models import (
    SPECS,
    as_double,
    call,
    datum,
    error,
    folder,
    loaded,
    logprobs,
    randomize,
    tokens_of,
    with_peft,
)
from tinsmith import _core
from tinsmith.checkpoints import checkpoint
from tinsmith.checkpoints.meta import Meta, load_meta
from tinsmith.checkpoints.store import Store
from tinsmith.formats import safetensors_io
from tinsmith.models.registry import FAMILIES, Family
from tinsmith.system import disk

ADAM = {
    "learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01,
    "grad_clip_norm": 1.0,
}  # fmt: skip
VECTORS = ("weights", "gradients", "m", "v")


def adapter_of(name: str = "qwen3", seed: int = 0, **options: Any) -> _core.Adapter:
    return randomize(_core.Adapter(loaded(name).core, **{"rank": 4, "alpha": 8.0, **options}), seed)


def meta_of(adapter: _core.Adapter, name: str = "qwen3", **changes: Any) -> Meta:
    fields = {
        "base_model": str(folder(name)),
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "seed": 0,
        "attn": True,
        "mlp": True,
        "unembed": True,
        "kind": "weights",
        "step": adapter.step,
        "user_metadata": {"note": "größer 🙂"},
        "created": "2026-11-21T12:00:00+00:00",
        "ttl_seconds": None,
    }
    return Meta(**fields | changes)


# Models whose modules have PEFT's names in our checkpoints.
OWN_NAMES = {family.name for family in FAMILIES if family.modules}
AS_PEFT = [name for name, spec in SPECS.items() if spec.family not in OWN_NAMES]


def save(path: Path, adapter: _core.Adapter, meta: Meta, **options: Any) -> None:
    checkpoint.save(path, family_of(meta), adapter, meta, **options)


def load_into(path: Path, adapter: _core.Adapter, **options: Any) -> None:
    checkpoint.load_into(path, family_of(load_meta(path)), adapter, **options)


def family_of(meta: Meta) -> Family:
    """The family of a meta_of's model."""
    name = SPECS[Path(meta.base_model).name].family
    return next(family for family in FAMILIES if family.name == name)


def train(adapter: _core.Adapter, name: str = "qwen3", steps: int = 2, seed: int = 0) -> None:
    for step in range(steps):
        call(adapter, [datum(tokens_of(name, 20 + step, seed))])
        adapter.optim_step(**ADAM)


def vectors(adapter: _core.Adapter) -> dict[str, np.ndarray]:
    read = {what: adapter.read(what) for what in VECTORS}
    return read | {"pending": np.asarray(adapter.pending)}


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for what in wanted:
        np.testing.assert_array_equal(found[what].view(np.uint32), wanted[what].view(np.uint32))


# ---- round trips ----


@pytest.mark.parametrize("name", SPECS)
def test_a_round_trip_is_bit_for_bit(name: str, tmp_path: Path) -> None:
    adapter = adapter_of(name)
    train(adapter, name)
    call(adapter, [datum(tokens_of(name, 9))])  # gradients that are not used yet
    meta = meta_of(adapter, name)
    save(tmp_path / "a", adapter, meta, optimizer=True)
    assert load_meta(tmp_path / "a") == meta
    again = checkpoint.load_adapter(tmp_path / "a", loaded(name), optimizer=True)
    assert_same(vectors(again), vectors(adapter))
    assert again.step == adapter.step == 2
    assert (again.rank, again.alpha) == (4, 8.0)


@pytest.mark.parametrize("pending", (False, True))
def test_a_resumed_run_goes_on_bit_for_bit(pending: bool, tmp_path: Path) -> None:
    adapter = adapter_of()
    train(adapter)
    if pending:
        call(adapter, [datum(tokens_of("qwen3", 9))])
    save(tmp_path / "a", adapter, meta_of(adapter), optimizer=True)
    resumed = checkpoint.load_adapter(tmp_path / "a", loaded("qwen3"), optimizer=True)
    other = adapter_of(seed=5)
    train(other, steps=1)
    call(other, [datum(tokens_of("qwen3", 9))])
    load_into(tmp_path / "a", other, optimizer=True)
    for one in (adapter, resumed, other):
        train(one, steps=3, seed=1)
    assert_same(vectors(resumed), vectors(adapter))
    assert_same(vectors(other), vectors(adapter))


def test_without_the_optimizer_it_is_as_new(tmp_path: Path) -> None:
    adapter = adapter_of()
    train(adapter)
    save(tmp_path / "a", adapter, meta_of(adapter), optimizer=True)
    other = adapter_of(seed=5)
    train(other, steps=3)
    call(other, [datum(tokens_of("qwen3", 9))])
    load_into(tmp_path / "a", other, optimizer=False)
    found = vectors(other)
    np.testing.assert_array_equal(found["weights"], adapter.read("weights"))
    assert not any(found[what].any() for what in ("gradients", "m", "v", "pending"))
    assert other.step == 0
    loaded_alone = checkpoint.load_adapter(tmp_path / "a", loaded("qwen3"), optimizer=False)
    assert_same(vectors(loaded_alone), found)


def test_a_snapshot_is_saved_for_sampling(tmp_path: Path) -> None:
    adapter = adapter_of()
    meta = meta_of(adapter, kind="sampler_weights", ttl_seconds=3600)
    save(tmp_path / "a", adapter.snapshot(), meta, optimizer=False)
    assert load_meta(tmp_path / "a").ttl_seconds == 3600
    again = checkpoint.load_adapter(tmp_path / "a", loaded("qwen3"), optimizer=False)
    np.testing.assert_array_equal(again.read("weights"), adapter.read("weights"))
    with pytest.raises(ValueError, match=r"was saved without optimizer\.safetensors"):
        checkpoint.load_adapter(tmp_path / "a", loaded("qwen3"), optimizer=True)


# ---- PEFT ----


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"attn": False},
        {"mlp": False, "unembed": False},
        {"attn": False, "mlp": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", AS_PEFT)
def test_peft_loads_it_and_gives_the_same(
    name: str, groups: dict[str, bool], tmp_path: Path
) -> None:
    adapter = adapter_of(name, rank=3, **groups)
    save(tmp_path / "a", adapter, meta_of(adapter, name, **groups), optimizer=True)
    model = PeftModel.from_pretrained(as_double(folder(name)), str(tmp_path / "a")).double().eval()
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha) == (3, 8.0)
    assert config.base_model_name_or_path == str(folder(name))
    one = datum(tokens_of(name, 40), np.tile(np.arange(80), (40, 1)))
    with torch.no_grad():
        table = logprobs(model, one.tokens)
        wanted = logprobs(with_peft(name, adapter), one.tokens)
    assert error(table, wanted) < 1e-7
    (found,), _ = call(adapter, [one], backward=False)
    assert error(found, table[:, :80]) < 1e-5


def test_the_adapters_file_is_whole_and_plain(tmp_path: Path) -> None:
    adapter = adapter_of()
    save(tmp_path / "a", adapter, meta_of(adapter), optimizer=False)
    assert {file.name for file in (tmp_path / "a").iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "meta.json",
    }  # fmt: skip
    tensors = safetensors.numpy.load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert sum(tensor.size for tensor in tensors.values()) == adapter.size
    assert tensors["base_model.model.lm_head.lora_B.weight"].shape == (131, 4)
    assert tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (
        4,
        36,
    )
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head",
    }  # fmt: skip


# ---- what can't be loaded ----


def saved(tmp_path: Path) -> Path:
    adapter = adapter_of()
    train(adapter)
    save(tmp_path / "a", adapter, meta_of(adapter), optimizer=True)
    return tmp_path / "a"


def refuses(path: Path, sentence: str, kind: type[Exception] = ValueError) -> None:
    """Loading fails with the sentence and leaves the adapter as it was."""
    adapter = adapter_of(seed=9)
    train(adapter, steps=1)
    call(adapter, [datum(tokens_of("qwen3", 9))])
    before = vectors(adapter)
    with pytest.raises(kind, match=sentence):
        load_into(path, adapter, optimizer=True)
    assert_same(vectors(adapter), before)
    assert adapter.step == 1


FILES = ("adapter_model.safetensors", "optimizer.safetensors")


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_found(name: str, tmp_path: Path) -> None:
    file = saved(tmp_path) / name
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    refuses(file.parent, f"{name} is damaged")


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_found(name: str, tmp_path: Path) -> None:
    file = saved(tmp_path) / name
    size = file.stat().st_size
    os.truncate(file, size - 1)
    refuses(file.parent, f"{name} should be {size} bytes, found {size - 1}")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(name: str, tmp_path: Path) -> None:
    file = saved(tmp_path) / name
    file.unlink()
    refuses(file.parent, f"{name} is missing", FileNotFoundError)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: text[:50], "meta.json is not JSON"),
        (lambda text: text.replace('"rank"', '"rang"'), "meta.json lacks rank"),
        (lambda text: "[]", "meta.json lacks"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "has version 2; this tinsmith"),
    ],
)
def test_a_bad_meta_is_found(change: Callable[[str], str], sentence: str, tmp_path: Path) -> None:
    file = saved(tmp_path) / "meta.json"
    file.write_text(change(file.read_text()))
    refuses(file.parent, sentence)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    refuses(tmp_path / "none", "there is no checkpoint at", FileNotFoundError)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        checkpoint.load_adapter(tmp_path, loaded("qwen3"), optimizer=False)


@pytest.mark.parametrize("what", ("weights", "m"))
def test_numbers_that_are_not_finite_are_refused(what: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    name = FILES[what == "m"]
    tensors = safetensors.numpy.load_file(path / name)
    key = "m" if what == "m" else next(iter(tensors))
    tensors[key].flat[3] = np.nan
    safetensors_io.write(path / name, tensors, {"step": "2"})
    rehash(path, name)
    refuses(path, "its m has nan at" if what == "m" else f"{key} has nan at .0, 3.: all of its")


def test_other_matrices_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    tensors = safetensors.numpy.load_file(path / FILES[0])
    del tensors["base_model.model.lm_head.lora_A.weight"]
    safetensors_io.write(path / FILES[0], tensors)
    rehash(path, FILES[0])
    refuses(path, "only this adapter has base_model.model.lm_head.lora_A.weight")


def test_a_matrix_of_another_shape_or_type_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    tensors = safetensors.numpy.load_file(path / FILES[0])
    key = "base_model.model.lm_head.lora_A.weight"
    for other in (tensors[key].T.copy(), tensors[key].astype(np.float16)):
        safetensors_io.write(path / FILES[0], tensors | {key: other})
        rehash(path, FILES[0])
        refuses(path, rf"{key}: file has F\d\d \(.*\), the adapter needs F32 \(4, 36\)")


def rehash(path: Path, name: str) -> None:
    """Makes meta.json agree with a file that a test has changed."""
    content = json.loads((path / "meta.json").read_text())
    content["files"][name] = {
        "bytes": (path / name).stat().st_size,
        "sha256": checkpoint._digest(path / name),
    }
    (path / "meta.json").write_text(json.dumps(content))


def test_another_base_model_or_adapter_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(ValueError, match="with width 36, this one has width 40"):
        checkpoint.load_adapter(path, loaded("llama"), optimizer=False)
    for options, sentence in (
        ({"rank": 5}, "has rank 4, this adapter has rank 5"),
        ({"alpha": 16.0}, "has alpha 8.0, this adapter has alpha 16.0"),
        ({"mlp": False}, "only the file has base_model.model.model.layers.0.mlp"),
    ):
        with pytest.raises(ValueError, match=sentence):
            load_into(path, adapter_of(**options), optimizer=False)


def test_a_resumed_run_sums_gradients_as_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In micro-batches of as many rows, on a machine whose default is another one."""
    adapter, path = adapter_of(step_tokens=77), tmp_path / "a"
    save(path, adapter, meta_of(adapter), optimizer=True)
    assert json.loads((path / "meta.json").read_text())["gradient"] == {
        "parts": 8, "step_tokens": 77,
    }  # fmt: skip
    own = adapter_of().step_tokens
    for optimizer, wanted in ((True, 77), (False, own)):
        other = checkpoint.load_adapter(path, loaded("qwen3"), optimizer=optimizer)
        assert other.step_tokens == wanted != 77 * (not optimizer)
    assert not caplog.messages
    content = json.loads((path / "meta.json").read_text())
    content["gradient"] = {"parts": 4, "step_tokens": 1 << 30}
    (path / "meta.json").write_text(json.dumps(content))
    assert checkpoint.load_adapter(path, loaded("qwen3"), optimizer=True).step_tokens == own
    assert "in 4 parts of micro-batches of 1073741824 tokens; here it is 8 parts" in caplog.text
    content["gradient"] = {"parts": 8, "step_tokens": 0}
    (path / "meta.json").write_text(json.dumps(content))
    refuses(path, "gradient should have parts and step_tokens, found")


# ---- whole or not at all ----


def test_an_existing_checkpoint_is_kept_unless_overwritten(tmp_path: Path) -> None:
    first, second = adapter_of(seed=1), adapter_of(seed=2)
    save(tmp_path / "a", first, meta_of(first), optimizer=True)
    with pytest.raises(
        FileExistsError, match=r"exists; choose another name or pass overwrite=True$"
    ):
        save(tmp_path / "a", second, meta_of(second), optimizer=False)
    found = checkpoint.load_adapter(tmp_path / "a", loaded("qwen3"), optimizer=True)
    assert_same(vectors(found), vectors(first))
    save(tmp_path / "a", second, meta_of(second), optimizer=False, overwrite=True)
    found = checkpoint.load_adapter(tmp_path / "a", loaded("qwen3"), optimizer=False)
    np.testing.assert_array_equal(found.read("weights"), second.read("weights"))
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    assert not (tmp_path / "a" / "optimizer.safetensors").exists()


class Fault:
    """Fails the n-th of the calls that touch the disk while saving, or all from there on; not those
    of other threads, which a server of other tests may have."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        number: int,
        error: BaseException,
        *,
        lasting: bool = False,
    ) -> None:
        self.left = number
        self.error = error
        self.lasting = lasting
        self.thread = threading.get_ident()
        self.done: list[str] = []  # the calls that did not fail
        system, path = ("fsync", "open", "rename", "link"), ("rename", "mkdir", "chmod", "open")
        touching = [(os, name) for name in system] + [(Path, name) for name in path]
        for owner, name in [*touching, (disk, "_exchange_at_once")]:
            monkeypatch.setattr(owner, name, self.wrap(getattr(owner, name)))
        remove = disk.remove
        monkeypatch.setattr(disk, "remove", lambda path: self.unharmed(remove, path))

    def unharmed(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls what may fail without any harm."""
        left, self.left = self.left, 1 << 30
        function(*arguments)
        self.left = left

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != self.thread:
                return function(*arguments, **options)
            self.left -= 1
            if self.left == 0 or (self.left < 0 and self.lasting):
                raise self.error
            self.done.append(function.__name__)
            return function(*arguments, **options)

        return wrapped


@pytest.fixture(params=("exchange", "aside"))
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which a folder takes another's place."""
    if request.param == "aside":
        monkeypatch.setattr(disk, "_exchange_at_once", lambda one, other: False)
    return request.param


@pytest.mark.parametrize("overwrite", (False, True))
def test_a_full_disk_at_any_point_leaves_what_was_there(
    overwrite: bool, swap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = adapter_of(seed=1), adapter_of(seed=2)
    if overwrite:
        save(tmp_path / "a", old, meta_of(old), optimizer=True)
    for number in range(1, 100):
        with monkeypatch.context() as patch:
            fault = Fault(patch, number, OSError(errno.ENOSPC, "No space left on device"))
            try:
                save(tmp_path / "a", new, meta_of(new), optimizer=True, overwrite=overwrite)
            except OSError as caught:
                assert caught.errno == errno.ENOSPC
                assert "the disk is full: the checkpoint" in str(caught)
            else:
                assert fault.left > 0  # every point was tried
                break
        assert [file.name for file in tmp_path.iterdir()] == (["a"] if overwrite else [])
        if overwrite:
            found = checkpoint.load_adapter(tmp_path / "a", loaded("qwen3"), optimizer=True)
            assert_same(vectors(found), vectors(old))
    assert number > 12
    found = checkpoint.load_adapter(tmp_path / "a", loaded("qwen3"), optimizer=True)
    assert_same(vectors(found), vectors(new))


@pytest.mark.parametrize("overwrite", (False, True))
def test_everything_is_synced_before_it_is_moved_and_the_move_after(
    overwrite: bool, swap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapter_of()
    place = tmp_path / "runs" / "a"
    if overwrite:
        save(place, adapter, meta_of(adapter), optimizer=True)
    log: list[tuple[str, str]] = []
    fsync, rename, exchange = os.fsync, Path.rename, disk._exchange_at_once

    def logged_fsync(descriptor: int) -> None:
        log.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def logged_rename(path: Path, target: Path) -> Path:
        log.append(("move", path.name))
        return rename(path, target)

    def logged_exchange(one: Path, other: Path) -> bool:
        done = exchange(one, other)
        log.extend([("move", one.name)] * done)
        return done

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "rename", logged_rename)
    monkeypatch.setattr(disk, "_exchange_at_once", logged_exchange)
    save(place, adapter, meta_of(adapter), optimizer=True, overwrite=overwrite)
    moved = [name for kind, name in log if kind == "move"]
    temporary = next(name for name in moved if name != "a")
    files = ["adapter_model.safetensors", "optimizer.safetensors", "adapter_config.json"]
    wanted = [("sync", name) for name in (*files, "meta.json", temporary)]
    aside = overwrite and swap == "aside"
    wanted += [("move", "a")] * aside + [("move", temporary)]
    wanted += [("move", "a~old")] * aside + [("sync", "runs")]
    made = [("sync", tmp_path.name)] * (not overwrite)  # the folder above is new
    assert log == made + wanted


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    adapter = adapter_of()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(tmp_path / "a", adapter, meta_of(adapter), optimizer=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


class Killed(BaseException):
    """Stands for a kill: from here on nothing touches the disk."""


@pytest.mark.parametrize("overwrite", (False, True))
def test_a_kill_at_any_point_is_recovered_when_the_store_is_claimed(
    overwrite: bool, swap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = adapter_of(seed=1), adapter_of(seed=2)
    path = "tinker://run:1/weights/a"
    for number in range(1, 100):
        root = tmp_path / str(number)
        place = Store(root).folder(path)
        if overwrite:
            save(place, old, meta_of(old), optimizer=True)
        killed = killed_while_saving(monkeypatch, place, new, number, overwrite)
        before = Store(root).checkpoints("run:1")
        assert before == [path] or not overwrite
        store = claimed(root)
        left = store.checkpoints("run:1")
        assert left == [path] if overwrite or not killed else left in ([], [path])
        assert [file.name for file in place.parent.glob("*")] == ["a"] * len(left)
        if left:
            found = checkpoint.load_adapter(place, loaded("qwen3"), optimizer=True)
            assert any(same_weights(found, one) for one in (old, new))
        if not killed:
            assert same_weights(found, new)
            break
    assert number > 12


def claimed(root: Path) -> Store:
    """A store as a server opens it, and closes it again."""
    store = Store(root)
    store.claim()
    store.close()
    return store


def same_weights(one: _core.Adapter, other: _core.Adapter) -> bool:
    return np.array_equal(one.read("weights"), other.read("weights"))


def killed_while_saving(
    monkeypatch: pytest.MonkeyPatch,
    place: Path,
    adapter: _core.Adapter,
    number: int,
    overwrite: bool,
) -> bool:
    """Saves until the n-th touch of the disk; whether it came to that."""
    with monkeypatch.context() as patch:
        Fault(patch, number, Killed(), lasting=True)
        patch.setattr(disk, "remove", lambda *_: None)
        try:
            save(place, adapter, meta_of(adapter), optimizer=True, overwrite=overwrite)
        except Killed:
            return True
    return False


@pytest.mark.parametrize("killed", (False, True))
def test_a_change_of_what_a_checkpoint_says_happens_whole_or_not_at_all(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, adapter = Store(tmp_path), adapter_of()
    path = store.path("r", "weights", "a")
    save(store.folder(path), adapter, meta_of(adapter), optimizer=True)
    before = load_meta(store.folder(path))
    for number in range(1, 100):
        with monkeypatch.context() as patch:
            error = Killed() if killed else OSError(errno.ENOSPC, "No space left on device")
            fault = Fault(patch, number, error, lasting=killed)
            if killed:
                patch.setattr(os, "unlink", lambda *_, **__: None)
            try:
                store.update(path, public=True, ttl_seconds=10**9)
            except (OSError, Killed):
                pass
            else:
                assert fault.left > 0  # every point was tried
                break
        found = load_meta(store.folder(path))
        changes = {"public": True, "ttl_seconds": 10**9} if "rename" in fault.done else {}
        assert found == dataclasses.replace(before, **changes)
        names = {file.name for file in store.folder(path).iterdir()}
        assert killed or names == {*FILES, "adapter_config.json", "meta.json"}
        store.update(path, public=False, ttl_seconds=None)
    assert number > 3
    assert load_meta(store.folder(path)).public
    found = checkpoint.load_adapter(store.folder(path), loaded("qwen3"), optimizer=True)
    assert_same(vectors(found), vectors(adapter))


# ---- tinker:// paths ----


def test_paths_and_folders_turn_into_each_other(tmp_path: Path) -> None:
    store = Store(tmp_path / "root")
    adapter = adapter_of()
    runs = ["a1b2:train:0", "x y%3A~ü", "..hidden", "plain"]
    for run in runs:
        for kind in ("weights", "sampler_weights"):
            for name in ("000002", "final.v-1_x"):
                path = store.path(run, kind, name)
                assert path == f"tinker://{run}/{kind}/{name}"
                save(store.folder(path), adapter, meta_of(adapter), optimizer=False)
                assert store.folder(path).resolve().is_relative_to(tmp_path / "root")
    again = Store(tmp_path / "root")
    assert again.runs() == sorted(runs)
    for run in runs:
        assert sorted(again.checkpoints(run)) == sorted(
            f"tinker://{run}/{kind}/{name}"
            for kind in ("weights", "sampler_weights")
            for name in ("000002", "final.v-1_x")
        )
    assert again.checkpoints("other") == []


def test_a_run_cannot_leave_the_root(tmp_path: Path) -> None:
    store = Store(tmp_path / "root")
    store.run_folder("../evil").mkdir(parents=True)
    assert store.runs() == ["../evil"] and store.checkpoints("../evil") == []
    assert [file.name for file in tmp_path.iterdir()] == ["root"]


def test_a_checkpoint_that_is_being_written_is_not_listed(tmp_path: Path) -> None:
    store, adapter = Store(tmp_path), adapter_of()
    path = store.path("r", "weights", "a")
    save(store.folder(path), adapter, meta_of(adapter), optimizer=False)
    shutil.copytree(store.folder(path), store.folder(path).with_name("b~0a1b2c3d"))
    assert store.checkpoints("r") == [path]
    assert claimed(tmp_path).checkpoints("r") == [path]
    assert [file.name for file in store.folder(path).parent.iterdir()] == ["a"]


def test_checkpoints_are_listed_in_the_order_they_were_made(tmp_path: Path) -> None:
    store, adapter = Store(tmp_path), adapter_of()
    for name in ("b", "c", "a"):
        path = store.path("r", "weights", name)
        save(store.folder(path), adapter, meta_of(adapter), optimizer=False)
    assert [path[-1] for path in store.checkpoints("r")] == ["b", "c", "a"]


def test_a_checkpoint_is_deleted(tmp_path: Path) -> None:
    store, adapter = Store(tmp_path), adapter_of()
    paths = [store.path("r", "weights", name) for name in ("a", "b")]
    for path in paths:
        save(store.folder(path), adapter, meta_of(adapter), optimizer=False)
    store.delete(paths[0])
    assert store.checkpoints("r") == paths[1:]
    assert [file.name for file in store.folder(paths[0]).parent.iterdir()] == ["b"]
    with pytest.raises(FileNotFoundError, match="there is no checkpoint tinker://r/weights/a"):
        store.delete(paths[0])


@pytest.mark.parametrize(
    "path",
    [
        "tinker://run/weights", "tinker://run/weights/a/b", "tinker:///weights/a",
        "tinker://run//a", "tinker://run/weights/", "run/weights/a", "", "tinker://",
        "file://run/weights/a", "/etc/passwd", "tinker://run/weights/../../a",
    ],
)  # fmt: skip
def test_a_path_of_another_form_is_a_sentence(path: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="is not a checkpoint's path, tinker://<run>/<kind>/<name>"
    ):
        Store(tmp_path).folder(path)


@pytest.mark.parametrize(
    "name", (".", "..", "a b", "a~old", "ü", "a\\b", "a\0", "a\n", "%2e", "x" * 129)
)
def test_a_name_that_could_lead_elsewhere_is_a_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be a checkpoint's name"):
        Store(tmp_path).path("run", "weights", name)


@pytest.mark.parametrize("run", (".", "..", "x" * 201, "\0" * 100))
def test_a_run_that_could_lead_elsewhere_is_a_sentence(run: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be the id of a training run"):
        Store(tmp_path).folder(f"tinker://{run}/weights/a")


def test_another_kind_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="or external_weights, found 'other"):
        Store(tmp_path).folder("tinker://run/other_weights/a")
