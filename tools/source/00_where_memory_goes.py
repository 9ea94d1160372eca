# %% [markdown]
# # 00 · Where memory goes in a training step
#
# **Symptom:** *"my model has 3 million parameters, that is 13 MB, so why does training run out of memory?"* — and
# `top`, the GPU tool and TensorFlow's own counter each name a different number.
#
# **Afterwards you can** split a training step into weights, gradients, optimizer slots, activations and workspace,
# predict each from shapes, measure each, and say which of three memory counters answers which question.
#
# | | |
# |---|---|
# | Time | about a minute to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C27 |
#
# Start here: every other lab uses the words and the counters of this one.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes a batch four times as large
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import matplotlib.pyplot as plt
import pandas as pd

import labsupport as lab

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

BATCH = lab.choose(SCALE, quick=8192, full=32768)
WIDTH, DEPTH, INPUTS, CLASSES = 1024, 4, 256, 10


def build():
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(DEPTH)]
    return keras.Sequential([keras.Input((INPUTS,)), *hidden, keras.layers.Dense(CLASSES)])


# %% [markdown]
# ## Predict
#
# This is the model. `summary()` is the tool that most people look at first.

# %%
model = build()
model.summary(line_length=64)

# %%
my_guess = lab.guess(
    f"Peak memory of one training step of this model with Adam and a batch of {BATCH}?", GUESS_MIB
)

# %% [markdown]
# The summary counts the weights and nothing else. A training step needs five things:
#
# | part | how many bytes | lives |
# |---|---|---|
# | weights | parameters × 4 | always |
# | optimizer slots | Adam: 2 × weights | always |
# | gradients | 1 × weights | from the backward pass to the update |
# | activations | batch × outputs of every layer × 4 | from the forward pass until their gradient is computed |
# | workspace | an intermediate or two of the largest layer | for moments |
#
# Only the activations grow with the batch.

# %%
weights = lab.tensor_mib((model.count_params(),))
one_layer = lab.tensor_mib((BATCH, WIDTH))
print(f"weights: {model.count_params():,} × 4 B = {weights:.1f} MiB")
print(f"one layer's output: {BATCH} × {WIDTH} × 4 B = {one_layer:.1f} MiB")
predicted = lab.predict_step(model, BATCH, "adam", graph=False)
predicted

# %% [markdown]
# ## Failure
#
# Somebody reads the summary, adds Adam's two slots and the gradients, and allows half as much again. That is a budget
# of six times the weights, generous if weights were all.


# %%
def train_one_step(batch):
    model, optimizer = build(), keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    x, y = tf.zeros([batch, INPUTS]), tf.zeros([batch], tf.int32)
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return float(loss)


by_summary = f"{6 * weights:.0f} MiB"
failure = lab.run(train_one_step, BATCH, budget=by_summary, label="budget from summary()")
lab.expect_oom(failure)

# %% [markdown]
# ## Fix
#
# The fix is arithmetic: a budget from all five parts, with a quarter in hand, since one prediction is no measurement.

# %%
by_parts = f"{1.25 * predicted.total_mib:.0f} MiB"
fix = lab.run(train_one_step, BATCH, budget=by_parts, label="budget from all parts")
lab.expect_finished(fix)

# %% [markdown]
# Now the same step taken apart. Each `with phase(...)` block below gets its own exact peak, and what is still held when
# it ends.


# %%
def taken_apart(batch):
    with lab.phase("weights"):
        model, optimizer = build(), keras.optimizers.Adam()
    with lab.phase("slots"):
        optimizer.build(model.trainable_variables)
    with lab.phase("input"):
        x, y = tf.zeros([batch, INPUTS]), tf.zeros([batch], tf.int32)
    with lab.phase("forward"):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
    with lab.phase("backward"):
        gradients = tape.gradient(loss, model.trainable_variables)
    with lab.phase("update"):
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return float(loss)


parts = lab.run(taken_apart, BATCH, label="one step, taken apart")
lab.expect_finished(parts)

# %% [markdown]
# ## Side by side
#
# First the failure and the fix, then prediction and measurement part by part.

# %%
lab.compare(failure, fix)

# %%
kept = ("weights", "optimizer slots", "input", "activations kept")
measured = {name: part.added_mib for name, part in zip(kept, parts.phases)}
expected = {name: predicted.parts[name] for name in kept}
measured["gradients and workspace"] = parts.peak_mib - sum(measured.values())
expected["gradients and workspace"] = predicted.total_mib - sum(expected.values())
sizes = pd.DataFrame({"predicted": expected, "measured": measured})

axes = sizes.T.plot.barh(stacked=True, figsize=(8, 2.6), xlabel="peak of one training step (MiB)")
axes.bar_label(axes.containers[-1], [f" {total:.0f} MiB" for total in sizes.sum()])
axes.invert_yaxis()
axes.margins(x=0.15)
axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.3))
plt.show()

# %%
lab.predicted_vs_measured(
    **{name.replace(" ", "_"): pair for name, *pair in sizes.itertuples()},
    peak=(predicted.total_mib, parts.peak_mib),
)

# %%
print(my_guess.against(parts.peak_mib))
assert measured["activations kept"] > 3 * measured["weights"], (
    "at this batch size activations must outweigh weights"
)

# %% [markdown]
# ### How much state an optimizer keeps


# %%
def slots_of_each():
    with lab.phase("weights"):
        model = build()
    for name in ("SGD", "RMSprop", "Adam"):
        with lab.phase(name):
            optimizer = getattr(keras.optimizers, name)()
            optimizer.build(model.trainable_variables)
        del optimizer


