"""The tokenizer of a GGUF file, as tokenizer.json and tokenizer_config.json.

Two kinds are read. "gpt2" is byte-level BPE: tokens and merges are in the file, and `pre` names the
pre-tokenizer; PRE is the table of these names. "llama" is SentencePiece's BPE: each token has a
score, and the neighbours merge whose union has the highest. That is BPE whose merges are all pairs
of tokens that form a token, by falling score (as transformers converts sentencepiece's files).

In reverse, `tokenizer_keys` finds a tokenizer.json's row of PRE from its steps. It writes
byte-level BPE, and refuses what llama.cpp would compute differently. (llama.cpp has no Unicode
forms: text that is not composed can have other tokens there, if a row has nfc.) No extra installs
transformers, whose conversion goes by the model's family, not by `pre`: it does neither.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.formats import tokenizer
from tinsmith.formats.config import CONFIG_FILE, read_json
from tinsmith.formats.gguf_header import Header
from tinsmith.formats.tokenizer import Vocabulary

NORMAL, UNKNOWN, CONTROL, USER, UNUSED = 1, 2, 3, 4, 5  # of tokenizer.ggml.token_type
SPACE = "\u2581"  # SentencePiece's symbol for a space

# Words with the character before them, groups of digits, punctuation, white space.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# o200k's: words also end between a lower-case and an upper-case letter.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CAMELS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _bytes(*, regex: bool) -> dict[str, Any]:
    kind = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return kind | {"use_regex": regex}


def _split(pattern: str) -> tuple[dict[str, Any], ...]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return cut, _bytes(regex=False)


@dataclass(frozen=True)
class Pre:
    """How text is split before BPE: the steps in tokenizer.json's form. nfc: text is first
    normalized to NFC. whole: a word that is a token needs no merges. bos: by default a text begins
    with that token."""

    steps: tuple[dict[str, Any], ...]
    nfc: bool = False
    whole: bool = False
    bos: bool = False


PRE = {
    "gpt-2": Pre((_bytes(regex=True),)),
    "smollm": Pre(({"type": "Digits", "individual_digits": True}, _bytes(regex=True))),
    "qwen2": Pre(_split(_WORDS % ""), nfc=True),
    "llama-bpe": Pre(_split(_WORDS % "{1,3}"), whole=True, bos=True),
    "gpt-4o": Pre(_split(_CAMELS)),
}
# Defaults of steps in tokenizer.json; offsets do not matter.
_DEFAULTS = {"add_prefix_space": True, "use_regex": True}
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}


def read_tokenizer(header: Header) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of tokenizer.json and tokenizer_config.json; ValueError if the tokenizer is
    unsupported or incomplete."""
    tokens = header.items("tokenizer.ggml.tokens", str)
    types = header.items("tokenizer.ggml.token_type", int, [NORMAL] * len(tokens))
    kind = header.get("tokenizer.ggml.model", str, ...)
    if kind not in MODELS:
        known = " and ".join(MODELS)
        raise ValueError(f"{header.file}: the tokenizer {kind!r:.60} is not supported; {known} are")
    if not tokens or len(types) != len(tokens):
        raise ValueError(f"{header.file}: {len(tokens)} tokens have {len(types)} types")
    vocab = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    if len(vocab) + types.count(UNUSED) != len(tokens):
        raise ValueError(f"{header.file}: a token is there twice")
    parts, begins = MODELS[kind](header, vocab, types)
    added = [
        {
            "id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": types[index] != USER,
        }
        for token, index in vocab.items()
        if types[index] in (UNKNOWN, CONTROL, USER)
    ]  # fmt: skip
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    special = special_ids(header, tokens)
    return content | parts | _ends(header, special, tokens, begins), _config(header, special)


def special_ids(header: Header, tokens: Sequence[str]) -> dict[str, int]:
    """The ids that the file names, by "bos", "eos" and others."""
    names = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unknown": "unk"}
    found = {}
    for key, name in (names | {"padding": "pad"}).items():
        index = header.get(f"tokenizer.ggml.{key}_token_id", int)
        if index is None:
            continue
        if not 0 <= index < len(tokens):
            raise ValueError(f"{header.file}: {key}_token_id {index} is not below {len(tokens)}")
        found[name] = index
    return found


