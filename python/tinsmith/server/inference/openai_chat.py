"""OpenAI's chat completions: conversations with a base model or a checkpoint, tools included.

https://platform.openai.com/docs/api-reference/chat. Messages become the model's prompt through its
own chat template. SETTINGS, NEUTRAL and REMARKS are the tables of a request's settings; any other
setting is refused by name.
"""

import json
import secrets
import string
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.chat.images import ROLES as ROLES_WITH_IMAGES
from tinsmith.chat.images import image_of_url, image_part
from tinsmith.chat.text import token_bytes
from tinsmith.chat.tools import Piece, Thought, ToolCall
from tinsmith.engine.decoding import SampleDelta
from tinsmith.engine.errors import RequestError, clipped
from tinsmith.server.http import error_bodies
from tinsmith.server.inference import conversations, serving
from tinsmith.server.inference.conversations import Received
from tinsmith.server.inference.serving import Choice, Drawing, Generation, Target, Wrong
from tinsmith.server.service.service import Service
from tinsmith.server.wire import parse
from tinsmith.server.wire.images import PlacedImage

CHOICES_MAX = 128
TOP_LOGPROBS_MAX = 20
TEMPERATURE_MAX = 2.0
LEAST = -9999.0  # OpenAI's log-probability of a practically impossible token
ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # Mistral's templates require it

SETTINGS = {
    "model", "messages", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "top_k", "seed", "stop", "logprobs", "top_logprobs", "tools",
    "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort",
    "return_token_ids",
}  # fmt: skip
# Settings that are not supported, and the values with which they change nothing.
NEUTRAL: dict[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "add_generation_prompt": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "functions": (),
    "function_call": (),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
}
# Fields that describe the request; they change no answer.
REMARKS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
ROLES = ("system", "developer", "user", "assistant", "tool")
# An image has the size that the model's processor gives it, whatever is said of detail.
DETAIL: dict[str, Sequence[Any]] = {"detail": ("auto", "high")}
MESSAGE = {
    "role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content",
}  # fmt: skip


@dataclass
class ChatRequest:
    """A checked chat request."""

    target: Target
    prompt: list[int]
    drawing: Drawing
    tools: list[dict[str, Any]]
    one_call: bool
    logprobs: bool
    ids: bool  # vLLM's return_token_ids
    stream: bool
    usage: bool  # whether the stream ends with the usage
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))


# ---- the request ----


async def chat_completions(service: Service, request: Request) -> Response | dict[str, Any]:
    with service.arrivals.begin() as arrival:
        asked, wanted = await conversations.prepared(
            service, request, arrival, _asked, SETTINGS | REMARKS, NEUTRAL
        )
        return await serving.respond(
            service,
            request,
            asked.target,
            [wanted],
            streams=asked.stream,
            events=partial(_events, asked),
            reply=partial(_reply, asked),
            arrival=arrival,
        )


def _asked(received: Received, target: Target) -> tuple[ChatRequest, Sequence[PlacedImage]]:
    body = received.body
    tools = _tools(body)
    messages = template_messages(parse.need(body, "messages", list))
    stream = parse.maybe(body, "stream", bool, False)
    logprobs = parse.maybe(body, "logprobs", bool, False)
    if parse.maybe(body, "top_logprobs", int, 0) and not logprobs:
        raise Wrong("top_logprobs needs logprobs to be true", param="top_logprobs")
    prompt = conversations.chat_prompt(received, target, messages, tools)
    asked = ChatRequest(
        target=target,
        prompt=prompt.ids,
        drawing=drawing_of(
            body,
            ends=target.chat.ends(target.model.eos_ids),
            limit=limit_of(body),
            top_logprobs=serving.between(body, "top_logprobs", int, 0, TOP_LOGPROBS_MAX, 0),
        ),
        tools=tools,
        one_call=not parse.maybe(body, "parallel_tool_calls", bool, True),
        logprobs=logprobs,
        ids=parse.maybe(body, "return_token_ids", bool, False),
        stream=stream,
        usage=wants_usage(body, stream),
    )
    return asked, prompt.images


def drawing_of(
    body: Mapping[str, Any], *, ends: tuple[int, ...], limit: int | None, top_logprobs: int
) -> Drawing:
    """How to draw, for chats and completions."""
    return Drawing(
        count=serving.between(body, "n", int, 1, CHOICES_MAX, 1),
        max_tokens=limit,
        temperature=serving.between(body, "temperature", float, 0.0, TEMPERATURE_MAX, 1.0),
        top_p=parse.maybe(body, "top_p", float, 1.0),
        top_k=parse.maybe(body, "top_k", int, -1),
        seed=parse.optional(body, "seed", int),
        stops=serving.stops_of(body, "stop"),
        ends=ends,
        top_logprobs=top_logprobs,
    )


