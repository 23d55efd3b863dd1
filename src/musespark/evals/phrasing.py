"""How questions are put into words: templates, and the untidiness of people's typing.

Every kind of question has its templates in two sets: those used in training and those kept out of
it, which measure whether the model reads a question or remembers a sentence.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from random import Random
from string import Formatter

OPENINGS = (
    "please ",
    "Please ",
    "hey, ",
    "Hi! ",
    "hello, ",
    "ok, ",
    "ok ",
    "now ",
    "so ",
    "then ",
    "well, ",
    "um, ",
    "right, ",
    "can you tell me: ",
    "can you do this: ",
    "could you help me? ",
    "do you know this: ",
    "I have a question: ",
    "my question is: ",
    "here is my question: ",
    "I was wondering: ",
    "I wonder: ",
    "let me ask: ",
    "just tell me: ",
    "tell me, ",
    "help me with this: ",
    "please help: ",
    "excuse me, ",
    "Spark-Mini, ",
    "hey Spark-Mini, ",
    "dear model, ",
    "my teacher asks: ",
    "for my homework: ",
    "quick one: ",
    "one more: ",
    "another one: ",
    "next: ",
    "Question: ",
    "Q: ",
    "Task: ",
    "Exercise: ",
    "Problem: ",
    "I am doing a puzzle. ",
    "We are playing a game. ",
    "Here is a task for you. ",
    "Can you solve this? ",
    "I bet you know this: ",
    "listen: ",
    "look, ",
    "let's see: ",
    "my friend wants to know: ",
    "a small question: ",
    "I need your help. ",
    "one thing: ",
    "new question: ",
    "Good morning! ",
)
CLOSINGS = (
    " please",
    ", please",
    " thanks",
    " Thanks!",
    " thank you",
    " Thank you very much.",
    ", thx",
    " pls",
    " for me",
    ", ok?",
    " asap",
    " :)",
    "...",
    " Can you do that?",
    " Do you know?",
    " I am not sure.",
    " It is for school.",
    " I need it now.",
    " Show your work.",
    " Think carefully.",
    " Take your time.",
    " Just the answer.",
    " I trust you.",
    " It is urgent.",
    " That is all.",
    " No explanation.",
    " Let me know.",
    " What do you think?",
    ", my friend",
    " if you can",
    ", Spark-Mini",
    " and thank you",
)
FILLERS = ("just", "please", "now", "really", "quickly", "maybe", "kindly", "also", "actually")
ENDINGS = ("", "", "", "?", ".", "!", "??", " ?")
LETTERS = "abcdefghijklmnopqrstuvwxyz"

TIDY_SHARE = 0.3
TYPO_SHARE = 0.12
FILLER_SHARE = 0.06
OPENING_SHARE = 0.25
CLOSING_SHARE = 0.15
ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Asked:
    """A question in words, and the name of the template it came from."""

    question: str
    phrasing: str


@dataclass(frozen=True)
class Wordings:
    """The templates of one kind of question.

    Slots stand in braces; square brackets hold alternatives, one of which is chosen:
    "[Reverse|Flip] {w}". Every expansion of a held-out template is unlike every one seen.
    """

    name: str
    seen: tuple[str, ...]
    held_out: tuple[str, ...]

    def ask(self, rng: Random, slots: Mapping[str, str], *, held_out: bool) -> Asked:
        """Choose a template, fill its slots, and type it the way somebody might."""
        templates = self.held_out if held_out else self.seen
        index = rng.randrange(len(templates))
        kind = "held" if held_out else "seen"
        question = typed_by_hand(rng, expanded(rng, templates[index]), slots)
        return Asked(question, f"{self.name}/{kind}-{index}")


def read_wordings() -> dict[str, Wordings]:
    """Read every file in wordings/, whose README says how they are written."""
    found = {}
    for file in (resources.files("musespark.evals") / "wordings").iterdir():
        if file.name.endswith(".txt"):
            for wordings in parse_wordings(file.read_text(encoding="utf-8")):
                found[wordings.name] = wordings
    return found


def parse_wordings(text: str) -> Iterator[Wordings]:
    """Yield the wordings of one file."""
    head, *sections = re.split(r"^== ", text, flags=re.MULTILINE)
    named = dict(re.findall(r"^(\$\w+) = (.*)$", head, flags=re.MULTILINE))
    for section in sections:
        title, _, body = section.partition("\n")
        lines = [_with_names(line, named) for line in body.splitlines() if line]
        border = lines.index("-- held out")
        yield Wordings(title, tuple(lines[:border]), tuple(lines[border + 1 :]))


def _with_names(line: str, named: Mapping[str, str]) -> str:
    for name, alternatives in named.items():
        line = line.replace(f"[{name}]", f"[{alternatives}]")
    return line.replace("\\n", "\n")


def expanded(rng: Random, template: str) -> str:
    """Return a template with one of each pair of brackets' alternatives chosen."""
    return ALTERNATIVES.sub(lambda match: rng.choice(match[1].split("|")), template)


def typed_by_hand(rng: Random, template: str, slots: Mapping[str, str]) -> str:
    """Fill a template, changing case, punctuation and spelling around the slots, never in them."""
    literals, names = _split(template)
    if rng.random() >= TIDY_SHARE:
        change_case = _choose_case(rng)
        literals = [change_case(text) for text in literals]
        if rng.random() < TYPO_SHARE:
            literals = _with_typo(rng, literals)
        if rng.random() < FILLER_SHARE:
            literals = _with_filler(rng, literals)
        literals[-1] = literals[-1].rstrip("?.! ") + rng.choice(ENDINGS)
        if rng.random() < OPENING_SHARE:
            literals[0] = rng.choice(OPENINGS) + _uncapitalised(literals[0])
        if rng.random() < CLOSING_SHARE:
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


def _with_filler(rng: Random, literals: list[str]) -> list[str]:
    """Return the literals with a word that says nothing at one of their spaces."""
    places = [
        (part, at)
        for part, text in enumerate(literals)
        for at in range(1, len(text) - 1)
        if text[at] == " " and text[at - 1].isalpha() and text[at + 1].isalpha()
    ]
    if not places:
        return literals
    part, at = rng.choice(places)
    text = literals[part]
    changed = f"{text[:at]} {rng.choice(FILLERS)}{text[at:]}"
    return [*literals[:part], changed, *literals[part + 1 :]]


WORDINGS: Mapping[str, Wordings] = read_wordings()
"""The wordings of all kinds of questions, by name."""
