"""Training calls that come as JSON, as those of Fireworks' SDK and of Tinker's up to 0.24 do.

A call becomes the protobuf messages that the newer SDKs send, so everything behind it is the same.
Its answer is JSON, whatever the client's Accept says: those SDKs announce protobuf and can read it
of samples alone. A float32 becomes the decimal that stands for it exactly.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.engine.decoding import SampleResult
from tinsmith.engine.teaching import NO_LOGPROB
from tinsmith.engine.worker import Batch, BatchResult
from tinsmith.server import fields, wire
from tinsmith.server.arrays import DTYPES, field_of
from tinsmith.server.messages import pb
from tinsmith.server.pieces import PIECE, PROTOBUF, Json, Lifted
from tinsmith.server.wire import Call, encoded_text, maybe, need, object_of, optional, short

TYPES = {label: (code, dtype) for code, (label, dtype) in DTYPES.items() if label != "bfloat16"}


# ---- requests ----


def batch(body: Mapping[str, Any], key: str, *arguments: Any) -> Batch:
    """wire.batch of the call in a request's JSON."""
    return wire.batch(call_of(body, key), *arguments)


def call_of(body: Mapping[str, Any], key: str) -> Call:
    """The call in a request's JSON; `key` names its input. ValueError names the datum."""
    fields.check(key, body)
    given = need(body, key, dict)
    fields.check("loss_input", given, key)
    head = pb.ForwardBackwardRequest(
        model_id=need(body, "model_id", str),
        seq_id=need(body, "seq_id", int),
        loss_fn=need(given, "loss_fn", str, key),
        forward_only=key == "forward_input",
    )
    for name, value in maybe(given, "loss_fn_config", dict, {}).items():
        setting = head.loss_fn_config_v2[name]
        if isinstance(value, str):
            setting.text = value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            setting.number = float(value)
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
    return Call(head, parts, lifted, count)


def _datum(given: Any, where: str, lifted: Lifted) -> pb.Datum:
    fields.check("json_datum", object_of(given, where), where)
    datum = pb.Datum()
    source, its = need(given, "model_input", dict, where), f"{where}: model_input"
    fields.check("model_input", source, its)
    for chunk in need(source, "chunks", list, its):
        tokens = _numbers(encoded_text(chunk, its), np.dtype("<i4"), its)
        datum.model_input.add().encoded_text.tokens = field_of([tokens], "<i4", lifted)
    for name, tensor in need(given, "loss_fn_inputs", dict, where).items():
        _fill(datum.loss_fn_inputs[name], tensor, f"{where}: {name:.100}", lifted)
    return datum


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
    if given.get("sparse_crow_indices") is None:
        message.dense = field_of([values], dtype.str, lifted)
        return
    message.sparse_csr.values = field_of([values], dtype.str, lifted)
    for part in ("crow_indices", "col_indices"):
        places = _numbers(need(given, f"sparse_{part}", list, where), np.dtype("<i8"), where)
        setattr(message.sparse_csr, part, field_of([places], "<i8", lifted))


def _numbers(values: list[Any], dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    """A flat list as an array; ValueError for what is no such number."""
    what = "integers" if dtype.kind == "i" else "numbers"
    try:
        found = np.asarray(values if values else np.empty(0, dtype))
    except (ValueError, OverflowError):  # lists of several lengths; integers of too many digits
        found = np.empty(0, object)
    if found.ndim != 1 or found.dtype.kind not in ("i" if dtype.kind == "i" else "if"):
        raise ValueError(f"{where} must be a flat list of {what}, {short(values)} came")
    if dtype.kind == "i" and found.size:
        bounds = np.iinfo(dtype)
        odd = np.flatnonzero((found < bounds.min) | (found > bounds.max))
        if len(odd):
            raise ValueError(f"{where} has {found[odd[0]]}, which is no {dtype.name}")
    with np.errstate(over="ignore"):  # what float32 can't hold is refused where it is read
        return found.astype(dtype)


# ---- answers ----


def batch_text(result: BatchResult) -> Json:
    """A ForwardBackwardOutput."""

    def text() -> Iterator[str]:
        yield '{"loss_fn_output_type":"ArrayRecord","loss_fn_outputs":['
        outputs = {"logprobs": result.logprobs, **result.outputs}
        for index in range(len(result.logprobs)):
            yield "," * (index > 0) + _dumps(
                {name: _tensor(arrays[index]) for name, arrays in outputs.items()}
            )
        yield f'],"metrics":{_dumps({"loss:sum": result.loss, **result.metrics})}}}'

    return _pieces(text())


def sample_text(result: SampleResult) -> Json:
    """A SampleResponse, as a client reads it that does not accept protobuf."""
    wide = [one.topk_ids for one in result.samples]
    if any(item is not None for item in [result.targets, result.drawn_ids, *wide]):
        raise ValueError(
            "target_prompt_logprobs, prompt_alt_tokens_k and topk_sample_logprobs are answered as "
            f"protobuf alone: send Accept: {PROTOBUF}"
        )

    def text() -> Iterator[str]:
        yield '{"type":"sample","sequences":['
        for index, one in enumerate(result.samples):
            sequence = {
                "stop_reason": one.stop_reason,
                "tokens": one.tokens.tolist(),
                "logprobs": one.logprobs.tolist(),
            }
            yield "," * (index > 0) + _dumps(sequence)
        yield f'],"prompt_logprobs":{_dumps(_prompt_logprobs(result))}'
        yield f',"topk_prompt_logprobs":{_dumps(_topk(result))}}}'

    return _pieces(text())


def _prompt_logprobs(result: SampleResult) -> list[float | None] | None:
    """One for each token of the prompt; null where there is none, as before the first."""
    if result.prompt_logprobs is None:
        return None
    found = result.prompt_logprobs.tolist()
    return [None if np.isnan(value) else value for value in found]


def _topk(result: SampleResult) -> list[list[tuple[int, float]] | None] | None:
    if result.topk_ids is None or result.topk_logprobs is None:
        return None
    rows = zip(result.topk_ids.tolist(), result.topk_logprobs.tolist(), strict=True)
    return [
        [pair for pair in zip(ids, values, strict=True) if pair[1] > NO_LOGPROB] or None
        for ids, values in rows
    ]


def _tensor(array: NDArray[np.float32]) -> dict[str, Any]:
    return {"data": array.ravel().tolist(), "dtype": "float32", "shape": list(array.shape)}


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _pieces(texts: Iterable[str]) -> Json:
    return Json([text.encode() for text in texts])
