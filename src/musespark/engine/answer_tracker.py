"""Following a chat turn token by token, to know when the answer is being written."""

import copy
from collections.abc import Sequence
from enum import Enum, auto

from musespark.config.structured_output import AnswerScope


class _State(Enum):
    HEADER = auto()
    ANSWER = auto()
    OTHER = auto()


class AnswerTracker:
    """Knows whether the next token belongs to an answer."""

    def __init__(self, scope: AnswerScope, prompt_token_ids: Sequence[int]) -> None:
        """Begin behind a prompt, which may end within a header or within an answer."""
        self._scope = scope
        self._state, self._header = _State.OTHER, list[int]()
        self.begun_answer: list[int] = []
        """The part of the answer that the prompt holds already."""
        places = [i for i, token in enumerate(prompt_token_ids) if token == scope.start_id]
        for token_id in prompt_token_ids[places[-1] :] if places else ():
            self.begun_answer = [*self.begun_answer, token_id] if self.in_answer else []
            self.push(token_id)
        if not self.in_answer:
            self.begun_answer = []

    def copy(self) -> "AnswerTracker":
        """One that goes on from here by itself."""
        other = copy.copy(self)
        other._header = list(self._header)
        return other

    @property
    def in_answer(self) -> bool:
        """Whether the next token belongs to an answer, or ends it."""
        return self._state is _State.ANSWER

    def push(self, token_id: int) -> None:
        """Take the next token of the turn."""
        scope = self._scope
        if token_id == scope.start_id or token_id in scope.message_end_ids:
            # A model may forget to open the next header; what follows is one all the same.
            self._state, self._header = _State.HEADER, []
        elif token_id in scope.turn_end_ids:
            self._state = _State.OTHER
        elif self._state is _State.HEADER:
            if token_id == scope.message_id:
                is_answer = tuple(self._header) in scope.headers
                self._state = _State.ANSWER if is_answer else _State.OTHER
            else:
                self._header.append(token_id)
