# %% [markdown]
# # 05 · What a batch costs: a line, and its floor
#
# **Symptom:** *"ResourceExhaustedError: OOM when allocating tensor with shape[16384,512]"* in the first training step,
# and the answer everywhere: *"try a smaller batch size"*, or *"slice the data into mini-batches"*.
#
# **Afterwards you can** write the memory of a training step as a line over the batch size, read its slope and its
# intercept from the model's shapes, and say what a smaller batch does *not* free: the floor, and the data.
#
# | | |
# |---|---|
# | Time | about 1 minute to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C05, C07 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes layers of twice the width
GUESS_MIB = 0.0  # a starting value for the guesses below

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import batch_size as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

ROWS, FEATURES, BATCH, EPOCHS = 16384, 256, 256, 2
WIDTH = lab.choose(SCALE, quick=512, full=1024)
BUDGET_MIB = lab.choose(SCALE, quick=96, full=256)
BUDGET = f"{BUDGET_MIB} MiB"
with np.load("../data/digits.npz") as digits:
    images, labels = digits["images"].astype("float32") / 16, digits["labels"].astype("int64")


def network(width=WIDTH, layers=4):
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
    return keras.Sequential([keras.Input((FEATURES,)), *hidden, keras.layers.Dense(1)])


def eager_step(model, optimizer):
    """The ordinary step of the published examples: a tape, one update."""
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return step


# %% [markdown]
# ## Predict
#
# A network of four wide layers, trained with Adam on 16,384 rows of 256 numbers, all of them in every step. One part
# first:

# %%
layer_guess = lab.guess(f"The outputs of one layer of {WIDTH} units for {ROWS:,} rows?", GUESS_MIB)

# %% [markdown]
# All four layers' outputs are kept until the backward pass has used them. That part grows with the batch; weights,
# gradients and Adam's two slots do not.

# %%
my_guess = lab.guess(f"Peak memory of one step over all {ROWS:,} rows?", GUESS_MIB)

# %%
one_row = lab.tensor_mib((FEATURES,)) + 4 * lab.tensor_mib((WIDTH,))
print(f"one layer: {ROWS:,} × {WIDTH} × 4 B = {lab.tensor_mib((ROWS, WIDTH)):.0f} MiB")
print(
    f"one row: {FEATURES} × 4 B of input + 4 × {WIDTH} × 4 B of outputs = "
    f"{one_row * 1024:.1f} KiB, × {ROWS:,} rows = {ROWS * one_row:.0f} MiB"
)
weights = lab.tensor_mib((network().count_params(),))
print(f"weights, Adam's two slots and gradients: 4 × {weights:.1f} MiB, not all at once")
predicted_full = lab.predict(network, ROWS, optimizer="adam", loss="mse")
print(predicted_full)

# %% [markdown]
# ## Failure
#
# Epochs in which the batch is all there is. (`NO_ONEDNN` leaves out oneDNN, Intel's library of fast layers for
# CPUs: where memory runs out inside one of them, TensorFlow 2.21 crashes in place of raising.)


# %%
def train(rows, batch, epochs, width=WIDTH, layers=4):
    keras.utils.set_random_seed(0)
    x = tf.constant(np.random.default_rng(0).standard_normal((rows, FEATURES), np.float32))
    y = tf.reduce_sum(x[:, :4], axis=1, keepdims=True) / 2
    step, updates = tf.function(eager_step(network(width, layers), keras.optimizers.Adam())), 0
    for _ in range(epochs):
        for start in range(0, rows, batch):
            step(x[start : start + batch], y[start : start + batch])
            updates += 1
    return f"updates: {updates}"


tight = {"budget": BUDGET, "env": lab.NO_ONEDNN}
failure = lab.run(train, ROWS, ROWS, EPOCHS, label="full batch", **tight)
lab.expect_oom(failure)

# %% [markdown]
# ## Advice, tested
#
# The advice is published with an example of its own size: 100 rows of 50 numbers through one `Dense(10)`. A
# full-batch step, repeated, is said to waste memory; a loop over slices of 32, once over the rows, cures it. The third
# arm is a control: slices of 32 over as many samples as the first arm saw.

