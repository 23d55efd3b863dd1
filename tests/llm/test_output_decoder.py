"""Text out of tokens, whatever pieces they come in, up to a stop text."""

import itertools

import pytest

from musespark.chat.pieces import Piece, join_text
from musespark.chat.tokenizer import Tokenizer
from musespark.checkpoint.source import resolve_checkpoint
from musespark.llm.output_decoder import OutputDecoder
from musespark.llm.stop_text import StopTextFinder


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(resolve_checkpoint("spark-mini"))


def first_stop(text, stops):
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


STOPS = [
    ("abab",),
    ("aab", "b"),
    ("\n\n",),
    ("é!", "🎉"),
    ("aaab", "aab"),
    ("nothing of it",),
]
TEXTS = ["aaabab", "abaabab", "a\n\nb", "aé!b", "x🎉y", "ab", "", "aaaab", "abab" * 3]


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_first_stop_text_ends_the_output(tokenizer, text, stops):
    """Byte by byte, so also within characters of several bytes."""
    token_ids = list(text.encode())
    whole = OutputDecoder(tokenizer, stops)
    assert join_text(whole.push(token_ids, last=True)) == first_stop(text, stops)
    assert whole.found_stop == (first_stop(text, stops) != text)
    single = OutputDecoder(tokenizer, stops)
    pieces = [piece for token in token_ids for piece in single.push([token])]
    assert join_text(pieces + single.push([], last=True)) == first_stop(text, stops)
    assert single.num_tokens == whole.num_tokens
    # The token that completed the stop text is the last one that counts.
    if single.found_stop:
        upto = bytes(token_ids[: single.num_tokens]).decode(errors="ignore")
        assert any(upto.endswith(stop) for stop in stops)


@pytest.mark.parametrize("stops", STOPS)
def test_text_is_held_back_only_while_it_may_begin_a_stop_text(stops):
    for letters in itertools.product("ab\n", repeat=6):
        text = "".join(letters)
        finder, shown = StopTextFinder(stops), ""
        for count, letter in enumerate(text, start=1):
            shown += finder.push(letter)
            if finder.found:
                break
            held = text[:count].removeprefix(shown)
            assert any(stop.startswith(held) for stop in stops) or not held
        assert shown + finder.flush() == first_stop(text, stops)


def test_special_tokens_are_pieces_of_their_own_and_end_what_was_held(tokenizer):
    eom = tokenizer.special_id("<|eom|>")
    decoder = OutputDecoder(tokenizer, ("ab",))
    pieces = decoder.push([*b"xa", eom, *b"b"], last=True)
    assert pieces == [Piece("x"), Piece("a"), Piece("<|eom|>", is_special=True), Piece("b")]
    assert not decoder.found_stop


def test_stop_texts_wait_for_min_tokens(tokenizer):
    decoder = OutputDecoder(tokenizer, ("ab",), min_tokens=3)
    assert join_text(decoder.push(b"ababxab", last=True)) == "ababx"
    decoder = OutputDecoder(tokenizer, ("ab",), min_tokens=2)
    assert join_text(decoder.push(b"ababxab", last=True)) == "ab"
