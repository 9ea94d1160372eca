"""Symptom: the first call of a train step dies, with an error of many megabytes, or its graph is too large to be saved.

Mechanism: a NumPy array that a tf.function reads from outside becomes a constant of its graph: it is copied into the graph,
and once more into the allocator when the graph runs.
Fix: give what a step needs as an argument.
"""

# kind: constants in graphs
# budget: 20 MiB
# line: some = tf.gather(rows, numbers)
import sys

import numpy as np
import tensorflow as tf

rows = np.random.default_rng(0).normal(size=(24_000, 256)).astype("float32")  # 23 MiB
fixed = "--fixed" in sys.argv
weights = tf.Variable(tf.zeros((256, 1)))


@tf.function
def step(numbers, some=None):
    with tf.GradientTape() as tape:
        some = tf.gather(rows, numbers) if some is None else some
        loss = tf.reduce_mean((some @ weights - 1) ** 2)
    weights.assign_sub(0.01 * tape.gradient(loss, weights))
    return loss


for i in range(20):
    numbers = np.arange(i, i + 64)
    step(tf.constant(numbers), tf.constant(rows[numbers]) if fixed else None)
