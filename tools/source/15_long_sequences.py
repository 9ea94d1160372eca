# %% [markdown]
# # 15 · Long sequences, and what layers keep
#
# **Symptom:** *a text model dies in the middle of an epoch, after batches that went well*; *"OOM in softmax"* with
# attention; *"LSTM on long sequences runs out of memory"*.
#
# **Afterwards you can** name what an activation function or a layer keeps for its way back, see what length does to it,
# and batch sequences so that the rare long one does not set the peak.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 35 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C34 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes batches of four times as many sentences
GUESS_MIB = 0.0  # a starting value for the guesses below

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import long_sequences as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
from keras import layers

PER_BATCH = lab.choose(SCALE, quick=16, full=64)
BUDGET = lab.choose(SCALE, quick="240 MiB", full="960 MiB")
WIDTH, HEADS = 64, 4
lengths = np.random.default_rng(0).lognormal(np.log(40), 1.1, 32 * PER_BATCH)
SENTENCES = np.clip(lengths.astype(int), 4, 511)
print(
    f"{len(SENTENCES)} sentences: half of them below {np.median(SENTENCES):.0f} tokens, "
    f"the longest {SENTENCES.max()}"
)

# %% [markdown]
# ## Predict
#
# A text model: embedding, attention with four heads, a pair of dense layers with gelu between them, a mean, two classes.
# A batch is padded to its longest sentence. One part first: attention has a score for every pair of tokens, in every
# head, for every sentence.

# %%
LONGEST = int(SENTENCES.max())
one_part = lab.guess(
    f"The scores of one batch of {PER_BATCH} sentences, padded to {LONGEST}?", GUESS_MIB
)

# %%
scores = lab.tensor_mib((PER_BATCH, HEADS, LONGEST, LONGEST))
typical = lab.tensor_mib((PER_BATCH, HEADS, 40, 40))
print(f"{PER_BATCH} × {HEADS} × {LONGEST} × {LONGEST} × 4 B = {scores:.1f} MiB")
print(f"your guess: {one_part.mib:.1f} MiB; and padded to 40 tokens: {typical:.2f} MiB")

# %%
my_guess = lab.guess("Peak memory of a training step of this batch, run eagerly?", GUESS_MIB)

# %% [markdown]
# The way back through the softmax is the worst moment. Kept are the scores before and after it (Keras hangs the former
# on the latter); then come the gradient of what the softmax gave, that less its mean, and the product of the two: five.

# %%
predicted = 5 * scores
print(f"5 × {scores:.1f} MiB = {predicted:.0f} MiB, and some for all the rest")

# %% [markdown]
# ## Failure
#
# One epoch over the sentences as they come, in padded batches.


# %%
BOUNDARIES = [32, 64, 128, 256, 512]


def batched(sizes):
    """Padded batches of one size as they come; or of like lengths, with a size for each bucket."""
    lengths = tf.data.Dataset.from_tensor_slices(SENTENCES)
    sentences = lengths.map(lambda length: tf.ones([length], tf.int32))
    if isinstance(sizes, int):
        return sentences.padded_batch(sizes)
    sizes = [*sizes, 1]  # the last is for sentences beyond the last boundary: there are none
    return sentences.bucket_by_sequence_length(lambda ids: tf.shape(ids)[0], BOUNDARIES, sizes)


def epoch(sizes, activation="gelu"):
    embed, attend = layers.Embedding(1000, WIDTH), layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
    widen, narrow = layers.Dense(4 * WIDTH, activation=activation), layers.Dense(WIDTH)
    classify = layers.Dense(2)
    shapes = []
    for ids in batched(sizes):
        with lab.phase(f"batch {len(shapes) + 1}"):
            with tf.GradientTape() as tape:
                h = embed(ids)
                h = h + attend(h, h)
                h = h + narrow(widen(h))
                loss = tf.reduce_mean(classify(tf.reduce_mean(h, 1)) ** 2)
            gradients = tape.gradient(loss, tape.watched_variables())
            del h, tape, gradients
        shapes.append(tuple(ids.shape))
    return shapes


