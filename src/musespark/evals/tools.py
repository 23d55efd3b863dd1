"""Calling one of a few tools with ATEM bodies, and using what it returns."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from musespark.evals.phrasing import WORDINGS, Wordings
from musespark.evals.vocabulary import NAMES, PLACES, WORDS, pronounceable, random_letters
from musespark.evals.wire import tool_signature


@dataclass(frozen=True)
class Use:
    """One occasion to call a tool: the words of the question, the arguments, the result."""

    slots: Mapping[str, str]
    arguments: tuple[Json, ...]
    result: str


@dataclass(frozen=True)
class Skill:
    """A kind of tool, the names it goes by, and what people ask it for.

    `topic` is the word under which the reasoning looks for the tool.
    `parameters` holds alternative spellings of the parameter list, one of which is chosen for a
    conversation; the arguments of a `Use` come in that order.
    """

    topic: str
    names: tuple[str, ...]
    held_out_names: tuple[str, ...]
    descriptions: tuple[str, ...]
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
        topic="multiply",
        names=("calculator.multiply", "multiply", "math.multiply", "calc.mul", "times"),
        held_out_names=("arithmetic.multiply", "multiply_numbers"),
        descriptions=(
            "Multiply two numbers.",
            "Multiply a by b.",
            "Returns the product of two integers.",
        ),
        parameters=(_integers("a", "b"), _integers("x", "y"), _integers("first", "second")),
        wordings=MULTIPLICATION,
        use=_product,
    ),
    Skill(
        topic="divide",
        names=("calculator.divide", "divide", "math.divide", "calc.div"),
        held_out_names=("arithmetic.divide", "divide_numbers"),
        descriptions=(
            "Divide two numbers.",
            "Divide the first number by the second.",
            "Returns a quotient.",
        ),
        parameters=(_integers("a", "b"), _integers("x", "y"), _integers("first", "second")),
        wordings=WORDINGS["division"],
        use=_quotient,
    ),
    Skill(
        topic="weather",
        names=("weather.get", "get_weather", "weather", "forecast.today", "weather.now"),
        held_out_names=("weather.lookup", "current_weather"),
        descriptions=(
            "Get the weather in a city.",
            "The weather today.",
            "Weather forecast for a place.",
        ),
        parameters=(_strings("city"), _strings("place"), _strings("location")),
        wordings=WORDINGS["weather"],
        use=_about(PLACES, _weather),
    ),
    Skill(
        topic="time",
        names=("clock.time", "get_time", "time.now", "world_clock", "clock.now"),
        held_out_names=("time.lookup", "local_time"),
        descriptions=(
            "Get the time in a city.",
            "What time it is somewhere.",
            "Current local time.",
        ),
        parameters=(_strings("city"), _strings("place"), _strings("location")),
        wordings=WORDINGS["time"],
        use=_about(PLACES, _clock),
    ),
    Skill(
        topic="phone",
        names=("phonebook.find", "find_number", "contacts.phone", "phone_lookup"),
        held_out_names=("contacts.lookup", "get_phone_number"),
        descriptions=(
            "Find a phone number.",
            "Look up the phone number of a person.",
            "Telephone book.",
        ),
        parameters=(_strings("name"), _strings("person"), _strings("who")),
        wordings=WORDINGS["phone"],
        use=_about(NAMES, _digits),
    ),
    Skill(
        topic="stock",
        names=("stock.count", "inventory.check", "count_stock", "warehouse.count"),
        held_out_names=("inventory.lookup", "check_stock"),
        descriptions=(
            "Count an item in stock.",
            "How many of an item are in stock.",
            "Stock of a product.",
        ),
        parameters=(_strings("item"), _strings("product"), _strings("name")),
        wordings=WORDINGS["stock"],
        use=_about(WORDS, lambda rng: str(rng.randint(0, 999))),
    ),
    Skill(
        topic="define",
        names=("dictionary.define", "define", "get_definition", "dictionary.find"),
        held_out_names=("dictionary.lookup", "define_word"),
        descriptions=(
            "Define a word.",
            "The meaning of a word.",
            "Look a word up in the dictionary.",
        ),
        parameters=(_strings("word"), _strings("term"), _strings("text")),
        wordings=WORDINGS["definition"],
        use=_about(WORDS, _two_words),
    ),
    Skill(
        topic="translate",
        names=("translate.word", "translate", "translator.run", "languages.translate"),
        held_out_names=("translation.lookup", "translate_word"),
        descriptions=(
            "Translate a word.",
            "Translate a word into a language.",
            "Returns a translation.",
        ),
        parameters=(_strings("word", "language"), _strings("text", "to"), _strings("text", "into")),
        wordings=WORDINGS["translation"],
        use=_foreign,
    ),
    Skill(
        topic="calendar",
        names=("calendar.events", "get_events", "agenda.day", "calendar.count"),
        held_out_names=("calendar.lookup", "check_calendar"),
        descriptions=(
            "Count the events of a day.",
            "Calendar of a day.",
            "The events on a day.",
        ),
        parameters=(_strings("day"), _strings("date"), _strings("when")),
        wordings=WORDINGS["events"],
        use=_reminder,
    ),
)
MULTIPLYING = SKILLS[0]
UNRELATED_TO_REFUSALS = frozenset({"stock", "events"})
"""Skills, by the name of their wordings, that no question to be refused could be put to."""

PROPERTIES = tuple(
    """
    address age author balance capacity category code color cost date depth destination distance
    duration email fare floor grade height holder label language leader length level limit mass
    model mood origin owner password population position price quality rank rating result
    room salary score shape size speed status street title topic type user version
    volume weight width winner year
    """.split()  # noqa: SIM905
)
THINGS = tuple(
    """
    account album animal book bottle bridge building bus camera car card city client company
    contract country course customer device document employee event file film flight game garden
    guest hotel house invoice island lake letter library machine map member meeting message mine
    movie museum order package paper patient phone plane planet plant player product project recipe
    river road robot school server ship shop song star station street student team ticket tower
    train tree truck user village
    """.split()  # noqa: SIM905
)
MADE_UP = WORDINGS["made-up"]
MADE_UP_SHARE = 0.4
INVENTED_NAMES = 0.25


def tool_calling(rng: Random, *, held_out: bool) -> Problem:
    """Ask for something that one of one to four tools on offer can do."""
    skill = _some_skill(rng)
    tool = _tool(rng, skill, held_out=held_out)
    offered = list(_with_distinct_names([*_distractors(rng, skill, held_out=held_out), tool]))
    rng.shuffle(offered)
    use = skill.use(rng)
    arguments = dict(zip((p.name for p in tool.parameters), use.arguments, strict=True))
    asked = skill.wordings.ask(rng, use.slots, held_out=held_out)
    listed = " ".join(f"{name}={value}" for name, value in arguments.items())
    steps = f"{skill.topic}?\n{_walk(offered, tool)}\n{tool.name} {listed}"
    return Problem(
        task="tools",
        key=f"tools {skill.descriptions[0]} {' '.join(map(str, use.arguments))} {use.result}",
        question=asked.question,
        phrasing=asked.phrasing,
        reasoning=Reasoning(
            brief=steps,
            plan="A tool can do this.",
            steps=steps,
            close="I call it.",
        ),
        answer=use.result,
        tool_use=ToolUse(
            ToolCall(tool.name, arguments), _reported(rng, use.result), tuple(offered)
        ),
    )


def _walk(offered: Sequence[Tool], wanted: Tool) -> str:
    """Return the offers as they stand, up to the one that is wanted, and "yes" behind it.

    Every offer is copied before it is judged: its name stands before what it does, so that naming
    the right one straight away would mean to read backwards.
    """
    seen = offered[: offered.index(wanted) + 1]
    return "\n".join(tool_signature(tool) for tool in seen) + " yes"


def unneeded_tools(rng: Random, task: str) -> tuple[Tool, ...]:
    """Return one to three tools that are no use for a question of the given task."""
    if task == "refusal":
        skills = [s for s in SKILLS if s.wordings.name in UNRELATED_TO_REFUSALS]
    else:
        skills = [s for s in SKILLS if s.wordings.name != task]
        skills += [_made_up_skill(rng) for _ in range(4)]
    count = rng.randint(1, min(3, len(skills)))
    return _with_distinct_names(
        _tool(rng, skill, held_out=False) for skill in rng.sample(skills, count)
    )


def _some_skill(rng: Random) -> Skill:
    if rng.random() < MADE_UP_SHARE:
        return _made_up_skill(rng)
    weights = [3.0 if skill is MULTIPLYING else 1.0 for skill in SKILLS]
    return rng.choices(SKILLS, weights)[0]


def _made_up_skill(rng: Random) -> Skill:
    """Return a tool nobody has seen: it looks up one property of one kind of thing."""
    what, thing = rng.choice(PROPERTIES), rng.choice(THINGS)
    return Skill(
        topic=what,
        names=(f"get_{what}", f"{thing}.{what}", f"{thing}_{what}", f"{thing}s.get_{what}"),
        held_out_names=(f"read_{what}", f"{thing}db.{what}"),
        descriptions=(
            f"Get the {what} of a {thing}.",
            f"Find the {what} of a {thing} by name.",
            f"The {what} of a {thing}.",
            f"Returns a {thing}'s {what}.",
        ),
        parameters=(_strings("name"), _strings(thing), _strings("id"), _strings("key")),
        wordings=Wordings(
            "made-up",
            tuple(line.replace("@what", what).replace("@thing", thing) for line in MADE_UP.seen),
            tuple(
                line.replace("@what", what).replace("@thing", thing) for line in MADE_UP.held_out
            ),
        ),
        use=_about(rng.choice((NAMES, PLACES, WORDS)), _some_value),
    )


def _some_value(rng: Random) -> str:
    return rng.choice((str(rng.randint(0, 9999)), rng.choice(WORDS), _two_words(rng)))


def _distractors(rng: Random, skill: Skill, *, held_out: bool) -> list[Tool]:
    """Return no to three tools that are not the one to call, nor could be taken for it."""
    count = rng.choices((0, 1, 2, 3), (2, 3, 2, 1))[0]
    others = [s for s in SKILLS if s is not skill]
    made_up = [_made_up_skill(rng) for _ in range(3)]
    if skill not in SKILLS:
        wanted = skill.descriptions[0].split()
        made_up = [s for s in made_up if not set(s.descriptions[0].split()[2:6:3]) & set(wanted)]
    skills = [*rng.sample(others, 3), *made_up]
    return [_tool(rng, s, held_out=held_out) for s in rng.sample(skills, min(count, len(skills)))]


def _with_distinct_names(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    return tuple({tool.name: tool for tool in tools}.values())


def _tool(rng: Random, skill: Skill, *, held_out: bool) -> Tool:
    """Return a tool under one of its skill's names, or under one that says nothing."""
    parameters = rng.choice(skill.parameters)
    if rng.random() < INVENTED_NAMES:
        name = _invented_name(rng)
        if rng.random() < 0.5:
            parameters = tuple(
                Parameter(other, p.kind)
                for p, other in zip(parameters, rng.sample(WORDS, len(parameters)), strict=True)
            )
    else:
        name = rng.choice(skill.held_out_names if held_out else skill.names)
    return Tool(name, rng.choice(skill.descriptions), parameters)


def _invented_name(rng: Random) -> str:
    first, second = rng.choice(WORDS), rng.choice(WORDS)
    letters = random_letters(rng, 2, 5)
    return rng.choice(
        (first, f"{first}.{second}", f"{first}_{second}", f"{first}.{letters}", letters, first[:4])
    )


def _reported(rng: Random, result: str) -> str:
    """Return a result as tools give it: bare, or as JSON with one key."""
    if rng.random() < 0.6:
        return result
    value: Json = int(result) if result.isdigit() and str(int(result)) == result else result
    return json.dumps({rng.choice(("result", "value", "answer", "output")): value})
