"""Symptom: memory climbs until it is full; gc.collect() in a callback makes it flat (tensorflow/tensorflow#31312).

Mechanism: each step's record refers to itself, so only Python's collector can free it. The collector goes by the number
of objects, not by their bytes: a few objects with large tensors do not wake it. With its own threshold it now and then came
in time, or for the error's traceback; many programs set a higher one to be faster.
Fix: no cycle (the record does not know its owner).
"""

# kind: garbage that waits for the collector
# budget: 48 MiB
# line: def __init__(self, outputs):
import gc
import sys

import tensorflow as tf

gc.set_threshold(100_000)
weight = tf.Variable(tf.random.normal([512, 512], stddev=0.02))


class Record:
    def __init__(self, outputs):
        self.outputs = outputs
        self.report = (lambda: 0.0) if "--fixed" in sys.argv else (lambda: float(tf.reduce_mean(self.outputs)))


for step in range(200):
    with tf.GradientTape() as tape:
        outputs = tf.nn.relu(tf.matmul(tf.random.normal([1024, 512]), weight))  # 2 MiB
        loss = tf.reduce_mean(outputs)
    weight.assign_sub(0.01 * tape.gradient(loss, weight))
    record = Record(outputs)
print("200 steps")
