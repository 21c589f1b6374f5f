"""Sampling requests and results: between Tinker's wire format and plain values.

A prompt's scores need care. The ids to score at each position come as a dense tensor with -1 as
padding, or as compressed sparse rows. The engine gets a flat list with row offsets; the scores are
returned in the layout of the ids. Row i of the tensor is position i + 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tinsmith.engine.decoding import PromptTargets, SampleRequest, SampleResult
from tinsmith.engine.image_cache import HeldImage, pixel_bytes
from tinsmith.models.registry import BaseModel
from tinsmith.server.wire import fields, images
from tinsmith.server.wire.arrays import TOGETHER, check_csr, check_ids, field_of
from tinsmith.server.wire.chunking import Buffer, Lifted, fill
from tinsmith.server.wire.images import ImageReader, PlacedImage
from tinsmith.server.wire.messages import pb
from tinsmith.server.wire.parse import (
    encoded_text,
    maybe,
    need,
    object_of,
    optional,
    seed_of,
    short,
)

SAMPLES_MAX = 4096  # of one request
DRAWS_MAX = 1024  # at one position of a prompt
STOPS_MAX = 1024  # each is searched for after each token
CELLS_MAX = 1 << 22  # of the tensors that score a prompt
RESULT_BYTES_MAX = 1 << 30  # of one request
SAMPLE_BYTES = 4096  # counted for each sample of a request in the queue
PADDING = -1  # an empty cell

T = TypeVar("T")


def has_images(body: Mapping[str, Any]) -> bool:
    """Whether a request's prompt has an image, if it is a prompt."""
    prompt = body.get("prompt")
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    given = chunks if isinstance(chunks, list) else []
    return any(isinstance(one, dict) and one.get("type") == images.CHUNK for one in given)


def look_at_images(body: Mapping[str, Any], model: BaseModel, tokens_max: int) -> list[PlacedImage]:
    """The images of a request's prompt, of which nothing else is read; see wire/images.py."""
    reader = ImageReader(model, tokens_max)
    for where, chunk in _chunks(body):
        if chunk.get("type") == images.CHUNK:
            data, name, expected = images.json_image(chunk, where)
            reader.add(partial(bytes, data), name, expected, where)
    return reader.found


def sample_request(
    body: Mapping[str, Any],
    model: BaseModel,
    fresh_seed: int,
    result_bytes_max: int = RESULT_BYTES_MAX,
    held: Sequence[HeldImage] = (),
) -> SampleRequest:
    """A checked request on a base model or an adapter; fresh_seed is used if it has no seed. `held`
    are its prompt's images, in their order."""
    fields.check("sample", body)
    prompt = _prompt(body, model, held)
    params = maybe(body, "sampling_params", dict, {})
    fields.check("sampling_params", params)
    stop_ids, stop_texts = _stops(params.get("stop"), model)
    score = maybe(body, "prompt_logprobs", bool, False)
    request = SampleRequest(
        prompt=prompt,
        num_samples=_num_samples(body),
        max_tokens=_within(_max_tokens(params), len(prompt), model),
        temperature=_at_least(0.0, maybe(params, "temperature", float, 1.0), "temperature"),
        top_k=_top_k(params),
        top_p=_top_p(params),
        seed=seed_of(params, fresh_seed),
        stop_ids=stop_ids,
        stop_texts=stop_texts,
        prompt_logprobs=score,
        topk_prompt=_width(body, "topk_prompt_logprobs", model.vocab),
        topk_sample=_width(body, "topk_sample_logprobs", model.vocab),
        last_n=_last_n(body, len(prompt), score),
        prompt_draws=_draws(body, len(prompt)),
        targets=_targets(body, len(prompt), model.vocab),
        record=maybe(body, "record_stability_info", bool, False),
        images=tuple(held),
    )
    _check_size(request, model.context, result_bytes_max)
    return request


def _within(max_tokens: int, length: int, model: BaseModel) -> int:
    """At most the tokens left in the context of a model's name, if that is not the model's own."""
    if model.context == model.config["context"]:
        return max_tokens
    most = max(model.context - length, 1)
    return most if max_tokens < 0 else min(max_tokens, most)


