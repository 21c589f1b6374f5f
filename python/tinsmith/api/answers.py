"""The answer of Model.chat: its text while its tokens are drawn, and the finished message."""

import json
import queue
from collections.abc import Callable, Sequence
from typing import Any

from tinsmith.chat.chat import Answer
from tinsmith.chat.tools import Piece, Thought, ToolCall
from tinsmith.engine.decoding import Sample, SampleDelta


class AnswerReader:
    """Reads one answer. The model's thread calls `parts.put`; the caller's thread calls `tell`,
    which passes new text to on_text."""

    def __init__(self, answer: Answer, on_text: Callable[[str], object] | None):
        self.parts: queue.SimpleQueue[Sequence[SampleDelta]] = queue.SimpleQueue()
        self._answer, self._on_text = answer, on_text
        self._read = 0  # tokens
        self._pieces: list[Piece] = []

    def tell(self, done: int = 0, total: int = 0) -> None:
        """Passes new text to on_text."""
        while not self.parts.empty():
            for part in self.parts.get():
                self._add(part.tokens.tolist())

    def message(self, sample: Sample) -> dict[str, Any]:
        """The whole answer as a message, with its tool calls if there are any."""
        self._add(sample.tokens[self._read :].tolist())
        self._take(self._answer.end())
        text = "".join(piece for piece in self._pieces if isinstance(piece, str))
        message: dict[str, Any] = {"role": "assistant", "content": text}
        thoughts = "".join(piece.text for piece in self._pieces if isinstance(piece, Thought))
        if thoughts:
            message["reasoning_content"] = thoughts
        calls = [piece for piece in self._pieces if isinstance(piece, ToolCall)]
        if calls:
            message["tool_calls"] = [_call(item) for item in calls]
        return message

    def _add(self, tokens: list[int]) -> None:
        self._read += len(tokens)
        for token in tokens:
            self._take(self._answer.add(token))

    def _take(self, pieces: Sequence[Piece]) -> None:
        self._pieces += pieces
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        if text and self._on_text is not None:
            self._on_text(text)


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    return {"type": "function", "function": function}
