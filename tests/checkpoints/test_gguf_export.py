"""Models written to GGUF files: what comes back has the same numbers and tokens, here and in
llama.cpp."""

import errno
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tinsmith
import torch
from support import gguf_files, tiny_models
from test_gguf import GPT2, SPM, TEXTS, TOKENS, cache, saved, smollm2, spec_of  # noqa: F401
from tinsmith.chat.chat import Chat
from tinsmith.checkpoints.export import export
from tinsmith.checkpoints.gguf_export import TYPES, export_gguf
from tinsmith.cli import commands
from tinsmith.formats import gguf_header, gguf_tokenizer, safetensors_io, tokenizer
from tinsmith.models import registry
from tokenizers import Tokenizer
from transformers import GPT2Tokenizer, Qwen2Tokenizer

HAS_LLAMA = importlib.util.find_spec("llama_cpp") is not None
needs_llama = pytest.mark.skipif(
    not HAS_LLAMA, reason="llama.cpp is absent: pip install llama-cpp-python"
)
OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "dtype": "float32"}


def lay_tokenizer(folder: Path, keys: dict[str, Any]) -> Path:
    """Gives a folder the tokenizer of a GGUF file with these keys."""
    header = gguf_header.Header(Path("a.gguf"), keys, {}, {})
    content, settings = gguf_tokenizer.read_tokenizer(header)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def keys_of(folder: Path, vocab: int, ends: list[int]) -> dict[str, Any]:
    """The keys of a GGUF file for a folder's tokenizer."""
    return gguf_tokenizer.tokenizer_keys(tokenizer.read(folder), vocab, ends)


def make(tmp_path: Path, name: str, **changes: Any) -> Path:
    """One of SPECS as a folder, with a tokenizer of byte-level BPE."""
    spec = replace(spec_of(name), **changes)
    folder = tiny_models.make(spec, tmp_path / name)
    vocab = spec.config["vocab_size"]
    return lay_tokenizer(folder, gguf_files.words(vocab, vocab - tiny_models.PADDING))


def tuned(folder: Path, **options: Any) -> Path:
    """An adapter of random matrices for a folder's model."""
    adapter = tinsmith.Model(folder, **OPTIONS).lora(rank=4, seed=1, **options)
    tiny_models.randomize(adapter.core)
    adapter.save(folder.with_name("adapter"))
    return folder.with_name("adapter")


# ---- numbers ----


@pytest.mark.parametrize("unembed", (True, False))
@pytest.mark.parametrize("name", ("llama", "llama-tied", "qwen2", "qwen3", "qwen3-tied"))
def test_a_file_has_the_merged_folders_numbers_bit_for_bit(
    name: str, unembed: bool, tmp_path: Path
) -> None:
    folder = make(tmp_path, name, dtype=torch.float32)
    adapter, out = tuned(folder, unembed=unembed), tmp_path / "out.gguf"
    assert export_gguf(folder, adapter, out, "f32") == export(folder, adapter, tmp_path / "out")
    merged, found = (
        registry.load_model(registry.find_model(str(place), {}), threads=1)
        for place in (tmp_path / "out", out)
    )
    assert (found.config, found.family, found.eos_ids) == (
        merged.config, merged.family, merged.eos_ids,
    )  # fmt: skip
    assert np.array_equal(found.inv_freq, merged.inv_freq)
    one, other, base = (
        tinsmith.Model(place, **OPTIONS).logprobs(TOKENS)
        for place in (tmp_path / "out", out, folder)
    )
    assert np.array_equal(one, other)
    assert np.abs(base - other).max() > 0.1


