"""/metrics for Prometheus, and a supervisor's two checks: /healthz and /readyz.

Counters and histograms grow with each ended call; GAUGES are read at each scrape. Each server has
its own registry, so several may run in one process. A new figure is a row of CALLS or GAUGES. Only
the newest open runs, at most RUNS_MAX, have figures of their own: each run is a label, and
Prometheus keeps every label that it has seen.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tinsmith.checkpoints.quota import bytes_in
from tinsmith.engine import image_cache
from tinsmith.engine.call_log import Call, Memory
from tinsmith.engine.errors import RequestError
from tinsmith.engine.replica import ReplicaRow
from tinsmith.server.records.notifier import Refused
from tinsmith.server.records.steps import loss_per_token
from tinsmith.server.routes.training import Handler
from tinsmith.server.service.service import Service
from tinsmith.system import disk

# From a short decoding step to a long training call.
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
TOKEN_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
RUNS_MAX = 20
DISK_SECONDS = 60.0  # how long the bytes of all checkpoints are cached
MEMORY_SECONDS = 0.5  # to wait for the engine's use of memory; after that its last reply is shown

Amount = Callable[[Call], float | None]


def _of_samples(amount: Amount) -> Amount:
    return lambda call: amount(call) if call.kind == "sample" else None


def _trained(call: Call) -> float | None:
    return call.tokens if call.kind in ("forward", "forward_backward") and not call.error else None


def _first(call: Call) -> float | None:
    return call.first - call.arrived if call.first else None


def _between(call: Call) -> float | None:
    """The mean time between a sequence's tokens; None for a call that drew no second token."""
    if call.kind != "sample" or call.error or not call.first:
        return None
    later = call.drawn / call.request.num_samples - 1
    return (call.ended - call.first) / later if later > 0 else None


# A figure's kind, its name, its help, its labels, and what a call adds to it (None: nothing).
CALLS: tuple[tuple[type[Counter] | type[Histogram], str, str, tuple[str, ...], Amount], ...] = (
    (Counter, "calls", "calls that ended", ("kind", "base", "outcome"), lambda call: 1),
    (Histogram, "call_seconds", "from a call's turn to its end", ("kind",), lambda c: c.seconds),
    (
        Histogram,
        "queue_seconds",
        "from a call's arrival to its turn",
        ("kind",),
        lambda c: c.queued,
    ),
    (Histogram, "first_token_seconds", "from a sample's arrival to its first token", (), _first),
    (
        Histogram,
        "inter_token_seconds",
        "from a token of a sequence to its next, the mean of a sample",
        (),
        _between,
    ),
    (Counter, "trained_tokens", "tokens of datums of calls that succeeded", ("base",), _trained),
    (Counter, "prompt_tokens", "prompts' tokens", ("base",), _of_samples(lambda c: c.tokens)),
    (
        Counter,
        "cached_tokens",
        "of these, found cached",
        ("base",),
        _of_samples(lambda c: c.cached),
    ),
    (Counter, "drawn_tokens", "tokens sampled", ("base",), _of_samples(lambda c: c.drawn)),
)

# A gauge, its help, and its value.
GAUGES: tuple[tuple[str, str, Callable[[Service], float]], ...] = (
    (
        "queue_requests",
        "requests that wait for the engine or are under way",
        lambda s: s.queue.count,
    ),
    ("queue_bytes", "their bytes", lambda s: s.queue.bytes),
    ("arriving_bytes", "bytes of requests that come in", lambda s: s.arrivals.bytes),
    ("result_bytes", "bytes of results that wait to be read", lambda s: s.promises.bytes),
    ("sessions", "clients", lambda s: sum(not one.ended for one in s.sessions.values())),
    ("runs", "runs that are open", lambda s: len(s.sessions.runs)),
    (
        "training",
        "1 while a training call is under way",
        lambda s: float(bool(s.worker.now.training)),
    ),
    ("training_waiting", "training calls that wait", lambda s: sum(s.worker.now.waiting.values())),
    ("sampling", "sampling requests under way", lambda s: sum(s.worker.now.sampling.values())),
)

