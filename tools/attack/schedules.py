"""The sampler's schedule: requests of every sort that come, go and are put off, in small caches.

An input is a model (layers with a window, without, or with a state; experts or none), a cache that
is too small for all, and requests at random times: groups, common beginnings, what others have
said, scores, targets, draws, adapters, sessions. Some are cancelled, stopped or given other
weights, and steps are interrupted. The memory that nobody holds is NaN all the while. What is left
must be what each gives alone, and in the end nothing may be held or lost.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from tinsmith import _core

from tools.attack.common import Attempt, Failure, One, refusal
from tools.attack.sequences import CONTEXT, VOCAB, adapters_of, core_of, result_of

SHAPES = ("f", "fw", "ww", "wwf", "fwwfw", "lf", "lw", "ffffffffw")
STEPS = 20_000


class Crowd:
    """The requests of one input."""

    def __init__(self, attempt: Attempt):
        rng = self.rng = attempt.rng
        self.shape = (
            rng.choice(SHAPES),
            rng.choice((1, 2, 64, 65, 66, 100, 190)),
            rng.random() < 0.3,
        )
        self.model = core_of(*self.shape)
        tokens = rng.choice((320, 448, 640, 1000, 2000))
        attempt.note("shape", self.shape, "cache", tokens)
        self.attempt, self.longest = attempt, min(tokens, CONTEXT) - 1
        self.sampler = _core.Sampler(self.model, tokens=tokens)
        self.stems = [self.tokens(rng.choice((20, 64, 65, 130, 300, 520))) for _ in range(3)]
        self.asked: dict[int, dict[str, Any]] = {}  # of those that are here
        self.changed: set[int] = set()  # those whose results are not what they are alone
        self.compared = 0

    def tokens(self, count: int) -> np.ndarray:
        made = [self.rng.randrange(VOCAB) for _ in range(count)]
        return np.array(made, np.int32)

    def prompt(self) -> np.ndarray:
        rng, stem = self.rng, self.rng.choice(self.stems)
        stem = stem[: rng.randint(1, len(stem))] if rng.random() < 0.4 else stem
        more = self.tokens(rng.randint(1, 150)) if rng.random() < 0.6 else stem[:0]
        return np.concatenate([stem, more])[: self.longest - 1]

    def add(self, number: int) -> None:
        """A request."""
        rng, prompt = self.rng, self.prompt()
        room = self.longest - len(prompt)
        options: dict[str, Any] = {
            "prompt": prompt, "max_tokens": rng.randint(1, max(1, min(room, rng.choice((3, 90))))),
            "adapter": rng.choice((None, *adapters_of(*self.shape))), "seed": number,
            "num_samples": rng.choice((1, 1, 2, 5)), "temperature": rng.choice((0.0, 1.0)),
        }  # fmt: skip
        if rng.random() < 0.3:
            options |= {"prompt_logprobs": True, "topk_prompt": rng.choice((0, 0, 3))}
            options["prompt_from"] = rng.choice((0, rng.randint(0, len(prompt))))
        elif rng.random() < 0.1:
            options["prompt_draws"] = 2
        if rng.random() < 0.2:
            options["topk_sample"] = 2
        if rng.random() < 0.2:
            options["stop_ids"] = self.tokens(2)
        if rng.random() < 0.15:
            options["session"] = rng.choice((7, 8))
            self.changed.add(number)  # pages of any weights
        self.attempt.note("add", number, len(prompt), {**options, "prompt": None})
        self.sampler.add(number, client=rng.randrange(3), **options)
        self.asked[number] = options

    def disturb(self) -> None:
        """Something that comes from outside."""
        rng, number = self.rng, self.rng.choice(sorted(self.asked))
        what = rng.choice(("cancel", "stop", "follow"))
        self.attempt.note(what, number)
        if what == "cancel":
            self.sampler.cancel(number)
            del self.asked[number]
        elif what == "stop":
            sample = rng.randrange(self.asked[number]["num_samples"])
            drawn = len(self.sampler.look(number, sample, 0)["tokens"])
            try:
                self.sampler.stop(number, sample)
                self.changed.add(number)
            except ValueError as error:
                refusal(error, "no token")
            if (number in self.changed) < bool(drawn):
                raise Failure(f"sample {sample} of request {number} was not stopped")
        elif "session" in self.asked[number]:
            self.sampler.set_adapter(number, rng.choice(adapters_of(*self.shape)))

    def step(self) -> None:
        """A step, which may be interrupted, and what is done after it."""
        self.sampler.spoil()
        if self.rng.random() < 0.02:
            self.interrupted()
        else:
            self.take(self.sampler.step()[1])

    def interrupted(self) -> None:
        """Steps until one of them fails, or for a while."""
        ended = threading.Event()

        def interrupt() -> None:
            while not ended.is_set():
                self.sampler.interrupt()

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            for _ in range(3):
                self.take(self.sampler.step()[1])
        except KeyboardInterrupt:
            self.attempt.note("interrupted")
        finally:
            ended.set()
            thread.join()

    def take(self, done: list[int]) -> None:
        """Compares what is done with what it gives alone."""
        for number in done:
            found, options = self.sampler.take(number), self.asked.pop(number)
            for sample in found["samples"]:
                if not np.isfinite(sample["logprobs"]).all():
                    raise Failure(f"request {number} has log-probabilities that are not finite")
            if number not in self.changed:
                check_same(number, found, result_of(self.model, options))
                self.compared += 1
            said = np.concatenate([options["prompt"], found["samples"][0]["tokens"]])
            self.stems[self.rng.randrange(3)] = said[: self.longest - 60]

    def end(self) -> None:
        """All are done, and nothing is held."""
        for _ in range(STEPS):
            if not self.asked:
                break
            self.step()
        else:
            raise Failure(f"no end after {STEPS} steps")
        cache = self.sampler.cache
        used = cache["known"] * cache["full"] + cache["kept"] * cache["windowed"]
        if cache["held"] or cache["windows"] or cache["free"] + used != cache["frames"]:
            raise Failure(f"the cache has lost something: {cache}")


def check_same(number: int, found: Any, alone: Any) -> None:
    """Two results, bit for bit."""
    pairs = [(found, alone), *zip(found["samples"], alone["samples"], strict=True)]
    for one, other in pairs:
        for key in one.keys() - {"samples", "prompt_reused"}:
            if not np.array_equal(bits(one[key]), bits(other[key])):
                raise Failure(f"request {number} has another {key} than alone")


def bits(value: Any) -> Any:
    """An array of which NaN equals NaN."""
    known = isinstance(value, np.ndarray) and value.dtype == np.float32
    return value.view(np.uint32) if known else value


@contextmanager
def attack() -> Iterator[One]:
    """The program."""

    def one(attempt: Attempt) -> str:
        crowd, rng = Crowd(attempt), attempt.rng
        for number in range(rng.randint(2, 14)):
            crowd.add(number)
            if crowd.asked and rng.random() < 0.15:
                crowd.disturb()
            for _ in range(rng.choice((0, 1, 5, 40))):
                crowd.step()
        crowd.end()
        return "compared" if crowd.compared else "ended"

    yield one
