"""Attacks the in-process API: Model, Adapter and Sampler get arguments that nobody should pass.

A call is refused with a sentence, and then the adapter is as it was, to the bit; or it does what it
says, and then all of the adapter's numbers are finite. What a clean adapter computes beside it is
the same bits throughout.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import tinsmith
from tinsmith import _core

from tools.attack import common, tiny
from tools.attack.common import Attempt, One

KINDS = (*common.USER, TypeError, MemoryError, RuntimeError)
VECTORS = ("weights", "gradients", "m", "v")
IDS = np.arange(9, dtype=np.int32) * 5 % tiny.VOCAB
ONES = np.ones(9, np.float32)
EVERY = 50  # attempts between two looks at the clean adapter


def number(rng: Random) -> Any:
    """Something in the place of a number."""
    return rng.choice((rng.choice(common.INTEGERS), rng.choice(common.FLOATS), value(rng)))


def value(rng: Random) -> Any:
    """Something in the place of anything."""
    kind = rng.randrange(6)
    if kind < 3:
        return common.hostile(rng)
    if kind == 3:
        return array(rng)
    if kind == 4:
        return [array(rng) for _ in range(rng.randrange(3))]
    return rng.choice((object(), b"bytes", {1, 2}, print, 1j, range(5), np.float64(0.5), Ellipsis))


def array(rng: Random) -> Any:
    """An array of an odd type, shape or content."""
    shape = rng.choice(((9,), (9,), (9, 1), (9, 2), (1, 9), (0,), (), (3, 3), (9, 0), (2, 2, 2)))
    kind = rng.choice(
        ("i4", "i8", "f4", "f8", "u1", "i2", "f2", "?", "U3", "O", "c8", ">i4", "M8[s]")
    )
    made = np.zeros(shape, kind)
    if kind in ("i4", "i8", "f4", "f8", ">i4") and made.size:
        made += rng.randrange(tiny.VOCAB)
        with np.errstate(all="ignore"):
            extreme = rng.choice((*common.INTEGERS[:21], *common.FLOATS))
            if rng.random() < 0.5:
                info = np.iinfo(kind) if "i" in kind else np.finfo(kind)
                small = extreme != extreme or abs(extreme) <= float(info.max)
                if small and (np.isfinite(extreme) or "f" in kind):
                    made.flat[rng.randrange(made.size)] = extreme
    if rng.random() < 0.2 and made.ndim:
        made = made[:: rng.choice((1, 2, -1))]
    return made.tolist() if rng.random() < 0.1 and kind != "O" else made


def mixed(rng: Random, good: dict[str, Any], odd: Callable[[Random], Any]) -> dict[str, Any]:
    """The good arguments with one or two others."""
    given = dict(good)
    for _ in range(rng.choice((1, 1, 2))):
        key = rng.choice(list(given))
        given[key] = odd(rng) if rng.random() < 0.9 else given[rng.choice(list(given))]
    if rng.random() < 0.03:
        given["no_such_argument"] = 1
    return given


ADAM = {
    "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0,
    "grad_clip_norm": 0.0, "grad_accumulation_normalization": None,
}  # fmt: skip
SAMPLE = {
    "prompts": IDS, "num_samples": 1, "max_tokens": 3, "temperature": 1.0, "top_k": -1,
    "top_p": 1.0, "seed": 1, "stop": None, "topk_logprobs": 0,
}  # fmt: skip
LORA = {"rank": 2, "alpha": 32.0, "seed": 1, "attn": True, "mlp": True, "unembed": True}
TRAIN = {"tokens": IDS, "targets": IDS, "weights": ONES, "loss_fn": "cross_entropy"}
POLICY = {"tokens": IDS, "targets": IDS, "logprobs": -ONES, "advantages": ONES}
LOSSES: dict[str, dict[str, Any]] = {
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.1},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "stable_reinforce": {"kl_coeff": 0.1},
}
TAUGHT = {
    "tokens": IDS[:-1], "targets": IDS[1:], "weights": ONES[1:], "teacher": None,
    "teacher_tokens": np.concatenate([IDS[:2], IDS[1:]]),
    "beta": 0.5, "temperature": 1.0, "top_k": None, "token_clip": None,
}  # fmt: skip


class Victim:
    """A model with an adapter that is attacked, one that is not, and what the latter computes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = tinsmith.Model(tiny.make(folder / "model"), device="cpu", threads=1)
        self.clean = self.model.lora(rank=2, seed=7)
        self.expected = self.look()
        self.renew()

    def renew(self) -> None:
        """A new adapter, as the ones before it were."""
        self.adapter = self.model.lora(rank=2, seed=3)
        self.adapter.forward_backward(IDS, IDS, ONES)

    def look(self) -> list[Any]:
        """What the clean adapter computes; its state stays."""
        out = self.clean.forward_backward(IDS, IDS[::-1].copy(), ONES)
        gradient = self.clean.core.read("gradients").tobytes()
        self.clean.zero_grad()
        drawn = self.model.sampler().sample(IDS, adapter=self.clean, max_tokens=4, seed=5)[0]
        return [out.loss, out.logprobs.tobytes(), gradient, drawn.tokens.tolist()]

    def state(self) -> list[Any]:
        """All that a call may change."""
        core = self.adapter.core
        return [*(core.read(what).tobytes() for what in VECTORS), core.step, core.pending]


