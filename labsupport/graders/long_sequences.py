"""Graders of the lab on long sequences and on what layers keep."""

import numpy as np

from labsupport.ground.meter import phase
from labsupport.lesson.exercises import exercise, try_out, untouched


def _whole_attention(q, k, v):
    import tensorflow as tf

    return tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)), v)


def _attended(answer):
    """In the arm: (right, given) for a length that the rows do not divide, or a word; peaks by phases."""
    import tensorflow as tf

    q, k, v = (tf.random.normal((2, 100, 16), seed=seed) for seed in (1, 2, 3))
    right, given = _whole_attention(q, k, v), answer(q, k, v, 32)
    if untouched(given):
        return "the function returns nothing yet: return a tensor of q's shape."
    if not (tf.is_tensor(given) or isinstance(given, np.ndarray)):
        return f"the function returns {type(given).__name__}, and a tensor of q's shape is asked for."
    # One sequence alone, so that pieces of the batch are no pieces of the scores.
    q, k, v = (tf.random.normal((1, 2048, 16), seed=seed) for seed in (1, 2, 3))
    for rows in (64, 512):
        with phase(f"{rows} rows"):
            held = answer(q, k, v, rows)
        del held
    return right.numpy(), np.asarray(given)


@exercise(
    1,
    "The scores have a row for each query. Which of q, k and v is to be cut, and along which axis?",
    "A slice of q along axis 1 goes through attention() as the whole does; tf.concat puts results together.",
)
def chunked_attention(answer):
    """answer(q, k, v, rows) is attention, computed for rows queries at a time."""
    done = try_out(_attended, answer, label="attention in chunks")
    right, given = done.value
    assert given.shape == right.shape, (
        f"for q of the shape {right.shape} and 32 rows the result has the shape {given.shape}: is every query in, also "
        "where the rows do not divide the length?"
    )
    apart = float(abs(given - right).max())
    assert apart < 1e-3, f"the result is off by up to {apart:.2g}: every chunk of queries needs all keys and values."
    whole = 2048 * 2048 * 4 / 2**20
    few, many = (done.phase(f"{rows} rows").rise_mib for rows in (64, 512))
    assert few < 0.5 * whole, (
        f"for one sequence of 2048 and 64 rows the peak is {few:.0f} MiB, and all its scores have {whole:.0f}: they are "
        "still made for all queries at once."
    )
    assert many > 1.5 * few, (
        f"with 64 rows it needs {few:.1f} MiB and with 512 rows {many:.1f}, and not more: `rows` is the number of queries in "
        "a chunk."
    )


def _truncated_gradients(lstm, x, chunk, hand_on=True):
    """The gradients of each piece, as arrays; hand_on=False: each piece starts from zeros."""
    import tensorflow as tf

    state = [tf.zeros((x.shape[0], lstm.units))] * 2
    pieces = []
    for start in range(0, x.shape[1], chunk):
        with tf.GradientTape() as tape:
            outputs, *after = lstm(x[:, start : start + chunk], initial_state=state)
            loss = tf.reduce_sum(outputs**2)
        pieces.append([gradient.numpy() for gradient in tape.gradient(loss, lstm.trainable_variables)])
        state = after if hand_on else state
    return pieces


def _summed(pieces):
    return [sum(gradients) for gradients in zip(*pieces)]


def _compared(answer):
    """In the arm: what the answer gives for 40 steps in pieces of 7, which right and wrong sums it could be, or a word."""
    import tensorflow as tf
    from keras import layers

    lstm = layers.LSTM(64, return_sequences=True, return_state=True)
    x = tf.random.normal((32, 40, 32))
    lstm(x[:, :2])
    with phase("in pieces"):
        given = answer(lstm, x, 7)
    if untouched(given):
        return "the function returns nothing yet: return the list of summed gradients."
    if tf.is_tensor(given) or not hasattr(given, "__iter__"):
        return f"the function returns {type(given).__name__}, and a list of three gradients is asked for."
    given = [np.asarray(gradient) for gradient in given]
    with phase("all steps"):
        (whole,) = _truncated_gradients(lstm, x, 40)
    pieces = _truncated_gradients(lstm, x, 7)
    sums = {
        "right": _summed(pieces),
        "no state": _summed(_truncated_gradients(lstm, x, 7, hand_on=False)),
        "last": pieces[-1],
        "no rest": _summed(pieces[:-1]),
        "mean": [total / len(pieces) for total in _summed(pieces)],
        "whole": whole,
    }
    return given, sums


