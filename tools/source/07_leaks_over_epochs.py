# %% [markdown]
# # 07 · What leaks over epochs
#
# **Symptom:** *"OOM after several epochs"*, *"RAM keeps growing during training"*. The first epochs fit, a later one
# does not, and nothing in the model has changed.
#
# **Afterwards you can** tell a leak from a pool that stays warm, find out what a loop keeps with counters that are
# exact, and say which clean-up call frees what.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 35 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C09, C10, C11, C29 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" trains four times as many epochs
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import gc
import tracemalloc

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from labsupport import (
    choose, compare, exercise, expect_oom, explore, guess, load_tensorflow, phase, predicted_vs_measured, reading, run,
    tensor_mib, verdict,
)  # fmt: skip
from labsupport.showing.palette import style

tf = load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

EPOCHS = choose(SCALE, quick=8, full=32)
BUDGET = choose(SCALE, quick="192 MiB", full="768 MiB")
STEPS = 4  # in an epoch
BATCH, INPUTS, UNITS, CLASSES = 256, 512, 1024, 1000

# %% [markdown]
# ## Predict
#
# The article's advice is about an ordinary eager training loop: a model, a tape, a few steps an epoch.

# %%
def build():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(UNITS, "relu"), keras.layers.Dense(UNITS, "relu"), keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((INPUTS,)), *layers])


def samples():
    random = np.random.default_rng(0)
    return tf.constant(random.random((BATCH, INPUTS), np.float32)), tf.constant(random.integers(0, CLASSES, BATCH))


my_guess = guess(f"A loop also keeps every step's gradients in a list, to plot them later. Peak after {EPOCHS} epochs of {STEPS} steps?", GUESS_MIB)

# %% [markdown]
# Gradients have the shapes of the weights. Count those, and what a tape holds: the outputs of the layers, and the
# probabilities that the loss computes from the last of them.

# %%
shapes = [(INPUTS, UNITS), (UNITS,), (UNITS, UNITS), (UNITS,), (UNITS, CLASSES), (CLASSES,)]
weights = sum(tensor_mib(shape) for shape in shapes)
activations = sum(tensor_mib((BATCH, width)) for width in (UNITS, UNITS, CLASSES, CLASSES))
predicted_growth = STEPS * weights
print(f"weights, and so the gradients of one step: {weights:.2f} MiB; activations: {activations:.2f} MiB")
print(f"kept gradients: {STEPS} × {weights:.2f} = {predicted_growth:.1f} MiB more in every epoch")

# %% [markdown]
# ## Failure
#
# First the article's loop as it stands. It is said to grow in every epoch, because nothing is deleted.

# %%
def train(epochs, log=None, article_fix=False):
    """log: what to keep of each step's gradients. article_fix: clean up after each epoch, as the article says."""
    (x, y), model, optimizer = samples(), build(), keras.optimizers.SGD(0.001)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    kept, levels = [], []
    for epoch in range(1, epochs + 1):
        with phase(f"epoch {epoch}"):
            for _ in range(STEPS):
                with tf.GradientTape() as tape:
                    loss = loss_function(y, model(x, training=True))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables))
                if log:
                    kept.append(log(gradients))
            if article_fix:
                del loss, gradients, tape
                tf.compat.v1.reset_default_graph()
        levels.append(reading())
    return [level.tensors_mib for level in levels], [level.process_mib for level in levels]


def growth(levels, warm_up=2):
    """MiB an epoch, without the first epochs, in which pools and caches fill."""
    return (levels[-1] - levels[warm_up - 1]) / (len(levels) - warm_up)


plain = run(train, EPOCHS, label="the article's loop").need()
print("tensors in use after each epoch (MiB):", *(f"{level:.1f}" for level in plain.value[0]))
print(f"growth of tensors: {growth(plain.value[0]):.2f} MiB an epoch")

# %% [markdown]
# It does not leak: a name that is assigned again lets go of its old tensor. So the failure needs something more. A
# real one is a line that looks harmless: each step's gradients go into a list, for a plot after training.

# %%
def all_gradients(gradients):
    return gradients


failure = run(train, EPOCHS, all_gradients, budget=BUDGET, label="gradients kept")
expect_oom(failure);

