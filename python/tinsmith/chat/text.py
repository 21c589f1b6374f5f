"""Incremental detokenization: whole characters only, up to a stop string.

One text is searched, cut and shown. It begins after the prompt, whose last tokens are its context:
the bytes of a character may be spread over tokens, and some decoders write a token differently at
the beginning of a text. Special tokens are part of it, so a stop string can be one; a client reads
that text without them. The pieces concatenated equal the text of all tokens decoded at once.
"""

import json
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Collection, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.formats import tokenizer as files
from tinsmith.system.install_hints import pip_install

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

UNKNOWN = "\ufffd"  # replaces bytes that are no character
CONTEXT = 32  # of the prompt's last tokens: 4 for a character, and one for the decoder's context
TOKENS_KEPT = 1 << 16  # tokens whose bytes are cached, and tokenizers whose kind is
TOKENIZERS_KEPT = 16
CLEAN_UP = "clean_up_tokenization_spaces"


@cache
def load_tokenizer(folder: Path) -> "Tokenizer":
    """The tokenizer of a model's folder, as transformers makes it from the folder's files: without
    truncation and padding, and with the tokens that only the other files name. RuntimeError if the
    package is not installed; ValueError if a file can't be read or needs something unsupported."""
    try:
        from tokenizers import AddedToken, Tokenizer
    except ImportError:
        raise RuntimeError(f"text needs tokenizers: {pip_install('server')}") from None
    file = folder / files.TOKENIZER_FILE
    try:
        made = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"text needs {file}, which can't be read: {error}") from None
    settings = files.settings(folder)
    if settings.get(CLEAN_UP) and type(made.model).__name__ != "BPE":
        raise ValueError(
            f"{folder / files.SETTINGS_FILE}: {CLEAN_UP} is true, which would change texts after "
            "they were shown; it is not supported: set it to false"
        )
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = bool(settings.get("split_special_tokens"))
    own = [_as_file(token) for token in made.get_added_tokens_decoder().values()]
    more = files.added_tokens(folder, settings, own)
    try:
        made.add_tokens([AddedToken(**vars(token)) for token in more])
    except (TypeError, ValueError) as error:  # half a surrogate pair is not text
        raise ValueError(f"{folder}: its added tokens can't be read: {error}") from None
    return made


def _as_file(token: "AddedToken") -> files.Added:
    """A token of the package in the form of the files."""
    flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word")}
    return files.Added(token.content, token.special, token.normalized, **flags)


