"""Calls as OpenTelemetry spans, if opentelemetry is installed and set up.

A span begins when a call arrives and ends with it; its attributes are the call's facts, its events
the turn and the first token. Spans go to the process's global tracer provider. If it has none,
OTEL_EXPORTER_OTLP_ENDPOINT is set, and the SDK and its OTLP exporter are installed, they go to that
endpoint. Otherwise there are no spans.

opentelemetry's instrumentation of Starlette makes spans of HTTP requests, which end with a promise:
they have neither the call's facts nor its waiting and computing time.
"""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec

from tinsmith.engine.call_log import Call
from tinsmith.server.records.notifier import EventListener, Refused

log = logging.getLogger("tinsmith")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def tracing() -> list[EventListener]:
    """A listener that makes a span of each call; none if no one would receive it."""
    if find_spec("opentelemetry") is None:
        return []
    from opentelemetry import trace

    unset = isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    if unset and not (any(map(os.environ.get, ENDPOINTS)) and _export()):
        return []
    tracer = trace.get_tracer("tinsmith")

    def span(happened: Call | Refused) -> None:
        if isinstance(happened, Refused):
            return
        call, zero = happened, happened.at - happened.arrived  # the offset between the two clocks
        attributes = {
            "tinsmith.base": call.base,
            "tinsmith.cli.run": call.run,
            "tinsmith.sampler": call.sampler,
            "tinsmith.step": call.step,
            "tinsmith.tokens": call.tokens,
            "tinsmith.cached": call.cached,
            "tinsmith.drawn": call.drawn,
        }
        made = tracer.start_span(call.kind, start_time=int(call.at * 1e9), attributes=attributes)
        for name, moment in (("turn", call.began), ("first token", call.first)):
            if moment:
                made.add_event(name, timestamp=int((zero + moment) * 1e9))
        if call.error:
            made.set_status(trace.StatusCode.ERROR, call.error)
        made.end(int((zero + call.ended) * 1e9))

    return [span]


def _export() -> bool:
    """Sends spans to the endpoint in the environment; returns whether that is possible."""
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning(
            "%s is set, but spans can't be sent: pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http",
            ENDPOINTS[0],
        )
        return False
    provider = TracerProvider(resource=Resource.create({"service.name": "tinsmith"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return True
