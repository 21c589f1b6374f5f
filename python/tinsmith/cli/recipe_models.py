"""The models that a recipe uses: from its arguments, and from the defaults in its source.

A recipe names a model under a key that ends in model, model_name or llm_name: `model_name=…` among
its arguments, a field or a variable of its source, an argument of a call there. The source is
parsed, not run, so it needs no imports, and this works before a server starts. Only the recipe's
own file is read; for a model that another module names, the server reports an error when it is
requested.
"""

import ast
import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinsmith.models.registry import find_model
from tinsmith.system.home import split_context

KEYS = ("model", "model_name", "llm_name")  # the end of a key that names a model


@dataclass(frozen=True)
class Wanted:
    """The folders of the models on this machine, by name, and the names of the missing ones."""

    found: dict[str, Path] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


def asks_for_help(command: Sequence[str]) -> bool:
    """Whether a recipe's command line asks for its help, which needs no model."""
    return not {"-h", "--help"}.isdisjoint(command[1:])


def wanted_models(command: Sequence[str]) -> Wanted:
    """The models of a command line, `-m MODULE …` or `SCRIPT …`. An argument replaces its key's
    default. An argument that is no model here may mean something else, so it is missing only if it
    looks like a model's name."""
    arguments = _arguments(command)
    given = {key.rpartition(".")[2] for key in arguments}
    defaults = [name for key, name in _defaults(command).items() if key not in given]
    found: dict[str, Path] = {}
    missing = []
    for value in dict.fromkeys([*arguments.values(), *defaults]):
        name, _ = split_context(value)
        try:
            found[name] = find_model(name, {})
        except (OSError, ValueError):
            if _is_name(name):
                missing.append(name)
    return Wanted(found, tuple(missing))


def no_model(command: Sequence[str], missing: Sequence[str]) -> str:
    """The error for a recipe without a model: which one it needs, and how to provide it."""
    if _source(command) is None:
        return f"there is no module {command[1]!r:.200} to run"
    if not missing:
        return (
            "there is no model to serve: give --model NAME=FOLDER, or the recipe a "
            "model_name=... that is a folder or is in the Hugging Face cache"
        )
    name, shown = missing[0], " ".join(command[:2] if command[0] == "-m" else command[:1])
    also = f" (and {', '.join(missing[1:])})" if len(missing) > 1 else ""
    return (
        f"there is no model to serve: the recipe wants {name}{also}, which is not in the Hugging "
        f"Face cache; fetch it (tinsmith pull {name}, or run --pull), or serve a model's folder "
        f"under that name (tinsmith run --model {name}=FOLDER {shown} ...)"
    )


def _arguments(command: Sequence[str]) -> dict[str, str]:
    pairs = (argument.lstrip("-").partition("=") for argument in command)
    return {key: value for key, equals, value in pairs if equals and key.endswith(KEYS)}


def _is_name(text: str) -> bool:
    """Whether a text looks like a hub name, organization/model."""
    parts = text.split("/")
    return len(parts) == 2 and all(part and part.isprintable() for part in parts)


# ---- the recipe's source ----


def _defaults(command: Sequence[str]) -> dict[str, str]:
    """The model names in a recipe's source, by key."""
    source = _source(command)
    if source is None:
        return {}
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return {}  # Python reports the error
    constants = {
        target.id: statement.value.value
        for statement in tree.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    found: dict[str, str] = {}
    for key, node in _pairs(tree):
        value = constants.get(node.id) if isinstance(node, ast.Name) else _literal(node)
        key = key.lower().removeprefix("default_")
        if key.endswith(KEYS) and isinstance(value, str) and _is_name(value):
            found.setdefault(key, value)
    return found


def _source(command: Sequence[str]) -> Path | None:
    """The file that a command line runs."""
    if command[0] != "-m":
        return Path(command[0])
    with contextlib.suppress(Exception):  # of a parent package, or no module: Python reports it
        sys.path.insert(0, "")  # as python -m does
        try:
            spec = importlib.util.find_spec(command[1])
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{command[1]}.__main__")
        finally:
            sys.path.remove("")
        if spec is not None and spec.origin is not None:
            return Path(spec.origin)
    return None


def _pairs(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The names in a source and their values: variables, fields, arguments and their defaults."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif isinstance(node, ast.Assign):
            yield from ((t.id, node.value) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value


def _literal(node: ast.expr) -> object:
    """A constant, or the default of a field like chz.field(default="…")."""
    if isinstance(node, ast.Call):
        defaults = (item.value for item in node.keywords if item.arg == "default")
        node = next(defaults, node)
    return node.value if isinstance(node, ast.Constant) else None
