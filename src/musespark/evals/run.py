"""Ask a model held-out questions and report how many it gets right, task by task.

Works with any engine: all it needs is the checkpoint's chat format and a function that continues
prompts greedily.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from musespark.chat import ChatFormat, Prompt, Turn, collect, parse_tools
from musespark.chat.pieces import END_OF_TURN
from musespark.errors import RequestError
from musespark.evals.conversation import Conversation, Json
from musespark.evals.generate import (
    FAMILIES,
    NEW_PHRASINGS,
    NEW_QUESTIONS,
    evaluation_conversations,
)
from musespark.evals.score import is_right_answer, is_right_call

MAX_REPLY_TOKENS = 448
PHRASINGS = ":phrasings"

NAMES = (*FAMILIES, "conversation")
TASKS = NAMES
"""Held-out questions in familiar phrasings: what is asked by default."""
PHRASING_TASKS = tuple(name + PHRASINGS for name in NAMES)
"""Held-out questions in phrasings and formats that are held out as well."""


class Generate(Protocol):
    """Continues prompts greedily; the stop token may be part of what comes back, or not."""

    def __call__(
        self, prompts: list[list[int]], max_tokens: int, stop_ids: Sequence[int]
    ) -> list[list[int]]: ...


Progress = Callable[[str, int, int], None]
"""Called with the task's name, the samples done and all of them."""


@dataclass(frozen=True)
class TaskResult:
    """How often a task's answer was right."""

    accuracy: float
    samples: int


@dataclass(frozen=True)
class Miss:
    """A question that was answered wrongly."""

    task: str
    phrasing: str
    question: str
    expected: str
    reply: str


@dataclass(frozen=True)
class EvalReport:
    """The results of one evaluation, in the order the tasks were asked."""

    seed: int
    tasks: dict[str, TaskResult]
    misses: tuple[Miss, ...]

    def to_json(self, model: str) -> dict[str, Json]:
        """Return the report as data."""
        tasks: dict[str, Json] = {
            name: {"accuracy": result.accuracy, "samples": result.samples}
            for name, result in self.tasks.items()
        }
        return {"model": model, "seed": self.seed, "tasks": tasks}

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the report as rows of a table: task, accuracy, samples."""
        return [
            (name, f"{result.accuracy:.1%}", str(result.samples))
            for name, result in self.tasks.items()
        ]


def evaluate(
    generate: Generate,
    chat: ChatFormat,
    *,
    tasks: Collection[str] = TASKS,
    samples: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
    batch_size: int = 64,
) -> EvalReport:
    """Ask `samples` questions of each task; the same seed asks the same questions.

    Args:
        generate: continues prompts.
        chat: the checkpoint's tokenizer and template.
        tasks: names out of `TASKS` and `PHRASING_TASKS`.
        samples: questions per task.
        seed: chooses the questions.
        progress: told after every batch.
        batch_size: how many prompts `generate` is given at once.

    Raises:
        RequestError: a task does not exist.
    """
    unknown = [task for task in tasks if task not in (*TASKS, *PHRASING_TASKS)]
    if unknown:
        raise RequestError(f"tasks: no task {unknown[0]!r}. There are: {', '.join(TASKS)}.")
    asker = _Asker(generate, chat)
    results = {}
    misses: list[Miss] = []
    for task in tasks:
        split = NEW_PHRASINGS if task.endswith(PHRASINGS) else NEW_QUESTIONS
        asked = evaluation_conversations(task.removesuffix(PHRASINGS), split, samples, seed)
        wrong: list[Miss] = []
        for start in range(0, samples, batch_size):
            batch = asked[start : start + batch_size]
            replies = asker.ask(batch)
            wrong += [
                _miss(task, conversation, reply)
                for conversation, (right, reply) in zip(batch, replies, strict=True)
                if not right
            ]
            if progress:
                progress(task, start + len(batch), samples)
        results[task] = TaskResult((samples - len(wrong)) / samples, samples)
        misses += wrong
    return EvalReport(seed, results, tuple(misses))


def _miss(task: str, conversation: Conversation, reply: str) -> Miss:
    question = conversation.history[-1].content
    return Miss(task, conversation.phrasing, question, conversation.answer, reply)


class _Asker:
    """Puts conversations to a model and scores what comes back."""

    def __init__(self, generate: Generate, chat: ChatFormat) -> None:
        self.generate = generate
        self.chat = chat

    def ask(self, conversations: Sequence[Conversation]) -> list[tuple[bool, str]]:
        """Return for each conversation whether the reply was right, and the reply."""
        turns = self._turns(conversations)
        right = [
            self._first_turn_is_right(*pair) for pair in zip(conversations, turns, strict=True)
        ]
        # Where a tool was called rightly, the tool now answers, and the model speaks again.
        waiting = [i for i, c in enumerate(conversations) if right[i] and len(c.reply) > 1]
        followed = [self._with_tool_result(conversations[i], turns[i]) for i in waiting]
        for i, conversation, turn in zip(waiting, followed, self._turns(followed), strict=True):
            right[i] = is_right_answer(conversation, turn)
            turns[i] = turn
        return [(ok, _readable(turn)) for ok, turn in zip(right, turns, strict=True)]

    @staticmethod
    def _first_turn_is_right(conversation: Conversation, turn: Turn) -> bool:
        first = conversation.reply[0]
        if first.tool_calls:
            return is_right_call(first.tool_calls[0], turn)
        return is_right_answer(conversation, turn)

    @staticmethod
    def _with_tool_result(conversation: Conversation, turn: Turn) -> Conversation:
        call = replace(conversation.reply[0], reasoning=turn.reasoning)
        history = (*conversation.history, call, conversation.reply[1])
        return replace(conversation, history=history, reply=conversation.reply[2:])

    def _turns(self, conversations: Sequence[Conversation]) -> list[Turn]:
        if not conversations:
            return []
        prompts = [self._prompt(conversation) for conversation in conversations]
        stop_ids = sorted(self.chat.tokenizer.stop_ids)
        replies = self.generate(
            [list(prompt.token_ids) for prompt in prompts], MAX_REPLY_TOKENS, stop_ids
        )
        return [
            self._parsed(conversation, prompt, reply)
            for conversation, prompt, reply in zip(conversations, prompts, replies, strict=True)
        ]

    def _prompt(self, conversation: Conversation) -> Prompt:
        return self.chat.prompt(
            conversation.request(),
            parse_tools(conversation.openai_tools()),
            reasoning_effort=conversation.effort,
        )

    def _parsed(self, conversation: Conversation, prompt: Prompt, reply: list[int]) -> Turn:
        stop_ids = self.chat.tokenizer.stop_ids
        if len(reply) < MAX_REPLY_TOKENS and not (reply and reply[-1] in stop_ids):
            reply = [*reply, self.chat.tokenizer.special_id(END_OF_TURN)]
        parser = self.chat.parser(prompt, parse_tools(conversation.openai_tools()))
        events = parser.feed(self.chat.tokenizer.decode_pieces(reply))
        return collect([*events, *parser.finish()])


def _readable(turn: Turn) -> str:
    """Return a turn on one line, for the list of misses."""
    calls = " ".join(f"{call.name}{call.arguments}" for call in turn.tool_calls)
    broken = " ".join(f"broken call: {call.reason}" for call in turn.broken_calls)
    parts = (f"[{turn.reasoning}]", turn.content, calls, broken)
    return " ".join(part for part in parts if part).replace("\n", " / ")