def _check_size(request: SampleRequest, context: int, result_bytes_max: int) -> None:
    """Raises ValueError if the result could be larger than one request's may be."""
    length, samples, new = len(request.prompt), request.num_samples, _new(request, context)
    prompt = _prompt_bytes(request)
    drawn = samples * new * (8 + 8 * request.topk_sample)
    if prompt + drawn > result_bytes_max:
        raise ValueError(
            f"the result could have {prompt + drawn} bytes, at most {result_bytes_max} are sent: "
            f"{prompt} for a prompt of {length} tokens with topk_prompt_logprobs "
            f"{request.topk_prompt} and prompt_alt_tokens_k {request.prompt_draws}, and {drawn} "
            f"for {samples} samples of up to {new} tokens with topk_sample_logprobs "
            f"{request.topk_sample}; ask for less, or in several requests"
        )


def _new(request: SampleRequest, context: int) -> int:
    """The maximum number of tokens of each sample."""
    most = max(context - len(request.prompt), 1)
    return most if request.max_tokens < 0 else min(request.max_tokens, most)


def _prompt_bytes(request: SampleRequest) -> int:
    """The bytes of a prompt's scores."""
    scores = 4 * request.prompt_logprobs + 8 * request.topk_prompt + 12 * request.prompt_draws
    return len(request.prompt) * scores + (4 * request.targets.values if request.targets else 0)


def held_bytes(request: SampleRequest, context: int) -> int:
    """The bytes that a request takes until it is done: its arrays, its images and the requested
    scores. Samples usually end long before their limit, so their tokens count for little."""
    came = [request.prompt]
    if request.targets is not None:
        came += [request.targets.ids, request.targets.starts, request.targets.cells]
    topk = request.num_samples * (SAMPLE_BYTES + 8 * request.topk_sample * _new(request, context))
    held = sum(array.nbytes for array in came) + pixel_bytes(request.images)
    return held + _prompt_bytes(request) + topk


def result_bytes(result: SampleResult) -> int:
    """The bytes that a result takes."""
    arrays = [result.prompt_logprobs, result.topk_ids, result.topk_logprobs]
    arrays += [result.target_logprobs, result.drawn_ids, result.drawn_logprobs]
    for sample in result.samples:
        arrays += [sample.tokens, sample.logprobs, sample.topk_ids, sample.topk_logprobs]
    return sum(array.nbytes for array in arrays if array is not None)


def _chunks(body: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The prompt's chunks, with their names in error messages."""
    for index, chunk in enumerate(need(need(body, "prompt", dict), "chunks", list, "the prompt")):
        yield f"prompt[{index}]", object_of(chunk, f"prompt[{index}]")


def _prompt(
    body: Mapping[str, Any], model: BaseModel, held: Sequence[HeldImage]
) -> NDArray[np.int32]:
    tokens, left = list[int](), iter(held)
    for where, chunk in _chunks(body):
        if chunk.get("type") == images.CHUNK:
            tokens += images.ids_of(left, need(chunk, "format", str, where), where).tolist()
        else:
            tokens += _checked(encoded_text(chunk, where), model.vocab)
    if not tokens:
        raise ValueError("the prompt is empty: it needs at least 1 token")
    if len(tokens) > model.context:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens; the model's context is {model.context}: cut its "
            "beginning"
        )
    return np.asarray(tokens, np.int32)


def _checked(tokens: list[Any], vocab: int) -> list[int]:
    """The ids of a chunk of text."""
    if not all(type(token) is int for token in tokens):
        raise ValueError("the prompt's tokens must be integers")
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab):
        bad = next(token for token in tokens if not 0 <= token < vocab)
        raise ValueError(f"the prompt has id {bad}; ids must be from 0 to {vocab - 1}")
    return tokens


def _at_least(bound: T, value: T, name: str) -> T:
    if value < bound:  # type: ignore[operator]
        raise ValueError(f"{name} must be at least {bound}, {value} came")
    return value


def _num_samples(body: Mapping[str, Any]) -> int:
    count = maybe(body, "num_samples", int, 1)
    if not 1 <= count <= SAMPLES_MAX:
        raise ValueError(f"num_samples must be from 1 to {SAMPLES_MAX}, {count} came")
    return count


