"""Two checks for the tests of your own repository: a budget for tensors, and no growth from call to call."""

import contextlib
import functools
import gc
import os
import sys
from dataclasses import dataclass

import numpy as np

from labsupport.doctor.alive import alive, allocator, counts_everything, running_tensorflow, size
from labsupport.doctor.names import by_name, more, own_frames, own_names
from labsupport.ground import meter
from labsupport.ground.budget import MIB, BudgetError, machine_memory, mib, parse_size
from labsupport.lesson.catalogue import see_lab
from labsupport.peak.here import recorded
from labsupport.peak.parts import largest

# The first call traces and makes variables and optimizer slots; the second, when it brings another shape, traces once
# more with that dimension left open; the third is the first that can be like all later ones.
_WARM_UP = 3
# Growth must show in each of so many equal parts of the calls. A cache that fills up, a buffer or a table that doubles
# now and then, and a block that the allocator places less tightly for once grow in some of them; a leak grows in all.
_PARTS = 4
# Bytes a call that may stay. A history of what a step reports, a few dozen numbers, stays below 256 B; over a million
# steps that is 244 MiB, so what passes does not end a training.
_LEAST_BYTES = 256
# The allocator hands out at least 256 B for each tensor, however small: 16 kept scalars count as this much.
_LEAST_IN_ALLOCATOR = 16 * 256
# Bytes of the smallest hole worth filling: a tensor placed less tightly in one still smaller is counted by less than
# that too high, which no budget in MiB notices.
_SMALLEST_HOLE = 64 * 1024
_MEANING = {  # kind: (the lab, what it means)
    "variables": ("a_model_per_trial", "models or variables are kept alive"),
    "tensors": ("leaks_over_epochs", "tensors are retained"),
    "arrays": ("leaks_over_epochs", "NumPy arrays are kept"),
    "pipelines": ("pipeline_buffers", "datasets or iterators are kept"),
    "graphs": ("retracing", "graphs are kept: the function is retraced, or made anew"),
    "allocator": (
        "pipeline_buffers",
        "no Python object holds it: the buffers of an iterator, or a cache() that is still filling "
        "(then let a call be a whole epoch)",
    ),
}


