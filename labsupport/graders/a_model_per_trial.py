"""Graders of the lab on a new model for every trial."""

import gc
from numbers import Integral

from labsupport.ground.meter import phase
from labsupport.lesson.exercises import exercise, try_out, untouched


def _registered():
    from tensorflow.python.framework import ops

    return set(ops.gradient_registry.list())


def _both(answer, original, candidates):
    """In the arm: (losses of the answer, of the original, gradient functions that each adds), or a complaint."""
    import numpy as np

    before = _registered()
    with phase("yours"):
        got = answer(candidates)
        gc.collect()
    between = _registered()
    if untouched(got):
        return "the function returns nothing yet: return the losses, as the search above does."
    with phase("original"):
        wanted = original(candidates)
        gc.collect()
    after = _registered()
    try:
        got = np.asarray(got, float)
    except (TypeError, ValueError):
        return f"return losses (numbers in lists), and no {type(got).__name__}."
    return got, np.asarray(wanted, float), len(between - before), len(after - between)


def _same_losses(answer, original, candidates, label):
    """The arm's result, when the answer has the original's losses."""
    import numpy as np

    done = try_out(_both, answer, original, candidates, label=label)
    got, wanted = done.value[:2]
    assert got.shape == wanted.shape, (
        f"the losses have the shape {got.shape}, those of the search above {wanted.shape}."
    )
    off = np.abs(got - wanted) / np.abs(wanted)
    where = np.unravel_index(np.argmax(off), off.shape)
    assert off.max() < 5e-3, (
        f"the losses differ from those of fresh models: {got[where]:.4g} in place of {wanted[where]:.4g} in trial "
        f"{where[0] + 1}. Do weights, optimizer and its state all start anew?"
    )
    return done


@exercise(
    1,
    "Look at the chart of ways to train: which rows keep nothing although they use Adam?",
    "What is never traced is never registered. compile() takes an argument that decides whether fit() is traced.",
)
def widths(answer, original, candidates):
    """answer(widths) trains what original(widths) trains, and leaves nothing."""
    done = _same_losses(answer, original, candidates, "your answer to 1")
    left, leak = done.phase("yours").added_mib, done.phase("original").added_mib
    assert left < max(1.0, 0.1 * leak), (
        f"{left:.1f} MiB stay when the search has ended, of the search above {leak:.1f}: models are still kept."
    )


@exercise(
    2,
    "What must exist before the first trial, so that no trial makes it? And what has a trial changed when it ends?",
    "An optimizer makes its state in its first step, unless build(variables) was called before; then it can be kept, too.",
)
def reused(answer, original, rates, one_model):
    """answer(rates) gives the losses of original(rates) from one model, of one_model MiB with its state, and one trace."""
    done = _same_losses(answer, original, rates, "your answer to 2")
    kept = done.phase("yours").held_mib
    assert kept < 1.5 * one_model, (
        f"{kept:.0f} MiB are kept, and one model with Adam's state has {one_model:.0f}: something is still made in the loop."
    )
    added, by_all = done.value[2:]
    assert added > 0 or by_all == 0, "no step was traced: the search above runs a tf.function, keep it one."
    assert added <= by_all / len(rates), (
        f"the table has {added} gradient functions more, one traced step adds {by_all / len(rates):.0f}: "
        "it is traced more than once."
    )


def _counts(answer):
    """In the arm: per activation what the answer says and what is so."""
    import keras
    import tensorflow as tf

    @tf.custom_gradient
    def doubled(x):
        return 2.0 * x, lambda upstream: 2.0 * upstream

    activations = {
        "relu": "relu",
        "silu": "silu",
        "a function of one custom gradient": lambda x: doubled(x),
        "a function of three custom gradients": lambda x: doubled(doubled(doubled(x))),
        "tanh": "tanh",
    }
    rows = []
    for name, activation in activations.items():
        layer, x = keras.layers.Dense(4, activation), tf.ones((2, 4))
        layer(x)
        before = len(_registered())
        tf.function(layer)(x)
        wanted, got = len(_registered()) - before, answer(activation)
        rows.append((name, wanted, int(got) if isinstance(got, Integral) else got))
    return rows


@exercise(
    3,
    "Only a trace adds entries: a call outside a tf.function shows nothing.",
    "Compare the table before and after one traced call; what is new in it is what the call added.",
)
def entries(answer):
    """answer(activation) counts the gradient functions that one traced forward pass adds to TensorFlow's table."""
    done = try_out(_counts, answer, label="your answer to 3")
    for name, wanted, got in done.value:
        assert not untouched(got), "entries_added() returns nothing yet: return a number of entries."
        assert isinstance(got, int), f"return a whole number, and no {type(got).__name__}."
        assert got == wanted, f"{name}: you count {got}, one traced call adds {wanted}."
