"""What the stages found: read from their output, and written as Markdown.

A stage's output is read as one of three kinds: lines of JSON, one for each row of a table, with
`wrong` where a row is not as it should be; pytest's lines; or plain text, of which the end is
kept. What is most telling comes first: the stages with something wrong, what it was, and then
every table."""

import json
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

NO_DEVICE = 3  # the exit code of the first stage where nothing else tells anything
KEPT_LINES = 60  # of a plain text, and of what failed tests say
CRASHED = re.compile(r"worker '\w+' crashed while running '([^']+)'")
COLLECTING = re.compile(r"^_+ ERROR collecting (\S+) _+$(?s:.*?)^E +(.+)$", re.MULTILINE)
TEST_LINE = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] )?(?:(\S+::.+?) )?(PASSED|FAILED|ERROR|SKIPPED)\b(.*)"
)


@dataclass(frozen=True)
class Stage:
    """One row of a command's table (stages.py)."""

    name: str
    tells: str
    command: Callable[[Namespace], list[str]]
    takes_s: float  # on a Hopper, as far as is known
    limit_s: float  # after which it is ended
    needs: tuple[str, ...] = ()  # packages or programs
    reads: str = "text"
    real: bool = False  # means nothing in the emulator
    carried: str = ""  # a file that must have been carried
    group: str = ""  # stages of one group run side by side
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The name of its files, without an ending."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name)


@dataclass
class Found:
    """What a stage found. `state`: right, found something, failed, cut off, passed over, not
    begun."""

    name: str
    tells: str
    state: str
    summary: str
    seconds: float = 0.0
    rows: list[dict] = field(default_factory=list)
    text: str = ""


def found(stage: Stage, text: str, code: int, seconds: float, *, late: bool) -> Found:
    """Reads a stage's output; `late`: it was ended at its limit."""
    result = Found(stage.name, stage.tells, "right", "", round(seconds, 1))
    READERS[stage.reads](result, text)
    if late:
        result.state = "found something" if result.state == "found something" else "cut off"
        result.summary = f"ended at its limit. {result.summary}".rstrip()
    elif code == NO_DEVICE or (code and result.state == "right"):
        result.state = "failed"
        result.summary = f"exit code {code}. {last_line(text)}"
        result.text = result.text or tail(text)
    return result


def read_json(result: Found, text: str) -> None:
    """A row for each line that is a JSON object; the other lines are kept as text."""
    rest = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            result.rows.append(row)
        else:
            rest.append(line)
    wrong = [row for row in result.rows if row.get("wrong")]
    result.text = tail("\n".join(rest))
    result.summary = f"{len(result.rows)} rows, {len(wrong)} wrong"
    if wrong:
        result.state = "found something"
        result.summary += f"; first: {wrong[0]['wrong']}"


def read_pytest(result: Found, text: str) -> None:
    """Counts of the tests' ends, also where the run was cut off; what failures say; the tests that
    hung, or lost the card, and so ended their worker; and the files that can't be imported."""
    counts, wrong, files = Counter(), [], dict(COLLECTING.findall(text))
    for line in text.partition("= short test summary info =")[0].splitlines():
        match = TEST_LINE.match(line)
        name = (match[1] or match[3]).strip() if match else ""
        if "::" not in name:
            continue
        counts[match[2]] += 1
        if match[2] in ("FAILED", "ERROR"):
            wrong.append(name)
    result.summary = ", ".join(f"{count} {end.lower()}" for end, count in counts.items())
    result.summary = result.summary or f"no test ran. {last_line(text)}"
    ended = dict.fromkeys(CRASHED.findall(text), "it hung, or crashed, and ended its process")
    if ended:
        result.summary += f", {len(ended)} ended their process"
    if files:
        result.summary += f", {len(files)} files were not tried"
    if wrong or files or ended:
        result.state = "found something"
        reasons = files | {name: reason(text, name) for name in wrong} | ended
        result.rows = [{"test": name, "wrong": why} for name, why in reasons.items()]
    elif not counts["PASSED"]:
        result.state = "failed"
        result.text = tail(text)


def reason(text: str, name: str) -> str:
    """What pytest's summary says of a test that failed."""
    match = re.search(rf"^(?:FAILED|ERROR) {re.escape(name)} - (.*)", text, re.MULTILINE)
    return match[1] if match else "it failed"


def read_text(result: Found, text: str) -> None:
    result.text, result.summary = tail(text), last_line(text)


READERS = {"json": read_json, "pytest": read_pytest, "text": read_text}


def tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-KEPT_LINES:])


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"


# ---- writing ----


def markdown(results: Sequence[Found], facts: dict) -> str:
    """The report."""
    parts = [
        "# What a card showed\n",
        f"The {facts['part']} command on `{facts['device']}`, {facts['began']}; "
        f"{facts['seconds']} of {facts['limit']:g} s. All that stages said is in logs.tgz.\n",
        "A rehearsal: sizes are tiny, and no time and no share of a roofline means anything.\n"
        if facts["device"] == "cuda-emulated"
        else "",
        "| stage | state | s | |\n|---|---|---|---|",
        *(f"| {r.name} | {r.state} | {r.seconds} | {cell(r.summary)} |" for r in results),
    ]
    wrong = [r for r in results if r.state in ("found something", "failed")]
    parts += ["\n## What is wrong\n" if wrong else "\nNothing that ran was wrong.\n"]
    for result in wrong:
        rows = [row for row in result.rows if row.get("wrong")]
        parts += [f"### {result.name}: {result.summary}\n", table(rows), fenced(result.text)]
    notes = dict.fromkeys(row["note"] for r in results for row in r.rows if row.get("note"))
    if notes:
        parts += ["## What is slower than it could be\n", *(f"- {note}" for note in notes), "\n"]
    for result in results:
        if result.rows or result.text:
            parts += [f"## {result.name}\n", f"{result.tells}.\n"]
            parts += [table(result.rows), fenced(result.text)]
    return "\n".join(filter(None, parts)) + "\n"


def profiles(results: Sequence[Found]) -> str:
    """The tables of steps by kernel, in columns of text."""
    parts = []
    for result in results:
        if result.name.startswith("kernels "):
            parts += [f"{result.name}: {result.summary}\n", *map(line, result.rows), ""]
    return "\n".join(parts) or "no step was looked at by kernel so far\n"


def line(row: dict) -> str:
    """A row in columns: its numbers first, then its names."""
    numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
    names = [str(value) for key, value in row.items() if key not in numbers]
    return "  ".join([*(f"{key} {cell(v):>9}" for key, v in numbers.items()), *names])


def cell(value: object) -> str:
    """A value in a table: a number with four digits, a text without what would end the cell."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")[:300]


def table(rows: Sequence[dict]) -> str:
    """Rows as Markdown, a table for each run of rows with the same columns."""
    lines, columns = [], None
    for row in rows:
        if list(row) != columns:
            columns = list(row)
            lines += ["", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines.append(f"| {' | '.join(cell(value) for value in row.values())} |")
    return "\n".join(lines) + "\n" if lines else ""


def fenced(text: str) -> str:
    return f"```\n{text}\n```\n" if text.strip() else ""
