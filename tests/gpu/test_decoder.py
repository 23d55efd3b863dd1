"""The whole decoder on a GPU: the same tokens as the CPU, and the same steps as graphs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from musespark import LLM, SamplingParams
from musespark.engine.cuda_graph import StepGraphs
from musespark.llm.loading import load_decoder
from musespark.model.batch import AttentionMetadata, ForwardBatch
from musespark.model.kv_cache import KVCacheSpec, allocate_kv_cache
from musespark.testing.checkpoints import make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY = SamplingParams(temperature=0, max_tokens=40)
PROMPTS = [
    list(text.encode())
    for text in (
        "What is 12 + 30?",
        "Name three colours.",
        "Hello",
        "Sort these numbers: 5, 3, 9, 1. " * 8,
        "b" * 150,
        "a",
    )
]
# As narrow as the Hopper experts allow.
WIDE_ENOUGH: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 32,
    "moe_hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 384,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "wide", **WIDE_ENOUGH)


def tokens(model, **settings):
    llm = LLM(model, max_model_len=512, max_num_seqs=8, **settings)
    return [list(c.token_ids) for c in llm.generate(PROMPTS, GREEDY)]


def test_float32_gives_the_cpus_greedy_tokens():
    on_cpu = tokens("spark-mini", device="cpu", dtype="float32")
    assert tokens("spark-mini", device="cuda", dtype="float32") == on_cpu
    # Prompts in several chunks, next to sequences that decode.
    chunked = tokens("spark-mini", device="cuda", dtype="float32", max_num_batched_tokens=32)
    assert chunked == on_cpu


def test_running_ahead_changes_no_token():
    """Of requests that end in every way and are sampled in every way."""
    params = [
        GREEDY,
        SamplingParams(temperature=0.8, seed=1, max_tokens=20, n=2, logprobs=1),
        SamplingParams(temperature=1.0, seed=2, top_p=0.9, top_k=40, max_tokens=30),
        SamplingParams(temperature=0, max_tokens=12, frequency_penalty=0.3),
        SamplingParams(temperature=0.6, seed=3, max_tokens=25, min_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=40, stop=("0",)),
    ]
    found = []
    for runs_ahead in (False, True):
        llm = LLM("spark-mini", device="cuda", dtype="float32", max_model_len=512, max_num_seqs=5)
        engine: Any = llm._engine
        engine._executor.runs_ahead = runs_ahead
        completions = [*llm.generate(PROMPTS, params), *llm.generate(PROMPTS[::-1], params)]
        found.append([(c.token_ids, c.finish_reason) for c in completions])
    assert found[0] == found[1]


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_bfloat16_runs_whole(folder, cache):
    found = tokens(folder, device="cuda", dtype="bfloat16", kv_cache_dtype=cache)
    assert all(len(ids) == GREEDY.max_tokens for ids in found)
    assert tokens(folder, device="cuda", dtype="bfloat16", kv_cache_dtype=cache) == found


BLOCK_SIZE, BLOCKS = 16, 64


def decode_batch(seq_lens, device):
    """One step of sequences that have decoded for a while, over caches full of numbers."""
    count = len(seq_lens)
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3))
    width = -(-max(seq_lens) // BLOCK_SIZE)
    table = order[: count * width].view(count, width)
    positions = torch.tensor(seq_lens) - 1
    blocks = table[torch.arange(count), positions // BLOCK_SIZE]
    slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    metadata = AttentionMetadata(
        block_table=table.to(device),
        key_start=(0,) * count,
        slot_mapping=slots.to(device),
        decode_table=table.to(device),
        decode_mask=torch.empty(0),
    )
    return ForwardBatch(
        token_ids=torch.arange(count, device=device) + 7,
        positions=positions.to(device),
        query_start=tuple(range(count + 1)),
        seq_lens=tuple(seq_lens),
        num_decodes=count,
        full=metadata,
        sliding=metadata,
        logit_rows=None,
    )


@pytest.mark.parametrize("seq_lens", [[40], [40, 3, 17, 64], [5, 40, 33], [9] * 11])
def test_a_graph_does_what_the_step_does(folder, seq_lens):
    device = torch.device("cuda")
    decoder = load_decoder(folder, device=device, dtype=torch.bfloat16)
    decoder.pack()
    assert not decoder.waits_for_device
    spec = KVCacheSpec(BLOCK_SIZE, BLOCKS, BLOCKS)

    def new_caches():
        caches = allocate_kv_cache(decoder.config, spec, dtype=torch.bfloat16, device=device)
        for index, layer in enumerate(caches):
            generator = torch.Generator(device).manual_seed(index)
            layer.key.normal_(generator=generator)
            layer.value.normal_(generator=generator)
        return caches

    batch = decode_batch(seq_lens, device)
    caches, graph_caches = new_caches(), new_caches()
    # Tables of sliding layers begin at the window; here they are whole, so the graph's must be.
    graphs = StepGraphs(decoder, graph_caches, spec, tap_layers=(-1, 2))
    graphs._sliding_table = graphs._full_table.clone()
    assert graphs.accepts(batch)
    for _ in range(2):
        logits, taps = decoder.forward_with_taps(batch, caches, (-1, 2))
        replayed, replayed_taps = graphs.run(batch)
        assert replayed.shape == logits.shape
        # Padded batches may take another way through the matrix library.
        assert torch.allclose(replayed, logits, atol=0.05)
        assert bool((replayed.argmax(-1) == logits.argmax(-1)).all())
        for tap, replayed_tap in zip(taps, replayed_taps, strict=True):
            assert torch.allclose(replayed_tap, tap, atol=0.05)
        touched = batch.full.slot_mapping
        for layer, graph_layer in zip(caches, graph_caches, strict=True):
            for one, other in ((layer.key, graph_layer.key), (layer.value, graph_layer.value)):
                rows, graph_rows = one.flatten(0, 1), other.flatten(0, 1)
                assert torch.allclose(rows[touched].float(), graph_rows[touched].float(), atol=0.1)
                rows[touched] = graph_rows[touched] = 0
                assert torch.equal(rows, graph_rows)
        batch = replace(batch, token_ids=batch.token_ids + 1)


def test_graphs_leave_other_steps_alone(folder):
    device = torch.device("cuda")
    decoder = load_decoder(folder, device=device, dtype=torch.bfloat16)
    decoder.pack()
    spec = KVCacheSpec(BLOCK_SIZE, BLOCKS, BLOCKS)
    caches = allocate_kv_cache(decoder.config, spec, dtype=torch.bfloat16, device=device)
    graphs = StepGraphs(decoder, caches, spec)
    batch = decode_batch([9, 9], device)
    assert graphs.accepts(batch)
    assert graphs.accepts(replace(batch, num_decodes=1))
    assert not graphs.accepts(replace(batch, query_start=(0, 1, 300)))
