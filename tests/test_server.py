"""The server through the unmodified tinker SDK: the whole life of training and sampling clients.

What the SDK would not do by itself (requests out of order, retries, compressed bodies) is posted by
hand. Where numbers are compared, both sides are the server's: the maths is tested elsewhere.
"""

import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import tinsmith
import torch
from conftest import CONTEXT, TOKENIZER, VOCAB, Wire, logprobs, make_datum
from tinsmith.server import Backend

ADAM = tinker.AdamParams(learning_rate=1e-3)
PROMPT = tinker.ModelInput.from_ints([10, 20, 30, 40, 50])
EOS = 2


def make_client(service: tinker.ServiceClient, seed: int = 1) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=seed).result()


def make_data() -> list[tinker.Datum]:
    return [
        make_datum([11, 12, 13, 14, 15], [12, 13, 14, 15, 16], weights=[0, 1, 1, 0.5, 1]),
        make_datum([21, 22, 23], [22, 23, 24], weights=[1, -1, 2]),
    ]


def train(client: tinker.TrainingClient, steps: int) -> list[float]:
    """Some steps on the same data; the losses."""
    losses = []
    for _ in range(steps):
        output = client.forward_backward(make_data(), "cross_entropy")
        client.optim_step(ADAM)
        losses.append(output.result().metrics["loss:sum"])
    return losses


def read(client: tinker.TrainingClient) -> np.ndarray:
    """Log-probabilities that stand for the adapter's state."""
    return np.concatenate(logprobs(client.forward(make_data(), "cross_entropy").result()))


def sample(client: tinker.SamplingClient, count: int = 1, **params) -> list[list[int]]:
    reply = client.sample(PROMPT, count, tinker.SamplingParams(**params)).result()
    return [list(sequence.tokens) for sequence in reply.sequences]


# ---- training ----


def test_forward_backward_and_optim_step_train(service_client):
    client = make_client(service_client)
    output = client.forward_backward(make_data(), "cross_entropy").result()
    weights = np.concatenate([d.loss_fn_inputs["weights"].to_numpy() for d in make_data()])
    expected = -float(np.sum(np.concatenate(logprobs(output)) * weights))
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0
    losses = train(client, 5)
    assert losses[-1] < losses[0] < output.metrics["loss:sum"]


def test_forward_leaves_no_gradients(service_client):
    client = make_client(service_client)
    forward = client.forward(make_data(), "cross_entropy").result()
    assert client.optim_step(ADAM).result().metrics["grad_norm"] == 0
    backward = client.forward_backward(make_data(), "cross_entropy").result()
    assert forward.metrics == backward.metrics
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_missing_weights_are_ones_and_other_losses_keys_are_passed_over(service_client):
    client = make_client(service_client)
    bare = make_datum([11, 12], [12, 13])
    ones = make_datum([11, 12], [12, 13], weights=[1, 1], advantages=[5, 5], logprobs=[0, 0])
    first, second = (client.forward([item], "cross_entropy").result() for item in (bare, ones))
    assert first.metrics == second.metrics


def test_datums_of_different_k_give_what_they_give_one_by_one(service_client):
    client = make_client(service_client)
    data = [
        make_datum([11, 12, 13], [[12, 1], [13, 2], [14, 3]], weights=np.ones((3, 2))),
        make_datum([11, 12], [12, 13], weights=[1, 2]),
        make_datum([11, 12], [[12], [13]], weights=[[1], [2]]),
        make_datum([5, 6, 7], [[1, 2, 3]] * 3, weights=np.full((3, 3), 0.5)),
        make_datum([11, 12, 13], [[12, 1], [13, 2], [14, 3]], weights=np.ones((3, 2))),
    ]
    together = client.forward(data, "cross_entropy").result()
    alone = [client.forward([datum], "cross_entropy").result() for datum in data]
    assert [item.shape for item in logprobs(together)] == [(3, 2), (2,), (2, 1), (3, 3), (3, 2)]
    for one, other in zip(logprobs(together), alone, strict=True):
        np.testing.assert_allclose(one, logprobs(other)[0], rtol=1e-5)
    losses = [output.metrics["loss:sum"] for output in alone]
    assert together.metrics["loss:sum"] == pytest.approx(sum(losses), rel=1e-5)


