"""Values of tool calls in XML: what a template writes is read as the value that it was, by the
tool's schema. jsonschema says which values a schema allows."""

import json
import random
from collections.abc import Callable
from typing import Any

import jinja2
import jsonschema
import pytest
from tinsmith.chat.tools import FORMATS, ToolCall, ToolReader

# As Qwen3.5's template writes values, and as Qwen3-Coder's does.
WRITERS = {
    "json": "{{ v | string if v is string else v | tojson }}",
    "python": "{{ v | tojson if v is mapping or (v is sequence and v is not string) else"
    " v | string }}",
}
DEFS = {
    "$defs": {
        "Name": {"type": "string"},
        "Level": {"enum": ["1", "2", "None"]},
        "Tree": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Tree"}}, {"type": "null"}]},
    },
    "definitions": {"a/b": {"type": "integer"}},
}
SCHEMAS: dict[str, Any] = {
    "string": {"type": "string"},
    "nullable": {"type": ["string", "null"]},
    "any of string and null": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "one of": {"oneOf": [{"type": "null"}, {"type": "string", "minLength": 2}]},
    "all of": {"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "boolean"]}]},
    "reference": {"$ref": "#/$defs/Name"},
    "escaped reference": {"$ref": "#/definitions/a~1b"},
    "a reference or null": {"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}]},
    "reference to values": {"$ref": "#/$defs/Level", "description": "how much"},
    "in a circle": {"$ref": "#/$defs/Tree"},
    "names": {"enum": ["true", "0", "null", "x"]},
    "mixed values": {"enum": [1, "1.5", True, None, [1, 2]]},
    "constant": {"const": "7"},
    "a number or a value": {"anyOf": [{"type": "number"}, {"enum": ["auto", "none"]}]},
    "boolean": {"type": "boolean"},
    "boolean or null": {"type": ["boolean", "null"]},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "text or number": {"type": ["string", "number"]},
    "text or texts": {"anyOf": [{"type": "string"}, {"type": "array"}]},
    "array": {"type": "array"},
    "object": {"type": "object"},
    "anything": {},
    "true": True,
}
DRAWN: tuple[Any, ...] = (
    "", "x", "true", "True", "false", "null", "None", "0", "1", "5", "7", "1.5", "-3", "1e5", " 5",
    "5 ", "[1, 2]", '{"a": 1}', '"quoted"', "auto", "none", "two\nlines", "\n", "Zürich <b>", "NaN",
    "Infinity", "1e999", "007", "[", "ab",
    True, False, None, 0, 1, 5, 7, -3, 10**20, 1.5, 1e-7, -0.25,
    [], [1, 2], ["a", None], [[], [None]], {}, {"a": {"b": [True, 1.5, "ü"]}},
)  # fmt: skip

# Of these, what only one value is written like.
CLEAR = [one for one in DRAWN if one in ("", "x", "ab", "auto") or not isinstance(one, str)]


def call(text: str) -> str:
    parameter = f"<parameter=it>\n{text}\n</parameter>"
    return f"<tool_call>\n<function=f>\n{parameter}\n</function>\n</tool_call>"


def read(text: str, parameters: dict[str, Any]) -> Any:
    """The argument `it` of a call of f."""
    reader = ToolReader(FORMATS[0], {"f": parameters})
    [found] = [*reader.add(call(text)), *reader.end()]
    assert isinstance(found, ToolCall)
    return json.loads(found.arguments)["it"]


@pytest.fixture(scope="module", params=WRITERS)
def write(request: pytest.FixtureRequest) -> Callable[[Any], str]:
    environment = jinja2.Environment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(WRITERS[request.param], {})
    return lambda value: template.render(v=value)


def same(one: Any, other: Any) -> bool:
    return json.dumps(one) == json.dumps(other)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_value_that_is_written_is_read_again(name: str, write: Callable[[Any], str]) -> None:
    """Where two allowed values are written alike, it is the one that is no text."""
    schema = {**DEFS, "properties": {"it": SCHEMAS[name]}}
    allows = jsonschema.Draft202012Validator(schema).is_valid
    values = [value for value in DRAWN if allows({"it": value})]
    assert values
    for value in values:
        text = write(value)
        found = read(text, schema)
        if not same(found, value):
            assert isinstance(value, str) and not isinstance(found, str), (text, found)
            assert allows({"it": found}), (text, found)


@pytest.mark.parametrize("seed", range(200))
def test_drawn_schemas_read_their_values(seed: int, write: Callable[[Any], str]) -> None:
    rng = random.Random(seed)
    schema = {**DEFS, "properties": {"it": drawn(rng, 3)}}
    allows = jsonschema.Draft202012Validator(schema).is_valid
    for value in (value for value in DRAWN if allows({"it": value})):
        found = read(write(value), schema)
        assert allows({"it": found}), (schema["properties"], value, found)
        assert same(found, value) or isinstance(value, str), (schema["properties"], value, found)


def drawn(rng: random.Random, depth: int) -> Any:
    """A schema of types and values, in the ways to combine them."""
    way = rng.choice(("type", "type", "enum", "const", "$ref", "anyOf", "allOf"))
    if way == "type" or (depth == 0 and way in ("anyOf", "allOf")):
        kinds = ["string", "integer", "number", "boolean", "null", "array", "object"]
        return {"type": rng.choice([rng.choice(kinds), rng.sample(kinds, 2)])}
    if way == "enum":
        return {way: rng.sample(CLEAR, 3)}
    if way == "const":
        return {way: rng.choice(CLEAR)}
    if way == "$ref":
        return {way: "#/$defs/Name"}
    return {way: [drawn(rng, depth - 1) for _ in range(2)]}


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "5", "5"),
        ({"type": "string", "nullable": True, "enum": ["None", "all"]}, "None", "None"),
        ({"type": "STRING"}, "5", "5"),
        ({"type": "str"}, "true", "true"),
        ({"pattern": "^[0-9]+$"}, "12", "12"),
        ({"type": "int"}, "5", 5),
        ({"type": "number"}, "1e+16", 1e16),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, " false ", False),
        ({"type": "integer"}, "many", "many"),  # the tool says what is wrong with it
        ({"type": "integer"}, "null", None),
        ({"enum": ["1", "2"]}, "3", "3"),
        ({"enum": [1, 2]}, "3", 3),
        ({"anyOf": [{"const": "5"}, {"type": "integer"}]}, "5", "5"),
        ({"anyOf": [{"const": 5}, {"type": "string"}]}, "6", "6"),
        ({"enum": ["a b"]}, '"a b"', "a b"),
        ({"type": ["string", "integer"]}, " 5", " 5"),
        ({"$ref": "#/$defs/nothing"}, "5", 5),
        ({"$ref": "https://example.com/schema"}, "x", "x"),
        ({"$ref": "#/properties/it"}, "5", 5),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
    ],
)
def test_what_no_schema_says_and_what_models_write(schema: Any, text: str, wanted: Any) -> None:
    assert same(read(text, {"properties": {"it": schema}}), wanted)


def test_properties_are_found_in_all_parts_of_a_schema() -> None:
    it, defs = {"properties": {"it": {"type": "string"}}}, {"A": {"additionalProperties": False}}
    for parameters in (
        {"allOf": [{"properties": {"other": {}}}, it]},
        {"$ref": "#/$defs/A", "$defs": {"A": it}},
        {"anyOf": [{"$ref": "#/$defs/A"}, it], "$defs": defs},
        {"additionalProperties": {"type": "string"}},
    ):
        assert read("5", parameters) == "5"
    assert read("5", {"properties": {"other": {"type": "string"}}}) == 5


def test_deep_schemas_end() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        schema = {"anyOf": [schema, schema]}
    assert read("x", {"properties": {"it": schema}}) == "x"
