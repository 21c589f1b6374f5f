"""Training clients through the unmodified SDK: calls, losses, checkpoints.

Where numbers are compared, both sides are the server's: the maths is tested elsewhere.
"""

import numpy as np
import pytest
import tinker
import torch
from conftest import VOCAB, Wire, logprobs, make_datum
from support.small_run import ADAM, make_client, make_data, read, sample, train
from tinsmith.server.backend import Backend
from tinsmith.server.routes import training
from tinsmith.server.service.config import ServerConfig
from tinsmith.server.wire.messages import pb


def test_forward_backward_and_optim_step_train(service_client):
    client = make_client(service_client)
    output = client.forward_backward(make_data(), "cross_entropy").result()
    weights = np.concatenate([d.loss_fn_inputs["weights"].to_numpy() for d in make_data()])
    expected = -float(np.sum(np.concatenate(logprobs(output)) * weights))
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0
    losses = train(client, 5)
    assert losses[-1] < losses[0] < output.metrics["loss:sum"]


def test_a_step_that_is_not_finite_fails_and_the_run_and_its_checkpoint_go_on(service_client):
    client, other = make_client(service_client), make_client(service_client)
    for one in (client, other):
        train(one, 2)
        one.forward_backward(make_data(), "cross_entropy").result()
    path = client.save_state("good").result().path
    for bad in (ADAM.model_copy(update={"learning_rate": 1e38}), tinker.AdamParams(beta2=1.0)):
        with pytest.raises(tinker.RequestFailedError) as failed:
            client.optim_step(bad).result()
        assert "as they were" in str(failed.value) or "beta2 must be in" in str(failed.value)
        assert failed.value.category == tinker.types.RequestErrorCategory.User
    assert client.save_state("good", overwrite=True).result().path == path
    steps = [one.optim_step(ADAM).result().metrics for one in (client, other)]
    assert steps[0] == steps[1]
    client.load_state_with_optimizer(path).result()
    assert client.optim_step(ADAM).result().metrics == steps[0]


def test_forward_leaves_no_gradients(service_client):
    client = make_client(service_client)
    forward = client.forward(make_data(), "cross_entropy").result()
    assert client.optim_step(ADAM).result().metrics["grad_norm"] == 0
    backward = client.forward_backward(make_data(), "cross_entropy").result()
    assert forward.metrics == backward.metrics
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_missing_weights_are_ones_and_a_rollouts_other_inputs_are_unused(service_client):
    client = make_client(service_client)
    rollout = {"advantages": [5, 5], "logprobs": [0, 0]}  # as the cookbook's SDFT sends it
    first, *others = (
        client.forward([make_datum([11, 12], [12, 13], **more)], "cross_entropy").result().metrics
        for more in ({}, {"weights": [1, 1]}, rollout, rollout | {"weights": [1, 1]})
    )
    assert others == [first] * 3


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


def test_bfloat16_weights_are_those_numbers_in_float32(server):
    wire, weights = Wire(server.url), np.asarray([0.5, -1.25, 3.0], np.float32)
    data = [make_datum([11, 12, 13], [12, 13, 14], weights=weights)]

    def narrow(message) -> None:
        tensor = message.data[0].loss_fn_inputs["weights"]
        tensor.dtype = pb.DTYPE_BFLOAT16
        tensor.dense = (weights.view(np.uint32) >> 16).astype("<u2").tobytes()

    wide, half = (
        wire.poll(wire.forward_backward(wire.create(), 1, data, change=change))
        for change in (None, narrow)
    )
    assert wide.headers["content-type"] == "application/x-protobuf"
    assert half.content == wide.content


def test_importance_sampling_and_ppo_with_config(service_client):
    client = make_client(service_client)
    plain = client.forward([make_datum([11, 12], [12, 13])], "cross_entropy").result()
    q = [value - np.log(2) for value in logprobs(plain)[0]]
    datum = make_datum([11, 12], [12, 13], logprobs=q, advantages=[1.0, 2.0])
    output = client.forward_backward([datum], "importance_sampling").result()
    assert output.metrics["loss:sum"] == pytest.approx(-6.0, rel=1e-5)  # every ratio is 2
    config = {"clip_low_threshold": 0.1, "clip_high_threshold": 1.5}
    clipped = client.forward([datum], "ppo", config).result()
    assert clipped.metrics["loss:sum"] == pytest.approx(-4.5, rel=1e-5)


