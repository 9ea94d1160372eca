"""Symptom: memory runs out after many reloads of a model in self-play (mokemokechicken/reversi-alpha-zero#31, keras-team/keras#11015).

Mechanism: each load adds the variables of a further model beside the old ones, which a list of opponents keeps.
Fix: load the weights into the model that is there already.
"""

# kind: models kept alive
# budget: 256 MiB
# line: opponents.append(opponent)
import sys
import tempfile

import keras
import numpy as np

board = np.random.rand(32, 256).astype("float32")
best = keras.Sequential([keras.Input((256,)), keras.layers.Dense(2048, "relu"), keras.layers.Dense(64)])
opponents = []
with tempfile.TemporaryDirectory() as folder:
    best.save(f"{folder}/best.keras")
    best.save_weights(f"{folder}/best.weights.h5")
    for generation in range(6):
        if "--fixed" in sys.argv:
            best.load_weights(f"{folder}/best.weights.h5")
            opponent = best
        else:
            opponent = keras.models.load_model(f"{folder}/best.keras")
            opponents.append(opponent)
        for move in range(8):
            opponent.predict_on_batch(board)
