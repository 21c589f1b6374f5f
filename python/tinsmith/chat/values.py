"""Parses a tool call's bare-text value according to the tool's JSON schema.

Templates write strings bare, and other values as JSON or Python (True, False, None). So `5` may be
a number or a string, and only the schema knows. A schema allows kinds of values, and single values
(enum, const). A text that is one of these is parsed as that; it stays a string if the schema allows
strings and nothing else fits. Other constraints of a schema (ranges, patterns, items) are ignored.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

STRING, NULL = "string", "null"
NUMBERS = frozenset({"integer", "number"})  # "number" is a number that is not an integer
ALL = NUMBERS | {STRING, NULL, "boolean", "array", "object"}

# Type names, JSON Schema's and others that tools use; unknown names are ignored.
TYPES = {one: frozenset({one}) for one in ALL} | {"number": NUMBERS}
TYPES |= dict.fromkeys(("str", "text", "char", "varchar"), TYPES[STRING])
TYPES |= dict.fromkeys(("int", "int32", "int64", "long"), TYPES["integer"])
TYPES |= dict.fromkeys(("float", "double"), NUMBERS)
TYPES |= {"bool": TYPES["boolean"], "none": TYPES[NULL]}
TYPES |= {"list": TYPES["array"], "dict": TYPES["object"], "map": TYPES["object"]}
# The type of a schema without a type, by one of its keys.
ABOUT = {
    "pattern": STRING, "minLength": STRING, "maxLength": STRING, "items": "array",
    "properties": "object", "minimum": "number", "maximum": "number",
}  # fmt: skip
ELSEWHERE = ("anyOf", "oneOf", "allOf", "$ref", "enum", "const")  # these state the type themselves
CONSTANTS = {"True": True, "False": False, "None": None}  # as Python writes them
DEPTH_MAX = 50  # of nested schemas; deeper ones are ignored


@dataclass(frozen=True)
class Allowed:
    """All values of `kinds`, and the single `values` by name."""

    kinds: frozenset[str] = frozenset()
    values: Mapping[str, Any] = field(default_factory=dict)

    def __and__(self, other: "Allowed") -> "Allowed":
        both = {**self.values, **other.values}
        kept = {name: one for name, one in both.items() if self.has(one) and other.has(one)}
        return Allowed(self.kinds & other.kinds, kept)

    def has(self, value: Any) -> bool:
        """Whether a value is allowed."""
        return _kind(value) in self.kinds or _name(value) in self.values


ANY = Allowed(ALL)


def _either(parts: Iterable[Allowed]) -> Allowed:
    kinds, values = set[str](), dict[str, Any]()
    for part in parts:
        kinds |= part.kinds
        values |= part.values
    return Allowed(frozenset(kinds), values)


def read(text: str, schemas: Iterable[Any], root: Any, parse: Callable[[str], Any]) -> Any:
    """The value of a text that fits one of the schemas; they may refer to parts of `root`. `parse`
    reads JSON, and raises ValueError."""
    reader = _Schemas(root)
    allowed = _either(map(reader.allowed, schemas))
    allowed = allowed if allowed.kinds or allowed.values else ANY
    bare = text.strip()
    try:
        value = CONSTANTS[bare] if bare in CONSTANTS else parse(bare)
        name = _name(value)
    except (ValueError, RecursionError):
        return text
    if name in allowed.values:
        return value
    if _name(text) in allowed.values:
        return text
    for kinds in (allowed.kinds, frozenset(map(_kind, allowed.values.values()))):
        # If strings are allowed, text with space around it is one: templates add none to values.
        if _kind(value) in kinds - {STRING} and (STRING not in kinds or text == bare):
            return value
        if STRING in kinds:
            return text
    return value


def properties(schema: Any, key: str) -> list[Any]:
    """An object schema's schemas for a key, in all of its parts."""
    reader = _Schemas(schema)
    return [found for part in reader.parts(schema) for found in _property(part, key)]


def _property(part: Mapping[str, Any], key: str) -> list[Any]:
    named, others = part.get("properties"), part.get("additionalProperties")
    if isinstance(named, Mapping) and key in named:
        return [named[key]]
    return [others] if isinstance(others, Mapping) else []


class _Schemas:
    """Reads schemas, each once: references between them may be circular."""

    def __init__(self, root: Any):
        self._root = root
        self._found: dict[int, Allowed] = {}

    def allowed(self, schema: Any, depth: int = 0) -> Allowed:
        """The values that a schema allows; a reference to itself adds none."""
        if not isinstance(schema, Mapping) or depth > DEPTH_MAX:
            return ANY
        if id(schema) not in self._found:
            self._found[id(schema)] = Allowed()
            self._found[id(schema)] = self._allowed(schema, depth + 1)
        return self._found[id(schema)]

    def _allowed(self, schema: Mapping[str, Any], depth: int) -> Allowed:
        found = Allowed(_types(schema))
        for key in ("anyOf", "oneOf"):
            if options := _list(schema.get(key)):
                found &= _either(self.allowed(one, depth) for one in options)
        for one in _list(schema.get("allOf")):
            found &= self.allowed(one, depth)
        if "$ref" in schema:
            found &= self.allowed(self._target(schema["$ref"]), depth)
        single = _list(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
        if single:
            found &= Allowed(values={_name(one): one for one in single})
        nullable = schema.get("nullable") is True
        return _either((found, Allowed(TYPES[NULL]))) if nullable else found

    def parts(self, schema: Any) -> list[Mapping[str, Any]]:
        """A schema, and all its parts."""
        found: dict[int, Mapping[str, Any]] = {}
        left = [schema]
        while left:
            one = left.pop()
            if not isinstance(one, Mapping) or id(one) in found:
                continue
            found[id(one)] = one
            left += [part for key in ("allOf", "anyOf", "oneOf") for part in _list(one.get(key))]
            left += [self._target(one["$ref"])] if "$ref" in one else []
        return list(found.values())

    def _target(self, reference: Any) -> Any:
        """The target of a reference into the root; None if there is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found = self._root
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, Mapping) else None
        return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The kinds of a schema's own type; all if it has none."""
    said = schema.get("type")
    names = [
        one.lower() for one in (said if isinstance(said, list) else [said]) if type(one) is str
    ]
    if not names and not any(key in schema for key in ELSEWHERE):
        names = [kind for key, kind in ABOUT.items() if key in schema]
    return frozenset(kind for name in names for kind in TYPES.get(name, ALL)) or ALL


def _kind(value: Any) -> str:
    if value is None:
        return NULL
    kinds = {bool: "boolean", int: "integer", float: "number", str: STRING, list: "array"}
    return kinds.get(type(value), "object")


def _name(value: Any) -> str:
    """A unique text for each value: 1, 1.0, "1" and true are four."""
    return json.dumps(value, sort_keys=True)
