"""Mixtures of experts in GGUF files: their keys, and their tensors in Hugging Face's form.

There, gate and up of all experts are two tensors (experts, ffn, width); at Hugging Face they are
one. A Joined is that one: its matrices are built on access from one expert's two parts, from their
numbers or from their blocks.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tinsmith.formats import safetensors_io

EXPERTS = "mlp.experts."
# llama.cpp's name of a layer's tensor: Hugging Face's name, and the part's number in it.
PARTS = {
    "ffn_gate_exps": ("gate_up_proj", 0),
    "ffn_up_exps": ("gate_up_proj", 1),
    "ffn_down_exps": ("down_proj", 0),
}
COUNTS = {"gate_up_proj": 2, "down_proj": 1}
_PART = re.compile(rf"(.*\.{re.escape(EXPERTS)}(?:{'|'.join(COUNTS)})(?:_bias)?)#([01])")


@dataclass(frozen=True)
class Mixture:
    """A row: `names` of a layer's other tensors, llama.cpp's and Hugging Face's; `keys` of
    config.json that are in the metadata, and in `said` the values of those that are not; the layout
    of a joined tensor (architecture.py's in_turns and turned); and `yarn`, the YaRN settings that
    are not in the metadata, None if YaRN is not supported."""

    names: Mapping[str, str]
    keys: Mapping[str, str]
    said: Mapping[str, Any] = field(default_factory=dict)
    in_turns: bool = False
    turned: bool = False
    yarn: Mapping[str, Any] | None = None


# By llama.cpp's architecture name.
MIXTURES = {
    "qwen3moe": Mixture(
        names={"ffn_gate_inp.weight": "mlp.gate.weight"},
        keys={
            "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        said={"norm_topk_prob": True},  # llama.cpp always does this
    ),
    "gpt-oss": Mixture(
        names={
            "ffn_gate_inp.weight": "mlp.router.weight",
            "ffn_gate_inp.bias": "mlp.router.bias",
            "attn_sinks.weight": "self_attn.sinks",
            "post_attention_norm.weight": "post_attention_layernorm.weight",
        },
        keys={
            "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
            "sliding_window": "attention.sliding_window",
        },
        in_turns=True,
        turned=True,
        yarn={"rope_type": "yarn", "truncate": False},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Joined:
    """One tensor of Hugging Face's and the file's parts of it: `entry` describes it, with the types
    of all parts."""

    entry: safetensors_io.Entry
    parts: tuple[safetensors_io.Entry, ...]
    mixture: Mixture

    def matrices(self, matrix: int) -> list[safetensors_io.Entry]:
        """The entries of one matrix's parts."""
        return [_matrix(part, matrix) for part in self.parts]

    def outputs(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """One matrix, with outputs as rows, from its parts: numbers or blocks."""
        if len(arrays) == 1:
            return arrays[0]
        if self.mixture.in_turns:
            return np.stack(arrays, axis=1).reshape(-1, arrays[0].shape[-1])
        return np.concatenate(arrays)

    def vectors(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """All experts' vectors, (experts, …), from their parts."""
        if self.mixture.in_turns:
            return np.stack(arrays, axis=-1).reshape(len(arrays[0]), -1)
        return np.concatenate(arrays, axis=-1)


def _matrix(entry: safetensors_io.Entry, index: int) -> safetensors_io.Entry:
    size = entry.size // entry.shape[0]
    begin = entry.begin + index * size
    return replace(entry, shape=entry.shape[1:], begin=begin, end=begin + size)


def join(mixture: Mixture, entries: dict[str, safetensors_io.Entry]) -> dict[str, Joined]:
    """Replaces parts in `entries`, which have names from `name_of`, by joined tensors."""
    found: dict[str, dict[int, safetensors_io.Entry]] = {}
    for match in [match for match in map(_PART.fullmatch, tuple(entries)) if match]:
        found.setdefault(match[1], {})[int(match[2])] = entries.pop(match[0])
    joined = {}
    for name, parts in found.items():
        target = name.rpartition(EXPERTS)[2].removesuffix("_bias")
        every = tuple(parts[number] for number in sorted(parts))
        shapes = {part.shape for part in every}
        axes = 2 if name.endswith("_bias") else 3
        if len(every) != COUNTS[target] or len(shapes) != 1 or len(every[0].shape) != axes:
            raise ValueError(
                f"{every[0].file}: {name} should be made of {COUNTS[target]} tensors of one shape "
                f"with {axes} axes; there are {', '.join(str(part.shape) for part in every)}"
            )
        count, rows, *cols = every[0].shape
        matrix = [rows * len(every), *cols]
        shape = (count, *(matrix[::-1] if mixture.turned else matrix))
        kinds = "+".join(dict.fromkeys(part.dtype for part in every))
        entry = safetensors_io.Entry(every[0].file, kinds, shape, every[0].begin, every[0].end)
        joined[name] = Joined(entry, every, mixture)
        entries[name] = entry
    return joined


def name_of(mixture: Mixture, block: str, inner: str, end: str) -> str | None:
    """The name of a layer's tensor `inner`.`end`, if only mixtures have it; a part's name ends with
    # and its number."""
    layer = f"model.layers.{block}."
    if inner in PARTS:
        target, number = PARTS[inner]
        return f"{layer}{EXPERTS}{target}{'_bias' if end == 'bias' else ''}#{number}"
    ours = mixture.names.get(f"{inner}.{end}")
    return None if ours is None else layer + ours
