"""The draft on Triton's kernels, against the draft on plain PyTorch."""

import pytest
import torch
from tests.ops.accuracy import seeded
from tests.ops.kernels.device import DEVICE, needs_kernels

from musespark.llm.loading import load_draft
from musespark.model.draft import DraftContext, PagedContext
from musespark.model.draft_cache import allocate_draft_cache
from musespark.model.kv_cache import KVCacheSpec
from musespark.ops import kernel_set
from musespark.testing import make_draft, tiny_config

pytestmark = needs_kernels

TARGET = tiny_config()
SPEC = KVCacheSpec(block_size=4, num_full_blocks=12, num_sliding_blocks=12)
VARIANTS = {
    "as released": {},
    "rounded residual": {"residual_dtype": "bf16"},
    "plain residual, norm alone": {"use_residual_gate": False, "use_attn_o_gate": False},
    "gate alone, no cap": {"use_attn_o_norm": False, "output_soft_cap_temp": None},
}


def proposal(folder, num_tokens):
    generator = seeded(0)
    embedding = torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=generator)
    draft = load_draft(folder, TARGET, embedding.to(DEVICE), dtype=torch.float32)
    caches = allocate_draft_cache(
        draft.config, TARGET, SPEC, dtype=torch.float32, device=draft.device
    )
    positions = torch.arange(9)
    taps = [torch.randn(9, TARGET.hidden_size, generator=generator).to(DEVICE) for _ in range(2)]
    slots = positions.to(DEVICE)
    draft.inject(draft.features(taps), slots, slots, slots, caches)
    lens = torch.tensor([9, 4], device=DEVICE)
    paged = PagedContext(torch.arange(3, device=DEVICE).expand(2, -1), torch.zeros_like(lens))
    context = DraftContext(lens, full=paged, sliding=paged)
    anchors = torch.tensor([5, 77], device=DEVICE)
    return draft, draft.propose(anchors, context, caches, num_tokens)


@pytest.mark.parametrize("changes", list(VARIANTS.values()), ids=list(VARIANTS))
def test_proposals_are_the_same(tmp_path, changes):
    folder = make_draft(tmp_path / "draft", TARGET, dtype=torch.float32, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_set, "HAS_TRITON", False)
        plain, expected = proposal(folder, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_set, "torch_kernels", kernel_set.triton_kernels)
        kernels, found = proposal(folder, 3)
    assert plain.kernels is kernel_set.torch_kernels()
    assert kernels.kernels is kernel_set.triton_kernels()
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.allclose(found.logits, expected.logits, atol=1e-4)
    assert torch.allclose(found.confidences, expected.confidences, atol=1e-5)
