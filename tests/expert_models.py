"""Mixtures of experts for the models of models.py: how their files may have them, what transformers
computes, in float64 throughout, and LoRA on experts as the hosted service lays it out."""

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


def route(
    module: torch.nn.Module, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shares = torch.softmax(torch.nn.functional.linear(x, module.weight), -1)
    chosen, index = torch.topk(shares, module.top_k)
    if getattr(module, "norm_topk_prob", True):
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return shares, chosen, index


def every_expert(
    module: torch.nn.Module, x: torch.Tensor, index: torch.Tensor, share: torch.Tensor
) -> torch.Tensor:
    """Every expert on every row, of which the chosen ones count."""
    total = torch.zeros_like(x)
    for number, (first, last) in enumerate(zip(module.gate_up_proj, module.down_proj, strict=True)):
        gate, up = (x @ first.T).chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ last.T
        total = total + y * torch.where(index == number, share, 0.0).sum(-1, keepdim=True)
    return total.to(x.dtype)  # shares are f32 where a router computes so


class LoraExperts(torch.nn.Module):
    """Experts with LoRA as the hosted service lays it out: w1 and w3 have one A for all and a B an
    expert, w2 an A an expert and one B. Each of them is a parameter of its own."""

    def __init__(
        self, experts: torch.nn.Module, rank: int, scale: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.scale, (count, width, ffn) = scale, experts.down_proj.shape
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
        for number in range(len(self.down_proj)):
            gate, up = (x @ self.gate_up_proj[number].T).chunk(2, -1)
            gate = gate + self.change("w1", number, x)
            up = up + self.change("w3", number, x)
            y = torch.nn.functional.silu(gate) * up
            y = y @ self.down_proj[number].T + self.change("w2", number, y)
            taken = torch.where(index == number, share, 0.0).sum(-1, keepdim=True)
            total = total + y * taken.to(y.dtype)
        return total


def united(model: torch.nn.Module) -> torch.nn.Module:
    """The model with LoRA on experts added to their weights."""
    for module in model.modules():
        if isinstance(module, LoraExperts):
            half = module.gate_up_proj.shape[1] // 2
            with torch.no_grad():
                for index, (first, last) in enumerate(
                    zip(module.gate_up_proj, module.down_proj, strict=True)
                ):
                    first[:half] += module.delta("w1", index)
                    first[half:] += module.delta("w3", index)
                    last += module.delta("w2", index)
            del module.w1, module.w2, module.w3
    return model