def _byte_level(
    header: Header, vocab: Mapping[str, int], types: Sequence[int]
) -> tuple[dict[str, Any], bool]:
    """tokenizer.json's parts for byte-level BPE, and whether a text begins with bos by default."""
    name = header.get("tokenizer.ggml.pre", str, "default")
    pre = PRE.get(ALIASES.get(name, name))
    if pre is None:
        known = ", ".join(sorted({*PRE, *ALIASES}))
        raise ValueError(
            f"{header.file}: the pre-tokenizer {name!r:.60} is not supported; {known} are"
        )
    merges = [merge.split(" ") for merge in header.items("tokenizer.ggml.merges", str)]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            raise ValueError(f"{header.file}: the merge {' '.join(merge)!r:.60} is none of tokens")
    steps = list(pre.steps)
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if steps[1:] else steps[0],
        "decoder": _bytes(regex=True),
        "model": _bpe(vocab, merges, whole=pre.whole),
    }, pre.bos


def _sentencepiece(
    header: Header, vocab: Mapping[str, int], types: Sequence[int]
) -> tuple[dict[str, Any], bool]:
    """The same for SentencePiece's BPE."""
    scores = header.items("tokenizer.ggml.scores", float)
    if len(scores) != len(types):
        raise ValueError(f"{header.file}: {len(types)} tokens have {len(scores)} scores")
    ranked = []
    for token, index in vocab.items():
        if types[index] == NORMAL:
            cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
            pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
            pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
            ranked += [(-scores[index], *pair) for pair in pairs]
    ranked.sort(key=lambda item: item[0])
    unknown = next((token for token, index in vocab.items() if types[index] == UNKNOWN), None)
    spaced = header.get("tokenizer.ggml.add_space_prefix", bool, True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": SPACE}] * spaced + [replace],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}] + [strip] * spaced,
        },
        "model": _bpe(vocab, [list(pair) for _, *pair in ranked])
        | {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }, True


MODELS = {"gpt2": _byte_level, "llama": _sentencepiece}  # tokenizer.ggml.model


def _bpe(
    vocab: Mapping[str, int], merges: Sequence[Sequence[str]], *, whole: bool = False
) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": whole, "vocab": vocab, "merges": merges,
    }  # fmt: skip


def _ends(
    header: Header, special: Mapping[str, int], tokens: Sequence[str], begins: bool
) -> dict[str, Any]:
    """The tokens around a text."""
    wanted = {
        "bos": header.get("tokenizer.ggml.add_bos_token", bool, begins),
        "eos": header.get("tokenizer.ggml.add_eos_token", bool, False),
    }
    used = {name: tokens[special[name]] for name in wanted if wanted[name] and name in special}

    def around(*texts: str) -> list[dict[str, Any]]:
        parts = []
        for number, text in enumerate(texts):
            ends = {name: {"SpecialToken": {"id": used[name], "type_id": number}} for name in used}
            one = [ends.get("bos"), {"Sequence": {"id": text, "type_id": number}}, ends.get("eos")]
            parts += [part for part in one if part]
        return parts

    known = {
        token: {"id": token, "ids": [special[name]], "tokens": [token]}
        for name, token in used.items()
    }
    kind = {"type": "TemplateProcessing", "single": around("A"), "pair": around("A", "B")}
    return {"post_processor": kind | {"special_tokens": known}}


def _config(header: Header, special: Mapping[str, int]) -> dict[str, Any]:
    """tokenizer_config.json: the special tokens and the chat templates."""
    tokens = header.values["tokenizer.ggml.tokens"]
    named: dict[str, Any] = {
        f"{name}_token": tokens[special[name]]
        for name in ("bos", "eos", "unk", "pad")
        if name in special
    }
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix + ".") if key != prefix else "default": header.get(key, str)
        for key in header.values
        if key == prefix or key.startswith(prefix + ".")
    }
    if templates.keys() == {"default"}:
        named["chat_template"] = templates["default"]
    elif templates:
        listed = [{"name": name, "template": text} for name, text in templates.items()]
        named["chat_template"] = listed
    return named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }


