"""A checked custom loss, evaluated and differentiated by torch, datum by datum.

A node's function was looked up when the graph was checked; it gets the results of the nodes before
it, and nothing else. Two limits bound the memory: the numbers that a datum's results hold, and
functions.py's limit on each. The numbers that the nodes of a request read and write count as work;
a limit on it bounds the time.

Tensors are on the CPU and have the types that the client's torch would give them: float32 for
logprobs and other numbers, int64 for integers. A loss runs on one thread: torch's threads would
take the cores of the engine's, and their number would change the order of a sum.
"""

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tinsmith.custom_losses.functions import look, multiplications, numbers, plain, tensors_in
from tinsmith.custom_losses.graph import CustomLoss, Evaluation, Ref
from tinsmith.system.steps import Steps

HELD_MAX = 1 << 26  # numbers that one datum's results hold
WORK_MAX = 1 << 31  # numbers that the nodes of a request read and write
TRIED_MAX = 1 << 24  # the same limit for the trial when a loss is uploaded
MEANWHILE_SECONDS = 0.02  # of work while others wait
CALL = 1_000  # cost of a call itself, in numbers
SENTENCE_MAX = 300  # characters of torch's error message
PLACE = re.compile(r"^\S+\.(cpp|h):\d+: ")  # in torch's sources, at the start of a message

_own = threading.local()


class Unsupported(ValueError):
    """A call that fails for every datum."""


class _Budget:
    """Counts down the numbers that a request's nodes may still read and write."""

    def __init__(self, most: int) -> None:
        self.most = self.left = most

    def spend(self, count: int) -> None:
        """Raises ValueError when it is used up."""
        self.left -= count
        if self.left < 0:
            raise ValueError(f"the loss takes more than {self.most} numbers of work in one request")


class _Held:
    """Counts the numbers that a datum's results and autograd hold, each storage once."""

    def __init__(self) -> None:
        self._count = 0
        self._known: set[int] = set()

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor; ValueError if too much is held."""
        memory = tensor.untyped_storage().data_ptr()
        if memory not in self._known:
            self._known.add(memory)
            self._count += numbers(tensor)
        if self._count > HELD_MAX:
            raise ValueError(f"the loss holds more than {HELD_MAX} numbers")
        return tensor


def evaluate(
    loss: CustomLoss,
    logprobs: Sequence[NDArray[np.float32]],
    inputs: Sequence[Sequence[NDArray[Any]]],
) -> Steps[Evaluation]:
    """The loss of some datums; see custom_loss.evaluate."""
    _alone()
    budget, total, gradients = _Budget(WORK_MAX), 0.0, []
    sums = dict.fromkeys(loss.metrics, 0.0)
    count, last = len(logprobs), time.monotonic()
    for index, (logp, others) in enumerate(zip(logprobs, inputs, strict=True)):
        where = f"custom loss {loss.name!r}, datum {index}"
        x = _tensor(logp).requires_grad_()
        results: dict[str, Any] = {}
        for _ in _run(loss, [x, *map(_tensor, others)], budget, where, results):
            if time.monotonic() - last > MEANWHILE_SECONDS:
                yield index, count
                last = time.monotonic()
        value = results[loss.loss.name]
        if not isinstance(value, torch.Tensor) or value.ndim:
            shape = tuple(value.shape) if torch.is_tensor(value) else type(value).__name__
            raise ValueError(f"{where}: the loss must be a scalar tensor, {shape} came")
        gradients.append(_gradient(value, x, where))
        total += value.item()
        for key, ref in loss.metrics.items():
            sums[key] += _metric(results[ref.name], f"{where}: the metric {key}")
    metrics = {
        key: value / count if key.endswith(":mean") else value for key, value in sums.items()
    }
    return Evaluation(total, tuple(gradients), metrics)


def attempt(loss: CustomLoss) -> None:
    """Runs a graph on small inputs: first floats, then integers beside logprobs. ValueError says
    why neither works."""
    _alone()
    shapes, told = {0: (), 1: (6,), 2: (6, 3)}, set()
    for dtype in (torch.float32, torch.int64):
        x, *others = (torch.full(shapes[rank], -1.0) for _, rank in loss.inputs)
        inputs = [x.requires_grad_(), *(item.to(dtype) for item in others)]
        try:
            for _ in _run(loss, inputs, _Budget(TRIED_MAX), f"custom loss {loss.name!r}", {}):
                pass
            return
        except Unsupported as error:
            told.add(str(error))
        except ValueError:
            return  # it may fit the real inputs
    if len(told) == 1:
        raise ValueError(told.pop())


def _alone() -> None:
    """Sets torch to one thread in this thread only: torch uses the last number that was set for
    threads that start later, so another thread sets it back."""
    if not hasattr(_own, "alone"):
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        other = threading.Thread(target=torch.set_num_threads, args=(before,))
        other.start()
        other.join()
        _own.alone = True


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """A copy, in the type that the SDK's to_torch gives."""
    return torch.tensor(array, dtype=torch.float32 if array.dtype.kind == "f" else torch.int64)