def assert_no_growth(step, n=50):
    """Fail if memory grows with every call of step().

    step: a function without arguments: one training step, one epoch, one trial. It is called 3 times to warm up, then
    n times (at least 8). What is alive is counted exactly, garbage collected, five times meanwhile: variables, eager
    tensors, NumPy arrays, graphs, tf.data pipelines, and the bytes in use by TensorFlow's allocator where it counts.
    A cache that is not full after n calls looks like a leak: give a larger n. Not seen: bytes, strings and other
    objects of Python.

    Raises AssertionError that names what grew, by how much a call, what holds it, and the lab that explains it.
    """
    __tracebackhide__ = True  # pytest then shows the caller's line
    if not callable(step):
        raise TypeError(
            f"assert_no_growth() needs a function to call, not {type(step).__name__}: "
            "write assert_no_growth(step), not assert_no_growth(step())"
        )
    if n < 2 * _PARTS:
        raise ValueError(f"n is {n}: give at least {2 * _PARTS} calls, so that growth can be told from a single event")
    for _ in range(_WARM_UP):
        step()
    calls = [n * part // _PARTS for part in range(_PARTS + 1)]
    half, last = calls[_PARTS // 2], n - calls[_PARTS // 2]
    seen = [_count()]
    for before, after in zip(calls, calls[1:]):
        for _ in range(after - before):
            step()
        seen.append(_count())
        if after == half:  # what is told of the growth is of the second half, without what filled up in the first
            names = _held(sys._getframe(1))
    grown = [kind for kind in _MEANING if _grows([_level(kind, census) for census in seen], calls, kind)]
    if grown:
        name = getattr(step, "__name__", "step")
        mean = f"mean of the last {last} of {_WARM_UP + n}"
        title = f"memory grows with every call of {name}(), by this much a call ({mean}):"
        lines = [
            *_grown(grown, seen[_PARTS // 2], seen[-1], last),
            *_holders(names, _held(sys._getframe(1)), last),
            "to see where: python -m labsupport doctor your_script.py",
        ]
        raise AssertionError("\n  ".join([title, *lines]))


def _held(frame):
    """What each name of the person's own modules and running functions holds."""
    return by_name(own_names(own_frames(frame)))


def _count():
    census = alive()
    tf = running_tensorflow()
    counted = allocator(tf).read() if tf else None
    census["allocator"] = counted and counted[0]
    return census


def _level(kind, census):
    """Bytes, or for what has no size or is never small a number."""
    if kind == "allocator":
        return census[kind]
    return size(census[kind]) if kind in ("tensors", "arrays") else census[kind].total()


def _grows(levels, calls, kind):
    """Whether a kind grew by enough in each part of the calls."""
    if None in levels:
        return False
    least = {"tensors": _LEAST_BYTES, "arrays": _LEAST_BYTES, "allocator": _LEAST_IN_ALLOCATOR}.get(kind)
    parts = zip(levels, levels[1:], calls, calls[1:])
    return all(later - earlier >= (least * (j - i) if least else 1) for earlier, later, i, j in parts)


def _grown(kinds, first, last, n):
    """Lines about what grew between two counts, n calls apart."""
    lines = []
    for kind in kinds:
        lab, meaning = _MEANING[kind]
        each = (_level(kind, last) - _level(kind, first)) / n
        if kind == "allocator":
            alone = not set(kinds) - {"graphs", "allocator"}
            lines.append(
                f"in TensorFlow's allocator: {_amount(each)} more" + (f": {meaning}; {see_lab(lab)}" if alone else "")
            )
            continue
        if kind == "graphs" and "variables" in kinds:
            lab = "a_model_per_trial"  # a kept training step keeps its model's variables, or the other way round
        rows = sorted((last[kind] - first[kind]).items(), key=lambda row: (-row[0][1] * row[1], -row[1]))
        evidence = ", ".join(f"{number / n:.3g} × {what}" for (what, _), number in rows[:3])
        amount = (
            f"{each:.3g}" if kind in ("graphs", "pipelines") else _amount((size(last[kind]) - size(first[kind])) / n)
        )
        lines.append(f"{kind}: {amount} more ({evidence}{', …' if len(rows) > 3 else ''}): {meaning}; {see_lab(lab)}")
    return lines


def _holders(before, after, n):
    """A line with the names that hold more after n calls than before, if there are any."""
    rows = [row for row in more(before, after) if row[0] >= _LEAST_BYTES * n or row[1] >= n // 2]
    held = ", ".join(
        f"{name} ({_amount(grown) if grown > 0 else f'{items} items'} more)" for grown, items, name in rows[:3]
    )
    return [f"names that hold more after these {n} calls: {held}"] if held else []


def _amount(amount):
    return mib(amount) if amount >= MIB / 10 else f"{amount:,.0f} B"


@dataclass
class Spent:
    """What a block under memory_budget() used, in MiB. before_mib: tensors in use when it began, which are not counted.

    peak_mib: the most that was in use at any moment over before_mib; None until the block has ended.
    """

    before_mib: float
    peak_mib: float | None = None


@contextlib.contextmanager
def memory_budget(budget):
    """`with memory_budget("512 MiB") as spent:` fails if the block's tensors need more than that at any moment.

    Counted is what the block adds to the tensors in use when it begins, so that a test does not depend on what earlier
    ones left. The peak is the counter of TensorFlow's allocator, on a CPU that of GPUs: exact, up to how tightly it
    packs its blocks. It does not stop the block; a hard limit in a process of its own is
    `labsupport.run(function, budget=…)`.

    Raises AssertionError over the budget, BudgetError for what is no size, and where the allocator does not count
    every tensor: a budget that cannot be checked does not pass.
    """
    __tracebackhide__ = True
    allowed = parse_size(budget)
    gauge = meter.active or _own_gauge()
    gc.collect()
    names = _held(sys._getframe(1))
    spent = Spent(gauge.counter.read()[0] / MIB)
    alone = (
        gauge is not meter.active and not _open
    )  # an arm's pool is one region already, and so is one within another block
    plugs = _fresh_room(gauge.counter, allowed) if alone and gauge.counter.device == "CPU:0" else []
    before = gauge.tensors_now()
    _open.append(budget)
    # Within an arm a recording would change what the arm measures.
    look = contextlib.nullcontext() if gauge is meter.active else recorded(f"memory_budget {budget}")
    try:
        with look as seen, gauge.phase(f"memory_budget {budget}"):
            yield spent
    finally:
        _open.pop()
        spent.peak_mib = (gauge.phases[-1].peak - before) / MIB
        plugs.clear()
    if spent.peak_mib * MIB > allowed:
        raise AssertionError(
            f"tensors peaked at {spent.peak_mib:,.1f} MiB, over the budget of {mib(allowed)}\n{_at_peak(seen)}"
            f"  in use before the block, not counted: {spent.before_mib:,.1f} MiB{_most(names)}\n"
            f"  still in use after it: {mib(gauge.phases[-1].held - before)} more{_most(_held(sys._getframe(1)))}\n"
            "  to see where: python -m labsupport doctor your_script.py"
        )


def _at_peak(seen):
    """Lines on the largest holders at the peak; none where that was not recorded. seen: of recorded(), or None."""
    rows = largest(seen.parts) if seen and seen.parts else []
    return "".join(f"  of that {row}\n" for row in rows)


def _most(names):
    """The three names that hold most variables and tensors."""
    rows = sorted(((count["variables"] + count["tensors"], name) for name, count in names.items()), reverse=True)
    held = ", ".join(f"{name} {mib(held)}" for held, name in rows[:3] if held)
    return f" (held by {held})" if held else ""


_open = []  # the blocks that run now, the outermost first


@functools.cache
def _own_gauge():
    """This process's meter."""
    if "tensorflow" not in sys.modules:
        os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")
    import tensorflow as tf

    counter = allocator(tf)
    counted = counts_everything(counter)
    if not counted:
        why = "keeps no statistics" if counted is None else "counts only large blocks"
        raise BudgetError(
            f"this budget cannot be checked: TensorFlow's allocator on {counter.device} {why} in this process. Set the "
            "environment variable TF_CPU_ALLOCATOR_USE_BFC=1 before TensorFlow is imported; labsupport's pytest plugin "
            "does, unless something imported TensorFlow before it or the variable is set to 0"
        )
    gauge = meter.Meter(counter)
    gauge.start()
    return gauge


def _fresh_room(counter, budget):
    """Tensors that fill the holes in the allocator's pool while a block runs, next to a free region of twice the budget.

    A block of memory that is less than twice what is asked for is handed out, and counted, whole. In the holes that
    earlier tests left, a tensor of 4 MiB can count as 7, and in a pool that grows by doubling one of 94 as 128. No page
    of all this is ever touched, so it costs no memory.
    """
    tf = counter.tf

    def empty(size):
        with tf.device(counter.device):
            tensor = tf.raw_ops.Empty(shape=[size // 16], dtype=tf.complex128)
        return tensor, np.frombuffer(memoryview(tensor), np.uint8).ctypes.data

    room = min(2 * budget, machine_memory() // 2)
    plugs = []
    try:
        tensor, start = empty(room)
        del tensor
        size = room // 2
        while size >= _SMALLEST_HOLE:
            tensor, place = empty(size)  # the allocator takes the smallest hole that is large enough
            if start <= place < start + room:
                size //= 2
            else:
                plugs.append(tensor)
            del tensor
    except tf.errors.ResourceExhaustedError:  # then the count is less tight, never too low
        pass
    return plugs
