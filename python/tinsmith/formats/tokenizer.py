"""A model folder's tokenizer, read without the tokenizers package: the ids, the tokens that are
added to tokenizer.json's, the names of special tokens, and the ends of a sequence.

transformers applies several files when it loads a folder, in this order: tokenizer.json;
tokenizer_config.json, whose added_tokens_decoder comes first; without one, the older
special_tokens_map.json and added_tokens.json; then special tokens that are named but not yet added.
A Vocabulary is the result (transformers, `PreTrainedTokenizerBase._from_pretrained`).
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinsmith.formats.config import CONFIG_FILE, read_json

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_FOLDER = "additional_chat_templates"
# In folders without an added_tokens_decoder.
SPECIAL_FILE, ADDED_FILE = "special_tokens_map.json", "added_tokens.json"

SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Special tokens that transformers' tokenizer class names if a folder does not.
CLASSES: Mapping[str, Mapping[str, str]] = {
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Added:
    """A token that is searched for before text is split; the fields are named as in the tokenizers
    package."""

    content: str
    special: bool = False
    normalized: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """See the file's header. `more` are the added tokens that tokenizer.json lacks, or has with
    other settings, in the order of addition."""

    folder: Path
    tokens: Mapping[str, int]
    added: Mapping[str, Added]  # all of them
    more: Sequence[Added]
    settings: Mapping[str, Any]
    content: Mapping[str, Any]  # tokenizer.json's

    def special(self, name: str) -> int | None:
        """The id of the token that the folder names this way, such as eos_token."""
        text = special_text(self.settings, name)
        return None if text is None else self.tokens.get(text)


def read(folder: Path) -> Vocabulary:
    """A folder's vocabulary. FileNotFoundError if there is no tokenizer.json, ValueError if a file
    is not a tokenizer's."""
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {TOKENIZER_FILE}")
    content, said = read_json(file), settings(folder)
    try:
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: pairs of a token and its score, in the order of ids
            vocab = {token: index for index, (token, _score) in enumerate(vocab)}
        tokens = {str(token): operator.index(index) for token, index in vocab.items()}
        own = [_added(token) for token in content.get("added_tokens") or ()]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is not a tokenizer: {error!r:.200}") from None
    own = [token for token in own if token.content]
    more = added_tokens(folder, said, own)
    _number(tokens, [*own, *more])
    if not tokens or min(tokens.values()) < 0:
        raise ValueError(f"{file} has {'an id below 0' if tokens else 'no tokens'}")
    added = {token.content: token for token in [*own, *more]}
    return Vocabulary(folder, tokens, added, more, said, content)


def _number(tokens: dict[str, int], added: Sequence[Added]) -> None:
    """Gives added tokens the ids that the tokenizers package gives them: their existing one, or
    else the next free one."""
    count, last = len(tokens), -1
    for token in added:
        if token.content not in tokens:
            tokens[token.content] = max(count, last + 1)
        last = max(last, tokens[token.content])


def _added(said: Any) -> Added:
    """A token from a text, or from a file's object."""
    if isinstance(said, str):
        return Added(said, special=True, normalized=False)
    special = bool(said.get("special"))
    flags = {key: bool(said.get(key)) for key in ("lstrip", "rstrip", "single_word")}
    normal = bool(said.get("normalized", not special))
    return Added(str(said["content"]), special=special, normalized=normal, **flags)


def added_tokens(folder: Path, said: Mapping[str, Any], own: Iterable[Added]) -> list[Added]:
    """The tokens that a folder's other files add to tokenizer.json's, in order. `said` are its
    settings. ValueError if they are not tokens."""
    try:
        return [token for token in _more(folder, said, own) if token.content]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{folder}: the added tokens of {SETTINGS_FILE}, {SPECIAL_FILE} or {ADDED_FILE} are "
            f"none: {error!r:.200}"
        ) from None


def _more(folder: Path, said: Mapping[str, Any], own: Iterable[Added]) -> list[Added]:
    listed = said.get("added_tokens_decoder")
    known = {token.content: token for token in own}
    found: dict[int, Added] = {}
    if listed is not None:
        found = {int(index): _added(token) for index, token in listed.items()}
    elif (folder / ADDED_FILE).is_file():
        special = {token.content for token in _named(said)}
        for text, index in read_json(folder / ADDED_FILE).items():
            is_special = text in special
            one = Added(text, special=is_special, normalized=not is_special)
            found[operator.index(index)] = known.get(text, one)
    more = [token for _, token in sorted(found.items()) if known.get(token.content) != token]
    there = known | {token.content: token for token in more}
    for token in _named(said):
        if token.content not in there:
            more.append(token)
            there[token.content] = token
        elif not there[token.content].special:  # a named token is special
            more.append(replace(there[token.content], special=True))
    return more


def _named(said: Mapping[str, Any]) -> list[Added]:
    """The special tokens in settings: the usual names first, then other names, then the list."""
    listed = said.get("extra_special_tokens") or said.get("additional_special_tokens") or ()
    texts = [*_names(said).values(), *(() if isinstance(listed, Mapping) else listed)]
    return [_added(text if isinstance(text, str) else {**text, "special": True}) for text in texts]


def _names(said: Mapping[str, Any]) -> dict[str, Any]:
    """Names of special tokens, each with a text or an object that contains one."""
    extra = said.get("extra_special_tokens")
    keys = [*SPECIAL, *(key for key in said if key.endswith("_token") and key not in SPECIAL)]
    found = {key: said.get(key) for key in keys} | (extra if isinstance(extra, Mapping) else {})
    return {key: token for key, token in found.items() if _text(token) is not None}


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


# ---- settings ----


def settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json with transformers' defaults (the names in the tokenizer's class) and,
    if it has no added_tokens_decoder, its overrides (special_tokens_map.json)."""
    found = _read(folder / SETTINGS_FILE)
    older = {} if "added_tokens_decoder" in found else _read(folder / SPECIAL_FILE)
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(found.get(key), list) and isinstance(older.get(key), list):
            older[key] = found[key] + [one for one in older[key] if one not in found[key]]
    kind = str(found.get("tokenizer_class")).removesuffix("Fast")
    return {**CLASSES.get(kind, {}), **found, **older}


def special_text(said: Mapping[str, Any], name: str) -> str | None:
    """The text of the special token `name` (bos_token, ...), if settings have one."""
    return _text(said.get(name))


def special_texts(said: Mapping[str, Any]) -> dict[str, str]:
    """All special tokens that settings name: a chat template's variables."""
    return {name: str(_text(token)) for name, token in _names(said).items()}


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


# ---- ends ----


def read_eos(vocabulary: Vocabulary, section: str, vocab: int) -> tuple[int, ...]:
    """The ids that end a sequence: those in generation_config.json or, if it has none, in
    config.json (`section` is the key of its text model, or ""); and the tokenizer's own eos_token.
    A chat's answer also ends where the template ends a turn (chat/chat.py)."""
    places = (GENERATION_FILE, ""), (CONFIG_FILE, ""), (CONFIG_FILE, section)
    found: list[int] = []
    for name, part in places:
        file = vocabulary.folder / name
        content = _read(file)
        said = (content[part] if part else content).get("eos_token_id")
        ids = said if isinstance(said, list) else [] if said is None else [said]
        if any(type(item) is not int or not 0 <= item < vocab for item in ids):
            raise ValueError(f"{file}: eos_token_id {said!r:.60} is not an id below {vocab}")
        if found := ids:
            break
    own = vocabulary.special("eos_token")
    return tuple(dict.fromkeys(found if own is None or own >= vocab else [*found, own]))
