"""What the tests of training share: adapters, batches for every loss, and one forward_backward held
to autograd of transformers and PEFT (`check`)."""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import opsd
import pytest
import torch
from models import (
    SPECS,
    Datum,
    assert_near,
    assert_rows_near,
    call,
    cut,
    datum,
    in_bf16,
    loaded,
    logprobs,
    randomize,
    targets_of,
    tokens_of,
    with_peft,
)
from tinsmith import _core

ADAM = {
    "learning_rate": 0.002, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}  # fmt: skip
GROUPS = ("attn", "mlp", "unembed")
ENDS = ("low", "high")
KEYS = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dapo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}
POLICY = (
    "importance_sampling", "ppo", "dapo", "dppo", "cispo", "dro", "gspo", "stable_reinforce"
)  # fmt: skip


def adapter_of(name: str, *, seed: int = 0, **options: Any) -> _core.Adapter:
    return randomize(_core.Adapter(loaded(name).core, **{"rank": 5, "alpha": 8.0, **options}), seed)


def batch(name: str, lengths: Sequence[int] = (23, 1, 40, 7), seed: int = 0) -> list[Datum]:
    """Sequences with weights of any sign, a third of them zero."""
    rng = np.random.default_rng(seed)
    data = [datum(tokens_of(name, length, seed)) for length in lengths]
    return [weighted(one, rng) for one in data]


def weighted(one: Datum, rng: np.random.Generator) -> Datum:
    weights = rng.normal(size=one.targets.shape) * (rng.random(one.targets.shape) > 1 / 3)
    return replace(one, inputs={"weights": weights.astype(np.float32)})


def advantaged(name: str, lengths: Sequence[int] = (23, 1, 40), seed: int = 0) -> list[Datum]:
    """Sequences for the policy losses: ratios from about 0.3 to 3, some advantages zero."""
    rng = np.random.default_rng(seed)
    data = [datum(tokens_of(name, length, seed)) for length in lengths]
    adapter = adapter_of(name, rank=5)
    now, _ = call(adapter, data, backward=False)
    return [
        replace(
            one,
            inputs={
                "logprobs": (logp + rng.normal(0, 0.6, logp.shape)).astype(np.float32),
                "advantages": (rng.normal(size=logp.shape) * (rng.random(logp.shape) > 0.3)).astype(
                    np.float32
                ),
            },
        )
        for one, logp in zip(data, now, strict=True)
    ]


def soft(name: str, length: int, targets: int, seed: int = 0) -> Datum:
    """A datum with K targets a token, some of them the same id twice, some rows all zero."""
    rng = np.random.default_rng([seed, length, targets])
    vocab = SPECS[name].config["vocab_size"]
    ids = rng.integers(0, vocab, (length, targets))
    if targets > 1:
        ids[::2, 1] = ids[::2, 0]
    one = weighted(datum(tokens_of(name, length, seed), ids), rng)
    one.inputs["weights"][::3] = 0
    return one


# ---- the reference ----


def loss_of(
    logp: torch.Tensor, one: Datum, loss: str, config: dict[str, float] | None = None
) -> torch.Tensor:
    """A datum's loss as Tinker's documents write it, of its targets' log-probabilities."""
    inputs = {
        name: torch.from_numpy(array.astype(np.float64)) for name, array in one.inputs.items()
    }
    if loss == "cross_entropy":
        return -(inputs.get("weights", torch.ones_like(logp)) * logp).sum()
    if loss == "generalized_jsd":
        return jsd_of_targets(logp, inputs["teacher_logprobs"], inputs["weights"], config or {})
    q, advantage = inputs["logprobs"], inputs["advantages"]
    if loss == "dro":
        assert config is not None
        return -(logp * advantage - 0.5 * config["beta"] * (logp - q) ** 2).sum()
    ratio = torch.exp(logp - q)
    if loss == "stable_reinforce":
        weight = torch.where(advantage < 0, ratio.clamp(max=1.0), 1.0).detach()
        kl = (config or {}).get("kl_coeff", 0.1) * 0.5 * (logp - q) ** 2
        return (kl - weight * advantage * logp)[advantage != 0].sum()
    if loss == "importance_sampling":
        return -(ratio * advantage).sum()
    if loss == "dppo":
        far = (logp.exp() - q.exp()) * advantage.sign() > (config or {}).get("delta", 0.15)
        return -(ratio * advantage * ~far.detach()).sum()
    if loss == "gspo":
        used = inputs.get("sequence_ratio_mask", advantage) != 0
        if not used.any():
            return 0.0 * logp.sum()
        ratio = torch.exp((logp - q)[used].mean().detach() + logp - logp.detach())
    keys = KEYS[loss] | (config or {})
    low, high = (inputs.get(f"clip_{end}_threshold", keys[f"clip_{end}_threshold"]) for end in ENDS)
    clipped = torch.clamp(ratio, torch.as_tensor(low), torch.as_tensor(high))
    if loss == "cispo":
        return -(clipped.detach() * logp * advantage).sum()
    return -torch.minimum(ratio * advantage, clipped * advantage).sum()