def wants_usage(body: Mapping[str, Any], stream: bool) -> bool:
    """Whether a stream ends with its usage."""
    options = parse.optional(body, "stream_options", dict)
    if options is not None and not stream:
        raise Wrong("stream_options needs stream to be true", param="stream_options")
    serving.check_fields(
        options or {}, {"include_usage"}, {"include_obfuscation": (False,)}, "stream_options."
    )
    return parse.maybe(options or {}, "include_usage", bool, False)


def limit_of(body: Mapping[str, Any]) -> int | None:
    """The maximum number of tokens to draw, if the request has one."""
    found = [parse.optional(body, key, int) for key in ("max_completion_tokens", "max_tokens")]
    limits = {limit for limit in found if limit is not None}
    if len(limits) > 1:
        raise Wrong("max_tokens and max_completion_tokens differ: send one", param="max_tokens")
    return next(iter(limits), None)


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = parse.maybe(body, "tools", list, [])
    choice = body.get("tool_choice")
    if choice == "none":
        return []
    if choice not in (None, "auto"):
        raise Wrong(
            f'tool_choice can be "auto" or "none", {parse.short(choice)} came: the model alone '
            "decides what it calls",
            param="tool_choice",
        )
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("strict"):
            raise Wrong(
                f"tools[{number}].function.strict is true: calls are not held to their schema here",
                param="tools",
            )
    return tools


def template_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: contents are texts or parts, arguments are objects."""
    if not messages:
        raise Wrong("messages is empty: it needs at least one", param="messages")
    names: dict[str, str] = {}  # of the calls, by their ids
    return [_message(item, f"messages[{number}]", names) for number, item in enumerate(messages)]


def _message(item: Any, where: str, names: dict[str, str]) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise Wrong(f"{where} must be an object, {parse.short(item)} came", param=where)
    role = item.get("role")
    if role not in ROLES:
        raise Wrong(
            f"{where}.role must be one of {', '.join(ROLES)}, {parse.short(role)} came", param=where
        )
    serving.check_fields(item, MESSAGE, {"annotations": ([],)}, f"{where}.")
    found = {"role": role, "content": _content(item, where)}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if (value := parse.optional(item, key, str)) is not None:
            found[key] = value
    if calls := parse.maybe(item, "tool_calls", list, []):
        found["tool_calls"] = [_past_call(call, f"{where}.tool_calls") for call in calls]
        names |= {call["id"]: call["function"]["name"] for call in found["tool_calls"]}
    if role == "tool" and found.get("tool_call_id") in names:
        found.setdefault("name", names[found["tool_call_id"]])
    return found


def _content(item: Mapping[str, Any], where: str) -> str | list[dict[str, Any]]:
    content = item.get("content")
    if content is None and item["role"] == "assistant":
        return parse.maybe(item, "refusal", str, "")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Wrong(f"{where}.content must be a text or text parts", param=where)
    return [_part(part, item["role"], where, row) for row, part in enumerate(content)]


def _part(part: Any, role: str, message: str, row: int) -> dict[str, Any]:
    kind, where = part.get("type") if isinstance(part, dict) else None, f"{message}.content[{row}]"
    if kind in ("text", "refusal"):
        return {"type": "text", "text": parse.need(part, kind, str, f"a part of {message}")}
    if kind != "image_url":
        raise Wrong(
            f"{message}.content has a part of type {parse.short(kind)}; this server reads text and "
            "image_url",
            param=message,
        )
    if role not in ROLES_WITH_IMAGES:
        raise Wrong(
            f"{where} is an image in a message of {role}; images can be in those of "
            f"{' and '.join(ROLES_WITH_IMAGES)}",
            param=message,
        )
    serving.check_fields(part, {"type", "image_url"}, {}, f"{where}.")
    given = part.get("image_url")
    if isinstance(given, dict):
        serving.check_fields(given, {"url"}, DETAIL, f"{where}.image_url.")
        given = given.get("url")
    if not isinstance(given, str):
        raise Wrong(f"{where}.image_url must have a url, which is a text", param=message)
    return image_part(image_of_url(given, where))


def _past_call(call: Any, where: str) -> dict[str, Any]:
    """A call of an earlier answer, with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise Wrong(f"{where} has a call that is no function's", param=where)
    name, text = parse.need(function, "name", str, where), function.get("arguments") or "{}"
    try:
        arguments = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise Wrong(f"{where}: the arguments of {name!r:.100} are no JSON object", param=where)
    made = {"name": name, "arguments": arguments}
    return {"id": parse.maybe(call, "id", str, ""), "type": "function", "function": made}


# ---- the reply ----


def call_id() -> str:
    """A new call's id."""
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))


