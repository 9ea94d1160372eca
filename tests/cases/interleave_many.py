"""Symptom: memory climbs as many pipelines are interleaved (tensorflow/tensorflow#30156).

Mechanism: as many inner pipelines as cycle_length are open at once, each with buffers of its own.
Fix: a small cycle_length, and buffering behind the interleave.
"""

# kind: buffer
# budget: 64 MiB
# line: for batch in tables.interleave(table, cycle_length=cycle,
import sys
import time

import tensorflow as tf


def table(number):
    rows = tf.data.Dataset.range(64).map(lambda row: tf.random.stateless_uniform([128, 128], [number, row]))
    return rows.batch(8).prefetch(8)


tables = tf.data.Dataset.range(32)
cycle = 2 if "--fixed" in sys.argv else 32
for batch in tables.interleave(table, cycle_length=cycle, block_length=1).prefetch(2):
    time.sleep(0.01)  # the model is busy
