"""tinsmith.Model: a base model in this process, for training loops in a notebook or a script.

    model = tinsmith.Model("path/to/Qwen3-0.6B")
    adapter = model.lora(rank=32)
    [answer] = model.sampler().sample(prompt, adapter=adapter, max_tokens=100)
    teacher = model.topk_logprobs(demonstration + answer, 20)
    adapter.forward_backward(tokens[:-1], targets, weights)
    adapter.optim_step(learning_rate=1e-4)

Token ids in, token ids out: you tokenize. Names, losses and defaults are Tinker's. The same calls
through `tinsmith.serve` give the same bits. Calls from several threads take turns (call_thread.py);
Ctrl-C ends the running call.
"""

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex, overload

from tinsmith import _core
from tinsmith.api import datums
from tinsmith.api.adapter import Adapter, core_of
from tinsmith.api.answers import AnswerReader
from tinsmith.api.conversations import read_prompt
from tinsmith.api.images import Image, images_of, is_batch, read_image
from tinsmith.api.kinds import Prompt, SomePrompt
from tinsmith.api.model_thread import Handle, ModelThread
from tinsmith.api.progress import Progress, reporting
from tinsmith.api.replicas import ModelReplicas
from tinsmith.api.results import ChatAnswer, TopKLogprobs
from tinsmith.api.sampler import Sampler, Stop, drawing, ending_of, seeds, values
from tinsmith.api.tokenizer import Messages, Tokenizer, as_messages, check_settings
from tinsmith.chat.chat import Tools
from tinsmith.checkpoints import peft
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.meta import Meta
from tinsmith.checkpoints.optimizers import optimizer_of
from tinsmith.engine.decoding import SampleRequest, SampleResult
from tinsmith.engine.devices import choose_device
from tinsmith.models.registry import find_model, load_model, load_tower
from tinsmith.ops import tensors
from tinsmith.replicas.local import divide, replicas_from

SEED_BITS = 63


