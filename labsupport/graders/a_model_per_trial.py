"""Graders of the lab on a new model for every trial."""

import contextlib
import functools
import gc

from labsupport.ground.meter import phase
from labsupport.lesson.exercises import exercise, try_out, try_out_once, untouched


@contextlib.contextmanager
def _traced_layers():
    """A list that gains an entry for each Dense layer that is called while a function is traced."""
    import keras
    import tensorflow as tf

    original, traced = keras.layers.Dense.call, []

    @functools.wraps(original)  # Keras reads the signature
    def call(layer, *given, **named):
        if tf.inside_function():
            traced.append(layer.name)
        return original(layer, *given, **named)

    keras.layers.Dense.call = call
    try:
        yield traced
    finally:
        keras.layers.Dense.call = original


def _searched(search, candidates):
    """In the arm: (losses of a search, how many layers it traced), or a complaint."""
    import numpy as np

    with phase("search"), _traced_layers() as traced:
        losses = search(candidates)
        gc.collect()
    if untouched(losses):
        return "the function returns nothing yet: return the losses, as the search above does."
    try:
        return np.asarray(losses, float), len(traced)
    except (TypeError, ValueError):
        return f"return losses (numbers in lists), and no {type(losses).__name__}."


def _same_losses(answer, original, candidates, label):
    """The arms' results of the answer, when it has the original's losses, and of the original."""
    import numpy as np

    mine = try_out(_searched, answer, candidates, label=label)
    theirs = try_out_once(_searched, original, candidates, label="the search above")
    got, wanted = mine.value[0], theirs.value[0]
    assert got.shape == wanted.shape, (
        f"the losses have the shape {got.shape}, those of the search above {wanted.shape}."
    )
    off = np.abs(got - wanted) / np.abs(wanted)
    where = np.unravel_index(np.argmax(off), off.shape)
    assert off.max() < 5e-3, (
        f"the losses differ from those of fresh models: {got[where]:.4g} in place of {wanted[where]:.4g} in trial "
        f"{where[0] + 1}. Do weights, optimizer and its state all start anew, with the same rate and batches?"
    )
    return mine, theirs


@exercise(
    1,
    "Look at the chart of ways to train: which rows keep nothing although they use Adam?",
    "What is never traced is never registered. compile() takes an argument that decides whether fit() is traced.",
)
def widths(answer, original, candidates):
    """answer(widths) trains what original(widths) trains, and leaves nothing."""
    mine, theirs = _same_losses(answer, original, candidates, "your answer to 1")
    left, leak = (done.phase("search").added_mib for done in (mine, theirs))
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
    mine, theirs = _same_losses(answer, original, rates, "your answer to 2")
    kept = mine.phase("search").held_mib
    assert kept < 1.5 * one_model, (
        f"{kept:.0f} MiB are kept, and one model with Adam's state has {one_model:.0f}: something is still made in the loop."
    )
    traced, by_all = mine.value[1], theirs.value[1]
    assert traced > 0, "no step was traced: the search above runs a tf.function, keep it one."
    assert traced <= by_all / len(rates), (
        f"the step is traced more than once: {traced} layers were traced, and {by_all / len(rates):.0f} for each trial of "
        "the search above."
    )
