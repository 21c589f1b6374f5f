"""`tinsmith chat`, a conversation in the terminal, and `tinsmith sample`, one prompt in a script.

Both load the model in this process, with or without an adapter. An answer is shown while its tokens
are drawn; Ctrl-C ends it, and what was shown stays in the conversation. COMMANDS is the table of
the commands that begin with /.
"""

import argparse
import base64
import json
import math
import queue
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinsmith.cli import argument_types, pull

if TYPE_CHECKING:
    from tinsmith.api.adapter import Adapter
    from tinsmith.api.conversations import SeenPrompt
    from tinsmith.api.model import Model
    from tinsmith.chat.template import Message
    from tinsmith.engine.decoding import SampleDelta, SampleRequest, SampleResult
    from tinsmith.engine.image_cache import HeldImage

QUOTES = '"""'  # around multi-line input


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of both commands."""
    argument_types.add_model(parser)
    parser.add_argument("--adapter", help="a checkpoint's or PEFT's folder, or a tinker:// path")
    argument_types.add_checkpoints(parser, "where tinker:// paths are looked for")
    parser.add_argument("--system", help="the system message of a conversation")
    parser.add_argument(
        "--temperature",
        type=argument_types.temperature,
        default=1.0,
        help="how freely tokens are drawn; 0 takes the likeliest (default: %(default)s)",
    )
    parser.add_argument(
        "--top-p",
        type=argument_types.share,
        default=1.0,
        help="draw from the likeliest tokens that have this probability together (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=argument_types.seed,
        help="with the same seed the same is drawn (default: drawn afresh)",
    )
    parser.add_argument(
        "--max-tokens",
        type=argument_types.whole(1),
        help="most tokens of an answer (default: to the context's end)",
    )
    argument_types.add_device(parser)
    argument_types.add_stages(parser)
    argument_types.add_dtype(parser)
    argument_types.add_weights(parser)


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of chat."""
    add_options(parser)
    parser.add_argument(
        "--image",
        type=argument_types.file,
        action="append",
        default=[],
        metavar="FILE",
        help="a PNG or JPEG file that goes with the first message; give it several times for more",
    )


def add_sample_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of sample."""
    add_options(parser)
    parser.add_argument("prompt", help="a text; - reads it from the standard input")
    parser.add_argument("--chat", action="store_true", help="it is a user's message, not a text")
    parser.add_argument(
        "-n",
        type=argument_types.whole(1, argument_types.SAMPLES_MAX),
        default=1,
        metavar="N",
        help="how many samples (default: %(default)s)",
    )


@dataclass(frozen=True)
class ChatSettings:
    """How answers are drawn. seed None: a random one."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None

    def request(
        self,
        model: "Model",
        prompt: Sequence[int],
        ends: tuple[int, ...],
        count: int = 1,
        images: "tuple[HeldImage, ...]" = (),
    ) -> "SampleRequest":
        """A request for answers to a prompt with these images, each up to one of the ids `ends`;
        ValueError for invalid settings."""
        from tinsmith.engine.decoding import SampleRequest

        if not 0 < len(prompt) <= model.context:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; the model reads from 1 to {model.context}"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, {self.max_tokens} came")
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1 or count < 1:
            raise ValueError(
                f"temperature must be at least 0, top_p in (0, 1] and n at least 1; "
                f"{self.temperature}, {self.top_p} and {count} came"
            )
        return SampleRequest(
            np.asarray(prompt, np.int32),
            num_samples=count,
            max_tokens=-1 if self.max_tokens is None else self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=(secrets.randbits(63) if self.seed is None else self.seed) % (1 << 63),
            stop_ids=ends,
            images=images,
        )


class Speaker:
    """A loaded model, with or without an adapter, and its chat template."""

    def __init__(self, model: "Model", adapter: "Adapter | None" = None):
        from tinsmith.chat.chat import Chat

        self.model = model
        self.adapter = adapter
        self.chat = Chat(model.path)

    def prompt(self, messages: Sequence["Message"]) -> "SeenPrompt":
        """The prompt for an answer to messages, which may have images."""
        from tinsmith.api.conversations import read_prompt

        token = self.model.engine.loaded.image_token
        return read_prompt(self.chat, messages, token, self.model.image)

    def ends(self, *, chat: bool = True) -> tuple[int, ...]:
        """The ids that end an answer, or a text's continuation."""
        return self.chat.ends(self.model.eos_ids) if chat else self.model.eos_ids

    def draw(
        self,
        request: "SampleRequest",
        *,
        base: bool = False,
        show: Callable[[str], None] = lambda text: None,
    ) -> "SampleResult":
        """A request's result; the first sample's text is shown as it is drawn, in this thread.
        `base`: without the adapter."""
        answer = self.chat.answer(request.prompt.tolist(), ends=request.stop_ids)
        parts: queue.SimpleQueue[Sequence[SampleDelta]] = queue.SimpleQueue()

        def show_pieces(pieces: Sequence[Any]) -> None:
            if text := "".join(piece for piece in pieces if isinstance(piece, str)):
                show(text)

        def show_new(done: int, total: int) -> None:
            while not parts.empty():
                for part in (part for part in parts.get() if part.number == 0):
                    for token in part.tokens.tolist():
                        show_pieces(answer.add(token))

        adapter = None if base or self.adapter is None else self.adapter.core
        try:
            [result] = self.model.engine.decode([request], adapter, show_new, parts.put)
        finally:
            show_new(0, 0)
            show_pieces(answer.end())
        return result


