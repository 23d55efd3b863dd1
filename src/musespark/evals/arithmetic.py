"""Addition, subtraction, comparison and multiplication of whole numbers."""

from random import Random

from musespark.evals import columns
from musespark.evals.conversation import Problem, Reasoning
from musespark.evals.phrasing import Wordings

ADDITION = Wordings(
    "addition",
    seen=(
        "What is {a} + {b}?",
        "{a} + {b}",
        "{a}+{b}",
        "{a}+{b}=?",
        "{a} + {b} =",
        "What is {a} plus {b}?",
        "{a} plus {b}",
        "Add {a} and {b}.",
        "Add {a} to {b}.",
        "Calculate {a} + {b}.",
        "Compute {a}+{b}",
        "What is the sum of {a} and {b}?",
        "The sum of {a} and {b}",
        "Sum {a} and {b}.",
        "How much is {a} + {b}?",
        "How much is {a} plus {b}?",
        "What do you get when you add {a} and {b}?",
        "Find the total of {a} and {b}.",
        "What is the total of {a} and {b}?",
        "Can you add {a} and {b}?",
        "Could you add {a} to {b} for me?",
        "I have {a} apples and get {b} more. How many apples do I have?",
        "There are {a} books here and {b} books there. How many books in total?",
        "{a} and {b} together make what?",
        "What is {b} more than {a}?",
        "Work out {a} + {b}",
        "Solve {a} + {b}",
        "Increase {a} by {b}.",
        "What does {a} + {b} equal?",
        "Do the sum: {a} + {b}",
        "I want to know {a} + {b}",
        "Put {a} and {b} together: what is the total?",
        "Tom has {a} coins and Ann has {b} coins. How many coins do they have together?",
        "Please tell me the sum of {a} and {b}.",
        "Give me {a} plus {b}",
    ),
    held_out=(
        "Tell me what {a} + {b} comes to.",
        "I need the sum of {a} and {b}",
        "{a} added to {b} is what?",
        "What total do {a} and {b} make?",
        "If I add {a} and {b}, what do I get?",
        "Could you work out {a} plus {b}?",
    ),
)
SUBTRACTION = Wordings(
    "subtraction",
    seen=(
        "What is {a} - {b}?",
        "{a} - {b}",
        "{a}-{b}",
        "{a}-{b}=?",
        "{a} - {b} =",
        "What is {a} minus {b}?",
        "{a} minus {b}",
        "Subtract {b} from {a}.",
        "Take {b} from {a}.",
        "Take {b} away from {a}.",
        "Calculate {a} - {b}.",
        "Compute {a}-{b}",
        "How much is {a} - {b}?",
        "How much is {a} minus {b}?",
        "What do you get when you subtract {b} from {a}?",
        "Can you subtract {b} from {a}?",
        "Could you take {b} from {a} for me?",
        "What is {b} less than {a}?",
        "Decrease {a} by {b}.",
        "Reduce {a} by {b}.",
        "{a} take away {b}",
        "Work out {a} - {b}",
        "Solve {a} - {b}",
        "What does {a} - {b} equal?",
        "I want to know {a} - {b}",
        "What is left of {a} after taking away {b}?",
        "What remains when {b} is taken from {a}?",
        "I had {a} coins and spent {b}. How many are left?",
        "Start with {a} and subtract {b}.",
        "From {a} subtract {b}.",
        "Give me {a} minus {b}",
        "Find {a} minus {b}.",
        "Please tell me {a} minus {b}.",
    ),
    held_out=(
        "Tell me what {a} - {b} comes to.",
        "I need to know {a} minus {b}",
        "If I subtract {b} from {a}, what do I get?",
        "Could you work out {a} minus {b}?",
        "What do I have left when I take {b} from {a}?",
        "How much remains of {a} after I take away {b}?",
    ),
)
LARGER = Wordings(
    "larger",
    seen=(
        "Which is larger, {a} or {b}?",
        "Which number is bigger: {a} or {b}?",
        "Which is greater, {a} or {b}?",
        "max of {a} and {b}?",
        "What is the larger of {a} and {b}?",
        "The bigger of {a} and {b}",
        "Is {a} or {b} larger?",
        "Is {a} or {b} bigger?",
        "What is the maximum of {a} and {b}?",
        "{a} or {b}: which is larger?",
        "{a} vs {b}, which is bigger?",
        "Compare {a} and {b} and give me the larger one.",
        "Pick the larger number: {a} or {b}",
        "Of {a} and {b}, which is greater?",
        "Which is more, {a} or {b}?",
        "Find the larger of {a} and {b}.",
        "Larger: {a} or {b}?",
        "Tell me the greater of {a} and {b}.",
        "Which is higher, {a} or {b}?",
        "What is bigger, {a} or {b}?",
    ),
    held_out=(
        "Which of {a} and {b} is larger?",
        "I want the bigger number, {a} or {b}",
        "Give me the greater one of {a} and {b}",
        "Between {a} and {b}, which is larger?",
    ),
)
SMALLER = Wordings(
    "smaller",
    seen=(
        "Which is smaller, {a} or {b}?",
        "Which number is less: {a} or {b}?",
        "Which is lower, {a} or {b}?",
        "min of {a} and {b}?",
        "What is the smaller of {a} and {b}?",
        "The smaller of {a} and {b}",
        "Is {a} or {b} smaller?",
        "Is {a} or {b} less?",
        "What is the minimum of {a} and {b}?",
        "{a} or {b}: which is smaller?",
        "{a} vs {b}, which is smaller?",
        "Compare {a} and {b} and give me the smaller one.",
        "Pick the smaller number: {a} or {b}",
        "Of {a} and {b}, which is less?",
        "Which is fewer, {a} or {b}?",
        "Find the smaller of {a} and {b}.",
        "Smaller: {a} or {b}?",
        "Tell me the lesser of {a} and {b}.",
        "Which is the lesser, {a} or {b}?",
        "What is smaller, {a} or {b}?",
    ),
    held_out=(
        "Which of {a} and {b} is smaller?",
        "I want the smaller number, {a} or {b}",
        "Give me the lesser one of {a} and {b}",
        "Between {a} and {b}, which is smaller?",
    ),
)
IS_LARGER = Wordings(
    "is-larger",
    seen=(
        "Is {a} larger than {b}?",
        "Is {a} greater than {b}?",
        "Is {a} bigger than {b}?",
        "Is {a} more than {b}?",
        "{a} > {b}?",
        "Is {a} > {b}?",
        "Is it true that {a} is larger than {b}?",
        "True or false: {a} is greater than {b}",
        "Would you say {a} is bigger than {b}?",
        "Does {a} exceed {b}?",
    ),
    held_out=("Can you tell me if {a} is larger than {b}?", "{a} is bigger than {b}, right?"),
)
IS_SMALLER = Wordings(
    "is-smaller",
    seen=(
        "Is {a} smaller than {b}?",
        "Is {a} less than {b}?",
        "Is {a} lower than {b}?",
        "{a} < {b}?",
        "Is {a} < {b}?",
        "Is it true that {a} is smaller than {b}?",
        "True or false: {a} is less than {b}",
        "Would you say {a} is smaller than {b}?",
        "Is {a} below {b}?",
        "Is {a} under {b}?",
    ),
    held_out=("Can you tell me if {a} is smaller than {b}?", "{a} is less than {b}, right?"),
)
MULTIPLICATION = Wordings(
    "multiplication",
    seen=(
        "What is {a} * {b}?",
        "{a} * {b}",
        "{a}*{b}",
        "{a}*{b}=?",
        "{a} x {b}",
        "{a}x{b}",
        "{a} \u00d7 {b}",
        "What is {a} times {b}?",
        "{a} times {b}",
        "Multiply {a} by {b}.",
        "Multiply {a} and {b}.",
        "Calculate {a} * {b}.",
        "Compute {a} x {b}",
        "What is the product of {a} and {b}?",
        "Find the product of {a} and {b}.",
        "How much is {a} * {b}?",
        "How much is {a} times {b}?",
        "What do you get when you multiply {a} by {b}?",
        "Can you multiply {a} by {b}?",
        "Work out {a} * {b}",
        "Solve {a} * {b}",
        "What does {a} * {b} equal?",
        "I want to know {a} times {b}",
        "There are {a} boxes with {b} pens each. How many pens in total?",
        "{a} multiplied by {b}",
        "Give me {a} times {b}",
    ),
    held_out=(
        "Tell me what {a} * {b} comes to.",
        "I need the product of {a} and {b}",
        "If I multiply {a} by {b}, what do I get?",
        "Could you work out {a} times {b}?",
    ),
)


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
