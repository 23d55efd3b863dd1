"""The mix of conversations: seeded, split, and right in what it teaches."""

import json
from itertools import islice
from random import Random

import pytest

from musespark.evals.conversation import EFFORTS, Conversation, Reasoning
from musespark.evals.generate import (
    FAMILIES,
    NEW_PHRASINGS,
    NEW_QUESTIONS,
    TRAINING,
    TRAINING_SHARES,
    draw_problem,
    evaluation_conversations,
    is_held_out,
    training_conversations,
)
from musespark.evals.lists import selection_steps, tagged
from musespark.evals.lookup import LONGEST_DISTANCE, lookup_at
from musespark.evals.wire import segments

MANY = 300


def sample(seed: str = "test", count: int = MANY) -> list[Conversation]:
    return list(islice(training_conversations(seed), count))


def test_a_seed_gives_the_same_conversations_again():
    assert sample("a", 50) == sample("a", 50)
    assert sample("a", 50) != sample("b", 50)


@pytest.mark.parametrize("task", [*FAMILIES, "conversation"])
def test_evaluation_is_the_same_for_a_seed_and_differs_between_seeds(task):
    asked = evaluation_conversations(task, NEW_QUESTIONS, 20, 1)
    assert asked == evaluation_conversations(task, NEW_QUESTIONS, 20, 1)
    assert asked != evaluation_conversations(task, NEW_QUESTIONS, 20, 2)
    assert all(conversation.held_out for conversation in asked)


@pytest.mark.parametrize("task", FAMILIES)
def test_questions_are_on_their_side_of_the_split(task):
    rng = Random(0)
    for _ in range(MANY):
        seen = draw_problem(rng, task, TRAINING)
        kept = draw_problem(rng, task, NEW_QUESTIONS)
        new = draw_problem(rng, task, NEW_PHRASINGS)
        assert not is_held_out(seen.key)
        assert is_held_out(kept.key) or not kept.key
        assert "held" not in seen.phrasing
        assert "held" not in kept.phrasing
        assert "held" in new.phrasing or new.phrasing == "gibberish"


def test_a_tenth_of_all_questions_is_held_out():
    share = sum(is_held_out(f"addition {a} {b}") for a in range(100) for b in range(100)) / 1e4
    assert 0.08 < share < 0.12


def test_the_order_of_a_sum_does_not_hide_that_it_is_held_out():
    rng = Random(0)
    keys = {draw_problem(rng, "addition", TRAINING).key for _ in range(MANY)}
    assert all(int(a) <= int(b) for a, b in (key.split()[1:] for key in keys))


def test_training_covers_every_task_effort_and_length():
    conversations = sample(count=2000)
    assert {c.task for c in conversations} == set(TRAINING_SHARES)
    assert {c.effort for c in conversations} == set(EFFORTS)
    turns = [sum(m.role == "user" for m in c.history) for c in conversations]
    assert sum(n >= 2 for n in turns) / len(turns) > 0.1
    assert max(turns) >= 3


@pytest.mark.parametrize("task", ["addition", "subtraction", "multiplication"])
def test_arithmetic_answers_are_right(task):
    rng = Random(1)
    operation = {"addition": int.__add__, "subtraction": int.__sub__, "multiplication": int.__mul__}
    for _ in range(MANY):
        problem = draw_problem(rng, task, TRAINING)
        a, b = (int(word) for word in problem.key.split()[1:])
        assert int(problem.answer) == operation[task](a, b)
        assert problem.answer in problem.reasoning.close


def test_sorting_answers_are_sorted():
    rng = Random(2)
    for _ in range(MANY):
        problem = draw_problem(rng, "sorting", TRAINING)
        items = [int(word) for word in problem.key.split()[1:]]
        assert 2 <= len(items) <= 8
        if isinstance(problem.value, list):
            assert problem.value in (items, items[::-1])
        else:
            assert problem.value in (items[0], items[-1])


def test_selecting_picks_one_number_after_the_other():
    assert tagged([345, 12, 7]) == ["a345", "b012", "c007"]
    assert (
        selection_steps([345, 12, 7], largest_first=False) == "007c: a345 b012 < 012b: a345 < 345a:"
    )
    assert selection_steps([5, 5], largest_first=True) == "005a: b005 > 005b:"


def test_counting_and_reversing_answers_are_right():
    rng = Random(3)
    for _ in range(MANY):
        _, what, word = draw_problem(rng, "counting", TRAINING).key.split()
        assert len(word) <= 12
        problem = draw_problem(rng, "reversing", TRAINING)
        assert problem.answer[::-1].lower() == problem.key.split()[1]
        assert what in {"letters", "vowels"} or len(what) == 1


@pytest.mark.parametrize("distance", [40, 160, LONGEST_DISTANCE])
def test_lookups_are_as_far_back_as_asked(distance):
    rng = Random(4)
    for _ in range(50):
        problem = lookup_at(rng, distance, held_out=False)
        if problem.context or problem.answer.startswith("There is no"):
            continue
        text = problem.question
        key = problem.reasoning.brief.split(":")[0]
        after_key = text[text.index(key) :]
        back = len(after_key) - after_key.index(problem.answer) - len(problem.answer)
        assert abs(back - distance) < 70


def test_json_answers_are_json():
    rng = Random(5)
    for _ in range(MANY):
        json.loads(draw_problem(rng, "json", TRAINING).answer)
    for conversation in sample(count=2000):
        if "in-json" in conversation.phrasing:
            assert "answer" in json.loads(conversation.answer)


def test_tools_on_offer_hold_the_one_to_call():
    rng = Random(6)
    for split in (TRAINING, NEW_PHRASINGS):
        for _ in range(MANY):
            use = draw_problem(rng, "tools", split).tool_use
            assert use is not None
            names = [tool.name for tool in use.offered]
            assert len(set(names)) == len(names) <= 4
            tool = use.offered[names.index(use.call.name)]
            assert list(use.call.arguments) == [p.name for p in tool.parameters]


def test_refusals_are_polite_and_say_why():
    rng = Random(7)
    for _ in range(MANY):
        problem = draw_problem(rng, "refusal", TRAINING)
        assert problem.answer.startswith("Sorry, ")
        assert problem.reasoning.brief


def test_reasoning_grows_with_the_effort():
    reasoning = Reasoning(brief="b", plan="plan", steps="steps", close="close")
    assert [reasoning.at(effort) for effort in EFFORTS] == [
        "b",
        "steps",
        "plan\nsteps",
        "plan\nsteps\nclose",
    ]
    lengths = dict.fromkeys(EFFORTS, 0)
    rng = Random(8)
    for _ in range(MANY):
        problem = draw_problem(rng, "addition", TRAINING)
        for effort in EFFORTS:
            lengths[effort] += len(problem.reasoning.at(effort))
    assert sorted(lengths, key=lengths.__getitem__) == list(EFFORTS)


def test_the_same_question_never_has_two_answers():
    answers: dict[str, str] = {}
    for conversation in sample("clash", 20_000):
        if len(conversation.history) == 1 and not conversation.tools:
            question = conversation.history[0].content
            assert answers.setdefault(question, conversation.answer) == conversation.answer


def test_only_the_last_reply_is_trained():
    for conversation in sample():
        pieces = segments(conversation)
        assert not pieces[0].trained
        trained = [piece.text for piece in pieces if piece.trained]
        assert len(trained) == sum(m.role == "assistant" for m in conversation.reply)
        assert all(text.endswith("<|eot|>") for text in trained)
        assert trained[-1].endswith(f"to=user<|message|>{conversation.answer}<|eot|>")
