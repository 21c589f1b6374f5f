"""The house style's limits and the direction of dependencies, checked on the sources themselves."""

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from tinsmith.models.registry import FAMILIES

CUDA_FILES = sorted(p for p in (ROOT / "cuda").rglob("*") if p.suffix in (".cu", ".cuh", ".h"))
C_FILES = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".c", ".h", ".inc"))
C_FILES += CUDA_FILES
FOLDERS = ("python", "tests", "benchmarks", "tools")
PYTHON_FILES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
PAGE_FILES = sorted(
    p
    for p in (ROOT / "python/tinsmith/server/dashboard/static").iterdir()
    if p.suffix in (".js", ".css", ".html")
)
FILES = [*C_FILES, *PYTHON_FILES, ROOT / "setup.py"]

LINE, FUNCTION, SOURCE_FILE, TEST_FILE, PAGE_FILE = 100, 75, 600, 900, 400
DOCUMENT_LINE = 120  # of Markdown
ARCHITECTURE, GLOSSARY = 250, 40


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def each(things: Iterable[Any]) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Makes of a test of one thing a test of all, which tells all that is wrong."""

    def of(test_one: Callable[[Any], None]) -> Callable[[], None]:
        def test_all() -> None:
            wrong = []
            for thing in things:
                try:
                    test_one(thing)
                except AssertionError as error:
                    wrong.append(f"{name_of(thing) if isinstance(thing, Path) else thing}: {error}")
            assert not wrong, "\n".join(wrong)

        test_all.__doc__ = test_one.__doc__
        return test_all

    return of


@each(FILES)
def test_lines_and_files_are_short(file: Path) -> None:
    lines = file.read_text().splitlines()
    long = [number for number, line in enumerate(lines, 1) if len(line) > LINE]
    assert not long, f"lines {long} are longer than {LINE} columns"
    limit = TEST_FILE if file.is_relative_to(ROOT / "tests") else SOURCE_FILE
    assert len(lines) <= limit, "split it: a file has one sentence that says what it is"


@each(PAGE_FILES)
def test_the_pages_files_are_short(path: Path) -> None:
    lines = path.read_text().splitlines()
    long = [number for number, line in enumerate(lines, 1) if len(line) > LINE]
    assert not long, f"lines {long} are longer than {LINE} columns"
    assert len(lines) <= PAGE_FILE
    assert path.suffix == ".html" or lines[0].startswith(("// ", "/* ")), "no header comment"


@each(
    (
        *("README.md", "ARCHITECTURE.md", "STYLE.md", "CHANGELOG.md", "SECURITY.md"),
        "cuda/README.md",
        *(name_of(path) for path in sorted((ROOT / "docs").glob("*.md"))),
        *(name_of(path) for path in sorted((ROOT / "csrc").rglob("*.md"))),
    ),
)
def test_lines_of_the_documents_are_short(name: str) -> None:
    """But for what a program has printed, which stands as it was."""
    text = re.sub(r"^```console\n.*?^```", "", (ROOT / name).read_text(), flags=re.M | re.S)
    long = [line for line in text.splitlines() if len(line) > DOCUMENT_LINE]
    assert not long, f"longer than {DOCUMENT_LINE} columns: {long}"


def test_the_architecture_is_read_in_one_sitting() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= ARCHITECTURE
    words = re.findall(r"^\| .* \|$", text.partition("## Glossary")[2], re.M)[1:]
    assert 10 < len(words) <= GLOSSARY


@each(FILES)
def test_every_file_says_what_it_is(file: Path) -> None:
    text = file.read_text()
    if file.suffix == ".py":
        assert file.name == "setup.py" or ast.get_docstring(ast.parse(text)), "no header docstring"
    else:
        csrc = ROOT / "csrc"
        shown = str(file.relative_to(csrc if file.is_relative_to(csrc) else ROOT))
        assert text.startswith(f"/* {shown} - "), f"the header comment must begin '/* {shown} - …'"


@each(FILES)
def test_nothing_is_left_for_later(file: Path) -> None:
    words = "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"])
    assert not re.search(rf"\b({words})\b", file.read_text())


def c_functions(text: str) -> Iterator[tuple[int, int]]:
    """(first line, lines) of each function body: '{' and '}' alone in column 0."""
    start = None
    for number, line in enumerate(text.splitlines(), 1):
        if line == "{":
            start = number
        elif line == "}" and start:
            yield start, number - start
            start = None


@each(C_FILES)
def test_c_functions_are_short(path: Path) -> None:
    long = [(line, size) for line, size in c_functions(path.read_text()) if size > FUNCTION]
    assert not long, f"functions over {FUNCTION} lines: {long}"


@each(PYTHON_FILES)
def test_python_functions_are_short(path: Path) -> None:
    """Their docstrings are not counted."""
    long = [
        (node.name, lines)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := lines_of(node)) > FUNCTION
    ]
    assert not long, f"functions over {FUNCTION} lines: {long}"


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    lines = (node.end_lineno or 0) - node.lineno
    return lines - ((first.end_lineno or 0) - first.lineno if ast.get_docstring(node) else 0)


@each(C_FILES)
def test_the_library_never_prints_exits_or_reads_the_environment(path: Path) -> None:
    code = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    found = re.findall(r"\b(?:printf|puts|fprintf|exit|abort|getenv)\s*\(", code)
    assert not found


# What a file of each folder may include of ours, beside its own folder's.
MAY_INCLUDE = {
    "csrc/device": set(),
    "csrc/cpu/runtime": {"csrc/device"},
    "csrc/cpu/weights": {"csrc/device", "csrc/cpu/runtime"},
    "csrc/cpu/product": {"csrc/cpu/runtime", "csrc/cpu/weights"},
    "csrc/cpu/pointwise": {"csrc/cpu/runtime", "csrc/cpu/weights"},
    "csrc/cpu/attention": {"csrc/cpu/runtime", "csrc/cpu/product", "csrc/cpu/pointwise"},
    "csrc/cpu/delta": {"csrc/device", "csrc/cpu/runtime", "csrc/cpu/product"},
    "csrc/cpu/head": {"csrc/device", "csrc/cpu/runtime"},
    "csrc/cpu/optimizer": {"csrc/device", "csrc/cpu/runtime"},
    "csrc/cpu": {
        *("csrc/device", "csrc/cpu/runtime", "csrc/cpu/weights", "csrc/cpu/product"),
        "csrc/cpu/attention",
    },
    "csrc/registry": {"csrc/device", "csrc/cpu"},
    "csrc/vision": {"csrc/device"},
    "csrc/model": {"csrc/device", "csrc/registry", "csrc/vision"},
    "csrc/model/layers": {"csrc/device", "csrc/model"},
    "csrc/model/optimizers": {"csrc/model"},
    "csrc/functional": {"csrc/device"},
    "csrc/train": {"csrc/device", "csrc/model", "csrc/model/layers"},
    "csrc/sampling": {"csrc/device", "csrc/model", "csrc/model/layers"},
    "cuda/emulator": set(),
    "cuda/runtime": {"csrc/device", "cuda/emulator"},
    "cuda/weights": {"csrc/device", "cuda/runtime"},
    "cuda/product": {"cuda/runtime", "cuda/weights"},
    "cuda/head": {"csrc/device", "cuda/runtime"},
    "cuda/pointwise": {"cuda/runtime", "cuda/weights", "cuda/product", "cuda/head"},
    "cuda/attention": {"cuda/runtime"},
    "cuda/delta": {"csrc/device", "cuda/runtime", "cuda/attention"},
    "cuda/optimizer": {"cuda/runtime"},
    "cuda": {
        *("csrc/device", "cuda/emulator", "cuda/runtime", "cuda/weights", "cuda/product"),
    },
    "csrc/binding": {
        *("csrc/device", "csrc/registry", "csrc/cpu", "csrc/model", "csrc/model/optimizers"),
        *("csrc/functional", "csrc/train", "csrc/sampling"),
    },
}


def folder_of(path: Path) -> str:
    return str(path.parent.relative_to(ROOT))


@each(C_FILES)
def test_dependencies_point_one_way(path: Path) -> None:
    text, folder = path.read_text(), folder_of(path)
    for included in re.findall(r'#include "([^"]+)"', text):
        target = (path.parent / included).resolve()
        assert target.exists(), included
        assert folder_of(target) in MAY_INCLUDE[folder] | {folder}, included
        if folder_of(target) == "csrc/cpu" != folder:
            assert target.name == "device.h", "it opens the CPU: nobody knows more of it"
    if folder != "csrc/binding":
        assert "Python.h" not in text
    if path.name != "arrays.c":
        assert "numpy/" not in text


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The groups of files that reach one another."""

    def reach(start: str) -> set[str]:
        found, new = set(), [start]
        while new:
            for name in edges[new.pop()] - found:
                found.add(name)
                new.append(name)
        return found

    reached = {name: reach(name) for name in edges}
    groups = {
        tuple(sorted({other for other in reached[name] if name in reached[other]}))
        for name in edges
        if name in reached[name]
    }
    return [list(group) for group in groups]


