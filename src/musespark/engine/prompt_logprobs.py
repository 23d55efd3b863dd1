"""Log-probabilities of prompts: more rows of logits in a step, and where they go."""

from collections.abc import Sequence

import torch
from torch import Tensor

from musespark.engine.request import Request
from musespark.engine.sampler import LogprobsReadback
from musespark.engine.scheduler import ScheduledRequest
from musespark.engine.step_plan import wanted_rows


def wants_prompt_logprobs(request: Request) -> bool:
    """Whether a step of this request predicts prompt tokens that the caller wants to know about."""
    return request.params.prompt_logprobs is not None and not request.output_token_ids


def take_prompt_logprobs(schedule: Sequence[ScheduledRequest], logits: Tensor) -> Tensor:
    """Note the prompts' log-probabilities; returns the logits [N, V] of the rows that sample.

    Args:
        schedule: the step.
        logits: [M, V] of all its wanted rows.
    """
    sampling_rows: list[int] = []
    end = 0
    for item in schedule:
        start, end = end, end + len(wanted_rows(item, item.num_new_tokens))
        if wants_prompt_logprobs(item.request):
            _note(item.request, logits[start:end])
        if item.samples:
            sampling_rows += range(end - 1 - item.num_drafts, end)
    return logits[torch.tensor(sampling_rows, dtype=torch.int64, device=logits.device)]


def _note(request: Request, logits: Tensor) -> None:
    """Take over the logits [n, V] of the request's tokens that this step computes."""
    prompt, first = request.prompt_token_ids, request.num_computed_tokens
    if not request.prompt_logprobs:
        request.prompt_logprobs = [None] * len(prompt)
    targets = prompt[first + 1 : first + 1 + len(logits)]
    counts = [request.params.prompt_logprobs or 0] * len(targets)
    token_ids = torch.tensor(targets, dtype=torch.int64, device=logits.device)
    found = LogprobsReadback(logits[: len(targets)], token_ids, counts).entries()
    request.prompt_logprobs[first + 1 : first + 1 + len(found)] = found
