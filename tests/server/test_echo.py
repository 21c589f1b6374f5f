"""Completions that echo their prompt, with scores: they are the SDK's, and transformers'. And ids
beside texts, as vLLM's clients ask for them."""

import asyncio
import json
import threading
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tinker
import torch
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect
from support import tokenizer_folders as folders
from support.chat_models import CONTEXT, WEATHER
from support.inference_server import ASKED, SAID, drawn, serve
from tinsmith.chat.chat import Chat
from tinsmith.engine.decoding import SampleRequest
from tinsmith.server.backend import Backend
from tinsmith.server.inference import completions, openai_text, serving
from transformers import AutoModelForCausalLM

TEXT = "Weather in Zürich? I look 你"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory):
    with serve(tmp_path_factory.mktemp("echo")) as found:
        yield found


@pytest.fixture(scope="module")
def one(place) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{place[0].url}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def chat(place) -> Chat:
    return Chat(place[0]._service.bases["tiny"].tokenizer_dir)


def scored(backend: Backend, model: str, prompt: list[int], k: int) -> Any:
    """The SDK's answer with the prompt's scores."""
    place = {"model_path": model} if model.startswith("tinker") else {"base_model": model}
    with backend.service_client() as client:
        sampler = client.create_sampling_client(**place).result()
        given, limit = tinker.ModelInput.from_ints(prompt), tinker.SamplingParams(max_tokens=1)
        asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": k}
        return sampler.sample(given, 1, limit, **asked).result()