def test_no_folder_includes_one_that_includes_it() -> None:
    assert {folder_of(path) for path in C_FILES} == set(MAY_INCLUDE)
    assert not circles(MAY_INCLUDE)


@functools.cache
def code_of(path: Path) -> str:
    """A file without comments, without its includes of headers, and with the names by which an
    instruction set's functions are called, `cpu_avx2_table`, as they are defined: `CPU_table`."""
    text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    text = re.sub(r"\bCPU\((\w+)\)", r"CPU_\1", text)
    return re.sub(r"\bcpu_(?:generic|avx2|avx512\w*|amx)_(\w+)", r"CPU_\1", text)


DEFINITION = re.compile(
    r"^(?!.*\bstatic\b|typedef|#)[A-Za-z_][\w *]*?\**\b(\w+)\([^;{]*\)\n\{", re.M
)
DECLARATION = re.compile(r"^(?!.*\bstatic\b|typedef|#)[A-Za-z_][\w *]*?\**\b(\w+)\([^;{]*;", re.M)
OPS = re.findall(r"^OP\((\w+),", (ROOT / "csrc/device/ops.inc").read_text(), re.M)
SOURCES = [path for path in C_FILES if path.suffix in (".c", ".cu")]


@functools.cache
def definitions(suffix: str) -> dict[str, Path]:
    """The functions that other files can call, and where they are."""
    files = [path for path in SOURCES if path.suffix == suffix]
    return {name: path for path in files for name in DEFINITION.findall(code_of(path))}


