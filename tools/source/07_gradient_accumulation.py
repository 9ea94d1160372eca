# %% [markdown]
# # 07 · Gradient accumulation: a large batch in the memory of a small one
#
# **Symptom:** *"OOM when allocating tensor"*: the batch that a recipe and its learning rate ask for does not fit. The
# accumulation loop as published runs, saves memory, lets the loss fall – and still does not train like that batch.
#
# **Afterwards you can** accumulate gradients so that the update equals the large batch's within float error, check that
# it does, predict what the accumulators cost, and say when accumulation makes memory *worse*.
#
# | | |
# |---|---|
# | Time | about 1 minute to run, 30 to work through |
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
from labsupport.graders import gradient_accumulation as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

FEATURES, PARTS, UPDATES = 256, 16, 4
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


def first_change(model, update, updates=UPDATES):
    """Make all updates; return how the first changed the weights: its gradient, times the rate."""
    before = flat(model.trainable_variables)
    update()
    change = before - flat(model.trainable_variables)
    for _ in range(updates - 1):
        update()
    return change


def flat(variables):
    return np.concatenate([np.ravel(v) for v in variables])


def distance(gradient, reference):
    """How far one gradient is from another, as a part of the other's length."""
    return float(np.linalg.norm(gradient - reference) / np.linalg.norm(reference))


# %% [markdown]
# ## Predict
#
# One update from a large batch through four wide layers with plain SGD, and the same update gathered from
# 16 micro-batches: small batches of which each gives a part of one gradient. The sum of the gradients must live from
# one micro-batch to the next. One part first:

# %%
sums_guess = lab.guess("What does the sum of the gradients take?", GUESS_MIB)

# %%
my_guess = lab.guess(
    f"Peak memory of one update from {PARTS} micro-batches of {PART} rows?", GUESS_MIB
)

# %% [markdown]
# The arithmetic. The activations shrink to a sixteenth. The sum has a number for each weight: one more buffer of the
# size of the weights.

# %%
whole, micro = (lab.predict(network, rows, optimizer="sgd", loss="mse") for rows in (BATCH, PART))
weights = lab.tensor_mib((network().count_params(),))
print(f"whole batch of {BATCH:,} rows: {whole.spread}")
print(
    f"micro-batch: {micro.total_mib:.1f} MiB + sums as large as the weights, "
    f"{weights:.1f} MiB = {micro.total_mib + weights:.1f} MiB"
)

# %% [markdown]
# ## Failure
#
# The whole batch does not fit the budget. Every run makes the same few updates, each from the same rows. (`NO_ONEDNN`
# leaves out oneDNN, Intel's library of fast layers for CPUs: where memory runs out inside one of them, TensorFlow 2.21
# crashes in place of raising.)


# %%
def ordinary(rows, updates=UPDATES):
    """Ordinary updates, each from the same first rows."""
    model, x, y = start()
    optimizer = keras.optimizers.SGD(0.05)

    @tf.function
    def step(x, y):
        optimizer.apply_gradients(zip(gradients_of(model, x, y), model.trainable_variables))

    update = lambda: step(tf.constant(x[:rows]), tf.constant(y[:rows]))
    return first_change(model, update, updates)


failure = lab.run(ordinary, BATCH, budget=BUDGET, label="whole batch", env=lab.NO_ONEDNN)
lab.expect_oom(failure)

# %% [markdown]
# ## Advice, tested
#
# The published loop, with the same data and under the same budget. (As printed it stops with a `NameError`, since its
# step counter does not exist; a loop counter is the one thing repaired here.)


# %%
def published():
    model, x, y = start()
    optimizer = keras.optimizers.SGD(0.05)

    @tf.function
    def micro_step(x, y):
        accumulated = [tf.zeros_like(v) for v in model.trainable_variables]
        return [a + g for a, g in zip(accumulated, gradients_of(model, x, y))]

    def update():
        for number in range(PARTS):
            rows = slice(number * PART, (number + 1) * PART)
            accumulated = micro_step(tf.constant(x[rows]), tf.constant(y[rows]))
            if (number + 1) % PARTS == 0:
                optimizer.apply_gradients(zip(accumulated, model.trainable_variables))

    return first_change(model, update)


