"""What a lent card tells in a few minutes: two commands, each with a report that outlives it.

    python -m tools.card first --out OUT
    python -m tools.card second --out OUT --only 'rmsnorm or swiglu'

The first has 420 seconds, the second 240. Each runs the stages of stages.py in order and leaves
seven files, written anew after every stage: report.md, report.json, logs.tgz (all that stages
said), wrong.tgz (arrays of wrong results, ratios of errors), choice.jsonl (cuBLASLt's trials),
profile.txt (steps by kernel) and ncu.txt. tools/card/README.md says what to carry, and what to do
with what comes back.

With --device cuda-emulated a command is rehearsed on a machine without a GPU: sizes are tiny then,
and no time means anything. Exits 0 if all that ran was right, 1 if something was found, 3 if the
device can't be opened, and 2 where the command line is wrong."""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from . import ROOT, report, runner, stages
from .report import Found, Stage

FILES_MOST = 15 << 20  # bytes of a file that comes back
NO_RECORD = "ncu has recorded nothing so far\n"


def environment(options: argparse.Namespace) -> dict[str, str]:
    """What every stage's programs get."""
    package = ROOT / "python"
    here = [str(package)] if any(package.glob("tinsmith/_core*.so")) else []  # else it is installed
    paths = [*here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "400",  # pytest says why a test failed as far as a line is wide
        "PYTHONPATH": os.pathsep.join(paths),
        "TINSMITH_CUDA_LOG": str(options.work / "choice.jsonl"),
        "TINSMITH_WRONG": str(options.work / "wrong"),
    }


def run(options: argparse.Namespace, chosen: Sequence[Stage]) -> list[Found]:
    """All of a command's stages; what comes back is written after each."""
    began, results, ready = time.monotonic(), [], []
    for name in ("logs", "wrong"):
        (options.work / name).mkdir(parents=True, exist_ok=True)
    for stage in chosen:
        if reason := stages.missing(stage, options):
            results.append(Found(stage.name, stage.tells, "passed over", reason))
        else:
            ready.append(stage)
    write(options, chosen, results, began)
    machine = runner.Here(
        lambda stage: stage.command(options), environment(options), options.work / "logs"
    )
    for one in runner.run(machine, ready, options.seconds - stages.ENDING_S):
        results.append(one)
        for row in one.rows:  # without which the device does not open
            machine.environment |= row.get("set", {})
        print(f"{time.monotonic() - began:6.0f} s  {one.name}: {one.state}. {one.summary}")
        write(options, chosen, results, began)
    return results


# ---- what comes back ----


def write(
    options: argparse.Namespace, chosen: Sequence[Stage], results: Sequence[Found], began: float
) -> None:
    """The seven files as they stand; each takes the old one's place at once."""
    order = {stage.name: place for place, stage in enumerate(chosen)}
    results = sorted(results, key=lambda one: order[one.name])
    seconds = time.monotonic() - began
    facts = {
        "part": options.part,
        "device": options.device,
        "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time.time() - seconds)),
        "limit": options.seconds,
        "seconds": round(seconds, 1),
    }
    choice, record = options.work / "choice.jsonl", options.work / "logs" / "counters.ncu-rep"
    for name, text in (
        ("report.md", report.markdown(results, facts)),
        ("report.json", json.dumps({**facts, "stages": list(map(dataclasses.asdict, results))})),
        ("choice.jsonl", choice.read_text() if choice.exists() else ""),
        ("profile.txt", report.profiles(results)),
        ("ncu.txt", counted(record, record.stat().st_mtime) if record.exists() else NO_RECORD),
    ):
        replace(options.out / name, text[:FILES_MOST].encode())
    for name in ("logs", "wrong"):
        pack(options.out / f"{name}.tgz", options.work / name)


def replace(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


def pack(path: Path, folder: Path) -> None:
    """The files of a folder, the smallest first, as many as there is room for. Tests that run write
    more of them meanwhile."""
    part, room, sizes = path.with_suffix(".part"), FILES_MOST, {}
    for file in folder.iterdir():
        with contextlib.suppress(OSError):
            sizes[file] = file.stat().st_size
    with tarfile.open(part, "w:gz", compresslevel=1) as archive:
        for file in sorted(sizes, key=sizes.__getitem__):
            room -= sizes[file] // (4 if file.suffix in (".log", ".csv") else 1)
            if room > 0 and file.suffix != ".part":
                with contextlib.suppress(OSError):
                    archive.add(file, file.name)
    part.replace(path)


@functools.cache
def counted(record: Path, _written: float) -> str:
    """ncu's own words on what it has recorded; beside the record, its counters by line."""
    ncu = stages.program_of("ncu") or ""
    page = [ncu, "--import", str(record), "--page"]
    said = []
    for what in (["details"], ["source", "--csv", "--print-source", "sass"]):
        try:
            done = subprocess.run([*page, *what], capture_output=True, text=True, timeout=10)
            said.append(done.stdout or done.stderr)
        except (OSError, subprocess.TimeoutExpired) as error:
            said.append(f"{error}\n")
    record.with_suffix(".csv").write_text(said[1])
    return said[0]


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.card",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=stages.STAGES)
    parser.add_argument("--out", required=True, help="the folder that gets the seven files")
    parser.add_argument("--device", choices=("cuda", "cuda-emulated"), default="cuda")
    parser.add_argument("--seconds", type=float, help="by default 420 and 240")
    parser.add_argument("--stages", nargs="+", help="only those whose names begin so, and device")
    parser.add_argument("--only", default="", help="of the tests, what pytest's -k chooses")
    parser.add_argument("--carried", type=Path, default=ROOT / "build" / "card")
    options = parser.parse_args(arguments)
    options.seconds = options.seconds or stages.SECONDS[options.part]
    names = [stage.name for stage in stages.STAGES[options.part]]
    for asked in options.stages or []:
        if not any(name.startswith(asked) for name in names):
            parser.error(f"no stage begins with {asked!r}; there are {', '.join(names)}")
    if not options.out:
        parser.error("--out is empty: name the folder that gets the seven files")
    options.out = Path(options.out).resolve()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    return options


def chosen_of(options: argparse.Namespace) -> list[Stage]:
    """The stages that are asked for; on the emulator with its patience."""
    asked, found = options.stages, []
    for stage in stages.STAGES[options.part]:
        if asked and not stage.name.startswith(("device", *asked)):
            continue
        if stages.emulated(options):
            stage = dataclasses.replace(stage, limit_s=stage.limit_s * stages.SLOW)
        found.append(stage)
    return found


def main() -> int:
    options = options_of()
    if stages.emulated(options):
        options.seconds *= stages.SLOW
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as work:
        options.work = Path(work)
        results = run(options, chosen_of(options))
    print(f"The report is {options.out / 'report.md'}")
    if any(one.name == "device" and one.state == "failed" for one in results):
        return report.NO_DEVICE
    return int(any(one.state in ("failed", "found something") for one in results))


if __name__ == "__main__":
    sys.exit(main())
