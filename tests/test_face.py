"""The face for loops of one's own: its numbers are the API's and PEFT's, its arrays are borrowed,
its mistakes get sentences, and threads and event loops do it no harm."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path

import models
import numpy as np
import pytest
import tinker
import tinsmith
import torch
from conftest import CONTEXT, VOCAB, logprobs, make_datum
from peft import LoraConfig, PeftModel, get_peft_model
from tinsmith import _core, tensors

RNG = np.random.default_rng(0)
TOKENS = [RNG.integers(3, 280, length).astype(np.int32) for length in (17, 40, 5)]
PROMPT = [10, 20, 30, 40]


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> tinsmith.Model:
    return tinsmith.Model(tiny_model_dir, device="cpu", threads=1)


@pytest.fixture
def adapter(model: tinsmith.Model) -> tinsmith.Adapter:
    """A small adapter whose matrices are all away from zero."""
    made = model.lora(rank=4, seed=1)
    models.randomize(made.core)
    return made


def state(adapter: tinsmith.Adapter) -> list[bytes]:
    """Everything that training an adapter changes."""
    vectors = [adapter.core.read(what).tobytes() for what in ("weights", "gradients", "m", "v")]
    return [*vectors, repr((adapter.step, adapter.core.pending)).encode()]


def soft_batch(k: int = 3) -> tuple[list, list, list]:
    """Sequences with (N, K) targets and weights."""
    inputs = [row[:-1] for row in TOKENS]
    targets = [RNG.integers(3, 280, (len(row), k)).astype(np.int32) for row in inputs]
    weights = [RNG.random((len(row), k)).astype(np.float32) for row in inputs]
    return inputs, targets, weights


# ---- what it is ----


def test_import_needs_neither_a_server_nor_a_tensor_library() -> None:
    heavy = ["tinker", "starlette", "uvicorn", "tokenizers", "torch", "transformers", "tqdm"]
    code = f"import sys, tinsmith; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_model_says_what_it_is(model: tinsmith.Model, tiny_model_dir: Path) -> None:
    assert (model.context, model.vocab, model.eos_ids) == (CONTEXT, VOCAB, (2,))
    assert (model.name, model.path) == (str(tiny_model_dir), tiny_model_dir.resolve())
    assert model.device == "cpu"
    assert str(tiny_model_dir) in repr(model)
    adapter = model.lora(rank=4)
    assert (adapter.rank, adapter.alpha, adapter.step) == (4, 32.0, 0)
    assert adapter.size == sum(matrix.size for matrix in adapter.parameters().values())


def test_loading_reports_every_byte(tiny_model_dir: Path) -> None:
    seen: list[tuple[int, int]] = []
    tinsmith.Model(tiny_model_dir, device="cpu", progress=lambda *now: seen.append(now))
    done = [now for now, _ in seen]
    assert done == sorted(set(done))
    assert {total for _, total in seen} == {done[-1]}


def test_progress_is_drawn_by_tqdm(model, tiny_model_dir: Path, capfd) -> None:
    tinsmith.Model(tiny_model_dir, device="cpu", progress=True)
    model.sampler().sample([PROMPT] * 3, max_tokens=3, progress=True)
    shown = capfd.readouterr().err
    assert "loading tiny: 100%" in shown
    assert "3/3" in shown


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_products_are_computed_in_the_type_asked_for(tiny_model_dir: Path, dtype: str) -> None:
    """The files are float32; bfloat16 rounds matrices as torch does, and what meets them."""
    if dtype == "bfloat16" and (reason := _core.devices()["cpu-bf16"]):
        pytest.skip(reason)
    found = tinsmith.Model(tiny_model_dir, device="cpu", dtype=dtype).logprobs(TOKENS[0])
    reference = models.as_double(tiny_model_dir)
    if dtype == "bfloat16":
        with torch.no_grad():
            for parameter in reference.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(parameter.bfloat16())
    table = models.logprobs(reference, TOKENS[0][:-1])
    wanted = models.targets_of(table, models.datum(TOKENS[0][:-1], TOKENS[0][1:]))
    off = np.abs(found - wanted.detach().numpy()).max()
    assert off < 2e-5 if dtype != "bfloat16" else 2e-5 < off < 5e-3


# ---- the API's numbers ----


def test_training_and_scoring_equal_the_api_bit_for_bit(model, service_client) -> None:
    client = service_client.create_lora_training_client("tiny", rank=4, seed=7).result()
    adapter = model.lora(rank=4, seed=7)
    inputs, targets, weights = soft_batch()
    data = [
        make_datum(row.tolist(), target, weights=weight)
        for row, target, weight in zip(inputs, targets, weights, strict=True)
    ]
    for _ in range(3):
        theirs = client.forward_backward(data, "cross_entropy").result()
        ours = adapter.forward_backward(inputs, targets, weights)
        for mine, other in zip(ours.logprobs, logprobs(theirs), strict=True):
            np.testing.assert_array_equal(mine, np.asarray(other).reshape(mine.shape))
        assert ours.loss == pytest.approx(theirs.metrics["loss:sum"], abs=0)
        params = tinker.AdamParams(learning_rate=3e-3, beta2=0.99, grad_clip_norm=1.0)
        metrics = client.optim_step(params).result().metrics
        step = adapter.optim_step(3e-3, beta2=0.99, grad_clip_norm=1.0)
        assert step.grad_norm in metrics.values()
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(TOKENS[1].tolist())
    theirs = sampler.compute_logprobs(prompt).result()
    ours = model.logprobs(TOKENS[1], adapter=adapter)
    np.testing.assert_array_equal(ours, np.asarray(theirs[1:], np.float32))
    reply = sampler.sample(
        prompt, 1, tinker.SamplingParams(max_tokens=1), True, topk_prompt_logprobs=5
    ).result()
    top = model.topk_logprobs(TOKENS[1], 5, adapter=adapter)
    for row, ids, values in zip(reply.topk_prompt_logprobs[1:], top.ids, top.logprobs, strict=True):
        assert [item[0] for item in row] == ids.tolist()
        np.testing.assert_array_equal(np.asarray([item[1] for item in row], np.float32), values)


def test_policy_losses_and_their_options_equal_the_api(model, service_client) -> None:
    row, one = TOKENS[1][:-1], TOKENS[1][1:]
    old = (model.logprobs(TOKENS[1]) + RNG.normal(0, 0.3, len(row))).astype(np.float32)
    advantages = RNG.normal(0, 1, len(row)).astype(np.float32)
    cases = [
        ("importance_sampling", {}),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", {"clip_high_threshold": 1.5}),
        ("dro", {"beta": 0.1}),
        ("gspo", {}),
    ]
    for loss, config in cases:
        client = service_client.create_lora_training_client("tiny", rank=4, seed=7).result()
        data = [make_datum(row.tolist(), one, logprobs=old, advantages=advantages)]
        theirs = client.forward_backward(data, loss, config).result()
        inputs = {"logprobs": old, "advantages": advantages}
        ours = model.lora(rank=4, seed=7).forward_backward(row, one, loss=loss, **inputs, **config)
        assert ours.loss == pytest.approx(theirs.metrics["loss:sum"], abs=0), loss


def test_samples_equal_the_api_bit_for_bit(model, service_client) -> None:
    client = service_client.create_sampling_client(base_model="tiny").result()
    sampler = model.sampler()
    for options in ({"temperature": 0.7}, {"top_k": 20, "top_p": 0.9}, {"stop": ["e"]}):
        params = tinker.SamplingParams(max_tokens=20, seed=11, **options)
        theirs = client.sample(tinker.ModelInput.from_ints(PROMPT), 3, params).result().sequences
        ours = sampler.sample(PROMPT, num_samples=3, max_tokens=20, seed=11, **options)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.tokens.tolist() == other.tokens
            assert mine.stop_reason == other.stop_reason
            np.testing.assert_array_equal(mine.logprobs, np.asarray(other.logprobs, np.float32))


def test_a_loss_of_ones_own_equals_forward_backward_custom(model, service_client) -> None:
    inputs, targets = [row[:-1] for row in TOKENS], [row[1:] for row in TOKENS]

    def squared(data, rows):
        return sum((row**2).sum() for row in rows), {}

    client = service_client.create_lora_training_client("tiny", rank=4, seed=7).result()
    data = [
        make_datum(row.tolist(), one, weights=np.ones(len(one)))
        for row, one in zip(inputs, targets, strict=True)
    ]
    client.forward_backward_custom(data, squared).result()
    theirs = client.optim_step(tinker.AdamParams(learning_rate=1e-3)).result().metrics
    adapter = model.lora(rank=4, seed=7)
    rows = adapter.forward(
        [torch.from_numpy(row) for row in inputs], [torch.from_numpy(one) for one in targets]
    )
    for row in rows:
        row.requires_grad_()
    squared(None, rows)[0].backward()
    adapter.backward([row.grad for row in rows])
    assert adapter.optim_step(1e-3).grad_norm in theirs.values()


# ---- OPSD ----


def lessons() -> tuple[list, list, list, list]:
    """Tokens, targets and weights of two completions, and what a teacher reads."""
    rows = [RNG.integers(3, 280, length).astype(np.int32) for length in (15, 8)]
    weights = [np.r_[np.zeros(5), RNG.uniform(0.5, 1.5, len(row) - 6)] for row in rows]
    read = [np.r_[RNG.integers(3, 280, 20), row[6:]].astype(np.int32) for row in rows]
    return [row[:-1] for row in rows], [row[1:] for row in rows], weights, read


def test_generalized_jsd_equals_the_api_bit_for_bit(model, service_client) -> None:
    tokens, targets, weights, read = lessons()
    data = [
        tinker.Datum(
            tinker.ModelInput.from_ints(row.tolist()),
            {
                "target_tokens": target.astype(np.int64),
                "weights": weight.astype(np.float32),
                "teacher_tokens": taught.astype(np.int64),
            },
        )
        for row, target, weight, taught in zip(tokens, targets, weights, read, strict=True)
    ]
    for config in ({}, {"beta": 0.1, "temperature": 2.0, "top_k": 30, "token_clip": 0.05}):
        client = service_client.create_lora_training_client("tiny", rank=4, seed=7).result()
        adapter = model.lora(rank=4, seed=7)
        for _ in range(2):
            theirs = client.forward_backward(data, "generalized_jsd", config).result()
            ours = adapter.generalized_jsd(tokens, targets, weights, read, **config)
            assert ours.loss == pytest.approx(theirs.metrics["loss:sum"], abs=0)
            rows = zip(ours.logprobs, ours.divergences, theirs.loss_fn_outputs, strict=True)
            for mine, gap, other in rows:
                np.testing.assert_array_equal(mine, other["logprobs"].to_numpy())
                np.testing.assert_array_equal(gap, other["jsd"].to_numpy())
            metrics = client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result().metrics
            assert adapter.optim_step(1e-2).grad_norm in metrics.values()


def test_generalized_jsd_over_the_top_k_is_what_numpy_makes_of_forward_and_backward(model) -> None:
    tokens, targets, weights, read = lessons()
    together, apart = (models_away(model) for _ in range(2))
    wanted = together.generalized_jsd(tokens[0], targets[0], weights[0], read[0], top_k=7, beta=0.3)
    top = model.topk_logprobs(read[0], 7)
    count = len(targets[0]) - 5
    ids, taught = np.zeros((len(tokens[0]), 7), np.int32), np.zeros((len(tokens[0]), 7))
    ids[5:], taught[5:] = top.ids[-count:], top.logprobs[-count:]
    found = torch.from_numpy(apart.forward(tokens[0], ids)).double().requires_grad_()
    q, p = found.log_softmax(-1), torch.from_numpy(taught).log_softmax(-1)
    m = torch.log(0.3 * p.exp() + 0.7 * q.exp())
    jsd = (0.3 * p.exp() * (p - m) + 0.7 * q.exp() * (q - m)).sum(-1)
    (torch.from_numpy(weights[0]) * jsd).sum().backward()
    apart.backward(found.grad)
    np.testing.assert_allclose(wanted.divergences[5:], jsd.detach()[5:], rtol=1e-4, atol=1e-7)
    for name, gradient in together.gradients().items():
        assert models.error(apart.gradients()[name], gradient) < 1e-4, name


def models_away(model: tinsmith.Model) -> tinsmith.Adapter:
    made = model.lora(rank=4, seed=3)
    models.randomize(made.core, seed=3)
    return made


def test_teachers_are_the_base_adapters_snapshots_and_other_models(
    model, adapter, tiny_model_dir: Path
) -> None:
    tokens, targets, weights, read = lessons()

    def loss(teacher: object, beta: float = 0.5) -> float:
        return adapter.generalized_jsd(
            tokens, targets, weights, read, teacher=teacher, beta=beta
        ).loss

    other = tinsmith.Model(tiny_model_dir, device="cpu", threads=1)
    assert loss(None) == loss(model) == loss(other)
    assert loss(adapter) == loss(adapter.snapshot())
    assert loss(adapter) != loss(None)
    elsewhere = other.lora(rank=4)
    elsewhere.core.write("weights", adapter.core.read("weights"))
    assert loss(elsewhere) == loss(adapter)
    average = adapter.snapshot()
    average.follow(models_away(model), 0.75)
    wanted = 0.75 * adapter.core.read("weights") + 0.25 * models_away(model).core.read("weights")
    np.testing.assert_allclose(average.core.read("weights"), wanted, atol=1e-6)


def test_two_models_teach_each_other_from_two_threads(tiny_model_dir: Path) -> None:
    """Both models' turns are taken in one order: neither thread waits for the other for ever."""
    pair = [tinsmith.Model(tiny_model_dir, device="cpu", threads=1) for _ in range(2)]
    adapters = [model.lora(rank=2, seed=1) for model in pair]
    lesson, losses = lessons(), []

    def teach(student: tinsmith.Adapter, teacher: tinsmith.Model) -> None:
        for _ in range(20):
            losses.append(student.generalized_jsd(*lesson, teacher=teacher).loss)

    threads = [
        threading.Thread(target=teach, args=(adapters[index], pair[1 - index]), daemon=True)
        for index in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(losses) == 40
    assert len(set(losses)) == 1


def test_a_bad_lesson_is_refused_and_changes_nothing(model, adapter) -> None:
    tokens, targets, weights, read = (item[0] for item in lessons())
    before = state(adapter)

    def teach(**options: object) -> object:
        return lambda: adapter.generalized_jsd(tokens, targets, weights, read, **options)

    def taught(weights: object, read: object) -> object:
        return lambda: adapter.generalized_jsd(tokens, targets, weights, read)

    for call, kind, sentence in (
        (teach(beta=1.5), ValueError, r"beta must be in \[0, 1\], not 1.5"),
        (teach(temperature=0), ValueError, "temperature must be more than 0"),
        (teach(top_k=VOCAB + 1), ValueError, "top_k must be a whole number"),
        (teach(top_k=2.5), ValueError, "top_k must be a whole number"),
        (teach(token_clip=-1.0), ValueError, "token_clip must be more than 0"),
        (teach(teacher="base"), TypeError, "tinsmith Adapter or Model, or None; str came"),
        (taught(None, read), TypeError, "generalized_jsd needs weights"),
        (taught(weights, read * 1.0), TypeError, "teacher_tokens must be integers, float64 came"),
        (taught(weights, [read]), ValueError, "a list for a list"),
        (taught(weights, read[:-1]), ValueError, "teacher"),
        (taught(weights, read + VOCAB), IndexError, "teacher"),
        (
            lambda: adapter.forward_backward(tokens, targets, weights, "generalized_jsd"),
            ValueError,
            "call adapter.generalized_jsd",
        ),
        (lambda: adapter.follow(None, 0.5), TypeError, "leader must be a tinsmith.Adapter"),
        (lambda: adapter.follow(model.lora(rank=3), 0.5), ValueError, "layout|rank|other"),
    ):
        with pytest.raises(kind, match=sentence):
            call()
        assert state(adapter) == before


# ---- PEFT's numbers ----


def peft_model(folder: Path, adapter: tinsmith.Adapter) -> PeftModel:
    """transformers and PEFT in float64, with the adapter's matrices by their names."""
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in adapter.parameters()}
    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=sorted(modules))
    base = models.as_double(folder)
    made = get_peft_model(base, config, autocast_adapter_dtype=False).double().eval()
    parameters = dict(made.named_parameters())
    with torch.no_grad():
        for name, matrix in adapter.parameters().items():
            parameters[torch_name(name)].copy_(torch.from_numpy(matrix.astype(np.float64)))
    return made


