"""Conversations with one model: messages to the prompt's tokens, and an answer's tokens to text and
tool calls.

    chat = Chat(folder)
    prompt = chat.prompt([{"role": "user", "content": "Hello"}])
    answer = chat.answer(prompt)
    for token in ...:                      # each as it is drawn
        for piece in answer.add(token):    # text, a ToolCall, or a Thought
            ...
    rest = answer.end()

It needs only the model's folder, neither its weights nor a server.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tinsmith.chat.images import ImageRows, has_images, has_text, is_image
from tinsmith.chat.template import ChatTemplate, Message, alike, load_template
from tinsmith.chat.text import Reading, load_tokenizer
from tinsmith.chat.tools import ChannelReader, Format, Piece, ToolReader, check_tools, format_of
from tinsmith.checkpoints.meta import check_text

Tools = Sequence[Mapping[str, Any]]

TURN_ENDS = {"<|return|>", "<|call|>"}  # of the marks of channels, the ones that end a turn
_CONTROL = re.compile(r"<\|.*\|>")  # the form of a control token that is not marked as special


class Answer:
    """One answer, read token by token. `stopped` is the stop string that ended it, `calls` the
    number of its tool calls."""

    def __init__(self, reading: Reading, reader: ToolReader | ChannelReader | None = None):
        self._reading = reading
        self._reader = reader

    @property
    def stopped(self) -> str | None:
        """The stop string that was found."""
        return self._reading.found

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return 0 if self._reader is None else self._reader.calls

    def add(self, token: int) -> list[Piece]:
        """The pieces that are final with this token; concatenate adjacent texts."""
        return self._read(self._reading.add(token))

    def end(self) -> list[Piece]:
        """The rest, after the last token."""
        pieces = self._read(self._reading.end())
        return pieces if self._reader is None else pieces + self._reader.end()

    def _read(self, text: str) -> list[Piece]:
        if self._reader is not None:
            return self._reader.add(text)
        return [text] if text else []


class Chat:
    """See the file's header. ValueError and RuntimeError say what the folder lacks."""

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
        images: ImageRows | None = None,
    ) -> list[int]:
        """The prompt's tokens, up to the assistant's answer; `prefix` is the beginning of the
        answer. `images` are those of the messages, which have a part {"type": "image"} for each.
        The other arguments are those of `text`."""
        if images is None or not images.counts:
            return self.encode(self.text(messages, tools, settings) + prefix)
        mark = None if images.token is None else self.tokenizer.id_to_token(images.token)
        if mark is None:
            raise ValueError(
                "this model's conversations take no images: config.json has no image_token_id that "
                "is one of its tokens"
            )
        if has_text([*messages, *(tools or ()), settings or {}, prefix], mark):
            raise ValueError(
                f"a text of the request has {mark}, which stands for an image in this model's "
                "prompts: with images, leave it out"
            )
        text = self.text(messages, tools, settings, images=True) + prefix
        return images.spread(self.encode(text))

    def text(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        answer: bool = True,
        images: bool = False,
    ) -> str:
        """The conversation's text; with `answer`, up to the beginning of the assistant's next
        message. Messages are those of OpenAI and of chat templates: role and content, and
        tool_calls whose arguments are objects. With `images`, contents can have them as parts.
        ValueError if the template refuses the messages."""
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
        made = [_message(template, one, row, images) for row, one in enumerate(messages)]
        return template.render(made, list(tools or ()) or None, settings, answer=answer)

    def variables(self, tools: Tools | None = None) -> frozenset[str]:
        """The template's own variables, such as Qwen3's enable_thinking."""
        return load_template(self._folder, tools=bool(tools)).variables

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """A text's tokens; with `special`, including those that the tokenizer adds, such as the
        first. ValueError if the text is not Unicode."""
        check_text(text, "the text")
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def ends(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids that end an answer: the model's own, and, if the chat template closes an answer
        with none of them, the id with which it does. So a base model that was trained on the
        template's chats ends its turns too."""
        found = list(eos_ids)
        for closing in _closings(self._folder):
            if closing and not {*closing} & {*found}:
                found.append(closing[-1])
        return tuple(found)

    def answer(
        self,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        ends: Sequence[int] = (),
        tools: Tools | None = None,
    ) -> Answer:
        """A new answer after a prompt, up to a stop string or an end id. With tools, it is searched
        for calls."""
        form = self._format() if not tools else format_of(self._source(tools=True))
        if form is None or not (tools or form.channels):
            return Answer(Reading(self.tokenizer, prompt, stops, ends, lead=self.lead))
        ids = (self.tokenizer.token_to_id(token) for token in form.tokens)
        shown = frozenset(token for token in ids if token is not None)
        reading = Reading(self.tokenizer, prompt, stops, ends, shown, self.lead)
        schemas = check_tools(tools or ())
        if form.channels:
            return Answer(reading, ChannelReader(form, schemas, wanted=bool(tools)))
        return Answer(reading, ToolReader(form, schemas))

    @property
    def lead(self) -> str:
        """Text that the template writes between the prompt and an answer."""
        try:
            return load_template(self._folder).lead
        except (ValueError, RuntimeError):  # there is no template
            return ""

    def continuation(
        self, prompt: Sequence[int], stops: Sequence[str] = (), ends: Sequence[int] = ()
    ) -> Answer:
        """The continuation of any prompt."""
        return Answer(Reading(self.tokenizer, prompt, stops, ends))

    def _source(self, *, tools: bool) -> str:
        return load_template(self._folder, tools=tools).source

    def _format(self) -> Format | None:
        """The template's format of answers, if there is a template."""
        try:
            return format_of(self._source(tools=False))
        except (ValueError, RuntimeError):
            return None


def _message(template: ChatTemplate, message: Message, number: int, images: bool) -> Message:
    """A message as the template takes it: parts unchanged if it loops over them or there is an
    image, otherwise as one text, a line each. An unknown role `developer` becomes `system`."""
    found = dict(message)
    if found.get("role") == "developer" and not template.takes_developer:
        found["role"] = "system"
    content = found.get("content")
    if not isinstance(content, list | tuple):
        return found
    for part in content:
        if images and is_image(part):
            continue
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise ValueError(
                f'messages[{number}] has the part {part!r:.80}; {{"type": "text", "text": …}} is '
                "what can be read here"
            )
    if has_images(found):
        return found
    if found.get("tool_calls") or not template.takes_parts(str(found.get("role"))):
        found["content"] = "\n".join(part["text"] for part in content)
    return found


@cache
def _closings(folder: Path) -> list[list[int]]:
    """The control tokens with which each of the folder's chat templates closes an answer: the ones
    that it always writes there, or else those after an answer that is the last message, or else the
    first of those after another. Marks of tools and channels, and of the beginning of an answer,
    are excluded: they occur inside answers too."""
    tokenizer, found = load_tokenizer(folder), []
    added = tokenizer.get_added_tokens_decoder()
    for tools in (False, True):
        try:
            template = load_template(folder, tools=tools)
        except (ValueError, RuntimeError):  # there is none
            continue
        form = format_of(template.source)
        marks = {*form.tokens} - TURN_ENDS if form else set[str]()
        marks |= {text for text in map(str, added.values()) if text in template.before_answer}

        def control(text: str, marks: set[str] = marks) -> list[int]:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            kept = [token for token in ids if token in added and str(added[token]) not in marks]
            return [t for t in kept if added[t].special or _CONTROL.fullmatch(str(added[t]))]

        last, other = template.behind_answer
        both = alike(last, other) if other else last
        found.append(control(both) or control(last) or control(other)[:1])
    return found
