"""The decoder with its cache: runs batches, knows nothing of requests."""

from collections.abc import Sequence

import torch
from torch import Tensor

from musespark.engine.cuda_graph import StepGraphs
from musespark.model.batch import ForwardBatch
from musespark.model.decoder import Decoder
from musespark.model.kv_cache import KVCacheSpec, allocate_kv_cache
from musespark.ops.attention_paged import attention_paged


class ModelRunner:
    """Holds the weights and every layer's keys and values."""

    def __init__(
        self,
        decoder: Decoder,
        spec: KVCacheSpec,
        *,
        tap_layers: Sequence[int] = (),
    ) -> None:
        """`tap_layers`: as for `Decoder.forward_with_taps`; what `run` hands out."""
        self._decoder, self._block_size = decoder, spec.block_size
        self._tap_layers = tuple(tap_layers)
        self._caches = allocate_kv_cache(
            decoder.config,
            spec,
            dtype=decoder.dtype,
            device=decoder.device,
            layout=decoder.layout,
        )
        # Small steps run as graphs where there are graphs, and nothing asks the device midway.
        can_record = decoder.device.type == "cuda" and not decoder.waits_for_device
        self._graphs = (
            StepGraphs(decoder, self._caches, spec, tap_layers=self._tap_layers)
            if can_record
            else None
        )

    @property
    def device(self) -> torch.device:
        """Where batches must be."""
        return self._decoder.device

    @property
    def reads_masks(self) -> bool:
        """Whether attention reads the batches' masks; kernels read lengths instead."""
        return self._decoder.kernels.attention_paged is attention_paged

    @property
    def records_steps(self) -> bool:
        """Whether small steps run as graphs, which are recorded when their size first comes."""
        return self._graphs is not None

    def run(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(logits [N, V] float32 of the batch's wanted rows, the stream [T, D] float32 of every
        token behind each of `tap_layers`); writes the batch's keys and values.

        A graph's tensors last until the next step only.
        """
        if self._graphs is not None and self._graphs.accepts(batch):
            return self._graphs.run(batch)
        return self._decoder.forward_with_taps(batch, self._caches, self._tap_layers)

    def close(self) -> None:
        """Let recorded steps go; nothing is run afterwards."""
        if self._graphs is not None:
            self._graphs.close()


class OneByOneRunner(ModelRunner):
    """Runs every sequence of a batch on its own.

    Which kernel computes a product, and in what order it adds, depends on the shape of the whole
    batch. With one sequence at a time, every operation has the same shapes whoever shares the step.
    """

    def run(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As for `ModelRunner`, and the same bits for a sequence in any company."""
        parts: list[tuple[Tensor, ...]] = []
        for one in batch.sequences(self._block_size):
            logits, taps = super().run(one)
            # Copied: a graph's tensors last until the next run only.
            parts.append((logits.clone(), *(tap.clone() for tap in taps)))
        logits, *taps_of_all = (torch.cat(same) for same in zip(*parts, strict=True))
        return logits, tuple(taps_of_all)
