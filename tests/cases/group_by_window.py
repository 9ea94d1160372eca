"""Symptom: memory rises steadily while records are grouped by a window (tensorflow/tensorflow#37969).

Mechanism: every key that has been seen keeps an unfinished window; here each record has a key of its own.
Fix: few keys, here buckets of 8.
"""

# kind: buffer
# budget: 64 MiB
# line: for numbers, batch in windows:
import sys

import tensorflow as tf

keys = 8 if "--fixed" in sys.argv else 2000
records = tf.data.Dataset.range(2000).map(lambda n: (n, tf.random.stateless_uniform([128, 128], [0, n])))
windows = records.group_by_window(
    key_func=lambda n, record: n % keys, reduce_func=lambda key, window: window.batch(8), window_size=8
)
for numbers, batch in windows:
    total = tf.reduce_sum(batch)