def _run(
    loss: CustomLoss,
    inputs: Sequence[torch.Tensor],
    budget: _Budget,
    where: str,
    results: dict[str, Any],
) -> Iterator[None]:
    """Computes the results of all nodes, by name; yields after each."""
    results.update(zip(loss.placeholders, inputs, strict=True))
    held = _Held()
    hooks = torch.autograd.graph.saved_tensors_hooks(held.saved, lambda tensor: tensor)
    for node in loss.nodes:
        args = [_resolve(value, results) for value in node.args]
        kwargs = {key: _resolve(value, results) for key, value in node.kwargs.items()}
        try:
            if node.group in ("sized", "new"):
                args, kwargs = plain(node.group, args), plain(node.group, kwargs)
            budget.spend(CALL + look(node.group, node.run, args, kwargs))
            with torch.enable_grad(), hooks:
                result = node.run(*args, **kwargs)
            made = sum(map(numbers, tensors_in(result)))
            for tensor in tensors_in(result):
                held.saved(tensor)
            factors = tensors_in([args, kwargs]) if node.group == "multiplies" else []
            budget.spend(made if len(factors) < 2 else multiplications(*factors[:2], result))
        except Exception as error:
            raise _refusal(error, f"{where}, node {node.name!r} ({node.says})") from None
        results[node.name] = result
        yield


def _refusal(error: Exception, where: str) -> Exception:
    """Torch's error, without its list of other possible calls."""
    said = PLACE.sub("", (str(error).splitlines() or [type(error).__name__])[0])
    if isinstance(error, MemoryError) or "can't allocate memory" in said:
        return MemoryError(f"{where}: there is not enough memory")
    kind = Unsupported if isinstance(error, TypeError) else ValueError
    return kind(f"{where}: {said.removesuffix(', but expected one of:')[:SENTENCE_MAX]}")


def _resolve(value: Any, results: Mapping[str, Any]) -> Any:
    """An argument, with each Ref replaced by its result."""
    if isinstance(value, Ref):
        return results[value.name]
    if isinstance(value, tuple | list):
        return type(value)(_resolve(item, results) for item in value)
    if isinstance(value, dict):
        return {key: _resolve(item, results) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_resolve(part, results) for part in (value.start, value.stop, value.step)))
    return value


def _gradient(loss: torch.Tensor, x: torch.Tensor, where: str) -> NDArray[np.float32]:
    if not torch.isfinite(loss):
        raise FloatingPointError(f"{where}: the loss is {loss.item()}; nothing was added")
    found = None
    if loss.requires_grad:
        try:
            (found,) = torch.autograd.grad(loss, x, allow_unused=True)
        except Exception as error:
            raise _refusal(error, where) from None
    if found is None:
        raise ValueError(f"{where}: the loss has no gradient: it does not depend on logprobs")
    exact = np.ascontiguousarray(found.numpy(force=True))
    bad = np.argwhere(~np.isfinite(exact))
    if len(bad):
        at = ", ".join(map(str, bad[0]))
        raise FloatingPointError(
            f"{where}: the gradient of logprobs[{at}] is {exact[tuple(bad[0])]}; nothing was added"
        )
    return exact


def _metric(value: Any, where: str) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.item())
    if isinstance(value, bool | int | float):
        return float(value)
    raise ValueError(f"{where} must be a scalar")