failure = lab.run(epoch, PER_BATCH, budget=BUDGET, label="padded batches")
lab.expect_oom(failure)

# %%
batches_of = {"padded": [tuple(ids.shape) for ids in batched(PER_BATCH)]}
died_in = len(failure.phases)
lab.note(
    f"It died in batch {died_in} of {len(batches_of['padded'])}, which is padded to "
    f"{batches_of['padded'][died_in - 1][1]} tokens. Nothing leaks: that batch alone does not fit."
)

# %% [markdown]
# ## Advice, tested
#
# **Choose another activation function.** They differ in what they need, published advice says. With relu in place of gelu,
# without a budget that stops either:

# %%
arms = {"padded": lab.measure(epoch, PER_BATCH, label="padded batches")}
with_relu = lab.measure(epoch, PER_BATCH, "relu", label="padded batches, relu")
lab.predicted_vs_measured(longest_batch=(predicted, arms["padded"].peak_mib))

# %%
print(my_guess.against(arms["padded"].peak_mib))
padded_to = np.array([length for _, length in with_relu.value])
relu, gelu = (np.array([p.rise_mib for p in arm.phases]) for arm in (with_relu, arms["padded"]))
short, long = (np.median((relu / gelu)[at]) for at in (padded_to <= 128, padded_to >= 480))
lab.note(
    f"With relu a batch padded to at most 128 tokens needs {short:.0%} of what it needs with gelu, "
    f"and one padded to 480 or more {long:.0%}: there the scores decide. The section Explain has "
    "what each keeps."
)

# %% [markdown]
# **Sort into buckets** of like lengths, so that short sentences are not padded to a long one. Batches keep their size.

# %%
bucketed = [PER_BATCH] * len(BOUNDARIES)
advice = lab.run(epoch, bucketed, budget=BUDGET, label="buckets")
lab.expect_oom(advice)

# %% [markdown]
# Buckets put all long sentences into one batch, and that is as large as before.
#
# ## Fix
#
# Buckets with a **token budget**: each bucket's batch size is chosen so that batch × length stays below one limit.

