"""Sorting a list of numbers, and finding its largest or smallest."""

from random import Random
from string import ascii_lowercase

from musespark.evals.conversation import Json, Problem, Reasoning
from musespark.evals.phrasing import WORDINGS

LONGEST_LIST = 8
LARGEST_ITEM = 999
CLOSE = 29
"""How far apart the items of a list of numbers that look alike may lie."""

ASCENDING = WORDINGS["ascending"]
DESCENDING = WORDINGS["descending"]
LARGEST = WORDINGS["largest"]
SMALLEST = WORDINGS["smallest"]
HELD_OUT_SEPARATORS = (", ", " ,", " ; ", ",  ")
COMMON_SEPARATORS = (", ", ", ", ", ", ", ", ",", ",", " ", " ", "; ", " and ", "\n")
MARKS = (",", ",", ";", "|", "/", "&", "and")
SPACES_BEFORE = ("", " ", " ", "  ")
SPACES_AFTER = ("", " ", " ", "  ", "\n")
BLANKS = (" ", "  ", "   ", "\t", "\n", "\n\n", " \n")
BRACKETS = (("[", "]"), ("(", ")"), ("{", "}"), ("<", ">"), ('"', '"'), ("`", "`"))


def joined(rng: Random, items: list[int], *, held_out: bool) -> str:
    """Return a list as people type it."""
    if held_out:
        return _closed(rng, items, rng.choice(HELD_OUT_SEPARATORS))
    roll = rng.random()
    if roll < 0.04:
        bullet = rng.choice(("- ", "* ", "+ ", "{}. ", "{}) ", "({}) ", "#{}: "))
        return "\n".join(bullet.format(i) + str(item) for i, item in enumerate(items, start=1))
    if roll < 0.14:
        return "".join(f"{item}{_separator(rng)}" for item in items[:-1]) + str(items[-1])
    if roll < 0.55:
        return _closed(rng, items, rng.choice(COMMON_SEPARATORS))
    return _closed(rng, items, _separator(rng))


def _closed(rng: Random, items: list[int], separator: str) -> str:
    """Return items with the separator between them, at times ending in "and", or in brackets."""
    texts = [str(item) for item in items]
    ends_in_and = "," in separator and len(items) > 2 and rng.random() < 0.15
    text = separator.join(texts)
    if ends_in_and:
        text = f"{separator.join(texts[:-1])} and {texts[-1]}"
    if separator.strip() and rng.random() < 0.12:
        opening, closing = rng.choice(BRACKETS)
        return f"{opening}{text}{closing}"
    return text


def _separator(rng: Random) -> str:
    """Return a separator put together at random, but none of those held out, except for ", "."""
    while True:
        mark = rng.choice(MARKS)
        if rng.random() < 0.2:
            separator = rng.choice(BLANKS)
        elif mark == "and":
            separator = rng.choice((" and ", ", and ", " & ", "  and  ", " and\n", "; and "))
        else:
            separator = rng.choice(SPACES_BEFORE) + mark + rng.choice(SPACES_AFTER)
        if separator == ", " or separator not in HELD_OUT_SEPARATORS:
            return separator


def random_list(rng: Random, length: int) -> list[int]:
    """Return numbers of one to three digits: of mixed or of one length, or close together."""
    high = rng.choice((9, 99, 99, LARGEST_ITEM, LARGEST_ITEM))
    low = high // 10 + 1 if rng.random() < 0.4 else 0
    if rng.random() < 0.06:
        low = rng.randint(0, LARGEST_ITEM - CLOSE)
        high = low + CLOSE
    return [rng.randint(low, high) for _ in range(length)]


def sorting(rng: Random, *, held_out: bool) -> Problem:
    """Ask for two to eight numbers in order, or for the largest or smallest of them."""
    items = random_list(rng, rng.choice((2, 3, 4, 5, 6, 7, 7, 8, 8)))
    wordings = rng.choices((ASCENDING, DESCENDING, LARGEST, SMALLEST), (10, 5, 1, 1))[0]
    asked = wordings.ask(rng, {"xs": joined(rng, items, held_out=held_out)}, held_out=held_out)
    largest_first = wordings in (DESCENDING, LARGEST)
    ordered = sorted(items, reverse=largest_first)
    steps = f"{' '.join(tagged(items))}{_next_sign(largest_first=largest_first)}"
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
    """Return `007c: a345 b012 < 012b: a345 < 345a:`: pick one, list what is left, go on.

    A pick names the number before the letter, so that it is found digit by digit. The sign between
    two picks says which way the list is sorted.
    """
    left = tagged(items)
    direction = -1 if largest_first else 1
    steps = []
    while left:
        pick = min(left, key=lambda tag: direction * int(tag[1:]))
        left.remove(pick)
        steps.append(" ".join([f"{pick[1:]}{pick[0]}:", *left]))
    return _next_sign(largest_first=largest_first).join(steps)


def _next_sign(*, largest_first: bool) -> str:
    return " > " if largest_first else " < "
