"""Bytes that one token and layer move in a card's memory, pass by pass: the table of RESULTS.md.

    python benchmarks/traffic.py            what the passes move in Qwen3's shapes
    python benchmarks/traffic.py --count    two small layers, as the emulated card counts them

A pass is a launch or a product. What it reads is counted once, and so is what it writes, however
many blocks do it: the least that memory moves where nothing stays in a cache from one pass to the
next. Weights and LoRA's matrices are read once a pass for all its rows, so a token of many has no
part in them; a decoded one has all. Sums that LoRA cuts where rows are few are left out.

The passes are the ones of csrc/model/, written down here. tests/cuda/test_traffic.py compares them
with the emulated card, which counts each access of each thread (tests/support/traffic.cpp)."""

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REAL, F32 = 2, 4
RANK = 32
PLAN = {"0.6B": 96, "1.7B": 152, "4B": 228, "8B": 288}  # KB forward, planned without LoRA
SCORED = 64  # keys of a page, which the delta rule scores with one another


@dataclass(frozen=True)
class Shape:
    """A layer: numbers of a row of its parts."""

    D: int  # the residual stream
    H: int  # heads of queries; a delta net's value heads
    G: int  # of keys and values; a delta net's key heads
    E: int
    F: int
    R: int = RANK

    @property
    def Q(self) -> int:
        return self.H * self.E

    @property
    def KV(self) -> int:
        return self.G * self.E


SHAPES = {
    "0.6B": Shape(1024, 16, 8, 128, 3072),
    "1.7B": Shape(2048, 16, 8, 128, 6144),
    "4B": Shape(2560, 32, 8, 128, 9728),
    "8B": Shape(4096, 32, 8, 128, 12288),
}


def product(K: int, N: int, plus: int = 0) -> int:
    """Either way: a row of K numbers in, one of N out."""
    return REAL * (K + N + plus)


def lora(s: Shape, K: int, *parts: int) -> int:
    """s = x·A of all matrices; then y += s·B."""
    rank, N = len(parts) * s.R, sum(parts)
    return REAL * (K + rank) + REAL * (rank + 2 * N)


def lora_backward(s: Shape, K: int, *parts: int, cut: bool = False) -> int:
    """ds; the gradients of A and B; dx += Σ ds·Aᵀ, whose sum is cut in parts where rows are few."""
    rank, N = len(parts) * s.R, sum(parts)
    waits = 2 * F32 * len(parts) * K if cut and len(parts) > 1 else 0
    return REAL * (N + rank) + REAL * (2 * rank + N + K) + REAL * (rank + 2 * K) + waits


def norm(s: Shape) -> int:
    return 2 * REAL * s.D + F32


def norm_backward(s: Shape) -> int:
    """dy, x and what is added come in."""
    return 4 * REAL * s.D + F32


def rotate(s: Shape) -> int:
    """Head norms and rope; all of a head is turned."""
    return 2 * REAL * (s.Q + s.KV) + F32 * (s.E + s.H + s.G)


def attention(s: Shape) -> dict[str, int]:
    wide = s.Q + 2 * s.KV
    return {
        "norm": norm(s),
        "q, k, v": product(s.D, wide),
        "their LoRA": lora(s, s.D, s.Q, s.KV, s.KV),
        "head norms, rope": rotate(s),
        "keys and values to pages": 4 * REAL * s.KV + 4,
        "attention": REAL * (2 * s.Q + 2 * s.KV) + F32 * s.H,
        "output": product(s.Q, s.D, plus=s.D),
        "its LoRA": lora(s, s.Q, s.D),
    }


def attention_backward(s: Shape, cut: bool = False) -> dict[str, int]:
    wide = s.Q + 2 * s.KV
    read = REAL * (2 * s.Q + 2 * s.KV) + 2 * F32 * s.H  # q, k, v, dy, lse and y·dy
    return {
        "norm again": norm(s),
        "output": product(s.D, s.Q),
        "its LoRA": lora_backward(s, s.Q, s.D),
        "head norms, rope again": rotate(s),
        "y·dy": 2 * REAL * s.Q + F32 * s.H,
        "attention: keys, queries": 2 * read + REAL * wide,
        "head norms, rope": 3 * REAL * (s.Q + s.KV) + F32 * (s.E + s.H + s.G),
        "q, k, v": product(wide, s.D),
        "their LoRA": lora_backward(s, s.D, s.Q, s.KV, s.KV, cut=cut),
        "norm": norm_backward(s),
    }


def mlp(s: Shape) -> dict[str, int]:
    return {
        "mlp's norm": norm(s),
        "gate, up": product(s.D, 2 * s.F),
        "gate's and up's LoRA": lora(s, s.D, s.F, s.F),
        "swiglu": 3 * REAL * s.F,
        "down": product(s.F, s.D, plus=s.D),
        "down's LoRA": lora(s, s.F, s.D),
    }