# %% [markdown]
# ## Fix
#
# The article's fix: delete the loop's variables and call `tf.compat.v1.reset_default_graph()` after every epoch. Both
# loops run with room for all their epochs, so that we see where they end.

# %%
unbounded = run(train, EPOCHS, all_gradients, label="gradients kept, no tight budget").need()
article = run(train, EPOCHS, all_gradients, True, label="gradients kept, the article's fix").need()
plain_deleted = run(train, EPOCHS, None, True, label="the article's loop, its fix", quiet=True).need()
print(f"with the fix, gradients kept: {growth(article.value[0]):.2f} MiB more an epoch; without it: {growth(unbounded.value[0]):.2f} MiB")
print(f"the article's own loop ends an epoch at {plain_deleted.value[0][-1]:.1f} MiB with the fix, at {plain.value[0][-1]:.1f} MiB without it")

# %% [markdown]
# Nothing is cured. The list still refers to every gradient, and no clean-up may free what a program can still reach. In
# the loop that never leaked, `del` lets go of the last step's gradients a moment earlier. That is one set, once: a
# lower level between epochs, not less growth.
#
# What works: keep the number that the plot needs.

# %%
def norm(gradients):
    return float(tf.linalg.global_norm(gradients))


fix = run(train, EPOCHS, norm, budget=BUDGET, label="norms kept").need()

# %% [markdown]
# ## Side by side

# %%
side_by_side = compare(unbounded, failure, article, fix, plain)
side_by_side

# %%
loops = {"gradients kept": unbounded, "gradients kept, the article's fix": article, "norms kept": fix, "the article's loop": plain}
figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", sharex=True)
for panel, which, title in zip(axes, (0, 1), ("tensors in use", "resident memory of the process")):
    for index, (label, result) in enumerate(loops.items()):
        panel.plot(range(1, EPOCHS + 1), result.value[which], marker="o", ms=4, label=label, **style(index))
    panel.set(title=title, xlabel="epoch", ylabel="added since the start (MiB)")
    panel.set_ylim(bottom=0)
    panel.spines[["top", "right"]].set_visible(False)
axes[0].legend(frameon=False, fontsize=9)
plt.show()
pd.DataFrame({label: result.value[0] for label, result in loops.items()}, index=pd.RangeIndex(1, EPOCHS + 1, name="tensors after epoch")).round(1).T

# %%
predicted_vs_measured(growth_an_epoch=(predicted_growth, growth(unbounded.value[0])), gradients_kept_peak=(EPOCHS * predicted_growth + 2 * weights, unbounded.peak_mib))

# %%
print(my_guess.against(unbounded.peak_mib))

# %% [markdown]
# ## Explain
#
# ### What leaks if you keep it?
#
# One process, one model. Each kind of thing is kept for a few steps in a list of its own. Three counters watch:
# TensorFlow's allocator (exact), `tracemalloc` for Python and NumPy (exact), and the resident memory of the process.

# %%
def kinds(steps):
    (x, y), model, optimizer = samples(), build(), keras.optimizers.SGD(0.001)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    narrow = keras.layers.Dense(1)

    def forward(persistent=False):
        with tf.GradientTape(persistent=persistent) as tape:
            logits = model(x, training=True)
            loss = loss_function(y, logits)
        return tape, logits, loss

    def step(persistent=False):
        tape, logits, loss = forward(persistent)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return {"tape": tape, "logits": logits, "loss": loss, "gradients": gradients}

    table = {
        "nothing": lambda: step() and None,
        "loss tensors": lambda: step()["loss"],
        "predictions of width 1": lambda: narrow(x),
        f"predictions of width {CLASSES}": lambda: step()["logits"],
        f"hidden outputs of width {UNITS}, evaluation": lambda: model.layers[0](x),
        "class numbers (argmax), evaluation": lambda: tf.argmax(model(x), axis=1),
        "gradients": lambda: step()["gradients"],
        "tapes, gradient taken": lambda: step()["tape"],
        "tapes, gradient never taken": lambda: forward()[0],
        "persistent tapes": lambda: step(persistent=True)["tape"],
        "model.trainable_variables": lambda: model.trainable_variables,
        "model.get_weights(), as callbacks do": lambda: model.get_weights(),
    }
    step(), narrow(x)  # warm up
    tracemalloc.start()
    rows = []
    for name, thing in table.items():
        kept, levels = [], []
        for _ in range(steps):
            kept.append(thing())
            levels.append((reading().tensors_mib, tracemalloc.get_traced_memory()[0] / 2**20, reading().process_mib))
        tensors, python, process = ((levels[-1][i] - levels[0][i]) / (steps - 1) for i in range(3))
        rows.append({"kept": name, "tensors": tensors, "Python and NumPy": python, "process": process})
    return rows


