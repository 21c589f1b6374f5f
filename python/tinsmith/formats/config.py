"""config.json: a model's sizes, the kinds of its layers, and its rotary frequencies.

A key that would change the maths and is not supported is refused by name, not computed wrongly;
keys that change nothing are ignored. Kinds of layers have transformers' names in `layer_types`. The
frequencies follow its modeling_rope_utils step by step in float32.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.formats import safetensors_io

CONFIG_FILE = "config.json"

# Keys that change the maths when they are set, unless a family reads them as a size.
REFUSED = (
    "mlp_bias", "num_experts", "num_local_experts",
    "n_routed_experts", "moe_intermediate_size", "final_logit_softcapping",
    "attn_logit_softcapping", "logits_soft_cap", "query_pre_attn_scalar", "clip_qkv",
    "no_rope_layers", "attention_chunk_size", "use_mrope",
)  # fmt: skip

# Keys that change the maths unless they have this value.
SO = {"is_causal": True}
# Factors that change the maths unless they are one.
FACTORS = (
    "rotary_pct", "logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier",
)  # fmt: skip
PARTIAL = "partial_rotary_factor"
SECTION, INTERLEAVED = "mrope_section", "mrope_interleaved"
CONTEXT = "max_position_embeddings"
ORIGINAL = "original_" + CONTEXT

# The key of a folder's quantisation, and the key of its method.
QUANTIZATION = "quantization_config"
METHOD = "quant_method"
# By method, the supported values of its other keys; ANY: every value, as none changes a number.
ANY = ()
QUANTIZATIONS: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "mxfp4": {},
    "fp8": {
        "fmt": ("e4m3", None), "activation_scheme": ("dynamic", None), "weight_block_size": ANY,
        "ignored_layers": ANY,
    },
    "bitsandbytes": {
        "load_in_4bit": (True,), "load_in_8bit": (False, None), "bnb_4bit_quant_type": ("nf4",),
        "bnb_4bit_quant_storage": ("uint8", None), "bnb_4bit_use_double_quant": ANY,
        "bnb_4bit_compute_dtype": ANY, "_load_in_4bit": ANY, "_load_in_8bit": ANY,
        "llm_int8_enable_fp32_cpu_offload": ANY, "llm_int8_has_fp16_weight": ANY,
        "llm_int8_skip_modules": ANY, "llm_int8_threshold": ANY,
    },
}  # fmt: skip
UNREAD = ("modules_to_not_convert", "dequantize")  # the names of tensors say which are quantised

TIED = "tie_word_embeddings"
F32_MIN = 2.0**-126  # the smallest normal float32
F32_MAX = float(np.finfo(np.float32).max)

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
DENSE, EXPERTS, WITH_SHARED = "mlp", "experts", "experts_with_shared"

# Alternative names in transformers for one key.
OTHER_NAMES = {"num_local_experts": "num_experts"}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    return parse_json(path, path.read_bytes())


def parse_json(path: Path, text: bytes) -> dict[str, Any]:
    """The JSON object in a file's text."""
    try:
        content = json.loads(text, object_pairs_hook=safetensors_io.unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold a JSON object, found {type(content).__name__}")
    return content


def section(file: Path, content: dict[str, Any], name: str) -> dict[str, Any]:
    """The object of a model's part under its key, with its own flag for tied embeddings."""
    found = content.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"{file}: {name} should be an object, found {found!r:.60}")
    return found | {TIED: content.get(TIED, False)}


