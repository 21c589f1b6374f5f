"""Bad input through the unmodified SDK: a clear sentence, a usable client, others untouched.

Each row of the tables is one mistake and what its sentence must say. After it, the same client must
get the numbers that it got before, and so must a client of another session, whose adapter has been
trained to something of its own.
"""

import errno
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tinker
from conftest import CONTEXT, VOCAB, Wire, logprobs, make_datum
from tinker.types.optimizer import OptimizerConfigBase
from tinsmith.checkpoints import checkpoint
from tinsmith.checkpoints.store import Store
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

GOOD = [([11, 12, 13], [12, 13, 14], [1.0, 2.0, 0.5])]
SECONDS = 60  # longer is a hang


def good_data() -> list[tinker.Datum]:
    return [make_datum(tokens, targets, weights=weights) for tokens, targets, weights in GOOD]


def numbers(client: tinker.TrainingClient) -> list[float]:
    """The log-probabilities and loss of a good request, and the gradient that it leaves."""
    output = client.forward_backward(good_data(), "cross_entropy").result(timeout=SECONDS)
    step = client.optim_step(tinker.AdamParams(learning_rate=0.0)).result(timeout=SECONDS)
    values = logprobs(output)[0].tolist()
    return [*values, output.metrics["loss:sum"], step.metrics["grad_norm"]]


@dataclass(frozen=True)
class Clients:
    """The client that makes mistakes, and one that must not notice."""

    service: tinker.ServiceClient
    training: tinker.TrainingClient
    other: tinker.TrainingClient
    expected: tuple[list[float], list[float]]

    def check(self) -> None:
        assert (numbers(self.training), numbers(self.other)) == self.expected


