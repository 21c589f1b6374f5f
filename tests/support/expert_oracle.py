"""A small model with experts, put together slot by slot, and the same in torch's float64.

It has what no family has together: experts of gpt-oss's kind (biases, a limited unit, sinks, a
window) beside Qwen's (an expert that all rows have, shares that don't add up to 1).
"""

import functools
from typing import Any

import numpy as np
import torch
from tinsmith import _core

from support.tiny_models import DEVICE

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD, ROTARY = 61, 40, 4, 2, 16, 16
SIZES = {
    "width": WIDTH, "heads": HEADS, "kv_heads": KV_HEADS, "head_width": HEAD, "rotary": ROTARY,
    "ffn": 33, "vocab": VOCAB, "context": 512, "norm_eps": 1e-6, "rope_scale": 1.3, "experts": 8,
    "chosen": 3, "expert_ffn": 21,
}  # fmt: skip
GPT_OSS = {
    "mixers": ["sliding_attention", "full_attention"], "feeds": ["experts"] * 2, "window": 9,
    "qkv_bias": 1, "o_bias": 1, "sinks": 1, "expert_bias": 1, "expert_limit": 1.5, "norm_shares": 1,
}  # fmt: skip
QWEN = {
    "mixers": ["full_attention"] * 3, "feeds": ["experts_with_shared", "mlp", "experts"],
    "qk_norm": 1, "norm_shares": 0,
}  # fmt: skip
KINDS = {"gpt-oss": GPT_OSS, "qwen": QWEN, "qwen, shares of all": QWEN | {"norm_shares": 1}}
FREQUENCIES = (1e3 ** -(np.arange(ROTARY // 2) / (ROTARY // 2))).astype(np.float32)


@functools.cache
def weights(kind: str) -> dict[tuple[str, int], np.ndarray]:
    """What every slot of every layer has: one matrix, or all experts'."""
    layers = len(KINDS[kind]["mixers"])
    slots = _core.Model(config(kind), FREQUENCIES, weights="f32", threads=1).slots
    rng, found = np.random.default_rng(3), {}
    for slot, layer, _, rows, cols in slots:
        value = rng.normal(0, 1.3 / cols**0.5, (rows, cols))
        if slot.endswith("norm"):
            value = rng.uniform(0.5, 1.5, (rows, cols))
        elif rows == 1 and slot != "shared_gate":
            value = rng.normal(0, 0.5, (rows, cols))
        found.setdefault((slot, layer), []).append(value.astype(np.float32))
    assert layers
    return {key: np.stack(values) for key, values in found.items()}


def config(kind: str) -> dict[str, Any]:
    return SIZES | KINDS[kind] | {"layers": len(KINDS[kind]["mixers"])}


def core(kind: str, threads: int = 1) -> _core.Model:
    return _core_on(kind, DEVICE.get(), threads)


@functools.cache
def _core_on(kind: str, device: str, threads: int) -> _core.Model:
    model = _core.Model(config(kind), FREQUENCIES, weights="f32", device=device, threads=threads)
    for slot, layer, index, rows, _ in model.slots:
        value = weights(kind)[slot, layer][index]
        matrix = rows > 1 or slot == "shared_gate"
        model.load(slot, layer, value if matrix else value[0], index)
    model.seal()
    return model


class Oracle:
    """The model with an adapter's factors as leaves of autograd."""

    def __init__(self, kind: str, adapter: _core.Adapter) -> None:
        self.c = config(kind)
        self.w = {key: torch.from_numpy(v).double() for key, v in weights(kind).items()}
        flat = adapter.read("weights")
        self.scale = adapter.alpha / adapter.rank
        self.factors: dict[tuple[str, int, int, str], torch.Tensor] = {}
        self.places: dict[tuple[str, int, int, str], slice] = {}
        for slot, layer, index, part, offset, rows, cols in adapter.layout:
            place = slice(offset, offset + rows * cols)
            leaf = torch.from_numpy(flat[place].reshape(rows, cols)).double().requires_grad_()
            self.factors[slot, layer, index, part] = leaf
            self.places[slot, layer, index, part] = place

    def product(self, x: torch.Tensor, slot: str, layer: int, index: int = 0) -> torch.Tensor:
        """x·wᵀ and LoRA's part, where a factor may be common to all experts."""
        y = x @ self.w[slot, layer][index].T
        a, b = (
            self.factors.get((slot, layer, index, part), self.factors.get((slot, layer, -1, part)))
            for part in "AB"
        )
        return y if a is None else y + self.scale * (x @ a @ b)

    def bias(self, slot: str, layer: int, width: int, index: int = 0) -> torch.Tensor:
        """That stretch of a vector, or zeros where the model has none."""
        if (slot, layer) not in self.w:
            return torch.zeros(width, dtype=torch.float64)
        return self.w[slot, layer].ravel()[index * width : (index + 1) * width]

    def norm(self, x: torch.Tensor, slot: str, layer: int) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.c["norm_eps"])
        return x * scale * self.w[slot, layer].ravel()

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[0])[:, None] * torch.from_numpy(FREQUENCIES).double()
        c, s = (f(angle)[:, None] * self.c["rope_scale"] for f in (torch.cos, torch.sin))
        u, v = x.chunk(2, -1)
        return torch.cat([u * c - v * s, v * c + u * s], -1)

    def attend(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        rows, sizes = x.shape[0], {"wq": HEADS, "wk": KV_HEADS, "wv": KV_HEADS}
        q, k, v = (
            (self.product(x, slot, layer) + self.bias("b" + slot[1], layer, heads * HEAD)).reshape(
                rows, heads, HEAD
            )
            for slot, heads in sizes.items()
        )
        if self.c.get("qk_norm"):
            q, k = self.norm(q, "q_norm", layer), self.norm(k, "k_norm", layer)
        q, k = self.rope(q), self.rope(k)
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
        logits = torch.einsum("ihe,jhe->hij", q, k) / HEAD**0.5
        gap = torch.arange(rows)[:, None] - torch.arange(rows)
        sliding = self.c["mixers"][layer] == "sliding_attention"
        hidden = (gap < 0) | (gap >= self.c["window"]) if sliding else gap < 0
        logits = logits.masked_fill(hidden, -torch.inf)
        if self.c.get("sinks"):
            sinks = self.w["sinks", layer].ravel()[:, None, None].expand(-1, rows, 1)
            logits = torch.cat([logits, sinks], -1)
        share = torch.softmax(logits, -1)[..., :rows]
        y = torch.einsum("hij,jhe->ihe", share, v).reshape(rows, HEADS * HEAD)
        return self.product(y, "wo", layer) + self.bias("bo", layer, WIDTH)

    def unit(self, gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
        if not limit:
            return torch.nn.functional.silu(gate) * up
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)

    def experts(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        count, ffn = self.c["experts"], self.c["expert_ffn"]
        logits = self.product(x, "router", layer) + self.bias("router_bias", layer, count)
        share = torch.softmax(logits, -1)
        kept, chosen = torch.topk(share, self.c["chosen"])
        kept = kept / kept.sum(-1, keepdim=True) if self.c["norm_shares"] else kept
        total = torch.zeros_like(x)
        for e in range(count):
            gate, up = (
                self.product(x, slot, layer, e) + self.bias(f"{slot}_bias", layer, ffn, e)
                for slot in ("e_gate", "e_up")
            )
            y = self.product(
                self.unit(gate, up, self.c.get("expert_limit", 0.0)), "e_down", layer, e
            )
            y = y + self.bias("e_down_bias", layer, WIDTH, e)
            total = total + y * torch.where(chosen == e, kept, 0.0).sum(-1, keepdim=True)
        return total

    def feed(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        kind = self.c["feeds"][layer]
        total = self.experts(x, layer) if kind != "mlp" else torch.zeros_like(x)
        if kind == "experts":
            return total
        y = self.unit(self.product(x, "w_gate", layer), self.product(x, "w_up", layer), 0.0)
        y = self.product(y, "w_down", layer)
        shared = kind == "experts_with_shared"
        return total + (y * torch.sigmoid(self.product(x, "shared_gate", layer)) if shared else y)

    def logprobs(self, tokens: np.ndarray) -> torch.Tensor:
        """(N, vocabulary) of a sequence."""
        x = self.w["embed", -1][0][torch.from_numpy(tokens).long()]
        for layer in range(self.c["layers"]):
            x = x + self.attend(self.norm(x, "attn_norm", layer), layer)
            x = x + self.feed(self.norm(x, "mlp_norm", layer), layer)
        return torch.log_softmax(self.product(self.norm(x, "final_norm", -1), "head", -1), -1)

    def gradient(self, loss: torch.Tensor, size: int) -> np.ndarray:
        """d loss / d the flat vector."""
        found = np.zeros(size)
        leaves = torch.autograd.grad(loss, list(self.factors.values()), allow_unused=True)
        for place, leaf in zip(self.places.values(), leaves, strict=True):
            found[place] = 0.0 if leaf is None else leaf.numpy().ravel()
        return found
