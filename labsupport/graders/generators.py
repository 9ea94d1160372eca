"""Graders of the lab on generators and what stands around them."""

import numpy as np

from labsupport.ground.budget import MIB
from labsupport.lesson.exercises import as_written, exercise, no_dataset, try_out

_PATHS = 128  # of those given: enough to tell a small buffer from a shuffle of all


def _decoded(path, shape):
    import tensorflow as tf

    return tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(path), channels=3), shape[:2]).numpy()


def _labels_of(dataset, paths, labels, shape):
    """(labels in the order they came, None), or (None, a word why a pair of an epoch is wrong)."""
    seen, place = [], {int(label): index for index, label in enumerate(labels)}
    for pair in dataset:
        if not isinstance(pair, tuple) or len(pair) != 2:
            return None, "an element must be a pair (image, label)."
        image, label = np.asarray(pair[0]), np.asarray(pair[1])
        if image.shape[1:] == shape:
            return None, f"the elements are batches of images, of the shape {image.shape}."
        if image.shape != shape:
            return None, f"an image has the shape {image.shape}, not {shape}."
        if image.dtype != np.float32:
            return None, f"the images are {image.dtype}, not float32."
        if label.shape != () or int(label) not in place:
            return None, "a label came that was not given."
        seen.append(int(label))
        # A few are looked at; decoding all once more would take as long as the answer.
        if len(seen) % 16 == 1 and abs(image - _decoded(paths[place[seen[-1]]], shape)).max() > 1:
            return None, "images and labels do not belong together."
    if sorted(seen) != sorted(map(int, labels)):
        return None, f"{len(seen)} pairs came for {len(labels)}: each must come once."
    return seen, None


def _two_epochs(answer, paths, shape):
    """In the arm: the labels of two epochs in the order they came, or a word why the pairs are wrong."""
    labels = list(range(len(paths)))
    dataset = answer(paths, labels)
    if word := no_dataset(dataset, "pairs"):
        return word
    dataset = as_written(dataset)
    epochs = []
    for _ in range(2):
        seen, word = _labels_of(dataset, paths, labels, shape)
        if word:
            return word
        epochs.append(seen)
    return epochs


@exercise(
    1,
    "What do you have for each image before it is decoded, and how large is that?",
    "A dataset of paths and labels can be shuffled whole; map decodes what comes out of it.",
)
def shuffled(answer, paths, shape):
    """answer(paths, labels) is a dataset of pairs in a new order each epoch, that holds a few images at most."""
    paths = paths[:_PATHS]
    done = try_out(_two_epochs, answer, paths, shape, label="your answer to 1")
    image, count, (first, second) = 4 * np.prod(shape) / MIB, len(paths), done.value
    assert first != sorted(first), "the order is that of the paths."
    assert first != second, "they come in the same order in both epochs."
    in_order = sum(after == before + 1 for before, after in zip(first, first[1:]))
    assert in_order < 0.5 * count, "they come in runs, within which the order is that of the paths."
    fifth = count // 5  # by chance, a shuffle of all fails in one of 200,000 runs
    far = max(first[:fifth]) > 0.6 * count and min(first[-fifth:]) < 0.4 * count
    assert far, f"they are shuffled over only part of them: the first {fifth} lie below {max(first[:fifth]) + 1}."
    assert done.peak_mib < 0.3 * count * image, (
        f"tensors took {done.peak_mib:.0f} MiB, and an image has {image:.1f}: a buffer holds images."
    )


def _rows(answer, count, row):
    """In the arm: a word why the rows are wrong, or None."""
    x = np.empty((count, *row), np.float32)
    for place in range(count):
        x[place] = place
    dataset = answer(x)
    if word := no_dataset(dataset, "the rows of x"):
        return word
    dataset = as_written(dataset)
    for epoch in ("first", "second"):
        place = 0
        for given in dataset:
            given = np.asarray(given)
            if given.dtype != np.float32:
                return f"a row is {given.dtype}, not float32."
            if given.shape != row:
                return f"an element has the shape {given.shape}, not that of a row, {row}."
            if not (given == place).all():
                return f"element {place} is not row {place} of the array."
            place += 1
        if place != count:
            return f"{place} rows of {count} came in the {epoch} epoch."
    return None


@exercise(
    2,
    "What from_generator gets as args becomes a tensor. From where else can a function have an array?",
    "A function may use the names of the function around it; a generator without arguments needs no args.",
)
def rows_of(answer):
    """answer(x) is a dataset of the rows of x, for which nobody copies x."""
    count, row = 450, (96, 96, 3)
    array = count * 4 * np.prod(row) / MIB
    done = try_out(_rows, answer, count, row, label="your answer to 2")
    assert done.peak_mib < 0.25 * array, (
        f"tensors took {done.peak_mib:.0f} MiB, and the array is {array:.0f}: a tensor holds the whole array."
    )
    assert done.process_peak_mib < 1.6 * array, (
        f"the process grew by {done.process_peak_mib:.0f} MiB, and the array is {array:.0f}: "
        "there is a copy of the whole array."
    )


def _decodes(dataset):
    """Whether a function in the dataset's own graph decodes images. A call into Python hides what it does from the graph."""
    from tensorflow.core.framework.graph_pb2 import GraphDef

    graph = GraphDef.FromString(dataset._as_serialized_graph().numpy())
    return any(node.op.startswith("Decode") for function in graph.library.function for node in function.node_def)


def _streamed(answer, paths, shape):
    """In the arm: a word why the pairs are wrong, or how many records are read before the first image."""
    import tensorflow as tf

    called, read, labels = [], [], [3 * index for index in range(len(paths))]

    def counting(operation):
        def counted(*given, **named):
            called.extend([operation] * tf.executing_eagerly())
            return operation(*given, **named)

        return counted

    for room in (tf.io, tf.image):
        for name in ("decode_jpeg", "decode_image", "decode_and_crop_jpeg", "decode_png"):
            if hasattr(room, name):
                setattr(room, name, counting(getattr(room, name)))

    def records():
        for path, label in zip(paths, labels):
            read.append(path)
            yield path, label

    dataset = answer(records)
    if word := no_dataset(dataset, "pairs (image, label)"):
        return word
    dataset = as_written(dataset)
    for _ in dataset.take(1):
        early = len(read)
    read.clear()
    called.clear()
    epoch = [(image.numpy(), int(label)) for image, label in dataset.map(lambda image, label: (image[:1], label))]
    from_python = len(called)
    if [label for _, label in epoch] != labels:
        missing = sorted(label for _, label in epoch) != labels
        return "each pair must come once." if missing else "the pairs come in another order."
    if from_python:
        return f"{from_python} of {len(paths)} images are decoded by a call from Python."
    if not _decodes(dataset):
        return "no step of the pipeline decodes: each image is decoded by a call from Python."
    _, word = _labels_of(dataset.take(16), paths[:16], labels[:16], shape)
    return word or early


@exercise(
    3,
    "from_generator takes any generator function, also the one that you were given.",
    "A dataset of paths and labels may decode in map; a path is a scalar of tf.string.",
)
def decoded_stream(answer, paths, shape):
    """answer(records) is a dataset of decoded pairs in order, decoded by the pipeline as the records come."""
    paths = paths[:_PATHS]
    done = try_out(_streamed, answer, paths, shape, label="your answer to 3")
    early = done.value
    assert early < 0.75 * len(paths), (
        f"{early} of {len(paths)} records are read before the first image comes: a stream may have no end."
    )
