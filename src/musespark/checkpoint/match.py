"""Do the files and the model fit? Checked both ways, by name, shape and dtype, before any read.

All that does not fit goes into one error: whoever fixes a checkpoint wants the whole list, not the
first line of it.
"""

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from musespark.checkpoint.names import LM_HEAD, is_skipped
from musespark.checkpoint.shards import CheckpointReader, resolve_index
from musespark.errors import CheckpointError
from musespark.parallel.shard import WeightSlot

# A family of alike names up to this size is spelt out; a larger one is folded into one line.
_SPELT_OUT = 4
_MAX_LINES = 24
# Misspelt names are looked for among this many at most: the search is quadratic.
_MAX_HINTS = 8
_MAX_CANDIDATES = 4000


@dataclass
class _Misfits:
    """Everything wrong, by kind. `misshaped` and `mistyped`: the complaint -> names."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    mistyped: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshaped or self.mistyped)


def check_slots(
    slots: Sequence[WeightSlot],
    reader: CheckpointReader,
    elsewhere: Callable[[str], bool] | None = None,
) -> list[str]:
    """Match the tensors a model wants with those the files hold.

    Args:
        slots: what the model wants. Several may take parts of one tensor; no part twice.
        reader: the files.
        elsewhere: says of a key nobody here wants whether another rank takes it.

    Returns:
        the keys that are left unread, knowingly.

    Raises:
        CheckpointError: every missing, unexpected, wrongly shaped or wrongly typed tensor.
        ValueError: slots that contradict one another.
    """
    _check_disjoint(slots)
    wanted = {slot.name: slot for slot in slots}
    misfits = _Misfits()
    skipped: list[str] = []
    for name in reader.names():
        if name not in wanted:
            known = is_skipped(name) or (elsewhere is not None and elsewhere(name))
            (skipped if known else misfits.unexpected).append(name)
    for name, slot in wanted.items():
        if name not in reader:
            misfits.missing.append(name)
            continue
        info = reader.info(name)
        if info.shape != slot.shape:
            complaint = f"shape {list(info.shape)}, but the config makes it {list(slot.shape)}"
            misfits.misshaped[complaint].append(name)
        if info.dtype not in slot.dtypes:
            accepted = " or ".join(map(_dtype_name, slot.dtypes))
            complaint = f"dtype {_dtype_name(info.dtype)}, but it must be {accepted}"
            misfits.mistyped[complaint].append(name)
    if misfits:
        raise CheckpointError(_describe(misfits, reader))
    return skipped


def fold_names(names: Iterable[str]) -> list[tuple[str, int]]:
    """Names that differ only in their numbers, folded: `layers.{0-61}.mlp.gate.weight`.

    Returns:
        (text, number of names it stands for), in order. Small families stay spelt out.
    """
    groups = [(name, [name]) for name in sorted(set(names), key=_natural_order)]
    for number in (-1, 0):  # the last number first: experts within a layer, then the layers
        groups = _fold(groups, number)
    lines: list[tuple[str, int]] = []
    for text, members in groups:
        if len(members) <= _SPELT_OUT:
            lines += [(name, 1) for name in members]
        else:
            lines.append((text, len(members)))
    return lines


def _fold(groups: list[tuple[str, list[str]]], position: int) -> list[tuple[str, list[str]]]:
    """Fold texts that agree in all but the number at `position` among their plain numbers."""
    families: dict[str, tuple[list[int], list[str], str]] = {}
    for text, members in groups:
        # Not the numbers of a range that an earlier fold has put in braces.
        numbers = list(re.finditer(r"(?<=\.)\d+(?=\.)", text))
        if numbers:
            match = numbers[position]
            key = f"{text[: match.start()]}{{}}{text[match.end() :]}"
            values, all_members, _ = families.setdefault(key, ([], [], text))
            values.append(int(match.group()))
            all_members += members
        else:
            families[text] = ([], list(members), text)
    return [
        (key.replace("{}", f"{{{_ranges(values)}}}") if len(values) > 1 else text, members)
        for key, (values, members, text) in families.items()
    ]


def _ranges(values: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _natural_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _describe(misfits: _Misfits, reader: CheckpointReader) -> str:
    misshaped = sum(map(len, misfits.misshaped.values()))
    mistyped = sum(map(len, misfits.mistyped.values()))
    counts = {
        "missing": len(misfits.missing),
        "unexpected": len(misfits.unexpected),
        "wrongly shaped": misshaped,
        "wrongly typed": mistyped,
    }
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    lines = [f"{reader.folder}: the weights do not fit the model of its config.json: {summary}."]
    lines += _section("Missing", misfits.missing, _spelling_hints(misfits, reader))
    lines += _section("Unexpected", misfits.unexpected, {})
    lines += _complaints("Wrongly shaped", misfits.misshaped)
    lines += _complaints("Wrongly typed", misfits.mistyped)
    lines.append(f"To fix: {_remedy(misfits, reader)}")
    return "\n".join(lines)


def _section(title: str, names: list[str], hints: dict[str, str]) -> list[str]:
    entries = [
        f"  {text}{_counted(count)}{hints.get(text, '')}" for text, count in fold_names(names)
    ]
    return [f"{title} ({len(names)}):", *_shortened(entries)] if entries else []


def _complaints(title: str, complaints: dict[str, list[str]]) -> list[str]:
    entries = [
        f"  {text}{_counted(count)}: {complaint}"
        for complaint, names in complaints.items()
        for text, count in fold_names(names)
    ]
    total = sum(map(len, complaints.values()))
    return [f"{title} ({total}):", *_shortened(entries)] if entries else []


def _counted(count: int) -> str:
    return f" ({count} tensors)" if count > 1 else ""


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= _MAX_LINES:
        return lines
    return [*lines[:_MAX_LINES], f"  ... and {len(lines) - _MAX_LINES} more lines like these"]


def _spelling_hints(misfits: _Misfits, reader: CheckpointReader) -> dict[str, str]:
    candidates = misfits.unexpected[:_MAX_CANDIDATES]
    hints = {}
    for name in misfits.missing[:_MAX_HINTS]:
        if similar := difflib.get_close_matches(name, candidates, n=1, cutoff=0.8):
            hints[name] = f"; is {similar[0]!r} ({reader.info(similar[0]).file.name}) meant?"
    return hints


def _remedy(misfits: _Misfits, reader: CheckpointReader) -> str:
    if misfits.missing == [LM_HEAD] and "embed_tokens.weight" in reader:
        return (
            "a MuseSparkTextModel saved alone has no output projection; save the "
            "MuseSparkForConditionalGeneration it belongs to, or add lm_head.weight."
        )
    if "fc.weight" in reader:
        return "use the config.json and the weights of one and the same save of a DSpark draft."
    if misfits.missing or misfits.unexpected:
        return (
            "use the config.json and the weights of one and the same save, under the names that "
            "transformers' MuseSparkForConditionalGeneration.save_pretrained writes."
        )
    if misfits.misshaped:
        return "use the config.json that was saved with these weights."
    return "convert the tensors named above to a dtype that is read, and save them again."


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_disjoint(slots: Sequence[WeightSlot]) -> None:
    by_name: defaultdict[str, list[WeightSlot]] = defaultdict(list)
    for slot in slots:
        resolve_index(slot.index, slot.shape)
        by_name[slot.name].append(slot)
    for name, group in by_name.items():
        for position, slot in enumerate(group):
            for other in group[:position]:
                if slot.shape != other.shape or slot.dtypes != other.dtypes:
                    raise ValueError(f"two slots disagree about {name!r}")
                if _overlap(slot, other):
                    raise ValueError(f"two slots take the same part of {name!r}")


def _overlap(one: WeightSlot, other: WeightSlot) -> bool:
    return all(
        max(starts) < min(stops)
        for starts, stops in (
            zip(*cuts, strict=True)
            for cuts in zip(
                resolve_index(one.index, one.shape),
                resolve_index(other.index, other.shape),
                strict=True,
            )
        )
    )
