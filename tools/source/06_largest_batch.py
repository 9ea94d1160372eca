# %% [markdown]
# # 06 · The largest batch that fits, and whether you want it
#
# **Symptom:** the batch size was raised until it crashed, the last size that worked was taken – and the training dies
# with *"ResourceExhaustedError: OOM when allocating tensor"* in its second step.
#
# **Afterwards you can** find the largest batch for a budget by trying, so that it also trains, or from two small
# measurements without a single crash, and say what its size does to speed and to learning.
#
# | | |
# |---|---|
# | Time | about 1½ minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C06, C25 |
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
from labsupport.graders import largest_batch as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

FEATURES, FIRST = 256, 1024
WIDTH = lab.choose(SCALE, quick=512, full=1024)
BUDGET_MIB = lab.choose(SCALE, quick=30, full=96)
BUDGET = f"{BUDGET_MIB} MiB"
with np.load("../data/digits.npz") as digits:
    images = digits["images"].reshape(-1, 64).astype("float32") / 16
    labels = digits["labels"].astype("int64")


def network():
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((FEATURES,)), *hidden, keras.layers.Dense(1)])


def train(batch, steps, build_first=False):
    """The first steps of a training with Adam, eagerly: one operation after the other."""
    model, optimizer = network(), keras.optimizers.Adam()
    if build_first:
        optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    for number in range(steps):
        with lab.phase(f"step {number + 1}"):
            step(tf.zeros((batch, FEATURES)), tf.zeros((batch, 1)))


# %% [markdown]
# ## Predict
#
# Four wide layers and Adam. A step over a first, small batch is no trouble:

# %%
first = lab.measure(train, FIRST, 2, label=f"batch {FIRST}")
weights = lab.tensor_mib((network().count_params(),))
print(
    f"peak of two steps: {first.peak_mib:.1f} MiB, of which weights and two slots {3 * weights:.1f}"
)

# %%
my_guess = lab.guess("And over half as many rows again?", GUESS_MIB)

# %% [markdown]
# Weights and slots do not grow with the batch (lab 05); what is left does.

# %%
predicted = 3 * weights + 1.5 * (first.peak_mib - 3 * weights)
fitting = FIRST * (BUDGET_MIB - 3 * weights) / (first.peak_mib - 3 * weights)
print(f"predicted: {predicted:.1f} MiB; by the same rule {BUDGET} are full at {fitting:.0f} rows")

# %% [markdown]
# ## Failure
#
# The search that most people do: one step, and if it worked, half as many rows again, until it dies. Each try is a
# process of its own, as it is with a script that is started again. The dying one takes ten seconds: TensorFlow's
# allocator waits for somebody to free memory.


# %%
def largest_by_trying(steps):
    """The last size of FIRST, half as many again, … whose steps ended well, and all the tries."""
    tries, batch = [], FIRST
    while not tries or tries[-1].ok:
        tries.append(
            lab.run(train, batch, steps, budget=BUDGET, label=f"batch {batch}", quiet=True)
        )
        batch = int(1.5 * batch)
    lab.expect_oom(tries[-1])
    return int(tries[-2].label.split()[1]), tries


found_by_one, _ = largest_by_trying(1)
print(f"one step a try: {found_by_one} rows fit")

# %% [markdown]
# So the training begins, with the size that worked:

# %%
STEPS = 10
failure = lab.run(
    train, found_by_one, STEPS, budget=BUDGET, label=f"{found_by_one} rows, found with one step"
)
lab.expect_oom(failure)

# %% [markdown]
# ## Fix
#
# The same search under the same budget, with three steps a try:

# %%
found, tries_of_three = largest_by_trying(3)
print(f"three steps a try: {found} rows fit")

# %%
fix = lab.run(train, found, STEPS, budget=BUDGET, label=f"{found} rows, found with three steps")
lab.expect_finished(fix)

