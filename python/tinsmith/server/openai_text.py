"""OpenAI's completions of a text as it is, and its list of models. ROUTES is the table of both APIs
under OpenAI's paths.

https://platform.openai.com/docs/api-reference/completions. A prompt is a text or token ids, or a
list of them; several are drawn together.
"""

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.chat.text import token_bytes
from tinsmith.engine.decoding import Part
from tinsmith.engine.errors import RequestError, clipped
from tinsmith.server import inference, shapes, wire
from tinsmith.server.bodies import read_json
from tinsmith.server.inference import Choice, Drawing, Generation, Target, Wrong
from tinsmith.server.openai_chat import (
    FINISH,
    LEAST,
    REMARKS,
    chat_completions,
    drawing_of,
    usage,
    wants_usage,
)
from tinsmith.server.routes import Handler
from tinsmith.server.service import Service

MAX_TOKENS = 16  # where a request says nothing, as OpenAI has it
LOGPROBS_MAX = 20

SETTINGS = {
    "model", "prompt", "stream", "stream_options", "n", "max_tokens", "temperature", "top_p",
    "top_k", "seed", "stop", "logprobs",
}  # fmt: skip
NEUTRAL: dict[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}


@dataclass
class Asked:
    """A completion request, checked."""

    target: Target
    prompts: list[list[int]]
    drawing: Drawing
    logprobs: bool
    stream: bool
    usage: bool
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def choices(self) -> list[Choice]:
        """A new one for each sample."""
        chat, drawing = self.target.chat, self.drawing
        return [
            Choice(chat.continuation(prompt, drawing.stops, drawing.ends), drawing.ends)
            for prompt in self.prompts
            for _ in range(drawing.count)
        ]


async def completions(service: Service, request: Request) -> Response | dict[str, Any]:
    body = await read_json(service, request)
    inference.check_fields(body, SETTINGS | REMARKS, NEUTRAL)
    target = await inference.find_target(service, body)
    asked = await service.beside(1 << 15, _asked, body, target)
    wanted = await inference.sample_requests(service, target, asked.prompts, asked.drawing)
    return await inference.respond(
        service,
        request,
        target,
        wanted,
        streams=asked.stream,
        events=partial(_events, asked),
        reply=partial(_reply, asked),
    )


def _asked(body: Mapping[str, Any], target: Target) -> Asked:
    stream = wire.maybe(body, "stream", bool, False)
    top = inference.between(body, "logprobs", int, 0, LOGPROBS_MAX, 0)
    limit = wire.maybe(body, "max_tokens", int, MAX_TOKENS)
    asked = Asked(
        target=target,
        prompts=_prompts(body.get("prompt"), target),
        drawing=drawing_of(body, ends=target.model.eos_ids, limit=limit, top_logprobs=top),
        logprobs=body.get("logprobs") is not None,
        stream=stream,
        usage=wants_usage(body, stream),
    )
    if len(asked.prompts) * asked.drawing.count > inference.PROMPTS_MAX:
        raise Wrong(
            f"{len(asked.prompts)} prompts with n {asked.drawing.count} are more than "
            f"{inference.PROMPTS_MAX} answers",
            param="prompt",
        )
    return asked


def _prompts(given: Any, target: Target) -> list[list[int]]:
    """A text's tokens are with those that the tokenizer adds; ids are as they are."""
    one = isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int)
    found = []
    for item in [given] if one else given if isinstance(given, list) else []:
        if isinstance(item, str):
            item = target.chat.encode(item, special=True)
        if not isinstance(item, list) or not item or any(type(token) is not int for token in item):
            raise Wrong("a prompt must be a text, or token ids, that are not empty", param="prompt")
        found.append(item)
    if not found:
        raise Wrong("prompt must be a text or token ids, or a list of them", param="prompt")
    return found


# ---- the reply ----


