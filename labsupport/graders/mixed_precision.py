"""Graders of the lab on mixed precision."""

import operator

import numpy as np

from labsupport.ground.budget import NO_ONEDNN
from labsupport.ground.meter import phase
from labsupport.lesson.exercises import exercise, try_out, untouched
from labsupport.lesson.predict import tensor_mib

MOST_MIB = 256
# Of the step in float32: 0.5 is half of all; by trial 0.60 where activations outweigh weights, 1.0 and more where they do not.
PART = 0.65


def _step_with_adam(policy, width, depth, batch):
    """In the arm: a few training steps of a network of equal layers, each a phase."""
    import keras
    import tensorflow as tf

    # Without biases, which weigh nothing: tracing them takes as long as tracing the kernels.
    layers = [keras.layers.Dense(width, activation="relu", use_bias=False, dtype=policy) for _ in range(depth)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    inputs = tf.random.normal([batch, width])

    @tf.function
    def step(inputs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(model(inputs, training=True), tf.float32) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    step(inputs)
    for _ in range(5):
        with phase("step"):
            step(inputs)


def _measured(policy, sizes):
    """The least peak of a few steps in MiB: a graph may order its operations anew in each."""
    done = try_out(_step_with_adam, policy, *sizes, label=f"your network, {policy}", env=NO_ONEDNN)
    return min(part.peak_mib for part in done.phases)


@exercise(
    1,
    "Count weights four times and activations once. Which of width, depth and batch makes only the activations grow?",
    "What the kernels take beside is the size of a few layers' outputs. A network of hundreds of outputs hardly notices it.",
)
def where_it_pays(answer):
    """answer() is {"width": …, "depth": …, "batch": …} of a network whose memory mixed_float16 brings to PART at most."""
    chosen = answer()
    assert not untouched(chosen), "the function returns nothing yet: return a dict of three sizes."
    assert isinstance(chosen, dict) and set(chosen) == {"width", "depth", "batch"}, (
        f"that is {chosen!r:.80}, and a dict with width, depth and batch is asked for."
    )
    try:
        sizes = [operator.index(chosen[name]) for name in ("width", "depth", "batch")]
    except TypeError:
        raise AssertionError("width, depth and batch are whole numbers.") from None
    assert min(sizes) > 0, "width, depth and batch are above 0."
    width, depth, batch = sizes
    weights, activations = depth * tensor_mib((width, width)), depth * tensor_mib((batch, width))
    expected = 4 * weights + activations
    assert expected <= MOST_MIB, f"it would need {expected:,.0f} MiB in float32, and {MOST_MIB} are allowed."
    assert depth <= 256, f"with {depth} layers, tracing takes too long here: at most 256."
    float32, mixed = _measured("float32", sizes), _measured("mixed_float16", sizes)
    assert float32 <= 1.1 * MOST_MIB, f"it needs {float32:,.0f} MiB in float32, and {MOST_MIB} are allowed."
    why = (
        f"weights, gradients and averages make {4 * weights:.1f} MiB, activations {activations:.1f}"
        if 4 * weights > 0.2 * activations
        else f"{depth} outputs are kept, and the scratch of the kernels is as large as some of them"
    )
    assert mixed <= PART * float32, (
        f"mixed_float16 needs {mixed:.1f} MiB and float32 {float32:.1f}, {mixed / float32:.2f} of it: {why}."
    )


@exercise(
    2,
    "The gradient is too small for float16 on its way, not at its end. What makes every gradient on the way larger?",
    "A factor that the loss gets inside the tape is a factor of the gradient, and can be divided out in float32 afterwards.",
)
def scaled_gradient(answer):
    """answer(weights, inputs) is the gradient of 1e-7 × mean(inputs @ weights) for weights."""
    import tensorflow as tf

    for seed in (1, 2):
        inputs, weights = tf.random.uniform([4, 8], 0.5, 2, seed=seed), tf.random.normal([8, 2], seed=seed)
        given = answer(weights, inputs)
        assert not untouched(given), "the function returns nothing yet: return the gradient."
        assert tf.is_tensor(given) or isinstance(given, np.ndarray), (
            f"that is {type(given).__name__}, and a tensor is asked for."
        )
        given = given.numpy() if tf.is_tensor(given) else given
        assert given.dtype != np.float16, "the gradient is float16: it must be float32 before it is divided."
        assert given.shape == (8, 2), f"the gradient has the shape {given.shape}, not that of the weights, (8, 2)."
        right = np.repeat(1e-7 * inputs.numpy().sum(axis=0)[:, None] / 8, 2, axis=1)
        assert np.all(given != 0), f"{np.mean(given == 0):.0%} of the gradient is 0: it still underflows."
        assert np.isfinite(given).all(), (
            f"{np.mean(~np.isfinite(given)):.0%} of the gradient is infinite or NaN: the factor takes it beyond 65504, the "
            "largest number of float16."
        )
        factor = float(np.median(given / right))
        # A float16 has eleven bits: one part in two thousand, a few times.
        assert abs(factor - 1) < 0.005, (
            f"the gradient is {factor:.4g} times the right one: is it divided by what the loss was multiplied with?"
        )
        assert np.allclose(given, right, rtol=0.005, atol=0), "the gradient is right in size, and not number by number."
        # Rounded to float16 on its way, it cannot be right to six digits.
        assert not np.allclose(given, right, rtol=2e-6, atol=0), (
            "the gradient is that of a loss in float32. That of small_loss goes through float16: scale it there."
        )
