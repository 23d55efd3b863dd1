"""The evaluation, with fake engines: one that knows every answer, and some that know less."""

from collections.abc import Callable
from importlib import resources

import pytest

from musespark.chat import ChatFormat
from musespark.errors import RequestError
from musespark.evals.generate import NEW_PHRASINGS, NEW_QUESTIONS, evaluation_conversations
from musespark.evals.run import PHRASING_TASKS, TASKS, EvalReport, evaluate
from musespark.evals.wire import segments

SAMPLES = 6
SEED = 3


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    with resources.as_file(resources.files("musespark") / "assets/spark-mini") as folder:
        return ChatFormat.from_folder(folder)


def answer_key(chat: ChatFormat, task: str) -> dict[tuple[int, ...], list[int]]:
    """Map every prompt of a task, tool results included, to the right continuation."""
    split = NEW_PHRASINGS if ":" in task else NEW_QUESTIONS
    key: dict[tuple[int, ...], list[int]] = {}
    for conversation in evaluation_conversations(task.split(":")[0], split, SAMPLES, SEED):
        before: list[int] = []
        for piece in segments(conversation):
            ids = chat.tokenizer.encode_prompt(piece.text, add_special_tokens=False)
            if piece.trained:
                key[tuple(before)] = ids
            before += ids
    return key


def ask(
    chat: ChatFormat, task: str, change: Callable[[list[int]], list[int]] = lambda reply: reply
) -> EvalReport:
    key = answer_key(chat, task)

    def generate(prompts, max_tokens, stop_ids):
        assert set(stop_ids) == {257, 259}
        return [change(key[tuple(prompt)])[:max_tokens] for prompt in prompts]

    return evaluate(generate, chat, tasks=[task], samples=SAMPLES, seed=SEED, batch_size=4)


@pytest.mark.parametrize("task", [*TASKS, *PHRASING_TASKS])
def test_right_replies_score_full_marks(chat, task):
    report = ask(chat, task)
    assert report.tasks[task].accuracy == 1.0, report.misses


@pytest.mark.parametrize("task", TASKS)
def test_an_engine_may_leave_out_the_stop_token(chat, task):
    assert ask(chat, task, lambda reply: reply[:-1]).tasks[task].accuracy == 1.0


@pytest.mark.parametrize("task", TASKS)
def test_changed_answers_are_wrong(chat, task):
    def with_first_letter_changed(reply: list[int]) -> list[int]:
        body = len(reply) - 1 - reply[::-1].index(262) + 1
        return [*reply[:body], ord("#"), *reply[body + 1 :]]

    report = ask(chat, task, with_first_letter_changed)
    assert report.tasks[task].accuracy == 0.0
    assert len(report.misses) == SAMPLES


def test_cut_off_replies_are_wrong(chat):
    report = ask(chat, "addition", lambda reply: [*reply[:-1], *[ord("0")] * 1000])
    assert report.tasks["addition"].accuracy == 0.0


def test_the_report_is_data_and_a_table(chat):
    report = ask(chat, "talk")
    assert report.to_json("spark-mini") == {
        "model": "spark-mini",
        "seed": SEED,
        "tasks": {"talk": {"accuracy": 1.0, "samples": SAMPLES}},
    }
    assert report.rows() == [("talk", "100.0%", str(SAMPLES))]


def test_progress_counts_to_the_end(chat):
    seen: list[tuple[str, int, int]] = []
    evaluate(
        lambda prompts, *_: [[259] for _ in prompts],
        chat,
        tasks=["talk"],
        samples=5,
        batch_size=2,
        progress=lambda *step: seen.append(step),
    )
    assert seen == [("talk", 2, 5), ("talk", 4, 5), ("talk", 5, 5)]


def test_unknown_tasks_are_named(chat):
    with pytest.raises(RequestError, match="no task 'sums'"):
        evaluate(lambda *_: [], chat, tasks=["sums"])
