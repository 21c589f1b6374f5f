"""Parses JSON requests into checked, plain values; requests with datums or a prompt are in
training_calls.py and sampling_calls.py.

Requests are checked completely before anything is queued: a ValueError's sentence names the datum
or field, what was expected and what came. Nothing here knows HTTP, waits or keeps state.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.meta import METADATA_BYTES_MAX, is_finish
from tinsmith.checkpoints.optimizers import ADAMW, OPTIMIZERS, Params, optimizer_of
from tinsmith.custom_losses import custom_loss
from tinsmith.custom_losses.graph import CustomLoss
from tinsmith.formats.config import F32_MAX
from tinsmith.server.wire import fields

NORMALIZATIONS = ("num_loss_tokens", "num_sequences", "none")
SEED_BITS = 63
INTEGER_BITS = 63  # more than any value needs; SQLite and the engine can hold that many
TEXT_MAX = 10_000  # characters of a name or a remark

T = TypeVar("T")


# ---- JSON fields ----

_KINDS: dict[type, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def need(body: Mapping[str, Any], key: str, kind: type[T], where: str = "the request") -> T:
    """A required field."""
    if body.get(key) is None:
        raise ValueError(f"{where} has no {key}")
    return _checked(body[key], key, kind)


def maybe(body: Mapping[str, Any], key: str, kind: type[T], default: T) -> T:
    """A field that may be missing or null."""
    return default if body.get(key) is None else _checked(body[key], key, kind)


def optional(body: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
    """A field, or None."""
    return None if body.get(key) is None else _checked(body[key], key, kind)


def _checked(value: Any, key: str, kind: type[T]) -> T:
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    number = isinstance(value, int) and not isinstance(value, bool)
    if number and kind in (int, float) and abs(value) >> INTEGER_BITS:
        raise ValueError(
            f"{key} must be {_KINDS[kind]} of {INTEGER_BITS} bits, {short(value)} came"
        )
    if kind is float and number:
        return float(value)  # type: ignore[return-value]
    if not fits:
        raise ValueError(f"{key} must be {_KINDS[kind]}, {short(value)} came")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} must be a finite number, {value} came")
    return value


def one_of(body: Mapping[str, Any], key: str, known: tuple[str, ...], why: str) -> None:
    """Refuses any other text; `why` ends the sentence."""
    value = optional(body, key, str)
    if value is not None and value not in known:
        raise ValueError(f"{key} must be {' or '.join(known)}, {short(value)} came: {why}")


def object_of(value: Any, where: str) -> dict[str, Any]:
    """A value that must be an object."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, {short(value)} came")
    return value


