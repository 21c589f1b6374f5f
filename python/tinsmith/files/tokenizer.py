"""tokenizer.json and the files beside it, read without the tokenizers package: the ids, those that
end a sequence, and the settings."""

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinsmith.files.config import CONFIG_FILE, read_json

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
SPECIAL_FILE = "special_tokens_map.json"  # of older folders
TEMPLATE_FILE = "chat_template.jinja"


def read(folder: Path) -> dict[str, int]:
    """Every token of tokenizer.json with its id."""
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {TOKENIZER_FILE}")
    content = read_json(file)
    try:
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: pairs of a token and its score, in the order of ids
            vocab = {token: index for index, (token, _score) in enumerate(vocab)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        tokens = {str(token): operator.index(index) for token, index in (vocab | added).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is not a tokenizer: {error!r:.200}") from None
    if not tokens or min(tokens.values()) < 0:
        raise ValueError(f"{file} has {'an id below 0' if tokens else 'no tokens'}")
    return tokens


def read_eos(folder: Path, section: str, tokenizer: dict[str, int], vocab: int) -> tuple[int, ...]:
    """The ids that end a sequence, from the first place that names any; `section` is the part of
    config.json that is the text model's, or ""."""
    places = ("generation_config.json", ""), (CONFIG_FILE, ""), (CONFIG_FILE, section)
    for name, part in places:
        file = folder / name
        content = read_json(file) if file.is_file() else {}
        found = (content[part] if part else content).get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if any(type(item) is not int or not 0 <= item < vocab for item in ids):
            raise ValueError(f"{file}: eos_token_id {found!r:.60} is not an id below {vocab}")
        if ids:
            return tuple(ids)
    file = folder / SETTINGS_FILE
    token = special_text(read_json(file), "eos") if file.is_file() else None
    found = vocab if token is None else tokenizer.get(token, vocab)
    return (found,) if found < vocab else ()


def settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, above the older special_tokens_map.json."""
    found: dict[str, Any] = {}
    for file in (folder / SPECIAL_FILE, folder / SETTINGS_FILE):
        found |= read_json(file) if file.is_file() else {}
    return found


def special_text(said: Mapping[str, Any], name: str) -> str | None:
    """The text of the special token `name` (bos, eos, ...), where settings have one."""
    token = said.get(f"{name}_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
