"""gpt-oss folders whose experts are in MXFP4, against transformers' dequantisation."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from support.expert_models import every_expert
from support.tiny_models import (
    SPECS,
    YARN,
    Spec,
    call,
    datum,
    in_double,
    logprobs,
    make,
    randomize,
    targets_of,
    tokens_of,
)
from tinker_cookbook import weights as cookbook
from tinsmith import _core
from tinsmith.checkpoints import checkpoint, peft
from tinsmith.checkpoints.export import export
from tinsmith.cli import commands
from tinsmith.formats import mxfp4, quantization, safetensors_io
from tinsmith.models import registry
from tinsmith.system.format import readable
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

NAME = "gpt_oss"
SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 8, "sliding_window": 32}
LEFT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": LEFT}
STEM = "model.layers.0.mlp.experts."


def packed(
    path: Path, change: Callable[[dict[str, Any]], object] = lambda tensors: None, **sizes: int
) -> Path:
    """A random gpt-oss in bf16 whose experts' matrices are random blocks and scales."""
    rope = YARN | {"truncate": False}
    config = {**SPECS[NAME].config, **SIZES, **sizes, "rope_parameters": rope}
    make(Spec(NAME, config, torch.bfloat16), path)
    rng, file = np.random.default_rng(3), path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, cols, rows = tensors.pop(name).shape
        shape = (count, rows, cols // 32)
        blocks = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
        tensors[f"{name}_blocks"] = torch.from_numpy(blocks)
        tensors[f"{name}_scales"] = torch.from_numpy(rng.integers(121, 126, shape, dtype=np.uint8))
    change(tensors)
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    said = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**said, "quantization_config": QUANTIZED}))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("packed") / "m")


def theirs(path: Path) -> torch.nn.Module:
    """The folder as transformers dequantises it, in float64."""
    model = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    return in_double(model.double()).eval()


# ---- numbers ----


def test_every_byte_with_every_scale_is_transformers_bit_for_bit() -> None:
    scales = np.arange(256, dtype=np.uint8)[None, :].repeat(16, 0)
    blocks = np.arange(256, dtype=np.uint8).reshape(16, 1, 16).repeat(256, 1)
    wanted = convert_moe_packed_tensors(*(torch.from_numpy(one)[None] for one in (blocks, scales)))
    bits = wanted[0].view(torch.int16).numpy().view(np.uint16).T
    found = mxfp4.unpack(blocks, scales)
    np.testing.assert_array_equal(found, bits)
    finite = np.isfinite(safetensors_io.widen(found)).reshape(16, 256, 32).all((0, 2))
    assert finite[:253].all() and not finite[253:].any()  # 6·2^125 is the largest


def test_the_tensors_are_transformers_bit_for_bit(base: Path) -> None:
    wanted = theirs(base).state_dict()
    with quantization.open_folder(base) as tensors:
        assert {name for name in tensors if tensors.entry(name).dtype == "MXFP4"} == {
            f"model.layers.{layer}.mlp.experts.{kind}_proj"
            for layer in (0, 1)
            for kind in ("gate_up", "down")
        }
        for name in tensors:
            np.testing.assert_array_equal(safetensors_io.widen(tensors[name]), wanted[name].numpy())


def test_the_bytes_of_a_matrix_are_handed_on_as_they_lie(base: Path) -> None:
    with quantization.open_folder(base) as tensors, safetensors_io.open_folder(base) as raw:
        name = f"{STEM}gate_up_proj"
        blocks, scales = tensors._stored[name].packed(tensors.bytes, 5)
        assert (blocks.shape, scales.shape) == ((64, 2, 16), (64, 2))
        for end, part in (("_blocks", blocks), ("_scales", scales)):
            entry = raw.entry(name + end)
            whole = np.fromfile(entry.file, np.uint8, entry.size, offset=entry.begin)
            np.testing.assert_array_equal(part, whole.reshape(entry.shape)[5])
        np.testing.assert_array_equal(mxfp4.unpack(blocks, scales).T, tensors.part(name, 5))


