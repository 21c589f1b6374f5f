"""Text as its tokens come: whole characters only, up to a stop string.

The bytes of a character may be spread over tokens, and some decoders write a token differently at
the beginning of a text. So each new token is decoded behind the tokens before it, and a character
is given out once no later token can change it. What comes in pieces is together what the tokenizer
makes of all tokens at once.
"""

import json
from codecs import getincrementaldecoder
from collections.abc import Collection, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.files.extras import pip_install

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN = "\ufffd"  # what the tokenizer writes for bytes that don't (yet) make up a character
CHARACTER_TOKENS = 4  # the most that one character can have: it has at most 4 bytes in UTF-8
TOKENS_KEPT = 1 << 16  # whose bytes are known, and the tokenizers whose kind is
TOKENIZERS_KEPT = 16
WINDOW_TOKENS = 16  # that are decoded again with each new one, where there is no whole character


@cache
def load_tokenizer(folder: Path) -> "Tokenizer":
    """The tokenizer of a model's folder. RuntimeError where tokenizers is not installed, ValueError
    where tokenizer.json can't be read."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise RuntimeError(f"text needs tokenizers: {pip_install('server')}") from None
    file = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library's own, of that very class
        raise ValueError(f"text needs {file}, which can't be read: {error}") from None


class Text:
    """One sequence's text. `add` takes a token and returns the characters that are certain now;
    `end` returns the rest. Special tokens are part of it, or only those that are in `shown`."""

    def __init__(self, tokenizer: "Tokenizer", shown: Collection[int] | None = None):
        self._tokenizer = tokenizer
        self._shown = shown
        self._tokens: list[int] = []
        self._settled = 0  # tokens before this one end with a whole character
        self._known = 0  # characters of what _tokens are that were given out

    def add(self, token: int) -> str:
        """The characters that are certain with this token."""
        if self._shown and token in self._shown:
            before = self.end()
            self._tokens, self._settled, self._known = [], 0, 0
            return before + self._tokenizer.decode([token], skip_special_tokens=False)
        self._tokens.append(token)
        text = self._decode(self._tokens)
        whole = self._certain(text)
        new = whole[self._known :]
        self._known = max(self._known, len(whole))
        if not text.endswith(UNKNOWN):
            self._begin_at(self._settled, len(self._tokens))
        elif len(self._tokens) - self._settled > WINDOW_TOKENS:  # these bytes are no text
            half = len(self._tokens) - WINDOW_TOKENS // 2
            self._begin_at(half, half)
        return new

    def end(self) -> str:
        """What is left, where bytes without the rest of their character are U+FFFD."""
        text = self._decode(self._tokens)
        left, self._known = text[self._known :], len(text)
        return left

    def _certain(self, text: str) -> str:
        """Without what a later token could change: a character that is not whole."""
        if not text.endswith(UNKNOWN):
            return text
        if len(self._tokens) - self._settled < CHARACTER_TOKENS:
            return text.rstrip(UNKNOWN)
        return text[:-1]  # the bytes before the last character are no text

    def _begin_at(self, first: int, settled: int) -> None:
        """Forgets the tokens before the first one; it and those up to `settled` give the context
        that decoding needs."""
        del self._tokens[:first]
        self._settled = settled - first
        self._known = len(self._certain(self._decode(self._tokens)))

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._shown is not None)


class Stops:
    """Text up to the first of some stop strings. `found` is the one that has come, `rest` what came
    behind it in the same piece."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._firsts = {stop[0] for stop in stops}
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found: str | None = None
        self.rest = ""

    def add(self, text: str) -> str:
        """What is certain not to belong to a stop string, which may begin in one piece and end in
        another."""
        if self.found is not None:
            return ""
        seen = self._held + text
        places = [(seen.index(stop), stop) for stop in self._stops if stop in seen]
        if places:
            at, self.found = min(places)
            self._held, self.rest = "", seen[at + len(self.found) :]
            return seen[:at]
        at = self._could_begin(seen)
        self._held = seen[at:]
        return seen[:at]

    def end(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held

    def _could_begin(self, seen: str) -> int:
        """Where a stop string could begin whose rest has not come."""
        for at in range(max(0, len(seen) - self._longest + 1), len(seen)):
            if seen[at] in self._firsts and any(s.startswith(seen[at:]) for s in self._stops):
                return at
        return len(seen)


# ---- one token ----


@lru_cache(TOKENS_KEPT)
def token_bytes(tokenizer: "Tokenizer", token: int) -> bytes:
    """The bytes of a token alone, which need not be whole characters."""
    text = tokenizer.id_to_token(token)
    added = tokenizer.get_added_tokens_decoder()
    if text is None or token in added:
        return tokenizer.decode([token], skip_special_tokens=False).encode()
    if "ByteLevel" in _decoders(tokenizer):
        letters = _letters()
        return bytes(letters[letter] for letter in text if letter in letters)
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes.fromhex(text[3:5])
    return text.replace("\u2581", " ").encode()


@lru_cache(TOKENIZERS_KEPT)
def _decoders(tokenizer: "Tokenizer") -> tuple[str, ...]:
    """The kinds of the decoders that turn tokens into text, in their order."""
    state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b"{}"
    decoder = json.loads(state)
    return tuple(str(part.get("type")) for part in decoder.get("decoders", [decoder]))


def pieces(tokenizer: "Tokenizer", tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text of all, special tokens included; bytes without the rest of
    their character are U+FFFD."""
    if _decoders(tokenizer) == ("ByteLevel",):  # the text is that of the tokens' bytes
        decoder = getincrementaldecoder("utf-8")(errors="replace")
        found = [decoder.decode(token_bytes(tokenizer, token)) for token in tokens]
        rest = decoder.decode(b"", final=True)
    else:
        text = Text(tokenizer)
        found = [text.add(token) for token in tokens]
        rest = text.end()
    if found:
        found[-1] += rest
    return found


@cache
def _letters() -> dict[str, int]:
    """The letter that byte-level BPE writes for each byte: the byte's own in Latin-1 where that can
    be seen, and the letters from U+0100 on for the others, in their order."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(seen)]
    letters = {chr(byte): byte for byte in seen}
    return letters | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}
