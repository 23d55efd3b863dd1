"""From logits to tokens, for a whole batch at once.

A request's tokens depend on its own logits and its own random stream only, never on its place in
the batch or on who shares it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from musespark.config.sampling import SamplingParams
from musespark.engine.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row, and log-probabilities where asked for."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
) -> SampledTokens:
    """Choose the next token of each row.

    Args:
        logits: [N, V] float32.
        params: [N] settings of the rows' requests.
        generators: [N] random stream of each row; None where temperature is 0.
    """
    token_ids = logits.argmax(dim=-1)  # the lowest id among equals
    rows = [row for row, setting in enumerate(params) if setting.temperature > 0]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        chosen = _sample_random(
            logits.index_select(0, index),
            [params[row] for row in rows],
            [generators[row] for row in rows],
        )
        token_ids.index_copy_(0, index, chosen)
    return SampledTokens(token_ids.tolist(), _logprobs(logits, token_ids, params))


def filter_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits [N, V] after temperature, top_k, top_p and min_p; what is cut away is -inf."""
    device = logits.device

    def column(name: str) -> Tensor:
        values = [getattr(setting, name) for setting in params]
        return torch.tensor(values, dtype=logits.dtype, device=device)[:, None]

    logits = logits / column("temperature")
    if not any(p.top_k or p.top_p < 1 or p.min_p for p in params):
        return logits
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=device)
    top_k = column("top_k")
    dropped = (top_k > 0) & (rank >= top_k)
    ranked = ranked.masked_fill(dropped, -torch.inf)
    probabilities = ranked.softmax(dim=-1)
    # A token stays while those more likely than it have not reached top_p yet.
    before = probabilities.cumsum(dim=-1) - probabilities
    dropped |= (before >= column("top_p")) | (
        probabilities < column("min_p") * probabilities[:, :1]
    )
    dropped[:, 0] = False
    return torch.empty_like(logits).scatter_(1, order, ranked.masked_fill(dropped, -torch.inf))


def _sample_random(
    logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
) -> Tensor:
    """Exact sampling from each row by racing exponential clocks: argmax p_i / e_i, e_i ~ Exp(1)."""
    probabilities = filter_logits(logits, params).softmax(dim=-1)
    noise = torch.empty_like(probabilities)
    for row, generator in enumerate(generators):
        noise[row].exponential_(generator=generator)
    return (probabilities / noise.clamp_min_(1e-38)).argmax(dim=-1)


def _logprobs(
    logits: Tensor, token_ids: Tensor, params: Sequence[SamplingParams]
) -> list[TokenLogprobs | None]:
    """Of the model's own distribution, before temperature and filters."""
    result: list[TokenLogprobs | None] = [None] * len(params)
    rows = [row for row, setting in enumerate(params) if setting.logprobs is not None]
    if not rows:
        return result
    index = torch.tensor(rows, device=logits.device)
    logprobs = logits.index_select(0, index).log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids.index_select(0, index)[:, None])  # [n, 1]
    ranks = (logprobs > chosen).sum(dim=-1).add(1).tolist()
    width = min(max(params[row].logprobs or 0 for row in rows), logits.shape[-1])
    values, ids = logprobs.topk(width, dim=-1)
    table = zip(rows, chosen[:, 0].tolist(), ranks, ids.tolist(), values.tolist(), strict=True)
    for row, logprob, rank, top_ids, top_values in table:
        count = params[row].logprobs or 0
        top = tuple(zip(top_ids[:count], top_values[:count], strict=True))
        result[row] = TokenLogprobs(logprob, rank, top)
    return result
