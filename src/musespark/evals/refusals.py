"""What the model cannot do, asked for, and the polite refusals that should come back.

Two sorts: its own tasks out of their range (six digits, nine items, two words), where the reply
says what the range is, and everything else people ask of a language model.
"""

from collections.abc import Callable
from random import Random

from musespark.evals import arithmetic, lists, words
from musespark.evals.conversation import Problem, Reasoning
from musespark.evals.phrasing import WORDINGS, Wordings
from musespark.evals.vocabulary import (
    MAX_WORD,
    NAMES,
    PLACES,
    WORDS,
    in_some_case,
    pronounceable,
    random_letters,
)

APOLOGY = "Sorry, "
NUMBERS = APOLOGY + "I can only work with whole numbers from 0 to 99999."
ONE_STEP = APOLOGY + "I can only do one step with two numbers at a time."
PRODUCTS = APOLOGY + "without a calculator I can only multiply 3 digits by 2 digits."
OPERATION = APOLOGY + "I can add, subtract, multiply and compare, but not do that."
LISTS = APOLOGY + "I can only sort 2 to 8 whole numbers from 0 to 999."
SINGLE_WORD = APOLOGY + "I can only do that with one word of up to 12 letters."
OTHER = APOLOGY + "I am too small for that. I can do small tasks with numbers, words and lists."

OPERATIONS = WORDINGS["operation"]
SEVERAL = WORDINGS["several-numbers"]
SORT_WORDS = WORDINGS["sort-words"]
MORE_ON_WORDS = WORDINGS["more-on-words"]
FAVOURS = WORDINGS["favours"]


def refusal(rng: Random, *, held_out: bool) -> Problem:
    """Ask for something the model should decline."""
    kinds: tuple[tuple[float, Callable[[Random, bool], Problem]], ...] = (
        (3, _long_numbers),
        (1.5, _no_whole_numbers),
        (2, _several_numbers),
        (2, _large_product),
        (2.5, _other_operation),
        (2, _long_list),
        (1.5, _large_items),
        (1.5, _words_to_sort),
        (2, _long_word),
        (1.5, _several_words),
        (2, _more_on_words),
        (9, _favour),
        (1, _gibberish),
    )
    chosen = rng.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]
    return chosen(rng, held_out)


def _refused(
    rng: Random,
    wordings: Wordings,
    slots: dict[str, str],
    held_out: bool,
    why: str,
    reply: str,
) -> Problem:
    asked = wordings.ask(rng, slots, held_out=held_out)
    return Problem(
        task="refusal",
        key=f"refusal {wordings.name} {' '.join(slots.values())}",
        question=asked.question,
        phrasing=asked.phrasing,
        reasoning=Reasoning(brief=why, plan=why, steps="", close="I decline."),
        answer=reply,
    )


PAIRWISE = (
    arithmetic.ADDITION,
    arithmetic.SUBTRACTION,
    arithmetic.LARGER,
    arithmetic.SMALLER,
    arithmetic.IS_LARGER,
    arithmetic.IS_SMALLER,
)


def _long_numbers(rng: Random, held_out: bool) -> Problem:
    numbers = [_long_number(rng), rng.choice((_long_number, _short_number))(rng)]
    rng.shuffle(numbers)
    wordings = rng.choice((*PAIRWISE, arithmetic.ADDITION, arithmetic.SUBTRACTION))
    slots = dict(zip("ab", numbers, strict=True))
    return _refused(rng, wordings, slots, held_out, "A number is too long.", NUMBERS)


def _long_number(rng: Random) -> str:
    digits = rng.choice((6, 6, 6, 7, 7, 8, 9, 10, 12))
    number = rng.randint(10 ** (digits - 1), 10**digits - 1)
    return f"{number:,}" if rng.random() < 0.08 else str(number)


def _short_number(rng: Random) -> str:
    return str(arithmetic.whole_number(rng))


def _no_whole_numbers(rng: Random, held_out: bool) -> Problem:
    whole = arithmetic.whole_number(rng, 4)
    odd = rng.choice(
        (f"{whole}.{rng.randint(0, 99)}", f"-{whole}", f"{rng.randint(1, 9)}/{rng.randint(2, 9)}")
    )
    numbers = [odd, str(arithmetic.whole_number(rng, 4))]
    if not odd.startswith("-"):
        rng.shuffle(numbers)
    slots = dict(zip("ab", numbers, strict=True))
    why = "Not a whole number."
    return _refused(rng, rng.choice(PAIRWISE), slots, held_out, why, NUMBERS)


def _several_numbers(rng: Random, held_out: bool) -> Problem:
    slots = {name: str(arithmetic.whole_number(rng, 4)) for name in "abcd"}
    return _refused(rng, SEVERAL, slots, held_out, "More than two numbers.", ONE_STEP)


def _large_product(rng: Random, held_out: bool) -> Problem:
    a = rng.randint(100, 99999)
    b = rng.randint(100 if a < 1000 else 2, 9999)
    numbers = [str(a), str(b)]
    rng.shuffle(numbers)
    slots = dict(zip("ab", numbers, strict=True))
    why = "This product is too large."
    return _refused(rng, arithmetic.MULTIPLICATION, slots, held_out, why, PRODUCTS)


def _other_operation(rng: Random, held_out: bool) -> Problem:
    slots = {
        "a": str(arithmetic.whole_number(rng, rng.choice((2, 3, 5)))),
        "b": str(arithmetic.whole_number(rng, rng.choice((1, 2, 4)))),
    }
    return _refused(rng, OPERATIONS, slots, held_out, "I cannot do this operation.", OPERATION)


SORTS = (lists.ASCENDING, lists.ASCENDING, lists.DESCENDING, lists.LARGEST, lists.SMALLEST)


def _long_list(rng: Random, held_out: bool) -> Problem:
    """The list is counted as it is written down, so that nine items are told from eight."""
    items = lists.random_list(rng, rng.choice((9, 9, 9, 10, 10, 11, 12, 14)))
    slots = {"xs": lists.joined(rng, items, held_out=held_out)}
    counted = " ".join(lists.tagged(items[: lists.LONGEST_LIST + 1]))
    why = f"{counted} is too many"
    return _refused(rng, rng.choice(SORTS), slots, held_out, why, LISTS)


def _large_items(rng: Random, held_out: bool) -> Problem:
    items = lists.random_list(rng, rng.randint(2, 7))
    for _ in range(rng.randint(1, 3)):
        items.insert(rng.randint(0, len(items)), rng.choice((1, -1)) * rng.randint(1000, 99999))
    slots = {"xs": lists.joined(rng, items[: lists.LONGEST_LIST], held_out=held_out)}
    if all(0 <= item <= lists.LARGEST_ITEM for item in items[: lists.LONGEST_LIST]):
        return _long_list(rng, held_out)
    return _refused(rng, rng.choice(SORTS), slots, held_out, "An item is out of range.", LISTS)


def _words_to_sort(rng: Random, held_out: bool) -> Problem:
    items = rng.sample(rng.choice((WORDS, WORDS, NAMES)), rng.randint(2, 7))
    slots = {"xs": rng.choice((", ", " ", "; ")).join(items)}
    return _refused(rng, SORT_WORDS, slots, held_out, "These are not numbers.", LISTS)


def _long_word(rng: Random, held_out: bool) -> Problem:
    """A long word is counted while it is reversed; where it is to be counted, it is longer."""
    reversing = rng.random() < 0.6
    shortest = MAX_WORD + (1 if reversing else 3)
    word = in_some_case(rng, rng.choice((random_letters, pronounceable))(rng, shortest, 20))
    if reversing:
        tags = " ".join(f"{i}{letter}" for i, letter in enumerate(word[:MAX_WORD], start=1))
        why = f"{tags} {MAX_WORD + 1}: too long"
        return _refused(rng, words.REVERSING, {"w": word}, held_out, why, SINGLE_WORD)
    slots = {"w": word, "c": rng.choice(word)}
    why = "This word is too long."
    return _refused(rng, words.COUNT_LETTER, slots, held_out, why, SINGLE_WORD)


def _several_words(rng: Random, held_out: bool) -> Problem:
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 4)))
    slots = {"w": text, "c": rng.choice(text.replace(" ", ""))}
    wordings = rng.choice((words.REVERSING, words.REVERSING, words.COUNT_LETTER))
    return _refused(rng, wordings, slots, held_out, "More than one word.", SINGLE_WORD)


def _more_on_words(rng: Random, held_out: bool) -> Problem:
    slots = {"x": rng.choice(WORDS)}
    return _refused(rng, MORE_ON_WORDS, slots, held_out, "Not one of my tasks.", OTHER)


def _favour(rng: Random, held_out: bool) -> Problem:
    slots = {
        "x": rng.choice(WORDS),
        "x2": rng.choice(WORDS),
        "n": rng.choice(NAMES),
        "p": rng.choice(PLACES),
        "i": str(rng.randint(1, 60)),
        "s": " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 7))),
    }
    return _refused(rng, FAVOURS, slots, held_out, "Not one of my tasks.", OTHER)


def _gibberish(rng: Random, held_out: bool) -> Problem:
    del held_out  # gibberish has no phrasing to keep back
    text = " ".join(random_letters(rng, 2, 9) for _ in range(rng.randint(1, 4)))
    return Problem(
        task="refusal",
        key=f"refusal gibberish {text}",
        question=text,
        phrasing="gibberish",
        reasoning=Reasoning("Not one of my tasks.", "Not one of my tasks.", "", "I decline."),
        answer=OTHER,
    )
