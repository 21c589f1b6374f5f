"""A loaded model with the thread that owns it, shared by Model, Adapter and Sampler."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Generic, Self, TypeVar
from weakref import WeakSet

from tinsmith import _core
from tinsmith.api.call_thread import CLOSED, CallThread
from tinsmith.api.images import has_image
from tinsmith.api.progress import Report, last_report
from tinsmith.api.replicas import ModelReplicas
from tinsmith.api.results import Public
from tinsmith.api.tokenizer import Tokenizer
from tinsmith.engine.decoding import Decoder, SampleRequest, SampleResult, TokenListener
from tinsmith.engine.errors import RequestError
from tinsmith.engine.shared_call import PartResult, compute_part
from tinsmith.engine.training import Batch
from tinsmith.models.registry import LoadedModel
from tinsmith.system.steps import Steps

Core = TypeVar("Core")


class ModelThread:
    """One base model, and the thread that makes its calls."""

    def __init__(self, loaded: LoadedModel, title: str, replicas: ModelReplicas | None = None):
        self.title, self._replicas = title, replicas  # the title is the model's name in a repr
        self.thread = CallThread()
        self._loaded: LoadedModel | None = loaded
        self._path = loaded.path
        self._decoder = Decoder()
        self._handles: WeakSet[Handle[Any]] = WeakSet()

    @property
    def loaded(self) -> LoadedModel:
        """The model; ValueError once it is closed."""
        if self._loaded is None:
            raise ValueError(CLOSED)
        return self._loaded

    @property
    def closed(self) -> bool:
        """Whether the model's memory was freed."""
        return self._loaded is None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. It also works after `close`."""
        return Tokenizer(self._path, self.title)

    def ids(self, prompt: Any) -> Any:
        """A text's ids, with the tokenizer's own special tokens; those of the texts beside images,
        without; anything else unchanged."""
        if has_image(prompt):
            encode = partial(self.tokenizer.encode, add_special_tokens=False)
            return [encode(part) if isinstance(part, str) else part for part in prompt]
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def add(self, handle: "Handle[Any]") -> None:
        """Registers a handle, for `close` to drop."""
        self._handles.add(handle)

    def close(self) -> None:
        """Drops the model, its cache and its adapters, in the thread."""

        def work() -> None:
            if self._replicas is not None:
                self._replicas.close()
            self._decoder, self._loaded = Decoder(), None
            for handle in list(self._handles):
                handle._drop()

        with self.unless_closed():
            self.thread.run(work)
            self.thread.close()

    @contextmanager
    def unless_closed(self) -> Iterator[None]:
        """Ignores the error if another thread has closed the model meanwhile."""
        try:
            yield
        except ValueError:
            if not self.closed:
                raise

    def stop_waiting(self) -> None:
        """Ends a call's wait for replicas; from any thread."""
        if self._replicas is not None:
            self._replicas.stopped.set()

    def train(
        self,
        core: _core.Adapter,
        batch: Batch,
        teacher: _core.Adapter | _core.Model | None = None,
    ) -> Steps[PartResult]:
        """A training call, in the model's thread."""
        if self._replicas is None:
            return compute_part(core, batch.request(core, True), teacher)
        return self._replicas.train(core, batch, teacher)

    def decode(
        self,
        requests: Sequence[SampleRequest],
        adapter: _core.Adapter | None,
        report: Report | None = None,
        listener: TokenListener | None = None,
    ) -> list[SampleResult]:
        """Runs sampling requests together until all are done, in one turn: all succeed or none. The
        listener is called for each token, in the model's own thread."""
        futures: list[Future[SampleResult]] = [Future() for _ in requests]
        stopped = threading.Event()

        def work() -> None:
            try:
                if not self._decoder.is_open(self.loaded):
                    self._decoder.open(self.loaded)
                if self._replicas is not None and listener is None:
                    self._replicas.decode(self._decoder, self.loaded, adapter, requests, futures)
                    return
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
            self.stop_waiting()
            self._decoder.interrupt()

        def tick() -> None:
            if report is not None:
                report(sum(future.done() for future in futures), len(futures))

        self.thread.run(work, interrupt=interrupt, tick=tick if report else None)
        if report is not None:
            last_report(report, len(futures), "sample")
        return [_result(future) for future in futures]


class Handle(Public, Generic[Core]):
    """The common part of Model and Adapter."""

    def __init__(self, engine: ModelThread, core: Core):
        self.engine = engine
        self._core: Core | None = core
        engine.add(self)

    @property
    def core(self) -> Core:
        """The engine's own object, for advanced use: one thread at a time may use it."""
        core, _ = self._core, self.engine.loaded  # ValueError if the model is closed
        if core is None:
            raise ValueError("the adapter is closed: load it again, or make a new one")
        return core

    @property
    def closed(self) -> bool:
        """Whether its memory was freed.

        Examples
        --------
        >>> model.closed, adapter.closed
        (False, False)
        """
        return self._core is None

    def _drop(self) -> None:
        """Drops the engine's object, in the model's thread."""
        self._core = None

    def close(self) -> None:
        """Frees its memory. A running call ends first. Using it afterwards raises ValueError.

        Closing twice does nothing. In a `with` statement it is closed at the end.

        Examples
        --------
        >>> with model.lora(rank=2) as adapter:
        ...     score = adapter.forward([55, 73], [73, 327])
        >>> adapter
        <tinsmith.Adapter, closed>
        """
        if not self.closed:
            with self.engine.unless_closed():
                self.engine.thread.run(self._drop)

    def __enter__(self) -> Self:
        self.core  # noqa: B018 - what is closed can't be entered
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def _named(index: int, count: int) -> Iterator[None]:
    """Adds the request's index to an error if there are several requests."""
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