_MISTAKES = {
    "no state": "the state is not handed on: each piece starts from zeros.",
    "last": "that is the gradient of the last piece alone, and the sum over all is asked for.",
    "no rest": "the last, shorter piece is missing: the pieces need not divide the length.",
    "mean": "that is the mean over the pieces, and their sum is asked for.",
    "whole": "the gradient flows through all pieces, as in through_all.",
}


@exercise(
    2,
    "What goes from one piece to the next is a state of plain tensors, and a running total.",
    "A tape that is opened for a piece and closed after it knows nothing of the piece before.",
)
def truncated(answer):
    """answer(lstm, x, chunk) is the sum of the gradients of pieces, each with a tape of its own, the state handed on."""
    done = try_out(_compared, answer, label="truncated back-propagation")
    given, sums = done.value
    shapes = [gradient.shape for gradient in sums["right"]]
    assert [gradient.shape for gradient in given] == shapes, (
        f"the shapes are {[gradient.shape for gradient in given]}, those of the LSTM's variables are {shapes}."
    )

    def apart(name):
        return max(float(abs(g - r).max() / abs(r).max()) for g, r in zip(given, sums[name]))

    if apart("right") > 1e-3:
        known = [told for name, told in _MISTAKES.items() if apart(name) < 1e-3]
        raise AssertionError(
            known[0] if known else f"the gradients are off by up to {apart('right'):.0%} of the largest."
        )
    whole, pieces = (done.phase(name).rise_mib for name in ("all steps", "in pieces"))
    assert pieces < 0.5 * whole, (
        f"the sum is right, and its peak is {pieces:.0f} MiB where all steps at once have {whole:.0f}: has every piece a "
        "tape of its own?"
    )


def _gelu(answer):
    """In the arm: (values, gradient) as they should be and as they are, or a word; what stays is a phase."""
    import tensorflow as tf

    x, upstream = tf.random.normal((1024, 1024), seed=1), tf.random.normal((1024, 1024), seed=2)
    answer(x)
    with phase("kept"):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = answer(x)
    if untouched(y):
        return "the function returns nothing yet: return a tensor of x's shape."
    if not tf.is_tensor(y):
        return f"the function returns {type(y).__name__}, and a tensor of x's shape is asked for."
    given = tape.gradient(y, x, upstream)
    if given is None:
        return "there is no gradient of the result with respect to x."
    with tf.GradientTape() as tape:
        tape.watch(x)
        right = tf.nn.gelu(x)
    return (right.numpy(), tape.gradient(right, x, upstream).numpy()), (y.numpy(), np.asarray(given))


@exercise(
    3,
    "tf.custom_gradient says what is kept: what the inner function refers to.",
    "The inner function gets the upstream gradient. It may compute gelu of x once more, under a tape of its own.",
)
def frugal_gelu(answer):
    """answer(x) is tf.nn.gelu in values and gradient, and keeps its output and x alone."""
    done = try_out(_gelu, answer, label="your gelu")
    (values, gradient), (given_values, given_gradient) = done.value
    assert given_values.shape == values.shape, f"the result has the shape {given_values.shape}, not {values.shape}."
    apart = float(abs(given_values - values).max())
    assert apart < 1e-5, f"the values differ from those of tf.nn.gelu by up to {apart:.2g}."
    apart = float(abs(given_gradient - gradient).max())
    assert apart < 1e-4, (
        f"the gradient is off by up to {apart:.2g}: what comes from behind, upstream, is to be multiplied by the slope at x."
    )
    outputs = done.phase("kept").added_mib / 4
    assert outputs < 1.5, (
        f"beside x it keeps {outputs:.0f} tensors of its size, and its output is only one of them. If you use "
        "tf.custom_gradient: did the tape see the values computed from x, not from tf.stop_gradient(x)?"
    )
