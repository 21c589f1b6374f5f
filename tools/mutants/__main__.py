"""Plants one slip after the other in a copy of this checkout, and asks the tests whether they
notice. Run on request; no part of the suite:

    python -m tools.mutants [--only PATTERN] [--jobs N] [--check]

A slip is a few lines of one of the *.txt files beside this one:

    == model/head.c                     the file: its path, or the end of it
    the sum runs one row too far        what is wrong
    - i < count                         the old text, which the file must hold exactly once
    + i <= count                        the new text; none deletes the old one
    > test_losses.py::test_a test_b.py  who should notice: tests, or whole files of them
    ~ nothing reads that row            only where nobody can notice: the reason

Text with several lines has a sign before each, and its own indentation. A row whose old text is not
there once, or whose tests are not there, ends the run before anything is planted: the table then is
to be brought up to date. The tests that a run asks for are first asked without any slip, and must
pass: a failure says nothing otherwise. A slip whose tests hang "took too long", which is neither
noticed nor unnoticed.

Copies lie in the folder for temporary files and stay there, built, for the next run; the checkout
itself is never touched. C is compiled with ccache where there is one: without it every slip in C
costs a whole build. The emulated CUDA device is built before the tests, which would build it
themselves, in their own time: slips in cuda/ are seen through it. A copy's tests run in forks of
one process that has imported the libraries (asker.py)."""

import argparse
import contextlib
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# For one test, for all that a slip asks, and for a build.
TEST_SECONDS, RUN_SECONDS, BUILD_SECONDS = 120, 400, 3600
FAILED = ("FAILED tests", "ERROR tests")  # how pytest's lines of its summary begin
TIMEOUT = re.compile(r"^\++ Timeout \++$|Timeout \(>", re.MULTILINE)  # what pytest-timeout says
EMULATED = """
import sys
sys.path.insert(0, "tests")
from support import op_devices
sys.exit(op_devices.emulated_build()[1] or 0)
"""
BUILDS = {
    "core": ["setup.py", "--quiet", "build_ext", "--inplace", "-j2"],
    "emulated": ["-c", EMULATED],
}
CCACHE = Path("/usr/lib/ccache")  # its compilers' names, where Debian puts them


@dataclass
class Slip:
    """One row of the tables."""

    table: str
    file: Path  # relative to the root
    name: str
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    harmless: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """How it is called."""
        return f"{self.file}: {self.name}"

    def planted(self, text: str) -> str:
        """A file's text with the slip in it."""
        return text.replace("\n".join(self.old), "\n".join(self.new))

    def fault(self) -> str:
        """Why the row is no slip, or ""."""
        text = (ROOT / self.file).read_text()
        count = text.count("\n".join(self.old))
        if not self.old or not self.tests:
            return "the row lacks its old text or its tests"
        if count != 1:
            return f"its old text is there {count} times"
        missing = [test for test in self.tests if not is_there(test)]
        if missing:
            return f"there is no {missing[0]}"
        if self.file.suffix == ".py":
            try:
                compile(self.planted(text), self.file, "exec")
            except SyntaxError as error:
                return f"its new text is no Python: {error}"
        return ""


def place_of(test: str, where: str) -> str:
    """A test with its file's path, which the tables leave out: no two files have one name."""
    file, colons, name = test.partition("::")
    found = list((ROOT / "tests").rglob(file))
    if len(found) != 1:
        raise ValueError(f"{where}: {file} is the name of {len(found)} files of tests")
    return f"{found[0].relative_to(ROOT)}{colons}{name}"


def is_there(test: str) -> bool:
    """Whether there is a test's file, and in it the function."""
    file, _, name = test.partition("::")
    name, path = name.partition("[")[0], ROOT / file
    return path.is_file() and (not name or f"def {name}(" in path.read_text())


def known_files() -> list[str]:
    """The checkout's files as git knows them, new ones too."""
    command = ["git", "-C", ROOT, "ls-files", "-zco", "--exclude-standard"]
    listed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return sorted(name for name in set(listed.split("\0")) if name and (ROOT / name).is_file())