class Model(Handle[_core.Model]):
    """A frozen base model, loaded from a Hugging Face folder or a GGUF file.

    Parameters
    ----------
    name : str or Path
        A folder, a file, or the name of a model in the Hugging Face cache.
    device : str
        "auto", "cpu" or "cuda[:n]"; "cpu-bf16" and "cpu-int16" force the product's precision.
    stages : int
        How many devices hold the model, each a part of its layers: 4 takes four GPUs, this device
        first. The results are the same. It gives room, not speed.
    threads : int
        0 takes all cores.
    dtype : {"auto", "float32", "bfloat16"}
        The type of products with base weights. "auto" is bfloat16 for a bfloat16 model where that
        is faster on this processor. Otherwise it is float32, but weights of 8 to 4 bits (not FP8
        and NF4) take inputs rounded to 16 bits.
    weights : {"stored", "bf16", "int8", "int4"}
        How base weights are stored: as in the file, in bf16, or quantised to blocks of 8 or 4 bits
        with a scale. Quantised weights give other results.
    weights_copy : bool
        Whether quantised weights of a large model are kept in the user's cache, for later loads.
    replicas : int or "auto"
        How many processes compute, this one among them: each has a GPU (or as many as there are
        stages), or its share of the cores.
        "auto" takes all GPUs of the device's kind. Training calls and lists of prompts are shared;
        the results are the same. They end with `close`, or with this process.
    progress : bool or function
        True draws a bar with tqdm. A function is called with (bytes loaded, bytes in all).

    Raises
    ------
    FileNotFoundError, ValueError
        If the model can't be loaded.
    RuntimeError
        If the device can't be used, or a replica would give other results.
    MemoryError
        If the model does not fit.

    Examples
    --------
    >>> model = tinsmith.Model("path/to/Qwen3-0.6B", device="cpu")
    >>> model.chat("What time is it?", max_tokens=8).message["role"]
    'assistant'
    """

    def __init__(
        self,
        name: str | Path,
        *,
        device: str = "auto",
        stages: int = 1,
        threads: int = 0,
        dtype: str = "auto",
        weights: str = "stored",
        weights_copy: bool = True,
        replicas: int | str = 1,
        progress: Progress = False,
    ):
        folder = find_model(str(name), {})
        chosen = choose_device(device, threads, stages)
        shares = divide(replicas_from(replicas), chosen, threads)
        others = None
        if len(shares) > 1:
            others = ModelReplicas(
                folder, shares, dtype=dtype, weights=weights, weights_copy=weights_copy
            )
        with reporting(progress, f"loading {folder.name}", unit="B") as report:
            loaded = load_model(
                folder,
                device=chosen,
                dtype=dtype,
                weights=weights,
                weights_copy=weights_copy,
                threads=shares[0].threads,
                report=report,
            )
        if others is not None:
            others.join(loaded, chosen)
        self._name = str(name)
        super().__init__(ModelThread(loaded, Path(name).name or folder.name, others), loaded.core)

    @property
    def name(self) -> str:
        """The folder or name that the model was loaded by.

        Examples
        --------
        >>> model.name
        'path/to/Qwen3-0.6B'
        """
        return self._name

    @property
    def path(self) -> Path:
        """The folder of the model, and of its tokenizer; a GGUF file's is in the user's cache.

        Examples
        --------
        >>> (model.path / "config.json").is_file()
        True
        """
        return self.engine.loaded.path

    @property
    def device(self) -> str:
        """The device, and the type of its products if that is not float32.

        Examples
        --------
        >>> model.device in ("cpu", "cpu-bf16", "cpu-int16")
        True
        """
        return self.core.device

    @property
    def context(self) -> int:
        """The maximum length of a sequence, in tokens.

        Examples
        --------
        >>> model.context
        2048
        """
        return self.engine.loaded.context

    @property
    def vocab(self) -> int:
        """Token ids are from 0 to vocab - 1.

        Examples
        --------
        >>> model.vocab
        1217
        """
        return self.engine.loaded.vocab

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer and chat template; needs the package tokenizers.

        Examples
        --------
        >>> model.tokenizer.encode("What time is it?")
        [417, 411, 311, 409, 30]
        """
        return self.engine.tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a sampled sequence, unless `stop` says otherwise.

        Examples
        --------
        >>> model.eos_ids
        (1210,)
        """
        return self.engine.loaded.eos_ids

    def __repr__(self) -> str:
        if self.closed:
            return f"<tinsmith.Model {self.engine.title}, closed>"
        layers, width = (self.core.config[key] for key in ("layers", "width"))
        sizes = f"{layers} layers, width {width}, vocab {self.vocab}, context {self.context}"
        return f"<tinsmith.Model {self.engine.title}: {sizes}, on {self.device}>"

    def close(self) -> None:
        """Frees the memory of the model, and of all adapters and samplers made from it.

        A running call ends first. Afterwards, using any of them raises ValueError. Closing twice
        does nothing. `with tinsmith.Model(…) as model:` closes at the end.

        Examples
        --------
        >>> with tinsmith.Model("path/to/Qwen3-0.6B", device="cpu") as other:
        ...     scores = other.logprobs("What time is it?")
        >>> other
        <tinsmith.Model Qwen3-0.6B, closed>
        """
        self.engine.close()

    def image(self, source: Any) -> Image:
        """An image for the model's prompts and training sequences, where it stands among the ids.

        Its rows are tokens like others: they count in lengths and limits, and targets at them are
        ids with the weight 0. The first image loads the vision tower.

        Parameters
        ----------
        source : str, Path, bytes, or PIL.Image.Image
            A PNG or JPEG file, its bytes, or an image of Pillow.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is no such image, or the model has no vision tower.
        RuntimeError
            If the package pillow is not installed.

        Examples
        --------
        >>> seeing = tinsmith.Model("path/to/Qwen3.5-0.8B", device="cpu")
        >>> photo = seeing.image("photo.png")
        >>> prompt = ["What is on ", photo, "?"]
        >>> [answer] = seeing.sampler().sample(prompt, max_tokens=5, stop=[])
        >>> len(answer.tokens)
        5
        >>> seeing.logprobs([1, 2, photo, 3]).shape  # 0 where the token is an image's
        (8,)
        """
        loaded = self.engine.loaded
        image = read_image(source, loaded)
        self.engine.thread.run(lambda: load_tower(loaded))
        return image

    def lora(
        self,
        *,
        rank: int = 32,
        alpha: float = 32.0,
        seed: int | None = None,
        attn: bool = True,
        mlp: bool = True,
        unembed: bool = True,
        optimizer: str = "adamw",
    ) -> Adapter:
        """A new LoRA adapter. It changes nothing until it is trained: B is zero.

        Parameters
        ----------
        rank : int
            From 1.
        alpha : float
            The scale is alpha / rank.
        seed : int, optional
            The seed of the random A; None: a new one each time.
        attn, mlp, unembed : bool
            Which matrices get LoRA.
        optimizer : {"adamw", "dimuon"}
            Which optimizer trains it.

        Raises
        ------
        ValueError
            If the rank is below 1, no matrix is chosen, or the optimizer is unknown.

        References
        ----------
        LoRA: Hu et al., arXiv:2106.09685.

        Examples
        --------
        >>> model.lora(rank=16, unembed=False).rank
        16
        """
        rank, alpha = tensors.to_integer(rank, "rank"), tensors.to_number(alpha, "alpha")
        if seed is None:
            seed = secrets.randbits(SEED_BITS)
        seed = tensors.to_integer(seed, "seed") % (1 << SEED_BITS)
        attn, mlp, unembed = bool(attn), bool(mlp), bool(unembed)
        optimizer_of(optimizer)
        lora = LoraSpec(rank, seed, attn, mlp, unembed, alpha, optimizer)
        core = self.engine.thread.run(lambda: lora.adapter(self.core))
        meta = Meta(
            base_model=self.name,
            **dataclasses.asdict(dataclasses.replace(lora, alpha=core.alpha)),
            kind="weights",
            step=0,
            user_metadata={},
            created=datetime.now(UTC).isoformat(),
            ttl_seconds=None,
        )
        return Adapter(self.engine, core, meta)

    def load_lora(self, path: str | Path, *, optimizer: bool = False) -> Adapter:
        """An adapter from a folder: one of our checkpoints, or one that PEFT has saved.

        Parameters
        ----------
        path : str or Path
            The folder.
        optimizer : bool
            Also load its moments and step, and gradients not yet used, so that training continues
            bit for bit.

        Raises
        ------
        FileNotFoundError, ValueError
            The message says what is missing or does not fit.

        Examples
        --------
        >>> adapter.save("my-adapter")
        >>> resumed = model.load_lora("my-adapter", optimizer=True)
        """
        folder = Path(path).expanduser()
        found = self.engine.thread.run(
            lambda: peft.load(folder, self.engine.loaded, optimizer=optimizer)
        )
        return Adapter(self.engine, found.adapter, found.meta)

    def sampler(self) -> Sampler:
        """A Sampler that draws sequences from the model and its adapters.

        Examples
        --------
        >>> [answer] = model.sampler().sample("What time is it?", max_tokens=5)
        """
        return Sampler(self.engine)

    def chat(
        self,
        messages: Messages,
        *,
        adapter: Adapter | None = None,
        tools: Tools | None = None,
        max_tokens: SupportsIndex | None = None,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex = -1,
        top_p: SupportsFloat = 1.0,
        seed: SupportsIndex | None = None,
        stop: Stop = None,
        on_text: Callable[[str], object] | None = None,
        **settings: Any,
    ) -> ChatAnswer:
        """The assistant's answer to a conversation, through the model's chat template.

        Parameters
        ----------
        messages : list of dict, or str
            role and content of each, as OpenAI and transformers have them; a str is a user's
            message. A content may be a list of parts: {"type": "text", "text": …}, and images as
            {"type": "image", "image": …}, of `image` or of what it takes, or OpenAI's data URLs.
        adapter : Adapter, optional
            None: the base model.
        tools : list of dict, optional
            Functions that the model may call. Calls are in the answer's message.
        max_tokens, temperature, top_k, top_p, seed, stop
            As in `Sampler.sample`.
        on_text : function, optional
            Called with each new piece of the answer's text while tokens are drawn.
        **settings
            The template's own variables, such as Qwen3's enable_thinking.

        Raises
        ------
        TypeError
            If the template does not read a setting.
        ValueError
            If the model has no chat template, or it refuses the messages; or if there are images
            and the model has no vision tower.
        RuntimeError
            If the packages tokenizers or jinja2 are not installed.

        Examples
        --------
        >>> messages = [{"role": "user", "content": "What time is it?"}]
        >>> answer = model.chat(messages, max_tokens=8, enable_thinking=False)
        >>> messages.append(answer.message)
        >>> [message["role"] for message in messages], type(answer.text)
        (['user', 'assistant'], <class 'str'>)
        >>> seeing = tinsmith.Model("path/to/Qwen3.5-0.8B", device="cpu")
        >>> photo = {"type": "image", "image": "photo.png"}
        >>> parts = [photo, {"type": "text", "text": "What is it?"}]
        >>> seen = seeing.chat([{"role": "user", "content": parts}], max_tokens=5)
        >>> [one for one in seen.prompt if isinstance(one, tinsmith.Image)]
        [<tinsmith.Image: 2 × 3 tokens>]
        """
        if seed is not None:
            seed = tensors.to_integer(seed, "seed")
        chat = self.tokenizer.core
        check_settings(chat, settings, tools, self.chat)
        token = self.engine.loaded.image_token
        prompt = read_prompt(chat, as_messages(messages), token, self.image, tools, settings)
        ending = ending_of(self.engine, stop, chat.ends(self.eos_ids))
        request = SampleRequest(
            prompt.rows,
            seed=seeds(seed, 1)[0],
            images=prompt.held,
            **drawing(ending, max_tokens, temperature, top_k, top_p),
        )
        answer = chat.answer(prompt.ids.tolist(), ending.texts, ending.ids, tools)
        reader = AnswerReader(answer, on_text)
        [result] = self.engine.decode(
            [request],
            core_of(adapter),
            reader.tell if on_text else None,
            reader.parts.put if on_text else None,
        )
        [sample] = result.samples
        message = reader.message(sample)
        ending = ending.behind(prompt.rows, chat.lead)
        return ChatAnswer(*values(sample, prompt.ids), ending, prompt.parts, message)

    @overload
    def logprobs(
        self, tokens: Prompt, *, adapter: Adapter | None = None, progress: Progress = False
    ) -> Any: ...
    @overload
    def logprobs(
        self,
        tokens: list[SomePrompt] | tuple[SomePrompt, ...],
        *,
        adapter: Adapter | None = None,
        progress: Progress = False,
    ) -> list[Any]: ...
    def logprobs(
        self, tokens: Any, *, adapter: Adapter | None = None, progress: Progress = False
    ) -> Any:
        """Log-probability of each token but the first, given the tokens before it.

        Parameters
        ----------
        tokens : ids (N,), a text, or a list of them
            A text's ids are those of `tokenizer.encode`.
        adapter : Adapter, optional
            None: the base model.
        progress : bool or function
            True draws a bar with tqdm. A function is called with (sequences done, all).

        Returns
        -------
        float32 array (N - 1,), or a list of them
            In nats. Element i belongs to tokens[i + 1]; it equals element i of
            adapter.forward(tokens[:-1], tokens[1:]).

        Examples
        --------
        >>> model.logprobs([55, 73, 327]).shape
        (2,)
        >>> [scores.shape for scores in model.logprobs(["What time is it?", "What time"])]
        [(4,), (1,)]
        """
        results, given = self._score(tokens, adapter, progress, prompt_logprobs=True)
        arrays = [
            tensors.like(item, result.prompt_logprobs[1:])
            for item, result in zip(given, results, strict=True)
            if result.prompt_logprobs is not None
        ]
        return arrays if is_batch(tokens) else arrays[0]

    @overload
    def topk_logprobs(
        self,
        tokens: Prompt,
        k: SupportsIndex,
        *,
        adapter: Adapter | None = None,
        progress: Progress = False,
    ) -> TopKLogprobs: ...
    @overload
    def topk_logprobs(
        self,
        tokens: list[SomePrompt] | tuple[SomePrompt, ...],
        k: SupportsIndex,
        *,
        adapter: Adapter | None = None,
        progress: Progress = False,
    ) -> list[TopKLogprobs]: ...
    def topk_logprobs(
        self,
        tokens: Any,
        k: SupportsIndex,
        *,
        adapter: Adapter | None = None,
        progress: Progress = False,
    ) -> TopKLogprobs | list[TopKLogprobs]:
        """The k likeliest ids at each position but the first, given the tokens before it.

        Parameters
        ----------
        tokens : ids (N,), a text, or a list of them
            As in `logprobs`.
        k : int
            From 1 to the vocabulary's size; otherwise ValueError.
        adapter, progress
            As in `logprobs`.

        Returns
        -------
        TopKLogprobs, or a list of them
            Arrays (N - 1, k). Row i belongs to tokens[i + 1]: the ids are (N - 1, k) targets for
            tokens[:-1].

        Examples
        --------
        >>> model.topk_logprobs([55, 73, 327], 5)
        TopKLogprobs(ids=int32[2, 5], logprobs=float32[2, 5])
        """
        k = tensors.to_integer(k, "k")
        if not 1 <= k <= self.vocab:
            raise ValueError(f"k must be from 1 to the vocabulary's {self.vocab}, {k} came")
        results, given = self._score(tokens, adapter, progress, topk_prompt=k)
        found = [
            TopKLogprobs(
                tensors.like(item, result.topk_ids[1:]),
                tensors.like(item, result.topk_logprobs[1:]),
            )
            for item, result in zip(given, results, strict=True)
            if result.topk_ids is not None and result.topk_logprobs is not None
        ]
        return found if is_batch(tokens) else found[0]

    def _score(
        self, tokens: Any, adapter: Adapter | None, progress: Progress, **wanted: Any
    ) -> tuple[list[SampleResult], Sequence[Any]]:
        """Scores of each sequence from the sampler, and the sequences as given."""
        batch = is_batch(tokens)
        given = list(tokens) if batch else [tokens]
        rows = [self.engine.ids(item) for item in given]
        requests = [
            SampleRequest(row, max_tokens=1, images=images_of([item]), **wanted)
            for item, row in zip(given, datums.sequences(rows, "tokens", batch), strict=True)
        ]
        with reporting(progress, "scoring", unit=" sequences") as report:
            watched = report if progress else None
            return self.engine.decode(requests, core_of(adapter), watched), given
