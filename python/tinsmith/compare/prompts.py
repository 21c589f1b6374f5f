"""What models are asked: a record's prompts and training example, by a renderer of the cookbook."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tinker
from tinker_cookbook import model_info, renderers
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer

from tinsmith.compare.data import Message, Record
from tinsmith.demo.data import demonstration_prompt

# Where a renderer leaves the calls of an answer, and what some models write around thoughts.
CALLS = ("tool_calls", "unparsed_tool_calls")
THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
LAST = renderers.TrainOnWhat.LAST_ASSISTANT_MESSAGE


def renderer_of(model: str, name: str | None) -> str:
    """The renderer that was named, or the cookbook's for a model of that name.

    Raises ValueError where the cookbook knows none.

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
    """A model's renderer and tokenizer. `model` is its name or its folder; `demonstration`, how a
    teacher reads the file's answer."""

    def __init__(self, model: str | Path, renderer: str, demonstration: str = "words"):
        self.tokenizer: Any = get_tokenizer(str(model))
        try:
            self.renderer = renderers.get_renderer(renderer, self.tokenizer)
            self._stops = self.renderer.get_stop_sequences()  # may want other ids
        except (AssertionError, ConfigurationError, KeyError, ValueError) as error:
            raise ValueError(f"there is no renderer {renderer!r:.80}: {error}") from None
        self.demonstration = demonstration

    def student(self, record: Record) -> tinker.ModelInput:
        """The tokens before the answer, for who has not read it."""
        return self.renderer.build_generation_prompt(list(record.messages))

    def teacher(self, record: Record) -> tinker.ModelInput:
        """The same with the answer as an example: in the words of the cookbook's SDFT recipe, or as
        an earlier turn of the conversation, in which the same was asked."""
        if self.demonstration == "turn":
            return self.renderer.build_generation_prompt([*_whole(record), record.messages[-1]])
        return self.after(record, demonstration_prompt(record.question, record.answer))

    def after(self, record: Record, question: str) -> tinker.ModelInput:
        """The tokens before the answer to another question in the same conversation."""
        message: Message = {"role": "user", "content": question}
        return self.renderer.build_generation_prompt([*record.messages[:-1], message])

    def supervised_datum(self, record: Record) -> tinker.Datum:
        """The file's answer to train on: cross-entropy's weights sum to 1 over its tokens."""
        return conversation_to_datum(_whole(record), self.renderer, None, LAST)

    def supervised(self, record: Record) -> tuple[tinker.ModelInput, list[bool]]:
        """The tokens of the conversation with the file's answer, and which of them are the
        answer's; of a plain text, all."""
        if not record.messages:
            ids = self.tokenizer.encode(record.answer)
            return tinker.ModelInput.from_ints(ids), [True] * len(ids)
        tokens, weights = self.renderer.build_supervised_example(_whole(record), LAST)
        return tokens, [weight > 0 for weight in weights.tolist()]

    def sampling(self, max_tokens: int, **more: Any) -> tinker.SamplingParams:
        """How answers are sampled: they end where the renderer says."""
        return tinker.SamplingParams(max_tokens=max_tokens, stop=self._stops, **more)

    def text(self, tokens: list[int]) -> str:
        """An answer's text with its tool calls, without what was thought before it."""
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
        """The text of the file's answer, as if a model had given it."""
        tokens, marks = self.supervised(record)
        return self.text([one for one, mark in zip(tokens.to_ints(), marks, strict=True) if mark])

    def check(self, path: str, records: Iterable[Record], max_tokens: int, context: int) -> None:
        """Raises ValueError with the line's number for a record that doesn't fit the context."""
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
