"""Tool bodies: values may spell any tag, and still end where the writer ended them."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.chat.wire import call_body

from musespark.chat.atem import AtemError, call_prefix, parse_body, render_body, render_result

ONE = call_body("f", ("k", "v"))


def values(body):
    return [dict(invocation.parameters) for invocation in parse_body(body)]


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "\n\n",
        "a < b && c > d &amp; \"e\" 'f'",
        "</atem:parameter> and on",
        "a </atem:parameter>\n</atem:invoke> b",
        "</atem:function_calls>",
        "</atem:parameter></atem:invoke></atem:function_calls> the end",
        '<atem:parameter name="x">',
        'open <atem:invoke name="g"> only',
        ONE,
        f"first {ONE} then {ONE} ",
        call_body("g", ("a", "1"), ("b", "2"), ("c", "3")),
        f"# Doc\n{call_body('g', ('a', ONE), ('b', ONE))}",
        "</ATEM:parameter></atem:parameter",
        '<atem:parameter name="x" >',
    ],
)
def test_value_may_spell_anything(value):
    for before, after in itertools.product(({}, {"a": "1"}), ({}, {"z": "2"})):
        arguments = {**before, "k": value, **after}
        assert values(call_body("f", *arguments.items())) == [arguments]


def test_whitespace_between_tags_is_free():
    assert values(f" \n{ONE.replace('>', '>  ').replace('>  v', '>v')}\n ") == [{"k": "v"}]
    assert values(ONE.replace("\n", "")) == [{"k": "v"}]


def test_several_blocks():
    assert values(f"{ONE}\n{ONE}") == [{"k": "v"}, {"k": "v"}]


def test_source_of_each_call_is_kept():
    (invocation,) = parse_body(ONE)
    assert f"<atem:function_calls>\n{invocation.text}\n</atem:function_calls>" == ONE


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "does not begin"),
        ("hello", "does not begin"),
        (f"Here: {ONE}", "does not begin"),
        ('<atem:invoke name="f"></atem:invoke>', "does not begin"),
        (f"{ONE} as asked", "text after"),
        (ONE[:-1], "does not end"),
        (ONE.removesuffix("</atem:function_calls>"), "does not end"),
        (ONE.replace("</atem:parameter>", ""), "do not pair up"),
        (ONE.replace("</atem:invoke>", ""), "do not pair up"),
        (ONE.replace('<atem:parameter name="k">', ""), "do not pair up"),
        (ONE.replace('name="f"', 'name=""'), "do not pair up"),
        ("<atem:function_calls></atem:function_calls>", "do not pair up"),
    ],
)
def test_malformed_body_is_refused_whole(body, reason):
    with pytest.raises(AtemError, match=reason):
        parse_body(body)


def test_no_call_before_its_block_closes():
    for length in range(len(ONE)):
        with pytest.raises(AtemError):
            parse_body(ONE[:length])


_TAGS = {
    "B": "<atem:function_calls>",
    "b": "</atem:function_calls>",
    "C": '<atem:invoke name="f">',
    "c": "</atem:invoke>",
    "V": '<atem:parameter name="k">',
    "v": "</atem:parameter>",
    "x": "text",
}


def every_reading(letters, state="start"):
    """All ways to read a body, by brute force: the spans of its values."""
    if not letters:
        return [[]] if state == "closed" else []
    head, tail = letters[0], letters[1:]
    if head == "V" and state in ("call", "value"):
        return [
            [letters[1:end], *rest]
            for end in range(1, len(letters))
            if letters[end] == "v"
            for rest in every_reading(letters[end + 1 :], "value")
        ]
    following = {
        ("start", "B"): "block",
        ("closed", "B"): "block",
        ("block", "C"): "call",
        ("call", "c"): "done",
        ("value", "c"): "done",
        ("done", "C"): "call",
        ("done", "b"): "closed",
    }.get((state, head))
    return every_reading(tail, following) if following else []


@given(st.text(alphabet="BbCcVvx", max_size=14).map(lambda middle: f"BCV{middle}vcb"))
def test_finds_a_reading_whenever_there_is_one(letters):
    readings = every_reading(letters)
    body = "".join(_TAGS[letter] for letter in letters)
    found = [value for invocation in parse_body(body) for _, value in invocation.parameters]
    assert found in [["".join(_TAGS[x] for x in value) for value in r] for r in readings]


@given(st.text(alphabet="BbCcVvx", max_size=10))
def test_refuses_exactly_what_has_no_reading(letters):
    body = "".join(_TAGS[letter] for letter in letters)
    if every_reading(letters):
        parse_body(body)
    else:
        with pytest.raises(AtemError):
            parse_body(body)


def test_many_tags_take_linear_time():
    body = call_body("f", ("k", "</atem:parameter><atem:parameter>" * 50_000))
    assert len(values(body)[0]["k"]) == 33 * 50_000


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab<é🙂"\\', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text("abc", min_size=1), _json, max_size=4))
def test_rendered_calls_read_back(arguments):
    (invocation,) = parse_body(render_body("ns.fn", arguments))
    assert invocation.name == "ns.fn"
    read = {
        key: raw if isinstance(arguments[key], str) else json.loads(raw)
        for key, raw in invocation.parameters
    }
    assert read == arguments


def test_rendering():
    assert render_body("f", {"s": "x y", "n": None, "b": True, "l": [1, "é"]}) == call_body(
        "f", ("s", "x y"), ("n", "null"), ("b", "true"), ("l", '[1, "é"]')
    )
    assert render_body("f", {}).startswith(call_prefix("f"))
    assert render_result("f", "9") == '<tool_output name="f">\n9\n</tool_output>'
