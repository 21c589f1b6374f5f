"""Attacks conversations: messages, tools and settings, mutated, to the prompt's tokens by chat
templates of the common kinds; and answers with tool calls, mutated, to their text and calls.

What can't be rendered is refused with a sentence. An answer's pieces are the same however its text
is cut, and each call's arguments are a JSON object that any reader takes.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from support.chat_models import TEMPLATES, WEATHER, make_tokenizer
from tinsmith.api.tokenizer import Tokenizer
from tinsmith.chat.tools import (
    FORMATS,
    ChannelReader,
    Piece,
    Thought,
    ToolCall,
    ToolReader,
    check_tools,
)

from tools.attack import common
from tools.attack.common import Attempt, One

CALL = {"name": "weather", "arguments": {"town": "Zürich", "days": 3, "exact": [1.5, None]}}
TALK = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it raining in Zürich?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]},
        {"role": "tool", "content": "no"},
    ],
    "tools": [WEATHER],
    "settings": {"enable_thinking": False},
}
XML = (
    "<function=weather>\n<parameter=town>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>"
    "\n</function>"
)
# An answer for each row of FORMATS.
ANSWERS = (
    f"I look.\n<tool_call>\n{XML}\n</tool_call>\nDone.",
    f"I look.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>\n",
    f"[TOOL_CALLS]{json.dumps([CALL])}[TOOL_CALLS]weather[ARGS]{json.dumps(CALL['arguments'])}",
    f"<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.weather <|constrain|>json<|message|>{json.dumps(CALL['arguments'])}<|call|>",
    f"<|python_tag|>{json.dumps({'name': 'weather', 'parameters': {'days': 1e3}})}; ",
)
NUMBERS = ("1e999", "-1e999", "NaN", "Infinity", "9" * 5000, '"\\ud800"', "[" * 2000, "{}")


@contextmanager
def attack() -> Iterator[One]:
    """The program."""
    with common.workplace() as root:
        for name, template in TEMPLATES.items():
            make_tokenizer(root / name, template)
        tokenizers = [Tokenizer(root / name, name) for name in TEMPLATES]

        def one(attempt: Attempt) -> str:
            if attempt.rng.random() < 0.5:
                return _render(attempt, attempt.rng.choice(tokenizers))
            return _read(attempt)

        yield one


def _render(attempt: Attempt, tokenizer: Tokenizer) -> str:
    talk = common.changed(attempt.rng, TALK)
    attempt.note(tokenizer, talk)
    settings = talk.get("settings") if isinstance(talk, dict) else None
    if not isinstance(settings, dict):
        return "no conversation"
    settings = {str(key): value for key, value in settings.items()}
    for own in ("tools", "tokenize", "messages", "self"):
        settings.pop(own, None)
    if "enable_thinking" not in tokenizer.core.variables():
        settings.pop("enable_thinking", None)
    try:
        ids = tokenizer.apply_chat_template(
            talk.get("messages"), tools=talk.get("tools"), **settings
        )
    except Exception as error:
        common.refusal(error, kinds=(ValueError, TypeError))
        return f"refused by {common.where(error)}"
    if any(type(item) is not int for item in ids):
        raise common.Failure(f"it is taken as {ids!r:.200}")
    return "rendered"


def _read(attempt: Attempt) -> str:
    rng, row = attempt.rng, attempt.rng.randrange(len(FORMATS))
    said = ANSWERS[row]
    if rng.random() < 0.5:
        said = said.replace(
            rng.choice(("3", "1.5", "null", '"Z\\u00fcrich"', "1000.0")), rng.choice(NUMBERS)
        )
    if rng.random() < 0.7:
        said = common.changed_bytes(rng, said.encode()).decode("utf-8", "replace")
    attempt.note(row, said)
    whole, cut = _pieces(row, [said]), _pieces(row, _parts(rng, said))
    if whole != cut:
        raise common.Failure(f"as a whole it is {whole}, in pieces {cut}")
    calls = [piece for piece in whole if isinstance(piece, ToolCall)]
    for call in calls:
        found = json.loads(call.arguments, parse_constant=_no_json)
        if not isinstance(found, dict):
            raise common.Failure(f"a call has the arguments {call.arguments!r:.200}")
        json.dumps(found, allow_nan=False)
        (call.name + call.arguments).encode()
    return f"read, {min(len(calls), 2)} calls"


def _no_json(name: str) -> None:
    raise common.Failure(f"a call's arguments have {name}")


def _parts(rng: Random, text: str) -> list[str]:
    """A text cut into a few pieces."""
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 9)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def _pieces(row: int, parts: list[str]) -> list[Piece]:
    """What a reader makes of them, neighbouring texts, and thoughts, as one."""
    form, tools, found = FORMATS[row], check_tools([WEATHER]), []
    reader = ChannelReader(form, tools, wanted=True) if form.channels else ToolReader(form, tools)
    for piece in [*(piece for part in parts for piece in reader.add(part)), *reader.end()]:
        if found and isinstance(piece, str) and isinstance(found[-1], str):
            found[-1] += piece
        elif found and isinstance(piece, Thought) and isinstance(found[-1], Thought):
            found[-1] = Thought(found[-1].text + piece.text)
        else:
            found.append(piece)
    return found
