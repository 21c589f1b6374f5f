"""Kernels that could be made otherwise, each tried by a switch: another library, or a variable.

A row changes a few words of a file of cuda/. build.py makes a library of each, for a Hopper alone,
and the second command times some ops with it beside the library as it is. What a variant changes
must stand in its file once, which a test looks at: so no kernel carries switches of its own."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from .report import Stage


@dataclass(frozen=True)
class Variant:
    """What is changed, and which ops show it (words of their names in benchmarks/cuda_ops.py)."""

    name: str
    tells: str
    ops: tuple[str, ...]
    file: str = ""  # of cuda/
    changes: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


VARIANTS = (
    Variant(
        "as-it-is", "what the others are held to", ("product", "attention", "LoRA", "head"),
    ),
    Variant(
        "own-products", "our own kernel makes all products", ("product", "head"),
        environment={"TINSMITH_CUBLASLT": "none"},
    ),
    Variant(
        "own-128x256", "the same with tiles of 128 by 256, eight warps", ("product", "head"),
        file="product/gemm.cu",
        changes={
            "typedef Tiling<128, 128, 32, 2, 2, 4> Wide;":
                "typedef Tiling<128, 256, 32, 2, 4, 4> Wide;",
            "__launch_bounds__(S::THREADS, 2)": "__launch_bounds__(S::THREADS, 1)",
        },
        environment={"TINSMITH_CUBLASLT": "none"},
    ),
    Variant(
        "own-deep", "the same with 64 of k a step, three of them ahead", ("product", "head"),
        file="product/gemm.cu",
        changes={
            "typedef Tiling<128, 128, 32, 2, 2, 4> Wide;":
                "typedef Tiling<128, 128, 64, 2, 2, 3> Wide;",
        },
        environment={"TINSMITH_CUBLASLT": "none"},
    ),
    Variant(
        "lora-slices", "LoRA's sums in at most 8 slices", ("LoRA",), file="product/lora.cu",
        changes={"SLICES = 16,": "SLICES = 8,"},
    ),
)  # fmt: skip


def stages(program: Callable[..., Callable]) -> Iterator[Stage]:
    """A stage for each, of the ops that show it."""
    for one in VARIANTS:
        library = f"{one.name}.so" if one.changes else ""
        given = ("--library", f"{{carried}}/{library}") if library else ()
        yield Stage(
            f"variant {one.name}", one.tells,
            program("tools.card.variant", *given, "--ops", *one.ops), 12, 40, reads="json",
            environment=one.environment, real=bool(library), carried=library,
        )  # fmt: skip
