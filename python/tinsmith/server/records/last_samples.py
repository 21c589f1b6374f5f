"""The last samples and datums of a run, with the log-probability of each token.

Ids and numbers are kept, up to a limit; they become text when the page asks for them. A sample that
a teacher then scores (compute_logprobs of prompt and sample) is found by its tokens, and gets the
teacher's log-probabilities besides its own. So do datums that have them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.chat import text
from tinsmith.engine.call_log import Call
from tinsmith.engine.image_cache import HeldImage
from tinsmith.engine.teachers import LOGPROBS, NO_LOGPROB
from tinsmith.engine.training import Batch, BatchResult
from tinsmith.server.records.steps import finite

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENS_MAX = 512  # of a sample or datum: its first ones
PROMPT_MAX = 128  # of a prompt: its last ones
CALL_MAX = 2  # samples of one call
BEST_MAX = 5  # the teacher's likeliest ids at a position

Row = dict[str, Any]


def numbers(values: NDArray[Any]) -> list[float | None]:
    """Log-probabilities for JSON, to four digits; None if not finite."""
    rounded = np.round(values.astype(np.float64), 4) + 0.0  # no -0.0
    return rounded.tolist() if np.isfinite(rounded).all() else finite(rounded.tolist())


def key_of(tokens: NDArray[np.int32]) -> bytes:
    """A hash of tokens, to find them by."""
    plain = np.ascontiguousarray(tokens, np.int32)
    return hashlib.blake2b(plain.tobytes(), digest_size=16).digest()


def samples_of(call: Call) -> Iterator[tuple[bytes, Row]]:
    """The first samples of a call: the key of prompt and sample together, and the row."""
    prompt = call.request.prompt
    for sample in call.result.samples[:CALL_MAX]:
        if len(sample.tokens):
            row = {
                "kind": "sample",
                "step": call.step,
                "at": call.at,
                "base": call.base,
                "prompt": prompt[-PROMPT_MAX:].tolist(),
                "prompt_cut": max(0, len(prompt) - PROMPT_MAX),
                "ids": sample.tokens[:TOKENS_MAX].tolist(),
                "cut": max(0, len(sample.tokens) - TOKENS_MAX),
                "student": numbers(sample.logprobs[:TOKENS_MAX]),
                "stop": sample.stop_reason,
                "temperature": call.request.temperature,
            }
            row |= _images_in(prompt[-PROMPT_MAX:], call.request.images)
            yield key_of(np.concatenate([prompt, sample.tokens])), row


def taught(row: Row, call: Call) -> Row:
    """A sample's row with the log-probabilities of a call that scored its prompt and its tokens."""
    behind = len(row["ids"]) + row["cut"]
    scores = call.result.prompt_logprobs[-behind:][:TOKENS_MAX]
    return {**row, "teacher": numbers(scores), "teacher_name": call.run or call.base}


def datum_of(call: Call, step: int) -> Row | None:
    """The first datum of a training call with a weight; None if there is none."""
    batch: Batch = call.request
    result: BatchResult = call.result
    weights = batch.inputs.get("weights", batch.inputs.get("advantages"))
    start = first = 0
    for number, (length, shape) in enumerate(zip(batch.lengths, batch.shapes, strict=True)):
        cells = slice(first, first + int(np.prod(shape)))
        own = None if weights is None else weights[cells]
        if shape[0] and (own is None or bool(np.any(own))):
            tokens = batch.tokens[start : start + int(length)]
            row = _datum(batch, result, number, tokens, cells, own)
            return {**row, "step": step, "at": call.at, "base": call.base, "loss": batch.loss}
        start, first = start + int(length), cells.stop
    return None


def _datum(
    batch: Batch,
    result: BatchResult,
    number: int,
    tokens: NDArray[np.int32],
    cells: slice,
    weights: NDArray[np.float32] | None,
) -> Row:
    """One datum, from just before its first weight."""
    shape, logprobs = batch.shapes[number], result.logprobs[number]
    targets = batch.targets[cells].reshape(shape)
    live = np.ones(shape[0], bool)
    if weights is not None:
        live = np.any(weights.reshape(shape[0], -1) != 0, axis=1)
    first = max(0, int(np.argmax(live)) - 1)
    window = slice(first, first + TOKENS_MAX)
    row: Row = {
        "kind": "datum",
        "prompt": tokens[max(0, first + 1 - PROMPT_MAX) : first + 1].tolist(),
        "prompt_cut": max(0, first + 1 - PROMPT_MAX),
        "cut": max(0, shape[0] - window.stop),
        "live": live[window].tolist(),
    }
    row |= _images_in(tokens[max(0, first + 1 - PROMPT_MAX) : window.stop + 1], batch.images)
    if (told := result.outputs.get("jsd")) is not None:
        row["divergence"] = numbers(told[number][window])
    if len(shape) == 1:
        own = {"ids": targets[window].tolist(), "student": numbers(logprobs[window])}
        past = batch.inputs.get("logprobs")
        return row | own | ({} if past is None else {"sampler": numbers(past[cells][window])})
    teacher = batch.inputs.get(LOGPROBS)
    told = None if teacher is None else teacher[cells].reshape(shape)
    if told is None and weights is not None and np.all(weights >= 0):
        told = _shares(weights.reshape(shape))
    both = [None if told is None else told[window], logprobs[window]]
    return row | _listed(targets[window], *both, tokens[window.start + 1 :], live[window])