# %% [markdown]
# And without a budget, what the first steps of the size that was found first take; and, as a control, the first step of
# an optimizer that had its slots made before:

# %%
unbounded = lab.measure(train, found_by_one, 3, label=f"{found_by_one} rows, no tight budget")
step_peaks = [step.peak_mib for step in unbounded.phases]
built = lab.measure(train, found_by_one, 1, True, label="optimizer.build() before the first step")
lab.note(
    f"Step by step {', '.join(f'{peak:.1f}' for peak in step_peaks)} MiB. Adam makes its two "
    f"slots, {2 * weights:.1f} MiB here, in the first update, when the activations are gone; from "
    "the second step on both are there at once. With `optimizer.build(model.trainable_variables)` "
    f"before it, the first step takes {built.peak_mib:.1f} MiB: such a try can be one step."
)
assert built.peak_mib > step_peaks[0] + weights

# %% [markdown]
# ## Side by side

# %%
lab.compare(unbounded, failure, fix)

# %% [markdown]
# Who held it? Both run once more while TensorFlow records every allocation. The first is seen on the way forward,
# where it wants too much, the second at its worst moment, on the way back. What the layers keep for that grows with
# the rows; weights and slots do not.

# %%
lab.take_apart(failure, fix)

# %%
half_more = lab.measure(train, int(1.5 * FIRST), 2, label="half as many rows again")
lab.predicted_vs_measured(half_as_many_rows_again=(predicted, half_more.peak_mib))

# %%
print(my_guess.against(half_more.peak_mib))

# %% [markdown]
# ## Explain
#
# ### Is it the largest?
#
# A search with three steps ends at a size that trains. It can tell the largest of those that it tries, no more. And the
# next one died, but did it have to? Measured without a budget, so that nothing else can kill it:

# %%
beyond = lab.measure(train, int(1.5 * found), 3, label=f"{int(1.5 * found)} rows, no tight budget")
lab.note(
    f"{found} rows peaked at {fix.peak_mib:.1f} MiB of {BUDGET}, half as many again need "
    f"{beyond.peak_mib:.1f}. The search took {sum(arm.seconds for arm in tries_of_three):.0f} s, "
    f"of which the try that died {tries_of_three[-1].seconds:.0f}."
)

# %% [markdown]
# ### Without a crash: two measurements make a line
#
# The line meets the budget, and one try confirms. Two things to know. Both sizes must lie where the batch outweighs
# the update (on the floor of lab 05 the line is flat), and a fifth is kept as a margin: an allocator hands out pieces,
# and its last free MiB may lie in two places. Down to a multiple of 256, since odd sizes leave odd gaps.

# %%
SMALL = lab.choose(SCALE, quick=[640, 896], full=[1280, 1536])
low, high = (
    lab.measure(train, batch, 2, label=f"batch {batch}", budget=BUDGET).peak_mib for batch in SMALL
)
slope = (high - low) / (SMALL[1] - SMALL[0])
meets = SMALL[1] + (BUDGET_MIB - high) / slope
by_line = int(0.8 * meets) // 256 * 256
confirmed = lab.measure(train, by_line, STEPS, label=f"{by_line} rows, by the line", budget=BUDGET)
lab.note(
    f"The line meets {BUDGET} at {meets:.0f} rows, between two tries of the search, which had "
    f"found {found}; {by_line} train, with a peak of {confirmed.peak_mib:.1f} MiB. Nothing died on "
    f"this way. Why a margin: in the failure above {failure.peak_mib:.1f} MiB of {BUDGET} were in "
    f"use, and {failure.wanted_mib:.1f} more had no room in one piece."
)

# %% [markdown]
# The step here is eager. Inside a `tf.function` on a CPU operations run side by side and the peak differs from step
# to step (the grey bars of lab 05): measure several steps and take the highest.
#
# ### What the size does to speed and to learning
#
# Handwritten digits, one hidden layer, plain SGD. The learning rate belongs to the batch size, so each size has
# the best of four, by its own loss on digits that are held back. Compared twice: after as many *updates*, and after as
# much *time*, for which an update counts as its quickest of forty.

