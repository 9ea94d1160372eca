# %% [markdown]
# # 09 · What leaks over epochs
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

import labsupport as lab
from labsupport.graders import leaks_over_epochs as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

EPOCHS = lab.choose(SCALE, quick=8, full=32)
BUDGET = lab.choose(SCALE, quick="192 MiB", full="768 MiB")
STEPS = 4  # in an epoch
BATCH, INPUTS, UNITS, CLASSES = 256, 512, 1024, 1000

# %% [markdown]
# ## Predict
#
# The article's advice is about an ordinary eager training loop: a model, a tape, a few steps an epoch.


# %%
def build():
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(UNITS, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input((INPUTS,)), *hidden, keras.layers.Dense(CLASSES)])


def samples():
    random = np.random.default_rng(0)
    x = tf.constant(random.random((BATCH, INPUTS), np.float32))
    return x, tf.constant(random.integers(0, CLASSES, BATCH))


my_guess = lab.guess(
    "A loop also keeps every step's gradients in a list, to plot them later. "
    f"Peak after {EPOCHS} epochs of {STEPS} steps?",
    GUESS_MIB,
)

# %% [markdown]
# Gradients have the shapes of the weights. Count those, and what a tape holds: the outputs of the layers, and the
# probabilities that the loss computes from the last of them.

# %%
shapes = [(INPUTS, UNITS), (UNITS,), (UNITS, UNITS), (UNITS,), (UNITS, CLASSES), (CLASSES,)]
weights = sum(lab.tensor_mib(shape) for shape in shapes)
activations = sum(lab.tensor_mib((BATCH, width)) for width in (UNITS, UNITS, CLASSES, CLASSES))
predicted_growth = STEPS * weights
print(f"weights, and so the gradients of one step: {weights:.2f} MiB")
print(f"activations: {activations:.2f} MiB")
print(f"kept gradients: {STEPS} × {weights:.2f} = {predicted_growth:.1f} MiB more in every epoch")

# %% [markdown]
# ## Failure
#
# First the article's loop as it stands. It is said to grow in every epoch, because nothing is deleted.


# %%
def train(epochs, log=None, delete=()):
    """log: what to keep of each step's gradients. delete: what the article's clean-up deletes."""
    (x, y), model, optimizer = samples(), build(), keras.optimizers.SGD(0.001)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    kept, levels = [], []
    for epoch in range(1, epochs + 1):
        with lab.phase(f"epoch {epoch}"):
            for _ in range(STEPS):
                with tf.GradientTape() as tape:
                    loss = loss_function(y, model(x, training=True))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables))
                if log:
                    kept.append(log(gradients))
            if delete:
                tf.compat.v1.reset_default_graph()
            if "names" in delete:
                del loss, gradients, tape
            if "list" in delete:
                del kept[:]
        levels.append(lab.reading())
    return [level.tensors_mib for level in levels], [level.process_mib for level in levels]


def growth(levels, warm_up=2):
    """MiB an epoch, without the first epochs, in which pools and caches fill."""
    return (levels[-1] - levels[warm_up - 1]) / (len(levels) - warm_up)


plain = lab.run(train, EPOCHS, label="the article's loop")
lab.expect_finished(plain)
print("tensors in use after each epoch (MiB):", *(f"{level:.1f}" for level in plain.value[0]))
print(f"growth of tensors: {growth(plain.value[0]):.2f} MiB an epoch")

# %% [markdown]
# It does not leak: a name that is assigned again lets go of its old tensor. So the failure needs something more. A
# real one is a line that looks harmless: each step's gradients go into a list, for a plot after training.


# %%
def all_gradients(gradients):
    return gradients


failure = lab.run(train, EPOCHS, all_gradients, budget=BUDGET, label="gradients kept")
lab.expect_oom(failure)

# %% [markdown]
# ## Advice, tested
#
# The article's fix: `del` the tensors and call `tf.compat.v1.reset_default_graph()` after every epoch. Which ones it leaves
# open: the loop's own names, or the list as well. All run with room for their epochs, so that we see where they end.

