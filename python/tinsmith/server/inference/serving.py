"""Sampling for APIs that send a conversation or a text and get text: OpenAI's, Anthropic's.

A request says which weights, what prompt and how to draw. It becomes the same SampleRequest as the
SDK's, so its tokens are the SDK's. Results come in parts: while tokens are drawn if the client
reads a stream, otherwise all at once. A client that disconnects cancels its request.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinsmith.chat.chat import Answer, Chat
from tinsmith.chat.tools import Piece, Thought, ToolCall
from tinsmith.engine.decoding import SampleDelta, SampleRequest, SampleResult, TokenListener
from tinsmith.engine.errors import RequestError, explain
from tinsmith.models.registry import BaseModel
from tinsmith.server.http.overload import Reservation
from tinsmith.server.service.promises import Refusal, owner, when_done
from tinsmith.server.service.service import Service
from tinsmith.server.wire import fireworks_names, parse, sampling_calls

LOOK_SECONDS = 1.0  # between two checks whether a waiting client has disconnected
FIRST_SECONDS = 5.0  # how long a stream waits for a failure before it sends its status
PING_SECONDS = 10.0  # of silence in a stream before a ping
PROMPTS_MAX = 4096  # answers of one request
STOPS_MAX, STOP_MAX = 64, 1000  # stop strings, and characters of each

T = TypeVar("T")


class Wrong(Refusal):
    """A refusal that names the setting at fault, or has an error code."""

    def __init__(
        self, detail: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ):
        super().__init__(status, detail)
        self.param = param
        self.code = code


@dataclass(frozen=True)
class Target:
    """The weights that a request names, and their model."""

    name: str
    key: str  # of service.samplers.named
    model: BaseModel

    @property
    def chat(self) -> Chat:
        """The model's chat template and tokenizer."""
        return Chat(self.model.tokenizer_dir)


@dataclass(frozen=True)
class Drawing:
    """How to draw. None: the model's own limit, a random seed."""

    count: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stops: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()  # ids that end an answer, in addition to stops
    top_logprobs: int = 0
    scores_prompt: bool = False  # its tokens too, and their most likely ones

    @property
    def is_plain(self) -> bool:
        """Whether a drawn token's log-probability is the model's own: temperature 1 without top_k
        and top_p, or temperature 0."""
        cut = self.top_p < 1 or self.top_k > 0
        return self.temperature == 0 or (self.temperature == 1 and not cut)


# ---- requests ----


def check_fields(
    body: Mapping[str, Any],
    known: Collection[str],
    neutral: Mapping[str, Sequence[Any]],
    where: str = "",
) -> None:
    """Refuses unknown settings by name. A setting in `neutral` is accepted with these values, which
    change nothing."""
    for key, value in body.items():
        if key in known or value is None:
            continue
        name = f"{where}{key}"
        if key not in neutral:
            raise Wrong(f"{name:.200} is no setting of this server; leave it out", param=name[:200])
        if value not in neutral[key]:
            rest = f"; it can be {json.dumps(neutral[key][0])}" if neutral[key] else ""
            raise Wrong(
                f"{name} is {parse.short(value)}, which this server does not have: leave it out"
                + rest,
                param=name,
            )


def between(body: Mapping[str, Any], key: str, kind: type[T], low: T, high: T, default: T) -> T:
    """A number within bounds."""
    value = parse.maybe(body, key, kind, default)
    if not low <= value <= high:  # type: ignore[operator]
        raise Wrong(f"{key} must be from {low} to {high}, {value} came", param=key)
    return value


