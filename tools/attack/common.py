"""What the attack programs share: seeded inputs, mutations of bytes and of JSON, limits, a report.

A program is a module of this folder with `attack`, a context manager that makes what is attacked
and gives `one(attempt)`. That makes one hostile input from `attempt.rng`, notes it, uses it, and
returns a word for what came of it ("taken", "refused"). A sentence is no failure: `refusal` says
which exceptions are one. Any other exception is a failure, and so is an input that takes longer
than HANG_SECONDS or more than MEMORY_BYTES. Input number i of a seed is always the same, whatever
came before it, as long as what is attacked is left as it was.

    python -m tools.attack [NAME ...] [--count N] [--seconds S] [--seed N] [--first N]

runs programs (all of them without a name), each in a process of its own that may crash or hang: the
input is then reported, and the rest goes on. It exits with 1 if there was a failure.
"""

import argparse
import faulthandler
import json
import logging
import marshal
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parent
HANG_SECONDS = 60.0  # of one input; a machine under load is slow
MEMORY_BYTES = 1 << 30  # by which one input may raise the most that the process ever had
LOOK_SECONDS = 0.02  # an input that is quicker can't have touched so much
SHOWN = 4000  # characters of a failure's input

USER = (ValueError, IndexError, OSError, FloatingPointError)  # a sentence: engine/errors.py
BUG = ("a bug", "Traceback")


@dataclass
class Attempt:
    """One input: its number, its random numbers, and its description for a failure's report."""

    number: int
    rng: random.Random
    notes: list[tuple[object, ...]] = field(default_factory=list)

    def note(self, *what: object) -> None:
        """Adds to the description, which is written only where it is asked for."""
        self.notes.append(what)

    @property
    def described(self) -> str:
        """The description."""
        texts = ((item if isinstance(item, str) else repr(item) for item in n) for n in self.notes)
        return "\n".join(map(" ".join, texts))


One = Callable[[Attempt], str]


@contextmanager
def workplace(level: int | None = None) -> Iterator[Path]:
    """A folder for a program, in memory where there is such. Meanwhile tinsmith logs nothing below
    `level`, if one is given."""
    log = logging.getLogger("tinsmith")
    before = log.level
    fast = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=fast) as name:
        try:
            if level is not None:
                log.setLevel(level)
            yield Path(name)
        finally:
            log.setLevel(before)


class Failure(Exception):
    """What an attempt found: a sentence."""


@dataclass
class Report:
    """What came of a program's inputs."""

    name: str
    seed: int
    first: int
    count: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        words = ", ".join(f"{count} {word}" for word, count in sorted(self.outcomes.items()))
        return (
            f"{self.name}: {self.count} inputs from number {self.first} of seed {self.seed} in "
            f"{self.seconds:.1f} s: {words or 'nothing'}; {len(self.failures)} failures"
        )


def refusal(error: BaseException, *names: str, kinds: tuple[type, ...] = USER) -> str:
    """ "refused" for an exception of these kinds with a sentence, which has one of the names in it
    if there are any. Raises Failure for all others."""
    text = str(error)
    if not isinstance(error, kinds):
        raise Failure(f"not a refusal but {type(error).__name__}: {text}") from error
    if len(text) < 8 or any(word in text for word in BUG):
        raise Failure(f"not a sentence: {type(error).__name__}: {text!r}") from error
    if names and not any(name in text for name in names):
        raise Failure(f"the sentence names none of {names}: {text!r}") from error
    return "refused"


