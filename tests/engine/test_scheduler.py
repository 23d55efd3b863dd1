"""The scheduler under any sequence of requests, steps and aborts, with pools as small as can be."""

import zlib
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.layouts import smallest_layout

from musespark.config.sampling import SamplingParams
from musespark.engine import scheduler
from musespark.engine.block_pool import BlockPool
from musespark.engine.request import FinishReason, Request, RequestStatus
from musespark.engine.scheduler import ScheduledRequest, Scheduler

MAX_LEN = 40


def make_request(prompt_len, max_tokens, request_id=0, num_followers=0, prompt_logprobs=None):
    def one(index):
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(range(prompt_len)),
            params=SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                prompt_logprobs=None if index else prompt_logprobs,
            ),
            end_token_ids=frozenset(),
            max_total_tokens=MAX_LEN,
            index=index,
        )

    request = one(0)
    request.followers = [one(index + 1) for index in range(num_followers)]
    return request


def make_scheduler(block_size=4, window=6, chunk=8, max_num_seqs=4, **kwargs):
    prefix_caching = kwargs.pop("prefix_caching", True)
    layout = smallest_layout(block_size, window, chunk, longest=MAX_LEN, **kwargs)
    return Scheduler(layout, max_num_seqs, chunk, prefix_caching=prefix_caching)


def token_after(request):
    """What a deterministic model would answer to what the request holds now."""
    tokens = request.token_ids(0, request.num_tokens)
    return zlib.crc32(bytes(tokens) + bytes([request.index])) % 200


