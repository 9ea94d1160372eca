"""Graders of the lab on files larger than memory."""

import os
import tempfile

import numpy as np

from labsupport.ground.budget import MIB
from labsupport.lesson.exercises import exercise, try_out, untouched

_ROWS, _WIDTH, _BATCH = 3072, 8192, 96
_WHOLE = _ROWS * _WIDTH * 4 / MIB
# What an answer may hold, of its own and as tensors. Pages of a file are no part of it (RLIMIT_DATA, on Linux).
_LIMITS = {"budget": "64 MiB", "outside": f"{0.75 * _WHOLE:.0f} MiB"}


def _rows(numbers):
    """The rows of the file that have these numbers: a drift and noise over the rows, times a slope a column."""
    noise, slopes = np.random.default_rng(0).random(_ROWS), np.random.default_rng(1).uniform(0.5, 1, _WIDTH)
    over_rows = (np.arange(_ROWS) / _ROWS + noise)[numbers]
    return (1000 + np.outer(over_rows, slopes)).astype(np.float32)


def _blocks():
    for start in range(0, _ROWS, 256):
        yield slice(start, start + 256), _rows(np.arange(start, start + 256))


def _numbers_of(pair, number_of):
    """(the numbers of the rows of a batch, None), or (None, what is wrong with it in words)."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return None, "a batch must be a pair (x, y)."
    x, y = np.asarray(pair[0]), np.asarray(pair[1])
    if x.shape[1:] != (_WIDTH,) or x.shape[:1] != y.shape:
        return None, f"a batch has x of the shape {x.shape} and y of {y.shape}, and ({_BATCH}, {_WIDTH}) is asked for."
    if x.dtype != np.float32:
        return None, f"x is {x.dtype}, and the file holds float32."
    numbers = [number_of.get(int(label), -1) for label in y]
    if min(numbers) < 0 or not (x == _rows(numbers)).all():
        return None, "x and y of a batch do not belong together, or they are not those of the file."
    return numbers, None


def _two_epochs(answer):
    """In the arm: the numbers of the rows in each batch of two epochs, or a word why they are wrong."""
    import h5py

    path = os.path.join(tempfile.mkdtemp(), "rows.h5")
    labels = np.random.default_rng(2).permutation(_ROWS)
    with h5py.File(path, "w") as file:
        file["y"], x = labels, file.create_dataset("x", (_ROWS, _WIDTH), "float32")
        for rows, block in _blocks():
            x[rows] = block
    number_of, epochs = {int(label): number for number, label in enumerate(labels)}, []
    for seed in (1, 2):
        batches = answer(path, _BATCH, seed)
        if untouched(batches):
            return "the function returns nothing yet: yield pairs (x, y)."
        epochs.append([])
        for pair in batches:
            numbers, word = _numbers_of(pair, number_of)
            if word:
                return word
            epochs[-1].append(numbers)
    return epochs


def _meet(batches):
    """All pairs of rows that meet in a batch."""
    return {(one, other) for batch in batches for one in batch for other in batch if one < other}


@exercise(
    1,
    "An order of row numbers is small. Which of them are in a batch?",
    "h5py reads a list of rows if their numbers increase: np.sort. Rows of one batch may stand in any order.",
)
def shuffled(answer):
    """answer(path, batch, seed) yields batches of all rows of an HDF5 file, shuffled by seed, each read when it is asked for."""
    done = try_out(_two_epochs, answer, label="your answer to 1", **_LIMITS)
    for batches in done.value:
        came = [number for batch in batches for number in batch]
        assert sorted(came) == list(range(_ROWS)), f"{len(set(came))} of {_ROWS} rows came: each must come once."
        assert {len(batch) for batch in batches} == {_BATCH}, f"there are batches of other sizes than {_BATCH}."
    first, second = done.value
    assert first != second, "another seed gives the same order."
    pairs, again = _meet(first), _meet(second)
    # Of rows that meet, in batches that are drawn anew: one in 32 meets again. Whole batches in another order: all.
    assert len(pairs & again) < 0.3 * len(pairs), "the same rows meet in every epoch: only whole batches change places."


def _statistics(answer):
    """In the arm: ((mean, std) as they should be, those given), or a word."""
    path = os.path.join(tempfile.mkdtemp(), "rows.npy")
    mapped = np.lib.format.open_memmap(path, "w+", np.float32, (_ROWS, _WIDTH))
    sums, squares = np.zeros(_WIDTH), np.zeros(_WIDTH)
    for rows, block in _blocks():
        mapped[rows] = block
        sums += (block - 1000.0).sum(0, "float64")
        squares += ((block - 1000.0).astype("float64") ** 2).sum(0)
    del mapped
    given = answer(path)
    if untouched(given):
        return "the function returns nothing yet: return mean and standard deviation."
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        return "return a pair: the means and the standard deviations of the columns."
    mean = sums / _ROWS
    return (1000 + mean, np.sqrt(squares / _ROWS - mean**2)), [np.asarray(each, "float64") for each in given]


@exercise(
    2,
    "A block of rows is small. What of it do you need when it is gone?",
    "Two passes: first the sum of the rows, then the sum of their squared distances from the mean. Add up in float64.",
)
def statistics(answer):
    """answer(path) gives mean and standard deviation of each column of an .npy file, without a copy of the array."""
    done = try_out(_statistics, answer, label="your answer to 2", **_LIMITS)
    (mean, std), (given_mean, given_std) = done.value
    for name, right, given in (("means", mean, given_mean), ("standard deviations", std, given_std)):
        assert given.shape == right.shape, f"the {name} have the shape {given.shape}, and there are {_WIDTH} columns."
    assert (abs(given_mean - mean) < 0.05 * std).all(), (
        f"a mean is off by {abs(given_mean - mean).max():.2g}: is every row in?"
    )
    apart = abs(given_std / std - 1).max()
    assert apart < 0.005, (
        f"a standard deviation is off by {apart:.0%}: every row counts, all have one mean, and the difference of two large "
        "numbers needs float64."
    )
