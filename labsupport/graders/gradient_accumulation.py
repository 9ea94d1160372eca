"""Graders of the lab on gradient accumulation."""

import numpy as np

from labsupport.lesson.exercises import exercise, try_out, untouched

_EQUAL = 1e-3  # relative distance of two gradients that differ by float32's rounding alone; measured are 1e-7 to 1e-6


def _flat(variables):
    return np.concatenate([np.ravel(v) for v in variables])


def _distance(gradient, reference):
    return float(np.linalg.norm(gradient - reference) / np.linalg.norm(reference))


def _gradients(model, x, y):
    """The gradients of the mean loss of a model that gives scores."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))
    return tape.gradient(loss, model.trainable_variables)


def _accumulated(answer, x, y, size):
    """In the arm: what the answer gives, the whole gradient, and the rows that it asked gradients of."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    asked, place = [], {row.tobytes(): index for index, row in enumerate(x)}

    def gradient(x, y):
        asked.append([place.get(row.tobytes(), -1) for row in np.asarray(x, "float32")])
        return _flat(_gradients(model, x, y))

    yours = answer(gradient, x, y, size)
    yours = None if untouched(yours) else np.asarray(yours, "float64")
    return yours, _flat(_gradients(model, x, y)), asked


@exercise(
    1,
    "The mean over all rows is no mean of means unless the parts are equal: what does each row count in its part?",
    "A slice past the end is simply shorter, so its own len() tells how many rows it has.",
)
def uneven(answer, x, y, size=32):
    """answer(gradient, x, y, size) gives the gradient over all rows from parts of at most `size` rows, each row once."""
    x = x + np.arange(len(x), dtype=x.dtype)[:, None] * np.float32(1e-4)  # no two rows alike
    done = try_out(_accumulated, answer, x, y, size, label="your answer to 1")
    yours, reference, asked = done.value
    assert yours is not None, "accumulate_uneven() returns nothing yet: return the accumulated gradient."
    most = max((len(rows) for rows in asked), default=0)
    assert most <= size, f"a gradient over {most} rows at once was asked for: micro-batches have at most {size}."
    rows = sorted(row for part in asked for row in part)
    strange = rows.count(-1)
    assert not strange, f"{strange} rows in micro-batches are none of the {len(x)}: padding counts in a mean, too."
    missing = len(x) - len(set(rows))
    assert not missing, f"{missing} rows of the {len(x)} never came into a micro-batch."
    assert len(rows) == len(x), f"{len(rows)} rows came into micro-batches where there are {len(x)}: each counts once."
    assert yours.shape == reference.shape, f"its shape is {yours.shape}, not {reference.shape}."
    scale = np.linalg.norm(yours) / np.linalg.norm(reference)
    assert 0.5 < scale < 2, f"the gradient is {scale:.2f} × as long as that of all rows: longer or shorter than a mean."
    off = _distance(yours, reference)
    assert off < _EQUAL, f"it is off by {off:.1%}: do the last {len(x) % size} rows weigh as much as {size} others?"


def _two_updates(answer, x, y):
    """In the arm: the distance of each applied update from the whole batch's, and how much of the first is in the second."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    scores = keras.layers.Dense(10, kernel_initializer="zeros")
    model, applied, whole = keras.Sequential([keras.Input((64,)), scores]), [], []
    sums = [tf.Variable(tf.zeros_like(v)) for v in model.trainable_variables]

    def apply():
        first = 128 * len(applied)
        whole.append(_flat(_gradients(model, x[first : first + 128], y[first : first + 128])) if first < len(x) else 0)
        applied.append(_flat(sums))
        for variable, gradient in zip(model.trainable_variables, sums):
            variable.assign_sub(0.5 * gradient)

    parts = [(x[start : start + 32], y[start : start + 32]) for start in range(0, 256, 32)]
    answer(lambda x, y: _gradients(model, x, y), sums, apply, [parts[:4], parts[4:]])
    if len(applied) != 2:
        return {"applied": len(applied)}
    return {
        "applied": 2,
        "first": _distance(applied[0], whole[0]),
        "second": _distance(applied[1], whole[1]),
        "kept": _distance(applied[1] - applied[0], whole[1]),
        "times": float(np.linalg.norm(applied[0]) / np.linalg.norm(whole[0])),
    }


@exercise(
    2,
    "What is in the sums when the second batch begins?",
    "A variable keeps its value until another is assigned; apply() reads these very variables.",
)
def cleared(answer, x, y):
    """answer(micro_gradients, sums, apply, batches) applies the gradient of each batch once, in the sums that it was given."""
    done = try_out(_two_updates, answer, x, y, label="your answer to 2")
    found = done.value
    assert found["applied"] == 2, (
        f"apply() was called {found['applied']} times: both batches must be applied, each once."
    )
    assert found["first"] < _EQUAL, (
        f"the first update is off by {found['first']:.0%}, and {found['times']:.2g} × as long as the whole batch's: "
        "leave the adding as it is."
    )
    assert found["second"] < _EQUAL, f"the second update is off by {found['second']:.0%}" + (
        ": the first batch's gradients are still in it." if found["kept"] < _EQUAL else ": it holds something else."
    )


def _norms(answer, x, y):
    """In the arm: the distance of the accumulated gradient, and what scaled and shifted inputs do to the hidden numbers."""
    import keras

    keras.utils.set_random_seed(0)
    model = answer()
    if untouched(model):
        return "normalized_model() returns nothing yet: return a Keras model."
    if not isinstance(model, keras.Model):
        return f"it returns {type(model).__name__}, not a Keras model."
    scores = model(x)
    if scores.shape != (len(x), 10):
        return f"its scores have the shape {tuple(scores.shape)}, not ({len(x)}, 10)."
    if sum(len(weight.shape) == 2 for weight in model.trainable_variables) < 2:
        return "there are no two dense layers in it."
    whole = _flat(_gradients(model, x, y))
    parts = [_flat(_gradients(model, x[start : start + 32], y[start : start + 32])) for start in range(0, len(x), 32)]
    # Where the numbers of a row, or of a batch, are normalized, inputs a hundred times as large give nearly the same scores.
    scores, of_larger = (model(scale * x, training=True).numpy() for scale in (1, 100))
    return {"distance": _distance(sum(parts) / len(parts), whole), "moved": _distance(of_larger, scores)}


@exercise(
    3,
    "Whose mean and variance may a layer use, if a row shall get the same gradient in any company?",
    "A row's own: Keras has several such layers, some over all features and some over groups of them.",
)
def accumulates(answer, x, y):
    """answer() builds a network that normalizes, and whose accumulated gradient is that of the whole batch."""
    done = try_out(_norms, answer, x, y, label="your answer to 3")
    moved, off = done.value["moved"], done.value["distance"]
    assert moved < 0.1, f"inputs a hundred times as large move the scores by {moved:.0%}: nothing is normalized."
    assert off < _EQUAL, (
        f"the accumulated gradient is off by {off:.0%}: the normalization uses the micro-batches' own mean and variance."
    )
