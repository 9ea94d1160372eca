"""Symptom: memory climbs with every call of Session.run (tensorflow/tensorflow#10408, #3000).

Mechanism: operations are built inside the loop, here a constant with the whole image, so the graph grows by each step.
Fix: build them once before the loop and feed the image through a placeholder.
"""

# kind: retracing
# budget: 128 MiB
# line: session.run(tf.image.rgb_to_grayscale(tf.constant(one)))
import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
images = np.random.default_rng(0).random((60, 64, 64, 3), dtype="float32")
image = tf.placeholder(tf.float32, [64, 64, 3])
gray = tf.image.rgb_to_grayscale(image)

with tf.Session() as session:
    for one in images:
        if "--fixed" in sys.argv:
            session.run(gray, {image: one})
        else:
            session.run(tf.image.rgb_to_grayscale(tf.constant(one)))