def log_softmax(folder: Path, prompt: list[int]) -> NDArray[np.float64]:
    """transformers' log-probabilities of each position's next token, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1).numpy()


def ask(place, **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{place[0].url}/v1/completions", json={"model": "tiny", **body}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(place, path: str = "completions", **body: Any) -> str:
    reply = httpx.post(f"{place[0].url}/v1/{path}", json={"model": "tiny", **body})
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]["message"]


# ---- scores ----


@pytest.mark.parametrize("temperature", (0.0, 0.7, 1.0))
@pytest.mark.parametrize("model", ("tiny", "the checkpoint"))
def test_an_echoed_prompt_has_the_sdks_scores(place, chat, model: str, temperature: float) -> None:
    name = place[1] if model == "the checkpoint" else model
    ids, given = chat.encode(TEXT), {"temperature": temperature, "max_tokens": 5, "seed": 4}
    wanted = scored(place[0], name, ids, 3)
    more = drawn(place[0], name, ids, 2, **given)
    for prompt in (TEXT, ids, [TEXT, [5, 6]], [ids]):
        reply = ask(place, model=name, prompt=prompt, echo=True, logprobs=3, n=2, **given)
        for choice, sequence in zip(reply["choices"][:2], more, strict=True):
            found = choice["logprobs"]
            values, best = found["token_logprobs"], found["top_logprobs"]
            assert values[: len(ids)] == wanted.prompt_logprobs
            assert values[0] is None and best[0] is None
            for row in range(1, len(ids)):
                top = {}
                for token, logprob in reversed(wanted.topk_prompt_logprobs[row]):
                    top[found_text(chat, token)] = logprob
                own = {found["tokens"][row]: values[row]}
                assert best[row] == own | top
            assert values[len(ids) :] == list(sequence.logprobs)
            assert len(best) == len(values) == len(found["tokens"])
            assert choice["text"] == TEXT + chat.tokenizer.decode(list(sequence.tokens))
    assert reply["usage"]["prompt_tokens"] == len(ids)


def found_text(chat: Chat, token: int) -> str:
    """A token alone, as bytes that need be no characters."""
    return completions._text(chat.tokenizer, token)


def test_an_echoed_prompt_has_transformers_log_probabilities(place, chat) -> None:
    ids = chat.encode(TEXT * 4)
    reference = log_softmax(place[0]._service.bases["tiny"].path, ids)
    given = {"echo": True, "logprobs": 2, "temperature": 0, "max_tokens": 1}
    found = ask(place, prompt=ids, **given)["choices"][0]["logprobs"]
    wanted = reference[np.arange(len(ids) - 1), ids[1:]]
    assert np.abs(np.array(found["token_logprobs"][1:-1]) - wanted).max() < 2e-5
    assert abs(found["token_logprobs"][-1] - reference[-1].max()) < 2e-5
    for row, best in zip(reference, found["top_logprobs"][1:], strict=True):
        assert abs(max(best.values()) - row.max()) < 2e-5


def test_lm_evals_requests_have_transformers_loglikelihoods(place, chat) -> None:
    """lm-evaluation-harness asks for contexts with continuations, as ids or as texts, and reads the
    rows from the context's end to the last but one: just one token must have been drawn, also
    where it ends the answer. A continuation is greedy where each token is the likeliest."""
    pairs = [("Weather in", " Zürich"), ("I look", " at it"), ("I", " look 你 I look")]
    texts = ["".join(pair) for pair in pairs]
    ids = [chat.encode(text) for text in texts]
    before = [len(chat.encode(context)) for context, _ in pairs]
    ids.append([*chat.prompt(ASKED, [WEATHER]), *chat.encode(SAID.removesuffix("<|im_end|>"))])
    texts.append(chat.tokenizer.decode(ids[-1], skip_special_tokens=False))
    before.append(len(chat.prompt(ASKED, [WEATHER])))
    for model in ("tiny", place[1]):
        found = []
        for prompt in (ids, texts):
            body = {"prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1}
            reply = ask(place, model=model, echo=True, seed=1234, **body)
            rows = [choice["logprobs"] for choice in reply["choices"]]
            assert [len(row["tokens"]) for row in rows] == [len(one) + 1 for one in ids]
            found.append(
                [
                    (
                        sum(row["token_logprobs"][first:-1]),
                        all(
                            own == max(top.values())
                            for own, top in zip(
                                row["token_logprobs"][first:-1],
                                row["top_logprobs"][first:-1],
                                strict=True,
                            )
                        ),
                    )
                    for row, first in zip(rows, before, strict=True)
                ]
            )
        assert found[0] == found[1]
        assert found[0][-1][1] == (model != "tiny")  # the checkpoint says it
        assert rows[-1]["tokens"][-1] == "<|im_end|>" or model == "tiny"
        if model == "tiny":
            for one, first, (total, greedy) in zip(ids, before, found[0], strict=True):
                reference = log_softmax(place[0]._service.bases["tiny"].path, one)
                own = reference[np.arange(len(one) - 1), one[1:]][first - 1 :]
                assert abs(total - own.sum()) < 5e-5
                assert greedy == (reference.argmax(-1)[first - 1 : -1] == one[first:]).all()


def test_nothing_is_drawn_where_no_token_is_asked_for(place, chat) -> None:
    ids = chat.encode(TEXT)
    wanted = scored(place[0], "tiny", ids, 0).prompt_logprobs
    for stream in (False, True):
        given = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
        [choice] = streamed(place, **given) if stream else ask(place, **given)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
        assert choice["logprobs"]["token_logprobs"] == wanted
        assert choice["logprobs"]["top_logprobs"] is None
    assert ask(place, prompt="a", echo=True, max_tokens=0)["usage"]["completion_tokens"] == 0
    assert "max_tokens must be at least 1" in refused(place, prompt="a", max_tokens=0)


def streamed(place, path: str = "completions", **body: Any) -> list[dict[str, Any]]:
    """A stream's choices, put together."""
    found: dict[int, dict[str, Any]] = {}
    url = f"{place[0].url}/v1/{path}"
    with httpx.stream("POST", url, json={"model": "tiny", **body, "stream": True}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for choice in (one for line in lines for one in json.loads(line)["choices"]):
        whole = found.setdefault(choice["index"], {"text": "", "token_ids": []})
        whole["text"] += choice["text"]
        whole["token_ids"] += choice.get("token_ids", [])
        whole["finish_reason"] = choice["finish_reason"]
        if "prompt_token_ids" in choice:
            assert "prompt_token_ids" not in whole  # once
            whole["prompt_token_ids"] = choice["prompt_token_ids"]
        if (scores := choice["logprobs"]) is not None:
            kept = whole.setdefault("logprobs", {key: [] for key in scores})
            for key, rows in scores.items():
                kept[key] = None if rows is None else kept[key] + rows
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("logprobs", (None, 0, 2))
def test_an_echo_is_streamed_as_it_is_replied(place, logprobs: int | None) -> None:
    given = {"prompt": [TEXT, "b"], "n": 2, "echo": True, "max_tokens": 30, "seed": 3}
    given |= {"logprobs": logprobs, "stop": ["e"], "return_token_ids": True, "temperature": 1.2}
    wholes, parts = ask(place, **given)["choices"], streamed(place, **given)
    for whole, part in zip(wholes, parts, strict=True):
        assert {key: whole[key] for key in part} == part
        assert whole["text"].startswith(TEXT if whole["index"] < 2 else "b")


@pytest.mark.parametrize("prompt", (TEXT, "plain words"))
def test_offsets_are_places_in_the_text(place, chat, prompt: str) -> None:
    """A token that begins within a character has the character's."""
    for given in (prompt, chat.encode(prompt)):
        choice = ask(place, prompt=given, echo=True, logprobs=0, max_tokens=3, seed=1)["choices"][0]
        found = choice["logprobs"]
        ends = accumulate(len(chat.tokenizer.id_to_token(token)) for token in chat.encode(prompt))
        count = len(chat.encode(prompt))
        wanted = [len(prompt.encode()[:end].decode(errors="ignore")) for end in ends]
        assert found["text_offset"][: count + 1] == [0, *wanted]
        for row, (begin, end) in enumerate(zip(found["text_offset"], wanted, strict=False)):
            if "\ufffd" not in found["tokens"][row]:
                assert choice["text"][begin:end] == found["tokens"][row]


def test_what_the_tokenizer_writes_before_a_text_has_no_place_in_it() -> None:
    """A first token of its own, and SentencePiece's first space."""
    for name in ("llama 3", "sentencepiece"):
        made = folders.llama3() if name == "llama 3" else folders.sentencepiece()
        text = "to be or not"
        ids = made.encode(text).ids
        found = completions._places(made, ids, len(text))
        assert len(found) == len(ids) and found[:2] == [0, 0] and found[-1] < len(text)
        words = [made.id_to_token(token).replace("▁", " ").replace("Ġ", " ") for token in ids[1:]]
        ends = [*found[2:], len(text)]
        cut = [text[begin:end] for begin, end in zip(found[1:], ends, strict=True)]
        assert "".join(cut) == text
        assert [one.strip() for one in cut] == [word.strip() for word in words], name


@pytest.mark.parametrize("stream", (False, True))
def test_a_long_echo_leaves_the_loop_to_others(place, monkeypatch, stream: bool) -> None:
    """It is read and written in other threads than the loop's."""
    called = dict[str, threading.Thread]()

    def noted(name: str) -> Callable[..., Any]:
        function = getattr(completions, name)

        def call(*given: Any) -> Any:
            called[name] = threading.current_thread()
            return function(*given)

        return call

    for name in ("prompt_rows", "pieces"):
        monkeypatch.setattr(completions, name, noted(name))
    given = {"prompt": [5] * CONTEXT, "echo": True, "max_tokens": 1}
    for logprobs in (None, 1):
        (streamed if stream else ask)(place, **given, logprobs=logprobs)
        assert "pieces" in called and ("prompt_rows" in called) == bool(logprobs)
        assert place[0]._thread not in called.values()


# ---- what the engine is asked for ----


@pytest.mark.parametrize(
    ("settings", "scores", "top"),
    (
        ({}, False, 0),
        ({"logprobs": 3}, False, 0),
        ({"echo": True}, False, 0),
        ({"echo": True, "logprobs": 3}, True, 3),
        ({"echo": True, "logprobs": True}, True, 0),
    ),
)
def test_scores_are_computed_where_they_are_asked_for(
    place, monkeypatch, settings, scores: bool, top: int
) -> None:
    """And each prompt is one request."""
    requests, submit = list[SampleRequest](), place[0].worker.sample

    def sample(session: str, request: SampleRequest, *rest: Any) -> Any:
        requests.append(request)
        return submit(session, request, *rest)

    monkeypatch.setattr(place[0].worker, "sample", sample)
    for stream in (False, True):
        (streamed if stream else ask)(place, prompt=["a", "b"], n=2, max_tokens=2, **settings)
        assert len(requests) == 2
        assert {(one.prompt_logprobs, one.topk_prompt) for one in requests} == {(scores, top)}
        requests.clear()


# ---- vLLM's fields ----


def test_logprobs_may_be_true_or_false(place) -> None:
    given = {"prompt": TEXT, "max_tokens": 8, "seed": 2, "temperature": 1.0}
    none, own = ask(place, logprobs=False, **given), ask(place, logprobs=True, **given)
    assert none["choices"][0]["logprobs"] is None
    assert own["choices"] == ask(place, logprobs=0, **given)["choices"]
    assert len(own["choices"][0]["logprobs"]["token_logprobs"]) > 2


def test_ids_are_those_that_were_drawn(place, one, chat) -> None:
    """The token that ended an answer is among them, and has a log-probability."""
    prompt, limit = chat.prompt(ASKED, [WEATHER]), {"temperature": 0, "max_tokens": 200}
    [wanted] = drawn(place[0], place[1], prompt, **limit)
    tokens = list(wanted.tokens)
    assert tokens[-1] == chat.tokenizer.token_to_id("<|im_end|>")
    given = {"model": place[1], "return_token_ids": True, **limit}
    for choice in (
        *ask(place, prompt=prompt, logprobs=0, **given)["choices"],
        *streamed(place, prompt=prompt, logprobs=0, **given),
    ):
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, tokens)
        assert choice["logprobs"]["token_logprobs"] == list(wanted.logprobs)
    url = f"{place[0].url}/v1/chat/completions"
    given |= {"messages": ASKED, "tools": [WEATHER], "logprobs": True}
    reply = httpx.post(url, json=given).json()
    assert reply["prompt_token_ids"] == prompt
    [choice] = reply["choices"]
    assert choice["token_ids"] == tokens
    values = [row["logprob"] for row in choice["logprobs"]["content"]]
    assert values == list(wanted.logprobs)
    with httpx.stream("POST", url, json={**given, "stream": True}) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert [chunk.get("prompt_token_ids") for chunk in chunks[:2]] == [prompt, None]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == tokens
    rows = [row for choice in choices for row in (choice["logprobs"] or {}).get("content", [])]
    assert [row["logprob"] for row in rows] == values
    none = ask(place, prompt="a", max_tokens=2)["choices"][0]
    assert not {"prompt_token_ids", "token_ids"} & none.keys()


