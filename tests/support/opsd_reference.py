"""OPSD's generalized_jsd_loss, written again from its contract in torch: the oracle of
tinsmith.ops.generalized_jsd. In float64 it is the truth, in float32 what one runs without us."""

import torch
from torch.nn.functional import kl_div


def best_of(logits: torch.Tensor, k: int) -> torch.Tensor:
    """torch.topk's ids, but that equals come in the order of their ids: torch orders them as it
    likes."""
    return torch.sort(logits, dim=-1, descending=True, stable=True).indices[..., :k]


def log_probabilities(student, teacher, temperature, logits_are_probs, top_k):
    if logits_are_probs:
        return torch.log(student.clamp_min(1e-8)), torch.log(teacher.clamp_min(1e-8))
    x, y = student / temperature, teacher / temperature
    if top_k is not None and top_k > 0:
        ids = best_of(y, top_k)
        x, y = torch.gather(x, -1, ids), torch.gather(y, -1, ids)
    return torch.log_softmax(x, dim=-1), torch.log_softmax(y, dim=-1)


def generalized_jsd_loss(
    student,
    teacher,
    labels=None,
    beta=0.5,
    temperature=1.0,
    reduction="batchmean",
    logits_are_probs=False,
    top_k=None,
    token_clip=None,
):
    log_p, log_q = log_probabilities(student, teacher, temperature, logits_are_probs, top_k)
    if beta == 0:
        terms = kl_div(log_p, log_q, reduction="none", log_target=True)
    elif beta == 1:
        terms = kl_div(log_q, log_p, reduction="none", log_target=True)
    else:
        b = torch.tensor(beta, dtype=log_p.dtype)
        both = torch.stack([log_p + torch.log1p(-b), log_q + torch.log(b)])
        log_m = torch.logsumexp(both, dim=0)
        of_teacher = kl_div(log_m, log_q, reduction="none", log_target=True)
        of_student = kl_div(log_m, log_p, reduction="none", log_target=True)
        terms = b * of_teacher + (1 - b) * of_student
    if token_clip is not None:
        terms = terms.clamp(max=token_clip)
    if labels is not None:
        mask = labels != -100
        terms = terms[mask]
    if reduction == "batchmean":
        return terms.sum() / (mask.sum() if labels is not None else terms.size(0))
    return {"sum": terms.sum, "mean": terms.mean, "none": lambda: terms}[reduction]()
