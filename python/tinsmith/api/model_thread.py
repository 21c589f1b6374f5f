"""A loaded model with the thread that owns it, shared by Model, Adapter and Sampler."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tinsmith import _core
from tinsmith.api.turns import Turns
from tinsmith.engine.decoding import Decoder, Listener, SampleRequest, SampleResult
from tinsmith.engine.errors import RequestError
from tinsmith.files.families import LoadedModel

if TYPE_CHECKING:
    from tinsmith.api.progress import Report


class ModelThread:
    """One base model, and the turns that calls on it take."""

    def __init__(self, loaded: LoadedModel):
        self.loaded = loaded
        self.turns = Turns()
        self._decoder = Decoder()

    def decode(
        self,
        requests: Sequence[SampleRequest],
        adapter: _core.Adapter | None,
        report: "Report | None" = None,
        listener: Listener | None = None,
    ) -> list[SampleResult]:
        """Runs sampling requests together until all are done, in one turn: all of them or none. The
        listener hears of each token, in the model's own thread."""
        futures: list[Future[SampleResult]] = [Future() for _ in requests]
        stopped = threading.Event()

        def work() -> None:
            try:
                if not self._decoder.is_open(self.loaded):
                    self._decoder.open(self.loaded)
                for index, (request, future) in enumerate(zip(requests, futures, strict=True)):
                    with _named(index, len(requests)):
                        self._decoder.add(self.loaded, adapter, request, future, listener=listener)
                while self._decoder.active and not stopped.is_set():
                    self._decoder.step()
            finally:
                for future in futures:
                    self._decoder.cancel(future)

        def interrupt() -> None:
            stopped.set()
            self._decoder.interrupt()

        def tick() -> None:
            if report is not None:
                report(sum(future.done() for future in futures), len(futures))

        self.turns.take(work, interrupt=interrupt, tick=tick if report else None)
        return [_result(future) for future in futures]


class Handle:
    """The common part of Model and Adapter. `core` is the engine's own object, for advanced use:
    one thread at a time may use it."""

    engine: ModelThread
    core: Any


@contextmanager
def _named(index: int, count: int) -> Iterator[None]:
    """Adds the number of the request to an error, if there are several requests."""
    try:
        yield
    except (ValueError, IndexError) as error:
        if count == 1:
            raise
        raise type(error)(f"number {index} of {count}: {error}") from None


def _result(future: "Future[SampleResult]") -> SampleResult:
    """A request's result. An error is raised as the engine raised it, not as a RequestError."""
    try:
        return future.result()
    except RequestError as error:
        raise (error.__cause__ or error) from None
