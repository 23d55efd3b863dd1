"""Collectives, over gloo, in every dtype the model computes in."""

import pytest
import torch
from tests.parallel.workers import WorkerError, Workers

from musespark.config.parallel import Parallelism
from musespark.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    exchange_counts,
    gather_columns,
    receive,
    reduce_scatter,
    send,
)
from musespark.parallel.mesh import MeshAxis, build_mesh

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def of_rank(rank, rows, dtype):
    """Small whole numbers, so that sums are exact in any dtype."""
    return (torch.arange(rows * 6).view(rows, 6) % 7 + rank).to(dtype)


def tensor_axis(rank, size):
    return build_mesh(Parallelism(tensor_parallel_size=size), rank).tensor


@pytest.mark.parametrize("size", [2, 3])
def test_all_of_them(workers, size):
    assert workers.run(size, check_collectives, size) == [True] * size


def check_collectives(rank, size):
    axis = tensor_axis(rank, size)
    for dtype in DTYPES:
        for rows in (0, 1, 5):
            each = [of_rank(other, rows, dtype) for other in range(size)]
            mine = of_rank(rank, rows, dtype)
            total = torch.stack(each).sum(0)
            assert torch.equal(all_gather(mine, axis), torch.cat(each))
            assert torch.equal(gather_columns(mine, axis), torch.cat(each, dim=1))
            assert torch.equal(all_reduce(mine.clone(), axis), total)
            # Strided inputs too.
            assert torch.equal(gather_columns(mine[:, ::2], axis)[:, :3], each[0][:, ::2])
            assert torch.equal(all_reduce(mine.clone()[:, 1:3], axis), total[:, 1:3])
            each = [of_rank(other, rows * size, dtype) for other in range(size)]
            total = torch.stack(each).sum(0)
            part = reduce_scatter(of_rank(rank, rows * size, dtype), axis)
            assert torch.equal(part, total.chunk(size)[rank] if rows else total)
    return True


# counts[i][j]: rows from rank i to rank j.
@pytest.mark.parametrize(
    "counts",
    [
        [[1, 2, 3], [0, 4, 1], [2, 2, 0]],
        [[0, 0, 0], [5, 0, 1], [0, 0, 0]],  # two ranks without a row to send
        [[0, 0, 7], [0, 0, 1], [0, 0, 2]],  # two ranks that receive nothing
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    ],
)
def test_uneven_counts_and_empty_ranks(workers, counts):
    assert workers.run(3, check_all_to_all, counts) == [True] * 3


def check_all_to_all(rank, counts):
    axis = tensor_axis(rank, 3)
    received = exchange_counts(torch.tensor(counts[rank]), axis).tolist()
    assert received == [row[rank] for row in counts]
    for dtype in DTYPES:
        sent = [of_rank(source, sum(counts[source]), dtype) for source in range(3)]
        got = all_to_all(sent[rank], counts[rank], received, axis)
        expected = [sent[source].split(counts[source])[rank] for source in range(3)]
        assert torch.equal(got, torch.cat(expected))
        back = all_to_all(got, received, counts[rank], axis)
        assert torch.equal(back, sent[rank])
    return True


def test_messages_may_pile_up_before_they_are_taken(workers):
    assert workers.run(2, check_messages) == [True] * 2


def check_messages(rank):
    axis = build_mesh(Parallelism(pipeline_parallel_size=2), rank).pipeline
    shapes = [(3, 4), (0, 4), (1, 4), (5, 4)]
    if rank == 0:
        sent = [send(torch.full(shape, float(i)), 1, axis) for i, shape in enumerate(shapes)]
        assert sent[1].is_done()
        for message in sent:
            message.wait()
    else:
        for i, shape in enumerate(shapes):
            assert torch.equal(receive(torch.empty(shape), 0, axis), torch.full(shape, float(i)))
    return True


def test_one_rank_alone():
    axis, x = MeshAxis(), torch.arange(6.0).view(2, 3)
    for collective in (all_reduce, all_gather, gather_columns, reduce_scatter, exchange_counts):
        assert collective(x, axis) is x
    assert all_to_all(x, [2], [2], axis) is x


class TestWorkers:
    """The pool itself: whatever a rank does, the call ends."""

    @pytest.mark.parametrize(
        ("function", "message"),
        [("raises", "rank 1:.*this rank is unwell"), ("dies", "rank 1 died"), ("hangs", "hang")],
    )
    def test_a_bad_rank_ends_the_call_and_the_next_one_works(self, function, message):
        pool = Workers(seconds=3 if function == "hangs" else 60)
        try:
            with pytest.raises(WorkerError, match=f"(?s){message}"):
                pool.run(2, globals()[function])
            pool._seconds = 60
            assert pool.run(2, fine) == [0, 1]
        finally:
            pool.close()


def raises(rank):
    if rank:
        raise ValueError("this rank is unwell")


def dies(rank):
    if rank:
        import os

        os._exit(3)


def hangs(rank):
    if rank:
        import time

        time.sleep(1000)


def fine(rank):
    return rank
