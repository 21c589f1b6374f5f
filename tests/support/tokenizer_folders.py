"""Folders with tokenizers of the common kinds, and texts to try them with.

FOLDERS says what makes tokenizer.json and which other files lie beside it: added tokens can be in
each of four of them, special tokens in three, templates in three.
"""

import json
import random
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

CORPUS = (
    "The quick brown fox jumps over the lazy dog; what time is it in Zürich?",
    "def add(a, b):\n    return a + b  # 3.14159 and 2718",
    "Grüße aus 北京 и Москва, 🙂👍🏽 naïve café e\u0301 ﬁne ①②",
    "it's we'll I'd you're they've don't CAN'T",
)
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPM = ("<unk>", "<s>", "</s>")
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{{- ' [INST] ' + m.content + ' [/INST]' }}{%- else %}{{- ' ' + m.content + eos_token }}"
    "{%- endif %}{%- endfor %}"
)
PARTS = (
    "{%- macro show(c) %}{%- if c is string %}{{- c }}{%- else %}{%- for p in c %}"
    "{%- if p.type == 'image' %}{{- image_token }}{%- else %}{{- p.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{%- endmacro %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + show(m.content) }}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
NAMED = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|" + CHATML


# ---- tokenizer.json ----


def merged(alphabet: list[str], words: list[list[str]]) -> tuple[dict[str, int], list[tuple]]:
    """A BPE vocabulary in which these words, in letters of the alphabet, are tokens."""
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in words:
        left = word[0]
        for right in word[1:]:
            if (left, right) not in merges:
                merges.append((left, right))
            left += right
            vocab.setdefault(left, len(vocab))
    return vocab, merges


def letters() -> dict[int, str]:
    """Byte-level BPE's letter of each byte."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(seen)]
    return {b: chr(b) for b in seen} | {b: chr(256 + n) for n, b in enumerate(hidden)}


def byte_level(
    *, special: tuple[str, ...] = ENDS, pre: Any = None, normal: Any = None, post: Any = None,
    **model: Any,
) -> Tokenizer:  # fmt: skip
    known = letters()
    words = [[known[b] for b in w.encode()] for w in (" the", " time", "what", "in", " 北", "'ll")]
    vocab, merges = merged([known[b] for b in range(256)], words)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, **model))
    made.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.normalizer, made.decoder = normal, decoders.ByteLevel()
    made.post_processor = post or processors.ByteLevel(trim_offsets=False)
    made.add_special_tokens(list(special))
    return made


def qwen(**more: Any) -> Tokenizer:
    steps = [
        pre_tokenizers.Split(Regex(QWEN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    pre = pre_tokenizers.Sequence(steps)
    return byte_level(pre=pre, normal=normalizers.NFC(), **more)


def llama3(**more: Any) -> Tokenizer:
    made = byte_level(
        special=("<|begin_of_text|>", "<|eot_id|>", *ENDS), ignore_merges=True, **more
    )
    bos = ("<|begin_of_text|>", made.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A $B", special_tokens=[bos]
    )
    made.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return made


def sentencepiece(scheme: str = "legacy", *, fallback: bool = True, bos: bool = True) -> Tokenizer:
    """Llama 2's kind: with the normaliser of old conversions, or Metaspace by its scheme."""
    plain = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;!?'\"()0123456789"
    bytes_ = [f"<0x{b:02X}>" for b in range(256)] if fallback else []
    words = [list(word) for word in ("▁the", "▁time", "▁what", "▁is", "▁it")]
    vocab, merges = merged([*SPM, *bytes_, *plain], words)
    made = Tokenizer(
        models.BPE(
            vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=fallback
        )
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme == "legacy":
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    if scheme != "never":
        steps.append(decoders.Strip(" ", 1, 0))
    made.decoder = decoders.Sequence(steps)
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    made.add_special_tokens(list(SPM))
    return made


def unigram() -> Tokenizer:
    pieces = [*SPM, *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "▁time", "is", "what"]
    pieces += [chr(c) for c in range(0x21, 0x7F)]
    scored = [(piece, -float(i + 1) / 10) for i, piece in enumerate(pieces)]
    made = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "always")])
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)]
    )
    made.add_special_tokens(list(SPM))
    return made


def wordpiece() -> Tokenizer:
    plain = [chr(c) for c in range(0x21, 0x7F) if not chr(c).isupper()]
    words = [*BERT, *plain, *(f"##{c}" for c in plain if c.isalnum()), "the", "time", "##ing"]
    vocab = {word: index for index, word in enumerate(words)}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    made.add_special_tokens(list(BERT))
    return made


def words() -> Tokenizer:
    vocab = {f"w{i}": i for i in range(50)} | {"the": 50, "time": 51, "<|endoftext|>": 52}
    made = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    made.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return made


# ---- the files beside it ----


def token(text: str, **flags: Any) -> dict[str, Any]:
    """A token as tokenizer_config.json has it."""
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": text, "special": True, **plain, **flags}


def decoder(start: int, *texts: str, **flags: Any) -> dict[str, Any]:
    """tokenizer_config.json's added_tokens_decoder."""
    return {str(start + index): token(text, **flags) for index, text in enumerate(texts)}