# %%
REPEATS = 1000


def articles_example(batch, epochs):
    x = tf.random.stateless_normal((100, 50), seed=(1, 2))
    y = tf.matmul(x, tf.random.stateless_normal((50, 10), seed=(3, 4)))
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(10)])
    step, updates = tf.function(eager_step(model, keras.optimizers.Adam())), 0
    with lab.phase("steps"):
        for _ in range(epochs):
            for start in range(0, 100, batch):
                step(x[start : start + batch], y[start : start + batch])
                updates += 1
    loss = float(tf.reduce_mean((model(x) - y) ** 2))
    return {"updates": updates, "graphs": step.experimental_get_tracing_count(), "loss": loss}


tiny = {
    name: lab.measure(articles_example, *how, label=name)
    for name, how in {
        "full batch": (100, REPEATS),
        "slices of 32, once": (32, 1),
        "slices of 32, as many samples": (32, REPEATS),
    }.items()
}
table = pd.DataFrame({name: arm.value for name, arm in tiny.items()}).T
table.insert(0, "tensors, peak KiB", [1024 * arm.phase("steps").peak_mib for arm in tiny.values()])
table.insert(1, "process, peak MiB", [arm.process_peak_mib for arm in tiny.values()])
table.round(2)

# %%
tiny_full, tiny_once, tiny_control = table.to_dict("records")
lab.note(
    f"Tensors: {tiny_full['tensors, peak KiB']:.1f} KiB with the full batch, "
    f"{tiny_once['tensors, peak KiB']:.1f} with slices, and with slices of as many samples "
    f"{tiny_control['tensors, peak KiB']:.1f}: of many steps one is higher. Process: "
    f"{tiny_full['process, peak MiB']:.1f} MiB, and {tiny_once['process, peak MiB']:.1f} with "
    "slices, of which the last has 4 rows: for it the function is built a second time. And the "
    f"cure changed the training: {tiny_once['updates']:,.0f} updates in place of "
    f"{tiny_full['updates']:,.0f}, and a loss of {tiny_once['loss']:.2f} in place of "
    f"{tiny_full['loss']:.2f}. Over as many samples it is {tiny_control['loss']:.2f}."
)

# %% [markdown]
# ## Fix
#
# The same advice where the rows outweigh the model: epochs and budget of the failure, in slices. Here, too, it changes
# the training: an update for each slice.

# %%
fix = lab.run(train, ROWS, BATCH, EPOCHS, label=f"slices of {BATCH}", **tight)
lab.expect_finished(fix)

# %% [markdown]
# What the full batch would have needed, in an epoch of its one update:

# %%
label = "full batch, no tight budget"
unbounded = lab.measure(train, ROWS, ROWS, 1, label=label, env=lab.NO_ONEDNN)

# %% [markdown]
# ## Side by side

# %%
lab.compare(unbounded, failure, fix)

# %% [markdown]
# Who held it? Both run once more, while TensorFlow records every allocation; the one that died, with room enough, is seen
# where it first wanted more than its budget. *Activations* are outputs of layers that wait for the way back.

# %%
lab.take_apart(failure, fix)

# %%
data_mib = lab.tensor_mib((ROWS, FEATURES))
predicted_mini = lab.predict(network, BATCH, optimizer="adam", loss="mse")
lab.predicted_vs_measured(
    full_batch_at_most=(predicted_full.total_mib, unbounded.peak_mib),
    full_batch_at_least=(predicted_full.lowest_mib, unbounded.peak_mib),
    slices_and_the_data_they_are_cut_from=(predicted_mini.total_mib + data_mib, fix.peak_mib),
)

# %%
lab.note(
    "A CPU runs the operations of a graph side by side, in an order that is not the same every "
    f"time. The prediction tries several: {predicted_full.lowest_mib:.0f} to "
    f"{predicted_full.total_mib:.0f} MiB. "
    f"What is between them are the outputs of one layer for all rows, "
    f"{lab.tensor_mib((ROWS, WIDTH)):.0f} MiB, alive a moment longer or not."
)
# The failure asked for room for the outputs of one more layer.
print("One layer:", layer_guess.against(failure.wanted_mib))
print("The whole step:", my_guess.against(unbounded.peak_mib))

