"""The turn parser: every rule of the wire format, in whatever stretches the text arrives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.chat.examples import EXAMPLES, TOOLS, Example
from tests.chat.wire import (
    call_body,
    counted_ids,
    cut_at,
    feed_one_by_one,
    one_character_at_a_time,
    wire,
)

from musespark.chat.events import (
    CallComplete,
    ContentDelta,
    ReasoningDelta,
    Turn,
    TurnEnd,
    collect,
)
from musespark.chat.parser import State, TurnParser, new_call_id, parse_turn
from musespark.chat.pieces import Piece, join_text

by_name = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)


def parser_of(example: Example) -> TurnParser:
    return TurnParser(TOOLS, wire(example.opening), counted_ids())


@by_name
def test_whole(example):
    turn = parse_turn(
        wire(example.text), TOOLS, opening=wire(example.opening), call_id=counted_ids()
    )
    assert turn == example.turn


@by_name
def test_one_character_at_a_time(example):
    pieces = one_character_at_a_time(wire(example.text))
    assert collect(feed_one_by_one(parser_of(example), pieces)) == example.turn


@by_name
@given(cuts=st.lists(st.integers(0, 500), max_size=12))
def test_in_random_stretches(example, cuts):
    pieces = cut_at(wire(example.text), cuts)
    assert collect(feed_one_by_one(parser_of(example), pieces)) == example.turn


@by_name
def test_cut_off_anywhere_reports_no_half_call(example):
    """Wherever the tokens end, what was shown is a beginning of the whole, and calls are whole."""
    pieces = one_character_at_a_time(wire(example.text))
    for length in range(len(pieces)):
        turn = collect(feed_one_by_one(parser_of(example), pieces[:length]))
        assert example.turn.reasoning.startswith(turn.reasoning)
        assert example.turn.content.startswith(turn.content)
        assert turn.tool_calls == example.turn.tool_calls[: len(turn.tool_calls)]


_FRAGMENTS = [
    " to=self",
    " to=user",
    " to=weather.get",
    "assistant",
    "tool x",
    "<|start|>",
    "<|message|>",
    "<|eom|>",
    "<|eot|>",
    "«eot»",
    "words ",
    "\n",
    call_body("weather.get", ("city", "Rome")),
    call_body("weather.get", ("days", "x")),
    "<atem:function_calls>",
    '<atem:invoke name="f">',
    '<atem:parameter name="k">',
    "</atem:parameter>",
    "</atem:invoke>",
    "</atem:function_calls>",
]


@given(
    fragments=st.lists(st.sampled_from(_FRAGMENTS), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_any_turn_is_read_the_same_in_any_stretches(fragments, cuts):
    pieces = wire("".join(fragments))
    whole = parse_turn(pieces, TOOLS, call_id=counted_ids())
    for parts in (cut_at(pieces, cuts), one_character_at_a_time(pieces)):
        assert collect(feed_one_by_one(TurnParser(TOOLS, call_id=counted_ids()), parts)) == whole


def test_answer_streams_without_delay():
    parser = TurnParser()
    parser.feed(wire(" to=self<|message|>"))
    assert parser.feed([Piece("a")]) == [ReasoningDelta("a")]
    parser.feed(wire("<|eom|><|start|>assistant to=user<|message|>"))
    assert parser.feed([Piece("<atem:")]) == [ContentDelta("<atem:")]
    assert parser.feed(wire("<|eot|>")) == [TurnEnd()]
    assert parser.is_ended


def test_call_is_shown_only_when_whole():
    parser = TurnParser(TOOLS, call_id=counted_ids())
    body = call_body("weather.get", ("city", "Rome"))
    assert parser.feed(wire(f" to=weather.get<|message|>{body}")) == []
    (event,) = parser.feed(wire("<|eom|>"))
    assert isinstance(event, CallComplete)
    assert event.call.to_openai() == {
        "id": "call_0",
        "type": "function",
        "function": {"name": "weather.get", "arguments": '{"city": "Rome"}'},
    }


def test_state_tells_where_a_grammar_applies():
    """A schema for the answer must not constrain reasoning or calls."""
    parser = TurnParser()
    seen = []
    for part in (" to=self", "<|message|>", "<|eom|>", "<|start|>assistant to=f", "<|message|>"):
        parser.feed(wire(part))
        seen.append((parser.state, parser.recipient))
    parser.feed(wire("<|eom|><|start|>assistant to=user<|message|>"))
    assert [state for state, _ in seen] == [
        State.HEADER,
        State.REASONING,
        State.HEADER,
        State.HEADER,
        State.CALL,
    ]
    assert (parser.state, parser.recipient) == (State.CONTENT, "user")


def test_one_bad_call_does_not_lose_the_good_one():
    body = (
        '<atem:function_calls><atem:invoke name="weather.get">'
        '<atem:parameter name="days">soon</atem:parameter></atem:invoke>'
        '<atem:invoke name="weather.get"><atem:parameter name="days">2</atem:parameter>'
        "</atem:invoke></atem:function_calls>"
    )
    turn = parse_turn(wire(f" to=weather.get<|message|>{body}<|eot|>"), TOOLS)
    assert [call.arguments for call in turn.tool_calls] == ['{"days": 2}']
    (broken,) = turn.broken_calls
    assert "soon" in broken.text
    assert "2" not in broken.text
    assert not broken.is_truncated


def test_stop_token_kept_by_the_engine_is_no_truncation():
    body = call_body("weather.get")[:-5]
    turn = parse_turn(wire(f" to=weather.get<|message|>{body}"), TOOLS, is_truncated=False)
    assert turn.is_complete
    assert not turn.broken_calls[0].is_truncated


def test_unknown_special_token_stays_in_an_argument():
    text = call_body("files.write", ("text", "a<|pad|>b"))
    turn = parse_turn(wire(f" to=files.write<|message|>{text}<|eot|>"), TOOLS)
    assert turn.tool_calls[0].arguments == '{"text": "a<|pad|>b"}'


def test_call_ids_do_not_repeat():
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(call_id.startswith("call_") for call_id in ids)


def test_deltas_of_many_tokens_join_to_the_whole():
    answer = "word " * 500
    pieces = [*wire(" to=user<|message|>"), *map(Piece, answer.split(" ")), *wire("<|eot|>")]
    parser = TurnParser()
    turn = collect(feed_one_by_one(parser, pieces))
    assert turn == Turn(content=join_text(map(Piece, answer.split(" "))), is_complete=True)
