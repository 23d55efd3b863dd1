"""Who runs in the next step, and with how many tokens.

Requests that decode go first, since each needs one token only; what is left of the token budget
goes to prompts, in chunks, in order of arrival. Tokens that a draft has guessed take what is free:
they drive nobody out, and leave prompts half of the budget. When blocks run out, the request that
arrived last gives its own back and is computed again later. So the oldest request always advances,
and nobody who waits is overtaken.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from musespark.engine.kv_blocks import CacheLayout, KVBlocks
from musespark.engine.request import FinishReason, Request, RequestStatus

# Prompt tokens of one step whose log-probabilities are wanted: each takes a row of logits.
_PROMPT_LOGPROBS_CHUNK = 256


ChooseWidths = Callable[[Sequence[Request], int, int], Sequence[int]]
"""How many of each request's guessed tokens to run: (requests, sequences that decode, tokens that
the step runs in any case)."""


class ScheduledRequest(NamedTuple):
    """A request's part of the next step."""

    request: Request
    num_new_tokens: int
    """Guessed ones included, which come last."""
    num_drafts: int
    """How many are guessed."""
    samples: bool
    """Whether the step reaches the request's last token, so that a new one is sampled."""

    @classmethod
    def of(cls, request: Request, num_new_tokens: int, num_drafts: int = 0) -> "ScheduledRequest":
        """The next tokens of a request, guessed ones last."""
        samples = num_new_tokens - num_drafts == request.num_uncomputed_tokens
        return cls(request, num_new_tokens, num_drafts, samples)


class _Refusal(NamedTuple):
    """A request that there were not enough blocks for, and how many there were."""

    request: Request
    num_running: int
    num_free_full: int
    num_free_sliding: int