def short(value: Any) -> str:
    """A value as error messages show it."""
    text = repr(value[:60] if isinstance(value, list | str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def text(body: Mapping[str, Any], key: str) -> str | None:
    """A text field that is stored, or None."""
    value = optional(body, key, str)
    if value is not None and len(value) > TEXT_MAX:
        raise ValueError(f"{key} must have at most {TEXT_MAX} characters, {len(value)} came")
    return value


def metadata(body: Mapping[str, Any]) -> dict[str, str]:
    """user_metadata; the SDK reads its values back as strings."""
    given = maybe(body, "user_metadata", dict, {})
    found = {str(key): str(value) for key, value in given.items()}
    size = sum(len(part.encode()) for pair in found.items() for part in pair)
    if size > METADATA_BYTES_MAX:
        raise ValueError(f"user_metadata has {size} bytes; at most {METADATA_BYTES_MAX} are kept")
    return found


def finish(body: Mapping[str, Any]) -> dict[str, Any]:
    """How a client says that its session ended."""
    reason = maybe(body, "reason", dict, {"type": "success"})
    need(reason, "type", str, "the reason")
    told = {"reason": reason, "detail": text(body, "detail")}
    if not is_finish(told):
        raise ValueError(f"the reason must have text alone, {short(reason)} came")
    return told


def ttl(body: Mapping[str, Any]) -> int | None:
    """ttl_seconds: an hour to ten years, or None."""
    seconds = optional(body, "ttl_seconds", int)
    if seconds is not None and not 3600 <= seconds <= 10 * 366 * 86400:
        raise ValueError(f"ttl_seconds must be from 3600 to ten years, {seconds} came")
    return seconds


# ---- training requests ----


def lora_spec(body: Mapping[str, Any], fresh_seed: int) -> LoraSpec:
    """A new run's or an upload's adapter; fresh_seed is used if the request has no seed."""
    given = maybe(body, "lora_config", dict, {})
    fields.check("lora_config", given)
    if maybe(body, "base_only", bool, False):
        return LoraSpec(1, 0, attn=True, mlp=False, unembed=False)  # B is 0, and stays so
    rank, alpha = maybe(given, "rank", int, 32), maybe(given, "alpha", float, LoraSpec.alpha)
    if rank < 1:
        raise ValueError(f"rank must be at least 1, {rank} came: tinsmith trains LoRA alone")
    if not 0 < alpha <= F32_MAX or not (alpha := float(np.float32(alpha))):  # as the engine has it
        raise ValueError(f"alpha must be a positive number of f32, {given['alpha']} came")
    one_of(given, "init_method", ("kaiming",), "A is drawn as PEFT draws it, and B is 0")
    attn = maybe(given, "train_attn", bool, True)
    mlp = maybe(given, "train_mlp", bool, True)
    unembed = maybe(given, "train_unembed", bool, True)
    if not (attn or mlp or unembed):
        raise ValueError("one of train_attn, train_mlp and train_unembed must be true")
    return LoraSpec(rank, seed_of(given, fresh_seed), attn, mlp, unembed, alpha)


def optimizer(body: Mapping[str, Any]) -> str | None:
    """The optimizer of a new run; None if the request has none."""
    given = optional(body, "optimizer_config", dict)
    if given is None:
        return None
    kind = given.get("type", ADAMW)
    wanted = optimizer_of(kind).config
    fields.check("optimizer_config", given)
    version = given.get("version")
    if version not in (None, wanted.get("version")):
        raise ValueError(f"tinsmith has no version {short(version)} of {kind}")
    return str(kind)


def step_params(body: Mapping[str, Any], kind: str) -> Params:
    """optim_step's settings for a run's optimizer. Unknown ones are refused, so that none is
    silently ignored."""
    fields.check("optim_step", body)
    row = OPTIMIZERS[kind]
    for other in OPTIMIZERS.values():
        if other is not row and body.get(other.sent) is not None:
            asked, own = other.params.__name__, row.params.__name__
            raise ValueError(f"this run is trained with {kind}: send {own}, {asked} came")
    given = maybe(body, row.sent, dict, {})
    fields.check(row.sent, given)
    if given.get("type", kind) != kind:
        raise ValueError(
            f"this run is trained with {kind}, settings of {short(given['type'])} came"
        )
    numbers = {name: _checked(given[name], name, float) for name in row.settings if name in given}
    mode = optional(body, "grad_accumulation_normalization", str)
    if mode is not None and mode not in NORMALIZATIONS:
        raise ValueError(
            f"grad_accumulation_normalization must be one of {list(NORMALIZATIONS)} or null, "
            f"{mode!r} came"
        )
    if given.get("emit_grad_norm_metrics") not in (None, True, False, "off", "basic"):
        raise ValueError(
            "emit_grad_norm_metrics can be off or basic: the answer has grad_norm, of all weights; "
            f"{short(given['emit_grad_norm_metrics'])} came"
        )
    return row.checked(numbers, None if mode == "none" else mode)


def uploaded_loss(body: Mapping[str, Any]) -> CustomLoss:
    """create_custom_loss's checked graph."""
    name = need(body, "name", str)
    if len(name) > 200:
        raise ValueError(f"a custom loss's name has at most 200 characters, {len(name)} came")
    return custom_loss.check(name, need(body, "inputs", list), need(body, "graph", dict))


def encoded_text(chunk: Any, where: str) -> list[Any]:
    """The tokens of a JSON chunk; SDK 0.16 leaves its type out. ValueError if it is not text."""
    kind = object_of(chunk, where).get("type")
    if kind != "encoded_text" and (kind is not None or "tokens" not in chunk):
        raise ValueError(f"{where} is {chunk_name(kind)}")
    return need(chunk, "tokens", list, where)


def chunk_name(kind: Any) -> str:
    """The kind of a chunk that is neither text nor an image, and why it is refused."""
    if kind == "image_asset_pointer":
        return f"an {kind}: send the image's bytes"
    name = kind if isinstance(kind, str) else "an unknown kind"
    return f"a chunk of {name:.60}; tinsmith takes text and images, no audio"


def seed_of(params: Mapping[str, Any], fresh_seed: int) -> int:
    """A request's seed, or else the fresh one."""
    seed = optional(params, "seed", int)
    return (fresh_seed if seed is None else seed) % (1 << SEED_BITS)