def pad(made: Tokenizer) -> Tokenizer:
    made.enable_truncation(max_length=7, stride=2)
    made.enable_padding(length=16, pad_id=1, pad_token="<|endoftext|>")
    return made


def with_added(made: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    made.add_tokens(list(tokens))
    return made


EOS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
SPM_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
THINK = ("<think>", "</think>")
N = 276  # tokens of byte_level with ENDS; those that only other files name come behind them

# Of each folder: its tokenizer.json, its tokenizer_config.json (None: it has none), and more files.
FOLDERS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any] | None, dict[str, Any]]] = {
    "byte-level": (byte_level, EOS | {"chat_template": CHATML}, {}),
    "qwen": (qwen, EOS | {"tokenizer_class": "Qwen2Tokenizer", "chat_template": CHATML}, {}),
    "qwen says little": (qwen, {"tokenizer_class": "Qwen2TokenizerFast",
        "chat_template": NAMED}, {}),
    "gpt2 says little": (byte_level, {"tokenizer_class": "GPT2Tokenizer",
        "chat_template": NAMED}, {}),
    "no settings": (byte_level, None, {"config.json": {"model_type": "gpt_oss"}}),
    "llama 3": (llama3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>",
        "clean_up_tokenization_spaces": False, "chat_template": "{{ bos_token }}" + CHATML}, {}),
    "cut and padded": (lambda: pad(byte_level()), EOS | {"chat_template": CHATML}, {}),
    "space before": (lambda: byte_level(pre=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        EOS | {"add_prefix_space": True}, {}),
    "digits": (lambda: byte_level(pre=pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])), EOS, {}),
    "nfkc": (lambda: byte_level(normal=normalizers.NFKC()), EOS, {}),
    "lower case": (lambda: byte_level(normal=normalizers.Lowercase()), EOS, {}),
    "replaced": (lambda: byte_level(normal=normalizers.Replace("e", "é")), EOS, {}),
    "added in settings": (lambda: byte_level(special=ENDS[:1]),
        EOS | {"added_tokens_decoder": decoder(N - 3, *ENDS), "chat_template": CHATML}, {}),
    "qwen3.5": (lambda: qwen(special=ENDS), EOS | {"chat_template": PARTS,
        "image_token": "<|image_pad|>", "added_tokens_decoder": decoder(N - 3, *ENDS)
        | decoder(N, *THINK, special=False) | decoder(N + 2, "<|image_pad|>", "<|audio|>")}, {}),
    "added not special": (byte_level, EOS | {"added_tokens_decoder": decoder(N - 3, *ENDS)
        | decoder(N, *THINK, special=False), "chat_template": PARTS}, {}),
    "added out of order": (byte_level, EOS | {"added_tokens_decoder":
        decoder(N + 9, "<z>") | decoder(N - 3, *ENDS) | decoder(N, "<b>", "<a>")}, {}),
    "lstrip": (byte_level, EOS | {"added_tokens_decoder": decoder(N - 3, *ENDS)
        | decoder(N, "<mask>", lstrip=True)}, {}),
    "rstrip": (byte_level, EOS | {"added_tokens_decoder": decoder(N - 3, *ENDS)
        | decoder(N, "<mask>", rstrip=True, lstrip=True)}, {}),
    "other flags than the file's": (byte_level, EOS | {"added_tokens_decoder":
        decoder(N - 3, *ENDS, rstrip=True)}, {}),
    "single words": (lambda: with_added(byte_level(),
        AddedToken("time", single_word=True)), EOS, {}),
    "normalised": (lambda: with_added(byte_level(normal=normalizers.Lowercase()),
        AddedToken("TIME", normalized=True), AddedToken("Fox", normalized=False)), EOS, {}),
    "strips in the file": (lambda: with_added(byte_level(),
        AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True)), EOS, {}),
    "added_tokens.json": (byte_level, EOS, {"added_tokens.json": {"<b>": N + 1, "<a>": N}}),
    "added_tokens.json, special": (byte_level, EOS | {"additional_special_tokens": ["<b>"]},
        {"added_tokens.json": {"<b>": N + 1, "<a>": N}}),
    "special_tokens_map.json": (byte_level, {"pad_token": "<|endoftext|>", "chat_template": NAMED},
        {"special_tokens_map.json": {"eos_token": token("<|im_end|>"), "bos_token": "<s>"}}),
    "special_tokens_map.json wins": (byte_level, EOS | {"chat_template": NAMED},
        {"special_tokens_map.json": {"eos_token": "<|endoftext|>", "unk_token": "<new>"}}),
    "special_tokens_map.json is old": (byte_level, EOS | {"chat_template": NAMED,
        "added_tokens_decoder": decoder(N - 3, *ENDS)},
        {"special_tokens_map.json": {"eos_token": "<|endoftext|>", "unk_token": "<new>"}}),
    "names without tokens": (byte_level, EOS | {"bos_token": "<bos>", "mask_token": "[M]",
        "additional_special_tokens": ["<x>", "<|im_start|>", "<y>"], "chat_template": NAMED}, {}),
    "a named word": (lambda: byte_level(special=ENDS[:2]), {"eos_token": "what",
        "chat_template": CHATML}, {}),
    "a named token that is not special": (lambda: with_added(byte_level(special=ENDS[:2]),
        AddedToken("<|im_end|>", normalized=False)), EOS | {"chat_template": CHATML}, {}),
    "split special tokens": (byte_level, EOS | {"split_special_tokens": True,
        "chat_template": CHATML}, {}),
    "ids that are not the next": (lambda: with_added(byte_level(special=()), "<p>", "<q>"),
        {"added_tokens_decoder": decoder(N + 40, *ENDS)}, {}),
    "sentencepiece": (sentencepiece, SPM_NAMES | {"chat_template": LLAMA}, {}),
    "sentencepiece, added": (sentencepiece, SPM_NAMES | {"chat_template": LLAMA,
        "pad_token": "<pad>", "added_tokens_decoder": decoder(0, *SPM)}, {}),
    "metaspace first": (lambda: sentencepiece("first"), SPM_NAMES | {"chat_template": LLAMA}, {}),
    "metaspace always": (lambda: sentencepiece("always", bos=False), SPM_NAMES, {}),
    "llama says little": (lambda: sentencepiece("first"), {"tokenizer_class": "LlamaTokenizerFast",
        "legacy": False, "chat_template": LLAMA}, {}),
    "llama": (lambda: sentencepiece("first"), SPM_NAMES | {"tokenizer_class": "LlamaTokenizer",
        "legacy": False, "add_bos_token": True, "add_eos_token": False, "chat_template": LLAMA,
        "added_tokens_decoder": decoder(0, *SPM)}, {}),
    "tokens by other names": (byte_level, EOS | {"extra_special_tokens": {
        "image_token": "<|image_pad|>", "audio_token": "<|audio|>"},
        "chat_template": "{{ image_token }}" + PARTS}, {}),
    "metaspace never": (lambda: sentencepiece("never"), SPM_NAMES, {}),
    "no byte fallback": (lambda: sentencepiece(fallback=False), SPM_NAMES, {}),
    "unigram": (unigram, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}, {}),
    "wordpiece": (wordpiece, {"unk_token": "[UNK]", "pad_token": "[PAD]"}, {}),
    "words": (words, {"eos_token": "<|endoftext|>"}, {}),
    "a template's file": (byte_level, EOS | {"chat_template": "never"},
        {"chat_template.jinja": CHATML}),
    "templates by name": (byte_level, EOS | {"chat_template": [
        {"name": "default", "template": CHATML}, {"name": "tool_use", "template": PARTS}]}, {}),
    "templates as an object": (byte_level, EOS | {"chat_template": {
        "default": CHATML, "tool_use": PARTS}}, {}),
    "an empty token": (byte_level, EOS | {"added_tokens_decoder": decoder(N - 3, *ENDS)
        | decoder(N, "", "<a>")}, {}),
    "a folder of templates": (byte_level, EOS, {"chat_template.jinja": CHATML,
        "additional_chat_templates/tool_use.jinja": PARTS}),
}  # fmt: skip


