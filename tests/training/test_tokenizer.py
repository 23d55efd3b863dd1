"""Spark-Mini's tokenizer: bytes everywhere, longer tokens only where they hide nothing."""

import string

import pytest
from training.tokenizer import HEADER_WORDS, SPECIAL_TOKENS, TAGS, VOCABULARY_SIZE, build


@pytest.fixture(scope="module")
def tokenizer():
    return build()


def tokens_of(tokenizer, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return [tokenizer.decode([i], skip_special_tokens=False) for i in ids]


def test_letters_and_digits_are_always_single_tokens(tokenizer):
    text = string.ascii_letters + string.digits
    assert tokenizer.encode(text).ids == list(text.encode())


@pytest.mark.parametrize("word", ["assistant", "tool", "user", "system", "self", "xhigh."])
def test_header_words_inside_a_message_stay_letters(tokenizer, word):
    for text in (f"Reverse {word}", f"is{word}j", f"{word} {word}", f"{word} x"):
        framed = f"<|start|>user<|message|>{text}<|eot|>"
        ids = tokenizer.encode(framed, add_special_tokens=False).ids
        assert ids[3:-1] == list(text.encode())


def test_headers_are_short(tokenizer):
    assert tokens_of(tokenizer, "<|start|>assistant to=self<|message|>") == [
        "<|start|>",
        "assistant",
        " to=self",
        "<|message|>",
    ]
    assert tokens_of(tokenizer, "<|start|>assistant to=a.b<|message|>")[:6] == [
        "<|start|>",
        "assistant",
        " to=",
        "a",
        ".",
        "b",
    ]
    assert tokens_of(tokenizer, "<|start|>tool ab<|message|>")[1:5] == list("tool")


def test_a_header_is_the_same_whether_the_prompt_ends_inside_or_not(tokenizer):
    whole = tokenizer.encode("<|start|>assistant to=user<|message|>x").ids
    prompt = tokenizer.encode("<|start|>assistant").ids
    reply = tokenizer.encode(" to=user<|message|>x").ids
    assert whole == prompt + reply


@pytest.mark.parametrize(
    "text", ["é", "日本", "a\nb", "  ", "\x00", "🙂", "<|eo", "naïve to=self x"]
)
def test_every_text_survives(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_ids_are_bytes_then_special_tokens_then_tags_then_header_words(tokenizer):
    for offset, token in enumerate((*SPECIAL_TOKENS, *TAGS)):
        assert tokenizer.token_to_id(token) == 256 + offset
    used = 256 + len(SPECIAL_TOKENS) + len(TAGS) + len(HEADER_WORDS)
    assert tokenizer.get_vocab_size() == used <= VOCABULARY_SIZE


def test_only_special_tokens_are_special(tokenizer):
    added = tokenizer.get_added_tokens_decoder().values()
    assert {token.content for token in added if token.special} == set(SPECIAL_TOKENS)
