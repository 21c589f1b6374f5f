"""The stages of the two commands, in the order of their worth: own figures first, then verdicts.

A row says what runs, how long it should take on a card of a Hopper, and when it is ended. What no
time is left for stands last in its command. Both commands fit a machine that is lent for fifteen
minutes: the first has 420 s, the second 240 s."""

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable

from . import variants
from .report import Stage

SECONDS = {"first": 420.0, "second": 240.0}
ENDING_S = 8.0  # of them, to pack what comes back

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OPS = (
    "device/test_ops", "device/test_ops_head", "device/test_ops_jsd", "model/test_delta",
    "cuda/test_packed_cuda", "ops/test_tensor_ops_cuda",
)  # fmt: skip
MODELS = (
    "cuda/test_cuda", "model/test_model", "train/test_train", "model/test_optimizer",
    "train/test_losses", "model/test_recompute", "train/test_distill", "model/test_experts",
    "model/test_quantized_model_cuda", "model/test_window_models", "train/test_training_refusals",
    "binding/test_turns",
)  # fmt: skip
SAMPLING = (
    "sampling/test_sample", "sampling/test_prefix_scores", "model/test_snapshot",
    "sampling/test_states_devices", "model/test_window", "sampling/test_window_cache",
)  # fmt: skip
TEST_FILES = {"ops": OPS, "models": MODELS, "sampling": SAMPLING}
TEST_FILES["again"] = OPS + MODELS + SAMPLING
# Of 16 cores; each has a context on the card.
WORKERS = {"ops": 4, "models": 4, "sampling": 3, "again": 10}
MODELS_NEED = ("torch", "transformers", "peft", "safetensors", "pytest")
# Tests with the device among their parameters: others open the emulated one, whatever their name.
REAL = "([cuda] or [cuda- or -cuda- or -cuda]) and not emulated"
# The kernels that most of a step's time goes to. ncu looks at the third launch of each.
KERNELS = (
    "attention_kernel", "keys_backward_kernel", "queries_backward_kernel", "product_kernel",
    "slices_kernel", "lse_part_kernel", "logprob_backward_kernel", "rotate_kernel",
    "swiglu_kernel", "rmsnorm_kernel", "gemm_kernel",
)  # fmt: skip
COUNTED = ("attention", "lora", "logprob", "rotate", "swiglu", "rmsnorm", "product q")
# Our own products alone: no trials of cuBLASLt's algorithms, which a test's many models would need.
OWN = {"TINSMITH_CUBLASLT": "none"}
SINGLE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # many processes run tests
SLOW = 20  # the emulator's limits are as many times a card's
TINY = (
    "--length", "16", "--datums", "2", "--batches", "1", "2", "--prompt", "4", "--new", "3",
    "--rounds", "1",
)  # fmt: skip

Command = Callable[[argparse.Namespace], list[str]]


def emulated(options: argparse.Namespace) -> bool:
    return options.device == "cuda-emulated"


def program(name: str, *arguments: str) -> Command:
    """A program of this checkout on the device; it knows --device and --tiny. {carried} in an
    argument is the folder of what was carried."""

    def command(options: argparse.Namespace) -> list[str]:
        what = [name] if name.endswith(".py") else ["-m", name]
        tiny = ["--tiny"] if emulated(options) else []
        given = [one.replace("{carried}", str(options.carried)) for one in arguments]
        return [sys.executable, *what, "--device", options.device, *tiny, *given]

    return command


def step(shape: str, *parts: str, more: tuple[str, ...] = ("--alone",)) -> Command:
    """benchmarks/gpu.py on one shape."""

    def command(options: argparse.Namespace) -> list[str]:
        sizes = TINY if emulated(options) else ["--rounds", "3", "--new", "48"]
        shown = "tiny" if emulated(options) else shape
        line = [sys.executable, "-W", "ignore", "benchmarks/gpu.py", "--device", options.device]
        return [*line, "--shapes", shown, "--parts", *parts, *more, *sizes]

    return command


def tests(name: str) -> Command:
    """The tests of some files that run on the device. A file that can't be imported does not keep
    the others from running; a test that hangs ends its worker, and another takes its place."""

    def command(options: argparse.Namespace) -> list[str]:
        files = [f"tests/{file}.py" for file in TEST_FILES[name]]
        rules = ["-o", "addopts=", "-p", "no:cacheprovider", "-v", "-ra", "--tb=short"]
        rules += ["--continue-on-collection-errors"]
        limit = 600 if emulated(options) else 40
        if importlib.util.find_spec("pytest_timeout"):
            rules += ["-o", f"timeout={limit}", "-o", "timeout_method=thread"]
        # pytest 9 ends a test also in C that holds the interpreter's lock, and says where it was.
        rules += ["-o", f"faulthandler_timeout={limit + 5}"]
        rules += ["-o", "faulthandler_exit_on_timeout=true"]
        if importlib.util.find_spec("xdist"):
            workers = 1 if emulated(options) else WORKERS[name]
            rules += ["-n", str(workers), "--max-worker-restart=20"]
        return [sys.executable, "-m", "pytest", *rules, "-k", only(options), *files]

    return command


def only(options: argparse.Namespace) -> str:
    """pytest's expression for the device's tests."""
    expression = "cuda-emulated" if emulated(options) else REAL
    return f"({expression}) and ({options.only})" if options.only else expression


