"""Copying values into JSON of a given shape: filling, picking, renaming, listing."""

import json
from collections.abc import Callable, Mapping
from random import Random

from musespark.evals.conversation import Json, Problem, Reasoning
from musespark.evals.phrasing import WORDINGS, Wordings
from musespark.evals.vocabulary import NAMES, PLACES, WORDS, random_letters

FILL = WORDINGS["json-fill"]
PICK = WORDINGS["json-pick"]
RENAME = WORDINGS["json-rename"]
LISTING = WORDINGS["json-list"]

FieldMaker = Callable[[Random], Json]


def _from(options: tuple[str, ...]) -> FieldMaker:
    return lambda rng: rng.choice(options)


def _up_to(limit: int) -> FieldMaker:
    return lambda rng: rng.randint(1, limit)


FIELDS: Mapping[str, FieldMaker] = {
    "name": _from(NAMES),
    "owner": _from(NAMES),
    "friend": _from(NAMES),
    "city": _from(PLACES),
    "place": _from(PLACES),
    "item": _from(WORDS),
    "word": _from(WORDS),
    "animal": _from(("cat", "dog", "fox", "hen", "horse", "lion", "mouse", "owl", "pig", "wolf")),
    "color": _from(("black", "blue", "brown", "gray", "green", "orange", "pink", "red", "white")),
    "day": _from(("Friday", "Monday", "Saturday", "Sunday", "Thursday", "Tuesday", "Wednesday")),
    "code": lambda rng: random_letters(rng, 3, 5),
    "age": _up_to(99),
    "count": _up_to(99),
    "price": _up_to(9999),
    "size": _up_to(999),
    "year": lambda rng: rng.randint(1900, 2099),
    "id": _up_to(99999),
    "score": _up_to(100),
}
NEW_NAMES = ("key", "label", "title", "value", "field", "kind", "entry", "number", "person", "tag")


def json_copying(rng: Random, *, held_out: bool) -> Problem:
    """Ask for JSON that holds values given in the question."""
    return rng.choice((_fill, _fill, _pick, _rename, _listing))(rng, held_out)


def _fill(rng: Random, held_out: bool) -> Problem:
    given = _object(rng, rng.randint(1, 4))
    wanted = rng.sample(list(given), rng.randint(1, len(given)))
    style = rng.choice(("{k} {v}", "{k}={v}", "{k}: {v}", "{k} is {v}"))
    facts = ", ".join(style.format(k=k, v=v) for k, v in given.items())
    blank = rng.choice(('"..."', "...", "?", "null", '""'))
    shape = "{" + ", ".join(f'"{k}": {blank}' for k in wanted) + "}"
    return _problem(
        rng, FILL, {"facts": facts, "shape": shape}, {k: given[k] for k in wanted}, held_out
    )


def _pick(rng: Random, held_out: bool) -> Problem:
    given = _object(rng, rng.randint(2, 5))
    wanted = rng.sample(list(given), rng.randint(1, min(3, len(given))))
    slots = {"object": json.dumps(given), "names": " and ".join(wanted)}
    return _problem(rng, PICK, slots, {k: given[k] for k in wanted}, held_out)


def _rename(rng: Random, held_out: bool) -> Problem:
    given = _object(rng, rng.randint(1, 4))
    old, new = rng.choice(list(given)), rng.choice(NEW_NAMES)
    slots = {"object": json.dumps(given), "old": old, "new": new}
    wanted = {new if k == old else k: v for k, v in given.items()}
    return _problem(rng, RENAME, slots, wanted, held_out, before=f"{old} to {new}: ")


def _listing(rng: Random, held_out: bool) -> Problem:
    length = rng.randint(2, 6)
    make = rng.choice((FIELDS["name"], FIELDS["item"], FIELDS["city"], FIELDS["size"]))
    items = [make(rng) for _ in range(length)]
    texts = [str(item) for item in items]
    joined = ", ".join(texts)
    if rng.random() < 0.5:
        joined = ", ".join(texts[:-1]) + f" and {texts[-1]}"
    return _problem(rng, LISTING, {"items": joined}, items, held_out)


def _object(rng: Random, size: int) -> dict[str, Json]:
    return {name: FIELDS[name](rng) for name in rng.sample(list(FIELDS), size)}


def _problem(
    rng: Random,
    wordings: Wordings,
    slots: Mapping[str, str],
    wanted: dict[str, Json] | list[Json],
    held_out: bool,
    before: str = "",
) -> Problem:
    """Return the problem; its worked steps are the values one after the other."""
    asked = wordings.ask(rng, slots, held_out=held_out)
    answer = json.dumps(wanted)
    if isinstance(wanted, dict):
        steps = before + " ".join(f"{k}={v}" for k, v in wanted.items())
    else:
        steps = " ".join(str(v) for v in wanted)
    return Problem(
        task="json",
        key=f"{wordings.name} {' '.join(slots.values())}",
        question=asked.question,
        phrasing=asked.phrasing,
        reasoning=Reasoning(
            brief=steps, plan="Write JSON.", steps=steps, close=f"That is {answer}"
        ),
        answer=answer,
    )