@pytest.mark.parametrize("suffix", (".c", ".cu"))
def test_no_file_calls_back_into_a_file_that_calls_it(suffix: str) -> None:
    home = definitions(suffix)
    edges = {
        name_of(path): {
            name_of(home[name])
            for name in set(re.findall(r"\b\w+\b", code_of(path))) & set(home)
            if home[name] != path
        }
        for path in set(home.values())
    }
    if suffix == ".c":  # the table has every op
        edges["csrc/cpu/table.c"] |= {name_of(home[f"CPU_{name}"]) for name in OPS}
        assert len(edges["csrc/cpu/table.c"]) > 20
    assert len(home) > 80
    assert not circles(edges)


def test_declarations_are_found() -> None:
    text = "Status a(int x,\n         int y);\nvoid CPU_b(float *to);\nstatic int c(void);\n"
    assert DECLARATION.findall(text + "static inline int d(int x)\n{\n    return f(x);\n}\n") == [
        *("a", "CPU_b")
    ]


@each([p for p in C_FILES if p.suffix in (".h", ".cuh")])
def test_a_header_is_its_files(path: Path) -> None:
    """What it declares is defined in the file beside it that has its stem."""
    home = definitions(".cu" if path.suffix == ".cuh" else ".c")
    for name in DECLARATION.findall(code_of(path)):
        if name in home:
            assert home[name].with_suffix(path.suffix) == path, f"{name} is in {home[name]}"


TYPE = re.compile(r"^(?:typedef )?(?:struct|enum|union) (\w+)\s*\{|^\} (\w+);", re.M)


@pytest.mark.parametrize("folder", ("csrc", "cuda"))
def test_no_two_types_have_one_name(folder: str) -> None:
    """Each of the two is a language of its own."""
    found: dict[str, set[str]] = {}
    for path in C_FILES:
        if path.is_relative_to(ROOT / folder):
            text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
            for names in TYPE.findall(text):
                found.setdefault("".join(names), set()).add(name_of(path))
    assert len(found) > 30
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_a_circle_would_be_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert circles(edges) == [["a", "b", "c"]]


# The ops whose kernels a GPU has beside those of other products, of which they are made.
BESIDE = {"grouped_linear", "grouped_linear_backward", "grouped_matmul", "grouped_gradient"}


