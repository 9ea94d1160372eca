# %% [markdown]
# # 05 · Gradient accumulation: a large batch in the memory of a small one
#
# **Symptom:** the batch that the recipe asks for does not fit, a smaller one trains worse, and the accumulation loop
# from an article runs, saves memory, lets the loss fall – and still does not train like the large batch.
#
# **Afterwards you can** accumulate gradients so that the update equals the large batch's within float error, check that
# it does, predict what the accumulators cost, and say when accumulation makes memory *worse*.
#
# | | |
# |---|---|
# | Time | about 1½ minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C14 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes layers of twice the width and twice the batch
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

FEATURES, PARTS = 256, 16
WIDTH = lab.choose(SCALE, quick=512, full=1024)
BATCH = lab.choose(SCALE, quick=8192, full=16384)
PART = BATCH // PARTS  # rows of a micro-batch
BUDGET = lab.choose(SCALE, quick="64 MiB", full="256 MiB")
with np.load("../data/digits.npz") as digits:
    images = digits["images"].reshape(-1, 64).astype("float32") / 16
    labels = digits["labels"].astype("int64")


def network(width=WIDTH):
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((FEATURES,)), *hidden, keras.layers.Dense(1)])


def start():
    """The same network, data and weights in every arm; the data stay in NumPy, not counted."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, FEATURES), np.float32)
    y = x[:, :1] * x[:, 1:2] + rng.standard_normal((BATCH, 1), np.float32)
    return network(), x, y


def gradients_of(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    return tape.gradient(loss, model.trainable_variables)


def flat(variables):
    return np.concatenate([np.ravel(v) for v in variables])


# %% [markdown]
# ## Predict
#
# One update from 8,192 rows ("full": 16,384) through four wide layers with plain SGD, and the same update gathered from
# 16 micro-batches.

# %%
my_guess = lab.guess(
    f"Peak memory of one update from {PARTS} micro-batches of {PART} rows?", GUESS_MIB
)

# %% [markdown]
# The arithmetic. The activations shrink to a sixteenth. In exchange the sum of the gradients must live from one
# micro-batch to the next: one more buffer of the size of the weights.

# %%
whole, micro = lab.predict_step(network(), BATCH, "sgd"), lab.predict_step(network(), PART, "sgd")
weights = whole.parts["weights"]
print(f"whole batch: {whole.total_mib:.1f} MiB")
print(
    f"micro-batch: {micro.total_mib:.1f} MiB + accumulators as large as the weights, "
    f"{weights:.1f} MiB = {micro.total_mib + weights:.1f} MiB"
)

# %% [markdown]
# ## Failure
#
# First the reason to accumulate at all: the whole batch does not fit the budget. (`NO_ONEDNN`: where memory runs out
# inside a oneDNN layer, TensorFlow 2.21 crashes in place of raising.)


# %%
def whole_batch():
    model, x, y = start()
    before, optimizer = flat(model.trainable_variables), keras.optimizers.SGD(1.0)

    @tf.function
    def step(x, y):
        optimizer.apply_gradients(zip(gradients_of(model, x, y), model.trainable_variables))

    step(tf.constant(x), tf.constant(y))
    # With a learning rate of 1 this is the gradient that was applied.
    return before - flat(model.trainable_variables)


failure = lab.run(whole_batch, budget=BUDGET, label="whole batch", env=lab.NO_ONEDNN)
lab.expect_oom(failure)

# %% [markdown]
# ## Fix
#
# The article's loop. (As printed it stops with a `NameError`, since its step counter does not exist; a loop counter is the
# one thing repaired here.) It fits:


# %%
def published():
    model, x, y = start()
    before, optimizer = flat(model.trainable_variables), keras.optimizers.SGD(1.0)

    @tf.function
    def micro_step(x, y):
        accumulated = [tf.zeros_like(v) for v in model.trainable_variables]
        return [a + g for a, g in zip(accumulated, gradients_of(model, x, y))]

    for number in range(PARTS):
        rows = slice(number * PART, (number + 1) * PART)
        accumulated = micro_step(tf.constant(x[rows]), tf.constant(y[rows]))
        if (number + 1) % PARTS == 0:
            optimizer.apply_gradients(zip(accumulated, model.trainable_variables))
    return before - flat(model.trainable_variables)


articles = lab.run(published, budget=BUDGET, label="published loop", env=lab.NO_ONEDNN)
lab.expect_finished(articles)

# %% [markdown]
# Look at where the zeros are made: inside the step. Every micro-batch starts a new sum, and the one that is applied holds
# the last micro-batch alone. Fifteen of sixteen gradients are computed and thrown away. **It does not accumulate.**
#
# **What works:** the sum lives in variables, outside the step; each micro-batch adds its share; the sum is cleared after
# the update.


# %%
def accumulated():
    with lab.phase("network and data"):
        model, x, y = start()
    before, optimizer = flat(model.trainable_variables), keras.optimizers.SGD(1.0)
    with lab.phase("accumulators"):
        sums = [tf.Variable(tf.zeros_like(v), trainable=False) for v in model.trainable_variables]

    @tf.function
    def micro_step(x, y):
        for total, gradient in zip(sums, gradients_of(model, x, y)):
            total.assign_add(gradient / PARTS)  # the mean of the parts' means

    @tf.function
    def update():
        optimizer.apply_gradients(zip(sums, model.trainable_variables))
        for total in sums:
            total.assign(tf.zeros_like(total))

    with lab.phase("micro-batches"):
        for number in range(PARTS):
            rows = slice(number * PART, (number + 1) * PART)
            micro_step(tf.constant(x[rows]), tf.constant(y[rows]))
    with lab.phase("update"):
        update()
    return before - flat(model.trainable_variables)


right = lab.run(accumulated, budget=BUDGET, label="variables + assign_add", env=lab.NO_ONEDNN)
lab.expect_finished(right)

# %% [markdown]
# Keras does the same when the optimizer is told to: `gradient_accumulation_steps`. The training loop then is the ordinary
# one, and works with `model.fit` as well.


# %%
def with_keras():
    model, x, y = start()
    before = flat(model.trainable_variables)
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=PARTS)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        optimizer.apply_gradients(zip(gradients_of(model, x, y), model.trainable_variables))

    for number in range(PARTS):
        rows = slice(number * PART, (number + 1) * PART)
        step(tf.constant(x[rows]), tf.constant(y[rows]))
    return before - flat(model.trainable_variables)


keras_own = lab.run(
    with_keras, budget=BUDGET, label="Keras' gradient_accumulation_steps", env=lab.NO_ONEDNN
)
lab.expect_finished(keras_own)

# %% [markdown]
# And the whole batch with room enough, to compare with:

# %%
unbounded = lab.measure(whole_batch, label="whole batch, no tight budget", env=lab.NO_ONEDNN)

# %% [markdown]
# ## Side by side

# %%
lab.compare(unbounded, failure, articles, right, keras_own)

# %% [markdown]
# All of them fit. Do they make the same update? The distance from the whole batch's gradient, as a part of its length:


# %%
def distance(gradient, reference):
    return float(np.linalg.norm(gradient - reference) / np.linalg.norm(reference))


arms = (articles, right, keras_own)
errors = pd.Series({arm.label: distance(arm.value, unbounded.value) for arm in arms})
axes = errors.plot.barh(figsize=(8, 2.2), logx=True, xlim=(1e-8, 10))
axes.set_xlabel("relative distance from the whole batch's gradient")
axes.invert_yaxis()
plt.show()
for name, error in errors.items():
    print(f"{name}: {error:.1e}")
assert errors[right.label] < 1e-3 and errors[keras_own.label] < 1e-3

# %%
lab.predicted_vs_measured(
    whole_batch=(whole.total_mib, unbounded.peak_mib),
    variables_and_assign_add=(micro.total_mib + weights, right.peak_mib),
    the_accumulators=(weights, right.phase("accumulators").added_mib),
)

# %%
print(my_guess.against(right.peak_mib))
assert right.peak_mib < 0.5 * unbounded.peak_mib

# %% [markdown]
# ## Explain
#
# The small arms need some MiB more than predicted: a block of the allocator's that is less than twice as large as the
# tensor is not split, and the rest of it counts as used. With tensors of this size that shows.
#
# ### Why the wrong loop goes unnoticed
#
# It trains. Its update is that of an ordinary small batch, so the loss falls; it only takes as many times the work as there are parts.
# A test that cannot be fooled: change one micro-batch's labels and see whether the update changes. Here on 128
# handwritten digits in four micro-batches, as in the article.


# %%
def on_digits(x, y):
    keras.utils.set_random_seed(0)
    hidden, scores = keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)
    model = keras.Sequential([keras.Input((64,)), hidden, scores])
    parts = [slice(32 * number, 32 * number + 32) for number in range(4)]

    def gradient(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
        return flat(tape.gradient(loss, model.trainable_variables))

    def published(x, y):
        for part in parts:
            applied = np.zeros(1) + gradient(x[part], y[part])
        return applied

    def right(x, y):
        return sum(gradient(x[part], y[part]) for part in parts) / len(parts)

    def influence(loop):
        changes = []
        for part in parts:
            wrong = y.copy()
            wrong[part] = (wrong[part] + 1) % 10
            changes.append(distance(loop(x, wrong), loop(x, y)))
        return changes

    loops, whole = {"published loop": published, "accumulated": right}, gradient(x, y)
    return {name: (influence(loop), distance(loop(x, y), whole)) for name, loop in loops.items()}


small = lab.measure(on_digits, images[:128], labels[:128], label="digits").value
changes = pd.DataFrame(
    {name: changes for name, (changes, _) in small.items()},
    index=[f"micro-batch {number}" for number in range(1, 5)],
)
changes.plot.bar(figsize=(8, 2.8), rot=0, ylabel="change of the update")
plt.xlabel("micro-batch whose labels were changed")
plt.show()
for name, (_, error) in small.items():
    print(f"{name}: distance from the whole batch's gradient {error:.1e}")
changes.round(3)

# %% [markdown]
# Three of four micro-batches do not count at all.
#
# ### Where accumulation makes it worse
#
# The accumulators cost one buffer of the size of the weights, whatever the batch. Where weights outweigh activations there
# is nothing to win: the peak is in the update, and it now has one buffer more. Wide layers, 32 rows, four micro-batches, the
# leanest of three updates each (a graph does not order its operations the same way every time):

# %%
HEAVY = lab.choose(SCALE, quick=1024, full=2048)


def heavy_weights(width, batch, parts):
    model, optimizer = network(width), keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    x, y = tf.zeros((batch, FEATURES)), tf.zeros((batch, 1))

    @tf.function
    def step(x, y):
        optimizer.apply_gradients(zip(gradients_of(model, x, y), model.trainable_variables))

    for _ in range(3):
        with lab.phase("one batch"):
            step(x, y)
    sums = [tf.Variable(tf.zeros_like(v), trainable=False) for v in model.trainable_variables]

    @tf.function
    def micro_step(x, y):
        for total, gradient in zip(sums, gradients_of(model, x, y)):
            total.assign_add(gradient / parts)

    @tf.function
    def update():
        optimizer.apply_gradients(zip(sums, model.trainable_variables))

    for _ in range(3):
        with lab.phase("accumulated"):
            for start in range(0, batch, batch // parts):
                micro_step(x[start : start + batch // parts], y[start : start + batch // parts])
            update()


heavy = lab.measure(heavy_weights, HEAVY, 32, 4, label="heavy weights", env=lab.NO_ONEDNN)
heavy_one = min(part.peak_mib for part in heavy.phases if part.name == "one batch")
heavy_sums = min(part.peak_mib for part in heavy.phases if part.name == "accumulated")
print(
    f"{lab.tensor_mib((HEAVY, HEAVY)):.0f} MiB a layer, 32 rows: one batch {heavy_one:.1f} MiB, "
    f"four micro-batches {heavy_sums:.1f} MiB ({heavy_sums / heavy_one:.2f} ×)"
)
assert heavy_sums > heavy_one

# %% [markdown]
# **When it flips.** Accumulation saves batch × (1 − 1/parts) × bytes a row, and costs the weights once. Find the batch
# from which it pays for other widths. Predicted from shapes alone: four layers, SGD.


# %%
def saves(width=WIDTH, batch=BATCH, parts=PARTS):
    # A row: its input, four outputs, one gradient on its way back.
    a_row = lab.tensor_mib((FEATURES,)) + 5 * lab.tensor_mib((width,))
    buffer = lab.tensor_mib((FEATURES, width)) + 3 * lab.tensor_mib((width, width))
    saved = batch * (1 - 1 / parts) * a_row
    advice = "accumulate" if saved > buffer else "do not accumulate"
    print(
        f"activations saved {saved:8.1f} MiB   accumulators cost {buffer:8.1f} MiB   "
        f"{advice} (predicted)"
    )


lab.explore(saves, width=(64, 4096, 64), batch=(16, 16384, 16), parts=(2, 64))

# %% [markdown]
# ### When equal is not equal
#
# * **An uneven last micro-batch.** The mean of means weighs a part of 8 rows like one of 32. Weigh each part by its rows
#   (exercise 1).
# * **Batch normalization** uses the mean and variance of what it sees. Micro-batches have their own, so no accumulation
#   gives the whole batch's gradient. Layer or group normalization, which look at one row, do not mind. Measured:


# %%
def normalized(x, y, layer):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    norm = layers.BatchNormalization() if layer == "batch" else layers.LayerNormalization()
    body = [layers.Dense(64), norm, layers.ReLU(), layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *body])

    def gradient(x, y):
        with tf.GradientTape() as tape:
            scores = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))
        return flat(tape.gradient(loss, model.trainable_variables))

    parts = [gradient(x[start : start + 32], y[start : start + 32]) for start in range(0, 128, 32)]
    return distance(sum(parts) / 4, gradient(x, y))


def both_norms(x, y):
    return {layer: normalized(x, y, layer) for layer in ("batch", "layer")}


norms = lab.measure(both_norms, images[:128], labels[:128], label="normalization").value
for layer, error in norms.items():
    print(f"{layer} normalization: accumulated gradient differs by {error:.1e}")
assert norms["batch"] > 100 * norms["layer"]

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C14",
    "fails",
    published_distance=errors[articles.label],
    right_distance_in_millionths=1e6 * errors[right.label],
    first_micro_batch_counts=small["published loop"][0][0],
    published=articles.peak_mib,
    right=right.peak_mib,
    keras=keras_own.peak_mib,
    whole=unbounded.peak_mib,
)

# %% [markdown]
# ## Exercises
#
# **1.** 100 digits in micro-batches of 32 leave one of 4 rows. Accumulate so that the result still is the gradient of all
# 100. (`gradient(x, y)` gives the gradient of the mean loss of the rows it gets, as one vector.)


# %%
def accumulate_uneven(gradient, x, y, size):
    # BEGIN SOLUTION
    total = 0.0
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        total = total + gradient(x[part], y[part]) * len(x[part]) / len(x)
    return total
    # END SOLUTION


def graded_uneven(x, y):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    most = []

    def gradient(x, y):
        most.append(len(x))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
        return flat(tape.gradient(loss, model.trainable_variables))

    yours = accumulate_uneven(gradient, x, y, 32)
    largest = max(most, default=0)
    return yours, gradient(x, y), largest


uneven = lab.run(graded_uneven, images[:100], labels[:100], label="uneven parts", quiet=True)
with lab.exercise(
    1,
    "Weigh the gradient of each part by len(part) / len(x); "
    "slices past the end are simply shorter.",
):
    assert uneven.ok, str(uneven.error)
    yours, reference, largest = uneven.value
    assert yours is not None, (
        "accumulate_uneven() returns nothing yet: return the accumulated gradient."
    )
    assert largest <= 32, (
        f"a gradient over {largest} rows was asked for: micro-batches have at most 32."
    )
    off = distance(yours, reference)
    assert off < 1e-3, (
        f"it is off by {off:.1%}: does the part of 4 rows weigh as much as one of 32?"
    )

# %% [markdown]
# **2.** This loop accumulates, and the first update is right. The second is not: it forgets something. Repair it.


# %%
def two_updates(micro_gradients, sums, apply, batches):
    """apply(): the step with what is in sums, variables. batches: two, of micro-batches each."""
    for micro_batches in batches:
        for x, y in micro_batches:
            for total, gradient in zip(sums, micro_gradients(x, y)):
                total.assign_add(gradient / len(micro_batches))
        apply()
        # BEGIN SOLUTION
        for total in sums:
            total.assign(tf.zeros_like(total))
        # END SOLUTION


def graded_updates(x, y):
    scores = keras.layers.Dense(10, kernel_initializer="zeros")
    model, applied, whole = keras.Sequential([keras.Input((64,)), scores]), [], []
    sums = [tf.Variable(tf.zeros_like(v)) for v in model.trainable_variables]

    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
        return tape.gradient(loss, model.trainable_variables)

    def apply():
        first = 128 * len(applied)
        whole.append(flat(gradients(x[first : first + 128], y[first : first + 128])))
        applied.append(flat(sums))
        for variable, gradient in zip(model.trainable_variables, sums):
            variable.assign_sub(0.5 * gradient)

    parts = [(x[start : start + 32], y[start : start + 32]) for start in range(0, 256, 32)]
    two_updates(gradients, sums, apply, [parts[:4], parts[4:]])
    return [distance(a, w) for a, w in zip(applied, whole)]


twice = lab.run(graded_updates, images[:256], labels[:256], label="two updates", quiet=True)
with lab.exercise(
    2, "The sums still hold the first batch when the second begins: assign zeros after apply()."
):
    assert twice.ok, str(twice.error)
    assert len(twice.value) == 2, "both batches must be applied, each once."
    first, second = twice.value
    assert first < 1e-3, f"the first update is off by {first:.1%}: leave the adding as it is."
    assert second < 1e-3, (
        f"the second update is off by {second:.0%}: "
        "it contains the first batch's gradients as well."
    )

# %% [markdown]
# **3.** Before you accumulate: does it pay? Give the MiB that accumulation saves (negative if it costs), from the rows of a
# batch, the number of parts, the MiB of the weights and the MiB that one row's activations take.


# %%
def saving(batch, parts, weights_mib, row_mib):
    # BEGIN SOLUTION
    return (batch - batch / parts) * row_mib - weights_mib
    # END SOLUTION


with lab.exercise(
    3,
    "Rows that no longer are in memory at the same time × MiB a row, "
    "less one buffer of the size of the weights.",
):
    answer = saving(1000, 4, 10.0, 0.1)
    assert answer is not None, "saving() returns nothing yet: return MiB."
    assert abs(answer - 65) < 1e-6, (
        "1,000 rows of 0.1 MiB in 4 parts at 10 MiB of weights: "
        f"750 rows × 0.1 − 10 = 65 MiB, not {answer}."
    )
    assert abs(saving(32, 4, 50.0, 0.01) + 49.76) < 1e-6, (
        "32 rows of 0.01 MiB at 50 MiB of weights: it must come out negative."
    )
    row = (unbounded.peak_mib - 2 * weights) / BATCH
    measured = unbounded.peak_mib - right.peak_mib
    assert abs(saving(BATCH, PARTS, weights, row) - measured) < 0.25 * measured, (
        "it is off by more than a quarter from what this run measured."
    )
