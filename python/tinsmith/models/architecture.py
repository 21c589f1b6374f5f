"""A row of families.py: an architecture's differences from plain Llama. They give the name of every
tensor and of every module that an adapter may train."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tinsmith.formats import config as hugging_face
from tinsmith.formats import safetensors_io
from tinsmith.formats.config import Mixers

# Each slot's tensor, in Llama's naming. If a layer has several matrices in one slot, {index} is the
# matrix's number.
LLAMA_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{layer}.input_layernorm.weight",
    "wq": "model.layers.{layer}.self_attn.q_proj.weight",
    "wk": "model.layers.{layer}.self_attn.k_proj.weight",
    "wv": "model.layers.{layer}.self_attn.v_proj.weight",
    "bq": "model.layers.{layer}.self_attn.q_proj.bias",
    "bk": "model.layers.{layer}.self_attn.k_proj.bias",
    "bv": "model.layers.{layer}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{layer}.self_attn.k_norm.weight",
    "wo": "model.layers.{layer}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "w_gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "w_up": "model.layers.{layer}.mlp.up_proj.weight",
    "w_down": "model.layers.{layer}.mlp.down_proj.weight",
}

PREFIX = "model."  # of all tensors except the head
NESTED = "model.language_model."  # in a model with several parts
# Other prefixes of module names in adapters' files.
SPELLINGS = {"lm_head": (NESTED + "unembed_tokens", "model.unembed_tokens"), PREFIX: (NESTED,)}


@dataclass(frozen=True)
class Tower:
    """A family's vision tower. `names` are its tensors by slot, behind one of `prefixes` and, in a
    merger, behind the merger's own name; {index} is a block's number. `defaults` are the values of
    keys that its part of config.json, `section`, lacks; `mergers` are the names of the main merger
    and of another, whose number is {index}."""

    names: Mapping[str, str] = field(repr=False)
    prefixes: tuple[str, ...]
    defaults: Mapping[str, Any] = field(repr=False)
    section: str = "vision_config"
    mergers: tuple[str, str] = ("merger.", "deepstack_merger_list.{index}.")

    def tensor(self, slot: str, index: int) -> str:
        """The name behind the prefix of a slot's tensor: of a block, or of a merger, of which the
        main one is 0."""
        stem = ""
        if slot.startswith("merge_"):
            stem = self.mergers[min(index, 1)].format(index=index - 1)
        return stem + self.names[slot].format(index=index)


@dataclass(frozen=True)
class Family:
    """One row: an architecture, and its differences from plain Llama.

    Of config.json: `section` is the key of the text model's part, "" for all of it; `switches` are
    the engine's switches that are on, or that a key sets; `numbers` are keys of the engine's
    numbers that are not integers, `sizes` keys that are added to SIZES or replace them; `defaults`
    are the values of missing keys; `fixed` are the only supported values of some keys; `refused`
    are keys that this architecture reads and the engine doesn't support; `packed` are the
    quantisations that its files may have; `partial` is the rotated share of a head if the file has
    none, None if only the whole head is supported.

    Of tensors: `prefixes` are prefixes that may replace PREFIX, and `prefix` is this folder's
    (`of`); `others` are stacked tensors (all experts in one) that replace `names`, and `other` says
    whether this folder has them; slots of one name are concatenated there, or with `in_turns`
    interleaved by rows; its matrices are `turned` if they are transposed (inputs as rows), or
    `either_way`, by folder; `tails` are the axes of a vector after its first; `heads` are vectors
    with a first axis of one of the engine's sizes; `plus_one` are norms that multiply by 1 + w;
    `constants` are slots without a tensor, each filled with one number, a function of its length;
    `aside` are prefixes of tensors that text does not need.

    `tower` is what turns images into rows, and `sections` are how many pairs of a head's elements
    each axis of a position rotates (time, height, width) if the file does not say.

    `modules` are the names of modules in an adapter's file, if they differ from the tensors'.
    `gguf` is the order of rows of q and k in a GGUF file, "" if such files are not supported.
    """

    name: str
    architecture: str
    mixers: Callable[[Path, dict[str, Any], int], Mixers] = hugging_face.all_full
    feeds: Callable[[Path, dict[str, Any], int], tuple[str, ...]] = hugging_face.all_dense
    switches: Mapping[str, Literal[True] | str] = field(default_factory=dict, repr=False)
    section: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict, repr=False)
    fixed: Mapping[str, Any] = field(default_factory=dict, repr=False)
    refused: tuple[str, ...] = ()
    sizes: Mapping[str, str] = field(default_factory=dict, repr=False)
    numbers: Mapping[str, str] = field(default_factory=dict, repr=False)
    packed: tuple[str, ...] = ("fp8", "bitsandbytes")
    partial: float | None = None
    prefixes: tuple[str, ...] = (PREFIX,)
    prefix: str = PREFIX
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES, repr=False)
    others: Mapping[str, str] = field(default_factory=dict, repr=False)
    other: bool = False
    in_turns: bool = False
    turned: bool = False
    either_way: bool = False
    tails: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    heads: Mapping[str, str] = field(default_factory=dict, repr=False)
    plus_one: tuple[str, ...] = ()
    constants: Mapping[str, Callable[[int], float]] = field(default_factory=dict, repr=False)
    aside: tuple[str, ...] = ()
    tower: Tower | None = field(default=None, repr=False)
    sections: tuple[int, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict, repr=False)
    gguf: str = ""

    def of(self, tensors: safetensors_io.Tensors) -> "Family":
        """The row for a folder with these tensors."""
        names = [name for name in tensors if not self.is_aside(name)]
        found = (one for one in self.prefixes if any(name.startswith(one) for name in names))
        ends = tuple(name.rpartition("}")[2] for name in self.others.values())
        other = any(name.endswith(ends) for name in names)
        turned = self.turned or (self.either_way and self._is_turned(tensors))
        return replace(self, prefix=next(found, PREFIX), other=self.other or other, turned=turned)

    def _is_turned(self, tensors: safetensors_io.Tensors) -> bool:
        """Whether a folder's stacked matrices have inputs as rows. Gate and up together have twice
        the outputs of down's inputs: no two shapes fit both ways, whatever the sizes."""
        first, last = (self.others[slot].rpartition("}")[2] for slot in ("e_gate", "e_down"))
        for name in tensors:
            both = name, name.removesuffix(first) + last
            if name.endswith(first) and both[1] in tensors:
                gate, down = (tensors.entry(one).shape for one in both)
                return len(gate) == len(down) == 3 and gate[2] == 2 * down[1]
        return False

    def tensor(self, slot: str, layer: int, index: int = 0) -> str:
        """The checkpoint's name of the tensor that contains a slot."""
        names = self.others if self.stacked(slot) else self.names
        return self.spelled(names[slot].format(layer=layer, index=index))

    def spelled(self, name: str) -> str:
        """A tensor's name in this folder."""
        return self.prefix + name.removeprefix(PREFIX) if name.startswith(PREFIX) else name

    def stacked(self, slot: str) -> bool:
        """Whether one tensor of this folder has all matrices of a layer's slot."""
        return self.other and slot in self.others

    def module(self, slot: str, layer: int, index: int = 0) -> str:
        """The name of a slot's module in an adapter's file."""
        name = self.modules.get(slot, self.names[slot].removesuffix(".weight"))
        return name.format(layer=layer, index=index)

    def matrix(self, slot: str, layer: int, index: int = 0) -> str:
        """The name of one matrix's module in PEFT's files."""
        return self.names[slot].removesuffix(".weight").format(layer=layer, index=index)

    def is_vector(self, name: str) -> bool:
        """Whether a tensor is a vector although it has several axes."""
        slots = (*self.tails, *self.heads)
        return name.endswith(tuple(self.names[slot].rpartition("}")[2] for slot in slots))

    def is_aside(self, name: str) -> bool:
        """Whether text does not need a tensor."""
        return name.startswith(self.aside)


def plain(module: str) -> str:
    """A module's canonical name, for each name that PEFT, the hosted service and we use."""
    for ours, others in SPELLINGS.items():
        for other in others:
            if module.startswith(other):
                return ours + module.removeprefix(other)
    return module
