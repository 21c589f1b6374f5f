"""Runs a suite of a peer: a copy of its tests, a server, a process for them, and what came of it.

The copy is the processes' current folder. It also has what the hub would give: for each name that
is served a link of that name to the model's folder, which transformers and the cookbook find before
they ask the hub, and data sets of ours (tests/support/recipe_data.py). The tests find the server by
the SDK's two variables.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import ROOT, models, table
from .table import Suite

ROWS = 256  # of each data set: what the tutorials' largest batches take


@dataclass(frozen=True)
class Ended:
    """How a test ended: passed, failed or skipped; and what it said."""

    test: str
    ended: str
    said: str = ""


@dataclass(frozen=True)
class Judged:
    """A test beside what the table says of it."""

    test: str
    ended: str
    why: str
    as_known: bool


def heading(peer: table.Peer, checkout: Path) -> str:
    """The peer, and the checkout's revision where git knows it."""
    git = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    known = "" if not head else f"; this checkout is {head[:9]}"
    return f"# {peer.title}\n\nThe table is of revision {peer.revision}{known}.\n"


def run(options: Namespace, suite: Suite, work: Path) -> list[Ended]:
    """The suite's tests, each with its end."""
    import tinsmith

    place = work / "copy"
    copy(suite, options.checkout, place)
    folders = {
        name: options.models.get(name) or models.folder(kind, work)
        for name, kind in suite.serves.items()
    }
    for name, folder in folders.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).symlink_to(folder, target_is_directory=True)
    if suite.data:
        from support import recipe_data

        recipe_data.write(place, ROWS)
    with tinsmith.serve(
        folders, checkpoints=work / "checkpoints", api_key=suite.api_key, seed=0,
        allow_hosts=["0.0.0.0"], preload=True,
    ) as backend:  # fmt: skip
        settings = environment(backend.url, suite, folders, work)
        if suite.scripts:
            chosen = [one for one in suite.commands() if options.only in one[0]]
            return [script(suite, one, place, settings, options) for one in chosen]
        return pytest(suite, place, settings, options)


def copy(suite: Suite, checkout: Path, place: Path) -> None:
    """The suite's files with the table's changes, at the same places."""
    for name in (*suite.files, *suite.beside):
        source, target = checkout / name, place / name
        if not source.is_file():
            raise table.AnotherRevision(f"{checkout} has no {name}")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    for change in suite.changes:
        change.apply(place, suite.files)


