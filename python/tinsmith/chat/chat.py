"""Conversations with one model: messages to the prompt's tokens, and an answer's tokens to its text
and tool calls.

    chat = Chat(folder)
    prompt = chat.prompt([{"role": "user", "content": "Hello"}])
    answer = chat.answer(prompt)
    for token in ...:                      # each as it is drawn
        for piece in answer.add(token):    # text, a ToolCall, or a Thought
            ...
    rest = answer.end()

It needs the model's folder only, neither its weights nor a server.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tinsmith.chat.template import ChatTemplate, Message, load_template
from tinsmith.chat.text import Reading, load_tokenizer
from tinsmith.chat.tools import ChannelReader, Format, Piece, ToolReader, check_tools, format_of
from tinsmith.files.meta import check_text

Tools = Sequence[Mapping[str, Any]]


class Answer:
    """One answer, as its tokens come. `stopped` is the stop string that has ended it, `calls` the
    number of its tool calls."""

    def __init__(self, reading: Reading, reader: ToolReader | ChannelReader | None = None):
        self._reading = reading
        self._reader = reader

    @property
    def stopped(self) -> str | None:
        """The stop string that has come."""
        return self._reading.found

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return 0 if self._reader is None else self._reader.calls

    def add(self, token: int) -> list[Piece]:
        """The pieces that are certain with this token; neighbouring texts belong together."""
        return self._read(self._reading.add(token))

    def end(self) -> list[Piece]:
        """What is left after the last token."""
        pieces = self._read(self._reading.end())
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
        tools: Tools | None = None,
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
        tools: Tools | None = None,
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
        made = [_message(template, item, number) for number, item in enumerate(messages)]
        return template.render(made, list(tools or ()) or None, settings, answer=answer)

    def variables(self, tools: Tools | None = None) -> frozenset[str]:
        """The template's own variables, such as Qwen3's enable_thinking."""
        return load_template(self._folder, tools=bool(tools)).variables

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """A text's tokens; `special`: with those that the tokenizer adds, such as the first.
        ValueError for a text that is no Unicode."""
        check_text(text, "the text")
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def ends(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids that end an answer: the model's own, and the one that its chat template writes
        right behind an answer, where it writes none of them. So a base model that was trained on
        the template's chats ends its turns too."""
        found = list(eos_ids)
        for behind in _behind_answers(self._folder):
            if behind[0] in self.tokenizer.get_added_tokens_decoder() and not {*behind} & {*found}:
                found.append(behind[0])
        return tuple(found)

    def answer(
        self,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        ends: Sequence[int] = (),
        tools: Tools | None = None,
    ) -> Answer:
        """A new answer behind a prompt, up to a stop string or the id that ends it. Its calls are
        looked for where tools are given."""
        form = self._format() if not tools else format_of(self._source(tools=True))
        if form is None or not (tools or form.channels):
            return self.continuation(prompt, stops, ends)
        ids = (self.tokenizer.token_to_id(token) for token in form.tokens)
        shown = frozenset(token for token in ids if token is not None)
        reading, schemas = (
            Reading(self.tokenizer, prompt, stops, ends, shown),
            check_tools(tools or ()),
        )
        if form.channels:
            return Answer(reading, ChannelReader(form, schemas, wanted=bool(tools)))
        return Answer(reading, ToolReader(form, schemas))

    def continuation(
        self, prompt: Sequence[int], stops: Sequence[str] = (), ends: Sequence[int] = ()
    ) -> Answer:
        """What continues a prompt, whatever it is."""
        return Answer(Reading(self.tokenizer, prompt, stops, ends))

    def _source(self, *, tools: bool) -> str:
        return load_template(self._folder, tools=tools).source

    def _format(self) -> Format | None:
        """How the template writes answers, if there is a template."""
        try:
            return format_of(self._source(tools=False))
        except (ValueError, RuntimeError):
            return None


def _message(template: ChatTemplate, message: Message, number: int) -> Message:
    """A message as the template takes it: parts as they are where it walks over them, else one
    text, a line each; `developer` is `system` where it knows no other."""
    found = dict(message)
    if found.get("role") == "developer" and not template.takes_developer:
        found["role"] = "system"
    content = found.get("content")
    if not isinstance(content, list | tuple):
        return found
    for part in content:
        text = (
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        )
        if not isinstance(text, str):
            raise ValueError(
                f'messages[{number}] has the part {part!r:.80}; {{"type": "text", "text": …}} is '
                "what can be read here"
            )
    if not template.takes_parts(str(found.get("role"))):
        found["content"] = "\n".join(part["text"] for part in content)
    return found


@cache
def _behind_answers(folder: Path) -> list[list[int]]:
    """The tokens that each of the folder's chat templates writes behind an answer, if any."""
    found = []
    for tools in (False, True):
        try:
            text = load_template(folder, tools=tools).behind_answer.lstrip()
        except (ValueError, RuntimeError):  # there is no template, or it takes no such chat
            continue
        found.append(load_tokenizer(folder).encode(text, add_special_tokens=False).ids)
    return [behind for behind in found if behind]
