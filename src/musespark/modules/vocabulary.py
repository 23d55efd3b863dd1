"""The two ends of the model, each cut over the vocabulary where ranks share it.

Every rank holds an equal run of rows, the last ones possibly less; rows past the vocabulary's end
are zero.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from musespark.modules.linear import Linear
from musespark.parallel.collectives import gather_columns
from musespark.parallel.mesh import MeshAxis
from musespark.parallel.shard import HasTensor, Share, WeightSlot, copy_into


def _rows_here(vocab_size: int, axis: MeshAxis) -> tuple[Share, int]:
    """(this rank's rows of the vocabulary, rows of its weight)."""
    rows = -(-vocab_size // axis.size)
    start = min(axis.rank * rows, vocab_size)
    return Share(vocab_size, start, min(start + rows, vocab_size)), rows


def _slot(name: str, share: Share, weight: Tensor) -> WeightSlot:
    shape = (share.total, weight.shape[1])
    return WeightSlot(name, shape, copy_into(weight[: share.size]), index=(share.index,))


class VocabularyEmbedding(nn.Module):
    """Token ids -> rows, of which each rank finds those of its own tokens."""

    def __init__(
        self,
        vocab_size: int,
        width: int,
        *,
        axis: MeshAxis,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._share, rows = _rows_here(vocab_size, axis)
        weight = torch.empty(rows, width, dtype=dtype, device=device)
        weight[self._share.size :] = 0
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._is_whole = axis.size == 1

    def weight_slots(self, prefix: str, _has: HasTensor) -> Iterator[WeightSlot]:
        """This rank's rows."""
        yield _slot(f"{prefix}weight", self._share, self.weight)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, width]: partial sums, zero where the token is another rank's."""
        if self._is_whole:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self._share.start
        elsewhere = (local < 0) | (local >= self._share.size)
        rows = F.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        return rows.masked_fill_(elsewhere[:, None], 0)


class VocabularyHead(Linear):
    """Hidden states -> float32 logits, of which each rank computes those of its own tokens."""

    def __init__(
        self,
        width: int,
        vocab_size: int,
        *,
        axis: MeshAxis,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._share, rows = _rows_here(vocab_size, axis)
        super().__init__(width, rows, dtype=dtype, device=device, wide_output=True)
        assert self.weight is not None
        self.weight.data[self._share.size :] = 0
        self._axis = axis

    def weight_slots(self, prefix: str, _has: HasTensor) -> Iterator[WeightSlot]:
        """This rank's rows."""
        assert self.weight is not None
        yield _slot(f"{prefix}weight", self._share, self.weight)

    def gather(self, logits: Tensor) -> Tensor:
        """[N, rows here] -> [N, V] on every rank."""
        return gather_columns(logits, self._axis)[:, : self._share.total]
