"""The draft on a GPU: what the CPU computes, and recordable as a graph."""

import pytest
import torch

from musespark.llm.loading import load_draft
from musespark.model.draft import DraftContext, PagedContext
from musespark.model.draft_cache import allocate_draft_cache
from musespark.model.kv_cache import KVCacheSpec
from musespark.testing import make_draft, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TARGET = tiny_config()
SPEC = KVCacheSpec(block_size=4, num_full_blocks=32, num_sliding_blocks=32)
LENGTHS = [23, 1, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("draft") / "draft"
    return make_draft(path, TARGET, num_hidden_layers=3, global_attn_cfg=[8, 0, 3])


def loaded(folder, device, dtype):
    """The draft and its caches with context in them."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=generator)
    draft = load_draft(folder, TARGET, embedding.to(device, dtype), dtype=dtype)
    caches = allocate_draft_cache(draft.config, TARGET, SPEC, dtype=dtype, device=draft.device)
    for row, length in enumerate(LENGTHS):
        positions = torch.arange(length)
        taps = [torch.randn(length, TARGET.hidden_size, generator=generator) for _ in range(2)]
        slots = (positions + row * 40).to(device)
        features = draft.features([tap.to(device) for tap in taps])
        draft.inject(features, positions.to(device), slots, slots, caches)
    return draft, caches


def context(device, lengths):
    paged = PagedContext(
        (torch.arange(10) + 10 * torch.arange(3)[:, None]).to(device),
        torch.zeros(3, dtype=torch.int64, device=device),
    )
    return DraftContext(torch.tensor(lengths, device=device), full=paged, sliding=paged)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 1.0)])
def test_a_gpu_proposes_what_a_cpu_does(folder, dtype, tolerance):
    proposals = []
    for device in ("cpu", "cuda"):
        draft, caches = loaded(folder, device, dtype)
        anchors = torch.tensor([5, 77, 3], device=device)
        proposals.append(draft.propose(anchors, context(device, LENGTHS), caches, 1))
    ours, theirs = proposals
    assert (theirs.logits.cpu() - ours.logits).abs().max() < tolerance
    assert (theirs.confidences.cpu() - ours.confidences).abs().max() < tolerance / 4


def test_a_graph_repeats_a_proposal_for_other_anchors_and_lengths(folder):
    draft, caches = loaded(folder, "cuda", torch.bfloat16)
    anchors = torch.tensor([5, 77, 3], device="cuda")
    place = context("cuda", LENGTHS)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        draft.propose(anchors, place, caches, 5)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        recorded = draft.propose(anchors, place, caches, 5)
    for ids, lengths in (([5, 77, 3], LENGTHS), ([9, 1, 100], [11, 0, 12])):
        anchors.copy_(torch.tensor(ids))
        place.context_lens.copy_(torch.tensor(lengths))
        graph.replay()
        expected = draft.propose(anchors, context("cuda", lengths), caches, 5)
        assert torch.equal(recorded.token_ids, expected.token_ids)
        assert torch.allclose(recorded.logits, expected.logits, atol=1e-3)
        assert torch.allclose(recorded.confidences, expected.confidences, atol=1e-3)
