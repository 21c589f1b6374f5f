"""The engine: base models, LoRA adapters with their gradients and optimizer, and the sampler.

Every call that computes, copies or allocates much releases the GIL. Calls on a model and on the
objects made from it take turns, from any threads. Attributes that are a number do not wait, except
`bytes` and `active`. Errors: ValueError, IndexError (a token id out of range), MemoryError,
FloatingPointError (a result that is not finite), RuntimeError (the device). After an error the
adapter is as it was before the call.
"""

from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

class StepReport(TypedDict):
    grad_norm: float  # before clipping, after normalization
    grad_norm_clipped: float
    weight_norm: float  # of all matrices, after the step
    loss: float  # the sum of the calls behind the step
    loss_tokens: float  # of them, those with a gradient that is not zero
    loss_sequences: float
    warning: str  # of a step that nobody can have wanted, a sentence; ""

class LossInput(TypedDict):
    name: str  # key in loss_fn_inputs, beside target_tokens
    required: bool
    fallback: str | None  # the config key, or the input before it, that stands in for a missing one
    default: float  # or, where there is no such, every element's value

class LossRow(TypedDict):
    name: str
    multi: bool  # whether targets may be (N, K)
    # Whether it compares rows with a teacher's: Adapter.distill; or, where teacher_logprobs came,
    # targets (N, K) with the teacher's log-probabilities of them: Adapter.forward_backward
    taught: bool
    recorded: bool  # whether a server takes its first input from what it recorded when it sampled
    gate: str | None  # the input whose zeros take targets out of the loss
    inputs: list[LossInput]  # float arrays of the targets' shape
    # loss_fn_config keys and their defaults; None: it must come, infinity: there is no bound
    config: dict[str, float | None]

def losses() -> list[LossRow]:
    """The table of losses, csrc/train/losses.c."""

def slot_groups() -> dict[str, str]:
    """The switch that trains beside each matrix's slot, csrc/model/weights.inc: "attn", "mlp" or
    "unembed"."""

def devices(name: str | None = None, /) -> dict[str, str]:
    """Device names, each with "" if it can be opened, or with a sentence that says why it can't. To
    find out, each device is opened; with a name, only that one."""

def cards(kind: str, /) -> list[tuple[str, str, int, tuple[int, int]]]:
    """The GPUs of this machine, for "cuda": the device's name ("cuda", "cuda:1"), the card's, its
    bytes of memory, and its compute capability. None is opened. RuntimeError where there is none.
    """

def bf16_is_fast() -> bool:
    """Whether this processor's products are faster in bf16 than in f32: it depends on nothing but
    the processor."""

def computes_with(device: str, /) -> str:
    """What a device computes with: of the CPU an instruction set ("generic", "avx2", "avx512",
    "avx512bf16" or "amx"); of a GPU the version and file of cuBLASLt. "" where that was not found,
    or the device can't be opened."""

def memory(device: str, /) -> tuple[int, int]:
    """Bytes that a device can give, and that it has in all. The CPU's bytes are the machine's, or
    what a container leaves of them. The call opens the device."""

def topk(rows: Any, weight: Any, k: int) -> tuple[Any, Any]:
    """(ids, logprobs) of rows that are flattened to (N, ·): tinsmith.ops.topk_logprobs.

    Here and below, arrays are anything with __dlpack__ in float32, bfloat16, or uint16 with bf16's
    bits, all on the CPU or all on CUDA's device 0; weight is (V, D), or None where the rows are
    logits. Results are NumPy's, or on a GPU capsules for dlpack_lend."""

def gather(
    rows: Any,
    weight: Any,
    ids: NDArray[np.int32],  # (N·K,)
    K: int,
    dlogprobs: Any,  # float32 of N·K numbers, here or on the CPU, or None: no gradients
    lse: Any,  # float32 of 2·N numbers from an earlier call, or None
    want_rows: bool,
    want_weight: bool,
) -> tuple[Any, Any, Any, Any]:
    """(logprobs (N, K), gradient of the rows, of the weight, in their types, lse (N, 2)); with lse
    the gradients alone."""