# ---- in reverse: a folder's tokenizer as the keys of a file ----

KEYS = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
ENDS = ("eos", "eot", "eom")  # names of tokens that may end a sequence


def tokenizer_keys(known: Vocabulary, vocab: int, ends: Sequence[int]) -> dict[str, Any]:
    """The keys of a GGUF file for a folder's tokenizer, with one token for each row of the
    embedding. `ends` are the ids that end a sequence. ValueError if llama.cpp does not have the
    tokenizer."""
    file = known.folder / tokenizer.TOKENIZER_FILE
    try:
        return _keys(file, known, vocab, ends)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a tokenizer: {error!r:.200}") from None


def _keys(file: Path, vocabulary: Vocabulary, vocab: int, ends: Sequence[int]) -> dict[str, Any]:
    folder, content = vocabulary.folder, vocabulary.content
    pre = _pre_of(file, content)
    # Tokens that only other files name, and without a row in the model, can't be read or written.
    extra = {token.content for token in vocabulary.more}
    known = {
        text: index
        for text, index in vocabulary.tokens.items()
        if index < vocab or text not in extra
    }
    added = {text: token for text, token in vocabulary.added.items() if text in known}
    for token in added.values():
        for key in ("lstrip", "rstrip", "single_word"):
            if getattr(token, key):
                raise ValueError(
                    f"{file}: the token {token.content!r:.60} has {key}, which llama.cpp does not "
                    "know"
                )
    tokens = _tokens(file, known, vocab)
    kinds = {known[text]: CONTROL if token.special else USER for text, token in added.items()}
    unused = set(range(vocab)) - set(known.values())
    types = [UNUSED if index in unused else kinds.get(index, NORMAL) for index in range(vocab)]
    special, around = _special(vocabulary, vocab), _around(file, content)
    special |= {name: known[token] for name, token in around.items()}
    special |= _named_ends(folder, special.pop("eos", None), ends, fixed="eos" in around)
    names = {"unk": "unknown", "pad": "padding"}
    return {
        KEYS + "model": "gpt2",
        KEYS + "pre": pre,
        KEYS + "tokens": tokens,
        KEYS + "token_type": types,
        KEYS + "merges": _merges(file, content),
        **{f"{KEYS}{names.get(name, name)}_token_id": index for name, index in special.items()},
        **{f"{KEYS}add_{name}_token": name in around for name in ("bos", "eos")},
        **_templates(folder, vocabulary.settings),
    }


def _pre_of(file: Path, content: Mapping[str, Any]) -> str:
    """The name in PRE of a tokenizer.json's pre-tokenizer."""
    model = content["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ValueError(
            f"{file}: the tokenizer is {model.get('type')!r:.60}, not byte-level BPE, which alone "
            "can be written to a GGUF file"
        )

    def listed(key: str, inner: str) -> list[Any]:
        part = content.get(key) or {}
        return part[inner] if part.get("type") == "Sequence" else [part] if part else []

    def plain(step: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in step.items() if key != "trim_offsets"}
        return (_DEFAULTS if step.get("type") == "ByteLevel" else {}) | kept

    steps = [plain(step) for step in listed("pre_tokenizer", "pretokenizers")]
    normal = [step.get("type") for step in listed("normalizer", "normalizers")]
    for name, pre in PRE.items():
        same = steps == [plain(step) for step in pre.steps] and normal == ["NFC"] * pre.nfc
        if same and bool(model.get("ignore_merges")) == pre.whole:
            return name
    raise ValueError(
        f"{file}: texts are cut in a way that has no name here that llama.cpp knows; "
        f"{', '.join(sorted(PRE))} are known"
    )


