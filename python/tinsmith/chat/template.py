"""A model's own chat template: messages to the prompt's text, as transformers renders it.

The template is Jinja in the model's folder. It runs in Jinja's sandbox for immutable values, with
transformers' functions and settings, so that both make the same text of the same messages
(Transformers, "Chat templates"). A template comes from elsewhere with a model, so its errors become
sentences for the user, never a failure of the server.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.formats import tokenizer
from tinsmith.formats.tokenizer import SETTINGS_FILE, SPECIAL, TEMPLATE_FILE, TEMPLATES_FOLDER
from tinsmith.system.install_hints import pip_install

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MARK = "tinsmith-mark"  # a text that is easy to find in a template's output
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of thinking, the usual one first
BEHIND_MAX = 256  # characters after an answer that are compared
OWN = ("messages", "tools", "add_generation_prompt")  # variables that settings can't replace

Message = Mapping[str, Any]


class ChatTemplate:
    """See the file's header. `source` is its text, `where` its file."""

    def __init__(self, source: str, where: Path, tokens: Mapping[str, str] | None = None):
        self.source = source
        self._tokens = dict(tokens or {})
        self._takes_parts: dict[str, bool] = {}  # by role
        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # Jinja's own errors, and those of constant expressions
            raise ValueError(f"{where}: the chat template can't be read: {error}") from None

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that settings may have: the variables that the template reads, except those
        that it always gets."""
        from jinja2.meta import find_undeclared_variables

        found = find_undeclared_variables(_environment().parse(self.source))
        return frozenset(found - {*OWN, *SPECIAL})

    @property
    def takes_tools(self) -> bool:
        """Whether the template can write tools."""
        return "tools" in self.source

    @property
    def takes_developer(self) -> bool:
        """Whether the template knows the role `developer`; others know `system`."""
        return "developer" in self.source

    @cached_property
    def before_answer(self) -> str:
        """The text that begins an answer; "" if the template takes no plain chat."""
        asked = _probe("user", "Hello")
        with contextlib.suppress(ValueError):
            said = self.render(asked)
            return said[len(alike(said, self.render(asked, answer=False))) :]
        return ""

    @cached_property
    def lead(self) -> str:
        """The space that some templates write between the prompt and an answer. It is removed from
        a drawn answer, so that the next prompt has it only once."""
        try:
            prompt = self.render(_probe("user", "Hello"))
            said = self.render(_probe("assistant", MARK), answer=False)
        except ValueError:
            return ""
        return " " if said.startswith(f"{prompt} {MARK}") else ""

    @cached_property
    def behind_answer(self) -> tuple[str, str]:
        """The text after an answer that is the last message, and after one that a user's message
        follows; "" if unknown."""
        for content in (MARK, [{"type": "text", "text": MARK}]):
            said = _probe("assistant", content)
            found = self._behind(said), self._behind([*said, *_probe("user", "Hello")])
            if any(found):
                return found
        return "", ""

    def _behind(self, messages: Sequence[Message]) -> str:
        with contextlib.suppress(ValueError):
            before, _, behind = self.render(messages, answer=False).rpartition(MARK)
            return behind[:BEHIND_MAX] if before else ""
        return ""

    def takes_parts(self, role: str) -> bool:
        """Whether the template loops over the parts of a message's content."""
        if role not in self._takes_parts:
            parts = [{"type": "text", "text": MARK + end} for end in "12"]
            try:
                said = self.render(_probe(role, parts), answer=False)
            except ValueError:  # it needs a text or another order: then as for the user
                self._takes_parts[role] = role != "user" and self.takes_parts("user")
            else:  # the list itself, in Python or JSON syntax, does not count
                whole = f"{MARK}1" in said and f"{MARK}2" in said
                self._takes_parts[role] = whole and not re.search(rf"['\"]{MARK}1", said)
        return self._takes_parts[role]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        answer: bool = True,
    ) -> str:
        """The messages' text; with `answer`, up to the beginning of the assistant's next message.
        `settings` are the template's own variables, such as Qwen3's enable_thinking. ValueError
        with the template's sentence if it refuses the messages."""
        if wrong := sorted(set(settings or {}) & {*OWN, *self._tokens}):
            raise ValueError(f"the chat template's {wrong[0]} is no setting of a request")
        named = {**self._tokens, "documents": None, **(settings or {})}
        try:
            return self._template.render(
                messages=list(map(_plain, messages)),
                tools=tools,
                add_generation_prompt=answer,
                **named,
            )
        except Exception as error:  # the template's expressions may raise anything
            raise ValueError(f"the model's chat template refuses this: {error}") from None


def alike(text: str, other: str) -> str:
    """The common beginning of two texts."""
    pairs = zip(text, other, strict=False)
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _plain(message: Message) -> dict[str, Any]:
    """A message without empty keys. Its thinking gets both names that templates read: gpt-oss's
    template calls it `thinking`."""
    found = {key: value for key, value in message.items() if value is not None}
    thoughts = next((found[key] for key in REASONING if key in found), None)
    if thoughts is None:
        return found
    return {"thinking": thoughts, **found, "reasoning_content": thoughts}


def _probe(role: str, content: Any) -> list[dict[str, Any]]:
    """A conversation that ends with a role's message, or begins with it if it must."""
    asked = {"role": "user", "content": "Hello"}
    if role in ("user", "system", "developer"):
        return [{"role": role, "content": content}, *([] if role == "user" else [asked])]
    if role == "assistant":
        return [asked, {"role": role, "content": content}]
    function = {"name": "look", "arguments": {}}
    call = {"id": "000000000", "type": "function", "function": function}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": role, "content": content, "name": "look", "tool_call_id": "000000000"}
    return [asked, called, result]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {error}") from None


@cache
def load_template(folder: Path, *, tools: bool = False) -> ChatTemplate:
    """The chat template of a model's folder; the one for tools if it exists and is wanted.
    ValueError if there is none."""
    settings = tokenizer.settings(folder)
    found = settings.get("chat_template")
    where = folder / SETTINGS_FILE
    named: dict[Any, Any] = {"default": found} if isinstance(found, str) else {}
    if isinstance(found, dict):
        named = found
    elif isinstance(found, list):
        items = [item for item in found if isinstance(item, dict)]
        named = {str(item.get("name")): item.get("template") for item in items}
    files = {file.stem: file for file in sorted((folder / TEMPLATES_FOLDER).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).is_file():
        files = {"default": folder / TEMPLATE_FILE} | files
    if files:  # they replace everything in the settings
        named = {name: _text(file) for name, file in files.items()}
    name = "tool_use" if tools and "tool_use" in named else "default"
    if not isinstance(named.get(name), str):
        raise ValueError(
            f"the model in {folder.name} has no chat template: neither {TEMPLATE_FILE} nor "
            f"chat_template in {SETTINGS_FILE}; it can complete a text, which is the prompt as it "
            "is"
        )
    return ChatTemplate(named[name], files.get(name, where), tokenizer.special_texts(settings))


@cache
def _environment() -> "ImmutableSandboxedEnvironment":
    """Jinja's sandbox with transformers' additions."""
    try:
        import jinja2
    except ImportError:
        raise RuntimeError(f"chat templates need jinja2: {pip_install('server')}") from None
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """{% generation %} marks the assistant's text; here it outputs its content unchanged."""

        tags = frozenset({"generation"})

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes <, > and & for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
