# %% [markdown]
# # 04 · Full batch against mini-batch, and finding the largest batch
#
# **Symptom:** *"ResourceExhaustedError: OOM when allocating tensor with shape[16384,512]"* in the first training step,
# and the answer everywhere: *"try a smaller batch size"* – without a word on how small.
#
# **Afterwards you can** write the memory of a training step as a line over the batch size, read its slope and its
# intercept from the model's shapes, find the largest batch for a budget from two small measurements, and say what a
# smaller batch does *not* free.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 35 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C05, C06, C07, C25 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes layers of twice the width
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from labsupport import (
    choose, compare, exercise, expect_oom, explore, guess, load_tensorflow, phase, predict_step, predicted_vs_measured, reading, run,
    tensor_mib, verdict,
)  # fmt: skip
from labsupport.showing.palette import COLOURS

tf = load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

ROWS, FEATURES, BATCH, EPOCHS = 16384, 256, 256, 2
WIDTH = choose(SCALE, quick=512, full=1024)
BUDGET_MIB = choose(SCALE, quick=96, full=256)
BUDGET = f"{BUDGET_MIB} MiB"
# Where memory runs out inside a fused oneDNN layer, TensorFlow 2.21 crashes in place of raising. These arms use
# TensorFlow's own kernels.
KERNELS = {"TF_ENABLE_ONEDNN_OPTS": "0"}
REPEATS = 1000  # of the published example
with np.load("../data/digits.npz") as digits:
    images, labels = digits["images"].astype("float32") / 16, digits["labels"].astype("int64")


def network():
    return keras.Sequential(
        [keras.Input((FEATURES,)), *[keras.layers.Dense(WIDTH, activation="relu") for _ in range(4)], keras.layers.Dense(1)]
    )


def training_step(model, optimizer):
    """The ordinary step of the published examples: a tape, gradients, one update, inside a tf.function."""
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    return step


# %% [markdown]
# ## Predict
#
# A network of four wide layers, trained with Adam on 16,384 rows of 256 numbers, all of them in every step.

# %%
my_guess = guess(f"Peak memory of one step over all {ROWS:,} rows?", GUESS_MIB)

# %% [markdown]
# The arithmetic. One row leaves one output per layer behind, and all of them are kept until the backward pass has used
# them. That part grows with the batch; weights, gradients and Adam's two slots do not.

# %%
one_row = tensor_mib((FEATURES,)) + 4 * tensor_mib((WIDTH,))
print(f"one row: {FEATURES} × 4 B of input + 4 × {WIDTH} × 4 B of outputs = {one_row * 1024:.1f} KiB, × {ROWS:,} rows = {ROWS * one_row:.0f} MiB")

# %%
predicted_full = predict_step(network(), ROWS, "adam")
predicted_full

# %% [markdown]
# The same for the published example: 100 rows of 50 numbers through one `Dense(10)`.

# %%
small = keras.Sequential([keras.Input((50,)), keras.layers.Dense(10)])
print(f"its full batch: {predict_step(small, 100, 'adam').total_mib * 1024:.0f} KiB, with batches of 32: {predict_step(small, 32, 'adam').total_mib * 1024:.0f} KiB (predicted)")

# %% [markdown]
# ## Failure
#
# **At the article's own size** it says: a full-batch step, repeated 1,000 times, wastes memory; a loop over slices of 32
# cures it. All three arms of the next run are in one process; the third is a comparison the article does not make:
# batches of 32 over *as many samples* as the first arm saw.

# %%
def articles_example(repeats):
    import psutil

    x = tf.random.stateless_normal((100, 50), seed=(1, 2))
    y = tf.matmul(x, tf.random.stateless_normal((50, 10), seed=(3, 4)))
    rows = []
    for name, batch, epochs in (("full batch", 100, repeats), ("batches of 32", 32, 1), ("batches of 32, as many samples", 32, repeats)):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(10)])
        step = training_step(model, keras.optimizers.Adam())
        before, updates = reading().tensors_mib, 0
        with phase(name):
            for _ in range(epochs):
                for start in range(0, 100, batch):
                    step(x[start : start + batch], y[start : start + batch])
                    updates += 1
        loss = float(tf.reduce_mean((model(x) - y) ** 2))
        rows.append({"arm": name, "before": before, "updates": updates, "loss": loss, "traces": step.experimental_get_tracing_count()})
    return rows, psutil.Process().memory_info().rss / 2**20


