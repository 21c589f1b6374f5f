"""Requests to a server, changed: protobuf and JSON that the SDK sent, and its paths and headers.

What the SDK sends in a small run of everything is recorded. An input is one of these requests with
a fresh number, changed in some places. Its answer must be Tinker's own, and so must its future's:
a result, or a sentence. Between the inputs a client that means well asks the same again and again,
and must get the same bits; at the end the server's memory and descriptors must be back where they
were (served.py).
"""

import contextlib
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import tinker
import zstandard
from tinker.proto import tinker_public_pb2 as pb
from tinsmith.server.backend import Backend

from tools.attack.common import (
    BUG,
    FLOATS,
    INTEGERS,
    STRINGS,
    Attempt,
    Failure,
    One,
    changed,
    changed_bytes,
    json_text,
)
from tools.attack.served import SECONDS, Clean, datum, served

CLEAN_EVERY = 25  # inputs between two of the clean client's rounds
KEY = "tml-attack"
PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Recorded:
    """A request that the SDK sent."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


# ---- what the SDK sends ----


def record(url: str) -> tuple[list[Recorded], tinker.ServiceClient]:
    """Everything that the SDK can ask for, once, and its client, whose session stays open."""
    found: list[Recorded] = []
    send = httpx.AsyncClient.send

    async def kept(client: httpx.AsyncClient, request: httpx.Request, **how: Any) -> Any:
        body = await request.aread()
        path, _, query = request.url.raw_path.decode().partition("?")
        headers = {k: v for k, v in request.headers.items() if k in ("content-type", "accept")}
        found.append(Recorded(request.method, path, query, headers, body))
        return await send(client, request, **how)

    httpx.AsyncClient.send = kept  # type: ignore[method-assign]
    try:
        service = _use_everything(url)
    finally:
        httpx.AsyncClient.send = send  # type: ignore[method-assign]
    unique = {(one.method, one.path, len(one.body) // 64): one for one in found}
    return list(unique.values()), service


def _use_everything(url: str) -> tinker.ServiceClient:
    rest = tinker.RestClient(base_url=url, api_key=KEY)
    with tinker.ServiceClient(base_url=url, api_key=KEY):
        pass  # its end is recorded
    service = tinker.ServiceClient(base_url=url, api_key=KEY, user_metadata={"a": "b"})
    client = service.create_lora_training_client("m", rank=2, seed=1, user_metadata={"c": "d"})
    training = client.result()
    training.forward_backward([datum(5), datum(3, seed=1)], "cross_entropy").result()
    training.forward([datum(4, 2)], "cross_entropy").result()
    rl = datum(4)
    rl.loss_fn_inputs["logprobs"] = tinker.TensorData.from_numpy(np.zeros(4, np.float32))
    rl.loss_fn_inputs["advantages"] = tinker.TensorData.from_numpy(np.ones(4, np.float32))
    del rl.loss_fn_inputs["weights"]
    for loss in ("importance_sampling", "ppo"):
        training.forward_backward([rl], loss).result()
    training.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
    state = training.save_state("state", ttl_seconds=7200).result().path
    weights = training.save_weights_for_sampler("sampler").result().path
    training.load_state(state).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    other = service.create_sampling_client(model_path=weights).result()
    prompt = tinker.ModelInput.from_ints([5, 6, 7, 8])
    params = tinker.SamplingParams(max_tokens=4, temperature=0.7, top_k=9, top_p=0.9, seed=3)
    sampler.sample(prompt, 2, params).result()
    stops = tinker.SamplingParams(max_tokens=6, stop=["e", "th"])
    other.sample(prompt, 1, stops, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    sampler.compute_logprobs(prompt).result()
    service.create_training_client_from_state(state).result()
    training.get_info()
    run = training.model_id
    rest.list_training_runs().result()
    rest.get_training_run(run).result()
    rest.list_checkpoints(run).result()
    rest.list_user_checkpoints().result()
    rest.get_weights_info_by_tinker_path(state).result()
    rest.publish_checkpoint_from_tinker_path(weights).result()
    rest.unpublish_checkpoint_from_tinker_path(weights).result()
    rest.set_checkpoint_ttl_from_tinker_path(weights, 9000).result()
    rest.list_sessions().result()
    rest.get_server_capabilities().result()
    rest.search_sessions(tinker.types.SessionSearchRequest(display_name="a")).result()
    rest.get_session(run.partition(":")[0]).result()
    return service


# ---- changes ----


def changed_message(rng: random.Random, body: bytes, copies: Sequence[int] = (1, 20, 300)) -> bytes:
    """A forward_backward with other fields than its own, some of them that often."""
    message = pb.ForwardBackwardRequest.FromString(body)
    for _ in range(rng.choice((1, 1, 2, 4))):
        _change_field(rng, message, copies)
    return message.SerializeToString()


def _change_field(rng: random.Random, message: Any, copies: Sequence[int]) -> None:
    act = rng.randrange(12)
    one = rng.choice(message.data) if message.data else message.data.add()
    keys = sorted(one.loss_fn_inputs) or ["weights"]
    tensor = one.loss_fn_inputs[rng.choice(keys)]
    if act == 0:
        message.loss_fn = rng.choice(
            ("ppo", "cispo", "dro", "gspo", "custom", "generalized_jsd", "", "x" * 3000)
        )
    elif act == 1:
        value = rng.choice((*FLOATS, *(float(n % 2**60) for n in INTEGERS)))
        message.loss_fn_config[rng.choice(("beta", "clip_low_threshold", "", "x" * 99))] = value
    elif act == 2:
        tensor.shape.append(rng.choice([n for n in INTEGERS if -(2**63) <= n < 2**63]))
    elif act == 3 and tensor.shape:
        tensor.shape[rng.randrange(len(tensor.shape))] = rng.choice((0, -1, 2, 2**31, 2**62))
    elif act == 4:
        tensor.dtype = rng.randrange(12)
    elif act == 5:
        tensor.dense = changed_bytes(rng, tensor.dense or b"\0" * 8)
    elif act == 6:
        tensor.sparse_csr.crow_indices = _numbers(rng, rng.randrange(7))
        tensor.sparse_csr.col_indices = _numbers(rng, rng.randrange(7))
        tensor.sparse_csr.values = _numbers(rng, rng.randrange(5))
    elif act == 7:
        one.loss_fn_inputs[rng.choice(("", "teacher_tokens", "logprobs", "x" * 500))].CopyFrom(
            tensor
        )
    elif act == 8:
        chunk = one.model_input.add()
        chunk.encoded_text.tokens = rng.choice((b"", b"abc", _numbers(rng, 3), bytes(4000)))
    elif act == 9 and one.model_input:
        del one.model_input[:]
    elif act == 10:
        message.data.extend([one] * rng.choice(copies))
    else:
        del message.data[:]


def _numbers(rng: random.Random, count: int) -> bytes:
    return np.array(
        [rng.choice((0, 1, 2, 3, 4, -1, 2**31, 2**62)) for _ in range(count)], "<i8"
    ).tobytes()


class Attacked:
    """A server, the recorded requests, and a client that means well."""

    def __init__(self, backend: Backend, clean: Clean):
        self._backend, self._clean = backend, clean
        self._http = httpx.Client(base_url=backend.url, timeout=SECONDS)
        self._numbers: dict[str, int] = {}
        self._fresh = 1000
        self._requests: list[Recorded] = []
        self._session = ""
        self._recorder: tinker.ServiceClient | None = None
        self._begin()

    def _begin(self) -> None:
        """Records; what is recorded is about a session that is open, and its run."""
        self._over = False
        if self._recorder is not None:
            self._recorder.close("success").result()
        self._requests, self._recorder = record(self._backend.url)
        turns = [json.loads(r.body) for r in self._requests if r.path.endswith("/optim_step")]
        run = turns[0]["model_id"]
        self._session = run.partition(":")[0]
        done = [
            name
            for _, name in self._backend._service.promises.pending
            if name.startswith(f"{run}:seq:")
        ]
        self._numbers = {run: 1 + max(int(name.rpartition(":")[2]) for name in done)}

    def _ask(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._http.post(f"/api/v1{path}", json=body, headers={"X-API-Key": KEY})

    def _check(self) -> None:
        """The clean client's round, and that the session of the attack is there."""
        self._clean.check()
        alive = self._ask("/session_heartbeat", {"session_id": self._session}).status_code == 200
        run = {"model_id": next(iter(self._numbers))}
        if self._over or not alive or self._ask("/get_info", run).status_code != 200:
            self._begin()

    def close(self) -> None:
        """Ends it."""
        if self._recorder is not None:
            self._recorder.close("success").result()
        self._http.close()

    # ---- one input ----

    def one(self, attempt: Attempt) -> str:
        if attempt.number % CLEAN_EVERY == 0 or self._over:
            self._check()
        rng = attempt.rng
        request = rng.choice(self._requests)
        request = self._change(rng, self._numbered(request))
        headers = dict(request.headers) | {"X-API-Key": KEY}
        body = request.body
        if body and rng.random() < 0.05:
            headers["Content-Encoding"] = rng.choice(("zstd", "zstd", "gzip", "identity"))
            if rng.random() < 0.8:
                body = zstandard.ZstdCompressor().compress(body)
        url = request.path + (f"?{request.query}" if request.query else "")
        attempt.note(request.method, url, headers, body[:3000])
        try:
            reply = self._http.request(request.method, url, content=body, headers=headers)
        except httpx.InvalidURL:
            return "no request"
        except httpx.TimeoutException:
            raise Failure(f"no answer in {SECONDS:g} s") from None
        self._check_reply(reply)
        if reply.status_code != 200:
            return f"{reply.status_code}"
        answer = _json(reply)
        if isinstance(answer, dict) and "request_id" in answer and "completions" not in answer:
            return self._answer(answer)
        return "taken"

    def _answer(self, promise: dict[str, Any]) -> str:
        """Waits for a future."""
        name = promise["request_id"]
        run, found, number = name.rpartition(":seq:")
        if found and run in self._numbers:
            self._numbers[run] = max(self._numbers[run], int(number) + 1)
            self._over = int(number) > 1 << 30  # no turn comes after these
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            reply = self._ask("/retrieve_future", {"request_id": name})
            if reply.status_code != 408:
                self._check_reply(reply)
                answer = _json(reply)
                if not isinstance(answer, dict) or "error" not in answer:
                    return "done"
                if answer["category"] not in ("user", "server"):
                    raise Failure(f"a failure of category {answer['category']}")
                return f"failed ({answer['category']})"
        raise Failure(f"the future of {name} did not come in {SECONDS:g} s")

    def _check_reply(self, reply: httpx.Response) -> None:
        text = reply.text if "protobuf" not in reply.headers.get("content-type", "") else ""
        if reply.status_code >= 500 or reply.status_code == 409:
            raise Failure(f"status {reply.status_code}: {text[:500]}")
        answer = _json(reply)
        told = (
            str(answer.get("error") or answer.get("detail") or "")
            if isinstance(answer, dict)
            else ""
        )
        if any(word in told for word in BUG):
            raise Failure(f"told as a bug: {told[:500]}")
        wordless = reply.status_code == 408 or reply.request.method == "HEAD"
        if reply.status_code >= 400 and len(told) < 8 and not wordless:
            raise Failure(f"status {reply.status_code} without a sentence: {text[:500]}")

    def _numbered(self, request: Recorded) -> Recorded:
        """The request with numbers that are its turn, so that it is no retry."""
        self._fresh += 1
        if request.headers.get("content-type") == PROTOBUF:
            message = pb.ForwardBackwardRequest.FromString(request.body)
            message.seq_id = self._numbers.get(message.model_id, 1)
            return replace(request, body=message.SerializeToString())
        if not request.body:
            return request
        body = json.loads(request.body)
        if "seq_id" in body:
            body["seq_id"] = self._numbers.get(body.get("model_id"), self._fresh)
        if request.path.endswith("/create_sampling_session"):
            body["sampling_session_seq_id"] = self._fresh
        return replace(request, body=json.dumps(body).encode())

    def _change(self, rng: random.Random, request: Recorded) -> Recorded:
        if rng.random() < 0.1:
            path = changed_bytes(rng, request.path.encode(), 1).decode("latin-1")
            request = replace(request, path=quote(path, safe="/%:?&=~.") or "/")
            if not request.path.startswith("/"):
                request = replace(request, path=f"/{request.path}")
        if rng.random() < 0.1:
            key = rng.choice(("limit", "offset", "x"))
            value = quote(str(rng.choice((*INTEGERS[:20], *STRINGS))), errors="ignore")
            request = replace(request, query=f"{key}={value}")
        if rng.random() < 0.03:
            method = rng.choice(("GET", "POST", "PUT", "DELETE", "HEAD", "PATCH"))
            request = replace(request, method=method)
        if not request.body:
            return request
        if request.headers["content-type"] == PROTOBUF:
            change = rng.choice((changed_bytes, changed_message, changed_message))
            return replace(request, body=change(rng, request.body))
        body = json.loads(request.body)
        for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
            body = changed(rng, body, 1) if isinstance(body, dict | list) else body
        return replace(request, body=json_text(rng, body))


def _json(reply: httpx.Response) -> Any:
    try:
        return reply.json()
    except ValueError:
        return None


@contextlib.contextmanager
def attack() -> Iterator[One]:
    """A server that loses patience soon."""
    with served(gap_seconds=0.3, poll_seconds=1.0) as (backend, clean):
        attacked = Attacked(backend, clean)
        try:
            yield attacked.one
        finally:
            attacked.close()