kinds_run = run(kinds, choose(SCALE, quick=4, full=16), label="kinds of things kept", quiet=True).need()
kept = pd.DataFrame(kinds_run.value).set_index("kept")
kept.round(3).add_suffix(", MiB a step")

# %%
predicted_vs_measured(
    gradients=(weights, kept.loc["gradients", "tensors"]),
    wide_predictions=(tensor_mib((BATCH, CLASSES)), kept.loc[f"predictions of width {CLASSES}", "tensors"]),
    unused_tape=(activations, kept.loc["tapes, gradient never taken", "tensors"]),
    persistent_tape=(weights + activations, kept.loc["persistent tapes", "tensors"]),
    weights_as_NumPy=(weights, kept.loc["model.get_weights(), as callbacks do", "Python and NumPy"]),
)

# %% [markdown]
# The allocator counts whole chunks, and a chunk may be a little larger than its tensor: hence the small differences.
# A kept tensor costs its own bytes. So it all depends on *what* is kept:
#
# * A loss is one number. Keep as many as you like, better as `float(loss)`.
# * An ordinary tape lets everything go when `gradient()` is called. If that never happens, it holds its activations.
# * A persistent tape holds the activations **and that step's weights**: the optimizer's update may not overwrite values
#   that a tape still needs, so it writes the new weights to a fresh place.
# * Variables are the same objects in every step. A list of references to them costs nothing.
# * Weights as NumPy arrays do leak, and TensorFlow's counter shows nothing. Use the counter that sees what you keep.
# * In evaluation, whole outputs add up to the size of the data set. Reduce each batch to what the score needs.
#
# ### Which clean-up frees what?
#
# Three places for one step's gradients: a name that is still bound, a list, and an object in a reference cycle to which
# no name leads any more. The clean-ups run one after the other, in the order of the rows. Automatic collection is off,
# so that each call gets the credit it deserves.

# %%
class Record:
    """Something that refers to itself, as callbacks and models often do."""

    def __init__(self, gradients):
        self.gradients, self.me = gradients, self


def what_frees_what():
    gc.disable()
    (x, y), model = samples(), build()

    def gradients_of_a_step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    gradients_of_a_step()
    places, table = {}, {}
    for situation in ("bound to a name", "in a list", "in a dropped cycle"):
        gc.collect()
        if situation == "bound to a name":
            places["gradients"] = gradients_of_a_step()
        elif situation == "in a list":
            places["list"] = [gradients_of_a_step()]
        else:
            Record(gradients_of_a_step())
        clean_ups = {
            "tf.debugging.set_log_device_placement(True)": lambda: tf.debugging.set_log_device_placement(True),
            "tf.compat.v1.reset_default_graph()": tf.compat.v1.reset_default_graph,
            "keras.utils.clear_session()": keras.utils.clear_session,
            "del of the name": lambda: places.pop("gradients", None),
            "gc.collect()": gc.collect,
            "emptying the list": lambda: places.pop("list", None),
        }
        column = {}
        for name, clean_up in clean_ups.items():
            before = reading().tensors_mib
            clean_up()
            column[name] = before - reading().tensors_mib
        table[situation] = column
    with phase("everything dropped"):
        del x, y, model, gradients_of_a_step
        gc.collect()
    left = reading()
    return table, left.tensors_mib, left.process_mib


frees_run = run(what_frees_what, label="what frees what", quiet=True).need()
frees, tensors_left, process_left = frees_run.value
frees = pd.DataFrame(frees)
frees.round(2).add_suffix(", MiB freed")