def where(error: BaseException) -> str:
    """The function of tinsmith that raised it: how deep an input got."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/tinsmith/" in code.co_filename:
            found = f"{Path(code.co_filename).stem}.{code.co_qualname}"
        trace = trace.tb_next
    return found.replace("<locals>.", "")


# ---- running ----


def run(
    program: ModuleType,
    *,
    count: int,
    seed: int = 0,
    seconds: float = 1e9,
    first: int = 0,
    under_way: Callable[[int], bool] = lambda number: True,
) -> Report:
    """Runs a program's inputs [first, first + count) in this process, for `seconds` at most.
    `under_way` is told each number before it is tried, and says whether it is to be tried."""
    name = program.__name__.rpartition(".")[2]
    report, begin = Report(name, seed, first), time.monotonic()
    with program.attack() as one:
        most = _most_memory()
        for number in range(first, first + count):
            if time.monotonic() - begin > seconds or not under_way(number):
                break
            attempt = Attempt(number, random.Random(f"{name}:{seed}:{number}"))
            report.count += 1
            problem, took = _problem(one, attempt, report.outcomes)
            if took > LOOK_SECONDS:
                before, most = most, _most_memory()
                if not problem and most - before > MEMORY_BYTES:
                    problem = f"input {number} took {(most - before) / 2**20:.0f} MiB"
            if problem:
                again = f"python -m tools.attack {name} --seed {seed} --first {number} --count 1"
                notes = attempt.described
                shown = notes if len(notes) <= SHOWN else notes[:SHOWN] + " …"
                report.failures.append(f"{problem}\n{shown}\nagain: {again}")
    report.seconds = time.monotonic() - begin
    return report


def _problem(one: One, attempt: Attempt, outcomes: Counter[str]) -> tuple[str | None, float]:
    """Tries one input; what is wrong with it, or None, and the seconds that it took."""
    begin = time.monotonic()
    try:
        outcomes[one(attempt)] += 1
    except Failure as failure:
        return f"input {attempt.number}: {failure}", time.monotonic() - begin
    except Exception:
        trace = traceback.format_exc()
        return f"input {attempt.number}:\n{trace}", time.monotonic() - begin
    seconds = time.monotonic() - begin
    slow = f"input {attempt.number} took {seconds:.1f} s" if seconds > HANG_SECONDS else None
    return slow, seconds


def _most_memory() -> int:
    """Bytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def programs() -> list[str]:
    """The names of the programs of this folder."""
    files = sorted(FOLDER.glob("*.py"))
    return [file.stem for file in files if "def attack(" in file.read_text()]


def main(load: Callable[[str], ModuleType], arguments: list[str]) -> int:
    """The command line, of the file's header; `load` imports a program."""
    known = programs()
    parser = argparse.ArgumentParser(prog="python -m tools.attack")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--count", type=int, default=100_000, help="inputs of each (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (%(default)s)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(known):
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    if options.inside:
        return _inside(load(options.names[0]), options)
    return max(_outside(name, options) for name in options.names or known)


def _inside(program: ModuleType, options: argparse.Namespace) -> int:
    """A program's own process: says each number before it tries it, then what came of all.
    SIGTERM ends it before the next input, with its report."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    watched = 0.0

    def under_way(number: int) -> bool:
        nonlocal watched
        if ended.is_set():
            return False
        print(number, flush=True)
        if time.monotonic() - watched > 1.0:  # not each time: it starts a thread
            watched = time.monotonic()
            faulthandler.dump_traceback_later(2 * HANG_SECONDS, exit=True)
        return True

    faulthandler.enable()
    report = run(
        program,
        count=options.count,
        seed=options.seed,
        seconds=options.seconds,
        first=options.first,
        under_way=under_way,
    )
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(vars(report)), flush=True)
    return 0


def _outside(name: str, options: argparse.Namespace) -> int:
    """Runs a program in processes of its own, one after another where one crashes."""
    whole = Report(name, options.seed, options.first)
    begin = time.monotonic()
    while whole.count < options.count and time.monotonic() - begin < options.seconds:
        first = options.first + whole.count
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "tools.attack", name, "--inside"),
                *("--count", str(options.count - whole.count), "--seed", str(options.seed)),
                *("--seconds", str(options.seconds - (time.monotonic() - begin))),
                *("--first", str(first)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        last = ""
        for line in child.stdout:
            last = line
        code = child.wait()
        if last.startswith("{"):
            found = json.loads(last)
            whole.count += found["count"]
            whole.outcomes.update(found["outcomes"])
            whole.failures += found["failures"]
            break  # a process that crashed took the outcomes of its other inputs with it
        if not last:
            print(f"{name} could not begin: exit code {code}", file=sys.stderr)
            return 1
        number = int(last)
        whole.count = number + 1 - options.first
        again = f"python -m tools.attack {name} --seed {options.seed} --first {number} --count 1"
        whole.failures.append(f"input {number} ended the process: exit code {code}\nagain: {again}")
    whole.seconds = time.monotonic() - begin
    for failure in whole.failures:
        print(failure, file=sys.stderr)
    print(whole, flush=True)
    return 1 if whole.failures else 0


# ---- mutations ----

INTEGERS = (
    0, 1, -1, 2, 3, 7, 127, 128, 255, 256, 4096, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, -(2**31),
    2**32, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400,
)  # fmt: skip
FLOATS = (
    0.5, -0.0, 1e-45, 1e-320, 1e38, 3.5e38, 1e308, -1e308, float("nan"), float("inf"),
    float("-inf"), 2.5, -1.5,
)  # fmt: skip
STRINGS = (
    "", "a", "\0", "\ud800", "é", "../../x", "/etc/passwd", "x" * 5000, "{}", "%s%n", "nan", "1",
    "-1", "\n", "~", "a/b", "__class__",
)  # fmt: skip


def hostile(rng: random.Random) -> Any:
    """A JSON value that a reader may not expect."""
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(INTEGERS)
    if kind == 3:
        return rng.choice(FLOATS)
    if kind == 4:
        return rng.choice(STRINGS)
    if kind == 5:
        return rng.choice((None, True, False))
    if kind == 6:
        return [hostile(rng) for _ in range(rng.randrange(4))]
    return {rng.choice(STRINGS): hostile(rng) for _ in range(rng.randrange(3))}


def changed(rng: random.Random, value: Any, times: int | None = None) -> Any:
    """A copy of a JSON value with a few (`times`) of its parts changed."""
    value = _copy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5)) if times is None else times):
        value = _changed_once(rng, value)
    return value


def _copy(value: Any) -> Any:
    """A copy of a JSON value; copy.deepcopy takes ten times as long."""
    return marshal.loads(marshal.dumps(value))


def _changed_once(rng: random.Random, value: Any) -> Any:
    places = _places(value) if isinstance(value, dict | list) else []
    if not places or rng.random() < 0.02:
        return hostile(rng)
    holder, key = rng.choice(places)
    act = rng.randrange(10)
    if act < 5:
        holder[key] = hostile(rng)
    elif act == 5:
        del holder[key]
    elif act == 6:
        holder[key] = _nudged(rng, holder[key])
    elif act == 7:  # another part of the whole, here
        other, name = rng.choice(places)
        holder[key] = _copy(other[name])
    elif isinstance(holder, list):
        holder.insert(key, _copy(holder[key]))
    elif act == 8:
        holder[rng.choice((*STRINGS, *map(str, holder)))] = holder[key]
    else:
        holder[f"{key}{rng.choice(STRINGS)}"] = hostile(rng)
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(holder, key or index) of every part of a JSON value."""
    found, left = [], [value]
    while left:
        item = left.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item))
        for key in keys:
            found.append((item, key))
            if isinstance(item[key], dict | list):
                left.append(item[key])
    return found