def _logprobs(asked: Asked, choice: Choice, part: Part, offset: int) -> dict[str, Any] | None:
    """The log-probabilities of a part's tokens; `offset` characters came before it."""
    if not asked.logprobs:
        return None
    tokenizer = asked.target.chat.tokenizer

    def text(token: int) -> str:
        return token_bytes(tokenizer, token).decode(errors="replace")

    texts = [text(token) for token in choice.kept]
    offsets = [offset + sum(map(len, texts[:row])) for row in range(len(texts))]
    top = None
    if part.topk_ids is not None and part.topk_logprobs is not None:
        rows = zip(part.topk_ids.tolist(), part.topk_logprobs.tolist(), strict=True)
        best = [list(zip(map(text, ids), values, strict=True)) for ids, values in rows]
        # Two ids can have one text: the likelier one, which comes first, keeps it.
        top = [{name: max(value, LEAST) for name, value in row[::-1]} for row in best]
    values = part.logprobs[: len(texts)].tolist()
    return {
        "tokens": texts,
        "token_logprobs": [max(value, LEAST) for value in values],
        "top_logprobs": None if top is None else top[: len(texts)],
        "text_offset": offsets,
    }


def _choice(choice: Choice, number: int, text: str, scored: Any) -> dict[str, Any]:
    return {
        "index": number,
        "text": text,
        "logprobs": scored,
        "finish_reason": FINISH[choice.ended],
        "stop_reason": choice.stopped,
    }


def _whole(asked: Asked, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": asked.id,
        "object": "text_completion",
        "created": asked.created,
        "model": asked.target.name,
        "choices": choices,
    }


def _reply(asked: Asked, generation: Generation, parts: Sequence[Part]) -> dict[str, Any]:
    choices, made = asked.choices, []
    for part in parts:
        choice = choices[part.number]
        text = "".join(map(str, choice.add(part)))
        made.append(_choice(choice, part.number, text, _logprobs(asked, choice, part, 0)))
    made.sort(key=lambda item: item["index"])
    drawn = sum(choice.tokens for choice in choices)
    return {**_whole(asked, made), "usage": usage(generation.prompt_tokens, drawn)}


async def _events(
    asked: Asked, generation: Generation, first: Sequence[Part] | None
) -> AsyncIterator[str]:
    choices = asked.choices
    offsets = [0] * len(choices)
    async for parts in inference.parts_from(generation, first):
        if isinstance(parts, RequestError):
            yield inference.event(shapes.openai(400, clipped(str(parts)), None, None))
            return
        if not parts:
            yield ": waiting\n\n"
        for part in parts:
            choice = choices[part.number]
            text = "".join(map(str, choice.add(part)))
            scored = _logprobs(asked, choice, part, offsets[part.number])
            if scored is not None:
                offsets[part.number] += sum(map(len, scored["tokens"]))
            if text or scored is not None or choice.ended is not None:
                one = _choice(choice, part.number, text, scored)
                yield inference.event(_whole(asked, [one]))
    if asked.usage:
        drawn = sum(choice.tokens for choice in choices)
        total = usage(generation.prompt_tokens, drawn)
        yield inference.event({**_whole(asked, []), "usage": total})
    yield "data: [DONE]\n\n"


# ---- models ----


async def models(service: Service, request: Request) -> dict[str, Any]:
    """Base models, and the checkpoints that were saved for sampling, in a form that OpenAI's and
    Anthropic's clients both read."""

    def saved() -> list[dict[str, Any]]:
        rows = [row for run in service.state.runs() for row in service.state.checkpoints(run.id)]
        return [
            _model(row.path, row.meta.created)
            for row in rows
            if row.meta.kind == "sampler_weights" and not service.store.has_ended(row.meta)
        ]

    found = [_model(name, service.started) for name in service.bases]
    found += await service.stored(saved)
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"], "has_more": False}
    return {"object": "list", "data": found, **ends}


async def model(service: Service, request: Request) -> dict[str, Any]:
    name = request.path_params["model"]
    await inference.find_target(service, {"model": name})
    return _model(name, service.started)


def _model(name: str, created: str) -> dict[str, Any]:
    seconds = int(datetime.fromisoformat(created).timestamp())
    return {
        "id": name,
        "object": "model",
        "created": seconds,
        "owned_by": "tinsmith",
        "type": "model",
        "display_name": name,
        "created_at": created,
    }


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/chat/completions", chat_completions),
    ("POST", "/completions", completions),
    ("GET", "/models", models),
    ("GET", "/models/{model:path}", model),
)
