"""Graders of the lab on loops that stay loops."""

import gc
import tracemalloc

from labsupport.ground.budget import MIB
from labsupport.ground.meter import phase
from labsupport.lesson.exercises import exercise, try_out, untouched

_ROWS, _TIMES, _PIECES, _UNITS = 256, 48, 6, 32


def _states(answer):
    """In the arm: (how far state and gradients are from the layer's own, in parts of those), or a word."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layer = keras.layers.GRU(_UNITS, recurrent_initializer="orthogonal")
    layer.build((None, _TIMES, 1))
    x = tf.random.stateless_normal((_ROWS, _TIMES, 1), seed=(1, 2))
    towards = tf.random.stateless_normal((_ROWS, _UNITS), seed=(3, 4))
    learnt = [variable.value for variable in layer.trainable_variables]

    def step(name, way):
        with phase(name):
            with tf.GradientTape() as tape:
                tape.watch(x)
                state = way()
                if untouched(state):
                    return None
                state = tf.convert_to_tensor(state)
                loss = tf.reduce_sum(state * towards) if state.shape == towards.shape else 0.0
            return state, tape.gradient(loss, [*learnt, x]) if loss else []

    given = step("yours", lambda: answer(layer, x, _PIECES))
    if given is None:
        return "the function returns nothing yet: return the state after the last step."
    if given[0].shape != towards.shape:
        return f"the result has the shape {tuple(given[0].shape)}; {tuple(towards.shape)} is wanted."
    wanted = step("whole", lambda: layer(x))
    if any(part is None for part in given[1]):
        return "a weight or the input gets no gradient: what is recomputed passes gradients to its arguments alone."
    off = lambda one, other: float(tf.norm(one - other) / tf.norm(other))
    return off(given[0], wanted[0]), max(map(off, given[1], wanted[1]))


@exercise(
    1,
    "A piece takes a part of the sequence and a state, and gives a state: that is what to recompute.",
    "tf.recompute_grad(f) keeps the arguments of f and calls f again. Everything that differs from piece to piece has to "
    "be an argument: a name of the loop has its last value by then.",
)
def last_state(answer):
    """answer(layer, x, pieces) is layer(x), with the same gradients, and keeps the steps of one piece at a time."""
    done = try_out(_states, answer, label="your answer to 1")
    states, gradients = done.value
    assert states < 1e-4, f"the state is {states:.2g} times its size off: do the pieces wait for each other?"
    assert gradients < 1e-4, (
        f"a gradient is {gradients:.2g} times its size off: through which steps does it go, and with which part of x?"
    )
    mine, whole = done.phase("yours").rise_mib, done.phase("whole").rise_mib
    assert (
        mine < 0.35 * whole
    ), (  # a sixth and what enters it; a graph of all steps keeps less than eager code, but not that
        f"it needs {mine:.1f} MiB, layer(x) {whole:.1f}: is all of it one piece, or nothing recomputed?"
    )


_BATCH, _WIDTH, _STEPS = 512, 513, 6
_BATCH_MIB = _BATCH * _WIDTH * 4 / MIB


def _centred(answer):
    """In the arm: MiB that Python's objects hold after some eager steps with the answer as a first layer, or a word."""
    import numpy as np
    import tensorflow as tf

    x = tf.random.stateless_normal((_BATCH, _WIDTH), seed=(1, 2)) ** 2
    wanted = x.numpy() - np.median(x, 1, keepdims=True)
    weights = tf.Variable(tf.ones((_WIDTH, 1)))

    def wrong(given, times=1):
        if given.shape != x.shape or given.dtype != np.float32:
            return f"the result is {tuple(given.shape)} of {given.dtype}; {tuple(x.shape)} of float32 is wanted."
        return (
            None if abs(given - times * wanted).max() < 1e-4 * times else "the values are not each row less its median."
        )

    def step(times):
        with tf.GradientTape() as tape:
            squared = tf.py_function(lambda weights: weights**2, [weights], tf.float32)  # its entry is asked for
            given = tf.convert_to_tensor(answer(times * x))
            loss = tf.reduce_mean(tf.matmul(given, tf.ensure_shape(squared, weights.shape)))
        return given, tape.gradient(loss, weights)

    first = answer(x)
    if untouched(first):
        return "the function returns nothing yet: return a tensor like x."
    if word := wrong(np.asarray(first)):
        return word
    step(1.0)
    with phase("steps"):
        tracemalloc.start()  # NumPy's arrays are told there
        for times in range(2, 2 + _STEPS):
            given = step(float(times))[0].numpy()
            if word := wrong(given, times):
                return word
        del given
        gc.collect()
        in_python = tracemalloc.get_traced_memory()[0] / MIB
        tracemalloc.stop()
    try:
        graph = tf.function(answer).get_concrete_function(tf.TensorSpec(x.shape, x.dtype))
    except Exception as error:
        return f"it cannot be traced in a graph: {str(error).splitlines()[0]}"
    if not graph.output_shapes.is_fully_defined():
        return "in a graph its result has no shape, and the next layer cannot be built on it."
    word = wrong(graph(x + 1).numpy())
    return f"in a graph {word}" if word else in_python


@exercise(
    2,
    "What notes down what it did, in case a gradient is asked? And who has no gradient?",
    "tf.numpy_function takes the place of tf.py_function; the median of a row is also the middle of tf.sort.",
)
def centred(answer):
    """answer(x) takes each row's median away, and leaves nothing behind under a tape that is never asked for it."""
    done = try_out(_centred, answer, label="your answer to 2")
    kept = done.phase("steps").added_mib + done.value
    assert kept < 2 * _BATCH_MIB, f"{kept:.1f} MiB stay after {_STEPS} batches of {_BATCH_MIB:.1f}: who holds them?"
