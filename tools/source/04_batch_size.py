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

import labsupport as lab

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

ROWS, FEATURES, BATCH, EPOCHS = 16384, 256, 256, 2
WIDTH = lab.choose(SCALE, quick=512, full=1024)
BUDGET_MIB = lab.choose(SCALE, quick=96, full=256)
BUDGET = f"{BUDGET_MIB} MiB"
REPEATS = 1000  # of the published example
with np.load("../data/digits.npz") as digits:
    images, labels = digits["images"].astype("float32") / 16, digits["labels"].astype("int64")


def network():
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((FEATURES,)), *hidden, keras.layers.Dense(1)])


def training_step(model, optimizer):
    """The ordinary step of the published examples, inside a tf.function: a tape, one update."""
    optimizer.build(model.trainable_variables)

    @tf.function
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
# A network of four wide layers, trained with Adam on 16,384 rows of 256 numbers, all of them in every step.

# %%
my_guess = lab.guess(f"Peak memory of one step over all {ROWS:,} rows?", GUESS_MIB)

# %% [markdown]
# The arithmetic. One row leaves one output per layer behind, and all of them are kept until the backward pass has used
# them. That part grows with the batch; weights, gradients and Adam's two slots do not.

# %%
one_row = lab.tensor_mib((FEATURES,)) + 4 * lab.tensor_mib((WIDTH,))
print(
    f"one row: {FEATURES} × 4 B of input + 4 × {WIDTH} × 4 B of outputs = "
    f"{one_row * 1024:.1f} KiB, × {ROWS:,} rows = {ROWS * one_row:.0f} MiB"
)

# %%
predicted_full = lab.predict_step(network(), ROWS, "adam")
predicted_full

# %% [markdown]
# The same for the published example: 100 rows of 50 numbers through one `Dense(10)`.

# %%
small = keras.Sequential([keras.Input((50,)), keras.layers.Dense(10)])
full, mini = (lab.predict_step(small, batch, "adam").total_mib * 1024 for batch in (100, 32))
print(f"its full batch: {full:.0f} KiB, with batches of 32: {mini:.0f} KiB (predicted)")

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
    for name, batch, epochs in (
        ("full batch", 100, repeats),
        ("batches of 32", 32, 1),
        ("batches of 32, as many samples", 32, repeats),
    ):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(10)])
        step = training_step(model, keras.optimizers.Adam())
        updates = 0
        with lab.phase(name):
            for _ in range(epochs):
                for start in range(0, 100, batch):
                    step(x[start : start + batch], y[start : start + batch])
                    updates += 1
        loss, traces = tf.reduce_mean((model(x) - y) ** 2), step.experimental_get_tracing_count()
        rows.append({"arm": name, "updates": updates, "loss": float(loss), "traces": traces})
    return rows, psutil.Process().memory_info().rss / 2**20


tiny = lab.measure(articles_example, REPEATS, label="the article's example")
tiny_rows, process_mib = tiny.value
own_mib = pd.Series({part.name: part.rise_mib for part in tiny.phases}, dtype=float)
table = pd.DataFrame(tiny_rows).set_index("arm")
table.insert(0, "peak of the steps, KiB", own_mib * 1024)
print(f"the whole process, TensorFlow included: {process_mib:,.0f} MiB")
table.round(2)

# %% [markdown]
# Nothing to see: some KiB either way, in a process ten thousand times that size. But look at the other columns.
# The cure also changed the training: 4 updates in place of 1,000, so the loss is that of a model which has hardly
# started. Over as many samples, batches of 32 make 4,000 updates and end lower. And the last slice has 4 rows, not 32:
# a second trace of the function.
#
# **At a size where it matters**, under a budget. The arm trains for the same number of epochs whatever the batch, so
# that every arm sees the same samples. (`NO_ONEDNN`: where memory runs out inside a oneDNN layer, TensorFlow 2.21
# crashes in place of raising.)


# %%
def train(batch):
    keras.utils.set_random_seed(0)
    x = tf.constant(np.random.default_rng(0).standard_normal((ROWS, FEATURES), np.float32))
    y = tf.reduce_sum(x[:, :4], axis=1, keepdims=True) / 2
    step, updates = training_step(network(), keras.optimizers.Adam()), 0
    for epoch in range(EPOCHS):
        with lab.phase(f"epoch {epoch + 1}"):
            for start in range(0, ROWS, batch):
                loss = step(x[start : start + batch], y[start : start + batch])
                updates += 1
    return f"{updates} updates, loss {float(loss):.3f}"