@pytest.mark.parametrize(("mask", "mode", "below"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_who_may_read_a_merged_model_the_umask_says(
    mask: int, mode: int, below: int, tmp_path: Path
) -> None:
    base = make(tmp_path, "qwen3", dtype=torch.float32)
    adapter, out = tuned(base), tmp_path / "new" / "out"
    before = os.umask(mask)
    try:
        export(base, adapter, out)
        export_gguf(base, adapter, out.with_suffix(".gguf"))
    finally:
        os.umask(before)
    modes = {file: file.stat().st_mode & 0o777 for file in [out.parent, *out.parent.rglob("*")]}
    assert {modes.pop(out.parent), modes.pop(out)} == {below}
    assert len(modes) > 3 and set(modes.values()) == {mode}
    assert {file.stat().st_mode & 0o077 for file in adapter.iterdir()} == {0}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ("llama", "qwen2", "qwen3"))  # in bf16, f16, f32
def test_a_matrix_is_merged_in_float32_and_rounded_once(
    name: str, kind: str, tmp_path: Path
) -> None:
    folder = make(tmp_path, name)
    adapter = tuned(folder)
    export_gguf(folder, adapter, tmp_path / "out.gguf", kind)
    with safetensors_io.open_folder(folder) as base:
        wide = {key: safetensors_io.widen(base[key]) for key in base}
    for file in folder.glob("model*"):
        file.unlink()
    safetensors_io.write(folder / "model.safetensors", wide)
    export(folder, adapter, tmp_path / "out")
    heads = {"attn_q": 4, "attn_k": 2} if name == "llama" else {}
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[kind]
    names = gguf.get_tensor_name_map(gguf_files.ARCHITECTURES[name], 2)
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    theirs = {one.name: one for one in reader.tensors}
    with safetensors_io.open_folder(tmp_path / "out") as merged:
        for key in merged:
            one = theirs.pop(names.get_name(key, (".weight", ".bias")))
            found = gguf.dequantize(one.data, one.tensor_type)
            wanted = torch.from_numpy(np.array(merged[key]))
            wanted = wanted.to(dtype if wanted.dim() == 2 else torch.float32).float().numpy()
            place = one.name.split(".")[2] if one.name.startswith("blk") else ""
            if place in heads:
                wanted = gguf_files.paired(wanted, heads[place])
            assert one.tensor_type.name == (kind.upper() if wanted.ndim == 2 else "F32")
            assert np.array_equal(found.reshape(wanted.shape), wanted), one.name
    assert set(theirs) == ({"rope_freqs.weight"} if name == "llama" else set())
    assert all(one.data_offset % 32 == 0 for one in reader.tensors)
    number = reader.get_field("general.file_type").contents()
    assert number == {"bf16": 32, "f16": 1, "f32": 0}[kind]


def test_a_gguf_files_own_tokenizer_is_copied(tmp_path: Path) -> None:
    folder = make(tmp_path, "qwen3")
    keys = gguf_files.words(131, 126) | {
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.scores": [0.5] * 131,
        "tokenizer.chat_template.tool_use": "a template",
    }
    file = gguf_files.write(tmp_path / "m.gguf", folder, keys, kind=None)
    arguments = [str(file), str(tuned(folder)), str(tmp_path / "out.gguf")]
    assert commands.main(["export", *arguments, "--gguf", "--type", "f32"]) == 0
    one, other = (gguf_header.read_header(place) for place in (file, tmp_path / "out.gguf"))
    for key in keys:
        assert (other.values[key], other.types[key]) == (one.values[key], one.types[key])
    model = tinsmith.Model(file, **OPTIONS)
    wanted = model.logprobs(TOKENS, adapter=model.load_lora(folder.with_name("adapter")))
    found = tinsmith.Model(tmp_path / "out.gguf", **OPTIONS).logprobs(TOKENS)
    assert tiny_models.error(found, wanted) < 1e-5


# ---- tokenizers ----

FULL = GPT2 | {
    "tokenizer.ggml.unknown_token_id": 263,
    "tokenizer.ggml.padding_token_id": 264,
    "tokenizer.chat_template": "one",
    "tokenizer.chat_template.tool_use": "two",
}


def folder_with(tmp_path: Path, keys: dict[str, Any]) -> Path:
    """A folder with a tokenizer alone."""
    (tmp_path / "config.json").write_text("{}")
    return lay_tokenizer(tmp_path, keys)


@pytest.mark.parametrize("bos", (True, False))
@pytest.mark.parametrize("eos", (True, False))
@pytest.mark.parametrize("pre", gguf_tokenizer.PRE)
def test_a_tokenizer_that_was_read_is_written_alike(
    pre: str, bos: bool, eos: bool, tmp_path: Path
) -> None:
    added = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    keys = FULL | added | {"tokenizer.ggml.pre": pre}
    found = keys_of(folder_with(tmp_path, keys), 265, [264])
    types = [1] * 263 + [3, 3]  # a token with a name, such as eos, is special
    assert found == keys | {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.ggml.token_type": types,
    }


def test_ids_without_a_token_are_filled(tmp_path: Path) -> None:
    keys = GPT2 | {"tokenizer.ggml.pre": "gpt-2"}
    found = keys_of(folder_with(tmp_path, keys), 267, [264])
    assert found["tokenizer.ggml.tokens"][265:] == ["[PAD265]", "[PAD266]"]
    assert found["tokenizer.ggml.token_type"] == [1] * 263 + [3, 3, 5, 5]


def test_names_without_a_row_are_left_out(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, GPT2 | {"tokenizer.ggml.pre": "gpt-2"})
    wanted = keys_of(folder, 265, [264])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"pad_token": "[PAD]", "image_token": "<i>"}
    settings["mask_token"] = {"content": "<m>", "lstrip": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    found = keys_of(folder, 265, [264])
    assert found == {key: one for key, one in wanted.items() if "padding" not in key}


def test_all_ends_of_a_sequence_are_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, GPT2 | {"tokenizer.ggml.pre": "gpt-2"})
    for ends, wanted in (
        ([7, 264, 9], {"eos": 264, "eot": 7, "eom": 9}),
        ([7, 9], {"eos": 7, "eot": 9}),
        ([264], {"eos": 264}),
    ):
        found = keys_of(folder, 265, ends)
        names = {f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")}
        assert {key: found[key] for key in names & found.keys()} == {
            f"tokenizer.ggml.{name}_token_id": index for name, index in wanted.items()
        }
    with pytest.raises(ValueError, match="has 4 tokens that end a sequence"):
        keys_of(folder, 265, [1, 2, 3, 4])


@pytest.mark.parametrize(("maker", "pre"), ((Qwen2Tokenizer, "qwen2"), (GPT2Tokenizer, "gpt-2")))
def test_transformers_own_tokenizers_are_known(maker: Any, pre: str, tmp_path: Path) -> None:
    vocab = {token: index for index, token in enumerate(GPT2["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in GPT2["tokenizer.ggml.merges"]]
    made = maker(vocab=vocab, merges=merges, chat_template="mine")
    made.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    known = tokenizer.read(tmp_path).tokens
    keys = keys_of(tmp_path, len(known), [made.eos_token_id])
    assert keys["tokenizer.ggml.pre"] == pre
    assert keys["tokenizer.ggml.merges"] == GPT2["tokenizer.ggml.merges"]
    assert keys["tokenizer.ggml.eos_token_id"] == known["<|endoftext|>"]
    assert keys["tokenizer.chat_template"] == "mine"
    header = gguf_header.Header(Path("a.gguf"), keys, {}, {})
    again = Tokenizer.from_str(json.dumps(gguf_tokenizer.read_tokenizer(header)[0]))
    for text in (*TEXTS, "1234 the's 'S <|endoftext|>"):
        assert again.encode(text).ids == made(text)["input_ids"]


def test_a_llamas_bos_is_found_behind_its_bytes(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, GPT2 | {"tokenizer.ggml.pre": "llama-bpe"})
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    steps = [{"type": "ByteLevel", "trim_offsets": False}, content["post_processor"]]
    content["post_processor"] = {"type": "Sequence", "processors": steps}
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    file.write_text(json.dumps(content))
    keys = keys_of(folder, 265, [264])
    assert (keys["tokenizer.ggml.pre"], keys["tokenizer.ggml.bos_token_id"]) == ("llama-bpe", 263)
    assert keys["tokenizer.ggml.add_bos_token"] and not keys["tokenizer.ggml.add_eos_token"]
    assert keys["tokenizer.ggml.merges"] == GPT2["tokenizer.ggml.merges"]


# ---- what is refused ----

DIGITS = {"type": "Digits", "individual_digits": False}
AROUND = [{"SpecialToken": {"id": "<s>"}}, {"SpecialToken": {"id": "<s>"}}]
Change = Callable[[dict[str, Any]], Any]
ODD: dict[str, tuple[Change, str]] = {
    "a pre-tokenizer": (
        lambda said: said["pre_tokenizer"].update(DIGITS),
        "gpt-2, gpt-4o, llama-bpe, qwen2, smollm are",
    ),
    "a space before": (
        lambda said: said["pre_tokenizer"].update(add_prefix_space=True), "has no name here",
    ),
    "a normalizer": (lambda said: said.update(normalizer={"type": "NFKC"}), "has no name here"),
    "whole words": (lambda said: said["model"].update(ignore_merges=True), "has no name here"),
    "a model": (lambda said: said["model"].update(type="WordPiece"), "'WordPiece', not byte-level"),
    "bytes": (lambda said: said["model"].update(byte_fallback=True), "not byte-level BPE"),
    "a token's spaces": (
        lambda said: said["added_tokens"][0].update(lstrip=True), "'<s>' has lstrip, which",
    ),
    "two before": (
        lambda said: said["post_processor"].update(single=AROUND), "llama.cpp can't have what",
    ),
    "a processor": (
        lambda said: said.update(post_processor={"type": "BertProcessing"}), "can't have what",
    ),
    "no merges": (lambda said: said["model"].update(merges=[]), "has no merges"),
    "a merge": (
        lambda said: said["model"].update(merges=[["a b", "c"]]), "is not of two tokens without",
    ),
    "an id": (lambda said: said["model"]["vocab"].update(x=300), "'x' has the id 300, the model"),
    "one id": (lambda said: said["model"]["vocab"].update(x=5), "have one id"),
    "a name": (
        lambda said: said["model"]["vocab"].update({"[PAD266]": 265}), "is called [PAD...]",
    ),
    "a form": (lambda said: said.update(pre_tokenizer=["x"]), "is not a tokenizer: "),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(what: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, GPT2 | {"tokenizer.ggml.pre": "gpt-2"})
    change, message = ODD[what]
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError) as caught:
        keys_of(folder, 267, [264])
    assert message in str(caught.value)


def test_sentencepiece_is_refused_but_for_a_file_that_has_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not byte-level BPE"):
        keys_of(folder_with(tmp_path, SPM), 300, [2])


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    keys = {key: value for key, value in GPT2.items() if "eos" not in key}
    with pytest.raises(ValueError, match="names no token that ends a sequence"):
        keys_of(folder_with(tmp_path, keys | {"tokenizer.ggml.pre": "gpt-2"}), 265, [])


REFUSED = {
    "mistral": "of the family mistral can't be written to a GGUF file; llama, qwen2, qwen3 can",
    "qwen3_5": "of the family qwen3_5 can't be written",
    "qwen2-window": "the sliding window can't be written",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cant_be_written_is_refused_first(name: str, tmp_path: Path) -> None:
    folder = tiny_models.make(spec_of(name), tmp_path / "model")
    with pytest.raises(ValueError) as caught:
        export_gguf(folder, tmp_path / "no adapter", tmp_path / "out.gguf")
    assert REFUSED[name] in str(caught.value)


def test_rope_factors_of_another_family_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, "qwen3")
    file = folder / "config.json"
    rope = {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": tiny_models.LLAMA3}
    file.write_text(json.dumps(json.loads(file.read_text()) | rope))
    with pytest.raises(ValueError, match="rope scaling can't be written to a GGUF file of the fam"):
        export_gguf(folder, tmp_path / "no adapter", tmp_path / "out.gguf")


def test_what_the_command_refuses(tmp_path: Path, capsys: Any) -> None:
    folder = make(tmp_path, "qwen3")
    adapter, taken = tuned(folder), tmp_path / "taken.gguf"
    taken.write_text("mine")
    for arguments, code, sentence in (
        ((tmp_path / "out", "--gguf"), 1, "a GGUF file's name should end in .gguf"),
        ((taken, "--gguf"), 1, f"{taken} exists; choose another name"),
        ((tmp_path / "out", "--type", "f16"), 1, "--type is a GGUF file's: add --gguf"),
        ((tmp_path / "out.gguf",), 1, "out.gguf would be a folder: add --gguf, or choose"),
        ((tmp_path / "out.gguf", "--gguf", "--type", "q8_0"), 2, "invalid choice"),
    ):
        command = ["export", str(folder), str(adapter), *map(str, arguments)]
        assert commands.main(command) == code
        assert sentence in capsys.readouterr().err
    assert taken.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == [
        "adapter", "qwen3", "taken.gguf",
    ]  # fmt: skip


def test_numbers_beyond_f16_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    folder = make(tmp_path, "qwen3")
    with safetensors_io.open_folder(folder) as base:
        wide = {key: np.array(base[key]) for key in base}
    wide["model.layers.1.mlp.up_proj.weight"][3, 4] = 7e4
    safetensors_io.write(folder / "model.safetensors", wide)
    adapter, out = tuned(folder), tmp_path / "here/out.gguf"
    with pytest.raises(ValueError, match=r"blk.1.ffn_up.weight, in f16, has inf at \[3, 4\]"):
        export_gguf(folder, adapter, out, "f16")
    assert not list(out.parent.iterdir())
    export_gguf(folder, adapter, out)
    assert [file.name for file in out.parent.iterdir()] == ["out.gguf"]


@pytest.mark.parametrize("where", ("the header", "the end"))
def test_a_full_disk_leaves_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = make(tmp_path, "qwen3")
    adapter, out = tuned(folder), tmp_path / "here/out.gguf"
    if where == "the header":
        monkeypatch.setattr(gguf.GGUFWriter, "write_kv_data_to_file", full)
    else:
        monkeypatch.setattr(os, "fsync", full)
        out.parent.mkdir()
    with pytest.raises(OSError, match=r"the disk is full: the model .*out.gguf was not written"):
        export_gguf(folder, adapter, out)
    assert not list(out.parent.iterdir())


# ---- llama.cpp ----


def in_llama(file: Path, **options: Any) -> Any:
    """A file in llama.cpp, its cache in f32."""
    import llama_cpp

    settings = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    f32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    return llama_cpp.Llama(str(file), **settings, **f32, **options)


@needs_llama
@pytest.mark.parametrize("name", ("llama", "llama-tied", "qwen2", "qwen3", "qwen3-tied"))
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path, name, dtype=torch.float32)
    export_gguf(folder, tuned(folder), tmp_path / "out.gguf", "f32")
    other = in_llama(tmp_path / "out.gguf", logits_all=True)
    other.eval(TOKENS.tolist())
    logits = torch.from_numpy(np.array(other.scores[: len(TOKENS)], np.float64))
    theirs = torch.log_softmax(logits, -1)[range(len(TOKENS) - 1), TOKENS[1:]].numpy()
    ours = tinsmith.Model(tmp_path / "out.gguf", **OPTIONS).logprobs(TOKENS)
    assert np.abs(ours - theirs).max() < 1e-3


@needs_llama
@pytest.mark.parametrize("pre", gguf_tokenizer.PRE)
def test_llama_cpp_cuts_texts_alike(pre: str, tmp_path: Path) -> None:
    vocab = len(GPT2["tokenizer.ggml.tokens"])
    spec = tiny_models.SPECS["qwen3"]
    spec = replace(spec, config={**spec.config, "vocab_size": vocab})
    folder = tiny_models.make(spec, tmp_path / "model")
    lay_tokenizer(folder, GPT2 | {"tokenizer.ggml.pre": pre})
    export_gguf(folder, tuned(folder), tmp_path / "out.gguf")
    other = in_llama(tmp_path / "out.gguf", vocab_only=True)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (*TEXTS, "1234 the's 'S'll 12 thethe", "a<s>b</s>c"):
        assert other.tokenize(text.encode(), special=True) == ours.encode(text).ids, text


@needs_llama
def test_llama_cpp_answers_as_tinsmith_does(smollm2: Path, tmp_path: Path) -> None:  # noqa: F811
    model = tinsmith.Model("smollm2", **OPTIONS)
    saved(model, tmp_path / "adapter")
    export_gguf(model.path, tmp_path / "adapter", tmp_path / "out.gguf", "f32")
    merged = tinsmith.Model(tmp_path / "out.gguf", **OPTIONS)
    chat, other = Chat(merged.path), in_llama(tmp_path / "out.gguf")
    for text in TEXTS:
        prompt = chat.encode(text, special=True)
        assert other.tokenize(text.encode(), special=True) == prompt
        [ours] = merged.sampler().sample(prompt, max_tokens=24, temperature=0.0)
        drawn = other.generate(prompt, temp=0.0, repeat_penalty=1.0)
        theirs = [token for token, _ in zip(drawn, range(24), strict=False)]
        assert ours.tokens.tolist() == theirs
