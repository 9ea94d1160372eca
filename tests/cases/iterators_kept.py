"""Symptom: memory holds the shuffle buffers of all data sets so far, though their names are gone (tensorflow/tensorflow#28759).

Mechanism: an iterator owns its buffer and outlives the dataset it came from.
Fix: let go of the iterator, not only of the dataset.
"""

# kind: buffer
# budget: 160 MiB
# line: iterators[name] = iter(images.shuffle(50).batch(8))
import sys

import tensorflow as tf

iterators = {}
for stage in range(8):
    images = tf.data.Dataset.range(200).map(lambda n: tf.fill([128, 128, 3], tf.cast(n + stage, tf.float32)))
    name = "now" if "--fixed" in sys.argv else stage
    iterators.pop(name, None)
    iterators[name] = iter(images.shuffle(50).batch(8))
    del images
    for step in range(6):
        batch = next(iterators[name])
