"""Attacks DLPack: capsules with hostile fields, given to tinsmith.ops and to the in-process API.

A lie that no reader can find out, sizes beyond the memory but not beyond all memory, is not told.
All others get a sentence with the array's name, or the result that the honest array gives; each
capsule that came is given back once.
"""

import ctypes
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import tinsmith
from tinsmith import _core, ops

from tools.attack import common, tiny
from tools.attack.common import Attempt, One

N, V = 6, tiny.VOCAB
BEFORE = 4096  # bytes of memory before an array, and behind it: small lies stay inside
KINDS = (TypeError, ValueError, IndexError)


class DLTensor(ctypes.Structure):
    """dlpack.h's."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class Plain(ctypes.Structure):
    """dlpack.h's DLManagedTensor."""

    _fields_ = [
        ("tensor", DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class Versioned(ctypes.Structure):
    """dlpack.h's DLManagedTensorVersioned."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


API = ctypes.pythonapi
API.PyCapsule_GetPointer.restype = ctypes.c_void_p
API.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
API.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
CODES = {"f": 2, "i": 0, "u": 1}


class Producer:
    """An array whose capsules, which the engine makes, have some fields of their own."""

    def __init__(self, array: np.ndarray, rng: Random, attempt: Attempt):
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim
        memory = np.zeros(2 * BEFORE + array.nbytes, np.uint8)
        begin = BEFORE - memory.ctypes.data % 64
        self.array = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
        self.array[...] = array
        self.keep: list[Any] = []  # memory that capsules point to
        tensor = {
            "data": self.array.ctypes.data,
            "device_type": 1,
            "device_id": 0,
            "ndim": array.ndim,
            "code": CODES[array.dtype.kind],
            "bits": array.itemsize * 8,
            "lanes": 1,
            "shape": array.shape,
            "strides": None,
            "byte_offset": 0,
        }
        fields, self.device = _lies(rng, tensor, array)
        self.lies = {key: value for key, value in fields.items() if value != tensor[key]}
        self.version = rng.choice((None, None, None, (1, 0), (1, 7), (0, 8), (2, 0)))
        self.name = rng.choice((None,) * 12 + (b"used_dltensor", b"x"))
        told = self.lies | ({"data": "elsewhere"} if self.lies.get("data") else {})
        attempt.note(str(array.dtype), array.shape, "told as", told, "on", self.device)
        attempt.note("version", self.version, "name", self.name)
        self.honest = not self.lies and self.device == (1, 0) and self.version in (None, (1, 0))
        self.references = sys.getrefcount(self.array)

    def __dlpack__(self, **_: Any) -> Any:
        capsule = _core.dlpack_lend(self.array, False, self.version is not None)
        name = b"dltensor_versioned" if self.version else b"dltensor"
        address = API.PyCapsule_GetPointer(capsule, name)
        managed = Versioned.from_address(address) if self.version else Plain.from_address(address)
        if self.version:
            managed.major, managed.minor = self.version
        for key, value in self.lies.items():
            if isinstance(value, tuple):
                array = (ctypes.c_int64 * len(value))(*value)
                self.keep.append(array)
                value = ctypes.addressof(array)
            setattr(managed.tensor, key, value)
        if self.name:
            API.PyCapsule_SetName(capsule, self.name)
        return capsule

    def __dlpack_device__(self) -> Any:
        return self.device

    def check(self) -> None:
        """Each capsule was given back once; one with a foreign name can't be."""
        if sys.getrefcount(self.array) > self.references:
            gc.collect()  # a refusal by another thread has a traceback that holds itself
        more = sys.getrefcount(self.array) - self.references
        if more and not self.name:
            raise common.Failure(f"{more} capsules too many were not given back")


def _lies(rng: Random, tensor: dict[str, Any], array: np.ndarray) -> tuple[dict[str, Any], Any]:
    """The fields with some of them changed, and the device that is announced."""
    fields, device = dict(tensor), (1, 0)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        key = rng.choice((*fields, "announced"))
        if key == "data":
            fields["data"] = rng.choice((None, tensor["data"] + rng.choice((1, 2, 4, 64, -64))))
        elif key == "device_type":
            fields[key] = rng.choice((0, 2, 3, 4, 7, 8, 10, 13, 99, -1, 2**31 - 1, -(2**31)))
        elif key == "device_id":
            fields[key] = rng.choice((1, -1, 2**31 - 1))
        elif key == "ndim":
            fields[key] = rng.choice((-1, 0, 1, 9, 65, 2**31 - 1, -(2**31)))
        elif key in ("code", "lanes"):
            fields[key] = rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 255))
        elif key == "bits":
            fields[key] = rng.choice((0, 1, 7, 8, 16, 31, 32, 33, 132, 232))
        elif key == "shape":
            fields[key] = _sizes(rng, array.shape, (0, 1, array.shape[0] // 2, -1))
        elif key == "strides":
            strides = tuple(stride // array.itemsize for stride in array.strides)
            fields[key] = _sizes(rng, strides, (0, 1, 2, 3, -1))
        elif key == "byte_offset":
            fields[key] = rng.choice((1, 2, 4, 64, 2**63, 2**64 - 1))
        else:
            choices = ((2, 0), (2, 1), (3, 0), (8, 0), (1, 5), (13, 0), (10**400, 0), (-1, -1))
            device = rng.choice((*choices, 1, None, (1,), ("cpu", 0), [1, 0], (1.0, 0), ()))
    if fields["lanes"] * fields["bits"] > 8 * array.itemsize:  # elements wider than the memory
        fields |= {"strides": None, "shape": (1,) * 10}
    return fields, device


def _sizes(rng: Random, sizes: tuple[int, ...], other: tuple[int, ...]) -> Any:
    """Sizes or strides of which one is another, or such that no memory has."""
    if rng.random() < 0.15:
        return None
    found = [*sizes, *[1] * (10 - len(sizes))]
    at = rng.randrange(len(sizes))
    found[at] = rng.choice((*other, -(2**63), 2**62, 2**63 - 1))
    if rng.random() < 0.1:
        found[: len(sizes)] = [2**58] * len(sizes)
    return tuple(found)


@contextmanager
def attack() -> Iterator[One]:
    """The program."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((N, V)).astype(np.float32)
    hidden = rng.standard_normal((N, 4)).astype(np.float32)
    weight = rng.standard_normal((V, 4)).astype(np.float32)
    ids = np.arange(N, dtype=np.int64)
    grad = np.ones(N, np.float32)
    half = (logits.view(np.uint32) >> 16).astype(np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        model = tinsmith.Model(tiny.make(Path(folder) / "model"), device="cpu", threads=1)
        adapter = model.lora(rank=1, seed=1)
        prompt, targets = np.arange(9), np.arange(9) + 1
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (lambda x: ops.topk_logprobs(x, 3), (logits,)),
            (lambda x: ops.topk_logprobs(x, 3), (half,)),
            (lambda x, w: ops.topk_logprobs(x, 3, weight=w), (hidden, weight)),
            (ops.gather_logprobs, (logits, ids)),
            (lambda x, w, i: ops.gather_logprobs(x, i, weight=w), (hidden, weight, ids)),
            (
                lambda g, x, w, i: ops.gather_logprobs_backward(g, x, i, weight=w),
                (grad, hidden, weight, ids),
            ),
            (ops.gather_logprobs_backward, (grad, logits, ids)),
            (ops.generalized_jsd, (logits, logits[::-1].copy())),
            (lambda a, b, c: ops.generalized_jsd(a, b, c), (logits, logits + 1, ids)),
            (model.logprobs, (prompt,)),
            (lambda p: model.topk_logprobs(p, 2).logprobs, (prompt,)),
            (lambda *a: adapter.forward_backward(*a).loss, (prompt, targets, np.ones(9, "f4"))),
            (lambda p: model.sampler().sample(p, max_tokens=2, seed=1)[0].tokens, (prompt,)),
        ]
        right = [_result(call(*arrays)) for call, arrays in calls]

        def one(attempt: Attempt) -> str:
            number = attempt.rng.randrange(len(calls))
            call, arrays = calls[number]
            attempt.note("call", number)
            at = attempt.rng.randrange(len(arrays))
            lying = Producer(np.ascontiguousarray(arrays[at]), attempt.rng, attempt)
            given = [lying if index == at else array for index, array in enumerate(arrays)]
            try:
                found = _result(call(*given))
            except Exception as error:
                word = common.refusal(error, kinds=KINDS)
            else:
                same = all(map(_near, found, right[number]))
                if lying.honest and not same:
                    raise common.Failure(f"{found} instead of {right[number]}")
                word = "taken" if same else "taken as what it says"
            lying.check()
            return word

        gc.freeze()  # check() may have to collect what came after this
        yield one
        gc.unfreeze()


def _near(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether they are the same, but for a loss's place: NumPy's is a float, others' a float32."""
    return found.shape == wanted.shape and np.allclose(found, wanted, rtol=1e-6, atol=0)


def _result(found: Any) -> list[np.ndarray]:
    """A call's result as NumPy's arrays."""
    many = found if isinstance(found, tuple) else (found,)
    return [np.array(one) for one in many]