@pytest.fixture(scope="module")
def clients(server) -> Iterator[Clients]:
    with server.service_client() as service, server.service_client() as second:
        made = [
            item.create_lora_training_client("tiny", rank=4, seed=seed).result()
            for item, seed in ((service, 1), (second, 2))
        ]
        for client in made:
            client.forward_backward(good_data(), "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        expected = (numbers(made[0]), numbers(made[1]))
        assert expected[0] != expected[1]
        yield Clients(service, made[0], made[1], expected)


def tokens(count: int) -> list[int]:
    return [index % 200 + 3 for index in range(count)]


def rl(targets: list, **inputs) -> tinker.Datum:
    return make_datum([1, 2], targets, **inputs)


# (name, datums, loss, config, sentence)
TRAINING = [
    (
        "missing target_tokens",
        [make_datum([1, 2], None, weights=[1, 1])],
        "cross_entropy",
        None,
        r"datum 0: loss_fn_inputs has no target_tokens; the keys that came: \['weights'\]",
    ),
    (
        "targets shorter than the input",
        [*good_data(), make_datum(tokens(24), tokens(10))],
        "cross_entropy",
        None,
        r"datum 1: target_tokens has shape \(10,\), model_input has 24 tokens: they must agree",
    ),
    (
        "targets longer than the input",
        [make_datum(tokens(24), tokens(40))],
        "cross_entropy",
        None,
        r"target_tokens has shape \(40,\), model_input has 24 tokens",
    ),
    (
        "as many numbers in another shape",
        [make_datum(tokens(32), np.ones((8, 4)))],
        "cross_entropy",
        None,
        r"target_tokens has shape \(8, 4\), model_input has 32 tokens",
    ),
    (
        "targets of three dimensions",
        [make_datum([1, 2], np.ones((2, 1, 1)))],
        "cross_entropy",
        None,
        r"target_tokens has shape \(2, 1, 1\)",
    ),
    (
        "no target for a position",
        [make_datum([1, 2], np.ones((2, 0)))],
        "cross_entropy",
        None,
        r"target_tokens has shape \(2, 0\): at least 1 is needed",
    ),
    (
        "weights shorter than the targets",
        [make_datum(tokens(24), tokens(24), weights=[1] * 10)],
        "cross_entropy",
        None,
        r"datum 0: weights has shape \(10,\), target_tokens has \(24,\): they must agree",
    ),
    (
        "one weight for each position but two targets",
        [make_datum([1, 2], [[1, 2], [3, 4]], weights=[1, 1])],
        "cross_entropy",
        None,
        r"weights has shape \(2,\), target_tokens has \(2, 2\)",
    ),
    (
        "2-D targets for a 1-D loss",
        [rl([[1, 2], [3, 4]], logprobs=np.zeros((2, 2)), advantages=np.ones((2, 2)))],
        "importance_sampling",
        None,
        r"target_tokens has shape \(2, 2\), but importance_sampling takes one target",
    ),
    (
        "no sampler log-probabilities",
        [rl([1, 2], advantages=[1, 1])],
        "importance_sampling",
        None,
        r"datum 0: importance_sampling needs logprobs in loss_fn_inputs",
    ),
    (
        "fewer advantages than targets",
        [rl([1, 2], logprobs=[0, 0], advantages=[1])],
        "ppo",
        None,
        r"advantages has shape \(1,\), target_tokens has \(2,\)",
    ),
    (
        "target id beyond the vocabulary",
        [make_datum([1, 2], [1, VOCAB])],
        "cross_entropy",
        None,
        rf"datum 0: target_tokens has id {VOCAB}; ids must be from 0 to {VOCAB - 1}",
    ),
    (
        "target id -100",
        [make_datum([1, 2], [-100, 1])],
        "cross_entropy",
        None,
        r"target_tokens has id -100; .*; to mask a position, give it any id and the weight 0",
    ),
    (
        "target id that int32 can't hold",
        [make_datum([1, 2], [1 << 32, 1])],
        "cross_entropy",
        None,
        r"target_tokens has id 4294967296",
    ),
    (
        "input id beyond the vocabulary",
        [make_datum([1, VOCAB], [1, 2])],
        "cross_entropy",
        None,
        rf"datum 0: model_input has id {VOCAB}",
    ),
    (
        "NaN weight",
        [make_datum([1, 2], [1, 2], weights=[1, math.nan])],
        "cross_entropy",
        None,
        r"datum 0: weights\[1\] is nan: every number must be finite",
    ),
    (
        "infinite weight",
        [make_datum([1, 2], [[1, 2], [3, 4]], weights=[[1, 1], [math.inf, 1]])],
        "cross_entropy",
        None,
        r"datum 0: weights\[1, 0\] is inf",
    ),
    (
        "empty datum",
        [*good_data(), make_datum([], [])],
        "cross_entropy",
        None,
        r"datum 1 is empty",
    ),
    (
        "targets that are no ids",
        [
            tinker.Datum(
                tinker.ModelInput.from_ints([1, 2]),
                {"target_tokens": np.asarray([1.0, 2.0], np.float32)},
            )
        ],
        "cross_entropy",
        None,
        r"target_tokens must be integers, float32 came",
    ),
    (
        "mistyped key",
        [make_datum([1, 2], [1, 2], weigths=[1, 1])],
        "cross_entropy",
        None,
        r"datum 0: cross_entropy does not read 'weigths' of loss_fn_inputs; it reads "
        r"\['target_tokens', 'weights'\]; did you mean weights\?",
    ),
    (
        "another loss's key",
        [make_datum([1, 2], [1, 2], advantages=[0, 1])],
        "cross_entropy",
        None,
        "cross_entropy does not read 'advantages'",
    ),
    (
        "a key that no loss has",
        [rl([1, 2], logprobs=[0, 0], advantages=[1, 1], ref_logprobs=[0, 0])],
        "importance_sampling",
        None,
        r"does not read 'ref_logprobs' .* did you mean logprobs\?",
    ),
    (
        "a mask beside no weights",
        [make_datum([1, 2], [1, 2], mask=[0, 1])],
        "cross_entropy",
        None,
        "datum 0: cross_entropy does not read mask, which is 0 at target 0, where weights is 1: "
        "multiply weights by it, and leave mask out",
    ),
    (
        "a mask that advantages do not have",
        [rl([1, 2], logprobs=[0, 0], advantages=[0, -2], mask=[1, 0])],
        "ppo",
        None,
        "ppo does not read mask, which is 0 at target 1, where advantages is -2: multiply adv",
    ),
    (
        "weights beside advantages",
        [rl([1, 2], logprobs=[0, 0], advantages=[1, 1], weights=[1, 0.5])],
        "importance_sampling",
        None,
        "importance_sampling does not read weights, which is 0.5 at target 1",
    ),
    (
        "a mask for a loss whose advantages mask nothing",
        [rl([1, 2], logprobs=[0, 0], advantages=[0, 1], mask=[0, 1])],
        "dro",
        {"beta": 0.1},
        "dro does not read mask, which is 0 at target 0: leave mask out",
    ),
    (
        "a mask of another shape",
        [rl([1, 2], logprobs=[0, 0], advantages=[1, 1], mask=[1])],
        "cispo",
        None,
        r"mask has shape \(1,\), target_tokens has \(2,\)",
    ),
    (
        "clip thresholds that are distances",
        [rl([1, 2], logprobs=[0, 0], advantages=[0, 1])],
        "ppo",
        {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2},
        "datum 0: ppo has clip_low_threshold 0.2 and clip_high_threshold 0.2 at position 1; they "
        "are ratios, as 0.8 and 1.2: low from 0 to 1, high at least 1",
    ),
    (
        "clip thresholds that are turned",
        [rl([1, 2], logprobs=[0, 0], advantages=[1, 1], clip_low_threshold=[0.9, 1.1])],
        "cispo",
        None,
        "cispo has clip_low_threshold 1.1 and clip_high_threshold 4 at position 1; they are rat",
    ),
    (
        "unknown loss",
        good_data(),
        "hinge",
        None,
        r"unknown loss 'hinge'; there are \['cispo', 'cross_entropy'",
    ),
    (
        "the name of a method",
        good_data(),
        "grpo",
        None,
        r"unknown loss 'grpo'; .*; GRPO's loss is importance_sampling or ppo, with each",
    ),
    (
        "the name of a method in capitals",
        good_data(),
        "SFT",
        None,
        r"unknown loss 'SFT'; .*; it is cross_entropy, with weights 0 on the prompt",
    ),
    (
        "a misspelled loss",
        good_data(),
        "cross-entropy",
        None,
        r"unknown loss 'cross-entropy'; .*; did you mean cross_entropy\?",
    ),
    (
        "datum without provenance",
        [rl([1, 2], logprobs=[0, 0], advantages=[1, 1])],
        "stable_reinforce",
        None,
        r"datum 0 has no provenance: .* record_stability_info=True",
    ),
    (
        "unknown config key",
        [rl([1, 2], logprobs=[0, 0], advantages=[1, 1])],
        "ppo",
        {"clip_hi": 1.2},
        r"unknown loss_fn_config key 'clip_hi': ppo takes \['clip_high_threshold'",
    ),
    (
        "config for a loss without any",
        good_data(),
        "cross_entropy",
        {"beta": 1.0},
        r"unknown loss_fn_config key 'beta': cross_entropy takes none",
    ),
    (
        "config that is no number",
        [rl([1, 2], logprobs=[0, 0], advantages=[1, 1])],
        "ppo",
        {"clip_high_threshold": "much"},
        r"clip_high_threshold must be a number, 'much' came",
    ),
    (
        "config that is not finite",
        [rl([1, 2], logprobs=[0, 0], advantages=[1, 1])],
        "ppo",
        {"clip_high_threshold": math.inf},
        r"clip_high_threshold must be a finite number of f32, inf came",
    ),
    (
        "config beyond float32",
        [rl([1, 2], logprobs=[0, 0], advantages=[1, 1])],
        "cispo",
        {"clip_low_threshold": 1e300},
        r"clip_low_threshold must be a finite number of f32, 1e\+300 came",
    ),
    (
        "longer than the context",
        [make_datum(tokens(CONTEXT + 1), tokens(CONTEXT + 1))],
        "cross_entropy",
        None,
        rf"datum 0: model_input has {CONTEXT + 1} tokens, the model's context is {CONTEXT}: cut it",
    ),
    (
        "an image",
        [
            tinker.Datum(
                tinker.ModelInput(
                    chunks=[tinker.types.ImageChunk(data=b"x", format="png", expected_tokens=2)]
                ),
                {"target_tokens": [1, 2]},
            )
        ],
        "cross_entropy",
        None,
        r"datum 0: model_input\[0\]: this model takes no images: .* has no vision tower",
    ),
]


@pytest.mark.parametrize(
    ("data", "loss", "config", "sentence"),
    [row[1:] for row in TRAINING],
    ids=[row[0] for row in TRAINING],
)
def test_bad_training_data(clients, data, loss, config, sentence):
    for call in (clients.training.forward_backward, clients.training.forward):
        with pytest.raises(tinker.RequestFailedError, match=sentence) as failure:
            call(data, loss, config).result(timeout=SECONDS)
        assert failure.value.category.value == "user"
    clients.check()


def test_no_datums(clients, server):
    """The SDK itself refuses an empty list, so this one is posted by hand."""
    wire = Wire(server.url)
    model = wire.create()
    refused = wire.result(wire.forward_backward(model, 1, []))
    assert "needs at least 1 datum" in refused["error"]
    assert wire.result(wire.forward_backward(model, 2, good_data())) == {}
    clients.check()


# Compressed rows (crow, columns, number of values) that make up no array of shape (2, 3).
SPARSE = {
    "a value less than columns": ([0, 1, 2], [0, 1], 1),
    "a value more than columns": ([0, 1, 2], [0, 1], 3),
    "a column beyond the shape": ([0, 1, 2], [0, 3], 2),
    "a column below zero": ([0, 1, 2], [0, -1], 2),
    "a row too few": ([0, 2], [0, 1], 2),
    "rows that begin late": ([1, 1, 2], [0, 1], 2),
    "rows that end early": ([0, 1, 1], [0, 1], 2),
    "rows that go back": ([0, 3, 2], [0, 1], 2),
}


@pytest.mark.parametrize("case", SPARSE)
def test_sparse_rows_that_the_sdk_would_not_send(server, case):
    wire, (crow, columns, values) = Wire(server.url), SPARSE[case]
    data = [make_datum([11, 12], np.ones((2, 3)), weights=np.ones((2, 3)))]

    def change(message) -> None:
        csr = message.data[0].loss_fn_inputs["weights"].sparse_csr
        csr.crow_indices = np.asarray(crow, "<i8").tobytes()
        csr.col_indices = np.asarray(columns, "<i8").tobytes()
        csr.values = np.ones(values, "<f4").tobytes()

    reply = wire.result(wire.forward_backward(wire.create(), 1, data, change=change))
    assert "datum 0: weights: its sparse rows do not make up an array of shape" in reply["error"]


ADAM = [
    ({"learning_rate": -1.0}, "learning_rate must be 0 or more and finite, not -1"),
    ({"beta1": 1.0}, r"beta1 must be in \[0, 1\), not 1"),
    ({"grad_clip_norm": -1.0}, "grad_clip_norm must be 0 or more and finite"),
]


@pytest.mark.parametrize(("params", "sentence"), ADAM)
def test_bad_optimizer_parameters(clients, params, sentence):
    with pytest.raises(tinker.RequestFailedError, match=sentence):
        clients.training.optim_step(tinker.AdamParams(**params)).result(timeout=SECONDS)
    clients.check()


def test_an_adam_parameter_that_there_is_not_is_refused(server):
    wire = Wire(server.url)
    body = {"model_id": wire.create(), "seq_id": 1, "adam_params": {"lr": 1e-3}}
    refused = wire.result(wire.post("/optim_step", **body))
    assert "unknown field 'lr' in adam_params; there are ['beta1'" in refused["error"]


def test_other_optimizers_are_refused_by_name(clients):
    config = OptimizerConfigBase(type="sgd")
    with pytest.raises(tinker.RequestFailedError, match="'sgd' is not built; tinsmith has adamw"):
        clients.service.create_lora_training_client("tiny", optimizer=config).result(SECONDS)
    clients.check()


def ids(rows):
    return tinker.TensorData.from_numpy(np.array(rows, np.int64))


SAMPLING = [
    ({"num_samples": 0}, "num_samples must be from 1 to 4096, 0 came"),
    ({"temperature": -1.0}, "temperature must be at least 0.0, -1.0 came"),
    ({"top_p": 0.0}, r"top_p must be in \(0, 1\], 0.0 came"),
    ({"top_p": 2.0}, r"top_p must be in \(0, 1\], 2.0 came"),
    ({"top_k": 0}, "top_k must be at least 1, or -1 for no limit; 0 came"),
    ({"top_k": -2}, "top_k must be at least 1"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, 0 came"),
    ({"stop": [VOCAB]}, f"stop has id {VOCAB}"),
    ({"stop": [1 << 63]}, f"stop has id {1 << 63}"),
    ({"stop": [1] * 1025}, "stop has 1025 strings or ids; at most 1024 are looked for"),
    ({"stop": ""}, "stop must be non-empty strings or token ids"),
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": [1, VOCAB]}, f"the prompt has id {VOCAB}; ids must be from 0 to {VOCAB - 1}"),
    ({"prompt": [-1]}, "the prompt has id -1"),
    (
        {"prompt": tinker.types.ImageChunk(data=b"x", format="png", expected_tokens=2)},
        r"prompt\[0\]: this model takes no images: .* has no vision tower",
    ),
    (
        {"prompt": [5] * (CONTEXT + 1)},
        f"the prompt has {CONTEXT + 1} tokens; the model's context is {CONTEXT}: cut its beginning",
    ),
    ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs must be at least 0"),
    ({"topk_prompt_logprobs": VOCAB + 1}, f"the vocabulary has {VOCAB} ids"),
    (
        {"prompt_logprobs_last_n": 9, "include_prompt_logprobs": True},
        "prompt_logprobs_last_n must be from 1 to the prompt's length - 1 = 2, 9 came",
    ),
    ({"prompt_alt_tokens_k": 1025}, "prompt_alt_tokens_k must be at most 1024"),
    ({"target_prompt_logprobs": ids([[1], [2], [3]])}, r"has shape \(3, 1\); .* \[2, K\]"),
    ({"target_prompt_logprobs": ids([[-1], [-1]])}, "names no id: every cell is -1"),
    ({"target_prompt_logprobs": ids([[-2], [1]])}, "target_prompt_logprobs has id -2"),
    ({"target_prompt_logprobs": ids([[VOCAB], [1]])}, f"has id {VOCAB}; ids must be from 0"),
]


@pytest.mark.parametrize(("change", "sentence"), SAMPLING)
def test_bad_sampling_requests(clients, change, sentence):
    sampler = clients.service.create_sampling_client(base_model="tiny").result()
    change = dict(change)
    names = ("temperature", "top_p", "top_k", "max_tokens", "stop")
    params = {name: change.pop(name) for name in names if name in change}
    given = change.pop("prompt", [5, 6, 7])
    chunk = tinker.EncodedTextChunk(tokens=given) if isinstance(given, list) else given
    prompt = tinker.ModelInput(chunks=[chunk])
    asked = {"num_samples": 1, **change}
    with pytest.raises(tinker.RequestFailedError, match=sentence):
        sampler.sample(
            prompt, sampling_params=tinker.SamplingParams(**{"max_tokens": 2, **params}), **asked
        ).result(timeout=SECONDS)
    reply = sampler.sample(
        tinker.ModelInput.from_ints([5, 6, 7]), 1, tinker.SamplingParams(max_tokens=2, stop=[])
    ).result(timeout=SECONDS)
    assert len(reply.sequences[0].tokens) == 2
    clients.check()


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ({"shape": [2, 2]}, "does not fit 2 elements"),
        ({"data": [1, 1.5]}, "data must be integers"),
        ({"dtype": "float32"}, "must be int64"),
        ({"sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 9]}, "sparse rows do not"),
        ({"sparse_crow_indices": [0, 1, 2]}, "has no sparse_col_indices"),
    ],
)
def test_target_tensors_that_the_sdk_would_not_send(server, layout, sentence):
    http = Wire(server.url)
    session = http.post("/create_session", tags=[], user_metadata={}, sdk_version="0")
    sampler = http.post(
        "/create_sampling_session",
        session_id=session["session_id"],
        sampling_session_seq_id=0,
        base_model="tiny",
    )
    promise = http.post(
        "/asample",
        sampling_session_id=sampler["sampling_session_id"],
        seq_id=0,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        sampling_params={"max_tokens": 1},
        target_prompt_logprobs={"data": [1, 2], "dtype": "int64", "shape": [2, 1]} | layout,
    )
    reply = http.result(promise)
    assert sentence in reply["error"] and reply["category"] == "user"


def test_unknown_models_and_ranks(clients):
    make = clients.service.create_lora_training_client
    with pytest.raises(
        tinker.RequestFailedError, match=r"unknown base model 'Qwen/Nope'; this server has \['tiny'"
    ):
        make("Qwen/Nope").result(timeout=SECONDS)
    assert make("TINY", rank=1).result(timeout=SECONDS).get_info().model_name == "tiny"
    for rank in (0, -3):
        with pytest.raises(tinker.RequestFailedError, match="rank must be at least 1"):
            make("tiny", rank=rank).result(timeout=SECONDS)
    with pytest.raises(tinker.BadRequestError, match="unknown base model 'Qwen/Nope'"):
        clients.service.create_sampling_client(base_model="Qwen/Nope").result(timeout=SECONDS)
    clients.check()


PATHS = [
    ("tinker://{run}/weights/nope", "there is no checkpoint tinker://.*/weights/nope"),
    ("tinker://nobody/weights/nope", "there is no checkpoint tinker://nobody/weights/nope"),
    ("tinker://{run}/weights", "is not a checkpoint's path"),
    ("tinker://{run}/weights/..", "can't be a checkpoint's name"),
    ("tinker:///etc/passwd", "is not a checkpoint's path"),
]


@pytest.mark.parametrize(("path", "sentence"), PATHS)
def test_unknown_checkpoint_paths(clients, path, sentence):
    path = path.format(run=clients.training.model_id)
    service = clients.service
    for create in (
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
    ):
        with pytest.raises(tinker.RequestFailedError, match=sentence):
            create(path).result(timeout=SECONDS)
    with pytest.raises(tinker.APIStatusError, match=sentence):
        service.create_sampling_client(model_path=path).result(timeout=SECONDS)
    clients.check()


def test_names_that_leave_the_folder_are_refused(clients, server):
    for name in ("../up", "a/b", "..", "x~y", ""):
        for save in (clients.training.save_state, clients.training.save_weights_for_sampler):
            with pytest.raises(tinker.RequestFailedError, match=r"path|name"):
                save(name).result(timeout=SECONDS)
    assert not (server.checkpoints / "up").exists()
    clients.check()


def test_a_damaged_checkpoint_is_told_of(clients, server):
    saved = clients.training.save_state("damaged").result().path
    weights = clients.training.save_weights_for_sampler("damaged").result().path
    store = Store(server.checkpoints)
    for path in (saved, weights):
        file = store.folder(path) / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(tinker.RequestFailedError, match=r"adapter_model.safetensors should be"):
        clients.service.create_training_client_from_state(saved).result(timeout=SECONDS)
    sampler = clients.service.create_sampling_client(model_path=weights).result(timeout=SECONDS)
    with pytest.raises(tinker.RequestFailedError, match=r"adapter_model.safetensors should be"):
        sampler.compute_logprobs(tinker.ModelInput.from_ints([5, 6])).result(timeout=SECONDS)
    clients.check()


def test_a_full_disk_is_told_of(clients, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.safetensors_io, "write", full)
        with pytest.raises(tinker.RequestFailedError, match="the disk is full") as failure:
            clients.training.save_state("full").result(timeout=SECONDS)
    assert failure.value.category.value == "server"
    assert clients.training.save_state("full").result(timeout=SECONDS).path.endswith("full")
    clients.check()


def test_a_key_that_is_none_encrypts_nothing(clients):
    with pytest.raises(tinker.RequestFailedError, match="'age1abc' is not a public key for age"):
        clients.training.save_weights_external("x", age_encryption_recipients=["age1abc"]).result(
            timeout=SECONDS
        )
    clients.check()


# ---- what is refused before a server starts ----


def copy_model(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def spoil_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def change_architecture(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"architectures": ["MixtralForCausalLM"]}
    file.write_text(json.dumps(config))


MODELS = [
    (cut_weights, "model.safetensors"),
    (spoil_weights, "model.safetensors"),
    (remove_tokenizer, "tokenizer.json"),
    (change_architecture, "MixtralForCausalLM"),
]


@pytest.mark.parametrize(("damage", "sentence"), MODELS)
def test_a_model_that_can_not_be_served(tiny_model_dir, tmp_path, damage, sentence):
    folder = copy_model(tiny_model_dir, tmp_path / "model")
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        Backend(ServerConfig({"tiny": folder}, checkpoints=tmp_path / "saved", device="cpu"))
