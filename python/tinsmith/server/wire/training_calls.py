"""Training calls: from Tinker's wire format, protobuf datums, to a checked batch.

The inputs of a loss, and its configuration, are in the engine's table, so a new loss needs no
change here. Any other input would have no effect, whatever its sender meant, so it is refused.
TOLERATED are two inputs that say which targets count, as weights and advantages do: they are
accepted if these agree. UNUSED is what a recipe sends with a loss that does not use it.
"""

import difflib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.custom_losses.graph import CustomLoss
from tinsmith.engine.image_cache import HeldImage
from tinsmith.engine.loss_names import loss_hint
from tinsmith.engine.teachers import CONFIG, EMA, LOGPROBS, TOKENS, Teacher, losses
from tinsmith.engine.training import Batch, Uploaded
from tinsmith.formats.config import F32_MAX
from tinsmith.models.registry import BaseModel
from tinsmith.server.wire import fields, images, parse
from tinsmith.server.wire.arrays import Column, array_of, check_ids, elements
from tinsmith.server.wire.chunking import Lifted, cut
from tinsmith.server.wire.images import ImageReader, PlacedImage
from tinsmith.server.wire.messages import pb
from tinsmith.server.wire.provenance import Find, recorded_logprobs

LOSSES = {row["name"]: row for row in losses()}
MESSAGE = "ForwardBackwardRequest message"
DATUMS_MAX = 1_000_000  # as many as the SDK sends in one request
TARGETS = "target_tokens"
TOLERATED = ("mask", "weights")
# Both are part of a rollout: the cookbook's SDFT with topk=0 trains on it with cross_entropy.
UNUSED = {"cross_entropy": {"advantages", "logprobs"}}


@dataclass(frozen=True)
class TrainingCall:
    """A forward_backward request: its settings, and its datums in parts, each parsed when its turn
    comes. So a datum is an object only while it is in use: objects take many times their bytes, and
    Python's garbage collector would walk them."""

    head: pb.ForwardBackwardRequest
    parts: deque[bytes]
    lifted: Lifted
    count: int

    def __len__(self) -> int:
        return self.count

    def datums(self) -> "Iterator[One]":
        """Each datum."""
        return self._each(self.parts)

    def take(self) -> "Iterator[One]":
        """Each datum; a part is freed after its last datum."""
        return self._each(self.parts.popleft() for _ in range(len(self.parts)))

    def _each(self, parts: Iterable[bytes]) -> "Iterator[One]":
        data = (datum for part in parts for datum in _parsed(part).data)
        for index, datum in enumerate(data):
            yield One(datum, f"datum {index}", self.lifted)


@dataclass(frozen=True)
class One:
    """A datum, with its name in error messages."""

    datum: pb.Datum
    where: str
    lifted: Lifted

    @property
    def inputs(self) -> Mapping[str, pb.Tensor]:
        """The datum's loss inputs."""
        return self.datum.loss_fn_inputs

    def array(self, key: str) -> NDArray[Any]:
        """One input as an array."""
        return array_of(self.inputs[key], self.lifted, f"{self.where}: {key}")


def parse_call(body: bytes) -> TrainingCall:
    """The protobuf message without its datums; ValueError if the bytes are none."""
    empty, parts, lifted, total = pb.ForwardBackwardRequest(), deque[bytes](), Lifted(), 0
    try:
        for count, part in cut(body, empty.DATA_FIELD_NUMBER, empty.DESCRIPTOR, lifted):
            total += count
            if total > DATUMS_MAX:
                raise ValueError(f"it has more than {DATUMS_MAX} datums")
            parts.append(part)
    except ValueError as error:
        raise ValueError(f"the body is no {MESSAGE}: {error}") from None
    return TrainingCall(_parsed(parts.pop()), parts, lifted, total)  # the last: other fields


def _parsed(part: bytes) -> pb.ForwardBackwardRequest:
    try:
        return pb.ForwardBackwardRequest.FromString(part)
    except Exception as error:  # protobuf's DecodeError differs between its implementations
        raise ValueError(f"the body is no {MESSAGE}: {error}") from None


