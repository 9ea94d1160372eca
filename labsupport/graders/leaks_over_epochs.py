"""Graders of the lab on what leaks over epochs."""

import gc

import numpy as np

from labsupport.ground.meter import phase, reading
from labsupport.lesson.exercises import exercise, try_out, try_out_once, untouched

# Steps: what is kept of each step shows between the two, and is more than a graph's order of operations can change.
_FEW, _MANY = 2, 16


def _means(answer):
    """In the arm: (means of the answer after many steps, MiB of arrays that more steps add), or a complaint."""
    import tracemalloc

    arrays = []
    for steps in (1, _FEW, _MANY):  # the first call warms up
        gc.collect()
        tracemalloc.start()
        with phase(f"{steps} steps"):
            given = answer(steps)
        arrays.append(tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
        if untouched(given):
            return "mean_gradients() returns nothing yet: return one mean for each weight."
    try:
        return [np.asarray(mean, float) for mean in given], arrays[-1] - arrays[-2]
    except (TypeError, ValueError):
        return [], 0.0


def _wanted(keeping):
    """In the arm: the means of the lab's own loop."""
    return [np.asarray(mean) for mean in keeping(_MANY)]


@exercise(
    1,
    "What of a step's gradients does a mean need, once the next step has begun?",
    "Keep one running sum for each weight, add each step's gradient to it, and divide at the end.",
)
def means(answer, keeping, weights):
    """answer(steps) returns what keeping(steps) does; more steps add no memory, neither of tensors nor of arrays."""
    done = try_out(_means, answer, label="your answer to 1")
    wanted = try_out_once(_wanted, keeping, label="the loop above").value
    given, arrays = done.value
    shapes = [mean.shape for mean in wanted]
    assert [mean.shape for mean in given] == shapes, (
        f"return a list of means, one for each weight, of the shapes {shapes}."
    )
    off = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(given, wanted))
    assert off < 1e-2, (
        f"the means differ from those of the kept gradients by {off:.1%}: same model, same steps, same rate?"
    )
    few, many = (done.phase(f"{steps} steps") for steps in (_FEW, _MANY))
    tensors = many.rise_mib - few.rise_mib
    more = max(tensors, arrays) / (_MANY - _FEW)
    assert more < 0.2 * weights, (
        f"more steps need more: {more:.1f} MiB for each step, and a set of gradients has {weights:.1f}: gradients pile up."
    )


# Better after it was worse, and later better only than the epoch before.
_LOSSES = (3.0, 2.0, 4.0, 1.0, 5.0, 1.5, 6.0)


def _held(callback_class, build):
    """In the arm: (MiB that the callback holds, what it calls best, None if nothing); the best weights have the factor 1."""
    import tracemalloc

    import tensorflow as tf

    model, callback = build(), callback_class()
    callback.set_model(model)
    callback.on_train_begin()
    # As tensors: a variable that is given an array may go on to use the array's memory, which would count as held.
    first, arrays = [tf.identity(variable) for variable in model.weights], []
    tracemalloc.start()
    for epoch, loss in enumerate(_LOSSES):
        for variable, value in zip(model.weights, first):
            variable.assign(value * loss)
        callback.on_epoch_end(epoch, {"loss": loss})
        gc.collect()
        arrays.append(tracemalloc.get_traced_memory()[0] / 2**20)
    tracemalloc.stop()
    best, pairs, factors = callback.best, (), None
    if best is not None:
        if [np.shape(a) for a in best] == [np.shape(b) for b in first]:
            pairs = list(zip(best, first))
        factors = [float(np.abs(a).sum() / np.abs(b).sum()) if np.any(b) else 1.0 for a, b in pairs]
    with_it = reading().tensors_mib
    del callback, best, pairs
    gc.collect()
    return max(arrays) + with_it - reading().tensors_mib, factors


@exercise(
    2,
    "When does an epoch's weights matter: before or after you have looked at its loss?",
    "Compare logs['loss'] with the lowest loss so far, and remember both the loss and the weights when it is lower.",
)
def keep_best(answer, build, weights):
    """answer is a callback class whose .best is the weights of the epoch with the lowest loss; it holds one set of them."""
    done = try_out(_held, answer, build, label="your answer to 2")
    held, factors = done.value
    assert factors is not None, "KeepBest keeps nothing yet: set self.best in on_epoch_end()."
    assert factors and np.allclose(factors, 1, rtol=1e-3), (
        "these are not the weights of the epoch with the lowest loss: after losses of "
        f"{', '.join(f'{loss:g}' for loss in _LOSSES)} they are those of another epoch, or live variables that training "
        "goes on to change."
    )
    assert held < 1.75 * weights, f"{held:.0f} MiB are held, the weights are {weights:.0f}: keep one set only."
