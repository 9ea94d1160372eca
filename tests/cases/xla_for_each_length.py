"""Symptom: the process grows with each batch of another length, and TensorFlow's own counter stays where it is (tensorflow/tensorflow#81896).

Mechanism: XLA compiles a program for each shape, even where TensorFlow traces once, and keeps it.
Fix: pad all batches to one length.
"""

# kind: programs that XLA keeps
# budget: 64 MiB
# line: @tf.function(jit_compile=True,
import sys

import tensorflow as tf

weights = [tf.Variable(tf.random.normal([64, 64])) for _ in range(6)]


@tf.function(jit_compile=True, input_signature=[tf.TensorSpec([None, 64])])
def step(x):
    with tf.GradientTape() as tape:
        for weight in weights:
            x = tf.nn.gelu(tf.nn.softmax(x @ weight))
        loss = tf.reduce_mean(x)
    for weight, gradient in zip(weights, tape.gradient(loss, weights)):
        weight.assign_sub(0.1 * gradient)
    return loss


for length in range(1, 35):
    step(tf.ones([34 if "--fixed" in sys.argv else length, 64]))
print("34 batches")
