"""Symptom: memory grows with every epoch although the data set is cached, and small.

Mechanism: cache() behind repeat() never sees the end of its first pass, so that it keeps each element of each pass anew.
Fix: cache() first, then repeat().
"""

# kind: cache behind repeat()
# budget: 512 MiB
# line: data = data.repeat().map(ready).batch(32).cache()
import sys

import keras
import numpy as np
import tensorflow as tf

images, labels = np.zeros((256, 64, 64, 3), "uint8"), np.zeros(256, "int64")
data = tf.data.Dataset.from_tensor_slices((images, labels))
ready = lambda image, label: (tf.cast(image, tf.float32) / 255, label)
if "--fixed" in sys.argv:
    data = data.map(ready).batch(32).cache().repeat()
else:
    data = data.repeat().map(ready).batch(32).cache()
model = keras.Sequential([keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(data.prefetch(1), steps_per_epoch=8, epochs=16, verbose=0)