# %% [markdown]
# ## Explain
#
# ### A line, and its floor
#
# Two steps at each size, with two optimizers. They run *eagerly*: one operation after the other, so that each peaks
# at the same place every time. Inside a `tf.function` the same step is a graph, and a CPU runs operations of it side by
# side as its threads are free: the grey bars are the lowest and the highest peak of eight such steps with Adam.

# %%
SIZES, GRAPH_SIZES = [16, 64, 256, 512, 1024, 2048, 4096], [1024, 2048, 4096]
OPTIMIZERS = ["sgd", "adam"]


def steps_of_each(sizes, optimizer, graph):
    step = eager_step(network(), keras.optimizers.get(optimizer))
    step = tf.function(step) if graph else step
    for batch in sizes:
        for _ in range(8 if graph else 2):
            with lab.phase(str(batch)):
                step(tf.zeros((batch, FEATURES)), tf.zeros((batch, 1)))


def peaks(sizes, optimizer, graph=False):
    """{size: the peaks of its steps, MiB}"""
    how = f"{optimizer}, {'graph' if graph else 'eager'}"
    arm = lab.measure(steps_of_each, sizes, optimizer, graph, label=how, env=lab.NO_ONEDNN)
    return {n: [step.peak_mib for step in arm.phases if step.name == str(n)] for n in sizes}


measured = {name: [max(found) for found in peaks(SIZES, name).values()] for name in OPTIMIZERS}
graph_low, graph_high = np.transpose(
    [(min(found), max(found)) for found in peaks(GRAPH_SIZES, "adam", graph=True).values()]
)

# %%
by_batch, fits = pd.DataFrame(index=pd.Index(SIZES, name="batch")), {}
_, axes = plt.subplots(figsize=(10, 4))
for name, marker, colour in zip(OPTIMIZERS, "os", lab.COLOURS):
    line = lab.predict(network, SIZES, optimizer=name, loss="mse", eager=True).line
    predicted = [level / 2**20 for level in line.values()]
    by_batch[f"{name} predicted"], by_batch[f"{name} measured"] = predicted, measured[name]
    # The line through those sizes at which the activations outweigh the update:
    fits[name] = np.polyfit(SIZES[-3:], measured[name][-3:], 1)
    axes.plot(SIZES, predicted, color=colour, label=f"{name}: predicted, eager")
    axes.plot(SIZES, measured[name], marker, color=colour, label=f"{name}: measured, eager")
bars = {"ls": "", "marker": "_", "color": lab.COLOURS[2], "elinewidth": 3, "capsize": 6}
middle, half = (graph_low + graph_high) / 2, (graph_high - graph_low) / 2
axes.errorbar(GRAPH_SIZES, middle, half, label="adam: measured, graph, eight steps", **bars)
axes.set(xlabel="batch size (rows)", ylabel="peak of one step (MiB)", title="A line with a floor")
axes.set_ylim(0)
lab.legend_below(axes)
plt.show()
by_batch.round(1)

# %%
# One more row: its input, its four outputs, and on the way back two gradients of an output.
slope_kib = (one_row + 2 * lab.tensor_mib((WIDTH,))) * 1024
for name, slots in (("sgd", 0), ("adam", 2)):
    slope, intercept = fits[name]
    print(
        f"{name}: slope {slope * 1024:.2f} KiB a row (predicted {slope_kib:.2f}), "
        f"intercept {intercept:.1f} MiB (weights and {slots} slots: {(1 + slots) * weights:.1f})"
    )
    assert abs(slope * 1024 - slope_kib) < 0.15 * slope_kib
