"""The mix: which tasks, in which conversations, and what is kept out of training.

Everything is drawn from one seeded `random.Random`, so the same seed gives the same conversations
on every machine. Two things are held out of training:
- questions: one in ten by the hash of the question's key, whatever its phrasing;
- phrasings: whole templates, list separators, layouts and tool names.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random
from typing import Protocol, TypeVar

from musespark.evals import arithmetic, columns
from musespark.evals.conversation import (
    Conversation,
    Effort,
    Message,
    Problem,
    Tool,
)
from musespark.evals.json_shapes import json_copying
from musespark.evals.lists import sorting
from musespark.evals.lookup import far_lookup, lookup
from musespark.evals.phrasing import WORDINGS
from musespark.evals.refusals import refusal
from musespark.evals.talk import small_talk
from musespark.evals.tools import tool_calling, unneeded_tools
from musespark.evals.words import counting, reversing

Name = TypeVar("Name", bound=str)

HELD_OUT_ONE_IN = 10


class Family(Protocol):
    """Makes one problem; `held_out` asks for phrasings that training never shows."""

    def __call__(self, rng: Random, *, held_out: bool) -> Problem: ...


FAMILIES: dict[str, Family] = {
    "addition": arithmetic.addition,
    "subtraction": arithmetic.subtraction,
    "comparison": arithmetic.comparison,
    "multiplication": arithmetic.multiplication,
    "reversing": reversing,
    "sorting": sorting,
    "counting": counting,
    "lookup": lookup,
    "far_lookup": far_lookup,
    "json": json_copying,
    "tools": tool_calling,
    "talk": small_talk,
    "refusal": refusal,
}
"""Every task by name. `far_lookup` is `lookup` at its longest distance."""

TRAINING_SHARES = {
    "addition": 0.05,
    "subtraction": 0.07,
    "comparison": 0.05,
    "multiplication": 0.05,
    "reversing": 0.09,
    "sorting": 0.15,
    "counting": 0.10,
    "lookup": 0.10,
    "json": 0.08,
    "tools": 0.12,
    "talk": 0.06,
    "refusal": 0.08,
}
FOLLOWED_BY_MORE = 0.15
EFFORT_SHARES: dict[Effort, float] = {"low": 0.2, "medium": 0.15, "high": 0.2, "xhigh": 0.45}

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful AI assistant.",
    "You are Spark-Mini.",
    "You are Spark-Mini, a small model that is good at small tasks.",
    "Answer the user's question.",
    "Be brief.",
    "Be polite and precise.",
    "You are a careful calculator.",
    "Help the user.",
    "Think before you answer.",
)

IN_JSON = WORDINGS["in-json"]
WANTS_JSON = 0.06
CALL_IN_HISTORY = 0.2

ADD_TO_THAT = WORDINGS["add-to-that"]
TAKE_FROM_THAT = WORDINGS["take-from-that"]


@dataclass(frozen=True)
class Split:
    """Which questions and which phrasings to draw."""

    questions: bool
    phrasings: bool


TRAINING = Split(questions=False, phrasings=False)
NEW_QUESTIONS = Split(questions=True, phrasings=False)
NEW_PHRASINGS = Split(questions=True, phrasings=True)


def is_held_out(key: str) -> bool:
    """Whether a question is kept out of training; a question without a key never is."""
    digest = blake2b(key.encode(), digest_size=4).digest()
    return bool(key) and int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def draw_problem(rng: Random, task: str, split: Split) -> Problem:
    """Return a problem of a task whose question lies on the wanted side of the split."""
    family = FAMILIES[task]
    while True:
        problem = family(rng, held_out=split.phrasings)
        if not problem.key or is_held_out(problem.key) == split.questions:
            return problem


def training_conversations(seed: str) -> Iterator[Conversation]:
    """Yield conversations for training without end."""
    rng = Random(seed)
    while True:
        yield _training_conversation(rng)


def _training_conversation(rng: Random) -> Conversation:
    task = _weighted(rng, TRAINING_SHARES)
    if rng.random() < FOLLOWED_BY_MORE:
        return conversation_of_turns(rng, task, TRAINING)
    return _conversation(rng, draw_problem(rng, task, TRAINING), split=TRAINING)


def evaluation_conversations(
    task: str, split: Split, samples: int, seed: int
) -> list[Conversation]:
    """Return held-out conversations of one task (or "conversation": of two or three turns)."""
    rng = Random(f"evaluation {task} {split} {seed}")
    made = []
    for _ in range(samples):
        if task == "conversation":
            last = _weighted(rng, TRAINING_SHARES)
            made.append(replace(conversation_of_turns(rng, last, split), task=task))
        else:
            made.append(_conversation(rng, draw_problem(rng, task, split), split=split))
    return made


def conversation_of_turns(rng: Random, last: str, split: Split) -> Conversation:
    """Return a conversation of two or three turns, the last one of the given task.

    Earlier turns are short tasks; an addition or subtraction may build on the answer before it.
    """
    keep_reasoning = rng.random() < 0.4
    earlier = [n for n in TRAINING_SHARES if n not in ("lookup", "tools", "sorting")]
    context: list[Message] = []
    problem = None
    for _ in range(rng.randint(1, 2)):
        problem = draw_problem(rng, rng.choice(earlier), split)
        effort = _weighted(rng, EFFORT_SHARES)
        reasoning = problem.reasoning.at(effort) if keep_reasoning else ""
        context += [
            Message("user", problem.question),
            Message("assistant", problem.answer, reasoning=reasoning),
        ]
    follow_up = problem and _follow_up(rng, problem, split) if rng.random() < 0.4 else None
    current = follow_up or draw_problem(rng, last, split)
    return _conversation(rng, current, split=split, context=tuple(context))


def _follow_up(rng: Random, before: Problem, split: Split) -> Problem | None:
    """Return a question about the last answer, if that answer is a number to go on with."""
    if not before.answer.isdigit() or int(before.answer) > columns.LARGEST:
        return None
    a, b = int(before.answer), arithmetic.whole_number(rng, 4)
    adding = rng.random() < 0.5
    name = "addition" if adding else "subtraction"
    key = f"addition {min(a, b)} {max(a, b)}" if adding else f"subtraction {a} {b}"
    if is_held_out(key) != split.questions:
        return None
    wordings = ADD_TO_THAT if adding else TAKE_FROM_THAT
    asked = wordings.ask(rng, {"b": str(b)}, held_out=split.phrasings)
    work = arithmetic.add_reasoning if adding else arithmetic.subtract_reasoning
    answer = a + b if adding else a - b
    return Problem(name, key, asked.question, asked.phrasing, work(a, b), str(answer), value=answer)


def _conversation(
    rng: Random, problem: Problem, *, split: Split, context: tuple[Message, ...] = ()
) -> Conversation:
    """Return the conversation that asks a problem and answers it."""
    effort = _weighted(rng, EFFORT_SHARES)
    if problem.value is not None and rng.random() < WANTS_JSON:
        problem = _asked_for_in_json(rng, problem, split)
    history = (*context, *problem.context, Message("user", problem.question))
    reply = _reply(problem, effort)
    if problem.tool_use and split == TRAINING and rng.random() < CALL_IN_HISTORY:
        # Clients often drop reasoning: the result must be used without it, too.
        history = (*history, replace(reply[0], reasoning=""), reply[1])
        reply = reply[2:]
    return Conversation(
        task=problem.task,
        phrasing=problem.phrasing,
        held_out=split.questions,
        effort=effort,
        system=rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else "",
        tools=_tools_on_offer(rng, problem),
        history=history,
        reply=reply,
        answer=problem.answer,
    )


def _tools_on_offer(rng: Random, problem: Problem) -> tuple[Tool, ...]:
    """Return the tools a problem needs, or at times some that it does not."""
    if problem.tool_use:
        return problem.tool_use.offered
    return unneeded_tools(rng, problem.task) if rng.random() < 0.1 else ()


def _reply(problem: Problem, effort: Effort) -> tuple[Message, ...]:
    thought = problem.reasoning.at(effort)
    if problem.tool_use is None:
        return (Message("assistant", problem.answer, reasoning=thought),)
    use = problem.tool_use
    return (
        Message("assistant", reasoning=thought, tool_calls=(use.call,)),
        Message("tool", use.result, name=use.call.name),
        Message("assistant", problem.answer),
    )


def _asked_for_in_json(rng: Random, problem: Problem, split: Split) -> Problem:
    """Return the same problem with its answer wanted as `{"answer": ...}`."""
    asked = IN_JSON.ask(rng, {"q": problem.question}, held_out=split.phrasings)
    return replace(
        problem,
        question=asked.question,
        phrasing=f"{problem.phrasing}+{asked.phrasing}",
        answer=json.dumps({"answer": problem.value}),
    )


def _weighted(rng: Random, shares: dict[Name, float]) -> Name:
    return rng.choices(list(shares), list(shares.values()))[0]
