"""Symptom: host memory rises while a compiled model answers questions of varied lengths (see--/natural-question-answering#7, tensorflow/tensorflow#58642).

Mechanism: without a signature each new shape may be traced again; a list of Python numbers is traced for each new text.
Fix: one signature with an open length, and tensors as arguments.
"""
# kind: retracing
# budget: 128 MiB
import sys

import numpy as np
import tensorflow as tf

embedding = tf.Variable(tf.random.normal([1000, 16]))


def answer(words):
    return tf.reduce_mean(tf.gather(embedding, words), axis=0)


signature = [tf.TensorSpec([None], tf.int32)] if "--fixed" in sys.argv else None
answer = tf.function(answer, input_signature=signature)
random = np.random.default_rng(0)
for question in range(50):
    words = random.integers(0, 1000, random.integers(5, 60)).tolist()
    answer(tf.constant(words) if "--fixed" in sys.argv else words)
