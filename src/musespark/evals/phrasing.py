"""How questions are put into words: templates, and the untidiness of people's typing.

Every kind of question has its templates in two sets: those used in training and those kept out of
it, which measure whether the model reads a question or remembers a sentence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from string import Formatter

OPENINGS = (
    "please ",
    "Please ",
    "hey, ",
    "Hi! ",
    "hello, ",
    "ok, ",
    "now ",
    "can you tell me: ",
    "I have a question: ",
    "Question: ",
    "quick one: ",
    "so ",
    "tell me, ",
    "um, ",
    "Q: ",
    "one more: ",
)
CLOSINGS = (
    " please",
    ", please",
    " thanks",
    " Thanks!",
    " thank you",
    ", thx",
    " pls",
)
ENDINGS = ("", "", "", "?", ".", "!", "??", " ?")
LETTERS = "abcdefghijklmnopqrstuvwxyz"

TIDY_SHARE = 0.4
TYPO_SHARE = 0.15


@dataclass(frozen=True)
class Asked:
    """A question in words, and the name of the template it came from."""

    question: str
    phrasing: str


@dataclass(frozen=True)
class Wordings:
    """The templates of one kind of question."""

    name: str
    seen: tuple[str, ...]
    held_out: tuple[str, ...]

    def ask(self, rng: Random, slots: Mapping[str, str], *, held_out: bool) -> Asked:
        """Choose a template, fill its slots, and type it the way somebody might."""
        templates = self.held_out if held_out else self.seen
        index = rng.randrange(len(templates))
        kind = "held" if held_out else "seen"
        question = typed_by_hand(rng, templates[index], slots)
        return Asked(question, f"{self.name}/{kind}-{index}")


def typed_by_hand(rng: Random, template: str, slots: Mapping[str, str]) -> str:
    """Fill a template, changing case, punctuation and spelling around the slots, never in them."""
    literals, names = _split(template)
    if rng.random() >= TIDY_SHARE:
        change_case = _choose_case(rng)
        literals = [change_case(text) for text in literals]
        if rng.random() < TYPO_SHARE:
            literals = _with_typo(rng, literals)
        literals[-1] = literals[-1].rstrip("?.! ") + rng.choice(ENDINGS)
        if rng.random() < 0.15:
            literals[0] = rng.choice(OPENINGS) + _uncapitalised(literals[0])
        if rng.random() < 0.1:
            literals[-1] += rng.choice(CLOSINGS)
    filled = [text for pair in zip(literals, names, strict=False) for text in (pair[0], pair[1])]
    return "".join(slots[part] if i % 2 else part for i, part in enumerate(filled)) + literals[-1]


def _split(template: str) -> tuple[list[str], list[str]]:
    """Return a template's literal parts (one more than its slots) and its slots' names."""
    literals: list[str] = []
    names: list[str] = []
    for literal, name, _, _ in Formatter().parse(template):
        if len(literals) > len(names):
            literals[-1] += literal
        else:
            literals.append(literal)
        if name is not None:
            names.append(name)
    if len(literals) == len(names):
        literals.append("")
    return literals, names


def _choose_case(rng: Random) -> Callable[[str], str]:
    roll = rng.random()
    if roll < 0.45:
        return str.lower
    if roll < 0.5:
        return str.upper
    return str


def _uncapitalised(text: str) -> str:
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _with_typo(rng: Random, literals: list[str]) -> list[str]:
    """Return the literals with one letter of one word of four or more letters gone wrong."""
    places = [
        (part, start)
        for part, text in enumerate(literals)
        for start in range(1, len(text) - 3)
        if text[start - 1 : start + 3].isalpha()
    ]
    if not places:
        return literals
    part, at = rng.choice(places)
    text = literals[part]
    wrong = rng.choice(
        (
            text[at + 1] + text[at],
            text[at + 1],
            text[at] * 2 + text[at + 1],
            rng.choice(LETTERS) + text[at + 1],
        )
    )
    changed = text[:at] + wrong + text[at + 2 :]
    return [*literals[:part], changed, *literals[part + 1 :]]
