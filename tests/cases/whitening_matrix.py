"""Symptom: fitting ZCA whitening on a few images asks for tens of GB (keras-team/keras#13433, #8706).

Mechanism: the covariance is pixels × pixels; it does not shrink with fewer images. 224 × 224 × 3 is 150,528 squared,
84 GiB; here 64 × 64 × 3 squared is 576 MiB from 32 images of 1.5 MiB together.
Fix: with fewer images than pixels all is in the images × images matrix (or standardize each channel instead).
"""

# kind: one operation's large output
# budget: 256 MiB
# line: covariance = tf.matmul(flat, flat, transpose_a=True) / 32
import sys

import tensorflow as tf

images = tf.random.uniform([32, 64, 64, 3])
flat = tf.reshape(images, [32, -1])
flat -= tf.reduce_mean(flat, axis=0)
if "--fixed" in sys.argv:
    small = tf.matmul(flat, flat, transpose_b=True)  # 32 × 32
    values, vectors = tf.linalg.eigh(small)
    white = tf.matmul(vectors / tf.sqrt(values + 1e-3), tf.matmul(vectors, flat, transpose_a=True))
else:
    covariance = tf.matmul(flat, flat, transpose_a=True) / 32  # 12,288 × 12,288
    white = tf.matmul(flat, covariance)
print(white.shape)