as_published = lab.run(published, budget=BUDGET, label="published loop", env=lab.NO_ONEDNN)
lab.expect_finished(as_published)

# %% [markdown]
# It fits. What "the memory of a small batch" is, ordinary updates from one micro-batch tell, as many as the loop above has
# micro-batches:

# %%
one_small = (ordinary, PART, UPDATES * PARTS)
small_batch = lab.measure(*one_small, budget=BUDGET, label="one small batch", env=lab.NO_ONEDNN)
lab.note(
    f"Published loop: {as_published.peak_mib:.1f} MiB; ordinary updates from {PART} rows: "
    f"{small_batch.peak_mib:.1f}. "
    "The loop hands the gradients out of the step, where they stay until the next ones are there."
)

# %% [markdown]
# But look at where the zeros are made: inside the step. Every micro-batch starts a new sum, and the one that is applied
# holds the last micro-batch alone. All other gradients are computed and thrown away. **It does not accumulate.**
#
# ## Fix
#
# Same data, same budget; the sum lives in variables, outside the step. Each micro-batch adds its share; the sum is
# cleared after the update.


# %%
def accumulating(model, optimizer, parts):
    """Two functions: add the gradient of a micro-batch, and update with the sum."""
    sums = [tf.Variable(tf.zeros_like(v), trainable=False) for v in model.trainable_variables]

    @tf.function
    def micro_step(x, y):
        for total, gradient in zip(sums, gradients_of(model, x, y)):
            total.assign_add(gradient / parts)  # the mean of the parts' means

    @tf.function
    def update():
        optimizer.apply_gradients(zip(sums, model.trainable_variables))
        for total in sums:
            total.assign(tf.zeros_like(total))

    return micro_step, update


def accumulated():
    with lab.phase("network and data"):
        model, x, y = start()
    with lab.phase("sums"):
        micro_step, apply_sums = accumulating(model, keras.optimizers.SGD(0.05), PARTS)

    def update():
        for number in range(PARTS):
            rows = slice(number * PART, (number + 1) * PART)
            micro_step(tf.constant(x[rows]), tf.constant(y[rows]))
        apply_sums()

    with lab.phase("updates"):
        return first_change(model, update)


right = lab.run(accumulated, budget=BUDGET, label="variables + assign_add", env=lab.NO_ONEDNN)
lab.expect_finished(right)

# %% [markdown]
# Keras does the same when the optimizer is told to: `gradient_accumulation_steps`. The training loop then is the ordinary
# one, and works with `model.fit` as well.


# %%
def with_keras():
    model, x, y = start()
    optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=PARTS)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        optimizer.apply_gradients(zip(gradients_of(model, x, y), model.trainable_variables))

    def update():
        for number in range(PARTS):
            rows = slice(number * PART, (number + 1) * PART)
            step(tf.constant(x[rows]), tf.constant(y[rows]))

    return first_change(model, update)


keras_own = lab.run(
    with_keras, budget=BUDGET, label="Keras' gradient_accumulation_steps", env=lab.NO_ONEDNN
)
lab.expect_finished(keras_own)

# %% [markdown]
# And the whole batch with room enough, to compare with:

# %%
unbounded = lab.measure(ordinary, BATCH, label="whole batch, no tight budget", env=lab.NO_ONEDNN)

# %% [markdown]
# ## Side by side

# %%
lab.compare(unbounded, failure, as_published, right, keras_own)

# %% [markdown]
# Who held it? Two of them run once more while TensorFlow records every allocation. The whole batch dies of the
# outputs of its layers; with small batches the sums, *other variables*, come on top of weights and gradients. (What a
# variable held until just now counts as *held by the script*.)

