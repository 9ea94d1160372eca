"""Graders of the lab on adding up in a loop."""

from labsupport.ground.meter import phase
from labsupport.lesson.exercises import exercise, try_out, untouched
from labsupport.lesson.predict import tensor_mib


def _problem(batch, units, terms):
    import tensorflow as tf

    x = tf.random.stateless_normal((batch, terms), seed=(1, 2))
    w = tf.Variable(tf.random.stateless_normal((terms, units), seed=(3, 4)) / 10)
    return x, w


def _step(way, batch, units, terms, name):
    """One eager training step: (the sum, the gradient of its mean square), each None if there is none; or a complaint."""
    import tensorflow as tf

    x, w = _problem(batch, units, terms)
    gradient = None
    with phase(name):
        with tf.GradientTape() as tape:
            total = way(x, w)
            if untouched(total):
                return "the function returns nothing yet: return the sum of all terms."
            if not tf.is_tensor(total):
                return f"return a tensor, and no {type(total).__name__}."
            if total.shape != (batch, units):
                return f"the sum has the shape {tuple(total.shape)}, and each term has {(batch, units)}."
            loss = tf.reduce_mean(tf.square(total))
        gradient = tape.gradient(loss, w)
    return total.numpy(), None if gradient is None else gradient.numpy()


def _both(answer, wanted, *sizes):
    """In the arm: largest differences of sum and gradient from those wanted, relative; or a complaint."""
    import numpy as np

    got = _step(answer, *sizes, "your answer")
    if isinstance(got, str):
        return got
    right = _step(wanted, *sizes, "the loop")
    off = lambda a, b: float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
    return off(got[0], right[0]), None if got[1] is None else off(got[1], right[1])


def _graded(answer, wanted, sizes, label):
    """The arm's result, when the answer has the loop's sum and gradient."""
    done = try_out(_both, answer, wanted, *sizes, label=label)
    value, gradient = done.value
    assert value < 1e-4, f"the sum differs from the loop's, it is off by {value:.2%} of its largest entry."
    assert gradient is not None, "the weight gets no gradient: somewhere on the way its tensors leave the tape."
    assert gradient < 1e-4, f"the sum is right, the gradient of the weight differs by {gradient:.2%}."
    return done


def _loop(x, w):
    import tensorflow as tf

    return tf.add_n([x[:, i : i + 1] @ w[i : i + 1] for i in range(x.shape[1])])


@exercise(
    1,
    "Write out one entry [b, u] of the result: what is added up over i, and which numbers stand in it?",
    "Rows of one matrix against columns of another: an operation that you have met does all these sums by itself.",
)
def terms(answer, batch, units, times):
    """answer(x, w) is the sum of `times` different products; a training step may hold a few of them."""
    done = _graded(answer, _loop, (batch, units, times), "your answer to 1")
    used = done.phase("your answer").peak_mib / tensor_mib((batch, units))
    assert used < 10, f"a training step holds {used:.0f} products at once: no term need be made by itself."


@exercise(
    2,
    "Each `+=` is an operation of its own, and the tape keeps what went into it. How many additions does it take?",
    "Look among TensorFlow's operations for one that takes a list of tensors and adds all of them, without a stack.",
)
def without_totals(answer, loop, batch, units, times):
    """answer(x, w) is what loop(x, w) is, and a training step keeps the terms, but not the totals."""
    done = _graded(answer, loop, (batch, units, times), "your answer to 2")
    share = done.phase("your answer").peak_mib / done.phase("the loop").peak_mib
    assert share < 0.65, f"the step needs {share:.0%} of the loop's peak: more than the terms is still kept."
