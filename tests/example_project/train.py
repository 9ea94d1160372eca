"""A small training script, as anybody's repository has one. Its tests are in test_memory.py.

LEAK, an environment variable, plants one fault; without it the script is in order.
"""

import os

import keras
import numpy as np
import tensorflow as tf

LEAK = os.environ.get("LEAK", "")
ROWS, WIDTH = 64, 128

history, kept = [], []


def build():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, "relu"), keras.layers.Dense(1)])


model = build()
features = np.random.default_rng(0).random((ROWS, WIDTH), np.float32)
labels = features[:, :1]


@tf.function
def train_step(x, y, rate):
    with tf.GradientTape() as tape:
        error = (model(x) - y) ** 2
        loss = tf.reduce_mean(error)
    gradients = tape.gradient(loss, model.trainable_variables)
    for variable, gradient in zip(model.trainable_variables, gradients):
        variable.assign_sub(rate * gradient)
    return loss, gradients


def step():
    """One training step."""
    rate = 0.01 * 0.99 ** len(history)
    run = train_step
    if LEAK == "function":
        run = tf.function(train_step.python_function)
        kept.append(run)
    loss, gradients = run(features, labels, rate if LEAK == "retrace" else tf.constant(rate))
    history.append(float(loss))
    if LEAK == "gradients":
        kept.append(gradients)
    if LEAK == "arrays":
        kept.append((features * 2, labels))
    if LEAK == "iterator":
        batches = iter(tf.data.Dataset.from_tensor_slices(features).repeat().batch(16).prefetch(2))
        next(batches)
        kept.append(batches)
    if LEAK == "fit":
        trial = build()
        trial.compile("adam", "mse")
        trial.fit(features, labels, verbose=0)
        del trial
        keras.utils.clear_session()
    cache(len(history))


def cache(number, _cached={}):
    """What grows at first and then no more must not be taken for a leak, nor garbage in a cycle."""
    if number < 8:
        _cached[number] = tf.zeros([256, 256]), np.zeros(10_000)
    cycle = [tf.zeros([64, 64])]
    cycle.append(cycle)


def epoch():
    """All rows at once, through a layer that is too wide for the budget in test_memory.py if LEAK is "wide"."""
    hidden = tf.zeros([1024, 4096 if LEAK == "wide" else 1024])  # 16 MiB, or 4
    return float(tf.reduce_sum(hidden))
