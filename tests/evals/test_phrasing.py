"""Templates: held-out ones are unlike those seen, and typing never touches the slots."""

import re
from random import Random

import pytest

from musespark.evals.phrasing import (
    WORDINGS,
    Wordings,
    expanded,
    parse_wordings,
    typed_by_hand,
)


def as_pattern(template: str) -> re.Pattern[str]:
    """A pattern of everything a template can expand to, slots left as they stand."""
    parts = re.split(r"(\[[^\[\]]*\])", template)
    pattern = "".join(
        "(?:" + "|".join(map(re.escape, part[1:-1].split("|"))) + ")"
        if part.startswith("[")
        else re.escape(part)
        for part in parts
    )
    return re.compile(pattern, re.IGNORECASE)


def bare(text: str) -> str:
    """Text as it is after the jitter of case, punctuation and politeness is taken away."""
    return re.sub(r"^please ", "", text.lower()).rstrip("?.! ").removesuffix(" please")


@pytest.mark.parametrize("wordings", WORDINGS.values(), ids=WORDINGS.keys())
def test_no_held_out_template_is_ever_seen(wordings):
    patterns = [as_pattern(template.rstrip("?.! ")) for template in wordings.seen]
    for template in wordings.held_out:
        for _ in range(20):
            sentence = bare(expanded(Random(0), template))
            assert not any(pattern.fullmatch(sentence) for pattern in patterns), template


@pytest.mark.parametrize("wordings", WORDINGS.values(), ids=WORDINGS.keys())
def test_every_kind_has_both_sets(wordings):
    assert len(wordings.seen) >= 10
    assert wordings.held_out
    assert len(set(wordings.seen)) == len(wordings.seen)


@pytest.mark.parametrize(
    "name",
    [
        "addition",
        "subtraction",
        "larger",
        "smaller",
        "multiplication",
        "reversing",
        "count-letter",
        "ascending",
        "descending",
        "lookup",
        "json-fill",
        "favours",
    ],
)
def test_main_kinds_have_twenty_phrasings(name):
    assert len(WORDINGS[name].seen) >= 20


@pytest.mark.parametrize("wordings", WORDINGS.values(), ids=WORDINGS.keys())
def test_slots_survive_any_typing(wordings):
    rng = Random(1)
    slots = {name: f"<{name.upper()}:Keep 1,2>" for name in "abcdknpqsvwxy"}
    slots |= {"x2": "<X2>", "i": "<I>", "xs": "<XS>", "q": "<Q>"}
    slots |= {"facts": "<F>", "shape": "<S>", "object": "<O>", "names": "<N>", "old": "<OLD>"}
    slots |= {"new": "<NEW>", "items": "<ITEMS>"}
    for template in (*wordings.seen, *wordings.held_out):
        for _ in range(5):
            chosen = expanded(rng, template)
            wanted = re.findall(r"(?<!\{)\{(\w+)\}(?!\})", chosen)
            typed = typed_by_hand(rng, chosen, slots)
            for name in wanted:
                assert slots[name] in typed


@pytest.mark.parametrize("wordings", WORDINGS.values(), ids=WORDINGS.keys())
def test_every_name_of_alternatives_is_known(wordings):
    for template in (*wordings.seen, *wordings.held_out):
        assert "$" not in template
        assert template.count("[") == template.count("]")
        assert "[" not in expanded(Random(0), template)


def test_files_may_name_alternatives_that_lines_share():
    text = "$how = a|b\n\n== demo\nx [$how] {w}\\ny\n-- held out\nz [$how]\n"
    assert list(parse_wordings(text)) == [Wordings("demo", ("x [a|b] {w}\ny",), ("z [a|b]",))]


def test_a_phrasing_is_named_after_its_template():
    wordings = Wordings("demo", ("one {w}",), ("two {w}",))
    assert wordings.ask(Random(0), {"w": "x"}, held_out=False).phrasing == "demo/seen-0"
    assert wordings.ask(Random(0), {"w": "x"}, held_out=True).phrasing == "demo/held-0"
