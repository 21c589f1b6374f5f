"""Tool calls in an answer's text, in the format of the model's chat template.

FORMATS is the table, one row for each format. A template's content shows which one it uses. Text
comes in pieces. A possible call is held back until it is complete, and then returned as a ToolCall;
if it turns out to be none, it is returned as text. In a format with channels (gpt-oss), the
thinking before the answer is returned as Thoughts.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.chat import values
from tinsmith.chat.text import Stops
from tinsmith.checkpoints.meta import check_text

Schemas = Mapping[str, Mapping[str, Any]]  # each tool's parameter schema, by the tool's name


@dataclass(frozen=True)
class ToolCall:
    """A call that the model makes; `arguments` is a JSON object's text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Thought:
    """Thinking of the model, in a channel of its own."""

    text: str


Piece = str | ToolCall | Thought


@dataclass(frozen=True)
class Format:
    """One format of calls. A template with this format contains `marks`. A call is between `begin`
    and `end`; without an `end` it is the rest of the text. `first`: only an answer's beginning can
    be a call. `parse` raises ValueError if a text is no call. `channels`: answers have marks even
    without calls, and ChannelReader reads them."""

    marks: tuple[str, ...]
    begin: tuple[str, ...]
    end: str | None
    parse: Callable[[str, Schemas], list[ToolCall]]
    first: bool = False
    inner: tuple[str, ...] = ()  # tokens inside a call
    channels: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        """Tokens that may be special but belong to the text."""
        return self.begin + self.inner + ((self.end,) if self.end else ())


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _number(text: str) -> float:
    """Python parses 1e999 as infinity, which JSON can't express."""
    if math.isinf(value := float(text)):
        raise ValueError(f"{text:.20} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_constant, parse_float=_number)


def _json(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("too many lists and objects in each other") from None


def _tool_call(name: str, arguments: dict[str, Any]) -> ToolCall:
    """ValueError if the call contains half a surrogate pair."""
    text = json.dumps(arguments, ensure_ascii=False)
    check_text(name + text, "a call")
    return ToolCall(name, text)


def _call(item: Any) -> ToolCall:
    """A call from its JSON object."""
    name = item.get("name") if isinstance(item, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("a call has no name")
    arguments = item.get("arguments", item.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("a call's arguments are no object")
    return _tool_call(name, arguments)


def _tagged_json(text: str, schemas: Schemas) -> list[ToolCall]:
    """{"name": …, "arguments": {…}}"""
    return [_call(_json(text))]


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def _tagged_xml(text: str, schemas: Schemas) -> list[ToolCall]:
    """<function=name><parameter=key>value</parameter>…</function>; the tool's schema gives each
    value's type (values.py)."""
    found = _FUNCTION.match(text)
    if found is None:
        raise ValueError("a call has no <function=name>, or no end")
    schema = schemas.get(found[1], {})
    arguments = {
        key: values.read(
            text.removeprefix("\n").removesuffix("\n"),
            values.properties(schema, key),
            schema,
            _json,
        )
        for key, text in _PARAMETER.findall(found[2])
    }
    return [_tool_call(found[1], arguments)]


def _array(text: str, schemas: Schemas) -> list[ToolCall]:
    """[{"name": …, "arguments": {…}}, …], or name[ARGS]{…} after each mark."""
    if text.lstrip().startswith("["):
        return [_call(item) for item in _several(_json(text))]
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        name, _, arguments = part.partition("[ARGS]")
        calls.append(_call({"name": name.strip(), "arguments": _json(arguments)}))
    return calls


def _objects(text: str, schemas: Schemas) -> list[ToolCall]:
    """{"name": …, "parameters": {…}}; several are separated by ; or a space."""
    calls, at = [], 0
    text = text.strip()
    while at < len(text):
        try:
            item, at = _DECODER.raw_decode(text, at)
        except RecursionError:
            raise ValueError("too many lists and objects in each other") from None
        calls.append(_call(item))
        while at < len(text) and text[at] in "; \n":
            at += 1
    return _several(calls)


def _several(calls: list[Any]) -> list[Any]:
    """ValueError if there is a mark but no call."""
    if not calls:
        raise ValueError("there is no call")
    return calls


CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
_HEAD = re.compile(
    r"(?:assistant)?\s*(?:to=\S*?\s*)?(?:<\|(?:channel|message|start|constrain)\|>.*)?", re.DOTALL
)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


def _addressed(text: str, schemas: Schemas) -> list[ToolCall]:
    """to=functions.name<|channel|>commentary json<|message|>{…}"""
    head, _, arguments = text.partition(MESSAGE)
    found = _RECIPIENT.search(head)
    if found is None:
        raise ValueError("a call has no to=functions.name")
    return [_call({"name": found[1], "arguments": _json(arguments)})]


# The format is the first row whose marks are all in the template.
FORMATS = (
    Format(("<tool_call>", "<function="), ("<tool_call>",), "</tool_call>", _tagged_xml),
    Format(("<tool_call>",), ("<tool_call>",), "</tool_call>", _tagged_json),
    Format(("[TOOL_CALLS]",), ("[TOOL_CALLS]",), None, _array, inner=("[ARGS]",)),
    Format(
        (CHANNEL, MESSAGE), (CHANNEL,), "<|call|>", _addressed,
        inner=(MESSAGE, START, "<|constrain|>", "<|end|>", "<|return|>"), channels=True,
    ),
    Format(('"parameters"',), ("<|python_tag|>", "{"), None, _objects, first=True),
)  # fmt: skip


def format_of(template: str) -> Format | None:
    """The format of a chat template's calls; None if it is unknown."""
    return next((row for row in FORMATS if all(mark in template for mark in row.marks)), None)


class ToolReader:
    """Reads an answer's text in pieces and takes its calls out, with the spaces around them."""

    def __init__(self, form: Format, schemas: Schemas):
        self._form = form
        self._schemas = schemas
        self._search = Stops(form.begin)
        self._begun: str | None = None  # what the open call began with
        self._inside = ""
        self._space = ""  # held back, because a call may follow
        self._behind_call = False
        self._plain = False  # no more calls can come
        self.calls = 0

    def add(self, text: str) -> list[Piece]:
        """The pieces that are final now."""
        found: list[Piece] = []
        while text:
            step = self._look if self._begun is None else self._go_on
            text = step(text, found)
        return found

    def end(self) -> list[Piece]:
        """The text that was held back, at the end of the answer."""
        found: list[Piece] = []
        if self._begun is not None:
            self._close(found, "")
        else:
            self._show(self._search.end(), found)
        if self._space:
            found.append(self._space)
        self._space = ""
        return found

    def _look(self, text: str, found: list[Piece]) -> str:
        """Text outside calls; returns the rest after a call's beginning."""
        if self._plain:
            found.append(text)
            return ""
        shown = self._search.add(text)
        if self._form.first and (shown + self._space).strip():
            search, self._plain = self._search, True
            found.append(self._space + shown + (search.found or search.end()) + search.rest)
            self._space = ""
            return ""
        self._show(shown, found)
        if self._search.found is None:
            return ""
        self._begun, rest = self._search.found, self._search.rest
        self._search = Stops(self._form.begin)
        if self._form.first and self._begun == "{":
            rest = "{" + rest
        return rest

    def _show(self, text: str, found: list[Piece]) -> None:
        """Outputs text, but holds back trailing space and drops space after a call."""
        text = self._space + text
        if self._behind_call:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._behind_call = False
            found.append(kept)

    def _go_on(self, text: str, found: list[Piece]) -> str:
        """Text inside a call; returns the rest after the call's end."""
        before = len(self._inside)
        self._inside += text
        if self._form.end is None:
            return ""
        at = self._inside.find(self._form.end, max(0, before - len(self._form.end)))
        if at < 0:
            return ""
        rest = self._inside[at + len(self._form.end) :]
        self._inside = self._inside[:at]
        self._close(found, self._form.end)
        return rest

    def _close(self, found: list[Piece], end: str) -> None:
        """Ends a call: it becomes a ToolCall, or text if it is none."""
        begun, inside = self._begun or "", self._inside
        self._begun, self._inside = None, ""
        try:
            calls = self._form.parse(inside, self._schemas)
        except (ValueError, TypeError):
            begun = "" if self._form.first and begun == "{" else begun
            self._show(begun + inside + end, found)
            return
        self._space, self._behind_call = "", True
        self.calls += len(calls)
        found += calls


class ChannelReader:
    """Reads an answer in parts, each a head up to <|message|> and a body: `final` and `commentary`
    are text, `analysis` is a Thought. A part addressed to a function is a call, if calls are
    `wanted`. An answer without such parts is plain text."""

    def __init__(self, form: Format, schemas: Schemas, *, wanted: bool):
        self._form, self._schemas, self._wanted = form, schemas, wanted
        self._head: str | None = ""  # of the current part; None: its body has begun
        self._kind: type[str] | type[Thought] | type[ToolCall] = str
        self._call = ""  # text of the current call
        self._ends = Stops(ENDS)
        self.calls = 0

    def add(self, text: str) -> list[Piece]:
        """The pieces that are final now."""
        found: list[Piece] = []
        while text:
            text = self._read_head(text) if self._head is not None else self._read_body(text, found)
        return found

    def end(self) -> list[Piece]:
        """The text that was held back, at the end of the answer."""
        found: list[Piece] = []
        if self._head is not None:
            self._kind = str
            self._show("" if "<|" in self._head else self._head, found)
        else:
            self._show(self._ends.end(), found)
            self._close("", found)
        return found

    def _begins(self) -> bool:
        """Whether the text so far is, or may become, a head."""
        text = (self._head or "").lstrip()
        marks = (CHANNEL, MESSAGE, START, "to=", "assistant")
        return any(mark.startswith(text) for mark in marks) or bool(_HEAD.fullmatch(text))

    def _read_head(self, text: str) -> str:
        """A head; returns the text after it."""
        self._head = (self._head or "") + text
        if not self._begins():
            text, self._head, self._kind = self._head, None, str
            return text
        head, mark, rest = self._head.partition(MESSAGE)
        if not mark:
            return ""
        addressed = self._wanted and _RECIPIENT.search(head)
        channel = head.partition(CHANNEL)[2].partition("<")[0].split() or [""]
        self._kind = ToolCall if addressed else Thought if channel[0] == "analysis" else str
        self._head, self._call = None, head + MESSAGE
        return rest

    def _read_body(self, text: str, found: list[Piece]) -> str:
        """A body, up to its end mark; returns the text after it."""
        self._show(self._ends.add(text), found)
        if self._ends.found is None:
            return ""
        end, rest = self._ends.found, self._ends.rest
        self._close(end, found)
        self._ends, self._head = Stops(ENDS), ""
        return rest

    def _show(self, text: str, found: list[Piece]) -> None:
        if self._kind is ToolCall:
            self._call += text
        elif text:
            found.append(Thought(text) if self._kind is Thought else text)

    def _close(self, end: str, found: list[Piece]) -> None:
        """Ends a call: it becomes a ToolCall, or text if it is none."""
        if self._kind is not ToolCall:
            return
        self._kind = str
        try:
            calls = self._form.parse(self._call, self._schemas)
        except (ValueError, TypeError):
            found.append(self._call + end)
            return
        self.calls += len(calls)
        found += calls


def check_tools(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """The schemas of tools in the form that templates take, {"type": "function", "function": {…}}.
    ValueError if one has another form."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name or tool.get("type") != "function":
            raise ValueError(
                f'tool {number} must be {{"type": "function", "function": {{"name": …, '
                '"parameters": {…}}}'
            )
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise ValueError(f"tool {number}: parameters must be a JSON schema")
        if name in schemas:
            raise ValueError(f"two tools are called {name!r:.100}")
        schemas[name] = parameters
    return schemas
