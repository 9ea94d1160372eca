"""Symptom: the derivatives of a model's outputs by its inputs are slow and huge (tensorflow/tensorflow#36227).

Mechanism: jacobian() holds the derivative of every example by every other one, which is zero off the diagonal.
Fix: batch_jacobian(), smaller by the batch size.
"""

# kind: batch-bound activations
# budget: 48 MiB
# line: derivatives = tape.batch_jacobian(y, x) if "--fixed" in
import sys

import tensorflow as tf

weights = tf.Variable(tf.random.normal([512, 32]))
for step in range(2):
    x = tf.random.normal([32, 512])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.tanh(x @ weights)
    derivatives = tape.batch_jacobian(y, x) if "--fixed" in sys.argv else tape.jacobian(y, x)
    print(derivatives.shape)
