"""Graders of the lab on reading an out-of-memory error."""

import re

from labsupport.ground.budget import MIB
from labsupport.lesson.exercises import exercise, try_out, untouched

_WORDS = ("in pieces", "in use")


def _made_dump(*pieces):
    """The map of a dump as TensorFlow writes it: "+" and MiB in use, "-" and MiB free; a small region of full ones behind."""
    rows, at = [f"I0000 bfc_allocator.cc:1085] Next region of size {sum(map(abs, pieces)) * MIB}"], 0x7F0000000000
    for size in pieces:
        state = "InUse" if size > 0 else "Free "
        rows.append(f"I0000 bfc_allocator.cc:1105] {state} at {at:x} of size {abs(size) * MIB} next 7")
        at += abs(size) * MIB
    rows += [f"I0000 bfc_allocator.cc:1085] Next region of size {MIB}"]
    rows += [f"I0000 bfc_allocator.cc:1105] InUse at {at:x} of size {MIB} next 9"]
    used, size = sum(size for size in pieces if size > 0) + 1, sum(map(abs, pieces)) + 1
    rows += [f"I0000 bfc_allocator.cc:1117] Sum Total of in-use chunks: {used:.2f}MiB"]
    rows += [f"I0000 bfc_allocator.cc:1119] Total size in pool: {size:.2f}MiB memory_limit_: {size:.2f}MiB"]
    return "\n".join([*rows, "Stats: ", f"Limit:  {size:.2f}MiB", f"InUse:  {used:.2f}MiB", ""])


@exercise(
    1,
    "Add up what is free, and compare it with what was wanted. In which unit is each of the two?",
    "chunks(log) gives (state, bytes) of every chunk; one MiB has 2**20 bytes.",
)
def cause(answer, dump, wanted):
    """answer(log, MiB) tells whether enough was free in all, for the lab's dump and made ones."""
    parts = re.split(r"Next region of size (\d+)", dump)
    _, largest = max(zip(map(int, parts[1::2]), parts[2::2]))
    free = sum(int(size) for size in re.findall(r"Free +at [0-9a-f]+ of size (\d+)", largest)) / MIB
    # 3 % more than is free: whoever takes a million bytes for a MiB finds 5 % too much.
    asked = [(dump, wanted, free), (dump, 1.03 * free, free)]
    asked += [(_made_dump(40, -30, 20, -25, 13), 50, 55), (_made_dump(60, -10, 50), 20, 10), (_made_dump(100), 5, 0)]
    for log, size, free in asked:
        found, expected = answer(log, size), _WORDS[free < size]
        assert not untouched(found), "cause() returns nothing yet: return one of two texts."
        assert found in _WORDS, f"you return {found!r}: either 'in pieces' or 'in use' is wanted."
        story = "the memory was there, in pieces" if free >= size else "too much was in use"
        assert found == expected, f"{free:.0f} MiB free, {size:.0f} wanted: {story}; you say {found!r}."


def _encoded(answer, output, batch, lengths):
    """In the arm: for each output that answer gives (its shape, its distance from the batch's own); None for none, or words."""
    import numpy as np

    right = [output(batch(length)).numpy() for length in lengths]
    found = answer((batch(length) for length in lengths), output)
    if untouched(found):
        return None
    if not isinstance(found, (list, tuple)):
        return f"you return something of type {type(found).__name__}: a list of outputs is wanted."
    found = [np.asarray(one) for one in found]
    apart = lambda one, own: float(abs(one - own).max()) if one.shape == own.shape else None
    return [(list(one.shape), apart(one, own)) for one, own in zip(found, right)] + [
        (list(one.shape), None) for one in found[len(right) :]
    ]


@exercise(
    2,
    "What lies between the holes need not stay in the region, or need not come in that order.",
    "A tensor's .numpy() is a copy that TensorFlow's allocator does not know. Or: sort, and put back what was sorted.",
)
def encode_all(answer, output, batch, lengths, budget):
    """answer(batches, output) gives all outputs in the batches' order, within the budget in which the plain loop fails."""
    done = try_out(_encoded, answer, output, batch, lengths, budget=budget, label="your answer to 2")
    assert done.value is not None, "encode_all() returns nothing yet: return a list of outputs."
    assert len(done.value) == len(lengths), (
        f"{len(lengths)} outputs are wanted, one for each batch; you return {len(done.value)}."
    )
    wide = [shape for shape, _ in done.value if len(shape) != 3]
    assert not wide, f"an output has the shape {wide[0]}: it is not what output() returned."
    for number, (shape, apart) in enumerate(done.value):
        assert shape[1] == lengths[number], (
            f"output {number} belongs to another batch: {shape[1]} words, not {lengths[number]}."
        )
        assert apart is not None and apart < 1e-3, f"the values of output {number} are not those of its batch."