def stops_of(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Stop strings: one, or a list."""
    given = body.get(key)
    items = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise Wrong(f"{key} must be strings that are not empty", param=key)
    if len(items) > STOPS_MAX or any(len(item) > STOP_MAX for item in items):
        raise Wrong(
            f"{key} can have {STOPS_MAX} strings of {STOP_MAX} characters; {len(items)} came",
            param=key,
        )
    return tuple(items)


def template_settings(
    body: Mapping[str, Any], chat: Chat, tools: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The variables of the model's chat template that a request sets."""
    given: dict[str, Any] = parse.maybe(body, "chat_template_kwargs", dict, {})
    effort = body.get("reasoning_effort")
    found = given if effort is None else {"reasoning_effort": effort, **given}
    if unknown := sorted(found.keys() - (known := chat.variables(tools) if found else set())):
        raise Wrong(
            f"{unknown[0]:.200} is no variable of the model's chat template, which reads "
            + (", ".join(sorted(known)) or "none of its own"),
            param="chat_template_kwargs" if unknown[0] in given else unknown[0],
        )
    return found


async def find_target(service: Service, body: Mapping[str, Any]) -> Target:
    """The weights of a request's `model`: a base model's name, a checkpoint's tinker:// path, or
    both with ; between them. The name may include a context length."""
    name = parse.need(body, "model", str)
    asked, weights = fireworks_names.SAMPLED.fullmatch(name), name
    if asked is not None:  # only these names read the disk
        weights = await service.disk(_of_fireworks, service, name, asked)
    base, _, path = ("", "", weights) if weights.startswith("tinker://") else weights.partition(";")
    wanted = None
    if base or not path:
        try:
            wanted, model = service.bases.name(base), service.bases.model(base)
        except ValueError as error:
            raise _absent(error) from None
        if not path:
            return Target(name, service.samplers.named.base(wanted), model)
    try:
        folder, meta = await service.disk(service.checkpoints.find, path, "sampler_weights")
    except FileNotFoundError as error:
        raise _absent(error) from None
    own = service.bases.name(meta.base_model)
    if wanted not in (None, own):
        raise Wrong(f"{path} is a checkpoint of {own}, not of {wanted}", param="model")
    key = service.samplers.named.checkpoint(path, own, folder, meta)
    return Target(name, key, service.bases.model(base or meta.base_model))


def _of_fireworks(service: Service, name: str, asked: re.Match[str]) -> str:
    """What a name from Fireworks' sampling client stands for, by its parts."""
    if asked["base"]:
        return asked["base"]
    runs = service.state.runs_of(asked["session"] or "")
    try:
        if ref := asked["own"] or asked["other"]:
            path = fireworks_names.tinker_path(service.store, ref, "sampler_weights", runs)
            if path.startswith("tinker://") and ("/" in ref or path[9:].startswith(tuple(runs))):
                return path
        elif runs:
            return service.state.run(runs[-1]).base_model
        raise FileNotFoundError(f"there is nothing to sample from at {name!r:.300}")
    except FileNotFoundError as error:
        raise _absent(error) from None


def _absent(error: Exception) -> Wrong:
    return Wrong(str(error), status=404, param="model", code="model_not_found")


async def sample_requests(
    service: Service, target: Target, prompts: Sequence[Sequence[int]], drawing: Drawing
) -> list[SampleRequest]:
    """The SDK's requests for these, one for each prompt."""
    first, size = service.samplers.named.requests, sum(map(len, prompts)) << 6
    service.samplers.named.requests += len(prompts)
    seeds = [service.fresh_seed(f"inference:{first + index}") for index in range(len(prompts))]
    bounds = target.model, service.promises.bytes_max

    def make() -> list[SampleRequest]:
        return [_sample_request(*one, drawing, *bounds) for one in zip(prompts, seeds, strict=True)]

    return await service.beside(size, make)


def _sample_request(
    prompt: Sequence[int], seed: int, drawing: Drawing, model: BaseModel, results_max: int
) -> SampleRequest:
    if len(prompt) > model.context:
        raise Wrong(
            f"the prompt has {len(prompt)} tokens; the model's context is {model.context}: cut its "
            "beginning, or leave the oldest messages out",
            code="context_length_exceeded",
        )
    params = {
        "max_tokens": drawing.max_tokens,
        "temperature": drawing.temperature,
        "top_p": drawing.top_p,
        "top_k": drawing.top_k,
        "seed": drawing.seed,
        "stop": list(drawing.stops) or None,
    }
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
        "num_samples": drawing.count,
        "sampling_params": params,
        "topk_sample_logprobs": drawing.top_logprobs,
        "prompt_logprobs": drawing.scores_prompt,
        "topk_prompt_logprobs": drawing.top_logprobs if drawing.scores_prompt else 0,
    }
    made = sampling_calls.sample_request(body, model, seed, results_max)
    return replace(made, stop_ids=drawing.ends)


# ---- results ----