def jsd_of_targets(
    logp: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor, config: dict[str, float]
) -> torch.Tensor:
    """OPSD's loss of rows (N, K), each over the ids of which the teacher has something to say."""
    total = torch.zeros((), dtype=logp.dtype)
    for own, taught, weight in zip(logp, teacher, weights, strict=True):
        there = taught > -99999
        terms = opsd.generalized_jsd_loss(own[there], taught[there], reduction="none", **config)
        total = total + (weight[there] * terms).sum()
    return total


def autograd(
    name: str,
    adapter: _core.Adapter,
    data: list[Datum],
    found: list[np.ndarray],
    loss: str,
    config: dict[str, float] | None,
    dtype: torch.dtype,
) -> tuple[np.ndarray, list[float], dict[str, np.ndarray]]:
    """torch's log-probabilities of all targets, each datum's loss, and each matrix's gradient.

    The loss is taken at the log-probabilities that the engine `found`: how far they are off is
    looked at by itself, and a ratio beside its clip lies on the same side for both.
    """
    model = with_peft(name, adapter, dtype)
    logp = [targets_of(logprobs(model, one.tokens), one) for one in data]
    losses = []
    for one, own, engines in zip(data, logp, found, strict=True):
        at = torch.from_numpy(engines.astype(np.float64)) + own - own.detach()
        losses.append(loss_of(at, one, loss, config))
    sum(losses).backward()
    parameters = dict(model.named_parameters())
    gradients = {
        key: parameters[key].grad.double().numpy().T
        for key in cut(adapter, adapter.read("weights"))
    }
    flat = np.concatenate([own.detach().numpy().ravel() for own in logp])
    return flat, [float(item.detach()) for item in losses], gradients


def check(
    name: str,
    adapter: _core.Adapter,
    data: list[Datum],
    loss: str = "cross_entropy",
    config: dict[str, float] | None = None,
) -> None:
    """One forward_backward: log-probabilities, loss and the gradient of each matrix."""
    found, total = call(adapter, data, loss, config)
    torchs = functools.cache(functools.partial(autograd, name, adapter, data, found, loss, config))
    for logp, one in zip(found, data, strict=True):
        assert logp.shape == one.targets.shape
    together = np.concatenate([logp.ravel() for logp in found])
    assert_rows_near(name, together, lambda dtype: torchs(dtype)[0])
    values = torchs(torch.float64)[1]
    assert total == pytest.approx(sum(values), abs=1e-5 * sum(map(abs, values)))
    gradients = cut(adapter, adapter.read("gradients"))
    for key in gradients:
        assert np.linalg.norm(torchs(torch.float64)[2][key]) > 0, key
    for what, keys in compared(list(gradients)).items():
        assert_near(
            np.stack([gradients[key] for key in keys]),
            lambda dtype, keys=keys: np.stack([torchs(dtype)[2][key] for key in keys]),
            what,
            f32_error=1e-4,
        )


def compared(keys: list[str]) -> dict[str, list[str]]:
    """The matrices that are held to the bar together: each alone; in bf16 those of a layer's
    experts, for a row with two logits of nearly one size may go to another expert there."""
    found: dict[str, list[str]] = {}
    for key in keys:
        what = re.sub(r"(experts\.\w+)\.\d+\.", r"\1.", key) if in_bf16() else key
        found.setdefault(what, []).append(key)
    return found


def torch_losses(
    name: str,
    adapter: _core.Adapter,
    data: list[Datum],
    steps: int,
    options: dict[str, float],
    dtype: torch.dtype,
) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses, gradient norms and final matrices of torch's AdamW on PEFT's layers."""
    model = with_peft(name, adapter, dtype)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=options["learning_rate"],
        betas=(options["beta1"], options["beta2"]),
        eps=options["eps"],
        weight_decay=options["weight_decay"],
    )
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        logp = [targets_of(logprobs(model, one.tokens), one) for one in data]
        loss = sum(loss_of(own, one, "cross_entropy") for own, one in zip(logp, data, strict=True))
        loss.backward()
        limit = options["grad_clip_norm"] or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, limit)))
        optimizer.step()
        losses.append(loss.item())
    final = {
        key: one.detach().numpy().T for key, one in model.named_parameters() if one.requires_grad
    }
    return losses, norms, final
