"""Anthropic's messages API: the same conversations in another form. ROUTES is the table.

https://docs.anthropic.com/en/api/messages. System texts, messages, tools and results become the
messages that chat templates take. If a conversation ends with the assistant's own words, the answer
continues them.
"""

import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.chat.images import ImageText, image_part, image_text
from tinsmith.chat.tools import Piece, Thought, ToolCall
from tinsmith.engine.decoding import SampleDelta
from tinsmith.engine.errors import RequestError, clipped
from tinsmith.server.http import error_bodies
from tinsmith.server.inference import conversations, serving
from tinsmith.server.inference.conversations import ChatPrompt, Received
from tinsmith.server.inference.serving import Choice, Drawing, Generation, Target, Wrong
from tinsmith.server.routes.training import Handler
from tinsmith.server.service.service import Service
from tinsmith.server.wire import parse
from tinsmith.server.wire.images import PlacedImage

# Prefixes are always cached, so cache_control changes nothing.
PROMPT = {
    "model", "messages", "system", "tools", "tool_choice", "chat_template_kwargs", "cache_control",
}  # fmt: skip
SETTINGS = PROMPT | {
    "max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k", "seed", "metadata",
}  # fmt: skip
NEUTRAL: dict[str, Sequence[Any]] = {
    "thinking": ({"type": "disabled"},),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "mcp_servers": ([],),
    "container": (),
    "context_management": ({"edits": []},),
    "output_config": (),
    "output_format": (),
}
TOOL = {"name", "description", "input_schema", "type", "cache_control"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}


@dataclass
class MessageRequest:
    """A checked request for a message."""

    target: Target
    prompt: list[int]
    drawing: Drawing
    tools: list[dict[str, Any]]
    one_call: bool
    stream: bool
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")

    @property
    def choice(self) -> Choice:
        """A new answer."""
        drawing = self.drawing
        answer = self.target.chat.answer(self.prompt, drawing.stops, drawing.ends, self.tools)
        return Choice(answer, drawing.ends, one_call=self.one_call)


# ---- the request ----