# %%
BATCHES, RATES, SEEDS, UPDATES = [32, 128, 1408], [0.1, 0.3, 1.0, 2.0], [0, 1, 2], 25


def learning(images, labels):
    import time

    def start(rate, seed):
        keras.utils.set_random_seed(seed)
        hidden, scores = keras.layers.Dense(512, activation="relu"), keras.layers.Dense(10)
        model = keras.Sequential([keras.Input((64,)), hidden, scores])
        optimizer = keras.optimizers.SGD(rate)

        def loss_of(x, y):
            return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(x, y)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        return step, tf.function(loss_of)

    def batches(batch, seed):
        rng = np.random.default_rng(seed)
        while True:
            order = rng.permutation(1408)
            for first in range(0, 1408 - batch + 1, batch):
                rows = order[first : first + batch]
                yield images[rows], labels[rows]

    step, _ = start(0.1, 0)
    milliseconds = {}
    for batch in BATCHES:
        taken, feed = [], batches(batch, 0)
        for _ in range(40):
            x, y = next(feed)
            begun = time.perf_counter()
            step(x, y)
            taken.append(1000 * (time.perf_counter() - begun))
        milliseconds[batch] = min(taken)
    losses = {}
    for batch in BATCHES:
        in_time = max(UPDATES, round(UPDATES * milliseconds[1408] / milliseconds[batch]))
        watched = sorted({5, 10, UPDATES, in_time, *range(2 * UPDATES, in_time, UPDATES)})
        for rate in RATES:
            for seed in SEEDS:
                (step, held_back), feed = start(rate, seed), batches(batch, seed)
                curve = losses.setdefault((batch, rate), {count: [] for count in watched})
                for count in range(1, in_time + 1):
                    step(*next(feed))
                    if count in curve:
                        curve[count].append(float(held_back(images[1408:], labels[1408:])))
    return milliseconds, [[*key, curve] for key, curve in losses.items()]


milliseconds, found_losses = lab.measure(learning, images, labels, label="learning").value


# %%
def best(batch, count):
    """Losses after so many updates with the best rate: median, lowest, highest of the seeds."""
    of_rates = {rate: curve[count] for size, rate, curve in found_losses if size == batch}
    rate = min(of_rates, key=lambda rate: np.median(of_rates[rate]))
    return float(np.median(of_rates[rate])), min(of_rates[rate]), max(of_rates[rate]), rate


figure, (by_update, by_time) = plt.subplots(1, 2, sharey=True)
rows = {}
for batch, line, colour in zip(BATCHES, lab.LINES, lab.COLOURS):
    counts = next(list(curve) for size, _, curve in found_losses if size == batch)
    median, lowest, highest, _ = np.transpose([best(batch, count) for count in counts])
    for axes, along in ((by_update, counts), (by_time, milliseconds[batch] * np.array(counts))):
        axes.plot(along, median, ls=line, color=colour, label=f"batch {batch}")
        axes.fill_between(along, lowest, highest, color=colour, alpha=0.15, lw=0)
    rows[batch] = {
        "ms an update": milliseconds[batch],
        "ms an epoch": milliseconds[batch] * 1408 / batch,
        f"loss after {UPDATES} updates": best(batch, UPDATES)[0],
        "best rate then": best(batch, UPDATES)[3],
        "loss after as much time": best(batch, counts[-1])[0],
    }
by_update.set(title="per update", xlabel="updates", ylabel="loss on held-back digits")
by_update.set(xlim=(0, UPDATES), ylim=(0, 2.4))
by_time.set(title="per time", xlabel="milliseconds in updates")
by_time.legend()
plt.show()
digits_table = pd.DataFrame(rows).T.rename_axis("batch")
digits_table.round(2)