failure = lab.run(train, ROWS, budget=BUDGET, label="full batch", env=lab.NO_ONEDNN)
lab.expect_oom(failure)

# %% [markdown]
# ## Fix
#
# The article's fix, the same function with slices of 256:

# %%
fix = lab.run(train, BATCH, budget=BUDGET, label=f"batches of {BATCH}", env=lab.NO_ONEDNN)
lab.expect_finished(fix)

# %% [markdown]
# What the full batch would have needed:

# %%
unbounded = lab.measure(train, ROWS, label="full batch, no tight budget", env=lab.NO_ONEDNN)

# %% [markdown]
# ## Side by side

# %%
lab.compare(unbounded, failure, fix)

# %% [markdown]
# Same samples, same epochs; the loss in the last column is that of each arm's last batch.
#
# The measured peak is that of the unluckiest step: a graph runs operations side by side, and where two gradients are alive
# together it needs one layer's output more than the prediction.

# %%
data_mib = lab.tensor_mib((ROWS, FEATURES))
predicted_mini = lab.predict_step(network(), BATCH, "adam")
lab.predicted_vs_measured(
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


large_mib = lab.tensor_mib((4 * ROWS, FEATURES))
sources = lab.measure(three_sources, 4 * ROWS, label="three sources")
warm, *parts = sources.phases
print(f"the data: {large_mib:.0f} MiB")
process = pd.Series(sources.value)
pd.DataFrame(
    {
        "tensors, peak MiB": {part.name: part.peak_mib for part in parts},
        "process over the warmed-up one, MiB": process.drop("warm-up") - process["warm-up"],
    }
).round(1)

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
OPTIMIZERS = ["sgd", "adam"]  # in this order: Adam's slots are still there afterwards (lab 09)


def steps_of_each(sizes, optimizers):
    model = network()
    for name in optimizers:
        step = training_step(model, keras.optimizers.get(name))
        for batch in sizes:
            for _ in range(3):
                with lab.phase(f"{name} {batch}"):
                    step(tf.zeros((batch, FEATURES)), tf.zeros((batch, 1)))


line = lab.measure(steps_of_each, SIZES, OPTIMIZERS, label="steps of each size", env=lab.NO_ONEDNN)
peaks = np.reshape([step.peak_mib for step in line.phases], (len(OPTIMIZERS), len(SIZES), 3))
by_batch, fits = pd.DataFrame(index=pd.Index(SIZES, name="batch")), {}
figure, axes = plt.subplots(figsize=(10, 4))
for name, steps, marker, colour in zip(OPTIMIZERS, peaks, "os", lab.COLOURS):
    low, high = steps.min(axis=1), steps.max(axis=1)
    predicted = [lab.predict_step(network(), batch, name).total_mib for batch in SIZES]
    by_batch[f"{name} predicted"], by_batch[f"{name} measured"] = predicted, low
    fits[name] = np.polyfit(SIZES[-3:], low[-3:], 1)  # where activations outweigh the update
    dots = {"marker": marker, "color": colour, "ls": ""}
    axes.plot(SIZES, predicted, color=colour, label=f"{name}: predicted from shapes")
    axes.errorbar(SIZES, low, (0 * low, high - low), label=f"{name}: measured", **dots)
    label = f"{name}: intercept of the measured line"
    axes.plot(0, fits[name][1], mfc="white", label=label, **dots)
axes.axhline(BUDGET_MIB, color=lab.BUDGET_LINE, ls="--", label=f"budget {BUDGET}")
axes.set(xlabel="batch size (rows)", ylabel="peak of one step (MiB)", title="A line with a floor")
axes.set_ylim(0, 1.15 * BUDGET_MIB)
figure.legend(loc="outside right upper")
plt.show()
by_batch.round(1)

# %%
weights = predicted_full.parts["weights"]
# one more row: its input, its four outputs, and the gradient of one of them while it is passed back
slope_kib = (one_row + lab.tensor_mib((WIDTH,))) * 1024
for name, slots in (("sgd", 0), ("adam", 2)):
    slope, intercept = fits[name]
    print(
        f"{name}: slope {slope * 1024:.2f} KiB a row (predicted {slope_kib:.2f}), "
        f"intercept {intercept:.1f} MiB (weights and {slots} slots: {(1 + slots) * weights:.1f}, "
        f"with every gradient: {(2 + slots) * weights:.1f})"
    )

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
        with lab.phase(f"try {batch}"):
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
    # To within half of what fits; finer costs more failures.
    while too_large - fitting > fitting // 2:
        middle = (fitting + too_large) // 2
        if fits(middle):
            fitting = middle
        else:
            too_large = middle
    return fitting, tries


trying = lab.run(find_by_trying, START, budget=BUDGET, label="find by trying", env=lab.NO_ONEDNN)
lab.expect_finished(trying)
tried, tries = trying.value
deaths = sum(not ok for _, ok in tries)
print(f"largest batch found: {tried}, after {len(tries)} tries, {deaths} of them out of memory:")
print(tries)

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


same = {"budget": BUDGET, "env": lab.NO_ONEDNN}
prediction = lab.run(find_by_prediction, BUDGET_MIB, 1024, 3072, label="find by prediction", **same)
lab.expect_finished(prediction)
found, predicting, limit, found_peak = prediction.value
refused = sum(not ok for _, ok in predicting)
print(f"the line meets {BUDGET} at a batch of {limit:.0f}")
print(f"{found} was tried and needs {found_peak:.1f} MiB")
print(f"{len(predicting)} sizes tried, {refused} of them out of memory: {predicting}")

# %%
search = pd.DataFrame(
    {
        "batch found": [tried, found],
        "sizes tried": [len(tries), len(predicting)],
        "out of memory": [deaths, refused],
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
        hidden, scores = keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)
        model = keras.Sequential([keras.Input((64,)), hidden, scores])
        optimizer = keras.optimizers.SGD(0.1)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        rng, points, in_steps = np.random.default_rng(0), [], 0.0
        epoch_updates = 1408 // batch
        updates = max(SAME_EPOCHS * epoch_updates, SAME_UPDATES)
        watched = {SAME_UPDATES, SAME_EPOCHS * epoch_updates}
        watched.update(np.geomspace(1, updates, 25).astype(int))
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
        an_epoch = 1000 * in_steps / (updates - 1) * epoch_updates
        table[batch] = {"points": points, "ms an epoch": an_epoch}
    return table


training = lab.measure(on_digits, images, labels, label="digits").value

# %%
figure, (by_epoch, by_update) = plt.subplots(1, 2, sharey=True)
for batch, line in zip(BATCHES, lab.LINES):
    updates, epochs, accuracy = np.array(training[batch]["points"]).T
    for axes, along in ((by_epoch, epochs), (by_update, updates)):
        name = f"batch {batch}" + (" (full)" if batch == 1408 else "")
        axes.plot(along, 100 * accuracy, ls=line, label=name)
by_epoch.set(title="per sample", xlabel="epochs (samples seen / 1,408)", ylabel="accuracy (%)")
by_epoch.set_xlim(0, SAME_EPOCHS)
by_epoch.legend()
by_update.set(title="per update", xlabel="updates", xlim=(1, SAME_UPDATES))
plt.show()


def accuracy_at(batch, column, value):
    return min(training[batch]["points"], key=lambda point: abs(point[column] - value))[2]


digits_table = pd.DataFrame(index=pd.Index(BATCHES, name="batch"))
for column, value, unit in ((1, SAME_EPOCHS, "epochs"), (0, SAME_UPDATES, "updates")):
    reached = [accuracy_at(batch, column, value) for batch in BATCHES]
    digits_table[f"accuracy after {value} {unit}"] = reached
digits_table["ms an epoch"] = [training[batch]["ms an epoch"] for batch in BATCHES]
digits_table.round(3)

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
    most = max(0, int((budget_mib - intercept) / slope))
    print(
        f"full {full:7.1f} MiB   mini {mini:7.1f} MiB   full is {full / mini:.1f} × mini; "
        f"largest batch in {budget_mib} MiB: {most:,} rows (predicted)"
    )


lab.explore(
    full_against_mini,
    rows=(100, 20000, 100),
    batch=(16, 4096, 16),
    optimizer=["adam", "sgd"],
    budget_mib=(16, 512, 8),
)

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C05",
    "partly",
    saving_at_its_own_size=own_mib["full batch"] - own_mib["batches of 32"],
    whole_process=process_mib,
    full=unbounded.peak_mib,
    mini=fix.peak_mib,
    full_died=failure.outcome == "OOM",
    mini_finished=fix.ok,
)

# %%
lab.verdict(
    "C06",
    "partly",
    smallest_batch=by_batch["sgd measured"].iloc[0],
    largest_batch=by_batch["sgd measured"].iloc[-1],
    ms_an_epoch_small=training[8]["ms an epoch"],
    ms_an_epoch_full=training[1408]["ms an epoch"],
    accuracy_small=accuracy_at(8, 1, SAME_EPOCHS),
    accuracy_full=accuracy_at(1408, 1, SAME_EPOCHS),
)

# %%
lab.verdict(
    "C07",
    "partly",
    data=large_mib,
    sliced_tensor=sources.phase("slices of a tensor").peak_mib,
    from_file=sources.phase("read from the file").peak_mib,
    full=unbounded.peak_mib,
    mini=fix.peak_mib,
)

# %%
lab.verdict(
    "C25",
    "holds",
    found_by_trying=tried,
    oom_while_trying=deaths,
    tries=len(tries),
    found_by_prediction=found,
    tries_of_prediction=len(predicting),
    line_meets_budget=limit,
)

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
    head = [keras.layers.Flatten(), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *body, *head])
    answers = []
    for name, function in (("given", given), ("yours", yours)):
        with lab.phase(name):
            answers.append(function(model, images[..., None], labels))
    return answers


