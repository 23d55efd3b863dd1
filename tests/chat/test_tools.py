"""Tool declarations, typed arguments, tool_choice."""

import pytest

from musespark.chat.atem import AtemError, Invocation
from musespark.chat.tools import (
    Tool,
    ToolChoice,
    call_arguments,
    convert_value,
    parse_tool_choice,
    parse_tools,
    schema_types,
)
from musespark.errors import RequestError

F = {"type": "function", "function": {"name": "ns.f", "parameters": {"type": "object"}}}


def types(*names):
    return frozenset(names)


@pytest.mark.parametrize(
    ("raw", "kinds", "value"),
    [
        ("12", types("string"), "12"),
        ('"quoted"', types("string"), '"quoted"'),
        (" {} ", types("string", "object"), " {} "),
        ("null", types("string"), "null"),
        ("null", types("string", "null"), None),
        ("12", types("integer"), 12),
        (" 1.5\n", types("number"), 1.5),
        ("true", types("boolean"), True),
        ("[1]", types("array"), [1]),
        ('"s"', types("array"), "s"),
        ("12", types(), 12),
        ("twelve", types(), "twelve"),
        ('"twelve"', types(), '"twelve"'),
        ("NaN", types(), "NaN"),
        ("", types(), ""),
    ],
)
def test_values_get_their_type_from_the_schema(raw, kinds, value):
    converted = convert_value(raw, kinds)
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    "raw", ["", "True", "None", "'a'", "{", "NaN", "-Infinity", "1 2", "[" * 100_000, "9" * 10_000]
)
def test_what_is_not_json_is_an_error_and_not_a_guess(raw):
    with pytest.raises(ValueError, match=r"."):
        convert_value(raw, types("integer", "object"))


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, types("string")),
        ({"type": ["integer", "null"]}, types("integer", "null")),
        ({"enum": ["a", 1, 1.5, None, True, [], {}]}, types(
            "string", "integer", "number", "null", "boolean", "array", "object")),
        ({"const": "a"}, types("string")),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "array"}]}]}, types("string", "array")),
        ({"allOf": [{"$ref": "#/$defs/name"}]}, types("string")),
        ({"$ref": "#/$defs/loop"}, types("number")),
        ({"$ref": "#/$defs/none"}, types()),
        ({"$ref": "https://example.com/schema"}, types()),
        ({"description": "anything"}, types()),
        ({"type": 5, "enum": 3}, types()),
        ({"anyOf": {"type": "string"}}, types()),
        (True, types()),
        (None, types()),
    ],
)  # fmt: skip
def test_types_of_a_schema(schema, kinds):
    root = {
        "$defs": {
            "name": {"type": "string"},
            "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "number"}]},
        }
    }
    assert schema_types(schema, root) == kinds


def test_arguments_keep_the_order_and_the_text_of_the_model():
    invocation = Invocation("f", (("b", "é"), ("a", "[1,2]")), "")
    assert call_arguments(invocation, ()) == '{"b": "é", "a": [1, 2]}'


def test_half_a_surrogate_pair_in_an_argument_can_still_be_sent():
    arguments = call_arguments(Invocation("f", (("a", '["\\ud83d"]'),), ""), ())
    assert arguments.encode() == b'{"a": ["\\ud83d"]}'


def test_parameter_given_twice_is_malformed():
    with pytest.raises(AtemError, match="'a' is given twice"):
        call_arguments(Invocation("f", (("a", "1"), ("a", "2")), ""), ())


def test_schema_without_properties_gives_no_types():
    tool = Tool("f", parameters={"properties": ["odd"]})
    assert call_arguments(Invocation("f", (("a", "1"),), ""), (tool,)) == '{"a": 1}'


def test_tools_are_read_in_both_shapes():
    assert parse_tools(None) == ()
    (tool,) = parse_tools([F])
    assert tool == Tool("ns.f", "", {"type": "object"})
    assert parse_tools([F["function"]]) == (tool,)
    assert parse_tools([tool]) == (tool,)
    assert parse_tools([{"name": "g"}])[0].for_template() == {
        "type": "function",
        "function": {
            "name": "g",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    }


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("f", "tools: must be a list"),
        ([3], r"tools\[0\]: must be an object"),
        ([{"type": "retrieval"}], r"tools\[0\]\.type: only 'function'"),
        ([{"type": "function", "function": "f"}], r"function: must be an object"),
        ([{"function": {}}], r"tools\[0\]\.function\.name: must be 1 to 128"),
        ([{"name": 'a"b'}], "must be 1 to 128"),
        ([{"name": "a b"}], "must be 1 to 128"),
        ([{"name": "f<|eot|>"}], "must be 1 to 128"),
        ([{"name": "self"}], "'self' addresses a part of the turn"),
        ([{"name": "user"}], "Rename the tool"),
        ([{"name": "f", "description": 3}], "description: must be a string"),
        ([{"name": "f", "parameters": "x"}], "parameters: must be a JSON schema object"),
        ([{"name": "f"}, {"name": "f"}], "'f' is defined 2 times"),
    ],
)
def test_bad_tools_are_refused(raw, message):
    with pytest.raises(RequestError, match=message):
        parse_tools(raw)


def test_tool_choice():
    tools = parse_tools([F, {"name": "g"}])
    assert parse_tool_choice(None, tools) == ToolChoice("auto")
    assert parse_tool_choice("auto", ()) == ToolChoice("auto")
    assert parse_tool_choice("none", tools) == ToolChoice("none")
    assert parse_tool_choice("required", tools) == ToolChoice("required", ("ns.f", "g"))
    named = {"type": "function", "function": {"name": "g"}}
    assert parse_tool_choice(named, tools) == ToolChoice("required", ("g",))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("always", "must be auto, none, required"),
        (3, "found 3"),
        ({"type": "function", "function": {"name": "h"}}, "no tool is named 'h'. There are: ns.f."),
        ({"type": "function", "function": {}}, "no tool is named"),
        ({"type": "function", "function": "x"}, "no tool is named"),
        ({"type": "custom"}, "must be auto"),
    ],
)
def test_bad_tool_choice_is_refused(raw, message):
    with pytest.raises(RequestError, match=message):
        parse_tool_choice(raw, parse_tools([F]))


@pytest.mark.parametrize("raw", ["required", {"function": {"name": "f"}}])
def test_tool_choice_needs_tools(raw):
    with pytest.raises(RequestError, match="has no tools"):
        parse_tool_choice(raw, ())
