"""The documentation's site is built without a warning, none of its links is dead, and what its
pages say of the program's tables and options is what the program has.

What its snippets do is in test_docs_snippets.py."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from support import ROOT
from tinsmith.cli import commands
from tinsmith.engine.teachers import losses
from tinsmith.models.registry import FAMILIES
from tinsmith.server.backend import TINKER
from tinsmith.server.dashboard import page
from tinsmith.server.inference import anthropic_messages, openai_text
from tinsmith.server.routes import client_logs, fireworks, metrics

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
SOURCES = [
    *sorted((ROOT / "csrc").rglob("*.c")),
    *sorted((ROOT / "cuda").rglob("*.cu*")),
    *sorted((ROOT / "python").rglob("*.py")),
]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)


def text_of(page_name: str) -> str:
    return (DOCS / page_name).read_text()


# ---- the site ----


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A warning of mkdocs ends the build."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


class Links(HTMLParser):
    """What a page refers to, and the places in it that others can refer to."""

    def __init__(self, file: Path):
        super().__init__()
        self.targets: list[str] = []
        self.places: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.targets.append(value)
            if value and name in ("id", "name"):
                self.places.add(value)


def test_no_link_of_the_site_is_dead(site: Path) -> None:
    pages = {file: Links(file) for file in site.rglob("*.html") if file.name != "404.html"}
    assert len(pages) > len(PAGES)
    for file, found in pages.items():
        for target in found.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert path.exists(), f"{file.name} refers to {target}"
            if parts.fragment and path in pages:
                place = unquote(parts.fragment)
                assert place in pages[path].places, f"{file.name} refers to {target}"


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*")
    styles = re.compile(r"url\(['\"]?(?:https?:)?//|@import")
    for file in site.rglob("*.html"):
        assert not loads.findall(file.read_text()), file.name
    for file in site.rglob("*.css"):
        assert not styles.findall(file.read_text()), file.name


def test_each_page_is_in_the_site_and_in_its_navigation(site: Path) -> None:
    navigation = Links(site / "index.html").targets
    for file in PAGES:
        assert (site / f"{file.stem}.html").is_file(), file.name
        assert f"{file.stem}.html" in navigation, file.name


def test_the_command_lines_reference_has_every_option(site: Path) -> None:
    shown = (site / "commands.html").read_text()
    for name, row in commands.COMMANDS.items():
        section = re.search(rf'<h2 id="{name}">(.*?)(?=<h2 |</article>)', shown, re.S)
        assert section, name
        parser = commands.argument_types.Parser()
        row.options(parser)
        for action in parser._actions:
            for option in action.option_strings:
                assert option in ("-h", "--help") or f"<code>{option}</code>" in section[1], option


def test_examples_of_docstrings_are_code(site: Path) -> None:
    """Below one line of text Markdown takes >>> for three quotations."""
    shown = (site / "api.html").read_text()
    assert "<blockquote>" not in shown
    assert shown.count('<div class="language-pycon highlight">') > 50


def test_a_drawing_keeps_its_lines(site: Path) -> None:
    shown = (site / "architecture.html").read_text()
    assert shown.count('<div class="drawing highlight">') == 1
    assert "drawing" not in (site / "recipes.html").read_text()


def test_long_names_in_tables_break_between_words(site: Path) -> None:
    shown = (site / "support.html").read_text()
    assert "<td><code>Qwen3_<wbr>5Moe<wbr>For<wbr>Conditional<wbr>Generation</code>" in shown
    assert "<td><code>Qwen3ForCausalLM</code>" in shown


# ---- links as GitHub shows them ----


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *PAGES, ROOT / "benchmarks/RESULTS.md"]


def anchors(file: Path) -> set[str]:
    """The places of a page, as GitHub names them."""
    text = FENCE.sub("", file.read_text())
    found = set()
    for title in re.findall(r"^#+ (.*)$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("file", documents(), ids=lambda file: file.name)
def test_no_link_of_a_document_is_dead(file: Path) -> None:
    for target in re.findall(r"\]\(([^()\s]+)\)", FENCE.sub("", file.read_text())):
        path, _, anchor = target.partition("#")
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        there = (file.parent / path).resolve() if path else file
        if there == DOCS / "commands.md":  # docs/hooks.py writes it: see the test above
            assert anchor in ("", *commands.COMMANDS), target
            continue
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), target


# ---- what the pages say, and what is ----


def fences(kind: str) -> Iterator[tuple[str, str]]:
    """The blocks of a kind: the page's name and the text."""
    for file in PAGES:
        for found, text in FENCE.findall(file.read_text()):
            if found == kind:
                yield file.name, text


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Each `tinsmith …` in a block of commands, as words."""
    for kind, prompt in (("", ""), ("console", "$ ")):
        for name, text in fences(kind):
            for line in text.replace("\\\n", " ").splitlines():
                if not line.startswith(prompt):
                    continue  # what a command has printed
                for command in re.split(r"&&|\|", line.removeprefix(prompt)):
                    if command.strip().startswith("tinsmith "):
                        yield name, shlex.split(command.partition(" #")[0])


@pytest.mark.parametrize(("name", "words"), list(command_lines()), ids=lambda item: str(item)[:40])
def test_a_command_line_of_a_page_is_understood(name: str, words: list[str]) -> None:
    given = [word for word in words[1:] if not word.startswith((">", "<"))]
    options = commands.command_line().parse_args(given)
    assert options.run


def test_http_has_every_route() -> None:
    shown = re.findall(r"^\| `((?:GET|POST|PUT|PATCH|DELETE) [^`]+)` \|", text_of("http.md"), re.M)
    tables = [*TINKER, anthropic_messages, client_logs, openai_text, metrics, page, fireworks]
    rows = [*(row for table in tables for row in table.ROUTES), *fireworks.CONTROL]
    assert set(shown) == {f"{method} {path}" for method, path, _ in rows}


def test_losses_has_every_loss_its_inputs_and_its_settings() -> None:
    table = dict(re.findall(r"^\| `(\w+)` \| (.*\|.*) \|$", text_of("losses.md"), re.M)[::-1])
    for row in losses():
        said = table.get(row["name"])
        assert said, f"docs/losses.md has no row for the loss {row['name']}: add it to both tables"
        if row["taught"]:
            said = text_of("losses.md") + text_of("opsd.md")
        for item in row["inputs"]:
            if item["name"] == "logprobs" and row["recorded"]:
                continue  # taken from the record
            if item["name"] not in row["config"]:
                assert f"`{item['name']}`" in said, (row["name"], item["name"])
        for key, default in row["config"].items():
            number = "" if row["taught"] or default is None else f" {default:g}"
            assert f"`{key}`{number}" in said, (row["name"], key)


def test_contributing_names_tests_for_each_folder() -> None:
    """One that is added gets a row: the tests that run first after a change in it."""
    text = FENCE.sub("", (ROOT / "CONTRIBUTING.md").read_text())
    table = dict(re.findall(r"^\| ((?:`[\w/]+`(?:, )?)+) \| (.*) \|$", text, re.M))
    named = {folder for cell in table for folder in re.findall(r"`([^`]+)`", cell)}
    there = {
        str(path.relative_to(ROOT))
        for parent in (ROOT / "csrc", ROOT / "python/tinsmith")
        for path in parent.iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert there | {"cuda"} == named, "CONTRIBUTING.md: a row of its table for each folder"
    for tests in table.values():
        for folder in re.findall(r"tests/\w+", tests):
            assert (ROOT / folder).is_dir(), f"CONTRIBUTING.md names {folder}, which is not there"
        assert "tests/" in tests


def test_support_has_every_family_and_the_versions() -> None:
    text = text_of("support.md")
    for family in FAMILIES:
        assert f"| `{family.architecture}` |" in text
        row = next(line for line in text.splitlines() if f"`{family.architecture}`" in line)
        assert row.endswith("– |") != bool(family.gguf), family.architecture
    project = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.11"' in project and "| Python | 3.11 and later |" in text
    [first, after] = re.findall(r"tinker>=([\d.]+),<([\d.]+)", project)[0]
    last = f"0.{int(after.partition('.')[2]) - 1}"
    assert f"| `tinker` (the SDK) | {first} to {last} |" in text


def test_configuration_has_every_variable_and_extra() -> None:
    text = text_of("configuration.md")
    read = re.compile(r'(?:environ\.get\(|environ\[|getenv", "ss", |_base\()"([A-Z_]+)"')
    sources = "\n".join(file.read_text() for file in [*SOURCES, ROOT / "setup.py"])
    found = set(read.findall(sources)) - {"TERM"}
    assert {"HF_HUB_CACHE", "TINSMITH_ISA", "XDG_DATA_HOME", "TINSMITH_NVCC"} <= found
    for variable in found:
        assert f"`{variable}`" in text, variable
    project = (ROOT / "pyproject.toml").read_text()
    extras = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    for extra in re.findall(r"^(\w+) = \[", extras, re.M):
        assert f"| `{extra}` |" in text, extra


def test_sizes_are_those_that_the_engine_plans() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/sizes.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout in text_of("sizes.md"), "python benchmarks/sizes.py prints the table"


def test_a_link_in_code_is_no_link() -> None:
    """A code span that shows one ended the build: the file that it names is not there."""
    pytest.importorskip("mkdocs")
    from types import SimpleNamespace

    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="support.md"))
    kept = "`a[b](gone.md)` ``[`b`](gone.md)``\n\n```\n[b](gone.md)\n```\n"
    made = hooks.on_page_markdown(f"{kept}[`b`](../TINKER.md)\n", page, None, [])
    assert made == f"{kept}`b`\n"
    with pytest.raises(FileNotFoundError, match=r"support.md links to gone.md"):
        hooks.on_page_markdown("[b](gone.md)", page, None, [])
