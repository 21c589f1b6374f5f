"""What a client of the API counts on, end to end with the SDK: the cases of a suite for servers.

SkyRL's tests of its own Tinker server ask for these; those that other files here hold are left out.
"""

from pathlib import Path

import numpy as np
import pytest
import tinker
from conftest import logprobs, make_datum
from transformers import AutoTokenizer

PROMPT = "The quick brown fox jumps over the"


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path):
    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture
def training(service_client) -> tinker.TrainingClient:
    return service_client.create_lora_training_client("tiny", rank=4, seed=3).result()


@pytest.fixture
def data(tokenizer) -> list[tinker.Datum]:
    """Weights of nothing, of the answer, and none at all."""
    data = []
    for question, answer, weigh in (
        ("two and two?", " four", lambda asked: 0.0),
        ("the sky is", " blue", lambda asked: float(not asked)),
        ("three and three?", " six", None),
    ):
        asked, told = tokenizer.encode(question), tokenizer.encode(answer)
        tokens = [*asked, *told]
        targets = [*tokens[1:], tokenizer.eos_token_id]
        arrays = {}
        if weigh is not None:
            arrays["weights"] = [weigh(place < len(asked) - 1) for place in range(len(targets))]
        data.append(make_datum(tokens, targets, **arrays))
    return data


def sample(client: tinker.SamplingClient, prompt: list[int], count: int = 1, **options):
    asked = {key: options.pop(key) for key in list(options) if "prompt_logprobs" in key}
    params = tinker.SamplingParams(**{"max_tokens": 12, "stop": [], **options})
    return client.sample(tinker.ModelInput.from_ints(prompt), count, params, **asked).result()


def test_capabilities_name_the_models_that_are_served(service_client):
    served = service_client.get_server_capabilities().supported_models
    assert "tiny" in [model.model_name for model in served]


# ---- training ----


