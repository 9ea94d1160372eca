"""Graders of the lab on stacking images eagerly."""

from pathlib import Path

from labsupport.ground.budget import MIB
from labsupport.lesson.exercises import exercise, finished
from labsupport.showing.running import run


def _assert_mean(done, mean, within):
    assert done.value is not None, "the function returns nothing yet: return the mean of all pixels."
    value = float(done.value)
    assert abs(value - mean) < within * mean, f"the mean is {value:.2f} and not {mean:.2f}: is every image in?"


@exercise(
    1,
    "An array that exists before the first image is read needs no stack.",
    "np.empty takes a shape and a dtype; an assignment to images[index] copies one image into its place.",
)
def filled(answer, paths, mean, the_list):
    """answer(paths) holds all images once, in the_list MiB, and returns their mean."""
    done = run(answer, paths, label="your answer to 1", quiet=True)
    finished(done)
    _assert_mean(done, mean, 0.01)
    grown = f"the process grew by {done.process_peak_mib:.0f} MiB, and the images need {the_list:.0f}"
    # Decoding and TensorFlow's threads come on top; a second copy is a whole list more.
    assert done.process_peak_mib < 1.5 * the_list, f"{grown}: there are two copies, or your array is float64."
    assert done.process_peak_mib > 0.9 * the_list, f"{grown}: they are not all held as float32."


def _with_bytes_read(answer, paths):
    """In the arm: (what the answer returns, bytes that this process read from files meanwhile)."""
    counted = lambda: int(Path("/proc/self/io").read_text().split()[1])  # rchar, see proc(5)
    before = counted()
    return answer(paths), counted() - before


@exercise(
    2,
    "What stands before cache() is done once, what stands behind it in each epoch.",
    "tf.cast(image, tf.uint8) belongs into the mapped function, tf.cast(batch, tf.float32) to where the batch is summed.",
)
def cached(answer, paths, mean, the_list):
    """answer(paths) goes twice over the images, reads each file once, and keeps a byte a number."""
    done = run(_with_bytes_read, answer, paths, label="your answer to 2", quiet=True)
    finished(done)
    done.value, read = done.value
    _assert_mean(done, mean, 0.02)
    files = sum(Path(path).stat().st_size for path in paths)
    assert read < 1.5 * files, (
        f"{read / MIB:.1f} MiB were read where all files have {files / MIB:.1f}: nothing is cached, "
        "each epoch decodes again."
    )
    assert read > 0.9 * files, "hardly a file was read: the images must come from the paths."
    assert done.peak_mib < 0.7 * the_list, (
        f"peak {done.peak_mib:.0f} MiB against {the_list:.0f} of float32 images: what is cached is not uint8."
    )
    assert done.peak_mib > 0.2 * the_list, f"peak {done.peak_mib:.0f} MiB: the images are not kept in memory."
