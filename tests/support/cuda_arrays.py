"""Arrays that say they are on a GPU: host memory behind DLPack's kDLCUDA, for cuda-emulated.

A library in the eyes of tinsmith.ops, with the words of torch: `Tensor`, `from_dlpack`, `asarray`.
It counts what the protocol promises: deleters called, streams handed over."""

import ctypes
import sys

import numpy as np

CUDA = 2  # kDLCUDA
VOID = ctypes.c_void_p
deleted: list[int] = []  # one for each capsule of ours that was given back
streams: list = []  # what __dlpack__ was told


class DLTensor(ctypes.Structure):
    """dlpack.h's DLManagedTensor."""

    _fields_ = [
        ("data", VOID),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", VOID),
        ("byte_offset", ctypes.c_uint64),
        ("context", VOID),
        ("deleter", ctypes.CFUNCTYPE(None, VOID)),
    ]


API = ctypes.pythonapi
API.PyCapsule_New.restype = ctypes.py_object
API.PyCapsule_New.argtypes = [VOID, ctypes.c_char_p, VOID]
API.PyCapsule_GetPointer.restype = VOID
API.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
API.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
USED = b"used_dltensor"
CODES = {"float32": (2, 32), "uint16": (4, 16), "int32": (0, 32), "int64": (0, 64)}
DESTROY = ctypes.CFUNCTYPE(None, VOID)(lambda _: deleted.append(1))


class Tensor:
    """An array "on" a GPU; uint16 is bf16."""

    def __init__(self, array: np.ndarray, number: int = 0):
        self.array, self.number = array, number
        self.shape, self.dtype, self.device = array.shape, array.dtype, f"cuda:{number}"

    def __dlpack_device__(self):
        return (CUDA, self.number)

    def __dlpack__(self, *, stream=None, max_version=None):
        streams.append(stream)
        shape = (ctypes.c_int64 * self.array.ndim)(*self.array.shape)
        code, bits = CODES[str(self.array.dtype)]
        data = self.array.ctypes.data
        tensor = DLTensor(data, CUDA, self.number, len(shape), code, bits, 1, shape, None, 0)
        self.keep = tensor, shape
        return API.PyCapsule_New(ctypes.addressof(tensor), b"dltensor", ctypes.cast(DESTROY, VOID))

    def cpu(self):
        return self.array


def from_dlpack(lender) -> Tensor:
    """Takes what is lent: copies it, and calls its deleter."""
    assert lender.__dlpack_device__() == (CUDA, 0)
    capsule = lender.__dlpack__(stream=2)
    pointer = API.PyCapsule_GetPointer(capsule, b"dltensor")
    API.PyCapsule_SetName(capsule, USED)
    tensor = DLTensor.from_address(pointer)
    assert (tensor.device_type, tensor.device_id) == (CUDA, 0)
    kind = {code: name for name, code in CODES.items()}[tensor.code, tensor.bits]
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    array = np.empty(shape, kind)
    if array.size:
        ctypes.memmove(array.ctypes.data, tensor.data, array.nbytes)
    tensor.deleter(pointer)
    return Tensor(array)


def asarray(array, device=None) -> Tensor:
    """A host array on the GPU."""
    assert device == "cuda:0"
    return Tensor(np.array(array))


# tinsmith.ops asks the package that a tensor's class names for from_dlpack.
sys.modules["cuda_arrays"], Tensor.__module__ = sys.modules[__name__], "cuda_arrays"
