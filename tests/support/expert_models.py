"""Mixtures of experts for the models of tiny_models.py: how their files may have them, what
transformers computes, in float64 throughout, and LoRA on experts as the hosted service lays it
out."""

import json
from pathlib import Path

import safetensors.torch
import torch


def fuse(folder: Path) -> None:
    """Puts the experts of a layer, which transformers writes one by one, in one tensor each: in one
    file, with the others of an index left alone."""
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    tensors = {
        name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()
    }
    found: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        layer, _, rest = name.partition(".experts.")
        number, kind, _ = rest.split(".")
        found.setdefault(layer, {}).setdefault(int(number), {})[kind] = tensors.pop(name)
    for layer, experts in found.items():
        every = [experts[number] for number in range(len(experts))]
        both = [torch.cat([one["gate_proj"], one["up_proj"]]) for one in every]
        tensors[f"{layer}.experts.gate_up_proj"] = torch.stack(both)
        tensors[f"{layer}.experts.down_proj"] = torch.stack([one["down_proj"] for one in every])
    places = {}
    for number, file in enumerate(files):
        some = {name: tensors[name] for name in sorted(tensors)[number :: len(files)]}
        safetensors.torch.save_file(some, file, {"format": "pt"})
        places |= dict.fromkeys(some, file.name)
    if index.is_file():
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))


def turn(folder: Path) -> None:
    """Writes all experts' matrices with inputs as rows."""
    for file in folder.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(file)
        for name in tensors:
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[name] = tensors[name].mT.contiguous()
        safetensors.torch.save_file(tensors, file, {"format": "pt"})


def route(
    module: torch.nn.Module, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shares = torch.softmax(torch.nn.functional.linear(x, module.weight), -1)
    chosen, index = torch.topk(shares, module.top_k)
    if getattr(module, "norm_topk_prob", True):
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return shares, chosen, index


def matrices(
    experts: torch.nn.Module, number: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of one expert's gate, up and down, outputs as rows."""
    first, last = experts.gate_up_proj[number], experts.down_proj[number]
    if experts.is_transposed:  # gpt-oss's, where rows of gate and up take turns
        return first.T[0::2], first.T[1::2], last.T
    return *first.chunk(2), last


def biases(
    experts: torch.nn.Module, number: int
) -> tuple[torch.Tensor | float, torch.Tensor | float, torch.Tensor | float]:
    """Those of one expert's gate, up and down."""
    if not experts.has_bias:
        return 0.0, 0.0, 0.0
    first = experts.gate_up_proj_bias[number]
    return first[0::2], first[1::2], experts.down_proj_bias[number]


def unit(experts: torch.nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """swiglu, or gpt-oss's with the limit of its config, which transformers 5.5 takes to be 7."""
    if not experts.has_bias:
        return torch.nn.functional.silu(gate) * up
    limit = getattr(experts.config, "swiglu_limit", 7.0)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def shares_of(index: torch.Tensor, share: torch.Tensor, number: int) -> torch.Tensor:
    """Each row's share of one expert, (rows, 1)."""
    return torch.where(index == number, share, 0.0).sum(-1, keepdim=True)


def every_expert(
    module: torch.nn.Module, x: torch.Tensor, index: torch.Tensor, share: torch.Tensor
) -> torch.Tensor:
    """Every expert on every row, of which the chosen ones count."""
    total = torch.zeros_like(x)
    for number in range(len(module.down_proj)):
        (w1, w3, w2), (b1, b3, b2) = matrices(module, number), biases(module, number)
        y = unit(module, x @ w1.T + b1, x @ w3.T + b3) @ w2.T + b2
        total = total + y * shares_of(index, share, number)
    return total.to(x.dtype)  # shares are f32 where a router computes so


class LoraExperts(torch.nn.Module):
    """Experts with LoRA as the hosted service lays it out: w1 and w3 have one A for all and a B an
    expert, w2 an A an expert and one B. Each of them is a parameter of its own."""

    def __init__(
        self, experts: torch.nn.Module, rank: int, scale: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.experts, self.scale, count = experts, scale, len(experts.down_proj)
        width, ffn = matrices(experts, 0)[2].shape
        for name, common, rows, cols in (
            ("w1", "A", ffn, width), ("w3", "A", ffn, width), ("w2", "B", width, ffn)
        ):  # fmt: skip
            for index in ("all", *map(str, range(count))):
                letter = common if index == "all" else "AB"["AB".index(common) - 1]
                shape = (rank, cols) if letter == "A" else (rows, rank)
                self.add(f"{name}.{index}.lora_{letter}.default", torch.zeros(shape, dtype=dtype))

    def add(self, name: str, weight: torch.Tensor) -> None:
        """A module of this name with one parameter, `weight`."""
        module = self
        for part in name.split("."):
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.weight = torch.nn.Parameter(weight)

    def delta(self, name: str, index: int) -> torch.Tensor:
        """scale · B·A of one expert, which its weight would be larger by."""
        a, b = self.pair(name, index)
        return self.scale * b @ a

    def change(self, name: str, index: int, x: torch.Tensor) -> torch.Tensor:
        """scale · x·Aᵀ·Bᵀ of one expert."""
        a, b = self.pair(name, index)
        return (self.scale * (x.to(a.dtype) @ a.T @ b.T)).to(x.dtype)

    def pair(self, name: str, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of one expert."""
        found = dict(self.named_parameters())
        a, b = (
            found.get(f"{name}.{index}.lora_{letter}.default.weight",
                      found.get(f"{name}.all.lora_{letter}.default.weight"))
            for letter in "AB"
        )  # fmt: skip
        return a, b

    def forward(self, x: torch.Tensor, index: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for number in range(len(self.experts.down_proj)):
            (w1, w3, w2), (b1, b3, b2) = (of(self.experts, number) for of in (matrices, biases))
            gate = x @ w1.T + b1 + self.change("w1", number, x)
            up = x @ w3.T + b3 + self.change("w3", number, x)
            y = unit(self.experts, gate, up)
            y = y @ w2.T + b2 + self.change("w2", number, y)
            total = total + y * shares_of(index, share, number).to(y.dtype)
        return total


def united(model: torch.nn.Module) -> torch.nn.Module:
    """The model with LoRA on experts added to their weights."""
    for layer in model.model.layers:
        lora = getattr(layer.mlp, "experts", None)
        if isinstance(lora, LoraExperts):
            with torch.no_grad():
                for number in range(len(lora.experts.down_proj)):
                    for name, matrix in zip(
                        ("w1", "w3", "w2"), matrices(lora.experts, number), strict=True
                    ):
                        matrix += lora.delta(name, number)
            layer.mlp.experts = lora.experts
    return model