class Generation:
    """One client's requests in flight. Their samples are numbered consecutively. If they are
    `scored`, `scores` gets a sample's log-probabilities at temperature 1, and the most likely
    tokens, before its part comes."""

    def __init__(
        self, service: Service, client: int, target: Target, streams: bool, scored: bool = False
    ):
        self._service = service
        self._client = client
        self._session = service.samplers.named.session(target.key)
        self._streams = streams
        self._scored = scored
        self._came: asyncio.Queue[Sequence[SampleDelta] | Future[SampleResult]] = asyncio.Queue()
        self._asked: dict[Future[SampleResult], tuple[SampleRequest, int]] = {}  # first sample
        self._parts: dict[Future[SampleResult], SampleDelta] = {}  # these wait for scores
        self.futures: list[Future[SampleResult]] = []  # in the order of the requests
        self.scores: dict[int, SampleResult] = {}
        self._left = 0
        self.prompt_tokens = 0

    def begin(self, wanted: Sequence[SampleRequest]) -> None:
        """Submits the requests."""
        first = 0
        for request in wanted:
            future = self._submit(request, self._listener(first) if self._streams else None)
            self.futures.append(future)
            self._asked[future] = request, first
            self.prompt_tokens += len(request.prompt)
            first += request.num_samples

    def _submit(
        self, request: SampleRequest, listener: TokenListener | None
    ) -> Future[SampleResult]:
        loop = asyncio.get_running_loop()

        def tell(future: Future[SampleResult]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._came.put_nowait, future)

        future = self._service.worker.sample(self._session, request, self._client, listener)
        future.add_done_callback(tell)
        self._left += 1
        return future

    def _listener(self, first: int) -> TokenListener:
        loop = asyncio.get_running_loop()

        def hear(parts: Sequence[SampleDelta]) -> None:
            numbered = [SampleDelta(first + part.number, *_values(part)) for part in parts]
            loop.call_soon_threadsafe(self._came.put_nowait, numbered)

        return hear

    async def next(self, seconds: float) -> Sequence[SampleDelta] | None:
        """The next parts; () after a timeout; None at the end. Raises the error of a failed
        request."""
        while self._left:
            try:
                item = await asyncio.wait_for(self._came.get(), seconds)
            except TimeoutError:
                return ()
            if not isinstance(item, Future):
                return item
            self._left -= 1
            if (error := item.exception()) is not None:
                raise explain(error)
            if parts := self._whole(item):
                return parts
        return None

    def _whole(self, done: Future[SampleResult]) -> list[SampleDelta]:
        """The samples that are complete with this result."""
        if self._streams:
            return []
        if done in self._parts:
            part = self._parts.pop(done)
            self.scores[part.number] = done.result()
            return [part]
        request, first = self._asked[done]
        samples = enumerate(done.result().samples, first)
        parts = [SampleDelta(number, *_values(sample)) for number, sample in samples]
        if not self._scored:
            return parts
        self._parts |= {self._submit(_scoring(request, part), None): part for part in parts}
        return []

    def close(self) -> None:
        """Cancels all unfinished requests."""
        for future in [*self.futures, *self._parts]:
            if not future.done():
                self._service.worker.cancel(future)


def _scoring(request: SampleRequest, part: SampleDelta) -> SampleRequest:
    """The request that scores a sample as the end of a prompt."""
    return SampleRequest(
        np.concatenate([request.prompt, part.tokens]),
        max_tokens=1,
        prompt_logprobs=True,
        topk_prompt=request.topk_sample,
        last_n=len(part.tokens),
        images=request.images,
    )


def _values(part: Any) -> tuple[Any, ...]:
    """The fields that SampleDelta and Sample share, in SampleDelta's order."""
    return part.tokens, part.logprobs, part.stop_reason, part.topk_ids, part.topk_logprobs


async def start(
    service: Service,
    request: Request,
    target: Target,
    wanted: Sequence[SampleRequest],
    *,
    streams: bool,
    scored: bool = False,
    arrival: Reservation | None = None,
) -> Generation:
    """Starts requests once the queue has space for them; their arrival ends then."""
    context = target.model.context
    held = sum(sampling_calls.held_bytes(one, context) for one in wanted)
    client = -1 - int(owner(request)[:15], 16)
    with await service.queue.enter(held) as queued:
        generation = Generation(service, client, target, streams, scored)
        generation.begin(wanted)
        queued.keep()
        if arrival is not None:
            arrival.leave()
        left = len(wanted)

        def one_less() -> None:
            nonlocal left
            left -= 1
            if not left:
                queued.leave()

        for future in generation.futures:
            when_done(future, one_less)
        return generation


