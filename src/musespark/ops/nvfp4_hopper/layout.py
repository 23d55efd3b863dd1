"""How NVFP4 weights lie in memory for Hopper's matrix units, and the packer that puts them there.

A Hopper matrix instruction takes its left operand from registers: each lane of a warp holds, of
every 16 x 16 piece, four runs of two neighbouring numbers. The layout makes a lane's registers come
straight out of memory, by loads of 16 bytes and a few bit operations, with nothing exchanged
between lanes. Four ideas, drawn in docs/nvfp4-hopper.md:

    columns   Within 128 columns, position 16 j + 2 g + e holds column 16 g + 2 j + e. A lane then
              meets, in one row, the 16 weights of one scale group g (j = 0..7, e = 0..1).
    tiles     64 rows x 128 columns are 4 KiB in one piece, in the order
              [column half, warp, lane, row half, word of the pair].
    bits      16 weights are two words. Eight pairs come out of them by one rotation and one AND
              each: the four bits of a code land where bfloat16 has its sign, the two low bits of
              its exponent and the top bit of its fraction. That number is e2m1 * 2**-126, exactly.
    scales    e4m3 becomes an eight-bit float with five exponent bits, whose subnormals are normal.
              One multiply-add turns it into a pair of bfloat16, biased so that the product with
              the pattern is e2m1 * e4m3 * 2**-7: at most six significant bits, so exact. The
              factor 2**7 is left to the global scale.

Gate and up rows alternate in runs of eight, so that a lane holds both halves of an activation; the
rows are ordered so that the first product's output is the second one's permuted input.
"""

from functools import lru_cache

import torch
from torch import Tensor

from musespark.ops.nvfp4 import GROUP_SIZE, unpack_codes

K_BLOCK = 128
"""Columns of a tile; the columns' permutation repeats after so many."""
TILE_ROWS = 64
TILE_WORDS = TILE_ROWS * K_BLOCK // 8
"""int32 words of a tile's codes."""
TILE_SCALE_WORDS = TILE_ROWS * K_BLOCK // GROUP_SIZE // 4
"""int32 words of a tile's scales."""
ROW_RUN = 8
"""Gate and up rows take turns after so many."""

LEFTOVER = 2.0**7
"""What the product of a pattern and its widened scale lacks; multiply the global scale by it."""
WIDE_SCALE_BIAS = 236
"""Added to the exponent of a widened scale."""

PAIR_MASK = 0x81C081C0
"""Where a pair's bits are: sign, two exponent bits and a fraction bit of two bfloat16."""
# Pair j is (source rotated left by so many bits) & PAIR_MASK. Sources: the two words, a and b, and
# m, made of the bits that six pairs leave unused: (a & MERGE_MASK) | (rotl(b, 2) & ~MERGE_MASK).
PAIR_SOURCES = (("a", 0), ("a", 28), ("a", 6), ("b", 0), ("b", 28), ("b", 6), ("m", 2), ("m", 24))
MERGE_MASK = 0x60306030
MERGE_ROTATION = 2

# Bit of a code -> bit of a bfloat16.
_CODE_BITS = {3: 15, 2: 8, 1: 7, 0: 6}

# e4m3 codes: the largest finite one, and NaN.
_E4M3_NAN = 0x7F
_SCALE_EXPONENT_OFFSET = 10
# Widens to an infinite exponent with a fraction: NaN.
_SCALE_NAN = 0x9F


def check_shape(rows: int, columns: int) -> None:
    """Raise unless a weight [rows, columns] is made of whole tiles."""
    for name, size in (("output", rows), ("input", columns)):
        if size % K_BLOCK:
            raise ValueError(
                f"The Hopper layout of NVFP4 experts needs widths that are multiples of {K_BLOCK}: "
                f"found {size} {name} features. Choose a parallel layout whose shares are, or keep "
                "the checkpoint's layout (backend 'reference')."
            )


def permuted_columns(width: int, device: torch.device | None = None) -> Tensor:
    """[width] int64: the original column at each position."""
    position = torch.arange(width, device=device)
    block, within = position // K_BLOCK, position % K_BLOCK
    j, g, e = within // 16, within % 16 // 2, within % 2
    return block * K_BLOCK + 16 * g + 2 * j + e


def gate_up_rows(inner: int, device: torch.device | None = None) -> Tensor:
    """[2 * inner] int64: the checkpoint's row (gate first, then up) at each row of the layout."""
    row = torch.arange(2 * inner, device=device)
    run, is_up, within = row // (2 * ROW_RUN), row // ROW_RUN % 2, row % ROW_RUN
    return permuted_columns(inner, device)[run * ROW_RUN + within] + is_up * inner


