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
from musespark.engine.sampler import SampledTokens, Sampler, Sampling, SamplingRows
from musespark.engine.sampling_table import Needs, needs_of
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
        # What has left that queue, and not been sampled yet.
        self._launched: tuple[_Step, StepOutput] | None = None
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
                needs_each_token=_needs_each_token(params, grammar),
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
        """Begin a step, or two where the second can begin before the first one's tokens are known,
        and return the tokens of the first; none while a pipeline fills up.

        An executor in lockstep gets a step whether or not there is anything to run.
        """
        started = time.perf_counter()
        if self._launched is None:
            is_new = self._submit(self.scheduler.schedule())
            assert is_new or self._under_way or not self.has_work, "nothing was found to run"
            is_full = len(self._under_way) == self._executor.depth
            if is_full or (self._under_way and not is_new):
                self._launch()
        results: list[NewToken] = []
        if self._launched is not None:
            launched, self._launched = self._launched, None
            results = self._take_up(*launched)
        self._step_seconds += time.perf_counter() - started
        return results

    def drain(self) -> None:
        """Abort every request, and take up what is under way, so that the executor can end."""
        for request_id in list(self._outputs):
            self.abort(request_id)
        while self._under_way:
            self._launch()
        self._launched = None

    def _submit(self, schedule: list[ScheduledRequest]) -> bool:
        """Begin a step; returns whether there was one to begin."""
        if not schedule and not self._executor.in_lockstep:
            return False
        # Sequences with a single new token attend together, so they must be first.
        schedule.sort(key=lambda item: item[1] > 1)
        step = _Step(schedule, self._planner.plan(schedule), time.perf_counter())
        self._executor.submit(step.plan)
        for request, *_ in schedule:
            request.is_under_way = True
        self._under_way.append(step)
        self._num_steps += 1
        return True

    def _launch(self, sampled: Tensor | None = None) -> None:
        """Have the oldest step run on the device; `sampled`: as for `Executor.collect`."""
        started = time.perf_counter()
        self._launched = self._under_way.popleft(), self._executor.collect(sampled)
        self._model_seconds += time.perf_counter() - started

    def _take_up(self, step: _Step, output: StepOutput) -> list[NewToken]:
        """The tokens of a step that has been launched.

        The next step is launched before they are read, if it can be, so that the device always has
        something to do.
        """
        schedule, logits = self._still_wanted(step, output.logits)
        sampling = [item for item in schedule if item.samples]
        is_foreseen, is_ahead = bool(sampling) and self._may_go_ahead(schedule), False
        # A replica in lockstep has steps without a token.
        speculation = self._speculation if schedule else None
        features = None if speculation is None else speculation.features(output)
        # How to sample depends on what was there before this step.
        rows = self._rows(sampling)
        if is_foreseen:
            self._foresee(schedule, sampling)
            is_ahead = self._submit(self.scheduler.schedule_ahead())
        started = time.perf_counter()
        if any(wants_prompt_logprobs(item.request) for item in schedule):
            logits = take_prompt_logprobs(schedule, logits)
        chosen = self._sample(logits, sampling, rows)
        if is_ahead:
            self._launch(chosen.token_ids)
        sampled = chosen.read()
        # Only now is it known that a GPU has finished: the sampled tokens are here.
        self._model_seconds += time.perf_counter() - started
        if speculation is not None:
            speculation.observe(sampling, sampled.token_ids)
        if not is_foreseen:
            self._foresee(schedule, sampling)
        results = self._settle_all(sampling, sampled)
        if speculation is not None and features is not None:
            parts = self._parts(step, schedule, results)
            speculation.follow(output, features, parts, self._sampler, is_overtaken=is_ahead)
            self._count_time(speculation, step, schedule, len(results))
        return results

    def _may_go_ahead(self, schedule: list[ScheduledRequest]) -> bool:
        """Whether the next step can begin before the tokens that this one samples are known.

        Not where a draft guesses from them, nor where rows are sampled one by one; see also
        `_needs_each_token`.
        """
        return (
            self._executor.runs_ahead
            and (self._speculation is None or self._speculation.rests(schedule))
            and self._limits.fixed_chunk is None
            and not any(item.request.needs_each_token for item in schedule)
        )

    def _rows(self, sampling: list[ScheduledRequest]) -> SamplingRows:
        guesses = None if self._speculation is None else self._speculation.guesses(sampling)
        return self._sampler.rows([item.request for item in sampling], guesses)

    def _foresee(self, schedule: list[ScheduledRequest], sampling: list[ScheduledRequest]) -> None:
        """Take over what a step does, but for which tokens it samples."""
        if self._speculation is not None:
            self._speculation.before_commit(schedule)
        if len(sampling) < len(schedule):
            for item in schedule:
                if not item.samples:
                    self.scheduler.foresee(item, 0)
        for row, item in enumerate(sampling):
            self.scheduler.foresee(item, row)

    def _settle_all(
        self, sampling: list[ScheduledRequest], sampled: SampledTokens
    ) -> list[NewToken]:
        results: list[NewToken] = []
        for item, token_ids, logprobs in zip(
            sampling, sampled.token_ids, sampled.logprobs, strict=True
        ):
            results += self._settle(item.request, token_ids, logprobs)
        self._num_new_tokens += len(results)
        return results

    def _parts(
        self, step: _Step, schedule: list[ScheduledRequest], results: list[NewToken]
    ) -> list[StepPart]:
        """What stands of a step."""
        places = {id(item.request): place for place, item in enumerate(step.schedule)}
        counts: Counter[tuple[int, int]] = Counter()
        if any(item.num_drafts for item in schedule):
            counts.update((token.request_id, token.output_index) for token in results)
        parts = []
        for request, num_kept, num_drafts, samples in schedule:
            if num_drafts:
                # The last of the new tokens is sampled, and was not run.
                num_kept += counts[request.request_id, request.index] - 1 - num_drafts
            parts.append(StepPart(request, places[id(request)], num_kept, samples))
        return parts

    def _count_time(
        self,
        speculation: Speculation,
        step: _Step,
        schedule: list[ScheduledRequest],
        num_new_tokens: int,
    ) -> None:
        started = max(step.started, self._last_collected)
        self._last_collected = time.perf_counter()
        speculation.count_time(schedule, num_new_tokens, self._last_collected - started)

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

    def _sample(
        self, logits: Tensor, sampling: list[ScheduledRequest], rows: SamplingRows
    ) -> Sampling:
        if self._limits.fixed_chunk is not None:
            return self._sample_one_by_one(logits, sampling, rows)
        return self._sampler.sample(logits, rows, self._forbidden(sampling))

    def _sample_one_by_one(
        self, logits: Tensor, sampling: list[ScheduledRequest], rows: SamplingRows
    ) -> Sampling:
        """Every row on its own, so that its operations have the same shapes in any company."""
        sampled = SampledTokens([], [])
        for row, item in enumerate(sampling):
            logits_of_one = logits[row : row + 1]
            one = self._sampler.sample(logits_of_one, rows.one(row), self._forbidden([item])).read()
            sampled.token_ids.extend(one.token_ids)
            sampled.logprobs.extend(one.logprobs)
        return Sampling(torch.tensor(sampled.token_ids), lambda: sampled)

    def _settle(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> list[NewToken]:
        prompt_logprobs = None
        if len(request.output_token_ids) == 1:
            self._num_prompt_tokens += len(request.prompt_token_ids)
            prompt_logprobs = tuple(request.prompt_logprobs) or None
        constraint = request.constraint
        if constraint is not None:
            token_ids = _accepted(constraint, token_ids)
        taken = self.scheduler.settle(request, token_ids)
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
        for request, _, num_drafts, _ in sampling:
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


def _needs_each_token(params: SamplingParams, grammar: Grammar | None) -> bool:
    """Whether the host has to do with each token before the next is sampled: to follow a grammar,
    to count it for penalties, or to note its prompt's log-probabilities before."""
    counts = Needs.PENALTIES in needs_of(params)
    return grammar is not None or counts or params.prompt_logprobs is not None


def _accepted(constraint: TokenConstraint, token_ids: list[int]) -> list[int]:
    """Tokens up to the one after which nothing may follow."""
    for count, token_id in enumerate(token_ids, start=1):
        constraint.accept(token_id)
        if constraint.is_finished:
            return token_ids[:count]
    return token_ids
