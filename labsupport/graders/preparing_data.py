"""Graders of the lab on preparing data on the host."""

import tracemalloc

import numpy as np

from labsupport.ground.budget import MIB
from labsupport.lesson.exercises import as_written, exercise, no_dataset, try_out, untouched

ROWS, BATCH = 60_000, 64
NUMBERS, CLASSES = 4, 250  # columns, exercise 1
COLUMNS = 32  # exercise 2
# Of all rows as float32: what is given and its copies as tensors are less than a tenth, all dummies as bytes a quarter.
_AT_ONCE = 0.2


def _count():
    """In the arm: count what Python and NumPy allocate from here on. An answer that measures itself does not end that."""
    tracemalloc.start()
    tracemalloc.reset_peak = tracemalloc.stop = lambda: None


def _most_taken():
    """In the arm: MiB of arrays and Python objects, at most, since _count()."""
    return tracemalloc.get_traced_memory()[1] / MIB


def _wrong_batch(given, numbers, codes):
    """A word why this is not the batch of these rows, or None."""
    wanted = (len(codes), NUMBERS + CLASSES)
    if given.dtype != np.float32:
        return f"the batches are {given.dtype}, not float32."
    if given.shape != wanted:
        return f"a batch has the shape {given.shape}, and {wanted} was due there."
    if not np.array_equal(given[:, :NUMBERS], numbers):
        return f"the first {NUMBERS} columns are not those of `numbers`, in their order."
    own = given[np.arange(len(codes)), NUMBERS + codes]
    if (own != 1).any() or np.count_nonzero(given[:, NUMBERS:]) != len(codes):
        return "in the columns of the classes there must be 1 for the row's own class, and 0 for the others."
    return None


def _epoch(dataset, numbers, codes):
    """A word why an epoch of the dataset is wrong, or None. It is read to its end, so that its peak is known."""
    word, start = None, 0
    for given in dataset:
        if isinstance(given, (tuple, dict)):
            return "an element must be one tensor: numbers and dummies side by side."
        given, here = np.asarray(given), slice(start, start + BATCH)
        word = word or _wrong_batch(given, numbers[here], codes[here])
        start += BATCH
    return word or (None if start >= len(codes) else f"only {start} rows of {len(codes)} came in an epoch.")


def _rows(answer):
    """In the arm: a word why the rows are wrong, or MiB of arrays that it took."""
    random = np.random.default_rng(0)
    numbers = random.random((ROWS, NUMBERS), np.float32)
    codes = random.integers(CLASSES, size=ROWS, dtype=np.int32)
    _count()
    dataset = answer(numbers, codes, CLASSES)
    if word := no_dataset(dataset, "float32 rows"):
        return word
    dataset = as_written(dataset)
    word = _epoch(dataset, numbers, codes)
    if word is None and (again := _epoch(dataset.take(1), numbers[:BATCH], codes[:BATCH])):
        word = f"in the second epoch: {again}"
    return word or _most_taken()


@exercise(
    1,
    "What is small in a row before its dummies are made? Let a dataset of just that come in batches.",
    "map sees a batch of numbers and a batch of codes; tf.one_hot makes the dummies of that batch.",
)
def rows_of(answer):
    """answer(numbers, codes, classes) is a dataset of rows with dummies, of which only a few batches exist at a time."""
    done = try_out(_rows, answer, label="your answer to 1")
    whole, most = ROWS * (NUMBERS + CLASSES) * 4 / MIB, max(done.value, done.peak_mib)
    assert most < _AT_ONCE * whole, (
        f"all rows are {whole:.0f} MiB, and {most:.0f} MiB were held at once: the dummies of all rows are made, not of a batch."
    )


def _normalised(answer):
    """In the arm: a word why the array is wrong, or MiB of arrays that were made beside x."""
    random = np.random.default_rng(0)
    x = random.normal(5, 2, (ROWS, COLUMNS)).astype(np.float32) * np.linspace(1, 9, COLUMNS, dtype=np.float32)
    x.sort(axis=0)  # so that no part of the rows is like the whole
    some = x[::97].astype(np.float64)
    mean, deviation = (np.array([made(column, dtype=np.float64) for column in x.T]) for made in (np.mean, np.std))
    _count()
    given = answer(x)
    most = _most_taken()
    if untouched(given):
        return "the function returns nothing yet: return the array."
    if not isinstance(given, np.ndarray):
        return f"the function returns {type(given).__name__}, not an array of NumPy."
    if given.shape != x.shape or given.dtype != np.float32:
        return f"what comes back is {given.dtype} of the shape {given.shape}, not float32 of {x.shape}."
    apart = abs(given[::97] - (some - mean) / deviation).max()
    if not apart < 0.01:  # nan is none either
        return (
            f"each column must have the mean 0 and the deviation 1 over all its rows: a number is off by {apart:.2g}."
        )
    return most


@exercise(
    2,
    "`rows - mean` and `rows.std()` make arrays of their own, as large as their rows. How many rows or columns need it at a time?",
    "Each `column` of x.T is a view, one column long: column -= … and column /= … write into x itself.",
)
def normalise(answer):
    """answer(x) is x with the mean 0 and the deviation 1 in each column, for which no second x is made."""
    done = try_out(_normalised, answer, label="your answer to 2")
    whole, most = ROWS * COLUMNS * 4 / MIB, max(done.value, done.peak_mib)
    assert most < 0.25 * whole, f"x has {whole:.1f} MiB, and {most:.1f} MiB were taken beside it."
