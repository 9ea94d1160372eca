"""Symptom: an allocation fails although enough memory is free (tensorflow/tensorflow#2942, #6111).

Mechanism: small pieces that stay lie between large ones that are freed, and the free pieces do not join.
Fix: allocate what stays before, in one piece.
"""

# kind: fragmentation
# budget: 64 MiB
# line: print(tf.zeros([20, MIB]).shape)
import sys

import tensorflow as tf

MIB = 2**18  # float32
features = tf.Variable(tf.zeros([8, MIB])) if "--fixed" in sys.argv else []
scratch = []
for image in range(8):
    scratch.append(tf.zeros([5, MIB]))  # 5 MiB for a while
    feature = tf.ones([MIB])  # 1 MiB to keep
    if "--fixed" in sys.argv:
        features[image].assign(feature)
    else:
        features.append(feature)
del scratch
print(tf.zeros([20, MIB]).shape)
