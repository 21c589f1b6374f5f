"""What a machine's first GPU tells, in the minutes that it is given: one command, one report.

    python tests/first_card.py --minutes 10 --out report

Runs the stages of STAGES, each in processes of its own with a limit, and writes report.md and
report.json anew after each of them: whatever happens later, what was found is there. The library
may have been built elsewhere. NumPy is needed; a stage that needs more says so and is passed over.
With torch and pytest all ops are tested, with transformers, peft and safetensors models too. Stages
of one phase run side by side; those that take times run alone.

With --device cuda-emulated it is rehearsed on a machine without a GPU: sizes are tiny then, and no
time means anything. Exits 0 if all that ran was right, 1 if something was found, 2 if there is no
such device."""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import ROOT
from . import report as card_report
from .report import Found, Stage

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OPS = ("ops", "ops_head", "ops_jsd", "delta", "packed_cuda", "tensor_ops_cuda")
MODELS = ("cuda", "model", "train", "optimizer", "losses", "recompute", "distill", "experts",
    "kept_cuda", "window_models")  # fmt: skip
SAMPLING = ("sample", "prefix_scores", "snapshot", "states_devices", "window", "window_cache")
MISUSE = ("training_refusals", "turns")
SERVED = ("jsd_topk", "inflight", "loading", "between")
MODELS_NEED = ("torch", "transformers", "peft", "safetensors", "pytest")
SERVED_NEED = (*MODELS_NEED, "tinker", "starlette", "uvicorn", "tokenizers", "zstandard")
# Tests with the device among their parameters: others open the emulated one, whatever their name.
REAL = "([cuda] or [cuda- or -cuda- or -cuda]) and not emulated"
KERNELS = ("attention_kernel", "attention_backward", "lora", "logprob", "rmsnorm")
PHASES = {  # when each must have ended, as a share of the time
    "alone": 0.1,  # what it is, and whether anything works
    "tests": 0.45,
    "times": 0.85,  # one after another
    "tools": 0.97,
}
TINY = (
    "--length 16 --datums 2 --batches 1 2 --prompt 4 --new 3 --rounds 1 --head 40 64 512 --topk 4"
)
LEAST_SECONDS = 5  # for less no stage begins


def pytest_stage(name: str, tells: str, files: Sequence[str], needs: tuple[str, ...]) -> Stage:
    """The tests of some files that run on the device. A file that can't be imported does not keep
    the others from running."""

    def command(options: argparse.Namespace) -> list[str]:
        spread = ["-n", "2"] if importlib.util.find_spec("xdist") else []
        names = [f"tests/test_{file}.py" for file in files]
        rules = ["-o", "addopts=", "-p", "no:cacheprovider", "-v", "-ra", "--tb=short"]
        rules += ["--continue-on-collection-errors"]
        return [sys.executable, "-m", "pytest", *rules, *spread, "-k", only(options), *names]

    return Stage(name, tells, "tests", command, 1.0, needs=needs, reads="pytest")


def only(options: argparse.Namespace) -> str:
    """pytest's expression for the device's tests."""
    expression = "cuda-emulated" if options.device == "cuda-emulated" else REAL
    return f"({expression}) and ({options.only})" if options.only else expression


def program(path: str, *arguments: str) -> Callable[[argparse.Namespace], list[str]]:
    """A program of this checkout on the device; it knows --device, and --tiny where it counts."""

    def command(options: argparse.Namespace) -> list[str]:
        tiny = ["--tiny"] if options.device == "cuda-emulated" else []
        module = [path] if path.endswith(".py") else ["-m", path]
        return [sys.executable, *module, "--device", options.device, *tiny, *arguments]

    return command


def beside_torch(*parts: str) -> Callable[[argparse.Namespace], list[str]]:
    """benchmarks/gpu.py for some parts, on one shape or on all."""

    def command(options: argparse.Namespace) -> list[str]:
        head, *shape = parts
        sizes = ["--rounds", "3"]
        if options.device == "cuda-emulated":
            sizes, shape = TINY.split(), ["tiny"]
        line = [sys.executable, "-W", "ignore", "benchmarks/gpu.py", "--device", options.device]
        parted = ["--parts", *head.split()]
        return [*line, *parted, *(["--shapes", *shape] if shape else []), *sizes]

    return command


