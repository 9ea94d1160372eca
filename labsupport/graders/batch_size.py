"""Graders of the lab on what a batch costs."""

import os
import tempfile
from pathlib import Path

import numpy as np

from labsupport.ground.budget import MIB, process_status
from labsupport.ground.meter import phase
from labsupport.lesson.exercises import exercise, try_out, try_out_once, untouched

_FEATURES = 256


def _value(function, images, labels):
    """In the arm: what the given way or the answer returns, on a small network whose first layers dominate.

    The last, shorter chunk of 64 is unlike the others, so that it shows how much it weighs: all right, and much brighter.
    """
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    body = [keras.layers.Conv2D(64, 3, padding="same", activation="relu") for _ in range(2)]
    head = [keras.layers.Flatten(), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *body, *head])
    images, labels, rest = images[..., None].copy(), labels.copy(), len(images) % 64
    images[-rest:] *= 20
    labels[-rest:] = tf.argmax(model(images[-rest:]), axis=1)
    with phase("value"):
        value = function(model, images, labels)
    return None if untouched(value) else np.asarray(value, "float64")


def _values_and_peaks(answer, given, images, labels, label):
    mine = try_out(_value, answer, images, labels, label=label)
    assert mine.value is not None, "the function returns nothing yet."
    theirs = try_out_once(_value, given, images, labels, label="all at once")
    return theirs.value, mine.value, theirs.phase("value").peak_mib, mine.phase("value").peak_mib


@exercise(
    1,
    "Accuracy is a count of right answers over a count of all: both can be gathered chunk by chunk.",
    "keras.metrics.SparseCategoricalAccuracy keeps the two counts: see its update_state and result.",
)
def evaluated(answer, given, images, labels):
    """answer(model, images, labels) gives the accuracy that the given way gives, with a chunk of images in memory."""
    reference, yours, before, after = _values_and_peaks(answer, given, images, labels, "your answer to 1")
    assert yours.size == 1, f"it returns {yours.size} numbers: return one accuracy."
    assert 0 <= float(yours) <= 1, f"it returns {float(yours):,.1f}: an accuracy lies between 0 and 1."
    assert after < 0.3 * before, f"peak {after:.1f} MiB against {before:.1f} at once: more than a chunk goes through."
    assert abs(float(yours) - reference) < 1e-4, (
        f"accuracy {float(yours):.4f} against {reference:.4f} at once: it is that of a part of the images, "
        "or the last, shorter chunk counts as much as the others."
    )


def _through_a_file(answer, rows, size):
    """In the arm: what is wrong with the batches of a generator over a file of its own, or figures of reading it."""
    expected = np.random.default_rng(0).standard_normal((256, _FEATURES), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.bin")
        with open(path, "wb") as file:
            for start in range(0, rows, 256):
                (expected + np.float32(start))[: rows - start].tofile(file)
        own, counted = process_status("RssAnon"), _bytes_read()
        generator, seen, most, number = answer(path, size), 0, own, 0
        if untouched(generator):
            return "batches() gives nothing yet: it must yield arrays."
        for number, batch in enumerate(generator, 1):
            batch = np.asarray(batch)
            if batch.ndim != 2 or batch.shape[1] != _FEATURES or batch.dtype != np.float32:
                return f"batch {number} has shape {batch.shape} and {batch.dtype}, not (rows, {_FEATURES}) of float32."
            if len(batch) > size or len(batch) < min(size, rows - seen):
                return f"batch {number} has {len(batch)} rows of the {rows - seen} left, where {size} were asked for."
            index = np.arange(seen, seen + len(batch))
            if not np.array_equal(batch, expected[index % 256] + (index // 256 * 256)[:, None].astype(np.float32)):
                return f"batch {number} does not hold the rows that follow in the file."
            seen, most = seen + len(batch), max(most or 0, process_status("RssAnon") or 0)
    if seen != rows:
        return f"{seen:,} rows came of {rows:,}: is the last, shorter batch in?"
    return {"grown": None if own is None else most - own, "read": _bytes_read() - counted}


def _bytes_read():
    """Bytes that this process has read from files so far (rchar, see proc(5)); 0 where there is no /proc."""
    counts = Path("/proc/self/io")
    return int(counts.read_text().split()[1]) if counts.exists() else 0


@exercise(
    2,
    "A file that is open remembers how far it was read; so does an offset that you keep yourself.",
    "A row has FEATURES × 4 bytes; np.frombuffer makes numbers of bytes, and the last read just gives fewer of them.",
)
def read_in_batches(answer):
    """answer(path, size) yields the rows of a file in order, reads them once and keeps none."""
    rows, size = 50_005, 1000
    done = try_out(_through_a_file, answer, rows, size, label="your answer to 2")
    whole, grown, read = rows * _FEATURES * 4, done.value["grown"], done.value["read"]
    assert read < 1.5 * whole, f"{read / whole:.0f} times the file was read: go on where the batch before ended."
    assert grown is None or grown < 0.5 * whole, (
        f"the process grew by {grown / MIB:.0f} MiB over a file of {whole / MIB:.0f}: the file stays in memory."
    )


@exercise(
    3,
    "A mean is a sum over a count: which of the two can be gathered chunk by chunk, and what is then left to keep?",
    "tf.reduce_sum over all axes but the channels leaves 64 numbers a chunk; there are len(images) × 8 × 8 of each.",
)
def reduced_at_once(answer, given, images, labels):
    """answer(model, images, labels) gives the 64 means that the given way gives, and keeps no chunk's outputs."""
    reference, yours, before, after = _values_and_peaks(answer, given, images, labels, "your answer to 3")
    assert yours.shape == (64,), f"the shape is {yours.shape}, not (64,)."
    times = np.sum(yours) / np.sum(reference)
    assert 0.2 < times < 5, f"the means are {times:.3g} times as large as they should be: what is the sum divided by?"
    off = np.max(np.abs(yours - reference) / (np.abs(reference) + 1e-12))
    assert off < 1e-3, (
        f"the means are off by up to {off:.0%}: does the last, shorter chunk count as much as the others?"
    )
    assert after < 0.3 * before, f"peak {after:.1f} MiB against {before:.1f}: the outputs of chunks are still kept."
