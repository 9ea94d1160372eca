"""How much memory a trained and dropped model leaves behind, as one row of model_per_trial.csv.

Needs nothing but TensorFlow, so that it runs in an environment of any version:
    python data/recorded/model_per_trial.py            prints the row for the TensorFlow that is installed
    python data/recorded/model_per_trial.py --header   prints the names of the columns first
"""

import csv
import gc
import os
import platform
import sys

os.environ.update(TF_CPU_ALLOCATOR_USE_BFC="1", TF_CPP_MIN_LOG_LEVEL="3")

import keras
import numpy as np
import tensorflow as tf

MIB = 2**20
ROUNDS = 4
x = np.random.default_rng(0).random((64, 1024), np.float32)
y = x[:, :1]


def build(activation="relu"):
    layers = [keras.layers.Dense(1024, activation), keras.layers.Dense(1024, activation), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((1024,)), *layers])


def fit(optimizer):
    model = build()
    model.compile(optimizer, "mse")
    model.fit(x, y, verbose=0)


def fit_without_all_reduce():
    class Local(keras.optimizers.Adam):
        def _all_reduce_sum_gradients(self, grads_and_vars):
            return grads_and_vars

    fit(Local())


def by_hand(activation):
    """A training step without a Keras optimizer."""
    model = build(activation)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        for variable, gradient in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables)):
            variable.assign_sub(0.01 * gradient)

    step()


def kept(train):
    """MiB that stay after each model, from the second to the last."""
    readings = []
    for _ in range(ROUNDS):
        train()
        keras.backend.clear_session()
        gc.collect()
        readings.append(tf.config.experimental.get_memory_info("CPU:0")["current"] / MIB)
    return round((readings[-1] - readings[0]) / (ROUNDS - 1), 2)


if __name__ == "__main__":
    weights = sum(np.prod(w.shape) for w in build().weights) * 4 / MIB
    row = {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
        "change": os.environ.get("CHANGE", "none"),
        "weights MiB": round(weights, 2),
        "fit, Adam": kept(lambda: fit("adam")),
        "fit, Adam without all-reduce": kept(fit_without_all_reduce)
        if hasattr(keras.optimizers.Adam, "_all_reduce_sum_gradients")
        else "",
        "no Keras optimizer, relu": kept(lambda: by_hand("relu")),
        "no Keras optimizer, silu": kept(lambda: by_hand("silu")),
    }
    writer = csv.DictWriter(sys.stdout, row, lineterminator="\n")
    if "--header" in sys.argv:
        writer.writeheader()
    writer.writerow(row)
