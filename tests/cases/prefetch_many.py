"""Symptom: memory is far above what a batch needs and rises at the begin of training (ai2cm/fv3net#1712).

Mechanism: prefetch(64) behind batch() prepares 64 whole batches while the model is busy.
Fix: one or two batches ahead are enough.
"""
# kind: buffer
# budget: 64 MiB
import sys
import time

import tensorflow as tf

samples = tf.data.Dataset.range(4096).map(lambda n: tf.random.stateless_uniform([64, 64], [0, n]))
for batch in samples.batch(64).prefetch(2 if "--fixed" in sys.argv else 64):
    time.sleep(0.02)  # the model is busy
