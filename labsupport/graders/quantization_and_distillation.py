"""Graders of the lab on quantization and distillation."""

import numpy as np

from labsupport.ground.budget import MIB, parse_size
from labsupport.lesson.exercises import exercise, try_out, untouched


def _pair(got, what):
    """The two arrays that an answer returned."""
    assert not untouched(got), f"nothing is returned yet: return {what}."
    assert isinstance(got, (tuple, list)) and len(got) == 2, f"return two arrays: {what}."
    return map(np.asarray, got)


@exercise(
    1,
    "What is the largest absolute value of each column, and what is it divided by to become 127?",
    "Divide the kernel by the scales, round to the nearest whole number, and only then change the type.",
)
def to_int8(answer, kernel):
    """answer(kernel) gives int8 numbers and a scale for each column, which together give the kernel back."""
    for given in (kernel[:300], kernel[:40, :7] * np.float32(100)):
        numbers, scales = _pair(answer(np.array(given)), "numbers, scales")
        assert numbers.dtype == np.int8, f"the numbers are {numbers.dtype}, not int8."
        assert numbers.shape == given.shape, f"a kernel of {given.shape} became numbers of {numbers.shape}."
        assert scales.dtype == np.float32, f"the scales are {scales.dtype}, not float32."
        scales = scales.reshape(-1)
        assert len(scales) == given.shape[1], f"{given.shape[1]} columns got {len(scales)} scales: one for each column."
        assert np.isfinite(scales).all(), "some scales are not finite."
        exact = np.abs(given).max(axis=0) / 127
        assert not (np.sign(numbers) * np.sign(given) < 0).any(), "some numbers changed their sign: int8 ends at 127."
        assert not np.allclose(scales * exact, 1, rtol=1e-3), "numbers are multiplied by the scales: yours divide."
        assert np.allclose(scales, exact, rtol=1e-3), "a scale is not its own column's largest absolute value by 127."
        off = float((np.abs(numbers * scales - given) / scales).max())
        assert off <= 0.51, f"some weights are off by {off:.2f} steps, more than half a step: are they rounded?"


class _Told(Exception):
    """What is wrong with an answer, found where the lab's training calls it."""


def _distilled(beside, data, weights, answer):
    """In the arm: (the losses with the teacher beside that is asked by the answer, or None; what is wrong)."""

    def told_apart(teacher, images, got):
        """The images may be other ones in the next step: turned round, they must give the same rows, turned round."""
        turned = np.asarray(answer(teacher, images[::-1]))[::-1]
        if not np.allclose(turned, got, rtol=0, atol=1e-3 * np.abs(got).max()):
            raise _Told(
                "the same images in another order gave other outputs: each row must be the teacher's for its image."
            )

    asked = []

    def ask(teacher, images):
        got = answer(teacher, images)
        if untouched(got):
            raise _Told("in_pieces() returns nothing yet: return the teacher's outputs for all images.")
        if np.shape(got) != (len(images), 10):
            raise _Told(f"{len(images)} images gave outputs of shape {np.shape(got)}: a row for each.")
        if not asked:
            told_apart(teacher, images, np.asarray(got))
        asked.append(True)
        return got

    try:
        return beside(data, weights, ask)["losses"], ""
    except _Told as told:
        return None, str(told)


@exercise(
    2,
    "What a piece needs beside the weights is two outputs of the teacher's widest layer, for the images of that piece.",
    "Slices of the images, one answer for each, and the answers joined along their first axis.",
)
def in_pieces(answer, beside, data, weights, budget, losses):
    """answer(teacher, images) gives the teacher's outputs for all images, within the budget of the failure."""
    done = try_out(_distilled, beside, data, weights, answer, label="your answer to 2")
    found, told = done.value
    assert not told, told
    off = max(abs(a - b) for a, b in zip(found, losses)) / losses[0]
    assert off < 0.01, (
        f"the losses are off by {off:.0%}: the outputs must be the teacher's own for these images, in their order."
    )
    peak = f"peak {done.peak_mib:.1f} MiB of a budget of {budget}"
    assert done.peak_mib < 0.98 * parse_size(budget) / MIB, f"{peak}: the pieces are too large."


@exercise(
    3,
    "np.argsort(outputs, axis=1) or tf.math.top_k say which outputs are the largest.",
    "np.take_along_axis takes the outputs of these classes; astype comes last, and no sign is needed for a class.",
)
def largest(answer):
    """answer(outputs, k) keeps of each row the k largest numbers as float16, and their classes as uint16."""
    for images, classes, k in ((50, 1000, 10), (3, 60_000, 4)):
        outputs = np.random.default_rng(classes).normal(size=(images, classes)).astype("float32")
        values, kept = _pair(answer(outputs.copy(), k), "values, classes")
        assert values.dtype == np.float16, f"the values are {values.dtype}, not float16."
        assert kept.dtype == np.uint16, f"the classes are {kept.dtype}, not uint16."
        for part, name in ((values, "values"), (kept, "classes")):
            assert part.shape == (images, k), f"{images} images and k = {k} gave {name} of shape {part.shape}."
        kept = kept.astype(int)
        assert kept.max() < classes and all(len(set(row)) == k for row in kept), (
            "a class is named twice, or does not exist."
        )
        theirs = np.take_along_axis(outputs, kept, axis=1)
        assert (theirs.min(axis=1) >= np.sort(outputs, axis=1)[:, -k]).all(), (
            "they are not the largest outputs of each row."
        )
        assert np.allclose(values, theirs, rtol=2e-3), "a value is not that of its class."
