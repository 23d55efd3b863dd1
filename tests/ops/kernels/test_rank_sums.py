"""Sums over ranks inside kernels, on as many processes that see each other's memory.

On a CPU the ranks' buffers and flags are files that all of them map, and Triton's interpreter runs
the kernels as they are, with their meetings.
"""

import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ops.accuracy import randn
from tests.ops.kernels.device import ON_GPU, needs_kernels

from musespark.ops import rank_sums
from musespark.ops.expert_finalize import expert_finalize_reference
from musespark.ops.rank_sums import (
    PeerMemory,
    boundary_over_ranks,
    boundary_over_ranks_reference,
    finalize_over_ranks,
    finalize_summed_rows,
    finalize_summed_rows_reference,
    norm_over_ranks,
    norm_over_ranks_reference,
    num_flags,
    sum_reference,
)

pytestmark = [needs_kernels, pytest.mark.skipif(ON_GPU, reason="for processes on one CPU")]
WIDTHS = (12, 24)
TOKENS = (0, 1, 5)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield name


def shared_memory(folder, rank, size, dtype, capacity):
    """Two memories of this rank, to take turns, and the tensors that must be kept."""
    kept, memories = [], []
    for turn in range(2):
        tables = []
        for kind, kind_dtype, elements in (
            ("buffer", dtype, capacity),
            ("flags", torch.int32, num_flags(size)),
        ):
            files = [Path(folder) / f"{kind}-{dtype}-{turn}-{peer}" for peer in range(size)]
            mapped = [
                torch.from_file(str(file), shared=True, size=elements, dtype=kind_dtype)
                for file in files
            ]
            kept += mapped
            tables.append(torch.tensor([tensor.data_ptr() for tensor in mapped]))
        memories.append(PeerMemory(rank, tables[0], tables[1], capacity))
    dist.barrier()
    return memories, kept


def close(found, expected):
    tolerance = 1e-5 if found.dtype == torch.float32 else 2.0**-7
    return torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("size", "programs"), [(2, 1), (3, 2)])
def test_kernels_equal_references(workers, folder, size, programs):
    assert workers.run(size, check_kernels, size, folder, programs) == [True] * size


def check_kernels(rank, size, folder, programs):
    with mock.patch.object(rank_sums, "num_multiprocessors", return_value=programs):
        return check_all(rank, size, folder)


def check_all(rank, size, folder):
    for dtype in (torch.float32, torch.bfloat16):
        memories, kept = shared_memory(folder, rank, size, dtype, max(TOKENS) * max(WIDTHS) * 3)
        turn = 0
        for width in WIDTHS:
            for tokens in TOKENS:
                for check in (check_boundary, check_columns, check_finalize, check_summed_rows):
                    check(rank, size, tokens, width, dtype, memories[turn])
                    turn = 1 - turn
        del kept
    return True


def check_boundary(rank, size, tokens, width, dtype, memory):
    parts = randn(size, tokens, width, seed=tokens).to(dtype)
    stream = randn(tokens, width, seed=1)
    vectors = [randn(width, seed=seed) for seed in range(2, 6)]
    alpha, beta, post, pre = vectors
    for post_gain in (post, None):
        rest = (alpha, beta, post_gain, 1e-8, pre, 1e-5)
        # A strided part, as a slice of a wider product would be.
        wider = torch.cat((parts[rank], parts[rank]), dim=1)[:, :width]
        normed, new_stream = boundary_over_ranks(stream, wider, *rest, memory)
        expected = boundary_over_ranks_reference(stream, parts, *rest)
        assert normed.dtype == dtype
        assert close(normed, expected[0])
        assert close(new_stream, expected[1])
        dist.barrier()  # the same memory once more


def check_columns(rank, size, tokens, width, dtype, memory):
    blocks = randn(size, tokens, width // size, seed=tokens).to(dtype)
    stream = randn(tokens, width, seed=1)
    alpha, beta, post, pre = (randn(width, seed=seed) for seed in range(2, 6))
    rest = (alpha, beta, post, 1e-8, pre, 1e-5)
    normed, new_stream = boundary_over_ranks(stream, blocks[rank], *rest, memory)
    expected = boundary_over_ranks_reference(stream, blocks, *rest)
    assert normed.dtype == dtype
    assert close(normed, expected[0])
    assert close(new_stream, expected[1])
    dist.barrier()  # the same memory once more
    found = norm_over_ranks(blocks[rank], pre, 1e-5, memory)
    assert found.dtype == dtype
    assert close(found, norm_over_ranks_reference(blocks, pre, 1e-5))


def routes(tokens, seed):
    """Weights and rows of two routes of three; some routes go nowhere."""
    weights = torch.rand(tokens, 3, generator=torch.Generator().manual_seed(seed))
    index = torch.randperm(tokens * 3, generator=torch.Generator().manual_seed(seed)).view(-1, 3)
    return weights, index


def check_finalize(rank, size, tokens, width, dtype, memory):
    gain, rows, indices = randn(width, seed=9), [], []
    weights, index = routes(tokens, 3)
    for peer in range(size):
        rows.append(randn(tokens * 3, width, seed=20 + peer).to(dtype))
        indices.append(index.masked_fill(index % size != peer, -1))
    # What lies where another rank's row would be may be anything.
    mine = rows[rank].clone()
    mine[torch.arange(tokens * 3) % size != rank] = torch.nan
    found = finalize_over_ranks(mine, weights, indices[rank], gain, 1e-8, memory)
    parts = [
        expert_finalize_reference(part, weights, own, gain, 1e-8)
        for part, own in zip(rows, indices, strict=True)
    ]
    assert found.dtype == dtype
    assert close(found, sum_reference(torch.stack(parts)))


def check_summed_rows(rank, size, tokens, width, dtype, memory):
    parts = randn(size, tokens * 3, width, seed=30).to(dtype)
    gain = randn(width, seed=9)
    weights, _ = routes(tokens, 4)
    index = torch.arange(tokens * 3).view(-1, 3)
    index = index.masked_fill(index % 5 == 3, -1)
    mine = parts[rank].clone()
    mine[torch.arange(tokens * 3) % 5 == 3] = torch.nan
    found = finalize_summed_rows(mine, weights, index, gain, 1e-8, memory)
    expected = finalize_summed_rows_reference(parts, weights, index, gain, 1e-8)
    assert found.dtype == dtype
    assert close(found, expected)


def test_a_sum_is_rounded_once():
    parts = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    assert sum_reference(parts).item() == 258.0  # by twos there: 256 + 1 would stay 256
