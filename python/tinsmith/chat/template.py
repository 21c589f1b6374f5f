"""A model's own chat template: messages to the prompt's text, as transformers renders it.

The template is Jinja in the model's folder. It runs in Jinja's sandbox for immutable values, with
the functions and settings that transformers gives it, so that both make the same text of the same
messages (Transformers, "Chat templates"). A template comes with a model from elsewhere, so what it
raises is a sentence for whoever asked, never a failure of the server.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.files import tokenizer
from tinsmith.files.extras import pip_install
from tinsmith.files.tokenizer import SETTINGS_FILE, TEMPLATE_FILE

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # each with _token behind it
OWN = ("messages", "tools", "add_generation_prompt")  # what a template's settings can't replace

Message = Mapping[str, Any]


class ChatTemplate:
    """See the file's header. `source` is its text, `where` the file that it is from."""

    def __init__(self, source: str, where: Path, tokens: Mapping[str, str] | None = None):
        self.source = source
        self._tokens = dict(tokens or {})
        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # Jinja's own, and those of constants that it computes
            raise ValueError(f"{where}: the chat template can't be read: {error}") from None

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that a setting can have: what the template reads, but for what it is always
        given."""
        from jinja2.meta import find_undeclared_variables

        found = find_undeclared_variables(_environment().parse(self.source))
        return frozenset(found - {*OWN, *(f"{name}_token" for name in SPECIAL)})

    @property
    def takes_tools(self) -> bool:
        """Whether the template writes tools at all."""
        return "tools" in self.source

    @property
    def takes_developer(self) -> bool:
        """Whether the template knows the role `developer`; others know `system`."""
        return "developer" in self.source

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        answer: bool = True,
    ) -> str:
        """The messages' text, with `answer` up to where the assistant's next one begins. `settings`
        are variables of the template's own, such as Qwen3's enable_thinking. ValueError with what
        the template says where it refuses the messages."""
        if wrong := sorted(set(settings or {}) & {*OWN, *self._tokens}):
            raise ValueError(f"the chat template's {wrong[0]} is no setting of a request")
        named = {**self._tokens, "documents": None, **(settings or {})}
        try:
            return self._template.render(
                messages=list(messages), tools=tools, add_generation_prompt=answer, **named
            )
        except Exception as error:  # whatever the template's expressions raise
            raise ValueError(f"the model's chat template refuses this: {error}") from None


@cache
def load_template(folder: Path, *, tools: bool = False) -> ChatTemplate:
    """The chat template of a model's folder: the one for tools where there is one and they are
    wanted. ValueError where there is none."""
    settings = tokenizer.settings(folder)
    texts = {f"{name}_token": tokenizer.special_text(settings, name) for name in SPECIAL}
    tokens = {name: text for name, text in texts.items() if text is not None}
    file = folder / TEMPLATE_FILE
    if file.is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"), file, tokens)
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("tool_use", named.get("default")) if tools else named.get("default")
    if not isinstance(found, str):
        raise ValueError(
            f"the model in {folder.name} has no chat template: neither {TEMPLATE_FILE} nor "
            f"chat_template in {SETTINGS_FILE}; it can complete a text, which is the prompt as it "
            "is"
        )
    return ChatTemplate(found, folder / SETTINGS_FILE, tokens)


@cache
def _environment() -> "ImmutableSandboxedEnvironment":
    """Jinja's sandbox with what transformers adds to it."""
    try:
        import jinja2
    except ImportError:
        raise RuntimeError(f"chat templates need jinja2: {pip_install('server')}") from None
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what the assistant wrote: its content is the text as it is."""

        tags = frozenset({"generation"})

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
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
    """Jinja's own filter writes <, > and & for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
