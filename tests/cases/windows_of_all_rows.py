"""Symptom: "Unable to allocate 410. MiB for an array" while the windows of a series of 2 MiB are cut, before the first step.

Mechanism: a window begins at each of 40,000 hours and is 168 hours long: as an array, each hour is there 168 times.
Fix: a pipeline that cuts the windows of one batch.
"""

# kind: data converted whole
# budget: 128 MiB
# line: data = np.stack([series[start : start + WEEK] for start in
# outside: 320 MiB
import sys

import keras
import numpy as np

HOURS, WEEK, SENSORS = 40_000, 168, 8
series = np.random.default_rng(0).normal(size=(HOURS, SENSORS))

if "--fixed" in sys.argv:
    data = keras.utils.timeseries_dataset_from_array(series[:-WEEK], series[WEEK:, 0], WEEK, batch_size=64)
    data = data.take(20)
    targets = None
else:
    data = np.stack([series[start : start + WEEK] for start in range(HOURS - WEEK)])
    targets = series[WEEK:, 0]

model = keras.Sequential([keras.Input((WEEK, SENSORS)), keras.layers.Flatten(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(data, targets, epochs=2, verbose=0)
