"""Graders of the lab on the shapes of layers' outputs."""

import numpy as np

from labsupport.ground.meter import phase
from labsupport.lesson.exercises import exercise, try_out, untouched

SIDE, CLASSES, WEIGHTS = 64, 10, 1_500_000
LEAST_SEEN = 0.75  # of the pixels: a convolution or pooling without padding may leave out a border


def _trained(answer, batch):
    """In the arm: train the answer's model two steps; what the grader wants to know of it, or a word why not."""
    import keras
    import tensorflow as tf

    model = answer()
    if untouched(model):
        return "the function returns nothing yet: return a Keras model."
    if not isinstance(model, keras.Model):
        return f"the function returns {type(model).__name__}, not a Keras model."
    image = np.zeros((1, SIDE, SIDE, 3), np.float32)
    shape = tuple(model(image).shape)
    if shape != (1, CLASSES):
        return f"for one image it gives the shape {shape}, not (1, {CLASSES})."

    def all_layers(layer):
        return [below for part in layer.layers for below in all_layers(part)] if hasattr(layer, "layers") else [layer]

    convolutions = sum("Conv" in type(layer).__name__ for layer in all_layers(model))
    # Many images: where each pooling takes the largest of four, three of them do not count in one image.
    noise = tf.constant(np.random.default_rng(0).uniform(size=(64, *image.shape[1:])).astype("float32"))
    with tf.GradientTape() as tape:
        tape.watch(noise)
        first = model(noise)[:, 0]
    slope = tape.gradient(first, noise)
    seen = 0.0 if slope is None else float(np.mean(np.any(slope.numpy() != 0, axis=(0, 3))))
    del tape, first, slope, noise
    optimizer = keras.optimizers.Adam()
    x = tf.random.uniform((batch, SIDE, SIDE, 3))
    y = tf.one_hot(tf.random.uniform((batch,), maxval=CLASSES, dtype=tf.int32), CLASSES)
    with phase("two steps"):
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(keras.losses.categorical_crossentropy(y, model(x, training=True)))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            del tape, loss, gradients
    weights = sum(int(np.prod(weight.shape)) for weight in model.trainable_variables)
    return {"convolutions": convolutions, "weights": weights, "seen": seen}


@exercise(
    1,
    "Once the first output is small, another one is the largest. What is in its shape but height and width?",
    "Channels that the convolutions lose cost weights, and Dense units give weights that no batch multiplies.",
)
def frugal_cnn(answer, batch, published_mib):
    """answer() is a CNN of enough weights that trains in less than half of published_mib."""
    done = try_out(_trained, answer, batch, label="your network")
    facts = done.value
    assert facts["convolutions"] >= 2, f"it has {facts['convolutions']} convolutions, and two are asked for."
    assert facts["weights"] >= WEIGHTS, (
        f"its trainable weights are fewer than asked for: {facts['weights']:,} and not {WEIGHTS:,}."
    )
    assert facts["seen"] >= LEAST_SEEN, f"only {facts['seen']:.0%} of the pixels of an image count for its output."
    assert done.peak_mib < 0.5 * published_mib, (
        f"it needs {done.peak_mib:.0f} MiB, more than half of the {published_mib:.0f} MiB of the published one."
    )


def _gradients_of_head(answer):
    """In the arm: (gradients that are right, what the answer gives), each as arrays, or a word why not."""
    import tensorflow as tf
    from keras import layers

    backbone = [layers.Dense(512, activation="relu") for _ in range(8)]
    head, x = layers.Dense(10, bias_initializer="ones"), tf.random.normal((2048, 512))
    h = x
    for layer in backbone:
        h = layer(h)
        layer.trainable = False
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(head(h) ** 2)
    right = [gradient.numpy() for gradient in tape.gradient(loss, head.trainable_variables)]
    del h, tape, loss
    answer(backbone, head, x[:8])  # a tf.function traces, and may keep what it makes then
    answer(backbone, head, x)
    with phase("answer"):
        given = answer(backbone, head, x)
        if untouched(given):
            return "the function returns nothing yet: return the list of the head's gradients."
        if tf.is_tensor(given) or isinstance(given, float):
            return "that is one gradient: the head has two variables, so return two, one for the kernel and one for the bias."
        given = list(given)
    if len(given) != 2:
        return f"{len(given)} gradients came, and two are asked for: one for the kernel and one for the bias."
    if any(gradient is None for gradient in given):
        return "a gradient is None: the tape must see the head being called."
    return right, [np.asarray(gradient) for gradient in given]


@exercise(
    2,
    "A tape keeps what it sees. Must it see the backbone?",
    "Only what is called inside `with tf.GradientTape()` is recorded, and the head needs nothing but its own input.",
)
def head_gradients(answer):
    """answer(backbone, head, x) gives the head's gradients without keeping the backbone's outputs."""
    done = try_out(_gradients_of_head, answer, label="your step")
    for name, right, given in zip(("kernel", "bias"), *done.value):
        assert given.shape == right.shape, f"the {name}'s gradient has the shape {given.shape}, not {right.shape}."
        apart = float(abs(given - right).max() / abs(right).max())
        assert apart < 1e-3, (
            f"the {name}'s gradient and the right one differ from each other by {apart:.0%} of its largest value."
        )
    output_mib = 2048 * 512 * 4 / 2**20
    kept = done.phase("answer").rise_mib / output_mib
    # In flight are a layer's input, its output before the activation and after it.
    assert kept < 5, f"at its peak it holds {kept:.0f} outputs of the backbone: they are still kept."
