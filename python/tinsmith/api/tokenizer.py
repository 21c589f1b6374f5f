"""tinsmith.Tokenizer: a model's own tokenizer and chat template, by transformers' names."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from tinsmith.api.kinds import Ids, SomeIds
from tinsmith.api.names import did_you_mean
from tinsmith.api.results import Public
from tinsmith.chat.chat import Chat, Tools
from tinsmith.chat.text import pieces
from tinsmith.ops import tensors

if TYPE_CHECKING:
    import tokenizers

Messages = str | Sequence[Mapping[str, Any]]


class Tokenizer(Public):
    """A model's own tokenizer, tokenizer.json in its folder; `Model.tokenizer` is one.

    Names and defaults are those of transformers. Needs the package tokenizers, and jinja2 for
    chat templates.

    Examples
    --------
    >>> model.tokenizer.decode(model.tokenizer.encode("What time is it?"))
    'What time is it?'
    """

    def __init__(self, folder: Path, title: str):
        self._folder, self._title = folder, title

    def __repr__(self) -> str:
        return f"<tinsmith.Tokenizer of {self._title}>"

    def __len__(self) -> int:
        return int(self.backend.get_vocab_size())

    @cached_property
    def core(self) -> Chat:
        """The reader of the model's folder and its chat template, for advanced use."""
        return Chat(self._folder)

    @property
    def backend(self) -> "tokenizers.Tokenizer":
        """The tokenizers package's own object.

        Examples
        --------
        >>> model.tokenizer.backend.token_to_id("<|im_end|>")
        1210
        """
        return self.core.tokenizer

    @overload
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    @overload
    def encode(self, text: list[str], *, add_special_tokens: bool = True) -> list[list[int]]: ...
    def encode(
        self, text: str | list[str], *, add_special_tokens: bool = True
    ) -> list[int] | list[list[int]]:
        """A text's ids; for a list of texts, a list of ids each.

        Parameters
        ----------
        text : str, or list of str
        add_special_tokens : bool
            Add the special tokens around a text, such as Llama's first one.

        Examples
        --------
        >>> model.tokenizer.encode("What time is it?")
        [417, 411, 311, 409, 30]
        """
        if isinstance(text, list):
            return [self._encode(item, add_special_tokens) for item in text]
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, special: bool) -> list[int]:
        if not isinstance(text, str):
            raise TypeError(f"text must be a str or a list of str, {type(text).__name__} came")
        return self.core.encode(text, special=special)

    @overload
    def decode(self, ids: Ids, *, skip_special_tokens: bool = False) -> str: ...
    @overload
    def decode(self, ids: list[SomeIds], *, skip_special_tokens: bool = False) -> list[str]: ...
    def decode(
        self, ids: Ids | list[SomeIds], *, skip_special_tokens: bool = False
    ) -> str | list[str]:
        """The text of ids; for a list of sequences, a list of texts.

        Parameters
        ----------
        ids : ids (N,), or a list of them
        skip_special_tokens : bool
            Leave out the end of sequence and other special tokens.

        Examples
        --------
        >>> model.tokenizer.decode([417, 411, 1210], skip_special_tokens=True)
        'What time'
        """
        if tensors.is_batch(ids):
            rows: Any = ids
            return [self._decode(r, f"ids[{n}]", skip_special_tokens) for n, r in enumerate(rows)]
        return self._decode(ids, "ids", skip_special_tokens)

    def _decode(self, ids: Any, name: str, skip: bool) -> str:
        return str(self.backend.decode(_listed(ids, name), skip_special_tokens=skip))

    def pieces(self, ids: Ids) -> list[str]:
        """The text that each of the ids (N,) adds; special tokens are text too.

        Examples
        --------
        >>> model.tokenizer.pieces([417, 411, 311])
        ['What', ' time', ' is']
        """
        return pieces(self.backend, _listed(ids, "ids"))

    @overload
    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
        tokenize: Literal[True] = True,
        **settings: Any,
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
        tokenize: Literal[False],
        **settings: Any,
    ) -> str: ...
    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **settings: Any,
    ) -> list[int] | str:
        """A conversation's ids, as the model's chat template writes it.

        Parameters
        ----------
        messages : list of dict, or str
            role and content of each, as OpenAI and transformers have them; a str is a user's
            message.
        tools : list of dict, optional
            Functions that the model may call.
        add_generation_prompt : bool
            Add the tokens that begin the assistant's answer.
        tokenize : bool
            False returns the text.
        **settings
            The template's own variables, such as Qwen3's enable_thinking.

        Raises
        ------
        TypeError
            If the template does not read a setting.
        ValueError
            If the template refuses the messages.

        Examples
        --------
        >>> model.tokenizer.apply_chat_template("Hello", tokenize=False)
        '<|im_start|>user\\nHello<|im_end|>\\n'
        """
        check_settings(self.core, settings, tools, self.apply_chat_template)
        text = self.core.text(
            as_messages(messages), tools, settings, answer=bool(add_generation_prompt)
        )
        return self.core.encode(text) if tokenize else text


def check_settings(
    chat: Chat, settings: Mapping[str, Any], tools: Tools | None, function: Callable[..., Any]
) -> None:
    """Raises TypeError if the chat template does not read a setting: it is a misspelled argument of
    the function, or a variable of another model's template."""
    if not settings or not (unknown := sorted(settings.keys() - (known := chat.variables(tools)))):
        return
    own = [one.name for one in inspect.signature(function).parameters.values()]
    hint = did_you_mean(unknown[0], [*own[:-1], *known])
    raise TypeError(
        f"{function.__name__}() has no argument {unknown[0]!r}{hint}, and the model's chat "
        f"template reads no such variable: it reads {', '.join(sorted(known)) or 'none of its own'}"
    )


def as_messages(messages: Messages) -> Sequence[Mapping[str, Any]]:
    """The messages; a text becomes one user message."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, list | tuple) or not all(isinstance(m, Mapping) for m in messages):
        raise TypeError('messages must be a text, or a list of {"role": …, "content": …}')
    if not messages:
        raise ValueError("messages is empty: at least one is needed")
    return messages


def _listed(ids: Any, name: str) -> list[int]:
    """Ids for the tokenizer; IndexError for one below 0."""
    array = tensors.to_ids(ids, name).reshape(-1)
    if array.size and array.min() < 0:
        raise IndexError(f"{name} has id {array.min()}: ids are from 0 on")
    return [int(item) for item in array]