def mlp_backward(s: Shape, cut: bool = False) -> dict[str, int]:
    return {
        "mlp's norm again": norm(s),
        "swiglu again": 3 * REAL * s.F,
        "down": product(s.D, s.F),
        "down's LoRA": lora_backward(s, s.F, s.D),
        "swiglu": 5 * REAL * s.F,
        "gate, up": product(2 * s.F, s.D),
        "gate's and up's LoRA": lora_backward(s, s.D, s.F, s.F, cut=cut),
        "mlp's norm": norm_backward(s),
    }


def prepared(s: Shape) -> int:
    """What the delta rule reads: three convolutions, two divisions by a length, two gates."""
    unit = 2 * REAL * s.KV + F32 * s.G
    return 2 * REAL * (2 * s.KV + s.Q) + 2 * unit + 2 * (REAL + F32) * s.H


def gated(s: Shape) -> int:
    """The norm of its output, and swiglu with z."""
    return 2 * REAL * s.Q + F32 * s.H + 3 * REAL * s.Q


def delta(s: Shape) -> dict[str, int]:
    """Queries and keys are KV wide here, values Q. Scores of keys with keys and with queries are
    written whole, and their lower triangles are read; the state is kept once a page."""
    wide = 2 * s.KV + 2 * s.Q
    scores = F32 * SCORED * s.G
    return {
        "norm": norm(s),
        "q, k, v, z, b, a": product(s.D, wide + 2 * s.H),
        "their LoRA": lora(s, s.D, s.KV, s.KV, s.Q, s.Q),
        "convolutions, lengths, gates": prepared(s),
        "scores": 2 * REAL * s.KV + 2 * scores,
        "delta rule": REAL * (2 * s.KV + 2 * s.Q) + F32 * (2 * s.H + s.Q) + scores
        + F32 * s.H * s.E * s.E // SCORED,
        "its norm and gate": gated(s),
        "output": product(s.Q, s.D, plus=s.D),
        "its LoRA": lora(s, s.Q, s.D),
    }  # fmt: skip


def delta_backward(s: Shape, cut: bool = False) -> int:
    """With its MLP's, and without the delta rule's own: scores and states that it writes between
    its launches."""
    wide = 2 * s.KV + 2 * s.Q
    passes = {
        "norm again": norm(s),
        "convolutions, lengths, gates again": prepared(s),
        "its norm and gate again": gated(s),
        "output": product(s.D, s.Q),
        "its LoRA": lora_backward(s, s.Q, s.D),
        "gate": 5 * REAL * s.Q,
        "its norm": 3 * REAL * s.Q + F32 * s.H,
        "gates": 2 * F32 * s.H + 4 * REAL * s.H,
        "lengths": 3 * 2 * REAL * s.KV + 2 * F32 * s.G,
        "convolutions": 3 * REAL * (2 * s.KV + s.Q),
        "q, k, v, z, b, a": product(wide + 2 * s.H, s.D),
        "their LoRA": lora_backward(s, s.D, s.KV, s.KV, s.Q, s.Q, cut=cut),
        "norm": norm_backward(s),
    }
    return sum(passes.values()) + sum(mlp_backward(s, cut).values())


def once(s: Shape, back: bool = False, is_delta: bool = False) -> int:
    """What passes read once for all rows, of a layer with its MLP: weights, LoRA, norms and the
    like; backward LoRA's gradients too, which are added to, and summed up, gathered and cleared
    when the call ends."""
    mixer = [(s.D, s.Q), (s.D, s.KV), (s.D, s.KV), (s.Q, s.D)]
    vectors, untrained = 2 * s.D + 2 * s.E, 0
    if is_delta:
        mixer.append((s.D, s.Q))
        vectors += 4 * (2 * s.KV + s.Q) + s.E + 2 * s.H
        untrained = 2 * s.D * s.H
    matrices = [*mixer, (s.D, s.F), (s.D, s.F), (s.F, s.D)]
    trained = sum(REAL * K * N + F32 * s.R * (K + N) * (8 if back else 1) for K, N in matrices)
    return trained + REAL * untrained + F32 * vectors * (2 if back else 1)


def forward(s: Shape) -> int:
    return sum((attention(s) | mlp(s)).values())


def backward(s: Shape, cut: bool = False) -> int:
    return sum(attention_backward(s, cut).values()) + sum(mlp_backward(s, cut).values())


def decoded(s: Shape, keys: int) -> int:
    """One token alone, which sees so many keys."""
    return forward(s) + once(s) + 2 * REAL * s.KV * (keys - 1)


