"""The engine: schedule, build inputs, run, sample, commit."""

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from musespark.config.sampling import SamplingParams
from musespark.engine.inputs import build_inputs
from musespark.engine.request import FinishReason, Request, RequestStatus, TokenLogprobs
from musespark.engine.sampler import sample
from musespark.engine.scheduler import CacheLayout, ScheduledRequest, Scheduler
from musespark.errors import RequestError
from musespark.model.batch import ForwardBatch


class Runner(Protocol):
    """What runs a batch: a `ModelRunner`, or a stand-in in tests."""

    @property
    def device(self) -> torch.device:
        """Where batches must be."""
        ...

    def run(self, batch: ForwardBatch) -> Tensor:
        """Logits [N, V] float32 of the batch's wanted rows."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine serves."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class NewToken:
    """One step's result for one request."""

    request_id: int
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


class Engine:
    """Runs requests together, one step at a time."""

    def __init__(self, runner: Runner, layout: CacheLayout, limits: EngineLimits) -> None:
        self._runner = runner
        self._limits = limits
        self.scheduler = Scheduler(layout, limits.max_num_seqs, limits.max_num_batched_tokens)
        self._requests: dict[int, Request] = {}
        self._generators: dict[int, torch.Generator] = {}
        self._next_id = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self.scheduler.has_work

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a prompt; returns the request's id.

        Raises:
            RequestError: an empty prompt, a token outside the vocabulary, or a prompt that leaves
                no room for an answer.
        """
        limits, prompt = self._limits, tuple(prompt_token_ids)
        self._check_prompt(prompt, params)
        end_tokens = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_tokens |= limits.eos_token_ids
        request = Request(
            request_id=next(self._next_id),
            prompt_token_ids=prompt,
            params=params,
            end_token_ids=end_tokens,
            max_total_tokens=limits.max_model_len,
        )
        self._requests[request.request_id] = request
        if params.temperature > 0:
            generator = torch.Generator(device=self._runner.device)
            seed = secrets.randbits(63) if params.seed is None else params.seed
            self._generators[request.request_id] = generator.manual_seed(seed)
        self.scheduler.add(request)
        return request.request_id

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request early; does nothing if it has ended already."""
        if (request := self._requests.get(request_id)) is not None:
            self.scheduler.finish(request, reason)
            self._forget(request_id)

    def step(self) -> list[NewToken]:
        """Run one batch; returns the tokens it produced."""
        schedule = self.scheduler.schedule()
        if not schedule:
            assert not self.has_work, "the scheduler found nothing to run"
            return []
        # Sequences with a single new token attend together, so they must be first.
        schedule.sort(key=lambda item: item.num_new_tokens > 1)
        logits = self._runner.run(
            build_inputs(schedule, self.scheduler.layout, self._runner.device)
        )
        return self._sample_and_commit(schedule, logits)

    def _sample_and_commit(
        self, schedule: list[ScheduledRequest], logits: Tensor
    ) -> list[NewToken]:
        sampling = [item for item in schedule if item.samples]
        requests = [item.request for item in sampling]
        sampled = sample(
            logits,
            [request.params for request in requests],
            [self._generators.get(request.request_id) for request in requests],
        )
        for item in schedule:
            if not item.samples:
                self.scheduler.commit(item, None)
        results = []
        for item, token_id, logprobs in zip(
            sampling, sampled.token_ids, sampled.logprobs, strict=True
        ):
            request = item.request
            self.scheduler.commit(item, token_id)
            results.append(NewToken(request.request_id, token_id, logprobs, request.finish_reason))
            if request.status is RequestStatus.FINISHED:
                self._forget(request.request_id)
        return results

    def _forget(self, request_id: int) -> None:
        del self._requests[request_id]
        self._generators.pop(request_id, None)

    def _check_prompt(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        limits = self._limits
        if not prompt:
            raise RequestError("The prompt is empty: it must hold at least one token.")
        for token_id in (*prompt, *params.stop_token_ids):
            if not 0 <= token_id < limits.vocab_size:
                raise RequestError(
                    f"Token id {token_id} is outside the model's vocabulary "
                    f"(0 to {limits.vocab_size - 1})."
                )
        if len(prompt) >= limits.max_model_len:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens, but prompt and output together may have "
                f"{limits.max_model_len} (max_model_len). Shorten it, or raise max_model_len."
            )