def usage(prompt: int, completion: int) -> dict[str, int]:
    """OpenAI's counts of tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _choices(asked: ChatRequest) -> list[Choice]:
    chat, drawing = asked.target.chat, asked.drawing

    def make() -> Choice:
        answer = chat.answer(asked.prompt, drawing.stops, drawing.ends, asked.tools)
        return Choice(answer, drawing.ends, one_call=asked.one_call)

    return [make() for _ in range(drawing.count)]


FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls", None: None}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(), "type": "function", "function": function}


def _logprobs(asked: ChatRequest, choice: Choice, part: SampleDelta) -> dict[str, Any] | None:
    """The log-probabilities of a part's tokens; the end token is only in the list of ids."""
    if not asked.logprobs:
        return None
    tokenizer = asked.target.chat.tokenizer

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_bytes(tokenizer, token)
        shown = text.decode(errors="replace")
        return {"token": shown, "logprob": max(logprob, LEAST), "bytes": list(text)}

    rows = []
    for row, token in enumerate(choice.drawn if asked.ids else choice.kept):
        top = []
        if part.topk_ids is not None and part.topk_logprobs is not None:
            best = zip(part.topk_ids[row].tolist(), part.topk_logprobs[row].tolist(), strict=True)
            top = [entry(*pair) for pair in best]
        rows.append({**entry(token, float(part.logprobs[row])), "top_logprobs": top})
    return {"content": rows, "refusal": None}


def _reply(
    asked: ChatRequest, generation: Generation, parts: Sequence[SampleDelta]
) -> dict[str, Any]:
    choices = _choices(asked)
    made = []
    for part in parts:
        choice = choices[part.number]
        pieces = choice.add(part)
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
        calls = [_call(piece) for piece in pieces if isinstance(piece, ToolCall)]
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        made.append(
            {
                "index": part.number,
                "message": message,
                "logprobs": _logprobs(asked, choice, part),
                "finish_reason": FINISH[choice.ended],
                "stop_reason": choice.stopped,
                **({"token_ids": choice.drawn} if asked.ids else {}),
            }
        )
    return {
        "id": asked.id,
        "object": "chat.completion",
        "created": asked.created,
        "model": asked.target.name,
        "choices": sorted(made, key=lambda item: item["index"]),
        "usage": usage(generation.prompt_tokens, sum(choice.tokens for choice in choices)),
        **({"prompt_token_ids": asked.prompt} if asked.ids else {}),
    }


async def _events(
    asked: ChatRequest, generation: Generation, first: Sequence[SampleDelta] | None
) -> AsyncIterator[str]:
    """The stream's chunks: each choice's role, its pieces, and why it ended."""
    choices, sent = _choices(asked), dict.fromkeys(range(asked.drawing.count), 0)

    def chunk(number: int, delta: dict[str, Any], **more: Any) -> str:
        one = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        ids = {"prompt_token_ids": asked.prompt} if asked.ids and "role" in delta else {}
        return serving.event({**_chunk(asked, [one]), **ids})

    for number in sent:
        yield chunk(number, {"role": "assistant", "content": ""})
    async for parts in serving.parts_from(generation, first):
        if isinstance(parts, RequestError):
            yield serving.event(error_bodies.openai(400, clipped(str(parts)), None, None))
            return
        if not parts:
            yield ": waiting\n\n"
        for part in parts:
            choice = choices[part.number]
            if choice.ended is not None:  # its one call is complete
                continue
            pieces = choice.add(part)
            about: dict[str, Any] = {"token_ids": choice.drawn} if asked.ids else {}
            if (scored := _logprobs(asked, choice, part)) is not None:
                about["logprobs"] = scored
            for piece in pieces or ([""] if about else []):
                delta, sent[part.number] = _delta(piece, sent[part.number])
                yield chunk(part.number, delta, **about)
                about = {}
            if choice.ended is not None:
                reasons = {"finish_reason": FINISH[choice.ended], "stop_reason": choice.stopped}
                yield chunk(part.number, {}, **reasons)
        if asked.one_call and all(choice.ended is not None for choice in choices):
            break
    if asked.usage:
        drawn = sum(choice.tokens for choice in choices)
        total = usage(generation.prompt_tokens, drawn)
        yield serving.event({**_chunk(asked, []), "usage": total})
    yield "data: [DONE]\n\n"


def _delta(piece: Piece, calls: int) -> tuple[dict[str, Any], int]:
    """A piece as a chunk's delta, and the number of calls so far."""
    if isinstance(piece, str):
        return {"content": piece}, calls
    if isinstance(piece, Thought):
        return {"reasoning_content": piece.text}, calls
    return {"tool_calls": [{"index": calls, **_call(piece)}]}, calls + 1


def _chunk(asked: ChatRequest, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": asked.id,
        "object": "chat.completion.chunk",
        "created": asked.created,
        "model": asked.target.name,
        "choices": choices,
        **({"usage": None} if asked.usage else {}),
    }
