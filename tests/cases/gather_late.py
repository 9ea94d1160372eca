"""Symptom: a warning of sparse gradients made dense, then out of memory (tensorflow/tensorflow#23566).

Mechanism: the whole table is transformed and only then looked up, forwards and backwards.
Fix: look up first, then transform the few rows.
"""

# kind: work on a whole table
# budget: 60 MiB
import sys

import tensorflow as tf

table = tf.Variable(tf.zeros([100_000, 64]))
projection = tf.Variable(tf.random.normal([64, 64]))
ids = tf.random.uniform([640], maxval=100_000, dtype=tf.int32)


@tf.function
def gradients():
    with tf.GradientTape() as tape:
        rows = (
            tf.tanh(tf.gather(table, ids) @ projection)
            if "--fixed" in sys.argv
            else tf.gather(tf.tanh(table @ projection), ids)
        )
        loss = tf.reduce_sum(rows)
    return tape.gradient(loss, projection)


for step in range(3):
    projection.assign_sub(0.01 * gradients())