def look_at_images(call: TrainingCall, model: BaseModel, tokens_max: int) -> list[PlacedImage]:
    """The images of a call's datums, of which nothing else is read; see wire/images.py."""
    reader = ImageReader(model, tokens_max)
    for one in call.datums() if call.lifted.images else ():
        for index, chunk in enumerate(one.datum.model_input):
            if chunk.WhichOneof("chunk") == images.CHUNK:
                image, where = chunk.image, f"{one.where}: model_input[{index}]"
                fields.check_message("image", image, where)
                expected = image.expected_tokens if image.HasField("expected_tokens") else None
                read = partial(one.lifted.get, image.data)
                reader.add(read, image.format, expected, where)
    return reader.found


def batch(
    call: TrainingCall,
    model: BaseModel,
    uploaded: Mapping[str, CustomLoss] | None = None,
    find: Find = lambda _: None,
    held: Sequence[HeldImage] = (),
) -> Batch:
    """A checked batch: all shapes agree, every id is in the vocabulary, every number is finite. It
    consumes the call's datums. `uploaded` are the session's custom losses by id; `find` gives its
    recorded samples; `held` are the call's images, in their order."""
    fields.check_message("forward_backward", call.head)
    name = call.head.loss_fn
    if name == "custom":
        return _custom_batch(call, model, uploaded or {}, held)
    _check_loss(name, LOSSES)
    if not len(call):
        raise ValueError("forward_backward needs at least 1 datum, none came")
    row = LOSSES[name]
    config = _loss_config(call.head, row["config"])
    carried = row["taught"] and _carries_teacher(call)
    teacher = None
    if carried:
        config = _without_teacher(call.head, config)
    elif row["taught"]:
        teacher = _teacher(call, config, row, model)
    taken = [item for item in row["inputs"] if carried or item["name"] != LOGPROBS]
    # The forms that this call allows: targets (N, K), and one weight for each of their rows.
    row = {**row, "multi": row["multi"] and (carried or not row["taught"]), "rows": carried}
    tokens, targets, shapes = Column(np.int32), Column(np.int32), []
    inputs = {item["name"]: Column(np.float32) for item in taken}
    left = iter(held)
    for one in call.take():
        row_tokens = _datum_tokens(one, model, left)
        if teacher is not None and row_tokens.min() < 0:
            raise ValueError(
                f"{one.where} has an image, which the teacher's {TOKENS} can't have: send "
                f"{LOGPROBS} instead"
            )
        row_targets = _datum_targets(one, len(row_tokens), model.vocab, row)
        others = _unread(one.where, row, one.inputs)
        tokens.add(row_tokens)
        targets.add(row_targets.ravel())
        shapes.append(row_targets.shape)
        for item in taken[row["recorded"] :]:
            if item["required"] or item["name"] in one.inputs:
                array = _datum_input(one, item["name"], row_targets.shape, row)
            elif item["fallback"] in inputs and item["fallback"] not in config:
                array = inputs[item["fallback"]].last
            else:
                array = np.full(row_targets.size, config.get(item["fallback"], item["default"]))
            inputs[item["name"]].add(array)
        if row["recorded"]:
            advantages = inputs["advantages"].last
            array = recorded_logprobs(
                one.datum, one.where, row_tokens, row_targets, advantages, find
            )
            inputs["logprobs"].add(array)
        for key in others:
            mask, gate = _datum_input(one, key, row_targets.shape, row), row["gate"]
            counted = inputs[gate].last if gate else np.ones(mask.size)
            _check_mask(one.where, row, key, mask, counted)
    counts = [shape[1] if len(shape) == 2 else 1 for shape in shapes]
    return Batch(
        tokens=tokens.whole(),
        lengths=np.asarray([shape[0] for shape in shapes], np.int32),
        targets=targets.whole(),
        counts=np.asarray(counts, np.int32),
        loss=name,
        inputs={key: column.whole() for key, column in inputs.items()},
        config=config,
        shapes=tuple(shapes),
        teacher=teacher,
        recorded=row["recorded"],
        images=tuple(held),
    )


