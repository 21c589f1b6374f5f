"""Conversations with one model: messages to the prompt's tokens, and an answer's tokens to its text
and tool calls.

    chat = Chat(folder)
    prompt = chat.prompt([{"role": "user", "content": "Hello"}])
    answer = chat.answer()
    for token in ...:                      # each as it is drawn, without the one that ends it
        for piece in answer.add(token):    # text, a ToolCall, or a Thought
            ...
    rest = answer.end()

It needs the model's folder only, neither its weights nor a server.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinsmith.chat.template import Message, load_template
from tinsmith.chat.text import Stops, Text, load_tokenizer
from tinsmith.chat.tools import ChannelReader, Format, Piece, ToolReader, check_tools, format_of

Tools = Sequence[Mapping[str, Any]]


class Answer:
    """One answer, as its tokens come. `stopped` is the stop string that has ended it, `calls` the
    number of its tool calls."""

    def __init__(self, text: Text, stops: Sequence[str], reader: ToolReader | ChannelReader | None):
        self._text = text
        self._stops = Stops(stops)
        self._reader = reader

    @property
    def stopped(self) -> str | None:
        """The stop string that has come."""
        return self._stops.found

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return 0 if self._reader is None else self._reader.calls

    def add(self, token: int) -> list[Piece]:
        """The pieces that are certain with this token; neighbouring texts belong together."""
        return self._read(self._stops.add(self._text.add(token)))

    def end(self) -> list[Piece]:
        """What is left after the last token."""
        pieces = self._read(self._stops.add(self._text.end()) + self._stops.end())
        return pieces if self._reader is None else pieces + self._reader.end()

    def _read(self, text: str) -> list[Piece]:
        if self._reader is not None:
            return self._reader.add(text)
        return [text] if text else []


class Chat:
    """See the file's header. ValueError and RuntimeError say what is missing in the folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.tokenizer = load_tokenizer(folder)

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        settings: Mapping[str, Any] | None = None,
        *,
        prefix: str = "",
    ) -> list[int]:
        """The prompt's tokens, after which the assistant's answer comes; `prefix` is how the answer
        begins. The rest is `text`'s."""
        return self.encode(self.text(messages, tools, settings) + prefix)

    def text(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        settings: Mapping[str, Any] | None = None,
        *,
        answer: bool = True,
    ) -> str:
        """The conversation's text, with `answer` up to where the assistant's next one begins.
        Messages are those of OpenAI and of chat templates: role and content, and tool_calls whose
        arguments are objects. ValueError where the template refuses them."""
        template = load_template(self._folder, tools=bool(tools))
        if tools:
            check_tools(tools)
            if not template.takes_tools or format_of(template.source) is None:
                raise ValueError(
                    "tools can't be used with this model: its chat template "
                    + (
                        "writes calls in a way that is not known here"
                        if template.takes_tools
                        else "does not write them"
                    )
                )
        if not template.takes_developer:
            messages = [
                {**item, "role": "system"} if item.get("role") == "developer" else item
                for item in messages
            ]
        return template.render(messages, list(tools) or None, settings, answer=answer)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """A text's tokens; `special`: with those that the tokenizer adds, such as the first."""
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def answer(self, tools: Tools = (), stops: Sequence[str] = ()) -> Answer:
        """A new answer. Its calls are looked for where tools are given."""
        form = self._format() if not tools else format_of(self._source(tools=True))
        if form is None or not (tools or form.channels):
            return self.continuation(stops)
        ids = (self.tokenizer.token_to_id(token) for token in form.tokens)
        shown = frozenset(token for token in ids if token is not None)
        text, schemas = Text(self.tokenizer, shown), check_tools(tools)
        if form.channels:
            return Answer(text, stops, ChannelReader(form, schemas, wanted=bool(tools)))
        return Answer(text, stops, ToolReader(form, schemas))

    def continuation(self, stops: Sequence[str] = ()) -> Answer:
        """What continues a text, whatever it is."""
        return Answer(Text(self.tokenizer, shown=()), stops, None)

    def _source(self, *, tools: bool) -> str:
        return load_template(self._folder, tools=tools).source

    def _format(self) -> Format | None:
        """How the template writes answers, if there is a template."""
        try:
            return format_of(self._source(tools=False))
        except (ValueError, RuntimeError):
            return None
