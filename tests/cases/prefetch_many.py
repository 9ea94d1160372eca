"""Symptom: memory is far above what a batch needs and rises at the begin of training (ai2cm/fv3net#1712).

Mechanism: prefetch(64) behind batch() prepares 64 whole batches while the model is busy.
Fix: one or two batches ahead are enough.
"""

# kind: buffer
# budget: 40 MiB
# line: for batch in samples.batch(8).prefetch(2 if "--fixed" in
import sys
import time

import tensorflow as tf

weights = tf.Variable(tf.zeros([4096, 32]))
samples = tf.data.Dataset.range(800).map(lambda n: tf.random.stateless_uniform([128, 256], [0, n]))
for batch in samples.batch(8).prefetch(2 if "--fixed" in sys.argv else 64):
    time.sleep(0.05)  # the model is busy
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.reshape(batch, [-1, 4096]) @ weights))
    weights.assign_sub(0.01 * tape.gradient(loss, weights))
