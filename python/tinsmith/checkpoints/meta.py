"""meta.json: a checkpoint's description of itself and of its files.

It may come from anyone, so all of it is checked when it is read: a ValueError names the field, the
expected value and the actual one. Unknown keys are ignored. The table FIELDS says what each field
of Meta may be, and FILES which files a checkpoint may have: any other name in meta.json never
becomes part of a path.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, get_args

from tinsmith.checkpoints import encryption
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.optimizers import ADAMW, OPTIMIZERS
from tinsmith.formats import safetensors_io
from tinsmith.formats.folder_version import Version, read

Kind = Literal["weights", "sampler_weights", "external_weights"]

META_FILE = "meta.json"
ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
OPTIMIZER_FILE = "optimizer.safetensors"
PLAIN = (ADAPTER_FILE, CONFIG_FILE, OPTIMIZER_FILE)
FILES = {*PLAIN, *(name + encryption.SUFFIX for name in PLAIN)}

VERSION = 1
BYTES_MAX = 1 << 22  # of meta.json; user_metadata takes most of it
METADATA_BYTES_MAX = 1 << 16  # of one user_metadata
TTL_SECONDS_MAX = 100 * 366 * 86400
COUNT_MAX = (1 << 31) - 1
TIME = re.compile(r"[0-9-]{10}[T ][0-9:]{5,8}(\.[0-9]{1,6})?(Z|[+-][0-9]{2}:?[0-9]{2})")

# The keys of a base model's config that determine an adapter's shapes.
SHAPE = ("layers", "width", "heads", "kv_heads", "head_width", "ffn", "vocab")


@dataclass(frozen=True)
class Meta:
    """A checkpoint's description of itself, in its meta.json."""

    base_model: str
    rank: int
    alpha: float
    seed: int
    attn: bool
    mlp: bool
    unembed: bool
    kind: Kind
    step: int
    user_metadata: dict[str, str]
    created: str  # ISO 8601
    ttl_seconds: int | None  # after `created`
    public: bool = False
    run_metadata: dict[str, str] = field(default_factory=dict)  # user_metadata of its run
    recipients: tuple[str, ...] = ()  # public keys that its files are encrypted to
    optimizer: str = ADAMW  # of its run; older checkpoints do not have it

    @property
    def lora(self) -> LoraSpec:
        """The adapter that continues from this checkpoint."""
        return LoraSpec(
            self.rank, self.seed, self.attn, self.mlp, self.unembed, self.alpha, self.optimizer
        )

    @property
    def expires(self) -> datetime | None:
        """When its ttl is over."""
        if self.ttl_seconds is None:
            return None
        return datetime.fromisoformat(self.created) + timedelta(seconds=self.ttl_seconds)

    @property
    def expired(self) -> bool:
        """Whether its ttl is over."""
        return self.expires is not None and self.expires <= datetime.now(UTC)


# ---- checks of values ----


def is_text(value: object) -> bool:
    """Whether it is text that UTF-8 can encode: a lone surrogate can't be."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_text(text: str, name: str) -> None:
    """Raises ValueError with the position of a lone surrogate in a text: it is not Unicode, and
    neither a tokenizer nor a file accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is no Unicode: half of a surrogate pair, {text[error.start]!a}, stands alone "
            f"at character {error.start}"
        ) from None


def is_metadata(value: object) -> bool:
    """Whether it is a dict from text to text."""
    return isinstance(value, dict) and all(map(is_text, (*value, *value.values())))


def is_count(value: object, least: int = 0, most: int = COUNT_MAX) -> bool:
    """Whether it is an integer in a range."""
    return type(value) is int and least <= value <= most


def is_time(value: object) -> bool:
    """Whether it is a time with a time zone, in the form that clients read, and early enough to add
    a ttl. Python itself accepts any character between date and time."""
    try:
        if TIME.fullmatch(value) is None:  # type: ignore[arg-type]
            return False
        told = datetime.fromisoformat(value)  # type: ignore[arg-type]
        return 1970 <= told.astimezone(UTC).year <= 9000
    except (TypeError, ValueError, OverflowError):
        return False


def is_positive(value: object) -> bool:
    """Whether it is a finite number above 0 that float32 holds."""
    return type(value) in (int, float) and 2e-38 < value <= 3e38  # type: ignore[operator]


def is_finish(value: Any) -> bool:
    """Whether it is a valid end of a client's session."""
    reason = value.get("reason") if isinstance(value, dict) else None
    if not isinstance(reason, dict) or not is_text(reason.get("type")):
        return False
    detail = value.get("detail")
    return is_metadata(reason) and (detail is None or is_text(detail))