ways = (evaluate_at_once, evaluate_in_chunks)
first = lab.run(both, *ways, images, labels, label="evaluation", quiet=True)
with lab.exercise(
    1,
    "Loop over range(0, len(images), 64); keras.metrics.SparseCategoricalAccuracy has "
    "update_state(labels, scores) and result().",
):
    assert first.ok, str(first.error)
    whole, chunked = first.value
    assert chunked is not None, (
        "evaluate_in_chunks() returns nothing yet: return the accuracy as a float."
    )
    assert abs(whole - chunked) < 1e-3, (
        f"accuracy {chunked:.4f} against {whole:.4f} at once: is the last, shorter chunk in?"
    )
    at_once, yours = (part.peak_mib for part in first.phases)
    assert yours < 0.3 * at_once, (
        f"peak {yours:.1f} MiB against {at_once:.1f} at once: more than a chunk goes through."
    )

# %% [markdown]
# **2.** Write the finder that most scripts need: start high, halve on out-of-memory, stop at 1. Any other error must
# get through – a wrong shape is no reason for a smaller batch. (It is graded with a stand-in for the step, so that no
# failure costs ten seconds.)


# %%
def halve_until_it_fits(step, batch):
    """The first of batch, batch / 2, … at which step(batch) has memory enough; 0 if none."""
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


