"""Fireworks' completions, asked for as its sampler does: the SDK's tokens, the log-probabilities
that they were drawn with, and the model's own beside them."""

import json
import threading
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
import tinker
from support.chat_models import CONTEXT, WEATHER
from support.inference_server import ASKED, drawn, serve
from tinsmith.chat.chat import Chat
from tinsmith.engine.decoding import SampleRequest
from tinsmith.engine.errors import RequestError
from tinsmith.server.backend import Backend

PROMPT = [5, 17, 300, 42, 8, 8, 91]
# What the sampler of fireworks-ai 1.2.30 sends with each request.
SENT = {
    "n": 1, "stream": True, "perf_metrics_in_response": True, "top_p": 1.0, "top_k": 0,
    "raw_output": True, "logprobs": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory):
    with serve(tmp_path_factory.mktemp("fireworks")) as found:
        yield found


def post(place, body: dict[str, Any]) -> httpx.Response:
    given = {"model": "tiny", "prompt": PROMPT, "max_tokens": 9, "temperature": 1.0, **SENT, **body}
    return httpx.post(f"{place[0].url}/inference/v1/completions", json=given, timeout=60)


def sampled(place, **body: Any) -> dict[str, Any]:
    """The choice that the sampler puts together: it adds up texts and log-probabilities, and takes
    the last raw output, finish reason and usage."""
    reply = post(place, body)
    assert reply.status_code == 200, reply.text
    if not body.get("stream", True):
        return {**reply.json()["choices"][0], **reply.json()}
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    found: dict[str, Any] = {"text": "", "content": []}
    for chunk in map(json.loads, lines):
        for choice in chunk["choices"]:
            assert choice["index"] == 0
            found["text"] += choice["text"]
            found["content"] += (choice["logprobs"] or {}).get("content", [])
            found |= {key: choice[key] for key in ("finish_reason", "raw_output") if key in choice}
        found |= {key: chunk[key] for key in ("usage", "perf_metrics") if key in chunk}
    return found | {"logprobs": {"content": found.pop("content")}}


def column(found: dict[str, Any], key: str) -> list[Any]:
    return [row[key] for row in found["logprobs"]["content"]]


def model_logprobs(backend: Backend, tokens: list[int], k: int = 0) -> Any:
    """The SDK's scores of tokens as a prompt."""
    with backend.service_client() as client:
        sampler = client.create_sampling_client(base_model="tiny").result()
        given = {"include_prompt_logprobs": True, "topk_prompt_logprobs": k}
        limit = tinker.SamplingParams(max_tokens=1)
        return sampler.sample(tinker.ModelInput.from_ints(tokens), 1, limit, **given).result()


@pytest.mark.parametrize(
    "settings",
    (
        {},
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.4, "top_p": 0.6, "top_k": 30},
        {"top_k": 20},
        {"top_p": 0.5},
        {"temperature": 0.0, "top_k": 20},
    ),
)
@pytest.mark.parametrize("echo", (False, True))
@pytest.mark.parametrize("stream", (True, False))
def test_a_sample_has_both_log_probabilities(place, settings, echo: bool, stream: bool) -> None:
    given = {"temperature": 1.0, "max_tokens": 9, "seed": 3, **settings}
    [wanted] = drawn(place[0], "tiny", PROMPT, **given)
    tokens = list(wanted.tokens)
    found = sampled(place, **given, echo=echo, stream=stream, top_logprobs=2)
    before = PROMPT if echo else []
    assert found["raw_output"]["completion_token_ids"] == before + tokens
    assert found["raw_output"]["prompt_token_ids"] == PROMPT
    assert column(found, "token_id") == before + tokens
    assert column(found, "sampling_logprob") == [None] * len(before) + list(wanted.logprobs)
    scores = model_logprobs(place[0], PROMPT + tokens, 2)
    own = [0.0, *scores.prompt_logprobs[1:]]  # the sampler drops the first row, and wants a number
    assert column(found, "logprob") == own[len(PROMPT) - len(before) :]
    best = [
        [(row["token_id"], row["logprob"]) for row in top] for top in column(found, "top_logprobs")
    ]
    rows = [[(PROMPT[0], 0.0)], *scores.topk_prompt_logprobs[1:]]
    assert best == [list(map(tuple, row)) for row in rows[len(PROMPT) - len(before) :]]
    usage = {"prompt_tokens": 7, "completion_tokens": len(tokens), "total_tokens": 7 + len(tokens)}
    assert found["usage"] == usage and found["perf_metrics"] == {"prompt-tokens": 7}
    assert found["finish_reason"] == ("stop" if tokens[-1] == 2 else "length")
    plain = given["temperature"] == 0 or not settings
    assert (list(wanted.logprobs) == own[len(PROMPT) :]) == plain


def test_the_token_that_ends_a_sample_is_in_all_lists(place) -> None:
    chat = Chat(place[0]._service.bases["tiny"].tokenizer_dir)
    prompt, given = chat.prompt(ASKED, [WEATHER]), {"temperature": 0.0, "max_tokens": 200}
    [wanted] = drawn(place[0], place[1], prompt, **given)
    assert list(wanted.tokens)[-1] == 2
    found = sampled(place, model=place[1], prompt=prompt, **given)
    assert found["raw_output"]["completion_token_ids"] == list(wanted.tokens)
    assert column(found, "sampling_logprob") == list(wanted.logprobs)
    assert found["finish_reason"] == "stop" and "<|im_end|>" not in found["text"]


