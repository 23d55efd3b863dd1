"""When an answer is being written, whatever the turn looks like."""

import pytest

from musespark.config.structured_output import AnswerScope
from musespark.engine.answer_tracker import AnswerTracker

START, MESSAGE, EOM, EOT = 90, 91, 92, 93
ASSISTANT, TO_USER, TO_SELF, TO_TOOL = 10, 11, 12, 13
SCOPE = AnswerScope(
    start_id=START,
    message_id=MESSAGE,
    message_end_ids=(EOM,),
    turn_end_ids=(EOT,),
    headers=((ASSISTANT,), (ASSISTANT, TO_USER), (TO_USER,)),
)
OPENING = [START, 50, MESSAGE, 1, 2, EOT, START, ASSISTANT]


def answer_flags(prompt, turn):
    """For each token of the turn, whether it belongs to an answer or ends one."""
    tracker = AnswerTracker(SCOPE, prompt)
    flags = []
    for token in turn:
        flags.append(tracker.in_answer)
        tracker.push(token)
    return "".join("x" if flag else "." for flag in flags)


@pytest.mark.parametrize(
    ("turn", "flags"),
    [
        ([TO_USER, MESSAGE, 1, 2, EOT], "..xxx"),
        ([MESSAGE, 1, 2, EOT], ".xxx"),
        ([TO_SELF, MESSAGE, 1, EOM, START, ASSISTANT, TO_USER, MESSAGE, 2, EOT], "........xx"),
        ([TO_SELF, MESSAGE, 1, EOM, TO_USER, MESSAGE, 2, EOT], "......xx"),
        ([TO_TOOL, MESSAGE, 1, 2, EOT], "....."),
        ([TO_TOOL, TO_USER, MESSAGE, 2, EOT], "....."),
        ([TO_SELF, MESSAGE, 1, START, ASSISTANT, MESSAGE, 2], "......x"),
        ([TO_SELF, MESSAGE, TO_USER, MESSAGE, 3], "....."),
        ([TO_USER, MESSAGE, EOT, TO_USER, MESSAGE, 3], "..x..."),
    ],
)
def test_only_bodies_for_the_user_are_answers(turn, flags):
    assert answer_flags(OPENING, turn) == flags


def test_a_prompt_may_end_anywhere():
    begun = [*OPENING, TO_USER, MESSAGE, 7, 8]
    tracker = AnswerTracker(SCOPE, begun)
    assert tracker.in_answer
    assert tracker.begun_answer == [7, 8]
    for prompt in ([], [1, 2], OPENING[:-2], [*OPENING, TO_SELF, MESSAGE, 7], [*begun, EOM]):
        tracker = AnswerTracker(SCOPE, prompt)
        assert not tracker.in_answer
        assert tracker.begun_answer == []
    assert answer_flags([*OPENING, TO_USER], [MESSAGE, 1]) == ".x"
