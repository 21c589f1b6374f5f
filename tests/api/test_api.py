"""The face for loops of one's own: what it is, and its numbers, which are the API's and PEFT's."""

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import tinker
import tinsmith
import torch
from conftest import CONTEXT, VOCAB, logprobs, make_datum
from peft import LoraConfig, PeftModel, get_peft_model
from support import tiny_models
from support.api_cases import PROMPT, TOKENS, soft_batch, state
from tinsmith import _core
from tinsmith.checkpoints.meta import load_meta

RNG = np.random.default_rng(0)


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
    adapter = model.lora(rank=4)
    assert (adapter.rank, adapter.alpha, adapter.step) == (4, 32.0, 0)
    assert adapter.size == sum(matrix.size for matrix in adapter.state_dict().values())


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
    reference = tiny_models.as_double(tiny_model_dir)
    if dtype == "bfloat16":
        with torch.no_grad():
            for parameter in reference.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(parameter.bfloat16())
    table = tiny_models.logprobs(reference, TOKENS[0][:-1])
    wanted = tiny_models.targets_of(table, tiny_models.datum(TOKENS[0][:-1], TOKENS[0][1:]))
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
        ours = model.lora(rank=4, seed=7).forward_backward(
            row, one, loss_fn=loss, loss_fn_inputs=inputs, loss_fn_config=config
        )
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


# ---- PEFT's numbers ----


def peft_model(folder: Path, adapter: tinsmith.Adapter) -> PeftModel:
    """transformers and PEFT in float64, with the adapter's matrices by their names."""
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in adapter.state_dict()}
    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=sorted(modules))
    base = tiny_models.as_double(folder)
    made = get_peft_model(base, config, autocast_adapter_dtype=False).double().eval()
    parameters = dict(made.named_parameters())
    with torch.no_grad():
        for name, matrix in adapter.state_dict().items():
            parameters[torch_name(name)].copy_(torch.from_numpy(matrix.astype(np.float64)))
    return made


def torch_name(name: str) -> str:
    return name.removesuffix(".weight") + ".default.weight"


def test_losses_and_gradients_equal_peft(model, adapter, tiny_model_dir: Path) -> None:
    inputs, targets, weights = soft_batch()
    reference = peft_model(tiny_model_dir, adapter)
    total = torch.zeros((), dtype=torch.float64)
    for row, target, weight in zip(inputs, targets, weights, strict=True):
        table = tiny_models.logprobs(reference, row)
        total -= (table.gather(1, torch.from_numpy(target).long()) * torch.from_numpy(weight)).sum()
    total.backward()
    found = adapter.forward_backward(inputs, targets, weights)
    assert found.loss == pytest.approx(total.item(), rel=1e-6)
    wanted = dict(reference.named_parameters())
    for name, gradient in adapter.gradients().items():
        assert tiny_models.error(gradient, wanted[torch_name(name)].grad) < 5e-5, name


def test_topk_logprobs_are_transformers(model, adapter, tiny_model_dir: Path) -> None:
    table = tiny_models.logprobs(peft_model(tiny_model_dir, adapter), TOKENS[1][:-1]).detach()
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
        theirs = PeftModel.from_pretrained(tiny_models.as_double(tiny_model_dir), tmp_path / "ours")
        theirs.float().save_pretrained(tmp_path / "theirs")  # with the frozen head
    table = tiny_models.logprobs(theirs.double(), TOKENS[1][:-1]).detach().numpy()
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


def test_a_snapshot_knows_the_step_that_it_was_made_at(model, tmp_path: Path) -> None:
    adapter = model.lora(rank=2, seed=1)
    inputs, targets, weights = soft_batch()
    for step in range(3):
        snapshot = adapter.snapshot()
        adapter.forward_backward(inputs, targets, weights)
        adapter.optim_step(1e-2)
        assert (snapshot.step, adapter.step) == (step, step + 1)
        snapshot.save(tmp_path / str(step), optimizer=False)
        assert load_meta(tmp_path / str(step)).step == step


# ---- sampling ----


def test_a_sampled_tokens_logprob_is_the_trainers(model, adapter) -> None:
    [drawn] = model.sampler().sample(
        PROMPT, adapter=adapter, max_tokens=30, seed=5, topk_logprobs=4
    )
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
    many = {"num_samples": 16, "max_tokens": 100, "seed": 3}
    ended, looked = (sampler.sample(PROMPT, stop=stop, **many) for stop in (None, "never seen"))
    assert "stop" in {one.stop_reason for one in ended}  # strings leave the end of sequence one
    assert [one.tokens.tolist() for one in looked] == [one.tokens.tolist() for one in ended]


def test_a_full_context_can_be_scored_and_trained_on(model, adapter, tiny_model_dir: Path) -> None:
    tokens = RNG.integers(3, 280, CONTEXT).astype(np.int32)
    reference = peft_model(tiny_model_dir, adapter)
    table = tiny_models.logprobs(reference, tokens)
    wanted = table[:-1].topk(2)
    top = model.topk_logprobs(tokens, 2, adapter=adapter)
    np.testing.assert_array_equal(top.ids, wanted.indices.numpy())
    np.testing.assert_allclose(top.logprobs, wanted.values.detach().numpy(), atol=5e-5)
    chosen = table.gather(1, torch.from_numpy(tokens).long()[:, None])[:, 0]
    (-chosen.sum()).backward()
    found = adapter.forward_backward(tokens, tokens)
    np.testing.assert_allclose(found.logprobs, chosen.detach().numpy(), atol=5e-5)
    matrices = dict(reference.named_parameters())
    for name, gradient in adapter.gradients().items():
        assert tiny_models.error(gradient, matrices[torch_name(name)].grad) < 5e-5, name
    assert model.logprobs([7]).shape == (0,)  # and the shortest there is