# %%
small, middle, full = (digits_table.loc[batch] for batch in BATCHES)
per_update, per_time = f"loss after {UPDATES} updates", "loss after as much time"
lab.note(
    f"Line: the median of {len(SEEDS)} runs, shade: all of them. After {UPDATES} updates each the "
    f"batch of {BATCHES[0]} is at {small[per_update]:.2f} and all rows at once at "
    f"{full[per_update]:.2f}: it saw {UPDATES * BATCHES[0]:,} samples in place of "
    f"{UPDATES * BATCHES[-1]:,}. After the time of {UPDATES} full updates it is at "
    f"{small[per_time]:.2f}: a full update took {full['ms an update'] / small['ms an update']:.1f} "
    "times as long. That is this CPU's: on a device that is not full a large batch takes hardly "
    f"longer than a small one. An epoch takes {small['ms an epoch']:.0f} ms in small batches and "
    f"{full['ms an epoch']:.0f} in one. Neither end need be the best: {BATCHES[1]} rows are at "
    f"{middle[per_update]:.2f} and {middle[per_time]:.2f}, {middle['ms an epoch']:.0f} ms an epoch."
)

# %% [markdown]
# And the memory of four sizes, two on the line of lab 05 and two on its floor:

# %%
memory = {
    batch: lab.measure(train, batch, 2, label=f"batch {batch}").peak_mib
    for batch in (16, 64, FIRST, 2 * FIRST)
}

# %% [markdown]
# ### When it flips
#
# The rows that a budget has room for, and how many of them the optimizer costs. All predicted, from the line above and
# the weights; the margin is in it.


# %%
def room(budget_mib=BUDGET_MIB, weights_mib=4.0, slots=2):
    most = max(0, int(0.8 * (budget_mib - (1 + slots) * weights_mib) / slope))
    without = max(0, int(0.8 * (budget_mib - weights_mib) / slope))
    print(f"{most:,} rows fit, with plain SGD {without:,} (predicted)")


lab.explore(room, budget_mib=(16, 512, 8), weights_mib=(1.0, 64.0, 1.0), slots=(0, 2, 1))

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C25",
    "partly",
    found_with_one_step=found_by_one,
    one_step_trains=failure.ok,
    found_with_three_steps=found,
    three_steps_train=fix.ok,
    half_more_needs=beyond.peak_mib,
    budget=BUDGET_MIB,
)

# %%
lab.verdict(
    "C06",
    "partly",
    rows_2048=memory[2 * FIRST],
    rows_1024=memory[FIRST],
    rows_64=memory[64],
    rows_16=memory[16],
    ms_an_epoch_small=small["ms an epoch"],
    ms_an_epoch_full=full["ms an epoch"],
    loss_small_per_update=small[per_update],
    loss_full_per_update=full[per_update],
    loss_small_per_time=small[per_time],
    loss_full_per_time=full[per_time],
)

# %% [markdown]
# ## Exercises
#
# **1.** Write the finder that most scripts need: start high, halve on out-of-memory, stop at 1. Any other error must
# get through – a wrong shape is no reason for a smaller batch. And the failed try must be over when the next one begins:
# an error that is still at hand holds the call that failed, and all that it held. (It is graded with a stand-in for
# the step, so that no failure costs ten seconds.)


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


# %%
check.halved(halve_until_it_fits)


# %% tags=["right"]
def halve_until_it_fits(step, batch):
    def fits(size):
        try:
            step(size)
        except tf.errors.ResourceExhaustedError:
            return False
        return True

    while batch and not fits(batch):
        batch = batch // 2
    return batch


# %% tags=["right"]
def halve_until_it_fits(step, batch):
    import contextlib

    for power in range(batch.bit_length()):
        with contextlib.suppress(tf.errors.ResourceExhaustedError):
            step(batch >> power)
            return batch >> power
    return 0