floor = by_batch["adam measured"].iloc[0]
lab.note(
    f"With Adam {SIZES[0]} rows need {floor:.1f} MiB and {SIZES[2]} rows "
    f"{by_batch['adam measured'].loc[SIZES[2]]:.1f}: on the floor a smaller batch saves next to "
    f"nothing. Steps of a graph over {GRAPH_SIZES[-1]} rows peaked between {graph_low[-1]:.1f} and "
    f"{graph_high[-1]:.1f} MiB, eager ones at {by_batch['adam measured'].iloc[-1]:.1f}. A graph "
    "may need less, since it can compute one gradient in another's place, or more, since a "
    "CPU's threads run its operations side by side; none of these labs measured a GPU's."
)

# %% [markdown]
# * **Slope**: for each row its input, every layer's output, and gradients that are on their way back. Fewer rows cut only this.
# * **Intercept**: weights and optimizer state. Hardly any gradients: when the activations are at their most, the
#   backward pass has just begun.
# * **Floor**: at the left the peak falls no further. There it is in the update: weights, *all* gradients, optimizer state
#   and the update's own intermediates. If that does not fit, no batch size does.
#
# ### What slices do not free
#
# The fixed arm holds a batch of activations *and the whole data set*: slices are cut from a tensor that stays. Where
# the data outweigh the activations, that is nearly everything. One narrow layer, four times as many rows:

# %%
NARROW = 16
large_mib = lab.tensor_mib((4 * ROWS, FEATURES))


def narrow(batch):
    work = (train, 4 * ROWS, batch, 1, NARROW, 1)
    return lab.measure(*work, label=f"narrow, batch {batch}", env=lab.NO_ONEDNN)


heavy_full, heavy_slices = narrow(4 * ROWS), narrow(BATCH)
lab.note(
    f"The data have {large_mib:.0f} MiB. The full batch peaked at {heavy_full.peak_mib:.1f} MiB, "
    f"slices of {BATCH} at {heavy_slices.peak_mib:.1f}."
)

# %% [markdown]
# To keep only a batch, the data must not be in memory in the first place. The same narrow step, fed in three ways:


# %%
def three_sources(rows):
    import os
    import tempfile

    path = os.path.join(tempfile.mkdtemp(), "x.bin")
    np.random.default_rng(0).standard_normal((rows, FEATURES), np.float32).tofile(path)
    step, growth = eager_step(network(NARROW, 1), keras.optimizers.Adam()), {}

    def read(start):
        numbers = np.fromfile(path, np.float32, BATCH * FEATURES, offset=start * FEATURES * 4)
        return tf.constant(numbers.reshape(BATCH, FEATURES))

    def steps(name, fetch):
        with lab.phase(name):
            for start in range(0, 32 * BATCH, BATCH):
                step(fetch(start), tf.zeros((BATCH, 1)))
        growth[name] = lab.reading().process_mib

    steps("warm-up", lambda start: tf.zeros((BATCH, FEATURES)))
    steps("read from the file", read)
    array = np.fromfile(path, np.float32).reshape(rows, FEATURES)
    steps("slices of a NumPy array", lambda start: tf.constant(array[start : start + BATCH]))
    tensor = tf.constant(array)
    array = None
    steps("slices of a tensor", lambda start: tensor[start : start + BATCH])
    return growth


sources = lab.measure(three_sources, 4 * ROWS, label="three sources")
warm, *parts = sources.phases
process = pd.Series(sources.value)
pd.DataFrame(
    {
        "tensors, peak MiB": {part.name: part.peak_mib for part in parts},
        "process over the warmed-up one, MiB": process.drop("warm-up") - process["warm-up"],
    }
).round(1)

# %% [markdown]
# The array is invisible to TensorFlow's counter, but not to the process. Reading keeps a batch in both: lab 02.
#
# ### When it flips
#
# Find the number of rows from which the full batch matters, and switch the optimizer to see what stays. All predicted,
# from the slopes, intercepts and floors measured above; the data are not in it.


# %%
def full_against_slices(rows=1024, batch=256, optimizer="adam"):
    (slope, intercept), floor = fits[optimizer], measured[optimizer][0]
    full, mini = (max(floor, slope * n + intercept) for n in (rows, min(batch, rows)))
    print(f"full {full:.1f} MiB, slices {mini:.1f} MiB: {full / mini:.1f} × (predicted)")


