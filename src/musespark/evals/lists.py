"""Sorting a list of numbers, and finding its largest or smallest."""

from random import Random

from musespark.evals.conversation import Json, Problem, Reasoning
from musespark.evals.phrasing import Wordings

LONGEST_LIST = 8
LARGEST_ITEM = 999

ASCENDING = Wordings(
    "ascending",
    seen=(
        "Sort {xs}.",
        "Sort {xs}",
        "Sort these numbers: {xs}",
        "Sort the numbers {xs}.",
        "Sort the list {xs}",
        "Order {xs}",
        "Order these: {xs}",
        "Put in order: {xs}.",
        "Put {xs} in order.",
        "Put these numbers in order: {xs}",
        "Arrange {xs}.",
        "Arrange these numbers: {xs}",
        "Arrange {xs} from smallest to largest.",
        "Sort from smallest to largest: {xs}",
        "Sort {xs} from small to large",
        "Sort {xs} ascending.",
        "Sort ascending: {xs}",
        "Sort {xs} in ascending order.",
        "Put these in ascending order: {xs}",
        "Can you sort {xs}?",
        "Could you sort these for me: {xs}",
        "What is {xs} sorted?",
        "{xs} sorted",
        "{xs} in ascending order",
        "Order {xs} from least to greatest.",
        "List {xs} in increasing order.",
        "Sort low to high: {xs}",
        "Rank these from smallest to largest: {xs}",
        "Sort this list: {xs}",
        "Give me {xs} in order.",
    ),
    held_out=(
        "Could you put these numbers in ascending order: {xs}",
        "Please order the list {xs} from smallest to largest",
        "I need {xs} sorted",
        "Tell me {xs} in increasing order.",
    ),
)
DESCENDING = Wordings(
    "descending",
    seen=(
        "Sort {xs} descending.",
        "Sort descending: {xs}",
        "Sort {xs} in descending order.",
        "Sort from largest to smallest: {xs}",
        "Sort {xs} from large to small",
        "Order {xs}, largest first",
        "Sort {xs}, largest first.",
        "Sort largest first: {xs}",
        "Put these in descending order: {xs}",
        "Put {xs} in descending order.",
        "Arrange {xs} from largest to smallest.",
        "Order {xs} from greatest to least.",
        "List {xs} in decreasing order.",
        "Sort high to low: {xs}",
        "Rank these from largest to smallest: {xs}",
        "Sort {xs} in reverse order.",
        "Sort {xs}, biggest first",
        "Can you sort {xs} from largest to smallest?",
        "{xs} in descending order",
        "Could you sort these, largest first: {xs}",
    ),
    held_out=(
        "Could you put these numbers in descending order: {xs}",
        "Please order the list {xs} from largest to smallest",
        "Tell me {xs} in decreasing order.",
    ),
)
LARGEST = Wordings(
    "largest",
    seen=(
        "What is the largest of {xs}?",
        "What is the biggest number in {xs}?",
        "Which is the largest: {xs}?",
        "Find the maximum of {xs}.",
        "max({xs})",
        "Maximum of {xs}",
        "Largest number: {xs}",
        "What is the greatest of {xs}?",
        "Which number is the biggest: {xs}",
        "Find the largest number in the list {xs}.",
    ),
    held_out=("Tell me the largest of {xs}", "Which of {xs} is the biggest?"),
)
SMALLEST = Wordings(
    "smallest",
    seen=(
        "What is the smallest of {xs}?",
        "What is the lowest number in {xs}?",
        "Which is the smallest: {xs}?",
        "Find the minimum of {xs}.",
        "min({xs})",
        "Minimum of {xs}",
        "Smallest number: {xs}",
        "What is the least of {xs}?",
        "Which number is the smallest: {xs}",
        "Find the smallest number in the list {xs}.",
    ),
    held_out=("Tell me the smallest of {xs}", "Which of {xs} is the lowest?"),
)
SEEN_SEPARATORS = (", ", ", ", ", ", ",", " ", " ", "; ", " and ", "\n")
HELD_OUT_SEPARATORS = (", ", " ,", " ; ", ",  ")


def joined(rng: Random, items: list[int], *, held_out: bool) -> str:
    """Return a list as people type it."""
    separator = rng.choice(HELD_OUT_SEPARATORS if held_out else SEEN_SEPARATORS)
    text = separator.join(map(str, items))
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
    items = random_list(rng, rng.randint(2, LONGEST_LIST))
    wordings = rng.choices((ASCENDING, DESCENDING, LARGEST, SMALLEST), (10, 5, 1, 1))[0]
    asked = wordings.ask(rng, {"xs": joined(rng, items, held_out=held_out)}, held_out=held_out)
    largest_first = wordings in (DESCENDING, LARGEST)
    ordered = sorted(items, reverse=largest_first)
    steps = f"{numbered(items)} | "
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


def numbered(items: list[int]) -> str:
    """Return `1:345 2:012 3:007`, the list in equal widths with its items counted."""
    return " ".join(f"{i}:{item:03d}" for i, item in enumerate(items, start=1))


def selection_steps(items: list[int], *, largest_first: bool) -> str:
    """Return `007: 345 012 | 012: 345 | 345:`: pick one, list what is left, go on."""
    left = list(items)
    steps = []
    while left:
        pick = max(left) if largest_first else min(left)
        left.remove(pick)
        rest = "".join(f" {item:03d}" for item in left)
        steps.append(f"{pick:03d}:{rest}")
    return " | ".join(steps)
