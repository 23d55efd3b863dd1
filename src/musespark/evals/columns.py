"""Written arithmetic, digit by digit, the way the model is taught to reason.

Every worked line has a fixed width per step, so that finding the next digit to work on is the
same look-up each time: five columns from the right, the carry written as an operand.
"""

WIDTH = 5
LARGEST = 10**WIDTH - 1


def padded(number: int, width: int = WIDTH) -> str:
    """Return a number with leading zeros."""
    return f"{number:0{width}d}"


def add_steps(a: int, b: int, *, brief: bool = False) -> str:
    """Return `00345+00078: 5+8+0=13 4+7+1=12 ... > 000423`; brief drops the operands."""
    left, right = padded(a), padded(b)
    carry = 0
    steps = []
    for x, y in zip(reversed(left), reversed(right), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{total:02d}" if brief else f"{x}+{y}+{carry}={total:02d}")
        carry = total // 10
    return f"{left}+{right}: {' '.join(steps)} > {padded(a + b, WIDTH + 1)}"


def subtract_steps(a: int, b: int, *, brief: bool = False) -> str:
    """Return `00345>00078 + 00345-00078: 5-8-0=17 ... > 00267`.

    The order of the operands comes first, then the sign of the answer, then larger minus smaller.
    Each step is digit - digit - borrow = the next borrow, then the digit.
    """
    large, small = max(a, b), min(a, b)
    top, bottom = padded(large), padded(small)
    borrow = 0
    steps = []
    for x, y in zip(reversed(top), reversed(bottom), strict=True):
        digit = int(x) - int(y) - borrow
        next_borrow = int(digit < 0)
        result = f"{next_borrow}{digit + 10 * next_borrow}"
        steps.append(result if brief else f"{x}-{y}-{borrow}={result}")
        borrow = next_borrow
    sign = "-" if a < b else "+"
    order = f"{padded(a)}{order_sign(a, b)}{padded(b)}"
    return f"{order} {sign} {top}-{bottom}: {' '.join(steps)} > {padded(large - small)}"


def compare_steps(a: int, b: int, *, brief: bool = False) -> str:
    """Return `00345 00378: 0=0 0=0 3=3 4<7`, which stops at the first difference."""
    steps = []
    for x, y in zip(padded(a), padded(b), strict=True):
        sign = order_sign(int(x), int(y))
        steps.append(sign if brief else f"{x}{sign}{y}")
        if x != y:
            break
    return f"{padded(a)} {padded(b)}: {' '.join(steps)}"


def multiply_steps(a: int, b: int, *, brief: bool = False) -> str:
    """Return the products of a three-digit `a` by each digit of a two-digit `b`, then their sum.

    `023*45 | 5: 3*5+0=15 2*5+1=11 0*5+1=01 > 0115 | 4: ... > 0092 | 00115+00920: ... > 001035`
    """
    top, digits = padded(a, 3), padded(b, 2)
    lines = [f"{top}*{digits}"]
    for digit in reversed(digits):
        carry = 0
        steps = []
        for x in reversed(top):
            total = int(x) * int(digit) + carry
            steps.append(f"{x}*{digit}+{carry}={total:02d}")
            carry = total // 10
        lines.append(f"{digit}: {' '.join(steps)} > {padded(a * int(digit), 4)}")
    if b < 10:
        del lines[2:]
    else:
        lines.append(add_steps(a * int(digits[1]), a * int(digits[0]) * 10, brief=brief))
    return " | ".join(lines)


def order_sign(a: int, b: int) -> str:
    """Return `<`, `=` or `>`."""
    return "<" if a < b else ">" if a > b else "="