# %%
lab.take_apart(failure, right)

# %% [markdown]
# Do those that fit make the same first update? The distance from the whole batch's gradient, as a part of its length:

# %%
arms = (as_published, right, keras_own)
errors = pd.Series({arm.label: distance(arm.value, unbounded.value) for arm in arms})
axes = errors.plot.barh(figsize=(8, 2.2), logx=True, xlim=(1e-8, 10), color=lab.COLOURS[0])
axes.set_xlabel("relative distance from the whole batch's gradient (1: as far as no update at all)")
axes.invert_yaxis()
plt.show()
lab.note(
    f"The sums miss the whole batch's gradient by {errors[right.label]:.0e} of its length, "
    f"float32's rounding; Keras' own by {errors[keras_own.label]:.0e}; the published loop by "
    f"{errors[as_published.label]:.1f}: most of what {PART} rows give is their own noise."
)
assert errors[right.label] < 1e-3 and errors[keras_own.label] < 1e-3

# %%
sums_mib = right.phase("sums").added_mib
lab.predicted_vs_measured(
    whole_batch_at_most=(whole.total_mib, unbounded.peak_mib),
    whole_batch_at_least=(whole.lowest_mib, unbounded.peak_mib),
    one_small_batch=(micro.total_mib, small_batch.peak_mib),
    variables_and_assign_add=(micro.total_mib + weights, right.peak_mib),
    the_sums=(weights, sums_mib),
)

# %%
lab.note(
    f"The sums have {weights:.1f} MiB and were handed out in pieces of {sums_mib:.1f} together: "
    "TensorFlow's allocator does not cut up a free piece that is less than twice as large as the "
    "tensor. Of the whole batch two figures are predicted, of a small one the higher, since a CPU "
    "runs operations of a graph side by side: what is alive together differs from step to step."
)
print("The sum:", sums_guess.against(sums_mib))
print("The update:", my_guess.against(right.peak_mib))
assert right.peak_mib < 0.5 * unbounded.peak_mib

# %% [markdown]
# ## Explain
#
# ### Why the wrong loop goes unnoticed
#
# Its update is that of an ordinary small batch, and small batches train. It only computes the other gradients for nothing.
# A test shows which micro-batches count: change the labels of one and see whether the update changes. Here on 128
# handwritten digits in four micro-batches, as published.


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
            applied = 0.0 + gradient(x[part], y[part])
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

    return {"published loop": influence(published), "accumulated": influence(right)}


changes = lab.measure(on_digits, images[:128], labels[:128], label="digits").value
axes = pd.DataFrame(changes, index=range(1, 5)).plot.bar(figsize=(8, 2.8), rot=0)
axes.set_xlabel("micro-batch whose labels were changed")
axes.set_ylabel("change, in lengths of the update")
plt.show()

