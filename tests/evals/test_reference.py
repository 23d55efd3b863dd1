"""Comparing logits with a reference run."""

from importlib import resources

import numpy as np
import pytest

from musespark.chat import ChatFormat
from musespark.evals.reference import compare_logits, reference_sequences


def logits(token_ids: list[int]) -> np.ndarray:
    return np.sin(np.outer(np.array(token_ids), np.arange(1, 6)))


def test_a_model_agrees_with_itself():
    report = compare_logits(logits, logits, [[1, 2, 3], [4]])
    assert report.mean_kl == pytest.approx(0.0, abs=1e-12)
    assert report.worst_logit_error == 0.0
    assert report.top1_agreement == 1.0
    assert report.positions == 4


def test_divergence_and_error_are_measured():
    def shifted(token_ids: list[int]) -> np.ndarray:
        moved = logits(token_ids)
        moved[:, 0] += 0.5
        return moved

    report = compare_logits(shifted, logits, [[1, 2, 3]])
    p = np.exp(logits([1, 2, 3]))
    q = np.exp(shifted([1, 2, 3]))
    p /= p.sum(-1, keepdims=True)
    q /= q.sum(-1, keepdims=True)
    assert report.mean_kl == pytest.approx((p * np.log(p / q)).sum(-1).mean())
    assert report.worst_logit_error == pytest.approx(0.5)
    assert report.top1_agreement < 1.0


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="compared with"):
        compare_logits(logits, lambda ids: logits(ids)[:, :3], [[1]])
    with pytest.raises(ValueError, match="no sequences"):
        compare_logits(logits, logits, [])


def test_sequences_are_whole_conversations_of_all_tasks():
    with resources.as_file(resources.files("musespark") / "assets/spark-mini") as folder:
        chat = ChatFormat.from_folder(folder)
    sequences = reference_sequences(chat, samples=24, seed=0)
    assert len(sequences) == 24
    assert sequences == reference_sequences(chat, samples=24, seed=0)
    assert all(ids[0] == chat.tokenizer.special_id("<|begin_of_text|>") for ids in sequences)
    assert all(ids[-1] == chat.tokenizer.special_id("<|eot|>") for ids in sequences)