def torch_name(name: str) -> str:
    return name.removesuffix(".weight") + ".default.weight"


def test_losses_and_gradients_equal_peft(model, adapter, tiny_model_dir: Path) -> None:
    inputs, targets, weights = soft_batch()
    reference = peft_model(tiny_model_dir, adapter)
    total = torch.zeros((), dtype=torch.float64)
    for row, target, weight in zip(inputs, targets, weights, strict=True):
        table = models.logprobs(reference, row)
        total -= (table.gather(1, torch.from_numpy(target).long()) * torch.from_numpy(weight)).sum()
    total.backward()
    found = adapter.forward_backward(inputs, targets, weights)
    assert found.loss == pytest.approx(total.item(), rel=1e-6)
    wanted = dict(reference.named_parameters())
    for name, gradient in adapter.gradients().items():
        assert models.error(gradient, wanted[torch_name(name)].grad) < 5e-5, name


def test_topk_logprobs_are_transformers(model, adapter, tiny_model_dir: Path) -> None:
    table = models.logprobs(peft_model(tiny_model_dir, adapter), TOKENS[1][:-1]).detach()
    wanted = table.topk(7)
    found = model.topk_logprobs(TOKENS[1], 7, adapter=adapter)
    np.testing.assert_allclose(found.logprobs, wanted.values.numpy(), atol=5e-5)
    np.testing.assert_array_equal(found.ids, wanted.indices.numpy())