def test_logprobs_are_those_of_transformers(base: Path) -> None:
    model = registry.load_model(base, threads=1)
    assert model.kind == "bf16"
    one = datum(tokens_of(NAME, 90))
    with torch.no_grad():
        wanted = targets_of(logprobs(theirs(base), one.tokens), one).numpy()
    (found,), _ = call(_core.Adapter(model.core, rank=1), [one], backward=False)
    assert np.abs(found - wanted).max() < 5e-5


def test_experts_are_widened_one_by_one(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 64}
    model = registry.inspect_model(packed(tmp_path / "m", **sizes), weights="bf16")
    slots = registry.open_core(model, threads=1).slots
    mxfp4.unpack(np.zeros((1, 1, 16), np.uint8), np.zeros((1, 1), np.uint8))  # makes the table
    tracemalloc.start()
    try:
        largest = max(piece.array.nbytes for piece in registry.read_weights(model, slots))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    expert, tensor = 2 * 128 * 128, 64 * 2 * 256 * 128
    assert largest < 2 * expert and peak < tensor / 4


# ---- what follows ----


def adapter_on(base: Path, path: Path) -> _core.Adapter:
    """A random adapter on the folder, and its checkpoint."""
    model = registry.load_model(base, threads=1)
    adapter = randomize(_core.Adapter(model.core, rank=3, alpha=8.0))
    meta = checkpoint.Meta(
        str(base), 3, 8.0, 0, True, True, True, kind="weights", step=0, user_metadata={},
        created="2026-11-24T12:00:00+00:00", ttl_seconds=None,
    )  # fmt: skip
    checkpoint.save(path, model.family, adapter, meta, optimizer=False)
    return adapter


