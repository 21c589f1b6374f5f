"""csrc/binding/dlpack.c: arrays of NumPy and torch are borrowed where they lie, and given back
once."""

import ctypes
import gc
import resource
import sys

import numpy as np
import pytest
import tinsmith.ops as ops
import torch
from support.cuda_arrays import API, DLTensor
from support.op_devices import from_bf16, to_bf16
from tinsmith import _core

LOGITS = np.random.default_rng(0).standard_normal((4, 33)).astype(np.float32)


class Wrapped:
    """A producer that asks as old libraries were asked: no max_version."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device, self.shape = array, device, array.shape
        self.dtype = array.dtype

    def __dlpack__(self):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.device


def test_numpy_torch_and_old_producers_give_the_same():
    ids, logp = ops.topk_logprobs(LOGITS, 5)
    for like in (torch.from_numpy(LOGITS), Wrapped(LOGITS)):
        got = ops.topk_logprobs(like, 5)
        np.testing.assert_array_equal(np.from_dlpack(got[0]), ids)
        np.testing.assert_array_equal(np.from_dlpack(got[1]), logp)


def test_outputs_are_of_the_kind_that_came_in():
    assert isinstance(ops.topk_logprobs(LOGITS, 2)[0], np.ndarray)
    x = torch.from_numpy(LOGITS)
    ids, logp = ops.topk_logprobs(x, 2)
    assert ids.dtype == torch.int32 and logp.dtype == torch.float32
    gradient = ops.gather_logprobs_backward(logp, x.bfloat16(), ids)
    assert gradient.dtype == torch.bfloat16 and gradient.shape == x.shape
    parameter = torch.nn.Parameter(x, requires_grad=False)
    assert isinstance(ops.topk_logprobs(parameter, 2)[0], torch.Tensor)


def test_a_readonly_array_and_a_slice_of_rows_are_borrowed():
    frozen = LOGITS.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(ops.topk_logprobs(frozen, 3)[0], ops.topk_logprobs(LOGITS, 3)[0])
    np.testing.assert_array_equal(
        ops.topk_logprobs(LOGITS[1:3], 3)[1], ops.topk_logprobs(LOGITS, 3)[1][1:3]
    )
    x = torch.from_numpy(LOGITS)
    np.testing.assert_array_equal(
        ops.topk_logprobs(x[2:], 3)[1], ops.topk_logprobs(LOGITS, 3)[1][2:]
    )


def test_bf16_of_torch_and_uint16_of_numpy_are_the_same_bits():
    half = to_bf16(LOGITS)
    x = torch.from_numpy(LOGITS).bfloat16()
    assert torch.equal(x.view(torch.uint16), torch.from_numpy(half))
    ours, theirs = ops.topk_logprobs(half, 4), ops.topk_logprobs(x, 4)
    np.testing.assert_array_equal(ours[1], theirs[1].numpy())
    np.testing.assert_array_equal(ours[1], ops.topk_logprobs(from_bf16(half), 4)[1])


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_what_we_lend_others_read(versioned, bf16):
    array = to_bf16(LOGITS) if bf16 else LOGITS.copy()

    class Lender:
        def __dlpack__(self, **_):
            return _core.dlpack_lend(array, True, versioned)

        def __dlpack_device__(self):
            return (1, 0)

    references = sys.getrefcount(array)
    got = torch.from_dlpack(Lender())
    assert got.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert got.data_ptr() == array.ctypes.data
    np.testing.assert_array_equal(got.float().numpy(), from_bf16(array) if bf16 else array)
    assert sys.getrefcount(array) == references + 1
    del got
    assert sys.getrefcount(array) == references
    _core.dlpack_lend(array, bf16, versioned)  # nobody takes it: the capsule gives it back
    assert sys.getrefcount(array) == references


def managed_tensor(array: np.ndarray, calls: list, **changes):
    """A capsule made by hand, whose deleter counts; with what must outlive it."""

    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    tensor = DLTensor(array.ctypes.data - 8, 1, 0, array.ndim, 2, 32, 1, shape, None, 8)
    arrays = {
        name: (ctypes.c_int64 * len(value))(*value)
        for name, value in changes.items()
        if isinstance(value, tuple)
    }
    for name, value in (changes | arrays).items():
        setattr(tensor, name, ctypes.addressof(value) if name == "strides" else value)
    destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: calls.append(1))
    address = ctypes.cast(destroy, ctypes.c_void_p)
    return API.PyCapsule_New(ctypes.addressof(tensor), b"dltensor", address), (
        tensor,
        shape,
        arrays,
        destroy,
    )


def test_a_capsule_is_given_back_once_and_its_byte_offset_counts():
    calls: list = []

    class Producer:
        shape, dtype = LOGITS.shape, LOGITS.dtype

        def __dlpack__(self, **_):
            capsule, self.keep = managed_tensor(LOGITS, calls)
            return capsule

        def __dlpack_device__(self):
            return (1, 0)

    got = _core.topk(Producer(), None, 3)
    np.testing.assert_array_equal(got[0], ops.topk_logprobs(LOGITS, 3)[0])
    assert calls == [1]
    with pytest.raises(ValueError, match="not 34"):
        _core.topk(Producer(), None, 34)
    assert calls == [1, 1]


@pytest.mark.parametrize("kind", ["numpy", "torch", "torch bf16"])
def test_hundreds_of_calls_leave_memory_and_references_as_they_were(kind):
    x, w = np.zeros((64, 48), np.float32), np.zeros((3000, 48), np.float32)
    ids = np.arange(64)
    if kind != "numpy":
        x, w = (torch.from_numpy(a).to(torch.bfloat16 if "bf16" in kind else None) for a in (x, w))

    def calls(n):
        for _ in range(n):
            ops.gather_logprobs_backward(np.ones(64, np.float32), x, ids, weight=w)
            with pytest.raises(ValueError):
                ops.topk_logprobs(x, 3001, weight=w)

    calls(30)
    gc.collect()
    references = [sys.getrefcount(a) for a in (x, w, ids)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls(300)
    gc.collect()
    assert [sys.getrefcount(a) for a in (x, w, ids)] == references
    # a leaked gradient or capsule would be 0.6 MB a call
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_what_can_not_be_borrowed_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match=r"logits is in the memory of CUDA \(device 1\)"):
        ops.topk_logprobs(Wrapped(LOGITS, device=(2, 1)), 2)
    with pytest.raises(ValueError, match="logits can't be shared"):
        ops.topk_logprobs(torch.zeros(2, 3, requires_grad=True), 2)
    with pytest.raises(ValueError, match="C-contiguous"):
        ops.topk_logprobs(torch.zeros(3, 4).t(), 2)
    with pytest.raises(TypeError, match="not float16"):
        ops.topk_logprobs(torch.zeros(3, 4).half(), 2)
    with pytest.raises(ValueError, match=r"ids is not in the memory of the CPU"):
        ops.gather_logprobs(LOGITS, Wrapped(np.zeros(4, int), device=(2, 0)))

    class NoCapsule(Wrapped):
        def __dlpack__(self):
            return 7

    with pytest.raises(TypeError, match="no DLPack capsule"):
        ops.topk_logprobs(NoCapsule(LOGITS), 2)


def test_a_version_of_dlpack_that_is_not_known_is_refused():
    class Newer(Wrapped):
        def __dlpack__(self, **_):
            capsule = _core.dlpack_lend(self.array, False, True)
            pointer = API.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
            ctypes.c_uint32.from_address(pointer).value = 2
            return capsule

    with pytest.raises(ValueError, match=r"logits came as DLPack 2\.0, version 1 is known"):
        ops.topk_logprobs(Newer(LOGITS), 2)


@pytest.mark.parametrize("writeable", [False, True])
def test_what_is_read_only_is_lent_as_read_only(writeable):
    array = LOGITS.copy()
    array.flags.writeable = writeable
    capsule = _core.dlpack_lend(array, False, True)
    pointer = API.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
    flags = ctypes.c_uint64.from_address(pointer + 24)  # behind the version and two pointers
    assert flags.value == (not writeable)


class Hostile:
    """A producer of LOGITS whose capsule has some fields of its own."""

    shape, dtype = LOGITS.shape, LOGITS.dtype

    def __init__(self, device: object = (1, 0), **changes):
        self.changes, self.device = changes, device

    def __dlpack__(self, **_):
        capsule, self.keep = managed_tensor(LOGITS, [], **self.changes)
        return capsule

    def __dlpack_device__(self):
        return self.device


HOSTILE = [
    ({"device_type": 2}, "is in the memory of CUDA.*, but its __dlpack_device__ "),
    ({"device_type": 8}, r"is in the memory of Metal"),
    ({"data": None}, "came without its data"),
    ({"shape": None}, "came without its shape"),
    ({"shape": (4, -33)}, "has a dimension below 0"),
    ({"shape": (2**40, 2**40)}, "has sizes that no memory holds"),
    ({"shape": (2**62, 1)}, "has sizes that no memory holds"),
    ({"strides": (2**62, 1)}, "has sizes that no memory holds"),
    ({"strides": (-(2**63), 1)}, "has sizes that no memory holds"),
    ({"byte_offset": 2**63}, "has sizes that no memory holds"),
    ({"ndim": -1}, "has -1 dimensions"),
    ({"lanes": 0}, "has elements without bits"),
    ({"ndim": 9}, "has 9 dimensions"),
]


@pytest.mark.parametrize(("changes", "sentence"), HOSTILE, ids=str)
def test_a_hostile_capsule_is_refused_with_a_sentence(model, changes, sentence):
    with pytest.raises(ValueError, match=f"logits {sentence}"):
        ops.topk_logprobs(Hostile(**changes), 2)
    with pytest.raises(ValueError, match=f"(?s)prompt .*({sentence})"):  # which NumPy would read
        model.sampler().sample(Hostile(**changes))


@pytest.mark.parametrize("changes", [{"code": 1, "bits": 132}, {"lanes": 2}], ids=str)
def test_an_odd_element_is_not_taken_for_another(changes):
    with pytest.raises(TypeError, match=r"logits must be float32.* not \w+\d+ of \d lanes"):
        ops.topk_logprobs(Hostile(**changes), 2)


@pytest.mark.parametrize("device", [7, None, (1,), (1, 0, 0), ("cpu", 0), (10**400, 0), [1, 0]])
def test_a_device_that_is_no_pair_is_refused(model, device):
    sentence = "__dlpack_device__ of {} must give a pair of whole numbers"
    with pytest.raises(TypeError, match=sentence.format("logits")):
        ops.topk_logprobs(Hostile(device), 2)
    with pytest.raises(TypeError, match=sentence.format("ids")):
        ops.gather_logprobs(LOGITS, Hostile(device))
    with pytest.raises(TypeError, match=sentence.format("prompt")):
        model.sampler().sample(Hostile(device))
