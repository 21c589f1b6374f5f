"""Calls of the in-process API as type checkers see them; test_types.py checks this file.

Each call has the type that assert_type says. What `type: ignore` marks is an error, and a checker
that finds none there says so. Nothing here is run.
"""

from typing import Any, assert_type

import numpy as np
import tinsmith
from numpy.typing import NDArray


class Tensor:
    """Another library's array, with the methods as torch's has them."""

    def __dlpack__(self, *, stream: int | None = -1, copy: bool | None = None) -> object:
        raise NotImplementedError

    def __dlpack_device__(self) -> tuple[int, int]:
        raise NotImplementedError


def trains(
    adapter: tinsmith.Adapter, row: NDArray[np.int32], tensor: Tensor, numbers: list[float]
) -> None:
    one = adapter.forward_backward(row, row, numbers)
    assert_type(one, tinsmith.ForwardBackwardOutput[Any])
    several = adapter.forward_backward([row, row], [row, row])
    assert_type(several, tinsmith.ForwardBackwardOutput[list[Any]])
    assert_type(several.logprobs, list[Any])
    assert_type(several.loss, float)
    assert_type(adapter.forward_backward([1, 2], [2, 3]), tinsmith.ForwardBackwardOutput[Any])
    assert_type(
        adapter.forward_backward([[1, 2], [3]], [[2, 3], [4]]),
        tinsmith.ForwardBackwardOutput[list[Any]],
    )
    adapter.forward_backward(tensor, [[2, 3], [4, 5]], [[1.0, 0.5], [0.0, 1.0]])
    adapter.forward_backward((tensor, row), [tensor, row])
    adapter.forward_backward(row, row, row > 5)
    adapter.forward_backward(
        row, row, loss_fn="ppo", loss_fn_inputs={"logprobs": tensor, "advantages": numbers}
    )
    adapter.forward_backward(row, row, loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.9})
    adapter.forward_backward([row], [row], loss_fn="ppo", loss_fn_inputs={"logprobs": [tensor]})
    assert_type(adapter.forward([row], [row]), list[Any])
    adapter.backward([tensor, tensor])
    step = adapter.optim_step(1e-3, grad_accumulation_normalization="num_sequences")
    assert_type(step.grad_norm, float)

    adapter.forward_backward(row, row, loss_fn="pppo")  # type: ignore[call-overload]
    adapter.forward_backward(row, row, advantage=numbers)  # type: ignore[call-overload]
    adapter.forward_backward("a text", row)  # type: ignore[arg-type]
    wrong = {"beta": "high"}
    adapter.forward_backward(row, row, loss_fn_config=wrong)  # type: ignore[arg-type]
    adapter.forward_backward([row, row], 3)  # type: ignore[call-overload]
    adapter.optim_step(grad_accumulation_normalization="mean")  # type: ignore[arg-type]


def distils(adapter: tinsmith.Adapter, model: tinsmith.Model, row: NDArray[np.int32]) -> None:
    one = adapter.generalized_jsd(row, row, row, row, teacher=model, top_k=5)
    assert_type(one, tinsmith.DistillOutput[Any])
    several = adapter.generalized_jsd([row], [row], [row], [row], teacher=adapter)
    assert_type(several.divergences, list[Any])
    top = model.topk_logprobs(row, 5, adapter=adapter)
    assert_type(top, tinsmith.TopKLogprobs)
    adapter.generalized_jsd_topk(row, top.ids, row, top.logprobs)


def samples(model: tinsmith.Model, row: NDArray[np.int32], tensor: Tensor) -> None:
    sampler = model.sampler()
    for prompt in (row, tensor, [1, 2], "a text"):
        assert_type(sampler.sample(prompt), list[tinsmith.SampledSequence])
    assert_type(sampler.sample("a text"), list[tinsmith.SampledSequence])
    assert_type(sampler.sample(["a text"]), list[list[tinsmith.SampledSequence]])
    assert_type(sampler.sample([[1, 2], [3]]), list[list[tinsmith.SampledSequence]])
    assert_type(sampler.sample([row, row]), list[list[tinsmith.SampledSequence]])
    [answer] = sampler.sample(tensor, top_k=50, topk_logprobs=5, stop=["\n"], seed=3)
    assert_type(answer.text, str)
    assert_type(model.logprobs([row, row]), list[Any])
    assert_type(model.topk_logprobs(["a", "b"], 3), list[tinsmith.TopKLogprobs])

    sampler.sample(row, topk=5)  # type: ignore[call-overload]
    sampler.sample(3)  # type: ignore[call-overload]
    model.topk_logprobs(row)  # type: ignore[call-overload]


def talks(model: tinsmith.Model) -> None:
    answer = model.chat([{"role": "user", "content": "Hello"}], enable_thinking=False)
    seen = {"type": "image", "image": model.image("photo.png")}
    model.chat([{"role": "user", "content": [seen, {"type": "text", "text": "What is it?"}]}])
    assert_type(answer, tinsmith.ChatAnswer)
    assert_type(answer.message, dict[str, Any])
    tokenizer = model.tokenizer
    assert_type(tokenizer.encode("a"), list[int])
    assert_type(tokenizer.encode(["a"]), list[list[int]])
    assert_type(tokenizer.decode([1, 2]), str)
    assert_type(tokenizer.decode([[1], [2]]), list[str])
    assert_type(tokenizer.apply_chat_template("a"), list[int])
    assert_type(tokenizer.apply_chat_template("a", tokenize=False), str)

    model.chat(5)  # type: ignore[arg-type]


def ends() -> None:
    with tinsmith.Model("a folder") as model, model.lora(rank=2) as adapter:
        assert_type(model, tinsmith.Model)
        assert_type(adapter.snapshot(), tinsmith.Adapter)
    assert_type(tinsmith.__version__, str)
    model.lora(8)  # type: ignore[call-arg]
