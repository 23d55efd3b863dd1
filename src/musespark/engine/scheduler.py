"""Who runs in the next step, and with how many tokens.

Requests that decode go first, since each needs one token only; what is left of the token budget
goes to prompts, in chunks, in order of arrival. When blocks run out, the request that arrived last
gives its own back and is computed again later. So the oldest request always advances.
"""

from collections import deque
from dataclasses import dataclass

from musespark.engine.block_pool import BlockPool
from musespark.engine.request import FinishReason, Request, RequestStatus


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What the scheduler must know of the two paged caches."""

    block_size: int
    num_full_blocks: int
    """0 where the model has no full layers."""
    num_sliding_blocks: int
    """0 where the model has no sliding layers."""
    sliding_window: int


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's part of the next step."""

    request: Request
    num_new_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the request's last token, so that a new one is sampled."""
        return self.num_new_tokens == self.request.num_uncomputed_tokens


class Scheduler:
    """Continuous batching with chunked prefill over two pools of blocks."""

    def __init__(self, layout: CacheLayout, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.layout = layout
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In order of arrival."""
        self.num_preemptions = 0
        self._full_pool = BlockPool(layout.num_full_blocks)
        self._sliding_pool = BlockPool(layout.num_sliding_blocks)

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, wherever it is, and take its blocks back."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        self._release_all(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason

    def schedule(self) -> list[ScheduledRequest]:
        """Choose the next step's requests, those that decode first, and give them blocks."""
        budget = self.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        decodes = [request for request in self.running if request.num_uncomputed_tokens == 1]
        prefills = [request for request in self.running if request.num_uncomputed_tokens > 1]
        preempted = False
        for request in decodes + prefills:
            if request.status is not RequestStatus.RUNNING or budget == 0:
                continue  # preempted meanwhile, or left for the next step
            count = min(request.num_uncomputed_tokens, budget)
            while not self._allocate(request, count):
                preempted = True
                victim = self.running[-1]
                scheduled = [item for item in scheduled if item.request is not victim]
                self._preempt(victim)
                if victim is request:
                    break
            if request.status is RequestStatus.RUNNING:
                scheduled.append(ScheduledRequest(request, count))
            budget = self.max_num_batched_tokens - sum(item.num_new_tokens for item in scheduled)
        while not preempted and budget and self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            count = min(request.num_uncomputed_tokens, budget)
            if not self._allocate(request, count):
                break
            self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            scheduled.append(ScheduledRequest(request, count))
            budget -= count
        return scheduled

    def commit(self, item: ScheduledRequest, token_id: int | None) -> None:
        """Take over what a step did for one request: its tokens are cached, one may be new."""
        request = item.request
        request.num_computed_tokens += item.num_new_tokens
        if token_id is not None:
            request.output_token_ids.append(token_id)
            if reason := self._finish_reason(request, token_id):
                self.finish(request, reason)
                return
        self._release_behind_window(request)

    def check_integrity(self) -> None:
        """Assert that no block is lost or held twice (used by tests after every step)."""
        requests = [*self.running, *self.waiting]
        self._full_pool.check_integrity(b for r in requests for b in r.full_blocks)
        self._sliding_pool.check_integrity(b for r in requests for b in r.sliding_blocks)

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        if token_id in request.end_token_ids:
            return FinishReason.STOP
        limit = request.params.max_tokens
        if limit is not None and len(request.output_token_ids) >= limit:
            return FinishReason.LENGTH
        return FinishReason.LENGTH if request.num_tokens >= request.max_total_tokens else None

    def _allocate(self, request: Request, count: int) -> bool:
        """Blocks for the next `count` tokens of a request, all or none."""
        num_blocks = -(-(request.num_computed_tokens + count) // self.layout.block_size)
        full = num_blocks - len(request.full_blocks) if self.layout.num_full_blocks else 0
        sliding = 0
        if self.layout.num_sliding_blocks:
            sliding = num_blocks - request.first_sliding_block - len(request.sliding_blocks)
        if full > self._full_pool.num_free or sliding > self._sliding_pool.num_free:
            return False
        request.full_blocks += self._full_pool.allocate(max(full, 0))
        request.sliding_blocks += self._sliding_pool.allocate(max(sliding, 0))
        return True

    def _release_behind_window(self, request: Request) -> None:
        """Give back the sliding blocks that no later token sees."""
        first_visible = request.num_computed_tokens - self.layout.sliding_window + 1
        first_block = max(0, first_visible) // self.layout.block_size
        passed = min(first_block - request.first_sliding_block, len(request.sliding_blocks))
        if passed > 0:
            self._sliding_pool.release(request.sliding_blocks[:passed])
            del request.sliding_blocks[:passed]
            request.first_sliding_block += passed

    def _release_all(self, request: Request) -> None:
        self._full_pool.release(request.full_blocks)
        self._sliding_pool.release(request.sliding_blocks)
        request.full_blocks, request.sliding_blocks = [], []
        request.first_sliding_block = 0
        request.num_computed_tokens = 0

    def _preempt(self, request: Request) -> None:
        """Send a running request back to the head of the queue, to be computed again."""
        self.running.remove(request)
        self._release_all(request)
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)
        self.num_preemptions += 1