# %% tags=["wrong"]
# says: a batch of 0
def halve_until_it_fits(step, batch):
    while True:
        try:
            step(batch)
            return batch
        except tf.errors.ResourceExhaustedError:
            batch //= 2


# %% tags=["wrong"]
# says: fifty tries
def halve_until_it_fits(step, batch):
    while True:
        try:
            step(batch)
            return batch
        except Exception:
            batch = max(1, batch // 2)


# %% tags=["wrong"]
# says: swallowed
def halve_until_it_fits(step, batch):
    while batch >= 1:
        try:
            step(batch)
            return batch
        except Exception:
            batch //= 2
    return 0


# %% tags=["wrong"]
# says: still alive
def halve_until_it_fits(step, batch):
    if batch < 1:
        return 0
    try:
        step(batch)
        return batch
    except tf.errors.ResourceExhaustedError:
        return halve_until_it_fits(step, batch // 2)


# %% tags=["wrong"]
# says: not even a batch of 1
def halve_until_it_fits(step, batch):
    while batch > 1:
        try:
            step(batch)
            break
        except tf.errors.ResourceExhaustedError:
            batch //= 2
    return batch


# %% tags=["wrong"]
# says: begin with the batch
def halve_until_it_fits(step, batch):
    for size in [2**power for power in range(12, -1, -1)]:
        try:
            step(size)
            return size
        except tf.errors.ResourceExhaustedError:
            pass
    return 0


# %% [markdown]
# **2.** Find the largest batch from a line, in a script of your own. `peak(batch)` measures the MiB of a step. Begin at
# `first`, which may still lie on the floor, measure as often as you need (10 tries at most) and never beyond the
# budget. Return a batch that fits and is at least 0.8 of the largest; 0 where the floor alone is too much.


# %%
def largest_by_line(peak, budget_mib, first):
    # BEGIN SOLUTION
    sizes, peaks = [first], [peak(first)]
    if peaks[0] > budget_mib:
        return 0
    slope = 0.0
    while True:
        sizes.append(2 * sizes[-1])
        peaks.append(peak(sizes[-1]))
        before, slope = slope, (peaks[-1] - peaks[-2]) / (sizes[-1] - sizes[-2])
        if before > 0 and abs(slope - before) < 0.05 * slope:  # both above the floor
            return int(0.95 * (sizes[-1] + (budget_mib - peaks[-1]) / slope))
    # END SOLUTION


# %%
check.from_a_line(largest_by_line)


# %% tags=["right"]
def largest_by_line(peak, budget_mib, first):
    import itertools

    measured = {first: peak(first)}
    if measured[first] > budget_mib:
        return 0
    for power in itertools.count(1):
        measured[first * 2**power] = peak(first * 2**power)
        if len(measured) > 2 and min(measured.values()) < 0.6 * max(measured.values()):
            break
    (a, low), (b, high) = list(measured.items())[-2:]
    return int(0.9 * (a + (budget_mib - low) * (b - a) / (high - low)))


# %% tags=["right"]
def largest_by_line(peak, budget_mib, first):
    sizes = first * 2 ** np.arange(8)
    peaks = np.array([peak(first)])
    if peaks[0] > budget_mib:
        return 0
    while len(peaks) < 3 or peaks[-2] < 1.02 * peaks[-3]:  # until two are above the floor
        peaks = np.append(peaks, peak(sizes[len(peaks)]))
    slope, intercept = np.polyfit(sizes[len(peaks) - 2 : len(peaks)], peaks[-2:], 1)
    return np.floor(0.93 * (budget_mib - intercept) / slope)


# %% tags=["wrong"]
# says: divides by zero
def largest_by_line(peak, budget_mib, first):
    (a, b, c), low = (first, 2 * first, 4 * first), peak(first)
    if low > budget_mib:
        return 0
    slopes = np.diff([low, peak(b), peak(c)]) / np.diff([a, b, c])
    while abs(slopes[1] - slopes[0]) > 0.05 * slopes[1]:
        a, b, c = b, c, 2 * c
        slopes = np.diff([peak(a), peak(b), peak(c)]) / np.diff([a, b, c])
    return int(0.9 * (c + (budget_mib - peak(c)) / slopes[1]))


# %% tags=["wrong"]
# says: on the floor
def largest_by_line(peak, budget_mib, first):
    low, high = peak(first), peak(2 * first)
    if low > budget_mib:
        return 0
    if high == low:
        return first
    return int(0.95 * (first + (budget_mib - low) * first / (high - low)))


# %% tags=["wrong"]
# says: intercept
def largest_by_line(peak, budget_mib, first):
    needed = peak(first)
    return int(0.95 * first * budget_mib / needed) if needed <= budget_mib else 0


# %% tags=["wrong"]
# says: beyond the budget
def largest_by_line(peak, budget_mib, first):
    batch = first
    while peak(batch) <= budget_mib:
        batch *= 2
    return batch // 2 if batch > first else 0


# %% [markdown]
# **3.** A search trains the model, and a step that dies may leave it half updated. Run `search()` and give its answer,
# and leave model and optimizer as if it had never run – also where it raises, and its error must get through.


# %%
def without_a_trace(model, optimizer, search):
    # BEGIN SOLUTION
    variables = [*model.variables, *optimizer.variables]
    before = [variable.numpy() for variable in variables]
    try:
        return search()
    finally:
        for variable, value in zip(variables, before):
            variable.assign(value)
    # END SOLUTION


# %%
check.left_as_it_was(without_a_trace)


# %% tags=["right"]
def without_a_trace(model, optimizer, search):
    weights = model.get_weights()
    own = {}
    optimizer.save_own_variables(own)
    own = {name: np.array(value) for name, value in own.items()}
    try:
        found = search()
    except BaseException:
        model.set_weights(weights)
        optimizer.load_own_variables(own)
        raise
    model.set_weights(weights)
    optimizer.load_own_variables(own)
    return found


# %% tags=["right"]
def without_a_trace(model, optimizer, search):
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        kept = tf.train.Checkpoint(model=model, optimizer=optimizer)
        path = kept.write(os.path.join(folder, "before"))
        try:
            return search()
        finally:
            kept.read(path)


# %% tags=["wrong"]
# says: where it raises a ValueError
def without_a_trace(model, optimizer, search):
    variables = [*model.variables, *optimizer.variables]
    before = [variable.numpy() for variable in variables]

    def restore():
        for variable, value in zip(variables, before):
            variable.assign(value)

    try:
        found = search()
    except tf.errors.ResourceExhaustedError:
        restore()
        raise
    restore()
    return found


# %% tags=["wrong"]
# says: optimizer
def without_a_trace(model, optimizer, search):
    before = model.get_weights()
    try:
        return search()
    finally:
        model.set_weights(before)


# %% tags=["wrong"]
# says: moving
def without_a_trace(model, optimizer, search):
    variables = [*model.trainable_variables, *optimizer.variables]
    before = [variable.numpy() for variable in variables]
    try:
        return search()
    finally:
        for variable, value in zip(variables, before):
            variable.assign(value)


# %% tags=["wrong"]
# says: where it raises a Res
def without_a_trace(model, optimizer, search):
    variables = [*model.variables, *optimizer.variables]
    before = [variable.numpy() for variable in variables]
    found = search()
    for variable, value in zip(variables, before):
        variable.assign(value)
    return found


# %% tags=["wrong"]
# says: must get through
def without_a_trace(model, optimizer, search):
    variables = [*model.variables, *optimizer.variables]
    before = [variable.numpy() for variable in variables]
    try:
        found = search()
    except tf.errors.ResourceExhaustedError:
        found = 0
    for variable, value in zip(variables, before):
        variable.assign(value)
    return found
