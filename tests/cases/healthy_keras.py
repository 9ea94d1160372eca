"""Nothing is wrong: what ordinary Keras training does must not be suspected.

Early stopping keeps the best weights, a moving average keeps one copy, evaluation runs between epochs, a schedule changes
the learning rate, histories are Python numbers, threads and devices are set at the start, and the script ends by sys.exit().
"""

# kind: none
# budget: 256 MiB
import argparse
import sys

import keras
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)


def main(epochs):
    tf.config.threading.set_inter_op_parallelism_threads(2)
    x, y = np.random.rand(256, 512).astype("float32"), np.random.rand(256, 1).astype("float32")
    model = keras.Sequential(
        [keras.Input((512,)), keras.layers.Dense(1024, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    )
    callbacks = [
        keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.evaluate(x[:64], y[:64], verbose=0)),
    ]
    model.compile(keras.optimizers.Adam(use_ema=True), "mse", metrics=["mae"])
    history = model.fit(
        x, y, batch_size=32, epochs=epochs, validation_data=(x[:64], y[:64]), callbacks=callbacks, verbose=0
    )
    model.compile("adam", "mse", run_eagerly=True)
    model.fit(x, y, batch_size=64, epochs=2, verbose=0)
    for request in range(10):  # predict() in an endless loop (tensorflow/tensorflow#44711, keras-team/keras#13118)
        model.predict(x, verbose=0)
    print(len(history.history["loss"]), "epochs")


if __name__ == "__main__":
    main(parser.parse_args([word for word in sys.argv[1:] if word != "--fixed"]).epochs)
    sys.exit(0)