def test_a_merge_is_in_bf16_and_transformers_reads_it(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = adapter_on(base, tmp_path / "a")
    assert commands.main(["export", str(base), str(tmp_path / "a"), str(tmp_path / "out")]) == 0
    assert f"what {base} has in MXFP4 is in bf16 there" in capsys.readouterr().out
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert registry.load_model(tmp_path / "out", threads=1).kind == "bf16"
    one = datum(tokens_of(NAME, 70))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        wanted = targets_of(logprobs(in_double(model.double()), one.tokens), one).numpy()
    (found,), _ = call(adapter, [one], backward=False)
    plain, _ = call(_core.Adapter(adapter.model, rank=1), [one], backward=False)
    # The sums are rounded to bf16, which sends some rows to other experts; most it hardly changes.
    assert np.median(np.abs(found - wanted)) < 0.03 * np.median(np.abs(found - plain[0]))


def test_an_exact_merge_is_the_adapters_own_sum(base: Path, tmp_path: Path) -> None:
    """Of one expert's matrices, from the file's blocks and the adapter's factors."""
    adapter_on(base, tmp_path / "a")
    export(base, tmp_path / "a", tmp_path / "out")
    with (
        safetensors_io.open_folder(tmp_path / "out") as merged,
        quantization.open_folder(base) as before,
        safetensors_io.open_file(tmp_path / "a" / checkpoint.ADAPTER_FILE) as lora,
    ):
        for kind, module, lines in (("gate_up", "w1", 0), ("gate_up", "w3", 1), ("down", "w2", 0)):
            a, b = (
                lora[f"base_model.model.{STEM}{module}.lora_{letter}.weight"] for letter in "AB"
            )
            a, b = (one[min(5, len(one) - 1)] for one in (a, b))
            step = 2 if kind == "gate_up" else 1
            old, new = (
                safetensors_io.widen(tensors[f"{STEM}{kind}_proj"])[5].T[lines::step]
                for tensors in (before, merged)
            )
            np.testing.assert_allclose(new, old + np.float32(8 / 3) * (b @ a), rtol=2**-8)


def test_the_cookbooks_tools_take_its_adapters(base: Path, tmp_path: Path) -> None:
    """Its PEFT adapter is the adapter. Its merge is ours, rounded to MXFP4 again."""
    adapter = adapter_on(base, tmp_path / "a")
    for build, out in ((cookbook.build_lora_adapter, "peft"), (cookbook.build_hf_model, "merged")):
        paths = {"base_model": base, "adapter_path": tmp_path / "a", "output_path": tmp_path / out}
        build(**{key: str(path) for key, path in paths.items()})
    model = registry.load_model(base, threads=1)
    again = peft.load_adapter(tmp_path / "peft", model, optimizer=False)
    np.testing.assert_array_equal(again.read("weights"), adapter.read("weights"))
    export(base, tmp_path / "a", tmp_path / "ours")
    registry.load_model(tmp_path / "merged", threads=1)
    with (
        quantization.open_folder(tmp_path / "merged") as theirs,
        safetensors_io.open_folder(tmp_path / "ours") as ours,
        quantization.open_folder(base) as before,
    ):
        assert set(theirs) == set(ours)
        for name in (f"{STEM}gate_up_proj", f"{STEM}down_proj"):
            assert theirs.entry(name).dtype == "MXFP4"
            wanted = safetensors_io.widen(ours[name])
            off, moved = (
                np.linalg.norm(safetensors_io.widen(one[name]) - wanted) for one in (theirs, before)
            )
            assert off < moved and off < 0.15 * np.linalg.norm(wanted), name


def test_info_and_doctor_say_that_it_is_kept_or_widened(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["info", str(base)]) == 0
    assert "77% of its matrices in mxfp4, 23% of its matrices in bf16" in capsys.readouterr().out
    assert commands.main(["info", str(base), "--weights", "bf16"]) == 0
    size = sum(8 * rows * (cols // 32) * 17 for rows, cols in ((64, 64), (64, 32))) * 2
    shown = capsys.readouterr().out
    assert f"{readable(size)} of the files are MXFP4, which is widened in memory" in shown
    assert commands.main(["doctor"]) == 0
    assert "MXFP4 and GGUF's Q8_0, Q4_0, Q4_1, on the CPU Q4_K, Q5_K, Q6_K, FP8, NF4 too;" in (
        capsys.readouterr().out
    )


def test_widened_and_kept_in_4_bits_it_is_the_same_model(base: Path) -> None:
    one = datum(tokens_of(NAME, 70))
    wide, narrow = (registry.load_model(base, weights=kind) for kind in ("bf16", "stored"))
    assert not wide.packed and set(narrow.packed.values()) == {"mxfp4"}
    assert narrow.weight_bytes < 0.6 * wide.weight_bytes
    found, wanted = (
        call(_core.Adapter(each.core, rank=1), [one], backward=False)[0][0]
        for each in (narrow, wide)
    )
    np.testing.assert_array_equal(found, wanted)


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors[f"{STEM}gate_up_proj_blocks"][3, 7, 1, :] = 0
        tensors[f"{STEM}gate_up_proj_scales"][3, 7, 1] = 255

    with pytest.raises(ValueError, match="gate_up_proj has a block whose scale is 255"):
        registry.load_model(packed(tmp_path / "m", change))


# ---- what is refused ----


def replaced(name: str, tensor: torch.Tensor | None) -> Callable[[dict[str, Any]], None]:
    """A change of the tensors: one is another, or is not there."""

    def change(tensors: dict[str, Any]) -> None:
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor

    return change


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("gate_up_proj_scales", None, r"have no .*gate_up_proj_scales, which belongs to .*gate_up"),
        ("down_proj_blocks", None, r"the files have no .*down_proj_blocks, which belongs to"),
        (
            "down_proj_scales",
            torch.ones(8, 64, 2, dtype=torch.uint8),
            r"down_proj_blocks is \(8, 64, 1, 16\), and .*down_proj_scales is \(8, 64, 2\); they",
        ),
        (
            "down_proj_scales",
            torch.ones(8, 64, 1, dtype=torch.bfloat16),
            r"down_proj_scales is BF16; it should be U8",
        ),
        ("down_proj", torch.ones(8, 32, 64), "down_proj is there beside the parts of it"),
    ],
)
def test_blocks_without_their_scales_are_refused(
    name: str, tensor: torch.Tensor | None, sentence: str, tmp_path: Path
) -> None:
    path = packed(tmp_path / "m", replaced(STEM + name, tensor))
    with pytest.raises(ValueError, match=sentence):
        registry.load_model(path)


def test_experts_of_another_size_are_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        for end in ("_blocks", "_scales"):
            tensors[f"{STEM}down_proj{end}"] = tensors[f"{STEM}down_proj{end}"][:, :-1].clone()

    with pytest.raises(
        ValueError, match=r"layer 0 e_down: file has \(8, 32, 63\), the model needs \(8, 32, 64\)"
    ):
        registry.load_model(packed(tmp_path / "m", change))


def test_a_number_that_is_not_finite_is_found_where_it_lies(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors[f"{STEM}gate_up_proj_blocks"][3, 7, 1, 2] = 0x10  # 0 and 0.5
        tensors[f"{STEM}gate_up_proj_blocks"][3, 7, 1, 3:] = 0
        tensors[f"{STEM}gate_up_proj_blocks"][3, 7, 1, 5] = 0x02  # 1 and 0
        tensors[f"{STEM}gate_up_proj_blocks"][3, 7, 1, :2] = 0
        tensors[f"{STEM}gate_up_proj_scales"][3, 7, 1] = 255

    with pytest.raises(ValueError, match=r"experts\.gate_up_proj has inf at \[3, 42, 7\]: all of"):
        registry.load_model(packed(tmp_path / "m", change))


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"quant_method": "fp8"}, "is 'fp8', which is not supported; only mxfp4 is"),
        ({"bits": 4}, r"is {'bits': 4}, which is not supported; only mxfp4 is"),
        ({**QUANTIZED, "block_size": 16}, "has block_size 16, which is not supported"),
        ("mxfp8", "is 'mxfp8', which is not supported"),
    ],
)
def test_another_quantisation_is_refused_by_name(
    said: Any, sentence: str, base: Path, tmp_path: Path
) -> None:
    content = json.loads((base / "config.json").read_text()) | {"quantization_config": said}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"config\.json: quantization_config {sentence}"):
        registry.read_config(tmp_path)