def jsd(
    student: Any,
    student_weight: Any,
    teacher: Any,
    teacher_weight: Any,
    keep: NDArray[np.uint8] | None,  # (N,): 0 leaves a row out, from losses and scale too
    scale: Any,  # float32, like the losses, here or on the CPU, or None: no gradients
    how: tuple[float, float, float, int, bool, bool],  # device.h's Jsd, field by field
    want_rows: bool,
    want_weight: bool,
) -> tuple[Any, Any, Any]:
    """(losses (N, 1), or (N, V or top_k) of single terms, and the gradients of Σ scale·loss)."""

def first_bad(array: NDArray[Any], /) -> int:
    """The index of the first number, of float32, float16 or bf16's bits in uint16, that is not
    finite; -1 where all are."""

def checksum(array: NDArray[np.uint8], /) -> int:
    """A number of 64 bits that a change of a byte changes."""

def weights_code() -> int:
    """A checksum of the engine's code that decides how weights become their bytes in memory."""

def dlpack_check(capsule: Any, name: str, device_type: int, /) -> None:
    """ValueError or TypeError, which calls the capsule `name`, for one that describes no memory
    there can be, or that says it is of another type of device."""

def dlpack_lend(array: Any, bf16: bool, versioned: bool, shape: tuple[int, ...] = ...) -> Any:
    """A DLPack capsule of a NumPy array, or of a result on a GPU in this shape. The memory lives
    until the consumer releases the capsule."""

def array_device(array: Any, /) -> int:
    """The ordinal of the GPU that a result of the core is on; -1 for any other object."""

def cuda_arrays_through(name: str) -> None:
    """The device that arrays on a GPU are for: "cuda", or "cuda-emulated", for tests that call host
    memory a GPU's."""

