"""stable_reinforce through the SDK: what was sampled is remembered, and is what is trained."""

import dataclasses
import logging
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import tinker
from conftest import Wire, logprobs, make_datum
from tinker import PromptProvenanceSpan, SampledProvenanceSpan
from tinsmith.engine.decoding import Sample, SampleResult
from tinsmith.server.wire.provenance import Sequences

PROMPT = [11, 12, 13, 14]
LOSS = "stable_reinforce"


@pytest.fixture
def client(service_client):
    return service_client.create_lora_training_client("tiny", rank=4, seed=1).result()


def sampled(client, count: int = 2, prompt: list[int] = PROMPT) -> list:
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
    params = tinker.SamplingParams(max_tokens=6, seed=3, stop=[])
    return sampler.sample(tinker.ModelInput.from_ints(prompt), count, params).result().sequences


def datum_of(sequence, advantage: float = 1.0, prompt: list[int] = PROMPT) -> tinker.Datum:
    """As the cookbook's rl_loop makes it, zeros for the prompt's targets."""
    before, count, name = len(prompt) - 1, len(sequence.tokens), sequence.sequence_id
    datum = make_datum(
        prompt + sequence.tokens[:-1],
        [0] * before + sequence.tokens,
        logprobs=[0.0] * before + sequence.logprobs,
        advantages=[0.0] * before + [advantage] * count,
    )
    return datum.with_provenance(
        model_input=[
            PromptProvenanceSpan(sequence_id=name, length=len(prompt)),
            SampledProvenanceSpan(sequence_id=name, length=count - 1),
        ],
        loss_fn_inputs=[
            PromptProvenanceSpan(sequence_id=name, offset=1, length=before),
            SampledProvenanceSpan(sequence_id=name, length=count),
        ],
    )


def with_inputs(datum: tinker.Datum, **inputs) -> tinker.Datum:
    arrays = {key: np.asarray(value) for key, value in inputs.items()}
    return dataclasses.replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, **arrays})


def test_the_servers_result_is_the_formula_over_what_was_recorded(client) -> None:
    first, second = sampled(client)
    client.forward_backward([make_datum([5, 6, 7], [6, 7, 8])], "cross_entropy").result()
    client.optim_step(tinker.AdamParams(learning_rate=0.03)).result()  # now it is off policy
    data = [datum_of(first, 0.5), datum_of(second, -2.0)]
    reply = client.forward_backward(data, LOSS, {"kl_coeff": 0.3}).result()
    loss, largest = 0.0, 0.0
    for sequence, advantage, found in zip(
        (first, second), (0.5, -2.0), logprobs(reply), strict=True
    ):
        q = np.asarray(sequence.logprobs)
        lp = found[len(PROMPT) - 1 :].astype(np.float64)
        assert np.abs(lp - q).max() > 1e-3
        weight = np.minimum(np.exp(lp - q), 1.0) if advantage < 0 else 1.0
        loss += (0.15 * (lp - q) ** 2 - weight * advantage * lp).sum()
        largest = max(largest, np.exp(lp - q).max())
    assert reply.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    assert reply.metrics["stable_reinforce_as_tinsmith_defines_it:max"] == 1
    assert reply.metrics["sampler_ratio:max"] == pytest.approx(largest, rel=1e-5)
    assert 0 < reply.metrics["sampler_kl:mean"] < 1


def test_the_recorded_logprobs_count_and_not_the_datums(client) -> None:
    [sequence] = sampled(client, 1)
    datum = datum_of(sequence)
    other = with_inputs(datum, logprobs=np.full(9, -3.0, np.float32))
    without = dataclasses.replace(
        datum,
        loss_fn_inputs={k: v for k, v in datum.loss_fn_inputs.items() if k != "logprobs"},
    )
    metrics = [client.forward([one], LOSS).result().metrics for one in (datum, other, without)]
    assert metrics[0] == metrics[1] == metrics[2]
    assert metrics[0]["sampler_ratio:max"] == 1.0  # to the bit: the sampler is the trainer


def test_two_turns_of_one_trajectory(client) -> None:
    """The second request's prompt has the first one's tokens in it: spans of three kinds."""
    [first] = sampled(client, 1)
    prompt = [*PROMPT, *first.tokens, 21, 22]
    [second] = sampled(client, 1, prompt)
    tokens = [*prompt, *second.tokens]
    count = len(first.tokens)
    spans = [
        PromptProvenanceSpan(sequence_id=first.sequence_id, length=4),
        SampledProvenanceSpan(sequence_id=first.sequence_id, length=count),
        PromptProvenanceSpan(sequence_id=second.sequence_id, offset=4 + count, length=2),
        SampledProvenanceSpan(sequence_id=second.sequence_id, length=len(second.tokens)),
    ]
    advantages = [0.0] * 3 + [1.0] * count + [0.0] * 2 + [-1.0] * len(second.tokens)
    datum = make_datum(tokens[:-1], tokens[1:], advantages=advantages, mask=np.abs(advantages))
    datum = datum.with_provenance(
        model_input=[*spans[:-1], dataclasses.replace(spans[-1], length=spans[-1].length - 1)],
        loss_fn_inputs=[dataclasses.replace(spans[0], offset=1, length=3), *spans[1:]],
    )
    reply = client.forward_backward([datum], LOSS).result()
    assert reply.metrics["sampler_ratio:max"] == 1.0
    wanted = -sum(first.logprobs) + sum(second.logprobs)
    assert reply.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-5)


