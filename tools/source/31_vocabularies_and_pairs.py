# %% [markdown]
# # 31 · Vocabularies and pairs
#
# **Symptom:** *a small language model dies in its last layer, "OOM when allocating tensor with shape[1024,50257]"*; *one
# large embedding runs out of memory whatever the batch*; *twice the batch, and the triplet loss needs eight times as much*.
#
# **Afterwards you can** see the product of sizes behind a loss before you run it, take such a loss in pieces with the same
# result, and say which step makes a sparse or a ragged tensor dense again.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 35 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C47, C48, C53, C59 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes batches of four times as many sentences
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import vocabularies_and_pairs as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras
from keras import layers

BATCH = lab.choose(SCALE, quick=16, full=64)
BUDGET = lab.choose(SCALE, quick="24 MiB", full="64 MiB")
STEPS, VOCABULARY, WIDTH = 64, 8192, 32
PIECE = 64  # rows of logits at a time
words = np.random.default_rng(0).zipf(1.4, (2 * BATCH, STEPS + 1)) % VOCABULARY
IDS, LABELS = words[:, :-1].astype("int32"), words[:, 1:].astype("int32")

# %% [markdown]
# ## Predict
#
# A small language model says of each word which will be next. Its labels are *sparse*: a whole number for each word, not a
# vector as long as the vocabulary.


# %%
def body():
    inputs = keras.Input((STEPS,), dtype="int32")
    return [inputs, layers.Embedding(VOCABULARY, WIDTH), layers.GRU(WIDTH, return_sequences=True)]


def compiled(metrics=("accuracy",), activation=None, sparse=True, eager=False):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([*body(), layers.Dense(VOCABULARY, activation)])
    kind = "SparseCategoricalCrossentropy" if sparse else "CategoricalCrossentropy"
    loss = getattr(keras.losses, kind)(from_logits=activation is None)
    sgd = keras.optimizers.SGD(1.0)
    model.compile(sgd, loss, metrics=list(metrics), run_eagerly=eager, jit_compile=False)
    return model


labels = lab.tensor_mib((BATCH, STEPS), "int32")
print(f"labels of a batch {labels:.4f} MiB, the same one-hot {labels * VOCABULARY:.0f} MiB")
my_guess = lab.guess("Peak memory of a training step?", GUESS_MIB)

# %% [markdown]
# By hand: the last layer gives a number for *each word of the vocabulary, for each word of the batch*. These logits are
# there, and their gradient. Keras' accuracy looks for the largest number of each row, and before that for negative zeros:
# their sign bits, in a tensor as large as the logits, and two masks of a byte a number. From the graph, before anything
# is allocated, it is predicted as well.

# %%
logits = lab.tensor_mib((BATCH, STEPS, VOCABULARY))
weights = lab.tensor_mib((VOCABULARY, 2 * WIDTH + 1))
predicted = 3.5 * logits + weights
print(f"(logits, gradient, sign bits, masks) 3.5 × {logits:.0f} MiB + {weights:.1f} of weights")
one_step = lab.predict(compiled, BATCH)
one_step

# %% [markdown]
# ## Failure
#
# Two batches, two epochs.


# %%
def fitted(build, one_hot=False):
    model = build()
    labels = keras.utils.to_categorical(LABELS, VOCABULARY) if one_hot else LABELS
    return model.fit(IDS, labels, BATCH, epochs=2, shuffle=False, verbose=0).history


failure = lab.run(fitted, compiled, budget=BUDGET, label="fit(), sparse labels")
lab.expect_oom(failure)

# %% [markdown]
# What it would have needed:

# %%
unbounded = lab.measure(fitted, compiled, label="fit(), sparse labels, no tight budget")
lab.predicted_vs_measured(
    by_hand=(predicted, unbounded.peak_mib), from_graph=(one_step.total_mib, unbounded.peak_mib)
)

# %% [markdown]
# ## Advice, tested
#
# **Sparse labels**, and other advice for a large vocabulary: logits in place of a softmax (the control has one), a run
# without a graph, no accuracy, and *sampled softmax*, which compares the right word with a few that are drawn. That one
# is another workload: it trains on an estimate of the loss.


