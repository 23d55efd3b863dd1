"""How many guessed tokens are worth verifying: a pure function of how likely they are to stay and
of what a step costs.

Verifying costs rows, and every row of an MoE model brings experts of its own into the step. So the
number of rows follows the load: where a step is as long with a few more tokens, all guesses are
verified; where each token adds to it, only likely ones are; and with a large batch none.

Which guesses are verified may depend on the tokens before them and not on themselves or later ones:
otherwise the tokens that come out would not be distributed as the target has them. Two rules see to
that. Guesses are taken in order of how likely they are to stay, which falls along each request, up
to the first that does not pay, or to a round number of tokens behind it. And whether to guess at
all is decided before, by what past guesses have brought.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

_Points = tuple[tuple[int, float], ...]

# Of each position of a guess, before anything is known: how often it is right if those before are.
_PRIOR = 0.75
# How many guesses past ones count for beside new ones: few, since texts differ. How fast they are
# forgotten while nothing is guessed, so that a draft that was bad at one text gets another try.
_MEMORY, _FORGET = 12.0, 0.002
# What guessing must bring to be worth it: times are measured with some noise, and guesses give the
# scheduler and the sampler more to do. For each further sequence it must bring more: those that are
# hard to guess get no more tokens out of a longer step, and are there when the others have ended.
_MARGIN, _MARGIN_PER_SEQUENCE, _MOST_MARGIN = 1.25, 0.02, 1.9
# How much a step's surcharge counts beside those before it; how many times the measured time it may
# be, since a step may have waited for a compiler; how fast that of guessing is forgotten meanwhile.
_NEW, _MOST_SURCHARGE, _FORGET_SURCHARGE = 0.1, 8.0, 0.0005
# Tokens of a step that may be any number, and what larger numbers are multiples of.
_MOST_ODD, _ROUND = 16, 8


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured times, (sequences, seconds) by ascending number of sequences."""

    plain: _Points
    """Of a step with one token of each sequence."""
    verify_one: _Points
    """With one guessed token of each besides, and the draft takes them in."""
    verify_all: _Points
    """With `num_guesses` of each."""
    draft: _Points
    """Of guessing."""
    num_guesses: int
    """Tokens guessed for each sequence."""

    def plain_seconds(self, num_tokens: int) -> float:
        """Of a step of so many tokens, none of them guessed."""
        return _interpolate(self.plain, num_tokens)

    def draft_seconds(self, num_sequences: int) -> float:
        """Of guessing for so many sequences."""
        return _interpolate(self.draft, num_sequences)

    def verify_seconds(self, num_sequences: int, num_guesses: int) -> float:
        """Of a step that verifies so many guesses, in all, of sequences that decode."""
        curve = self.verify_curve(num_sequences, num_sequences)
        return _interpolate(curve, num_sequences + num_guesses)

    def verify_curve(self, num_sequences: int, num_tokens: int) -> _Points:
        """(tokens, seconds) of a step of so many sequences that runs `num_tokens` tokens in any
        case, with none, one and all guesses of each sequence verified."""
        plain = self.plain_seconds(num_tokens)
        # What prompts add to such a step, they add to one that verifies.
        extra = plain - self.plain_seconds(num_sequences)
        points = [(num_tokens, plain)]
        for width, times in ((1, self.verify_one), (self.num_guesses, self.verify_all)):
            size = num_tokens + width * num_sequences
            if size > points[-1][0]:
                seconds = _interpolate(times, num_sequences) + extra
                points.append((size, max(seconds, points[-1][1])))
        return tuple(points)


class Surcharge:
    """How much longer than measured steps have taken of late.

    Measured is what the device does, and what starts it. Around it an engine schedules, samples and
    hands out, while the device works or while it waits; where a step is short, that is as long. So
    it is watched, by numbers of sequences up to the same power of two.
    """

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        self._verifying: dict[int, float] = {}

    def plain_seconds(self, num_sequences: int) -> float:
        """Of a step without guesses."""
        return self._plain.get(num_sequences.bit_length(), 0.0)

    def verify_seconds(self, num_sequences: int) -> float:
        """Of one that verifies guesses, and the guessing behind it; where that is not known yet, as
        of one without."""
        plain = self.plain_seconds(num_sequences)
        return self._verifying.get(num_sequences.bit_length(), plain)

    def observe(
        self, num_sequences: int, seconds: float, measured: float, *, verifies: bool
    ) -> None:
        """Take in that a step, which verified guesses or did not, has taken `seconds`."""
        size = num_sequences.bit_length()
        kept = self._verifying if verifies else self._plain
        beyond = min(max(seconds - measured, 0.0), _MOST_SURCHARGE * measured)
        kept[size] = _towards(beyond, kept.get(size, beyond), _NEW)
        if not verifies and size in self._verifying:
            self._verifying[size] = _towards(kept[size], self._verifying[size], _FORGET_SURCHARGE)


