"""Graders of the lab on what a pipeline holds."""

import tempfile
import time
from numbers import Real
from pathlib import Path

from labsupport.ground.meter import grown, reading
from labsupport.lesson.exercises import as_written, exercise, no_dataset, try_out

_COUNT = 250  # images: shades of grey tell them apart; no multiple of a batch, so that a last, shorter one is due
_STEP = 0.01  # seconds of pause behind each batch, in which the buffers fill


def _two_epochs(answer, image_mib):
    """An arm: the orders in which answer(paths) gives even images, two epochs as lists of batches of their numbers."""
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number in range(_COUNT):
            paths.append(str(Path(folder, f"{number:03}.jpg")))
            shade = tf.fill([16, 16, 3], tf.constant(number, tf.uint8))
            Path(paths[-1]).write_bytes(tf.io.encode_jpeg(shade, quality=100).numpy())
        dataset, epochs = answer(paths), []
        if told := no_dataset(dataset, "batches of images"):
            return told
        dataset = as_written(dataset)
        for _ in range(2):
            epochs.append([])
            for batch in dataset:
                if not isinstance(batch, tf.Tensor) or batch.shape.rank != 4:
                    return (
                        f"the dataset gives {getattr(batch, 'shape', type(batch).__name__)}, and not batches of images."
                    )
                if tf.size(batch[0]).numpy() * 4 / 2**20 != image_mib:
                    return f"an image has the shape {batch.shape[1:]}, and is not as load() makes it."
                shades = tf.reduce_mean(tf.cast(batch, tf.float32), [1, 2, 3]).numpy()
                epochs[-1].append([int(round(float(shade))) for shade in shades])
                if sum(map(len, epochs[-1])) > _COUNT:
                    return f"an epoch gives more than the {_COUNT} images that there are, and perhaps never ends."
                if len(epochs[-1]) == 1:
                    grown(lambda: reading().tensors_mib)  # its buffers fill
    return epochs


@exercise(
    1,
    "What weighs less than a decoded image, and says which image it will be?",
    "Of the four stages, two hold elements: ask of each how many it holds and what one of them weighs at that place.",
)
def tidy(answer, image_mib, batch):
    """answer(paths) is a dataset of all images, mixed over their whole number in each epoch, that holds few of them."""
    done = try_out(_two_epochs, answer, image_mib, label="your answer to 1")
    for batches in done.value:
        order = [number for numbers in batches for number in numbers]
        assert sorted(order) == list(range(_COUNT)), (
            f"an epoch gives {len(order)} images, {len(set(order))} of them different, and there are {_COUNT}."
        )
        size = max(map(len, batches))  # the last, shorter one may stand anywhere where batches are shuffled
        assert size == batch, f"a batch has {size} images, and not {batch}."
        # Each image of a batch from anywhere: from first to last it spans nearly the whole number.
        spans = sum(max(numbers) - min(numbers) for numbers in batches) / len(batches)
        # A buffer of n lets an image come n - 1 places early at most; one of all lets the last come among the first.
        lead = 1 + max(number - place for place, number in enumerate(order))
        neighbours = all(max(numbers) - min(numbers) == len(numbers) - 1 for numbers in batches)
        assert not neighbours or lead == 1, "neighbours stay together: batches are shuffled, and not images."
        # Of 1e12 perfect orders less than one leads by less than this.
        assert lead > 0.6 * _COUNT and spans > 0.6 * _COUNT, (
            f"the images are not mixed over all files: the buffer of shuffle holds about {lead} "
            f"{'image' if lead == 1 else 'images'}."
        )
    assert done.value[0] != done.value[1], "the second epoch has the same order as the first."
    whole = _COUNT * image_mib
    # A few batches are worked ahead, more of them on a busy machine; a stage of decoded images holds nearly all.
    assert done.peak_mib < 0.7 * whole, (
        f"the peak is {done.peak_mib:.0f} MiB where all images have {whole:.0f}: which stage holds decoded images?"
    )


def _shuffled(buffer, side, batch, count):
    """An arm: an epoch of images of a side, shuffled with this buffer in front of batch, and one batch ahead."""
    import tensorflow as tf

    images = tf.data.Dataset.range(count).map(lambda number: tf.fill([side, side, 3], tf.cast(number, tf.float32)))
    # Where no prefetch stands, tf.data puts one there that grows beyond one batch on a busy machine.
    for _ in images.shuffle(buffer).batch(batch).prefetch(1):
        time.sleep(_STEP)


@exercise(
    2,
    "The buffer is not alone: see what is alive behind every pipeline.",
    "resident() in the section Predict lists them by name; subtract them from the budget before you divide.",
)
def largest_buffer(answer):
    """answer(budget, image, batch) is a buffer with which the pipeline stays within the budget and uses it."""
    for budget, side, batch in ((48, 128, 16), (20, 64, 32)):
        image = side * side * 3 * 4 / 2**20
        buffer = answer(budget, image, batch)
        assert buffer is not None, "largest_buffer() returns nothing yet: return a number of images."
        assert isinstance(buffer, Real) and buffer >= 1, f"{buffer} is no number of images."
        asked = f"within {budget} MiB, images of {image:.3f} MiB in batches of {batch}: "
        beyond = f"{asked}{buffer:,.0f} images alone take {buffer * image:,.1f} MiB: what about the batches?"
        assert buffer * image < budget - batch * image, beyond
        done = try_out(_shuffled, int(buffer), side, batch, int(buffer) + 8 * batch, label=f"{int(buffer)} images")
        told = f"{asked}with {int(buffer)} images the peak is {done.peak_mib:.1f} MiB"
        # A few single images are on their way, too.
        assert done.peak_mib <= budget + 0.7 * batch * image, f"{told}: which batches are alive beside the buffer?"
        # Whether a batch is computed ahead at the worst moment is a matter of timing.
        assert done.peak_mib > budget - 2.5 * batch * image, f"{told}: a larger buffer would still fit."