async def messages(service: Service, request: Request) -> Response | dict[str, Any]:
    with service.arrivals.begin() as arrival:
        asked, wanted = await conversations.prepared(
            service, request, arrival, _asked, SETTINGS, NEUTRAL
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


async def count_tokens(service: Service, request: Request) -> dict[str, Any]:
    with service.arrivals.begin() as arrival:
        received = await conversations.receive(service, request, arrival)
        serving.check_fields(received.body, PROMPT, NEUTRAL)
        target = await serving.find_target(service, received.body)
        tools = _tools(received.body)
        prompt = await conversations.read(service, received, _prompt, target, tools)
        return {"input_tokens": len(prompt.ids)}


def _asked(received: Received, target: Target) -> tuple[MessageRequest, Sequence[PlacedImage]]:
    body = received.body
    tools = _tools(body)
    prompt = _prompt(received, target, tools)
    asked = MessageRequest(
        target=target,
        prompt=prompt.ids,
        drawing=Drawing(
            max_tokens=parse.need(body, "max_tokens", int),
            temperature=serving.between(body, "temperature", float, 0.0, 2.0, 1.0),
            top_p=parse.maybe(body, "top_p", float, 1.0),
            top_k=parse.maybe(body, "top_k", int, -1),
            seed=parse.optional(body, "seed", int),
            stops=serving.stops_of(body, "stop_sequences"),
            ends=target.chat.ends(target.model.eos_ids),
        ),
        tools=tools,
        one_call=_is_one_call(body),
        stream=parse.maybe(body, "stream", bool, False),
    )
    return asked, prompt.images


def _prompt(received: Received, target: Target, tools: Sequence[Mapping[str, Any]]) -> ChatPrompt:
    body = received.body
    given = parse.need(body, "messages", list)
    if not given:
        raise Wrong("messages is empty: it needs at least one")
    found: list[dict[str, Any]] = []
    if system := _texts(body.get("system"), "system"):
        found.append({"role": "system", "content": system})
    names: dict[str, str] = {}
    for number, item in enumerate(given):
        found += _messages(item, f"messages[{number}]", names)
    last = found[-1]
    prefix = ""
    if last["role"] == "assistant":
        if last.get("tool_calls"):
            raise Wrong("the last message calls a tool: the tool's result has to follow")
        begun = found.pop()["content"]
        prefix = begun if isinstance(begun, str) else "".join(part["text"] for part in begun)
        if not found:
            raise Wrong("messages has the assistant's words alone: a user's must come before them")
    return conversations.chat_prompt(received, target, found, tools, prefix)


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tools in the form that chat templates take."""
    choice = parse.maybe(body, "tool_choice", dict, {"type": "auto"})
    if choice.get("type") not in ("auto", "none"):
        raise Wrong(
            f'tool_choice can have the type "auto" or "none", {parse.short(choice.get("type"))} '
            "came: the model alone decides what it calls"
        )
    serving.check_fields(choice, {"type", "disable_parallel_tool_use"}, {}, "tool_choice.")
    found = []
    for number, tool in enumerate(parse.maybe(body, "tools", list, [])):
        where = f"tools[{number}]"
        if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
            raise Wrong(f"{where} is no tool of the client's own; this server has no others")
        serving.check_fields(tool, TOOL, {"strict": (False,)}, f"{where}.")
        function = {
            "name": parse.need(tool, "name", str, where),
            "description": parse.maybe(tool, "description", str, ""),
            "parameters": parse.need(tool, "input_schema", dict, where),
        }
        found.append({"type": "function", "function": function})
    return [] if choice["type"] == "none" else found


def _is_one_call(body: Mapping[str, Any]) -> bool:
    choice = parse.maybe(body, "tool_choice", dict, {})
    return parse.maybe(choice, "disable_parallel_tool_use", bool, False)


Content = str | list[dict[str, Any]]


def _texts(content: Any, where: str) -> Content:
    """A text as it is, or text blocks as the parts that chat templates take."""
    return _content(content, where, ("text",))


def _content(content: Any, where: str, kinds: Sequence[str]) -> Content:
    if content is None or isinstance(content, str):
        return content or ""
    return _parts(_blocks(content, where, kinds), where)


def _parts(blocks: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """The texts and images of blocks as the parts that chat templates take."""
    found = []
    for row, block in enumerate(blocks):
        if block["type"] == "text":
            found.append({"type": "text", "text": block["text"]})
        elif block["type"] == "image":
            found.append(image_part(_image(block, f"{where}[{row}]")))
    return found


def _image(block: Mapping[str, Any], where: str) -> ImageText:
    source = parse.need(block, "source", dict, where)
    if (kind := source.get("type")) != "base64":
        raise Wrong(
            f"{where} has a source of type {parse.short(kind)}, which is not opened here: send the "
            "image's bytes in one of type base64"
        )
    serving.check_fields(source, {"type", "media_type", "data"}, {}, f"{where}.source.")
    media = parse.need(source, "media_type", str, where)
    return image_text(media, parse.need(source, "data", str, where), where)


BLOCK = {
    "text": {"text"},
    "image": {"source"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id", "content", "is_error"},
}


def _blocks(content: Any, where: str, kinds: Sequence[str]) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        raise Wrong(f"{where} must be a text or a list of blocks")
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in kinds:
            raise Wrong(
                f"{where} has a block of type {parse.short(kind)}; this server reads "
                f"{', '.join(kinds)} there"
            )
        known = BLOCK[kind] | {"type", "cache_control"}
        serving.check_fields(block, known, {"citations": ([],)}, f"{where}.")
        if kind == "text":
            parse.need(block, "text", str, where)
    return content


def _messages(item: Any, where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """One message as chat templates take it: each tool's result is a message of its own."""
    role = item.get("role") if isinstance(item, dict) else None
    if role not in ("user", "assistant"):
        raise Wrong(f"{where}.role must be user or assistant, {parse.short(role)} came")
    serving.check_fields(item, {"role", "content"}, {}, f"{where}.")
    content, where_in = item.get("content"), f"{where}.content"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    kinds = ("text", "tool_use") if role == "assistant" else ("text", "image", "tool_result")
    blocks = _blocks(content, where_in, kinds)
    said = {"role": role, "content": _parts(blocks, where_in) or ""}
    if role == "assistant":
        calls = [_past_call(b, where, names) for b in blocks if b["type"] == "tool_use"]
        return [{**said, **({"tool_calls": calls} if calls else {})}]
    found = [
        _result(block, where, f"{where_in}[{row}].content", names)
        for row, block in enumerate(blocks)
        if block["type"] == "tool_result"
    ]
    return found + ([said] if said["content"] or not found else [])


def _past_call(block: Mapping[str, Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    name = parse.need(block, "name", str, where)
    key = parse.need(block, "id", str, where)
    names[key] = name
    function = {"name": name, "arguments": parse.need(block, "input", dict, where)}
    return {"id": key, "type": "function", "function": function}


def _result(
    block: Mapping[str, Any], where: str, inside: str, names: dict[str, str]
) -> dict[str, Any]:
    key = parse.need(block, "tool_use_id", str, where)
    content = _content(block.get("content"), inside, ("text", "image"))
    if parse.maybe(block, "is_error", bool, False):
        content = _as_error(content)
    named = {"name": names[key]} if key in names else {}
    return {"role": "tool", "tool_call_id": key, "content": content, **named}


def _as_error(content: Content) -> Content:
    """A tool's result that begins with a word that says what it is."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = parts[:1] if parts and parts[0]["type"] == "text" else []
    first = texts[0]["text"] if texts else ""
    return [{"type": "text", "text": f"Error: {first}"}, *parts[len(texts) :]]


# ---- the reply ----


def _envelope(asked: MessageRequest, generation: Generation) -> dict[str, Any]:
    return {
        "id": asked.id,
        "type": "message",
        "role": "assistant",
        "model": asked.target.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": generation.prompt_tokens, "output_tokens": 0},
    }


def _end(choice: Choice) -> dict[str, Any]:
    if choice.stopped is not None and choice.ended == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stopped}
    return {"stop_reason": STOP_REASONS[choice.ended or "stop"], "stop_sequence": None}


def _said(pieces: Sequence[Piece]) -> list[str | ToolCall]:
    """Without thinking: its blocks would need a signature."""
    return [piece for piece in pieces if not isinstance(piece, Thought)]


def _block(piece: str | ToolCall) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    given = json.loads(piece.arguments)
    return {"type": "tool_use", "id": _call_id(), "name": piece.name, "input": given}


def _call_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


def _reply(
    asked: MessageRequest, generation: Generation, parts: Sequence[SampleDelta]
) -> dict[str, Any]:
    choice = asked.choice
    content = [_block(piece) for piece in _said(choice.add(parts[0]))]
    found = {**_envelope(asked, generation), "content": content, **_end(choice)}
    found["usage"]["output_tokens"] = choice.tokens
    return found


async def _events(
    asked: MessageRequest, generation: Generation, first: Sequence[SampleDelta] | None
) -> AsyncIterator[str]:
    """The stream's blocks, one after the other: a text in deltas, a call at once."""
    choice, blocks, is_open = asked.choice, 0, False
    begun = {"type": "message_start", "message": _envelope(asked, generation)}
    yield serving.event(begun, "message_start")
    async for parts in serving.parts_from(generation, first):
        if isinstance(parts, RequestError):
            error = error_bodies.anthropic(400, clipped(str(parts)), None, None)
            yield serving.event(error, "error")
            return
        if not parts:
            yield serving.event({"type": "ping"}, "ping")
        for piece in [piece for part in parts for piece in _said(choice.add(part))]:
            if is_open and not isinstance(piece, str):
                yield _stop(blocks)
                blocks, is_open = blocks + 1, False
            if isinstance(piece, str):
                if not is_open:
                    yield _start(blocks, {"type": "text", "text": ""})
                    is_open = True
                yield _delta(blocks, {"type": "text_delta", "text": piece})
                continue
            yield _start(blocks, {**_block(piece), "input": {}})
            yield _delta(blocks, {"type": "input_json_delta", "partial_json": piece.arguments})
            yield _stop(blocks)
            blocks += 1
        if asked.one_call and choice.ended is not None:
            break
    if is_open:
        yield _stop(blocks)
    total = {"output_tokens": choice.tokens}
    yield serving.event(
        {"type": "message_delta", "delta": _end(choice), "usage": total}, "message_delta"
    )
    yield serving.event({"type": "message_stop"}, "message_stop")


def _start(index: int, block: dict[str, Any]) -> str:
    data = {"type": "content_block_start", "index": index, "content_block": block}
    return serving.event(data, "content_block_start")


def _delta(index: int, delta: dict[str, Any]) -> str:
    data = {"type": "content_block_delta", "index": index, "delta": delta}
    return serving.event(data, "content_block_delta")


def _stop(index: int) -> str:
    data = {"type": "content_block_stop", "index": index}
    return serving.event(data, "content_block_stop")


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/messages", messages),
    ("POST", "/messages/count_tokens", count_tokens),
)
