# %% [markdown]
# # 12 · Recomputation: "gradient checkpointing" that does and that does not
#
# **Symptom:** *"gradient checkpointing makes no difference to memory"*, or *"OOM when allocating tensor with shape
# [4096,64]"* in the middle of a deep model whose weights are tiny.
#
# **Afterwards you can** tell whether a training step recomputes anything at all, cut a model into segments that are
# recomputed, predict the best number of them from the depth, and name what recomputation silently breaks.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C13, C56 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes batches four times as large
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import contextlib
import re
import time

import matplotlib.pyplot as plt
import pandas as pd

import labsupport as lab
from labsupport.graders import recomputation as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

DEPTH, WIDTH, CLASSES = 36, 64, 10
BATCH = lab.choose(SCALE, quick=4096, full=16384)
BUDGET = lab.choose(SCALE, quick="28 MiB", full="112 MiB")

# %% [markdown]
# ## Predict
#
# The model is 36 hidden layers `Dense(64, "relu")` and a `Dense(10)` on top. Before you run anything: how much memory
# does one training step on a batch take at its worst moment?

# %%
my_guess = lab.guess(
    f"Peak memory of one training step, {DEPTH} × Dense({WIDTH}), batch {BATCH}?", GUESS_MIB
)

# %% [markdown]
# Now the arithmetic. The backward pass needs every layer's output, so all of them are kept until it comes by.

# %%
one = lab.tensor_mib((BATCH, WIDTH))
weights = DEPTH * lab.tensor_mib((WIDTH, WIDTH))
predicted_plain = (DEPTH + 2) * one  # and two gradients of one activation on the way back
print(f"one activation {one:.2f} MiB; all weights: {weights:.2f} MiB")
print(f"{DEPTH} activations kept and 2 in passing: {predicted_plain:.0f} MiB")

# %% [markdown]
# Recomputation keeps only some outputs, *checkpoints*, and runs the layers between two of them a second time when the
# backward pass needs what they made. With `k` segments of `n/k` layers that is `k` checkpoints for the whole step,
# plus one segment's `n/k` outputs at a time. A segment also holds the gradient that enters it, so 3 in passing.


# %%
def predicted_segments(k, depth=DEPTH, kept_per_layer=1.0):
    """MiB at the peak with k segments; kept_per_layer: activations that one layer keeps."""
    return (k + kept_per_layer * depth / k + 3) * one


COUNTS = [k for k in range(1, DEPTH + 1) if DEPTH % k == 0]
print(
    "\n".join(f"{k:2} segments: {predicted_segments(k):6.1f} MiB" for k in COUNTS),
    f"\nnone: {predicted_plain:15.1f} MiB",
)

# %% [markdown]
# `k + n/k` is smallest at `k = √n`, here 6. At both ends, one segment or 36, there is nothing to gain.
#
# ## Failure
#
# The published snippet, called gradient checkpointing: a step in a `tf.function` with a tape, over slices of the
# samples. First at its own size: one hidden layer, 1,000 samples of ten numbers, slices of 32. We count what it does.
# A step over `d` dense layers has `d` matrix products forward and, for the gradients, `d` for weights and `d − 1` for
# layer inputs: `3d − 1`. A step that recomputed anything would have more.


# %%
def multiplications(train_step, *arguments):
    """How many matrix products the graph of a step holds."""
    return sum(
        op.type == "MatMul"
        for op in train_step.get_concrete_function(*arguments).graph.get_operations()
    )


def published(hidden, inputs, samples, batch):
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(hidden)]
    model = keras.Sequential([keras.Input((inputs,)), *layers, keras.layers.Dense(CLASSES)])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)  # else the first step does it, and is traced twice
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x = tf.random.normal((samples, inputs))
    y = tf.random.uniform((samples,), maxval=CLASSES, dtype=tf.int32)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    for start in range(0, samples, batch):
        train_step(x[start : start + batch], y[start : start + batch])
    return multiplications(train_step, x[:batch], y[:batch])


own_size = lab.measure(published, 1, 10, 1000, 32, label="published, at its own size")
print(f"2 layers: {own_size.value} matrix products, an ordinary step has 3 × 2 − 1 = {3 * 2 - 1}")

# %% [markdown]
# That size has no memory trouble to cure. Where recomputation is wanted, in a deep model on a large batch, under a
# budget that a step with real checkpoints keeps. (oneDNN, the library of fused kernels that TensorFlow uses on CPUs,
# crashes the process in a graph where others report an OOM; the runs that are compared go without it.)

