"""Rotary frequencies of every kind against transformers: llama3's, and YaRN's with its factor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.model_folders import changed
from support.tiny_models import (
    LLAMA3,
    YARN,
    as_double,
    call,
    datum,
    error,
    logprobs,
    reference,
    targets_of,
    tokens_of,
)
from tinsmith import _core
from tinsmith.models import registry
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


@pytest.mark.parametrize("low", (None, 1.0, 2.0), ids=("default", "llama3", "llama3 from 2"))
@pytest.mark.parametrize("theta", (1e4, 5e5, 1e6))
@pytest.mark.parametrize("width", (64, 80, 128))
def test_rotary_frequencies_equal_transformers(
    low: float | None, theta: float, width: int, tmp_path: Path
) -> None:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if low is not None:
        rope |= LLAMA3 | {"rope_theta": theta, "low_freq_factor": low}
        rope["original_max_position_embeddings"] = 8192
    path = changed(tmp_path, "llama", rope_parameters=rope, head_dim=width)
    _, found = registry.read_config(path)
    config = LlamaConfig(head_dim=width, max_position_embeddings=131072, rope_parameters=dict(rope))
    wanted = LlamaRotaryEmbedding(config).inv_freq.numpy()
    assert found.dtype == np.float32 and found.shape == (width // 2,)
    # torch's own power is off in the last bit here and there; everything after it is the same.
    assert (found != wanted).sum() <= 2
    np.testing.assert_allclose(found, wanted, rtol=2e-7)


@pytest.mark.parametrize(
    "changes",
    (
        {},
        {"truncate": False, "factor": 32.0},
        {"attention_factor": 0.7},
        {"mscale": 0.8, "mscale_all_dim": 0.4, "beta_fast": 16.0, "beta_slow": 2.0},
        {"factor": 0.5},
    ),
)
def test_yarn_equals_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    rope = YARN | changes
    path = changed(tmp_path, "qwen3", rope_parameters=rope, head_dim=64)
    sizes, found = registry.read_config(path)
    config = LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_parameters=dict(rope))
    wanted = LlamaRotaryEmbedding(config)
    assert (found != wanted.inv_freq.numpy()).sum() <= 2
    np.testing.assert_allclose(found, wanted.inv_freq.numpy(), rtol=2e-7)
    assert sizes["rope_scale"] == pytest.approx(wanted.attention_scaling, rel=1e-12)


@torch.no_grad()
def test_a_model_with_yarn_equals_transformers(tmp_path: Path) -> None:
    path = changed(tmp_path, "qwen3", rope_parameters=YARN | {"factor": 8.0})
    model = registry.load_model(path, threads=1)
    tokens = tokens_of("qwen3", 90)
    adapter = _core.Adapter(model.core, rank=1)
    (found,), _ = call(adapter, [datum(tokens)], backward=False)
    wanted = targets_of(logprobs(as_double(path), tokens), datum(tokens)).numpy()
    assert np.abs(found - wanted).max() < 5e-5
    assert error(found, targets_of(logprobs(reference("qwen3"), tokens), datum(tokens))) > 1e-3


QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = LLAMA3 | {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("embeddings", "rope", "beside", "wanted"),
    (
        (40960, QWEN, {}, 131072),  # as Qwen3's page says
        (131072, QWEN, {}, 131072),  # the product is there already, as in gpt-oss
        (32768, QWEN | {"factor": 1.5}, {}, 49152),
        (65536, QWEN | {"factor": 1.0}, {}, 32768),
        (160, {"type": "yarn", "factor": 4.0}, {}, 640),  # no original one
        (160, QWEN, {"original_max_position_embeddings": 200}, 800),
        (131072, LONG, {}, 131072),
        (160, None, {}, 160),
    ),
)
def test_the_context_is_vllms(
    embeddings: int,
    rope: dict[str, Any] | None,
    beside: dict[str, int],
    wanted: int,
    tmp_path: Path,
) -> None:
    sizes = {"max_position_embeddings": embeddings, "rope_scaling": rope}
    path = changed(tmp_path, "qwen3", rope_parameters=None, rope_theta=1e6, **sizes, **beside)
    assert registry.read_config(path)[0]["context"] == wanted


def test_a_context_of_no_position_is_refused(tmp_path: Path) -> None:
    path = changed(tmp_path, "qwen3", rope_parameters=YARN | {"factor": 1e-3})
    with pytest.raises(ValueError, match=r"original_max_position_embeddings times factor should"):
        registry.read_config(path)


def test_tokens_behind_max_position_embeddings_are_scored_as_transformers_does(
    tmp_path: Path,
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    path = changed(tmp_path, "qwen3", rope_parameters=rope)
    tokens = tokens_of("qwen3", 600)  # 4·160 may come
    one = datum(tokens[:-1], tokens[1:])
    found, _ = call(_core.Adapter(registry.load_model(path).core, rank=2), [one])
    wanted = targets_of(logprobs(as_double(path), one.tokens), one)
    assert error(found[0], wanted) < 1e-4
