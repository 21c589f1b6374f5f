"""Vision towers: what of config.json, tensors and processor is read, and why a model can't see."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from support import gguf_files, tiny_models, vision_reference
from support.quantized_files import FP8, fp8
from support.tiny_models import call, datum, error
from support.vision_models import SEEING, folder
from tinsmith import _core
from tinsmith.checkpoints import checkpoint
from tinsmith.checkpoints.export import export
from tinsmith.cli import commands
from tinsmith.formats import safetensors_io
from tinsmith.models import registry, vision
from transformers import AutoConfig


def copied(tmp_path: Path, name: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model's folder after `change` was called on the content of its config.json."""
    path = tmp_path / "model"
    shutil.copytree(folder(name), path)
    content = json.loads((path / "config.json").read_text())
    change(content)
    (path / "config.json").write_text(json.dumps(content))
    return path


def with_tensors(tmp_path: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """The same with its tensors in one file."""
    path = copied(tmp_path, name, lambda content: None)
    tensors = {}
    for file in path.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(file)
        file.unlink()
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    safetensors.torch.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def blind(path: Path) -> str:
    """Why a model sees nothing, which computes text as before."""
    model = registry.load_model(path, threads=1)
    assert model.vision is None and model.processor is None and model.no_images
    one = datum([5, 6, 7, 8, 9])
    (found,), _ = call(_core.Adapter(model.core, rank=1), [one], backward=False)
    with torch.no_grad():
        wanted = vision_reference.log_probabilities(folder("qwen3_vl"), [list(one.tokens)])
    assert error(found, tiny_models.targets_of(wanted, one)) < 1e-5
    assert str(path.parent) not in model.no_images  # no client needs to know
    return model.no_images


# ---- config.json ----

# Of qwen3_vl, whose tower has 3 blocks, and whose language model has 4 layers.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another merge": ({"spatial_merge_size": 3}, "spatial_merge_size is 3; only 2 is supported"),
    "other frames": ({"temporal_patch_size": 1}, "temporal_patch_size is 1; only 2 is supported"),
    "four channels": ({"in_channels": 4}, "in_channels is 4; only 3 is supported"),
    "another unit": (
        {"hidden_act": "gelu"},
        "hidden_act is 'gelu'; only gelu_pytorch_tanh is supported",
    ),
    "no depth": ({"depth": 0}, "depth should be a positive integer, found 0"),
    "a depth that is none": ({"depth": "3"}, "depth should be a positive integer, found '3'"),
    "patches of two sides": (
        {"patch_size": [16, 16]},
        r"patch_size should be a positive integer, found \[16, 16\]",
    ),
    "heads of 6": (
        {"num_heads": 8},
        "8 heads in hidden_size 48; a head should be a multiple of 4 wide, and at most 256",
    ),
    "heads that don't divide": ({"num_heads": 5}, "5 heads in hidden_size 48; a head should"),
    "heads that are too wide": (
        {"hidden_size": 520, "num_heads": 2},
        "has 2 heads in hidden_size 520; a head should be a multiple of 4 wide, and at most 256",
    ),
    "no square of positions": (
        {"num_position_embeddings": 50},
        "num_position_embeddings is 50, which is no square",
    ),
    "rows of another width": (
        {"out_hidden_size": 48},
        "out_hidden_size is 48; it should be the language model's hidden_size, 64",
    ),
    "blocks in another order": (
        {"deepstack_visual_indexes": [2, 0]},
        r"deepstack_visual_indexes should be increasing numbers of the 3 blocks, found \[2, 0\]",
    ),
    "a block twice": ({"deepstack_visual_indexes": [1, 1]}, "should be increasing numbers of the"),
    "a block beyond the last": (
        {"deepstack_visual_indexes": [0, 3]},
        "should be increasing numbers of the 3 blocks",
    ),
    "a block below the first": ({"deepstack_visual_indexes": [-1, 2]}, "should be increasing num"),
    "blocks that are no list": ({"deepstack_visual_indexes": 2}, "increasing numbers .* found 2"),
    "blocks that are no numbers": ({"deepstack_visual_indexes": [True]}, "should be increasing"),
    "other angles": (
        {"rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}},
        "rope_parameters is .*; only rope_type axial with rope_theta 10000 is supported",
    ),
    "angles of another kind": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000}},
        "rope_parameters is .*; only rope_type axial with rope_theta 10000 is supported",
    ),
    "angles that are no object": ({"rope_parameters": 1}, "rope_parameters is 1; only rope_type"),
    "patches of another side": ({"patch_size": 14}, r"proj.weight is \(48, 3, 2, 16, 16\), the mo"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_tower_that_is_not_supported_is_a_model_of_text(case: str, tmp_path: Path) -> None:
    said, sentence = REFUSED[case]
    path = copied(tmp_path, "qwen3_vl", lambda content: content["vision_config"].update(said))
    assert re.search(rf"^config\.json: vision_config.*{sentence}|tower: .*{sentence}", blind(path))


def test_as_many_blocks_as_layers_are_refused(tmp_path: Path) -> None:
    """Behind the last layer nothing would be added: only its input is kept for a backward pass."""

    def change(content: dict[str, Any]) -> None:
        content["vision_config"]["deepstack_visual_indexes"] = [0, 1, 2]
        content["text_config"]["num_hidden_layers"] = 3

    def drop(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".layers.3." in name]:
            del tensors[name]

    path = with_tensors(tmp_path, "qwen3_vl", drop)
    content = json.loads((path / "config.json").read_text())
    change(content)
    (path / "config.json").write_text(json.dumps(content))
    said = registry.inspect_model(path).no_images
    assert said == (
        "config.json: vision_config.deepstack_visual_indexes has 3 blocks; it should have at most "
        "8, and fewer than the language model has layers, 3"
    )


def test_more_blocks_than_the_engine_adds_are_refused(tmp_path: Path) -> None:
    path, family = tmp_path / "config.json", registry.read_family(folder("qwen3_vl"))
    for count, fits in ((8, True), (9, False)):
        content = {"vision_config": {"deepstack_visual_indexes": list(range(count))}}
        assert family.tower
        try:
            vision.read_sizes(path, content, family.tower, {"width": 3584, "layers": 36})
        except ValueError as error:
            assert not fits and "has 9 blocks; it should have at most 8, and fewer" in str(error)
        else:
            assert fits


@pytest.mark.parametrize("value", (None, 3, []))
def test_a_folder_without_a_vision_config_is_a_model_of_text(value: Any, tmp_path: Path) -> None:
    path = copied(tmp_path, "qwen3_vl", lambda content: content.update(vision_config=value))
    assert "config.json: vision_config should be an object, found" in blind(path)


ROPE: dict[str, tuple[dict[str, Any], str]] = {
    "two sections": ({"mrope_section": [8, 8]}, "mrope_section should be three numbers of pairs"),
    "too many pairs": ({"mrope_section": [6, 6, 5]}, r"of pairs, 16 together, found \[6, 6, 5\]"),
    "no list": ({"mrope_section": "16"}, "of pairs, 16 together, found '16'"),
    "less than none": ({"mrope_section": [-1, 9, 8]}, r"of pairs, 16 together, found \[-1, 9, 8\]"),
    "no numbers": ({"mrope_section": [6, 5, "5"]}, "of pairs, 16 together, found"),
    "axes that do not take turns": (
        {"mrope_interleaved": False},
        "mrope_interleaved is False; only true is supported",
    ),
}


@pytest.mark.parametrize("case", ROPE)
def test_positions_that_are_not_supported_are_a_model_of_text(case: str, tmp_path: Path) -> None:
    said, sentence = ROPE[case]

    def change(content: dict[str, Any]) -> None:
        content["text_config"]["rope_parameters"].update(said)

    path = copied(tmp_path, "qwen3_vl", change)
    assert re.search(rf"^config\.json: .*{sentence}", blind(path))


@pytest.mark.parametrize("case", ROPE)
def test_positions_that_are_not_supported_have_one_axis(case: str, tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["text_config"]["rope_parameters"].update(ROPE[case][0])

    assert "rope_axis" not in registry.read_config(copied(tmp_path, "qwen3_vl", change))[0]


# A section each for heads of 32 elements, of which Qwen3.5 rotates a quarter of twice as many.
SECTIONS = {
    "qwen3_vl": ([6, 5, 5], [4, 6, 6], [16, 0, 0], [2, 4, 10], [0, 16, 0], None),
    "qwen3_5": ([4, 2, 2], [3, 3, 2], [0, 4, 4], [1, 2, 5], [8, 0, 0], None),
}


@pytest.mark.parametrize(
    ("name", "section"), [(name, one) for name, some in SECTIONS.items() for one in some]
)
def test_pairs_rotate_by_transformers_axes(
    name: str, section: list[int] | None, tmp_path: Path
) -> None:
    def change(content: dict[str, Any]) -> None:
        rope = content["text_config"]["rope_parameters"]
        rope["mrope_section"] = section
        if section is None:
            del rope["mrope_section"]

    path = copied(tmp_path, name, change)
    config, inv_freq = registry.read_config(path)
    made = type(vision_reference.whole(folder(name)).model.language_model.rotary_emb)
    rotary = made(AutoConfig.from_pretrained(path).text_config)
    pairs = len(inv_freq)
    angles = torch.arange(3.0)[:, None, None, None].repeat(1, 1, 1, pairs)  # of an axis: its number
    wanted = rotary.apply_interleaved_mrope(angles, rotary.mrope_section)
    assert config["rope_axis"] == wanted[0, 0].int().tolist()
    assert set(config["rope_axis"]) <= {0, 1, 2} and len(config["rope_axis"]) == pairs


@pytest.mark.parametrize("name", ("qwen3", "qwen3_5-tied"))
def test_a_model_of_text_has_one_axis(name: str) -> None:
    assert "rope_axis" not in registry.read_config(tiny_models.folder(name))[0]


# ---- the image processor ----


def test_a_folder_without_a_processor_is_a_model_of_text(tmp_path: Path) -> None:
    path = copied(tmp_path, "qwen3_vl", lambda content: None)
    (path / "preprocessor_config.json").unlink()
    assert blind(path) == (
        "its folder has no preprocessor_config.json, which belongs to the model: `tinsmith pull` "
        "fetches it"
    )


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            {"patch_size": 14},
            "config.json: vision_config.patch_size is 16, but the image processor's is 14",
        ),
        (
            {"merge_size": 1},
            "vision_config.spatial_merge_size is 2, but the image processor's is 1",
        ),
        ({"temporal_patch_size": 1}, "temporal_patch_size is 2, but the image processor's is 1"),
        ({"do_resize": False}, "preprocessor_config.json: do_resize is False; only True is sup"),
    ],
)
def test_a_processor_that_does_not_fit_is_a_model_of_text(
    said: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = copied(tmp_path, "qwen3_vl", lambda content: None)
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    assert sentence in blind(path)


def test_a_model_without_a_tower_says_so() -> None:
    model = registry.inspect_model(tiny_models.folder("qwen3"))
    assert model.no_images == "config.json names Qwen3ForCausalLM, which has no vision tower"
    assert model.vision is None and model.processor is None


def test_a_gguf_file_has_no_tower(tmp_path: Path) -> None:
    vocab = tiny_models.SPECS["qwen3"].config["vocab_size"]
    words = gguf_files.words(vocab, vocab - tiny_models.PADDING)
    file = gguf_files.write(tmp_path / "model.gguf", tiny_models.folder("qwen3"), words)
    model = registry.inspect_model(registry.find_model(str(file), {}))
    assert model.no_images.startswith("images need a vision tower, which a GGUF file does not have")


@pytest.mark.parametrize("value", (-1, 128, "20", 2.0, True))
def test_an_images_id_that_is_none_is_refused(tmp_path: Path, value: object) -> None:
    path = copied(tmp_path, "qwen3_vl", lambda content: content.update(image_token_id=value))
    assert blind(path) == (
        f"config.json: image_token_id should be an id from 0 to 127, found {value!r}"
    )


def test_images_need_no_id_but_in_chats(tmp_path: Path) -> None:
    path = copied(tmp_path, "qwen3_vl", lambda content: content.pop("image_token_id"))
    model = registry.inspect_model(path)
    assert model.vision and model.image_token is None
    assert registry.inspect_model(folder("qwen3_vl")).image_token == 20


# ---- tensors ----


def drop(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.pop(name)


def shape(name: str, *sizes: int) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: torch.ones(sizes)})


