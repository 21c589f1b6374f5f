"""OpenAI's completions of a raw text, and its list of models. ROUTES is the table of both APIs
under OpenAI's paths, FIREWORKS of those under Fireworks'.

https://platform.openai.com/docs/api-reference/completions. A prompt is a text or token ids, or a
list of them; several are drawn together. Fireworks' sampler sends the same with more settings, and
retries a 404 for minutes.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.engine.decoding import SampleDelta
from tinsmith.engine.errors import RequestError, clipped
from tinsmith.server.http import error_bodies
from tinsmith.server.inference import serving
from tinsmith.server.inference.completions import CompletionRequest, completion, writers_of
from tinsmith.server.inference.openai_chat import (
    REMARKS,
    chat_completions,
    drawing_of,
    limit_of,
    usage,
    wants_usage,
)
from tinsmith.server.inference.serving import Generation, Target, Wrong
from tinsmith.server.routes.training import Handler
from tinsmith.server.service.bodies import read_json, reply_of
from tinsmith.server.service.service import Service
from tinsmith.server.wire import parse
from tinsmith.server.wire.chunking import Json

MAX_TOKENS = 16  # if a request has none, as in OpenAI's API
LOGPROBS_MAX = 20
ECHOED_MAX = 1 << 20  # ids and log-probabilities of prompts in one answer

SETTINGS = {
    "model", "prompt", "stream", "stream_options", "n", "max_tokens", "temperature", "top_p",
    "top_k", "seed", "stop", "logprobs", "echo", "return_token_ids",
}  # fmt: skip
NEUTRAL: dict[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
}
FIREWORKS_SETTINGS = SETTINGS | {
    "max_completion_tokens", "top_logprobs", "raw_output", "perf_metrics_in_response",
}  # fmt: skip
FIREWORKS_NEUTRAL = NEUTRAL | {
    "context_length_exceeded_behavior": ("truncate",),
    "ignore_eos": (False,),
    "images": ([],),
    "include_routing_matrix": (False,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "service_tier": ("auto", "default"),
}


async def completions(service: Service, request: Request) -> Response | dict[str, Any]:
    body = await read_json(service, request)
    serving.check_fields(body, SETTINGS | REMARKS, NEUTRAL)
    target = await serving.find_target(service, body)
    return await _answer(service, request, target, body, fireworks=False)


async def fireworks_completions(service: Service, request: Request) -> Response | dict[str, Any]:
    body = await read_json(service, request)
    serving.check_fields(body, FIREWORKS_SETTINGS | REMARKS, FIREWORKS_NEUTRAL)
    try:
        target = await serving.find_target(service, body)
    except Wrong as error:
        raise Wrong(str(error), param=error.param, code=error.code) from None
    if body.get("top_k") == 0:  # no limit
        body = {**body, "top_k": None}
    return await _answer(service, request, target, body, fireworks=True)


async def _answer(
    service: Service, request: Request, target: Target, body: Mapping[str, Any], *, fireworks: bool
) -> Response | dict[str, Any]:
    asked = await service.beside(1 << 15, _asked, body, target, fireworks)
    wanted = await serving.sample_requests(service, target, asked.prompts, asked.drawing)
    return await serving.respond(
        service,
        request,
        target,
        wanted,
        streams=asked.stream,
        events=partial(_events, service, asked),
        reply=partial(_reply, asked),
        whole=asked.whole,
        scored=asked.scored,
    )


def _asked(body: Mapping[str, Any], target: Target, fireworks: bool) -> CompletionRequest:
    stream, echo = parse.maybe(body, "stream", bool, False), parse.maybe(body, "echo", bool, False)
    limit = limit_of(body)
    limit = MAX_TOKENS if limit is None else limit
    silent = echo and limit == 0
    form, top = _scores(body, fireworks)
    given, prompts = _prompts(body.get("prompt"), target)
    drawing = drawing_of(
        body, ends=target.model.eos_ids, limit=1 if silent else limit, top_logprobs=top
    )
    asked = CompletionRequest(
        target=target,
        given=given,
        prompts=prompts,
        drawing=replace(drawing, scores_prompt=echo and form is not None),
        form=form,
        echo=echo,
        ids=parse.maybe(body, "return_token_ids", bool, False),
        raw=parse.maybe(body, "raw_output", bool, False),
        metrics=parse.maybe(body, "perf_metrics_in_response", bool, False),
        silent=silent,
        stream=stream,
        usage=wants_usage(body, stream) or fireworks,
    )
    _check(asked)
    vocab = target.model.vocab
    if echo and all(min(prompt) >= 0 and max(prompt) < vocab for prompt in prompts):
        _ = asked.texts  # decoded here, in a thread; invalid ids are refused
    return asked


def _check(asked: CompletionRequest) -> None:
    """Refuses requests that are too large, or can't be scored."""
    count, drawing = len(asked.prompts) * asked.drawing.count, asked.drawing
    if count > serving.PROMPTS_MAX:
        raise Wrong(
            f"{len(asked.prompts)} prompts with n {drawing.count} are more than "
            f"{serving.PROMPTS_MAX} answers",
            param="prompt",
        )
    each = 1 + drawing.top_logprobs * drawing.scores_prompt
    echoed = sum(map(len, asked.prompts)) * drawing.count * each
    if (asked.echo or asked.ids or asked.raw) and echoed > ECHOED_MAX:
        raise Wrong(
            f"the answer would have {echoed} ids and log-probabilities of prompts, at most "
            f"{ECHOED_MAX} are sent: ask for fewer prompts, fewer of the most likely tokens or a "
            "smaller n",
            param="echo",
        )
    context = asked.target.model.context
    if asked.scored and any(len(prompt) == context for prompt in asked.prompts):
        raise Wrong(
            f"a prompt fills the model's context of {context} tokens: what follows it has no "
            "log-probability without temperature, top_p and top_k",
            param="logprobs",
        )


