"""Looking up a key in notes, at a chosen distance back from the end of the question.

The distance is counted in characters, which are tokens here, from the end of the value to the end
of the question. Beyond the sliding window only the full-attention layers can see the value.
"""

from dataclasses import dataclass
from random import Random

from musespark.evals.conversation import Message, Problem, Reasoning
from musespark.evals.phrasing import WORDINGS
from musespark.evals.vocabulary import NAMES, WORDS, random_letters

LONGEST_DISTANCE = 320
NEAR = 64

ASKING = WORDINGS["lookup"]


@dataclass(frozen=True)
class Layout:
    """How notes are written down: what opens them, one entry, what stands between and after."""

    opening: str
    entry: str
    separator: str
    ending: str


OPENINGS = (
    "Notes: ",
    "Table: ",
    "Remember: ",
    "Data: ",
    "Here are the values: ",
    "Given ",
    "Prices: ",
    "Codes - ",
    "My list: ",
    "Facts: ",
    "I know that ",
    "",
)
LINE_OPENINGS = ("List:\n", "", "Table:\n", "Notes:\n", "The values are\n", "Read this:\n\n")
ENTRIES = (
    "{k}={v}",
    "{k} = {v}",
    "{k}: {v}",
    "{k} : {v}",
    "{k} is {v}",
    "{k} has {v}",
    "{k} {v}",
    "{k} -> {v}",
    "{k}->{v}",
    "{k} - {v}",
    "{k} equals {v}",
    '"{k}": {v}',
    '"{k}": "{v}"',
    "({k}, {v})",
    "{k} costs {v}",
    "the {k} is {v}",
)
LINE_ENTRIES = (*ENTRIES, "- {k}: {v}", "* {k} = {v}", "{k}\t{v}", "| {k} | {v} |", "- {k} is {v}")
SEPARATORS = (", ", ". ", "; ", " ", ",", " | ")


def seen_layout(rng: Random) -> Layout:
    """Return a way to write notes down: in one line, or a line for each."""
    if rng.random() < 0.4:
        ending = rng.choice(("\n", "\n\n"))
        return Layout(rng.choice(LINE_OPENINGS), rng.choice(LINE_ENTRIES), "\n", ending)
    return Layout(rng.choice(OPENINGS), rng.choice(ENTRIES), rng.choice(SEPARATORS), ". ")


HELD_OUT_LAYOUTS = (
    Layout("Values: ", "{k}: {v}", ", ", ". "),
    Layout("Here is a list:\n", "{k} is {v}", "\n", "\n"),
    Layout("Given: ", "{k} = {v}", "; ", ". "),
    Layout("We have ", "{k} as {v}", ", ", ". "),
)


def lookup(rng: Random, *, held_out: bool) -> Problem:
    """Ask for a value at any trained distance."""
    return lookup_at(rng, rng.randint(8, LONGEST_DISTANCE), held_out=held_out)


def far_lookup(rng: Random, *, held_out: bool) -> Problem:
    """Ask for a value as far back as training goes."""
    return lookup_at(rng, LONGEST_DISTANCE, held_out=held_out)


def lookup_at(rng: Random, distance: int, *, held_out: bool) -> Problem:
    """Ask for a value about `distance` tokens back; some near look-ups find no such key."""
    layout = rng.choice(HELD_OUT_LAYOUTS) if held_out else seen_layout(rng)
    entries = _entries(rng, layout, distance + rng.randint(0, 40))
    texts = [layout.entry.format(k=k, v=v) for k, v in entries]
    typical_question = 20
    key, value = entries[_entry_at(texts, layout, distance - typical_question)]
    asked = ASKING.ask(rng, {"k": key}, held_out=held_out)
    missing = distance < NEAR and rng.random() < 0.15
    if missing:
        texts.remove(layout.entry.format(k=key, v=value))
    notes = layout.opening + layout.separator.join(texts)
    answer = f"There is no {key}." if missing else value
    found = f"{key}: {'none' if missing else value}"
    in_two_turns = layout.ending == ". " and rng.random() < 0.15
    return Problem(
        task="lookup",
        key=f"lookup {key} in {' '.join(texts)}",
        question=asked.question if in_two_turns else notes + layout.ending + asked.question,
        phrasing=asked.phrasing,
        reasoning=Reasoning(
            brief=found, plan=f"Find {key}.", steps=found, close=f"The answer is: {answer}"
        ),
        answer=answer,
        context=(Message("user", notes + "."), Message("assistant", "Noted."))
        if in_two_turns
        else (),
    )


def _entries(rng: Random, layout: Layout, length: int) -> list[tuple[str, str]]:
    """Return distinct keys with values, together about `length` characters once laid out."""
    make_key = rng.choice((_letters, _letters, _word, _name))
    make_value = rng.choice((_number, _number, _word))
    entries: dict[str, str] = {}
    used = 0
    while used < length or len(entries) < 2:
        key, value = make_key(rng), make_value(rng)
        if key not in entries:
            entries[key] = value
            used += len(layout.entry.format(k=key, v=value)) + len(layout.separator)
        elif len(entries) > len(NAMES) // 2:
            make_key = _letters
    return list(entries.items())


def _entry_at(texts: list[str], layout: Layout, distance: int) -> int:
    """Return which entry ends closest to `distance` characters before the end of the notes."""
    ends = []
    behind = len(layout.ending)
    for text in reversed(texts):
        ends.append(behind)
        behind += len(text) + len(layout.separator)
    nearest = min(range(len(ends)), key=lambda i: abs(ends[i] - distance))
    return len(texts) - 1 - nearest


def _letters(rng: Random) -> str:
    return random_letters(rng, 3, 3)


def _word(rng: Random) -> str:
    return rng.choice(WORDS)


def _name(rng: Random) -> str:
    return rng.choice(NAMES)


def _number(rng: Random) -> str:
    return str(rng.randint(10, 9999))