def _carries_teacher(call: TrainingCall) -> bool:
    """Whether datums have their teacher's log-probabilities; if one has, all must."""
    keys = [sorted({TOKENS, LOGPROBS} & set(one.inputs)) for one in call.datums()]
    if not any(LOGPROBS in found for found in keys):
        return False

    def one_of(found: list[str]) -> str:
        return found[0] if found else f"neither {TOKENS} nor {LOGPROBS}"

    for index, found in enumerate(keys):
        if len(found) == 2:
            raise ValueError(f"datum {index} has both {TOKENS} and {LOGPROBS}: it needs one")
        if found != keys[0]:
            raise ValueError(
                f"datum {index} has {one_of(found)}, datum 0 has {one_of(keys[0])}: all datums of "
                "a call must have the same one"
            )
    return True


def _without_teacher(head: pb.ForwardBackwardRequest, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a loss whose datums have the teacher: it must not name a teacher."""
    given = {*head.loss_fn_config, *head.loss_fn_config_v2}
    refused = sorted(given & {"top_k", *CONFIG})
    if refused:
        raise ValueError(
            f"loss_fn_config {', '.join(refused)} goes with {TOKENS}: {LOGPROBS} are already the "
            f"teacher's, of the ids in {TARGETS}"
        )
    return {key: value for key, value in config.items() if key not in CONFIG}


def _teacher(
    call: TrainingCall,
    config: dict[str, Any],
    row: Mapping[str, Any],
    model: BaseModel,
) -> Teacher:
    """The teacher, which is removed from the configuration, and the tokens that it reads."""
    name, decay = config.pop("teacher"), config.pop("teacher_ema")
    given = {*call.head.loss_fn_config, *call.head.loss_fn_config_v2}
    if name != EMA and "teacher_ema" in given:
        raise ValueError(f"teacher_ema is for the teacher {EMA!r}, {name!r} came")
    if not 0 <= decay < 1:
        raise ValueError(f"teacher_ema must be in [0, 1), {decay} came")
    key = row["tokens"]
    tokens, lengths = Column(np.int32), []
    for one in call.datums():
        if key not in one.inputs:
            raise ValueError(
                f"{one.where}: {row['name']} needs {key} in loss_fn_inputs: the teacher's "
                f"prompt and then the completion (or {LOGPROBS}, of (N, K) {TARGETS}); there "
                f"came {sorted(one.inputs)}"
            )
        array, where = one.array(key), f"{one.where}: {key}"
        if array.dtype.kind != "i" or array.ndim != 1:
            found = f"{array.dtype} of shape {array.shape}"
            raise ValueError(f"{where} must be integers of shape (M,), {found} came")
        check_ids(array, model.vocab, where)
        tokens.add(array.astype(np.int32))
        lengths.append(len(array))
    return Teacher(tokens.whole(), np.asarray(lengths, np.int32), name, decay)


def _custom_batch(
    call: TrainingCall,
    model: BaseModel,
    losses: Mapping[str, CustomLoss],
    held: Sequence[HeldImage],
) -> Batch:
    """Datums for an uploaded loss: each input has its declared rank."""
    config = call.head.loss_fn_config_v2
    name = config["loss_id"].text if config else ""
    if name not in losses:
        raise ValueError(
            f"custom needs the loss_id of a loss that create_custom_loss made in this session, "
            f"{name!r:.80} came"
        )
    if not len(call):
        raise ValueError("forward_backward needs at least 1 datum, none came")
    loss = losses[name]
    multi = loss.inputs[0][1] == 2
    row = {"multi": multi, "name": f"custom loss {loss.name!r}"}
    tokens, targets, shapes, inputs = Column(np.int32), Column(np.int32), [], []
    left = iter(held)
    for one in call.take():
        row_tokens = _datum_tokens(one, model, left)
        row_targets = _datum_targets(one, len(row_tokens), model.vocab, row)
        if multi != (row_targets.ndim == 2):
            raise ValueError(
                f"{one.where}: {TARGETS} has shape {row_targets.shape}, but custom loss "
                f"{loss.name!r} declared logprobs with rank {1 + multi}"
            )
        tokens.add(row_tokens)
        targets.add(row_targets.ravel())
        shapes.append(row_targets.shape)
        inputs.append(tuple(_ranked(one, key, rank, loss.name) for key, rank in loss.inputs[1:]))
    return Batch(
        tokens=tokens.whole(),
        lengths=np.asarray([shape[0] for shape in shapes], np.int32),
        targets=targets.whole(),
        counts=np.asarray([shape[1] if multi else 1 for shape in shapes], np.int32),
        loss="custom",
        inputs={},
        config={},
        shapes=tuple(shapes),
        uploaded=Uploaded(loss, tuple(inputs)),
        images=tuple(held),
    )


def _ranked(one: One, key: str, rank: int, loss: str) -> NDArray[Any]:
    if key not in one.inputs:
        came = sorted(one.inputs)
        raise ValueError(f"{one.where}: custom loss {loss!r} takes {key}; there came {came}")
    array = one.array(key)
    if array.ndim != rank:
        raise ValueError(
            f"{one.where}: {key} has rank {array.ndim}, but custom loss {loss!r} declared {rank}"
        )
    return array


def _datum_tokens(one: One, model: BaseModel, left: Iterator[HeldImage]) -> NDArray[np.int32]:
    """A datum's ids; those of images, which are `left`, are below 0."""
    fields.check_message("datum", one.datum, one.where)
    parts, where = [], f"{one.where}: model_input"
    for index, chunk in enumerate(one.datum.model_input):
        kind = chunk.WhichOneof("chunk")
        if kind == images.CHUNK:
            parts.append(images.ids_of(left, chunk.image.format, f"{where}[{index}]"))
            continue
        if kind != "encoded_text":
            raise ValueError(f"{where}[{index}] is {parse.chunk_name(kind)}")
        given = elements(one.lifted.get(chunk.encoded_text.tokens), np.dtype("<i4"), where)
        check_ids(given, model.vocab, where)
        parts.append(given)
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
    if not len(tokens):
        raise ValueError(f"{one.where} is empty: its model_input needs at least 1 token")
    if len(tokens) > model.context:
        raise ValueError(
            f"{where} has {len(tokens)} tokens, the model's context is {model.context}: cut it, or "
            "leave it out"
        )
    return tokens.astype(np.int32, copy=False)


def _datum_targets(one: One, length: int, vocab: int, row: Mapping[str, Any]) -> NDArray[np.int32]:
    if TARGETS not in one.inputs:
        came = sorted(one.inputs) or "none"
        raise ValueError(
            f"{one.where}: loss_fn_inputs has no {TARGETS}; the keys that came: {came}"
        )
    array, where = one.array(TARGETS), f"{one.where}: {TARGETS}"
    if array.dtype.kind != "i":
        raise ValueError(f"{where} must be integers, {array.dtype} came")
    if array.ndim == 2 and not row["multi"]:
        raise ValueError(
            f"{where} has shape {array.shape}, but {row['name']} takes one target for "
            f"each position, shape ({length},)"
        )
    if array.ndim not in (1, 2) or array.shape[0] != length:
        raise ValueError(
            f"{where} has shape {array.shape}, model_input has {length} tokens: they must agree"
        )
    if array.ndim == 1 and row.get("rows"):
        raise ValueError(
            f"{where} has shape {array.shape}; with {LOGPROBS} it must be ({length}, K)"
        )
    if array.size == 0:
        raise ValueError(f"{where} has shape {array.shape}: at least 1 is needed")
    check_ids(array, vocab, where)
    return array.astype(np.int32)


def _datum_input(
    one: One, key: str, shape: tuple[int, ...], row: Mapping[str, Any]
) -> NDArray[np.float32]:
    """Numbers of the targets' shape; if a loss compares rows, weights may be (N,), one a row."""
    if key not in one.inputs:
        came = sorted(one.inputs)
        raise ValueError(
            f"{one.where}: {row['name']} needs {key} in loss_fn_inputs; there came {came}"
        )
    array, where = one.array(key), f"{one.where}: {key}"
    if row["rows"] and key == "weights" and array.shape == shape[:1]:
        array = np.broadcast_to(array[:, None], shape)
    if array.shape != shape:
        raise ValueError(f"{where} has shape {array.shape}, {TARGETS} has {shape}: they must agree")
    flat = array.astype(np.float32).ravel()
    bad = np.flatnonzero(~np.isfinite(flat))
    if len(bad):
        place = np.unravel_index(bad[0], shape)
        at = ", ".join(str(int(axis)) for axis in place)
        raise ValueError(f"{where}[{at}] is {flat[bad[0]]}: every number must be finite")
    return flat


def _loss_config(
    head: pb.ForwardBackwardRequest, defaults: Mapping[str, float | str | None]
) -> dict[str, Any]:
    """The loss's configuration, each value of its default's type: text, or else a finite number."""
    given: dict[str, Any] = dict(head.loss_fn_config)
    for key, value in head.loss_fn_config_v2.items():
        given[key] = value.text if value.WhichOneof("value") == "text" else value.number
    for key, value in given.items():
        if key not in defaults:
            known = f"takes {sorted(defaults)}" if defaults else "takes none"
            raise ValueError(f"unknown loss_fn_config key {key!r}: {head.loss_fn} {known}")
        wanted = "text" if isinstance(defaults[key], str) else "a number"
        if isinstance(value, str) != (wanted == "text"):
            raise ValueError(f"loss_fn_config {key} must be {wanted}, {value!r} came")
        if isinstance(value, float) and not abs(value) <= F32_MAX:
            raise ValueError(f"loss_fn_config {key} must be a finite number of f32, {value} came")
    found = {**defaults, **given}
    for key, value in found.items():
        if value is None:
            raise ValueError(
                f"{head.loss_fn} needs {key} in loss_fn_config: it has no documented default"
            )
    return found


# ---- which inputs a loss reads ----


def _check_loss(name: str, known: Collection[str]) -> None:
    """Raises ValueError for an unknown loss, with a guess what its name may have meant."""
    if name not in known:
        raise ValueError(
            f"unknown loss {name!r}; there are {sorted(known)}{loss_hint(name, known)}"
        )


def _unread(where: str, row: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """The received inputs that the loss does not read; ValueError if one is not allowed."""
    reads = {TARGETS, *(item["name"] for item in row["inputs"])}
    reads |= {row["tokens"]} if row["tokens"] else set()
    unused, came = UNUSED.get(row["name"], set()), set(keys)
    others = sorted(came - reads - (unused if unused <= came else set()))
    for key in others:
        if key not in TOLERATED:
            near = difflib.get_close_matches(key, reads, n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"{where}: {row['name']} does not read {key!r:.100} of loss_fn_inputs; it reads "
                f"{sorted(reads)}{guess}"
            )
    return others


def _check_mask(
    where: str, row: Mapping[str, Any], key: str, mask: NDArray[np.float32], gate: NDArray[Any]
) -> None:
    """Raises ValueError if a mask is not 1 where the loss counts the target: multiplying by it
    would change the loss. `gate` is the loss's input whose zeros exclude targets, or ones."""
    odd = np.flatnonzero((mask != 1) & (gate != 0))
    if len(odd):
        at, name = int(odd[0]), row["gate"]
        its = f", where {name} is {gate[at]:g}: multiply {name} by it, and" if name else ":"
        raise ValueError(
            f"{where}: {row['name']} does not read {key}, which is {mask[at]:g} at target {at}"
            f"{its} leave {key} out"
        )