# %%
token_budget = [PER_BATCH * 128 // boundary for boundary in BOUNDARIES]
print("sentences a batch, by bucket:", dict(zip(BOUNDARIES, token_budget)))
fix = lab.run(epoch, token_budget, budget=BUDGET, label="token budget")
lab.expect_finished(fix)

# %% [markdown]
# A control: is it the buckets? A smaller batch for all, as they come, the size that the longest bucket has:

# %%
control = lab.run(epoch, token_budget[-1], budget=BUDGET, label="small batches")
lab.expect_finished(control)

# %% [markdown]
# ## Side by side

# %%
arms |= {
    "buckets": lab.measure(epoch, bucketed, label="buckets, no tight budget"),
    "token budget": fix,
    "small batches": control,
}
peaks = {way: np.array([part.rise_mib for part in arm.phases]) for way, arm in arms.items()}
_, axes = plt.subplots()
for place, sizes in enumerate(peaks.values()):
    rows = place + np.random.default_rng(0).uniform(-0.25, 0.25, len(sizes))  # else they coincide
    axes.plot(sizes, rows, "os^D"[place], ms=4, color=lab.COLOURS[place])
axes.axvline(lab.parse_size(BUDGET) / 2**20, color=lab.BUDGET_LINE, ls="--", lw=1)
axes.set_yticks(range(len(peaks)), peaks)
axes.invert_yaxis()
axes.set(xlabel="peak of a batch (MiB); a mark a batch; dashed: the budget", xlim=(0, None))
plt.show()
tokens = {way: sum(size * length for size, length in arm.value) for way, arm in arms.items()}
batches = pd.DataFrame(
    {
        "batches": {way: len(arm.value) for way, arm in arms.items()},
        "padding %": {way: 100 * (1 - SENTENCES.sum() / size) for way, size in tokens.items()},
        "median peak MiB": {way: np.median(sizes) for way, sizes in peaks.items()},
        "largest peak MiB": {way: sizes.max() for way, sizes in peaks.items()},
    }
).round(1)
batches

# %%
largest, padding = batches["largest peak MiB"], batches["padding %"]
lab.note(
    f"Buckets cut the padding from {padding['padded']:.0f} to {padding['buckets']:.0f} %, and "
    "leave "
    f"the largest peak at {largest['buckets'] / largest['padded']:.2f} of what it was; the token "
    f"budget brings it to {largest['token budget'] / largest['padded']:.2f}, in "
    f"{batches['batches']['token budget']} batches. Small batches fit as well: "
    f"{batches['batches']['small batches']} of them, with {padding['small batches']:.0f} % padding."
)
assert padding["buckets"] < 0.7 * padding["padded"], "buckets should cut the padding"
assert largest["buckets"] > 0.9 * largest["padded"], "buckets alone should not cut the peak"
assert largest["token budget"] < 0.5 * largest["buckets"], "a token budget should cut the peak"

# %% [markdown]
# Who held it? Both run once more while TensorFlow records every allocation. The scores of attention, length × length
# for each head and sentence, come several times: as products, as softmax, and as their gradients.

# %%
lab.take_apart(failure, fix)

# %% [markdown]
# What must fit is the largest batch. A run that got through its most expensive batch once will get through the epoch:
# feed that batch *first*.
#
# ## Explain
#
# **What a layer keeps**, in multiples of its own output. The input is not counted: whoever made it keeps it. First what
# the derivative needs if nothing is computed a second time. Activation functions stand in a `Dense` layer, as they are
# used: relu, tanh, sigmoid and softmax can be differentiated from their *output*, gelu and silu not: they need what the
# layer had before the activation, too. Dropout needs a mask of a byte a number; an LSTM four gates, the cell, its
# tanh and the output of every step; attention query, key, value, context and output, and the scores after the
# softmax: heads × T × T a sample.

# %%
UNITS, STEPS, ROWS = 128, 128, 64  # 64 sequences of 128 steps; for layers that know no steps, rows
ACTIVATIONS = {"relu": 1, "tanh": 1, "sigmoid": 1, "softmax": 1, "silu": 2, "gelu": 2}
KINDS = {
    "Dense": 1,
    "Dropout": 1.25,
    "BatchNormalization": 1,
    "LayerNormalization": 1,
    "LSTM": 7,
    "MultiHeadAttention": 5 + HEADS * STEPS / UNITS,
}
NEEDS = ACTIVATIONS | KINDS


def layer_of(name):
    made = {
        "Dense": lambda: layers.Dense(UNITS),
        "Dropout": lambda: layers.Dropout(0.5),
        "BatchNormalization": layers.BatchNormalization,
        "LayerNormalization": layers.LayerNormalization,
        "LSTM": lambda: layers.LSTM(UNITS, return_sequences=True),
        "MultiHeadAttention": lambda: layers.MultiHeadAttention(HEADS, UNITS // HEADS),
    }
    layer = made[name]() if name in made else layers.Dense(UNITS, activation=name)
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


def kinds(names):
    sequences = tf.random.normal((ROWS, STEPS, UNITS))
    for name in names:
        rows = tf.reshape(sequences, (ROWS * STEPS, UNITS))
        x = sequences if name in ("LSTM", "MultiHeadAttention") else rows
        in_graph = tf.function(under_tape(name, x, f"{name}, eager"))
        in_graph(x)  # traces
        with lab.phase(f"{name}, graph"):
            in_graph(x)


measured = lab.measure(kinds, list(NEEDS), label="kinds of layers")
output = lab.tensor_mib((ROWS, STEPS, UNITS))
kept = pd.DataFrame({"the derivative needs": NEEDS})
kept["kept, run eagerly"] = [measured.phase(f"{name}, eager").added_mib / output for name in NEEDS]
kept["peak of a step in a graph"] = [
    measured.phase(f"{name}, graph").rise_mib / output for name in NEEDS
]

# %%
words = f"multiples of the layer's output ({output:.0f} MiB)"
axes = kept.plot.barh(width=0.8, xlabel=words, figsize=(10, 5))
for bars, hatch in zip(axes.containers, ("", "//", "..")):
    plt.setp(bars, hatch=hatch)
axes.invert_yaxis()
axes.legend()
plt.show()
kept.round(2)

# %%
eager, graph = kept["kept, run eagerly"], kept["peak of a step in a graph"]
assert (kept.iloc[:, 1:].min(axis=1) > 0.98 * kept["the derivative needs"]).all()
lab.note(
    f"Run eagerly, gelu keeps {eager['gelu'] / eager['relu']:.0f} times what relu keeps, and tanh "
    f"{eager['tanh'] / eager['relu']:.1f} times. gelu and LayerNormalization are put together from "
    "small operations, and each keeps what *it* needs. Keras hangs on the output of sigmoid and "
    f"softmax what they were computed from, for the loss: {eager['softmax']:.0f} outputs, not 1. A "
    "whole step in a graph also holds a gradient at its peak, and drops and reuses: gelu comes to "
    f"{graph['gelu']:.0f}, the LSTM to {graph['LSTM']:.0f}, where eagerly {eager['LSTM']:.0f} are "
    "kept."
)

# %% [markdown]
# The two measured columns belong to the kernels of a CPU, and others may keep something else. What the derivative needs
# does not depend on them.
#
# **What length does to it.** The same for sequences that grow longer.


# %%
def growing(name, lengths):
    for length in reversed(lengths):  # the longest first, so that its memory fits the others
        under_tape(name, tf.random.normal((16, length, UNITS)), f"{length} steps")


LENGTHS = [64, 128, 256, 512]
grown = pd.DataFrame(index=LENGTHS)
for name in ("LSTM", "MultiHeadAttention"):
    by_length = lab.measure(growing, name, LENGTHS, label=f"{name}, by length")
    grown[name] = [by_length.phase(f"{length} steps").added_mib for length in LENGTHS]
labels = {"xlabel": "steps T", "ylabel": "kept, 16 sequences (MiB)"}
axes = grown.plot(style=["o-", "s--"], loglog=True, **labels)
axes.set_xticks(LENGTHS, LENGTHS)
axes.set_yticks([10, 100], ["10", "100"])
axes.minorticks_off()
plt.show()
longer = grown.loc[512] / grown.loc[64]
factors = ", ".join(f"{name} {factor:.1f} times" for name, factor in longer.items())
lab.note(
    f"With {512 // 64} times the steps there is kept: {factors}. An LSTM keeps the same for "
    "every step; "
    "the scores of attention are T × T."
)
assert 6 < longer["LSTM"] < 10, "it should grow with the length"
assert longer["MultiHeadAttention"] > 2 * longer["LSTM"], (
    "attention should grow faster than the LSTM"
)

# %% [markdown]
# **When it flips.** Where do the scores outweigh what gelu keeps, in a block as above? (Its dense layer is four times as
# wide as its attention.)


# %%
def block(tokens=128, width=64, heads=4, batch=16):
    of_scores = 2 * lab.tensor_mib((batch, heads, tokens, tokens))
    of_gelu = eager["gelu"] * lab.tensor_mib((batch, tokens, 4 * width))
    print(f"scores {of_scores:8.1f} MiB   gelu {of_gelu:8.1f} MiB   (kept, predicted)")


lab.explore(block, tokens=(16, 2048, 16), width=(16, 1024, 16), heads=(1, 16), batch=(1, 64))

# %% [markdown]
# **The embedding's gradient** has the shape of what was gathered, if the rows are gathered from the variable itself
# (`IndexedSlices`). Anything in between makes it as large as the table. 640 rows of 50,000:


# %%
def gathering():
    table = tf.Variable(tf.random.normal((50_000, 64)))
    ids = tf.random.uniform((640,), maxval=50_000, dtype=tf.int32)
    ways = {
        "tanh of all, then gather": lambda: tf.gather(tf.tanh(table), ids),
        "gather, then tanh": lambda: tf.tanh(tf.gather(table, ids)),
    }
    kinds = {}
    for name, way in ways.items():
        with lab.phase(name), tf.GradientTape() as tape:
            gradient = tape.gradient(way(), table)
        kinds[name] = type(gradient).__name__
    return kinds


gathered = lab.measure(gathering, label="gathering")
for part in gathered.phases:
    print(f"{part.name:28} {part.rise_mib:5.1f} MiB   {gathered.value[part.name]}")

# %% [markdown]
# ## Verdict

# %%
figures = {}
for execution, column in (("eagerly", eager), ("graph", graph)):
    for group, names in (("functions", ACTIVATIONS), ("kinds", KINDS)):
        figures[f"{group}_{execution}_least"] = column[list(names)].min()
        figures[f"{group}_{execution}_most"] = column[list(names)].max()
lab.verdict("C34", "holds", **figures)

# %% [markdown]
# They differ. Whether a choice among them helps depends on which, and on what fills the memory: see the advice.
#
# ## Exercises
#
# **1.** Attention without the T × T tensor: compute it for `rows` queries at a time and put the parts together. Every
# query needs all keys, but no other query.


# %%
def attention(q, k, v):
    return tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)), v)


