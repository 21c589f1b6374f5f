"""Guesses what the name of an unknown loss may have meant. OTHERS maps names of methods to how you
get each here."""

import difflib
from collections.abc import Collection

_GROUP = (
    "GRPO's loss is importance_sampling or ppo, with each sample's advantage the reward less its "
    "group's mean"
)
_ANSWER = "it is cross_entropy, with weights 0 on the prompt and above 0 on the answer"

OTHERS: dict[str, str] = {
    "grpo": _GROUP,
    "dr_grpo": _GROUP,
    "rloo": "RLOO's loss is importance_sampling, and its advantages rewards less the others' mean",
    "reinforce": "REINFORCE's loss is importance_sampling, with the reward as advantage",
    "policy_gradient": "it is importance_sampling, with the reward as advantage",
    "sft": _ANSWER,
    "nll": _ANSWER,
    "ce": _ANSWER,
    "mle": _ANSWER,
    "sdft": "SDFT's loss is generalized_jsd, or cross_entropy with (N, K) targets of a teacher",
    "opsd": "OPSD's loss is generalized_jsd",
    "kl": "a divergence from a teacher is generalized_jsd",
    "jsd": "it is generalized_jsd",
    "dpo": "DPO's is a loss of your own: forward_backward_custom; in process forward and backward",
}


def loss_hint(name: str, known: Collection[str]) -> str:
    """A guess for a loss's name, as the end of a sentence; "" if no name is close."""
    if about := OTHERS.get(name.lower().replace("-", "_")):
        return f"; {about}"
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known, 1)
    return f"; did you mean {near[0]}?" if near else ""
