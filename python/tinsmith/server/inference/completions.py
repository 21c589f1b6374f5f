"""A completion of a raw text: in OpenAI's form, with vLLM's fields, and in Fireworks'.

A choice comes in one piece or, in a stream, in several. If the prompt is echoed, its first piece
begins with the prompt's text and scores. Rows are tokens with their log-probabilities; FORMS is the
table of how they are written. A prompt's scores are known when its request is done, so they come
with whole samples only.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.chat.text import pieces, token_bytes
from tinsmith.engine.decoding import SampleDelta, SampleResult
from tinsmith.server.inference.openai_chat import FINISH, LEAST
from tinsmith.server.inference.serving import Choice, Drawing, Generation, Target

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Best = list[list[tuple[int, float]]]


@dataclass
class CompletionRequest:
    """A checked completion request."""

    target: Target
    given: list[Any]  # the prompts: texts, or ids
    prompts: list[list[int]]
    drawing: Drawing
    form: str | None  # the form of log-probabilities, if wanted
    echo: bool
    ids: bool  # vLLM's return_token_ids
    raw: bool  # Fireworks' raw_output
    metrics: bool  # Fireworks' perf_metrics_in_response
    silent: bool  # nothing is sampled
    stream: bool
    usage: bool
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def texts(self) -> list[str]:
        """The prompts' texts."""
        tokenizer = self.target.chat.tokenizer
        return [
            one if isinstance(one, str) else "".join(pieces(tokenizer, one)) for one in self.given
        ]

    @property
    def scored(self) -> bool:
        """Whether drawn tokens need log-probabilities besides those that they were drawn with."""
        return self.form == "content" and not self.drawing.is_plain and not self.silent

    @property
    def whole(self) -> bool:
        """Whether a stream has each choice in one piece."""
        return self.scored or self.drawing.scores_prompt

    @property
    def aligned(self) -> bool:
        """Whether the token that ended a choice is included, so that lists have equal lengths."""
        return self.echo or self.ids or self.raw or self.form == "content"


@dataclass
class Rows:
    """Tokens, each one's log-probability by the model and as drawn, and the most likely tokens at
    each position. A prompt's first token has none, and prompt tokens are not drawn."""

    tokens: list[int]
    logprobs: list[float | None]
    drawn_with: list[float | None]
    best: Best | None

    def __add__(self, other: "Rows") -> "Rows":
        both = None if self.best is None or other.best is None else self.best + other.best
        return Rows(
            self.tokens + other.tokens,
            self.logprobs + other.logprobs,
            self.drawn_with + other.drawn_with,
            both,
        )


def _best(ids: NDArray[np.int32] | None, logprobs: NDArray[np.float32] | None) -> Best | None:
    if ids is None or logprobs is None:
        return None
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in pairs]


def prompt_rows(prompt: Sequence[int], result: SampleResult) -> Rows:
    """A prompt's scores: the SDK's prompt_logprobs and topk_prompt_logprobs."""
    assert result.prompt_logprobs is not None
    best = _best(result.topk_ids, result.topk_logprobs)
    return Rows(
        list(prompt),
        [None, *result.prompt_logprobs[1:].tolist()],
        [None] * len(prompt),
        None if best is None else [[], *best[1:]],
    )


def drawn_rows(tokens: Sequence[int], part: SampleDelta, score: SampleResult | None) -> Rows:
    """A part's first tokens, with the part's scores at temperature 1, if any."""
    count, drawn_with = len(tokens), part.logprobs.tolist()
    logprobs, best = drawn_with, _best(part.topk_ids, part.topk_logprobs)
    if score is not None and score.prompt_logprobs is not None:
        logprobs = score.prompt_logprobs[-len(part.tokens) :].tolist()
        best = _best(score.topk_ids, score.topk_logprobs)
        best = best and best[-len(part.tokens) :]
    return Rows(list(tokens), logprobs[:count], drawn_with[:count], best and best[:count])


# ---- forms of log-probabilities ----


def _text(tokenizer: "Tokenizer", token: int) -> str:
    return token_bytes(tokenizer, token).decode(errors="replace")


def _legacy(tokenizer: "Tokenizer", rows: Rows, offsets: Sequence[int]) -> dict[str, Any]:
    """https://platform.openai.com/docs/api-reference/completions/object"""

    def top(token: int, logprob: float | None, best: list[tuple[int, float]]) -> Any:
        if logprob is None:
            return None
        # Two ids can have one text: the likelier one, which comes first, wins. The token's own is
        # always there.
        pairs = [(token, logprob), *best[::-1]]
        return {_text(tokenizer, one): max(value, LEAST) for one, value in pairs}

    return {
        "tokens": [_text(tokenizer, token) for token in rows.tokens],
        "token_logprobs": [None if one is None else max(one, LEAST) for one in rows.logprobs],
        "top_logprobs": None
        if rows.best is None
        else list(map(top, rows.tokens, rows.logprobs, rows.best)),
        "text_offset": list(offsets),
    }