# %%
def chunked_attention(q, k, v, rows):
    # BEGIN SOLUTION
    starts = range(0, q.shape[1], rows)
    return tf.concat([attention(q[:, start : start + rows], k, v) for start in starts], axis=1)
    # END SOLUTION


# %%
check.chunked_attention(chunked_attention)


# %% tags=["right"]
def chunked_attention(q, k, v, rows):
    result = tf.TensorArray(tf.float32, 0, dynamic_size=True, infer_shape=False)
    start = 0
    while start < q.shape[1]:
        some = tf.einsum("bqd,bkd->bqk", q[:, start : start + rows, :], k)
        part = tf.einsum("bqk,bkd->bqd", tf.nn.softmax(some, axis=-1), v)
        result = result.write(result.size(), tf.transpose(part, [1, 0, 2]))
        start += rows
    return tf.transpose(result.concat(), [1, 0, 2])


# %% tags=["right"]
def chunked_attention(q, k, v, rows):
    queries = tf.pad(q, [[0, 0], [0, -q.shape[1] % rows], [0, 0]])
    parts = tf.reshape(queries, (q.shape[0], -1, rows, q.shape[2]))
    done = tf.map_fn(lambda part: attention(part, k, v), tf.transpose(parts, [1, 0, 2, 3]))
    return tf.reshape(tf.transpose(done, [1, 0, 2, 3]), queries.shape)[:, : q.shape[1]]


