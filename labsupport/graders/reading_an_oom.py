"""Graders of the lab on reading an OOM."""

import numpy as np

from labsupport.ground.budget import MIB
from labsupport.lesson.exercises import exercise, finished
from labsupport.showing.running import run

# Two regions as the allocator lists them, the way a dump ends; what is free lies in pieces of 3, 1 and 2 MiB.
_DUMP = """\
2025-01-01 12:00:00: I tsl/framework/bfc_allocator.cc:1046] Bin (2097152): \tTotal Chunks: 2, Chunks in use: 0. 5.0MiB allocated
Next region of size 2097152
InUse at 7f3c00000000 of size 1048576 next 1
Free  at 7f3c00100000 of size 1048576 next 18446744073709551615
Next region of size 9437184
Free  at 7f3d00000000 of size 3145728 next 3
InUse at 7f3d00300000 of size 4194304 next 4
Free  at 7f3d00700000 of size 2097152 next 18446744073709551615
"""


@exercise(
    1,
    "Every line of the map tells whether its chunk is free.",
    "chunks(log) gives pairs; which of the two parts of a pair is text, and in which unit is the other?",
)
def largest_free(answer, dump, pieces):
    """answer(log) is the largest free piece in MiB; pieces: those of the lab's own dump, in MiB."""
    for log, right in ((dump, pieces), (_DUMP, [3.0, 2.0])):
        found = answer(log)
        assert found is not None, "largest_free() returns nothing yet: return a number of MiB."
        assert np.ndim(found) == 0 and not isinstance(found, str), f"it returns {type(found).__name__}, not one number."
        found = float(found)
        told = f"of the pieces {', '.join(f'{piece:.1f}' for piece in right)} MiB it finds {found:,.4g}"
        assert not abs(found - max(right) * MIB) < 1, f"{told}: that is in bytes."
        assert not (len(right) > 1 and abs(found - sum(right)) < 0.01), f"{told}: that is all that is free, in pieces."
        assert abs(found - max(right)) < 0.01, f"{told}. Look at the free ones only."


@exercise(
    2,
    "The results need not stay where the batches come and go.",
    "What holds a result as a NumPy array? Or: what could be there, at its full size, before the first batch?",
)
def in_order(answer, sweep, sizes, budget):
    """answer(sizes) works through the batches in their order inside the budget; gives what sweep(sizes) gives."""
    want = sweep(sizes)
    done = run(answer, sizes, budget=budget, label="your answer to 2", quiet=True)
    finished(done)
    assert done.value is not None, "in_order() returns nothing yet: return the results, one array a batch."
    assert isinstance(done.value, (list, tuple, np.ndarray)), f"it returns {type(done.value).__name__}, not a list."
    got = [np.asarray(part) for part in done.value]
    assert sum(len(part) for part in got) == sum(len(part) for part in want), (
        f"it returns {sum(map(len, got)):,} rows of results for {sum(map(len, want)):,} rows of data: some are lost."
    )
    got, want = np.concatenate(got), np.concatenate(want)
    assert got.shape == want.shape, f"the results have the shape {got.shape}, not {want.shape}."
    assert np.allclose(got, want, rtol=1e-3, atol=1e-5), (
        "the results are not those of these batches in this order: a result stands in another's place."
    )
