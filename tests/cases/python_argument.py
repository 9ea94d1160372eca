"""Symptom: memory rises while an agent's policy, a tf.function, is called (instadeepai/Mava#346, tensorflow/tensorflow#50765).

Mechanism: the exploration rate is a Python number, and every new value is traced into a graph of its own, which is kept.
Fix: pass it as a tensor.
"""

# kind: retracing
# budget: 128 MiB
# line: @tf.function
import sys

import tensorflow as tf

weights = tf.Variable(tf.random.normal([8, 4]))


@tf.function
def act(observation, exploration):
    best = tf.argmax(observation @ weights, axis=1)
    random = tf.random.uniform(tf.shape(best), maxval=4, dtype=tf.int64)
    return tf.where(tf.random.uniform(tf.shape(best)) < exploration, random, best)


for step in range(60):
    exploration = 1.0 - step / 60
    act(tf.random.normal([16, 8]), tf.constant(exploration) if "--fixed" in sys.argv else exploration)