def test_backward_equals_forward_backward_and_needs_no_second_forward(model) -> None:
    inputs, targets, weights = soft_batch()
    together, apart = (model.lora(rank=4, seed=3) for _ in range(2))
    wanted = together.forward_backward(inputs, targets, weights)
    found = apart.forward(inputs, targets)
    apart.backward([-weight for weight in weights])
    for mine, other in zip(found, wanted.logprobs, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert state(apart) == state(together)


def test_folders_go_to_peft_and_back(model, adapter, tiny_model_dir: Path, tmp_path: Path) -> None:
    inputs, targets, weights = soft_batch()
    adapter.forward_backward(inputs, targets, weights)
    adapter.optim_step(1e-2)
    adapter.forward_backward(inputs, targets, weights)
    adapter.save(tmp_path / "ours")
    resumed = model.load_lora(tmp_path / "ours", optimizer=True)
    assert state(resumed) == state(adapter)
    assert model.load_lora(tmp_path / "ours").step == 0
    assert adapter.optim_step(1e-2) == resumed.optim_step(1e-2)
    assert state(resumed) == state(adapter)
    with pytest.raises(FileExistsError, match="exists"):
        adapter.save(tmp_path / "ours")
    adapter.save(tmp_path / "ours", optimizer=False, overwrite=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = PeftModel.from_pretrained(models.as_double(tiny_model_dir), tmp_path / "ours")
        theirs.float().save_pretrained(tmp_path / "theirs")  # with the frozen head
    table = models.logprobs(theirs.double(), TOKENS[1][:-1]).detach().numpy()
    again = model.load_lora(tmp_path / "theirs")
    assert (again.rank, again.alpha) == (4, 32.0)
    found = model.logprobs(TOKENS[1], adapter=again)
    np.testing.assert_array_equal(found, model.logprobs(TOKENS[1], adapter=adapter))
    np.testing.assert_allclose(found, table[np.arange(39), TOKENS[1][1:]], atol=1e-4)


def test_a_snapshot_stays_and_can_not_be_trained(model, adapter) -> None:
    before = adapter.snapshot()
    inputs, targets, weights = soft_batch()
    wanted = before.forward(inputs[0], targets[0])
    adapter.forward_backward(inputs, targets, weights)
    adapter.optim_step(1e-2)
    np.testing.assert_array_equal(before.forward(inputs[0], targets[0]), wanted)
    assert np.abs(adapter.forward(inputs[0], targets[0]) - wanted).max() > 1e-3
    with pytest.raises(ValueError, match="snapshot"):
        before.forward_backward(inputs, targets, weights)


# ---- sampling ----


def test_a_sampled_tokens_logprob_is_the_trainers(model, adapter) -> None:
    [drawn] = model.sampler().sample(PROMPT, adapter=adapter, max_tokens=30, seed=5, topk=4)
    tokens = np.concatenate([PROMPT, drawn.tokens]).astype(np.int32)
    scored = adapter.forward(tokens[:-1], tokens[1:])[len(PROMPT) - 1 :]
    limited = drawn.logprobs  # among the tokenizer's ids: a little more than among all
    assert (limited >= scored).all()
    assert np.ptp(limited - scored) < 0.2
    assert drawn.topk_ids.shape == drawn.topk_logprobs.shape == (len(drawn.tokens), 4)
    assert (np.diff(drawn.topk_logprobs, axis=1) <= 0).all()


def test_a_list_of_prompts_gives_what_each_gives_alone(model, adapter) -> None:
    sampler = model.sampler()
    prompts = [PROMPT, PROMPT[:2], PROMPT]
    together = sampler.sample(prompts, adapter=adapter, num_samples=2, max_tokens=9, seed=30)
    for index, (prompt, samples) in enumerate(zip(prompts, together, strict=True)):
        alone = sampler.sample(
            prompt, adapter=adapter, num_samples=2, max_tokens=9, seed=30 + index
        )
        assert [item.tokens.tolist() for item in alone] == [s.tokens.tolist() for s in samples]
    named = sampler.sample(prompts, adapter=adapter, max_tokens=9, seed=[4, 5, 4])
    assert named[0][0].tokens.tolist() == named[2][0].tokens.tolist()
    fresh = {str(sampler.sample(PROMPT, max_tokens=20, stop=[])[0].tokens) for _ in range(3)}
    assert len(fresh) > 1


def test_stops_are_ids_strings_or_nothing(model) -> None:
    sampler = model.sampler()
    [free] = sampler.sample(PROMPT, max_tokens=60, seed=11, stop=[])
    assert (len(free.tokens), free.stop_reason) == (60, "length")
    stop = int(free.tokens[10])
    end = free.tokens.tolist().index(stop) + 1
    for form in (stop, [stop], np.asarray([stop]), torch.tensor([stop])):
        [cut] = sampler.sample(PROMPT, max_tokens=60, seed=11, stop=form)
        assert (cut.tokens.tolist(), cut.stop_reason) == (free.tokens[:end].tolist(), "stop")


def test_a_full_context_can_be_scored_and_trained_on(model, adapter) -> None:
    tokens = RNG.integers(3, 280, CONTEXT).astype(np.int32)
    assert model.topk_logprobs(tokens, 2).ids.shape == (CONTEXT - 1, 2)
    assert adapter.forward_backward(tokens, tokens).logprobs.shape == (CONTEXT,)
    assert model.logprobs([7]).shape == (0,)


# ---- arrays ----


def test_arrays_of_the_right_type_are_borrowed() -> None:
    ids, numbers = np.arange(5, dtype=np.int32), torch.rand(4, 3)
    ids.flags.writeable = False
    assert tensors.to_ids(ids, "x") is ids
    seen = tensors.to_floats(numbers, "x")
    assert seen.ctypes.data == numbers.data_ptr()
    assert seen.shape == (4, 3)
    tensor = torch.arange(5, dtype=torch.int32)
    assert tensors.to_ids(tensor, "x").ctypes.data == tensor.data_ptr()
    back = tensors.like(numbers, seen)
    assert isinstance(back, torch.Tensor)
    assert back.data_ptr() == numbers.data_ptr()
    assert tensors.like([1, 2], ids) is ids


def test_other_types_and_layouts_are_converted() -> None:
    wide = torch.arange(12, dtype=torch.int64).reshape(3, 4).T
    np.testing.assert_array_equal(tensors.to_ids(wide, "x"), wide.numpy())
    assert tensors.to_ids(wide, "x").flags.c_contiguous
    swapped = np.arange(3).astype(">i8")
    assert tensors.to_ids(swapped, "x").dtype == np.int32
    np.testing.assert_array_equal(tensors.to_floats(torch.tensor([True, False]), "x"), [1.0, 0.0])
    assert tensors.to_floats(np.asarray([0.1]), "x")[0] == np.float32(0.1)


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
def test_results_are_of_the_kind_that_came(model, adapter, kind) -> None:
    result = torch.Tensor if kind is torch.tensor else np.ndarray
    ids = kind([5, 6, 7, 8])
    one = adapter.forward_backward(ids[:-1], ids[1:]).logprobs
    assert isinstance(one, result)
    assert one.shape == (3,)
    assert all(isinstance(x, result) for x in adapter.forward([ids[:-1]] * 2, [ids[1:]] * 2))
    assert isinstance(model.logprobs(ids), result)
    assert isinstance(model.topk_logprobs(ids, 2).ids, result)
    [drawn] = model.sampler().sample(ids, max_tokens=2)
    assert isinstance(drawn.tokens, result)
    assert isinstance(drawn.logprobs, result)


class OnCard:
    """An array in the memory of a device that NumPy can't read."""

    device = "card:3"

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype

    def __dlpack__(self, **_: object) -> object:
        raise BufferError("this memory is not the CPU's")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 3  # kDLCUDA

    def __array_namespace__(self) -> type:
        return Library


class Library:
    @staticmethod
    def asarray(array: np.ndarray, *, device: str = "the current one") -> tuple[str, np.ndarray]:
        return device, array


class LikeTorch(OnCard):
    def cpu(self) -> torch.Tensor:
        return torch.from_numpy(self.array)


class LikeJax(OnCard):
    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return self.array


class LikeCuPy(OnCard):
    def get(self) -> np.ndarray:
        return self.array

    def __array_namespace__(self) -> type:
        return CuPy


class CuPy:
    @staticmethod
    def asarray(array: np.ndarray) -> tuple[str, np.ndarray]:
        return "card:3", array


@pytest.mark.parametrize("kind", [LikeTorch, LikeJax, LikeCuPy])
def test_a_tensor_of_another_device_is_fetched_and_its_result_sent_back(adapter, kind) -> None:
    ids = kind(np.asarray([5, 6, 7]))
    device, found = adapter.forward_backward(ids, ids).logprobs
    assert device == "card:3"
    np.testing.assert_array_equal(found, adapter.forward([5, 6, 7], [5, 6, 7]))


def test_a_thousand_calls_leave_memory_and_references_as_they_were(model, adapter) -> None:
    ids, weights = torch.arange(5, 12, dtype=torch.int32), np.ones(6, np.float32)

    def call(ids: torch.Tensor) -> None:
        adapter.forward_backward(ids[:-1], ids[1:], weights)
        adapter.backward(-adapter.forward(ids[:-1], ids[1:]))
        adapter.optim_step(1e-3)
        model.topk_logprobs(ids, 2, adapter=adapter)
        model.sampler().sample(ids, adapter=adapter, max_tokens=2, num_samples=2)
        with pytest.raises(IndexError):
            adapter.forward([VOCAB], [0])

    for _ in range(20):
        call(ids)
    gc.collect()
    objects, references, pages = len(gc.get_objects()), sys.getrefcount(weights), resident()
    for _ in range(1000):
        call(ids)
    gc.collect()
    assert sys.getrefcount(weights) == references
    assert len(gc.get_objects()) - objects < 500  # the SDK's own come and go
    assert resident() - pages < 4 << 20
    gone = weakref.ref(ids)
    del ids
    assert gone() is None


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_models_memory_and_thread_go_with_it(tiny_model_dir: Path) -> None:
    def threads() -> int:
        return sum(thread.name.startswith("tinsmith_") for thread in threading.enumerate())

    before = threads()
    model = tinsmith.Model(tiny_model_dir, device="cpu")
    model.logprobs(PROMPT)
    assert threads() == before + 1
    core = model.lora(rank=2).core.model
    references = sys.getrefcount(core)
    del model
    gc.collect()
    for _ in range(100):
        if threads() == before:
            break
        time.sleep(0.02)
    assert threads() == before
    assert sys.getrefcount(core) < references


# ---- threads and event loops ----


def test_threads_take_turns(model, adapter) -> None:
    """Each gets the numbers that it gets alone, and no gradient is lost."""
    wanted = [adapter.forward(row[:-1], row[1:], keep=False) for row in TOKENS]
    [drawn] = model.sampler().sample(PROMPT, adapter=adapter, max_tokens=9, seed=1)
    failures: list[BaseException] = []

    def train(index: int) -> None:
        for _ in range(10):
            row = TOKENS[index]
            found = adapter.forward_backward(row[:-1], row[1:]).logprobs
            np.testing.assert_array_equal(found, wanted[index])

    def sample() -> None:
        for _ in range(10):
            [again] = model.sampler().sample(PROMPT, adapter=adapter, max_tokens=9, seed=1)
            assert again.tokens.tolist() == drawn.tokens.tolist()

    def guarded(work, *arguments) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(train, index)) for index in range(3)]
    threads += [threading.Thread(target=guarded, args=(sample,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert adapter.core.pending[1:] == (10 * sum(len(row) - 1 for row in TOKENS), 30)


def test_other_threads_run_while_the_engine_computes(model, adapter) -> None:
    ticks, over = [], threading.Event()

    def tick() -> None:
        while not over.wait(0.002):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    rows = [np.full(120, 7, np.int32)] * 100
    thread.start()
    calls = (
        lambda: adapter.forward_backward(rows, rows),
        lambda: model.sampler().sample(rows[0][:8], num_samples=200, max_tokens=40, stop=[]),
    )
    for call in calls:
        start = time.monotonic()
        call()
        end = time.monotonic()
        margin = (end - start) / 4  # in the middle of the call there is nothing but the engine
        inside = sum(start + margin < moment < end - margin for moment in ticks)
        assert inside >= 5, f"{inside} ticks in {end - start:.2f} s"
    over.set()
    thread.join()


def test_a_running_event_loop_is_no_obstacle(model, adapter) -> None:
    row = TOKENS[1]

    async def cell() -> tuple[np.ndarray, np.ndarray, int]:
        directly = adapter.forward_backward(row[:-1], row[1:]).logprobs
        task = asyncio.create_task(
            asyncio.to_thread(model.sampler().sample, [PROMPT] * 50, max_tokens=60, stop=[])
        )
        beats = 0
        while not task.done():
            await asyncio.sleep(0.001)
            beats += 1
        await task
        return directly, adapter.forward(row[:-1], row[1:]), beats

    first, second, beats = asyncio.run(cell())
    np.testing.assert_array_equal(first, second)
    assert beats > 5


def test_a_forked_process_is_told_to_load_its_own_model(model) -> None:
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            model.logprobs(PROMPT)
        except BaseException as error:
            os.write(write, json.dumps([type(error).__name__, str(error)]).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    kind, sentence = json.loads(os.read(read, 1000))
    os.close(read)
    assert kind == "RuntimeError"
    assert "fork" in sentence


# ---- bad input ----

ONE, TWO, X = np.asarray([5, 6, 7]), np.asarray([[5, 6], [7, 8], [9, 10]]), np.ones(3)
TRAINING = {
    "no array": (("abc", ONE), {}, TypeError, "tokens must be an array.*str came"),
    "floats": ((X, ONE), {}, TypeError, "tokens must be integers, float64 came"),
    "bools": ((ONE > 5, ONE), {}, TypeError, "tokens must be integers, bool came"),
    "ragged": (([[1, 2], [3]], [[1, 2], [[3], 4]]), {}, TypeError, r"targets\[1\] must be a list"),
    "none": ((None, ONE), {}, TypeError, "NoneType came"),
    "padded": ((TWO, TWO), {}, ValueError, r"tokens must be one sequence.*\(3, 2\) came"),
    "empty": (([], []), {}, ValueError, "datum 0 is empty"),
    "too long": ((np.zeros(CONTEXT + 1, int),) * 2, {}, ValueError, "129 tokens.*context is 128"),
    "too short": ((ONE, ONE[:2]), {}, ValueError, r"targets has shape \(2,\); for 3 tokens"),
    "no targets": ((ONE, TWO[:, :0]), {}, ValueError, "datum 0 has 0 targets"),
    "three axes": ((ONE, TWO[:, :, None]), {}, ValueError, r"targets has shape \(3, 2, 1\)"),
    "an id too many": ((ONE, [5, 6, VOCAB]), {}, IndexError, "position 2 is 304.*0 to 303"),
    "a negative id": (([5, -1, 7], ONE), {}, IndexError, "the token at position 1 is -1"),
    "a huge id": (([5, 1 << 40, 7], ONE), {}, IndexError, f"tokens has id {1 << 40}"),
    "the second": (([ONE, ONE], [ONE, ONE + VOCAB]), {}, IndexError, "datum 1: the target"),
    "one list": (([ONE, ONE], ONE), {}, ValueError, "a list of 2; targets must be one too"),
    "other lists": (([ONE, ONE], [ONE]), {}, ValueError, "a list of 2; .* 1 came"),
    "weights": ((ONE, ONE, X[:2]), {}, ValueError, r"weights has shape \(2,\), its targets.*\(3,"),
    "K weights": ((ONE, TWO, X), {}, ValueError, r"weights has shape \(3,\).*\(3, 2\)"),
    "nan": ((ONE, ONE, [1, np.nan, 1]), {}, ValueError, "weights at position 1 is nan"),
    "inf": ((ONE, ONE, [1, 1, 1e300]), {}, ValueError, "weights at position 2 is inf"),
    "complex": ((ONE, ONE, X + 1j), {}, TypeError, "weights must be real numbers, complex128"),
    "words": ((ONE, ONE, ["a", "b", "c"]), {}, TypeError, "weights must be real numbers"),
    "grad": ((ONE, ONE, torch.ones(3, requires_grad=True)), {}, ValueError, "pass weights.detach"),
    "bf16": ((ONE, ONE, torch.ones(3).bfloat16()), {}, TypeError, "weights can't .*bfloat16"),
    "a loss": ((ONE, ONE), {"loss": "mse"}, ValueError, "no loss 'mse'; there are .*'ppo'"),
    "a key": ((ONE, ONE), {"advantages": X}, TypeError, "cross_entropy has no argument 'adv"),
    "needs": ((ONE, ONE), {"loss": "ppo", "logprobs": X}, TypeError, "ppo needs advantages"),
    "dro": (
        (ONE, ONE),
        {"loss": "dro", "logprobs": X, "advantages": X},
        TypeError,
        "dro needs beta",
    ),
    "beta": (
        (ONE, ONE),
        {"loss": "dro", "logprobs": X, "advantages": X, "beta": "high"},
        TypeError,
        "beta must be a number, 'high' came",
    ),
    "K of one": (
        (ONE, TWO),
        {"loss": "ppo", "logprobs": X[:, None] * [1, 1], "advantages": X[:, None] * [1, 1]},
        ValueError,
        "2 targets a position; ppo takes one",
    ),
}


@pytest.mark.parametrize("name", TRAINING)
def test_a_bad_training_call_is_refused_and_changes_nothing(adapter, name: str) -> None:
    arguments, options, kind, sentence = TRAINING[name]
    adapter.forward_backward(TOKENS[0], TOKENS[0])
    before = state(adapter)
    with pytest.raises(kind, match=sentence):
        adapter.forward_backward(*arguments, **options)
    assert state(adapter) == before


def test_backward_is_refused_without_its_forward(adapter) -> None:
    one = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="no forward to go back from"):
        adapter.backward(one)
    adapter.forward(ONE, ONE)
    with pytest.raises(ValueError, match=r"dlogprobs has shape \(2,\), its targets have \(3,\)"):
        adapter.backward(one[:2])
    with pytest.raises(ValueError, match="at position 1 is nan"):
        adapter.backward([0, np.nan, 0])
    adapter.backward(one)
    with pytest.raises(ValueError, match="no forward to go back from"):
        adapter.backward(one)
    adapter.forward(ONE, ONE)
    adapter.forward_backward(ONE, ONE)
    adapter.optim_step()
    before = state(adapter)
    with pytest.raises(ValueError, match="weights"):
        adapter.backward(one)
    assert state(adapter) == before


OPTIM = {
    "a word": ({"learning_rate": "fast"}, TypeError, "learning_rate must be a number, 'fast' came"),
    "nan": ({"learning_rate": float("nan")}, ValueError, "lr|learning_rate"),
    "beta": ({"beta1": 1.5}, ValueError, "beta1"),
    "mode": ({"grad_accumulation_normalization": "mean"}, ValueError, "'num_loss_tokens'"),
}


@pytest.mark.parametrize("name", OPTIM)
def test_a_bad_optim_step_is_refused_and_changes_nothing(adapter, name: str) -> None:
    options, kind, sentence = OPTIM[name]
    adapter.forward_backward(TOKENS[0], TOKENS[0])
    before = state(adapter)
    with pytest.raises(kind, match=sentence):
        adapter.optim_step(**options)
    assert state(adapter) == before


SAMPLING = {
    "no prompt": (([],), {}, ValueError, "the prompt is empty"),
    "a text": (("hello",), {}, TypeError, "prompt must be an array.*str came"),
    "an id": (([PROMPT, [VOCAB]],), {}, IndexError, "number 1 of 2.*position 0 is 304"),
    "samples": ((PROMPT,), {"num_samples": 0}, ValueError, "num_samples must be at least 1"),
    "half": ((PROMPT,), {"num_samples": 1.5}, TypeError, "num_samples must be an integer"),
    "tokens": ((PROMPT,), {"max_tokens": 0}, ValueError, "max_tokens must be at least 1"),
    "cold": ((PROMPT,), {"temperature": -1}, ValueError, "temperature must be 0 or more"),
    "hot": ((PROMPT,), {"temperature": "hot"}, TypeError, "temperature must be a number, 'hot'"),
    "top_p": ((PROMPT,), {"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\]"),
    "top_k": ((PROMPT,), {"top_k": 0}, ValueError, "top_k must be at least 1"),
    "topk": ((PROMPT,), {"topk": VOCAB + 1}, ValueError, "must be 0 to 304"),
    "seeds": (([PROMPT],), {"seed": [1, 2]}, ValueError, "seed has 2 numbers for 1 prompts"),
    "stop": ((PROMPT,), {"stop": [VOCAB]}, IndexError, "stop has id 304"),
    "no stop": ((PROMPT,), {"stop": ""}, ValueError, "an empty string came"),
    "a stop": ((PROMPT,), {"stop": 1.5}, TypeError, "stop must be an integer, 1.5 came"),
    "adapter": ((PROMPT,), {"adapter": "a"}, TypeError, "must be a tinsmith.Adapter, str came"),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_a_bad_sampling_call_is_refused_and_the_next_one_is_not(model, name: str) -> None:
    arguments, options, kind, sentence = SAMPLING[name]
    sampler = model.sampler()
    with pytest.raises(kind, match=sentence):
        sampler.sample(*arguments, **{"max_tokens": 2, **options})
    assert len(sampler.sample(PROMPT, max_tokens=2, stop=[])[0].tokens) == 2


def test_other_bad_calls_are_refused(model, adapter, tiny_model_dir: Path, tmp_path: Path) -> None:
    other = tinsmith.Model(tiny_model_dir, device="cpu")
    for call, kind, sentence in (
        (lambda: model.topk_logprobs(PROMPT, 0), ValueError, "k must be from 1 to .* 304, 0 came"),
        (lambda: model.topk_logprobs(PROMPT, VOCAB + 1), ValueError, "305 came"),
        (lambda: model.topk_logprobs(PROMPT, 2.0), TypeError, "k must be an integer, 2.0 came"),
        (lambda: model.logprobs(5), TypeError, "tokens must be an array"),
        (lambda: other.logprobs(PROMPT, adapter=adapter), ValueError, "belongs to another model"),
        (lambda: model.lora(rank=0), ValueError, "rank"),
        (lambda: model.lora(rank="4"), TypeError, "rank must be an integer, '4' came"),
        (lambda: model.lora(attn=0, mlp=0, unembed=0), ValueError, "attn"),
        (lambda: model.load_lora(tmp_path), FileNotFoundError, "adapter_config.json"),
        (lambda: tinsmith.Model(tmp_path), FileNotFoundError, "there is no model"),
        (lambda: tinsmith.Model(tiny_model_dir, device="tpu"), ValueError, "no device 'tpu'"),
        (lambda: tinsmith.Model(tiny_model_dir, dtype="int8"), ValueError, "'int8' came"),
    ):
        with pytest.raises(kind, match=sentence):
            call()
