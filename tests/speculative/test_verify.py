"""What comes out of verification is distributed as the target alone has it."""

import itertools

import pytest
import torch

from musespark.speculative.verify import verify_drafts

V = 4


def distributions(seed: int, length: int, sharpness: float):
    """The same for the same tokens before: prefix -> probabilities [V]."""
    table = {}
    generator = torch.Generator().manual_seed(seed)
    for count in range(length + 1):
        for prefix in itertools.product(range(V), repeat=count):
            table[prefix] = (sharpness * torch.randn(V, generator=generator)).softmax(0)
    return table


def outputs(target, draft, width_after, method, samples, seed, length):
    """[samples, length] what comes out when `length` tokens are guessed, and completed from the
    target where fewer than that stay. `width_after` says, from the tokens so far, whether another
    one is guessed."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(samples, 3 * length + 2, generator=generator, dtype=torch.float64)
    guessed = torch.zeros(samples, length, dtype=torch.int64)
    widths = torch.zeros(samples, dtype=torch.int64)
    p = torch.zeros(samples, length + 1, V)
    q = torch.zeros(samples, length, V)
    for row in range(samples):
        prefix: tuple[int, ...] = ()
        p[row, 0] = target[()]
        while len(prefix) < length and width_after(prefix):
            place = len(prefix)
            q[row, place] = draft[prefix]
            total = q[row, place].double().cumsum(0)
            token = int(torch.searchsorted(total, uniform[row, place] * total[-1], right=True))
            guessed[row, place] = token
            prefix += (token,)
            p[row, place + 1] = target[prefix]
        widths[row] = len(prefix)
    kept, last = verify_drafts(
        p,
        q,
        guessed,
        widths,
        uniform[:, length : 2 * length],
        uniform[:, 2 * length :][:, : length + 1],
        method,
    )
    assert (kept <= widths).all()
    return guessed, kept, last


def exact_frequencies(target, guessed, kept, last, count):
    """Of each sequence of `count` tokens, with those that are missing drawn exactly."""
    frequencies = dict.fromkeys(itertools.product(range(V), repeat=count), 0.0)
    for row, num, end in zip(guessed.tolist(), kept.tolist(), last.tolist(), strict=True):
        begun = (*row[:num], end)[:count]
        for rest in itertools.product(range(V), repeat=count - len(begun)):
            share, prefix = 1.0, begun
            for token in rest:
                share *= float(target[prefix][token])
                prefix += (token,)
            frequencies[prefix] += share / len(guessed)
    return frequencies


def true_frequencies(target, count):
    result = {}
    for tokens in itertools.product(range(V), repeat=count):
        result[tokens] = 1.0
        for place, token in enumerate(tokens):
            result[tokens] *= float(target[tokens[:place]][token])
    return result


def always(_prefix):
    return True


# Whether the next token is guessed may depend on those before it, as a budget's decision does.
RULES = {"always": always, "unless the last is 0": lambda prefix: not prefix or prefix[-1] != 0}


@pytest.mark.parametrize("method", ["block", "token"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_the_distribution_is_the_targets(method, rule, sharpness):
    target, draft = distributions(1, 3, sharpness), distributions(2, 3, sharpness)
    guessed, kept, last = outputs(target, draft, rule, method, 6000, 3, 2)
    found = exact_frequencies(target, guessed, kept, last, 3)
    expected = true_frequencies(target, 3)
    # Of 6000 samples over 64 outcomes, 0.04 is what chance makes of it at worst.
    assert sum(abs(found[key] - expected[key]) for key in expected) / 2 < 0.045
    # A wrong rule would show: always accepting is far off.
    naive = exact_frequencies(target, guessed, torch.full_like(kept, 2), last, 3)
    if rule is always:
        assert sum(abs(naive[key] - expected[key]) for key in expected) / 2 > 0.1


def test_a_block_keeps_more_than_token_by_token():
    target, draft = distributions(1, 4, 1.0), distributions(2, 4, 1.0)
    means = {
        method: outputs(target, draft, always, method, 4000, 5, 3)[1].double().mean()
        for method in ("block", "token")
    }
    assert means["block"] > means["token"]


@pytest.mark.parametrize("method", ["block", "token"])
def test_the_same_distribution_is_never_rejected(method):
    target = distributions(1, 4, 1.0)
    _, kept, _ = outputs(target, target, always, method, 500, 5, 3)
    assert (kept == 3).all()


@pytest.mark.parametrize("method", ["block", "token"])
def test_what_the_target_forbids_never_stays(method):
    target = {key: p.clone() for key, p in distributions(1, 4, 1.0).items()}
    for p in target.values():
        p[2] = 0
    draft = distributions(2, 4, 1.0)
    guessed, kept, last = outputs(target, draft, always, method, 800, 5, 3)
    stays = torch.arange(3) < kept[:, None]
    assert not ((guessed == 2) & stays).any()
    assert not (last == 2).any()


@pytest.mark.parametrize("method", ["block", "token"])
def test_sequences_do_not_depend_on_one_another(method):
    target, draft = distributions(1, 4, 1.0), distributions(2, 4, 1.0)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(V, (6, 3), generator=generator)
    p = torch.stack([torch.stack([target[tuple(r[:n])] for n in range(4)]) for r in ids.tolist()])
    q = torch.stack([torch.stack([draft[tuple(r[:n])] for n in range(3)]) for r in ids.tolist()])
    widths = torch.tensor([3, 2, 1, 3, 3, 1])
    accept = torch.rand(6, 3, generator=generator, dtype=torch.float64)
    final = torch.rand(6, 4, generator=generator, dtype=torch.float64)
    together = verify_drafts(p, q, ids, widths, accept, final, method)
    for row in range(6):
        one, width = slice(row, row + 1), int(widths[row])
        alone = verify_drafts(
            p[one, : width + 1], q[one, :width], ids[one, :width], widths[one],
            accept[one, :width], final[one, : width + 1], method,
        )  # fmt: skip
        assert [int(x) for x in alone] == [int(x[row]) for x in together]