def _images_in(ids: NDArray[np.int32], images: Collection[HeldImage]) -> Row:
    """The first id, the height and the width of the images among ids, if there are any."""
    found = [
        [one.core.first, one.core.high, one.core.wide]
        for one in dict.fromkeys(images)
        if ((ids <= one.core.first) & (ids > one.core.first - one.core.rows)).any()
    ]
    return {"images": found} if found else {}


def _shares(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log-probabilities from several weighted targets at a position: those of a teacher whose
    probabilities are the weights."""
    sums = np.maximum(weights.sum(1, keepdims=True), np.finfo(np.float32).tiny)
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(weights / sums), NO_LOGPROB)


def _listed(
    targets: NDArray[np.int32],
    teacher: NDArray[np.float32] | None,
    student: NDArray[np.float32],
    following: NDArray[np.int32],
    live: NDArray[np.bool_],
) -> Row:
    """Positions with several ids each: both sides' log-probabilities of the next token, and the ids
    that are likeliest for the teacher (or the student, if there is no teacher). Positions without a
    weight get none: their ids are padding."""
    ids, mine, theirs, best = [], [], [], []
    for place, names in enumerate(targets):
        judge = student[place] if teacher is None else teacher[place]
        order = np.argsort(-judge, kind="stable")[:BEST_MAX]
        order = order[(judge[order] > NO_LOGPROB) & live[place]]
        token = int(following[place]) if place < len(following) else int(names[np.argmax(judge)])
        found = np.flatnonzero((names == token) & live[place])[:1]
        ids.append(token)
        mine += numbers(student[place][found]) or [None]
        theirs += [None] if teacher is None else numbers(teacher[place][found]) or [None]
        other = numbers(judge[order]) if teacher is not None else [None] * len(order)
        best.append([names[order].tolist(), numbers(student[place][order]), other])
    row: Row = {"ids": ids, "student": mine, "best": best}
    return row if teacher is None else {**row, "teacher": theirs, "teacher_name": "teacher"}


# ---- as text ----


def pieces(
    tokenizer: Tokenizer | None,
    ids: Sequence[int],
    before: Sequence[int] = (),
    images: Sequence[Sequence[int]] = (),
) -> list[str]:
    """The text of each token after those in `before`; concatenated, they are the whole text. An
    image is one text, at its first row. Without a tokenizer, the ids."""
    found = list[str]()
    for is_text, group in groupby(ids, lambda token: token >= 0):
        part = list(group)
        if not is_text:
            found += _image_pieces(part, images)
        elif tokenizer is None:
            found += [f"⟨{token}⟩" for token in part]
        else:
            found += text.pieces(tokenizer, part, [*before, *ids[: len(found)]])
    return found


def _image_pieces(rows: Sequence[int], images: Sequence[Sequence[int]]) -> list[str]:
    """The texts of rows of images: "[image 15 × 10]" is 15 tokens wide and 10 high."""
    found, last = list[str](), None
    for row in rows:
        one = next((one for one in images if one[0] - one[1] * one[2] < row <= one[0]), None)
        begins = one is not last or (one is not None and row == one[0])
        last = one
        size = f" {one[2]} × {one[1]}" if one else ""
        found.append(f"[image{size}]" if begins or not found else "")
    return found


def shown(row: Row, tokenizer: Tokenizer | None) -> Row:
    """A row with the texts of its tokens instead of their ids."""
    raw, images = ("ids", "prompt", "best", "images"), row.get("images", ())
    told = {key: value for key, value in row.items() if key not in raw}
    told["prompt"] = "".join(pieces(tokenizer, row["prompt"], (), images))
    told["tokens"] = pieces(tokenizer, row["ids"], row["prompt"], images)
    if best := row.get("best"):
        told["best"] = [
            [[_alone(tokenizer, token), *both] for token, *both in zip(*place, strict=True)]
            for place in best
        ]
    return told


def _alone(tokenizer: Tokenizer | None, token: int) -> str:
    if tokenizer is None:
        return f"⟨{token}⟩"
    return text.token_bytes(tokenizer, token).decode(errors="replace")