Act = tuple[str, Callable[..., Any], dict[str, Any], Callable[[Random], Any]]


def acts(victim: Victim) -> list[Act]:
    """Of each call its name, itself, its good arguments, and what odd ones are drawn from."""
    adapter, model = victim.adapter, victim.model
    return [
        ("optim_step", adapter.optim_step, ADAM, number),
        ("optim_step", adapter.optim_step, ADAM, number),
        ("forward_backward", adapter.forward_backward, TRAIN, value),
        ("forward_backward", adapter.forward_backward, TRAIN, array),
        *(
            (name, _policy(adapter, name), POLICY | config, value)
            for name, config in LOSSES.items()
        ),
        ("generalized_jsd", adapter.generalized_jsd, TAUGHT, value),
        ("forward", adapter.forward, {"tokens": IDS, "targets": IDS}, value),
        ("backward", _backward(adapter), {"dlogprobs": ONES}, value),
        ("lora", lambda **o: model.lora(**o).state_dict(), LORA, number),
        ("sample", lambda **o: model.sampler().sample(adapter=adapter, **o), SAMPLE, value),
        ("sample", model.sampler().sample, SAMPLE, number),
        ("logprobs", model.logprobs, {"tokens": IDS, "adapter": adapter}, value),
        ("topk_logprobs", model.topk_logprobs, {"tokens": IDS, "k": 3}, value),
        ("step_memory", lambda value: setattr(adapter, "step_memory", value), {"value": 0}, value),
        ("save", adapter.save, {"path": victim.folder / "a", "overwrite": True}, _path),
        ("load_lora", model.load_lora, {"path": victim.folder / "a", "optimizer": True}, _path),
    ]


def attacked(victim: Victim, rng: Random) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    """A call's name, itself, and arguments of which some are odd."""
    name, call, good, odd = rng.choice(acts(victim))
    given = mixed(rng, good, odd)
    if type(given.get("num_samples")) is int and 256 < given["num_samples"] < 2**17:
        given["num_samples"] = 256  # more are legal, and take their time
    return name, call, given


def _policy(adapter: tinsmith.Adapter, loss: str) -> Callable[..., Any]:
    def call(tokens: Any, targets: Any, logprobs: Any, advantages: Any, **config: Any) -> None:
        inputs = {"logprobs": logprobs, "advantages": advantages}
        adapter.forward_backward(
            tokens, targets, loss_fn=loss, loss_fn_inputs=inputs, loss_fn_config=config
        )

    return call


def _backward(adapter: tinsmith.Adapter) -> Callable[..., Any]:
    def call(dlogprobs: Any) -> None:
        adapter.forward(IDS, IDS)
        adapter.backward(dlogprobs)

    return call


def _path(rng: Random) -> Any:
    """Something in the place of a path, none of which can be written to."""
    return rng.choice(
        ("\0", "/proc/x/y", "/dev/null/a", "\ud800\0", 7, None, 1.5, [], "a\0b" * 999)
    )


@contextmanager
def attack() -> Iterator[One]:
    """The program."""
    with tempfile.TemporaryDirectory() as folder:
        victim = Victim(Path(folder))
        for _, call, good, _ in acts(victim):
            call(**good)

        def one(attempt: Attempt) -> str:
            victim.renew()
            before = victim.state()
            name, call, given = attacked(victim, attempt.rng)
            attempt.note(name, _shown(given))
            try:
                call(**given)
            except Exception as error:
                word = common.refusal(error, kinds=KINDS)
                if victim.state() != before:
                    raise common.Failure("the adapter has changed") from error
            else:
                word = "taken"
                for what in VECTORS:
                    if _core.first_bad(victim.adapter.core.read(what)) >= 0:
                        raise common.Failure(f"{what} is not finite")
            if attempt.number % EVERY == 0 and victim.look() != victim.expected:
                raise common.Failure("a clean adapter computes something else")
            return f"{name} {word}"

        yield one


def _shown(given: dict[str, Any]) -> str:
    try:
        return repr(given)
    except ValueError:  # an integer of more digits than Python writes
        return "with an integer that is too long to be written"
