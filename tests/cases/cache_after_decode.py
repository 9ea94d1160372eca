"""Symptom: training on a large image set fills all memory during its first epoch (larq/zoo#258, tensorflow/tensorflow#27128).

Mechanism: cache() stands behind the decoding and keeps every decoded image.
Fix: cache the encoded bytes, which are a hundredth here, and decode again in each epoch.
"""

# kind: buffer
# budget: 64 MiB
# line: images = images.cache().map(decode) if "--fixed" in
import sys

import tensorflow as tf

files = [tf.io.encode_jpeg(tf.fill([224, 224, 3], tf.cast(n, tf.uint8))).numpy() for n in range(200)]


def decode(encoded):
    return tf.image.convert_image_dtype(tf.io.decode_jpeg(encoded, channels=3), tf.float32)


images = tf.data.Dataset.from_tensor_slices(files)
images = images.cache().map(decode) if "--fixed" in sys.argv else images.map(decode).cache()
kernel = tf.Variable(tf.random.normal([3, 3, 3, 4]))
for epoch in range(2):
    for batch in images.batch(8):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.conv2d(batch, kernel, 2, "SAME"))
        kernel.assign_sub(tape.gradient(loss, kernel))
