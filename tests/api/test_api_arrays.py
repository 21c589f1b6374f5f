"""The face's arrays: borrowed where they can be, given back in the kind that came, nothing kept."""

import gc
import os
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import tinsmith
import torch
from conftest import VOCAB
from support.api_cases import PROMPT
from support.waiting import until
from tinsmith.ops import tensors


def test_arrays_of_the_right_type_are_borrowed() -> None:
    ids, numbers = np.arange(5, dtype=np.int32), torch.rand(4, 3)
    ids.flags.writeable = False
    assert tensors.to_ids(ids, "x") is ids
    seen = tensors.to_floats(numbers, "x")
    assert seen.ctypes.data == numbers.data_ptr()
    assert seen.shape == (4, 3)
    tensor = torch.arange(5, dtype=torch.int32)
    assert tensors.to_ids(tensor, "x").ctypes.data == tensor.data_ptr()
    back = tensors.like(numbers, seen)
    assert isinstance(back, torch.Tensor)
    assert back.data_ptr() == numbers.data_ptr()
    assert tensors.like([1, 2], ids) is ids


def test_other_types_and_layouts_are_converted() -> None:
    wide = torch.arange(12, dtype=torch.int64).reshape(3, 4).T
    np.testing.assert_array_equal(tensors.to_ids(wide, "x"), wide.numpy())
    assert tensors.to_ids(wide, "x").flags.c_contiguous
    swapped = np.arange(3).astype(">i8")
    assert tensors.to_ids(swapped, "x").dtype == np.int32
    np.testing.assert_array_equal(tensors.to_floats(torch.tensor([True, False]), "x"), [1.0, 0.0])
    assert tensors.to_floats(np.asarray([0.1]), "x")[0] == np.float32(0.1)


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
def test_results_are_of_the_kind_that_came(model, adapter, kind) -> None:
    result = torch.Tensor if kind is torch.tensor else np.ndarray
    ids = kind([5, 6, 7, 8])
    one = adapter.forward_backward(ids[:-1], ids[1:]).logprobs
    assert isinstance(one, result)
    assert one.shape == (3,)
    assert all(isinstance(x, result) for x in adapter.forward([ids[:-1]] * 2, [ids[1:]] * 2))
    assert isinstance(model.logprobs(ids), result)
    assert isinstance(model.topk_logprobs(ids, 2).ids, result)
    [drawn] = model.sampler().sample(ids, max_tokens=2)
    assert isinstance(drawn.tokens, result)
    assert isinstance(drawn.logprobs, result)


class OnCard:
    """An array in the memory of a device that NumPy can't read."""

    device = "card:3"

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype

    def __dlpack__(self, **_: object) -> object:
        raise BufferError("this memory is not the CPU's")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 3  # kDLCUDA

    def __array_namespace__(self) -> type:
        return Library


class Library:
    @staticmethod
    def asarray(array: np.ndarray, *, device: str = "the current one") -> tuple[str, np.ndarray]:
        return device, array


class LikeTorch(OnCard):
    def cpu(self) -> torch.Tensor:
        return torch.from_numpy(self.array)


class LikeJax(OnCard):
    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return self.array


class LikeCuPy(OnCard):
    def get(self) -> np.ndarray:
        return self.array

    def __array_namespace__(self) -> type:
        return CuPy


class CuPy:
    @staticmethod
    def asarray(array: np.ndarray) -> tuple[str, np.ndarray]:
        return "card:3", array


@pytest.mark.parametrize("kind", [LikeTorch, LikeJax, LikeCuPy])
def test_a_tensor_of_another_device_is_fetched_and_its_result_sent_back(adapter, kind) -> None:
    ids = kind(np.asarray([5, 6, 7]))
    device, found = adapter.forward_backward(ids, ids).logprobs
    assert device == "card:3"
    np.testing.assert_array_equal(found, adapter.forward([5, 6, 7], [5, 6, 7]))


def test_a_thousand_calls_leave_memory_and_references_as_they_were(model, adapter) -> None:
    ids, weights = torch.arange(5, 12, dtype=torch.int32), np.ones(6, np.float32)

    def call(ids: torch.Tensor) -> None:
        adapter.forward_backward(ids[:-1], ids[1:], weights)
        adapter.backward(-adapter.forward(ids[:-1], ids[1:]))
        adapter.optim_step(1e-3)
        model.topk_logprobs(ids, 2, adapter=adapter)
        model.sampler().sample(ids, adapter=adapter, max_tokens=2, num_samples=2)
        with pytest.raises(IndexError):
            adapter.forward([VOCAB], [0])

    for _ in range(20):
        call(ids)
    gc.collect()
    objects, references, pages = len(gc.get_objects()), sys.getrefcount(weights), resident()
    for _ in range(1000):
        call(ids)
    gc.collect()
    assert sys.getrefcount(weights) == references
    assert len(gc.get_objects()) - objects < 500  # the SDK's own come and go
    assert resident() - pages < 4 << 20
    gone = weakref.ref(ids)
    del ids
    assert gone() is None


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_models_memory_and_thread_go_with_it(tiny_model_dir: Path) -> None:
    def threads() -> int:
        return sum(thread.name.startswith("tinsmith_") for thread in threading.enumerate())

    before = threads()
    model = tinsmith.Model(tiny_model_dir, device="cpu")
    model.logprobs(PROMPT)
    assert threads() == before + 1
    core = model.lora(rank=2).core.model
    references = sys.getrefcount(core)
    del model
    gc.collect()
    until(lambda: threads() == before)
    assert sys.getrefcount(core) < references