# %%
unbounded = lab.run(train, EPOCHS, all_gradients, label="gradients kept, no tight budget")
article = lab.run(train, EPOCHS, all_gradients, ["names"], label="gradients kept, names deleted")
emptied = lab.measure(
    train, EPOCHS, all_gradients, ["names", "list"], label="gradients kept, list deleted"
)
lab.expect_finished(unbounded, article)
plain_deleted = lab.measure(train, EPOCHS, None, ["names"], label="the article's loop, its fix")
lab.note(
    f"Where gradients are kept, tensors grow by {growth(unbounded.value[0]):.2f} MiB an epoch; "
    "with the loop's names deleted "
    f"by {growth(article.value[0]):.2f}, with the list deleted too by "
    f"{growth(emptied.value[0]):.2f}. The article's own loop "
    f"ends an epoch at {plain_deleted.value[0][-1]:.1f} MiB with its fix, at "
    f"{plain.value[0][-1]:.1f} without it."
)

# %% [markdown]
# No clean-up may free what a program can still reach: as long as the list refers to the gradients, they stay. Deleting the
# list's items does free them, and with them what the plot was to be made of. In the loop that never leaked, `del` lets go of
# the last step's gradients a moment earlier: one set, once, which is a lower level between epochs, not less growth.
#
# ## Fix
#
# Keep the number that the plot needs.


# %%
def norm(gradients):
    return float(tf.linalg.global_norm(gradients))


fix = lab.run(train, EPOCHS, norm, budget=BUDGET, label="norms kept")
lab.expect_finished(fix)

# %% [markdown]
# ## Side by side

# %%
side_by_side = lab.compare(unbounded, failure, article, fix, plain)
side_by_side

# %%
loops = {
    "gradients kept": unbounded,
    "gradients kept, the article's fix": article,
    "norms kept": fix,
    "the article's loop": plain,
}
epochs = pd.RangeIndex(1, EPOCHS + 1, name="tensors after epoch")
tensors, process = (
    pd.DataFrame({label: result.value[which] for label, result in loops.items()}, epochs)
    for which in (0, 1)
)
_, axes = plt.subplots(1, 2)
shared = {"style": lab.LINES, "xlabel": "epoch", "ylim": (0, None)}
shared["ylabel"] = "added since the start (MiB)"
tensors.plot(ax=axes[0], title="tensors in use", **shared)
process.plot(ax=axes[1], title="resident memory of the process", legend=False, **shared)
plt.show()
tensors.round(1).T

# %%
lab.predicted_vs_measured(
    growth_an_epoch=(predicted_growth, growth(unbounded.value[0])),
    gradients_kept_peak=(EPOCHS * predicted_growth + 2 * weights, unbounded.peak_mib),
)

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
            now, python = lab.reading(), tracemalloc.get_traced_memory()[0] / 2**20
            levels.append((now.tensors_mib, python, now.process_mib))
        rows.append([name, *((b - a) / (steps - 1) for a, b in zip(levels[0], levels[-1]))])
    return rows


kinds_run = lab.measure(kinds, lab.choose(SCALE, quick=4, full=16), label="kinds of things kept")
columns = ["kept", "tensors", "Python and NumPy", "process"]
kept = pd.DataFrame(kinds_run.value, columns=columns).set_index("kept")
kept.round(3).add_suffix(", MiB a step")

# %%
kept_tensors, kept_arrays = kept["tensors"], kept["Python and NumPy"]
wide = lab.tensor_mib((BATCH, CLASSES))
lab.predicted_vs_measured(
    gradients=(weights, kept_tensors["gradients"]),
    wide_predictions=(wide, kept_tensors[f"predictions of width {CLASSES}"]),
    unused_tape=(activations, kept_tensors["tapes, gradient never taken"]),
    persistent_tape=(weights + activations, kept_tensors["persistent tapes"]),
    weights_as_NumPy=(weights, kept_arrays["model.get_weights(), as callbacks do"]),
)

# %% [markdown]
# The allocator hands out whole chunks, and a chunk can be larger than its tensor. The row *nothing* shows how far two
# readings can lie apart for that reason alone. A kept tensor costs its own bytes. So it all depends on *what* is kept:
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


