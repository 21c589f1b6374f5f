"""OPSD through the unmodified SDK: one step beside transformers, PEFT and OPSD's loss, every LoRA
gradient included, for each kind of teacher; and what is refused, by a sentence."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from conftest import VOCAB, logprobs, make_datum
from peft import PeftModel
from support.distill_cases import Pair, generalized_jsd, logits_of
from support.tiny_models import as_double, cut
from tinsmith import _core
from tinsmith.checkpoints import checkpoint
from tinsmith.checkpoints.store import Store
from tinsmith.models.registry import load_model
from tinsmith.recipes import opsd_data
from tinsmith.server.backend import Backend

LOSS = "generalized_jsd"
ADAM = tinker.AdamParams(learning_rate=2e-2, eps=1e-8)


def pairs() -> list[Pair]:
    """Two completions, the teacher's prompts longer than the student's."""
    rng, made = np.random.default_rng(0), []
    for prompt, completion, hint in ((6, 9, 20), (3, 5, 31)):
        ids = rng.integers(3, VOCAB, prompt + completion).astype(np.int32)
        weights = np.zeros(len(ids) - 1, np.float32)
        weights[prompt - 1 :] = rng.uniform(0.5, 1.5, completion)
        read = np.concatenate([rng.integers(3, VOCAB, prompt + hint), ids[prompt:]])
        made.append(Pair(ids[:-1], ids[1:], weights, read.astype(np.int32)))
    return made


def datums(data: list[Pair]) -> list[tinker.Datum]:
    return [
        tinker.Datum(
            tinker.ModelInput.from_ints(one.tokens.tolist()),
            {
                "target_tokens": one.targets.astype(np.int64),
                "weights": one.weights,
                "teacher_tokens": one.teacher.astype(np.int64),
            },
        )
        for one in data
    ]


def trained(service: tinker.ServiceClient, seed: int, steps: int = 2) -> tinker.TrainingClient:
    """A client whose adapter has moved: with B at zero, A would have no gradient to be seen."""
    client = service.create_lora_training_client("tiny", rank=4, seed=seed).result()
    ids = np.random.default_rng(seed).integers(3, VOCAB, 12).tolist()
    for _ in range(steps):
        client.forward_backward([make_datum(ids[:-1], ids[1:])], "cross_entropy").result()
        client.optim_step(ADAM).result()
    return client


def folder_of(server: Backend, path: str) -> Path:
    return Store(server.checkpoints).folder(path)


def saved(server: Backend, client: tinker.TrainingClient, name: str) -> Path:
    return folder_of(server, client.save_state(name).result().path)


def in_peft(tiny: Path, folder: Path) -> PeftModel:
    return PeftModel.from_pretrained(as_double(tiny), folder, is_trainable=True).double().eval()


def check_step(
    server: Backend,
    tiny: Path,
    client: tinker.TrainingClient,
    config: dict[str, Any],
    teacher: torch.nn.Module,
    name: str,
) -> None:
    """One call, through the SDK and in torch: loss, log-probabilities, rows and gradients."""
    output = client.forward_backward(datums(pairs()), LOSS, config).result()
    folder = saved(server, client, name)
    adapter = checkpoint.load_adapter(folder, load_model(tiny, threads=1), optimizer=True)
    student, total = in_peft(tiny, folder), torch.zeros(())
    numbers = {key: value for key, value in config.items() if not key.startswith("teacher")}
    for one, found in zip(pairs(), output.loss_fn_outputs, strict=True):
        rows = np.flatnonzero(one.weights)
        logits = logits_of(student, one.tokens)
        with torch.no_grad():
            taught = logits_of(teacher, one.teacher)
        shift = len(one.teacher) - 1 - len(one.tokens)
        jsd = generalized_jsd(logits[rows], taught[rows + shift], **numbers)
        total = total + (torch.from_numpy(one.weights[rows].astype(float)) * jsd).sum()
        np.testing.assert_allclose(found["jsd"].to_numpy()[rows], jsd.detach(), rtol=1e-3)
        assert not found["jsd"].to_numpy()[one.weights == 0].any()
        own = torch.log_softmax(logits, -1)[range(len(one.targets)), one.targets.tolist()]
        np.testing.assert_allclose(found["logprobs"].to_numpy(), own.detach(), atol=1e-4)
    total.backward()
    assert output.metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-4)
    parameters, gradients = dict(student.named_parameters()), adapter.read("gradients")
    for key, view in cut(adapter, gradients).items():
        wanted = parameters[key].grad.numpy().T
        assert np.linalg.norm(view - wanted) <= 1e-4 * np.linalg.norm(wanted) > 0, key


@pytest.fixture(scope="module")
def service(server: Backend) -> Iterator[tinker.ServiceClient]:
    with server.service_client() as client:
        yield client


# ---- one step, beside torch ----


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"beta": 0.0, "top_k": 20},
        {"beta": 1.0, "temperature": 1.3},
        {"beta": 0.3, "token_clip": 0.004, "teacher": "base"},
    ],
    ids=str,
)
def test_a_step_with_the_base_model_as_teacher(
    server: Backend, service: tinker.ServiceClient, tiny_model_dir: Path, config: dict[str, Any]
) -> None:
    client = trained(service, seed=1)
    check_step(server, tiny_model_dir, client, config, as_double(tiny_model_dir), "base")
    named = client.forward(datums(pairs()), LOSS, {**config, "teacher": "tiny"}).result()
    plain = client.forward(datums(pairs()), LOSS, config).result()
    assert named.metrics == plain.metrics  # the base model by its name on the server


def test_a_step_with_a_checkpoint_or_a_sampler_as_teacher(
    server: Backend, service: tinker.ServiceClient, tiny_model_dir: Path
) -> None:
    other = trained(service, seed=2)
    state = other.save_state("state").result().path
    named = other.save_weights_for_sampler("named").result().path
    sampler = other.save_weights_and_get_sampling_client().result()
    trained_on = other.forward_backward(datums(pairs()), LOSS).result()
    other.optim_step(ADAM).result()  # what was saved does not move with its run
    assert trained_on.metrics["loss:sum"] > 0
    taught = in_peft(tiny_model_dir, folder_of(server, state))
    client = trained(service, seed=1)
    check_step(server, tiny_model_dir, client, {"teacher": state}, taught, "one")
    config, losses = {"beta": 0.5}, []
    for teacher in (state, named, sampler.get_sampler_handle(), sampler._sampling_session_id):
        output = client.forward(datums(pairs()), LOSS, {**config, "teacher": teacher}).result()
        losses.append(output.metrics["loss:sum"])
    assert len(set(losses)) == 1, losses


def test_a_teachers_checkpoint_is_looked_up_beside_the_event_loop(
    server: Backend, service: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = trained(service, seed=1)
    path, meta, found = client.save_state("taught").result().path, Store.meta, list[str]()

    def noted(store: Store, name: str) -> Any:
        found.append(threading.current_thread().name)
        return meta(store, name)

    monkeypatch.setattr(Store, "meta", noted)
    client.forward(datums(pairs()), LOSS, {"teacher": path}).result()
    assert found and all(name.startswith("tinsmith-disk") for name in found), found


def test_a_step_with_the_student_itself_as_teacher(
    server: Backend, service: tinker.ServiceClient, tiny_model_dir: Path
) -> None:
    client = trained(service, seed=1)
    taught = in_peft(tiny_model_dir, saved(server, client, "itself"))
    check_step(server, tiny_model_dir, client, {"teacher": "current"}, taught, "current")


def test_an_average_of_the_student_teaches_it(
    server: Backend, service: tinker.ServiceClient, tiny_model_dir: Path
) -> None:
    """It begins where it is first asked for, follows each step, and is saved with the run."""
    client, decay = trained(service, seed=1), 0.75
    config = {"teacher": "ema", "teacher_ema": decay}
    model = load_model(tiny_model_dir, threads=1)

    def weights(name: str) -> np.ndarray:
        folder = saved(server, client, name)
        return checkpoint.load_adapter(folder, model, optimizer=False).read("weights")

    average = weights("w0").astype(np.float64)
    for step in range(1, 4):
        client.forward_backward(datums(pairs()), LOSS, config).result()
        client.optim_step(ADAM).result()
        average = decay * average + (1 - decay) * weights(f"w{step}")
    folder = folder_of(server, client.save_state("averaged").result().path)
    kept = checkpoint.load_average(folder, checkpoint.load_adapter(folder, model, optimizer=True))
    assert kept is not None and kept.decay == decay
    np.testing.assert_allclose(kept.adapter.read("weights"), average, rtol=1e-5, atol=1e-7)

    taught = in_peft(tiny_model_dir, folder)
    parameters = dict(taught.named_parameters())
    with torch.no_grad():
        for key, view in cut(kept.adapter, average).items():
            parameters[key].copy_(torch.from_numpy(view.T))
    path = client.save_state("again").result().path
    check_step(server, tiny_model_dir, client, config, taught, "ema")
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    fresh = service.create_training_client_from_state(path).result()
    found = [
        one.forward(datums(pairs()), LOSS, config).result().metrics["loss:sum"]
        for one in (client, resumed, fresh)
    ]
    assert found[0] == found[1] != found[2]


def test_a_resumed_run_takes_the_same_steps_bit_for_bit(service: tinker.ServiceClient) -> None:
    config = {"teacher": "ema", "teacher_ema": 0.5, "beta": 0.0}
    client = trained(service, seed=1)

    def steps(one: tinker.TrainingClient) -> list[float]:
        losses = []
        for _ in range(3):
            output = one.forward_backward(datums(pairs()), LOSS, config)
            one.optim_step(ADAM)
            losses.append(output.result().metrics["loss:sum"])
        return losses

    steps(client)
    path = client.save_state("middle").result().path
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert steps(client) == steps(again)


def test_weights_that_are_loaded_alone_begin_a_new_average(service: tinker.ServiceClient) -> None:
    config = {"teacher": "ema", "teacher_ema": 0.9}
    client = trained(service, seed=1)

    def loss(one: tinker.TrainingClient) -> float:
        return one.forward(datums(pairs()), LOSS, config).result().metrics["loss:sum"]

    client.forward_backward(datums(pairs()), LOSS, config).result()
    client.optim_step(ADAM).result()
    path, behind = client.save_state("alone").result().path, loss(client)
    with pytest.warns(FutureWarning):
        client.load_state(path).result()
    fresh = service.create_training_client_from_state(path).result()
    assert loss(client) == loss(fresh) != behind


# ---- calls ----


def test_metrics_and_calls_that_the_sdk_cuts_add_up(
    service: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, data = trained(service, seed=1), datums(pairs()) * 3
    whole = client.forward(data, LOSS).result()
    small = client.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 2})
    monkeypatch.setattr(client.holder, "_client_config", small)
    parts = client.forward(data, LOSS).result()
    assert whole.metrics.keys() == parts.metrics.keys()
    for key, value in whole.metrics.items():
        assert parts.metrics[key] == pytest.approx(value, rel=1e-9), key
    rows = [item["jsd"].to_numpy() for item in whole.loss_fn_outputs]
    means = [row[row != 0].mean() for row in rows]
    assert whole.metrics["jsd:mean"] == pytest.approx(np.mean(means), rel=1e-5)
    assert whole.metrics["jsd:max"] == max(row.max() for row in rows)
    assert whole.metrics["jsd_tokens:sum"] == 3 * (9 + 5)
    plain = client.forward(
        [make_datum(one.tokens.tolist(), one.targets) for one in pairs()], "cross_entropy"
    ).result()
    for one, other in zip(logprobs(plain), logprobs(whole), strict=False):
        np.testing.assert_array_equal(one, other)


def test_opsds_mean_is_weights_of_one_over_the_tokens(service: tinker.ServiceClient) -> None:
    client, one = trained(service, seed=1), pairs()[0]
    prompt, completion = one.tokens[:6].tolist(), [*one.tokens[6:].tolist(), int(one.targets[-1])]
    taught = one.teacher[: len(one.teacher) - len(completion)].tolist()
    made = opsd_data.make_datum(prompt, taught, completion, 1 / len(completion))
    output = client.forward([made], LOSS).result()
    rows = output.loss_fn_outputs[0]["jsd"].to_numpy()
    assert np.count_nonzero(rows) == len(completion)
    assert output.metrics["loss:sum"] == pytest.approx(rows.sum() / len(completion), rel=1e-6)


def test_training_moves_the_student_to_its_teacher(service: tinker.ServiceClient) -> None:
    client, losses = trained(service, seed=1), []
    for _ in range(12):
        output = client.forward_backward(datums(pairs()), LOSS, {"teacher": "base"})
        client.optim_step(tinker.AdamParams(learning_rate=1e-2, eps=1e-8)).result()
        losses.append(output.result().metrics["loss:sum"])
    assert losses[-1] < 0.6 * losses[0], losses


# ---- refused ----


def changed(**inputs: Any) -> list[tinker.Datum]:
    """The second datum with other inputs; None leaves one out."""
    first, second = datums(pairs())
    arrays = {**second.loss_fn_inputs, **inputs}
    kept = {key: value for key, value in arrays.items() if value is not None}
    return [first, tinker.Datum(second.model_input, kept)]


REFUSED: dict[str, tuple[Callable[[], list[tinker.Datum]], dict[str, Any], str]] = {
    "no teacher's tokens": (
        lambda: changed(teacher_tokens=None), {},
        "datum 1: generalized_jsd needs teacher_tokens in loss_fn_inputs: the teacher's prompt and",
    ),
    "tokens that are numbers": (
        lambda: changed(teacher_tokens=np.ones(9, np.float32)), {},
        r"datum 1: teacher_tokens must be integers of shape \(M,\), float32 of shape \(9,\) came",
    ),
    "tokens in two dimensions": (
        lambda: changed(teacher_tokens=np.ones((9, 2), np.int64)), {}, r"shape \(9, 2\) came",
    ),
    "a token beyond the vocabulary": (
        lambda: changed(teacher_tokens=np.full(9, 1 << 40)), {},
        "datum 1: teacher_tokens has id 1099511627776; ids must be from 0",
    ),
    "another completion": (
        lambda: changed(teacher_tokens=pairs()[0].teacher.astype(np.int64)), {},
        "datum 1: teacher_tokens must end with the completion, target_tokens from position 2 on",
    ),
    "the last token left out, as from model_input": (
        lambda: changed(teacher_tokens=pairs()[1].teacher[:-1].astype(np.int64)), {},
        "datum 1: teacher_tokens must end with the completion",
    ),
    "no prompt": (
        lambda: changed(teacher_tokens=pairs()[1].teacher[-5:].astype(np.int64)), {},
        "datum 1: teacher_tokens has 5 tokens; it must be the teacher's prompt and then the 5",
    ),
    "weights that mark no completion": (
        lambda: changed(weights=None), {}, "datum 1: generalized_jsd needs weights",
    ),
    "weights of another length": (
        lambda: changed(weights=np.ones(3, np.float32)), {}, r"weights has shape \(3,\)",
    ),
    "targets (N, K)": (
        lambda: changed(target_tokens=np.ones((7, 2), np.int64)), {}, "takes one target for each",
    ),
    "an unknown teacher": (
        lambda: datums(pairs()), {"teacher": "socrates"},
        "the teacher 'socrates' is neither 'base', 'current' nor 'ema', no tinker:// path",
    ),
    "a checkpoint that is not there": (
        lambda: datums(pairs()), {"teacher": "tinker://run/weights/none"},
        "there is no checkpoint tinker://run/weights/none",
    ),
    "a path that is none": (
        lambda: datums(pairs()), {"teacher": "tinker://x"}, "is not a checkpoint's path",
    ),
    "a teacher that is a number": (
        lambda: datums(pairs()), {"teacher": 1.0}, "loss_fn_config teacher must be text, 1.0 came",
    ),
    "a beta that is text": (
        lambda: datums(pairs()), {"beta": "half"}, "beta must be a number, 'half' came",
    ),
    "beta": (lambda: datums(pairs()), {"beta": 1.1}, r"beta must be in \[0, 1\], not 1.1"),
    "temperature": (lambda: datums(pairs()), {"temperature": -1.0}, "temperature must be more"),
    "more than the vocabulary": (
        lambda: datums(pairs()), {"top_k": VOCAB + 1}, f"top_k must be .* to {VOCAB}, not",
    ),
    "clip": (lambda: datums(pairs()), {"token_clip": -1.0}, "token_clip must be more than 0"),
    "an unknown key": (lambda: datums(pairs()), {"alpha": 1.0}, "unknown loss_fn_config key"),
    "a decay of nothing": (
        lambda: datums(pairs()), {"teacher_ema": 0.9}, "teacher_ema is for the teacher 'ema'",
    ),
    "a decay of one": (
        lambda: datums(pairs()), {"teacher": "ema", "teacher_ema": 1.0},
        r"teacher_ema must be in \[0, 1\), 1.0 came",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_and_training_goes_on(
    service: tinker.ServiceClient, case: str
) -> None:
    make, config, sentence = REFUSED[case]
    client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
    with pytest.raises(tinker.RequestFailedError, match=sentence):
        client.forward_backward(make(), LOSS, config).result(timeout=60)
    assert client.optim_step(ADAM).result().metrics["grad_norm"] == 0
    assert client.forward_backward(datums(pairs()), LOSS).result().metrics["loss:sum"] > 0


def test_another_clients_sampler_is_no_teacher(server: Backend) -> None:
    with server.service_client(api_key="tml-one") as mine:
        sampler = mine.create_sampling_client(base_model="tiny").result()
        with server.service_client(api_key="tml-two") as theirs:
            client = theirs.create_lora_training_client("tiny", rank=4).result()
            config = {"teacher": sampler.get_sampler_handle()}
            with pytest.raises(tinker.RequestFailedError, match="there is no sampling session"):
                client.forward(datums(pairs()), LOSS, config).result(timeout=60)


def test_the_table_of_losses_lists_what_it_takes() -> None:
    from tinsmith.engine.teachers import losses

    (row,) = [row for row in losses() if row["name"] == LOSS]
    assert row["taught"] and row["tokens"] == "teacher_tokens"
    assert row["config"] == {
        "beta": 0.5, "temperature": 1.0, "top_k": 0.0, "token_clip": np.inf,
        "teacher": "base", "teacher_ema": 0.999,
    }  # fmt: skip
    assert [item["name"] for item in row["inputs"]] == ["weights", "teacher_logprobs"]
    assert not any(row["taught"] for row in _core.losses() if row["name"] != LOSS)
