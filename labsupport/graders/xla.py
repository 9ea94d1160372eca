"""Graders of the lab on XLA."""

import os
import tempfile

from labsupport.ground.meter import phase
from labsupport.lesson.exercises import exercise, try_out, untouched

_LONGER = 16  # rows of padding that exercise 1 allows
_RATE = 0.01  # of the SGD step in exercise 3


@exercise(
    1,
    "Round up, not down: a padded length is the next multiple of some number.",
    "How many multiples of that number there are among 16 lengths in a row decides how many shapes there are.",
)
def bucket(answer):
    """answer(length) is a padded length: whole, long enough, not too long, and one of few."""
    assert not untouched(answer(2)), "bucket() returns nothing yet: return a length."
    for first in (2, 63, 1000):
        shapes = set()
        for length in range(first, first + 16):
            after = answer(length)
            assert after == int(after), f"bucket({length}) is {after}: a number of rows is whole."
            assert after >= length, f"bucket({length}) is {after}: shorter than the sequence."
            assert after <= length + _LONGER, f"bucket({length}) is {after}: more than {_LONGER} rows of padding."
            shapes.add(int(after))
        assert len(shapes) <= 3, (
            f"for the lengths {first} to {length} there are {len(shapes)} shapes, each compiled by itself."
        )


def _made_report(size, parameters):
    """A report as XLA writes it, with other sizes."""
    return [
        f"Total bytes used: {parameters + 1} (7.00MiB)",
        "",
        "Allocations sorted by size:",
        "",
        "cumulative_size; total_size - cumulative_size; allocation",
        "-" * 78,
        "   3.00GiB( 60%);    2.00GiB; allocation 4: size 3.00GiB, parameter 0, shape |f32[2048,512]| at ShapeIndex {}:",
        f"   4.00GiB( 80%);    1.00GiB; allocation 9: size {size}, preallocated-temp:",
    ]


@exercise(
    2,
    "One line of the report has the words preallocated-temp; the size stands behind the word size.",
    "XLA writes KiB, MiB or GiB, whatever is readable.",
)
def temporary_mib(answer, report):
    """answer(report) is the size of the temporary block in MiB, whatever its unit and its place."""
    line = next(line for line in report if "preallocated-temp" in line)
    number, unit = line.split(" size ")[1].split("iB,")[0][:-1], line.split(" size ")[1].split("iB,")[0][-1]
    factor = {"K": 1 / 1024, "M": 1, "G": 1024}
    found = answer(report)
    assert not untouched(found), "temporary_mib() returns nothing yet: return a number."
    assert not isinstance(found, str), f"temporary_mib() returns the text {found!r}: return a number, in MiB."
    expected, total = float(number) * factor[unit], int(report[0].split()[3]) / 2**20
    assert abs(found - total) > 0.001 * total, f"{found:.1f} MiB is the size of everything, not of the block."
    assert abs(found - expected) < 0.01 * expected, f"{found:.2f} MiB: the line says {number} {unit}iB."
    for size, wanted in (("1.50GiB", 1536), ("640.0KiB", 0.625)):
        found = answer(_made_report(size, 10**9))
        assert abs(found - wanted) < 0.01 * wanted, (
            f"in a report whose block has {size} you find {found:.2f} MiB: its line is not always the first, its unit is not "
            "always MiB, and its size stands behind the word size."
        )


def _reference(weights):
    """The step of exercise 3 without XLA."""
    import tensorflow as tf

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            hidden = x
            for weight in weights:
                product = hidden @ weight
                cube = 0.044715 * product * product * product
                hidden = 0.5 * product * (1.0 + tf.tanh(0.7978845608 * (product + cube)))
            loss = tf.reduce_mean(hidden * hidden)
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(_RATE * gradient)
        return loss

    return step


def _trained(make, depth, width, rows):
    """In the arm: the losses of three steps, sums of what the weights moved by, and whether XLA compiled anything.

    None for a make() that gives no step.
    """
    import tensorflow as tf

    folder = tempfile.mkdtemp()
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder}"  # XLA reads this when it compiles first

    weights = [tf.Variable(tf.random.stateless_normal([width, width], seed=[number, 3]) / 8) for number in range(depth)]
    x = tf.random.stateless_normal([rows, width], seed=[4, 5])
    before = [weight.numpy() for weight in weights]
    step = make(weights)
    if untouched(step):
        return None
    losses = [float(step(x))]
    with phase("steps"):
        losses += [float(step(x)) for _ in range(2)]
    moved = [float(abs(weight.numpy() - old).sum()) for weight, old in zip(weights, before)]
    return losses, moved, bool(os.listdir(folder))


@exercise(
    3,
    "What must be handed from the forward half to the backward half is stored. Where must both halves be?",
    "jit_compile=True belongs to the function that holds the tape and the gradient.",
)
def compiled_step(answer):
    """answer(weights) is a training step with the reference's losses and weights, and clearly less memory."""
    sizes = (4, 256, 2048)
    done = try_out(_trained, answer, *sizes, label="your step")
    assert done.value is not None, "compiled_step() returns nothing yet: return the step."
    plain = try_out(_trained, _reference, *sizes, label="the step without XLA")
    near = lambda found, wanted: all(abs(a - b) <= 0.005 * abs(b) for a, b in zip(found, wanted))
    (losses, moved, compiled), (wanted, wanted_moved, _) = done.value, plain.value
    assert near(losses[:1], wanted[:1]), (
        f"the loss is {losses[0]:.5f} and without XLA {wanted[0]:.5f}: the step must compute the same loss, from all rows."
    )
    assert near(moved, wanted_moved) and near(losses, wanted), (
        f"after three steps the weights differ from those without XLA: they moved by {sum(moved):.3f} in all, "
        f"and should by {sum(wanted_moved):.3f}."
    )
    assert compiled, "the step is right, but nothing in it is compiled by XLA."
    mine, theirs = done.phase("steps").rise_mib, plain.phase("steps").rise_mib
    assert mine < 0.7 * theirs, (
        f"a step needs {mine:.0f} MiB, and {theirs:.0f} without XLA: are forward and backward in one compiled function?"
    )