# A figure of each replica: its kind, its name, its help, and its value (None: it has none).
Figure = Callable[[ReplicaRow], float | None]
REPLICAS: tuple[
    tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, Figure], ...
] = (
    (GaugeMetricFamily, "samples", "samples under way", lambda row: row.samples),
    (GaugeMetricFamily, "memory_bytes", "what it holds", lambda row: row.memory),
    (CounterMetricFamily, "drawn_tokens", "tokens that it has sampled", lambda row: row.drawn),
    (
        CounterMetricFamily,
        "weights_pulled_bytes",
        "adapters' weights that were sent to it",
        lambda row: row.weights_bytes,
    ),
    (CounterMetricFamily, "parts", "parts of training calls", lambda row: row.parts),
    (
        CounterMetricFamily,
        "gradient_bytes",
        "sums of gradients that it has sent",
        lambda row: row.gradient_bytes,
    ),
)


class Metrics:
    """A server's figures: it listens to calls, and collects the others when Prometheus scrapes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.service: Service | None = None  # its gauges are read, once it is set
        self.memory: Memory | None = None
        self.disk: tuple[int, int] | None = None  # bytes of checkpoints, and free ones
        self.disk_at = -math.inf  # when that was counted
        self._runs: dict[str, tuple[str, dict[str, float]]] = {}  # base, figures; newest last
        self._calls = [
            (self._make(kind, name, about, labels), labels, amount)
            for kind, name, about, labels, amount in CALLS
        ]
        self._refused = self._make(Counter, "refused", "requests refused", ("route", "status"))
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def _make(self, kind: Any, name: str, about: str, labels: tuple[str, ...]) -> Any:
        buckets = TOKEN_SECONDS if name == "inter_token_seconds" else SECONDS
        more = {"buckets": buckets} if kind is Histogram else {}
        return kind(f"tinsmith_{name}", about, labels, registry=self.registry, **more)

    def __call__(self, happened: Call | Refused) -> None:
        """Counts an ended call or a refusal."""
        if isinstance(happened, Refused):
            self._refused.labels(happened.route, happened.status).inc()
            return
        facts = {
            "kind": happened.kind,
            "base": happened.base,
            "outcome": "failed" if happened.error else "done",
        }
        for figure, labels, amount in self._calls:
            value = amount(happened)
            if value is None:
                continue
            one = figure.labels(*(facts[label] for label in labels)) if labels else figure
            one.observe(value) if hasattr(one, "observe") else one.inc(value)
        if not happened.error and happened.kind in ("forward_backward", "optim_step"):
            self._trained(happened)

    def _trained(self, call: Call) -> None:
        """Updates the figures of a run that has trained."""
        base, figures = self._runs.pop(call.run, (call.base, {"step": call.step}))
        if call.kind == "optim_step":
            figures["step"] = call.step + 1
        else:
            figures["loss"] = loss_per_token(call)
        self._runs[call.run] = base, figures
        while len(self._runs) > RUNS_MAX:
            del self._runs[next(iter(self._runs))]

    def collect(self) -> Iterator[Metric]:
        """The gauges, and the engine's own counts."""
        service = self.service
        if service is None:
            return
        for name, about, value in GAUGES:
            yield GaugeMetricFamily(f"tinsmith_{name}", about, value=value(service))
        yield from self._drawing(*service.worker.drawn)
        yield from self._images(*image_cache.counts())
        yield from self._replicas(service.worker.replicas, service.worker.repeated)
        yield from self._training(set(service.sessions.runs))
        if self.disk is not None:
            for name, size in zip(("bytes", "disk_free_bytes"), self.disk, strict=True):
                about = "checkpoints on the disk" if name == "bytes" else "free on their disk"
                yield GaugeMetricFamily(f"tinsmith_checkpoints_{name}", about, value=size)
        if self.memory is not None:
            held = GaugeMetricFamily("tinsmith_memory_bytes", "memory by its use", labels=["use"])
            for use, size in asdict(self.memory).items():
                if use not in ("limit", "evictions", "cache_used", "offloaded"):
                    held.add_metric([use], size)
            yield held
            yield GaugeMetricFamily(
                "tinsmith_memory_limit_bytes",
                "the most that all of it may take",
                value=self.memory.limit or float("inf"),
            )
            yield GaugeMetricFamily(
                "tinsmith_cache_used_ratio",
                "the part of the cache of keys and values that running sequences hold",
                value=self.memory.cache_used / max(1, self.memory.cache),
            )
            yield GaugeMetricFamily(
                "tinsmith_offloaded_bytes",
                "idle runs that made room, on disk or in the host's memory",
                value=self.memory.offloaded,
            )
            yield CounterMetricFamily(
                "tinsmith_evictions", "what was dropped for room", value=self.memory.evictions
            )

    @staticmethod
    def _images(decoded: int, found: int, held: int) -> Iterator[Metric]:
        """The images of requests."""
        for name, about, value in (
            ("decoded", "images that were decoded", decoded),
            ("found", "images whose pixels were still there", found),
        ):
            yield CounterMetricFamily(f"tinsmith_images_{name}", about, value=value)
        about = "pixels of the latest images, beside those of requests"
        yield GaugeMetricFamily("tinsmith_images_bytes", about, value=held)

    def _training(self, opened: set[str]) -> Iterator[Metric]:
        """The newest open runs: their steps, and the loss of the last forward_backward."""
        for name, about in (
            ("step", "optimizer steps of a run"),
            ("loss", "loss of a run's last forward_backward, over the sum of its weights"),
        ):
            family = GaugeMetricFamily(f"tinsmith_run_{name}", about, labels=["run", "base"])
            for run, (base, figures) in list(self._runs.items()):
                if run in opened and name in figures:
                    family.add_metric([run, base], figures[name])
            yield family

    @staticmethod
    def _replicas(rows: list[ReplicaRow], repeated: tuple[int, int]) -> Iterator[Metric]:
        """The processes that compute, if there are several."""
        if not rows:
            return
        states = GaugeMetricFamily("tinsmith_replicas", "replicas by state", labels=["state"])
        for state, number in collections.Counter(row.state for row in rows).items():
            states.add_metric([state], number)
        yield states
        again = "that were repeated as their replica was lost"
        for name, what, value in zip(
            ("repeated", "parts_repeated"), ("requests", "parts of calls"), repeated, strict=True
        ):
            yield CounterMetricFamily(f"tinsmith_{name}", f"{what} {again}", value=value)
        for kind, name, about, figure in REPLICAS:
            family = kind(f"tinsmith_replica_{name}", about, labels=["replica"])
            for row in rows:
                if (value := figure(row)) is not None:
                    family.add_metric([row.name], value)
            yield family

    @staticmethod
    def _drawing(steps: dict[int, int], seconds: float) -> Iterator[Metric]:
        """A histogram of tokens per sampling step: one token for each decoding sequence."""
        counts = [
            (str(top), sum(n for size, n in steps.items() if size <= top)) for top in STEP_TOKENS
        ]
        yield HistogramMetricFamily(
            "tinsmith_step_tokens",
            "tokens that a sampling step draws",
            buckets=[*counts, ("+Inf", sum(steps.values()))],
            sum_value=sum(size * count for size, count in steps.items()),
        )
        yield CounterMetricFamily("tinsmith_sampling_seconds", "of sampling steps", value=seconds)