sizes = {"rows": (100, 20000, 100), "batch": (16, 4096, 16)}
lab.explore(full_against_slices, **sizes, optimizer=OPTIMIZERS[::-1])

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C05",
    "fails",
    full_kib=tiny_full["tensors, peak KiB"],
    slices_kib=tiny_once["tensors, peak KiB"],
    full_process_mib=tiny_full["process, peak MiB"],
    slices_process_mib=tiny_once["process, peak MiB"],
)

# %%
lab.verdict(
    "C07",
    "partly",
    full=unbounded.peak_mib,
    slices=fix.peak_mib,
    full_where_data_outweigh=heavy_full.peak_mib,
    slices_where_data_outweigh=heavy_slices.peak_mib,
)

# %% [markdown]
# ## Exercises
#
# **1.** Training with small batches works, and then the evaluation dies: it sends the whole split through the network
# at once. Write the evaluation in chunks of 64 images, so that it gives the same accuracy.


# %%
def evaluate_at_once(model, images, labels):
    return float(np.mean(tf.argmax(model(images), axis=1).numpy() == labels))


# %%
def evaluate_in_chunks(model, images, labels):
    # BEGIN SOLUTION
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    for start in range(0, len(images), 64):
        accuracy.update_state(labels[start : start + 64], model(images[start : start + 64]))
    return float(accuracy.result())
    # END SOLUTION


# %%
check.evaluated(evaluate_in_chunks, evaluate_at_once, images, labels)


# %% tags=["right"]
def evaluate_in_chunks(model, images, labels):
    right = 0
    for start in range(0, len(images), 64):
        scores = model(images[start : start + 64]).numpy()
        right += (scores.argmax(axis=-1) == labels[start : start + 64]).sum()
    return right / len(images)


# %% tags=["right"]
def evaluate_in_chunks(model, images, labels):
    scores = model.predict(images, batch_size=64, verbose=0)
    return tf.reduce_mean(tf.cast(tf.argmax(scores, axis=1) == labels, tf.float32))


# %% tags=["wrong"]
# says: between 0 and 1
def evaluate_in_chunks(model, images, labels):
    right = 0
    for start in range(0, len(images), 64):
        scores = model(images[start : start + 64]).numpy()
        right += (scores.argmax(axis=-1) == labels[start : start + 64]).sum()
    return right


# %% tags=["wrong"]
# says: shorter chunk
def evaluate_in_chunks(model, images, labels):
    parts = [slice(start, start + 64) for start in range(0, len(images), 64)]
    return float(np.mean([evaluate_at_once(model, images[part], labels[part]) for part in parts]))


# %% tags=["wrong"]
# says: more than a chunk
def evaluate_in_chunks(model, images, labels):
    scores = model(images)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    for start in range(0, len(images), 64):
        accuracy.update_state(labels[start : start + 64], scores[start : start + 64])
    return float(accuracy.result())


# %% tags=["wrong"]
# says: a part of the images
def evaluate_in_chunks(model, images, labels):
    return evaluate_at_once(model, images[:64], labels[:64])


# %% [markdown]
# **2.** Slices keep the data set. Write a generator that reads the rows, float32 and 256 numbers each, from a file
# without keeping them: batches of `size` rows in the order of the file, the last one as short as it is.


# %%
def batches(path, size):
    # BEGIN SOLUTION
    row = FEATURES * 4
    with open(path, "rb") as file:
        while numbers := file.read(size * row):
            yield np.frombuffer(numbers, np.float32).reshape(-1, FEATURES)
    # END SOLUTION


# %%
check.read_in_batches(batches)


# %% tags=["right"]
def batches(path, size):
    rows = tf.data.FixedLengthRecordDataset(path, FEATURES * 4)
    return iter(rows.map(lambda row: tf.io.decode_raw(row, tf.float32)).batch(size))