def without_lora(s: Shape, back: bool) -> int:
    passes = (attention_backward(s), mlp_backward(s)) if back else (attention(s), mlp(s))
    return sum(moved for part in passes for name, moved in part.items() if "LoRA" not in name)


# ---- counted ----

SMALL = Shape(64, 4, 2, 32, 96, R=8)
ROWS = 64  # of a call
KEYS = 30  # that a decoded token sees


class Counter:
    """The emulated card that counts, which this process opens instead of the other one."""

    def __init__(self) -> None:
        sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
        from support import op_devices

        path, reason = op_devices.emulated_build(counting=True)
        if reason:
            raise RuntimeError(reason)
        core = ctypes.CDLL(str(op_devices.core_library()))
        core.device_emulated.argtypes = [ctypes.c_char_p]
        assert core.device_emulated(os.fsencode(path)) == 0
        self.library = ctypes.CDLL(str(path))
        self.library.cuda_emulated_mode(0, 0)

    def take(self) -> int:
        """The bytes moved since the last call."""
        room = 1 << 16
        numbers = (ctypes.c_int64 * (2 * room))()
        count = self.library.traffic_take(numbers, room)
        assert count <= room
        return sum(numbers[: 2 * count])


def adapter_of(mixers: Sequence[str]) -> Any:
    """Random layers of the small shape on the counting card, and LoRA on them."""
    import numpy as np
    from support.tiny_models import randomize
    from tinsmith import _core

    s = SMALL
    delta_sizes = {"key_heads": s.G, "value_heads": s.H, "key_width": s.E, "value_width": s.E}
    config = {
        "layers": len(mixers), "width": s.D, "heads": s.H, "kv_heads": s.G, "head_width": s.E,
        "rotary": s.E, "ffn": s.F, "vocab": 64, "context": 256, "window": 0, "qkv_bias": 0,
        "qk_norm": 1, "q_gate": 0, "tied": 0, "norm_eps": 1e-6, "rope_scale": 1.0,
        "mixers": list(mixers), "feeds": ["mlp"] * len(mixers),
    }  # fmt: skip
    has_delta = "linear_attention" in mixers
    config |= {name: size * has_delta for name, size in delta_sizes.items()}
    inv_freq = (1e4 ** -(np.arange(s.E // 2) / (s.E // 2))).astype(np.float32)
    model = _core.Model(config, inv_freq, weights="bf16", device="cuda-emulated", threads=1)
    rng = np.random.default_rng(5)
    for slot, layer, index, rows, cols in model.slots:
        array = rng.normal(0, 1 / cols**0.5, (rows, cols)).astype(np.float32)
        model.load(slot, layer, array[0] if rows == 1 else array, index)
    model.seal()
    return randomize(_core.Adapter(model, rank=s.R))


def of_calls(counter: Counter, mixers: Sequence[str]) -> list[int]:
    """What a forward pass moves, and one with its backward; then a token that is decoded."""
    import numpy as np
    from support.tiny_models import call, datum
    from tinsmith import _core

    adapter = adapter_of(mixers)
    tokens = np.arange(ROWS, dtype=np.int32)
    call(adapter, [datum(tokens)])  # cuBLASLt's algorithms are picked
    found = []
    for backward in (False, True):
        counter.take()
        call(adapter, [datum(tokens)], backward=backward)
        found.append(counter.take())
    sampler = _core.Sampler(adapter.model, tokens=1024, graphs=False)
    sampler.add(0, tokens[: KEYS - 3], adapter, max_tokens=4, seed=3)
    for _ in range(3):  # the prompt, and two tokens
        sampler.step()
    counter.take()
    sampler.step()
    return [*found, counter.take()]


def count() -> dict[str, list[int]]:
    """Of a layer in the middle: forward, backward, decoded."""
    counter, full = Counter(), "full_attention"
    less = of_calls(counter, [full, full])
    found = {}
    for kind in (full, "linear_attention"):
        more = of_calls(counter, [full, kind, full])
        forward, both, alone = (b - a for a, b in zip(less, more, strict=True))
        found[kind] = [forward, both - forward, alone]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", action="store_true", help="count, and print it as JSON")
    if parser.parse_args().count:
        print(json.dumps(count()))
        return
    print(
        "| KB a token and layer | forward | without LoRA | plan | backward | without LoRA | plan |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, s in SHAPES.items():
        cells = [forward(s), without_lora(s, False), PLAN[name] * 1000]
        cells += [backward(s), without_lora(s, True), PLAN[name] * 2500]
        print(f"| {name} |", " | ".join(f"{cell / 1000:,.0f}" for cell in cells), "|")


if __name__ == "__main__":
    main()
