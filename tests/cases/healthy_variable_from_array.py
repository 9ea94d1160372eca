"""Nothing is wrong here: a variable made from a NumPy array, before any model exists.

What is alive may be counted while the array is being converted, when the variable is half made. `--fixed` makes the tensor
first.
"""

# kind: none
# budget: 256 MiB
import sys

import numpy as np
import tensorflow as tf

start = np.random.default_rng(0).random((512, 512), "float32")
weight = tf.Variable(tf.constant(start) if "--fixed" in sys.argv else start)
for step in range(20):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.matmul(tf.random.normal([64, 512]), weight)))
    weight.assign_sub(0.01 * tape.gradient(loss, weight))
print("20 steps")