async def respond(
    service: Service,
    request: Request,
    target: Target,
    wanted: Sequence[SampleRequest],
    *,
    streams: bool,
    events: Callable[[Generation, Sequence[SampleDelta] | None], AsyncIterator[str]],
    reply: Callable[[Generation, Sequence[SampleDelta]], Response | dict[str, Any]],
    whole: bool = False,
    scored: bool = False,
    arrival: Reservation | None = None,
) -> Response | dict[str, Any]:
    """The requests' result: a stream of `events` from the first parts on, or one `reply`, made in a
    thread. With `whole`, a stream has each sample when it is complete, and can be `scored`."""
    streamed = streams and not whole
    generation = await start(
        service, request, target, wanted, streams=streamed, scored=scored, arrival=arrival
    )
    if streams:
        first = await first_parts(generation, request)
        return Streamed(events(generation, first), generation)
    parts = await all_parts(generation, request)
    shown = sum(len(part.tokens) for part in parts)
    shown += sum(len(one.prompt) * one.num_samples for one in wanted if one.prompt_logprobs)
    return await service.beside(shown << 6, reply, generation, parts)


async def all_parts(generation: Generation, request: Request) -> list[SampleDelta]:
    """All parts, for a client that does not stream."""
    found: list[SampleDelta] = []
    clock = asyncio.get_running_loop().time
    looked = clock()
    try:
        while (parts := await generation.next(LOOK_SECONDS)) is not None:
            found += parts
            if not parts or clock() - looked > LOOK_SECONDS:
                looked = clock()
                if await request.is_disconnected():
                    raise ClientDisconnect
    finally:
        generation.close()
    return found


class Choice:
    """One sample, from tokens to text and tool calls; with `one_call` it ends after its first call.
    Do not add tokens after its end."""

    def __init__(self, answer: Answer, ends: Collection[int], *, one_call: bool = False):
        self._answer = answer
        self._ends = ends
        self._one_call = one_call
        self.tokens = 0
        self.ended: str | None = None  # "stop", "length" or "calls"
        self.drawn: list[int] = []  # the newest part's tokens …
        self.kept: list[int] = []  # … without the one that ended it

    @property
    def stopped(self) -> str | None:
        """The stop string that ended it."""
        return self._answer.stopped

    def add(self, part: SampleDelta) -> list[Piece]:
        """The pieces that are final now; texts are not empty, and no two are adjacent."""
        pieces, tokens = list[Piece](), part.tokens.tolist()
        for count, token in enumerate(tokens, 1):
            pieces += self._answer.add(token)
            if self._one_call and self._answer.calls:
                tokens, self.ended = tokens[:count], "calls"
                break
        self.drawn = self.kept = tokens
        self.tokens += len(tokens)
        if part.stop_reason == "stop" and tokens and tokens[-1] in self._ends:
            self.kept = self.kept[:-1]
        if part.stop_reason is not None and self.ended is None:
            pieces += self._answer.end()
            cut = part.stop_reason == "length" and self.stopped is None
            self.ended = "length" if cut else "calls" if self._answer.calls else "stop"
        return joined(_to_call(pieces) if self._one_call else pieces)


def _to_call(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """The pieces up to the first call."""
    calls = (row for row, piece in enumerate(pieces, 1) if isinstance(piece, ToolCall))
    return pieces[: next(calls, len(pieces))]


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces, with adjacent texts and adjacent thoughts concatenated."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, str) and isinstance(last, str):
            found[-1] = last + piece
        elif isinstance(piece, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + piece.text)
        elif piece:
            found.append(piece)
    return found


# ---- streams ----


class Streamed(StreamingResponse):
    """Server-sent events of a generation, which ends when they end or the client disconnects."""

    def __init__(self, events: AsyncIterator[str], generation: Generation):
        super().__init__(
            events, media_type="text/event-stream", headers={"cache-control": "no-store"}
        )
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


async def first_parts(generation: Generation, request: Request) -> Sequence[SampleDelta] | None:
    """The first parts. A failure before them still gets its own HTTP status."""
    waited = 0.0
    try:
        while not (parts := await generation.next(LOOK_SECONDS)) and parts is not None:
            waited += LOOK_SECONDS
            if await request.is_disconnected():
                raise ClientDisconnect
            if waited >= FIRST_SECONDS:
                break
    except BaseException:
        generation.close()
        raise
    return parts


async def parts_from(
    generation: Generation, first: Sequence[SampleDelta] | None
) -> AsyncIterator[Sequence[SampleDelta] | RequestError]:
    """The parts from the first ones on; empty ones after some silence, and a failure last."""
    parts = first
    while parts is not None:
        yield parts
        try:
            parts = await generation.next(PING_SECONDS)
        except RequestError as error:
            yield error
            return


def event(data: Mapping[str, Any], name: str | None = None) -> str:
    """One server-sent event."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"