# %%
deep = (DEPTH, WIDTH, BATCH, BATCH)
failure = lab.run(published, *deep, budget=BUDGET, label="published snippet", env=lab.NO_ONEDNN)
lab.expect_oom(failure)

# %% [markdown]
# ## Fix
#
# One thing changes: the layers are called in segments, each wrapped in `tf.recompute_grad` (Keras offers the same as
# `keras.remat`). The layers must be built before that, because a variable may not be created inside a segment.


# %%
def chain(layers):
    def call(x):
        for layer in layers:
            x = layer(x)
        return x

    return call


def in_segments(layers, lengths):
    """Functions that together apply all layers, each recomputed: lengths[0] layers, and so on."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        tf.recompute_grad(chain(layers[start : start + length]))
        for start, length in zip(starts, lengths)
    ]


def built_layers(activation):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(WIDTH, activation=activation) for _ in range(DEPTH)]
    head = keras.layers.Dense(CLASSES)
    for layer in [*layers, head]:
        layer.build((None, WIDTH))
    weights = [weight for layer in [*layers, head] for weight in layer.trainable_variables]
    return layers, head, weights


def recomputed(segments, batch):
    layers, head, weights = built_layers("relu")
    optimizer = keras.optimizers.Adam()
    optimizer.build(weights)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x = tf.random.normal((batch, WIDTH))
    y = tf.random.uniform((batch,), maxval=CLASSES, dtype=tf.int32)
    parts = in_segments(layers, [DEPTH // segments] * segments)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            h = x
            for part in parts:
                h = part(h)
            loss = loss_fn(y, head(h))
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights))
        return loss

    train_step(x, y)
    return multiplications(train_step, x, y)


fix = lab.run(recomputed, 6, BATCH, budget=BUDGET, label="6 segments recomputed", env=lab.NO_ONEDNN)
lab.expect_finished(fix)

# %% [markdown]
# What the published step would have needed, and what Keras' own training step needs, which nobody calls
# checkpointing:


# %%
def ordinary(batch):
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(DEPTH)]
    model = keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(CLASSES)])
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss_fn, jit_compile=False)
    model.optimizer.build(model.trainable_variables)  # else the first step does it
    x = tf.random.normal((batch, WIDTH))
    y = tf.random.uniform((batch,), maxval=CLASSES, dtype=tf.int32)
    model.train_on_batch(x, y)


unbounded = lab.measure(published, *deep, label="published, no tight budget", env=lab.NO_ONEDNN)
keras_step = lab.measure(ordinary, BATCH, label="Keras train_on_batch", env=lab.NO_ONEDNN)

# %% [markdown]
# ## Side by side

# %%
lab.compare(unbounded, keras_step, fix)

# %% [markdown]
# Who held it? Two of them run once more while TensorFlow records every allocation. The ordinary step holds the
# outputs of its layers; in segments, it holds one for each segment on the way, and those of the segment that is
# computed again.

# %%
lab.take_apart(unbounded, fix)

# %%
layers = DEPTH + 1
print(my_guess.against(unbounded.peak_mib))
products, with_segments = unbounded.value, fix.value
lab.note(
    f"Matrix products: ordinary 3 × {layers} − 1 = {3 * layers - 1}, published {products}, 6 "
    f"segments {with_segments}. Of those that came on top {DEPTH} are the layers run again; the "
    "rest is the gradient for the first segment's input, which nobody uses."
)
assert products == 3 * layers - 1 < with_segments, (
    "a step that recomputes must hold more products than one that does not"
)

# %% [markdown]
# ### Memory and time over the number of segments
#
# Every way to cut 36 layers into equal segments, eagerly; some of them in a graph too. The step only computes
# gradients here, without an optimizer, so that activations are all there is to see. Each step is taken three times: a
# graph runs what is independent side by side, and the order, and with it the peak, can change from step to step.


# %%
def gradient_step(parts, head, weights):
    def step(x, y):
        with tf.GradientTape() as tape:
            h = x
            for part in parts:
                h = part(h)
            loss = tf.reduce_mean(tf.square(head(h) - y))
        return tape.gradient(loss, weights)

    return step


def sweep(activation, counts, batch, graph=False, times=3):
    """Some steps, a phase each, for each number of segments; 0: nothing is recomputed."""
    layers, head, weights = built_layers(activation)
    x, y = tf.random.normal((batch, WIDTH)), tf.random.normal((batch, CLASSES))
    seconds, gradients = [], []
    for count in counts:
        parts = in_segments(layers, [DEPTH // count] * count) if count else [chain(layers)]
        step = gradient_step(parts, head, weights)
        if graph:
            step = tf.function(step)
            step(x, y)  # traces
        for _ in range(times):
            begin = time.monotonic()
            with lab.phase(f"{count}"):
                gradients.append(step(x, y)[0].numpy())  # the first layer's: computed last
            seconds.append(time.monotonic() - begin)
    off = max(float(abs(g - gradients[0]).max()) for g in gradients)
    return seconds, off / float(abs(gradients[0]).max())


def by_segments(result):
    """MiB over inputs and weights, and seconds, of each step of sweep(), grouped by segments."""
    rows = [[int(p.name), p.rise_mib, s] for p, s in zip(result.phases, result.value[0])]
    return pd.DataFrame(rows, columns=["segments", "MiB", "seconds"]).groupby("segments")


SOME = [0, 1, 3, 6, 12, DEPTH]
swept = lab.measure(sweep, "relu", [0, *COUNTS], BATCH, label="segments, eager")
swept_graph = lab.measure(sweep, "relu", SOME, BATCH, True, label="segments, graph")
runs = {"eager": by_segments(swept), "graph": by_segments(swept_graph)}

# %%
_, panels = plt.subplots(1, 2)
predicted = [predicted_segments(k) for k in COUNTS]
panels[0].plot(COUNTS, predicted, "kx", zorder=3, label="predicted (eager)")
labels = {"MiB": "peak of one step (MiB)", "seconds": "time of one step (s)"}
for axes, (column, label) in zip(panels, labels.items()):
    for way, colour, line in zip(runs, lab.COLOURS, ("o-", "s--")):
        steps = runs[way][column].agg(["median", "min", "max"])
        some = steps.drop(0)
        axes.plot(some["median"], line, color=colour, label=f"{way}, recomputed")
        axes.vlines(some.index, some["min"], some["max"], color=colour)
        none = {"color": colour, "ls": line[1:], "lw": 1}
        axes.axhline(steps["median"][0], label=f"{way}, nothing recomputed", **none)
    axes.set(xscale="log", xlabel="number of segments", ylabel=label, ylim=(0, None))
    axes.set_xticks(COUNTS, COUNTS)
    axes.minorticks_off()
lab.legend_below(panels[0])
plt.show()
medians = pd.concat({way: steps.median() for way, steps in runs.items()}, axis=1)
medians.rename(index={0: "none"}).round(2)

# %%
eager, graph = medians["eager"]["MiB"], medians["graph"]["MiB"]
eager_s, graph_s = medians["eager"]["seconds"], medians["graph"]["seconds"]
spread = runs["graph"]["MiB"].agg(["min", "max"])
lab.note(
    f"Of the eager ways {eager.drop(0).idxmin()} segments need least; √{DEPTH} = {DEPTH**0.5:.0f}. "
    f"With 6 a step took {eager_s[6] / eager_s[0]:.2f} times the plain one on this CPU, and in a "
    f"graph {graph_s[6] / graph_s[0]:.2f} times; a third more is what the arithmetic asks for. In "
    f"a graph 6 segments peak at {graph[6]:.0f} MiB and eagerly at {eager[6]:.0f}: a graph drops "
    "what nobody will read. Its three steps lay up to "
    f"{(spread['max'] - spread['min']).max():.1f} MiB apart."
)
off = max(swept.value[1], swept_graph.value[1])
print(f"gradients: apart by at most {off:.1e} of the largest, float32 rounds at 1.2e-07")
assert off < 1e-3, "recomputation must not change the gradients"
assert eager[6] < 0.6 * eager[0], "segments of √n layers should need well below the plain step"
lab.predicted_vs_measured(
    plain=(predicted_plain, eager[0]),
    one_segment=(predicted_segments(1), eager[1]),
    six_segments=(predicted_segments(6), eager[6]),
    each_layer_alone=(predicted_segments(DEPTH), eager[DEPTH]),
)

# %% [markdown]
# ## Explain
#
# * The snippet is an ordinary step. A tape alone keeps everything; a `tf.function` around it recomputes nothing.
# * The **whole model as one segment** is useless: nothing is kept forward, but then the one segment is computed again
#   and *everything* is there at once.
# * **Each layer alone** is useless for these layers: the input of every layer is kept, and that is exactly what the
#   plain step keeps too. `Dense` with relu needs its input and its output, and one layer's output is the next's input.
# * The price is one more forward pass, about a third of a step's arithmetic. Segments do not change that price: take
#   the number that saves most.
#
# ### What Keras' switch does
#
# Its documentation calls both `keras.remat` and `keras.RematScope` rematerialization: the first wraps a function, the
# second, in one line, whatever is constructed under it. On the TensorFlow backend:


# %%
def keras_way(way, batch):
    with contextlib.nullcontext() if way == "segments" else keras.RematScope(way):
        hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(DEPTH)]
        model = keras.Sequential([keras.Input((WIDTH,)), *hidden])
    parts, head = [model], keras.layers.Dense(CLASSES)
    if way == "segments":
        parts = [keras.remat(chain(hidden[i : i + 6])) for i in range(0, DEPTH, 6)]
    head.build((None, WIDTH))
    x, y = tf.random.normal((batch, WIDTH)), tf.random.normal((batch, CLASSES))
    step = gradient_step(parts, head, [*model.trainable_variables, *head.trainable_variables])
    errors = {}
    for name, run_step in (("eager", step), ("graph", tf.function(step))):
        try:
            with lab.phase(name):
                run_step(x, y)
        except ValueError as error:
            errors[name] = re.search(".*custom_gradient.*|$", str(error))[0].strip("\x1b[01m ")
    return errors


ways = {
    way: lab.measure(keras_way, way, BATCH, label=f"Keras, {way}")
    for way in ("segments", "full", "activations")
}
rises = {
    way: {p.name: p.rise_mib for p in arm.phases if p.name not in arm.value}
    for way, arm in ways.items()
}
for way, arm in ways.items():
    for step, error in arm.value.items():
        print(f"{way} in a {step}: ValueError: {error}")
mib = pd.DataFrame({"neither": {"eager": eager[0], "graph": graph[0]}, **rises}).T.round(0)
mib.astype(object).fillna("unavailable")

# %% [markdown]
# "segments" is `keras.remat` around six layers at a time. `RematScope("full")` wraps every layer *and* the model around
# them: both useless ways at once. Where a line says `ValueError`, it cannot be traced into a graph at all, which means
# no `fit`. `RematScope("activations")` wraps each relu: to
# compute relu again, its *input* must be kept, and the next layer needs its output anyway, so two are kept for one.
#
# ### When each layer alone is worth it
#
# That turns where a layer keeps more than its output. `gelu` is computed in several steps, and each keeps something.

# %%
gelu = by_segments(lab.measure(sweep, "gelu", [0, 6, 18, DEPTH], BATCH, False, 1, label="gelu"))
gelu_mib = gelu["MiB"].median()
kept = (gelu_mib[0] / one - 2) / DEPTH
print(gelu_mib.rename(index={0: "none"}).round(1).to_string())
alone = gelu_mib[DEPTH] / gelu_mib[0]
print(f"a gelu layer keeps {kept:.1f} activations; each alone needs {alone:.2f} × the plain step")
assert alone < 0.5, "each layer alone should gain where it keeps several"

# %% [markdown]
# The rule for any model: with `c` activations kept a layer, `k + c·n/k` is smallest at `k = √(c·n)`. And recomputation
# saves activations only: where weights, gradients and slots fill the memory, there is nothing to save. Find both points.


# %%
def gain(depth=DEPTH, kept_per_layer=1.0, weights_and_slots=10):
    counts = [k for k in range(1, depth + 1) if depth % k == 0]
    plain = (kept_per_layer * depth + 2) * one + weights_and_slots
    best = min(predicted_segments(k, depth, kept_per_layer) for k in counts) + weights_and_slots
    print(f"plain {plain:.1f} MiB, best {best:.1f}: {plain / best:.1f} × smaller (predicted)")


sliders = {"depth": (4, 144, 4), "kept_per_layer": (1.0, 8.0, 0.5)}
lab.explore(gain, **sliders, weights_and_slots=(0, 2000, 50))

# %% [markdown]
# ### What it silently breaks
#
# A segment runs twice. Whatever draws a random number or changes a variable in the forward pass does so twice: dropout
# draws a *second mask*, and the gradient then belongs to a network that never made the prediction.


# %%
def twice(batch=64):
    x = tf.ones((batch, WIDTH))
    norm = keras.layers.BatchNormalization(momentum=0.5)
    norm.build((None, WIDTH))
    drop = keras.layers.Dropout(0.5)

    def same_mask(function):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return float(tf.reduce_mean(tf.cast((y != 0) == (tape.gradient(y, x) != 0), tf.float32)))

    def moved(function):
        norm.moving_mean.assign(tf.zeros(WIDTH))
        with tf.GradientTape() as tape:
            y = function(x)
        tape.gradient(y, norm.trainable_variables)
        return float(norm.moving_mean[0])

    dropout, batch_norm = lambda x: drop(x, training=True), lambda x: norm(x, training=True)
    masks = [same_mask(function) for function in (dropout, tf.recompute_grad(dropout))]
    return masks, [moved(function) for function in (batch_norm, tf.recompute_grad(batch_norm))]


masks, means = lab.measure(twice, label="state inside a segment").value
found = {
    "dropout: share where output and gradient agree": masks,
    "moving mean after a step from 0 towards 1": means,
}
pd.DataFrame(found, index=["plain", "recomputed"]).T.round(2)

# %% [markdown]
# Keep such layers between the segments, or hand dropout a fixed seed (exercise 2).
#
# ## Verdict

# %%
lab.verdict(
    "C13",
    "fails",
    published=unbounded.peak_mib,
    keras=keras_step.peak_mib,
    segments=fix.peak_mib,
    products=products,
    ordinary_products=3 * layers - 1,
    products_in_segments=with_segments,
)

# %%
lab.verdict(
    "C56",
    "partly",
    plain=eager[0],
    segments=rises["segments"]["eager"],
    scope=rises["full"]["eager"],
    scope_traced="graph" not in ways["full"].value,
)

# %% [markdown]
# ## Exercises
#
# **1.** Predict for gelu. Use `kept`, measured above, to find the number of segments out of `COUNTS` for which the
# predicted peak is smallest. Your number is then run.


# %%
def best_segments(depth, kept_per_layer):
    # BEGIN SOLUTION
    return min(COUNTS, key=lambda k: predicted_segments(k, depth, kept_per_layer))
    # END SOLUTION


# %%
def peak_of(k):
    arm = lab.measure(sweep, "gelu", [k], BATCH, False, 1, label="gelu")
    return by_segments(arm)["MiB"].median()[k]


check.best_segments(best_segments, COUNTS, predicted_segments, DEPTH, kept, peak_of)


# %% tags=["right"]
def best_segments(depth, kept_per_layer):
    ideal = (kept_per_layer * depth) ** 0.5
    near = sorted(COUNTS, key=lambda k: abs(k - ideal))[:2]
    peaks = {k: k + kept_per_layer * depth / k for k in near}
    return min(peaks, key=peaks.get)


# %% tags=["right"]
def best_segments(depth, kept_per_layer):
    peaks = pd.Series({float(k): predicted_segments(k, depth, kept_per_layer) for k in COUNTS})
    return peaks.idxmin()


# %% tags=["wrong"]
# says: does your answer use what it is given
def best_segments(depth, kept_per_layer):
    return 9


# %% tags=["wrong"]
# says: another number needs
def best_segments(depth, kept_per_layer):
    return min(COUNTS, key=lambda k: abs(k - depth**0.5))


# %% tags=["wrong"]
# says: is none of
def best_segments(depth, kept_per_layer):
    return round((kept_per_layer * depth) ** 0.5) + 1


# %% [markdown]
# **2.** Dropout that may be recomputed. Write a function of `x` **and a seed** that drops half of `x`, always the same
# half for the same seed, eagerly and in a graph. The caller draws a new seed each step, outside the segment.


# %%
def seeded_dropout(x, seed):
    # BEGIN SOLUTION
    return tf.nn.experimental.stateless_dropout(x, rate=0.5, seed=seed)
    # END SOLUTION


# %%
check.seeded_dropout(seeded_dropout, WIDTH)


# %% tags=["right"]
def seeded_dropout(x, seed):
    return tf.where(tf.random.stateless_uniform(tf.shape(x), seed) < 0.5, 0.0, 2 * x)


# %% tags=["wrong"]
# says: in a graph
def seeded_dropout(x, seed):
    tf.random.set_seed(int(seed[0]) + 1000 * int(seed[1]))
    return tf.nn.dropout(x, rate=0.5)


# %% tags=["wrong"]
# says: drawn anew
def seeded_dropout(x, seed):
    return tf.nn.dropout(x, rate=0.5)


# %% tags=["wrong"]
# says: two seeds give the same mask
def seeded_dropout(x, seed):
    return tf.nn.experimental.stateless_dropout(x, rate=0.5, seed=[1, 2])


# %% tags=["wrong"]
# says: not half
def seeded_dropout(x, seed):
    return tf.nn.experimental.stateless_dropout(x, rate=0.2, seed=seed)