# %% [markdown]
# In the published loop only the last micro-batch counts; its bar is higher, since it is the whole update.
#
# ### Where accumulation makes it worse
#
# The sums cost one buffer of the size of the weights, whatever the batch. Where weights outweigh activations there is
# nothing to win: the sums stay while gradients are made and while they are applied. Wide layers, few rows, four micro-batches,
# the leanest of three updates each:

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
    micro_step, update = accumulating(model, optimizer, parts)
    for _ in range(3):
        with lab.phase("accumulated"):
            for start in range(0, batch, batch // parts):
                micro_step(x[start : start + batch // parts], y[start : start + batch // parts])
            update()


heavy = lab.measure(heavy_weights, HEAVY, 32, 4, label="heavy weights", env=lab.NO_ONEDNN)
heavy_one = min(part.peak_mib for part in heavy.phases[:3])
heavy_sums = min(part.peak_mib for part in heavy.phases[3:])
lab.note(
    f"With layers of {lab.tensor_mib((HEAVY, HEAVY)):.0f} MiB and 32 rows, one batch needs "
    f"{heavy_one:.1f} MiB and four micro-batches {heavy_sums:.1f}."
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
    print(f"{saved:.1f} MiB saved, {buffer:.1f} MiB of sums: {advice} (predicted)")


lab.explore(saves, width=(64, 4096, 64), batch=(16, 16384, 16), parts=(2, 64))

# %% [markdown]
# ### When equal is not equal
#
# * **An uneven last micro-batch.** The mean of means weighs a part of 4 rows like one of 32. Weigh each part by its rows
#   (exercise 1).
# * **Batch normalization** uses the mean and variance of what it sees. Micro-batches have their own, so no accumulation
#   gives the whole batch's gradient. Layer normalization looks at one row at a time and does not mind. Measured:


# %%
def normalized(x, y, norm):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    body = [layers.Dense(64), getattr(layers, norm)(), layers.ReLU(), layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *body])

    def gradient(x, y):
        with tf.GradientTape() as tape:
            scores = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))
        return flat(tape.gradient(loss, model.trainable_variables))

    parts = [gradient(x[start : start + 32], y[start : start + 32]) for start in range(0, 128, 32)]
    return distance(sum(parts) / 4, gradient(x, y))


of_batch, of_layer = (
    lab.measure(normalized, images[:128], labels[:128], norm, label=norm).value
    for norm in ("BatchNormalization", "LayerNormalization")
)
lab.note(
    f"With batch normalization the accumulated gradient differs by {of_batch:.1e} of its length, "
    f"with layer normalization by {of_layer:.1e}."
)
assert of_batch > 100 * of_layer

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C14",
    "partly",
    published=as_published.peak_mib,
    small_batch=small_batch.peak_mib,
    large_batch=unbounded.peak_mib,
    published_distance=errors[as_published.label],
    right_distance_in_millionths=1e6 * errors[right.label],
    right=right.peak_mib,
    keras=keras_own.peak_mib,
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


# %%
check.uneven(accumulate_uneven, images[:100], labels[:100])


# %% tags=["right"]
def accumulate_uneven(gradient, x, y, size):
    starts = range(0, len(x), size)
    parts = [gradient(x[start : start + size], y[start : start + size]) for start in starts]
    return np.average(parts, axis=0, weights=[min(size, len(x) - start) for start in starts])


# %% tags=["wrong"]
# says: padding
def accumulate_uneven(gradient, x, y, size):
    count = -(-len(x) // size)
    more = count * size - len(x)
    x, y = np.pad(x, [(0, more), (0, 0)]), np.pad(y, (0, more))
    parts = zip(np.split(x, count), np.split(y, count))
    return sum(gradient(xs, ys) for xs, ys in parts) / count


# %% tags=["wrong"]
# says: rows weigh
def accumulate_uneven(gradient, x, y, size):
    starts = range(0, len(x), size)
    return np.mean([gradient(x[s : s + size], y[s : s + size]) for s in starts], axis=0)


# %% tags=["wrong"]
# says: 4 rows .* never
def accumulate_uneven(gradient, x, y, size):
    total, whole = 0.0, len(x) // size * size
    for start in range(0, whole, size):
        total = total + gradient(x[start : start + size], y[start : start + size]) * size / whole
    return total


# %% tags=["wrong"]
# says: 100 rows at once
def accumulate_uneven(gradient, x, y, size):
    return gradient(x, y)


# %% tags=["wrong"]
# says: longer or shorter
def accumulate_uneven(gradient, x, y, size):
    return sum(gradient(x[s : s + size], y[s : s + size]) for s in range(0, len(x), size))


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


# %%
check.cleared(two_updates, images[:256], labels[:256])


# %% tags=["right"]
def two_updates(micro_gradients, sums, apply, batches):
    for micro_batches in batches:
        for number, (x, y) in enumerate(micro_batches):
            for total, gradient in zip(sums, micro_gradients(x, y)):
                share = gradient / len(micro_batches)
                total.assign(share if number == 0 else total + share)
        apply()


# %% tags=["wrong"]
# says: still in it
def two_updates(micro_gradients, sums, apply, batches):
    for micro_batches in batches:
        for x, y in micro_batches:
            for total, gradient in zip(sums, micro_gradients(x, y)):
                total.assign_add(gradient / len(micro_batches))
        apply()
        for total in sums:
            total = tf.zeros_like(total)


# %% tags=["wrong"]
# says: first update .* × as long
def two_updates(micro_gradients, sums, apply, batches):
    for micro_batches in batches:
        for total in sums:
            total.assign(tf.zeros_like(total))
        for x, y in micro_batches:
            for total, gradient in zip(sums, micro_gradients(x, y)):
                total.assign_add(gradient)
        apply()


# %% tags=["wrong"]
# says: first update
def two_updates(micro_gradients, sums, apply, batches):
    for micro_batches in batches:
        for x, y in micro_batches:
            for total, gradient in zip(sums, micro_gradients(x, y)):
                total.assign(gradient / len(micro_batches))
        apply()


# %% tags=["wrong"]
# says: holds something else
def two_updates(micro_gradients, sums, apply, batches):
    for micro_batches in batches:
        for x, y in micro_batches:
            for total, gradient in zip(sums, micro_gradients(x, y)):
                total.assign_add(gradient / len(micro_batches))
        apply()
        sums = [tf.Variable(tf.zeros_like(total)) for total in sums]


# %% tags=["wrong"]
# says: each once
def two_updates(micro_gradients, sums, apply, batches):
    for micro_batches in batches:
        for x, y in micro_batches:
            for total, gradient in zip(sums, micro_gradients(x, y)):
                total.assign(gradient)
            apply()


# %% [markdown]
# **3.** With batch normalization no accumulation gives the whole batch's gradient. Build a model for the digits with which
# it does: two dense layers as above, and a normalization and relu between them.


# %%
def normalized_model():
    # BEGIN SOLUTION
    layers = keras.layers
    body = [layers.Dense(64), layers.LayerNormalization(), layers.ReLU(), layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *body])
    # END SOLUTION


# %%
check.accumulates(normalized_model, images[:128], labels[:128])


# %% tags=["right"]
def normalized_model():
    inputs = keras.Input((64,))
    hidden = keras.layers.GroupNormalization(groups=4)(keras.layers.Dense(64)(inputs))
    return keras.Model(inputs, keras.layers.Dense(10)(keras.ops.relu(hidden)))


# %% tags=["right"]
def normalized_model():
    class Digits(keras.Model):
        def __init__(self):
            super().__init__()
            hidden = [keras.layers.Dense(64), keras.layers.LayerNormalization()]
            self.body = keras.Sequential([*hidden, keras.layers.ReLU()])
            self.scores = keras.layers.Dense(10)

        def call(self, x, training=False):
            return self.scores(self.body(x, training=training))

    return Digits()


# %% tags=["wrong"]
# says: no two dense layers
def normalized_model():
    layers = keras.layers
    body = [layers.LayerNormalization(), layers.ReLU(), layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *body])


# %% tags=["wrong"]
# says: micro-batches' own
def normalized_model():
    layers = keras.layers
    body = [layers.Dense(64), layers.BatchNormalization(momentum=0.9), layers.ReLU()]
    return keras.Sequential([keras.Input((64,)), *body, layers.Dense(10)])


# %% tags=["wrong"]
# says: nothing is normalized
def normalized_model():
    layers = keras.layers
    body = [layers.Dense(64), layers.ReLU(), layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *body])


# %% tags=["wrong"]
# says: nothing is normalized
def normalized_model():
    layers = keras.layers
    body = [layers.Dense(64, activation="tanh"), layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *body])


# %% tags=["wrong"]
# says: nothing is normalized
def normalized_model():
    layers = keras.layers
    frozen = layers.BatchNormalization(trainable=False)
    body = [layers.Dense(64), frozen, layers.ReLU(), layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *body])
