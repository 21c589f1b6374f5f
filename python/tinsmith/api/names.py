"""Guesses what an unknown keyword argument may have meant.

ALIASES maps names that other libraries use to ours. A name that is not in it is compared with the
function's own by spelling. `explained` adds the guess to the TypeError, where Python only names the
argument.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# A guess is an argument of the function, or a method of the same object.
ALIASES: dict[str, tuple[str, ...]] = {
    "adam_beta1": ("beta1",),
    "adam_beta2": ("beta2",),
    "adam_epsilon": ("eps",),
    "advantages": ("loss_fn_inputs",),
    "beta": ("loss_fn_config",),
    "betas": ("beta1", "beta2"),
    "clip_high_threshold": ("loss_fn_config",),
    "clip_low_threshold": ("loss_fn_config",),
    "delta": ("loss_fn_config",),
    "eos_token_id": ("stop",),
    "epsilon": ("eps",),
    "input_ids": ("tokens", "prompts"),
    "kl_coeff": ("loss_fn_config",),
    "labels": ("targets",),
    "logprobs": ("loss_fn_inputs", "topk_logprobs"),
    "loss": ("loss_fn",),
    "lora_alpha": ("alpha",),
    "lora_rank": ("rank",),
    "lr": ("learning_rate",),
    "max_grad_norm": ("grad_clip_norm",),
    "max_length": ("max_tokens",),
    "max_new_tokens": ("max_tokens",),
    "n": ("num_samples",),
    "num_return_sequences": ("num_samples",),
    "prompt": ("prompts",),
    "r": ("rank",),
    "sequence_ratio_mask": ("loss_fn_inputs",),
    "stop_sequences": ("stop",),
    "stop_strings": ("stop",),
    "teacher_logprobs": ("generalized_jsd_topk()",),
    "temp": ("temperature",),
    "top_logprobs": ("topk_logprobs",),
    "topk": ("top_k", "topk_logprobs"),
    "wd": ("weight_decay",),
}
# Method names from before 0.1, and the names of today.
RENAMED = {"follow": "ema_update", "parameters": "state_dict"}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A guess for a name, as the end of a sentence; empty if no known name is close."""
    known = list(known)
    near = [one for one in ALIASES.get(name, ()) if one in known or one.endswith("()")]
    near = near or difflib.get_close_matches(name, known, 1)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def explained(function: Function) -> Function:
    """The function, but its TypeError for an unknown argument has a guess."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return function  # it takes any argument and checks them itself
    known = {one.name for one in parameters if one.kind is not one.POSITIONAL_ONLY}
    listed = [one.name for one in parameters if one.name in known and one.name != "self"]
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if not known.issuperset(named):
            unknown = min(named.keys() - known)
            takes = f"it takes {', '.join(listed)}" if listed else "it takes none"
            guess = did_you_mean(unknown, listed)
            raise TypeError(f"{name}() has no argument {unknown!r}{guess}; {takes}")
        return function(*arguments, **named)

    return call  # type: ignore[return-value]


class Explained:
    """A base class whose subclasses have `explained` constructors and public methods. The error for
    a method in RENAMED gives the new name."""

    if not TYPE_CHECKING:  # a type checker would accept every attribute

        def __getattr__(self, name):
            kind, now = type(self).__name__, RENAMED.get(name)
            said = f"{kind!r} object has no attribute {name!r}"
            if now is not None and hasattr(type(self), now):
                said += f": {kind}.{now} is its name now"
            raise AttributeError(said, name=name, obj=self)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, value in list(vars(cls).items()):
            if inspect.isfunction(value) and (name == "__init__" or name[0] != "_"):
                setattr(cls, name, explained(value))
