"""Graders of the lab on predicting whether a training step fits."""

import functools

import numpy as np

from labsupport.ground.meter import phase
from labsupport.lesson.exercises import exercise, try_out, untouched

_LOSS = "sparse_categorical_crossentropy"
# (numbers a row, units): SGD's saving is near a tenth far from a power of two for both, and at another power for each.
_MODELS = ((1024, 1536), (256, 1024))


def _builder(features, units):
    def build():
        import keras

        dense = keras.layers.Dense
        return keras.Sequential(
            [keras.Input((features,)), dense(units, activation="relu"), dense(10, activation="softmax")]
        )

    return build


@functools.cache
def _optimizers(features, units):
    """The predictions for one of _MODELS with Adam and with SGD."""
    from labsupport.fits.prediction import predict

    return [predict(_builder(features, units), 32, optimizer=name, loss=_LOSS) for name in ("adam", "sgd")]


def _saving(model, batch):
    """What SGD saves of Adam's peak at this batch."""
    adam, sgd = _optimizers(*model)
    return 1 - sgd.at(batch) / adam.at(batch)


def _flipped(answer):
    """In the arm: what the answer gives for each model, or a word."""
    found = []
    for features, units in _MODELS:
        with phase(f"{features} features"):
            batch = answer(_builder(features, units))
        if untouched(batch):
            return "the function returns nothing yet: return a batch."
        if isinstance(batch, bool) or not isinstance(batch, (int, np.integer)) or batch < 1 or batch & (batch - 1):
            return f"it gives {batch!r}, and a power of two is asked for."
        if batch > 2**20:
            return f"it gives {batch:,}: that is beyond every batch that people train with."
        found.append(int(batch))
    return found


@exercise(
    1,
    "lab.predict(build, 32, optimizer=…, loss=LOSS) gives a prediction; its at(batch) tells the bytes of any other batch.",
    "The saving is 1 − SGD's bytes / Adam's bytes. Begin with a batch of 1 and double it while the saving is a tenth or more.",
)
def flips(answer):
    """answer(build) is the first power of two at which SGD saves less than a tenth of Adam's peak; nothing is built."""
    done = try_out(_flipped, answer, label="where it flips")
    for (features, units), batch in zip(_MODELS, done.value):
        before, at = (_saving((features, units), size) for size in (max(1, batch // 2), batch))
        told = f"for a layer of {units} units over {features} numbers it gives {batch}"
        assert at < 0.1, f"{told}, where SGD saves {at:.0%}: still a tenth or more."
        assert before >= 0.1 or batch == 1, f"{told}, and at half of that SGD saves {before:.0%} already."
        rise = done.phase(f"{features} features").rise_mib
        weights = features * units * 4 / 2**20
        assert rise < 0.5 * weights, (
            f"the model was really built: tensors took {rise:.1f} MiB, and its weights alone have {weights:.1f}."
        )


_SHAPES, _UPDATES, _RATE = ((1024, 1024), (40, 700), (1024,)), 3, 0.01


def _reference(weights, gradients):
    """The weights after the updates of exercise 2, in NumPy."""
    means = [[np.zeros(size) for size in weight.shape] for weight in weights]
    weights = [weight.astype("float64") for weight in weights]
    for step in gradients:
        for place, gradient in enumerate(step):
            state, squares = means[place], gradient.astype("float64") ** 2
            if gradient.ndim == 1:
                state[0] = v = 0.9 * state[0] + 0.1 * squares
            else:
                state[:] = [0.9 * mean + 0.1 * squares.mean(1 - axis) for axis, mean in enumerate(state)]
                v = np.outer(*state) / state[0].mean()
            weights[place] = weights[place] - _RATE * gradient / (np.sqrt(v) + 1e-7)
    return weights


def _factored(make):
    """In the arm: how far the weights are from NumPy's, how far again with a zeroed state, bytes of the weights; or a word."""
    import keras
    import tensorflow as tf

    if untouched(make):
        return "there is no class yet."
    random = np.random.default_rng(0)
    weights = [random.standard_normal(shape).astype("float32") for shape in _SHAPES]
    # Gradients whose rows and columns, and steps, differ in size, so that no mean can be left out.
    scales = [np.multiply.outer(*[np.linspace(0.5, 2, n) for n in s]) if len(s) == 2 else 1.0 for s in _SHAPES]
    gradients = [
        [
            ((2 + step) * scale * random.standard_normal(shape)).astype("float32")
            for shape, scale in zip(_SHAPES, scales)
        ]
        for step in range(_UPDATES)
    ]
    # Computed, so that their memory is the allocator's: TensorFlow takes over an aligned array as it is.
    variables = [keras.Variable(weight * tf.ones(())) for weight in weights]
    try:
        optimizer = make(learning_rate=_RATE)
        with phase("state"):
            optimizer.build(variables)
            apply = tf.function(lambda step: optimizer.apply_gradients(zip(step, variables)))
            for step in gradients:
                apply([tf.constant(gradient) for gradient in step])
    except NotImplementedError:
        return "the class has no update_step yet."
    apart = _distance(variables, _reference(weights, gradients))
    for variable in optimizer.variables:
        if "learning_rate" not in variable.path:
            variable.assign(tf.zeros(variable.shape, variable.dtype))
    before = [np.array(variable) for variable in variables]
    apply([tf.constant(gradient) for gradient in gradients[0]])
    as_new = _distance(variables, _reference(before, gradients[:1]))
    return apart, as_new, sum(weight.nbytes for weight in weights)


def _distance(variables, expected):
    return max(float(abs(np.asarray(variable) - right).max()) for variable, right in zip(variables, expected))


@exercise(
    2,
    "A matrix of the shape (m, n) needs two variables, of the shapes (m,) and (n,); a vector one.",
    "self._get_variable_index(variable) is the place of a variable in the list that build() was given.",
)
def factored(make):
    """make is an optimizer that updates as the lab says, and keeps a row and a column for a matrix."""
    done = try_out(_factored, make, label="your optimizer")
    apart, as_new, size = done.value
    assert apart < 1e-4, f"after {_UPDATES} updates the weights are off by up to {apart:.2g}: the updates are others."
    kept = done.phase("state").added_mib * 2**20 / size
    assert kept < 0.25, (
        f"the updates are right, and the optimizer keeps {kept:.2f} numbers for each weight: a row and a column are fewer."
    )
    assert as_new < 1e-4, (
        "with all of optimizer.variables set to zero it still remembers the steps before: make its state with add_variable, "
        "or it is not saved with the model."
    )