def environment(url: str, suite: Suite, folders: dict[str, Path], work: Path) -> dict[str, str]:
    """What the tests' process gets."""
    package = ROOT / "python"
    here = [str(package)] if any(package.glob("tinsmith/_core*.so")) else []  # else it is installed
    paths = [*here, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": suite.api_key or "tml-local",
        "TINKER_TELEMETRY": "0",
        "TINSMITH_MODELS": json.dumps({name: str(folder) for name, folder in folders.items()}),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(work / "datasets"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "TOKENIZERS_PARALLELISM": "false",
    }


def launch(
    command: Sequence[str], place: Path, settings: dict[str, str], log: Path, seconds: int | None
) -> int:
    """A process that `tinsmith run` would start, to its end; returns its exit code. What it has
    started is ended with it."""
    whole = [sys.executable, "-m", "tinsmith.launch", *command]
    with log.open("wb") as out:
        process = subprocess.Popen(
            whole, cwd=place, env=settings, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            with contextlib.suppress(ProcessLookupError):  # nobody of its group is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def log_file(options: Namespace, place: Path, name: str) -> Path:
    """Where what a process says is kept; its name is told, since one may take minutes."""
    folder = options.logs or place.parent
    folder.mkdir(parents=True, exist_ok=True)
    print(name, file=sys.stderr, flush=True)
    return folder / f"{name.partition(',')[0].replace(' ', '-')}.log"


def script(
    suite: Suite, command: Sequence[str], place: Path, settings: dict[str, str], options: Namespace
) -> Ended:
    """A program, which passes if it exits 0 and prints what the suite asks for."""
    name = Path(command[0]).stem
    log = log_file(options, place, name)
    code = launch(command, place, settings, log, options.seconds)
    text = log.read_text(errors="replace")
    numbers = [float(one) for one in re.findall(suite.prints, text, re.M)] if suite.prints else []
    wrong = [one for one in numbers if not one <= suite.most]
    if code:
        said = f"exit code {code}: {last_error(text)}"
    elif suite.prints and not numbers:
        said = f"nothing that it printed is like {suite.prints!r}"
    elif wrong:
        said = f"it printed {wrong[0]}, more than {suite.most}"
    else:
        return Ended(name, "passed", f"at most {max(numbers):.1e}" if numbers else "")
    return Ended(name, "failed", said)


def last_error(text: str) -> str:
    """The last line that looks like an exception's, or the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\w*: ", line)]
    return (errors or lines or ["it said nothing"])[-1]


def pytest(suite: Suite, place: Path, settings: dict[str, str], options: Namespace) -> list[Ended]:
    """pytest on the suite's files, in one process; read from its JUnit file."""
    report, log = place.parent / "report.xml", log_file(options, place, suite.name)
    plugin = ["-p", suite.plugin] if suite.plugin else []
    chosen = ["-k", options.only] if options.only else []
    command = [
        "-m", "pytest", "-p", "no:cacheprovider", *plugin, "-q", f"--junitxml={report}",
        f"--timeout={options.seconds}", "--rootdir=.", "-o", "asyncio_mode=auto",
        *suite.files, *chosen, *(f"--deselect={one}" for one in suite.left_out),
    ]  # fmt: skip
    code = launch(command, place, settings, log, None)
    if not report.is_file():
        return [
            Ended(suite.name, "failed", f"pytest ended with {code}: {last_error(log.read_text())}")
        ]
    return read_junit(report.read_text())


def read_junit(text: str) -> list[Ended]:
    """The tests of a JUnit file, named as pytest names them but for folders and `.py`."""
    found = []
    for case in ET.fromstring(text).iter("testcase"):
        parts = case.get("classname", "").split(".")
        first = next((i for i, part in enumerate(parts) if part.startswith("test_")), 0)
        test = "::".join([*parts[first:], case.get("name", "")])
        ends = [one for one in case if one.tag in ("failure", "error", "skipped")]
        if not ends:
            found.append(Ended(test, "passed"))
        else:
            end = "skipped" if ends[0].tag == "skipped" else "failed"
            found.append(Ended(test, end, f"{ends[0].get('message', '')}\n{ends[0].text or ''}"))
    return found


def judge(suite: Suite, found: Sequence[Ended], *, whole: bool) -> list[Judged]:
    """Each test beside the table's row for it; and the table's tests that did not run."""
    rows = []
    for one in found:
        known = suite.known.get(one.test)
        if known is None:
            good, why = one.ended == "passed", first_line(one.said)
        elif one.ended == "passed":
            good, why = False, f"the table says that it fails: {known.why}"
        else:
            good = known.says in one.said
            why = known.why if good else f"not as known: {first_line(one.said)}"
        rows.append(Judged(one.test, one.ended, why, good))
    if whole and len(found) != suite.tests:
        why = f"the table has {suite.tests} tests; is it another revision?"
        rows.append(Judged("(all)", f"{len(found)} ran", why, False))
    return rows


def first_line(text: str) -> str:
    return text.strip().split("\n")[0][:200]


def markdown(suite: Suite, rows: Sequence[Judged]) -> str:
    """The table that is printed; what is not as known stands out."""
    lines = [f"## {suite.name}\n", "| test | | why |", "|---|---|---|"]
    for row in rows:
        why = row.why.replace("|", "\\|")
        lines.append(f"| {row.test} | {row.ended} | {why if row.as_known else f'**{why}**'} |")
    return "\n".join(lines) + "\n"