def rename(old: str, new: str) -> Callable[[dict[str, Any]], object]:
    """Names that begin with `old` begin with `new`."""

    def change(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return change


def drop_all(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if ".visual." in name]:
        del tensors[name]


V = "model.visual."
TENSORS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no tower": (
        drop_all,
        "its folder has no vision tower: its files have no tensor model",
    ),
    "no positions": (drop(V + "pos_embed.weight"), f"the file has no {V}pos_embed.weight"),
    "no bias": (drop(V + "blocks.2.attn.qkv.bias"), f"the file has no {V}blocks.2.attn.qkv.bias"),
    "no second merger": (
        drop(V + "deepstack_merger_list.1.norm.weight"),
        f"the file has no {V}deepstack_merger_list.1.norm.weight",
    ),
    "patches in rows": (
        shape(V + "patch_embed.proj.weight", 48, 1536),
        rf"{V}patch_embed.proj.weight is \(48, 1536\), the model needs \(48, 3, 2, 16, 16\)",
    ),
    "positions of another grid": (
        shape(V + "pos_embed.weight", 36, 48),
        rf"{V}pos_embed.weight is \(36, 48\), the model needs \(49, 48\)",
    ),
    "a norm of a token": (
        shape(V + "merger.norm.weight", 192),
        rf"{V}merger.norm.weight is \(192,\), the model needs \(48,\)",
    ),
    "a norm of a patch": (
        shape(V + "deepstack_merger_list.0.norm.bias", 48),
        rf"{V}deepstack_merger_list.0.norm.bias is \(48,\), the model needs \(192,\)",
    ),
    "a turned matrix": (
        shape(V + "blocks.0.mlp.linear_fc1.weight", 48, 60),
        rf"{V}blocks.0.mlp.linear_fc1.weight is \(48, 60\), the model needs \(60, 48\)",
    ),
    "another type": (
        lambda tensors: tensors.update({V + "merger.norm.bias": torch.ones(48).double()}),
        f"{V}merger.norm.bias is F64; tinsmith reads BF16, F16, F32",
    ),
    "another block": (
        shape(V + "blocks.3.norm1.weight", 48),
        f"the file has {V}blocks.3.norm1.weight, which the vision tower does not use",
    ),
    "others": (
        lambda tensors: tensors.update({V + "a": torch.ones(1), V + "b": torch.ones(1)}),
        f"the file has {V}a and 1 more, which the vision tower does not use",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_a_model_of_text(case: str, tmp_path: Path) -> None:
    change, sentence = TENSORS[case]
    assert re.search(sentence, blind(with_tensors(tmp_path, "qwen3_vl", change)))


def wanted_of(state: dict[str, np.ndarray], place: tuple[str, int]) -> np.ndarray:
    """The numbers of a slot, by transformers' names."""
    slot, index = place
    stem = f"blocks.{index}."
    if slot.startswith("merge_"):
        stem = f"deepstack_merger_list.{index - 1}." if index else "merger."
    stem = "" if slot.startswith(("patch", "pos")) else stem
    slot, end = (slot.removesuffix("_bias"), "bias") if slot.endswith("_bias") else (slot, "weight")
    name = {
        "patch": "patch_embed.proj", "pos": "pos_embed", "qkv": "attn.qkv", "proj": "attn.proj",
        "fc1": "mlp.linear_fc1", "fc2": "mlp.linear_fc2", "merge_norm": "norm",
        "merge_fc1": "linear_fc1", "merge_fc2": "linear_fc2",
    }.get(slot, slot)  # fmt: skip
    return state.pop(f"model.visual.{stem}{name}.{end}")


def slots_of(model: registry.BaseModel) -> list[tuple[str, int, int, int]]:
    """The slots of the engine's tower: rows and columns of a matrix, or of a vector, as the
    positions are."""
    assert model.vision
    with safetensors_io.open_folder(model.path) as tensors:
        shapes = {place: tensors.entry(name).shape for place, name in model.vision.names.items()}
    return [
        (*place, shape[0], int(np.prod(shape[1:])))
        if len(shape) > 1 and place[0] != "pos"
        else (*place, 1, int(np.prod(shape)))
        for place, shape in shapes.items()
    ]


@pytest.mark.parametrize("name", SEEING)
def test_a_towers_numbers_are_transformers(name: str) -> None:
    model = registry.inspect_model(folder(name))
    narrow = SEEING[name].dtype == torch.bfloat16
    assert model.vision and model.vision.kind == ("bf16" if narrow else "f32")
    assert model.no_images == "" and model.processor is model.vision.processor
    state = {
        key: value.numpy()
        for key, value in vision_reference.whole(folder(name)).state_dict().items()
        if ".visual." in key
    }
    numbers = sum(array.size for array in state.values())
    assert model.vision.parameters == numbers
    done = 0
    for part in registry.read_tower(model, slots_of(model)):
        wanted = wanted_of(state, (part.slot, part.index))
        wide = part.array.ndim == 1
        assert part.array.dtype == (np.float32 if wide or not narrow else np.uint16)
        assert part.array.flags.c_contiguous and part.done > done
        done = part.done
        found = safetensors_io.widen(part.array)
        np.testing.assert_array_equal(found, wanted.reshape(found.shape), err_msg=part.slot)
    assert not state and done == part.total


def test_the_sizes_of_a_tower_are_config_jsons() -> None:
    model = registry.inspect_model(folder("qwen3_vl-tied"))
    said = AutoConfig.from_pretrained(folder("qwen3_vl-tied")).vision_config
    assert model.vision and model.vision.config == {
        "depth": said.depth, "width": said.hidden_size, "heads": said.num_heads,
        "ffn": said.intermediate_size, "grid": 5, "out": said.out_hidden_size, "patch": 16,
        "frames": 2, "merge": 2, "deep": [0, 1, 3], "rescale": 1 / 255, "mean": [0.5, 0.4, 0.45],
        "std": [0.5, 0.45, 0.4],
    }  # fmt: skip


def test_keys_that_are_missing_have_transformers_values(tmp_path: Path) -> None:
    """Those of Qwen3-VL-8B: of its tower, config.json need not say more than the width of rows."""
    path = copied(tmp_path, "qwen3_vl", lambda content: content.update(vision_config={}))
    said, content = AutoConfig.from_pretrained(path).vision_config, {"vision_config": {}}
    sizes = vision.read_sizes(path, content, registry.read_family(path).tower,
                              {"width": 3584, "layers": 4})  # fmt: skip
    assert dataclasses.asdict(sizes) == {
        "depth": said.depth, "width": said.hidden_size, "heads": said.num_heads,
        "ffn": said.intermediate_size, "grid": 48, "out": said.out_hidden_size,
        "patch": said.patch_size, "frames": said.temporal_patch_size,
        "merge": said.spatial_merge_size, "deep": tuple(said.deepstack_visual_indexes),
    }  # fmt: skip


@pytest.mark.parametrize("name", ("qwen3_5", "qwen3_vl-tied"))
def test_a_tower_beside_the_language_models_tensors_is_read(name: str, tmp_path: Path) -> None:
    """As transformers 5.5 saves a Qwen3.5."""
    change = rename("model.visual.", "model.language_model.visual.")
    model = registry.inspect_model(with_tensors(tmp_path, name, change))
    plain = registry.inspect_model(folder(name))
    slots = slots_of(plain)
    for one, other in zip(
        registry.read_tower(model, slots), registry.read_tower(plain, slots), strict=True
    ):
        np.testing.assert_array_equal(one.array, other.array)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "f32"),
        ({"weights": "bf16"}, "bf16"),
        ({"weights": "int8"}, "f32"),
        pytest.param({"dtype": "bfloat16"}, "bf16", marks=tiny_models.needs_bf16),
        ({"dtype": "auto"}, "f32"),
    ],
)
def test_a_towers_matrices_have_the_type_of_the_others(options: dict[str, Any], kind: str) -> None:
    """But they never have blocks."""
    model = registry.inspect_model(folder("qwen3_5"), **options)
    assert model.vision and model.vision.kind == kind