class Text:
    """One sequence's text after the tokens in `before`. `add` takes a token and returns the
    characters that are final now; `end` returns the rest, with an incomplete character's bytes as
    U+FFFD. Special tokens are text."""

    def __init__(self, tokenizer: "Tokenizer", before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        bytes_apart = "ByteFallback" in _decoders(tokenizer)
        self._byte = tokenizer.token_to_id("<0x41>") if bytes_apart else None
        self._utf8 = getincrementaldecoder("utf-8")(errors="replace")
        self._last: int | None = None  # the token before the next one; a decoder may need it
        self._foreign = False
        for token in before:
            self.add(token)
        self._foreign = bool(self._utf8.getstate()[0])  # the prompt ends inside a character

    def add(self, token: int) -> str:
        """The characters that are final with this token."""
        alone = _alone(self._tokenizer, token)
        if isinstance(alone, bytes):
            if self._last is None:
                self._last = self._byte  # a stand-in: any byte that is a character
                if alone == b" ":  # some decoders strip a text's first space
                    return self.end() + self._tokenizer.decode([token], skip_special_tokens=False)
            return self._own(self._utf8.decode(alone))
        if alone is None:
            return self.end()
        last, self._last = self._last, token
        if last is None:
            return self.end() + alone
        known = _alone(self._tokenizer, last)
        known = known.decode() if isinstance(known, bytes) else known or ""
        both = self._tokenizer.decode([last, token], skip_special_tokens=False)
        return self.end() + both[len(known) :]

    def end(self) -> str:
        """The rest."""
        left = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return self._own(left)

    def _own(self, text: str) -> str:
        """Without the character that the prompt has begun, if it stays incomplete."""
        foreign, self._foreign = self._foreign, self._foreign and not text
        return text.removeprefix(UNKNOWN) if foreign else text


class Stops:
    """Text up to the first of some stop strings: the one that is complete first, and the longest of
    those that end at the same place. `found` is the stop string found, `rest` the text after it in
    the same piece."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._firsts = {stop[0] for stop in stops}
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found: str | None = None
        self.rest = ""

    def add(self, text: str) -> str:
        """The text that can't belong to a stop string. A stop string may span pieces."""
        if self.found is not None:
            return ""
        seen = self._held + text
        known = [stop for stop in self._stops if stop in seen]
        if known:
            end, begin = min((seen.index(stop) + len(stop), seen.index(stop)) for stop in known)
            self.found, self.rest = seen[begin:end], seen[end:]
            self._held = ""
            return seen[:begin]
        at = self._could_begin(seen)
        self._held = seen[at:]
        return seen[:at]

    def end(self) -> str:
        """The text that was held back."""
        held, self._held = self._held, ""
        return held

    def _could_begin(self, seen: str) -> int:
        """Where an incomplete stop string could begin."""
        for at in range(max(0, len(seen) - self._longest + 1), len(seen)):
            if seen[at] in self._firsts and any(s.startswith(seen[at:]) for s in self._stops):
                return at
        return len(seen)


class Reading:
    """Reads the tokens drawn after a prompt: their text up to the first stop string, without
    special tokens (except `shown`), and without the end id (`ends`). A first character equal to
    `lead` belongs to the prompt. `found` is the stop string found."""

    def __init__(
        self,
        tokenizer: "Tokenizer",
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        ends: Collection[int] = (),
        shown: Collection[int] = (),
        lead: str = "",
    ):
        self._tokenizer, self._special = tokenizer, _special(tokenizer)
        before = [token for token in context(prompt) if token not in self._special]
        self._text, self._stops = Text(tokenizer, before), Stops(stops)
        self._hidden = self._special.difference(shown).union(ends)
        self._spans: deque[tuple[int, int]] = deque()  # of hidden text
        self._come = self._certain = 0  # characters
        self._lead = lead

    @property
    def found(self) -> str | None:
        """The stop string that was found."""
        return self._stops.found

    def add(self, token: int) -> str:
        """The text that is final with this token."""
        if token in self._special:  # it is not part of other tokens' text
            rest = self._text.end()
            text = rest + self._tokenizer.decode([token], skip_special_tokens=False)
        else:
            rest = self._text.end() if token in self._hidden else ""
            text = rest + self._text.add(token)
        begin, self._come = self._come + len(rest), self._come + len(text)
        if token in self._hidden:
            self._spans.append((begin, self._come))
        elif text and self._lead:
            self._spans.extend([(begin, begin + 1)] if text.startswith(self._lead) else [])
            self._lead = ""
        return self._show(self._stops.add(text))

    def end(self) -> str:
        """The rest."""
        left = self._stops.end() + self._text.end()
        return "" if self.found is not None else self._show(left)

    def _show(self, text: str) -> str:
        """The next characters of the text, without hidden ones."""
        begin, self._certain = self._certain, self._certain + len(text)
        kept, at = [], begin
        while self._spans and self._spans[0][0] < self._certain:
            first, last = self._spans[0]
            kept.append(text[at - begin : max(at, first) - begin])
            at = min(last, self._certain)
            if last > self._certain:
                break
            self._spans.popleft()
        return "".join([*kept, text[at - begin :]])


def context(prompt: Sequence[int]) -> list[int]:
    """The ids of a prompt's end on which the text behind it may depend: the last CONTEXT, from the
    last image on, whose rows are below 0."""
    found = [int(token) for token in prompt[-CONTEXT:]]
    images = [place for place, token in enumerate(found) if token < 0]
    return found[images[-1] + 1 :] if images else found


# ---- one token ----


@lru_cache(TOKENS_KEPT)
def _alone(tokenizer: "Tokenizer", token: int) -> bytes | str | None:
    """A token's bytes, if they do not depend on the tokens before it; otherwise its text at the
    beginning of a sequence. None for an id without a token."""
    text = tokenizer.id_to_token(token)
    if text is None:
        return None
    decoders = _decoders(tokenizer)
    if decoders == ("ByteLevel",):
        return token_bytes(tokenizer, token)
    if "ByteFallback" in decoders and _is_byte(text):
        return bytes.fromhex(text[3:5])
    return tokenizer.decode([token], skip_special_tokens=False)


@lru_cache(TOKENS_KEPT)
def token_bytes(tokenizer: "Tokenizer", token: int) -> bytes:
    """The bytes of one token, which may be part of a character."""
    text = tokenizer.id_to_token(token)
    if text is None or token in _added(tokenizer):
        return tokenizer.decode([token], skip_special_tokens=False).encode()
    if "ByteLevel" in _decoders(tokenizer):
        letters = _letters()
        return bytes(letters[letter] for letter in text if letter in letters)
    if _is_byte(text):
        return bytes.fromhex(text[3:5])
    return text.replace("\u2581", " ").encode()


def pieces(tokenizer: "Tokenizer", tokens: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    """The text that each token adds, special tokens included; bytes of an incomplete character are
    U+FFFD."""
    text = Text(tokenizer, context(before))
    found = [text.add(token) for token in tokens]
    if found:
        found[-1] += text.end()
    return found


def _is_byte(text: str) -> bool:
    """Whether a token is a byte in byte fallback's form."""
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


@lru_cache(TOKENIZERS_KEPT)
def _decoders(tokenizer: "Tokenizer") -> tuple[str, ...]:
    """The kinds of the decoders that turn tokens into text, in order."""
    state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b"{}"
    decoder = json.loads(state)
    return tuple(str(part.get("type")) for part in decoder.get("decoders", [decoder]))


@lru_cache(TOKENIZERS_KEPT)
def _added(tokenizer: "Tokenizer") -> frozenset[int]:
    return frozenset(tokenizer.get_added_tokens_decoder())


@lru_cache(TOKENIZERS_KEPT)
def _special(tokenizer: "Tokenizer") -> frozenset[int]:
    """The ids of special tokens."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token for token, said in added.items() if said.special)


@cache
def _letters() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte: the byte's own in Latin-1 if it is
    visible; the others get the characters from U+0100 on, in order."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(seen)]
    letters = {chr(byte): byte for byte in seen}
    return letters | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}