# %% [markdown]
# `clear_session()` ends with a garbage collection of its own, so it takes the cycle with it, and `gc.collect()` finds
# nothing left to do. `reset_default_graph()` resets a graph of TensorFlow 1, into which an eager loop has put nothing.
# `del` removes one name: that frees a tensor if it was the last reference, and nothing if a list has another.
#
# ### A pool is not a leak
#
# At the end of that arm every tensor was dropped. Look at both counters then:

# %%
print(f"tensors in use: {tensors_left:.2f} MiB, memory of the process: +{process_left:.0f} MiB")
print(f"in the article's loop: tensors {plain.value[0][-1]:.0f} MiB after the last epoch, process +{plain.value[1][-1]:.0f} MiB, peak of a step {plain.peak_mib:.0f} MiB")

# %% [markdown]
# TensorFlow's allocator takes memory from the system and does not hand it back when a tensor is freed: the next step
# will want it again. From outside (`top`, `nvidia-smi`) that looks like memory that a step forgot to free. It is a
# high-water mark: it climbs in the first epochs and then stays. Only the end of the process gives it back.
#
# ### `set_log_device_placement`
#
# Here it prints nothing unless it is switched on before TensorFlow's first operation. So this arm starts one more
# Python. It takes some steps that keep nothing, then as many that keep their gradients, and compares what the log says.

# %%
PLACEMENT = """
import sys, tensorflow as tf
tf.debugging.set_log_device_placement(True)
x, w, kept = tf.ones((256, 512)), tf.Variable(tf.ones((512, 1024))), []
def step(keep):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ w) ** 2)
    gradient = tape.gradient(loss, w)
    w.assign_sub(0.001 * gradient)
    if keep:
        kept.append(gradient)
step(False)
for keep in (False, True):
    print("MARK", file=sys.stderr, flush=True)
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    for _ in range(3):
        step(keep)
    print("GREW", (tf.config.experimental.get_memory_info("CPU:0")["current"] - before) / 2**20, flush=True)
print("MARK", file=sys.stderr, flush=True)
"""


def placement_log():
    import os
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", PLACEMENT], capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True)
    parts = [[line.split("] ")[-1] for line in part.splitlines() if "Executing op" in line] for part in done.stderr.split("MARK")]
    clean, leaking = (float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("GREW"))
    return parts[1], parts[2], clean, leaking


clean_log, leaking_log, clean_growth, leaking_growth = run(placement_log, label="device placement log", quiet=True).need().value
print(f"steps that keep nothing: {clean_growth:.1f} MiB more, {len(clean_log)} lines of log")
print(f"steps that leak:         {leaking_growth:.1f} MiB more, {len(leaking_log)} lines of log")
different = len(set(clean_log) ^ set(leaking_log)) + abs(len(clean_log) - len(leaking_log))
print(f"lines that differ: {different}. One of them reads: {leaking_log[0]}")

# %% [markdown]
# The log says where operations run, not what stays.
#
# ### A recipe for leak hunters
#
# 1. Choose the counter. Tensors: `tf.config.experimental.get_memory_info(device)["current"]`. Python and NumPy:
#    `tracemalloc`. What only the process shows is a pool, a graph or a library.
# 2. Read it once a round, at the same place. Do not use a peak: it can only rise.
# 3. Leave out the first rounds. Pools, caches and kernels fill there.
# 4. A leak is a slope that goes on over many rounds. A plateau is a pool.
# 5. Divide the slope by the size of a suspect (weights, a batch of outputs). A whole number names it.
# 6. Hold a `weakref` to the suspect and collect garbage. If it is still alive, `gc.get_referrers` tells who holds it.
#
# **When it flips.** A kept thing matters when its size times the number of steps reaches what is free. Move the sliders.

# %%
def until_full(kept_mib=10.0, steps_an_epoch=100, free_gib=8.0):
    epochs = free_gib * 1024 / (kept_mib * steps_an_epoch)
    print(f"{kept_mib:g} MiB kept a step, {steps_an_epoch} steps an epoch: {free_gib:g} GiB are full after {epochs:,.1f} epochs (predicted)")


explore(until_full, kept_mib=(0.01, 100.0, 0.01), steps_an_epoch=(1, 1000, 1), free_gib=(0.5, 80.0, 0.5))

