"""Rings of slots in shared memory, from warps that fill them to warps that use them.

Of each slot two barriers tell: it is full, and nobody reads it any more. Either side waits for
the other's, by turns for its even and its odd completions; what has never been filled counts as
read. Warps that run to the end must refer to all barriers: their memory may not become another's
(docs/decisions.md).
"""

from musespark.ops.gluon_import import gl, gluon, mbarrier


@gluon.jit
def allocate_ring(SLOTS: gl.constexpr, FULL_ARRIVALS: gl.constexpr, EMPTY_ARRIVALS: gl.constexpr):
    """(full, empty): the barriers of each slot, complete after so many arrivals."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=FULL_ARRIVALS)
        mbarrier.init(empty.index(slot), count=EMPTY_ARRIVALS)
    return full, empty


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The slot behind this one, and how often modulo 2 the ring has come round to it."""
    wraps = slot == SLOTS - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)
