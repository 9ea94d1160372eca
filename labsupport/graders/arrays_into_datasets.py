"""Graders of the lab on NumPy arrays that become datasets."""

import gc
import os
import tempfile

import numpy as np

from labsupport.ground.budget import MIB, process_status
from labsupport.lesson.exercises import as_written, exercise, no_dataset, try_out, untouched

_EMPTY = "the function returns nothing yet: return "


def _sizes(sizes, count, batch):
    """A word why these are not the sizes of batches that hold each of `count` elements once; None if they are."""
    if max(sizes, default=0) != batch:
        return f"the largest batch holds {max(sizes, default=0)}, not {batch}."
    if sum(sizes) != count:
        return f"{sum(sizes)} came out of {count}: some are missing or come twice."
    return None


def _note_whole_files():
    """In the arm: a list that gets an entry whenever np.load reads a whole file into memory."""
    load, whole = np.load, []

    def noted(*given, **named):
        array = load(*given, **named)
        whole.extend([] if isinstance(array, np.memmap) else [len(array)])
        return array

    np.load = noted
    return whole


def _pairs(answer, count, row, batch):
    """In the arm: a word why the pairs are wrong, or (places of the rows in the order they came, MiB that were kept)."""
    path = os.path.join(tempfile.mkdtemp(), "images.npy")
    file = np.lib.format.open_memmap(path, "w+", np.float32, (count, *row))
    for place in range(count):
        file[place] = place  # a row says its place
    del file
    labels = (7919 * np.arange(count)) % count + 5
    before, whole = process_status("RssAnon"), _note_whole_files()
    dataset = answer(path, labels)
    if word := no_dataset(dataset, "(images, labels)"):
        return word
    dataset = as_written(dataset)
    spec = dataset.element_spec
    if not isinstance(spec, tuple) or len(spec) != 2:
        return "an element must be a pair: a batch of images, and a batch of labels."
    if spec[0].dtype != "float32":
        return f"the images are {spec[0].dtype.name}, not float32."
    places, sizes, right = [], [], True
    for pixels, numbers in dataset:
        pixels, numbers = pixels.numpy(), np.asarray(numbers)
        if pixels.shape[1:] != row:
            return f"a batch of images has the shape {pixels.shape}, not (…, {', '.join(map(str, row))})."
        here = pixels[:, 0, 0, 0].astype(int)
        right &= len(numbers) == len(here) and np.array_equal(labels[here], numbers)
        places += here.tolist()
        sizes.append(len(here))
    after = process_status("RssAnon")
    if whole:
        return f"np.load read the whole file {len(whole)} times: without mmap_mode all images are in memory."
    if word := _sizes(sizes, count, batch):
        return word
    if sorted(places) != list(range(count)):
        return "some images are missing, and others come twice."
    if not right:
        return "images and labels do not belong together."
    return places, None if before is None else (after - before) / MIB


@exercise(
    1,
    "Shuffle numbers, not images. What does map get to see then, and what must it return?",
    "The mapped function may return a pair. Labels are small, so TensorFlow may have them all: tf.gather picks from them.",
)
def by_index(answer, count, row, batch):
    """answer(path, labels) is a dataset of shuffled pairs that never holds the images of the file."""
    done = try_out(_pairs, answer, count, row, batch, label="your answer to 1")
    places, kept = done.value
    array = 4 * count * int(np.prod(row)) / MIB
    most = done.peak_mib if kept is None else max(done.peak_mib, kept)
    assert most < 0.5 * array, f"{most:.0f} MiB are held, and all images are {array:.0f}: they are in memory."
    assert places != sorted(places), "the order is still that of the file."
    neighbours = sum(after == before + 1 for before, after in zip(places, places[1:]))
    assert neighbours < 0.5 * count, (
        "whole batches are shuffled, and not the images: within a batch they come in order."
    )
    # Of 64 drawn from all, one lies in the last quarter, but for one case in 10⁸.
    far = max(places[:64]) > 0.75 * count and min(places[-64:]) < 0.25 * count
    assert far, f"they are shuffled over only part of them: the first 64 lie below {max(places[:64]) + 1} of {count}."