def choose_widths(
    survival: Sequence[Sequence[float]],
    num_sequences: int,
    num_tokens: int,
    costs: StepCosts,
    surcharge: Surcharge,
) -> list[int]:
    """How many of each request's guesses to verify: for the most tokens per second, and then some
    that fill the step up to a round number of tokens.

    Args:
        survival: of each request's guesses, how likely each is to stay; falls along a request.
        num_sequences: tokens that the step brings in any case.
        num_tokens: tokens that it runs in any case.
        costs: what a step takes.
        surcharge: what it takes besides.
    """
    places = sorted(
        ((place, index) for place, chances in enumerate(survival) for index in range(len(chances))),
        key=lambda item: -survival[item[0]][item[1]],
    )
    beyond = surcharge.verify_seconds(num_sequences)
    curve = costs.verify_curve(num_sequences, num_tokens)
    hull = _hull(tuple((size, seconds + beyond) for size, seconds in curve))
    widths = [0] * len(survival)
    tokens, seconds = float(num_sequences), hull[0][1]
    pays = True
    for count, (place, index) in enumerate(places, start=1):
        more = tokens + survival[place][index]
        longer = _interpolate(hull, num_tokens + count)
        pays = pays and more * seconds > tokens * longer
        if not pays and (count == 1 or _is_round(num_tokens + count - 1)):
            break
        widths[place] += 1
        tokens, seconds = more, longer
    return widths


def _is_round(num_tokens: int) -> bool:
    """Whether a step of so many tokens is one of a few kinds. On a CPU the first step of a size
    takes half as long again, since its products are set up; GPUs have graphs of some sizes only."""
    return num_tokens <= _MOST_ODD or num_tokens % _ROUND == 0


class Acceptance:
    """How often guesses have been right of late, position by position."""

    def __init__(self, num_tokens: int) -> None:
        self._rates = [_PRIOR] * num_tokens

    @property
    def survival(self) -> list[float]:
        """How likely each position of a guess is to stay."""
        return list(accumulate(self._rates, mul))

    def observe(self, guesses: Iterable[tuple[int, int, Sequence[float]]]) -> None:
        """Take in what became of a step's guesses.

        Args:
            guesses: (verified tokens, accepted ones, survival) of each. The survival tells of the
                places that were not verified, which are the unlikely ones: without them, guesses
                would look too good.
        """
        sizes = [_MEMORY] * len(self._rates)
        sums = [_MEMORY * rate for rate in self._rates]
        for num_verified, num_accepted, survival in guesses:
            for index in range(min(num_verified, num_accepted + 1)):
                sizes[index] += 1
                sums[index] += index < num_accepted
            if num_accepted < num_verified:
                continue
            reached = before = survival[num_verified - 1] if num_verified else 1.0
            for index in range(num_verified, len(survival)):
                # As likely as the place is reached, with the chance that the token there is right.
                if reached > 0:
                    sizes[index] += before / reached
                    sums[index] += survival[index] / reached
                before = survival[index]
        self._rates = [total / size for total, size in zip(sums, sizes, strict=True)]

    def forget(self) -> None:
        """Take in that a step went by without guesses."""
        self._rates = [_towards(_PRIOR, rate, _FORGET) for rate in self._rates]

    def is_worthwhile(
        self, num_guessing: int, num_sequences: int, costs: StepCosts, surcharge: Surcharge
    ) -> bool:
        """Whether to guess for `num_guessing` of `num_sequences` that decode."""
        seconds = costs.plain_seconds(num_sequences) + surcharge.plain_seconds(num_sequences)
        plain = num_sequences / seconds
        margin = min(_MARGIN + _MARGIN_PER_SEQUENCE * (num_sequences - 1), _MOST_MARGIN)
        drafting = costs.draft_seconds(num_guessing) + surcharge.verify_seconds(num_sequences)
        curve = costs.verify_curve(num_sequences, num_sequences)
        return any(
            (num_sequences + num_guessing * gained)
            / (drafting + _interpolate(curve, num_sequences + num_guessing * width))
            > plain * margin
            for width, gained in enumerate(accumulate(self.survival), start=1)
        )


def _towards(value: float, before: float, share: float) -> float:
    return before + share * (value - before)


def _interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
    """On straight lines between the points; beyond them, on the line of the last two."""
    place = bisect_left(points, x, key=lambda point: point[0])
    if (place < len(points) and points[place][0] == x) or len(points) == 1:
        return points[min(place, len(points) - 1)][1]
    place = min(max(place, 1), len(points) - 1)
    former, latter = points[place - 1], points[place]
    return former[1] + _slope(former, latter) * (x - former[0])


def _hull(points: _Points) -> _Points:
    """The largest convex curve that no point is below: where the first guess is dear and the next
    are cheap, it spreads the price over all of them."""
    hull: list[tuple[int, float]] = []
    for point in points:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return tuple(hull)


def _slope(former: tuple[int, float], latter: tuple[int, float]) -> float:
    return (latter[1] - former[1]) / (latter[0] - former[0])


def smoothed(points: Sequence[tuple[int, float]]) -> _Points:
    """Measured times without their noise where it makes a larger step look faster."""
    times = accumulate((seconds for _, seconds in reversed(points)), min)
    return tuple(zip((size for size, _ in points), reversed(list(times)), strict=True))


def check_costs(costs: StepCosts) -> bool:
    """Whether these can be costs: sizes ascend, and times are positive."""
    return all(
        points
        and all(size >= 1 for size, _ in points)
        and all(seconds > 0 for _, seconds in points)
        and all(former[0] < latter[0] for former, latter in pairwise(points))
        for points in (costs.plain, costs.verify_one, costs.verify_all, costs.draft)
    )