def _scores(body: Mapping[str, Any], fireworks: bool) -> tuple[str | None, int]:
    """The form of log-probabilities, and how many of the most likely tokens get them."""
    given, top = body.get("logprobs"), 0
    if fireworks:
        top = serving.between(body, "top_logprobs", int, 0, LOGPROBS_MAX, 0)
        if top and given is not True:
            raise Wrong("top_logprobs needs logprobs to be true", param="top_logprobs")
    if given is None or given is False:
        return None, 0
    if given is True:
        return ("content", top) if fireworks else ("legacy", 0)
    return "legacy", serving.between(body, "logprobs", int, 0, LOGPROBS_MAX, 0)


def _prompts(prompt: Any, target: Target) -> tuple[list[Any], list[list[int]]]:
    """Prompts as given, and their ids. A text's ids include those that the tokenizer adds; given
    ids stay unchanged."""
    one = isinstance(prompt, str)
    one |= isinstance(prompt, list) and len(prompt) > 0 and type(prompt[0]) is int
    given = [prompt] if one else prompt if isinstance(prompt, list) else []
    found = []
    for item in given:
        if isinstance(item, str):
            item = target.chat.encode(item, special=True)
        if not isinstance(item, list) or not item or any(type(token) is not int for token in item):
            raise Wrong("a prompt must be a text, or token ids, that are not empty", param="prompt")
        found.append(item)
    if not found:
        raise Wrong("prompt must be a text or token ids, or a list of them", param="prompt")
    return given, found


# ---- the reply ----


def _metrics(asked: CompletionRequest, generation: Generation) -> dict[str, Any]:
    """The times that Fireworks' client reads; here only the prompt's length."""
    return {"perf_metrics": {"prompt-tokens": generation.prompt_tokens}} if asked.metrics else {}


def _reply(
    asked: CompletionRequest, generation: Generation, parts: Sequence[SampleDelta]
) -> Response:
    writers = writers_of(asked)
    made = Json()  # choice by choice: one text of all would block everyone
    for part in sorted(parts, key=lambda part: part.number):
        made += [b"," if made else b"", _dumps(writers[part.number].write(part, generation))]
    drawn = usage(generation.prompt_tokens, sum(one.tokens for one in writers))
    end = {**completion(asked, []), "usage": drawn, **_metrics(asked, generation)}
    del end["choices"]
    return reply_of(Json([b'{"choices":[', *made, b"],", _dumps(end)[1:]]))


def _dumps(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def _events(
    service: Service,
    asked: CompletionRequest,
    generation: Generation,
    first: Sequence[SampleDelta] | None,
) -> AsyncIterator[str]:
    writers = writers_of(asked)

    def written(part: SampleDelta) -> str | None:
        made = writers[part.number].write(part, generation)
        if made["text"] or made["logprobs"] or made.get("token_ids") or made["finish_reason"]:
            return serving.event(completion(asked, [made]))
        return None

    size = max(map(len, asked.prompts)) << 6 if asked.whole else 0
    async for parts in serving.parts_from(generation, first):
        if isinstance(parts, RequestError):
            yield serving.event(error_bodies.openai(400, clipped(str(parts)), None, None))
            return
        if not parts:
            yield ": waiting\n\n"
        for part in parts:
            if (event := await service.beside(size, written, part)) is not None:
                yield event
    if asked.usage:
        drawn = usage(generation.prompt_tokens, sum(one.tokens for one in writers))
        end = {**completion(asked, []), "usage": drawn, **_metrics(asked, generation)}
        yield serving.event(end)
    yield "data: [DONE]\n\n"


# ---- models ----


async def models(service: Service, request: Request) -> dict[str, Any]:
    """Base models, and the checkpoints saved for sampling, in a form that both OpenAI's and
    Anthropic's clients read."""

    def saved() -> list[dict[str, Any]]:
        rows = [row for run in service.state.runs() for row in service.state.checkpoints(run.id)]
        return [
            _model(row.path, row.meta.created)
            for row in rows
            if row.meta.kind == "sampler_weights" and not service.store.has_ended(row.meta)
        ]

    found = [_model(name, service.started) for name in service.bases]
    found += await service.disk(saved)
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"], "has_more": False}
    return {"object": "list", "data": found, **ends}


async def model(service: Service, request: Request) -> dict[str, Any]:
    name = request.path_params["model"]
    await serving.find_target(service, {"model": name})
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


_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/chat/completions", chat_completions),
    ("GET", "/models", models),
    ("GET", "/models/{model:path}", model),
)
ROUTES = (("POST", "/completions", completions), *_ROUTES)
FIREWORKS = (("POST", "/completions", fireworks_completions), *_ROUTES)
