"""Safetensors: against the safetensors package in both directions, and every way a file can lie."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from support.tiny_models import SPECS, folder
from tinsmith.formats import safetensors_io


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "odd": rng.normal(size=(3,)).astype(np.float16),
        "matrix": rng.normal(size=(5, 7)).astype(np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.float32(2.5).reshape(()),
        "ids": np.arange(9, dtype=np.int64),
        "turned": rng.normal(size=(4, 6)).astype(np.float32).T,
    }


@pytest.mark.parametrize("name", SPECS)
def test_reads_what_safetensors_reads(name: str) -> None:
    read: dict[str, torch.Tensor] = {}
    for file in folder(name).glob("*.safetensors"):
        read |= safetensors.torch.load_file(file)
    with safetensors_io.open_folder(folder(name)) as found:
        assert set(found) == set(read)
        for key, tensor in read.items():
            bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
            np.testing.assert_array_equal(found[key], bits.numpy(), strict=True)
            assert not found[key].flags.writeable


def test_safetensors_reads_what_we_write(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    safetensors_io.write(file, tensors(), {"format": "pt", "step": "3"})
    read = safetensors.numpy.load_file(file)
    assert set(read) == set(tensors())
    for key, array in tensors().items():
        np.testing.assert_array_equal(read[key], array, strict=True)
    with safetensors.safe_open(file, "np") as opened:
        assert opened.metadata() == {"format": "pt", "step": "3"}
    with safetensors_io.open_file(file) as found:
        assert found.metadata == {"format": "pt", "step": "3"}
        for key in ("odd", "matrix", "empty", "scalar", "turned"):
            np.testing.assert_array_equal(found[key], tensors()[key], strict=True)


def test_uint16_is_written_as_bf16(tmp_path: Path) -> None:
    numbers = torch.randn(4, 3).to(torch.bfloat16)
    safetensors_io.write(tmp_path / "a.safetensors", {"x": numbers.view(torch.uint16).numpy()})
    assert torch.equal(safetensors.torch.load_file(tmp_path / "a.safetensors")["x"], numbers)


def test_every_written_tensor_is_aligned(tmp_path: Path) -> None:
    safetensors_io.write(tmp_path / "a.safetensors", tensors())
    with safetensors_io.open_file(tmp_path / "a.safetensors") as found:
        for key in found:
            assert found.entry(key).begin % tensors()[key].itemsize == 0


def test_a_header_of_odd_length_still_gives_aligned_arrays(tmp_path: Path) -> None:
    item = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    text = json.dumps({"x": item}).encode()
    text += b" " * (1 - len(text) % 2)
    data = np.array([1.5, -2.5], np.float32)
    file = tmp_path / "a.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data.tobytes())
    with safetensors_io.open_file(file) as found:
        assert len(text) % 2 and found["x"].flags.aligned and not found["x"].flags.writeable
        np.testing.assert_array_equal(found["x"], data)


def test_a_view_outlives_its_folder(tmp_path: Path) -> None:
    safetensors_io.write(tmp_path / "a.safetensors", tensors())
    with safetensors_io.open_file(tmp_path / "a.safetensors") as found:
        matrix = found["matrix"]
    np.testing.assert_array_equal(matrix, tensors()["matrix"])


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    safetensors_io.write(tmp_path / "a.safetensors", {"ids": np.arange(3)})
    with (
        safetensors_io.open_file(tmp_path / "a.safetensors") as found,
        pytest.raises(ValueError, match="ids is I64; tinsmith reads BF16, F16, F32"),
    ):
        found["ids"]
    with pytest.raises(ValueError, match="complex128 can't be written"):
        safetensors_io.write(tmp_path / "b.safetensors", {"z": np.zeros(2, np.complex128)})


# ---- files that lie ----

X = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
Y = {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]}


def encode(header: Any, data: int = 32) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "found 0 bytes"),
    "cut in the length": (b"\1\0\0", "found 3 bytes"),
    "header too long": (
        (10**9).to_bytes(8, "little") + b"{}" * 9,
        "1000000000 bytes long; the limit",
    ),
    "cut in the header": (encode({"x": X, "y": Y})[:40], "should be .* bytes, the file has 32"),
    "not an object": (encode(b"[1, 2]"), r"should begin with '\{', found b'\['"),
    "leading space": (encode(b' {"x": 1}'), "should begin with"),
    "not JSON": (encode(b'{"x": '), "is not JSON"),
    "not UTF-8": (encode(b'{"\xff": 1}'), "is not JSON"),
    "nested too deep": (encode(b'{"x": ' + b"[" * 100_000 + b"}"), "is not JSON"),
    "same name twice": (
        encode(b'{"x": %b, "x": %b}' % ((json.dumps(X).encode(),) * 2)),
        "the key 'x' is there twice",
    ),
    "too many entries": (encode(b"{" * 70_000), "more than 65536 entries"),
    "entry not an object": (encode({"x": 3}), "header's x should be an object"),
    "unknown type": (encode({"x": X | {"dtype": "F7"}, "y": Y}), "x has the unknown dtype 'F7'"),
    "type not a string": (encode({"x": X | {"dtype": ["F32"]}, "y": Y}), "x has the unknown dtype"),
    "negative size": (encode({"x": X | {"shape": [-2, -3]}, "y": Y}), r"x has the shape \[-2, -3"),
    "size a float": (encode({"x": X | {"shape": [2.0, 3]}, "y": Y}), "x has the shape"),
    "size a bool": (encode({"x": X | {"shape": [True, 6]}, "y": Y}), "x has the shape"),
    "no shape": (encode({"x": {"dtype": "F32", "data_offsets": [0, 24]}}), "x has the shape None"),
    "too large a shape": (
        encode({"x": X | {"shape": [1 << 61, 1 << 61, 0, 4]}, "y": Y}),
        "needs 0 bytes, its data_offsets hold 24",
    ),
    "shape beyond its bytes": (
        encode({"x": X | {"shape": [2, 4]}, "y": Y}),
        r"x F32 \(2, 4\) needs 32 bytes, its data_offsets hold 24",
    ),
    "three offsets": (encode({"x": X | {"data_offsets": [0, 24, 24]}}), "x has the data_offsets"),
    "offsets turned": (encode({"x": X | {"data_offsets": [24, 0]}}), "x has the data_offsets"),
    "overlap": (
        encode({"x": X, "y": Y | {"data_offsets": [20, 28]}}, 28),
        "y should begin at byte 24, its offset is 20",
    ),
    "hole": (
        encode({"x": X, "y": Y | {"data_offsets": [28, 36]}}, 36),
        "y should begin at byte 24, its offset is 28",
    ),
    "hole at the front": (encode({"y": Y}), "y should begin at byte 0, its offset is 24"),
    "cut at the end": (encode({"x": X, "y": Y}, 31), "need 32 bytes, the file has 31"),
    "more at the end": (encode({"x": X, "y": Y}, 33), "need 32 bytes, the file has 33"),
    "metadata not strings": (encode({"__metadata__": {"a": 1}, "x": X, "y": Y}), "__metadata__"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    content, sentence = LIES[lie]
    file = tmp_path / "lie.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as caught:
        safetensors_io.open_file(file)
    assert str(file) in str(caught.value) and len(str(caught.value)) < 400


def test_the_honest_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(encode({"x": X, "y": Y}))
    with safetensors_io.open_file(tmp_path / "a.safetensors") as found:
        assert found["x"].shape == (2, 3) and found["y"].shape == (2,)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = encode({"x": X, "y": Y})
    for size in range(len(whole)):
        (tmp_path / "a.safetensors").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"a\.safetensors"):
            safetensors_io.open_file(tmp_path / "a.safetensors")


# ---- folders and shards ----


def shards(path: Path) -> dict[str, Any]:
    safetensors_io.write(path / "one.safetensors", {"x": np.ones(2, np.float32)})
    safetensors_io.write(path / "two.safetensors", {"y": np.ones(3, np.float32)})
    return {"weight_map": {"x": "one.safetensors", "y": "two.safetensors"}}


INDEXES: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "no map": (lambda index: {}, ValueError, "has no weight_map"),
    "not an object": (lambda index: [index], ValueError, "has no weight_map"),
    "a folder above": (
        lambda index: {"weight_map": index["weight_map"] | {"x": "../one.safetensors"}},
        ValueError,
        "x names the file '../one.safetensors', not one beside the index",
    ),
    "not a string": (
        lambda index: {"weight_map": index["weight_map"] | {"x": 3}},
        ValueError,
        "x names the file 3",
    ),
    "missing shard": (
        lambda index: {"weight_map": index["weight_map"] | {"x": "three.safetensors"}},
        FileNotFoundError,
        "x is in three.safetensors, which is missing",
    ),
    "wrong shard": (
        lambda index: {"weight_map": index["weight_map"] | {"x": "two.safetensors"}},
        ValueError,
        "x should be in two.safetensors, which does not have it",
    ),
}


@pytest.mark.parametrize("case", INDEXES)
def test_a_bad_index_is_refused(case: str, tmp_path: Path) -> None:
    change, kind, sentence = INDEXES[case]
    index = tmp_path / safetensors_io.INDEX_FILE
    content = shards(tmp_path)
    index.write_text(json.dumps(content))
    with safetensors_io.open_folder(tmp_path) as found:
        assert sorted(found) == ["x", "y"]
    index.write_text(json.dumps(change(content)))
    with pytest.raises(kind, match=sentence):
        safetensors_io.open_folder(tmp_path)


def test_an_index_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / safetensors_io.INDEX_FILE).write_text('{"weight_map": ')
    with pytest.raises(ValueError, match="is not JSON"):
        safetensors_io.open_folder(tmp_path)


def test_the_same_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    content = shards(tmp_path)
    safetensors_io.write(
        tmp_path / "two.safetensors", {"x": np.ones(2, np.float32), "y": np.ones(3, np.float32)}
    )
    (tmp_path / safetensors_io.INDEX_FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"two.safetensors: x is also in one.safetensors"):
        safetensors_io.open_folder(tmp_path)


def test_a_folder_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has neither model.safetensors nor model"):
        safetensors_io.open_folder(tmp_path)
