# %% [markdown]
# # 12 · Shapes, layers and smaller models
#
# **Symptom:** *"`model.summary()` says 6 MB, and training still runs out of memory"*, *"OOM when allocating tensor with
# shape[128,62,62,32]"*, or a text model that dies in the middle of an epoch, at a batch that happened to be long.
#
# **Afterwards you can** say which layer of a model fills the memory and make *that* one smaller, name what an activation
# function or a layer keeps for its backward pass, and batch sequences so that the rare long one does not set the peak.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 35 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C22, C34 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes image batches four times as large
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras
from keras import layers

BATCH = lab.choose(SCALE, quick=128, full=512)
BUDGET = lab.choose(SCALE, quick="160 MiB", full="600 MiB")

# %% [markdown]
# ## Predict
#
# The published small CNN: images of 64 × 64 × 3, Conv 32, pool, Conv 64, pool, Dense 128, Dense 10. It is called
# memory-saving because it is small, with `model.summary()` as the tool.


# %%
def cnn(first=32, second=64, dense=128, strided=False):
    if strided:
        start = [layers.Conv2D(first, 3, strides=2, activation="relu")]
    else:
        start = [layers.Conv2D(first, 3, activation="relu"), layers.MaxPooling2D()]
    middle = [layers.Conv2D(second, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()]
    end = [layers.Dense(dense, activation="relu"), layers.Dense(10, activation="softmax")]
    return keras.Sequential([keras.Input((64, 64, 3)), *start, *middle, *end])


cnn().summary(line_length=64)

# %%
my_guess = lab.guess(
    f"Peak memory of one Adam step of this model with a batch of {BATCH}?", GUESS_MIB
)

# %% [markdown]
# Now the arithmetic. A layer's weights count four times with Adam (weights, gradients, two slots), whatever the batch.
# A layer's output counts once *for every image of the batch*, and `summary()` does not count it at all.

# %%
prediction = lab.predict_step(cnn(), BATCH, graph=False)
prediction

# %%
names = [f"{i} {kind}" for i, kind in enumerate(prediction.layers["kind"])]
by_layer = prediction.layers.set_axis(names)
bars = {
    f"outputs, batch {BATCH}": by_layer["output MiB"],
    "weights × 4: with gradient and two slots": 4 * by_layer["weights MiB"],
}
axes = pd.DataFrame(bars).plot.barh(width=0.8, xlabel="MiB (predicted)")
axes.invert_yaxis()
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# Nearly all weights sit in the first Dense layer. Most of the memory sits in the first convolution, which has hardly any.
#
# ## Failure
#
# Somebody must get below the budget, reads the summary, and shrinks the Dense layer from 128 to 16 units. (The step
# runs eagerly. In a graph, a convolution's two gradients may run side by side, and the peak depends on chance.)


# %%
def train(changes, batch):
    model = cnn(**changes)
    optimizer = keras.optimizers.Adam()
    x = tf.random.uniform((batch, 64, 64, 3))
    y = tf.one_hot(tf.random.uniform((batch,), maxval=10, dtype=tf.int32), 10)

    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.categorical_crossentropy(y, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    for _ in range(2):
        train_step(x, y)
    return f"{model.count_params():,} weights"


small_dense = {"dense": 16}
failure = lab.run(train, small_dense, BATCH, budget=BUDGET, label="Dense 16")
lab.expect_oom(failure)

# %% [markdown]
# ## Fix
#
# Make the layer smaller that fills the memory. A first convolution with `strides=2` gives the same shape as
# convolution and pooling did, so every layer keeps its weights, but the 62 × 62 × 32 outputs are never made.

# %%
strided = {"strided": True}
fix = lab.run(train, strided, BATCH, budget=BUDGET, label="strides=2")
lab.expect_finished(fix)

# %% [markdown]
# What the others need, without a budget that stops them:

# %%
unbounded = lab.measure(train, small_dense, BATCH, label="Dense 16, no tight budget")
article = lab.measure(train, {}, BATCH, label="published CNN")

# %% [markdown]
# ## Side by side

# %%
lab.compare(article, unbounded, fix)

# %%
changes = {"published": {}, "dense 16": small_dense, "strides=2": strided}
models = {name: cnn(**change) for name, change in changes.items()}
predicted = {
    name: lab.predict_step(model, BATCH, graph=False).total_mib for name, model in models.items()
}
lab.predicted_vs_measured(
    published=(predicted["published"], article.peak_mib),
    dense_16=(predicted["dense 16"], unbounded.peak_mib),
    strides_2=(predicted["strides=2"], fix.peak_mib),
)

# %%
print(my_guess.against(article.peak_mib))
weights = {name: model.count_params() for name, model in models.items()}
print(f"weights: {weights}")
assert weights["strides=2"] == weights["published"] > 5 * weights["dense 16"]
assert fix.peak_mib < 0.75 * article.peak_mib and fix.peak_mib < unbounded.peak_mib, (
    "the strided model should need least"
)

# %% [markdown]
# ### Layer by layer
#
# The prediction said that each layer keeps its output. Measured: what is in use after each layer, under a tape.


# %%
def layer_by_layer(batch):
    model, h = cnn(), tf.random.uniform((batch, 64, 64, 3))
    with tf.GradientTape():
        for layer in model.layers:
            with lab.phase(layer.name):
                h = layer(h)
    with lab.phase("a larger one"):
        train({"first": 64, "second": 128, "dense": 256}, batch)


by_one = lab.measure(layer_by_layer, BATCH, label="layer by layer")
*each, larger = by_one.phases
measured = [part.added_mib for part in each]
pd.DataFrame({"predicted MiB": by_layer["output MiB"], "measured MiB": measured}).round(2)

# %% [markdown]
# ## Explain
#
# * `summary()` counts weights. Training keeps outputs, times the batch. The largest are at the front of a
#   convolutional network, where images are still wide.
# * Fewer units at the end, fewer weights: a smaller file, hardly less memory.
# * What helps: shrink early (strides, pooling, smaller images), fewer channels in the first layers, a smaller batch.
#
# **When it flips.** With small batches or wide Dense layers the weights do dominate. Find the point.


# %%
def share(batch=BATCH, dense=128):
    step = lab.predict_step(cnn(dense=dense), batch, graph=False)
    state = sum(step.parts[name] for name in ("weights", "gradients", "optimizer slots"))
    print(
        f"weights, gradients and slots {state:6.1f} MiB of {step.total_mib:6.1f} MiB: "
        f"{state / step.total_mib:.0%} (predicted)"
    )


lab.explore(share, batch=(1, 256, 5), dense=(16, 2048, 16))

# %% [markdown]
# ### What an activation function or a layer keeps
#
# The same measurement for single layers, in multiples of their own output. The input is not counted: whoever made it
# keeps it. First the prediction, from what the derivative is made of: relu, tanh, sigmoid and softmax can be
# differentiated from their *output*; gelu and silu need something of their input too; dropout needs its mask; an LSTM
# needs four gates, the cell, its tanh and the output of every step; attention needs query, key, value, context and
# output, and the scores before and after the softmax: heads × T × T a sample.

# %%
WIDTH, STEPS, HEADS = 128, 128, 4
ROWS = 64  # sequences of 128 steps; for all but the recurrent layer and attention that is 8192 rows
FORMULA = {
    "relu": 1,
    "tanh": 1,
    "sigmoid": 1,
    "softmax": 1,
    "silu": 2,
    "gelu": 2,
    "Dense": 1,
    "Dropout": 2,
    "BatchNormalization": 1,
    "LayerNormalization": 1,
    "LSTM": 7,
    "MultiHeadAttention": 5 + 2 * HEADS * STEPS / WIDTH,
}


def layer_of(name):
    made = {
        "Dense": lambda: layers.Dense(WIDTH),
        "Dropout": lambda: layers.Dropout(0.5),
        "BatchNormalization": layers.BatchNormalization,
        "LayerNormalization": layers.LayerNormalization,
        "LSTM": lambda: layers.LSTM(WIDTH, return_sequences=True),
        "Conv1D": lambda: layers.Conv1D(WIDTH, 3, padding="same"),
        "MultiHeadAttention": lambda: layers.MultiHeadAttention(HEADS, WIDTH // HEADS),
    }
    layer = made[name]() if name in made else layers.Activation(name)
    if name == "MultiHeadAttention":
        return layer, lambda x: layer(x, x)
    if name in ("Dropout", "BatchNormalization"):
        return layer, lambda x: layer(x, training=True)
    return layer, layer


def under_tape(name, x, phase):
    """Call a layer on x under a tape, as a phase; return a function that computes its gradients."""
    layer, call = layer_of(name)
    call(x)  # builds the layer

    def gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = call(x)
        return tape.gradient(y, [x, *layer.trainable_variables])

    with lab.phase(phase):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = call(x)  # noqa: F841  held until the phase has ended
    return gradients


LENGTHS = [64, 128, 256, 512]
GROWING = ["Conv1D", "LSTM", "MultiHeadAttention"]


def kinds(names):
    sequences = tf.random.normal((ROWS, STEPS, WIDTH))
    flat = tf.reshape(sequences, (ROWS * STEPS, WIDTH))
    for name in names:
        x = sequences if name in ("LSTM", "MultiHeadAttention") else flat
        in_graph = tf.function(under_tape(name, x, f"{name}, eager"))
        in_graph(x)  # traces
        with lab.phase(f"{name}, graph"):
            in_graph(x)
    for name in GROWING:
        for length in LENGTHS:
            under_tape(name, tf.random.normal((4, length, WIDTH)), f"{name}, {length} steps")


kinds_run = lab.measure(kinds, list(FORMULA), label="kinds of layers")
output = lab.tensor_mib((ROWS, STEPS, WIDTH))
eager = {name: kinds_run.phase(f"{name}, eager").added_mib / output for name in FORMULA}
graph = {name: kinds_run.phase(f"{name}, graph").rise_mib / output for name in FORMULA}
columns = {"the formula needs": FORMULA, "eager keeps": eager, "peak of a step in a graph": graph}
kept = pd.DataFrame(columns)

# %%
words = f"multiples of the layer's output ({output:.0f} MiB)"
axes = kept.plot.barh(width=0.8, edgecolor="white", xlabel=words, figsize=(10, 5))
for bars, hatch in zip(axes.containers, ("", "//", "..")):
    plt.setp(bars, hatch=hatch)
axes.invert_yaxis()
axes.legend()
plt.show()
kept.round(2)

# %% [markdown]
# * Swapping relu for tanh, sigmoid or softmax changes nothing. Swapping it for gelu does.
# * A formula's minimum is not what runs. gelu and LayerNormalization are put together from small operations, and
#   eagerly each one keeps what *it* needs. A graph drops and reuses some.
# * A recurrent layer keeps its inner steps, attention its scores.
#
# ### Long sequences
#
# An LSTM keeps the same for every step: twice the steps, twice the memory. Attention scores are T × T. The last run
# also measured four sequences of growing length.

# %%
grown = pd.DataFrame(index=LENGTHS)
for name in GROWING:
    grown[name] = [kinds_run.phase(f"{name}, {length} steps").added_mib for length in LENGTHS]
labels = {"xlabel": "steps T", "ylabel": "kept, batch 4 (MiB)"}
axes = grown.plot(style=["o-", "s--", "^:"], loglog=True, **labels)
axes.set_xticks(LENGTHS, LENGTHS)
axes.set_yticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
axes.minorticks_off()
plt.show()
doubling = grown.loc[512] / grown.loc[256]
factors = ", ".join(f"{name} × {factor:.1f}" for name, factor in doubling.items())
print(f"from T = 256 to 512: {factors}")
assert doubling["MultiHeadAttention"] > 1.3 * doubling["LSTM"], (
    "attention should grow faster than the LSTM"
)

# %% [markdown]
# Sentences have a long tail. A batch is padded to its longest member, so one long sentence makes a whole batch long;
# which batch that is, chance decides. Three ways to batch the same sentences:
# **padded** in the order they come; **buckets** of like lengths, same batch size; **token budget**, buckets whose
# batch size is chosen so that batch × length stays below a limit.

# %%
BOUNDARIES = [32, 64, 128, 256, 512]
SENTENCES = np.clip(np.random.default_rng(0).lognormal(np.log(40), 1.1, 512).astype(int), 4, 511)
PER_BATCH, TOKENS = 16, 16 * 128
print(
    f"{len(SENTENCES)} sentences: half below {np.median(SENTENCES):.0f} tokens, "
    f"the longest {SENTENCES.max()}"
)


def token_budget(boundaries, tokens):
    return [max(1, tokens // boundary) for boundary in boundaries]


def batched(bucket_sizes):
    lengths = tf.data.Dataset.from_tensor_slices(SENTENCES)
    sentences = lengths.map(lambda length: tf.ones([length], tf.int32))
    if bucket_sizes is None:
        return sentences.padded_batch(PER_BATCH)
    sizes = [*bucket_sizes, 1]
    return sentences.bucket_by_sequence_length(lambda ids: tf.shape(ids)[0], BOUNDARIES, sizes)


def text_model(ways):
    embed, attend = layers.Embedding(1000, 64), layers.MultiHeadAttention(HEADS, 16)
    classify = layers.Dense(2)
    shapes = {way: [] for way in ways}
    for way, bucket_sizes in ways.items():
        for ids in batched(bucket_sizes):
            with lab.phase(way):
                with tf.GradientTape() as tape:
                    h = embed(ids)
                    loss = tf.reduce_mean(classify(tf.reduce_mean(attend(h, h), 1)) ** 2)
                gradients = tape.gradient(loss, tape.watched_variables())
                del h, tape, gradients
            shapes[way].append(tuple(ids.shape))
    return shapes


ways = {
    "padded": None,
    "buckets": [PER_BATCH] * len(BOUNDARIES),
    "token budget": token_budget(BOUNDARIES, TOKENS),
}
text = lab.measure(text_model, ways, label="sentences")
peaks = {way: np.array([p.peak_mib for p in text.phases if p.name == way]) for way in ways}

# %%
_, axes = plt.subplots()
for index, (way, sizes) in enumerate(peaks.items()):
    axes.plot(np.linspace(0, 100, len(sizes)), sizes, "os^"[index], ms=4, label=way)
    axes.axhline(sizes.max(), color=lab.COLOURS[index], lw=1, ls=lab.LINES[index])
axes.set(xlabel="way through the epoch (%)", ylabel="peak of the batch (MiB)", ylim=(0, None))
axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()
sizes = {way: sum(b * t for b, t in shapes) for way, shapes in text.value.items()}
columns = {
    "batches": {way: len(shapes) for way, shapes in text.value.items()},
    "padding %": {way: 100 * (1 - SENTENCES.sum() / size) for way, size in sizes.items()},
    "median peak MiB": {way: np.median(sizes) for way, sizes in peaks.items()},
    "largest peak MiB": {way: sizes.max() for way, sizes in peaks.items()},
}
batches = pd.DataFrame(columns)
padding, largest = batches["padding %"], batches["largest peak MiB"]
assert padding["buckets"] < padding["padded"], "buckets should cut the padding"
assert largest["token budget"] < 0.5 * largest["buckets"], "a token budget should cut the peak"
batches.round(1)

# %% [markdown]
# Buckets save work and the memory of most batches, **not the peak**: they put all long sentences into one batch. What
# must fit is the largest batch. The token budget cuts that; a run that got through its most expensive batch once will
# get through the epoch. So feed that batch *first*.
#
# ### Freezing and gathering
#
# Two more cases where the shape of what is kept surprises.


# %%
def in_phase(name, function, *arguments):
    with lab.phase(name):
        return function(*arguments)


def freezing():
    """A frozen backbone, and the second phase of training, which unfreezes it."""
    backbone = [layers.Dense(512, activation="relu") for _ in range(8)]
    head, x = layers.Dense(10), tf.random.normal((2048, 512))

    def features(x):
        for layer in backbone:
            x = layer(x)
        return x

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(head(features(x)) ** 2)
        weights = [weight for layer in [*backbone, head] for weight in layer.trainable_variables]
        return tape.gradient(loss, weights)

    def step_outside(x):
        h = features(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(head(h) ** 2)
        return tape.gradient(loss, head.trainable_variables)

    head(features(x))
    for state in ("frozen", "unfrozen"):
        for layer in backbone:
            layer.trainable = state == "unfrozen"
        in_phase(f"{state}, eager", step, x)
        in_graph = tf.function(step)
        in_graph(x)
        in_phase(f"{state}, graph", in_graph, x)
    in_phase("frozen, eager, backbone called outside the tape", step_outside, x)


def gathering():
    """An embedding that is transformed and then gathered, or the other way round."""
    table, project = tf.Variable(tf.random.normal((50_000, 64))), tf.random.normal((64, 64))
    ids = tf.random.uniform((640,), maxval=50_000, dtype=tf.int32)

    def gradient_of(function):
        with tf.GradientTape() as tape:
            y = function()
        return tape.gradient(y, table)

    ways = {
        "transform all, then gather": lambda: tf.gather(tf.tanh(table @ project), ids),
        "gather, then transform": lambda: tf.tanh(tf.gather(table, ids) @ project),
    }
    return {name: type(in_phase(name, gradient_of, f)).__name__ for name, f in ways.items()}


def freezing_and_gathering():
    freezing()
    return gathering()


others = lab.measure(freezing_and_gathering, label="freezing and gathering")
other_mib = {part.name: part.rise_mib for part in others.phases}
for name, size in other_mib.items():
    kind = f"gradient: {others.value[name]}" if name in others.value else ""
    print(f"{name:48} {size:7.1f} MiB  {kind}")
assert other_mib["frozen, eager"] > 0.9 * other_mib["unfrozen, eager"], (
    "freezing now frees activations eagerly too: the text below is out of date"
)
assert other_mib["unfrozen, graph"] > 2 * other_mib["frozen, graph"], (
    "unfreezing should need the backbone's activations"
)

# %% [markdown]
# * **Freezing.** In a graph, and so in `fit`, a frozen backbone's activations are dropped, and unfreezing it in "phase
#   two" brings them all back at an unchanged batch size: there the OOM comes. In an eager loop, `trainable = False`
#   leaves the variables watched by the tape in Keras 3, and **freezing saves no activation at all**. Call the frozen part outside
#   the tape.
# * **Gathering.** A gradient of gathered rows is sparse (`IndexedSlices`) only if the rows are gathered from the
#   variable itself. Anything in between makes it dense, as large as the table.
#
# ## Verdict

# %%
lab.verdict(
    "C22",
    "partly",
    published=article.peak_mib,
    larger=larger.peak_mib,
    dense_16=unbounded.peak_mib,
    strides_2=fix.peak_mib,
)
judged = ["relu", "tanh", "sigmoid", "softmax", "gelu", "Dense", "LSTM", "MultiHeadAttention"]
lab.verdict("C34", "partly", **{name.lower(): eager[name] for name in judged})

# %% [markdown]
# ## Exercises
#
# **1.** Attention without the T × T tensor: compute it for `rows` queries at a time and put the parts together. Every
# query needs all keys, but no other query.


# %%
def attention(q, k, v):
    return tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)), v)


def chunked_attention(q, k, v, rows):
    # BEGIN SOLUTION
    starts = range(0, q.shape[1], rows)
    return tf.concat([attention(q[:, start : start + rows], k, v) for start in starts], axis=1)
    # END SOLUTION


def compare_attention():
    q, k, v = (tf.random.normal((16, 1024, 32), seed=seed) for seed in (1, 2, 3))
    with lab.phase("whole"):
        whole = attention(q, k, v)
    with lab.phase("chunked"):
        chunked = chunked_attention(q, k, v, 128)
    return None if chunked is None else float(tf.reduce_max(tf.abs(whole - chunked)))


attention_run = lab.run(compare_attention, label="attention in chunks", quiet=True)
with lab.exercise(
    1,
    "Slice q[:, start : start + rows], call attention on it, and tf.concat the parts along axis 1.",
):
    lab.expect_finished(attention_run)
    difference = attention_run.value
    assert difference is not None, (
        "chunked_attention() returns nothing yet: return a tensor of q's shape."
    )
    whole_mib, chunked_mib = (part.rise_mib for part in attention_run.phases)
    assert difference < 1e-3, (
        f"the result is off by up to {difference:.2g}: "
        "every chunk of queries needs all keys and values."
    )
    assert chunked_mib < 0.4 * whole_mib, (
        f"peak {chunked_mib:.0f} MiB against {whole_mib:.0f}: "
        "the scores are still made for all queries at once."
    )
    print(f"whole {whole_mib:.0f} MiB, in chunks {chunked_mib:.0f} MiB")

# %% [markdown]
# **2.** Truncated back-propagation. `through_all` keeps 256 steps of an LSTM. Run it in pieces of `chunk` steps, a tape
# each, handing the state on (`lstm(x, initial_state=state)` returns outputs, h, c), and return the **sum** of the
# pieces' gradients. The gradient does not flow from one piece into the one before: it differs from the whole one.


# %%
def through_all(lstm, x):
    with tf.GradientTape() as tape:
        outputs, h, c = lstm(x)
        loss = tf.reduce_sum(outputs**2)
    return tape.gradient(loss, lstm.trainable_variables)


def truncated(lstm, x, chunk):
    # BEGIN SOLUTION
    state = [tf.zeros((x.shape[0], lstm.units))] * 2
    total = [tf.zeros(weight.shape) for weight in lstm.trainable_variables]
    for start in range(0, x.shape[1], chunk):
        with tf.GradientTape() as tape:
            outputs, *state = lstm(x[:, start : start + chunk], initial_state=state)
            loss = tf.reduce_sum(outputs**2)
        total = [t + g for t, g in zip(total, tape.gradient(loss, lstm.trainable_variables))]
    return total
    # END SOLUTION


def compare_truncated():
    lstm = layers.LSTM(64, return_sequences=True, return_state=True)
    x = tf.random.normal((32, 256, 32))
    lstm(x[:, :2])
    with lab.phase("all steps"):
        whole = [g.numpy() for g in through_all(lstm, x)]
    with lab.phase("in pieces"):
        pieces = truncated(lstm, x, 32)
    if pieces is None:
        return None

    def apart(gradients):
        return max(float(abs(w - g.numpy()).max() / abs(w).max()) for w, g in zip(whole, gradients))

    return apart(pieces), apart(truncated(lstm, x, 256))


truncated_run = lab.run(compare_truncated, label="truncated back-propagation", quiet=True)
with lab.exercise(
    2,
    "Start from zeros for h and c; open a new tape for each piece; "
    "add its gradients to a running total.",
):
    lab.expect_finished(truncated_run)
    apart = truncated_run.value
    assert apart is not None, (
        "truncated() returns nothing yet: return the list of summed gradients."
    )
    all_mib, pieces_mib = (part.rise_mib for part in truncated_run.phases)
    assert apart[1] < 1e-3, (
        "with one piece of all 256 steps the gradients should equal those of through_all."
    )
    assert pieces_mib < 0.4 * all_mib, (
        f"peak {pieces_mib:.0f} MiB against {all_mib:.0f}: does every piece have a tape of its own?"
    )
    print(
        f"all steps {all_mib:.0f} MiB, in pieces {pieces_mib:.0f} MiB; "
        f"gradients apart by {apart[0]:.0%} of the largest"
    )