def test_a_prompt_alone_is_scored(place) -> None:
    """As the check of a deployment asks for it, by text, and as compute_logprobs does."""
    scores = [0.0, *model_logprobs(place[0], PROMPT).prompt_logprobs[1:]]
    found = sampled(place, echo=True, max_tokens=0, stream=False)
    assert column(found, "logprob") == scores
    assert found["raw_output"]["completion_token_ids"] == PROMPT
    assert sampled(place, prompt="Weather", echo=True, max_tokens=0)["text"] == "Weather"
    found = sampled(place, echo=True, max_tokens=1, temperature=0.7)
    assert column(found, "logprob")[: len(PROMPT)] == scores


def test_several_prompts_and_samples_are_scored(place) -> None:
    prompts, given = [PROMPT, [1, 2, 3]], {"temperature": 0.6, "max_tokens": 5, "n": 3}
    reply = post(place, {"prompt": prompts, "stream": False, **given}).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    seen = set()
    for choice in reply["choices"]:
        prompt = prompts[choice["index"] // 3]
        tokens = choice["raw_output"]["completion_token_ids"]
        scores = model_logprobs(place[0], prompt + tokens).prompt_logprobs
        assert column(choice, "logprob") == scores[len(prompt) :]
        seen.add(tuple(tokens))
    assert len(seen) > 3


def test_log_probabilities_by_number_are_openais(place) -> None:
    given = {"logprobs": 2, "stream": False, "seed": 1, "raw_output": None}
    own = sampled(place, **given)["logprobs"]
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 9, "seed": 1, "logprobs": 2}
    reply = httpx.post(f"{place[0].url}/v1/completions", json=body).json()
    assert own == reply["choices"][0]["logprobs"]
    assert "raw_output" not in post(place, given).json()["choices"][0]


def test_the_prefix_has_chats_and_models(place) -> None:
    url = f"{place[0].url}/inference/v1"
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 2}
    assert httpx.post(f"{url}/chat/completions", json=body).status_code == 200
    assert httpx.get(f"{url}/models").json()["data"][0]["id"] == "tiny"
    assert httpx.get(f"{url}/nothing").json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        # The sampler repeats 404, 408, 425, 429 and 5xx: what is not there is told at once.
        ({"model": "nobody"}, "nobody"),
        ({"model": "tinker://s-0:train:0/sampler_weights/x"}, "x"),
        ({"model": None}, "the request has no model"),
        ({"include_routing_matrix": True}, "include_routing_matrix is True, which this server"),
        ({"routing_matrix_format": "parquet_v1"}, "routing_matrix_format is no setting"),
        ({"top_sampling_logprobs": 5}, "top_sampling_logprobs is no setting"),
        ({"top_sampling_format": "parquet_v1"}, "top_sampling_format is no setting"),
        ({"sampling_mask": "parquet_v1"}, "sampling_mask is no setting"),
        ({"images": ["data:image/png;base64,AA"]}, "images is"),
        ({"echo_last": 3}, "echo_last is no setting"),
        ({"min_p": 0.1}, "min_p is 0.1"),
        ({"context_length_exceeded_behavior": "error"}, 'it can be "truncate"'),
        ({"raw_output": 1}, "raw_output must be true or false"),
        ({"perf_metrics_in_response": "yes"}, "perf_metrics_in_response must be true or false"),
        ({"top_k": -2}, "top_k must be at least 1"),
        ({"logprobs": None, "top_logprobs": 2}, "top_logprobs needs logprobs to be true"),
        ({"logprobs": 2, "top_logprobs": 2}, "top_logprobs needs logprobs to be true"),
        ({"top_logprobs": 21}, "top_logprobs must be from 0 to 20"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "differ: send one"),
        ({"prompt": [5] * CONTEXT, "temperature": 0.5}, "fills the model's context of 1024 tokens"),
    ),
)
def test_what_the_sampler_can_not_have_is_told_at_once(place, change, sentence: str) -> None:
    reply = post(place, change)
    assert reply.status_code == 400, reply.text
    assert sentence in reply.json()["error"]["message"]


def test_a_prompt_that_fills_the_context_is_drawn_behind(place) -> None:
    found = sampled(place, prompt=[5] * CONTEXT)
    assert len(found["raw_output"]["completion_token_ids"]) == 1
    assert column(found, "logprob") == column(found, "sampling_logprob")
    almost = sampled(place, prompt=[5] * (CONTEXT - 1), temperature=0.5)
    scores = model_logprobs(place[0], [5] * (CONTEXT - 1) + column(almost, "token_id"))
    assert column(almost, "logprob") == scores.prompt_logprobs[-1:]


def test_a_client_that_goes_away_leaves_no_scoring_behind(place, monkeypatch) -> None:
    worker, submit, cancel = place[0].worker, place[0].worker.sample, place[0].worker.cancel
    scoring, cancelled = Future[Any](), threading.Event()

    def sample(session: str, request: SampleRequest, *rest: Any) -> Future[Any]:
        return scoring if request.last_n else submit(session, request, *rest)

    def stop(future: Future[Any]) -> None:
        cancelled.set() if future is scoring else cancel(future)

    monkeypatch.setattr(worker, "sample", sample)
    monkeypatch.setattr(worker, "cancel", stop)
    body = {"model": "tiny", "prompt": PROMPT, **SENT, "temperature": 0.5, "max_tokens": 2}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{place[0].url}/inference/v1/completions", json=body, timeout=0.5)
    assert cancelled.wait(60)


def test_a_sample_that_can_not_be_scored_is_told(place, monkeypatch) -> None:
    submit = place[0].worker.sample

    def sample(session: str, request: SampleRequest, *rest: Any) -> Future[Any]:
        if not request.last_n:
            return submit(session, request, *rest)
        failed = Future[Any]()
        failed.set_exception(RequestError("no room for the scores"))
        return failed

    monkeypatch.setattr(place[0].worker, "sample", sample)
    for stream in (False, True):
        reply = post(place, {"temperature": 0.5, "stream": stream})
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == "no room for the scores"