Change = Callable[[tinker.Datum], tinker.Datum]


def spans(datum: tinker.Datum, field: str, index: int, **change) -> tinker.Datum:
    found = list(getattr(datum, field))
    found[index] = dataclasses.replace(found[index], **change)
    return dataclasses.replace(datum, **{field: found})


def unknown_number(datum: tinker.Datum) -> tinker.Datum:
    name = datum.model_input_spans[0].sequence_id
    return spans(datum, "loss_fn_input_spans", 1, sequence_id=f"{name}7")


def bare(datum: tinker.Datum) -> tinker.Datum:
    return dataclasses.replace(datum, model_input_spans=None, loss_fn_input_spans=None)


def other_token(datum: tinker.Datum) -> tinker.Datum:
    tokens = datum.model_input.to_ints()
    tokens[6] = (tokens[6] + 1) % 200
    return dataclasses.replace(datum, model_input=tinker.ModelInput.from_ints(tokens))


def other_target(datum: tinker.Datum) -> tinker.Datum:
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy().copy()
    targets[4] = (targets[4] + 1) % 200
    return with_inputs(datum, target_tokens=targets)


def unshifted(datum: tinker.Datum) -> tinker.Datum:
    """Each target is its own input: every span is right by itself."""
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy().tolist()
    tokens = datum.model_input.to_ints()[1:] + targets[-1:]
    moved = dataclasses.replace(datum, model_input=tinker.ModelInput.from_ints(tokens))
    moved = spans(moved, "model_input_spans", 0, offset=1, length=3)
    return spans(moved, "model_input_spans", 1, length=6)


def prompts_advantage(datum: tinker.Datum) -> tinker.Datum:
    return with_inputs(datum, advantages=np.ones(9, np.float32))


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        (bare, r"datum 1 has no provenance"),
        (
            lambda one: spans(one, "model_input_spans", 0, sequence_id="nobody:0"),
            r"datum 1: model_input_spans\[0\] names sequence 'nobody:0', of which",
        ),
        (
            unknown_number,
            r"datum 1: loss_fn_input_spans\[1\] names sequence '.*:seq:\d+:\d7'",
        ),
        (
            lambda one: spans(one, "model_input_spans", 1, offset=2),
            r"model_input_spans\[1\] has offset 2 and length 5, but sequence .* has 6 sampled",
        ),
        (
            lambda one: spans(one, "model_input_spans", 0, offset=1),
            r"model_input_spans\[0\] has offset 1 and length 4, but .* has 4 tokens in its prompt",
        ),
        (
            lambda one: spans(one, "loss_fn_input_spans", 1, length=5),
            r"datum 1: loss_fn_input_spans cover 8 of the datum's 9 positions",
        ),
        (
            lambda one: spans(one, "model_input_spans", 1, length=6),
            r"datum 1: model_input_spans cover more than the datum's 9 positions",
        ),
        (other_token, r"datum 1: model_input_spans\[1\] has id \d+ at position 6, but sequence"),
        (other_target, r"datum 1: loss_fn_input_spans\[1\] has id \d+ at position 4, but sequence"),
        (unshifted, r"has the target after id \d+ at position 3, but .* has id 14 before it"),
        (prompts_advantage, r"the target at position 0 is a prompt's, but its advantage is 1"),
    ),
)  # fmt: skip
def test_a_datum_that_is_not_what_was_sampled_is_refused_by_index(
    client, change: Change, sentence: str
) -> None:
    first, second = sampled(client)
    good = [datum_of(first), datum_of(second)]
    with pytest.raises(tinker.RequestFailedError, match=sentence) as failure:
        client.forward_backward([good[0], change(good[1])], LOSS).result()
    assert "user" in str(failure.value.category).lower()
    fresh = client.forward_backward(good, LOSS).result()  # nothing of the refused one remains
    step = client.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    assert fresh.metrics["sampler_ratio:max"] == 1.0 and step.metrics


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        (lambda span: span.Clear(), "is neither a prompt's nor a sampled"),
        (lambda span: setattr(span.sampled_tokens, "offset", -1), "has offset -1 and length 5"),
        (lambda span: setattr(span.sampled_tokens, "length", -5), "has offset 0 and length -5"),
        (lambda span: setattr(span.sampled_tokens, "length", (1 << 63) - 1), "has 6 sampled"),
        (lambda span: setattr(span.sampled_tokens, "sequence_id", "x" * 9999), "has no record"),
    ),
)  # fmt: skip
def test_a_span_that_the_sdk_would_not_make_is_refused(client, server, change, sentence) -> None:
    [sequence] = sampled(client, 1)  # request 1 of the run

    def both(message) -> None:
        message.loss_fn = LOSS
        change(message.data[0].model_input_spans[1])

    wire = Wire(server.url)
    promise = wire.forward_backward(client.model_id, 2, [datum_of(sequence)], change=both)
    assert sentence in wire.poll(promise).json()["error"]


