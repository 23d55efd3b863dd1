"""How far a model's logits are from those of a reference run of the same model.

Spark-Mini is so sure of its answers that accuracy hardly shows numeric damage: logits can be off
by units before an answer changes. Their divergence and worst error show it at once.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from musespark.chat import ChatFormat
from musespark.evals.generate import NEW_QUESTIONS, TRAINING_SHARES, evaluation_conversations
from musespark.evals.wire import Segment, segments

ComputeLogits = Callable[[list[int]], ArrayLike]
"""Token ids of one sequence -> logits [tokens, vocabulary] of every position."""


@dataclass(frozen=True)
class LogitReport:
    """A comparison over all positions of all sequences."""

    mean_kl: float
    """Of the reference's next-token distribution against the model's, in nats."""
    worst_logit_error: float
    """The largest absolute difference of any logit."""
    top1_agreement: float
    """How often both find the same token likeliest."""
    positions: int


def reference_sequences(chat: ChatFormat, *, samples: int, seed: int) -> list[list[int]]:
    """Return held-out conversations with their right replies, as token ids: every task in turn."""
    tasks = list(TRAINING_SHARES)
    each = -(-samples // len(tasks))
    by_task = [evaluation_conversations(task, NEW_QUESTIONS, each, seed) for task in tasks]
    mixed = [conversation for group in zip(*by_task, strict=True) for conversation in group]
    return [_token_ids(chat, segments(conversation)) for conversation in mixed[:samples]]


def _token_ids(chat: ChatFormat, pieces: list[Segment]) -> list[int]:
    text = "".join(piece.text for piece in pieces)
    return chat.tokenizer.encode_prompt(text, add_special_tokens=False)


def compare_logits(
    model: ComputeLogits, reference: ComputeLogits, sequences: Iterable[list[int]]
) -> LogitReport:
    """Run both over the same sequences and measure how they differ.

    Raises:
        ValueError: there are no sequences, or the shapes of the logits differ.
    """
    divergence = 0.0
    worst = 0.0
    agreeing = 0
    positions = 0
    for token_ids in sequences:
        ours = np.asarray(model(token_ids), dtype=np.float64)
        theirs = np.asarray(reference(token_ids), dtype=np.float64)
        if ours.shape != theirs.shape:
            raise ValueError(f"logits of {ours.shape} compared with logits of {theirs.shape}")
        divergence += float(_kl(theirs, ours).sum())
        worst = max(worst, float(np.abs(ours - theirs).max()))
        agreeing += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        positions += len(token_ids)
    if positions == 0:
        raise ValueError("no sequences to compare logits on")
    return LogitReport(divergence / positions, worst, agreeing / positions, positions)


def _kl(p_logits: NDArray[Any], q_logits: NDArray[Any]) -> NDArray[Any]:
    """Return KL(p || q) of each row."""
    log_p, log_q = _log_softmax(p_logits), _log_softmax(q_logits)
    divergence: NDArray[Any] = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    return divergence


def _log_softmax(logits: NDArray[Any]) -> NDArray[Any]:
    shifted = logits - logits.max(-1, keepdims=True)
    normalised: NDArray[Any] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised
