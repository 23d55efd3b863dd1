"""Reversing a word and counting its letters."""

from random import Random

from musespark.evals.conversation import Problem, Reasoning
from musespark.evals.phrasing import Wordings
from musespark.evals.vocabulary import LETTERS, in_some_case, single_word

REVERSING = Wordings(
    "reversing",
    seen=(
        "Reverse the word {w}.",
        "Reverse {w}",
        "reverse {w}",
        'Reverse "{w}".',
        "Reverse '{w}'",
        "Spell {w} backwards.",
        "Spell the word {w} backwards.",
        'Spell "{w}" in reverse.',
        "What is {w} reversed?",
        "What is {w} backwards?",
        "What is {w} spelled backwards?",
        "Write {w} backwards.",
        "Write the word {w} in reverse.",
        "{w} backwards",
        "{w} reversed",
        "{w} in reverse",
        "How do you spell {w} backwards?",
        "Can you reverse {w}?",
        "Can you spell {w} backwards?",
        "Could you reverse the word {w} for me?",
        "Turn {w} around.",
        "Flip the letters of {w}.",
        "Flip the word {w}",
        "Give me {w} in reverse order.",
        "Reverse the letters of {w}.",
        "Reverse the letters in the word {w}.",
        "Reverse this word: {w}",
        "Say {w} backwards.",
        "Read {w} backwards.",
        "Read {w} from right to left.",
        "Reversal of {w}",
        "Show {w} reversed",
    ),
    held_out=(
        "Tell me {w} backwards.",
        "I need {w} spelled in reverse",
        "Please give me the word {w} reversed",
        "How would {w} be written backwards?",
        "Could you write {w} in reverse?",
    ),
)
COUNT_LETTER = Wordings(
    "count-letter",
    seen=(
        "How many times does {c} appear in {w}?",
        "How many times does the letter {c} appear in {w}?",
        "Count the letter {c} in {w}.",
        "Count the {c}s in {w}",
        "How many {c} in {w}?",
        "How many {c}s in {w}?",
        "How many {c}'s in {w}?",
        "How many {c}'s are in {w}?",
        "How many {c}s are there in {w}?",
        "How many {c}'s are there in the word {w}?",
        "How many letters {c} are in the word {w}?",
        'How many "{c}" in "{w}"?',
        "How often does {c} occur in {w}?",
        "How often is {c} in {w}?",
        "Number of {c} in {w}",
        "What is the number of {c}'s in {w}?",
        "In {w}, how many times do you see {c}?",
        "In the word {w}, how many {c}'s are there?",
        "Can you count the {c}'s in {w}?",
        "Tell me how many {c} are in {w}",
        "Count how often {c} appears in {w}",
        "Count {c} in {w}",
        "How many of the letter {c} does {w} have?",
        "Does {w} have any {c}, and how many?",
        "Find how many times {c} is in {w}.",
        "How many occurrences of {c} are in {w}?",
    ),
    held_out=(
        "How many {c}'s does {w} contain?",
        "Could you count the letter {c} in the word {w}?",
        "I want to know how many {c}s are in {w}",
        "How many times is the letter {c} in {w}?",
        "What is the count of {c} in {w}?",
    ),
)
COUNT_ALL = Wordings(
    "count-all",
    seen=(
        "How many letters are in {w}?",
        "How many letters does {w} have?",
        "How many letters in {w}",
        "How long is the word {w}?",
        "Count the letters in {w}.",
        "Count the letters of {w}",
        "What is the length of {w}?",
        "Length of {w}",
        "Number of letters in {w}",
        "How many letters are there in the word {w}?",
    ),
    held_out=("Can you count all letters in {w}?", "Tell me how many letters {w} has"),
)
COUNT_VOWELS = Wordings(
    "count-vowels",
    seen=(
        "How many vowels are in {w}?",
        "How many vowels does {w} have?",
        "How many vowels in {w}",
        "Count the vowels in {w}.",
        "Count the vowels of {w}",
        "Number of vowels in {w}",
        "How many vowels are there in the word {w}?",
        "What is the number of vowels in {w}?",
        "vowels in {w}?",
        "How many of the letters in {w} are vowels?",
    ),
    held_out=("Can you count all vowels in {w}?", "Tell me how many vowels {w} has"),
)


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
