"""Training calls in JSON, from Fireworks' SDK and from Tinker's up to 0.24.

A call becomes the protobuf messages of newer SDKs, so all later code is the same.
"""

import contextlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.server.wire import fields, images, parse, training_calls
from tinsmith.server.wire.arrays import DTYPES
from tinsmith.server.wire.chunking import LARGE, PIECE, Lifted
from tinsmith.server.wire.messages import pb
from tinsmith.server.wire.parse import (
    encoded_text,
    maybe,
    need,
    object_of,
    optional,
    short,
)

SPARSE = ("sparse_crow_indices", "sparse_col_indices")
TYPES = {label: (code, dtype) for code, (label, dtype) in DTYPES.items() if label != "bfloat16"}


# ---- requests ----


def call_of(body: Mapping[str, Any], key: str) -> training_calls.TrainingCall:
    """The call in a request's JSON; `key` names its input. A ValueError names the datum."""
    fields.check(key, body)
    given = need(body, key, dict)
    fields.check("loss_input", given, key)
    head = pb.ForwardBackwardRequest(
        loss_fn=need(given, "loss_fn", str, key),
        forward_only=key == "forward_input",
    )
    for name, value in maybe(given, "loss_fn_config", dict, {}).items():
        setting = head.loss_fn_config_v2[name]
        if isinstance(value, str):
            setting.text = value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            setting.number = parse.need({name: value}, name, float)
        else:
            raise ValueError(
                f"loss_fn_config {name:.100} must be a number or a text, {short(value)} came"
            )
    lifted, parts, size = Lifted(), deque[bytes](), 0
    part, count = pb.ForwardBackwardRequest(), 0
    for index, datum in enumerate(need(given, "data", list, key)):
        part.data.append(_datum(datum, f"datum {index}", lifted))
        size, count = size + part.data[-1].ByteSize(), count + 1
        if size >= PIECE:
            parts.append(part.SerializeToString())
            part, size = pb.ForwardBackwardRequest(), 0
    parts.append(part.SerializeToString())
    return training_calls.TrainingCall(head, parts, lifted, count)


def _datum(given: Any, where: str, lifted: Lifted) -> pb.Datum:
    fields.check("json_datum", object_of(given, where), where)
    datum = pb.Datum()
    source, its = need(given, "model_input", dict, where), f"{where}: model_input"
    fields.check("model_input", source, its)
    for index, chunk in enumerate(need(source, "chunks", list, its)):
        _add_chunk(datum.model_input.add(), chunk, f"{its}[{index}]", lifted)
    for name, tensor in need(given, "loss_fn_inputs", dict, where).items():
        _fill(datum.loss_fn_inputs[name], tensor, f"{where}: {name:.100}", lifted)
    return datum


def _add_chunk(message: pb.Chunk, given: Any, where: str, lifted: Lifted) -> None:
    """A chunk of text, or an image, whose file is lifted."""
    if object_of(given, where).get("type") != images.CHUNK:
        tokens = _numbers(encoded_text(given, where), np.dtype("<i4"), where)
        message.encoded_text.tokens = _bytes(tokens, lifted)
        return
    data, name, expected = images.json_image(given, where)
    message.image.data, message.image.format = lifted.put(data), name
    if expected is not None:
        message.image.expected_tokens = expected
    lifted.images = True


def _fill(message: pb.Tensor, given: Any, where: str, lifted: Lifted) -> None:
    """A tensor: flat numbers with a type and a shape, or the values of compressed sparse rows."""
    fields.check("tensor", object_of(given, where), where)
    label = need(given, "dtype", str, where)
    if label not in TYPES:
        raise ValueError(f"{where} has dtype {short(label)}; there are {sorted(TYPES)}")
    message.dtype, dtype = TYPES[label]
    values = _numbers(need(given, "data", list, where), dtype, where)
    shape = optional(given, "shape", list)
    if shape:
        message.shape.extend(_numbers(shape, np.dtype("<i8"), f"{where}: shape").tolist())
    sparse = [key for key in SPARSE if given.get(key) is not None]
    if not sparse:
        message.dense = _bytes(values, lifted)
        return
    message.sparse_csr.values = _bytes(values, lifted)
    for key in SPARSE:
        places = _numbers(need(given, key, list, where), np.dtype("<i8"), where)
        setattr(message.sparse_csr, key.removeprefix("sparse_"), _bytes(places, lifted))


def _bytes(array: NDArray[Any], lifted: Lifted) -> bytes:
    """An array's elements for a message; large ones are lifted out of it."""
    data = array.tobytes()
    return data if len(data) < LARGE else lifted.put(data)


def _numbers(values: list[Any], dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    """A flat list as an array; ValueError for anything but such numbers."""
    what, kinds = ("integers", {int}) if dtype.kind == "i" else ("numbers", {int, float})
    found = np.empty(0, object)
    if set(map(type, values)) <= kinds:  # a list of texts would become a matrix of letters
        with contextlib.suppress(OverflowError):  # integers with too many digits
            found = np.asarray(values, None if values else dtype)
    if found.dtype.kind not in ("i" if dtype.kind == "i" else "if"):
        raise ValueError(f"{where} must be a flat list of {what}, {short(values)} came")
    if dtype.kind == "i" and found.size:
        bounds = np.iinfo(dtype)
        odd = np.flatnonzero((found < bounds.min) | (found > bounds.max))
        if len(odd):
            raise ValueError(f"{where} has {found[odd[0]]}, which is no {dtype.name}")
    with np.errstate(over="ignore"):  # overflow to infinity is refused where it is read
        return found.astype(dtype)
