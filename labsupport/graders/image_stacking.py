"""Graders of the lab on stacking images eagerly."""

from contextlib import ExitStack
from unittest.mock import patch

from labsupport.lesson.exercises import exercise, try_out

_TIMES = 3


def _counted(answer, paths):
    """In the arm: (what the answer returns, how many JPEG images were decoded meanwhile, in graphs or out of them)."""
    import numpy as np
    import tensorflow as tf

    decode, count = tf.io.decode_jpeg, 0

    def tick():
        nonlocal count
        count += 1
        return np.int64(count)

    def decode_and_count(*args, **named):
        with tf.control_dependencies([tf.numpy_function(tick, [], tf.int64)]):
            return decode(*args, **named)

    with ExitStack() as stack:
        for place in (tf.io, tf.image):
            for name in ("decode_jpeg", "decode_image"):
                stack.enter_context(patch.object(place, name, decode_and_count))
        return answer(paths), count


def _result_of(answer, paths, label):
    """(the arm, what the answer returned, how many images it decoded)."""
    done = try_out(_counted, answer, paths, label=label)
    value, decoded = done.value
    assert value is not None, "the function returns nothing yet: return the mean of all pixels."
    return done, value, decoded


def _assert_mean(value, mean, within):
    assert getattr(value, "size", 1) == 1, f"it returns an array of {value.shape}: return the mean of all pixels."
    assert float(value) > 0.01 * mean, (
        f"the mean is {float(value):.2f} and not {mean:.2f}: a sum of uint8 begins anew at 256, so cast what you add up."
    )
    assert abs(float(value) - mean) < within * mean, (
        f"the mean is {float(value):.2f} and not {mean:.2f}: is every image in?"
    )


@exercise(
    1,
    "An array that exists before the first image is read needs no stack.",
    "np.empty takes a shape and a dtype; an assignment to images[index] copies one image into its place.",
)
def filled(answer, paths, mean, the_list):
    """answer(paths) holds all images once, in the_list MiB, and returns their mean."""
    done, value, decoded = _result_of(answer, paths, "your answer to 1")
    assert decoded == len(paths), f"{decoded} images were decoded, and there are {len(paths)}."
    grown = f"the process grew by {done.process_peak_mib:.0f} MiB, and the images need {the_list:.0f}"
    # Decoding and TensorFlow's threads come on top; a second copy is a whole list more.
    assert done.process_peak_mib < 1.5 * the_list, f"{grown}: there are two copies, or your array is float64."
    assert done.process_peak_mib > 0.9 * the_list, f"{grown}: they are not all held as float32."
    _assert_mean(value, mean, 0.002)


@exercise(
    2,
    "What stands before cache() is done once, what stands behind it in each epoch.",
    "tf.cast(image, tf.uint8) belongs into the mapped function, tf.cast(batch, tf.float32) to where the batch is summed.",
)
def cached(answer, paths, mean, the_list):
    """answer(paths) goes twice over the images, decodes each once, and keeps a byte a number.

    With all images several times, since the batches on their way take the same whatever their number is.
    """
    done, means, decoded = _result_of(answer, _TIMES * paths, "your answer to 2")
    count, whole = _TIMES * len(paths), _TIMES * the_list
    assert isinstance(means, (list, tuple)) and len(means) == 2, "return the means of two epochs, as a list."
    for value in means:
        _assert_mean(value, mean, 0.01)
    assert decoded < 2 * count, (
        f"{decoded} images were decoded where there are {count}: nothing is cached, each epoch decodes again."
    )
    assert decoded == count, f"{decoded} images were decoded, and there are {count}."
    held = max(done.peak_mib, done.process_peak_mib or 0)  # also what NumPy keeps
    assert held < 0.47 * whole, (
        f"peak {held:.0f} MiB against {whole:.0f} of float32 images: what is cached is not uint8."
    )
    assert held > 0.2 * whole, f"peak {held:.0f} MiB: the images are not kept in memory."