tiny = run(articles_example, REPEATS, label="the article's example", quiet=True).need()
tiny_rows, process_mib = tiny.value
own_kib = [None if row["before"] is None else part.peak / 1024 - row["before"] * 1024 for row, part in zip(tiny_rows, tiny.phases)]
table = pd.DataFrame(tiny_rows).set_index("arm").drop(columns="before")
table.insert(0, "peak of the steps, KiB", own_kib)
print(f"the whole process, TensorFlow included: {process_mib:,.0f} MiB")
table.round(2)

# %% [markdown]
# Nothing to see: some KiB either way, in a process ten thousand times that size. But look at the other columns.
# The cure also changed the training: 4 updates in place of 1,000, so the loss is that of a model which has hardly
# started. Over as many samples, batches of 32 make 4,000 updates and end lower. And the last slice has 4 rows, not 32:
# a second trace of the function.
#
# **At a size where it matters**, under a budget. The arm trains for the same number of epochs whatever the batch, so
# that every arm sees the same samples.

# %%
def train(batch):
    keras.utils.set_random_seed(0)
    x = tf.constant(np.random.default_rng(0).standard_normal((ROWS, FEATURES), np.float32))
    y = tf.reduce_sum(x[:, :4], axis=1, keepdims=True) / 2
    step, updates = training_step(network(), keras.optimizers.Adam()), 0
    for epoch in range(EPOCHS):
        with phase(f"epoch {epoch + 1}"):
            for start in range(0, ROWS, batch):
                loss = step(x[start : start + batch], y[start : start + batch])
                updates += 1
    return f"{updates} updates, loss {float(loss):.3f}"


failure = run(train, ROWS, budget=BUDGET, label="full batch", env=KERNELS)
expect_oom(failure);

# %% [markdown]
# ## Fix
#
# The article's fix, the same function with slices of 256:

# %%
fix = run(train, BATCH, budget=BUDGET, label=f"batches of {BATCH}", env=KERNELS)
fix.need();

# %% [markdown]
# What the full batch would have needed:

# %%
unbounded = run(train, ROWS, label="full batch, no tight budget", quiet=True, env=KERNELS)
unbounded.need();

# %% [markdown]
# ## Side by side

# %%
compare(unbounded, failure, fix)

# %% [markdown]
# Same samples, same epochs; the loss in the last column is that of each arm's last batch.
#
# The measured peak is that of the unluckiest step: a graph runs operations side by side, and where two gradients are alive
# together it needs one layer's output more than the prediction.

# %%
data_mib = tensor_mib((ROWS, FEATURES))
predicted_mini = predict_step(network(), BATCH, "adam")
predicted_vs_measured(
    full_batch=(predicted_full.total_mib, unbounded.peak_mib),
    mini_batch_and_the_resident_data=(predicted_mini.total_mib + data_mib, fix.peak_mib),
)

# %%
print(my_guess.against(unbounded.peak_mib))

# %% [markdown]
# ## Explain
#
# ### What slices do not free
#
# The fixed arm holds a batch of activations *and the whole data set*: slices are cut from a tensor that stays. The
# next run takes the same steps from a data set four times as large: read batch by batch from a file, sliced from a
# NumPy array, and sliced from a tensor.