def _content(tokenizer: "Tokenizer", rows: Rows, offsets: Sequence[int]) -> dict[str, Any]:
    """Fireworks': a prompt's first token has 0, because its client drops the first row and reads
    null as "no log-probabilities at all"."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = token_bytes(tokenizer, token)
        shown, value = text.decode(errors="replace"), 0.0 if logprob is None else logprob
        return {
            "token": shown,
            "token_id": token,
            "bytes": list(text),
            "logprob": max(value, LEAST),
        }

    made = []
    for row, token in enumerate(rows.tokens):
        own, drawn_with = entry(token, rows.logprobs[row]), rows.drawn_with[row]
        own["sampling_logprob"] = None if drawn_with is None else max(drawn_with, LEAST)
        own["text_offset"] = offsets[row]
        if rows.best is not None:
            own["top_logprobs"] = [entry(*pair) for pair in rows.best[row] or [(token, 0.0)]]
        made.append(own)
    return {"content": made}


FORMS: Mapping[str, Callable[["Tokenizer", Rows, Sequence[int]], dict[str, Any]]] = {
    "legacy": _legacy,
    "content": _content,
}


# ---- a choice ----


class Writer:
    """Writes one choice, part by part."""

    def __init__(self, asked: CompletionRequest, number: int):
        drawing, self._asked, self._number = asked.drawing, asked, number
        self._place = number // drawing.count  # index of the prompt
        self._prompt = asked.prompts[self._place]
        chat = asked.target.chat
        answer = chat.continuation(self._prompt, drawing.stops, drawing.ends)
        self._choice = Choice(answer, drawing.ends)
        self._tokenizer = chat.tokenizer
        self._begun = False
        self._length = 0  # characters of the tokens written so far
        self._drawn: list[int] = []
        self._text = ""

    @property
    def tokens(self) -> int:
        """How many tokens were drawn so far."""
        return 0 if self._asked.silent else self._choice.tokens

    def write(self, part: SampleDelta, generation: Generation) -> dict[str, Any]:
        """The choice's next piece, from a part."""
        asked, choice, prompt, begun = self._asked, self._choice, self._prompt, self._begun
        self._begun = True
        text = "".join(map(str, choice.add(part)))
        tokens = choice.drawn if asked.aligned else choice.kept
        if asked.silent:
            text, tokens = "", []
        said = asked.texts[self._place] if asked.echo and not begun else ""
        self._text += said + text
        self._drawn += tokens
        reason = "length" if asked.silent else FINISH[choice.ended]
        made = {
            "index": self._number,
            "text": said + text,
            "logprobs": self._logprobs(tokens, part, generation),
            "finish_reason": reason,
            "stop_reason": None if asked.silent else choice.stopped,
        }
        if asked.ids:
            made |= {} if begun else {"prompt_token_ids": prompt}
            made["token_ids"] = tokens
        if asked.raw and reason is not None:
            made["raw_output"] = {
                "prompt_token_ids": prompt,
                "completion": self._text,
                "completion_token_ids": prompt + self._drawn if asked.echo else self._drawn,
            }
        return made

    def _logprobs(
        self, tokens: list[int], part: SampleDelta, generation: Generation
    ) -> dict[str, Any] | None:
        asked = self._asked
        if asked.form is None:
            return None
        rows = drawn_rows(tokens, part, generation.scores.get(self._number))
        offsets = list[int]()
        if asked.drawing.scores_prompt:
            scored = prompt_rows(self._prompt, generation.futures[self._place].result())
            rows, self._length = scored + rows, len(asked.texts[self._place])
            offsets = _places(self._tokenizer, self._prompt, self._length)
        lengths = [len(_text(self._tokenizer, token)) for token in tokens]
        offsets += accumulate([self._length, *lengths])
        self._length = offsets.pop()
        return FORMS[asked.form](self._tokenizer, rows, offsets)


def _places(tokenizer: "Tokenizer", prompt: Sequence[int], length: int) -> list[int]:
    """The offsets of a prompt's tokens in its text of `length` characters. Text that the tokenizer
    adds in front has offset 0."""
    ends = list(accumulate(map(len, pieces(tokenizer, prompt))))
    return [max(0, end - ends[-1] + length) for end in [0, *ends[:-1]]]


def writers_of(asked: CompletionRequest) -> list[Writer]:
    """A new writer for each sample."""
    count = len(asked.prompts) * asked.drawing.count
    return [Writer(asked, number) for number in range(count)]


def completion(asked: CompletionRequest, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A completion, or a chunk of a stream."""
    return {
        "id": asked.id,
        "object": "text_completion",
        "created": asked.created,
        "model": asked.target.name,
        "choices": choices,
    }
