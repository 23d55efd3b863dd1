"""The engine: schedule, plan, submit, collect, sample, commit."""

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from musespark.config.sampling import SamplingParams
from musespark.config.structured_output import StructuredOutput
from musespark.engine.checks import check_request
from musespark.engine.client import EngineStats
from musespark.engine.executor import Executor, StepOutput
from musespark.engine.grammar import Grammar, GrammarCompiler, new_bitmask, unpack_bitmask
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.prompt_logprobs import take_prompt_logprobs, wants_prompt_logprobs
from musespark.engine.request import (
    FinishReason,
    Request,
    RequestStatus,
    TokenConstraint,
    TokenLogprobs,
)
from musespark.engine.sampler import SampledTokens, Sampler
from musespark.engine.scheduler import ScheduledRequest, Scheduler
from musespark.engine.speculation import Speculation, StepPart
from musespark.engine.step_plan import StepPlan, StepPlanner
from musespark.errors import RequestError
from musespark.moe.load import ExpertLoad


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine serves."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: frozenset[int]
    prefix_caching: bool = True
    """Keep the keys and values of past prompts for prompts that begin alike."""
    fixed_chunk: int | None = None
    """Read prompts in chunks of exactly so many tokens and sample row by row, so that a request's
    tokens are the same bits in any company; needs a runner that is invariant too."""


class NewToken(NamedTuple):
    """One step's result for one output of one request."""

    request_id: int
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    output_index: int = 0
    """Which of the request's outputs."""
    num_cached_tokens: int = 0
    """Tokens of its prompt that came out of the prefix cache."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """With the first token of output 0, where asked for."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that has been submitted and not collected."""

    schedule: list[ScheduledRequest]
    plan: StepPlan
    started: float