def sanitizer(tool: str) -> Stage:
    """The op tests under one tool of compute-sanitizer."""
    return Stage(
        tool,
        f"compute-sanitizer's {tool} on the op tests",
        "tools",
        lambda options: ["env", f"PYTHON={sys.executable}", "tests/sanitize.sh", tool],
        1.0,
        needs=("torch", "compute-sanitizer"),
        real=True,
    )


def counters(options: argparse.Namespace) -> list[str]:
    """Nsight Compute on a launch or two of the five kernels that take most of a step."""
    times = program("benchmarks/cuda_ops.py", "--rounds", "1", "--shapes", "8b")(options)
    chosen = ["--kernel-name", f"regex:{'|'.join(KERNELS)}", "--launch-count", "10"]
    return ["ncu", "--clock-control", "none", "--set", "basic", *chosen, *times]


STAGES = (
    Stage(
        "device",
        "driver, cards, memory, cuBLASLt, and the packages beside",
        "alone",
        program("tools.card.facts"),
        0.5,
        reads="json",
    ),
    Stage(
        "smoke",
        "tools/card/smoke.c: the ops of a step at a real shape, against loops on the host",
        "alone",
        program("tools.card.smoke"),
        0.5,
        needs=("cc",),
        reads="json",
    ),
    Stage(
        "bits",
        "whether a row of a product has the same bits at every number of rows",
        "tests",
        program("tools.card.choice"),
        1.0,
        reads="json",
    ),
    pytest_stage("ops", "every op against float64", OPS, ("torch", "pytest")),
    pytest_stage(
        "models", "models and training against float64 and torch's bf16", MODELS, MODELS_NEED
    ),
    pytest_stage(
        "sampling", "sampler = trainer; replayed graphs = the eager path", SAMPLING, MODELS_NEED
    ),
    pytest_stage(
        "misuse", "what training refuses, and threads that take turns", MISUSE, MODELS_NEED
    ),
    pytest_stage("served", "inflight sampling, loading, top-K losses", SERVED, SERVED_NEED),
    Stage(
        "op times",
        "each op of a step against the card's own copy and product (CUDA events)",
        "times",
        program("benchmarks/cuda_ops.py"),
        0.2,
        reads="json",
    ),
    *(
        Stage(
            f"beside torch, {shape}",
            f"LoRA training and decoding of the {shape.upper()} shape beside torch + PEFT",
            "times",
            beside_torch("train decode", shape),
            share,
            needs=("torch", "transformers", "peft", "safetensors"),
        )
        for shape, share in (("0.6b", 0.3), ("8b", 0.6), ("1.7b", 0.5), ("4b", 0.6))
    ),
    Stage(
        "head",
        "log-probabilities and top K of 8,192 rows beside torch",
        "times",
        beside_torch("head"),
        0.6,
        needs=("torch", "transformers", "peft", "safetensors"),
    ),
    Stage("counters", "ncu of the main kernels", "times", counters, 1.0, ("ncu",), real=True),
    *map(sanitizer, TOOLS),
)


# ---- running ----


def missing(stage: Stage, options: argparse.Namespace) -> str:
    """Why a stage can't run here, or ""."""
    if stage.real and options.device == "cuda-emulated":
        return "it needs a real card"
    for need in stage.needs:
        if not (importlib.util.find_spec(need) or program_of(need)):
            return f"{need} is not installed"
    return ""


def program_of(name: str) -> str | None:
    """A program's path: on PATH, named by the variable that sanitize.sh knows, or CUDA's own."""
    variable = name.upper().replace("-", "_")
    places = (os.environ.get(variable, ""), name, f"/usr/local/cuda/bin/{name}")
    return next(filter(None, map(shutil.which, filter(None, places))), None)


@dataclasses.dataclass
class Running:
    """A stage under way: its process, and where its output goes."""

    stage: Stage
    process: subprocess.Popen
    output: Path
    began: float
    limit_s: float

    def end(self) -> Found:
        """What it found, once it has ended or its limit has passed."""
        late = self.process.poll() is None
        if late:
            kill(self.process)
        seconds = time.monotonic() - self.began
        text = self.output.read_text(errors="replace")
        return card_report.found(self.stage, text, self.process.returncode, seconds, late=late)