class Scheduler:
    """Continuous batching with chunked prefill over two pools of blocks."""

    def __init__(
        self,
        layout: CacheLayout,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        prefix_caching: bool = True,
        fixed_chunk: int | None = None,
        depth: int = 1,
        choose_widths: ChooseWidths | None = None,
    ) -> None:
        """So many steps may be under way at once as `depth` says, of different requests. With
        `fixed_chunk`, which must leave room for `max_num_seqs` tokens beside it, prompts
        are read in exactly such chunks, and outputs one token at a time even when they are computed
        again: so what a request runs through does not depend on the others. `choose_widths` limits
        how many guessed tokens are run; None: all."""
        self.layout, self._fixed_chunk, self._depth = layout, fixed_chunk, depth
        self._choose_widths = choose_widths
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.blocks = KVBlocks(layout, prefix_caching=prefix_caching, fixed_chunk=fixed_chunk)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In order of arrival."""
        self.num_preemptions = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._last_refusal: _Refusal | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.waiting or self.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, followers of running ones included."""
        return sum(1 for _ in self._unstarted())

    def add(self, request: Request) -> None:
        """Put a request, with its followers, at the end of the queue."""
        self.waiting.append(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, wherever it is, and take its blocks back."""
        if request.status is RequestStatus.RUNNING:
            self._stop(request)
        elif request.status is RequestStatus.WAITING:
            self._remove_waiting(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        self._start_followers(request)

    def schedule(self) -> list[ScheduledRequest]:
        """Choose the next step's requests, those that decode first, and give them blocks.

        Requests that are under way are left out; their blocks stay as they are.
        """
        budget = self.max_num_batched_tokens
        places = self._num_places()
        preemptions = self.num_preemptions
        scheduled: list[ScheduledRequest] = []
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            if request.is_under_way:
                continue
            (decodes if request.num_uncomputed_tokens == 1 else prefills).append(request)
        decodes, prefills = decodes[:places], prefills[: max(0, places - len(decodes))]
        scheduled, budget = self._advance(decodes, scheduled, budget)
        if any(request.draft_token_ids for request in decodes):
            budget -= self._add_drafts(scheduled, prefills, budget)
        scheduled, budget = self._advance(prefills, scheduled, budget)
        if preemptions == self.num_preemptions:
            scheduled += self._admit(budget, places - len(scheduled))
        return scheduled

    def schedule_ahead(self) -> list[ScheduledRequest]:
        """The step behind one that was foreseen: the next token of each request that decodes.

        Empty where more is to be done, or somebody would be driven out: that can wait until the
        tokens are known.
        """
        if self.waiting and self._free_slots and not self._is_refused_again(self.waiting[0]):
            return []
        decodes = [request for request in self.running if not request.is_under_way]
        if any(request.num_uncomputed_tokens > 1 for request in decodes):
            return []
        decodes = decodes[: self.max_num_batched_tokens]
        if not all(self.blocks.allocate(request, 1) for request in decodes):
            return []  # who got a block needs it next in any case
        return [ScheduledRequest(request, 1, 0, True) for request in decodes]

    def commit(self, item: ScheduledRequest, token_ids: Sequence[int]) -> int:
        """Take over what a step did for one request: its tokens are cached, some may be new.

        Args:
            item: the request's part of the step.
            token_ids: what it adds to the output: guessed tokens that were right, and one more
                that was not run yet; none, if the step does not reach the request's last token.

        Returns:
            How many of `token_ids` belong to the output, which may end before the last.
        """
        self.foresee(item, 0)
        return self.settle(item.request, token_ids) if token_ids else 0

    def foresee(self, item: ScheduledRequest, row: int) -> None:
        """The first half of `commit`, before the new token is known: the step's are cached.

        Args:
            item: the request's part of the step.
            row: which of those that the step samples the new token is going to be.
        """
        request = item.request
        request.num_computed_tokens += item.num_new_tokens - item.num_drafts
        if item.samples:
            outputs = request.output_token_ids
            outputs.append(-1 - row)
            # If that is its last one, there is nothing to run behind it.
            request.is_under_way = len(outputs) == request.max_output_tokens
        self.blocks.commit(request)
        if request.followers and request.num_computed_tokens >= len(request.prompt_token_ids):
            self._start_followers(request)

    def settle(self, request: Request, token_ids: Sequence[int]) -> int:
        """The second half of `commit`: the new token, which may have been foreseen for long, and
        with guesses the ones before it. Returns as `commit` does."""
        if request.draft_token_ids:
            request.drop_drafts()
        taken, reason, outputs = 0, None, request.output_token_ids
        outputs.pop()
        for token_id in token_ids:
            outputs.append(token_id)
            taken += 1
            if reason := self._finish_reason(request, token_id):
                break
        if taken > 1:
            request.num_computed_tokens += taken - 1
            self.blocks.commit(request)
        if reason is not None:
            self.finish(request, reason)
        return taken

    def reserve(self, request: Request, count: int) -> bool:
        """Blocks for the next `count` tokens of a running request, if there are more than enough:
        one is left for each that runs, so that guessing drives nobody out."""
        return self.blocks.allocate(request, count, spare=len(self.running))

    def check_integrity(self) -> None:
        """Assert that no block or slot is lost or held twice (used by tests after every step)."""
        self.blocks.check_integrity([*self.running, *self._unstarted()])
        slots = sorted([*self._free_slots, *(request.slot for request in self.running)])
        assert slots == list(range(self.max_num_seqs)), "a slot was lost or doubled"

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        count = len(request.output_token_ids)
        if token_id in request.end_token_ids and count > request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= request.max_output_tokens else None

    def _advance(
        self, requests: list[Request], scheduled: list[ScheduledRequest], budget: int
    ) -> tuple[list[ScheduledRequest], int]:
        """Schedule running requests as far as `budget` goes; (the schedule, what is left of it)."""
        for request in requests:
            if request.status is not RequestStatus.RUNNING or budget == 0:
                continue  # preempted meanwhile, or left for the next step
            count = self._chunk(request, budget)
            if count == 0:
                continue
            if self.blocks.allocate(request, count):
                scheduled.append(ScheduledRequest.of(request, count))
                budget -= count
            else:
                scheduled = self._make_room(request, count, scheduled)
                budget = self.max_num_batched_tokens - sum(item[1] for item in scheduled)
        return scheduled, budget

    def _add_drafts(
        self, scheduled: list[ScheduledRequest], prefills: list[Request], budget: int
    ) -> int:
        """Let scheduled requests run guessed tokens too; returns how many those are."""
        places = [i for i, item in enumerate(scheduled) if item.request.draft_token_ids]
        requests = [scheduled[place].request for place in places]
        limit = budget
        num_tokens = len(scheduled)
        if prefills or self.waiting:
            limit //= 2
            backlog = sum(request.num_uncomputed_tokens for request in prefills)
            num_tokens += min(backlog, budget - limit)
        if self._choose_widths is None:
            widths: Sequence[int] = [len(request.draft_token_ids) for request in requests]
        else:
            widths = self._choose_widths(requests, len(scheduled), num_tokens)
        left = limit
        for place, request, wanted in zip(places, requests, widths, strict=True):
            # One token comes in any case.
            width = min(wanted, left, request.num_wanted_tokens - 1)
            if width > 0 and not self.reserve(request, 1 + width):
                held = request.num_blocks * self.layout.block_size - request.num_computed_tokens
                width = min(width, held - 1)
            if width > 0:
                scheduled[place] = ScheduledRequest.of(request, 1 + width, width)
                left -= width
        return limit - left

    def _make_room(
        self, request: Request, count: int, scheduled: list[ScheduledRequest]
    ) -> list[ScheduledRequest]:
        """Preempt from the end until the request's next tokens fit, or it is preempted itself."""
        self._take_back(scheduled)
        while not self.blocks.allocate(request, count):
            victim = next(other for other in reversed(self.running) if not other.is_under_way)
            if victim is request and any(other.is_under_way for other in self.running):
                return scheduled  # until those have come back
            scheduled = [item for item in scheduled if item.request is not victim]
            self._preempt(victim)
            if victim is request:
                return scheduled
        return [*scheduled, ScheduledRequest.of(request, count)]

    def _num_places(self) -> int:
        """Requests of one step at most: an equal share of all for each step under way."""
        if self._depth == 1:
            return self.max_num_seqs
        return -(-min(self.max_num_seqs, len(self.running) + self.num_waiting) // self._depth)

    def _take_back(self, scheduled: list[ScheduledRequest]) -> None:
        """Free the blocks that were reserved for guessed tokens and are not needed in this step."""
        counts = {id(item.request): item.num_new_tokens for item in scheduled}
        for request in self.running:
            if not request.is_under_way:
                self.blocks.trim(request, counts.get(id(request), 1))

    def _admit(self, budget: int, places: int) -> list[ScheduledRequest]:
        """Start requests from the head of the queue while there is room for them."""
        admitted: list[ScheduledRequest] = []
        while budget and len(admitted) < places and self.waiting and self._free_slots:
            request = self.waiting[0]
            if self._is_refused_again(request):
                break
            self.blocks.take_cached_prefix(request)
            count = self._chunk(request, budget)
            # With a block to spare for each that runs, so that a newcomer drives nobody out.
            spare = len(self.running)
            if count == 0 or not self.blocks.allocate(request, count, spare=spare):
                self.blocks.release(request)
                if count:
                    self._last_refusal = self._refusal(request)
                break
            self.blocks.count_lookup(request)
            self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            request.slot = self._free_slots.pop()
            request.num_starts += 1
            self.running.append(request)
            admitted.append(ScheduledRequest.of(request, count))
            budget -= count
        return admitted

    def _is_refused_again(self, request: Request) -> bool:
        """Whether trying again would fail as it did last time. Looking up a long prompt and letting
        it go again takes milliseconds, so that is not done in every step."""
        last, now = self._last_refusal, self._refusal(request)
        return (
            last is not None
            and last.request is request
            and 0 < last.num_running <= now.num_running
            and now.num_free_full <= last.num_free_full
            and now.num_free_sliding <= last.num_free_sliding
        )

    def _refusal(self, request: Request) -> "_Refusal":
        full, sliding = self.blocks.full_pool, self.blocks.sliding_pool
        return _Refusal(request, len(self.running), full.num_free, sliding.num_free)

    def _chunk(self, request: Request, budget: int) -> int:
        """How many of a request's tokens run in a step with this budget left."""
        if self._fixed_chunk is not None:
            return self._whole_chunk(request, budget, self._fixed_chunk)
        count = min(request.num_uncomputed_tokens, budget)
        if count > _PROMPT_LOGPROBS_CHUNK and request.params.prompt_logprobs is not None:
            return _PROMPT_LOGPROBS_CHUNK
        return count

    def _whole_chunk(self, request: Request, budget: int, size: int) -> int:
        first, prompt = request.num_computed_tokens, len(request.prompt_token_ids)
        if first >= prompt:
            return 1
        count = min((first // size + 1) * size, prompt) - first
        return count if count <= budget else 0

    def _preempt(self, request: Request) -> None:
        """Send a running request back to the head of the queue, to be computed again."""
        self._stop(request)
        request.drop_drafts()
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self._free_slots.append(request.slot)
        request.slot = -1
        self.blocks.release(request)

    def _start_followers(self, leader: Request) -> None:
        """Queue the other outputs of a prompt; they arrived with the first, so they go first."""
        self.waiting.extendleft(reversed(leader.followers))
        leader.followers = []

    def _unstarted(self) -> Iterator[Request]:
        for request in self.waiting:
            yield request
            yield from request.followers
        for request in self.running:
            yield from request.followers

    def _remove_waiting(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
            return
        leaders: Iterable[Request] = [*self.waiting, *self.running]
        for leader in leaders:
            if request in leader.followers:
                leader.followers.remove(request)
                return