def test_blocks_that_config_json_does_not_speak_of_are_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "m")
    said = json.loads((path / "config.json").read_text())
    del said["quantization_config"]
    (path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"e_gate: the file has no .*experts\.gate_up_proj"):
        registry.load_model(path)


def test_some_experts_may_be_left_in_bf16(base: Path, tmp_path: Path) -> None:
    """The names of tensors say which are quantised."""

    def widen(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            if name.endswith("_blocks"):
                stem = name.removesuffix("_blocks")
                pair = (tensors.pop(stem + end) for end in ("_blocks", "_scales"))
                tensors[stem] = convert_moe_packed_tensors(*pair)

    model = registry.load_model(packed(tmp_path / "m", widen), threads=1)
    one = datum(tokens_of(NAME, 40))
    found, wanted = (
        call(_core.Adapter(each.core, rank=1), [one], backward=False)[0][0]
        for each in (model, registry.load_model(base, threads=1))
    )
    np.testing.assert_array_equal(found, wanted)


def test_the_reference_of_experts_is_transformers_own(base: Path) -> None:
    """`every_expert`, with the limit that transformers has, against GptOssExperts.forward."""
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=Mxfp4Config(dequantize=True), experts_implementation="eager"
    ).double()
    experts = model.model.layers[0].mlp.experts
    experts.config.swiglu_limit = experts.limit = 0.7
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(9, 64)))
    share, index = torch.topk(torch.softmax(torch.randn(9, 8, dtype=torch.float64), -1), 3)
    wanted = type(experts).forward(experts, x, index, share)
    torch.testing.assert_close(every_expert(experts, x, index, share), wanted)