def write(name: str, folder: Path) -> Path:
    """Writes one of FOLDERS."""
    make, settings, files = FOLDERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    make().save(str(folder / "tokenizer.json"))
    if settings is not None:
        said = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
        (folder / "tokenizer_config.json").write_text(json.dumps(said))
    for file, content in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


# ---- texts ----

MARKS = (
    *ENDS, *SPM, *THINK, *BERT[2:], "<mask>", "<a>", "<b>", "<l>", "<r>", "<p>", "<x>", "<z>",
    "<bos>", "<new>", "<pad>", "<|image_pad|>", "<|begin_of_text|>", "time", "TIME", "Fox",
)  # fmt: skip


def texts(count: int = 200) -> Iterator[str]:
    """Texts of words, marks, numbers, white space and characters of many kinds, the same ones each
    time."""
    draw = random.Random(7)
    parts = [word for line in CORPUS for word in line.split(" ")]
    spaces = [" ", "  ", "\n", "\n\n", "\t", "", " \r\n", "\u3000", "\xa0"]
    yield from ("", " ", "a", " a", "a ", "\n", *CORPUS)
    for _ in range(count - 6 - len(CORPUS)):
        found = []
        for _ in range(draw.randint(1, 12)):
            kind = draw.random()
            if kind < 0.5:
                found.append(draw.choice(parts))
            elif kind < 0.75:
                found.append(draw.choice(MARKS))
            elif kind < 0.9:
                found.append(str(draw.randint(0, 10**6)))
            else:
                found.append(
                    chr(
                        draw.choice([0x4E00, 0x1F600, 0x410, 0x300, 0xE000, 0x1])
                        + draw.randint(0, 60)
                    )
                )
            found.append(draw.choice(spaces) if draw.random() < 0.5 else " ")
        text = "".join(found)
        yield unicodedata.normalize("NFD", text) if draw.random() < 0.1 else text