def _graphs(answer, count, row, batch):
    """In the arm: a word why the lookup is wrong, or (MiB of the graphs that it made, traces)."""
    import tensorflow as tf
    from tensorflow.python.framework.func_graph import FuncGraph

    x = np.random.default_rng(0).random((count, *row), np.float32)
    look = answer(x)
    if not callable(look):
        return f"{_EMPTY}a tf.function." if untouched(look) else "what comes back cannot be called."
    alive = lambda: {id(thing) for thing in gc.get_objects() if isinstance(thing, FuncGraph)}
    before, made, kept = alive(), {}, []
    for start in (0, 3, 7):
        rows = tf.range(start, start + batch)
        found = look(rows)
        kept.append(found)
        if tuple(found.shape) != (batch, *row) or not np.array_equal(np.asarray(found), x[start : start + batch]):
            return "the rows that come back are not those asked for."
        for thing in gc.get_objects():
            if isinstance(thing, FuncGraph) and id(thing) not in before:
                made[id(thing)] = thing
    return sum(graph.as_graph_def().ByteSize() for graph in made.values()) / MIB, len(made)


@exercise(
    2,
    "A NumPy array is written into the graph. What kind of thing does a graph only refer to?",
    "Make a tensor or a variable of the array before anything is traced, that is, outside the tf.function.",
)
def lookup(answer, count, row, batch):
    """answer(x) gives a traced function for the rows of x, in whose graph x is not."""
    done = try_out(_graphs, answer, count, row, batch, label="your answer to 2")
    size, traces = done.value
    array = 4 * count * int(np.prod(row)) / MIB
    assert traces, "nothing was traced: it must be a tf.function."
    assert size < 0.1 * array, f"the graph still holds {size:.1f} MiB: the array is a constant in it."
    assert traces == 1, f"it was traced {traces} times for 3 calls with the same kind of rows."


def _scaled(answer, count, row, batch):
    """In the arm: a word why the batches are wrong, or None."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, *row), np.uint8)
    expected = lambda start: pixels[start : start + batch].astype(np.float32) / 255
    dataset = answer(pixels)
    if word := no_dataset(dataset, "float32 batches"):
        return word
    dataset = as_written(dataset)
    sizes, word = [], None
    for images in dataset:  # to its end, so that the peak is that of a whole epoch
        given, right = np.asarray(images), expected(batch * len(sizes))
        sizes.append(len(given) if given.ndim else 0)
        if word:
            continue
        if given.dtype != np.float32:
            word = f"the batches are {given.dtype}, not float32."
        elif not 0.01 < given.max(initial=0) < 1.001:
            word = f"the largest pixel is {given.max(initial=0):.4g}: they should lie between 0 and 1."
        elif given.shape != right.shape:
            word = f"a batch has the shape {given.shape}, not {right.shape}."
        elif abs(given - right).max() > 0.003:
            word = "the pixels are others, or in another order."
    return word or _sizes(sizes, count, batch)


@exercise(
    3,
    "Every copy that the dataset makes has the dtype of the array that it is given.",
    "Give the dataset the bytes, and let map cast each batch before it divides.",
)
def scaled_batches(answer, count, row, batch):
    """answer(pixels) is a dataset of float batches of a uint8 array that is never all floats."""
    done = try_out(_scaled, answer, count, row, batch, label="your answer to 3")
    as_bytes = count * int(np.prod(row)) / MIB
    beside = done.process_peak_mib - as_bytes - done.peak_mib  # what NumPy took, but for the array itself
    assert done.peak_mib < 3.4 * as_bytes and beside < 3 * as_bytes, (
        f"the images are {as_bytes:.0f} MiB of bytes, and the process went up to {done.process_peak_mib:.0f} MiB: "
        "at some moment it holds all of them as floats."
    )
