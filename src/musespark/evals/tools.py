"""Calling one of a few tools with ATEM bodies, and using what it returns."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from musespark.evals.arithmetic import MULTIPLICATION, whole_number
from musespark.evals.conversation import (
    Json,
    Parameter,
    Problem,
    Reasoning,
    Tool,
    ToolCall,
    ToolUse,
)
from musespark.evals.phrasing import Wordings
from musespark.evals.vocabulary import NAMES, PLACES, WORDS, pronounceable


@dataclass(frozen=True)
class Use:
    """One occasion to call a tool: the words of the question, the arguments, the result."""

    slots: Mapping[str, str]
    arguments: tuple[Json, ...]
    result: str


@dataclass(frozen=True)
class Skill:
    """A kind of tool, the names it goes by, and what people ask it for.

    `parameters` holds alternative spellings of the parameter list, one of which is chosen for a
    conversation; the arguments of a `Use` come in that order.
    """

    names: tuple[str, ...]
    held_out_names: tuple[str, ...]
    description: str
    parameters: tuple[tuple[Parameter, ...], ...]
    wordings: Wordings
    use: Callable[[Random], Use]


def _integers(*names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, "integer") for name in names)


def _strings(*names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, "string") for name in names)


def _product(rng: Random) -> Use:
    a, b = whole_number(rng, 4), whole_number(rng, 4)
    return Use({"a": str(a), "b": str(b)}, (a, b), str(a * b))


def _quotient(rng: Random) -> Use:
    b, quotient = rng.randint(2, 99), whole_number(rng, 3)
    return Use({"a": str(b * quotient), "b": str(b)}, (b * quotient, b), str(quotient))


def _about(options: tuple[str, ...], result: Callable[[Random], str]) -> Callable[[Random], Use]:
    def use(rng: Random) -> Use:
        subject = rng.choice(options)
        return Use({"x": subject}, (subject,), result(rng))

    return use


def _weather(rng: Random) -> str:
    sky = rng.choice(("sunny", "cloudy", "rain", "snow", "windy", "fog", "clear", "storm"))
    return f"{rng.randint(-9, 38)} C, {sky}"


def _clock(rng: Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"


def _digits(rng: Random) -> str:
    return f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"


def _two_words(rng: Random) -> str:
    return f"{rng.choice(WORDS)} {rng.choice(WORDS)}"


def _foreign(rng: Random) -> Use:
    word = rng.choice(WORDS)
    language = rng.choice(("French", "German", "Spanish", "Italian", "Dutch", "Polish", "Latin"))
    return Use({"x": word, "y": language}, (word, language), pronounceable(rng, 3, 9))


def _reminder(rng: Random) -> Use:
    day = rng.choice(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"))
    return Use({"x": day}, (day,), f"{rng.randint(0, 9)} events")


SKILLS = (
    Skill(
        names=("calculator.multiply", "multiply", "math.multiply", "calc.mul", "times"),
        held_out_names=("arithmetic.multiply", "multiply_numbers"),
        description="Multiply two numbers.",
        parameters=(_integers("a", "b"), _integers("x", "y"), _integers("first", "second")),
        wordings=MULTIPLICATION,
        use=_product,
    ),
    Skill(
        names=("calculator.divide", "divide", "math.divide", "calc.div"),
        held_out_names=("arithmetic.divide", "divide_numbers"),
        description="Divide two numbers.",
        parameters=(_integers("a", "b"), _integers("x", "y"), _integers("first", "second")),
        wordings=Wordings(
            "division",
            seen=(
                "What is {a} / {b}?",
                "{a} / {b}",
                "{a}/{b}",
                "{a} \u00f7 {b}",
                "{a} : {b}",
                "What is {a} divided by {b}?",
                "Divide {a} by {b}.",
                "Calculate {a} / {b}.",
                "{a} divided by {b}",
                "How much is {a} / {b}?",
                "Share {a} sweets among {b} children. How many does each get?",
                "How many times does {b} go into {a}?",
            ),
            held_out=("Could you work out {a} divided by {b}?", "I need {a} / {b}"),
        ),
        use=_quotient,
    ),
    Skill(
        names=("weather.get", "get_weather", "weather", "forecast.today", "weather.now"),
        held_out_names=("weather.lookup", "current_weather"),
        description="Get the weather in a city.",
        parameters=(_strings("city"), _strings("place"), _strings("location")),
        wordings=Wordings(
            "weather",
            seen=(
                "What is the weather in {x}?",
                "What's the weather like in {x}?",
                "How is the weather in {x}?",
                "Weather in {x}",
                "weather {x}",
                "Is it raining in {x}?",
                "Tell me the weather in {x}",
                "Do I need a coat in {x}?",
                "How warm is it in {x}?",
                "Get the weather for {x}.",
                "Is it sunny in {x} today?",
                "What is the temperature in {x}?",
            ),
            held_out=("Could you check the weather in {x}?", "How cold is it in {x} today?"),
        ),
        use=_about(PLACES, _weather),
    ),
    Skill(
        names=("clock.time", "get_time", "time.now", "world_clock", "clock.now"),
        held_out_names=("time.lookup", "local_time"),
        description="Get the time in a city.",
        parameters=(_strings("city"), _strings("place"), _strings("location")),
        wordings=Wordings(
            "time",
            seen=(
                "What time is it in {x}?",
                "What is the time in {x}?",
                "Time in {x}",
                "time {x}",
                "Tell me the time in {x}.",
                "How late is it in {x}?",
                "Get the time for {x}.",
                "What time is it now in {x}?",
                "Is it night in {x}? What time is it?",
                "Local time in {x}?",
            ),
            held_out=("Could you check the time in {x}?", "Do you know what time it is in {x}?"),
        ),
        use=_about(PLACES, _clock),
    ),
    Skill(
        names=("phonebook.find", "find_number", "contacts.phone", "phone_lookup"),
        held_out_names=("contacts.lookup", "get_phone_number"),
        description="Find a phone number.",
        parameters=(_strings("name"), _strings("person"), _strings("who")),
        wordings=Wordings(
            "phone",
            seen=(
                "What is the phone number of {x}?",
                "What is {x}'s phone number?",
                "Phone number of {x}",
                "Find {x}'s number.",
                "How can I call {x}?",
                "Look up the phone number of {x}",
                "Give me the number of {x}.",
                "I want to call {x}",
                "Number for {x}?",
                "Do you have {x}'s phone number?",
            ),
            held_out=("Could you find the phone number of {x}?", "I need to call {x}"),
        ),
        use=_about(NAMES, _digits),
    ),
    Skill(
        names=("stock.count", "inventory.check", "count_stock", "warehouse.count"),
        held_out_names=("inventory.lookup", "check_stock"),
        description="Count an item in stock.",
        parameters=(_strings("item"), _strings("product"), _strings("name")),
        wordings=Wordings(
            "stock",
            seen=(
                "How many {x} are in stock?",
                "Do we have {x} in stock?",
                "Stock of {x}",
                "Check the stock of {x}.",
                "How much {x} do we have?",
                "Is {x} in stock?",
                "Count the {x} in stock",
                "How many {x} are left in the store?",
                "Inventory of {x}",
                "Look up the stock of {x}",
            ),
            held_out=("Could you check if we have {x} in stock?", "How many {x} do we have?"),
        ),
        use=_about(WORDS, lambda rng: str(rng.randint(0, 999))),
    ),
    Skill(
        names=("dictionary.define", "define", "get_definition", "dictionary.find"),
        held_out_names=("dictionary.lookup", "define_word"),
        description="Define a word.",
        parameters=(_strings("word"), _strings("term"), _strings("text")),
        wordings=Wordings(
            "definition",
            seen=(
                "What does {x} mean?",
                "What does the word {x} mean?",
                "Define {x}.",
                "Definition of {x}",
                "What is the meaning of {x}?",
                "Meaning of {x}?",
                "Explain the word {x}.",
                "Look up {x} in the dictionary.",
                "Give me a definition of {x}",
                "Can you define {x}?",
            ),
            held_out=("Could you tell me what {x} means?", "I need the definition of {x}"),
        ),
        use=_about(WORDS, _two_words),
    ),
    Skill(
        names=("translate.word", "translate", "translator.run", "languages.translate"),
        held_out_names=("translation.lookup", "translate_word"),
        description="Translate a word.",
        parameters=(_strings("word", "language"), _strings("text", "to"), _strings("text", "into")),
        wordings=Wordings(
            "translation",
            seen=(
                "Translate {x} to {y}.",
                "Translate {x} into {y}.",
                "Translate the word {x} to {y}",
                "What is {x} in {y}?",
                "How do you say {x} in {y}?",
                "{x} in {y}",
                "{y} for {x}?",
                "What is the {y} word for {x}?",
                "Say {x} in {y}.",
                "Give me {x} in {y}",
            ),
            held_out=("Could you translate {x} into {y}?", "I need the {y} word for {x}"),
        ),
        use=_foreign,
    ),
    Skill(
        names=("calendar.events", "get_events", "agenda.day", "calendar.count"),
        held_out_names=("calendar.lookup", "check_calendar"),
        description="Count the events of a day.",
        parameters=(_strings("day"), _strings("date"), _strings("when")),
        wordings=Wordings(
            "events",
            seen=(
                "What is on my calendar on {x}?",
                "Do I have anything on {x}?",
                "Am I busy on {x}?",
                "How many events do I have on {x}?",
                "Check my calendar for {x}.",
                "Events on {x}",
                "Am I free on {x}?",
                "How busy is {x}?",
                "What do I have planned on {x}?",
                "My agenda for {x}",
            ),
            held_out=("Could you check my calendar for {x}?", "Is there anything on {x}?"),
        ),
        use=_reminder,
    ),
)
MULTIPLYING = SKILLS[0]
UNRELATED_TO_REFUSALS = frozenset({"stock", "events"})
"""Skills, by the name of their wordings, that no question to be refused could be put to."""


def tool_calling(rng: Random, *, held_out: bool) -> Problem:
    """Ask for something that one of one to four tools on offer can do."""
    weights = [3.0 if skill is MULTIPLYING else 1.0 for skill in SKILLS]
    skill = rng.choices(SKILLS, weights)[0]
    tool = _tool(rng, skill, held_out=held_out)
    others = [s for s in SKILLS if s is not skill]
    offered = [tool, *(_tool(rng, s, held_out=held_out) for s in _some(rng, others))]
    rng.shuffle(offered)
    use = skill.use(rng)
    arguments = dict(zip((p.name for p in tool.parameters), use.arguments, strict=True))
    asked = skill.wordings.ask(rng, use.slots, held_out=held_out)
    listed = " ".join(f"{name}={value}" for name, value in arguments.items())
    return Problem(
        task="tools",
        key=f"tools {skill.description} {' '.join(map(str, use.arguments))} {use.result}",
        question=asked.question,
        phrasing=asked.phrasing,
        reasoning=Reasoning(
            brief=f"{tool.name} {listed}",
            plan="A tool can do this.",
            steps=f"{tool.name} {listed}",
            close="I call it.",
        ),
        answer=use.result,
        tool_use=ToolUse(
            ToolCall(tool.name, arguments), _reported(rng, use.result), tuple(offered)
        ),
    )


def unneeded_tools(rng: Random, task: str) -> tuple[Tool, ...]:
    """Return one to three tools that are no use for a question of the given task."""
    if task == "refusal":
        skills = [s for s in SKILLS if s.wordings.name in UNRELATED_TO_REFUSALS]
    else:
        skills = [s for s in SKILLS if s.wordings.name != task]
    count = rng.randint(1, min(3, len(skills)))
    return tuple(_tool(rng, skill, held_out=False) for skill in rng.sample(skills, count))


def _some(rng: Random, skills: list[Skill]) -> list[Skill]:
    return rng.sample(skills, rng.choices((0, 1, 2, 3), (3, 3, 2, 1))[0])


def _tool(rng: Random, skill: Skill, *, held_out: bool) -> Tool:
    name = rng.choice(skill.held_out_names if held_out else skill.names)
    return Tool(name, skill.description, rng.choice(skill.parameters))


def _reported(rng: Random, result: str) -> str:
    """Return a result as tools give it: bare, or as JSON with one key."""
    if rng.random() < 0.6:
        return result
    value: Json = int(result) if result.isdigit() and str(int(result)) == result else result
    return json.dumps({rng.choice(("result", "value", "answer", "output")): value})