def kill(process: subprocess.Popen) -> None:
    """Ends a process and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=3)
            return
        except ProcessLookupError:
            process.wait()
            return
        except subprocess.TimeoutExpired:
            continue


def start(stage: Stage, options: argparse.Namespace, limit_s: float) -> Running:
    output = options.out / f"{re.sub(r'[^a-z0-9]+', '-', stage.name)}.log"
    package = ROOT / "python"
    here = [str(package)] if any(package.glob("tinsmith/_core*.so")) else []  # else it is installed
    path = os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])])
    with output.open("wb") as file:
        process = subprocess.Popen(
            stage.command(options),
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path},
        )
    return Running(stage, process, output, time.monotonic(), limit_s)


def run_phase(
    stages: Sequence[Stage], options: argparse.Namespace, ends: float, beside: bool
) -> Iterator[Found]:
    """Runs stages until `ends`: side by side, or each alone for its share of what is left."""
    if beside:
        left = ends - time.monotonic()
        running = [start(stage, options, left) for stage in stages] if left > LEAST_SECONDS else []
        yield from (late_start(stage) for stage in stages if not running)
        while running:
            for one in list(running):
                over = time.monotonic() - one.began > one.limit_s
                if one.process.poll() is not None or over:
                    running.remove(one)
                    yield one.end()
            time.sleep(0.05)
        return
    for stage in stages:
        left = ends - time.monotonic()
        if left < LEAST_SECONDS:
            yield late_start(stage)
            continue
        one = start(stage, options, stage.share * left)
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(timeout=one.limit_s)
        yield one.end()


def late_start(stage: Stage) -> Found:
    return Found(stage.name, stage.tells, "not begun", "no time was left", 0.0)


def run(options: argparse.Namespace) -> list[Found]:
    """All stages; the report is written after each."""
    began, seconds, results = time.monotonic(), 60 * options.minutes, []
    for phase, share in PHASES.items():
        due = [one for one in STAGES if one.phase == phase and chosen(one, options)]
        ready = []
        for stage in due:
            if reason := missing(stage, options):
                results.append(Found(stage.name, stage.tells, "passed over", reason, 0.0))
            else:
                ready.append(stage)
        for one in run_phase(ready, options, began + share * seconds, phase in ("tests", "tools")):
            results.append(one)
            print(f"{time.monotonic() - began:6.0f} s  {one.name}: {one.state}. {one.summary}")
            write(results, options, began)
        if phase == "alone" and results and results[0].state == "failed":
            break  # without a device nothing else tells anything
    write(results, options, began)
    return results


def chosen(stage: Stage, options: argparse.Namespace) -> bool:
    return not options.stages or any(stage.name.startswith(name) for name in options.stages)


def write(results: Sequence[Found], options: argparse.Namespace, began: float) -> None:
    """The report as it stands; each file takes the old one's place at once."""
    order = {stage.name: place for place, stage in enumerate(STAGES)}
    results = sorted(results, key=lambda one: order[one.name])
    seconds = time.monotonic() - began
    facts = {
        "device": options.device,
        "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time.time() - seconds)),
        "minutes": options.minutes,
        "seconds": round(seconds, 1),
    }
    for name, text in (
        ("report.md", card_report.markdown(results, facts)),
        ("report.json", json.dumps({**facts, "stages": list(map(dataclasses.asdict, results))})),
    ):
        part = options.out / f"{name}.part"
        part.write_text(text)
        part.replace(options.out / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="the time for all of it")
    parser.add_argument("--out", type=Path, default=Path("first-card"), help="the report's folder")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cuda-emulated")
    parser.add_argument("--stages", nargs="*", help="only those whose names begin so")
    parser.add_argument("--only", default="", help="of the tests, what pytest's -k chooses")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results = run(options)
    print(f"The report is {options.out / 'report.md'}")
    if results and results[0].name == "device" and results[0].state == "failed":
        return 2
    return int(any(one.state in ("failed", "found something") for one in results))


if __name__ == "__main__":
    sys.exit(main())
