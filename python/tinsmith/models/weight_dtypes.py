"""The stored type of each base weight: wide, or blocks of 8 to 4 bits (csrc/device/dtype.c).

Each weight has its own type. Weights stored in blocks stay in them, unless more or fewer bits are
requested; wide ones are quantised when they are loaded. Some matrices get more bits than the
others: the embedding and the head, and those that are too small to save anything.
"""

from collections.abc import Mapping, Sequence

from tinsmith import _core
from tinsmith.formats import safetensors_io
from tinsmith.models.tensor_views import SlotView

WEIGHTS = ("stored", "bf16", "int8", "int4")

FOLDER_TYPES = {"FP8": "fp8", "NF4": "nf4"}  # in safetensors folders, besides MXFP4
BITS = {
    "int8": 8, "int4": 4, "q4_0": 4, "q4_1": 4, "mxfp4": 4, "fp8": 8, "nf4": 4, "q4_k": 4,
    "q5_k": 5, "q6_k": 6,
}  # fmt: skip
# Types that a GPU can compute with (cuda/weights/weight_load.cu); the CPU can use all. Stored types
# that a device does not support are widened.
ON_GPU = {"int8", "int4", "q4_0", "q4_1", "mxfp4"}

SMALL = {"router", "shared_gate", "delta_a", "delta_b"}  # never quantised here
ENDS = {"embed", "head"}  # 8 bits if the others have 4

Place = tuple[str, int]  # a slot, and its layer or -1


def check(kind: str) -> None:
    """Raises ValueError for an invalid setting."""
    if kind not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}; {kind!r:.60} came")


def stored(
    held: Mapping[str, Sequence[SlotView]], tensors: safetensors_io.Tensors
) -> dict[Place, set[str | None]]:
    """The block types, or None, in which the matrices of each slot of a layer are stored."""
    found: dict[Place, set[str | None]] = {}
    for name, parts in held.items():
        for one in parts:
            if one.place.rows > 1:
                found.setdefault((one.slot, one.layer), set()).add(tensors.stored(name))
    return found


def choose(kind: str, device: str, places: Mapping[Place, set[str | None]]) -> dict[Place, str]:
    """The type of each place that is stored in blocks. `places` has the block types, or None, of
    the matrices' tensors."""
    if kind == "bf16":
        return {}
    most, known = BITS.get(kind, 8), BITS.keys() if device.startswith("cpu") else ON_GPU
    chosen = {}
    for place, types in places.items():
        slot, bits = place[0], max(most, 8) if place[0] in ENDS else most
        one = next(iter(types)) if len(types) == 1 else None
        if one in known and BITS[one] <= bits:
            chosen[place] = one
        elif kind != "stored" and slot not in SMALL:
            chosen[place] = "int8" if bits == 8 else "int4"
    return chosen


def device_for(chosen: Mapping[Place, str], device: str, dtype: str | None) -> str:
    """The device: cpu-int16, which multiplies integers, for weights in blocks that would be
    computed in f32, if dtype leaves that open."""
    faster = bool(chosen) and dtype == "auto" and device == staged("cpu", device)
    usable = faster and not _core.devices("cpu-int16")["cpu-int16"]
    return staged("cpu-int16", device) if usable else device


def staged(name: str, device: str) -> str:
    """The device `name` for each stage of a device."""
    return ",".join([name] * len(device.split(",")))


def tally(
    slots: Sequence[tuple[str, int, int, int, int]], chosen: Mapping[Place, str], wide: str
) -> dict[str, int]:
    """How many numbers of a model's matrices are stored in each type, largest first."""
    counts: dict[str, int] = {}
    for slot, layer, _, rows, cols in slots:
        if rows > 1:
            kind = chosen.get((slot, layer), wide)
            counts[kind] = counts.get(kind, 0) + rows * cols
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
