"""Nothing is wrong here: four worker processes read one array that they share with their parent, page by page.

Each process shows the shared pages in its resident set, so that the sum over the family counts them five
times; only the proportional set (PSS) or the unique one (USS) tells that there is one copy. A doctor that adds up
resident sets ends this healthy script. `--fixed` reads the same array with threads.
"""

# kind: none
# budget: 128 MiB
# outside: 512 MiB
import sys

import keras
import numpy as np

images = np.random.default_rng(0).random((100, 1024, 512), "float32")  # 200 MiB, written once, only read later
model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        images[index].sum()
        return images[index][:32], np.zeros((32, 1), "float32")


if __name__ == "__main__":
    model.fit(Batches(workers=4, use_multiprocessing="--fixed" not in sys.argv, max_queue_size=4), epochs=4, verbose=0)
    print("4 epochs")