class Model:
    """A frozen base model. Shapes come from `config`; weights are put in with `load`, then `seal`.

    config keys: layers, width, heads, kv_heads, head_width, rotary (numbers of a head that are
    rotated), ffn, vocab, context, norm_eps, rope_scale, window (of sliding_attention), qkv_bias
    (0/1), qk_norm (0/1), q_gate (0/1: wq has a gate beside each head's q), tied (0/1); of
    linear_attention key_heads, value_heads, key_width and value_width; of layers with experts
    experts, chosen (experts of a token), expert_ffn, norm_shares (0/1: the chosen ones' shares add
    up to 1), expert_bias (0/1) and expert_limit (of gpt-oss's unit); o_bias (0/1) and sinks (0/1)
    of attention; and of each layer's parts their kinds (csrc/model/layers.inc): mixers,
    full_attention, sliding_attention or linear_attention, and feeds, mlp, experts or
    experts_with_shared. What is missing is 0. inv_freq is (rotary/2,) float32.
    weights is the element type that matrices are kept in, but those of `packed`, {(slot, layer or
    -1): type}, have blocks (csrc/device/dtype.c). Products are exact for each.
    """

    def __init__(
        self,
        config: dict[str, Any],
        inv_freq: NDArray[np.float32],
        *,
        weights: str = "bf16",  # or "f32"
        packed: dict[tuple[str, int], str] = {},
        device: str = "cpu",
        threads: int = 0,
        mapped: bool = False,  # for a plan: whether map() will be called, not load()
    ) -> None: ...
    @property
    def slots(self) -> list[tuple[str, int, int, int, int]]:
        """(slot, layer or -1, index, rows, cols) of every tensor that must be loaded; vectors have
        rows 1, and index is 0 but where a layer has several matrices in one slot."""
    def load(
        self,
        slot: str,
        layer: int,
        array: NDArray[Any],
        index: int = 0,
        packed: str | None = None,
    ) -> None:
        """Copies one tensor in: (rows, cols) or, for vectors, (cols,). float32, float16, or uint16
        holding bf16 bits, of which a matrix in bf16 or f32, int8 or int4 is made; vectors are
        float32. Or uint8, with a row's blocks of the type `packed` in each row, for a matrix that
        is kept in that type. ValueError where a number is not finite, as it comes or is kept."""
    def fill(self, block: NDArray[np.uint16]) -> None:
        """Makes every matrix that was not loaded of the block, in the order of `slots`, again and
        again: random weights for a benchmark. Only the block is uploaded, the rest are copies on
        the device. It is bf16's bits. ValueError where the device is no GPU, where a matrix is kept
        in another type, and where rows are no multiple of 8 numbers."""
    def seal(self) -> None:
        """Ends loading; ValueError names the slots that are still missing."""
    def map(self, file: int, at: int) -> None:
        """Instead of loading and sealing: the weights are bytes of an open file, from byte `at` on,
        a multiple of 65,536, which are what memory() gave of a model of the same arguments. Behind
        them the file has 256 bytes more. They are mapped: nothing is read or checked, and processes
        share them. ValueError on a device that has memory of its own."""
    def memory(self) -> NDArray[np.uint8]:
        """The bytes of a sealed model's weights, which the array keeps alive; read-only. ValueError
        on a device that has memory of its own."""
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def device(self) -> str: ...
    @property
    def library(self) -> str:
        """The library that makes products, its version and file: "" where it is the engine."""
    @property
    def notes(self) -> list[str]:
        """Sentences on what the device does slower than it could, as ops find out."""
    @property
    def weight_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int:
        """Those of the weights that take memory: all, but of mapped ones not an embedding that is
        no head, of which few rows are read."""
    def plan(
        self, rank: int, tokens: int = 0, step_bytes: int = 0, datum_bytes: int = 0
    ) -> dict[str, int]:
        """Bytes of each use of memory, before anything is allocated. weights, and of them those
        that are held (held_bytes). adapter: of `rank` on
        every layer. step: of a datum of `tokens` (0: step_tokens, the default's). own: the ops' own
        needs on the device. cache: a sampler's default, of cache_tokens tokens, kv_token bytes
        each, and the states of `states` sequences, kv_sequence bytes each. kv_token leaves out
        layers with a window: they keep at most kv_window bytes of a sequence that decodes. free and
        all: the bytes that the device can give, and those that it has. scratch: a step's part of
        `own`. step_most: the limit of a step and its scratch, which is step_bytes, or by default
        half of what the weights leave; datum_most: of one whose datum needs more, as
        Adapter.limit says. The step's layers keep what fits in that limit: `kept`
        layers keep everything, attention_kept layers at least attention's results, and the others
        only the inputs of activation recomputation. Both counts are 0 if the step does not fit at
        all. longest: the tokens of the longest datum that fits, at most the context."""

    def step_bytes(self, memory: int) -> int:
        """Bytes that a training step may take by default: half of what the weights leave of
        `memory`. memory 0 is all memory of the device."""
    def cache_tokens(self, memory: int = 0, free: int = 0) -> int:
        """Tokens that a sampler's KV cache holds by default: as many as fit in a quarter of what
        the weights leave of `memory`, and in half of what is free of it. If the whole context is
        more tokens, the cache holds the whole context. memory 0: what the device has, and no more
        than half of what it has free."""
    def cache_bytes(self, tokens: int) -> int:
        """Bytes of a sampler's cache for so many tokens: their keys and values; of layers with a
        window those of one sequence's, if other layers have none; and, if the model's layers keep a
        state for a sequence, as many states as take the same bytes, but at least 4 and at most
        512."""

