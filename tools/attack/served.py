"""What the attack programs on the server share: a server on the demonstration's model, a client
that means well and must get the same bits throughout, and what the server may have kept at the
end."""

import contextlib
import gc
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinsmith.demo.demo import MODEL
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

from tools.attack.common import Failure

SECONDS = 50.0  # for an answer; a machine under load is slow
MEMORY_BYTES = 300 << 20  # that the process may have grown by at the end: allocators keep some
DESCRIPTORS = 16  # that may be left: the SDK's own clients keep some


def datum(length: int, width: int = 0, seed: int = 0) -> tinker.Datum:
    """Some ids and targets, (length,) or (length, width)."""
    rng = np.random.default_rng(seed)
    shape = (length, width) if width else (length,)
    inputs: dict[str, Any] = {
        "target_tokens": rng.integers(3, 200, shape),
        "weights": np.ones(shape, np.float32),
    }
    tokens = tinker.ModelInput.from_ints(rng.integers(3, 200, length).tolist())
    return tinker.Datum(model_input=tokens, loss_fn_inputs=inputs)


class Clean:
    """A client that asks the same again and again."""

    def __init__(self, backend: Backend):
        self._service = backend.service_client(api_key="tml-clean")
        self.training = self._service.create_lora_training_client("m", rank=2, seed=7).result()
        self._sampler = self._service.create_sampling_client(base_model="m").result()
        self._expected = self._ask()

    def _ask(self) -> list[bytes]:
        data = [datum(6, seed=5), datum(4, seed=6)]
        output = self.training.forward(data, "cross_entropy").result(timeout=SECONDS)
        found = [item["logprobs"].to_numpy().tobytes() for item in output.loss_fn_outputs]
        params = tinker.SamplingParams(max_tokens=5, seed=11, stop=[])
        prompt = tinker.ModelInput.from_ints([9, 8, 7])
        drawn = self._sampler.sample(prompt, 2, params).result(timeout=SECONDS)
        for sequence in drawn.sequences:
            found.append(str((list(sequence.tokens), sequence.logprobs)).encode())
        return found

    def check(self) -> None:
        """Failure unless it gets what it got at first."""
        try:
            if self._ask() != self._expected:
                raise Failure("the clean client got other bits than before")
        except TimeoutError:
            raise Failure(f"the clean client got no answer in {SECONDS:g} s") from None

    def close(self) -> None:
        """Ends its session."""
        self._service.close("success").result()


@contextlib.contextmanager
def served(**options: Any) -> Iterator[tuple[Backend, Clean]]:
    """A server and its clean client; Failure at the end if something was kept."""
    with tempfile.TemporaryDirectory() as folder:
        descriptors = _descriptors()
        with Backend(
            ServerConfig({"m": MODEL}, checkpoints=Path(folder), device="cpu", threads=1, **options)
        ) as backend:
            clean = Clean(backend)
            before = _memory()
            yield backend, clean
            clean.check()
            clean.close()
            _settle(backend)
        gc.collect()
        grown, left = _memory() - before, _descriptors() - descriptors
        if grown > MEMORY_BYTES:
            raise Failure(f"the server's process has grown by {grown >> 20} MiB")
        if left > DESCRIPTORS:
            raise Failure(f"{left} descriptors are left")


def _settle(backend: Backend) -> None:
    """Waits until nothing waits in the server."""
    end = time.monotonic() + SECONDS
    while True:
        left = backend.queue.bytes, backend.queue.count, backend._service.arrivals.bytes
        if not any(left):
            return
        if time.monotonic() > end:
            raise Failure(f"the server still counts {left} bytes and requests")
        time.sleep(0.05)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _memory() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