def test_one_wide_matrix_keeps_a_towers_numbers(tmp_path: Path) -> None:
    def widen(tensors: dict[str, Any]) -> None:
        tensors[V + "merger.linear_fc2.weight"] = tensors[V + "merger.linear_fc2.weight"].float()

    model = registry.inspect_model(with_tensors(tmp_path, "qwen3_vl-tied", widen))
    assert model.vision and (model.vision.kind, model.kind) == ("f32", "bf16")


@pytest.mark.parametrize(
    ("slot", "name", "place"),
    [
        ("fc1", "blocks.1.mlp.linear_fc1.weight", (59, 47)),
        ("pos", "pos_embed.weight", (3, 4)),
        ("merge_norm_bias", "deepstack_merger_list.0.norm.bias", (191,)),
        ("patch", "patch_embed.proj.weight", (1, 2, 0, 15, 3)),
    ],
)
def test_a_number_of_a_tower_that_is_not_finite_is_found_where_it_lies(
    slot: str, name: str, place: tuple[int, ...], tmp_path: Path
) -> None:
    class Core:
        """An engine that refuses such a number, as the real one."""

        def tower_load(self, slot: str, index: int, array: np.ndarray) -> None:
            if not np.isfinite(array).all():
                raise ValueError(slot)

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[V + name][place] = np.nan

    model = registry.inspect_model(with_tensors(tmp_path, "qwen3_vl", spoil))
    at = ", ".join(map(str, place))
    with pytest.raises(ValueError, match=rf"model\.visual\.{name} has nan at \[{at}\]"):
        for part in registry.read_tower(model, slots_of(model)):
            part.load(Core())