# %%
def three_sources(rows):
    import os
    import tempfile

    path = os.path.join(tempfile.mkdtemp(), "x.bin")
    rng = np.random.default_rng(0)
    with open(path, "wb") as file:
        for _ in range(rows // 4096):
            rng.standard_normal((4096, FEATURES), np.float32).tofile(file)
    step, growth = training_step(network(), keras.optimizers.Adam()), {}

    def steps(name, fetch):
        with phase(name):
            for start in range(0, 32 * BATCH, BATCH):
                step(fetch(start), tf.zeros((BATCH, 1)))
        growth[name] = reading().process_mib

    steps("warm-up", lambda start: tf.zeros((BATCH, FEATURES)))
    steps("read from the file", lambda start: tf.constant(np.fromfile(path, np.float32, BATCH * FEATURES, offset=start * FEATURES * 4).reshape(BATCH, FEATURES)))
    array = np.fromfile(path, np.float32).reshape(rows, FEATURES)
    steps("slices of a NumPy array", lambda start: tf.constant(array[start : start + BATCH]))
    tensor = tf.constant(array)
    del array
    steps("slices of a tensor", lambda start: tensor[start : start + BATCH])
    return growth


large_mib = tensor_mib((4 * ROWS, FEATURES))
sources = run(three_sources, 4 * ROWS, label="three sources", quiet=True).need()
warm, *parts = sources.phases
print(f"the data: {large_mib:.0f} MiB")
pd.DataFrame(
    {
        "source": [part.name for part in parts],
        "tensors, peak MiB": [None if part.peak is None else part.peak / 2**20 for part in parts],
        "process over the warmed-up one, MiB": [sources.value[part.name] - sources.value["warm-up"] for part in parts],
    }
).set_index("source").round(1)

# %% [markdown]
# The step costs the same from all three. The array is invisible to TensorFlow's counter but not to the process.
# To keep only a batch, the data must not be in memory in the first place: lab 02.
#
# ### Memory is a line over the batch size
#
# Three steps at each size, with two optimizers, in one process: the counter's peak is exact and does not mind warm pools.
# Point: the lowest of three peaks. Bar: up to the highest. A graph does not run its operations in the same order every
# time, and now and then two gradients that usually follow each other are alive together.

# %%
SIZES = [64, 256, 512, 1024, 2048, 4096]


def steps_of_each(sizes, optimizers):
    model = network()
    for name in optimizers:
        step = training_step(model, keras.optimizers.get(name))
        for batch in sizes:
            for _ in range(3):
                with phase(f"{name} {batch}"):
                    step(tf.zeros((batch, FEATURES)), tf.zeros((batch, 1)))


line = run(steps_of_each, SIZES, ["sgd", "adam"], label="steps of each size", quiet=True, env=KERNELS).need()
peaks = {name: np.sort([[p.peak / 2**20 for p in line.phases if p.name == f"{name} {batch}"] for batch in SIZES]) for name in ("sgd", "adam")}
measured = {name: peaks[name][:, 0] for name in peaks}
predicted = {name: [predict_step(network(), batch, name).total_mib for batch in SIZES] for name in ("sgd", "adam")}

figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
fits = {}
for name, colour, marker in (("adam", COLOURS[0], "o"), ("sgd", COLOURS[1], "s")):
    fits[name] = np.polyfit(SIZES[-3:], measured[name][-3:], 1)  # where activations outweigh the update
    axes.plot(SIZES, predicted[name], color=colour, lw=1.5, label=f"{name}: predicted from shapes")
    axes.errorbar(SIZES, measured[name], (0 * measured[name], peaks[name][:, 2] - measured[name]), fmt=marker, color=colour, capsize=3, label=f"{name}: measured")
    axes.plot(0, fits[name][1], marker, mfc="white", color=colour, label=f"{name}: intercept of the measured line")
axes.axhline(BUDGET_MIB, color="#7F0000", ls="--")
axes.annotate(f"budget {BUDGET}", (0, BUDGET_MIB), xytext=(4, 3), textcoords="offset points", color="#7F0000")
axes.set(xlabel="batch size (rows)", ylabel="peak of one step (MiB)", ylim=(0, 1.15 * BUDGET_MIB), title="A line with a floor")
figure.legend(frameon=False, fontsize=9, loc="outside right upper")
axes.grid(alpha=0.3)
plt.show()
pd.DataFrame({"batch": SIZES, **{f"{n} {k}": v for n in measured for k, v in (("predicted", predicted[n]), ("measured", measured[n]))}}).set_index("batch").round(1)

# %%
weights = predicted_full.parts["weights"]
# one more row: its input, its four outputs, and the gradient of one of them while it is passed back
slope_kib = (one_row + tensor_mib((WIDTH,))) * 1024
for name, slots in (("sgd", 0), ("adam", 2)):
    slope, intercept = fits[name]
    print(f"{name}: slope {slope * 1024:.2f} KiB a row (predicted {slope_kib:.2f}), intercept {intercept:.1f} MiB (weights and {slots} slots: {(1 + slots) * weights:.1f}, with every gradient: {(2 + slots) * weights:.1f})")

# %% [markdown]
# * **Slope**: input, every layer's output, and one gradient that is on its way back, a row. Fewer rows cut only this.
# * **Intercept**: weights, optimizer state and the first gradients. Not all gradients: when the activations are at
#   their most, the backward pass has just begun, and as it goes on it frees more than it makes.
# * **Floor**: at the left the points leave the line. There the peak is in the update: weights, *all* gradients,
#   optimizer state and the update's own intermediates. A smaller batch saves nothing there, and if that does not fit,
#   no batch size does.
#
# ### Finding the largest batch by trying
#
# Under the budget: double until it runs out of memory, catch the error, back off, try the middle. Two things matter.
# Catch only `ResourceExhaustedError`, and go on *outside* the `except` block: inside it, the error's traceback still
# holds the failed call and what that call holds.

# %%
START = 512


def find_by_trying(start):
    step, tries = training_step(network(), keras.optimizers.Adam()), []

    def fits(batch):
        with phase(f"try {batch}"):
            try:
                step(tf.zeros((batch, FEATURES)), tf.zeros((batch, 1)))
                ok = True
            except tf.errors.ResourceExhaustedError:
                ok = False
        tries.append((batch, ok))
        return ok

    fitting = start
    while fits(fitting):
        fitting *= 2
    too_large, fitting = fitting, fitting // 2
    while too_large - fitting > fitting // 2:  # to within half of what fits; finer costs more failures
        middle = (fitting + too_large) // 2
        if fits(middle):
            fitting = middle
        else:
            too_large = middle
    return fitting, tries


trying = run(find_by_trying, START, budget=BUDGET, label="find by trying", env=KERNELS)
tried, tries = trying.need().value
print(f"largest batch found: {tried}, after {len(tries)} tries, {sum(not ok for _, ok in tries)} of them out of memory: {tries}")

# %% [markdown]
# ### Predicting it from two small measurements
#
# Two points make a line, the line meets the budget, one try confirms. The function uses only TensorFlow's own counter,
# so it works in your own script on a GPU as it does here. It takes the worst of three steps at each size, and keeps a
# quarter of the batch as a margin: a batch that just fits once, as trying accepts it, dies later, in the step whose
# operations overlap differently (the bars above).

# %%
def find_by_prediction(budget_mib, first, second):
    device = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
    step, tries = training_step(network(), keras.optimizers.Adam()), []

    def peak(batch):
        tf.config.experimental.reset_memory_stats(device)
        for _ in range(3):
            step(tf.zeros((batch, FEATURES)), tf.zeros((batch, 1)))
        tries.append((batch, True))
        return tf.config.experimental.get_memory_info(device)["peak"] / 2**20

    low, high = peak(first), peak(second)
    slope = (high - low) / (second - first)
    if slope <= 0:
        raise ValueError("the two sizes are on the floor: measure with larger batches")
    limit = second + (budget_mib - high) / slope
    batch = int(0.75 * limit) // 64 * 64
    while True:
        try:
            return batch, tries, limit, peak(batch)
        except tf.errors.ResourceExhaustedError:
            tries.append((batch, False))
        batch = int(0.9 * batch) // 64 * 64


prediction = run(find_by_prediction, BUDGET_MIB, 1024, 3072, budget=BUDGET, label="find by prediction", env=KERNELS)
found, predicting, limit, found_peak = prediction.need().value
print(f"the line meets {BUDGET} at a batch of {limit:.0f}; {found} was tried and needs {found_peak:.1f} MiB; {len(predicting)} sizes tried, {sum(not ok for _, ok in predicting)} of them out of memory: {predicting}")

# %%
search = pd.DataFrame(
    {
        "batch found": [tried, found],
        "sizes tried": [len(tries), len(predicting)],
        "out of memory": [sum(not ok for _, ok in found) for found in (tries, predicting)],
        "seconds": [trying.seconds, prediction.seconds],
    },
    index=["by trying", "by prediction"],
)
assert len(predicting) < len(tries) and found > 0.6 * tried
search.round(1)

# %% [markdown]
# Each failure costs what the allocator waits for somebody to free memory, ten seconds, and it can leave the model
# half updated: some variables have taken the step, others have not. Restore the weights after a search. With
# `predict_step` the line needs no measurement at all – as long as every layer's rule is known.
#
# ### What a smaller batch does to training
#
# 1,408 handwritten digits, one hidden layer, plain SGD with one learning rate for all. Accuracy is on 384 others.

# %%
BATCHES, SAME_EPOCHS, SAME_UPDATES = [8, 32, 128, 1408], 10, 176


def on_digits(images, labels):
    import time

    x, y = images.reshape(-1, 64), labels
    table = {}
    for batch in BATCHES:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
        optimizer = keras.optimizers.SGD(0.1)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
            optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

        rng, points, in_steps = np.random.default_rng(0), [], 0.0
        epoch_updates = 1408 // batch
        updates = max(SAME_EPOCHS * epoch_updates, SAME_UPDATES)
        watched = {SAME_UPDATES, SAME_EPOCHS * epoch_updates, *np.unique(np.geomspace(1, updates, 25).astype(int))}
        for update in range(updates):
            if update % epoch_updates == 0:
                order = rng.permutation(1408)
            rows = order[update % epoch_updates * batch :][:batch]
            begin = time.perf_counter()
            step(x[rows], y[rows])
            in_steps += time.perf_counter() - begin if update else 0.0  # the first call also traces
            if update + 1 in watched:
                right = tf.argmax(model(x[1408:1792]), axis=1).numpy() == y[1408:1792]
                points.append((update + 1, (update + 1) / epoch_updates, float(right.mean())))
        table[batch] = {"points": points, "ms an epoch": 1000 * in_steps / (updates - 1) * epoch_updates}
    return table


training = run(on_digits, images, labels, label="digits", quiet=True).need().value

# %%
figure, (by_epoch, by_update) = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
for index, batch in enumerate(BATCHES):
    updates, epochs, accuracy = np.array(training[batch]["points"]).T
    for axes, along in ((by_epoch, epochs), (by_update, updates)):
        axes.plot(along, 100 * accuracy, ["-", "--", "-.", ":"][index], color=COLOURS[index], lw=2, label=f"batch {batch}" + (" (full)" if batch == 1408 else ""))
by_epoch.set(xlabel="epochs (samples seen / 1,408)", ylabel="accuracy (%)", xlim=(0, SAME_EPOCHS), title="per sample")
by_update.set(xlabel="updates", xlim=(1, SAME_UPDATES), title="per update")
by_epoch.legend(frameon=False)
for axes in (by_epoch, by_update):
    axes.grid(alpha=0.3)
plt.show()


def accuracy_at(batch, column, value):
    return min(training[batch]["points"], key=lambda point: abs(point[column] - value))[2]


pd.DataFrame(
    {
        f"accuracy after {SAME_EPOCHS} epochs": [accuracy_at(batch, 1, SAME_EPOCHS) for batch in BATCHES],
        f"accuracy after {SAME_UPDATES} updates": [accuracy_at(batch, 0, SAME_UPDATES) for batch in BATCHES],
        "ms an epoch": [training[batch]["ms an epoch"] for batch in BATCHES],
    },
    index=pd.Index(BATCHES, name="batch"),
).round(3)

# %% [markdown]
# The price of a small batch is time: every step has a fixed cost. In samples it is the *large* batch that pays, with
# fewer updates (a larger learning rate wins some of that back, up to a point).
#
# ### When it flips
#
# Find the number of rows from which the full batch matters, and the optimizer's share of what stays. All predicted,
# with the slopes and intercepts measured above; the floor is not in it.

# %%
def full_against_mini(rows=1024, batch=256, optimizer="adam", budget_mib=BUDGET_MIB):
    slope, intercept = fits[optimizer]
    full, mini = intercept + slope * rows, intercept + slope * min(batch, rows)
    print(f"full {full:7.1f} MiB   mini {mini:7.1f} MiB   full is {full / mini:.1f} × mini; largest batch in {budget_mib} MiB: {max(0, int((budget_mib - intercept) / slope)):,} rows (predicted)")


explore(full_against_mini, rows=(100, 20000, 100), batch=(16, 4096, 16), optimizer=["adam", "sgd"], budget_mib=(16, 512, 8))

# %% [markdown]
# ## Verdict

# %%
tiny_saving = None if None in own_kib else (own_kib[0] - own_kib[1]) / 1024
verdict(
    "C05",
    "partly",
    figures={"saving_at_its_own_size": tiny_saving, "whole_process": process_mib, "full": unbounded.peak_mib, "mini": fix.peak_mib,
             "full_died": failure.outcome == "OOM", "mini_finished": fix.ok},
    tests={
        "at the article's own size it saves at least 1 % of the process": "saving_at_its_own_size > 0.01 * whole_process",
        "at 16,384 rows and four wide layers it needs less than half, and fits where the full batch dies": "mini < 0.5 * full and full_died and mini_finished",
    },
    because="100 rows through ten units are a few KiB; only rows × layer widths that outweigh the weights are worth cutting. The cure also changes the number of updates.",
    flips="When the activations of all rows outweigh weights, gradients and optimizer state.",
)  # fmt: skip

# %%
verdict(
    "C06",
    "partly",
    figures={"smallest_batch": measured["sgd"][0], "largest_batch": measured["sgd"][-1],
             "ms_an_epoch_small": training[8]["ms an epoch"], "ms_an_epoch_full": training[1408]["ms an epoch"],
             "accuracy_small": accuracy_at(8, 1, SAME_EPOCHS), "accuracy_full": accuracy_at(1408, 1, SAME_EPOCHS)},
    tests={
        "memory falls with the batch": "smallest_batch < 0.5 * largest_batch",
        "an epoch takes longer": "ms_an_epoch_small > 1.5 * ms_an_epoch_full",
        "convergence suffers: after as many epochs the small batch is less accurate": "accuracy_small < accuracy_full",
    },
    because="Memory is a line over the batch with a floor of weights, gradients and optimizer state; speed is the price; per sample, small batches converged faster.",
    flips="Below the floor no batch size saves memory; counted in updates rather than samples, the large batch converges at least as well.",
    unit="MiB, ms, accuracy",
)  # fmt: skip

# %%
verdict(
    "C07",
    "partly",
    figures={"data": large_mib, "sliced_tensor": None if parts[2].peak is None else parts[2].peak / 2**20,
             "from_file": None if parts[0].peak is None else parts[0].peak / 2**20, "full": unbounded.peak_mib, "mini": fix.peak_mib},
    tests={
        "activations shrink with the slice": "mini < 0.5 * full",
        "the data set does not stay in memory": "sliced_tensor - from_file < 0.5 * data",
    },
    because="A slice is one more small tensor; the tensor or array that it is cut from stays whole.",
    flips="When batches are read from disk, or when the data set is small beside the activations.",
)  # fmt: skip

# %%
verdict(
    "C25",
    "holds",
    figures={"found_by_trying": tried, "oom_while_trying": sum(not ok for _, ok in tries), "tries": len(tries),
             "found_by_prediction": found, "tries_of_prediction": len(predicting), "line_meets_budget": limit},
    tests={
        "trying ends at a batch that fits, with a failure above it": "found_by_trying > 0 and oom_while_trying >= 1",
        "what it finds is at least half of what the budget allows by the measured line": "found_by_trying > 0.5 * line_meets_budget",
    },
    because="It works, at ten seconds a failure; a line through two small batches finds a like size in fewer tries and keeps a margin.",
    flips="Where steps differ in size (padded sequences, random shapes) the line must be drawn for the largest one.",
    unit="rows, tries",
)  # fmt: skip

# %% [markdown]
# ## Exercises
#
# **1.** Training with small batches works, and then the evaluation dies: it sends the whole split through the network
# at once. Write the evaluation in chunks of 64 images with a streaming metric, so that it gives the same accuracy.

# %%
def evaluate_at_once(model, images, labels):
    return float(np.mean(tf.argmax(model(images), axis=1).numpy() == labels))


def evaluate_in_chunks(model, images, labels):
    # BEGIN SOLUTION
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    for start in range(0, len(images), 64):
        accuracy.update_state(labels[start : start + 64], model(images[start : start + 64]))
    return float(accuracy.result())
    # END SOLUTION


def both(given, yours, images, labels):
    keras.utils.set_random_seed(0)
    body = [keras.layers.Conv2D(64, 3, padding="same", activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *body, keras.layers.Flatten(), keras.layers.Dense(10)])
    answers = []
    for name, function in (("given", given), ("yours", yours)):
        with phase(name):
            answers.append(function(model, images[..., None], labels))
    return answers


first = run(both, evaluate_at_once, evaluate_in_chunks, images, labels, label="evaluation", quiet=True)
with exercise(1, "Loop over range(0, len(images), 64); keras.metrics.SparseCategoricalAccuracy has update_state(labels, scores) and result()."):
    assert first.ok, str(first.error)
    whole, chunked = first.value
    assert chunked is not None, "evaluate_in_chunks() returns nothing yet: return the accuracy as a float."
    assert abs(whole - chunked) < 1e-3, f"accuracy {chunked:.4f} against {whole:.4f} at once: is the last, shorter chunk in?"
    at_once, yours = (part.peak for part in first.phases)
    assert yours < 0.3 * at_once, f"peak {yours / 2**20:.1f} MiB against {at_once / 2**20:.1f} at once: more than a chunk goes through."

# %% [markdown]
# **2.** Write the finder that most scripts need: start high, halve on out-of-memory, stop at 1. Any other error must
# get through – a wrong shape is no reason for a smaller batch. (It is graded with a stand-in for the step, so that no
# failure costs ten seconds.)

# %%
def halve_until_it_fits(step, batch):
    """The first of batch, batch / 2, … at which step(batch) does not run out of memory; 0 if none."""
    # BEGIN SOLUTION
    while batch >= 1:
        try:
            step(batch)
            return batch
        except tf.errors.ResourceExhaustedError:
            pass
        batch //= 2
    return 0
    # END SOLUTION


def step_up_to(largest):
    def step(batch):
        if batch > largest:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    return step


def broken_step(batch):
    raise tf.errors.InvalidArgumentError(None, None, "Matrix size-incompatible")


with exercise(2, "while batch >= 1: try step(batch) and return; except tf.errors.ResourceExhaustedError: pass; then batch //= 2."):
    answer = halve_until_it_fits(step_up_to(700), 4096)
    assert answer is not None, "halve_until_it_fits() returns nothing yet: return the batch that fits."
    assert answer == 512, f"from 4,096, with room for 700, it gives {answer}, not 512."
    assert halve_until_it_fits(step_up_to(0), 64) == 0, "where not even a batch of 1 fits it must return 0."
    try:
        halve_until_it_fits(broken_step, 64)
        surfaced = False
    except tf.errors.InvalidArgumentError:
        surfaced = True
    assert surfaced, "it swallowed an InvalidArgumentError: catch ResourceExhaustedError alone."

# %% [markdown]
# **3.** The evaluation runs in chunks, and still its memory grows to the end: it keeps every hidden output until a
# figure is worked out from all of them. Give the same mean activation of the 64 channels from chunks that are reduced
# at once.

# %%
def channel_means_of_all(model, images, labels):
    hidden = keras.Model(model.inputs, model.layers[1].output)
    outputs = [hidden(images[start : start + 64]) for start in range(0, len(images), 64)]
    return tf.reduce_mean(tf.concat(outputs, axis=0), axis=(0, 1, 2)).numpy()


def channel_means(model, images, labels):
    hidden = keras.Model(model.inputs, model.layers[1].output)
    # BEGIN SOLUTION
    total = np.zeros(64)
    for start in range(0, len(images), 64):
        total += tf.reduce_sum(hidden(images[start : start + 64]), axis=(0, 1, 2)).numpy()
    return total / (len(images) * 8 * 8)
    # END SOLUTION


third = run(both, channel_means_of_all, channel_means, images, labels, label="hidden outputs", quiet=True)
with exercise(3, "Add up tf.reduce_sum(hidden(chunk), axis=(0, 1, 2)).numpy(); divide by len(images) * 8 * 8 at the end."):
    assert third.ok, str(third.error)
    of_all, of_chunks = third.value
    assert of_chunks is not None, "channel_means() returns nothing yet: return 64 means."
    assert np.shape(of_chunks) == (64,), f"the shape is {np.shape(of_chunks)}, not (64,)."
    assert np.allclose(of_all, of_chunks, rtol=1e-3, atol=1e-5), "the means differ: sum the chunks and divide once, since the last chunk is shorter."
    kept, reduced = (part.peak for part in third.phases)
    assert reduced < 0.3 * kept, f"peak {reduced / 2**20:.1f} MiB against {kept / 2**20:.1f}: some chunks' outputs are still kept."