# %%
class WithoutLogits(keras.Model):
    """The network as far as the last layer, whose logits are left to the loss."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.body, self.words = keras.Sequential(body()), layers.Dense(VOCABULARY)
        self.words.build((None, WIDTH))
        self.right = keras.metrics.Mean("accuracy")

    def call(self, ids):
        return self.body(ids)


class Sampled(WithoutLogits):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        rows, labels = tf.reshape(y_pred, (-1, WIDTH)), tf.reshape(y, (-1, 1))
        kernel = tf.transpose(self.words.kernel)
        losses = tf.nn.sampled_softmax_loss(
            kernel, self.words.bias, labels, rows, num_sampled=64, num_classes=VOCABULARY
        )
        return tf.reduce_mean(losses)


def of_class(kind):
    model = kind()
    model.compile(keras.optimizers.SGD(1.0), jit_compile=False)
    return model


ADVICE = {
    "one-hot labels": (lambda: compiled(sparse=False), True),
    "softmax in the layer": (lambda: compiled(activation="softmax"),),
    "run eagerly": (lambda: compiled(eager=True),),
    "no accuracy": (lambda: compiled(metrics=()),),
    "another loss: sampled softmax": (lambda: of_class(Sampled),),
}
advice = {name: lab.measure(fitted, *way, label=name) for name, way in ADVICE.items()}
peaks = {"sparse labels": unbounded.peak_mib}
peaks = pd.Series(peaks | {name: arm.peak_mib for name, arm in advice.items()})
pd.DataFrame({"peak (MiB)": peaks.round(1), "× logits": (peaks / logits).round(2)})

# %%
sparse, bare = peaks["sparse labels"], peaks["no accuracy"]
lab.note(
    f"Sparse labels save {(peaks['one-hot labels'] - sparse) / logits:.1f} times the logits "
    f"(`fit()` holds those of both batches), and {sparse / logits:.1f} times are left. "
    f"{(sparse - bare) / logits:.1f} of these are for the accuracy. Without it the kernel of the "
    f"loss writes its gradient over the logits, and {bare / logits:.1f} times are left. The budget "
    f"is {lab.parse_size(BUDGET) / 2**20 / logits:.2f} times."
)

# %% [markdown]
# ## Fix
#
# Each row of logits is used for its own loss and never again. So `PIECE` rows are made at a time, and made a second time on
# the way back: `tf.recompute_grad` around one piece, as in [lab 12](12_recomputation.ipynb), and a loop over the pieces.


# %%
class InPieces(WithoutLogits):
    loop = staticmethod(tf.map_fn)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        # As tensors: in a loop recompute_grad takes no variables; eagerly it counts Keras' twice.
        kernel, bias = map(tf.convert_to_tensor, (self.words.kernel, self.words.bias))

        @tf.recompute_grad
        def of_piece(rows, labels, kernel, bias):
            logits = rows @ kernel + bias
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            right = tf.argmax(logits, axis=-1, output_type=tf.int32) == labels
            return tf.reduce_mean(loss), tf.reduce_mean(tf.cast(right, tf.float32))

        pieces = tf.reshape(y_pred, (-1, PIECE, WIDTH)), tf.reshape(y, (-1, PIECE))
        loss, right = self.loop(
            lambda piece: of_piece(*piece, kernel, bias),
            pieces,
            fn_output_signature=(tf.float32, tf.float32),
            parallel_iterations=1,
        )
        self.right.update_state(right)
        return tf.reduce_mean(loss)


fix = lab.run(fitted, lambda: of_class(InPieces), budget=BUDGET, label="fit(), loss in pieces")
lab.expect_finished(fix)

# %% [markdown]
# ## Side by side

# %%
lab.compare(unbounded, failure, fix)

# %% [markdown]
# Who held it? Both run once more while TensorFlow records every allocation.

# %%
lab.take_apart(unbounded, fix)

# %%
print(my_guess.against(unbounded.peak_mib))
for name in ("loss", "accuracy"):
    print(f"{name}: {unbounded.value[name]} at once, {fix.value[name]} in pieces")
    assert np.allclose(unbounded.value[name], fix.value[name], rtol=1e-4), "they train the same"

# %% [markdown]
# Is it the pieces alone? A control: the same pieces from a Python list. A graph runs them as it likes, several at once.


# %%
class Listed(InPieces):
    @staticmethod
    def loop(function, pieces, **_):
        results = [function(piece) for piece in zip(*map(tf.unstack, pieces))]
        return map(tf.stack, zip(*results))


control = lab.measure(fitted, lambda: of_class(Listed), label="loss in pieces, a list")
lab.note(
    f"At once without accuracy {bare:.0f} MiB, from a list {control.peak_mib:.0f}, in a loop of "
    f"one piece at a time {fix.peak_mib:.0f}."
)

# %% [markdown]
# ## Explain
#
# A loss over pairs of things has the product of two sizes in it: words of the batch × words of the vocabulary here. Where
# each row of the product is reduced to a number, pieces of rows cost a second computation, not memory. Three relatives, and
# [lab 15](15_long_sequences.ipynb) for a fourth, attention.
#
# ### A large table
#
# The gradient of an embedding names the rows that a batch has looked up ([lab 15](15_long_sequences.ipynb)). What else is as
# large as the table? `Gathered` asks the variable for its rows; Keras' own layer reads the table first.


# %%
class Gathered(layers.Embedding):
    def call(self, ids):
        return tf.gather(self.embeddings.value, ids)


def averaging(embedding, optimizer):
    pooled = [embedding, layers.GlobalAveragePooling1D(), layers.Dense(1)]
    model = keras.Sequential([keras.Input((None,), dtype="int32"), *pooled])
    model.compile(optimizer, "mse", jit_compile=False)
    return model


TABLE = (65536, 64)


def updates():
    ids, y = np.random.default_rng(0).integers(0, TABLE[0], (32, 20)), np.ones((32, 1))
    sgd, gathered = keras.optimizers.SGD, Gathered(*TABLE)
    ways = {
        "SGD, Gathered": (gathered, sgd()),
        "SGD, Keras layer": (layers.Embedding(*TABLE), sgd()),
        "SGD, clipnorm": (gathered, sgd(clipnorm=1.0)),
        "SGD, global_clipnorm": (gathered, sgd(global_clipnorm=1.0)),
        "SGD, weight_decay": (gathered, sgd(weight_decay=0.01)),
        "SGD, momentum": (gathered, sgd(momentum=0.9)),
        "Adam": (gathered, keras.optimizers.Adam()),
        "SGD, L2": (Gathered(*TABLE, embeddings_regularizer="l2"), sgd()),
    }
    slots = {}
    for name, way in ways.items():
        model, before = averaging(*way), lab.reading().tensors_mib
        model.train_on_batch(ids, y)  # traces, and makes the slots
        slots[name] = lab.reading().tensors_mib - before
        with lab.phase(name):
            model.train_on_batch(ids, y)
    return slots


steps = lab.measure(updates, label="updates of a table")
table = lab.tensor_mib(TABLE)
beside = pd.Series({way: size + steps.phase(way).rise_mib for way, size in steps.value.items()})
(beside / table).to_frame("a step's peak beside the table, in tables").round(2)

# %%
lab.note(
    f"Plain SGD on the rows alone needs {beside['SGD, Gathered'] / table:.2f} tables beside the "
    f"table; with Keras' layer it is {beside['SGD, Keras layer'] / table:.1f}. Once a variable was "
    "looked up or updated by rows, TensorFlow copies it whenever it is read as a whole. Slots are "
    "as large as the table, and an optimizer that has them updates every row, used or not. Weight "
    "decay and L2 change every row by themselves; `global_clipnorm` makes the gradient dense."
)

# %% [markdown]
# ### Pairs and triplets
#
# A contrastive loss compares every example of a batch with every other, a triplet loss with every pair of others. Four ways
# to write it; *hardest* takes of all triplets the worst one of each example, which is another loss.


# %%
def by_broadcast(x):
    return tf.reduce_sum((x[:, None] - x[None]) ** 2, -1)  # batch × batch × features


def by_algebra(x):  # |a - b|² = |a|² + |b|² - 2ab
    square = tf.reduce_sum(x**2, -1)
    return tf.nn.relu(square[:, None] + square[None] - 2 * tf.matmul(x, x, transpose_b=True))


def pairs(distances, same):
    return tf.reduce_mean(tf.where(same, distances, tf.nn.relu(1 - distances)))


def all_triplets(distances, same):
    margins = tf.nn.relu(1 + distances[:, :, None] - distances[:, None, :])
    return tf.reduce_mean(tf.where(same[:, :, None] & ~same[:, None, :], margins, 0))


def hardest(distances, same):
    farthest = tf.reduce_max(tf.where(same, distances, 0), 1)
    nearest = tf.reduce_min(tf.where(same, distances.dtype.max, distances), 1)
    return tf.reduce_mean(tf.nn.relu(1 + farthest - nearest))


FEATURES, EXAMPLES = 64, [32, 64, 128]
LOSSES = {
    "all pairs, broadcast": (by_broadcast, pairs),
    "all pairs, algebra": (by_algebra, pairs),
    "all triplets": (by_algebra, all_triplets),
    "hardest triplets": (by_algebra, hardest),
}


def compared(sizes, losses):
    weights, values = tf.Variable(tf.random.normal((FEATURES, FEATURES), 0, 0.02, seed=1)), {}
    for size in reversed(sizes):
        x, classes = tf.random.normal((size, FEATURES), seed=2), tf.range(size) % 8
        for name, (distances, loss) in losses.items():

            @tf.function
            def step():
                with tf.GradientTape() as tape:
                    value = loss(distances(x @ weights), classes[:, None] == classes)
                return value, tape.gradient(value, weights)

            step()  # traces
            with lab.phase(f"{name}, {size}"):
                value, gradient = step()
            values[name] = float(value), float(tf.norm(gradient))
    return values


contrast = lab.measure(compared, EXAMPLES, LOSSES, label="losses over pairs")
by_batch = pd.DataFrame(
    {name: [contrast.phase(f"{name}, {n}").rise_mib for n in EXAMPLES] for name in LOSSES}, EXAMPLES
)
by_batch["the batch itself"] = [lab.tensor_mib((n, FEATURES)) for n in EXAMPLES]
axes = by_batch.plot(style=["o-", "s--", "^-.", "D:", "k-"], loglog=True, xlabel="examples")
axes.set(ylabel="a step's peak (MiB)")
axes.set_xticks(EXAMPLES, EXAMPLES)
axes.minorticks_off()
plt.show()
by_batch.round(2)

# %%
growth, largest = by_batch.iloc[-1] / by_batch.iloc[0], by_batch.iloc[-1]
algebra = largest["all pairs, broadcast"] / largest["all pairs, algebra"]
lab.note(
    f"{EXAMPLES[-1] / EXAMPLES[0]:.0f} times the examples: "
    f"{growth['all pairs, broadcast']:.0f} times the memory for all pairs by broadcast, "
    f"{growth['all triplets']:.0f} times for all triplets. The algebra needs {algebra:.0f} times "
    "less than the broadcast for the same loss, since no features are left in its products. It "
    "rounds more: examples that are almost equal may get a distance of zero."
)
value, other = (contrast.value[f"all pairs, {way}"] for way in ("broadcast", "algebra"))
assert np.allclose(value, other, rtol=1e-3), "the same loss and the same gradient"

# %% [markdown]
# ### Ragged in place of padded
#
# Sentences of many lengths as one `RaggedTensor`: their values in a row, and where each begins. What keeps it so?

# %%
lengths = np.clip(np.random.default_rng(0).lognormal(np.log(20), 1.1, 256).astype(int), 1, 511)


def with_sentences(lengths, width):
    ragged = tf.RaggedTensor.from_row_lengths(tf.ones(lengths.sum(), tf.int32), lengths)
    ids, y, size = ragged.to_tensor(), np.ones(len(lengths)), len(lengths)
    embed, dense, norm = (
        layers.Embedding(1000, width),
        layers.Dense(width),
        layers.LayerNormalization(),
    )
    model, rows = averaging(embed, "sgd"), embed(ragged)
    by_length = tf.split(tf.argsort(lengths), 8)
    norm(rows[:1]), dense(rows.values[:1])  # builds them
    ways = {
        "padded: Embedding, mean, fit()": lambda: model.fit(ids, y, size, verbose=0),
        "ragged: Embedding, mean, fit()": lambda: model.fit(ragged, y, size, verbose=0),
        "ragged: its values through Dense": lambda: rows.with_values(dense(rows.values)),
        "ragged: LayerNormalization": lambda: norm(rows),
        "ragged: to_tensor()": lambda: rows.to_tensor(),
        "the same, in buckets": lambda: [
            tf.reduce_sum(tf.gather(rows, some).to_tensor()) for some in by_length
        ],
    }
    for name, way in ways.items():
        with lab.phase(name):
            way()
    refused = []
    for layer in (dense, layers.LSTM(8), layers.Conv1D(8, 3)):
        try:
            layer(rows)
        except (TypeError, ValueError):
            refused.append(type(layer).__name__)
    return refused


sentences = lab.measure(with_sentences, lengths, WIDTH, label="ragged and padded")
padded = lab.tensor_mib((len(lengths), lengths.max(), WIDTH))
kept = pd.Series({part.name: part.rise_mib for part in sentences.phases})
print("Layers that take no ragged tensor:", ", ".join(sentences.value) or "none of these")
pd.DataFrame({"peak (MiB)": kept.round(1), "× padded": (kept / padded).round(2)})

# %%
lab.note(
    f"Of the padded numbers {lengths.sum() / len(lengths) / lengths.max():.0%} are words. Ragged "
    "stays what is looked up, or reduced over a sentence. A layer that sees one word at a time, "
    "such as Dense, takes no ragged tensor, but its values as rows. What works along a sentence "
    "wants `to_tensor()`, which "
    "pads to the longest of the batch, and LayerNormalization does that inside: the fix is to pad "
    "less, in buckets of like length as in lab 15."
)

# %% [markdown]
# **On a GPU** none of this has been measured here. The sizes of logits, slots and pairs follow from shapes and hold there;
# what a kernel writes over its input may differ.
#
# **When it flips:** what does a vocabulary cost at the last layer (figures of this run, scaled: predicted)?

# %%
WAYS = {"with accuracy": sparse - weights, "without": bare - weights}
times = {name: size / logits for name, size in WAYS.items()}
others = (fix.peak_mib - lab.tensor_mib((2 * PIECE, VOCABULARY))) / weights


def last_layer(words_in_batch=8192, vocabulary=50257, width=768, piece=64):
    of_weights = lab.tensor_mib((vocabulary, 2 * width + 1))
    for name in times:
        at_once = times[name] * lab.tensor_mib((words_in_batch, vocabulary))
        print(f"{name:14}{at_once + of_weights:10,.0f} MiB")
    cut = lab.tensor_mib((2 * piece, vocabulary))
    print(f"in pieces     {cut + others * of_weights:10,.0f} MiB")


sizes = {"words_in_batch": (256, 131072, 256), "vocabulary": (1000, 250000)}
lab.explore(last_layer, **sizes, width=(32, 4096, 32), piece=(16, 1024, 16))

# %% [markdown]
# ## Verdict

# %%
lab.verdict("C47", "partly", logits=logits, one_hot=peaks["one-hot labels"], sparse=sparse)

# %%
lab.verdict(
    "C48",
    "partly",
    table=table,
    sgd=beside["SGD, Gathered"],
    keras_layer=beside["SGD, Keras layer"],
    adam=beside["Adam"],
    clipped=beside["SGD, global_clipnorm"],
    regularized=beside["SGD, L2"],
)

# %%
lab.verdict(
    "C53",
    "fails",
    batch=EXAMPLES[-1] / EXAMPLES[0],
    pairs=growth["all pairs, broadcast"],
    triplets=growth["all triplets"],
)

# %%
lab.verdict(
    "C59",
    "partly",
    padded=kept["padded: Embedding, mean, fit()"],
    ragged=kept["ragged: Embedding, mean, fit()"],
    normalized=kept["ragged: LayerNormalization"],
    lstm_takes_it="LSTM" not in sentences.value,
)

# %% [markdown]
# ## Exercises
#
# **1.** A *masked* language model has labels for a few words of each sentence; for all others the label is −1. Write the mean
# loss over the rows that have a label, 0 if none has. Make no logits for the others; their rows may hold anything.


# %%
def masked_loss(rows, labels, kernel, bias):
    # BEGIN SOLUTION
    wanted = tf.where(labels >= 0)[:, 0]
    logits = tf.gather(rows, wanted) @ kernel + bias
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(labels, wanted), logits)
    return tf.math.divide_no_nan(tf.reduce_sum(losses), tf.cast(tf.size(wanted), tf.float32))
    # END SOLUTION


# %%
check.masked_loss(masked_loss)


# %% tags=["right"]
def masked_loss(rows, labels, kernel, bias):
    has_one = labels > -1
    logits = tf.matmul(tf.boolean_mask(rows, has_one), kernel) + bias
    right = tf.one_hot(tf.boolean_mask(labels, has_one), logits.shape[1])
    if len(right) == 0:
        return 0.0 * tf.reduce_sum(bias)
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(right, logits))


# %% tags=["wrong"]
# says: for all rows
def masked_loss(rows, labels, kernel, bias):
    wanted = tf.cast(labels >= 0, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.maximum(labels, 0), rows @ kernel + bias
    )
    losses = tf.where(labels >= 0, losses, 0)
    return tf.math.divide_no_nan(tf.reduce_sum(losses), tf.reduce_sum(wanted))


# %% tags=["wrong"]
# says: over the rows that have a label
def masked_loss(rows, labels, kernel, bias):
    some = labels >= 0
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels[some], rows[some] @ kernel + bias
    )
    return tf.reduce_sum(losses) / len(labels)


# %% tags=["wrong"]
# says: from 0 on
def masked_loss(rows, labels, kernel, bias):
    some = labels > 0
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels[some], rows[some] @ kernel + bias
    )
    return tf.math.divide_no_nan(tf.reduce_sum(losses), tf.cast(tf.size(losses), tf.float32))


# %% tags=["wrong"]
# says: no row has a label
def masked_loss(rows, labels, kernel, bias):
    some = labels >= 0
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels[some], rows[some] @ kernel + bias)
    )


# %% [markdown]
# **2.** The mean of each sentence's rows of a table, without padding and without a gradient as large as the table: write
# `sentence_means(table, sentences)`. `table` is a `tf.Variable`, `sentences` a ragged tensor of row numbers from 0 on. A
# sentence without words gets zeros.


# %%
def sentence_means(table, sentences):
    # BEGIN SOLUTION
    rows = tf.gather(table, sentences.values)
    sums = tf.math.unsorted_segment_sum(rows, sentences.value_rowids(), sentences.nrows())
    return tf.math.divide_no_nan(sums, tf.cast(sentences.row_lengths(), tf.float32)[:, None])
    # END SOLUTION


# %%
check.sentence_means(sentence_means)


# %% tags=["right"]
def sentence_means(table, sentences):
    rows = sentences.with_values(tf.gather(table, sentences.values))
    means = tf.reduce_mean(rows, axis=1)
    return tf.where(sentences.row_lengths()[:, None] > 0, means, 0)


# %% tags=["wrong"]
# says: padded
def sentence_means(table, sentences):
    rows = tf.gather(table, sentences.to_tensor())
    lengths = tf.cast(sentences.row_lengths(), tf.float32)[:, None]
    real = tf.sequence_mask(sentences.row_lengths(), rows.shape[1], tf.float32)[:, :, None]
    return tf.math.divide_no_nan(tf.reduce_sum(rows * real, 1), lengths)


# %% tags=["wrong"]
# says: without words
def sentence_means(table, sentences):
    return tf.reduce_mean(tf.gather(table, sentences), axis=1)


# %% tags=["wrong"]
# says: for every row of the table
def sentence_means(table, sentences):
    means = tf.reduce_mean(tf.gather(table, sentences), axis=1)
    return tf.where(sentences.row_lengths()[:, None] > 0, means, 0)


# %% tags=["wrong"]
# says: as large as the table
def sentence_means(table, sentences):
    return tf.math.unsorted_segment_mean(
        tf.gather(1.0 * table, sentences.values), sentences.value_rowids(), sentences.nrows()
    )