# %% tags=["right"]
def batches(path, size):
    rows = np.memmap(path, np.float32, "r").reshape(-1, FEATURES)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


# %% tags=["right"]
def batches(path, size):
    buffer = np.empty((size, FEATURES), np.float32)  # one, for all batches
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[: count // (FEATURES * 4)]


# %% tags=["wrong"]
# says: stays in memory
def batches(path, size):
    rows = np.fromfile(path, np.float32).reshape(-1, FEATURES)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


# %% tags=["wrong"]
# says: times the file
def batches(path, size):
    start = 0
    while len(rows := np.fromfile(path, np.float32).reshape(-1, FEATURES)[start : start + size]):
        yield rows.copy()
        start += size


# %% tags=["wrong"]
# says: rows came
def batches(path, size):
    import os

    for start in range(0, os.path.getsize(path) // (FEATURES * 4) // size * size, size):
        numbers = np.fromfile(path, np.float32, size * FEATURES, offset=start * FEATURES * 4)
        yield numbers.reshape(size, FEATURES)


# %% tags=["wrong"]
# says: batch 2
def batches(path, size):
    import os

    for start in range(0, os.path.getsize(path) // (FEATURES * 4), size):
        yield np.fromfile(path, np.float32, size * FEATURES, offset=start).reshape(-1, FEATURES)


# %% [markdown]
# **3.** The evaluation runs in chunks, and still its memory grows to the end: it keeps every hidden output until a
# figure is worked out from all of them. Give the same mean activation of the 64 channels from chunks that are reduced
# at once.


# %%
def channel_means_of_all(model, images, labels):
    hidden = keras.Model(model.inputs, model.layers[1].output)
    outputs = [hidden(images[start : start + 64]) for start in range(0, len(images), 64)]
    return tf.reduce_mean(tf.concat(outputs, axis=0), axis=(0, 1, 2)).numpy()


# %%
def channel_means(model, images, labels):
    hidden = keras.Model(model.inputs, model.layers[1].output)
    # BEGIN SOLUTION
    total = np.zeros(64)
    for start in range(0, len(images), 64):
        total += tf.reduce_sum(hidden(images[start : start + 64]), axis=(0, 1, 2)).numpy()
    return total / (len(images) * 8 * 8)
    # END SOLUTION


# %%
check.reduced_at_once(channel_means, channel_means_of_all, images, labels)


# %% tags=["right"]
def channel_means(model, images, labels):
    hidden = keras.Model(model.inputs, model.layers[1].output)
    total = 0
    for start in range(0, len(images), 64):
        part = images[start : start + 64]
        total = total + len(part) / len(images) * tf.reduce_mean(hidden(part), axis=(0, 1, 2))
    return total


# %% tags=["wrong"]
# says: times as large
def channel_means(model, images, labels):
    hidden = keras.Model(model.inputs, model.layers[1].output)
    total = 0.0
    for start in range(0, len(images), 64):
        total += tf.reduce_sum(hidden(images[start : start + 64]), axis=(0, 1, 2))
    return total / len(images)


# %% tags=["wrong"]
# says: shorter chunk
def channel_means(model, images, labels):
    hidden = keras.Model(model.inputs, model.layers[1].output)
    parts = [images[start : start + 64] for start in range(0, len(images), 64)]
    return np.mean([tf.reduce_mean(hidden(part), axis=(0, 1, 2)) for part in parts], axis=0)


# %% tags=["wrong"]
# says: still kept
def channel_means(model, images, labels):
    hidden = keras.Model(model.inputs, model.layers[1].output)
    outputs = [hidden(images[start : start + 64]) for start in range(0, len(images), 64)]
    return sum(tf.reduce_sum(part, axis=(0, 1, 2)) for part in outputs) / (len(images) * 64)


# %% tags=["wrong"]
# says: shape
def channel_means(model, images, labels):
    hidden = keras.Model(model.inputs, model.layers[1].output)
    parts = [hidden(images[start : start + 64]) for start in range(0, len(images), 64)]
    return np.mean([float(tf.reduce_mean(part)) for part in parts])
