"""Symptom: memory fills before the first step of each epoch (tensorflow/tensorflow#32376, #54299, huggingface/datasets#5855).

Mechanism: the shuffle buffer is as large as the data set, and it holds decoded images.
Fix: shuffle what is small, here the numbers of the images, and decode afterwards.
"""

# kind: buffer
# budget: 48 MiB
# line: images = numbers.shuffle(400).map(load) if "--fixed" in
import sys

import tensorflow as tf


def load(number):
    return tf.random.stateless_uniform([128, 128, 3], [0, number])


numbers = tf.data.Dataset.range(400)
images = numbers.shuffle(400).map(load) if "--fixed" in sys.argv else numbers.map(load).shuffle(400)
kernel = tf.Variable(tf.random.normal([3, 3, 3, 4]))
for batch in images.batch(8):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.conv2d(batch, kernel, 2, "SAME"))
    kernel.assign_sub(tape.gradient(loss, kernel))