# %% tags=["wrong"]
# says: number of queries in a chunk
def chunked_attention(q, k, v, rows):
    size = -(-q.shape[1] // rows)
    starts = range(0, q.shape[1], size)
    return tf.concat([attention(q[:, start : start + size], k, v) for start in starts], axis=1)


# %% tags=["wrong"]
# says: still made for all queries
def chunked_attention(q, k, v, rows):
    return attention(q, k, v)


# %% tags=["wrong"]
# says: still made for all queries
def chunked_attention(q, k, v, rows):
    return tf.concat(
        [attention(q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i in range(len(q))], 0
    )


# %% tags=["wrong"]
# says: all keys
def chunked_attention(q, k, v, rows):
    spans = [slice(start, start + rows) for start in range(0, q.shape[1], rows)]
    return tf.concat([attention(q[:, s], k[:, s], v[:, s]) for s in spans], 1)


# %% tags=["wrong"]
# says: shape
def chunked_attention(q, k, v, rows):
    starts = range(0, q.shape[1] - rows + 1, rows)
    return tf.concat([attention(q[:, start : start + rows], k, v) for start in starts], axis=1)


# %% [markdown]
# **2.** Truncated back-propagation. `through_all` keeps all steps of an LSTM. Run it in pieces of `chunk` steps, a tape
# each, handing the state on (`lstm(x, initial_state=state)` returns outputs, h, c), and return the **sum** of the
# pieces' gradients. The gradient does not flow from one piece into the one before: it differs from the whole one.


# %%
def through_all(lstm, x):
    with tf.GradientTape() as tape:
        outputs, h, c = lstm(x)
        loss = tf.reduce_sum(outputs**2)
    return tape.gradient(loss, lstm.trainable_variables)


# %%
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


# %%
check.truncated(truncated)


# %% tags=["right"]
def truncated(lstm, x, chunk):
    h = c = None
    sums = None
    for piece in [x[:, i : i + chunk] for i in range(0, x.shape[1], chunk)]:
        with tf.GradientTape() as tape:
            outputs, h, c = lstm(piece) if h is None else lstm(piece, initial_state=[h, c])
            loss = tf.reduce_sum(outputs * outputs)
        new = [g.numpy() for g in tape.gradient(loss, lstm.trainable_variables)]
        sums = new if sums is None else [a + b for a, b in zip(sums, new)]
    return tuple(sums)


# %% tags=["right"]
def truncated(lstm, x, chunk):
    sums = {w.path: tf.Variable(tf.zeros(w.shape)) for w in lstm.weights}
    state = None
    for piece in tf.split(x, [*[chunk] * (x.shape[1] // chunk), x.shape[1] % chunk], axis=1):
        with tf.GradientTape(persistent=True) as tape:
            outputs, *state = lstm(piece, initial_state=state)
            loss = tf.reduce_sum(tf.square(outputs))
        for weight in lstm.weights:
            sums[weight.path].assign_add(tape.gradient(loss, weight))
        del tape
    return [variable.read_value() for variable in sums.values()]


# %% tags=["wrong"]
# says: last, shorter piece
def truncated(lstm, x, chunk):
    state, total = None, [0.0] * 3
    for piece in range(x.shape[1] // chunk):
        with tf.GradientTape() as tape:
            some = x[:, piece * chunk : (piece + 1) * chunk]
            outputs, *state = lstm(some, initial_state=state)
            loss = tf.reduce_sum(outputs**2)
        total = [t + g for t, g in zip(total, tape.gradient(loss, lstm.trainable_variables))]
    return total


# %% tags=["wrong"]
# says: state is not handed on
def truncated(lstm, x, chunk):
    total = [0.0] * 3
    for start in range(0, x.shape[1], chunk):
        total = [t + g for t, g in zip(total, through_all(lstm, x[:, start : start + chunk]))]
    return total


# %% tags=["wrong"]
# says: last piece alone
def truncated(lstm, x, chunk):
    state = [tf.zeros((x.shape[0], lstm.units))] * 2
    for start in range(0, x.shape[1], chunk):
        with tf.GradientTape() as tape:
            outputs, *state = lstm(x[:, start : start + chunk], initial_state=state)
            loss = tf.reduce_sum(outputs**2)
        gradients = tape.gradient(loss, lstm.trainable_variables)
    return gradients


# %% tags=["wrong"]
# says: mean
def truncated(lstm, x, chunk):
    state, total, pieces = None, [0.0] * 3, 0
    for start in range(0, x.shape[1], chunk):
        with tf.GradientTape() as tape:
            outputs, *state = lstm(x[:, start : start + chunk], initial_state=state)
            loss = tf.reduce_sum(outputs**2)
        total = [t + g for t, g in zip(total, tape.gradient(loss, lstm.trainable_variables))]
        pieces += 1
    return [t / pieces for t in total]


# %% tags=["wrong"]
# says: through all pieces
def truncated(lstm, x, chunk):
    return through_all(lstm, x)


# %% tags=["wrong"]
# says: through all pieces
def truncated(lstm, x, chunk):
    state, loss = None, 0.0
    with tf.GradientTape() as tape:
        for start in range(0, x.shape[1], chunk):
            outputs, *state = lstm(x[:, start : start + chunk], initial_state=state)
            loss += tf.reduce_sum(outputs**2)
    return tape.gradient(loss, lstm.trainable_variables)


# %% tags=["wrong"]
# says: tape of its own
def truncated(lstm, x, chunk):
    state, losses = None, []
    with tf.GradientTape(persistent=True) as tape:
        for start in range(0, x.shape[1], chunk):
            state = state and [tf.stop_gradient(s) for s in state]
            outputs, *state = lstm(x[:, start : start + chunk], initial_state=state)
            losses.append(tf.reduce_sum(outputs**2))
        loss = tf.add_n(losses)
    return tape.gradient(loss, lstm.trainable_variables)


# %% [markdown]
# **3.** gelu that keeps nothing but its input. Run eagerly, `tf.nn.gelu(x)` keeps several tensors of x's size. Write
# `frugal_gelu(x)` with the same values and the same gradient, which keeps its output and, beside it, only x. (Run
# eagerly, a tape also sees into a `tf.custom_gradient`, unless the values are computed from `tf.stop_gradient(x)`.)


# %%
def frugal_gelu(x):
    # BEGIN SOLUTION
    @tf.custom_gradient
    def gelu(x):
        def gradient(upstream):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.nn.gelu(x)
            return tape.gradient(y, x, upstream)

        return tf.nn.gelu(tf.stop_gradient(x)), gradient

    return gelu(x)
    # END SOLUTION


# %%
check.frugal_gelu(frugal_gelu)


# %% tags=["right"]
def frugal_gelu(x):
    return tf.recompute_grad(tf.nn.gelu)(x)


# %% tags=["right"]
@tf.custom_gradient
def frugal_gelu(x):
    def gradient(upstream):
        normal = 0.5 * (1 + tf.math.erf(x / 2**0.5))
        return upstream * (normal + x * tf.exp(-(x**2) / 2) / (2 * np.pi) ** 0.5)

    fixed = tf.stop_gradient(x)
    return 0.5 * fixed * (1 + tf.math.erf(fixed / 2**0.5)), gradient


# %% tags=["wrong"]
# says: gradient is off
def frugal_gelu(x):
    return x + tf.stop_gradient(tf.nn.gelu(x) - x)


# %% tags=["wrong"]
# says: keeps
def frugal_gelu(x):
    return 0.5 * x * (1 + tf.math.erf(x / 2**0.5))


# %% tags=["wrong"]
# says: values
@tf.custom_gradient
def frugal_gelu(x):
    def gradient(upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.gelu(x, approximate=True)
        return tape.gradient(y, x, upstream)

    return tf.nn.gelu(x, approximate=True), gradient


# %% tags=["wrong"]
# says: gradient
@tf.custom_gradient
def frugal_gelu(x):
    def gradient(upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.gelu(x)
        return tape.gradient(y, x)

    return tf.nn.gelu(tf.stop_gradient(x)), gradient


# %% tags=["wrong"]
# says: keeps
@tf.custom_gradient
def frugal_gelu(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.nn.gelu(x)
    slope = tape.gradient(y, x)
    return y, lambda upstream: upstream * slope


# %% tags=["wrong"]
# says: keeps .*stop_gradient
@tf.custom_gradient
def frugal_gelu(x):
    def gradient(upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.gelu(x)
        return tape.gradient(y, x, upstream)

    return tf.nn.gelu(x), gradient
