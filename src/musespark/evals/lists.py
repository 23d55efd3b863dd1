"""Sorting a list of numbers, and finding its largest or smallest."""

from random import Random
from string import ascii_lowercase

from musespark.evals.conversation import Json, Problem, Reasoning
from musespark.evals.phrasing import WORDINGS

LONGEST_LIST = 8
LARGEST_ITEM = 999

ASCENDING = WORDINGS["ascending"]
DESCENDING = WORDINGS["descending"]
LARGEST = WORDINGS["largest"]
SMALLEST = WORDINGS["smallest"]
SEEN_SEPARATORS = (
    ", ",
    ", ",
    ", ",
    ", ",
    ",",
    " ",
    " ",
    "; ",
    ";",
    " and ",
    "\n",
    ",\n",
    " | ",
    " / ",
    "  ",
)
MIXED = (", ", ",", " ", "; ", "  ", " and ", ", and ")
HELD_OUT_SEPARATORS = (", ", " ,", " ; ", ",  ")


def joined(rng: Random, items: list[int], *, held_out: bool) -> str:
    """Return a list as people type it."""
    separator = rng.choice(HELD_OUT_SEPARATORS if held_out else SEEN_SEPARATORS)
    text = separator.join(map(str, items))
    if not held_out and rng.random() < 0.1:
        return "".join(f"{item}{rng.choice(MIXED)}" for item in items[:-1]) + str(items[-1])
    if separator == ", " and len(items) > 2 and rng.random() < 0.15:
        text = ", ".join(map(str, items[:-1])) + f" and {items[-1]}"
    return f"[{text}]" if separator in (", ", ",") and rng.random() < 0.12 else text


def random_list(rng: Random, length: int) -> list[int]:
    """Return numbers of one to three digits, in lists of mixed or of one length of number."""
    high = rng.choice((9, 99, 99, LARGEST_ITEM, LARGEST_ITEM))
    low = high // 10 + 1 if rng.random() < 0.4 else 0
    return [rng.randint(low, high) for _ in range(length)]


def sorting(rng: Random, *, held_out: bool) -> Problem:
    """Ask for two to eight numbers in order, or for the largest or smallest of them."""
    items = random_list(rng, rng.choice((2, 3, 4, 5, 6, 7, 7, 8, 8)))
    wordings = rng.choices((ASCENDING, DESCENDING, LARGEST, SMALLEST), (10, 5, 1, 1))[0]
    asked = wordings.ask(rng, {"xs": joined(rng, items, held_out=held_out)}, held_out=held_out)
    largest_first = wordings in (DESCENDING, LARGEST)
    ordered = sorted(items, reverse=largest_first)
    steps = f"{' '.join(tagged(items))} | "
    value: Json
    if wordings in (LARGEST, SMALLEST):
        name = "largest" if largest_first else "smallest"
        plan = f"Find the {name}."
        picked, answer, value = f"{ordered[0]:03d}", str(ordered[0]), ordered[0]
        close = f"The {name} is {answer}."
    else:
        plan = f"Sort, {'largest' if largest_first else 'smallest'} first."
        picked = selection_steps(items, largest_first=largest_first)
        answer, value = ", ".join(map(str, ordered)), list[Json](ordered)
        close = f"In order: {answer}."
    return Problem(
        task="sorting",
        key=f"sorting {' '.join(map(str, sorted(items)))}",
        question=asked.question,
        phrasing=asked.phrasing,
        reasoning=Reasoning(brief=steps + picked, plan=plan, steps=steps + picked, close=close),
        answer=answer,
        value=value,
    )


def tagged(items: list[int]) -> list[str]:
    """Return `a345 b012 c007`: equal widths, and a letter each, so that copies cannot slip."""
    return [f"{letter}{item:03d}" for letter, item in zip(ascii_lowercase, items, strict=False)]


def selection_steps(items: list[int], *, largest_first: bool) -> str:
    """Return `c007: a345 b012 | b012: a345 | a345:`: pick one, list what is left, go on."""
    left = tagged(items)
    direction = -1 if largest_first else 1
    steps = []
    while left:
        pick = min(left, key=lambda tag: direction * int(tag[1:]))
        left.remove(pick)
        steps.append(" ".join([f"{pick}:", *left]))
    return " | ".join(steps)
