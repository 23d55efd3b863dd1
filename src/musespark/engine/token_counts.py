"""How often each token stands in the prompt and the output of requests with penalties."""

from collections.abc import Sequence

import torch
from torch import Tensor

from musespark.engine.request import Request


class TokenCounts:
    """Dense counts on the device, one row per slot, made when first needed."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._num_slots, self._device = num_slots, device
        self._outputs = torch.empty(0)
        self._prompts = torch.empty(0)
        # Whose counts a row holds, and of how many output tokens.
        self._owners: list[Request | None] = [None] * num_slots
        self._counted = [0] * num_slots

    def rows(
        self, requests: Sequence[Request], vocab_size: int, ahead: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """(output counts [N, V] int32, in the prompt [N, V] bool) up to each one's last token, and
        to the `ahead`-th of those that it has guessed behind it."""
        if self._outputs.numel() == 0:
            shape = (self._num_slots, vocab_size)
            self._outputs = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._prompts = torch.zeros(shape, dtype=torch.bool, device=self._device)
        slots: list[int] = []
        tokens: list[int] = []
        for request in requests:
            new = self._new_tokens(request)
            slots += [request.slot] * len(new)
            tokens += new
        ones = torch.ones(len(tokens), dtype=torch.int32, device=self._device)
        index = torch.tensor([slots, tokens], dtype=torch.int64, device=self._device)
        self._outputs.index_put_((index[0], index[1]), ones, accumulate=True)
        rows = torch.tensor([request.slot for request in requests], device=self._device)
        outputs = self._outputs[rows]  # a copy
        if ahead is not None:
            guessed = [
                (row, token_id)
                for row, (request, count) in enumerate(zip(requests, ahead, strict=True))
                for token_id in request.draft_token_ids[:count]
            ]
            index = torch.tensor(guessed, dtype=torch.int64, device=self._device).view(-1, 2).T
            ones = torch.ones(len(guessed), dtype=torch.int32, device=self._device)
            outputs.index_put_((index[0], index[1]), ones, accumulate=True)
        return outputs, self._prompts[rows]

    def _new_tokens(self, request: Request) -> list[int]:
        """Output tokens that a request's row lacks; the row is started if it is another's."""
        slot, count = request.slot, len(request.output_token_ids)
        if self._owners[slot] is not request:
            self._owners[slot], self._counted[slot] = request, 0
            self._outputs[slot].zero_()
            prompt = torch.tensor(request.prompt_token_ids, device=self._device)
            self._prompts[slot].zero_().index_fill_(0, prompt, True)
        new = request.output_token_ids[self._counted[slot] :]
        self._counted[slot] = count
        return new