def load(options: argparse.Namespace) -> Speaker:
    """Loads the model of a command line."""
    from tinsmith.api.model import Model
    from tinsmith.checkpoints.export import find_adapter

    folder = pull.find(options.model, fetch=options.pull)
    model = Model(
        folder,
        device=options.device,
        stages=options.stages,
        threads=options.threads,
        dtype=options.dtype,
        weights=options.weights,
        weights_copy=options.weights_copy,
    )
    if options.adapter is None:
        return Speaker(model)
    return Speaker(model, model.load_lora(find_adapter(options.adapter, options.checkpoints)))


def settings_of(options: argparse.Namespace) -> ChatSettings:
    """The settings of a command line."""
    return ChatSettings(options.temperature, options.top_p, options.seed, options.max_tokens)


# ---- sample ----


def run_sample(options: argparse.Namespace) -> None:
    """Continues one prompt, and prints JSON."""
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if options.system is not None and not options.chat:
        raise ValueError("a system message is a conversation's: add --chat")
    speaker = load(options)
    prompt = speaker.chat.encode(text, special=True)
    if options.chat:
        messages = [{"role": "user", "content": text}]
        if options.system is not None:
            messages.insert(0, {"role": "system", "content": options.system})
        prompt = speaker.chat.prompt(messages)
    ends = speaker.ends(chat=options.chat)
    result = speaker.draw(settings_of(options).request(speaker.model, prompt, ends, options.n))
    read = speaker.chat.answer if options.chat else speaker.chat.continuation
    samples = []
    for sample in result.samples:
        tokens, answer = sample.tokens.tolist(), read(prompt, ends=ends)
        pieces = [piece for token in tokens for piece in answer.add(token)]
        samples.append(
            {
                "text": "".join(x for x in pieces + answer.end() if isinstance(x, str)),
                "stop_reason": sample.stop_reason,
                "tokens": tokens,
                "logprobs": sample.logprobs.tolist(),
            }
        )
    found = {"model": options.model, "adapter": options.adapter, "prompt_tokens": prompt}
    print(json.dumps({**found, "samples": samples}, ensure_ascii=False))


# ---- chat ----


