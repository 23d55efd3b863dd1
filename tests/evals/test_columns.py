"""Every worked step must be true, and the answer must follow from the steps."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from musespark.evals import columns

NUMBERS = st.integers(0, columns.LARGEST)


def checked_equations(steps: str) -> list[int]:
    """Evaluate every `a+b=c`, `a-b=c` and `a*b+c=d` of the text; return the right-hand sides."""
    results = []
    for left, right in re.findall(r"(\d[+*-]\d[+-]\d)=(\d+)", steps):
        terms = [int(term) for term in re.split(r"[+*-]", left)]
        if "*" in left:
            total = terms[0] * terms[1] + terms[2]
        elif "-" in left:
            digit = terms[0] - terms[1] - terms[2]
            total = 10 + (digit + 10) if digit < 0 else digit  # the borrow, then the digit
        else:
            total = sum(terms)
        assert total == int(right), (left, right)
        results.append(int(right))
    return results


@given(NUMBERS, NUMBERS)
def test_addition_steps_are_true_and_end_in_the_sum(a, b):
    steps = columns.add_steps(a, b)
    column_sums = checked_equations(steps)
    assert len(column_sums) == columns.WIDTH
    digits = "".join(str(total % 10) for total in reversed(column_sums))
    assert int(str(column_sums[-1] // 10) + digits) == a + b
    assert int(steps.rsplit("> ", 1)[1]) == a + b


@given(NUMBERS, NUMBERS)
def test_subtraction_steps_are_true_and_end_in_the_difference(a, b):
    steps = columns.subtract_steps(a, b)
    digits = "".join(str(result % 10) for result in reversed(checked_equations(steps)))
    assert int(digits) == abs(a - b)
    order, sign, _ = steps.split(" ", 2)
    assert order == f"{a:05d}{'<' if a < b else '>' if a > b else '='}{b:05d}"
    assert sign == ("-" if a < b else "+")
    assert int(steps.rsplit("> ", 1)[1]) == abs(a - b)


@given(NUMBERS, NUMBERS)
def test_comparison_stops_at_the_first_difference(a, b):
    *equal, last = columns.compare_steps(a, b).split(": ")[1].split()
    assert all(step[1] == "=" for step in equal)
    for step in (*equal, last):
        assert step[1] == columns.order_sign(int(step[0]), int(step[2]))
    assert last[1] == columns.order_sign(a, b)


@given(st.integers(0, 999), st.integers(0, 99))
def test_multiplication_steps_are_true_and_end_in_the_product(a, b):
    steps = columns.multiply_steps(a, b)
    checked_equations(steps)
    assert int(steps.rsplit("> ", 1)[1]) == a * b
    for line in steps.split(" | ")[1:3]:
        if line[1:2] == ":":
            assert int(line.rsplit("> ", 1)[1]) == a * int(line[0])


@pytest.mark.parametrize(
    ("steps", "brief"),
    [
        (columns.add_steps, "00345+00078: 13 12 04 00 00 > 000423"),
        (columns.subtract_steps, "00345>00078 + 00345-00078: 17 16 02 00 00 > 00267"),
        (columns.compare_steps, "00345 00078: = = >"),
    ],
)
def test_brief_steps_leave_the_operands_out(steps, brief):
    assert steps(345, 78, brief=True) == brief
