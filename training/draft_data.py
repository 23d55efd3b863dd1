"""What a draft learns from: conversations as they are made, and as the target goes on with them."""

from collections.abc import Callable
from itertools import islice

import numpy as np

from musespark.evals.generate import training_conversations
from musespark.evals.wire import prompt_text
from training.data import Encoded, encoded
from training.draft_config import DraftRecipe
from training.tokenizer import build

Continue = Callable[[list[list[int]], int], list[list[int]]]
"""Continues prompts by at most so many tokens, up to and with a stop token."""


def made(recipe: DraftRecipe, chunk: int) -> list[Encoded]:
    """Return the conversations of one chunk: the same whenever they are made."""
    stream = encoded(f"draft {recipe.seed} {chunk}", recipe.max_tokens)
    return list(islice(stream, recipe.chunk))


def continued(generate: Continue, recipe: DraftRecipe, seed: str, count: int) -> list[Encoded]:
    """Return prompts as the target itself goes on with them."""
    texts = [prompt_text(c) for c in islice(training_conversations(seed), count)]
    encodings = build().encode_batch(texts, add_special_tokens=False)
    longest = recipe.max_tokens - recipe.own_tokens
    prompts = [encoding.ids for encoding in encodings if len(encoding.ids) <= longest]
    return [
        Encoded(
            np.array(prompt + reply, np.uint16),
            np.arange(len(prompt) + len(reply)) >= len(prompt),
        )
        for prompt, reply in zip(prompts, generate(prompts, recipe.own_tokens), strict=True)
    ]
