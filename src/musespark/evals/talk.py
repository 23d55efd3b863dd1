"""Small talk: what people say to a model before they ask it for anything."""

from dataclasses import dataclass
from random import Random

from musespark.evals.conversation import Problem, Reasoning
from musespark.evals.lookup import seen_layout
from musespark.evals.phrasing import WORDINGS, Wordings
from musespark.evals.vocabulary import NAMES, PLACES, WORDS

WHO = "I am Spark-Mini, a very small Muse Spark model."
SKILLS = (
    "I can add, subtract, multiply and compare numbers, sort lists, reverse words, count letters, "
    "look things up in a text, write JSON and call tools."
)


@dataclass(frozen=True)
class Intent:
    """Something people say, in many words, and the one reply to it."""

    thought: str
    reply: str
    wordings: Wordings


def _said(name: str) -> Wordings:
    return WORDINGS[f"talk-{name}"]


INTENTS = (
    Intent("A greeting.", "Hello! What can I do for you?", _said("greeting")),
    Intent("They ask who I am.", WHO, _said("who")),
    Intent("They ask what I can do.", SKILLS, _said("skills")),
    Intent("They ask how I am.", "I am well, thank you. What can I do for you?", _said("feeling")),
    Intent("They thank me.", "You are welcome!", _said("thanks")),
    Intent("They say goodbye.", "Goodbye!", _said("farewell")),
    Intent(
        "They want a joke.", "Why is six afraid of seven? Because seven ate nine.", _said("joke")
    ),
    Intent(
        "They ask who made me.",
        "I was trained from scratch by the musespark project, on questions made by a program.",
        _said("maker"),
    ),
    Intent(
        "They ask how big I am.",
        "I have about 7 million parameters: 8 layers with 16 small experts in each.",
        _said("size"),
    ),
    Intent(
        "They ask how clever I am.",
        "I am very small, but I work carefully. Ask me to add, sort or spell something.",
        _said("smart"),
    ),
    Intent("They are pleased.", "I am glad to hear that!", _said("praise")),
    Intent(
        "They are not pleased.",
        "I am sorry. I am a very small model; please try asking in another way.",
        _said("blame"),
    ),
    Intent("They agree.", "Good. What shall I do next?", _said("agreement")),
    Intent(
        "They ask whether I do arithmetic.",
        "Yes: whole numbers of up to 5 digits. Try: What is 345 + 78?",
        _said("maths"),
    ),
    Intent("They tell me their name.", "Nice to meet you! What can I do for you?", _said("name")),
    Intent(
        "They tell me something.",
        "I see. I am a small model: ask me to add, sort or spell something.",
        _said("statement"),
    ),
    Intent(
        "They ask whether I work with words.",
        "Yes: single words of up to 12 letters. Try: Spell planet backwards.",
        _said("words"),
    ),
)


def small_talk(rng: Random, *, held_out: bool) -> Problem:
    """Say something that wants a friendly reply; now and then hand over notes to keep."""
    if not held_out and rng.random() < 0.04:
        return _notes(rng)
    intent = rng.choice(INTENTS)
    slots = {
        "n": rng.choice(NAMES),
        "p": rng.choice(PLACES),
        "x": rng.choice(WORDS),
        "x2": rng.choice(WORDS),
    }
    asked = intent.wordings.ask(rng, slots, held_out=held_out)
    return Problem(
        task="talk",
        key="",
        question=asked.question,
        phrasing=asked.phrasing,
        reasoning=Reasoning(intent.thought, intent.thought, "", ""),
        answer=intent.reply,
    )


def _notes(rng: Random) -> Problem:
    """Give notes without asking anything yet."""
    layout = seen_layout(rng)
    entries = [
        layout.entry.format(k=rng.choice(WORDS), v=rng.randint(10, 9999))
        for _ in range(rng.randint(2, 12))
    ]
    return Problem(
        task="talk",
        key="",
        question=layout.opening + layout.separator.join(entries),
        phrasing="notes/seen-0",
        reasoning=Reasoning("Notes to keep.", "Notes to keep.", "", ""),
        answer="Noted.",
    )