def read_tables() -> list[Slip]:
    """All rows of all tables; ValueError for lines that belong to none."""
    files, slips = known_files(), []
    for table in sorted(HERE.glob("*.txt")):
        file, row = None, None
        for number, line in enumerate(table.read_text().splitlines(), 1):
            where, sign, text = f"{table.name}:{number}", line[:1], line[2:]
            if not line.strip() or sign == "#":
                row = None
            elif line.startswith("== "):
                file, row = one_of(files, line.removeprefix("== "), where), None
            elif file is None or (row is None and sign in "-+>~"):
                raise ValueError(f"{where}: a row is its file, its name, and what follows them")
            elif sign not in "-+>~":
                row = Slip(table.stem, Path(file), line)
                slips.append(row)
            elif sign == ">":
                row.tests += [place_of(test, where) for test in text.split()]
            else:
                {"-": row.old, "+": row.new, "~": row.harmless}[sign].append(text)
    return slips


def one_of(files: list[str], name: str, where: str) -> str:
    """The one file whose path ends so."""
    found = [file for file in files if f"/{file}".endswith(f"/{name}")]
    if name in files:
        return name
    if len(found) != 1:
        raise ValueError(f"{where}: {name} is the end of {len(found)} paths: {found}")
    return found[0]


class TooLong(Exception):
    """A command did not end in its time."""


