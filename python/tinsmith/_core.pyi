"""The engine: base models, LoRA adapters with their gradients and optimizer, and the sampler.

Every call that computes, copies or allocates much releases the GIL. Calls on a model and on the
objects made from it take turns, from any threads. Attributes that are a number do not wait, except
`bytes` and `active`. Errors: ValueError, IndexError (a token id out of range), MemoryError,
FloatingPointError (a result that is not finite), RuntimeError (the device). After an error the
adapter is as it was before the call.
"""

from abc import ABCMeta
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, Literal, TypedDict, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

class StepReport(TypedDict):
    grad_norm: float  # before clipping, after normalization
    grad_norm_clipped: float
    weight_norm: float  # of all matrices, after the step
    loss: float  # the summed loss of the calls whose gradients the step used
    loss_tokens: float  # of them, those with a gradient that is not zero
    loss_sequences: float
    warning: str  # about a step that is probably a mistake, a sentence; else ""

class StagePlan(TypedDict):
    device: str
    first: int  # its layers are [first, end)
    end: int
    weights: int
    adapter: int
    step: int
    own: int
    cache: int
    free: int
    all: int

class LossInput(TypedDict):
    name: str  # key in loss_fn_inputs, beside target_tokens
    required: bool
    fallback: str | None  # the config key, or the earlier input, that replaces a missing one
    default: float  # if there is no fallback, every element's value

class LossRow(TypedDict):
    name: str
    multi: bool  # whether targets may be (N, K)
    # Whether it compares rows with a teacher's: Adapter.distill. With teacher_logprobs, the targets
    # (N, K) have the teacher's log-probabilities instead: Adapter.forward_backward
    taught: bool
    recorded: bool  # whether a server takes its first input from its own record of the samples
    gate: str | None  # the input whose zeros exclude targets from the loss
    inputs: list[LossInput]  # float arrays of the targets' shape
    # loss_fn_config keys and their defaults; None: required, infinity: no bound
    config: dict[str, float | None]

def losses() -> list[LossRow]:
    """The table of losses, csrc/train/losses.c."""

def slot_groups() -> dict[str, str]:
    """The switch that trains the LoRA of each slot, csrc/model/weights.inc: "attn", "mlp" or
    "unembed"."""

def devices(name: str | None = None, /) -> dict[str, str]:
    """Device names, each with "" if it can be opened, or with a sentence that says why it can't. To
    find out, each device is opened; with a name, only that one."""

def cards(kind: str, /) -> list[tuple[str, str, int, tuple[int, int]]]:
    """The GPUs of this machine, for "cuda": the device's name ("cuda", "cuda:1"), the card's name,
    its bytes of memory, and its compute capability. None is opened. RuntimeError if there is
    none."""

def bf16_is_fast() -> bool:
    """Whether this processor's products are faster in bf16 than in f32. It depends only on the
    processor."""

def computes_with(device: str, /) -> str:
    """What a device computes with: a CPU's instruction set ("generic", "avx2", "avx512",
    "avx512bf16" or "amx"); a GPU's version and file of cuBLASLt. "" if that was not found, or the
    device can't be opened."""

def use_isa(name: str, /) -> None:
    """Limits the CPU's instruction sets as TINSMITH_ISA does; "": not at all. It concerns devices
    that are opened from now on."""

def memory(device: str, /) -> tuple[int, int]:
    """The bytes that a device has available, and its bytes in all. The CPU's are the machine's, or
    a container's limit. The call opens the device."""

def topk(rows: Any, weight: Any, k: int) -> tuple[Any, Any]:
    """(ids, logprobs) of rows flattened to (N, ·): tinsmith.ops.topk_logprobs.

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
    only the gradients."""

def jsd(
    student: Any,
    student_weight: Any,
    teacher: Any,
    teacher_weight: Any,
    keep: NDArray[np.uint8] | None,  # (N,): 0 excludes a row, from losses and scale too
    scale: Any,  # float32, like the losses, here or on the CPU, or None: no gradients
    how: tuple[float, float, float, int, bool, bool],  # device.h's Jsd, field by field
    want_rows: bool,
    want_weight: bool,
) -> tuple[Any, Any, Any]:
    """(losses (N, 1), or (N, V or top_k) of single terms, and the gradients of Σ scale·loss)."""