def smoke(limit_s: float, kept: str, *arguments: str) -> Command:
    """tools/card/smoke.py, with the program that was built elsewhere where there is one; what it
    leaves is kept in a folder of what comes back. It ends the program before the stage is ended."""

    def command(options: argparse.Namespace) -> list[str]:
        built = options.carried / "gpu_smoke"
        given = ["--program", str(built)] if built.exists() else []
        limit = limit_s * (SLOW if emulated(options) else 1) - ENDING_S
        given += ["--out", str(options.work / kept), "--limit", str(limit)]
        return program("tools.card.smoke", *given, *arguments)(options)

    return command


def counters(options: argparse.Namespace) -> list[str]:
    """Nsight Compute on one launch of each of KERNELS."""
    times = program("benchmarks/cuda_ops.py", "--shapes", "8b", "--rounds", "1", "--launches", "4")
    chosen = f"::regex:^({'|'.join(KERNELS)})$:3"
    settings = ["--clock-control", "none", "--set", "full", "--import-source", "yes"]
    out = str(options.work / "logs" / "counters")
    ncu = [program_of("ncu") or "ncu", *settings, "--kernel-id", chosen, "-f", "-o", out]
    return [*ncu, *times(options), "--ops", *COUNTED]


def experiments(options: argparse.Namespace) -> list[str]:
    return [str(options.carried / "experiments")]


def program_of(name: str) -> str | None:
    """A program's path: named by a variable (COMPUTE_SANITIZER), on PATH, or CUDA's own."""
    variable = name.upper().replace("-", "_")
    places = (os.environ.get(variable, ""), name, f"/usr/local/cuda/bin/{name}")
    return next(filter(None, map(shutil.which, filter(None, places))), None)


DEVICE = Stage(
    "device", "driver, card, memory, cuBLASLt, packages, and a first product",
    program("tools.card.facts"), 8, 30, reads="json",
)  # fmt: skip

SMOKE_S, SANITIZER_S = 45, 150  # after which they are ended

FIRST = (
    DEVICE,
    Stage(
        "smoke", "the ops of a step at real shapes, against loops on the host (C, no Python)",
        smoke(SMOKE_S, "wrong"), 15, SMOKE_S, reads="json",
    ),
    Stage(
        "choice", "rows of a product have the same bits at every number of rows",
        program("tools.card.choice"), 20, 80, reads="json",
    ),
    *(
        stage
        for shape, taken in (("8b", 35), ("0.6b", 18))
        for stage in (
            Stage(
                f"step {shape}", "training and decoding, with and without an adapter",
                step(shape, "train", "decode"), taken, 80, reads="json",
            ),
            Stage(
                f"kernels {shape}", "one training step and 20 decoded tokens by kernel",
                program("tools.card.kernels", "--shape", shape), taken / 2, 60,
                needs=("torch",), reads="json",
            ),
        )
    ),
    Stage(
        "experiments", "bits of mma and wgmma, a graph's node, memory's speed", experiments, 6, 25,
        reads="json", real=True, carried="experiments",
    ),
    *(
        Stage(
            f"step {shape}", "training", step(shape, "train"), taken, 45, reads="json"
        )
        for shape, taken in (("1.7b", 12), ("4b", 16))
    ),
    Stage(
        "op times", "each op beside the card's own copy and product",
        program("benchmarks/cuda_ops.py"), 40, 90, reads="json",
    ),
    Stage(
        "counters", "ncu of the kernels that take most of a step", counters, 40, 90,
        needs=("ncu",), real=True, environment=OWN,
    ),
    *(
        Stage(
            name, f"the tests of {', '.join(TEST_FILES[name][:3])} and others", tests(name), taken,
            150, needs=needs, reads="pytest", group="tests", environment={**SINGLE, **more},
        )
        for name, needs, taken, more in (
            ("ops", ("torch", "pytest"), 60, {}), ("models", MODELS_NEED, 90, OWN),
            ("sampling", MODELS_NEED, 90, {}),
        )
    ),
    *(
        Stage(
            f"sanitizer {tool}", f"compute-sanitizer's {tool} on the C program, small sizes",
            smoke(SANITIZER_S, "logs", "--tiny", "--tool", tool), 40, SANITIZER_S,
            needs=("compute-sanitizer",), reads="json", real=True, group="tests", environment=OWN,
        )
        for tool in TOOLS
    ),
)  # fmt: skip

SECOND = (
    DEVICE,
    Stage(
        "again", "the tests that --only names", tests("again"), 60, 90, needs=MODELS_NEED,
        reads="pytest",
    ),
    *variants.stages(program),
    *(
        Stage(
            f"beside torch {shape}", "a training step beside torch + PEFT",
            step(shape, "train", more=()), taken, 2 * taken,
            needs=("torch", "transformers", "peft"),
        )
        for shape, taken in (("0.6b", 30), ("8b", 45))
    ),
)  # fmt: skip

STAGES = {"first": FIRST, "second": SECOND}


def missing(stage: Stage, options: argparse.Namespace) -> str:
    """Why a stage can't run here, or ""."""
    if stage.real and emulated(options):
        return "it needs a real card"
    if stage.carried and not (options.carried / stage.carried).exists():
        return f"{stage.carried} was not carried: python -m tools.card.build makes it"
    if stage.name == "again" and not options.only:
        return "--only names no tests"
    for need in stage.needs:
        if not (importlib.util.find_spec(need) or program_of(need)):
            return f"{need} is not installed"
    return ""