@pytest.mark.parametrize("key", ("mask", "weights"))
def test_a_mask_that_advantages_have_too_changes_nothing(service_client, key):
    client, row = make_client(service_client), {"logprobs": [-3.0, -2.0], "advantages": [0.0, -2.0]}
    alone, beside = (
        make_datum([11, 12], [12, 13], **row, **more) for more in ({}, {key: [0.0, 1.0]})
    )
    for loss in ("importance_sampling", "ppo", "cispo", "gspo"):
        wanted, found = (client.forward([one], loss).result() for one in (alone, beside))
        assert found.metrics["loss:sum"] == wanted.metrics["loss:sum"]
    whole = make_datum([11, 12], [12, 13], **row, **{key: [1.0, 1.0]})
    wanted, found = (client.forward([one], "dro", {"beta": 0.1}).result() for one in (alone, whole))
    assert found.metrics["loss:sum"] == wanted.metrics["loss:sum"]


def test_every_policy_loss_and_its_options(service_client):
    client = make_client(service_client)
    plain = client.forward([make_datum([11, 12], [12, 13])], "cross_entropy").result()
    lp = logprobs(plain)[0]
    q = [value - np.log(2) for value in lp]  # every ratio is 2
    datum = make_datum([11, 12], [12, 13], logprobs=q, advantages=[1.0, 2.0])
    pull = -(lp[0] + 2 * lp[1])
    for loss, config, wanted in (
        ("ppo", None, -3.6),
        ("cispo", None, 2 * pull),
        ("dro", {"beta": 0.5}, pull + 0.5 * np.log(2) ** 2),
        ("gspo", {"clip_high_threshold": 1.5}, -4.5),
    ):
        output = client.forward_backward([datum], loss, config).result()
        assert output.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-5), loss
        np.testing.assert_array_equal(logprobs(output)[0], lp)
    with pytest.raises(tinker.RequestFailedError, match="dro needs beta in loss_fn_config"):
        client.forward([datum], "dro").result()
    own = {"clip_high_threshold": [1.5, 9.0]}
    for loss, more in (("ppo", {}), ("gspo", {"sequence_ratio_mask": [0, 1]})):
        datum = make_datum([11, 12], [12, 13], logprobs=q, advantages=[1.0, 2.0], **own, **more)
        output = client.forward_backward([datum], loss).result()
        assert output.metrics["loss:sum"] == pytest.approx(-5.5, rel=1e-5), loss


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


def test_a_call_of_many_chunks_comes_back_in_order(server, monkeypatch):
    monkeypatch.setitem(training.CLIENT_CONFIG, "fwdbwd_max_chunk_len", 1024)
    with server.service_client() as service:
        check_a_long_call(make_client(service))


def test_a_long_call_is_one_request_that_is_refused_as_a_whole(service_client):
    client = make_client(service_client)
    check_a_long_call(client)
    client.optim_step(ADAM).result()
    data = [make_datum([5], [6], weights=[1]) for _ in range(3000)]
    data[2999] = make_datum([5], [VOCAB], weights=[1])
    with pytest.raises(tinker.RequestFailedError, match="2999"):
        client.forward_backward(data, "cross_entropy").result()
    assert client.optim_step(ADAM).result().metrics["grad_norm"] == 0  # nothing was added


def check_a_long_call(client):
    """2,500 datums give what they give in pieces."""
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
        return Backend(
            ServerConfig({"tiny": tiny_model_dir}, checkpoints=tmp_path, device="cpu", threads=1)
        )

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
        client.save_state("same").result(timeout=60)
    assert client.save_state("same", overwrite=True).result().path == path
    loaded = service_client.create_training_client_from_state(path).result()
    np.testing.assert_array_equal(read(loaded), read(client))