def clean_up_one_by_one():
    (x, _), model = samples(), build()

    def gradients_of_a_step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    gradients_of_a_step()
    places, log_placement = {}, tf.debugging.set_log_device_placement
    clean_ups = {
        "tf.debugging.set_log_device_placement(True)": lambda: log_placement(True),
        "tf.compat.v1.reset_default_graph()": tf.compat.v1.reset_default_graph,
        "keras.utils.clear_session()": keras.utils.clear_session,
        "del of the name": lambda: places.pop("gradients", None),
        "gc.collect()": gc.collect,
        "emptying the list": lambda: places.pop("list", None),
    }
    for situation in ("bound to a name", "in a list", "in a dropped cycle"):
        gc.collect()
        if situation == "bound to a name":
            places["gradients"] = gradients_of_a_step()
        elif situation == "in a list":
            places["list"] = [gradients_of_a_step()]
        else:
            Record(gradients_of_a_step())
        for name, clean_up in clean_ups.items():
            with lab.phase(f"{name}: {situation}"):
                clean_up()


def what_frees_what():
    gc.disable()
    clean_up_one_by_one()
    gc.collect()


frees_run = lab.measure(what_frees_what, label="what frees what")
freed = {tuple(p.name.split(": ")): p.level_mib - p.held_mib for p in frees_run.phases}
frees = pd.Series(freed).unstack(sort=False)
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
print(
    f"tensors in use: {frees_run.end_mib:.2f} MiB, "
    f"memory of the process: +{frees_run.process_end_mib:.0f} MiB"
)
print(
    f"in the article's loop: tensors {plain.value[0][-1]:.0f} MiB after the last epoch, "
    f"process +{plain.value[1][-1]:.0f} MiB, peak of a step {plain.peak_mib:.0f} MiB"
)

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
in_use = lambda: tf.config.experimental.get_memory_info("CPU:0")["current"]
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
    before = in_use()
    for _ in range(3):
        step(keep)
    print("GREW", (in_use() - before) / 2**20, flush=True)
