"""Reversing a word and counting its letters."""

from random import Random

from musespark.evals.conversation import Problem, Reasoning
from musespark.evals.phrasing import WORDINGS
from musespark.evals.vocabulary import LETTERS, in_some_case, single_word

REVERSING = WORDINGS["reversing"]
COUNT_LETTER = WORDINGS["count-letter"]
COUNT_ALL = WORDINGS["count-all"]
COUNT_VOWELS = WORDINGS["count-vowels"]


def reversing(rng: Random, *, held_out: bool) -> Problem:
    """Ask for a word of up to twelve letters written backwards."""
    word = in_some_case(rng, single_word(rng))
    asked = REVERSING.ask(rng, {"w": word}, held_out=held_out)
    tags = [f"{i}{letter}" for i, letter in enumerate(word, start=1)]
    steps = f"{' '.join(tags)} > {' '.join(reversed(tags))}"
    return Problem(
        task="reversing",
        key=f"reversing {word.lower()}",
        question=asked.question,
        phrasing=asked.phrasing,
        reasoning=Reasoning(
            brief=" ".join(tags) if len(word) <= 5 else steps,
            plan=f"Reverse {word}.",
            steps=steps,
            close=f"{word} backwards is {word[::-1]}.",
        ),
        answer=word[::-1],
        value=word[::-1],
    )


def counting(rng: Random, *, held_out: bool) -> Problem:
    """Ask how often a letter occurs in a word, or for its vowels, or all its letters."""
    wordings = rng.choices((COUNT_LETTER, COUNT_ALL, COUNT_VOWELS), (8, 1, 1))[0]
    plain = single_word(rng)
    letter = rng.choice(plain) if rng.random() < 0.8 else rng.choice(LETTERS)
    if wordings is COUNT_LETTER and rng.random() < 0.35:
        plain = "".join(letter if rng.random() < 0.3 else other for other in plain)
    word = in_some_case(rng, plain)
    if wordings is COUNT_LETTER:
        counted, what = letter, letter
    elif wordings is COUNT_VOWELS:
        counted, what = "aeiou", "vowels"
    else:
        counted, what = LETTERS, "letters"
    asked = wordings.ask(rng, {"w": word, "c": letter}, held_out=held_out)
    steps, brief, total = _running_total(plain, counted)
    return Problem(
        task="counting",
        key=f"counting {what} {plain}",
        question=asked.question,
        phrasing=asked.phrasing,
        reasoning=Reasoning(
            brief=f"{what}: {brief}",
            plan=f"Count {what} in {plain}.",
            steps=f"{what}: {steps}",
            close=f"The count is {total}.",
        ),
        answer=str(total),
        value=total,
    )


def _running_total(word: str, counted: str) -> tuple[str, str, int]:
    """Return `s0 p0 o1 o2`, the same with numbers at the hits only, and the total."""
    total = 0
    steps = []
    brief = []
    for letter in word:
        hit = letter in counted
        total += hit
        steps.append(f"{letter}{total}")
        brief.append(f"{letter}{total}" if hit else letter)
    return " ".join(steps), " ".join(brief), total
