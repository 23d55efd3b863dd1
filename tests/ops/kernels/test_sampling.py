"""Filters of logits by a kernel: what their definitions keep, without ranking anything."""

import pytest
import torch
from tests.ops.kernels.device import DEVICE, needs_kernels, on_gpu
from tests.ops.test_sample import SETTINGS, check_filters

from musespark.ops.sample_filter import filter_logits, filter_logits_triton

pytestmark = needs_kernels


def filtered(logits, settings):
    columns = [torch.tensor(column, device=DEVICE) for column in zip(*settings, strict=True)]
    return filter_logits_triton(logits.to(DEVICE), *columns).cpu()


@pytest.mark.parametrize(
    ("vocab_size", "spread"), [(7, 1.0), (300, 0.01), (5000, 5.0), *on_gpu((202048, 1.0))]
)
def test_filters_keep_what_their_definitions_say(vocab_size, spread):
    torch.manual_seed(vocab_size)
    settings = SETTINGS if vocab_size < 1000 else SETTINGS[::5]
    logits = torch.randn(len(settings), vocab_size) * spread
    check_filters(logits, filtered(logits, settings), settings)


def test_ties_forbidden_tokens_and_rows_of_a_wider_tensor():
    rows = torch.tensor([[1.0, 2.0, 2.0, 0.0, 9.0], [-torch.inf, -0.0, 0.0, -torch.inf, 9.0]])
    settings = [(1, 1.0, 0.0), (0, 0.6, 0.0)]
    kept = filtered(rows.to(DEVICE)[:, :4], settings).isfinite()
    assert kept.tolist() == [[False, True, True, False], [False, True, True, False]]
    # Of three equally likely tokens exactly two weigh: the first alone reaches a half.
    tied = torch.tensor([[3.0, 1.0, 1.0, 1.0]])
    half = float(torch.tensor([3.0, 1.0]).softmax(0)[0])
    assert filtered(tied, [(2, half - 1e-3, 0.0)]).isfinite().sum() == 1
    assert filtered(tied, [(2, half + 1e-3, 0.0)]).isfinite().sum() == 4


def test_no_rows():
    assert filtered(torch.empty(0, 9), [(0, 1.0, 0.0)]).shape == (0, 9)


def test_the_same_tokens_as_by_ranking():
    torch.manual_seed(5)
    logits = torch.randn(8, 900) * 3
    settings = [(0, 0.9, 0.0), (40, 0.95, 0.0), (0, 1.0, 0.1), (7, 1.0, 0.0)] * 2
    columns = [torch.tensor(column) for column in zip(*settings, strict=True)]
    assert torch.equal(filtered(logits, settings), filter_logits(logits, *columns))