def first_bad(array: NDArray[Any], /) -> int:
    """The index of the first number that is not finite, in float32, float16 or bf16's bits in
    uint16; -1 if all are."""

def checksum(array: NDArray[np.uint8], /) -> int:
    """A 64-bit checksum, which changes with any byte."""

def weights_code() -> int:
    """A checksum of the engine's code that determines the weights' bytes in memory."""

def dlpack_check(capsule: Any, name: str, device_type: int, /) -> None:
    """Raises ValueError or TypeError, naming the capsule `name`, if it describes impossible memory,
    or another type of device."""

def dlpack_lend(array: Any, bf16: bool, versioned: bool, shape: tuple[int, ...] = ...) -> Any:
    """A DLPack capsule of a NumPy array, or of a result on a GPU in this shape. The memory lives
    until the consumer releases the capsule."""

def array_device(array: Any, /) -> int:
    """The number of the GPU that a result of the core is on; -1 for any other object."""

def cuda_arrays_through(name: str) -> None:
    """Sets the device for arrays on a GPU: "cuda", or "cuda-emulated", for tests that treat host
    memory as a GPU's."""

PARTS: int  # of a call's gradient
STAGES: int  # of a model, at most

class Image:
    """An image of this process. Its rows stand in tokens as ids below 0: row i has the id first -
    i, and no other image ever has it. While an Image exists, its pixels are kept; whoever uses its
    ids holds one."""

    def __init__(self, pixels: NDArray[np.uint8], high: int, wide: int, first: int = 0) -> None:
        """Copies flat pixels (high·side, wide·side, 3) of high × wide tokens. `first` 0: new ids.
        Otherwise the image with that first id, of this process or another, gets its pixels."""
    @property
    def first(self) -> int: ...
    @property
    def high(self) -> int: ...
    @property
    def wide(self) -> int: ...
    @property
    def rows(self) -> int: ...  # high · wide
    @property
    def side(self) -> int: ...  # pixels of a token's side
    @property
    def nbytes(self) -> int: ...  # of its pixels
    @property
    def pixels(self) -> NDArray[np.uint8]: ...  # flat and read-only

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
    weights is the element type of matrices; those in `packed`, {(slot, layer or -1): type}, have
    blocks (csrc/device/dtype.c). Products are exact for each.
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
        """(slot, layer or -1, index, rows, cols) of every tensor that must be loaded. Vectors have
        rows 1; index is 0 unless a layer has several matrices in one slot."""
    def load(
        self,
        slot: str,
        layer: int,
        array: NDArray[Any],
        index: int = 0,
        packed: str | None = None,
    ) -> None:
        """Loads one tensor: (rows, cols) or, for vectors, (cols,). float32, float16, or uint16 with
        bf16's bits, which become a matrix in bf16, f32, int8 or int4; vectors are float32. Or
        uint8, each row with its blocks of the type `packed`, for a matrix that is stored in that
        type. ValueError if a number is not finite, before or after the conversion."""
    def fill(self, block: NDArray[np.uint16]) -> None:
        """Fills every matrix that was not loaded with the block, in the order of `slots`, repeated:
        random weights for a benchmark. Only the block is uploaded, the rest are copies on the
        device. It is bf16's bits. ValueError if the device is no GPU, if a matrix is stored in
        another type, or if rows are no multiple of 8 numbers."""
    def seal(self) -> None:
        """Ends loading; ValueError names the slots that are still missing."""
    def map(self, file: int, at: int) -> None:
        """Instead of load and seal: maps the weights from an open file, from byte `at` on, a
        multiple of 65,536. They must be the bytes of memory() of a model with the same arguments,
        followed by 256 more bytes. Nothing is read or checked, and processes share them. ValueError
        on a device that has memory of its own."""
    def memory(self) -> NDArray[np.uint8]:
        """The bytes of a sealed model's weights, which the array keeps alive; read-only. ValueError
        on a device that has memory of its own."""
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def device(self) -> str: ...
    @property
    def library(self) -> str:
        """The library that computes products, its version and file; "" if it is the engine."""
    @property
    def notes(self) -> list[str]:
        """Sentences on what the device does slower than possible, as ops find out."""
    @property
    def weight_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int:
        """The bytes of weights that take memory: all, but of mapped weights not an embedding that
        is no head, because few of its rows are read."""
    def plan(
        self, rank: int, tokens: int = 0, step_bytes: int = 0, datum_bytes: int = 0
    ) -> dict[str, int]:
        """Bytes of each use of memory, before anything is allocated. weights, and the held part of
        them (held_bytes). adapter: with `rank` on every layer, and gradients. sums: the gradients
        of a call in flight, and of its parts. step: for a datum of `tokens` (0:
        step_tokens, the default's). own: the ops' own memory on the device. cache: a sampler's
        default, of cache_tokens tokens, kv_token bytes each, and the states of `states` sequences,
        kv_sequence bytes each. kv_token leaves out layers with a window: they keep at most
        kv_window bytes of a decoding sequence. free and all: the device's free bytes, and all its
        bytes. scratch: a step's part of `own`. step_most: the limit of a step and its scratch,
        which is step_bytes, or by default half of what the weights leave; datum_most: the limit if
        a datum needs more (Adapter.limit). Within that limit, `kept` layers keep all activations,
        attention_kept layers at least attention's results, and the others only the inputs for
        activation recomputation. Both counts are 0 if the step does not fit at all. longest: the
        tokens of the longest datum that fits, at most the context."""
    def stage_plan(
        self, rank: int, tokens: int = 0, step_bytes: int = 0, datum_bytes: int = 0
    ) -> list[StagePlan]:
        """Each stage's device, layers and part of the plan, in bytes. weights: those that take
        memory."""

    def step_bytes(self, memory: int) -> int:
        """Bytes that a training step may take by default: half of what the weights leave of
        `memory`. memory 0: all memory of the device."""
    def cache_tokens(self, memory: int = 0, free: int = 0) -> int:
        """Tokens in a sampler's KV cache by default: as many as fit in a quarter of what the
        weights leave of `memory`, and in half of its free part. If the whole context is more
        tokens, the cache holds the whole context. memory 0: the device's, and at most half of its
        free memory."""
    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena that training steps share, now."""
    @property
    def training_bytes(self) -> int:
        """The same with the vectors that wait for the next gradients."""
    def trim(self) -> None:
        """Frees them until the next call; no result changes."""
    def cache_bytes(self, tokens: int) -> int:
        """Bytes of a sampler's cache for `tokens` tokens: their keys and values; for layers with a
        window, one sequence's, if there are no other layers. If layers keep a state for a sequence,
        also as many states as take the same bytes, but at least 4 and at most 512."""
    def tower_open(
        self, config: dict[str, Any], weights: Literal["bf16", "f32"] = "bf16", memory: int = 0
    ) -> None:
        """Begins the vision tower: config has the sizes of csrc/vision/tower.h, `deep`, `rescale`,
        `mean` and `std`. Its tensors can then be loaded. Features are kept in a sixteenth of what
        the weights leave of `memory`. memory 0: all memory of the device."""
    def tower_load(self, slot: str, index: int, array: NDArray[Any]) -> None:
        """Copies one tensor of the tower in: (rows, cols), or (cols,) in float32 for vectors."""
    def tower_seal(self) -> None:
        """Ends the tower's loading; ValueError names what is missing. Images are legal from now
        on."""
    def tower_close(self) -> None:
        """Frees the tower and all images' features."""
    def features_drop(self) -> None:
        """Frees all images' features; no result changes."""
    def tower_features(self, image: Image) -> NDArray[Any]:
        """An image's features, flat: the last merger's rows, then those of deepstack. uint16 holds
        bf16's bits."""
    @property
    def tower_slots(self) -> list[tuple[str, int, int, int]]:
        """(slot, index, rows, cols) of every tensor of an open tower."""
    @property
    def tower_bytes(self) -> int:
        """Bytes of an open tower's weights."""
    @property
    def features_bytes(self) -> int:
        """Bytes of the images' features that are kept: at most a sixteenth of what the weights
        leave, and those of the step in flight."""
    @property
    def tower_images(self) -> int:
        """Images that ran through it."""

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
        step_bytes: int = 0,  # that a step may take; 0: half of the memory that weights leave
        optimizer: str = "adamw",  # or "dimuon"
    ) -> None: ...
    @property
    def model(self) -> Model: ...
    @property
    def optimizer(self) -> str:
        """The optimizer that trains it: "adamw" or "dimuon"."""
    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def size(self) -> int:
        """Number of trained parameters."""
    @property
    def bytes(self) -> int:
        """Bytes of the device's memory that its flat vectors take now: weights and moments, and
        gradients if there are any."""
    @property
    def step_bytes(self) -> int:
        """Bytes that a step may take, for activations and for the ops' own memory. You may set it
        (0: the default). No result depends on it: activations that do not fit are recomputed."""
    @step_bytes.setter
    def step_bytes(self, value: int) -> None: ...
    @property
    def datum_bytes(self) -> int:
        """The limit for a step whose datum does not fit in step_bytes with the least kept."""
    def limit(self, step_bytes: int, datum_bytes: int) -> None:
        """Sets both. 0: the default, which for datum_bytes is step_bytes; if that is 0 too, it is
        what weights and adapter leave of nine tenths of the device's memory."""
    def step_least(self, tokens: int) -> int:
        """The least bytes of a step with one datum of `tokens` tokens, with the ops' scratch."""
    @property
    def stamp(self) -> int:
        """Names the weights in this process: adapters with the same stamp have the same weights. A
        snapshot has its adapter's."""
    @property
    def step_tokens(self) -> int:
        """Rows of a micro-batch, at most, unless one datum has more; may be set between two calls.
        The sum of a call's gradients depends on it, in its last bits."""
    @step_tokens.setter
    def step_tokens(self, value: int) -> None: ...
    @property
    def step(self) -> int:
        """Optimizer steps taken; may be set."""
    @step.setter
    def step(self, value: int) -> None: ...
    @property
    def pending(self) -> tuple[float, float, float]:
        """(loss, tokens, sequences) of the calls in the gradients; a checkpoint may set it."""
    @pending.setter
    def pending(self, value: tuple[float, float, float]) -> None: ...
    @property
    def has_gradients(self) -> bool:
        """Whether a training call was made since the last step."""
    @property
    def growth(self) -> tuple[int, float, float]:
        """(step, norm before, norm after) of the step that made the weights' norm grow so much that
        sums may overflow, for errors to name; step 0: there was none. May be set."""
    @growth.setter
    def growth(self, value: tuple[int, float, float]) -> None: ...
    @property
    def layout(self) -> list[tuple[str, int, int, str, int, int, int]]:
        """(slot, layer or -1, index, "A" or "B", offset, rows, cols) of each matrix in the flat
        vectors. A is stored (fan_in, rank) and B (rank, fan_out): PEFT's matrices transposed. Index
        -1 is one factor for all matrices of the layer's slot."""
    @property
    def routed(self) -> NDArray[np.int32] | None:
        """(layers, experts): how many rows of the last training call went to each expert; zeros for
        a layer without experts, None if no layer has any."""
    @overload
    def forward_backward(
        self,
        tokens: NDArray[np.int32],  # all datums' tokens, concatenated
        lengths: NDArray[np.int32],  # tokens of each datum
        targets: NDArray[np.int32],  # all datums' targets, (N, K) row-major each
        counts: NDArray[np.int32],  # K of each datum
        loss: str,
        inputs: dict[str, NDArray[np.float32]],  # flat, like targets; optional ones may be missing
        config: dict[str, float],
        *,
        backward: bool = True,  # False: no gradients
        keep: bool = False,  # with backward=False: as forward(keep=True)
        part: int = -1,  # the datums are this part of a larger call; -1: a whole call
        stepwise: Literal[False] = False,
    ) -> tuple[NDArray[np.float32], float]:
        """Log-probabilities of the targets (flat, like targets) and the loss's sum; adds to the
        gradients. Every id, length, and number is checked first; on any error nothing was added.

        With `part`, the gradients wait as that part's sum (take_part, end_parts); a snapshot has
        no other gradients."""
    @overload
    def forward_backward(
        self,
        tokens: NDArray[np.int32],
        lengths: NDArray[np.int32],
        targets: NDArray[np.int32],
        counts: NDArray[np.int32],
        loss: str,
        inputs: dict[str, NDArray[np.float32]],
        config: dict[str, float],
        *,
        backward: bool = True,
        keep: bool = False,
        part: int = -1,
        stepwise: Literal[True],
    ) -> TrainingCall[tuple[NDArray[np.float32], float]]: ...
    @overload
    def forward(
        self,
        tokens: NDArray[np.int32],
        lengths: NDArray[np.int32],
        targets: NDArray[np.int32],
        counts: NDArray[np.int32],
        *,
        keep: bool = False,
        stepwise: Literal[False] = False,
    ) -> NDArray[np.float32]:
        """Log-probabilities of the targets, flat. With keep, backward may follow. The first
        micro-batch's activations stay in memory until another call needs the memory; so do those of
        more micro-batches as far as keep_bytes suffices. backward recomputes the rest, to the same
        bits."""
    @overload
    def forward(
        self,
        tokens: NDArray[np.int32],
        lengths: NDArray[np.int32],
        targets: NDArray[np.int32],
        counts: NDArray[np.int32],
        *,
        keep: bool = False,
        stepwise: Literal[True],
    ) -> TrainingCall[NDArray[np.float32]]: ...
    @overload
    def backward(
        self, dlogprobs: NDArray[np.float32], *, stepwise: Literal[False] = False
    ) -> float:
        """Adds to the gradients as forward_backward of the kept forward's datums would, bit for
        bit, if its loss had this gradient (flat, like targets). Returns Σ dlogprobs·logprobs, which
        is cross_entropy's loss with weights of -dlogprobs. ValueError if no forward was kept since
        the weights last changed; a forward serves one backward."""
    @overload
    def backward(
        self, dlogprobs: NDArray[np.float32], *, stepwise: Literal[True]
    ) -> TrainingCall[float]: ...
    @overload
    def distill(
        self,
        tokens: NDArray[np.int32],
        lengths: NDArray[np.int32],
        targets: NDArray[np.int32],
        counts: NDArray[np.int32],
        loss: str,
        inputs: dict[str, NDArray[np.float32]],
        config: dict[str, float],
        teacher_tokens: NDArray[np.int32],  # all datums', concatenated
        teacher_lengths: NDArray[np.int32],
        *,
        teacher: Adapter | Model | None = None,  # None: the student's base model
        backward: bool = True,
        part: int = -1,
        stepwise: Literal[False] = False,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
        """forward_backward for a loss with `taught` in its row. A datum's teacher_tokens are the
        teacher's prompt and then the completion: the targets from the first one with a weight that
        is not 0. Where a weight is not 0, the student's distribution is compared with the teacher's
        for the same token. Returns the log-probabilities of the targets, the divergence of each row
        (0 where the weight is), and the loss: the sum of weights times divergences. The teacher
        gets no gradient; it may be the adapter itself."""
    @overload
    def distill(
        self,
        tokens: NDArray[np.int32],
        lengths: NDArray[np.int32],
        targets: NDArray[np.int32],
        counts: NDArray[np.int32],
        loss: str,
        inputs: dict[str, NDArray[np.float32]],
        config: dict[str, float],
        teacher_tokens: NDArray[np.int32],
        teacher_lengths: NDArray[np.int32],
        *,
        teacher: Adapter | Model | None = None,
        backward: bool = True,
        part: int = -1,
        stepwise: Literal[True],
    ) -> TrainingCall[tuple[NDArray[np.float32], NDArray[np.float32], float]]: ...
    def parts(self, lengths: NDArray[np.int32]) -> list[tuple[int, int]]:
        """The datums [first, last) of each of the PARTS parts of a call with datums of these
        lengths. A part may be empty. Whoever computes a part gets the same bits."""
    def take_part(self, node: int) -> tuple[NDArray[np.float32] | None, float, float, float]:
        """Takes a sum of parts out of the adapter: (gradients, loss, tokens, sequences). The sums
        are a binary tree: node 1 is the root, 2·n and 2·n + 1 are the children of n, PARTS + p is
        part p. Siblings that are both there are summed at once, so that only their parent can be
        taken. None: no gradients. ValueError if the node is not there."""
    def put_part(
        self,
        node: int,
        vector: NDArray[np.float32] | None,
        loss: float,
        tokens: float,
        sequences: float,
    ) -> None:
        """Puts a sum that another adapter's take_part gave into this one."""
    def end_parts(self) -> float:
        """Adds the sum of all parts to the gradients, and returns the loss. ValueError if a part is
        missing. FloatingPointError if the sum is not finite: it is dropped."""
    def drop_parts(self) -> None:
        """Drops the sums of parts."""
    def optim_step(
        self,
        *,
        normalization: str | None = None,  # "num_loss_tokens", "num_sequences" or None
        **settings: float,  # the optimizer's, see checkpoints/optimizers.py
    ) -> StepReport:
        """One step of the adapter's optimizer with the accumulated gradients, which are then
        cleared. FloatingPointError if the step would give numbers that are not finite (Dimuon's
        also if a matrix that it divides by has no inverse): it is not taken, and nothing changes.
        ValueError if a setting is missing, out of range, or another optimizer's."""
    def clear_gradients(self) -> None: ...
    def interrupt(self) -> None:
        """Call it from another thread: the current forward_backward stops within a layer's time. It
        raises KeyboardInterrupt and adds nothing."""
    def read(self, what: str) -> NDArray[np.float32]:
        """A copy of a flat vector, (size,): "weights", "gradients", "m" or, with adamw, "v"."""
    def write(self, what: str, array: NDArray[np.float32]) -> None:
        """Replaces a flat vector; every number must be finite."""
    def snapshot(self) -> Adapter:
        """The current weights, for sampling or as a teacher; it can't be trained."""
    def ema_update(self, leader: Adapter, decay: float) -> None:
        """weights = decay · weights + (1 - decay) · the leader's, an adapter of the same layout. On
        a snapshot, this is an exponential moving average. decay is in [0, 1)."""

R = TypeVar("R")

class TrainingCall(Generator[tuple[int, int] | Future[None], None, R], metaclass=ABCMeta):
    """A call with stepwise=True. Each next() executes a micro-batch and returns (done, all); the
    last one raises StopIteration with the result, so `yield from` evaluates to it. In between,
    others may use the model and everything on it but this adapter's training calls, and no bit
    depends on it. A call that fails, or is closed or forgotten before its end, adds nothing. It has
    `close`, but no other method of a generator."""

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
        # -1: until the context, or the cache if that is smaller, is full
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
        # 0: requests on the same weights share the cache's pages. Otherwise only the requests of
        # this session share them, whatever weights computed them; see set_adapter
        session: int = 0,
        first_sample: int = 0,  # the number of the first sample, for those of one seed in parts
    ) -> None:
        """Queues a request under a number that the caller chooses. The request is checked first.

        Log-probabilities of drawn tokens, topk_sample's too, are those of the distribution that was
        drawn from: logits divided by the temperature (1 if it is 0; one between 0 and 1e-30 counts
        as 1e-30), among the tokens that top_k and top_p allow.
        """
    def step(self) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Runs one forward: (request, sample, token) for each drawn token, and the requests that
        are now done."""
    def set_adapter(self, request: int, adapter: Adapter) -> None:
        """A session's request uses other weights from its next token. Each token's log-probability
        is by the weights that drew it; keys and values in the cache stay."""
    def stop(self, request: int, sample: int) -> None:
        """Ends a sample after its newest token, with reason "stop" (a stop string was found).
        ValueError if it has drawn no token."""
    def interrupt(self) -> None:
        """Call it from another thread: the current step stops within a layer's time. It raises
        KeyboardInterrupt and draws nothing."""
    def spoil(self) -> None:
        """For tests: fills the cache's free memory with NaN."""
    def cancel(self, request: int) -> None:
        """Cancels a request."""
    def look(self, request: int, sample: int, first: int) -> dict[str, Any]:
        """The tokens that a sample has drawn after its first `first` tokens, in the form of
        take()'s samples; stop_reason is None while it is running."""
    def take(self, request: int) -> dict[str, Any]:
        """A done request's result, which is then dropped. FloatingPointError if a log-probability
        was NaN, which ended the request.
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
        """Uses of the cache's memory. A page is 64 tokens of a sequence, with a frame in each of
        `full` lists of layers and, for layers with a window, of `windowed` lists. frames: all
        frames, and `free` ones. held: pages that sequences hold; `windows` of them with windowed
        frames. known: pages that no sequence holds, cached for prompts with the same beginning;
        kept: pages with windowed frames that no sequence holds.
        """
    @property
    def states(self) -> tuple[int, int]:
        """(slots, kept), if the model's layers keep a state for a sequence: how many sequences fit,
        and how many states are cached for prompts with the same beginning. Otherwise (0, 0).
        """
    @property
    def replays(self) -> tuple[int, int]:
        """(steps, replays): the decoding-only steps on a device that records them, and how many of
        these were replayed."""