def test_a_state_brings_back_the_losses_of_its_time(service_client, training, data):
    start = training.forward(data, "cross_entropy").result()
    state = training.save_state("0000").result().path
    sampler = training.save_weights_for_sampler("0000").result().path  # a name of its own kind
    assert state != sampler
    first = training.forward_backward(data, "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    moved = training.forward(data, "cross_entropy").result()
    assert moved.metrics["loss:sum"] < first.metrics["loss:sum"]
    for create in (
        service_client.create_training_client_from_state,
        service_client.create_training_client_from_state_with_optimizer,
    ):
        again = create(state).result().forward_backward(data, "cross_entropy").result()
        assert again.metrics["loss:sum"] == first.metrics["loss:sum"]
        for one, other, begun in zip(
            logprobs(again), logprobs(first), logprobs(start), strict=True
        ):
            np.testing.assert_array_equal(one, other)
            np.testing.assert_array_equal(one, begun)


def test_weights_of_zero_are_scored_and_cost_nothing(training, data):
    alone = training.forward(data[:1], "cross_entropy").result()
    assert alone.metrics["loss:sum"] == 0
    assert (logprobs(alone)[0] < 0).all()
    every = training.forward(data[2:], "cross_entropy").result()
    assert every.metrics["loss:sum"] == pytest.approx(-logprobs(every)[0].sum(), rel=1e-6)
    masked = training.forward(data[1:2], "cross_entropy").result()
    weights = data[1].loss_fn_inputs["weights"].to_numpy()
    expected = -(logprobs(masked)[0] * weights).sum()
    assert 0 < masked.metrics["loss:sum"] == pytest.approx(expected, rel=1e-6)


def test_a_loss_of_the_clients_own_equals_the_built_in_one(service_client, training, data):
    def cross_entropy(batch, scored):
        total = 0.0
        for datum, row in zip(batch, scored, strict=True):
            weights = datum.loss_fn_inputs.get("weights")
            total = total - (row * (1.0 if weights is None else weights.to_torch())).sum()
        return total, {}

    state = training.save_state("start").result().path
    paths = []
    for run in range(2):
        client = service_client.create_training_client_from_state(state).result()
        if run:
            client.forward_backward_custom(data, cross_entropy).result()
        else:
            client.forward_backward(data, "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        paths.append(logprobs(client.forward(data, "cross_entropy").result()))
    for one, other in zip(*paths, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_an_unloaded_model_is_gone_and_its_neighbour_is_not(server, service_client, data):
    import httpx

    gone, stays = (service_client.create_lora_training_client("tiny", rank=2) for _ in range(2))
    gone, stays = gone.result(), stays.result()
    url, headers = f"{server.url}/api/v1", {"X-API-Key": "tml-local"}
    body = {"model_id": gone.model_id}
    promise = httpx.post(f"{url}/unload_model", json=body, headers=headers).json()
    wanted = {"request_id": promise["request_id"]}
    told = httpx.post(f"{url}/retrieve_future", json=wanted, headers=headers).json()
    assert (told["type"], told["model_id"]) == ("unload_model", gone.model_id)
    again = httpx.post(f"{url}/unload_model", json=body, headers=headers)
    assert again.json() == promise  # to a client that lost the reply
    body["model_id"] += "0"
    assert httpx.post(f"{url}/unload_model", json=body, headers=headers).status_code == 404
    assert httpx.post(f"{url}/get_info", json=body, headers=headers).status_code == 404
    with pytest.raises(tinker.TinkerError, match="there is no"):
        gone.forward(data, "cross_entropy").result()
    assert stays.forward(data, "cross_entropy").result().metrics["loss:sum"] > 0


# ---- checkpoints ----


def test_a_run_is_listed_with_what_it_is(service_client):
    run = service_client.create_lora_training_client("tiny").result()  # rank 32, the SDK's own
    run.save_state("kept").result()
    found = service_client.create_rest_client().list_training_runs(limit=1000).result()
    assert found.cursor.total_count == len(found.training_runs)
    mine = next(item for item in found.training_runs if item.training_run_id == run.model_id)
    assert (mine.base_model, mine.is_lora, mine.lora_rank) == ("tiny", True, 32)
    assert not mine.corrupted


def test_what_is_deleted_leaves_the_listing_and_the_disk_and_nothing_else_does(
    server, service_client, training
):
    rest = service_client.create_rest_client()
    for name in ("a", "b", "c"):
        training.save_state(name).result()
    training.save_weights_for_sampler("a").result()

    def listed() -> dict[str, str]:
        found = rest.list_checkpoints(training.model_id).result().checkpoints
        return {item.checkpoint_id: item.tinker_path for item in found}

    def on_disk() -> set[str]:
        files = server.checkpoints.glob("*/*/*/meta.json")
        mine = [file.parent for file in files if training.model_id.split(":")[0] in str(file)]
        return {f"{folder.parent.name}/{folder.name}" for folder in mine}

    everything = {"weights/a", "weights/b", "weights/c", "sampler_weights/a"}
    assert set(listed()) == on_disk() == everything
    for gone in ("weights/b", "sampler_weights/a"):
        rest.delete_checkpoint_from_tinker_path(listed()[gone]).result()
    assert set(listed()) == on_disk() == {"weights/a", "weights/c"}
    with pytest.raises(tinker.APIStatusError) as refused:  # which of two kinds is not said
        rest.delete_checkpoint(training.model_id, "a").result()
    assert 400 <= refused.value.status_code < 500
    assert set(listed()) == on_disk() == {"weights/a", "weights/c"}


# ---- sampling ----


def test_an_untrained_adapter_answers_as_its_base_does(service_client, training, tokenizer):
    base = service_client.create_sampling_client(base_model="tiny").result()
    tuned = training.save_weights_and_get_sampling_client().result()
    prompt = tokenizer.encode(PROMPT)
    futures = [
        client.sample(
            tinker.ModelInput.from_ints(prompt),
            count,
            tinker.SamplingParams(max_tokens=length, temperature=0.0, stop=[]),
        )
        for client in (base, tuned)
        for count, length in ((1, 20), (2, 10))
    ]
    results = [future.result().sequences for future in futures]
    assert [len(sequences) for sequences in results] == [1, 2, 1, 2]
    longest = results[0][0].tokens
    for sequences in results:
        for sequence in sequences:
            assert sequence.stop_reason == "length"
            assert sequence.tokens == longest[: len(sequence.tokens)]


def test_the_first_of_its_kind_stops_a_sample(service_client, tokenizer):
    client = service_client.create_sampling_client(base_model="tiny").result()
    prompt = tokenizer.encode(PROMPT)
    free = sample(client, prompt, temperature=0.0, max_tokens=30).sequences[0].tokens
    for stop in dict.fromkeys(free):
        found = sample(client, prompt, temperature=0.0, max_tokens=30, stop=[stop]).sequences[0]
        assert found.stop_reason == "stop"
        assert found.tokens == free[: free.index(stop) + 1]


def test_top_k_of_one_leaves_a_seed_nothing_to_choose(service_client, tokenizer):
    client = service_client.create_sampling_client(base_model="tiny").result()
    prompt = tokenizer.encode(PROMPT)
    drawn = {
        k: {
            tuple(sample(client, prompt, seed=seed, top_k=k).sequences[0].tokens)
            for seed in range(4)
        }
        for k in (1, -1)
    }
    greedy = sample(client, prompt, temperature=0.0).sequences[0].tokens
    assert drawn[1] == {tuple(greedy)}
    assert len(drawn[-1]) == 4


def test_samples_of_one_request_differ_and_repeat_with_its_seed(service_client, tokenizer):
    client = service_client.create_sampling_client(base_model="tiny").result()
    prompt = tokenizer.encode(PROMPT)

    def draw(seed: int) -> list[list[int]]:
        return [one.tokens for one in sample(client, prompt, 3, seed=seed).sequences]

    first = draw(42)
    assert len({tuple(tokens) for tokens in first}) == 3
    assert draw(42) == first
    assert draw(999) != first


def test_scores_of_the_prompt_come_only_when_they_are_asked_for(service_client, tokenizer):
    client = service_client.create_sampling_client(base_model="tiny").result()
    prompt = tokenizer.encode(PROMPT)
    plain = sample(client, prompt)
    assert plain.prompt_logprobs is None and plain.topk_prompt_logprobs is None
    scored = sample(client, prompt, include_prompt_logprobs=True)
    assert len(scored.prompt_logprobs) == len(prompt) and scored.topk_prompt_logprobs is None
    best = sample(client, prompt, include_prompt_logprobs=True, topk_prompt_logprobs=4)
    assert len(best.topk_prompt_logprobs) == len(prompt)
    assert best.prompt_logprobs[1:] == scored.prompt_logprobs[1:]


@pytest.mark.parametrize("loads", [False, True])
def test_trainer_and_sampler_score_a_text_alike(service_client, training, tokenizer, loads):
    """The cookbook's script for it, whose mean squared difference here has to be 0."""
    tokens = tokenizer.encode(" ".join([PROMPT] * 4))
    datum = make_datum(tokens[:-1], tokens[1:])
    for _ in range(3):
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    client = training
    if loads:  # into a client that has a model already, as the script does
        state = training.save_state("trained").result().path
        client = service_client.create_lora_training_client("tiny", rank=4).result()
        client.load_state(state).result()
    trained = logprobs(client.forward([datum], "cross_entropy").result())[0]
    sampler = client.save_weights_and_get_sampling_client().result()
    scored = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
    np.testing.assert_array_equal(np.asarray(scored[1:], np.float32), trained)
