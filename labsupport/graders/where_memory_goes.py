"""Graders of the lab on where memory goes in a training step."""

from numbers import Real

from labsupport.ground.budget import MIB
from labsupport.ground.meter import reading
from labsupport.lesson.exercises import exercise, try_out

_KEPT = ("weights", "optimizer slots", "input", "activations kept")
_ASKS = {
    "weights": "is every parameter in it, once?",
    "optimizer slots": "it is as many copies of the weights as the argument `copies` says.",
    "input": "it is batch × inputs.",
    "activations kept": "does it count every layer, for every sample? The input is a part of its own.",
}
# Two models, (inputs, units of the layers), batch, optimizer and the copies that it keeps. The last layers are so large
# that forgetting them shows, and that a step is at its worst while all outputs are kept.
_CASES = [((512, (768, 384, 768, 576)), 4096, "Adam", 2), ((1024, (512, 1024, 896)), 2048, "SGD", 0)]


def _model(inputs, units):
    import keras

    hidden = [keras.layers.Dense(size, activation="relu") for size in units[:-1]]
    return keras.Sequential([keras.Input((inputs,)), *hidden, keras.layers.Dense(units[-1])])


def _mib(arrays):
    return sum(array.numpy().nbytes for array in arrays) / MIB


def _step(shape, batch, name):
    """An arm: MiB of the parts of one step. Activations as the allocator counts them: nobody names them."""
    import keras
    import tensorflow as tf

    model, optimizer = _model(*shape), getattr(keras.optimizers, name)()
    optimizer.build(model.trainable_variables)
    x = tf.ones([batch, shape[0]])
    before = reading().tensors_mib
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        loss = tf.reduce_mean(outputs)
    kept = reading().tensors_mib - before
    tape.gradient(loss, model.trainable_variables)
    return dict(zip(_KEPT, [_mib(model.weights), _mib(optimizer.variables), _mib([x]), kept]))


@exercise(
    1,
    "The table of parts tells what each is made of; only two of the four depend on the batch.",
    "lab.tensor_mib((rows, columns)) is the size of a float32 tensor; one number of units is not enough for a model of several layers.",
)
def parts(answer):
    """answer(model, batch, copies) gives MiB by part, as they are measured in two models."""
    for shape, batch, name, copies in _CASES:
        said = answer(_model(*shape), batch, copies)
        assert said is not None, "my_parts() returns nothing yet: return a dictionary of MiB."
        assert isinstance(said, dict), (
            f"my_parts() returns {type(said).__name__} and not a dictionary of the four parts."
        )
        missing = [part for part in _KEPT if part not in said]
        assert not missing, f"the dictionary has no {', '.join(missing)}."
        done = try_out(_step, shape, batch, name, label=f"batch {batch}, {name}")
        for part in _KEPT:
            yours, measured = float(said[part]), done.value[part]
            within = 0.03 * measured + 0.05  # the loss and its like beside the activations
            beside = f"{part}: you said {yours:.1f} MiB, {measured:.1f} as measured ({name}, batch {batch})"
            ask = _ASKS[part]
            if abs(yours * 1e6 / MIB - measured) < within:
                ask = "one MiB is 2**20 bytes."
            if abs(yours / MIB - measured) < within < measured:
                ask = "these are bytes, not MiB."
            assert abs(yours - measured) < within, f"{beside}: {ask}"


@exercise(
    2,
    "Nothing needs to run: a prediction for one batch after the other is enough.",
    "lab.predict(build, 32, optimizer=…, loss=LOSS, eager=True) has at(batch), in bytes; begin with a small batch and double it.",
)
def largest_batch(answer, step, budgets, one_sample):
    """answer(budget) is the largest power of two whose step fits; one_sample: MiB that its outputs have a sample."""
    for budget in budgets:
        batch = answer(budget)
        assert batch is not None, "my_batch() returns nothing yet: return a whole number."
        assert isinstance(batch, Real), f"my_batch() returns {type(batch).__name__} and not a whole number."
        assert batch == int(batch) > 0 and int(batch).bit_count() == 1, f"{batch} is no power of two."
        batch = int(batch)
        outputs = batch * one_sample
        assert outputs < 2 * budget, (
            f"a batch of {batch}: the outputs of its layers alone take {outputs:,.0f} MiB of {budget:.0f}."
        )
        peaks = {}
        for size in (batch, 2 * batch):
            done = try_out(step, size, label=f"batch {size}")
            peaks[size] = done.peak_mib
        assert peaks[batch] <= budget, (
            f"a batch of {batch} does not fit: its peak is {peaks[batch]:.0f} MiB, allowed are {budget:.0f}."
        )
        assert peaks[2 * batch] > budget, (
            f"a batch of {2 * batch} would fit, too: its peak is {peaks[2 * batch]:.0f} MiB, allowed are {budget:.0f}."
        )