class Copy:
    """The checkout once more, with a build of its own."""

    def __init__(self, number: int):
        name = f"tinsmith-mutants-{os.getuid()}-{ROOT.name}-{number}"
        self.root = Path(tempfile.gettempdir()) / name
        self.temporary = self.root.with_name(f"{name}-tmp")
        self.stale = {"core", "emulated"}  # what is not built of what stands there
        self.asker: subprocess.Popen[str] | None = None
        names = known_files()
        for name in names:
            source, target = ROOT / name, self.root / name
            if not target.is_file() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        for folder in (
            "csrc",
            "cuda",
            "python",
            "tests",
            "tools",
        ):  # what the checkout does not have now
            for path in sorted((self.root / folder).rglob("*")):
                left = str(path.relative_to(self.root)) not in names and path.suffix != ".so"
                if path.is_file() and left:
                    path.unlink()
        self.environment = os.environ | {
            "PYTHONPATH": str(self.root / "python"),
            "PYTHONDONTWRITEBYTECODE": "1",  # two slips within a second may have the same size
            "TMPDIR": str(self.temporary),
            "CCACHE_BASEDIR": str(self.root),
            "CCACHE_NOHASHDIR": "1",
            "TINSMITH_NVCC": "",  # slips in cuda/ are the emulator's
            "TINSMITH_EMULATE": "eager",  # for tests that choose no mode, whatever they are called
        }
        if CCACHE.is_dir():
            self.environment["PATH"] = f"{CCACHE}:{os.environ['PATH']}"

    def put(self, file: Path, text: str) -> None:
        """Changes a file; what is built of it is to be built again."""
        (self.root / file).write_text(text)
        if file.suffix != ".py":
            self.stale |= {"emulated"} if file.parts[0] == "cuda" else {"core"}
        if "device" in file.parts:  # both sides of the seam read it
            self.stale |= {"core", "emulated"}

    def run(self, command: list[str], seconds: float) -> tuple[int, str]:
        """A command's exit code and what it printed; TooLong without an end. Whatever it has
        started ends with it."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                raise TooLong(f"it took more than {seconds} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, said

    def forked(self, arguments: list[str], seconds: float) -> tuple[int, str]:
        """The same of pytest, in a fork of the copy's asker."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()
        said = self.root.with_name(f"{self.root.name}-said.txt")
        said.write_text("")
        if self.asker is None:
            self.asker = subprocess.Popen(
                [sys.executable, self.root / "tools" / "mutants" / "asker.py"],
                cwd=self.root,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.asker.stdin and self.asker.stdout
        print(json.dumps([str(said), arguments]), file=self.asker.stdin, flush=True)
        group, late = int(self.asker.stdout.readline()), threading.Event()

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

        def end() -> None:
            late.set()
            kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            code = int(self.asker.stdout.readline())
        finally:
            timer.cancel()
            kill()
        if late.is_set():
            raise TooLong(f"it took more than {seconds} s")
        return code, said.read_text(errors="replace")

    def build(self) -> str:
        """Builds what has changed; returns what went wrong."""
        for what, command in BUILDS.items():
            if what not in self.stale:
                continue
            code, said = self.run([sys.executable, *command], BUILD_SECONDS)
            if code:
                return said or f"exit code {code}"
            self.stale.remove(what)
        return ""

    def ask(self, tests: list[str], seconds: float = RUN_SECONDS) -> tuple[int, str]:
        """pytest's exit code for some tests, the first failure ending it, and its last words;
        TooLong where a test has no end."""
        options = ["-n0", "-x", "--tb=line", "-p", "no:cacheprovider"]
        limit = [f"--timeout={TEST_SECONDS}", "--timeout-method=thread"]
        code, said = self.forked([*options, *limit, *tests], seconds)
        if code and TIMEOUT.search(said):
            raise TooLong(f"a test took more than {TEST_SECONDS} s")
        failed = [line for line in said.splitlines() if line.startswith(FAILED)]
        return code, failed[0].partition(" - ")[0] if failed else said[-2000:]


def try_one(copy: Copy, slip: Slip) -> tuple[str, str]:
    """What becomes of a slip, and who said so."""
    original = (ROOT / slip.file).read_text()
    copy.put(slip.file, slip.planted(original))
    try:
        said = copy.build()
        if said:
            return "not built", said[-2000:]
        code, said = copy.ask(slip.tests)
    except TooLong as error:
        return "took too long", str(error)
    finally:
        copy.put(slip.file, original)
    if code in (3, 4, 5):
        return "not asked", said
    if code == 0:
        return ("harmless", "") if slip.harmless else ("UNNOTICED", "")
    if slip.harmless:
        return "NOT HARMLESS", said
    last = said.strip().splitlines()[-1] if said.strip() else ""
    return "noticed", said if said.startswith(FAILED) else f"exit code {code}: {last}"


class Progress:
    """The slips that are left, and what became of the others."""

    def __init__(self, slips: list[Slip]):
        self.ends: list[tuple[str, Slip]] = []
        self.total = len(slips)
        self._left = deque(slips)
        self._lock = threading.Lock()

    def next(self) -> Slip | None:
        """One that is left."""
        with self._lock:
            return self._left.popleft() if self._left else None

    def stop(self) -> None:
        """Leaves none."""
        with self._lock:
            self._left.clear()

    def add(self, end: str, slip: Slip, said: str, seconds: float) -> None:
        """A slip has been tried."""
        with self._lock:
            self.ends.append((end, slip))
            place = f"{len(self.ends)}/{self.total}"
            print(f"{place:>8} {end:13} {seconds:6.1f} s  {slip.title}", flush=True)
            if said:
                print(" " * 33 + said.replace("\n", "\n" + " " * 33), flush=True)


def work(copy: Copy, progress: Progress) -> None:
    """Tries slips until none is left, in a copy of its own. Where it fails, the others stop."""
    try:
        while slip := progress.next():
            begin = time.monotonic()
            end, said = try_one(copy, slip)
            progress.add(end, slip, said, time.monotonic() - begin)
    except BaseException:
        progress.stop()
        raise


def check_without(copy: Copy, slips: list[Slip]) -> str:
    """Asks all tests that the slips name, without any of them; returns what went wrong."""
    tests = sorted({test for slip in slips for test in slip.tests})
    files = {test for test in tests if "::" not in test}
    tests = [*files, *(test for test in tests if test.partition("::")[0] not in files)]
    try:
        said = copy.build()
        if said:
            return said
        code, said = copy.ask(tests, RUN_SECONDS * len(slips))
    except TooLong as error:
        return f"without any slip: {error}"
    return f"without any slip: {said}" if code else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", default="*", metavar="PATTERN", help="slips whose title has this")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies to work in")
    parser.add_argument("--check", action="store_true", help="only see whether the rows apply")
    options = parser.parse_args()
    slips = read_tables()
    faults = [(slip, fault) for slip in slips if (fault := slip.fault())]
    for slip, fault in faults:
        print(f"{slip.table}.txt: {slip.title}: DOES NOT APPLY: {fault}")
    if faults or options.check:
        print(f"{len(slips)} rows, {len(faults)} do not apply")
        return 1 if faults else 0
    pattern = f"*{options.only}*"
    slips = [slip for slip in slips if fnmatch.fnmatch(f"{slip.table} {slip.title}", pattern)]
    copies = [Copy(number) for number in range(options.jobs)]
    begin, fault = time.monotonic(), check_without(copies[0], slips)
    if fault:
        print(fault)
        return 1
    print(f"{len(slips)} slips; their tests pass without any ({time.monotonic() - begin:.0f} s)")
    progress = Progress(slips)
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            for done in as_completed([pool.submit(work, copy, progress) for copy in copies]):
                done.result()  # or what a worker failed with, which ends the run
        except BaseException:
            progress.stop()
            raise
    counts = Counter(end for end, _ in progress.ends)
    print(", ".join(f"{count} {end}" for end, count in counts.items()))
    good = ("noticed", "harmless")
    bad = [f"{end}: {slip.title}" for end, slip in progress.ends if end not in good]
    print("\n".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