def _max_tokens(params: Mapping[str, Any]) -> int:
    count = optional(params, "max_tokens", int)
    return -1 if count is None else _at_least(1, count, "max_tokens")


def _top_k(params: Mapping[str, Any]) -> int:
    top_k = maybe(params, "top_k", int, -1)
    if top_k == 0 or top_k < -1:
        raise ValueError(f"top_k must be at least 1, or -1 for no limit; {top_k} came")
    return top_k if top_k < 1 << 31 else -1


def _top_p(params: Mapping[str, Any]) -> float:
    top_p = maybe(params, "top_p", float, 1.0)
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], {top_p} came")
    return top_p


def _width(body: Mapping[str, Any], key: str, vocab: int) -> int:
    width = _at_least(0, maybe(body, key, int, 0), key)
    if width > vocab:
        raise ValueError(f"{key} is {width}, the vocabulary has {vocab} ids")
    return width


def _last_n(body: Mapping[str, Any], length: int, score: bool) -> int | None:
    last_n = optional(body, "prompt_logprobs_last_n", int)
    if last_n is None:
        return None
    if not score:
        raise ValueError("prompt_logprobs_last_n needs prompt_logprobs to be asked for")
    if not 1 <= last_n < length:
        raise ValueError(
            f"prompt_logprobs_last_n must be from 1 to the prompt's length - 1 = {length - 1}, "
            f"{last_n} came"
        )
    return last_n


def _draws(body: Mapping[str, Any], length: int) -> int:
    key = "prompt_alt_tokens_k"
    count = _at_least(0, maybe(body, key, int, 0), key)
    if count > DRAWS_MAX or count * length > CELLS_MAX:
        raise ValueError(
            f"{key} must be at most {DRAWS_MAX}, and at most {CELLS_MAX} when multiplied by the "
            f"prompt's length, {length}; {count} came"
        )
    return count


def _targets(body: Mapping[str, Any], length: int, vocab: int) -> PromptTargets | None:
    """The ids to score at each position, from a tensor [length - 1, K]."""
    key = "target_prompt_logprobs"
    given = optional(body, key, dict)
    if given is None:
        return None
    if given.get("dtype") != "int64":
        raise ValueError(f"{key} must be int64, {short(given.get('dtype'))} came")
    shape = tuple(_integers(given, "shape", key).tolist())
    values = _integers(given, "data", key)
    if len(shape) != 2 or shape[0] != length - 1 or shape[1] < 1:
        raise ValueError(
            f"{key} has shape {shape}; it must have a row for each of the prompt's {length} tokens "
            f"after the first, [{length - 1}, K]"
        )
    sparse = given.get("sparse_crow_indices") is not None
    crow = _integers(given, "sparse_crow_indices", key) if sparse else None
    cols = _integers(given, "sparse_col_indices", key) if sparse else None
    if crow is not None and cols is not None:
        check_csr(crow, cols, len(values), shape, key)
    elif len(values) != shape[0] * shape[1]:
        raise ValueError(f"{key}: shape {shape} does not fit {len(values)} elements")
    if len(values) > CELLS_MAX:
        raise ValueError(f"{key} has {len(values)} cells; at most {CELLS_MAX} can be scored")
    cells = np.flatnonzero(values != PADDING)
    if not len(cells):
        raise ValueError(f"{key} names no id: every cell is {PADDING}")
    check_ids(values[cells], vocab, key)
    ends = np.arange(length) * shape[1] if crow is None else crow
    return PromptTargets(
        ids=values[cells].astype(np.int32),
        starts=np.searchsorted(cells, ends).astype(np.int32),
        shape=shape,
        cells=cells,
        values=len(values),
        crow=crow,
        cols=cols,
    )


def _integers(tensor: Mapping[str, Any], key: str, where: str) -> NDArray[np.int64]:
    items = need(tensor, key, list, where)
    if not all(type(item) is int and -(1 << 63) <= item < 1 << 63 for item in items):
        raise ValueError(f"{where}: {key} must be integers, {short(items)} came")
    found = np.empty(len(items), np.int64)
    for at in range(0, len(items), TOGETHER):
        found[at : at + TOGETHER] = items[at : at + TOGETHER]
    return found