def test_sparse_targets_equal_dense_ones(service_client):
    client = make_client(service_client)
    targets = torch.zeros((20, 8), dtype=torch.int64)
    weights = torch.zeros((20, 8))
    targets[17], weights[17] = torch.arange(1, 9), torch.linspace(0.1, 0.8, 8)
    prompt = tinker.ModelInput.from_ints(list(range(20)))
    sparse = tinker.Datum(prompt, {"target_tokens": targets, "weights": weights})
    dense = make_datum(list(range(20)), targets.numpy(), weights=weights.numpy())
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None
    one, two = (client.forward([item], "cross_entropy").result() for item in (sparse, dense))
    np.testing.assert_array_equal(logprobs(one)[0], logprobs(two)[0])
    assert one.metrics == two.metrics


def test_importance_sampling_and_ppo_with_config(service_client):
    client = make_client(service_client)
    plain = client.forward([make_datum([11, 12], [12, 13])], "cross_entropy").result()
    inputs = {"logprobs": logprobs(plain)[0], "advantages": [1.0, 2.0], "mask": [1, 1]}
    datum = make_datum([11, 12], [12, 13], **inputs)
    output = client.forward_backward([datum], "importance_sampling").result()
    assert output.metrics["loss:sum"] == pytest.approx(-3.0, rel=1e-5)  # every ratio is 1
    config = {"clip_low_threshold": 0.1, "clip_high_threshold": 0.5}
    clipped = client.forward([datum], "ppo", config).result()
    assert clipped.metrics["loss:sum"] == pytest.approx(-1.5, rel=1e-5)


def test_every_policy_loss_and_its_options(service_client):
    client = make_client(service_client)
    plain = client.forward([make_datum([11, 12], [12, 13])], "cross_entropy").result()
    q = logprobs(plain)[0]
    datum = make_datum([11, 12], [12, 13], logprobs=q, advantages=[1.0, 2.0])
    for loss, config, wanted in (
        ("ppo", None, -3.0),
        ("cispo", None, -(q[0] + 2 * q[1])),
        ("dro", {"beta": 0.5}, -(q[0] + 2 * q[1])),
        ("gspo", {"clip_high_threshold": 0.5}, -1.5),
    ):
        output = client.forward_backward([datum], loss, config).result()
        assert output.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-5), loss
        np.testing.assert_array_equal(logprobs(output)[0], q)
    with pytest.raises(tinker.RequestFailedError, match="dro needs beta in loss_fn_config"):
        client.forward([datum], "dro").result()
    own = {"clip_high_threshold": [0.5, 9.0], "sequence_ratio_mask": [0, 1]}
    datum = make_datum([11, 12], [12, 13], logprobs=q, advantages=[1.0, 2.0], **own)
    for loss in ("ppo", "gspo"):
        output = client.forward_backward([datum], loss).result()
        assert output.metrics["loss:sum"] == pytest.approx(-2.5, rel=1e-5), loss


