"""Addition, subtraction, comparison and multiplication of whole numbers."""

from random import Random

from musespark.evals import columns
from musespark.evals.conversation import Problem, Reasoning
from musespark.evals.phrasing import WORDINGS

ADDITION = WORDINGS["addition"]
SUBTRACTION = WORDINGS["subtraction"]
LARGER = WORDINGS["larger"]
SMALLER = WORDINGS["smaller"]
IS_LARGER = WORDINGS["is-larger"]
IS_SMALLER = WORDINGS["is-smaller"]
MULTIPLICATION = WORDINGS["multiplication"]


def whole_number(rng: Random, digits: int = columns.WIDTH) -> int:
    """Return a number of 1 to `digits` digits, every length equally likely."""
    length = rng.randint(1, digits)
    return rng.randint(0 if length == 1 else 10 ** (length - 1), 10**length - 1)


def operands(rng: Random) -> tuple[int, int]:
    """Return two numbers, more often than not of the same length."""
    first = whole_number(rng)
    length = len(str(first))
    if rng.random() < 0.5:
        return first, whole_number(rng)
    return first, rng.randint(0 if length == 1 else 10 ** (length - 1), 10**length - 1)


def spelled(rng: Random, number: int) -> str:
    """Return a number as typed; now and then with a thousands comma."""
    return f"{number:,}" if rng.random() < 0.06 else str(number)


def addition(rng: Random, *, held_out: bool) -> Problem:
    """Make an addition of two numbers of up to five digits."""
    a, b = operands(rng)
    asked = ADDITION.ask(rng, {"a": spelled(rng, a), "b": spelled(rng, b)}, held_out=held_out)
    return Problem(
        task="addition",
        key=f"addition {min(a, b)} {max(a, b)}",
        question=asked.question,
        phrasing=asked.phrasing,
        reasoning=add_reasoning(a, b),
        answer=str(a + b),
        value=a + b,
    )


def add_reasoning(a: int, b: int) -> Reasoning:
    """Return the worked addition."""
    return Reasoning(
        brief=columns.add_steps(a, b, brief=True),
        plan=f"Add {a} and {b}.",
        steps=columns.add_steps(a, b),
        close=f"So {a} + {b} = {a + b}.",
    )


def subtraction(rng: Random, *, held_out: bool) -> Problem:
    """Make a subtraction, with the larger number first most of the time."""
    a, b = operands(rng)
    if a < b and rng.random() < 0.6:
        a, b = b, a
    asked = SUBTRACTION.ask(rng, {"a": spelled(rng, a), "b": spelled(rng, b)}, held_out=held_out)
    return Problem(
        task="subtraction",
        key=f"subtraction {a} {b}",
        question=asked.question,
        phrasing=asked.phrasing,
        reasoning=subtract_reasoning(a, b),
        answer=str(a - b),
        value=a - b,
    )


def subtract_reasoning(a: int, b: int) -> Reasoning:
    """Return the worked subtraction."""
    return Reasoning(
        brief=columns.subtract_steps(a, b, brief=True),
        plan=f"Subtract {b} from {a}.",
        steps=columns.subtract_steps(a, b),
        close=f"So {a} - {b} = {a - b}.",
    )


def comparison(rng: Random, *, held_out: bool) -> Problem:
    """Ask for the larger or the smaller of two numbers, or whether one is larger or smaller."""
    a, b = operands(rng)
    if rng.random() < 0.4:
        b = _close_to(rng, a)
    wordings = rng.choice((LARGER, SMALLER, LARGER, SMALLER, IS_LARGER, IS_SMALLER))
    asked = wordings.ask(rng, {"a": spelled(rng, a), "b": spelled(rng, b)}, held_out=held_out)
    wants_larger = wordings in (LARGER, IS_LARGER)
    if wordings in (IS_LARGER, IS_SMALLER):
        holds = a > b if wants_larger else a < b
        answer = "Yes" if holds else "No"
        plan = f"Is {a} {'larger' if wants_larger else 'smaller'} than {b}?"
    else:
        answer = "They are equal." if a == b else str(max(a, b) if wants_larger else min(a, b))
        plan = f"Find the {'larger' if wants_larger else 'smaller'} of {a} and {b}."
    outcome = {"<": "is smaller than", "=": "is equal to", ">": "is larger than"}
    return Problem(
        task="comparison",
        key=f"comparison {min(a, b)} {max(a, b)}",
        question=asked.question,
        phrasing=asked.phrasing,
        reasoning=Reasoning(
            brief=columns.compare_steps(a, b, brief=True),
            plan=plan,
            steps=columns.compare_steps(a, b),
            close=f"{a} {outcome[columns.order_sign(a, b)]} {b}.",
        ),
        answer=answer,
        value=answer if a == b or not answer.isdigit() else int(answer),
    )


def _close_to(rng: Random, number: int) -> int:
    """Return a number with some of the same digits, so that the first one does not decide."""
    return int("".join(d if rng.random() < 0.7 else rng.choice("0123456789") for d in str(number)))


def multiplication(rng: Random, *, held_out: bool) -> Problem:
    """Make a product the model can work out itself: up to three digits by up to two."""
    a = whole_number(rng, 3)
    b = whole_number(rng, 2)
    slots = [str(a), str(b)]
    if rng.random() < 0.4:
        slots.reverse()
    asked = MULTIPLICATION.ask(rng, {"a": slots[0], "b": slots[1]}, held_out=held_out)
    large, small = (a, b) if b <= a or a > 99 else (b, a)
    return Problem(
        task="multiplication",
        key=f"multiplication {min(a, b)} {max(a, b)}",
        question=asked.question,
        phrasing=asked.phrasing,
        reasoning=Reasoning(
            brief=columns.multiply_steps(large, small, brief=True),
            plan=f"Multiply {large} by {small}.",
            steps=columns.multiply_steps(large, small),
            close=f"So {large} * {small} = {large * small}.",
        ),
        answer=str(a * b),
        value=a * b,
    )