class Engine:
    """Runs requests together, step by step."""

    def __init__(
        self,
        executor: Executor,
        layout: CacheLayout,
        limits: EngineLimits,
        grammars: GrammarCompiler | None = None,
        expert_load: ExpertLoad | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """`grammars` is None where output cannot be constrained, `expert_load` where the experts'
        load is not counted, `speculation` where nothing is guessed ahead."""
        assert speculation is None or limits.fixed_chunk is None
        self._speculation = speculation
        self._executor, self._grammars = executor, grammars
        self.expert_load = expert_load
        self._limits = limits
        self.scheduler = Scheduler(
            layout,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            prefix_caching=limits.prefix_caching,
            fixed_chunk=limits.fixed_chunk,
            depth=executor.depth,
            choose_widths=None if speculation is None else speculation.choose_widths,
        )
        self._planner = StepPlanner(layout, limits.max_num_seqs)
        self._sampler = Sampler(limits.max_num_seqs, executor.device)
        self._under_way: deque[_Step] = deque()
        self._outputs: dict[int, dict[int, Request]] = {}
        self._next_id = 0
        self._finished: Counter[str] = Counter()
        self._num_prompt_tokens = self._num_new_tokens = self._num_steps = 0
        self._step_seconds = self._model_seconds = self._last_collected = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything of use."""
        return self.scheduler.has_work or any(step.schedule for step in self._under_way)

    @property
    def in_lockstep(self) -> bool:
        """Whether other engines take part in each step, and `step` is called for them too."""
        return self._executor.in_lockstep

    def compile_grammar(self, wanted: StructuredOutput) -> Grammar:
        """A grammar for `add_request`; may be called from another thread.

        Raises:
            RequestError: it is no valid grammar, or this engine has no library or vocabulary for
                grammars.
        """
        if self._grammars is None:
            raise RequestError(
                f"{wanted.kind}: this engine cannot constrain its output. It needs the extra "
                "musespark[structured] and a model with a byte-level tokenizer."
            )
        return self._grammars.compile(wanted)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        grammar: Grammar | None = None,
    ) -> int:
        """Queue a prompt, with `params.n` outputs; returns the request's id.

        Raises:
            RequestError: an empty prompt, a token outside the vocabulary, or a prompt that leaves
                no room for an answer or does not fit the grammar.
        """
        limits, prompt = self._limits, tuple(prompt_token_ids)
        check_request(prompt, params, limits.vocab_size, limits.max_model_len)
        end_tokens = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_tokens |= limits.eos_token_ids
        outputs = [
            Request(
                request_id=self._next_id,
                prompt_token_ids=prompt,
                # The prompt's log-probabilities are told once.
                params=dataclasses.replace(params, prompt_logprobs=None) if index else params,
                end_token_ids=end_tokens,
                max_total_tokens=limits.max_model_len,
                index=index,
                constraint=None if grammar is None else grammar.constrain(prompt, end_tokens),
            )
            for index in range(params.n)
        ]
        request_id = self._next_id
        self._next_id += 1
        outputs[0].followers = outputs[1:]
        self._outputs[request_id] = dict(enumerate(outputs))
        self.scheduler.add(outputs[0])
        return request_id

    def abort(
        self,
        request_id: int,
        reason: FinishReason = FinishReason.ABORT,
        index: int | None = None,
    ) -> list[int]:
        """End a request, or one output of it, early; does nothing if it has ended already.

        Returns:
            The outputs that this has ended.
        """
        outputs = self._outputs.get(request_id, {})
        # The last ones first: an output that ends puts those that wait for it into the queue.
        ended = [i for i in reversed(outputs) if index is None or i == index]
        for i in ended:
            request = outputs[i]
            self.scheduler.finish(request, reason)
            self._forget(request)
        return ended[::-1]

    def step(self) -> list[NewToken]:
        """Submit a step, and collect the oldest one if as many are under way as can be, or if no
        further one can begin; returns the tokens that this brought.

        An executor in lockstep gets a step whether or not there is anything to run.
        """
        started = time.perf_counter()
        is_new = self._submit()
        assert is_new or self._under_way or not self.has_work, "the scheduler found nothing to run"
        results: list[NewToken] = []
        is_full = len(self._under_way) == self._executor.depth
        if is_full or (self._under_way and not is_new):
            results = self._collect()
        self._num_steps += is_new
        self._step_seconds += time.perf_counter() - started
        return results

    def drain(self) -> None:
        """Abort every request, and take up what is under way, so that the executor can end."""
        for request_id in list(self._outputs):
            self.abort(request_id)
        while self._under_way:
            self._collect()

    def _submit(self) -> bool:
        """Begin a step; returns whether there was one to begin."""
        schedule = self.scheduler.schedule()
        if not schedule and not self._executor.in_lockstep:
            return False
        # Sequences with a single new token attend together, so they must be first.
        schedule.sort(key=lambda item: item[1] > 1)
        step = _Step(schedule, self._planner.plan(schedule), time.perf_counter())
        self._executor.submit(step.plan)
        for request, *_ in schedule:
            request.is_under_way = True
        self._under_way.append(step)
        return True

    def _collect(self) -> list[NewToken]:
        """The tokens of the oldest step."""
        started = time.perf_counter()
        step = self._under_way.popleft()
        output = self._executor.collect()
        schedule, logits = self._still_wanted(step, output.logits)
        sampling = [item for item in schedule if item.samples]
        if any(wants_prompt_logprobs(item.request) for item in schedule):
            logits = take_prompt_logprobs(schedule, logits)
        sampled = self._sample(logits, sampling)
        # Only now is it known that a GPU has finished: the sampled tokens are here.
        self._model_seconds += time.perf_counter() - started
        results = self._commit_all(schedule, sampling, sampled)
        if self._speculation is not None:
            self._speculate(self._speculation, step, output, schedule, results)
        return results

    def _speculate(
        self,
        speculation: Speculation,
        step: _Step,
        output: StepOutput,
        schedule: list[ScheduledRequest],
        results: list[NewToken],
    ) -> None:
        """Let the draft take in what stands of a step, and guess what follows."""
        places = {id(item.request): place for place, item in enumerate(step.schedule)}
        counts = Counter((token.request_id, token.output_index) for token in results)
        parts = []
        for item in schedule:
            request = item.request
            # The last of the new tokens is sampled, and was not run.
            num_new = counts[request.request_id, request.index]
            num_kept = item.num_new_tokens - item.num_drafts + max(0, num_new - 1)
            parts.append(StepPart(request, places[id(request)], num_kept, num_new > 0))
        speculation.follow(output, parts, self._sampler)
        started = max(step.started, self._last_collected)
        self._last_collected = time.perf_counter()
        seconds = self._last_collected - started
        speculation.count_time(schedule, len(counts), len(results), seconds)

    def _still_wanted(self, step: _Step, logits: Tensor) -> tuple[list[ScheduledRequest], Tensor]:
        """A step without the requests that were aborted while it was under way."""
        for request, *_ in step.schedule:
            request.is_under_way = False
        wanted = [item.request.status is RequestStatus.RUNNING for item in step.schedule]
        if all(wanted):
            return step.schedule, logits
        rows = torch.tensor(step.plan.rows_of(wanted), dtype=torch.int64, device=logits.device)
        kept = [item for item, is_wanted in zip(step.schedule, wanted, strict=True) if is_wanted]
        return kept, logits.index_select(0, rows)

    def stats(self) -> EngineStats:
        """What has happened so far."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_full_blocks_used=blocks.full_pool.num_used,
            num_sliding_blocks_used=blocks.sliding_pool.num_used,
            kv_cache_usage=blocks.usage,
            prompt_tokens=self._num_prompt_tokens,
            generation_tokens=self._num_new_tokens,
            prefix_cache_queries=blocks.num_queried_tokens,
            prefix_cache_hits=blocks.num_hit_tokens,
            preemptions=scheduler.num_preemptions,
            finished=dict(self._finished),
            steps=self._num_steps,
            step_seconds=self._step_seconds,
            schedule_seconds=self._step_seconds - self._model_seconds,
            speculation=None if self._speculation is None else self._speculation.stats(),
        )

    def _commit_all(
        self,
        schedule: list[ScheduledRequest],
        sampling: list[ScheduledRequest],
        sampled: SampledTokens,
    ) -> list[NewToken]:
        if len(sampling) < len(schedule):
            for item in schedule:
                if not item.samples:
                    self.scheduler.commit(item, ())
        results: list[NewToken] = []
        for item, token_ids, logprobs in zip(
            sampling, sampled.token_ids, sampled.logprobs, strict=True
        ):
            results += self._commit(item, token_ids, logprobs)
        self._num_new_tokens += len(results)
        return results

    def _sample(self, logits: Tensor, sampling: list[ScheduledRequest]) -> SampledTokens:
        if not sampling:
            return SampledTokens([], [])
        requests = [item.request for item in sampling]
        if self._limits.fixed_chunk is None:
            speculation = self._speculation
            guesses = None if speculation is None else speculation.guesses(sampling)
            sampled = self._sampler.sample(logits, requests, self._forbidden(sampling), guesses)
            if speculation is not None:
                speculation.observe(sampling, sampled.token_ids)
            return sampled
        token_ids, logprobs = list[list[int]](), list[list[TokenLogprobs] | None]()
        for row, item in enumerate(sampling):
            forbidden = self._forbidden([item])
            sampled = self._sampler.sample(logits[row : row + 1], [item.request], forbidden)
            token_ids += sampled.token_ids
            logprobs += sampled.logprobs
        return SampledTokens(token_ids, logprobs)

    def _commit(
        self, item: ScheduledRequest, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> list[NewToken]:
        request = item.request
        prompt_logprobs = None
        if not request.output_token_ids:
            self._num_prompt_tokens += len(request.prompt_token_ids)
            prompt_logprobs = tuple(request.prompt_logprobs) or None
        if request.constraint is not None:
            token_ids = _accepted(request.constraint, token_ids)
        taken = self.scheduler.commit(item, token_ids)
        constraint = request.constraint
        if constraint is not None and constraint.is_finished and request.finish_reason is None:
            reason = FinishReason.ABORT if constraint.is_too_slow else FinishReason.STOP
            self.scheduler.finish(request, reason)
        if request.status is RequestStatus.FINISHED:
            self._forget(request)
        return [
            NewToken(
                request.request_id,
                token_id,
                None if logprobs is None else logprobs[place],
                request.finish_reason if place == taken - 1 else None,
                request.index,
                request.num_cached_tokens or 0,
                prompt_logprobs if place == 0 else None,
            )
            for place, token_id in enumerate(token_ids[:taken])
        ]

    def _forbidden(self, sampling: list[ScheduledRequest]) -> tuple[list[int], Tensor] | None:
        """The rows with a grammar at work, and which tokens [n, V] it forbids in each."""
        if all(item.request.constraint is None for item in sampling):
            return None
        vocab_size = self._limits.vocab_size
        bitmask = new_bitmask(sum(1 + item.num_drafts for item in sampling), vocab_size)
        rows: list[int] = []
        first = 0
        for request, _, num_drafts in sampling:
            if (constraint := request.constraint) is not None:
                ahead = request.draft_token_ids[:num_drafts]
                rows += constraint.fill_allowed(bitmask, first, ahead)
            first += 1 + num_drafts
        if not rows:
            return None
        allowed = unpack_bitmask(bitmask[rows].to(self._executor.device), vocab_size)
        return rows, ~allowed

    def _forget(self, request: Request) -> None:
        assert request.finish_reason is not None
        self._finished[request.finish_reason.value] += 1
        outputs = self._outputs[request.request_id]
        del outputs[request.index]
        if not outputs:
            del self._outputs[request.request_id]


def _accepted(constraint: TokenConstraint, token_ids: list[int]) -> list[int]:
    """Tokens up to the one after which nothing may follow."""
    for count, token_id in enumerate(token_ids, start=1):
        constraint.accept(token_id)
        if constraint.is_finished:
            return token_ids[:count]
    return token_ids
