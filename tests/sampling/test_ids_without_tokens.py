"""Ids that the model has and its tokenizer has no token for: they are drawn like others, with the
log-probabilities of the draw, and their text is transformers' for them, which is none."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import tinker
import tinsmith
from support.model_folders import rewritten
from support.tiny_models import PADDING, SPECS
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig
from transformers import AutoTokenizer

FIRST = SPECS["llama"].config["vocab_size"] - PADDING  # of the ids without a token
PROMPT = [5, 17, 80, 33]
ASKED = [{"role": "user", "content": "w5 w17"}]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that prefers such ids: of two rows that are opposite, one is likely."""

    def prefer(tensors: dict[str, np.ndarray]) -> None:
        head = tensors["lm_head.weight"]
        head[FIRST:] *= 3
        head[FIRST + 1] = -head[FIRST]

    found = rewritten(tmp_path_factory.mktemp("padded"), "llama", prefer)
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (found / "tokenizer_config.json").write_text(json.dumps(settings))
    return found


@pytest.fixture(scope="module")
def backend(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    root = tmp_path_factory.mktemp("saved")
    with Backend(ServerConfig({"m": place}, checkpoints=root, device="cpu", threads=1)) as made:
        yield made


def drawn(backend: Backend, count: int = 1, **params: Any) -> list[tinker.SampledSequence]:
    given = tinker.SamplingParams(**{"stop": [], "seed": 3} | params)
    with backend.service_client() as client:
        sampler = client.create_sampling_client(base_model="m").result()
        return sampler.sample(tinker.ModelInput.from_ints(PROMPT), count, given).result().sequences


def test_what_is_drawn_is_what_is_scored(backend: Backend) -> None:
    [greedy] = drawn(backend, max_tokens=20, temperature=0)
    several = drawn(backend, count=20, max_tokens=20)
    tokens = {token for one in several for token in one.tokens}
    assert max(greedy.tokens) >= FIRST and len([one for one in tokens if one >= FIRST]) > 1
    with backend.service_client() as client:
        sampler = client.create_sampling_client(base_model="m").result()
        for one in (greedy, *several[:3]):
            whole = tinker.ModelInput.from_ints([*PROMPT, *one.tokens])
            scores = sampler.compute_logprobs(whole).result()
            assert scores[len(PROMPT) :] == list(one.logprobs)
        known = tinker.ModelInput.from_ints(PROMPT)
        [first] = sampler.sample(
            known, 1, tinker.SamplingParams(max_tokens=1, temperature=0), topk_sample_logprobs=1
        ).result().sequences  # fmt: skip
    assert first.tokens[0] == greedy.tokens[0]


def test_their_text_is_transformers(backend: Backend, place: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(place)
    [one] = drawn(backend, max_tokens=30)
    words = theirs.decode(one.tokens).split()
    assert len(one.tokens) == 30 > len(words) and max(one.tokens) >= FIRST
    client = openai.OpenAI(base_url=f"{backend.url}/v1", api_key="tml-x", max_retries=0)
    asked = {"model": "m", "max_tokens": 30, "seed": 3}
    whole = client.completions.create(prompt=PROMPT, logprobs=1, **asked).choices[0]
    assert whole.text.replace(" ", "") == "".join(words)
    stream = client.completions.create(prompt=PROMPT, stream=True, **asked)
    assert "".join(part.choices[0].text for part in stream) == whole.text
    cut = client.completions.create(prompt=PROMPT, stop=words[2], **asked).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(words[2])]
    with tinsmith.Model(place, device="cpu", threads=1) as model:
        [mine] = model.sampler().sample(PROMPT, max_tokens=30, seed=3, stop=[])
        assert model.tokenizer.decode(mine.tokens) == theirs.decode(mine.tokens)
        assert len(model.tokenizer.pieces(mine.tokens)) == len(mine.tokens)


def test_chats_go_on_where_one_is_drawn(backend: Backend) -> None:
    client = openai.OpenAI(base_url=f"{backend.url}/v1", api_key="tml-x", max_retries=0)
    asked = {"model": "m", "messages": ASKED, "max_tokens": 30}
    said = client.chat.completions.create(logprobs=True, top_logprobs=3, **asked).choices[0]
    assert len(said.logprobs.content) == 30
    assert "" in [entry.token for entry in said.logprobs.content]
    other = anthropic.Anthropic(base_url=backend.url, api_key="tml-x", max_retries=0)
    assert other.messages.create(**asked).usage.output_tokens == 30
