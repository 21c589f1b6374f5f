"""mkdocs' hooks: pages from outside docs/ or generated from the program's tables, and links.

On GitHub, links connect files of the checkout. In the site they connect the pages made from these
files. A link to a file without a page (a source) becomes its text. A page of docs/ that is not in
mkdocs.yml's nav is added under "How to".
"""

import argparse
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Files outside docs/ that become pages of the site.
ELSEWHERE = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "RECIPES.md": "recipes.md",
    "SECURITY.md": "security.md",
    "TINKER.md": "tinker.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
}
COMMANDS = "commands.md"  # generated from the command line's parsers
# A fence, a code span (within its paragraph), or a link: whichever begins first.
LINK_OR_CODE = re.compile(
    r"^ *```.*?^ *```|(?<!`)(?P<ticks>`+)(?!`)(?:(?!\n\n).)+?(?<!`)(?P=ticks)(?!`)"
    r"|(?P<mark>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s]+)\)",
    re.M | re.S,
)
NAME = re.compile(r"(?<=<td><code>)[\w.]{24,}(?=</code>)")  # a long name at the start of a cell
WORD = re.compile(r"(?<=[._])(?=\w)|(?<=[a-z])(?=[A-Z])")  # between the words of a name
# Code without a language that contains a box-drawing character.
DRAWING = re.compile(r'<div class="language-text highlight">(?=<pre><span></span><code>[^<]*[─│])')
OTHERS = "How to"  # the section of pages that are not in the nav


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the pages that are not in the nav."""
    nav = config.nav or []
    named = set(_named(nav))
    found = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    section = next(entry[OTHERS] for entry in nav if isinstance(entry, dict) and OTHERS in entry)
    section.extend(name for name in found if name not in named)
    return config


def _named(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    values = nav.values() if isinstance(nav, dict) else nav
    return [name for value in values for name in _named(value)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from elsewhere, the plots, and the command line's reference."""
    for source, name in ELSEWHERE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for plot in sorted((ROOT / "benchmarks/plots").iterdir()):
        files.append(File.generated(config, f"plots/{plot.name}", abs_src_path=str(plot)))
    files.append(File.generated(config, COMMANDS, content=commands()))
    return files


# ---- links ----


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites a page's links to pages of the site."""
    own = next((a for a, b in ELSEWHERE.items() if b == page.file.src_uri), None)
    folder = Path(own or f"docs/{page.file.src_uri}").parent
    known = {file.src_uri for file in files}

    def there(found: re.Match[str]) -> str:
        mark, text, target = found.group("mark", "text", "target")
        if target is None or target.startswith(("#", "http:", "https:", "mailto:")):
            return found[0]
        path, sharp, anchor = target.partition("#")
        name = site_path(os.path.normpath(folder / path))
        if name in known:
            return f"{mark}[{text}]({name}{sharp}{anchor})"
        if not (ROOT / folder / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {target}, which is not there")
        return text

    return LINK_OR_CODE.sub(there, markdown)


def site_path(path: str) -> str:
    """The path in the site of a file of the checkout."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    return path.removeprefix("docs/").removeprefix("benchmarks/")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Marks character drawings, whose lines must not wrap (lines of commands do). Long names in
    tables may wrap between their words."""
    html = NAME.sub(lambda found: WORD.sub("<wbr>", found[0]), html)
    return DRAWING.sub('<div class="drawing highlight">', html)


# ---- the command line ----


def commands() -> str:
    """The reference of the command line, from its parsers."""
    from tinsmith.cli import commands as cli

    rows = [
        "# Command line",
        "`tinsmith COMMAND …`. Each command's `--help` says the same. An error is one sentence on "
        "stderr: exit code 1, or 2 for a wrong command line, which is refused before anything is "
        "read or started. A size is like `800M` or `12G`.",
    ]
    top = cli.command_line()
    [actions] = [a for a in top._actions if isinstance(a, argparse._SubParsersAction)]
    for name, parser in actions.choices.items():
        rows += [f"## {name}", _sentence(parser.description or cli.COMMANDS[name].help)]
        rows += ["```\n" + "\n".join(cli.COMMANDS[name].examples) + "\n```"]
        table = ["| argument | meaning |", "|---|---|"]
        table += [_row(parser, action) for action in parser._actions if action.dest != "help"]
        rows += ["\n".join(table)] if len(table) > 2 else []
    return "\n\n".join(rows) + "\n"


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    value = action.metavar or (
        "\\|".join(map(str, action.choices)) if action.choices else action.dest.upper()
    )
    if action.option_strings:
        shown = ", ".join(f"`{option}`" for option in action.option_strings)
        shown += "" if action.nargs == 0 else f" `{value}`".replace("\\|", "` or `")
    else:
        shown = f"`{action.metavar or action.dest}`"
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"| {shown} | {_code(text)} |"


def _code(text: str) -> str:
    """A help text as Markdown, with markup characters escaped."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text.endswith(".") else text + "."
