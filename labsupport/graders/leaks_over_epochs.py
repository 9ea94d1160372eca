"""Graders of the lab on what leaks over epochs."""

import numpy as np

from labsupport.ground.meter import phase
from labsupport.lesson.exercises import exercise, try_out


@exercise(
    1,
    "First leave out the rounds of warm-up; then ask for the line through what is left.",
    "np.polyfit(x, y, 1) gives two numbers; which of them is what y gains for each x?",
)
def slope(answer, leaking, flat, weights, predicted_growth):
    """answer(levels, warm_up) is the slope of a straight line through the readings after the warm-up.

    leaking, flat: MiB after each epoch of a loop that keeps its gradients and of one that keeps nothing.
    """
    for levels, warm_up, right, why in (
        ([10, 110, 120, 120, 120, 120], 2, 0, "a plateau after two rounds of warm-up"),
        ([0, 50, 60, 70, 80], 1, 10, "10 more each round after the first"),
        ([0, 10, 30, 20, 40], 1, 8, "8 more each round as a line; its two ends alone would say 10"),
        ([5, 4, 3, 2], 0, -1, "falling by 1 each round"),
    ):
        found = answer(list(levels), warm_up)
        assert found is not None, "slope() returns nothing yet: return MiB per round."
        assert np.ndim(found) == 0, f"slope() returns {np.shape(found)} numbers: return one, MiB per round."
        assert abs(float(found) - right) < 1e-6, (
            f"{levels} with {warm_up} of warm-up is {why}; you say {float(found):.3g}."
        )
    found = float(answer(leaking, 2))
    assert found > 0.9 * predicted_growth, (
        f"the loop that keeps its gradients grows by their size; you say {found:.3g}."
    )
    assert abs(float(answer(flat, 2))) < 0.1 * weights, "the article's loop is flat."


def _evaluations(answer, at_the_end, make):
    """In the arm: what both evaluations return, each in a phase of its own."""
    model, x = make()
    with phase("yours"):
        mine = answer(model, x)
    with phase("at the end"):
        theirs = at_the_end(model, x)
    return None if mine is None else np.asarray(mine), theirs


@exercise(
    2,
    "Of a batch's outputs, what does the result need?",
    "Reduce each batch to its class numbers inside the loop, as NumPy numbers; put these together at the end.",
)
def evaluation(answer, at_the_end, make):
    """answer(model, x) returns what at_the_end(model, x) does and holds one batch of outputs; make(): (model, x)."""
    done = try_out(_evaluations, answer, at_the_end, make, label="your answer to 2")
    mine, theirs = done.value
    assert mine is not None, "evaluate_by_batch() returns nothing yet: return one class number for each sample."
    assert mine.shape == theirs.shape, f"return an array of shape {theirs.shape}, not {mine.shape}."
    assert np.array_equal(mine, theirs), (
        "the class numbers differ from those of evaluate_at_the_end(): same batches, same order?"
    )
    peak, all_of_them = done.phase("yours").peak_mib, done.phase("at the end").peak_mib
    assert peak < 0.6 * all_of_them, f"your peak is {peak:.0f} MiB against {all_of_them:.0f}: outputs still pile up."


def _held(callback_class, build):
    """In the arm: (MiB of arrays that it keeps after each of six epochs, what it calls best), the best has the factor 1."""
    import gc
    import tracemalloc

    model, callback = build(), callback_class()
    callback.set_model(model)
    callback.on_train_begin()
    first = model.get_weights()
    tracemalloc.start()
    held = []
    for epoch, loss in enumerate([3.0, 1.0, 2.0, 4.0, 1.5, 6.0]):
        model.set_weights([array * loss for array in first])
        callback.on_epoch_end(epoch, {"loss": loss})
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0] / 2**20)
    tracemalloc.stop()
    best = callback.best
    if best is None:
        return held, None
    same = [np.shape(a) == np.shape(b) for a, b in zip(best, first, strict=True)]
    return held, [float(np.abs(a).sum() / np.abs(b).sum()) if np.any(b) else 1.0 for a, b in zip(best, first)] * all(
        same
    )


@exercise(
    3,
    "When does an epoch's weights matter: before or after you have looked at its loss?",
    "Compare logs['loss'] with the lowest loss so far, and remember both the loss and the weights when it is lower.",
)
def keep_best(answer, build, weights):
    """answer is a callback class whose .best is the weights of the epoch with the lowest loss; it holds one set of them."""
    done = try_out(_held, answer, build, label="your answer to 3")
    held, factors = done.value
    assert factors is not None, "KeepBest keeps nothing yet: set self.best in on_epoch_end()."
    assert factors and np.allclose(factors, 1, rtol=1e-3), (
        "these are not the weights of the epoch with the lowest loss: after losses of 3, 1, 2, 4, 1.5 and 6 they are "
        "those of another epoch, or live variables that training goes on to change."
    )
    most = max(held)
    assert most < 1.5 * weights, f"{most:.0f} MiB of arrays are held, the weights are {weights:.0f}: keep one set only."