def test_custom_loss_equals_the_same_built_in_one(service_client):
    weights = [torch.tensor([0, 1, 1, 0.5, 1]), torch.tensor([1.0, -1, 2])]

    def loss(data, values):
        total = -sum((value * weight).sum() for value, weight in zip(values, weights, strict=True))
        return total, {"seen": float(len(data))}

    custom, built_in = make_client(service_client), make_client(service_client)
    output = custom.forward_backward_custom(make_data(), loss).result()
    expected = built_in.forward_backward(make_data(), "cross_entropy").result()
    assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    assert output.metrics["seen"] == 2
    norms = [c.optim_step(ADAM).result().metrics["grad_norm"] for c in (custom, built_in)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_call_of_many_chunks_comes_back_in_order(service_client):
    client = make_client(service_client)
    data = [make_datum([i % 200 + 3], [i % 100 + 3], weights=[1]) for i in range(2500)]
    output = client.forward_backward(data, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 2500
    expected = client.forward(data[:200], "cross_entropy").result()
    for start in (0, 1000, 2200):
        values = np.concatenate(logprobs(output)[start : start + 200])
        np.testing.assert_allclose(values, np.concatenate(logprobs(expected)), rtol=1e-5)
    total = -np.sum(np.concatenate(logprobs(output)), dtype=np.float64)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def test_info_names_the_tokenizer_that_the_client_loads(service_client, tiny_model_dir):
    client = make_client(service_client)
    info = client.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == ("tiny", 4, True)
    assert info.model_data.tokenizer_id == str(tiny_model_dir.resolve())
    assert client.get_tokenizer().decode(client.get_tokenizer().encode("the dog")) == "the dog"


def test_a_base_model_is_found_by_its_path_too(service_client, tiny_model_dir):
    client = service_client.create_lora_training_client(str(tiny_model_dir), rank=2).result()
    assert client.get_info().lora_rank == 2


# ---- checkpoints ----


def test_a_resumed_run_continues_bit_for_bit(service_client):
    client = make_client(service_client)
    train(client, 2)
    path = client.save_state("step").result().path
    assert path == f"tinker://{client.model_id}/weights/step"
    expected = train(client, 3)
    resumed = service_client.create_training_client_from_state_with_optimizer(path).result()
    assert train(resumed, 3) == expected
    np.testing.assert_array_equal(read(resumed), read(client))


def test_weights_alone_are_loaded_into_new_and_existing_clients(service_client):
    client = make_client(service_client)
    train(client, 2)
    path, expected = client.save_state("step").result().path, read(client)
    train(client, 1)
    fresh = service_client.create_training_client_from_state(path).result()
    np.testing.assert_array_equal(read(fresh), expected)
    with pytest.warns(FutureWarning):
        client.load_state(path).result()
    np.testing.assert_array_equal(read(client), expected)
    assert fresh.optim_step(ADAM).result().metrics["grad_norm"] == 0


def test_checkpoints_survive_a_restart(tiny_model_dir, tmp_path):
    def start() -> Backend:
        return Backend({"tiny": tiny_model_dir}, checkpoints=tmp_path, device="cpu", threads=1)

    with start() as backend, backend.service_client() as service:
        client = make_client(service)
        train(client, 2)
        state = client.save_state("a", user_metadata={"k": "v"}, ttl_seconds=7200).result().path
        weights = client.save_weights_for_sampler("b").result().path
        expected, run = read(client), client.model_id
        sampler = service.create_sampling_client(model_path=weights).result()
        tokens = sample(sampler, 2, max_tokens=8, seed=5)
    with start() as backend, backend.service_client() as service:
        rest = tinker.RestClient(base_url=backend.url, api_key="tml-local")
        found = rest.list_checkpoints(run).result().checkpoints
        assert {item.tinker_path for item in found} == {state, weights}
        kept = next(item for item in found if item.tinker_path == state)
        assert kept.user_metadata == {"k": "v"}
        assert (kept.expires_at - kept.time).total_seconds() == 7200
        resumed = service.create_training_client_from_state_with_optimizer(state).result()
        np.testing.assert_array_equal(read(resumed), expected)
        sampler = service.create_sampling_client(model_path=weights).result()
        assert sample(sampler, 2, max_tokens=8, seed=5) == tokens


def test_an_existing_name_is_refused_unless_overwritten(service_client):
    client = make_client(service_client)
    path = client.save_state("same").result().path
    train(client, 1)
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        client.save_state("same").result(timeout=20)
    assert client.save_state("same", overwrite=True).result().path == path
    loaded = service_client.create_training_client_from_state(path).result()
    np.testing.assert_array_equal(read(loaded), read(client))


# ---- sampling ----


def test_same_seed_same_tokens_whatever_else_decodes(service_client):
    client = service_client.create_sampling_client(base_model="tiny").result()
    alone = sample(client, 3, max_tokens=12, seed=7, stop=[])
    params = tinker.SamplingParams(max_tokens=20, seed=1, stop=[])
    others = [client.sample(PROMPT, 2, params) for _ in range(4)]
    assert sample(client, 3, max_tokens=12, seed=7, stop=[]) == alone
    assert len({tuple(tokens) for tokens in alone}) == 3
    assert len({str([s.tokens for s in other.result().sequences]) for other in others}) == 1
    drawn = {str(sample(client, 1, max_tokens=12, stop=[])) for _ in range(3)}
    assert len(drawn) == 3  # a missing seed is a fresh one


def test_stops_none_ends_at_the_end_of_sequence_and_an_empty_list_never(service_client):
    client = service_client.create_sampling_client(base_model="tiny").result()
    free = sample(client, 16, max_tokens=100, seed=3, stop=[])
    assert all(len(tokens) == 100 for tokens in free)
    cut = [tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens for tokens in free]
    assert any(len(tokens) < 100 for tokens in cut)
    assert sample(client, 16, max_tokens=100, seed=3) == cut
    assert max(max(tokens) for tokens in free) < TOKENIZER  # padded ids are never drawn


def test_stop_ids_and_strings_are_the_last_of_the_tokens(service_client, tiny_model_dir):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    client = service_client.create_sampling_client(base_model="tiny").result()
    free = sample(client, 1, max_tokens=60, seed=11, stop=[])[0]
    stop = free[5]
    by_id = sample(client, 1, max_tokens=60, seed=11, stop=[stop, 299])[0]
    assert by_id == free[: free.index(stop) + 1]
    # Two neighbours whose text is plain, so that the string begins in one token and ends in the
    # next; the first place where the text appears is where sampling must end.
    plain = [tokenizer.decode([token]) for token in free]
    pair = next(i for i in range(4, 59) if (plain[i] + plain[i + 1]).strip().isascii()
                and plain[i].strip() and plain[i + 1].strip())  # fmt: skip
    text = plain[pair][-1:] + plain[pair + 1][:1]
    ends = [
        n for n in range(1, 61) if text in tokenizer.decode(free[:n], skip_special_tokens=False)
    ]
    for given in (text, [text], [text, "never seen"]):
        reply = client.sample(
            PROMPT, 1, tinker.SamplingParams(max_tokens=60, seed=11, stop=given)
        ).result()
        expected = free[: ends[0]]
        if EOS in expected:
            expected = expected[: expected.index(EOS) + 1]
        assert list(reply.sequences[0].tokens) == expected
        assert reply.sequences[0].stop_reason == "stop"


def test_prompt_logprobs_are_the_trainers(service_client):
    training = make_client(service_client)
    train(training, 2)
    client = training.save_weights_and_get_sampling_client().result()
    tokens = [10, 20, 30, 40, 50, 60]
    scored = client.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
    assert scored[0] is None and len(scored) == 6
    forward = training.forward([make_datum(tokens[:-1], tokens[1:])], "cross_entropy").result()
    np.testing.assert_allclose(scored[1:], logprobs(forward)[0], atol=1e-5)


@pytest.mark.parametrize("sparse", (False, True))
def test_target_prompt_logprobs_are_the_trainers_in_the_requests_layout(service_client, sparse):
    training = make_client(service_client)
    train(training, 2)
    client = training.save_weights_and_get_sampling_client().result()
    tokens = [10, 20, 30, 40, 50, 60]
    ids = torch.full((5, 20), -1)  # wide enough for the SDK to send it sparse
    ids[1, :2], ids[3, 0], ids[4, 19] = torch.tensor([30, 7]), 8, 9
    make = tinker.TensorData.from_torch_sparse if sparse else tinker.TensorData.from_torch
    asked = make(ids, pad_value=-1) if sparse else make(ids)
    params = tinker.SamplingParams(max_tokens=1, temperature=0.3)
    prompt = tinker.ModelInput.from_ints(tokens)
    reply = client.sample(prompt, 2, params, True, target_prompt_logprobs=asked).result()
    found = reply.target_prompt_logprobs
    assert (found.sparse_crow_indices is not None) == sparse
    assert (found.shape, found.dtype) == ([5, 20], "float32")
    datum = make_datum(tokens[:-1], ids.clamp(min=0).numpy())
    forward = training.forward([datum], "cross_entropy").result()
    wanted = np.where(ids.numpy() >= 0, logprobs(forward)[0], 0.0)
    np.testing.assert_array_equal(found.to_torch().numpy(), wanted)
    assert reply.prompt_logprobs[2] == wanted[1, 0]  # the prompt's own token was asked for there


def test_alternatives_to_prompt_tokens(service_client):
    client = service_client.create_sampling_client(base_model="tiny").result()
    params = tinker.SamplingParams(max_tokens=1, temperature=0.7, seed=3)
    reply = client.sample(PROMPT, 1, params, prompt_alt_tokens_k=6).result().prompt_alt_tokens
    tokens, found = reply.tokens.to_torch(), reply.logprobs.to_torch()
    assert (tokens.shape, tokens.dtype) == ((4, 6), torch.int64)
    assert (found.shape, found.dtype) == ((4, 6), torch.float32)
    scored = client.sample(PROMPT, 1, params, target_prompt_logprobs=reply.tokens).result()
    assert torch.equal(scored.target_prompt_logprobs.to_torch(), found)
    assert len(set(tokens[0].tolist())) > 1 and int(tokens.max()) < TOKENIZER


def test_sampled_logprobs_are_scaled_by_the_temperature(service_client):
    client = service_client.create_sampling_client(base_model="tiny").result()

    def top(temperature: float) -> dict[int, float]:
        params = tinker.SamplingParams(max_tokens=2, seed=2, temperature=temperature, stop=[])
        reply = client.sample(PROMPT, 1, params, topk_sample_logprobs=VOCAB).result()
        sequence = reply.sequences[0]
        known = dict(sequence.topk_logprobs[0])
        assert len(sequence.topk_logprobs) == 2
        assert known[sequence.tokens[0]] == pytest.approx(sequence.logprobs[0], abs=1e-6)
        return known

    plain, sharp = top(1.0), top(0.5)
    ids = sorted(set(plain) & set(sharp))
    assert len(ids) >= TOKENIZER
    ratios = [(sharp[i] - sharp[ids[0]]) - 2 * (plain[i] - plain[ids[0]]) for i in ids]
    np.testing.assert_allclose(ratios, 0, atol=1e-4)
    assert sum(np.exp(value) for value in sharp.values()) == pytest.approx(1, abs=1e-4)


def test_topk_prompt_logprobs_and_the_last_n(service_client):
    client = service_client.create_sampling_client(base_model="tiny").result()
    params = tinker.SamplingParams(max_tokens=1)

    def ask(**extra):
        return client.sample(
            PROMPT, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=7, **extra
        ).result()

    reply = ask()
    top = reply.topk_prompt_logprobs
    assert len(top) == 5 and top[0] is None and all(len(row) == 7 for row in top[1:])
    scored = zip(top[1:], PROMPT.to_ints()[1:], reply.prompt_logprobs[1:], strict=True)
    for row, token, value in scored:
        values = [entry[1] for entry in row]
        assert values == sorted(values, reverse=True)
        assert value <= values[0] + 1e-6
        known = {int(entry[0]): entry[1] for entry in row}
        assert token not in known or known[token] == pytest.approx(value, abs=1e-6)
    last = ask(prompt_logprobs_last_n=2)
    assert last.prompt_logprobs[:3] == [None] * 3
    assert last.prompt_logprobs[3:] == reply.prompt_logprobs[3:]


def test_a_snapshot_stays_as_it_was_saved(service_client):
    training = make_client(service_client)
    before = training.save_weights_and_get_sampling_client().result()
    base = service_client.create_sampling_client(base_model="tiny").result()
    first = before.compute_logprobs(PROMPT).result()
    np.testing.assert_allclose(first[1:], base.compute_logprobs(PROMPT).result()[1:], atol=1e-6)
    train(training, 3)
    after = training.save_weights_and_get_sampling_client().result()
    assert before.compute_logprobs(PROMPT).result() == first
    assert after.compute_logprobs(PROMPT).result() != first


def test_a_prompt_may_leave_room_for_one_token(service_client):
    client = service_client.create_sampling_client(base_model="tiny").result()
    full = tinker.ModelInput.from_ints([i % 200 + 3 for i in range(CONTEXT - 1)])
    assert len(client.compute_logprobs(full).result()) == CONTEXT - 1
    reply = client.sample(full, 1, tinker.SamplingParams(max_tokens=50, stop=[])).result()
    assert (len(reply.sequences[0].tokens), reply.sequences[0].stop_reason) == (1, "length")
    rest = tinker.ModelInput.from_ints([5] * (CONTEXT - 3))
    reply = client.sample(rest, 1, tinker.SamplingParams(stop=[])).result()
    assert (len(reply.sequences[0].tokens), reply.sequences[0].stop_reason) == (3, "length")


# ---- order, retries, polls: posted by hand ----


def test_replies_are_not_held_back_by_nagles_algorithm(server):
    wire, seconds = Wire(server.url), []
    for _ in range(20):
        start = time.perf_counter()
        assert wire.http.get("/healthz").status_code == 200
        seconds.append(time.perf_counter() - start)
    assert sorted(seconds)[10] < 0.03  # it held every reply of header and body back for 40 ms


def test_requests_that_arrive_out_of_order_are_executed_in_order(server):
    wire = Wire(server.url)
    straight, turned = wire.create(), wire.create()
    wire.forward_backward(straight, 1, make_data())
    wire.forward_backward(straight, 2, make_data())
    expected = wire.result(wire.optim_step(straight, 3))
    last = wire.optim_step(turned, 3)
    wire.forward_backward(turned, 2, make_data())
    wire.forward_backward(turned, 1, make_data())
    assert wire.result(last) == expected
    assert expected["metrics"]["grad_norm"] > 0


def test_a_retry_is_answered_with_the_first_promise_and_executed_once(server):
    wire = Wire(server.url)
    once, retried = wire.create(), wire.create()
    wire.forward_backward(once, 1, make_data())
    expected = wire.result(wire.optim_step(once, 2))
    first, second = (
        wire.forward_backward(retried, 1, make_data()),
        wire.forward_backward(retried, 1, make_data()),
    )
    assert first == second
    assert wire.result(second) == {}
    step = wire.optim_step(retried, 2)
    assert wire.result(step) == expected
    assert wire.optim_step(retried, 2) == step
    assert wire.result(wire.optim_step(retried, 3))["metrics"]["grad_norm"] == 0


def test_creations_and_samples_are_retried_too(server):
    wire = Wire(server.url)
    model = wire.create()
    session = model.partition(":")[0]
    again = wire.post("/create_model", session_id=session, model_seq_id=0, base_model="tiny")
    assert wire.result(again)["model_id"] == model
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = wire.post("/create_sampling_session", **asked)["sampling_session_id"]
    assert wire.post("/create_sampling_session", **asked)["sampling_session_id"] == sampler
    body = {
        "sampling_session_id": sampler,
        "seq_id": 551568033000000000,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 8, "stop": []},
    }
    first, second = wire.post("/asample", **body), wire.post("/asample", **body)
    assert first == second and len(first["sample_sequence_ids"]) == 1
    # Without a seed a second execution would draw other tokens.
    assert wire.poll(first).content == wire.poll(second).content
    assert wire.result(wire.optim_step(model, 1))["metrics"]["grad_norm"] == 0


def test_a_compressed_body_is_read(server):
    wire = Wire(server.url)
    one, two = wire.create(), wire.create()
    wire.forward_backward(one, 1, make_data())
    wire.forward_backward(two, 1, make_data(), compress=True)
    norms = [wire.result(wire.optim_step(model, 2)) for model in (one, two)]
    assert norms[0] == norms[1]


@pytest.fixture(scope="module")
def hasty_server(tiny_model_dir, tmp_path_factory):
    """A server that answers a poll after 0.2 s and gives up a gap after one second."""
    with Backend(
        {"tiny": tiny_model_dir},
        checkpoints=tmp_path_factory.mktemp("hasty"),
        device="cpu",
        threads=1,
        poll_seconds=0.2,
        gap_seconds=1.0,
    ) as backend:
        yield backend


def test_a_poll_ends_in_time_with_try_again(hasty_server):
    wire = Wire(hasty_server.url)
    model = wire.create()
    waiting = wire.optim_step(model, 2)
    reply = wire.poll(waiting)
    assert (reply.status_code, reply.json()["type"]) == (408, "try_again")
    wire.forward_backward(model, 1, make_data())
    assert wire.result(waiting)["metrics"]["grad_norm"] > 0


def test_a_gap_that_never_fills_fails_with_a_sentence(hasty_server):
    wire = Wire(hasty_server.url)
    model = wire.create()
    waiting = wire.optim_step(model, 3)
    while (reply := wire.poll(waiting)).status_code == 408:
        pass
    assert "waited 1 s for request 1, which never came" in reply.json()["error"]
    late = wire.result(wire.forward_backward(model, 1, make_data()))
    assert "comes after its turn" in late["error"]
    wire.forward_backward(model, 4, make_data())
    assert wire.result(wire.optim_step(model, 5))["metrics"]["grad_norm"] > 0


def test_the_sdk_waits_through_several_polls(hasty_server):
    with hasty_server.service_client() as service:
        client = make_client(service)
        data = [make_datum([7] * 120, [8] * 120) for _ in range(400)]
        output = client.forward_backward(data, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 400


def test_a_refused_request_uses_up_its_turn(service_client):
    client = make_client(service_client)
    bad = client.forward_backward([make_datum([1, 2], [1])], "cross_entropy")
    good = client.forward_backward(make_data(), "cross_entropy")
    step = client.optim_step(ADAM)
    with pytest.raises(tinker.RequestFailedError, match="they must agree"):
        bad.result(timeout=20)
    assert good.result(timeout=20).metrics["loss:sum"] > 0
    assert step.result(timeout=20).metrics["grad_norm"] > 0


# ---- who sees what ----


def test_two_clients_train_apart(server):
    with server.service_client() as one, server.service_client() as two:
        first, second = make_client(one), make_client(two)
        np.testing.assert_array_equal(read(first), read(second))
        before = read(second)
        train(first, 2)
        np.testing.assert_array_equal(read(second), before)
        assert np.abs(read(first) - before).max() > 0


def test_another_key_can_not_use_a_model_or_sampler(server):
    with server.service_client() as service:
        client = make_client(service)
        sampler = client.save_weights_and_get_sampling_client().result()
        name = sampler._sampling_session_id
        stranger = Wire(server.url, key="tml-other")
        refused = stranger.result(stranger.optim_step(client.model_id, 1))
        assert "there is no model" in refused["error"]
        assert stranger.http.get(f"/samplers/{name}").status_code == 404
        reply = stranger.http.post("/get_info", json={"model_id": client.model_id})
        assert reply.status_code == 404
        assert stranger.http.get("/sessions").json() == {"sessions": []}
        assert client.optim_step(ADAM).result().metrics["grad_norm"] == 0


def test_a_finished_session_is_over_and_others_are_not(server):
    other = server.service_client()
    kept = make_client(other)
    with server.service_client() as service:
        model = make_client(service).model_id
    wire = Wire(server.url)
    assert "there is no model" in wire.result(wire.optim_step(model, 1))["error"]
    session = model.partition(":")[0]
    assert wire.http.post("/session_heartbeat", json={"session_id": session}).status_code == 410
    assert wire.http.post(f"/sessions/{session}/finish", json={}).status_code == 200
    assert train(kept, 1)[0] > 0
    assert model not in server._worker._runs  # its adapter is freed
    other.close("success").result()


# ---- REST ----


def test_rest_tells_of_runs_checkpoints_and_sessions(server, service_client):
    rest = tinker.RestClient(base_url=server.url, api_key="tml-local")
    capabilities = rest.get_server_capabilities().result().supported_models
    assert [(m.model_name, m.max_context_length) for m in capabilities] == [("tiny", CONTEXT)]
    client = service_client.create_lora_training_client(
        "tiny", rank=4, train_unembed=False, user_metadata={"renderer_name": "qwen3"}
    ).result()
    path = client.save_state("000001").result().path
    weights = client.save_weights_for_sampler("000001").result().path
    run = rest.get_training_run_by_tinker_path(path).result()
    assert (run.base_model, run.lora_rank) == ("tiny", 4)
    assert run.user_metadata == {"renderer_name": "qwen3"}
    assert run.last_checkpoint.tinker_path == path
    assert run.last_sampler_checkpoint.tinker_path == weights
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.train_unembed, info.train_mlp, info.lora_rank) == (False, True, 4)
    runs = rest.list_training_runs(limit=1000).result().training_runs
    assert client.model_id in {item.training_run_id for item in runs}
    listed = rest.list_user_checkpoints(limit=1000).result().checkpoints
    assert {path, weights} <= {item.tinker_path for item in listed}
    session = rest.get_session(client.model_id.partition(":")[0]).result()
    assert session.training_run_ids == [client.model_id]
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [item.tinker_path for item in left] == [weights]
    with pytest.raises(tinker.BadRequestError, match="assigning projects is not built"):
        rest.assign_session_project(client.model_id.partition(":")[0], "p").result()


def test_an_unknown_route_or_body_is_a_4xx_with_a_sentence(server):
    http = httpx.Client(base_url=server.url)
    reply = http.get("/api/v1/nothing")
    assert (reply.status_code, reply.json()["detail"]) == (
        404,
        "tinsmith has no GET /api/v1/nothing",
    )
    assert http.get("/api/v1/healthz").json() == {"status": "ok"}
    for path, body in (
        ("/optim_step", b"{"),
        ("/optim_step", b"[]"),
        ("/optim_step", b'{"model_id": 3}'),
        ("/forward_backward", b"\xff\xff\xff"),
        ("/retrieve_future", b'{"request_id": "none"}'),
    ):
        reply = http.post(f"/api/v1{path}", content=body)
        assert 400 <= reply.status_code < 500 and reply.status_code != 409
        assert len(reply.json()["detail"]) > 20


def drawn_without_a_seed(model: Path, folder: Path, seed: int | None) -> list[list[int]]:
    """What two requests without a seed draw on a fresh server, from an adapter without one."""
    with tinsmith.serve(model, device="cpu", checkpoints=folder, seed=seed) as backend:
        trainer = backend.service_client().create_lora_training_client(str(model), rank=4)
        sampler = trainer.result().save_weights_and_get_sampling_client().result()
        prompt = tinker.ModelInput.from_ints([5, 6, 7])
        params = tinker.SamplingParams(max_tokens=12)
        results = [sampler.sample(prompt, 2, params).result() for _ in range(2)]
    return [list(one.tokens) for result in results for one in result.sequences]


def test_a_server_with_a_seed_repeats_itself(tiny_model_dir: Path, tmp_path: Path) -> None:
    first, again = (drawn_without_a_seed(tiny_model_dir, tmp_path / n, 7) for n in ("a", "b"))
    other = drawn_without_a_seed(tiny_model_dir, tmp_path / "c", 8)
    fresh = drawn_without_a_seed(tiny_model_dir, tmp_path / "d", None)
    assert first == again
    assert first[0] != first[2]  # two requests of one run are not the same draw
    assert other != first and fresh != first


def test_a_full_context_can_be_scored(service_client: tinker.ServiceClient) -> None:
    sampler = service_client.create_sampling_client(base_model="tiny").result()
    tokens = [5 + i % 90 for i in range(CONTEXT)]
    found = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
    short = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens[:40])).result()
    assert len(found) == CONTEXT and found[0] is None
    assert found[1:40] == short[1:]
