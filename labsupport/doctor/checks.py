"""Two checks for the tests of your own repository: a budget for tensors, and no growth from call to call."""

import functools
import gc
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from labsupport.ground import meter
from labsupport.doctor.alive import MEMORY, alive, by_name, counts_everything, device_of, own_frames, own_names, running_tensorflow, size
from labsupport.ground.budget import MIB, BudgetError, machine_memory, mib, parse_size

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
_SMALLEST_HOLE = 64 * 1024
_LABS = {
    "variables": ("09", "models or variables are kept alive"),
    "tensors": ("07", "tensors are retained"),
    "arrays": ("07", "NumPy arrays are kept"),
    "pipelines": ("03", "datasets or iterators are kept"),
    "graphs": ("08", "graphs are kept: the function is retraced, or made anew"),
    "allocator": ("03", "no Python object holds it: the buffers of an iterator, or a cache() that is still filling (then let a call be a whole epoch)"),
}  # fmt: skip


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
        raise TypeError(f"assert_no_growth() needs a function to call, not {type(step).__name__}: write assert_no_growth(step), not assert_no_growth(step())")
    if n < 2 * _PARTS:
        raise ValueError(f"n is {n}: give at least {2 * _PARTS} calls, so that growth can be told from a single event")
    for _ in range(_WARM_UP):
        step()
    seen, names = [_count()], {}
    calls = [0] + [n * part // _PARTS for part in range(1, _PARTS + 1)]
    for before, after in zip(calls, calls[1:]):
        for _ in range(after - before):
            step()
        seen.append(_count())
        if after == calls[_PARTS // 2]:  # what is told of the growth is of the second half, without what filled up in the first
            names = by_name(own_names(own_frames(sys._getframe(1))))
    grown = {}
    for kind in _LABS:
        levels = [_level(kind, census) for census in seen]
        least = {"tensors": _LEAST_BYTES, "arrays": _LEAST_BYTES, "allocator": _LEAST_IN_ALLOCATOR}.get(kind)
        if None not in levels and all(
            b - a >= (least * (j - i) if least else 1) for a, b, i, j in zip(levels, levels[1:], calls, calls[1:])
        ):
            grown[kind] = (levels[-1] - levels[_PARTS // 2]) / (n - calls[_PARTS // 2])
    if grown:
        last = n - calls[_PARTS // 2]
        title = f"memory grows with every call of {getattr(step, '__name__', 'step')}(), by this much a call (mean of the last {last} of {_WARM_UP + n}):"
        holders = _holders(names, by_name(own_names(own_frames(sys._getframe(1)))), last)
        raise AssertionError(title + "".join("\n  " + line for line in _growth(last, grown, seen[_PARTS // 2], seen[-1], holders)))


def _count():
    census = alive()
    tf = running_tensorflow()
    census["allocator"] = meter.Meter(tf, device_of(tf), tensors_zero=0).tensors_now() if tf else None
    return census


def _level(kind, census):
    """Bytes, or for what has no size or is never small a number."""
    if kind == "allocator":
        return census[kind]
    return size(census[kind]) if kind in ("tensors", "arrays") else census[kind].total()


def _holders(before, after, n):
    """Names that hold more than before: [(bytes, items, name)], most first."""
    rows = []
    for name, count in after.items():
        more = count - before.get(name, type(count)())
        grown = sum(more[kind] for kind in MEMORY)
        if grown >= _LEAST_BYTES * n or more["items"] >= n // 2:
            rows.append((grown, more["items"], name))
    return sorted(rows, reverse=True)


def _growth(n, grown, first, last, holders):
    """Lines about what grew in n calls."""
    lines = []
    python = [kind for kind in grown if kind != "allocator"]
    for kind in python:
        lab, meaning = _LABS[kind]
        if kind == "graphs" and "variables" in grown:  # a kept training step keeps its model's variables, or the other way round
            lab = "09"
        more = sorted((last[kind] - first[kind]).items(), key=lambda row: (-row[0][1] * row[1], -row[1]))
        evidence = ", ".join(f"{number / n:.3g} × {what}" for (what, _), number in more[:3]) + (", …" if len(more) > 3 else "")
        amount = f"{grown[kind]:.3g}" if kind in ("graphs", "pipelines") else _amount((size(last[kind]) - size(first[kind])) / n)
        lines.append(f"{kind}: {amount} more ({evidence}): {meaning}; see lab {lab}")
    if "allocator" in grown:
        lab, meaning = _LABS["allocator"]
        alone = not set(python) - {"graphs"}
        lines.append(f"in TensorFlow's allocator: {_amount(grown['allocator'])} more" + (f": {meaning}; see lab {lab}" if alone else ""))
    if holders:
        held = ", ".join(f"{name} (" + (_amount(grown) if grown else f"{items} items") + " more)" for grown, items, name in holders[:3])
        lines.append(f"names that hold more after these {n} calls: {held}")
    return [*lines, "to see where: python -m labsupport doctor your_script.py"]


def _amount(amount):
    return mib(amount) if amount >= MIB / 10 else f"{amount:,.0f} B"


@dataclass
class Spent:
    """What a block under memory_budget() used, in MiB. before_mib: tensors in use when it began, which are not counted.

    peak_mib: the most that was in use at any moment over before_mib; None until the block has ended.
    """

    before_mib: float
    peak_mib: float | None = None


@contextmanager
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
    names = by_name(own_names(own_frames(sys._getframe(1))))
    spent = Spent((gauge.tensors_now() + gauge.tensors_zero) / MIB)
    plugs = _fresh_room(gauge, allowed) if gauge.device == "CPU:0" and gauge is not meter.active and not _open else []
    before = gauge.tensors_now()
    _open.append(budget)
    try:
        with gauge.phase(f"memory_budget {budget}"):
            yield spent
    finally:
        _open.pop()
        spent.peak_mib = (gauge.phases[-1].peak - before) / MIB
        plugs.clear()
    if spent.peak_mib * MIB > allowed:
        raise AssertionError(
            f"tensors peaked at {spent.peak_mib:,.1f} MiB, over the budget of {mib(allowed)}\n"
            f"  in use before the block, not counted: {spent.before_mib:,.1f} MiB{_most(names)}\n"
            f"  still in use after it: {mib(gauge.phases[-1].held - before)} more{_most(by_name(own_names(own_frames(sys._getframe(1)))))}\n"
            "  to see where: python -m labsupport doctor your_script.py"
        )


def _most(names):
    """The three names that hold most variables and tensors."""
    rows = sorted(((count["variables"] + count["tensors"], name) for name, count in names.items()), reverse=True)
    held = ", ".join(f"{name} {mib(held)}" for held, name in rows[:3] if held)
    return f" (held by {held})" if held else ""


_open = []  # the blocks that run now, the outermost first


def _own_gauge():
    """This process's meter."""
    if "tensorflow" not in sys.modules:
        os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")
    import tensorflow as tf

    return _started(tf, device_of(tf))


@functools.cache
def _started(tf, device):
    counted = counts_everything(tf, device)
    if not counted:
        why = "keeps no statistics" if counted is None else "counts only large blocks"
        raise BudgetError(
            f"this budget cannot be checked: TensorFlow's allocator on {device} {why} in this process. Set the environment variable "
            "TF_CPU_ALLOCATOR_USE_BFC=1 before TensorFlow is imported; labsupport's pytest plugin does, unless something imported "
            "TensorFlow before it or the variable is set to 0"
        )
    gauge = meter.Meter(tf, device)
    gauge.start()
    return gauge


def _fresh_room(gauge, budget):
    """Tensors that fill the holes in the allocator's pool while a block runs, next to one free region of twice the budget.

    A block of memory that is less than twice what is asked for is handed out, and counted, whole. In the holes that
    earlier tests left, a tensor of 4 MiB can count as 7, and in a pool that grows by doubling one of 94 as 128. No page
    of all this is ever touched, so it costs no memory.
    """
    tf = gauge.tf

    def empty(size):
        with tf.device(gauge.device):
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