# %% [markdown]
# ## Verdict

# %%
verdict(
    "C09",
    "partly",
    figures={
        "weights": weights, "gradients": kept.loc["gradients", "tensors"], "persistent": kept.loc["persistent tapes", "tensors"],
        "losses": kept.loc["loss tensors", "tensors"], "tapes": kept.loc["tapes, gradient taken", "tensors"],
    },
    tests={
        "kept gradients add the size of the weights in every step": "0.9 * weights < gradients < 1.25 * weights",
        "kept persistent tapes add at least as much": "persistent > 0.9 * weights",
        "kept losses add up to something": "losses > 0.01 * weights",
        "kept ordinary tapes, used once, add up to something": "tapes > 0.01 * weights",
    },
    because="A kept tensor costs its own bytes: the size of the weights for gradients, a few hundred bytes for a loss; a used tape is empty.",
    flips="With what is kept, not with where: wide predictions and hidden outputs add up, numbers do not.",
)  # fmt: skip

# %%
verdict(
    "C10",
    "fails",
    figures={
        "growth": growth(unbounded.value[0]), "growth_with_fix": growth(article.value[0]),
        "freed_by_reset": float(frees.loc["tf.compat.v1.reset_default_graph()"].max()), "weights": weights,
    },
    tests={
        "the leaking loop grows less with del and reset_default_graph()": "growth_with_fix < 0.9 * growth",
        "reset_default_graph() frees some of the gradients": "freed_by_reset > 0.01 * weights",
    },
    because="The list still refers to every gradient; an eager loop puts nothing into the graph that is reset.",
    flips="In TensorFlow 1 style code, where operations pile up in the default graph, resetting it does free them.",
)  # fmt: skip

# %%
verdict(
    "C11",
    "fails",
    figures={"lines": len(leaking_log), "different_lines": different, "freed": float(frees.loc["tf.debugging.set_log_device_placement(True)"].max()), "weights": weights},
    tests={
        "the log of a leaking step differs from that of a clean one": "different_lines > 0 or lines == 0",
        "switching it on frees something": "freed > 0.01 * weights",
    },
    because="It logs on which device an operation runs; the same operations run whether their results are kept or not.",
    flips="It helps with another question: whether an operation runs on the GPU or falls back to the CPU.",
    unit="lines, MiB",
)

# %%
verdict(
    "C29",
    "fails",
    figures={
        "growth": growth(plain.value[0]), "growth_deleted": growth(plain_deleted.value[0]), "weights": weights,
        "tensors_at_end": plain.value[0][-1], "process_at_end": plain.value[1][-1],
    },
    tests={
        "the plain loop's tensors grow from epoch to epoch": "growth > 0.1 * weights",
        "deleting by hand makes it grow less": "growth - growth_deleted > 0.1 * weights",
    },
    because="A name that is assigned again lets its old tensor go; the process keeps the pool that its largest step needed, which looks like growth from outside.",
    flips="As soon as something outlives the step: a list, a callback, a persistent tape.",
)  # fmt: skip

# %% [markdown]
# ## Exercises
#
# **1.** Write the recipe's steps 3 and 4: the growth per round of a series of readings, its first `warm_up` rounds left
# out. Use a straight line through the rest (`np.polyfit`), so that one noisy reading does not decide.

# %%
def slope(levels, warm_up):
    # BEGIN SOLUTION
    rest = levels[warm_up:]
    return float(np.polyfit(np.arange(len(rest)), rest, 1)[0])
    # END SOLUTION


with exercise(1, "rest = levels[warm_up:]; np.polyfit(np.arange(len(rest)), rest, 1)[0] is the slope."):
    answer = slope([10, 110, 120, 120, 120, 120], 2)
    assert answer is not None, "slope() returns nothing yet: return MiB per round."
    assert abs(answer) < 1e-6, f"10, 110, 120, 120, 120, 120 is a plateau after two rounds of warm-up; you say {answer:.1f} a round."
    assert abs(slope([0, 50, 60, 70, 80], 1) - 10) < 1e-6, "50, 60, 70, 80 grows by 10 a round."
    assert abs(slope([0, 10, 30, 20, 40], 1) - 8) < 1e-6, "10, 30, 20, 40 grows by 8 a round as a line; first and last alone would say 10."
    assert slope(unbounded.value[0], 2) > 0.9 * predicted_growth, "the loop that keeps its gradients grows by their size."
    assert abs(slope(plain.value[0], 2)) < 0.1 * weights, "the article's loop is flat."