def is_size(value: object) -> bool:
    """Whether it is a number of bytes."""
    return is_count(value, 0, safetensors_io.BYTES_MAX)


_BOOL = (lambda value: type(value) is bool, "true or false")

# The check of each field, and its description for errors.
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "base_model": (is_text, "text"),
    "rank": (lambda value: is_count(value, 1), "a whole number of 1 or more"),
    "alpha": (is_positive, "a positive number"),
    "seed": (lambda value: is_count(value, 0, (1 << 64) - 1), "a whole number of 0 or more"),
    "attn": _BOOL,
    "mlp": _BOOL,
    "unembed": _BOOL,
    "kind": (lambda value: value in get_args(Kind), " or ".join(get_args(Kind))),
    "step": (is_count, "a whole number of 0 or more"),
    "user_metadata": (is_metadata, "an object of text"),
    "created": (is_time, "a time in ISO 8601 with its zone"),
    "ttl_seconds": (
        lambda value: value is None or is_count(value, 0, TTL_SECONDS_MAX),
        "null, or seconds of at most a hundred years",
    ),
    "public": _BOOL,
    "run_metadata": (is_metadata, "an object of text"),
    "recipients": (
        lambda value: isinstance(value, list | tuple) and all(map(is_text, value)),
        "a list of text",
    ),
    "optimizer": (
        lambda value: isinstance(value, str) and value in OPTIMIZERS,
        " or ".join(OPTIMIZERS),
    ),
}


# ---- reading ----


def load_meta(folder: Path | str) -> Meta:
    """A checkpoint's Meta; FileNotFoundError if there is none."""
    return as_meta(read(Path(folder), content_of))


def as_meta(content: Mapping[str, Any]) -> Meta:
    """A Meta from its JSON object; unknown keys are ignored."""
    known = {name: content[name] for name in FIELDS if name in content}
    for name, value in known.items():
        fits, words = FIELDS[name]
        if not fits(value):
            raise ValueError(f"{name} should be {words}, found {value!r:.80}")
    return Meta(**known | {"recipients": tuple(known.get("recipients", ()))})


def content_of(version: Version) -> dict[str, Any]:
    """The checked object of a version's meta.json."""
    file = version.folder / META_FILE
    try:
        with version.open(META_FILE) as opened:
            text = opened.read(BYTES_MAX + 1)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no checkpoint at {version.folder}") from None
    if len(text) > BYTES_MAX:
        raise ValueError(f"{file} has more than {BYTES_MAX} bytes")
    try:
        content = json.loads(text, object_pairs_hook=safetensors_io.unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    needed = {"version", "model", "files"} | {
        item.name
        for item in dataclasses.fields(Meta)
        if item.default is MISSING and item.default_factory is MISSING
    }
    missing = needed - set(content if isinstance(content, dict) else ())
    if missing:
        raise ValueError(f"{file} lacks {', '.join(sorted(missing))}")
    if content["version"] != VERSION:
        found = content["version"]
        raise ValueError(f"{file} has version {found!r:.40}; this tinsmith reads {VERSION}")
    try:
        as_meta(content)
        _check_rest(content)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return content


def _check_rest(content: Mapping[str, Any]) -> None:
    """Checks the keys that are not in Meta: the files, the base model's shape, and the average."""
    files, shape, average = (content.get(key) for key in ("files", "model", "average"))
    if not isinstance(files, dict):
        raise ValueError(f"files should be an object, found {files!r:.80}")
    for name, said in files.items():
        if name not in FILES:
            raise ValueError(f"{name!r:.80} can't be a file of a checkpoint")
        size, digest = (said.get(key) if isinstance(said, dict) else None for key in _SAID)
        fits = is_size(size) and isinstance(digest, str)
        if not fits or not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"files should have bytes and sha256 of {name}, found {said!r:.80}")
    if not isinstance(shape, dict) or not all(_is_number(shape.get(key)) for key in SHAPE):
        raise ValueError(f"model should have the numbers {', '.join(SHAPE)}, found {shape!r:.80}")
    sums = content.get("gradient")
    if sums is not None and not (
        isinstance(sums, dict)
        and all(is_count(sums.get(key), 1) for key in ("parts", "step_tokens"))
    ):
        raise ValueError(f"gradient should have parts and step_tokens, found {sums!r:.80}")
    if average is not None:
        decay = average.get("decay") if isinstance(average, dict) else None
        if not _is_number(decay) or not 0 <= decay < 1:
            raise ValueError(f"average should have a decay in [0, 1), found {average!r:.80}")


_SAID = ("bytes", "sha256")


def _is_number(value: object) -> bool:
    return is_count(value) or (type(value) is float and math.isfinite(value))
