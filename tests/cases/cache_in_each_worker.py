"""Symptom: memory rises over an epoch with use_multiprocessing=True and several workers, while the Python process itself
looks innocent (tensorflow/tensorflow#37026, #30801, keras-team/keras#10756).

Mechanism: workers are processes. What __getitem__ keeps on the data set it keeps in each worker: the cache is filled
once a worker, not once.
Fix: threads, which share one cache (or a cache in a file that all map).
"""

# kind: copies in child processes
# budget: 128 MiB
# line: model.fit(data, epochs=12, verbose=0)
# outside: 448 MiB
import sys

import keras
import numpy as np

model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")


class Batches(keras.utils.PyDataset):
    def __init__(self, **options):
        super().__init__(**options)
        self.cache = {}

    def __len__(self):
        return 48

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = np.random.default_rng(index).random((1024, 512), "float32")  # 2 MiB "decoded"
        return self.cache[index][:32], np.zeros((32, 1), "float32")


if __name__ == "__main__":
    data = Batches(workers=4, use_multiprocessing="--fixed" not in sys.argv, max_queue_size=4)
    model.fit(data, epochs=12, verbose=0)
    print("12 epochs")
