"""The prompts of a comparison: a record's prompts and training example, by a cookbook renderer."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tinker
from tinker_cookbook import model_info, renderers
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer

from tinsmith.compare.data import Record, TextMessage
from tinsmith.demo.data import demonstration_prompt

# Where a renderer puts the calls of an answer, and what some models write around thinking.
CALLS = ("tool_calls", "unparsed_tool_calls")
THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
LAST = renderers.TrainOnWhat.LAST_ASSISTANT_MESSAGE


def renderer_of(model: str, name: str | None) -> str:
    """The given renderer, or the cookbook's for a model of that name.

    Raises ValueError if the cookbook has none.

        renderer_of("Qwen/Qwen3-8B", None)
    """
    if name is not None:
        return name
    try:
        return model_info.get_recommended_renderer_name(model)
    except (ConfigurationError, KeyError, ValueError):
        raise ValueError(
            f"the cookbook knows no renderer for the model {model!r:.200}: name one with "
            "--renderer, such as qwen3 or llama3, or serve the model's folder under the hub's name "
            "(--model NAME=FOLDER)"
        ) from None


class Prompts:
    """A model's renderer and tokenizer. `model` is its name or its folder; `demonstration` is how a
    teacher reads the file's answer."""

    def __init__(self, model: str | Path, renderer: str, demonstration: str = "words"):
        self.tokenizer: Any = get_tokenizer(str(model))
        try:
            self.renderer = renderers.get_renderer(renderer, self.tokenizer)
            self._stops = self.renderer.get_stop_sequences()  # may need other ids
        except (AssertionError, ConfigurationError, KeyError, ValueError) as error:
            raise ValueError(f"there is no renderer {renderer!r:.80}: {error}") from None
        self.demonstration = demonstration

    def student(self, record: Record) -> tinker.ModelInput:
        """The tokens before the answer: the student's prompt, without the file's answer."""
        return self.renderer.build_generation_prompt(list(record.messages))

    def teacher(self, record: Record) -> tinker.ModelInput:
        """The same with the answer as an example: in the words of the cookbook's SDFT recipe, or as
        an earlier turn of the conversation with the same question."""
        if self.demonstration == "turn":
            return self.renderer.build_generation_prompt([*_whole(record), record.messages[-1]])
        return self.after(record, demonstration_prompt(record.question, record.answer))

    def after(self, record: Record, question: str) -> tinker.ModelInput:
        """The prompt for another question in the same conversation."""
        message: TextMessage = {"role": "user", "content": question}
        return self.renderer.build_generation_prompt([*record.messages[:-1], message])

    def supervised_datum(self, record: Record) -> tinker.Datum:
        """The file's answer to train on: cross-entropy's weights sum to 1 over its tokens."""
        return conversation_to_datum(_whole(record), self.renderer, None, LAST)

    def supervised(self, record: Record) -> tuple[tinker.ModelInput, list[bool]]:
        """The tokens of the conversation with the file's answer, and a mask of the answer's tokens;
        all, for a plain text."""
        if not record.messages:
            ids = self.tokenizer.encode(record.answer)
            return tinker.ModelInput.from_ints(ids), [True] * len(ids)
        tokens, weights = self.renderer.build_supervised_example(_whole(record), LAST)
        return tokens, [weight > 0 for weight in weights.tolist()]

    def sampling(self, max_tokens: int, **more: Any) -> tinker.SamplingParams:
        """Parameters for sampling answers: they end at the renderer's stop sequences."""
        return tinker.SamplingParams(max_tokens=max_tokens, stop=self._stops, **more)

    def text(self, tokens: list[int]) -> str:
        """An answer's text with its tool calls, without the thinking before it."""
        message, _ = self.renderer.parse_response(tokens)
        if not any(message.get(key) for key in CALLS):
            return renderers.get_text_content(message).strip()
        kept = list(tokens)
        while kept and kept[-1] in self._stops:
            kept.pop()
        text = str(self.tokenizer.decode(kept))
        for stop in self._stops:
            text = text.removesuffix(stop) if isinstance(stop, str) else text
        return THOUGHT.sub("", text).strip()

    def expected(self, record: Record) -> str:
        """The text of the file's answer, as if the model had written it."""
        tokens, marks = self.supervised(record)
        return self.text([one for one, mark in zip(tokens.to_ints(), marks, strict=True) if mark])

    def check(self, path: str, records: Iterable[Record], max_tokens: int, context: int) -> None:
        """Raises ValueError with the line's number if a record doesn't fit the context."""
        for record in records:
            needed = self.supervised(record)[0].length
            if record.messages:
                prompt = max(self.student(record).length, self.teacher(record).length)
                needed = max(prompt + max_tokens, needed)
            if needed > context:
                raise ValueError(
                    f"{path}, line {record.line} needs {needed:,} tokens with the teacher's prompt "
                    f"and --max-tokens {max_tokens}; the model's context is {context:,}"
                )


def _whole(record: Record) -> list[Any]:
    return [*record.messages, {"role": "assistant", "content": record.answer}]