print("MARK", file=sys.stderr, flush=True)
"""


def placement_log():
    import os
    import subprocess
    import sys

    command, env = [sys.executable, "-c", PLACEMENT], {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    _, clean, leaking, _ = (
        [line.split("] ")[-1] for line in part.splitlines() if "Executing op" in line]
        for part in done.stderr.split("MARK")
    )
    grew = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("GREW")]
    return clean, leaking, *grew


placement_run = lab.measure(placement_log, label="device placement log")
clean_log, leaking_log, clean_growth, leaking_growth = placement_run.value
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
    print(
        f"{kept_mib:g} MiB kept a step, {steps_an_epoch} steps an epoch: "
        f"{free_gib:g} GiB are full after {epochs:,.1f} epochs (predicted)"
    )


lab.explore(
    until_full, kept_mib=(0.01, 100.0, 0.01), steps_an_epoch=(1, 1000, 1), free_gib=(0.5, 80.0, 0.5)
)

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C09",
    "partly",
    weights=weights,
    gradients=kept_tensors["gradients"],
    persistent=kept_tensors["persistent tapes"],
    losses=kept_tensors["loss tensors"],
    tapes=kept_tensors["tapes, gradient taken"],
)

# %%
lab.verdict(
    "C10",
    "partly",
    growth=growth(unbounded.value[0]),
    growth_names_deleted=growth(article.value[0]),
    growth_list_deleted=growth(emptied.value[0]),
    freed_by_reset=frees.loc["tf.compat.v1.reset_default_graph()"].max(),
)

# %%
lab.verdict(
    "C11",
    "fails",
    lines=len(leaking_log),
    different_lines=different,
    freed=frees.loc["tf.debugging.set_log_device_placement(True)"].max(),
    weights=weights,
)

# %%
lab.verdict(
    "C29",
    "fails",
    growth=growth(plain.value[0]),
    growth_deleted=growth(plain_deleted.value[0]),
    weights=weights,
    tensors_at_end=plain.value[0][-1],
    process_at_end=plain.value[1][-1],
)

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


# %%
check.slope(slope, unbounded.value[0], plain.value[0], weights, predicted_growth)


# %% tags=["right"]
def slope(levels, warm_up):
    y = np.array(levels[warm_up:], float)
    x = np.arange(len(y)) - (len(y) - 1) / 2
    return (x @ y) / (x @ x)


# %% tags=["wrong"]
# says: its two ends alone
def slope(levels, warm_up):
    rest = levels[warm_up:]
    return (rest[-1] - rest[0]) / (len(rest) - 1)


# %% tags=["wrong"]
# says: a plateau
def slope(levels, warm_up):
    return float(np.polyfit(np.arange(len(levels)), levels, 1)[0])


# %% tags=["wrong"]
# says: return one
def slope(levels, warm_up):
    rest = levels[warm_up:]
    return np.polyfit(np.arange(len(rest)), rest, 1)


# %% [markdown]
# **2.** This evaluation collects all outputs before it reduces them. Write one that returns the same class numbers and
# holds one batch of outputs at a time.

# %%
BATCHES = 20


def evaluate_at_the_end(model, x):
    outputs = [model(tf.roll(x, number, axis=1)) for number in range(BATCHES)]
    return tf.argmax(tf.concat(outputs, axis=0), axis=1).numpy()


def model_and_rows():
    (x, _), model = samples(), build()
    model(x)
    return model, x


# %%
def evaluate_by_batch(model, x):
    # BEGIN SOLUTION
    return np.concatenate(
        [tf.argmax(model(tf.roll(x, number, axis=1)), axis=1).numpy() for number in range(BATCHES)]
    )
    # END SOLUTION


# %%
check.evaluation(evaluate_by_batch, evaluate_at_the_end, model_and_rows)


# %% tags=["right"]
def evaluate_by_batch(model, x):
    found = []
    for number in range(BATCHES):
        found.extend(model(tf.roll(x, number, axis=1)).numpy().argmax(axis=-1))
    return np.array(found)


# %% tags=["wrong"]
# says: pile up
def evaluate_by_batch(model, x):
    outputs = []
    for number in range(BATCHES):
        outputs.append(model(tf.roll(x, number, axis=1)))
    return np.concatenate([tf.argmax(output, axis=1).numpy() for output in outputs])


# %% tags=["wrong"]
# says: same batches
def evaluate_by_batch(model, x):
    return np.concatenate([tf.argmax(model(x), axis=1).numpy() for _ in range(BATCHES)])


# %% tags=["wrong"]
# says: shape
def evaluate_by_batch(model, x):
    for number in range(BATCHES):
        classes = tf.argmax(model(tf.roll(x, number, axis=1)), axis=1).numpy()
    return classes


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


# %%
class KeepBest(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.lowest, self.best = float("inf"), None

    def on_epoch_end(self, epoch, logs=None):
        # BEGIN SOLUTION
        if logs["loss"] < self.lowest:
            self.lowest, self.best = logs["loss"], self.model.get_weights()
        # END SOLUTION


# %%
check.keep_best(KeepBest, build, weights)


# %% tags=["right"]
class KeepBest(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.lowest, self.best = None, None

    def on_epoch_end(self, epoch, logs=None):
        if self.lowest is not None and logs["loss"] >= self.lowest:
            return
        self.best = [weight.numpy().copy() for weight in self.model.weights]
        self.lowest = logs["loss"]


# %% tags=["wrong"]
# says: another epoch
class KeepBest(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.lowest, self.best = float("inf"), None

    def on_epoch_end(self, epoch, logs=None):
        if logs["loss"] < self.lowest:
            self.best = self.model.get_weights()


# %% tags=["wrong"]
# says: keep one set only
class KeepBest(KeepAll):
    pass


# %% tags=["wrong"]
# says: live variables|another epoch
class KeepBest(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.lowest, self.best = float("inf"), None

    def on_epoch_end(self, epoch, logs=None):
        if logs["loss"] < self.lowest:
            self.lowest, self.best = logs["loss"], self.model.weights
