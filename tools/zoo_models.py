"""The models of the zoo: all of keras.applications, and ten of other kinds. Each is a function that builds one.

A model is split off into the kept-out half by a hash of its name, before any figure of it is known.
"""

import hashlib
from dataclasses import dataclass
from functools import partial

import keras
import tensorflow as tf
from keras import layers

IMAGE = (96, 96, 3)  # small enough for two cores, large enough for every network of keras.applications
BATCHES = (8, 24)
_SEEN = {"ResNet50", "VGG16", "MobileNetV2", "unet"}  # looked at before there was a split


@dataclass(frozen=True)
class Entry:
    """build: a function that gives a Keras model; batches: the two that are measured; loss: for compile().

    input: ((shape, dtype),) for a model that does not say itself what it takes.
    """

    name: str
    build: object
    batches: tuple
    loss: str
    input: tuple | None = None

    @property
    def half(self):
        """ "rules" for the half that rules are made on, "kept out" for the other."""
        odd = hashlib.sha256(self.name.encode()).digest()[0] % 2
        return "kept out" if odd and self.name not in _SEEN else "rules"


def application(name):
    return getattr(keras.applications, name)(weights=None, input_shape=IMAGE)


def lstm():
    return keras.Sequential([keras.Input((100, 32)), layers.LSTM(256), layers.Dense(10, activation="softmax")])


def gru():
    inputs = keras.Input((80,), dtype="int32")
    x = layers.Embedding(5_000, 128)(inputs)
    x = layers.Bidirectional(layers.GRU(128, return_sequences=True))(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(layers.GlobalMaxPooling1D()(x)))


def transformer():
    inputs = keras.Input((128,), dtype="int32")
    x = layers.Embedding(10_000, 256)(inputs)
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(8, 32, dropout=0.1)(y, y)
        y = layers.Dense(1024, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1)(layers.Dense(256)(y))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling1D()(x)))


def unet():
    x = inputs = keras.Input((128, 128, 3))
    skips = []
    for filters in (32, 64, 128):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(256, 3, padding="same", activation="relu")(x)
    for filters, skip in zip((128, 64, 32), reversed(skips)):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skip])
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))


def autoencoder():
    return keras.Sequential(
        [
            keras.Input((64, 64, 3)),
            *(layers.Conv2D(n, 3, strides=2, padding="same", activation="relu") for n in (32, 64, 128)),
            *(layers.Conv2DTranspose(n, 3, strides=2, padding="same", activation="relu") for n in (128, 64, 32)),
            layers.Conv2D(3, 3, padding="same", activation="sigmoid"),
        ]
    )


def wide_mlp():
    hidden = [layers.Dense(4096, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((1024,)), *hidden, layers.Dense(10, activation="softmax")])


def deep_mlp():
    hidden = []
    for _ in range(20):
        hidden += [layers.Dense(512), layers.BatchNormalization(), layers.Activation("relu"), layers.Dropout(0.2)]
    return keras.Sequential([keras.Input((512,)), *hidden, layers.Dense(10, activation="softmax")])


def embeddings():
    inputs = keras.Input((50,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(100_000, 128)(inputs))
    return keras.Model(inputs, layers.Dense(20, activation="softmax")(layers.Dense(64, activation="relu")(x)))


class Residual(keras.Model):
    """A subclassed model."""

    def __init__(self):
        super().__init__()
        self.first = layers.Conv2D(64, 3, padding="same")
        self.blocks = [layers.Conv2D(64, 3, padding="same", activation="relu") for _ in range(8)]
        self.norms = [layers.BatchNormalization() for _ in range(8)]
        self.head = layers.Dense(10, activation="softmax")

    def call(self, x, training=False):
        x = self.first(x)
        for block, norm in zip(self.blocks, self.norms):
            x = x + norm(block(x), training=training)
        return self.head(keras.ops.mean(x, axis=(1, 2)))


def subclassed():
    model = Residual()
    model(keras.Input((64, 64, 3)))
    return model


def two_inputs():
    image, table = keras.Input((64, 64, 3)), keras.Input((200,))
    x = layers.Conv2D(64, 5, strides=2, activation="swish")(image)
    x = layers.SeparableConv2D(128, 3, activation="swish")(x)
    x = layers.Concatenate()([layers.GlobalAveragePooling2D()(x), layers.Dense(512, activation="tanh")(table)])
    return keras.Model([image, table], layers.Dense(10, activation="softmax")(x))


class Recomputed(layers.Layer):
    """Two dense layers whose insides are computed again on the way back."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = layers.Dense(4096, activation="gelu"), layers.Dense(1024)

    def build(self, shape):
        self.wide.build(shape)
        self.narrow.build((*shape[:-1], 4096))

    def call(self, x):
        return tf.recompute_grad(lambda x: self.narrow(self.wide(x)))(x)


def recomputing():
    hidden = [Recomputed() for _ in range(6)]
    return keras.Sequential([keras.Input((1024,)), *hidden, layers.Dense(10, activation="softmax")])


_CLASSES = "sparse_categorical_crossentropy"
_OTHERS = [
    Entry("lstm", lstm, (32, 128), _CLASSES),
    Entry("gru", gru, (32, 128), _CLASSES),
    Entry("transformer", transformer, (8, 32), _CLASSES),
    Entry("unet", unet, (4, 16), "binary_crossentropy"),
    Entry("autoencoder", autoencoder, (16, 64), "mse"),
    Entry("wide_mlp", wide_mlp, (32, 1024), _CLASSES),
    Entry("deep_mlp", deep_mlp, (256, 4096), _CLASSES),
    Entry("embeddings", embeddings, (64, 1024), _CLASSES),
    Entry("subclassed", subclassed, (8, 32), _CLASSES, (((64, 64, 3), "float32"),)),
    Entry("two_inputs", two_inputs, (16, 64), _CLASSES),
    Entry("recomputing", recomputing, (256, 2048), _CLASSES),
]


def zoo():
    """{name: Entry}, those of keras.applications first."""
    names = [name for name in sorted(vars(keras.applications)) if name[0].isupper()]
    entries = [Entry(name, partial(application, name), BATCHES, _CLASSES) for name in names]
    return {entry.name: entry for entry in entries + _OTHERS}