class Driver:
    """Runs a scheduler and asserts, around every step, all that must always hold."""

    def __init__(self, under_test, guesses=()):
        """`guesses`: for each place behind a request's last token, whether its guess is right."""
        self.scheduler = under_test
        self.guesses = guesses
        self.alive = []

    def add(self, request):
        self.scheduler.add(request)
        self.alive += [request, *request.followers]

    def abort(self, number):
        if self.alive:
            request = self.alive.pop(number % len(self.alive))
            self.scheduler.finish(request, FinishReason.ABORT)
            assert request.finish_reason is FinishReason.ABORT
            self.check()

    def step(self):
        running, waiting = self.scheduler.running, self.scheduler.waiting
        oldest = running[0] if running else waiting[0] if waiting else None
        for request in running:
            if request.num_uncomputed_tokens == 1:
                request.draft_token_ids = self.guess(request)
        schedule = self.scheduler.schedule()
        self.scheduler.check_integrity()
        requests = [item.request for item in schedule]
        assert len(set(map(id, requests))) == len(requests)
        assert all(request.status is RequestStatus.RUNNING for request in requests)
        assert all(item.num_new_tokens >= 1 for item in schedule)
        assert (
            sum(item.num_new_tokens for item in schedule) <= self.scheduler.max_num_batched_tokens
        )
        assert len(running) <= self.scheduler.max_num_seqs
        if oldest is not None:
            assert oldest in requests, "the oldest request did not advance"
        for item in schedule:
            self.check_room(item)
        for item in schedule:
            before = item.request.num_tokens
            token_ids = self.verify(item) if item.samples else []
            taken = self.scheduler.commit(item, token_ids)
            assert taken == item.request.num_tokens - before <= len(token_ids)
            assert not item.request.draft_token_ids
            assert item.request.num_tokens >= before
        self.alive = [r for r in self.alive if r.status is not RequestStatus.FINISHED]
        self.check()
        return schedule

    def guess(self, request):
        tokens = continuation(request, len(self.guesses))
        return [t if right else t + 1 for t, right in zip(tokens, self.guesses, strict=True)]

    def verify(self, item):
        """What sampling makes of the guesses that a step has run."""
        assert 1 + item.num_drafts <= item.request.num_wanted_tokens
        tokens = continuation(item.request, item.num_drafts + 1)
        guesses = item.request.draft_token_ids[: item.num_drafts]
        pairs = enumerate(zip(tokens, guesses, strict=False))
        wrong = next((i for i, (token, guess) in pairs if token != guess), item.num_drafts)
        return tokens[: wrong + 1]

    def check_room(self, item):
        """Blocks for every token of the step, and for every one that its queries still see."""
        request, layout = item.request, self.scheduler.layout
        end = -(-(request.num_computed_tokens + item.num_new_tokens) // layout.block_size)
        if layout.num_full_blocks:
            assert len(request.full_blocks) >= end
        if layout.num_sliding_blocks:
            first_seen = max(0, request.num_computed_tokens - layout.sliding_window + 1)
            assert request.first_sliding_block * layout.block_size <= first_seen
            assert request.first_sliding_block + len(request.sliding_blocks) >= end

    def check(self):
        """Between steps."""
        self.scheduler.check_integrity()
        queue = [*self.scheduler.running, *self.scheduler.waiting]
        if not any(request.index or request.followers for request in queue):
            ids = [request.request_id for request in queue]
            assert ids == sorted(ids), "a request was overtaken"
        layout = self.scheduler.layout
        for request in self.alive:
            if request.status is RequestStatus.WAITING:
                assert not request.full_blocks
                assert not request.sliding_blocks
            elif layout.num_sliding_blocks and request.num_computed_tokens:
                computed, size = request.num_computed_tokens, layout.block_size
                first = max(0, computed - layout.sliding_window + 1) // size
                assert request.first_sliding_block == first
                needed = max(0, -(-computed // size) - first)
                reserved = -(-(computed + 1 + len(self.guesses)) // size) - -(-computed // size)
                assert needed <= len(request.sliding_blocks) <= needed + reserved

    def drain(self):
        """Finish all that is left, in no more steps than the oldest request needs in turn."""
        budget = sum(
            len(request.prompt_token_ids) + request.params.max_tokens for request in self.alive
        )
        while self.scheduler.has_work:
            assert budget > 0, "a request starves"
            budget -= 1
            self.step()
        assert not self.alive


def continuation(request, count):
    """The next tokens of a deterministic model, if nothing ends the output."""
    output = request.output_token_ids
    tokens = []
    for _ in range(count):
        tokens.append(token_after(request))
        request.output_token_ids = [*output, *tokens]
    request.output_token_ids = output
    return tokens


def expected_output(request):
    twin = make_request(len(request.prompt_token_ids), request.params.max_tokens)
    twin.index = request.index
    while len(twin.output_token_ids) < twin.params.max_tokens and twin.num_tokens < MAX_LEN:
        twin.output_token_ids.append(token_after(twin))
    return twin.output_token_ids


operations = st.one_of(
    st.tuples(
        st.just("add"),
        st.integers(1, MAX_LEN - 1),
        st.integers(1, 25),
        st.sampled_from([0, 0, 2]),
        st.sampled_from([None, None, 0]),
    ),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 50)),
)


# Prompts whose log-probabilities are wanted take smaller chunks: here of three tokens.
@mock.patch.object(scheduler, "_PROMPT_LOGPROBS_CHUNK", 3)
@settings(max_examples=300)
@given(
    block_size=st.sampled_from([1, 2, 4, 7]),
    window=st.integers(1, 20),
    max_num_seqs=st.integers(1, 5),
    more_budget=st.integers(0, 12),
    kinds=st.sampled_from(["both", "full", "sliding"]),
    spare=st.integers(0, 12),
    prefix_caching=st.booleans(),
    guesses=st.lists(st.booleans(), max_size=5),
    script=st.lists(operations, min_size=4, max_size=40),
)
def test_invariants_hold_whatever_happens(
    block_size, window, max_num_seqs, more_budget, kinds, spare, prefix_caching, guesses, script
):
    driver = Driver(
        make_scheduler(
            block_size,
            window,
            chunk=max_num_seqs + more_budget,
            max_num_seqs=max_num_seqs,
            kinds=kinds,
            spare=spare,
            prefix_caching=prefix_caching,
        ),
        guesses,
    )
    added = []
    for number, (action, *arguments) in enumerate(script):
        if action == "add":
            prompt_len, max_tokens, num_followers, prompt_logprobs = arguments
            request = make_request(prompt_len, max_tokens, number, num_followers, prompt_logprobs)
            added += [request, *request.followers]
            driver.add(request)
        elif action == "step":
            for _ in range(arguments[0]):
                driver.step()
        else:
            driver.abort(arguments[0])
    driver.drain()
    for request in added:
        assert request.status is RequestStatus.FINISHED
        if request.finish_reason is not FinishReason.ABORT:
            assert request.output_token_ids == expected_output(request)
    blocks = driver.scheduler.blocks
    assert blocks.full_pool.num_used == blocks.sliding_pool.num_used == 0


def test_preemption_takes_the_newest_and_loses_no_token():
    driver = Driver(make_scheduler(block_size=1, window=MAX_LEN, chunk=40, spare=10))
    requests = [make_request(10, 25, request_id=number) for number in range(3)]
    for request in requests:
        driver.add(request)
    finished = []
    while driver.scheduler.has_work:
        waiting_before = list(driver.scheduler.waiting)
        driver.step()
        for request in driver.scheduler.waiting:
            if request not in waiting_before:  # just preempted: everyone who runs came earlier
                ids = [running.request_id for running in driver.scheduler.running]
                assert all(number < request.request_id for number in ids)
        finished += [r.request_id for r in requests if r not in driver.alive]
    assert driver.scheduler.num_preemptions > 0
    assert [number for i, number in enumerate(finished) if number not in finished[:i]] == [0, 1, 2]
    for request in requests:
        assert request.output_token_ids == expected_output(request)


def test_decodes_go_before_prompts_and_prompts_take_what_is_left():
    driver = Driver(make_scheduler(chunk=8, spare=30))
    short, long = make_request(2, 10, 0), make_request(30, 1, 1)
    driver.add(short)
    driver.add(long)
    counts = [
        {item.request.request_id: item.num_new_tokens for item in driver.step()} for _ in range(5)
    ]
    assert counts == [{0: 2, 1: 6}, {0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 3}]
    assert long.output_token_ids == expected_output(long)


def test_no_more_requests_run_than_allowed_and_none_overtakes():
    driver = Driver(make_scheduler(chunk=20, max_num_seqs=2, spare=100))
    for number in range(5):
        driver.add(make_request(1, 3 + number, number))
    started = []
    while driver.scheduler.has_work:
        for item in driver.step():
            if item.request.request_id not in started:
                started.append(item.request.request_id)
    assert started == [0, 1, 2, 3, 4]


def test_further_outputs_of_a_prompt_come_right_after_it_in_order():
    driver = Driver(make_scheduler(max_num_seqs=1, spare=100))
    driver.add(make_request(3, 2, 0, num_followers=3))
    driver.add(make_request(3, 2, 1))
    started = []
    while driver.scheduler.has_work:
        for item in driver.step():
            output = (item.request.request_id, item.request.index)
            if output not in started:
                started.append(output)
    assert started == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted"])
def test_abort_gives_everything_back(state):
    driver = Driver(make_scheduler(block_size=1, window=MAX_LEN, chunk=12, spare=8))
    victim = make_request(20, 20, 1)
    if state == "waiting":
        driver.add(victim)
    elif state == "preempted":
        driver.add(make_request(20, 20, 0))
        driver.add(victim)
        while not (victim.status is RequestStatus.WAITING and victim.output_token_ids):
            driver.step()
    else:
        driver.add(victim)
        while state == "decoding" and not victim.output_token_ids:
            driver.step()
        if state == "prefilling":
            driver.step()
            assert 0 < victim.num_computed_tokens < 20
    driver.abort(driver.alive.index(victim))
    assert victim.status is RequestStatus.FINISHED
    assert not victim.full_blocks
    assert not victim.sliding_blocks
    driver.drain()


def test_a_scheduled_request_samples_only_at_its_last_token():
    request = make_request(5, 2)
    assert not ScheduledRequest.of(request, 4).samples
    assert ScheduledRequest.of(request, 5).samples
    request.num_computed_tokens = 4
    assert ScheduledRequest.of(request, 1).samples


@settings(max_examples=100)
@given(
    num_blocks=st.integers(0, 12),
    script=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40),
)
def test_block_pool_never_hands_a_block_out_twice(num_blocks, script):
    pool, held = BlockPool(num_blocks), []
    for takes, count in script:
        if takes and count <= pool.num_free:
            held += pool.allocate(count)
        elif not takes:
            pool.release(held[:count])
            del held[:count]
        assert len(set(held)) == len(held)
        assert pool.num_free == num_blocks - len(held)
        pool.check_integrity(held)


def test_integrity_notices_lost_and_doubled_blocks():
    pool = BlockPool(4)
    held = pool.allocate(3)
    for wrong in (held[:2], [*held, held[0]], [*held[:2], 3 - sum(held) + 3]):
        if sorted(wrong) != sorted(held):
            with pytest.raises(AssertionError):
                pool.check_integrity(wrong)
    pool.release(held[:1])
    with pytest.raises(AssertionError):
        pool.check_integrity(held)


def test_right_guesses_save_steps_and_wrong_ones_cost_none():
    for guesses, num_right in (((), 0), ((True, True, True), 3), ((True, False), 1), ((False,), 0)):
        driver = Driver(make_scheduler(chunk=8, spare=30), guesses)
        request = make_request(6, 20)
        driver.add(request)
        count = 0
        while driver.scheduler.has_work:
            driver.step()
            count += 1
        # The first token comes out of the prompt's step.
        assert count == 1 + -(-19 // (1 + num_right))
        assert request.output_token_ids == expected_output(request)


def test_guesses_leave_prompts_half_of_the_budget_and_are_limited_from_outside():
    asked = []

    def choose(requests, num_sequences, num_tokens):
        assert num_sequences == 1
        asked.append((len(requests), num_tokens))
        return [2] * len(requests)

    layout = smallest_layout(4, 6, 40, longest=MAX_LEN, spare=30)
    driver = Driver(Scheduler(layout, 4, 9, choose_widths=choose), (True,) * 5)
    driver.add(make_request(2, 30, 0))
    driver.step()
    driver.add(make_request(30, 1, 1))
    schedule = driver.step()
    assert [(item.num_new_tokens, item.num_drafts) for item in schedule] == [(3, 2), (6, 0)]
    assert asked[-1] == (1, 1)
    schedule = driver.step()
    assert [(item.num_new_tokens, item.num_drafts) for item in schedule] == [(3, 2), (6, 0)]
    assert asked[-1] == (1, 5)  # and four tokens of the prompt at least


def test_guesses_take_no_block_that_another_may_need():
    """Both requests get a block each in turn; with none to spare, nothing is guessed."""
    driver = Driver(make_scheduler(block_size=1, window=MAX_LEN, chunk=40), (True,) * 5)
    first, second = make_request(18, 3, 0), make_request(18, 3, 1)
    for request in (first, second):
        driver.add(request)
        driver.step()
    while driver.scheduler.has_work:
        driver.step()
    assert driver.scheduler.num_preemptions == 0