@dataclass
class Conversation:
    """A running conversation. `write` shows text."""

    speaker: Speaker
    settings: ChatSettings
    write: Callable[[str], None]
    system: str | None = None
    compare: bool = False
    images: Sequence["Message"] = ()  # as parts of the first message
    messages: list[dict[str, Any]] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Adds a user message, and answers it."""
        seen = [] if self.messages else list(self.images)
        content = [*seen, {"type": "text", "text": text}] if seen else text
        self.messages.append({"role": "user", "content": content})
        try:
            if self.compare:
                self.write("without the adapter: ")
                self._answer(base=True)
                self.write("with it: ")
            answer = self._answer(base=False)
        except Exception:
            self.messages.pop()  # a message that can't be answered is dropped
            raise
        self.messages.append({"role": "assistant", "content": answer})

    def _answer(self, *, base: bool) -> str:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt = self.speaker.prompt(system + self.messages)
        shown: list[str] = []

        def show(text: str) -> None:
            shown.append(text)
            self.write(text)

        request = self.settings.request(
            self.speaker.model, prompt.rows.tolist(), self.speaker.ends(), images=prompt.held
        )
        try:
            self.speaker.draw(request, base=base, show=show)
        except KeyboardInterrupt:
            self.write(" …")
        self.write("\n")
        return "".join(shown)

    def command(self, line: str) -> bool:
        """Runs a command that begins with /; returns whether the conversation goes on."""
        name, _, rest = line.strip().partition(" ")
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name not in COMMANDS:
            raise ValueError(f"there is no {name}; /help shows what there is")
        COMMANDS[name][1](self, rest.strip())
        return True


def _number(
    key: str, kind: Callable[[str], Any], *, none: bool = False
) -> Callable[[Conversation, str], None]:
    """A command that sets a number, or shows it without an argument; `none`: "none" is allowed."""

    def change(talk: Conversation, text: str) -> None:
        if text:
            value = None if none and text == "none" else kind(text)
            changed = replace(talk.settings, **{key: value})
            changed.request(talk.speaker.model, [0], ())
            talk.settings = changed
        talk.write(f"{key}: {getattr(talk.settings, key)}\n")

    return change


def _set_system(talk: Conversation, text: str) -> None:
    talk.system = text or None
    talk.write(f"system: {talk.system}\n")


def _reset(talk: Conversation, text: str) -> None:
    talk.messages.clear()
    talk.write("the conversation is empty\n")


def _save(talk: Conversation, text: str) -> None:
    if not text:
        raise ValueError("say where to: /save FILE")
    system = [] if talk.system is None else [{"role": "system", "content": talk.system}]
    messages = {"messages": system + talk.messages}
    Path(text).write_text(json.dumps(messages, ensure_ascii=False) + "\n", encoding="utf-8")
    talk.write(f"{text}: {len(talk.messages)} messages\n")


def _compare(talk: Conversation, text: str) -> None:
    if talk.speaker.adapter is None:
        raise ValueError("there is no adapter to compare with: start with --adapter")
    talk.compare = not talk.compare
    talk.write(f"compare with base: {'on' if talk.compare else 'off'}\n")


def _help(talk: Conversation, text: str) -> None:
    for name, (what, _) in COMMANDS.items():
        talk.write(f"{name:14}{what}\n")
    talk.write(f"{'/exit':14}ends\n{QUOTES} around several lines; Ctrl-C ends an answer\n")


COMMANDS: dict[str, tuple[str, Callable[[Conversation, str], None]]] = {
    "/help": ("shows this", _help),
    "/temperature": ("sets it; 0 is greedy", _number("temperature", float)),
    "/top_p": ("sets it", _number("top_p", float)),
    "/seed": ("draws the same each time; none: afresh", _number("seed", int, none=True)),
    "/max_tokens": (
        "of an answer; none: to the end of the context",
        _number("max_tokens", int, none=True),
    ),
    "/system": ("sets the system message; nothing: none", _set_system),
    "/compare": ("answers without the adapter too, or no more", _compare),
    "/reset": ("forgets what was said", _reset),
    "/save": ("FILE writes the conversation as JSON", _save),
}


def inputs(read: Callable[[str], str]) -> Iterator[str]:
    """The user's inputs: a line each, or several lines between quotes. Ctrl-C drops an unfinished
    input; the end of the input ends the loop."""
    while True:
        try:
            text = read("> ")
            if text.lstrip().startswith(QUOTES):
                text = text.lstrip().removeprefix(QUOTES)
                while not text.rstrip().endswith(QUOTES):
                    text += "\n" + read("… ")
                text = text.rstrip().removesuffix(QUOTES)
        except EOFError:
            return
        except KeyboardInterrupt:
            continue
        if text.strip():
            yield text


def converse(talk: Conversation, read: Callable[[str], str]) -> None:
    """The whole conversation; errors in it are shown as sentences."""
    for text in inputs(read):
        try:
            if not text.startswith("/"):
                talk.say(text)
            elif not talk.command(text):
                return
        except (ValueError, OSError, MemoryError, FloatingPointError) as error:
            talk.write(f"{error}\n")


def _image(model: "Model", file: Path) -> "Message":
    """A file as OpenAI's part of a message, which /save can write; ValueError if the model does not
    take it."""
    from tinsmith.api.images import format_of

    data = file.read_bytes()
    name = format_of(data, str(file))
    try:
        model.image(data)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    url = f"data:image/{name};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def run_chat(options: argparse.Namespace) -> None:
    """Runs a conversation until the input ends."""
    speaker, settings = load(options), settings_of(options)
    settings.request(speaker.model, [0], ())
    images = [_image(speaker.model, file) for file in options.image]
    speaker.prompt([{"role": "user", "content": images or "Hello"}])  # raises if it is refused
    if sys.stdin.isatty():
        import readline  # noqa: F401 - input() then edits lines and remembers them

        print(f"{options.model}: /help shows what there is, /exit ends")

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    talk = Conversation(speaker, settings, write, system=options.system, images=images)
    converse(talk, input if sys.stdin.isatty() else lambda prompt: input())