def test_an_answer_is_written_choice_by_choice(place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One text of all choices would hold up everyone while it is made."""
    asked = {"prompt": [[5, 6, 7] * 40] * 3, "n": 8, "max_tokens": 1, "echo": True, "logprobs": 5}
    sizes, dumps = [], openai_text._dumps

    def counted(value: Any) -> bytes:
        sizes.append(len(dumps(value)))
        return dumps(value)

    monkeypatch.setattr(openai_text, "_dumps", counted)
    reply = httpx.post(
        f"{place[0].url}/v1/completions", json={"model": "tiny", **asked}, timeout=60
    )
    assert len(reply.json()["choices"]) == 24 and len(reply.content) > 20 * max(sizes)
    assert [choice["index"] for choice in reply.json()["choices"]] == list(range(24))


def test_a_client_that_has_gone_is_noticed_while_samples_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not only when nothing has come for a while."""

    class Coming:
        closed = False

        async def next(self, seconds: float) -> list[str]:
            return ["part"]

        def close(self) -> None:
            self.closed = True

    class Gone:
        async def is_disconnected(self) -> bool:
            return True

    monkeypatch.setattr(serving, "LOOK_SECONDS", -1.0)
    coming = Coming()
    with pytest.raises(ClientDisconnect):
        asyncio.run(serving.all_parts(coming, Gone()))  # type: ignore[arg-type]
    assert coming.closed


# ---- refusals ----


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        ({"echo": 1}, "echo must be true or false, 1 came"),
        ({"echo": "yes"}, "echo must be true or false"),
        ({"logprobs": "1"}, "logprobs must be an integer"),
        ({"logprobs": 1.5}, "logprobs must be an integer"),
        ({"echo": True, "logprobs": 21}, "logprobs must be from 0 to 20"),
        ({"echo": True, "max_tokens": -1}, "max_tokens must be at least 1, -1 came"),
        ({"echo": True, "prompt": [5, 100000]}, "ids must be from 0 to"),
        ({"echo": True, "prompt": [-1]}, "ids must be from 0 to"),
        ({"echo": True, "prompt": [5] * (CONTEXT + 1)}, "the model's context is 1024"),
        (
            {"echo": True, "prompt": [[5] * CONTEXT] * 2, "n": 128, "logprobs": 20},
            "would have 5505024 ids and log-probabilities of prompts, at most 1048576 are sent",
        ),
        (
            {"return_token_ids": True, "prompt": [[5] * CONTEXT] * 9, "n": 128},
            "would have 1179648 ids and log-probabilities of prompts, at most 1048576 are sent",
        ),
        ({"return_token_ids": 1}, "return_token_ids must be true or false"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is no setting of this server"),
    ),
)
def test_an_echo_that_can_not_be_is_refused(place, change, sentence: str) -> None:
    for stream in (False, True):
        assert sentence in refused(place, **{"prompt": "a", "stream": stream, **change})


def test_a_chat_has_no_echo(place) -> None:
    assert "echo is no setting" in refused(place, "chat/completions", messages=ASKED, echo=True)
    said = refused(place, "chat/completions", messages=ASKED, return_token_ids="no")
    assert "return_token_ids must be true or false" in said