def test_the_tower_of_an_fp8_folder_is_read(tmp_path: Path) -> None:
    """It is in bf16 beside the language model's FP8."""

    def narrow(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            fp8(tensors, name)

    path = with_tensors(tmp_path, "qwen3_vl-tied", narrow)
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"quantization_config": FP8}))
    model, plain = (registry.inspect_model(one) for one in (path, folder("qwen3_vl-tied")))
    assert model.vision == plain.vision and "fp8" in model.packed.values()
    for one, other in zip(
        *(registry.read_tower(each, slots_of(plain)) for each in (model, plain)), strict=True
    ):
        np.testing.assert_array_equal(one.array, other.array)


# ---- what else reads such folders ----


def test_info_shows_the_tower(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert commands.main(["info", str(folder("qwen3_5"))]) == 0
    shown = capsys.readouterr().out
    assert (
        "vision tower: 4 blocks, 1,084,048 parameters, 4.41 MiB when the first image comes; an "
        "image of 1024 × 1024 is 64 tokens\n" in shown
    )
    assert "left aside, because text does not need them: 1 tensors of mtp.*\n" in shown
    path = copied(tmp_path, "qwen3_5", lambda content: None)
    (path / "preprocessor_config.json").unlink()
    assert commands.main(["info", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "no images: its folder has no preprocessor_config.json, which" in shown
    assert re.search(r"left aside, .*: \d\d tensors of model.visual.\*, 1 tensors of mtp", shown)
    assert commands.main(["info", str(tiny_models.folder("qwen3"))]) == 0
    assert "images" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ("qwen3_vl", "qwen3_vl_moe-turned", "qwen3_5_moe"))
def test_a_merged_model_sees_as_before(name: str, tmp_path: Path) -> None:
    base = registry.load_model(folder(name), threads=1)
    adapter = tiny_models.randomize(_core.Adapter(base.core, rank=2))
    lora = vision_reference.with_lora(folder(name), adapter)
    meta = checkpoint.Meta(
        str(folder(name)), 2, adapter.alpha, 0, True, True, True, kind="weights", step=0,
        user_metadata={}, created="2026-11-28T12:00:00+00:00", ttl_seconds=None,
    )  # fmt: skip
    checkpoint.save(tmp_path / "a", base.family, adapter, meta, optimizer=False)
    export(folder(name), tmp_path / "a", tmp_path / "out")
    merged = registry.inspect_model(tmp_path / "out")
    assert merged.vision == dataclasses.replace(base.vision, names=merged.vision.names)
    slots = slots_of(base)
    for one, other in zip(
        registry.read_tower(base, slots), registry.read_tower(merged, slots), strict=True
    ):
        np.testing.assert_array_equal(one.array, other.array)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8))
    parts = [[5, 6, 7, 22], image, [23, 9]]
    with torch.no_grad():
        wanted = vision_reference.log_probabilities(folder(name), parts, lora)
        found = vision_reference.log_probabilities(tmp_path / "out", parts)
    assert error(found, wanted) < (2e-2 if SEEING[name].dtype == torch.bfloat16 else 1e-5)