@each(OPS)
def test_an_op_has_one_stem_on_both_devices(op: str) -> None:
    cpu, cuda = definitions(".c")[f"CPU_{op}"], definitions(".cu")[f"cuda_{op}"]
    stems = [
        file.relative_to(ROOT / folder).with_suffix("")
        for file, folder in ((cpu, "csrc/cpu"), (cuda, "cuda"))
    ]
    assert (stems[0] == stems[1]) == (op not in BESIDE), stems


def test_the_list_of_kernels_has_every_op_with_its_file() -> None:
    text = (ROOT / "cuda/README.md").read_text()
    home, listed = definitions(".cu"), set[str]()
    for names, files in re.findall(r"^\|[^|]*\|([^|]*)\|([^|]*)\|$", text, re.M):
        for op in re.findall(r"`(\w+)`", names):
            assert f"`{home[f'cuda_{op}'].relative_to(ROOT / 'cuda')}`" in files, op
            listed.add(op)
    assert listed == set(OPS)


@each(CUDA_FILES)
def test_cublaslt_and_ptx_have_one_place_each(path: Path) -> None:
    code = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    if path.name != "ptx.cuh":
        assert path.name == "emulator.h" or not re.search(r"\basm\b", code), "PTX: ptx.cuh only"
    if path.name not in ("matmul.cu", "cublaslt.cuh", "buckets.cuh", "choices.cuh"):
        assert "cublas" not in code.lower()


# What the Python of each folder of tinsmith may import of ours; "" is the package itself.
MAY_IMPORT = {
    "system": set(),
    "formats": {"system"},
    "models": {"formats", "system"},
    "checkpoints": {"models", "formats", "system"},
    "custom_losses": {"system"},
    "ops": set(),
    "torch": {"ops"},
    "chat": {"checkpoints", "formats", "system"},
    "engine": {"chat", "checkpoints", "models", "formats", "custom_losses", "ops", "system"},
    "replicas": {"engine", "checkpoints", "models", "system"},
    "api": {"replicas", "engine", "chat", "checkpoints", "models", "ops", "system"},
    "server/wire": {"engine", "checkpoints", "models", "formats", "custom_losses", "system"},
    "server/records": {"server/wire", "engine", "chat", "checkpoints", "formats", "system"},
    "server/http": {"server/records", "engine", "system"},
    "server/service": {
        *("server/http", "server/records", "server/wire"),
        *("engine", "checkpoints", "models", "custom_losses", "system"),
    },
    "server/routes": {
        *("server/service", "server/http", "server/records", "server/wire"),
        *("engine", "checkpoints", "models", "custom_losses", "system"),
    },
    "server/inference": {
        *("server/routes", "server/service", "server/http", "server/wire"),
        *("engine", "chat", "models"),
    },
    "server/dashboard": {
        *("server/routes", "server/service", "server/http", "server/records"),
        *("engine", "chat", "checkpoints", "system"),
    },
    "server": {
        *("server/dashboard", "server/inference", "server/routes", "server/service"),
        *("server/http", "server/records", "replicas"),
        *("engine", "checkpoints", "models", "system"),
    },
    "": {"server", "api", "ops"},
    "cli": {
        *("", "server", "server/service", "server/http", "server/records", "api"),
        *("replicas", "engine", "chat", "checkpoints", "models", "formats", "system"),
    },
    "demo": {"server", "system"},
    "recipes": {"demo"},
    "compare": {
        *("recipes", "demo", "cli", "server"),
        *("checkpoints", "models", "formats", "system"),
    },
}


def folder_of_module(module: str) -> str:
    """The folder of a module of ours, by its dotted name."""
    folder = modules()[module].parent.relative_to(ROOT / "python/tinsmith")
    return str(folder).removeprefix(".")


def test_no_folder_imports_what_imports_it() -> None:
    assert not circles(MAY_IMPORT)


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    root = ROOT / "python"
    found = {}
    for path in sorted((root / "tinsmith").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, *, functions: bool = True) -> set[str]:
    """Modules of ours that a Python file imports, in its functions or not."""
    known, found, todo = modules(), set(), [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in known or name == "tinsmith._core"}