def _nudged(rng: random.Random, value: Any) -> Any:
    """Something near a value, of its own kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1, -value, value, 2**31, 2**32, -(2**63)))
    if isinstance(value, float):
        return value * rng.choice((-1.0, 0.0, 1e30, 1e300, 1e-30))
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return value[:at] + rng.choice(STRINGS) + value[at + rng.randrange(2) :]
    return [value]


def json_text(rng: random.Random, value: Any) -> bytes:
    """JSON text of a value, which now and then is not quite JSON."""
    try:
        text = json.dumps(value, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")
    except ValueError:  # Python writes no integer that is longer than its limit
        text = b"1" + b"0" * 5000
    act = rng.randrange(40)
    if act == 0:
        return changed_bytes(rng, text)
    if act == 1:
        return b"[" * rng.choice((10, 1000, 200_000)) + text
    if act == 2:
        return b"\xef\xbb\xbf" + text
    if act == 3 and text.startswith(b"{"):  # a key that is there twice
        return text[:-1] + b", " + text[1:]
    if act == 4:
        return text.replace(b"1", b"1" + b"0" * rng.choice((20, 400, 5000)), 1)
    return text


def changed_json(rng: random.Random, text: bytes) -> bytes:
    """JSON text with some of its parts changed, or, where it is none any more, some bytes."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return changed_bytes(rng, text)
    return json_text(rng, changed(rng, value))


def changed_bytes(rng: random.Random, data: bytes, times: int | None = None) -> bytes:
    """A copy of bytes, changed in a few places: bits, numbers, stretches."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16)) if times is None else times):
        at = rng.randrange(len(found) + 1)
        size = min(rng.choice((1, 2, 4, 8, 64, 1000)), len(found) - at)
        act = rng.randrange(7)
        if act == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif act == 1:
            found[at : at + size] = rng.randbytes(size)
        elif act == 2:
            found[at : at + size] = bytes([rng.choice((0, 255, 0x7F, 0x80, 0x22, 0x7B))]) * size
        elif act == 3:
            number = rng.choice(INTEGERS) % (1 << 64)
            found[at : at + 8] = number.to_bytes(8, rng.choice(("little", "big")))
        elif act == 4:
            del found[at : at + size]
        elif act == 5:
            other = rng.randrange(len(found) + 1)
            found[at:at] = found[other : other + size]
        else:
            del found[at:]
    return bytes(found)
