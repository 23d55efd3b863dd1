"""Conversations as rows of tokens, packed, in an order that depends on the seed alone."""

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from musespark.evals.generate import training_conversations
from musespark.evals.wire import segments
from training.config import Recipe
from training.tokenizer import build

BUFFERED = 64
SMALLEST_GAP = 48


@dataclass(frozen=True)
class Chunk:
    """Rows for some steps: token ids, which of them are trained, and each token's document.

    Documents count from 1 within a row; 0 is padding.
    """

    ids: np.ndarray  # [rows, row_tokens] uint16
    trained: np.ndarray  # [rows, row_tokens] bool
    document: np.ndarray  # [rows, row_tokens] uint8


@dataclass(frozen=True)
class Encoded:
    """One conversation's tokens, and which of them the assistant has to write."""

    ids: np.ndarray
    trained: np.ndarray


class Packer:
    """Fills rows with whole conversations, the longest that still fits first."""

    def __init__(self, seed: str, row_tokens: int) -> None:
        """Start an endless stream of conversations."""
        self.row_tokens = row_tokens
        self.pad = build().token_to_id("<|pad|>")
        self.stream = encoded(seed, row_tokens)
        self.buffer: list[Encoded] = []

    def rows(self, count: int) -> Chunk:
        """Return the next rows."""
        shape = (count, self.row_tokens)
        chunk = Chunk(
            np.full(shape, self.pad, np.uint16), np.zeros(shape, bool), np.zeros(shape, np.uint8)
        )
        for row in range(count):
            self._fill(chunk, row)
        return chunk

    def _fill(self, chunk: Chunk, row: int) -> None:
        used = 0
        document = 1
        while self.row_tokens - used >= SMALLEST_GAP:
            self.buffer += islice(self.stream, BUFFERED - len(self.buffer))
            sizes = [len(sample.ids) for sample in self.buffer]
            fitting = [i for i, size in enumerate(sizes) if size <= self.row_tokens - used]
            if not fitting:
                break
            # The first is taken as it comes: always taking the longest would starve short ones.
            best = fitting[0] if used == 0 else max(fitting, key=sizes.__getitem__)
            sample = self.buffer.pop(best)
            place = slice(used, used + len(sample.ids))
            chunk.ids[row, place] = sample.ids
            chunk.trained[row, place] = sample.trained
            chunk.document[row, place] = document
            used += len(sample.ids)
            document += 1


def encoded(seed: str, row_tokens: int) -> Iterator[Encoded]:
    """Yield conversations without end, leaving out those longer than a row."""
    tokenizer = build()
    for conversation in training_conversations(seed):
        pieces = segments(conversation)
        encodings = tokenizer.encode_batch(
            [piece.text for piece in pieces], add_special_tokens=False
        )
        ids = [i for encoding in encodings for i in encoding.ids]
        if len(ids) <= row_tokens:
            trained = [
                piece.trained
                for piece, encoding in zip(pieces, encodings, strict=True)
                for _ in encoding.ids
            ]
            yield Encoded(np.array(ids, np.uint16), np.array(trained, bool))


def make_chunk(recipe: Recipe, index: int) -> Chunk:
    """Return the rows of chunk `index`: the same whoever makes it and whenever."""
    packer = Packer(f"training {recipe.seed} {index}", recipe.row_tokens)
    return packer.rows(recipe.rows * recipe.steps_per_chunk)


class ChunkStream:
    """Chunks in order, made ahead of time by other processes."""

    def __init__(self, recipe: Recipe, first: int, processes: int) -> None:
        """Begin with chunk `first`."""
        last = -(-recipe.steps // recipe.steps_per_chunk)
        self.pool = multiprocessing.get_context("spawn").Pool(processes)
        self.pending = iter(range(first, last))
        self.results = [
            self.pool.apply_async(make_chunk, (recipe, index))
            for index in islice(self.pending, 2 * processes)
        ]
        self.recipe = recipe

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks until the training's last step."""
        while self.results:
            chunk = self.results.pop(0).get()
            for index in islice(self.pending, 1):
                self.results.append(self.pool.apply_async(make_chunk, (self.recipe, index)))
            yield chunk

    def close(self) -> None:
        """Stop the processes."""
        self.pool.terminate()
        self.pool.join()