def one_name(file: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The content with OTHER_NAMES replaced; ValueError if two names have different values."""
    found = dict(content)
    for other, name in OTHER_NAMES.items():
        value = found.pop(other, None)
        if value is None:
            continue
        if found.get(name) not in (None, value):
            raise ValueError(
                f"{file}: {name} is {found[name]!r:.60}, but {other} is {value!r:.60}; they are "
                "one number"
            )
        found[name] = value
    return found


def refuse(
    file: Path,
    content: dict[str, Any],
    keys: Sequence[str],
    fixed: Mapping[str, Any],
    sizes: Collection[str] = (),
) -> None:
    """ValueError for keys that change the maths and are not supported: REFUSED (except `sizes`),
    `keys`, other values than those of `fixed` and SO, and FACTORS other than one."""
    for key in (*REFUSED, *keys):
        if content.get(key) and key not in sizes:
            raise ValueError(f"{file}: {key} is {content[key]!r:.60}, which is not supported")
    for key, value in (fixed | SO | dict.fromkeys(FACTORS, 1)).items():
        if content.get(key) not in (None, value):
            raise ValueError(f"{file}: {key} is {content[key]!r:.60}; only {value} is supported")
    if content.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"{file}: hidden_act is {content['hidden_act']!r}; only silu is supported")


def quantization(file: Path, content: dict[str, Any], known: Sequence[str]) -> str:
    """A folder's quantisation, one of `known`, or "" for none."""
    said = content.get(QUANTIZATION)
    if not said:
        return ""
    named = said.get(METHOD, said) if isinstance(said, dict) else said
    if not isinstance(named, str) or named not in known:
        only = f"; only {', '.join(known)} is" if known else ""
        raise ValueError(f"{file}: {QUANTIZATION} is {named!r:.60}, which is not supported{only}")
    known_keys = QUANTIZATIONS[named]
    odd = sorted(set(said) - {METHOD, *UNREAD, *known_keys})
    odd += [key for key, values in known_keys.items() if values and said.get(key) not in values]
    if odd:
        raise ValueError(
            f"{file}: {QUANTIZATION} has {odd[0]} {said.get(odd[0])!r:.60}, which is not supported"
        )
    return named


def count(
    file: Path, content: dict[str, Any], key: str, default: int | None = None, least: int = 1
) -> int:
    """A key's whole number of at least `least`; `default` if it is absent or null."""
    value = content.get(key)
    value = default if value is None else value
    if type(value) is not int or not least <= value < 1 << 31:
        what = "a positive integer" if least else "an integer of 0 or more"
        raise ValueError(f"{file}: {key} should be {what}, found {value!r:.60}")
    return value


def number(file: Path, content: dict[str, Any], key: str, default: float | None = None) -> float:
    """A key's positive number; `default` if it is absent or null."""
    value = content.get(key)
    value = default if value is None else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not F32_MIN <= value <= F32_MAX:
        raise ValueError(f"{file}: {key} should be a positive number, found {value!r:.60}")
    return float(value)


# ---- the mixers of the layers: their kinds, and the window of those that have one ----

Mixers = tuple[tuple[str, ...], int]


def all_full(file: Path, content: dict[str, Any], layers: int) -> Mixers:
    """Every layer has full attention."""
    return _agreed(file, content, (FULL,) * layers, 0)


def all_sliding(file: Path, content: dict[str, Any], layers: int) -> Mixers:
    """Every layer has the window. null: no window; a missing key: transformers' default."""
    if content.get("sliding_window", 0) is None:
        return all_full(file, content, layers)
    window = count(file, content, "sliding_window", default=4096)
    return _agreed(file, content, (SLIDING,) * layers, window)


def some_sliding(file: Path, content: dict[str, Any], layers: int) -> Mixers:
    """With use_sliding_window, the layers in layer_types have the window, or those from
    max_window_layers on."""
    used = content.get("use_sliding_window") and content.get("sliding_window", 0) is not None
    window = count(file, content, "sliding_window", default=4096) if used else 0
    full = count(file, content, "max_window_layers", default=28, least=0) if window else layers
    kinds = tuple(SLIDING if layer >= full else FULL for layer in range(layers))
    named = content.get("layer_types")
    both = isinstance(named, list) and all(kind in (FULL, SLIDING) for kind in named)
    if window and both and len(named) == layers:
        kinds = tuple(named)
    return _agreed(file, content, kinds, window if SLIDING in kinds else 0)


def turns_sliding(file: Path, content: dict[str, Any], layers: int) -> Mixers:
    """The layers in layer_types have the window, or every other one from the first."""
    kinds = _named(file, content, layers, (SLIDING, FULL))
    kinds = kinds or tuple(FULL if layer % 2 else SLIDING for layer in range(layers))
    said = {"sliding_window": content.get("sliding_window", 128)}
    return kinds, count(file, said, "sliding_window") if SLIDING in kinds else 0


def some_linear(file: Path, content: dict[str, Any], layers: int) -> Mixers:
    """Every full_attention_interval-th layer has full attention, or the ones in layer_types; the
    others keep a state."""
    kinds = _named(file, content, layers, (LINEAR, FULL))
    if not kinds:
        every = count(file, content, "full_attention_interval", default=4)
        kinds = tuple(LINEAR if (layer + 1) % every else FULL for layer in range(layers))
    return kinds, 0


def _named(
    file: Path, content: dict[str, Any], layers: int, known: Sequence[str]
) -> tuple[str, ...]:
    """The kinds, of `known`, in layer_types; () if it is missing."""
    named = content.get("layer_types")
    if named is None:
        return ()
    if not isinstance(named, list) or len(named) != layers:
        raise ValueError(f"{file}: layer_types should name {layers} layers: {named!r:.60}")
    for layer, kind in enumerate(named):
        if kind not in known:
            raise ValueError(
                f"{file}: layer_types has {kind!s:.60} for layer {layer}; it should be "
                f"{' or '.join(known)}"
            )
    return tuple(named)


def _agreed(file: Path, content: dict[str, Any], kinds: tuple[str, ...], window: int) -> Mixers:
    """These kinds; ValueError if layer_types contradicts them."""
    named = content.get("layer_types")
    if named is None or named == list(kinds):
        return kinds, window
    if not isinstance(named, list) or len(named) != len(kinds):
        raise ValueError(f"{file}: layer_types should name {len(kinds)} layers: {named!r:.60}")
    layer = next(i for i, kind in enumerate(kinds) if named[i] != kind)
    found, wanted = named[layer], kinds[layer]
    raise ValueError(
        f"{file}: layer_types has {found!s:.60} for layer {layer}; the other keys say {wanted}"
    )


# ---- the feeds of the layers: their kinds ----


def all_dense(file: Path, content: dict[str, Any], layers: int) -> tuple[str, ...]:
    """Every layer has one MLP."""
    return (DENSE,) * layers


def some_experts(file: Path, content: dict[str, Any], layers: int) -> tuple[str, ...]:
    """Every decoder_sparse_step-th layer has experts, except those in mlp_only_layers."""
    every = count(file, content, "decoder_sparse_step", default=1)
    named = content.get("mlp_only_layers")
    named = [] if named is None else named
    if not isinstance(named, list) or any(type(layer) is not int for layer in named):
        raise ValueError(f"{file}: mlp_only_layers should be a list of layers, found {named!r:.60}")
    for layer in named:
        if not 0 <= layer < layers:
            raise ValueError(
                f"{file}: mlp_only_layers has {layer}; the {layers} layers are numbered from 0"
            )
    dense = set(named)
    sparse = (layer not in dense and (layer + 1) % every == 0 for layer in range(layers))
    return tuple(EXPERTS if one else DENSE for one in sparse)


def all_experts(file: Path, content: dict[str, Any], layers: int) -> tuple[str, ...]:
    """Every layer has experts."""
    return (EXPERTS,) * layers


def all_experts_with_shared(file: Path, content: dict[str, Any], layers: int) -> tuple[str, ...]:
    """Every layer has experts, and a shared expert that every token uses."""
    return (WITH_SHARED,) * layers


def flag(file: Path, content: dict[str, Any], key: str) -> bool:
    """A key's true or false."""
    value = content.get(key)
    if type(value) is not bool:
        raise ValueError(f"{file}: {key} should be true or false, found {value!r:.60}")
    return value


# ---- rotary frequencies ----


def rotary_width(
    file: Path, content: dict[str, Any], head_width: int, partial: float | None
) -> int:
    """How many elements of a head are rotated: the first ones. `partial` is their share if
    config.json has none; None: all are rotated, and a share is refused."""
    given = _rope(file, content).get(PARTIAL)
    given = content.get(PARTIAL) if given is None else given
    if partial is None:
        if given not in (None, 1):
            raise ValueError(f"{file}: {PARTIAL} is {given!r:.60}; only 1 is supported")
        return head_width
    width = int(head_width * number(file, {PARTIAL: given}, PARTIAL, default=partial))
    if width % 2 or not 2 <= width <= head_width:
        raise ValueError(
            f"{file}: {PARTIAL} {given or partial} of head_dim {head_width} is {width} elements; "
            f"it should be an even number of them, from 2 to all"
        )
    return width


def _rope(file: Path, content: dict[str, Any]) -> dict[str, Any]:
    # transformers 4 writes rope_theta beside rope_scaling, transformers 5 both in rope_parameters.
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{file}: rope_parameters per layer are not supported, found {rope!r:.60}")
    return rope


def rope_axis(
    file: Path, content: dict[str, Any], rotary: int, default: Sequence[int]
) -> tuple[int, ...]:
    """Which of a position's three axes (time, height, width) rotates each pair of a head's first
    `rotary` elements. The axes take turns until height and width have as many pairs as the section
    says (`default`, if it is missing); the others are time's."""
    rope, pairs = _rope(file, content), rotary // 2
    if rope.get(INTERLEAVED, True) is not True:
        raise ValueError(
            f"{file}: {INTERLEAVED} is {rope[INTERLEAVED]!r:.60}; only true is supported"
        )
    said = rope.get(SECTION)
    parts = default if said is None else said
    three = isinstance(parts, list | tuple) and len(parts) == 3
    whole = three and all(type(one) is int and one >= 0 for one in parts)
    if not whole or (said is not None and sum(parts) != pairs):
        raise ValueError(
            f"{file}: {SECTION} should be three numbers of pairs, {pairs} together, found "
            f"{said!r:.60}"
        )
    axis = [0] * pairs
    for one in (1, 2):
        for pair in range(one, min(pairs, 3 * parts[one]), 3):
            axis[pair] = one
    return tuple(axis)


def rope_theta(file: Path, content: dict[str, Any]) -> float:
    """The base of the frequencies' powers."""
    return number(file, {"rope_theta": 10000.0} | content | _rope(file, content), "rope_theta")


@np.errstate(all="ignore")
def frequencies(file: Path, content: dict[str, Any], rotary: int) -> NDArray[np.float32]:
    """The angle by which a position rotates each pair of a head's first `rotary` elements. Sections
    for the axes of an image (mrope) do not affect text: all axes have the same position."""
    rope = _rope(file, content)
    theta = rope_theta(file, content)
    exponents = np.arange(0, rotary, 2).astype(np.float32) / np.float32(rotary)
    # A rounded float64 power is torch's float32 power, except for one in a hundred's last bit.
    powers = (float(np.float32(theta)) ** exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1.0) / powers
    kind = _rope_kind(file, rope)
    rope = rope | {ORIGINAL: _original(content, rope)}
    if kind == "llama3":
        plain = _llama3(file, rope, plain)
    if kind == "yarn":
        plain = _yarn(file, rope, powers, float(theta))
    if not np.isfinite(plain).all():
        raise ValueError(f"{file}: with rope_theta {theta:g} not all frequencies are finite")
    return plain


def _original(content: Mapping[str, Any], rope: Mapping[str, Any]) -> Any:
    """The context before scaling. As in transformers, the top-level key comes before the one in the
    rope settings."""
    contexts = (content.get(ORIGINAL), rope.get(ORIGINAL), content.get(CONTEXT))
    return next((one for one in contexts if one is not None), None)


def context(file: Path, content: dict[str, Any]) -> int:
    """How many positions a model supports. Under YaRN it is vLLM's value, the factor times the
    original context: some folders' max_position_embeddings is that product already, and others only
    add the settings. transformers has no limit."""
    rope = _rope(file, content)
    if _rope_kind(file, rope) != "yarn":
        return count(file, content, CONTEXT)
    factor, original = (
        number(file, {key: value}, key)
        for key, value in (("factor", rope.get("factor")), (ORIGINAL, _original(content, rope)))
    )
    key = f"{CONTEXT} by YaRN, {ORIGINAL} times factor"
    return count(file, {key: int(factor * original)}, key)


def _rope_kind(file: Path, rope: Mapping[str, Any]) -> str:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3", "yarn"):
        raise ValueError(
            f"{file}: the rope type is {kind!r:.60}; tinsmith knows default, llama3 and yarn"
        )
    return str(kind)


def rope_scale(file: Path, content: dict[str, Any]) -> float:
    """The factor of rope's cosines and sines: YaRN's attention factor, or 1."""
    scale = _rope_scale(file, _rope(file, content))
    if not F32_MIN <= scale <= F32_MAX:
        raise ValueError(
            f"{file}: YaRN would multiply rope's cosines by {scale:g}, which should be a positive "
            "float32"
        )
    return scale


def _rope_scale(file: Path, rope: dict[str, Any]) -> float:
    if _rope_kind(file, rope) != "yarn":
        return 1.0
    given = rope.get("attention_factor")
    if given is not None:
        return number(file, rope, "attention_factor")
    factor = number(file, rope, "factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        both = (number(file, rope, key) for key in ("mscale", "mscale_all_dim"))
        own, all_dim = (_longer(factor, scale) for scale in both)
        return own / all_dim
    return _longer(factor, 1.0)


def _longer(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn(
    file: Path, rope: dict[str, Any], powers: NDArray[np.float32], theta: float
) -> NDArray[np.float32]:
    """YaRN's frequencies: pairs that rotate few times within the original context are slowed by a
    factor, those that rotate often are not, with a linear ramp between."""
    fast, slow = (
        number(file, rope, key, default=default)
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    factor, original = (number(file, rope, key) for key in ("factor", ORIGINAL))
    whole = rope.get("truncate", True)
    if type(whole) is not bool:
        raise ValueError(f"{file}: truncate should be true or false, found {whole!r:.60}")
    if theta == 1.0:
        raise ValueError(f"{file}: with rope_theta 1 all pairs turn alike, which YaRN can't slow")
    pairs = len(powers)
    first, last = (
        2 * pairs * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (fast, slow)
    )
    if whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    last += 0.001 if first == last else 0
    line = (np.arange(pairs, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    kept = 1 - np.clip(line, 0, 1)
    slowed = np.float32(1) / (np.float32(factor) * powers)
    return (slowed * (1 - kept) + np.float32(1) / powers * kept).astype(np.float32)


def _llama3(file: Path, rope: dict[str, Any], inv_freq: NDArray[np.float32]) -> NDArray[np.float32]:
    """Llama 3.1's frequencies: long wavelengths slowed by a factor, with a smooth transition."""
    keys = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
    factor, low, high, original = (number(file, rope, key) for key in keys)
    if high <= low:
        raise ValueError(f"{file}: high_freq_factor {high} should exceed low_freq_factor {low}")
    # torch divides a number by a tensor by multiplying with the tensor's reciprocal.
    wavelength = np.float32(1) / inv_freq * np.float32(2 * math.pi)
    slowed = np.where(wavelength > original / low, inv_freq / np.float32(factor), inv_freq)
    turns = np.float32(1) / wavelength * np.float32(original)
    smooth = (turns - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * slowed / np.float32(factor) + smooth * slowed
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return np.where(medium, between, slowed).astype(np.float32)


# ---- sizes that belong together ----

# The engine's limits (csrc/device/device.h).
DELTA_UNIT, DELTA_MOST = 32, 256
EXPERTS_MOST, CHOSEN_MOST = 1024, 32


def check_delta(file: Path, config: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """Checks the sizes of a delta network, which are zeros if the family has none."""
    for size in ("key_width", "value_width"):
        if config[size] % DELTA_UNIT or config[size] > DELTA_MOST:
            raise ValueError(
                f"{file}: {keys[size]} is {config[size]}; it should be a multiple of "
                f"{DELTA_UNIT}, at most {DELTA_MOST}"
            )
    heads, values = config["key_heads"], config["value_heads"]
    if heads and values % heads:
        raise ValueError(f"{file}: {values} value heads can't share {heads} key heads evenly")


def check_experts(file: Path, config: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """Checks that there are enough experts for a row, and not too many for the engine."""
    experts, chosen = config["experts"], config["chosen"]
    if experts > EXPERTS_MOST:
        raise ValueError(
            f"{file}: {keys['experts']} is {experts}; it should be at most {EXPERTS_MOST}"
        )
    if chosen > min(experts, CHOSEN_MOST):
        most = f"{CHOSEN_MOST}" if experts > CHOSEN_MOST else f"{experts}, the number of experts"
        raise ValueError(f"{file}: {keys['chosen']} is {chosen}; it should be at most {most}")