@each(modules())
def test_python_folders_import_one_way(module: str) -> None:
    folder = folder_of_module(module)
    folders = {
        folder_of_module(name)
        for name in imports(modules()[module]) - {"tinsmith._core", "tinsmith"}
    }
    assert folders <= MAY_IMPORT[folder] | {folder}


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for module, path in modules().items():
        tree = ast.parse(path.read_text())
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
                given = [target.id for target in node.targets if isinstance(target, ast.Name)]
                # Aliases of types: constants are in capitals.
                names += [name for name in given if name[0].isupper() and not name.isupper()]
        for name in names:
            found.setdefault(name, []).append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


# The modules that import torch: for its users, and to evaluate custom losses. Who imports one of
# these has torch, so the others import them in a function that is called when it is wanted.
TORCH = {
    "tinsmith.torch",
    "tinsmith.torch.operators",
    "tinsmith.custom_losses.evaluation",
    "tinsmith.custom_losses.functions",
}
# A maintainer's scripts: they make the shipped models.
MAKERS = {"make_model.py", "make_seeing_model.py"}


def test_the_engine_needs_neither_torch_nor_transformers() -> None:
    for module, path in modules().items():
        if path.name in MAKERS:
            continue
        tree = ast.parse(path.read_text())
        names = {
            alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        } | {
            (node.module or "").split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
        }
        allowed = {"torch"} if module in TORCH else set()
        assert not names & {"torch", "transformers", "safetensors", "peft"} - allowed, module


@each(sorted(modules().keys() - TORCH))
def test_what_imports_torch_is_imported_when_it_is_wanted(module: str) -> None:
    path = modules()[module]
    assert not imports(path, functions=False) & TORCH
    assert not imports(path) & TORCH or module == "tinsmith.custom_losses.custom_loss"


@functools.cache
def strings(path: Path) -> list[str]:
    """The string constants in a file's code."""
    text = path.read_text()
    if path.suffix == ".py":
        nodes = ast.walk(ast.parse(text))
        return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return re.findall(r'"([^"\n]*)"', re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def test_no_code_asks_for_a_familys_name() -> None:
    """A family is its row of families.py, where alone its names stand: what differs between two
    families is a column, which code reads. (GGUF's tokenizers have names of their own, which are
    the same words.)"""
    others = {name: path for name, path in modules().items() if "gguf_tokenizer" not in name}
    rows = others["tinsmith.models.families"]
    for family in FAMILIES:
        for name in (family.name, family.architecture):
            found = [path for path in [*C_FILES, *others.values()] if name in strings(path)]
            assert found == [rows] and strings(rows).count(name) == 1, (name, found)


def test_the_server_does_not_know_the_c_engine() -> None:
    for module, path in modules().items():
        if folder_of_module(module).startswith("server"):
            assert "tinsmith._core" not in imports(path), module


# ---- tests ask no clock ----

ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
READING = re.compile(r"time\.(time|monotonic|perf_counter|process_time|thread_time)(_ns)?\(\)")


def clock_spans(text: str) -> list[int]:
    """The lines of a Python text that compare a clock's reading, or subtract it from another one:
    calls of a clock, and names that a function gives to what they return."""
    found = set[int]()
    for scope in ast.walk(ast.parse(text)):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        names = set[str]()
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign):
                sides = node.targets[0], node.value
                both = all(isinstance(side, ast.Tuple) for side in sides)
                for name, value in zip(*(s.elts if both else [s] for s in sides), strict=False):
                    if READING.fullmatch(ast.unparse(value)):
                        names.add(ast.unparse(name))
        for node in ast.walk(scope):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ORDERS):
                sides = {ast.unparse(side) for side in (node.left, *node.comparators)}
                if sides & names or READING.search(ast.unparse(node)):
                    found.add(node.lineno)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
                sides = map(ast.unparse, (node.left, node.right))
                if all(side in names or READING.fullmatch(side) for side in sides):
                    found.add(node.lineno)
    return sorted(found)


@each(sorted((ROOT / "tests").rglob("*.py")))
def test_no_test_asks_how_long_something_took(path: Path) -> None:
    """A busy machine takes as long as it likes. Count what happens, or give the program a clock of
    the test's. What hangs ends by the test's timeout (support/waiting.py)."""
    assert not clock_spans(path.read_text())


def test_a_span_of_a_clock_would_be_found() -> None:
    text = """
        start, other = time.monotonic(), 0
        end = time.monotonic() + 60
        while time.monotonic() < end: pass
        took = time.monotonic() - start
        assert time.perf_counter_ns() - start < 1
        assert end - other < 1
    """
    assert clock_spans("def test():" + text) == [4, 5, 6]