def _tokens(file: Path, known: Mapping[str, int], vocab: int) -> list[str]:
    """All tokens by id; ids without a token get a placeholder that is never produced."""
    tokens: list[str] = [f"[PAD{index}]" for index in range(vocab)]
    seen = set()
    for token, index in known.items():
        if index >= vocab:
            raise ValueError(f"{file}: {token!r:.60} has the id {index}, the model {vocab} rows")
        if index in seen:
            raise ValueError(f"{file}: {token!r:.60} and {tokens[index]!r:.60} have one id")
        seen.add(index)
        tokens[index] = token
    if "" in known or len(set(tokens)) < vocab:
        raise ValueError(f"{file}: a token is empty, or is called [PAD...] as those without a name")
    return tokens


def _merges(file: Path, content: Mapping[str, Any]) -> list[str]:
    merges = []
    for merge in content["model"].get("merges") or ():
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if len(parts) != 2 or any(" " in part for part in parts):
            raise ValueError(f"{file}: the merge {merge!r:.60} is not of two tokens without spaces")
        merges.append(" ".join(parts))
    if not merges:
        raise ValueError(f"{file} has no merges, which llama.cpp needs")
    return merges


def _special(vocabulary: Vocabulary, vocab: int) -> dict[str, int]:
    """The ids of bos, eos, unk and pad, if a folder names them and the model has them."""
    said = read_json(vocabulary.folder / CONFIG_FILE)
    ids = {index for index in vocabulary.tokens.values() if index < vocab}
    found = {}
    for name in ("bos", "eos", "unk", "pad"):
        named = tokenizer.special_text(vocabulary.settings, f"{name}_token") is not None
        index = vocabulary.special(f"{name}_token") if named else said.get(f"{name}_token_id")
        if type(index) is int and index in ids:
            found[name] = index
    return found


def _around(file: Path, content: Mapping[str, Any]) -> dict[str, str]:
    """The tokens before a text (bos) and after it (eos)."""
    processor = content.get("post_processor") or {"type": "ByteLevel"}
    sequence = processor.get("type") == "Sequence"
    found: dict[str, str] = {}
    for part in processor["processors"] if sequence else [processor]:
        if part.get("type") == "ByteLevel":
            continue
        names, place = [], "bos"
        for item in part.get("single", ()) if part.get("type") == "TemplateProcessing" else "?":
            if "SpecialToken" in item:
                names.append(place)
                found[place] = item["SpecialToken"]["id"]
            elif "Sequence" in item:
                place = "eos"
            else:
                names += [place] * 2
        if len(names) != len(set(names)):
            raise ValueError(f"{file}: llama.cpp can't have what is put around a text here")
    return found


def _named_ends(
    folder: Path, eos: int | None, ends: Sequence[int], *, fixed: bool
) -> dict[str, int]:
    """The ids that end a sequence, by their names in the file. eos is the tokenizer's, if it is one
    of them, or if it is `fixed`: appended to every text."""
    eos = eos if eos is not None and (eos in ends or fixed) else next(iter(ends), None)
    if eos is None:
        raise ValueError(f"{folder} names no token that ends a sequence, as a GGUF file has to")
    found = list(dict.fromkeys([eos, *ends]))
    if len(found) > len(ENDS):
        raise ValueError(
            f"{folder} has {len(found)} tokens that end a sequence; a GGUF file names at most "
            f"{len(ENDS)}"
        )
    return dict(zip(ENDS, found, strict=False))


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The chat templates."""
    found = settings.get("chat_template")
    if (folder / tokenizer.TEMPLATE_FILE).is_file():
        found = (folder / tokenizer.TEMPLATE_FILE).read_text(encoding="utf-8")
    if not isinstance(found, list):
        return {TEMPLATE: found} if isinstance(found, str) else {}
    named = {item["name"]: item["template"] for item in found}
    keys = {TEMPLATE: named.pop("default")} if "default" in named else {}
    keys |= {f"{TEMPLATE}.{name}": text for name, text in named.items()}
    return keys | ({f"{TEMPLATE}s": list(named)} if named else {})
