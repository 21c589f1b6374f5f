"""The face's refusals: every bad call gets its sentence and changes nothing."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import tinsmith
import torch
from conftest import CONTEXT, VOCAB
from support.api_cases import PROMPT, TOKENS, state
from tinsmith.api.names import RENAMED
from tinsmith.formats import safetensors_io

from tools.attack import tiny

ONE, TWO, X = np.asarray([5, 6, 7]), np.asarray([[5, 6], [7, 8], [9, 10]]), np.ones(3)
DRAWN = {"logprobs": X, "advantages": X}
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
    "a masked id": (
        ([5, 6, 7], [5, -100, 7]),
        {},
        IndexError,
        "is -100; .*; to mask it, give",
    ),
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
    "a method": (
        (ONE, ONE),
        {"loss_fn": "reinforce"},
        ValueError,
        "'ppo'.*REINFORCE's loss is imp",
    ),
    "a loss": ((ONE, ONE), {"loss_fn": "mse"}, ValueError, "no loss 'mse'; there are .*'ppo'"),
    "a key": (
        (ONE, ONE),
        {"loss_fn_inputs": {"advantages": X}},
        TypeError,
        r"loss_fn_inputs has no 'advantages' here: this loss takes \['weights'\]",
    ),
    "a number among arrays": (
        (ONE, ONE),
        {"loss_fn": "dro", "loss_fn_inputs": {"beta": 0.1}},
        TypeError,
        "loss_fn_inputs has no 'beta' here: it is of the loss_fn_config of dro",
    ),
    "no dict": ((ONE, ONE), {"loss_fn_config": [1]}, TypeError, "must be a dict, list came"),
    "no dict beside weights": (
        (ONE, ONE, X),
        {"loss_fn_inputs": np.ones(3)},
        TypeError,
        "loss_fn_inputs must be a dict, ndarray came",
    ),
    "twice": ((ONE, ONE, X), {"loss_fn_inputs": {"weights": X}}, TypeError, "weights came twice"),
    "before 0.1": (
        (ONE, ONE),
        {"loss": "ppo"},
        TypeError,
        r"no argument 'loss' \(did you mean loss_fn\?\)",
    ),
    "an input before 0.1": ((ONE, ONE), {"advantages": X}, TypeError, "did you mean loss_fn_inp"),
    "needs": (
        (ONE, ONE),
        {"loss_fn": "ppo", "loss_fn_inputs": {"logprobs": X}},
        TypeError,
        "ppo needs advantages",
    ),
    "dro": ((ONE, ONE), {"loss_fn": "dro", "loss_fn_inputs": DRAWN}, TypeError, "dro needs beta"),
    "beta": (
        (ONE, ONE),
        {"loss_fn": "dro", "loss_fn_inputs": DRAWN, "loss_fn_config": {"beta": "high"}},
        TypeError,
        "beta must be a number, 'high' came",
    ),
    "K of one": (
        (ONE, TWO),
        {"loss_fn": "ppo", "loss_fn_inputs": dict.fromkeys(DRAWN, X[:, None] * [1, 1])},
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
    "a short name": (
        {"lr": 1e-4},
        TypeError,
        r"'lr' \(did you mean learning_rate\?\); it takes le",
    ),
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
    "a set": (({1},), {}, TypeError, "prompt must be an array.*set came"),
    "an id": (([PROMPT, [VOCAB]],), {}, IndexError, "number 1 of 2.*position 0 is 304"),
    "samples": ((PROMPT,), {"num_samples": 0}, ValueError, "num_samples must be at least 1"),
    "too many": ((PROMPT,), {"num_samples": 2**40}, ValueError, "at least 1 and at most 65536"),
    "half": ((PROMPT,), {"num_samples": 1.5}, TypeError, "num_samples must be an integer"),
    "tokens": ((PROMPT,), {"max_tokens": 0}, ValueError, "max_tokens must be at least 1"),
    "cold": ((PROMPT,), {"temperature": -1}, ValueError, "temperature must be 0 or more"),
    "hot": ((PROMPT,), {"temperature": "hot"}, TypeError, "temperature must be a number, 'hot'"),
    "too hot": ((PROMPT,), {"temperature": 10**400}, TypeError, "temperature must be a number, 10"),
    "too long": ((PROMPT,), {"temperature": 10**5000}, TypeError, "a very long int came"),
    "top_p": ((PROMPT,), {"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\]"),
    "top_k": ((PROMPT,), {"top_k": 0}, ValueError, "top_k must be at least 1"),
    "a huge top_k": ((PROMPT,), {"top_k": -(2**70)}, ValueError, "top_k must be at least 1"),
    "topk": ((PROMPT,), {"topk_logprobs": VOCAB + 1}, ValueError, "must be 0 to 304"),
    "its old name": ((PROMPT,), {"topk": 5}, TypeError, "mean top_k or topk_logprobs"),
    "no argument": ((PROMPT,), {"temperatur": 5}, TypeError, r"mean temperature\?\); it takes pro"),
    "a short name": ((PROMPT,), {"n": 5}, TypeError, r"sample\(\) .* 'n' \(did you mean num_sampl"),
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


def test_what_other_libraries_call_an_argument_is_named(model, tiny_model_dir: Path) -> None:
    """`chat` said what was meant; everything else said "unexpected keyword argument"."""
    for call, wanted in (
        (
            lambda: model.lora(r=8),
            r"lora\(\) has no argument 'r' \(did you mean rank\?\); it takes rank",
        ),
        (lambda: model.lora(lora_alpha=8), r"did you mean alpha\?"),
        (lambda: model.logprobs(input_ids=[5]), r"'input_ids' \(did you mean tokens\?\)"),
        (lambda: model.sampler(n=2), r"sampler\(\) has no argument 'n'; it takes none"),
        (lambda: tinsmith.Model(tiny_model_dir, devise="cpu"), r"Model\(\) .* mean device\?\)"),
        (lambda: model.chat("Hi", max_new_tokens=2), "no chat template"),
    ):
        with pytest.raises((TypeError, ValueError), match=wanted):
            call()
    assert str(inspect.signature(tinsmith.Model.lora)).startswith("(self, *, rank: int = 32")


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


def test_weights_that_overflow_are_told_by_a_sentence_and_others_are_not_disturbed(model) -> None:
    good, bad = model.lora(rank=2, seed=1), model.lora(rank=2, seed=2)
    bad.core.write("weights", np.full(bad.size, 1e36, np.float32))
    expected = model.sampler().sample(PROMPT, adapter=good, max_tokens=4, seed=3)[0].tokens
    for call in (
        lambda: model.sampler().sample(PROMPT, adapter=bad, max_tokens=4, seed=3),
        lambda: model.logprobs(PROMPT, adapter=bad),
        lambda: bad.forward_backward(PROMPT, PROMPT),
    ):
        with pytest.raises(FloatingPointError, match=r"sums overflow|not finite"):
            call()
    again = model.sampler().sample(PROMPT, adapter=good, max_tokens=4, seed=3)[0].tokens
    np.testing.assert_array_equal(again, expected)
    assert np.isfinite(model.logprobs(PROMPT)).all()


def test_log_probabilities_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    """Even where no loss counts them. The weights are finite, and sums of them are not."""
    tensors = tiny.tensors()
    tensors["lm_head.weight"] *= np.float32(1e38)
    tensors["model.norm.weight"] *= np.float32(1e20)
    safetensors_io.write(
        tiny.make(tmp_path / "m") / safetensors_io.SINGLE_FILE, tensors, {"format": "pt"}
    )
    model = tinsmith.Model(tmp_path / "m", device="cpu", threads=1)
    adapter, ids = model.lora(rank=1, seed=1), np.arange(9)
    before = state(adapter)
    for call in (
        lambda: adapter.forward(ids, ids),
        lambda: adapter.forward_backward(ids, ids, np.zeros(9)),
        lambda: model.logprobs(ids, adapter=adapter),
    ):
        with pytest.raises(FloatingPointError, match="not numbers here: its weights"):
            call()
        assert state(adapter) == before


@pytest.mark.parametrize("old, new", RENAMED.items())
def test_a_method_that_was_renamed_is_refused_with_its_new_name(adapter, old, new) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{old}': Adapter.{new} is its name"):
        getattr(adapter, old)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = adapter.nothing
    assert not hasattr(adapter.history, old)