with lab.exercise(
    2,
    "while batch >= 1: try step(batch) and return; "
    "except tf.errors.ResourceExhaustedError: pass; then batch //= 2.",
):
    answer = halve_until_it_fits(step_up_to(700), 4096)
    assert answer is not None, (
        "halve_until_it_fits() returns nothing yet: return the batch that fits."
    )
    assert answer == 512, f"from 4,096, with room for 700, it gives {answer}, not 512."
    assert halve_until_it_fits(step_up_to(0), 64) == 0, (
        "where not even a batch of 1 fits it must return 0."
    )
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


ways = (channel_means_of_all, channel_means)
third = lab.run(both, *ways, images, labels, label="hidden outputs", quiet=True)
with lab.exercise(
    3,
    "Add up tf.reduce_sum(hidden(chunk), axis=(0, 1, 2)).numpy(); "
    "divide by len(images) * 8 * 8 at the end.",
):
    assert third.ok, str(third.error)
    of_all, of_chunks = third.value
    assert of_chunks is not None, "channel_means() returns nothing yet: return 64 means."
    assert np.shape(of_chunks) == (64,), f"the shape is {np.shape(of_chunks)}, not (64,)."
    assert np.allclose(of_all, of_chunks, rtol=1e-3, atol=1e-5), (
        "the means differ: sum the chunks and divide once, since the last chunk is shorter."
    )
    kept, reduced = (part.peak_mib for part in third.phases)
    assert reduced < 0.3 * kept, (
        f"peak {reduced:.1f} MiB against {kept:.1f}: some chunks' outputs are still kept."
    )