class Adapter:
    """LoRA matrices on a model, with gradients and an optimizer's state. B starts at zero, A as
    PEFT initialises it (uniform in ±1/sqrt(fan_in)) from `seed`. The scale is alpha / rank."""

    def __init__(
        self,
        model: Model,
        *,
        rank: int,
        alpha: float = 32.0,
        seed: int = 0,
        attn: bool = True,
        mlp: bool = True,
        unembed: bool = True,
        step_tokens: int = 0,  # rows of a micro-batch; 0: the engine's default
        keep_bytes: int = 4 << 30,  # that forward(keep=True) may hold; one micro-batch in any case
        step_bytes: int = 0,  # that a step may take; 0: half of what weights leave of the memory
        optimizer: str = "adamw",  # or "dimuon"
    ) -> None: ...
    @property
    def model(self) -> Model: ...
    @property
    def optimizer(self) -> str:
        """What it is trained with: "adamw" or "dimuon"."""
    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def size(self) -> int:
        """Number of trained parameters."""
    @property
    def bytes(self) -> int:
        """Bytes of the device's memory that it holds: its flat vectors, and those of its largest
        step."""
    @property
    def step_bytes(self) -> int:
        """Bytes that a step may take, for activations and for the ops' own needs. You may set it
        (0: the default). It changes no result: activations that do not fit are computed again."""
    @step_bytes.setter
    def step_bytes(self, value: int) -> None: ...
    @property
    def datum_bytes(self) -> int:
        """Bytes that a step may take whose datum does not fit in step_bytes with the least kept."""
    def limit(self, step_bytes: int, datum_bytes: int) -> None:
        """Sets both. 0: the default, which for datum_bytes is step_bytes, or, where that is 0 too,
        all that weights and adapter leave of nine tenths of the device's memory."""
    def step_least(self, tokens: int) -> int:
        """Bytes that a step of one datum of so many tokens takes at least, the ops' scratch too."""
    @property
    def step(self) -> int:
        """Optimizer steps taken; may be set."""
    @step.setter
    def step(self, value: int) -> None: ...
    @property
    def pending(self) -> tuple[float, float, float]:
        """(loss, tokens, sequences) of the calls behind the gradients; may be set, by a
        checkpoint."""
    @pending.setter
    def pending(self, value: tuple[float, float, float]) -> None: ...
    @property
    def layout(self) -> list[tuple[str, int, int, str, int, int, int]]:
        """(slot, layer or -1, index, "A" or "B", offset, rows, cols) of each matrix in the flat
        vectors. A is stored (fan_in, rank) and B (rank, fan_out): PEFT's matrices transposed. Index
        -1 is one factor for all matrices of the layer's slot."""
    @property
    def routed(self) -> NDArray[np.int32] | None:
        """(layers, experts): how many rows of the last training call went to each expert; zeros for
        a layer without, None where no layer has any."""
    def forward_backward(
        self,
        tokens: NDArray[np.int32],  # all datums' tokens, one after another
        lengths: NDArray[np.int32],  # tokens of each datum
        targets: NDArray[np.int32],  # all datums' targets, (N, K) row-major each
        counts: NDArray[np.int32],  # K of each datum
        loss: str,
        inputs: dict[
            str, NDArray[np.float32]
        ],  # name -> flat array like targets; optional ones may be missing
        config: dict[str, float],
        *,
        backward: bool = True,  # False: no gradients
        keep: bool = False,  # with backward=False: as forward(keep=True)
        between: Callable[[int, int], object] | None = None,
    ) -> tuple[NDArray[np.float32], float]:
        """Log-probabilities of the targets (flat, like targets) and the loss's sum; adds to the
        gradients. Every id, length, and number is checked first; on any error nothing was added.

        `between(done, total)` is called between two micro-batches, in this thread, with how many
        are done, and how many there are. It may use the model and everything on it but this
        adapter, and changes no bit of the call. Its exception ends the call, and is raised. Other
        threads' calls on the model still wait for this one."""
    def forward(
        self,
        tokens: NDArray[np.int32],
        lengths: NDArray[np.int32],
        targets: NDArray[np.int32],
        counts: NDArray[np.int32],
        *,
        keep: bool = False,
        between: Callable[[int, int], object] | None = None,
    ) -> NDArray[np.float32]:
        """Log-probabilities of the targets, flat. With keep, backward may follow. The first
        micro-batch's activations stay in memory until another call needs the memory; so do those of
        more micro-batches if keep_bytes suffice. backward computes the rest again, to the same
        bits."""
    def backward(
        self, dlogprobs: NDArray[np.float32], *, between: Callable[[int, int], object] | None = None
    ) -> float:
        """Adds to the gradients as forward_backward of the kept forward's datums would, bit for
        bit, if its loss had this gradient (flat, like targets). Returns Σ dlogprobs·logprobs, which
        is cross_entropy's loss with weights of -dlogprobs. ValueError if no forward was kept since
        the weights last changed; a forward serves one backward."""
    def distill(
        self,
        tokens: NDArray[np.int32],
        lengths: NDArray[np.int32],
        targets: NDArray[np.int32],
        counts: NDArray[np.int32],
        loss: str,
        inputs: dict[str, NDArray[np.float32]],
        config: dict[str, float],
        teacher_tokens: NDArray[np.int32],  # all datums', one after another
        teacher_lengths: NDArray[np.int32],
        *,
        teacher: Adapter | Model | None = None,  # None: the student's base model
        backward: bool = True,
        between: Callable[[int, int], object] | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
        """forward_backward for a loss with `taught` in its row. A datum's teacher_tokens are the
        teacher's prompt and then the completion: the targets from the first one with a weight that
        is not 0. Where a weight is not 0, the student's distribution is compared with the teacher's
        for the same token. Returns the log-probabilities of the targets, the divergence of each row
        (0 where the weight is), and the loss: the sum of weights times divergences. The teacher
        gets no gradient; it may be the adapter itself."""
    def optim_step(
        self,
        *,
        normalization: str | None = None,  # "num_loss_tokens", "num_sequences" or None
        **settings: float,  # all that the optimizer has: checkpoints/optimizers.py is their table
    ) -> StepReport:
        """One step of the adapter's optimizer with the gradients so far, which are then cleared.
        FloatingPointError if the step would leave numbers that are not finite (Dimuon's also if a
        matrix that it divides by has no inverse): it is not taken, and all stays as it was.
        ValueError for a setting that is missing, out of its range, or another optimizer's."""
    def trim(self) -> None:
        """Gives a training step's memory back until the next step; no result changes."""
    def clear_gradients(self) -> None: ...
    def interrupt(self) -> None:
        """Call it from another thread: the current forward_backward stops within a layer's time. It
        raises KeyboardInterrupt and adds nothing."""
    def read(self, what: str) -> NDArray[np.float32]:
        """A copy of a flat vector, (size,): "weights", "gradients", "m" or, with adamw, "v"."""
    def write(self, what: str, array: NDArray[np.float32]) -> None:
        """Replaces a flat vector; every number must be finite."""
    def snapshot(self) -> Adapter:
        """The weights as they are now, for sampling or as a teacher; it can't be trained."""
    def ema_update(self, leader: Adapter, decay: float) -> None:
        """weights = decay · weights + (1 - decay) · the leader's, an adapter of the same layout. On
        a snapshot, this is an exponential moving average. decay is in [0, 1)."""

class Sampler:
    """Continuous batching over one model: many requests, each with its own adapter or none, are
    decoded together. A request's result does not depend on the others (batch-invariant)."""

    def __init__(self, model: Model, *, tokens: int = 0, graphs: bool = True) -> None:
        """tokens: the KV cache's size in tokens (0: the engine's default). graphs: whether a device
        that can record decoding steps records them."""
    def add(
        self,
        request: int,
        prompt: NDArray[np.int32],
        adapter: Adapter | None = None,
        *,
        num_samples: int = 1,
        # -1: to the end of the context, or of the cache where that is smaller
        max_tokens: int = -1,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        seed: int = 0,
        stop_ids: NDArray[np.int32] = ...,
        topk_sample: int = 0,
        prompt_logprobs: bool = False,
        topk_prompt: int = 0,
        prompt_draws: int = 0,  # tokens to draw at each prompt position after the first
        targets: NDArray[np.int32] | None = None,  # ids to score there: those at position p + 1
        target_starts: NDArray[np.int32] | None = None,  # are targets[starts[p] : starts[p + 1]]
        prompt_from: int = 0,  # prompt positions before it get no log-probabilities
        client: int = 0,  # clients share every step, however many requests each has
        # 0: pages of the cache are shared by all requests on the same weights. Else by the requests
        # of this session alone, whatever weights computed them; see set_adapter
        session: int = 0,
    ) -> None:
        """Queues a request under a number of the caller's choice. The request is checked first.

        Log-probabilities of drawn tokens, topk_sample's too, are those of the distribution that was
        drawn from: logits divided by the temperature (1 where it is 0; one between 0 and 1e-30 is
        1e-30), among the tokens that top_k and top_p keep.
        """
    def step(self) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Runs one forward: (request, sample, token) for each token drawn, and the requests that
        are now done."""
    def set_adapter(self, request: int, adapter: Adapter) -> None:
        """A request of a session goes on with other weights from its next token. Each token's
        log-probability is that of the weights that drew it; keys and values that are in the cache
        stay."""
    def stop(self, request: int, sample: int) -> None:
        """Ends a sample after its newest token, with reason "stop" (a stop string was seen).
        ValueError for one that has drawn none."""
    def interrupt(self) -> None:
        """Call it from another thread: the current step stops within a layer's time. It raises
        KeyboardInterrupt and draws nothing."""
    def spoil(self) -> None:
        """For tests: fills the cache's free memory with NaN."""
    def cancel(self, request: int) -> None:
        """Forgets a request."""
    def look(self, request: int, sample: int, first: int) -> dict[str, Any]:
        """What a sample has drawn after its first `first` tokens, in the form of take()'s samples;
        stop_reason is None while it goes on."""
    def take(self, request: int) -> dict[str, Any]:
        """A done request's result, which is then forgotten. FloatingPointError where one of its
        log-probabilities is not a number, at which it has ended.
        samples: list of {"tokens": int32 (n,), "logprobs": float32 (n,), "stop_reason": "stop" |
        "length",
                          "topk_ids": int32 (n, K) | None, "topk_logprobs": float32 (n, K) | None}
        prompt_reused: how many of the prompt's tokens were found in the cache
        prompt_logprobs: float32 (N,) with NaN at 0, or None
        topk_ids: int32 (N, K) | None, topk_logprobs: float32 (N, K) | None; row 0 is id 0, logprob
        -99999.
        target_logprobs: float32, like targets, or None
        drawn_ids: int32 (N - 1, draws) | None, drawn at the temperature, and drawn_logprobs:
        float32 (N - 1, draws) | None; like all of a prompt's log-probabilities, at temperature 1
        """
    @property
    def active(self) -> int:
        """Requests queued or running."""
    @property
    def reused(self) -> int:
        """Tokens found in the prefix cache: a prompt that begins like an earlier sequence on the
        same weights reuses its pages. No result depends on it."""
    @property
    def cache(self) -> dict[str, int]:
        """What the cache's memory is used for. A page is 64 tokens of a sequence, with a frame in
        each of `full` lists of layers and, for layers with a window, of `windowed` lists.
        frames: all there are, and `free` ones. held: pages that sequences hold, of which they hold
        windowed frames in `windows`. known: pages that no sequence holds, remembered for prompts
        that begin alike; kept: pages whose windowed frames are there though no sequence holds them.
        """
    @property
    def states(self) -> tuple[int, int]:
        """(slots, kept), where the model's layers keep a state for a sequence: how many sequences
        there is room for, and how many states are kept for prompts that begin alike. Else (0, 0).
        """
    @property
    def replays(self) -> tuple[int, int]:
        """(steps, replays): the steps that only decoded, on a device that records them, and how
        many of these were replayed."""
