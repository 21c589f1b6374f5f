"""What the tests of training share: adapters, batches for every loss, and one forward_backward held
to autograd of transformers and PEFT (`check`)."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tinsmith import _core

from support import opsd_reference
from support.tiny_models import (
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

ADAM = {
    "learning_rate": 0.002, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}  # fmt: skip
GROUPS = ("attn", "mlp", "unembed")
THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
# The configuration of each loss with its defaults; None: it must come.
KEYS: dict[str, dict[str, Any]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dapo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
    "dppo": {"delta": 0.15},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": None},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "stable_reinforce": {"kl_coeff": 0.1},
    "generalized_jsd": {"beta": 0.5, "temperature": 1.0, "top_k": 0.0, "token_clip": np.inf},
}
CONFIG = {"dro": {"beta": 0.3}}  # what a loss must be told, in the tests
ROWS = {row["name"]: row for row in _core.losses()}
POLICY = tuple(name for name, row in ROWS.items() if row["gate"] == "advantages" or name == "dro")


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


# A loss in float64, of one datum's log-probabilities, what its gradient holds constant of them, its
# inputs, and its configuration.
Formula = Callable[
    [torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, Any]], torch.Tensor
]


def loss_of(
    logp: torch.Tensor,
    one: Datum,
    loss: str,
    config: Mapping[str, float] | None = None,
    held: torch.Tensor | None = None,
) -> torch.Tensor:
    """A datum's loss as Tinker's documents write it, of its targets' log-probabilities. `held` are
    those that its gradient holds constant: the same, unless they are given."""
    assert loss in REFERENCE and loss in KEYS, (
        f"the loss {loss} has no reference: write its formula into REFERENCE in training_cases.py, "
        "in float64, with `held` for the log-probabilities that its gradient holds constant, and "
        "its configuration's defaults into KEYS"
    )
    inputs = {
        name: torch.from_numpy(array.astype(np.float64)) for name, array in one.inputs.items()
    }
    held = logp.detach() if held is None else held
    return REFERENCE[loss](logp, held, inputs, KEYS[loss] | dict(config or {}))


def cross_entropy(lp: Any, held: Any, x: Any, key: Any) -> torch.Tensor:
    return -(x.get("weights", torch.ones_like(lp)) * lp).sum()


def importance_sampling(lp: Any, held: Any, x: Any, key: Any) -> torch.Tensor:
    return -(torch.exp(lp - x["logprobs"]) * x["advantages"]).sum()


def clipped(ratio: torch.Tensor, x: Any, key: Any) -> torch.Tensor:
    low, high = (x.get(name, key[name]) for name in THRESHOLDS)
    return torch.clamp(ratio, torch.as_tensor(low), torch.as_tensor(high))


def clipped_loss(ratio: torch.Tensor, x: Any, key: Any) -> torch.Tensor:
    free, bounded = ratio * x["advantages"], clipped(ratio, x, key) * x["advantages"]
    return -torch.minimum(free, bounded).sum()


def ppo(lp: Any, held: Any, x: Any, key: Any) -> torch.Tensor:
    return clipped_loss(torch.exp(lp - x["logprobs"]), x, key)


def gspo(lp: Any, held: Any, x: Any, key: Any) -> torch.Tensor:
    used = x.get("sequence_ratio_mask", x["advantages"]) != 0
    if not used.any():
        return 0.0 * lp.sum()
    return clipped_loss(torch.exp((held - x["logprobs"])[used].mean() + lp - held), x, key)


def dppo(lp: Any, held: Any, x: Any, key: Any) -> torch.Tensor:
    moved = (held.exp() - x["logprobs"].exp()) * x["advantages"].sign()
    return -(torch.exp(lp - x["logprobs"]) * x["advantages"])[moved <= key["delta"]].sum()


def cispo(lp: Any, held: Any, x: Any, key: Any) -> torch.Tensor:
    return -(clipped(torch.exp(held - x["logprobs"]), x, key) * lp * x["advantages"]).sum()


def dro(lp: Any, held: Any, x: Any, key: Any) -> torch.Tensor:
    gap = lp - x["logprobs"]
    return -(lp * x["advantages"] - 0.5 * key["beta"] * gap**2).sum()


def stable_reinforce(lp: Any, held: Any, x: Any, key: Any) -> torch.Tensor:
    q, advantage = x["logprobs"], x["advantages"]
    weight = torch.where(advantage < 0, torch.exp(held - q).clamp(max=1.0), 1.0)
    pull = key["kl_coeff"] * 0.5 * (lp - q) ** 2
    return (pull - weight * advantage * lp)[advantage != 0].sum()


def generalized_jsd(lp: Any, held: Any, x: Any, key: Any) -> torch.Tensor:
    """OPSD's loss of rows (N, K), each over the ids of which the teacher has something to say."""
    total = torch.zeros((), dtype=lp.dtype)
    given = {name: key[name] for name in ("beta", "temperature")}
    given |= {"token_clip": key["token_clip"]} if np.isfinite(key["token_clip"]) else {}
    for own, taught, weight in zip(lp, x["teacher_logprobs"], x["weights"], strict=True):
        there = taught > -99999
        terms = opsd_reference.generalized_jsd_loss(
            own[there], taught[there], reduction="none", **given
        )
        total = total + (weight[there] * terms).sum()
    return total


REFERENCE: dict[str, Formula] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "dapo": ppo,
    "dppo": dppo,
    "cispo": cispo,
    "dro": dro,
    "stable_reinforce": stable_reinforce,
    "gspo": gspo,
    "generalized_jsd": generalized_jsd,
}

# What the example of a loss has for an input, where its targets' log-probabilities are these.
INPUTS: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "weights": lambda lp, rng: rng.normal(size=lp.shape) * (rng.random(lp.shape) > 1 / 3),
    "logprobs": lambda lp, rng: lp + rng.normal(0, 0.6, lp.shape),
    "advantages": lambda lp, rng: rng.normal(size=lp.shape) * (rng.random(lp.shape) > 0.3),
    "teacher_logprobs": lambda lp, rng: lp + rng.normal(0, 0.6, lp.shape),
}


def example(name: str, loss: str) -> tuple[list[Datum], dict[str, float]]:
    """Sequences with all that a loss of the engine's table needs, and its configuration."""
    row, rng = ROWS[loss], np.random.default_rng(0)
    data = [datum(tokens_of(name, length)) for length in (23, 1, 40)]
    if row["taught"]:  # rows of K ids, with a teacher's log-probabilities of each
        ids = [rng.permuted(np.tile(np.arange(90), (len(one.tokens), 1)), axis=1) for one in data]
        ids = [own[:, :4].astype(np.int32) for own in ids]
        data = [replace(one, targets=own) for one, own in zip(data, ids, strict=True)]
    now, _ = call(adapter_of(name), data, backward=False)
    wanted = [item["name"] for item in row["inputs"] if item["required"]]
    wanted += ["teacher_logprobs"] if row["taught"] else []
    for item in wanted:
        assert item in INPUTS, (
            f"the loss {loss} needs {item}: say in INPUTS in training_cases.py what it may be"
        )
    for key, default in row["config"].items():
        assert default is not None or key in CONFIG.get(loss, {}), (
            f"the loss {loss} needs {key}: give it a value in CONFIG in training_cases.py"
        )
    data = [
        replace(one, inputs={item: INPUTS[item](lp, rng).astype(np.float32) for item in wanted})
        for one, lp in zip(data, now, strict=True)
    ]
    return data, CONFIG.get(loss, {})


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
