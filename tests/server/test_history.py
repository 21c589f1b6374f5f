"""The history of runs: what the client saw, kept in bounds, and there after a restart."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from conftest import logprobs, make_datum
from support.images import Held
from support.small_run import ADAM, PROMPT, make_data
from tinsmith.chat.text import load_tokenizer
from tinsmith.checkpoints.optimizers import AdamParams
from tinsmith.checkpoints.store import Store
from tinsmith.engine.call_log import Call
from tinsmith.engine.decoding import Sample, SampleRequest, SampleResult
from tinsmith.engine.image_cache import HeldImage
from tinsmith.engine.training import Batch, BatchResult
from tinsmith.server.backend import Backend
from tinsmith.server.records import history as history_file
from tinsmith.server.records import steps as history_steps
from tinsmith.server.records.database import State
from tinsmith.server.records.history import RunHistory
from tinsmith.server.records.last_samples import datum_of, samples_of, shown
from tinsmith.server.records.notifier import Refused
from tinsmith.server.records.steps import StepMetrics, joined, split
from tinsmith.server.service.config import ServerConfig


def start(model: Path, folder: Path) -> Backend:
    return Backend(ServerConfig({"tiny": model}, checkpoints=folder, device="cpu", threads=1))


@pytest.fixture(scope="module")
def seen(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    """A server on which a client has trained, sampled and distilled, and what the client saw."""
    folder = tmp_path_factory.mktemp("history")
    found: dict[str, Any] = {"folder": folder}
    with start(tiny_model_dir, folder) as backend, backend.service_client() as service:
        about = {"recipe": "small"}
        client = service.create_lora_training_client(
            "tiny", rank=4, seed=1, user_metadata=about
        ).result()
        for _ in range(2):
            found["loss"] = client.forward_backward(make_data(), "cross_entropy").result()
            found["optimizer"] = client.optim_step(ADAM).result().metrics
        sampler = client.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=6, temperature=1.0, seed=3)
        sample = sampler.sample(PROMPT, 1, params).result().sequences[0]
        tokens = [*PROMPT.to_ints(), *sample.tokens]
        base = service.create_sampling_client(base_model="tiny").result()
        found["teacher"] = base.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
        behind = len(tokens) - len(sample.tokens)
        past = np.concatenate([np.zeros(behind - 1), sample.logprobs])
        advantages = (np.arange(len(tokens) - 1) >= behind - 1) * 1.0
        datum = make_datum(tokens[:-1], tokens[1:], logprobs=past, advantages=advantages)
        reply = client.forward_backward([datum], "importance_sampling").result()
        client.optim_step(ADAM).result()
        found |= {"sample": sample, "past": past[behind - 1 :]}
        found["now"] = logprobs(reply)[0][behind - 1 :]
        client.forward(make_data(), "cross_entropy").result()
        with pytest.raises(tinker.TinkerError), pytest.warns(FutureWarning):
            client.load_state("tinker://nowhere/weights/x").result()
        found["run"] = client.model_id
        backend.notifier.flush()
        found["told"] = told(backend.history, client.model_id)
        found["under_way"] = backend.history.under_way(client.model_id)
        found["refusals"] = backend.history.refusals()
    with opened(folder) as history:
        yield found | {"history": history}


@contextmanager
def opened(folder: Path) -> Iterator[RunHistory]:
    """The history in a folder, as a server finds it that begins."""
    state = State(Store(folder))
    history = RunHistory(state)
    yield history
    history.close()
    state.close()


def told(history: RunHistory, run: str) -> list[Any]:
    """All that is told of a run."""
    return [history.steps(run), history.samples(run), history.about(run), history.runs()]


def steps(seen: dict) -> list[dict[str, Any]]:
    return seen["history"].steps(seen["run"])[0]


def test_a_step_has_what_its_client_saw(seen: dict) -> None:
    rows = steps(seen)
    assert [row["step"] for row in rows] == [0, 1, 2]
    row = rows[1]
    assert row["metrics"]["loss:sum"] == seen["loss"].metrics["loss:sum"]
    assert row["optimizer"] == seen["optimizer"]
    assert row["adam"]["learning_rate"] == 1e-3
    assert (row["tokens"], row["datums"]) == (8, 2)
    assert row["calls"] == {"forward_backward": 1, "optim_step": 1}
    assert sum(row["split"].values()) == pytest.approx(row["seconds"])
    assert rows[2]["calls"] == {"forward_backward": 1, "optim_step": 1, "snapshot": 1, "sample": 2}
    assert rows[2]["drawn"] == 7 and rows[2]["split"]["sampling"] > 0


def test_the_gap_between_sampler_and_trainer_is_the_cookbooks(seen: dict) -> None:
    gap = seen["past"].astype(np.float64) - seen["now"]
    row = steps(seen)[2]["kl"]
    assert row["v1"] == pytest.approx(gap.mean(), abs=1e-9)
    assert row["v2"] == pytest.approx((gap**2).mean() / 2, abs=1e-9)
    assert row["entropy"] == pytest.approx(-seen["past"].mean(), rel=1e-6)
    assert steps(seen)[1]["kl"] is None


def test_a_sample_has_its_teachers_log_probabilities_beside_its_own(
    seen: dict, tiny_model_dir: Path
) -> None:
    rows = seen["history"].samples(seen["run"])
    (row,) = [row for row in rows if row["kind"] == "sample"]
    sample = seen["sample"]
    assert row["ids"] == sample.tokens and row["prompt"] == PROMPT.to_ints()
    assert row["student"] == pytest.approx(sample.logprobs, abs=1e-4)
    assert row["teacher"] == pytest.approx(seen["teacher"][len(PROMPT.to_ints()) :], abs=1e-4)
    assert row["teacher_name"] == "tiny" and row["step"] == 2
    tokenizer = load_tokenizer(tiny_model_dir)
    told, text = shown(row, tokenizer), tokenizer.decode(sample.tokens, skip_special_tokens=False)
    assert "".join(told["tokens"]) == text and len(told["tokens"]) == len(sample.tokens)
    assert shown(row, None)["tokens"][0] == f"⟨{sample.tokens[0]}⟩"


def test_a_datum_has_the_log_probability_of_each_target(seen: dict) -> None:
    rows = [row for row in seen["history"].samples(seen["run"]) if row["kind"] == "datum"]
    assert [row["loss"] for row in rows] == ["importance_sampling", *["cross_entropy"] * 2]
    row = rows[1]  # the second step's
    assert row["ids"] == [12, 13, 14, 15, 16] and row["prompt"] == [11]
    assert row["live"] == [False, True, True, True, True]
    assert row["student"] == pytest.approx(logprobs(seen["loss"])[0], abs=1e-4)
    assert rows[0]["sampler"][-1] == pytest.approx(seen["past"][-1], abs=1e-4)


def test_settings_totals_and_failures_are_told(seen: dict) -> None:
    _, about = seen["history"].about(seen["run"])
    assert about["user_metadata"] == {"recipe": "small"}
    assert (about["base"], about["rank"], about["attn"]) == ("tiny", 4, True)
    assert (about["loss"], about["steps"], len(about["spark"])) == ("importance_sampling", 3, 3)
    assert about["adam"]["beta2"] == 0.95 and "nowhere" in about["error"]["detail"]
    assert any("nowhere" in item["detail"] for item in seen["refusals"])
    assert seen["under_way"] == {"step": 3, "calls": {"forward": 1}, "failed": 0}


def test_it_is_there_after_a_restart(seen: dict) -> None:
    assert told(seen["history"], seen["run"]) == seen["told"]
    assert len(seen["told"][0][0]) == 3
    assert seen["history"].under_way(seen["run"]) is None


# ---- without a server ----


def call(kind: str, run: str = "r", step: int = 0, **facts: Any) -> Call:
    """A call of a second that has ended."""
    first = 10.0 * step
    return Call(kind, run, step=step, arrived=first, began=first + 1, ended=first + 2, **facts)


def stepped(run: str, step: int, loss: float = 1.0) -> Call:
    report = {"loss": loss, "loss_tokens": 2.0, "grad_norm": 1.0}
    return call("optim_step", run, step, request=AdamParams(), result=report)


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunHistory]:
    monkeypatch.setattr(history_file, "FLUSH_SECONDS", 600.0)
    with opened(tmp_path) as it:
        yield it


def test_a_long_run_keeps_every_second_step_then_every_fourth(
    history: RunHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_file, "STEPS_MAX", 8)
    for step in range(30):
        history(stepped("r", step))
        history.flush()
    rows, place = history.steps("r")
    assert [row["step"] for row in rows] == list(range(0, 30, 4))
    history(stepped("r", 32))
    assert [row["step"] for row in history.steps("r", place)[0]] == [32]
    _, about = history.about("r")
    assert about["steps"] == 31 and about["last"]["step"] == 32 and about["stride"] == 8
    assert [row["step"] for row in history.steps("r")[0]] == list(range(0, 33, 8))


def test_how_far_apart_the_steps_are_is_there_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_file, "STEPS_MAX", 8)
    with opened(tmp_path) as history:
        for step in range(12):
            history(stepped("r", step))
    with opened(tmp_path) as history:
        assert history.about("r")[1]["stride"] == 2
        history(stepped("r", 13))
        history(stepped("r", 14))
        assert [row["step"] for row in history.steps("r")[0]] == [0, 2, 4, 6, 8, 10, 14]


def test_the_oldest_runs_give_way(history: RunHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_file, "FORGET_FLUSHES", 1)
    monkeypatch.setattr(history_file, "RUNS_MAX", 3)
    for number in range(5):
        made = stepped(f"run {number}", 0)
        made.at = float(number)
        history(made)
    assert list(history.runs()) == ["run 4", "run 3", "run 2"]
    assert history.steps("run 0") == ([], 0) and len(history.steps("run 4")[0]) == 1
    monkeypatch.setattr(history_file, "ROWS_MAX", 2)
    history(stepped("run 4", 1))
    history.flush()
    assert list(history.runs()) == ["run 4"]


def test_the_small_curve_keeps_its_length(history: RunHistory) -> None:
    for step in range(200):
        history(stepped("r", step, loss=float(step)))
    spark = history.about("r")[1]["spark"]
    assert 20 <= len(spark) <= history_file.SPARK_MAX
    assert spark[0] == 0.0 and spark == sorted(spark) and spark[-1] > 80


def test_what_is_no_number_is_null(history: RunHistory) -> None:
    history(stepped("r", 0, loss=float("nan")))
    assert history.steps("r")[0][0]["optimizer"]["loss"] is None


def test_a_row_that_is_damaged_is_left_out(history: RunHistory) -> None:
    history(stepped("r", 0))
    history(stepped("r", 1))
    history.flush()
    with history._state.transaction() as sql:
        sql.execute("UPDATE history_step SET row = '[' WHERE step = 0")
        sql.execute("UPDATE history_run SET about = '1'")
    assert [row["step"] for row in history.steps("r")[0]] == [1]
    assert history.runs()["r"][1] == {}


def test_refusals_are_bounded_and_repeats_are_counted(history: RunHistory) -> None:
    for number in range(300):
        history(Refused("POST /x", 400, f"sentence {number // 2}"))
    found = history.refusals()
    assert len(found) == history_file.REFUSED_MAX
    assert found[0] | {"at": 0} == {
        "at": 0, "what": "POST /x", "status": 400, "detail": "sentence 149", "count": 2,
    }  # fmt: skip


def test_a_loaded_checkpoint_sets_the_step(history: RunHistory) -> None:
    history(stepped("r", 0))
    history(call("load", step=1))
    history(stepped("r", 7))
    assert [row["step"] for row in history.steps("r")[0]] == [0, 7]


def batch(loss: str = "generalized_jsd", **inputs: Any) -> Batch:
    """Two positions with three ids each."""
    return Batch(
        tokens=np.array([5, 6], np.int32),
        lengths=np.array([2], np.int32),
        targets=np.array([6, 7, 8, 9, 10, 11], np.int32),
        counts=np.array([6], np.int32),
        loss=loss,
        inputs={key: np.array(value, np.float32) for key, value in inputs.items()},
        config={},
        shapes=((2, 3),),
    )


def test_a_teachers_list_stands_beside_the_students(history: RunHistory) -> None:
    teacher = [-0.5, -2.0, -99999.0, -3.0, -1.0, -0.2]
    made = batch(weights=[1.0] * 6, teacher_logprobs=teacher)
    own = np.array([[-1.0, -2.5, -7.0], [-0.1, -4.0, -5.0]], np.float32)
    result = BatchResult((own,), 0.5, {"jsd:mean": 0.25}, {"jsd": (np.array([0.1, 0.4]),)})
    history(call("forward_backward", request=made, result=result, tokens=2))
    (row,) = history.samples("r")
    assert row["ids"] == [6, 11]  # what follows, and at the end what the teacher thinks likeliest
    assert (row["student"], row["teacher"]) == ([-1.0, -5.0], [-0.5, -0.2])
    assert row["best"][0] == [[6, 7], [-1.0, -2.5], [-0.5, -2.0]]
    assert row["best"][1] == [[11, 10, 9], [-5.0, -4.0, -0.1], [-0.2, -1.0, -3.0]]
    assert row["divergence"] == [0.1, 0.4]
    assert shown(row, None)["best"][0][0] == ["⟨6⟩", -1.0, -0.5]


def test_weights_of_several_targets_are_what_the_teacher_thinks(history: RunHistory) -> None:
    made = batch("cross_entropy", weights=[0.5, 0.25, 0.0, 0.0, 0.0, 0.0])
    own = np.array([[-1.0, -2.5, -7.0], [-0.1, -4.0, -5.0]], np.float32)
    result = BatchResult((own,), 0.5, {"loss:sum": 0.25})
    history(call("forward_backward", request=made, result=result, tokens=2))
    (row,) = history.samples("r")
    assert row["teacher"] == [pytest.approx(np.log(2 / 3), abs=1e-4), None]
    assert row["student"] == [-1.0, None] and row["live"] == [True, False]
    names, mine, theirs = row["best"][0]
    assert (names, mine) == ([6, 7], [-1.0, -2.5])
    assert theirs == pytest.approx(np.log([2 / 3, 1 / 3]), abs=1e-4)
    assert row["best"][1] == [[], [], []]


def test_each_moment_counts_once() -> None:
    spans = {
        "optimizer": [(8.0, 9.0)],
        "forward_backward": [(4.0, 6.0), (5.0, 7.0)],
        "sampling": [(1.0, 5.0), (0.0, 2.0)],
        "waiting": [(0.0, 8.0)],
    }
    assert split(spans, 0.5, 10.0) == {
        "optimizer": 1.0,
        "forward_backward": 3.0,
        "saving": 0.0,
        "sampling": 3.5,
        "waiting": 1.0,
        "client": 1.0,
    }
    assert joined([(3, 4), (0, 1), (1, 2)]) == [(0, 2), (3, 4)]


def test_spans_that_do_not_touch_are_not_joined_at_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of 40,000 samples took minutes of the thread that watches."""
    seen = 0

    def counted(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
        nonlocal seen
        seen += len(spans)
        return joined(spans)

    monkeypatch.setattr(history_steps, "joined", counted)
    step = history_steps.Step(1)
    for number in range(8192):
        step._span("sampling", (2.0 * number, 2.0 * number + 1))
    assert len(step._spans["sampling"]) == 8192 and seen < 4 * 8192


def test_metrics_of_several_calls_are_reduced_by_their_names() -> None:
    metrics = StepMetrics()
    metrics.add({"loss:sum": 1.0, "jsd:mean": 1.0, "jsd:max": 3.0, "x:min": 2.0}, 1)
    metrics.add({"loss:sum": 2.0, "jsd:mean": 4.0, "jsd:max": 2.0, "x:min": 1.0, "y": 7.0}, 2)
    assert metrics.values == {
        "loss:sum": 3.0, "jsd:mean": 3.0, "jsd:max": 3.0, "x:min": 1.0, "y": 7.0,
    }  # fmt: skip


def test_an_image_is_shown_as_one_text(tiny_model_dir: Path) -> None:
    """Of a sample and of a datum, also where its first rows were cut off, or the second image
    follows at once."""
    first, second = (HeldImage(Held(*facts, 0)) for facts in ((-1, 2, 3), (-7, 1, 2)))
    tokenizer, images = load_tokenizer(tiny_model_dir), (first, second, first)
    ids = np.concatenate([[5, 6], first.ids, second.ids, [7], first.ids, [8]]).astype(np.int32)
    drawn = Sample(np.asarray([9, 10], np.int32), np.zeros(2, np.float32), "length")
    call = Call("sample", request=SampleRequest(ids, images=images), result=SampleResult((drawn,)))
    [(_, row)] = samples_of(call)
    assert row["images"] == [[-1, 2, 3], [-7, 1, 2]]
    text = [tokenizer.decode([token], skip_special_tokens=False) for token in range(11)]
    big, small = "[image 3 × 2]", "[image 2 × 1]"
    told = shown(row, tokenizer)
    wanted = "".join([*text[5:7], big, small, text[7], big, text[8]])
    assert told["prompt"] == wanted and "".join(told["tokens"]) == text[9] + text[10]
    assert "images" not in told
    assert shown(row, None)["prompt"] == f"⟨5⟩⟨6⟩{big}{small}⟨7⟩{big}⟨8⟩"
    assert shown({**row, "prompt": row["prompt"][4:]}, None)["prompt"].startswith(f"{big}{small}⟨7")

    plain = SampleRequest(ids[:2], images=())
    [(_, row)] = samples_of(Call("sample", request=plain, result=SampleResult((drawn,))))
    assert "images" not in row

    weights = np.zeros(len(ids), np.float32)
    weights[-1] = 1
    lengths = np.asarray([len(ids)], np.int32)
    targets = np.maximum(np.append(ids[1:], 4), 0).astype(np.int32)
    batch = Batch(
        ids, lengths, targets, np.ones(1, np.int32), "cross_entropy", {"weights": weights}, {},
        ((len(ids),),), images=images,
    )  # fmt: skip
    result = BatchResult((np.zeros(len(ids), np.float32),), 0.0)
    row = datum_of(Call("forward_backward", request=batch, result=result), 1)
    assert row is not None
    told = shown(row, None)
    assert told["prompt"] == f"⟨5⟩⟨6⟩{big}{small}⟨7⟩{big}" and told["tokens"] == ["⟨8⟩", "⟨4⟩"]