def test_another_sessions_sequences_are_unknown(client, server) -> None:
    [sequence] = sampled(client, 1)
    with server.service_client() as other:
        theirs = other.create_lora_training_client("tiny", rank=4, seed=1).result()
        with pytest.raises(tinker.RequestFailedError, match="its session has no record"):
            theirs.forward_backward([datum_of(sequence)], LOSS).result()


def test_what_was_sampled_without_recording_is_unknown(client) -> None:
    sampler = client.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=6, seed=3, stop=[])
    prompt = tinker.ModelInput.from_ints(PROMPT)
    [sequence] = sampler.sample(prompt, 1, params).result().sequences
    with pytest.raises(tinker.RequestFailedError, match="has no record"):
        client.forward_backward([datum_of(sequence)], LOSS).result()
    # Other losses take such datums as they are: their provenance is no claim that they use.
    client.forward_backward([datum_of(sequence)], "importance_sampling").result()


def test_a_run_says_once_in_the_log_whose_formula_it_is(client, caplog) -> None:
    [sequence] = sampled(client, 1)
    with caplog.at_level(logging.INFO, "tinsmith"):
        for _ in range(2):
            client.forward_backward([datum_of(sequence)], LOSS).result()
    told = [record for record in caplog.messages if "has not published its formula" in record]
    assert len(told) == 1 and client.model_id in told[0]


# ---- what is remembered, and for how long ----


def result(*tokens: int) -> SampleResult:
    ids = np.asarray(tokens, np.int32)
    return SampleResult((Sample(ids, -ids.astype(np.float32), "stop"),))


def kept(bytes_max: int = 1 << 20) -> tuple[Sequences, list[float]]:
    time = [0.0]
    return Sequences(bytes_max, clock=lambda: time[0]), time


def test_a_sequence_lasts_a_day_after_its_last_use() -> None:
    sequences, time = kept()
    sequences.add("s", "a", np.asarray([1], np.int32), result(5, 6))
    for hours in (23, 46, 69):
        time[0] = hours * 3600.0
        found = sequences.find("s", "a:0")
        assert found is not None and found.tokens.tolist() == [5, 6]
    time[0] += 86401
    assert sequences.find("s", "a:0") is None and sequences.bytes == 0


def test_the_least_recently_used_are_forgotten_where_there_is_no_room() -> None:
    sequences, _ = kept(bytes_max=3 * 420 + 30)
    for name in "abc":
        sequences.add("s", name, np.asarray([1], np.int32), result(5, 6))
    assert sequences.find("s", "a:0") is not None
    sequences.add("s", "d", np.asarray([1], np.int32), result(5, 6))
    known = [name for name in "abcd" if sequences.find("s", f"{name}:0")]
    assert known == ["a", "c", "d"] and sequences.bytes <= sequences.bytes_max


def test_what_a_result_has_beside_its_sequences_is_not_kept() -> None:
    """Nobody would count its bytes."""
    sequences, _ = kept()
    ids, scores = np.zeros((2, 1000), np.int32), np.zeros((2, 1000), np.float32)
    prompt = np.asarray([1, 2], np.int32)
    [sample] = result(5, 6).samples
    sample = dataclasses.replace(sample, topk_ids=ids, topk_logprobs=scores)
    whole = SampleResult((sample,), topk_ids=ids, topk_logprobs=scores)
    left = [weakref.ref(array) for array in (ids, scores)]
    sequences.add("s", "a", prompt, whole)
    del ids, scores, sample, whole
    assert sequences.find("s", "a:0") is not None and all(ref() is None for ref in left)


def test_a_session_takes_its_sequences_with_it() -> None:
    sequences, _ = kept()
    sequences.add("s", "a", np.asarray([1], np.int32), result(5))
    sequences.add("t", "b", np.asarray([1], np.int32), result(5))
    sequences.forget("s")
    assert sequences.find("s", "a:0") is None and sequences.find("t", "b:0") is not None


@pytest.mark.parametrize("name", ("a", "a:", "a:1", "a:-1", "a:x", "a:²", "", ":", "a:" + "9" * 99))
def test_a_name_that_is_none_is_unknown(name: str) -> None:
    sequences, _ = kept()
    sequences.add("s", "a", np.asarray([1], np.int32), result(5))
    assert sequences.find("s", name) is None and sequences.find("t", "a:0") is None