states = lab.measure(slots_of_each, label="state of three optimizers")
slots = pd.Series({part.name: part.added_mib for part in states.phases})
pd.DataFrame({"state MiB": slots, "× weights": slots / slots["weights"]}).round(2)

# %% [markdown]
# ## Explain
#
# **Why the summary misleads.** Weights are read once per step whatever the batch is. Activations are kept because the
# backward pass needs each layer's output; they grow with the batch. Move the slider to find the batch at which
# activations overtake everything that hangs on the weights.


# %%
def overtaking(batch=1024):
    step = lab.predict_step(model, batch, "adam", graph=False).parts
    state = step["weights"] + step["gradients"] + step["optimizer slots"]
    growing = ("input", "activations kept", "gradients of activations")
    moving = sum(step.get(name, 0) for name in growing)
    print(
        f"batch {batch}: weights and their company {state:.0f} MiB, "
        f"all that grows with the batch {moving:.0f} MiB (predicted)"
    )


lab.explore(overtaking, batch=(32, 8192, 32))

# %% [markdown]
# **Three counters, three stories.** The same process, asked three ways at four moments. NumPy's memory does not pass
# through TensorFlow's allocator. A freed tensor goes back to the allocator's pool, not to the system. Virtual size counts
# addresses that were only reserved.


# %%
def three_stories():
    import numpy as np
    import psutil

    def ask():
        now, virtual = lab.reading(), psutil.Process().memory_info().vms
        return now.tensors_mib, now.process_mib, (virtual - reserved) / 2**20

    reserved = psutil.Process().memory_info().vms
    rows = {"at the start": ask()}
    tensor = tf.ones([200 * 2**18])
    rows["a 200 MiB tensor"] = ask()
    del tensor
    rows["the tensor deleted"] = ask()
    array = np.ones(100 * 2**18, np.float32)
    rows["then a 100 MiB NumPy array"] = ask()
    return rows, float(array[0])


stories, _ = lab.measure(three_stories, budget="1 GiB", label="three counters").value
counters = ["TensorFlow's allocator (MiB)", "resident set, as in top (MiB)", "virtual size (MiB)"]
pd.DataFrame(stories, index=counters).T.round(0)

# %% [markdown]
# The allocator answers *what do my tensors need*. The resident set answers *what will the system kill me for*; it does not
# fall when tensors are freed, which many people take for a leak. Virtual size answers neither.
#
# **A sampler misses peaks.** Many tools ask for the resident set every few milliseconds from a thread. Python code that
# holds the interpreter's lock keeps that thread out, and the peak passes unseen. The high-water mark is a counter of the
# operating system and cannot miss it.


# %%
def sampled():
    import threading
    import time

    import psutil

    process, samples, done = psutil.Process(), [], threading.Event()
    start = process.memory_info().rss

    def look():
        while not done.is_set():
            samples.append((process.memory_info().rss - start) / 2**20)
            time.sleep(0.01)

    thread = threading.Thread(target=look)
    thread.start()
    time.sleep(0.1)
    len(b"x" * (300 * 2**20))  # 300 MiB for a moment
    time.sleep(0.1)
    done.set()
    thread.join()
    return max(samples)


missed = lab.measure(sampled, label="a sampler beside the counter")
mark = "unavailable" if missed.process_peak_mib is None else f"{missed.process_peak_mib:.0f} MiB"
print(f"highest sample of the thread: {missed.value:.0f} MiB")
print(f"high-water mark of the same process: {mark}")

# %% [markdown]
# That is why the labs take every peak from a counter and use samples only to draw the curve between.
#
# ## Verdict

# %%
lab.verdict("C27", "holds", **slots.rename(str.lower))

# %% [markdown]
# ## Exercises
#
# **1.** Without running anything: how many MiB does one training step of this model take with plain SGD and a batch
# of 64, inside a `tf.function`? Return the number; build it from parts, or let `predict_step` do it.


# %%
def my_prediction():
    # BEGIN SOLUTION
    return lab.predict_step(model, 64, "sgd", graph=True).total_mib
    # END SOLUTION


def small_sgd_step():
    model, optimizer = build(), keras.optimizers.SGD()
    x, y = tf.zeros([64, INPUTS]), tf.zeros([64], tf.int32)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    step()


truth = lab.measure(small_sgd_step, label="SGD, batch 64")
with lab.exercise(
    1, "Weights + gradients + no slots + the batch's activations; see the table of five parts."
):
    answer = my_prediction()
    assert answer is not None, "my_prediction() returns nothing yet: return a number of MiB."
    error = abs(answer - truth.peak_mib) / truth.peak_mib
    assert error < 0.25, (
        f"you said {answer:.0f} MiB, measured were {truth.peak_mib:.0f} MiB: which part is missing?"
    )

# %% [markdown]
# **2.** Under the budget that killed the failing arm, which batch size still fits? Return the largest power of two
# that you would dare, by prediction; it is then run.


# %%
def my_batch(budget_mib):
    # BEGIN SOLUTION
    batch = 1
    while lab.predict_step(model, 2 * batch, "adam", graph=False).total_mib < 0.9 * budget_mib:
        batch *= 2
    return batch
    # END SOLUTION


batch = my_batch(6 * weights)
with lab.exercise(
    2, "Double the batch while predict_step(...).total_mib stays below nine tenths of the budget."
):
    assert batch is not None, "my_batch() returns nothing yet: return a whole number."
    tried = lab.run(train_one_step, batch, budget=by_summary, label=f"batch {batch}", quiet=True)
    assert tried.ok, f"a batch of {batch} does not fit: {tried.error}"
    assert tried.peak_mib > 0.5 * 6 * weights, (
        f"a batch of {batch} uses only {tried.peak_mib:.0f} MiB; twice that batch might fit too."
    )
