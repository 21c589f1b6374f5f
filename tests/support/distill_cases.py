"""Distillation in torch, for the tests: OPSD's loss, datums with a teacher, and one step with
transformers and PEFT in float64, every LoRA gradient included."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tinsmith import _core
from tinsmith.system.steps import finish

from support.tiny_models import cut, reference, tokens_of, with_peft

LOSS = "generalized_jsd"


@dataclass(frozen=True)
class Pair:
    """A datum: the student's tokens and targets (N,), weights (N,), and the teacher's tokens."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    teacher: np.ndarray


def pair(name: str, prompt: int, completion: int, hint: int, seed: int = 0) -> Pair:
    """Random prompts of so many tokens each, the teacher's longer by a hint, and a completion of
    which each position has another weight."""
    ids = tokens_of(name, prompt + completion, seed)
    weights = np.zeros(len(ids) - 1, np.float32)
    weights[prompt - 1 :] = np.random.default_rng(seed).uniform(0.2, 1.5, completion)
    teacher = np.concatenate([tokens_of(name, prompt + hint, seed + 100), ids[prompt:]])
    return Pair(ids[:-1], ids[1:], weights, teacher)


def generalized_jsd(
    student: torch.Tensor,
    teacher: torch.Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    top_k: int = 0,
    token_clip: float | None = None,
) -> torch.Tensor:
    """The loss of OPSD's trainer for each row of logits (N, V), unreduced."""
    student, teacher = student / temperature, teacher / temperature
    if top_k:
        best = teacher.topk(int(top_k), dim=-1).indices
        student, teacher = student.gather(-1, best), teacher.gather(-1, best)
    p, q = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)

    def kl(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return F.kl_div(to, of, reduction="none", log_target=True)

    if beta == 0:
        terms = kl(q, p)
    elif beta == 1:
        terms = kl(p, q)
    else:
        shares = torch.tensor([1 - beta, beta], dtype=p.dtype).log()
        mixture = torch.logsumexp(torch.stack([p + shares[0], q + shares[1]]), 0)
        terms = beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)
    return terms.clamp(max=token_clip).sum(-1) if token_clip else terms.sum(-1)


def distill(
    adapter: _core.Adapter,
    data: Sequence[Pair],
    config: Mapping[str, float] | None = None,
    teacher: _core.Adapter | _core.Model | None = None,
    between: Callable[[int, int], object] | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Adapter.distill on a list of pairs: log-probabilities and divergences, flat, and the loss."""
    result: Any = adapter.distill(
        np.concatenate([one.tokens for one in data]),
        np.array([len(one.tokens) for one in data], np.int32),
        np.concatenate([one.targets for one in data]),
        np.ones(len(data), np.int32),
        LOSS,
        {"weights": np.concatenate([one.weights for one in data])},
        dict(config or {}),
        np.concatenate([one.teacher for one in data]),
        np.array([len(one.teacher) for one in data], np.int32),
        teacher=teacher,
        stepwise=between is not None,
        **options,
    )
    return result if between is None else finish(result, between)


def logits_of(model: torch.nn.Module, tokens: np.ndarray) -> torch.Tensor:
    return model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]


def in_torch(
    name: str,
    adapter: _core.Adapter,
    data: Sequence[Pair],
    config: Mapping[str, float] | None = None,
    teacher: _core.Adapter | None = None,
) -> tuple[np.ndarray, np.ndarray, float, np.ndarray]:
    """What distill gives, and the flat gradient, by transformers and PEFT in float64."""
    model = with_peft(name, adapter)
    other = reference(name) if teacher is None else with_peft(name, teacher)
    total, logprobs, divergences = torch.zeros(()), [], []
    for one in data:
        student = logits_of(model, one.tokens)
        with torch.no_grad():
            taught = logits_of(other, one.teacher[:-1])
        rows = np.flatnonzero(one.weights)
        jsd = generalized_jsd(
            student[rows], taught[rows + len(one.teacher) - 1 - len(one.tokens)], **(config or {})
        )
        total = total + (jsd * torch.from_numpy(one.weights[rows].astype(np.float64))).sum()
        spread = np.zeros(len(one.tokens))
        spread[rows] = jsd.detach().numpy()
        divergences.append(spread)
        table = torch.log_softmax(student, -1)
        wanted = torch.from_numpy(one.targets.astype(np.int64))[:, None]
        logprobs.append(table.gather(1, wanted)[:, 0].detach().numpy())
    total.backward()
    parameters = dict(model.named_parameters())
    flat = np.zeros(adapter.size)
    for key, view in cut(adapter, flat).items():
        view[:] = parameters[key].grad.numpy().T
    return np.concatenate(logprobs), np.concatenate(divergences), float(total.detach()), flat