async def memory_now(service: Service, request: Request) -> Memory | None:
    """What holds memory, or the engine's last reply if it is busy."""
    metrics: Metrics = request.app.state.metrics
    asked = asyncio.shield(asyncio.wrap_future(service.worker.memory()))
    with contextlib.suppress(TimeoutError, RequestError):  # the engine has ended
        metrics.memory = await asyncio.wait_for(asked, MEMORY_SECONDS)
    return metrics.memory


async def _look_at_disk(service: Service, metrics: Metrics) -> None:
    """Counts the bytes of all checkpoints, which takes a moment if there are thousands."""
    moment, root = time.monotonic(), service.store.root
    if moment - metrics.disk_at >= DISK_SECONDS:
        metrics.disk_at = moment
        with contextlib.suppress(OSError):
            held = await service.disk(bytes_in, root)
            metrics.disk = held, (await service.disk(shutil.disk_usage, root)).free


async def figures(service: Service, request: Request) -> Response:
    """The figures, in Prometheus's format."""
    metrics: Metrics = request.app.state.metrics
    await memory_now(service, request)
    await _look_at_disk(service, metrics)
    return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def healthz(service: Service, request: Request) -> dict[str, Any]:
    """A server that listens has already checked its models, so every answer is "ok"."""
    return {"status": "ok"}


async def readyz(service: Service, request: Request) -> dict[str, Any] | Response:
    """Whether requests would be served: the engine's thread is alive, and a small file can be
    written beside the checkpoints."""
    reason = "" if service.worker.alive else "the engine's thread has ended"
    if not reason:
        try:
            await service.disk(disk.check_writes, service.store.root)
        except OSError as error:
            why = disk.FULL.get(error.errno or 0, error.strerror)
            reason = f"checkpoints can't be written to {service.store.root}: {why}"
    if not reason:
        return {"status": "ready"}
    return JSONResponse({"status": "not ready", "detail": reason}, 503)


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/metrics", figures),
    ("GET", "/healthz", healthz),
    ("GET", "/readyz", readyz),
)
