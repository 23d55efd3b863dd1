"""Build Spark-Mini's tokenizer: bytes, the wire format's tokens, and nothing inside words.

Letters and digits are always tokens of their own, or reversing, counting and arithmetic would have
to look inside tokens. There are no merges. Longer tokens exist only where they can hide nothing:
special tokens, ATEM tags, and the words of message headers, which a pattern recognises by their
place (all of the text between two special tokens, or its end), so that a question about the word
"user" still sees four letters.

    python -m training.tokenizer src/musespark/assets/spark-mini
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eom|>",
    "<|eot|>",
    "<|pad|>",
    "<|start|>",
    "<|message|>",
)
TAGS = (
    "<atem:function_calls>",
    "</atem:function_calls>",
    '<atem:invoke name="',
    "</atem:invoke>",
    '<atem:parameter name="',
    "</atem:parameter>",
    '<tool_output name="',
    "</tool_output>",
)
HEADER_WORDS = (
    "assistant",
    "system",
    "user",
    " to=self",
    " to=user",
    " to=",
    "Reasoning strength: ",
    "xhigh.",
    "high.",
    "medium.",
    "low.",
)
VOCABULARY_SIZE = 384

PATTERN = "|".join(
    (
        r"\A(?:assistant|system|user)(?=\z| to=)",
        r" to=(?:self|user)(?=\z)",
        r" to=(?=[^ ]+\z)",
        r"Reasoning strength: (?=(?:xhigh|high|medium|low)\.)",
        r"(?<=Reasoning strength: )(?:xhigh|high|medium|low)\.",
        r"[\s\S]",
    )
)


def byte_characters() -> dict[int, str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in characters]
    return characters | {byte: chr(256 + i) for i, byte in enumerate(others)}


def build() -> Tokenizer:
    """Return the tokenizer: ids 0 to 255 are bytes, then special tokens, tags, header words."""
    spelled = byte_characters()
    vocabulary = {character: byte for byte, character in spelled.items()}
    words = ["".join(spelled[byte] for byte in text.encode()) for text in HEADER_WORDS]
    for token in (*SPECIAL_TOKENS, *TAGS, *words):
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in TAGS])
    return tokenizer


def settings() -> dict[str, object]:
    """Return tokenizer_config.json, for transformers."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }


def main(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    build().save(str(folder / "tokenizer.json"))
    config = settings()
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
