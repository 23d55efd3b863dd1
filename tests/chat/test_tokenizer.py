"""Text <-> token ids: typed markers stay text, and no half character is ever shown."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from musespark.chat.pieces import Piece, join_text
from musespark.chat.tokenizer import Tokenizer
from musespark.errors import CheckpointError, RequestError

SPARK_MINI = Path(__file__).parents[2] / "src/musespark/assets/spark-mini"

TOKENIZER = Tokenizer.from_folder(SPARK_MINI)
NEXT_ID = TOKENIZER.vocab_size
BACKEND = tokenizers.Tokenizer.from_file(str(SPARK_MINI / "tokenizer.json"))

_texts = st.text() | st.lists(
    st.sampled_from(["<|eot|>", "<|start|>", " to=user", "assistant", "é🙂", "<|", "x "])
).map("".join)


@given(_texts)
def test_typed_special_tokens_stay_text(text):
    token_ids = TOKENIZER.encode(text)
    assert not set(token_ids) & set(TOKENIZER.special_ids.values())
    assert TOKENIZER.decode(token_ids) == text


@given(_texts)
def test_raw_prompts_are_encoded_as_transformers_does(text):
    expected = BACKEND.encode(text).ids
    assert TOKENIZER.encode_prompt(text) == expected


def test_pieces_become_tokens_by_their_kind():
    pieces = [Piece("<|start|>", is_special=True), Piece("<|start|>")]
    token_ids = TOKENIZER.encode_pieces(pieces)
    assert token_ids[0] == TOKENIZER.special_id("<|start|>")
    assert bytes(token_ids[1:]) == b"<|start|>"
    decoded = TOKENIZER.decode_pieces(token_ids)
    assert decoded[0] == pieces[0]
    assert not any(piece.is_special for piece in decoded[1:])
    assert TOKENIZER.decode(token_ids) == "<|start|>"
    assert TOKENIZER.decode(token_ids, keep_special=True) == "<|start|><|start|>"


def test_special_ids_by_name():
    assert TOKENIZER.special_ids["<|eot|>"] == 259
    assert TOKENIZER.stop_ids == {257, 259}
    assert TOKENIZER.special_id("<|eom|>") not in TOKENIZER.stop_ids
    assert TOKENIZER.vocab_size > max(TOKENIZER.special_ids.values())
    with pytest.raises(CheckpointError, match=r"no special token '<\|video\|>'.*token ids still"):
        TOKENIZER.special_id("<|video|>")


def test_half_a_surrogate_pair_is_refused():
    for encode in (TOKENIZER.encode, TOKENIZER.encode_prompt):
        with pytest.raises(RequestError, match="surrogate pair at character 1"):
            encode("a\ud83d")


# --- streaming


def stream(tokenizer, token_ids):
    decoder = tokenizer.stream()
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.flush()]


@given(st.lists(st.integers(0, 256) | st.integers(0, 300), max_size=40))
def test_streamed_text_is_the_text_of_all_tokens(token_ids):
    """Whatever the bytes: what is shown joins to what transformers decodes at once."""
    names = {index: name for name, index in TOKENIZER.special_ids.items()}
    expected = ""
    run: list[int] = []
    for token_id in [*token_ids, None]:
        if token_id is None or token_id in names:
            expected += BACKEND.decode(run, skip_special_tokens=False) + names.get(token_id, "")
            run = []
        else:
            run.append(token_id)
    streamed = [piece for pieces in stream(TOKENIZER, token_ids) for piece in pieces]
    assert join_text(streamed) == expected
    assert streamed == TOKENIZER.decode_pieces(token_ids)


@given(st.text())
def test_no_half_character_is_shown(text):
    """Each byte is a token here, so every character of several bytes is split."""
    for pieces in stream(TOKENIZER, text.encode()):
        assert "\ufffd" in text or "\ufffd" not in join_text(pieces)


def test_character_appears_with_its_last_byte():
    shown = stream(TOKENIZER, "a🙂".encode())
    assert shown == [[Piece("a")], [], [], [], [Piece("🙂")], []]


def test_half_a_character_before_a_special_token():
    eot = TOKENIZER.special_id("<|eot|>")
    assert stream(TOKENIZER, [0xF0, 0x9F, eot, ord("a"), 0xF0]) == [
        [],
        [],
        [Piece("\ufffd"), Piece("<|eot|>", is_special=True)],
        [Piece("a")],
        [],
        [Piece("\ufffd")],
    ]


def test_ids_outside_the_vocabulary_show_nothing():
    assert TOKENIZER.decode([ord("a"), 300, 10**6, ord("b")]) == "ab"


@pytest.fixture
def byte_fallback():
    """A vocabulary of another kind: words with a space mark, and bytes for what is missing."""
    words = ["▁Hello", "▁wor", "ld", "<|eot|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<|eot|>", special=True)])
    return Tokenizer(backend)


def test_other_vocabularies_stream_too(byte_fallback):
    smile = [4 + byte for byte in "🙂".encode()]
    assert byte_fallback.decode([0, 1, 2, *smile, 3]) == "Hello world🙂"
    shown = ["".join(map(join_text, [pieces])) for pieces in stream(byte_fallback, [0, *smile, 1])]
    assert shown == ["Hello", "", "", "", "🙂", " wor", ""]
    assert stream(byte_fallback, smile[:2])[-1] == [Piece("\ufffd\ufffd")]


# --- files


@pytest.fixture
def folder(tmp_path):
    shutil.copy(SPARK_MINI / "tokenizer.json", tmp_path)
    return tmp_path


def write_settings(folder, **settings):
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def test_missing_tokenizer_says_what_still_works(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file.*token ids"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": 3}', b"\xff\xfe\x00", b"[]"])
def test_damaged_tokenizer_says_what_still_works(folder, content):
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer.*token ids"):
        Tokenizer.from_folder(folder)


def test_damaged_settings_are_an_error(folder):
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not valid JSON.*token ids"):
        Tokenizer.from_folder(folder)


def test_named_tokens_come_from_the_settings(folder):
    assert Tokenizer.from_folder(folder).named_token("bos_token") == "<|begin_of_text|>"
    write_settings(folder, bos_token={"content": "<|start|>"}, eos_token="<|eom|>", pad_token=None)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.named_token("bos_token") == "<|start|>"
    assert tokenizer.named_token("eos_token") == "<|eom|>"
    assert tokenizer.named_token("pad_token") == "<|pad|>"
    assert tokenizer.named_token("mask_token") == ""
    assert tokenizer.stop_ids == {257, 258, 259}


def test_first_token_is_added_to_raw_prompts_only(folder):
    write_settings(folder, add_bos_token=True)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode_prompt("a") == [256, 97]
    assert tokenizer.encode_prompt("<|begin_of_text|>a") == [256, 97]
    assert tokenizer.encode_prompt("a", add_special_tokens=False) == [97]
    assert tokenizer.encode("a") == [97]


def test_special_tokens_that_only_the_settings_name(folder):
    write_settings(
        folder,
        added_tokens_decoder={
            str(NEXT_ID + 1): {"content": "<|video|>", "special": True},
            str(NEXT_ID): {"content": "<|patch|>", "special": True},
            "259": {"content": "<|eot|>", "special": True},
        },
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_id("<|patch|>") == NEXT_ID
    assert tokenizer.vocab_size == NEXT_ID + 2
    assert tokenizer.encode_prompt("<|video|>") == [NEXT_ID + 1]
    assert NEXT_ID + 1 not in tokenizer.encode("<|video|>")


def test_settings_of_another_tokenizer_are_refused(folder):
    write_settings(folder, added_tokens_decoder={"500": {"content": "<|x|>", "special": True}})
    with pytest.raises(CheckpointError, match=rf"'<\|x\|>' the id 500.* next free id is {NEXT_ID}"):
        Tokenizer.from_folder(folder)
    write_settings(folder, added_tokens_decoder={"x": {}, "y": {"special": True}})
    with pytest.raises(CheckpointError, match="added_tokens_decoder must map"):
        Tokenizer.from_folder(folder)


def test_training_leftovers_are_switched_off(folder):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=5, pad_id=260)
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_folder(folder).encode("abc") == [97, 98, 99]


def test_learned_merges_stay_intact_around_special_tokens(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|eot|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode_prompt("ab<|eot|>ab") == [2, 3, 2]
    assert tokenizer.encode("abab") == [2, 2]
    assert tokenizer.decode([2, 3, 2]) == "abab"