# %% [markdown]
# **2.** This evaluation collects all outputs before it reduces them. Write one that returns the same class numbers and
# holds one batch of outputs at a time.

# %%
BATCHES = 20


def evaluate_at_the_end(model, x):
    outputs = [model(x * (1 + number)) for number in range(BATCHES)]
    return tf.argmax(tf.concat(outputs, axis=0), axis=1).numpy()


def evaluate_by_batch(model, x):
    # BEGIN SOLUTION
    return np.concatenate([tf.argmax(model(x * (1 + number)), axis=1).numpy() for number in range(BATCHES)])
    # END SOLUTION


def both_evaluations():
    (x, _), model = samples(), build()
    model(x)
    with phase("by batch"):
        mine = evaluate_by_batch(model, x)
    with phase("at the end"):
        theirs = evaluate_at_the_end(model, x)
    return mine, theirs


evaluation = run(both_evaluations, label="two evaluations", quiet=True)
with exercise(2, "Take tf.argmax(model(...), axis=1).numpy() of each batch in the loop, and np.concatenate the small results."):
    mine, theirs = evaluation.need().value
    assert mine is not None, "evaluate_by_batch() returns nothing yet: return one class number for each sample."
    assert np.shape(mine) == np.shape(theirs), f"return an array of shape {np.shape(theirs)}, not {np.shape(mine)}."
    assert np.array_equal(mine, theirs), "the class numbers differ from those of evaluate_at_the_end()."
    peaks = {part.name: part.peak / 2**20 for part in evaluation.phases}
    assert peaks["by batch"] < 0.6 * peaks["at the end"], f"your peak is {peaks['by batch']:.0f} MiB against {peaks['at the end']:.0f}: outputs still pile up."

# %% [markdown]
# **3.** `KeepAll` keeps the weights of every epoch, to return to the best one later. Write `KeepBest`, which keeps only
# the weights of the best epoch so far (the lowest `logs["loss"]`), in `self.best`.

# %%
class KeepAll(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.losses, self.weights = [], []

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])
        self.weights.append(self.model.get_weights())

    @property
    def best(self):
        return self.weights[int(np.argmin(self.losses))]


class KeepBest(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.lowest, self.best = float("inf"), None

    def on_epoch_end(self, epoch, logs=None):
        # BEGIN SOLUTION
        if logs["loss"] < self.lowest:
            self.lowest, self.best = logs["loss"], self.model.get_weights()
        # END SOLUTION


def epochs_with(callback_class):
    """Six epochs as a callback sees them, with known losses; the weights of an epoch are the first ones times its loss."""
    model, callback = build(), callback_class()
    callback.set_model(model)
    callback.on_train_begin()
    first = model.get_weights()
    tracemalloc.start()
    for epoch, loss in enumerate([3.0, 1.0, 2.0, 4.0, 5.0, 6.0]):
        model.set_weights([array * loss for array in first])
        callback.on_epoch_end(epoch, {"loss": loss})
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    return held, None if callback.best is None else [float(abs(array).sum()) for array in callback.best]


def both_callbacks():
    return epochs_with(KeepBest), epochs_with(KeepAll)


callbacks = run(both_callbacks, label="two callbacks", quiet=True)
with exercise(3, "If logs[\"loss\"] < self.lowest: remember that loss, and self.best = self.model.get_weights()."):
    (held, best), (held_by_all, best_of_all) = callbacks.need().value
    assert best is not None, "KeepBest keeps nothing yet: set self.best in on_epoch_end()."
    assert np.allclose(best, best_of_all), "these are not the weights of the epoch with the lowest loss."
    assert held < 1.5 * weights, f"{held:.0f} MiB of arrays are held, the weights are {weights:.0f}: keep one set only."
    assert held_by_all > 3 * held, "KeepAll should hold far more than KeepBest."
