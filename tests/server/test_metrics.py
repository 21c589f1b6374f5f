"""/metrics, /healthz, /readyz and OpenTelemetry's spans, against what the clients saw."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support import ROOT
from support.tiny_models import folder
from tinker import types
from tinsmith.engine.call_log import Call
from tinsmith.engine.decoding import SampleRequest
from tinsmith.server.backend import Backend
from tinsmith.server.routes import metrics as metrics_module
from tinsmith.server.routes.metrics import RUNS_MAX, Metrics
from tinsmith.server.service.config import ServerConfig

DASHBOARD = ROOT / "packaging" / "grafana.json"
IDS = types.ModelInput.from_ints([1, 2, 3, 4])


@pytest.fixture(scope="module")
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    yield exporter


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory, spans: Any) -> Iterator[Backend]:
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    with Backend(
        ServerConfig({"tiny": folder("qwen3")}, checkpoints=checkpoints, device="cpu")
    ) as backend:
        yield backend


def read(backend: Backend) -> dict[str, float]:
    """Every sample of /metrics: its name and labels, and its value."""
    backend.notifier.flush()
    text = httpx.get(f"{backend.url}/metrics").raise_for_status().text
    return {
        sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(figures: dict[str, float], name: str, **labels: str) -> float:
    return figures[f"tinsmith_{name}" + json.dumps(labels, sort_keys=True)]


def work(backend: Backend) -> tuple[int, int]:
    """A step and two samples; the tokens that were trained, and drawn."""
    inputs = {"target_tokens": types.TensorData(data=[1, 2, 3, 4], dtype="int64")}
    datum = types.Datum(model_input=IDS, loss_fn_inputs=inputs)
    with backend.service_client() as client:
        run = client.create_lora_training_client("tiny", rank=2).result()
        run.forward_backward([datum] * 3, "cross_entropy").result()
        run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        sampler = run.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=5, stop=[])
        found = sampler.sample(IDS, 2, params).result().sequences
        with pytest.raises(Exception, match="nothing"):
            run.forward([datum], "nothing").result()
        held = read(backend)
        for use in ("weights", "adapters", "arenas", "snapshots", "cache"):
            assert of(held, "memory_bytes", use=use) > 0
        assert of(held, "memory_limit_bytes") > of(held, "memory_bytes", use="weights")
        assert of(held, "sessions") == of(held, "runs") == 1
        assert of(held, "cache_used_ratio") == 0  # what is remembered is not held
        [loss] = [value for name, value in held.items() if name.startswith("tinsmith_run_loss{")]
        assert 4 < loss < 7  # of a model that knows nothing of 305 ids
        [step] = [value for name, value in held.items() if name.startswith("tinsmith_run_step{")]
        assert step == 1
    return 12, sum(len(one.tokens) for one in found)


def test_metrics_count_what_clients_did(backend: Backend, spans: InMemorySpanExporter) -> None:
    work(backend)
    before = read(backend)
    spans.clear()
    trained, drawn = work(backend)
    httpx.get(f"{backend.url}/api/v1/training_runs/nobody")
    httpx.get(f"{backend.url}/", headers={"Host": "evil.example"})
    after = read(backend)

    def grown(name: str, **labels: str) -> float:
        return of(after, name, **labels) - before.get(
            f"tinsmith_{name}" + json.dumps(labels, sort_keys=True), 0.0
        )

    for kind in ("create", "forward_backward", "optim_step", "snapshot", "sample"):
        assert grown("calls_total", kind=kind, base="tiny", outcome="done") == 1
        assert [grown(f"{name}_seconds_count", kind=kind) for name in ("call", "queue")] == [1, 1]
    assert grown("calls_total", kind="reject", base="tiny", outcome="failed") == 1
    assert grown("trained_tokens_total", base="tiny") == trained
    assert grown("prompt_tokens_total", base="tiny") == 4
    assert grown("drawn_tokens_total", base="tiny") == drawn == grown("step_tokens_sum")
    assert 'tinsmith_memory_bytes{"use": "limit"}' not in after
    assert grown("step_tokens_bucket", le="1") < grown("step_tokens_count")  # two at once
    assert grown("first_token_seconds_count") == grown("inter_token_seconds_count") == 1
    assert not any(name.startswith("tinsmith_run_") for name in after)  # its client has gone
    assert 0 < grown("sampling_seconds_total") < 60
    assert grown("refused_total", route="GET /api/v1/training_runs/{run}", status="404") == 1
    assert grown("refused_total", route="access", status="403") == 1
    assert of(after, "training") == of(after, "sampling") == of(after, "queue_requests") == 0

    found = {span.name: span for span in spans.get_finished_spans()}
    sample, forward = found["sample"], found["forward_backward"]
    assert sample.attributes["tinsmith.drawn"] == drawn and sample.status.is_ok
    assert forward.attributes["tinsmith.tokens"] == trained
    assert [event.name for event in sample.events] == ["turn", "first token"]
    moments = [sample.start_time, *(e.timestamp for e in sample.events), sample.end_time]
    assert moments == sorted(moments)
    assert not found["reject"].status.is_ok and "nothing" in found["reject"].status.description


def test_the_time_between_tokens_is_a_sequences_mean(backend: Backend) -> None:
    metrics = Metrics()
    call = Call("sample", request=SampleRequest(np.ones(3, np.int32), num_samples=2))
    call.first, call.ended, call.drawn = 10.0, 16.0, 8  # two sequences of four tokens
    for drawn in (8, 2):  # of two sequences of one token there is none
        call.drawn = drawn
        metrics(call)
    text = generate_latest(metrics.registry).decode()
    assert "tinsmith_inter_token_seconds_sum 2.0\n" in text
    assert "tinsmith_inter_token_seconds_count 1.0\n" in text


def test_only_the_newest_runs_have_figures_of_their_own() -> None:
    metrics = Metrics()
    for number in [*range(RUNS_MAX + 5), 3]:  # the fourth is back
        metrics(Call("optim_step", run=f"run{number}", base="tiny", step=number))
    opened = {f"run{number}" for number in range(RUNS_MAX + 4)}
    steps, losses = metrics._training(opened)
    assert not losses.samples
    found = {sample.labels["run"]: sample.value for sample in steps.samples}
    wanted = {number: number + 1 for number in [*range(6, RUNS_MAX + 4), 3]}
    assert found == {f"run{number}": step for number, step in wanted.items()}


def test_the_bytes_of_checkpoints_are_counted(backend: Backend, monkeypatch: Any) -> None:
    monkeypatch.setattr(metrics_module, "DISK_SECONDS", float("inf"))
    before = of(read(backend), "checkpoints_bytes")
    (backend.checkpoints / "new").write_bytes(bytes(5000))
    assert of(read(backend), "checkpoints_bytes") == before  # not each time
    monkeypatch.setattr(metrics_module, "DISK_SECONDS", 0.0)
    figures = read(backend)
    assert of(figures, "checkpoints_bytes") >= before + 5000
    assert of(figures, "checkpoints_disk_free_bytes") > 0


def test_the_dashboard_asks_for_figures_that_there_are(backend: Backend) -> None:
    work(backend)
    known = {name.partition("{")[0] for name in read(backend)}
    text = httpx.get(f"{backend.url}/metrics").text  # of a run's there are none when it has gone
    known |= {family.name for family in text_string_to_metric_families(text)}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {target["expr"] for panel in panels for target in panel.get("targets", ())}
    assert len(asked) > 10
    for expression in asked:
        names = {word for word in _words(expression) if word.startswith(("tinsmith_", "process_"))}
        assert names and names <= known, expression


def _words(text: str) -> list[str]:
    return "".join(sign if sign.isalnum() or sign == "_" else " " for sign in text).split()


def test_health_and_readiness_need_no_key_and_metrics_do(tmp_path: Path) -> None:
    models, key = {"tiny": folder("qwen3")}, "tml-secret-key"
    with Backend(
        ServerConfig(models, checkpoints=tmp_path / "c", device="cpu", api_key=key)
    ) as locked:
        assert httpx.get(f"{locked.url}/healthz").json() == {"status": "ok"}
        assert httpx.get(f"{locked.url}/readyz").json() == {"status": "ready"}
        assert httpx.get(f"{locked.url}/metrics").status_code == 401
        bearer = {"Authorization": f"Bearer {key}"}
        assert "tinsmith_calls" in httpx.get(f"{locked.url}/metrics", headers=bearer).text
        files = sorted((tmp_path / "c").iterdir())
        (tmp_path / "c").rename(tmp_path / "moved")
        reply = httpx.get(f"{locked.url}/readyz")
        told = f"checkpoints can't be written to {tmp_path / 'c'}: No such file or directory"
        assert reply.status_code == 503 and reply.json()["detail"] == told
        (tmp_path / "moved").rename(tmp_path / "c")
        assert httpx.get(f"{locked.url}/readyz").status_code == 200
        assert sorted((tmp_path / "c").iterdir()) == files  # the small file is gone
        locked.worker.close()
        reply = httpx.get(f"{locked.url}/readyz")
        assert reply.status_code == 503 and "engine's thread" in reply.json()["detail"]
        assert httpx.get(f"{locked.url}/healthz").status_code == 200
        # Just then a supervisor wants to know.
        assert httpx.get(f"{locked.url}/metrics", headers=bearer).status_code == 200
