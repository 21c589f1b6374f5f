"""Results in Tinker's wire format: protobuf, and JSON for clients that send JSON.

A JSON call gets a JSON reply, whatever Accept says: SDKs up to 0.24 announce protobuf but can read
it only for samples. A float32 becomes the decimal that stands for it exactly.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.engine.decoding import SampleResult
from tinsmith.engine.teachers import NO_LOGPROB
from tinsmith.engine.training import BatchResult
from tinsmith.server.wire.arrays import field_of
from tinsmith.server.wire.chunking import PROTOBUF, Buffer, Json, Lifted, fill
from tinsmith.server.wire.messages import pb

ARRAY_BYTES = 112  # of an array, besides its elements

# ---- as protobuf ----


def batch_bytes(result: BatchResult) -> int:
    """The approximate size of a result, in bytes."""
    columns = [result.logprobs, *result.outputs.values()]
    return sum(ARRAY_BYTES + array.nbytes for column in columns for array in column)


def batch_message(result: BatchResult) -> list[Buffer]:
    """A ForwardBackwardOutput, in parts: consecutive datums of one trailing shape share an
    ArrayRecord."""
    lifted, rows = Lifted(), enumerate(result.logprobs)
    parts = fill(pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord"), lifted)
    for _, group in itertools.groupby(rows, key=lambda item: item[1].shape[1:]):
        datums = [index for index, _ in group]
        message = pb.ForwardBackwardOutput()
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(datums))
        for name, output in {"logprobs": result.logprobs, **result.outputs}.items():
            arrays = [output[index] for index in datums]
            tensor = record.fields[name]
            tensor.data = field_of(arrays, "<f4", lifted)
            ends = np.cumsum([0] + [4 * array.size for array in arrays])
            tensor.offsets = field_of([ends], "<i8", lifted)
            tensor.dtype = pb.DTYPE_FLOAT32
            tensor.trailing_shape.extend(arrays[0].shape[1:])
        parts += fill(message, lifted)
    message = pb.ForwardBackwardOutput(metrics={"loss:sum": result.loss, **result.metrics})
    return parts + fill(message, lifted)


# ---- as JSON ----


def batch_text(result: BatchResult) -> Json:
    """A ForwardBackwardOutput in JSON."""

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
    """A SampleResponse in JSON, for a client that does not accept protobuf."""
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
    """One for each token of the prompt; null if it has none, such as the first."""
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