def pack_in_place(packed: Tensor, scales: Tensor, rows: Tensor | None = None) -> None:
    """Re-lay weights expert by expert; nothing beyond one expert's temporaries is allocated.

    Args:
        packed: [E, out, in / 2] uint8, the checkpoint's; becomes [E, out / 64, in / 128, 1024]
            words, in the same memory.
        scales: [E, out, in / 16] float8_e4m3fn; becomes [E, out / 64, in / 128, 128] words.
        rows: [out] int64: the checkpoint's row at each row of the layout; None: as they are.
    """
    check_shape(packed.shape[1], 2 * packed.shape[2])
    for codes, blocks in zip(packed, scales.view(torch.uint8), strict=True):
        ordered, ordered_scales = (codes, blocks) if rows is None else (codes[rows], blocks[rows])
        words, scale_words = pack_expert(unpack_codes(ordered), ordered_scales)
        codes.copy_(words.view(torch.uint8).view(codes.shape))
        blocks.copy_(scale_words.view(torch.uint8).view(blocks.shape))


def pack_expert(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Re-lay one weight.

    Args:
        codes: [N, K] uint8 e2m1 codes.
        scales: [N, K / 16] uint8 e4m3 codes; any of the 256.

    Returns:
        (words [N / 64, K / 128, 1024] int32, scale words [N / 64, K / 128, 128] int32).
    """
    num_rows, width = codes.shape
    grid = num_rows // TILE_ROWS, width // K_BLOCK
    signs = (scales >> 7).repeat_interleave(GROUP_SIZE, 1) << 3  # a scale's sign moves to codes
    is_zero = (scales & 0x7F == 0).repeat_interleave(GROUP_SIZE, 1)
    codes = (codes ^ signs).masked_fill_(is_zero, 0)  # a zero scale has no widened form
    # tile row, warp, row half, row, tile column, column half, group, code of the group
    split = codes.view(grid[0], 4, 2, 8, grid[1], 2, 4, GROUP_SIZE).to(torch.int32)
    patterns = _code_patterns(codes.device)
    words = patterns[0][split[..., 0]]
    for place in range(1, GROUP_SIZE):
        words |= patterns[place][split[..., place]]
    words = words.view(torch.int32).view(*words.shape, 2)  # both words of a group
    # tile row, warp, row half, row, tile column, column half, group, word ->
    # tile row, tile column, column half, warp, (row, group) = lane, row half, word
    words = words.permute(0, 4, 5, 1, 3, 6, 2, 7).reshape(*grid, TILE_WORDS)
    # tile row, warp, row half, row, tile column, column half, group ->
    # tile row, tile column, warp, lane, (row half, column half) = byte of a word
    blocks = _scale_codes(scales.device)[(scales & 0x7F).int()].view(
        grid[0], 4, 2, 8, grid[1], 2, 4
    )
    blocks = blocks.permute(0, 4, 1, 3, 6, 2, 5).reshape(*grid, -1)
    return words, blocks.view(torch.int32)


def bit_places() -> dict[tuple[int, int, int], tuple[int, int]]:
    """(pair j, half e, bit of the code) -> (word of the two, bit of the word)."""
    places = {}
    for pair, (source, rotation) in enumerate(PAIR_SOURCES):
        for half in (0, 1):
            for code_bit, target in _CODE_BITS.items():
                bit = (target + 16 * half - rotation) % 32
                word = 0 if source == "a" else 1
                if source == "m" and MERGE_MASK >> bit & 1:
                    word = 0
                elif source == "m":
                    bit = (bit - MERGE_ROTATION) % 32
                places[pair, half, code_bit] = word, bit
    return places


@lru_cache(maxsize=8)
def _code_patterns(device: torch.device) -> Tensor:
    """[16, 16] int64: the bits, in both words, of each code at each place of its group."""
    table = torch.zeros((GROUP_SIZE, 16), dtype=torch.int64)
    codes = torch.arange(16)
    for (pair, half, code_bit), (word, bit) in bit_places().items():
        table[2 * pair + half] |= (codes >> code_bit & 1) << (32 * word + bit)
    return table.to(device)


@lru_cache(maxsize=8)
def _scale_codes(device: torch.device) -> Tensor:
    """[128] uint8: e4m3 codes as codes with five exponent bits and no subnormals, without sign."""
    table = torch.zeros(128, dtype=torch.uint8)
    for code in range(1, _E4M3_NAN):
        exponent, fraction = (code >> 3) - 7, code & 7
        if code < 8:  # subnormal: fraction * 2**-9
            shift = fraction.bit_length() - 1
            exponent, fraction = shift - 9, (fraction << (3 - shift)) & 7
        table[code] = (exponent + _SCALE_EXPONENT_OFFSET) << 3 | fraction
    table[_E4M3_NAN] = _SCALE_NAN
    return table.to(device)