def _stops(stop: Any, model: BaseModel) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Stop ids and stop texts. None: the end of sequence; []: nothing; texts: both."""
    if stop is None:
        return model.eos_ids, ()
    items = [stop] if isinstance(stop, str) else stop
    if not isinstance(items, list):
        raise ValueError(f"stop must be a string, strings, or token ids; {short(stop)} came")
    if len(items) > STOPS_MAX:
        raise ValueError(
            f"stop has {len(items)} strings or ids; at most {STOPS_MAX} are looked for"
        )
    texts = tuple(item for item in items if isinstance(item, str))
    ids = tuple(item for item in items if type(item) is int)
    if len(texts) + len(ids) < len(items) or "" in texts:
        raise ValueError(f"stop must be non-empty strings or token ids; {short(stop)} came")
    for token in ids:
        if not 0 <= token < model.vocab:
            raise ValueError(f"stop has id {token}; ids must be from 0 to {model.vocab - 1}")
    return (ids + model.eos_ids if texts else ids), texts


def sample_message(result: SampleResult) -> list[Buffer]:
    """A SampleResponse, in parts."""
    lifted, parts = Lifted(), list[Buffer]()
    for sample in result.samples:
        stopped = sample.stop_reason == "stop"
        message = pb.SampleResponse()
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH,
            tokens=field_of([sample.tokens], "<i4", lifted),
            logprobs=field_of([sample.logprobs], "<f4", lifted),
        )
        if sample.topk_ids is not None and sample.topk_logprobs is not None:
            topk = _topk(sample.topk_ids, sample.topk_logprobs, lifted)
            sequence.topk_sampled_logprobs.CopyFrom(topk)
        parts += fill(message, lifted)
    return parts + fill(_scores_message(result, lifted), lifted)


def _scores_message(result: SampleResult, lifted: Lifted) -> pb.SampleResponse:
    """The part of the message that has the prompt's scores."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=result.prompt_reused)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = field_of([result.prompt_logprobs], "<f4", lifted)
    if result.topk_ids is not None and result.topk_logprobs is not None:
        topk = _topk(result.topk_ids, result.topk_logprobs, lifted)
        message.topk_prompt_logprobs.CopyFrom(topk)
    if result.targets is not None and result.target_logprobs is not None:
        scores = _scores(result.targets, result.target_logprobs, lifted)
        message.target_prompt_logprobs.CopyFrom(scores)
    if result.drawn_ids is not None and result.drawn_logprobs is not None:
        tokens, logprobs = result.drawn_ids, result.drawn_logprobs
        drawn = message.prompt_alt_tokens
        drawn.tokens.CopyFrom(_dense(tokens, "<i8", pb.DTYPE_INT64, lifted))
        drawn.logprobs.CopyFrom(_dense(logprobs, "<f4", pb.DTYPE_FLOAT32, lifted))
    return message


def _scores(targets: PromptTargets, logprobs: NDArray[np.float32], lifted: Lifted) -> pb.Tensor:
    """Scores in the layout of their ids; 0 where no id was given."""
    values = np.zeros(targets.values, np.float32)
    values[targets.cells] = logprobs
    if targets.crow is None or targets.cols is None:
        return _dense(values.reshape(targets.shape), "<f4", pb.DTYPE_FLOAT32, lifted)
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=targets.shape)
    tensor.sparse_csr.values = field_of([values], "<f4", lifted)
    tensor.sparse_csr.crow_indices = field_of([targets.crow], "<i8", lifted)
    tensor.sparse_csr.col_indices = field_of([targets.cols], "<i8", lifted)
    return tensor


def _dense(array: NDArray[Any], dtype: str, code: int, lifted: Lifted) -> pb.Tensor:
    return pb.Tensor(dense=field_of([array], dtype, lifted), dtype=code, shape=array.shape)


def _topk(ids: NDArray[np.int32], logprobs: NDArray[np.float32], lifted: Lifted) -> pb.TopkLogprobs:
    length, width = ids.shape
    return pb.TopkLogprobs(
        token_ids=field_of([ids], "<i4", lifted),
        logprobs=field_of([logprobs], "<f4", lifted),
        k=width,
        length=length,
    )
