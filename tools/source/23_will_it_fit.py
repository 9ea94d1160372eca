# %% [markdown]
# # 23 · Will it fit, and what to change if it does not
#
# **Symptom:** *how much memory will my model need for training, before I rent the GPU?* – *"OOM"* in the first step,
# and then one change after the other is tried: another optimizer, a smaller batch, half precision.
#
# **Afterwards you can** predict the memory of a training step of your own model before anything of it is allocated, say
# which kind of memory fills it, and rank the changes that would make it fit without running any of them.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C42 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes batches of four times the size, and layers of twice the width
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import will_it_fit as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras
from keras import layers

BATCH = lab.choose(SCALE, quick=64, full=256)
WIDE = lab.choose(SCALE, quick=1024, full=2048)
BUDGET = lab.choose(SCALE, quick="128 MiB", full="512 MiB")
POINTS, LOSS = 1024, "sparse_categorical_crossentropy"


def clouds():
    """Classifies clouds of points: the same layers for every point, then the mean of all."""
    hidden = [layers.Dense(units, activation="relu") for units in (64, 128, 256)]
    pooled = [layers.GlobalAveragePooling1D(), layers.Dense(10, activation="softmax")]
    return keras.Sequential([keras.Input((POINTS, 3)), *hidden, *pooled])


def tables():
    """Classifies rows of a table with wide layers."""
    hidden = [layers.Dense(WIDE, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((WIDE,)), *hidden, layers.Dense(10, activation="softmax")])


# %% [markdown]
# ## Predict
#
# Two models for two kinds of data. Here is the first:

# %%
model = clouds()
weights = lab.tensor_mib((model.count_params(),))
print(f"{model.count_params():,} weights, {weights:.2f} MiB; a batch has {BATCH} clouds")

# %%
my_guess = lab.guess(f"Peak memory of a training step with Adam, {BATCH} clouds?", GUESS_MIB)

# %% [markdown]
# By hand: each hidden layer has an output for every point, kept for the way back. There the gradient of the widest
# output comes on top. Weights, gradients and Adam's two slots are four times the weights.

# %%
kept = [lab.tensor_mib((BATCH, POINTS, units)) for units in (64, 128, 256)]
by_hand = sum(kept) + max(kept) + 4 * weights
print(f"outputs: {' + '.join(f'{size:.0f}' for size in kept)} MiB; with the rest {by_hand:.0f} MiB")

# %% [markdown]
# `lab.predict` does that for any Keras model. It builds the model inside a graph, where a variable has a shape and no
# memory, traces the training step, and walks through its operations as TensorFlow would run them: who is alive
# when, and when are most? It wants the *function* that builds the model, since a model that exists has its memory already.

# %%
prediction = lab.predict(clouds, BATCH, optimizer="adam", loss=LOSS)
print(prediction)

# %% [markdown]
# By hand, at the worst moment all outputs are kept and a gradient of the widest is there. The prediction names a moment
# that is just as high: the widest output is gone, and two tensors of its size belong to the way back (*working memory*:
# what is there only for moments). The last line is as much a part of it as the first: what the figure does not know.
#
# ## Failure
#
# The budget is below the prediction. Does it really not fit? (`NO_ONEDNN` leaves out Intel's library of fast layers for CPUs:
# where memory runs out inside one of them, TensorFlow 2.21 crashes in place of raising.)

# %%
OPTIMIZERS = {
    "Adam": keras.optimizers.Adam,
    "SGD": keras.optimizers.SGD,
    "Lion": keras.optimizers.Lion,
    "Adafactor": keras.optimizers.Adafactor,
}


def train(build, optimizer="Adam", parts=None, updates=10):
    """A few updates, each over BATCH examples: at once, or in so many parts."""
    model = build()
    model.compile(OPTIMIZERS[optimizer](gradient_accumulation_steps=parts), LOSS)
    rows = BATCH // (parts or 1)
    x = np.random.default_rng(0).standard_normal((BATCH, *model.input_shape[1:]), np.float32)
    y = np.arange(BATCH) % 10
    for _ in range(updates):
        for start in range(0, BATCH, rows):
            model.train_on_batch(x[start : start + rows], y[start : start + rows])


tight = {"budget": BUDGET, "env": lab.NO_ONEDNN}
failure = lab.run(train, clouds, label="Adam", **tight)
lab.expect_oom(failure)

# %% [markdown]
# ## Advice, tested
#
# **A lighter optimizer halves it**, says published advice. Adam keeps two slots for each weight, SGD none. The same
# clouds with plain SGD:

# %%
control = lab.run(train, clouds, "SGD", label="SGD", **tight)
lab.expect_oom(control)

# %% [markdown]
# It saved the slots, and there was next to nothing to save. That could have been known before:

# %%
by_kind = pd.DataFrame({"clouds": prediction.by("kind")})
of_tables = lab.predict(tables, BATCH, optimizer="adam", loss=LOSS)
by_kind["tables"] = pd.Series(of_tables.by("kind"))
by_kind = by_kind.fillna(0).loc[lambda sizes: sizes.max(axis=1) >= 0.1]
shares = (by_kind / by_kind.sum()).T
axes = shares.plot.barh(stacked=True, xlabel="share of the predicted peak")
lab.legend_below(axes)
plt.show()
by_kind.round(1)

# %% [markdown]
# No change saves more than the kinds of memory that it touches. A lighter optimizer touches slots and its own update;
# a smaller batch touches input, activations and working memory, which here is gradients of outputs; recomputation and half
# precision touch activations and a part of those gradients.
#
# ## Fix
#
# `lab.plan` predicts each of the usual changes by itself, for the same step, and ranks them:


# %%
def ranked(prediction):
    """A table of the changes that can be predicted, the most saving first."""
    rows = {
        change.words: {
            "predicted MiB": change.level / 2**20,
            "saves %": 100 * (1 - change.level / prediction.level),
            "lab": change.lab,
        }
        for change in lab.plan(prediction)
        if change.level is not None
    }
    return pd.DataFrame.from_dict(rows, orient="index").round(1)


changes = ranked(prediction)
changes

# %% [markdown]
# Two of these learn something else for certain: frozen layers do not learn, and half a batch is another batch. Strike
# them out, and take the first of those that are left.

# %%
same = changes[~changes["lab"].isin(["shapes_and_layers", "batch_size"])]
print(f"first: {same.index[0]}")
assert same["lab"].iloc[0] == "gradient_accumulation"
fix = lab.run(train, clouds, "Adam", 2, label="Adam, two parts an update", **tight)
lab.expect_finished(fix)

# %% [markdown]
# The same budget, the same optimizer, as many examples in each update.
#
# ## Side by side
#
# What would they have needed, and how near do the predictions come? Both models, without a tight budget, with Adam, at
# once and in two parts, and with three optimizers that are said to be lighter. First the predictions that are not there yet:

# %%
steps = {clouds: {"Adam": prediction}, tables: {"Adam": of_tables}}
for build, predictions in steps.items():
    for name in list(OPTIMIZERS)[1:]:
        predictions[name] = lab.predict(build, BATCH, optimizer=name.lower(), loss=LOSS)
plans = {clouds: changes, tables: ranked(steps[tables]["Adam"])}
plans[tables]

# %% [markdown]
# For the tables the order is another one. Each case in a process of its own:

# %%
bars = {}
for build, predictions in steps.items():
    for name, step in predictions.items():
        label = f"{build.__name__}: {name}"
        arm = lab.measure(train, build, name, None, 2, env=lab.NO_ONEDNN, label=label)
        bars[build.__name__, name] = {"predicted": step.total_mib, "measured": arm.peak_mib}
    in_parts = plans[build].set_index("lab")["predicted MiB"]["gradient_accumulation"]
    label = f"{build.__name__}: Adam, two parts"
    arm = lab.measure(train, build, "Adam", 2, 2, env=lab.NO_ONEDNN, label=label)
    bars[build.__name__, "Adam, two parts"] = {"predicted": in_parts, "measured": arm.peak_mib}
bars = pd.DataFrame(bars).T
pairs = {": ".join(case): tuple(row) for case, row in zip(bars.index, bars.to_numpy(float))}
lab.predicted_vs_measured(**pairs)

# %%
axes = bars.plot.barh(width=0.8, figsize=(10, 5))
plt.setp(axes.containers[1], hatch="//")
room = lab.parse_size(BUDGET) / 2**20
axes.axvline(room, color=lab.BUDGET_LINE, ls="--", lw=1, label="the budget of the clouds")
axes.set_yticks(range(len(bars)), [": ".join(case) for case in bars.index])
axes.set(xlabel="peak of a step (MiB)", ylabel="")
axes.invert_yaxis()
axes.legend()
plt.show()

# %%
clouds_measured, tables_measured = (bars["measured"][name] for name in ("clouds", "tables"))
errors = abs(bars["predicted"] / bars["measured"] - 1)
print(my_guess.against(clouds_measured["Adam"]))
lab.note(
    f"The predictions are off by {errors.median():.1%} in the median, by {errors.max():.1%} at "
    f"worst, for {': '.join(errors.idxmax())}: where weights fill the peak, the order of the "
    "updates decides. For the clouds with Adam it was "
    f"{by_hand / clouds_measured['Adam'] - 1:+.1%} by hand."
)
# The worst miss of all models in data/zoo.md is 37 %.
assert errors.max() < 0.4, "a prediction should be near what is measured"

# %% [markdown]
# Who held it, at the worst moment? Both run once more while TensorFlow records every allocation.

# %%
lab.take_apart(failure, fix)

# %% [markdown]
# ## Explain
#
# * For the clouds, outputs of layers and their gradients fill the peak, and grow with the batch. No optimizer changes them.
# * For the tables, it is weights, slots, gradients and the update. The batch hardly counts. In two parts an update needs
#   even *more*: the sum of the gradients is one more copy of the weights.

# %%
lab.note(
    "Of Adam's peak SGD needs "
    f"{clouds_measured['SGD'] / clouds_measured['Adam']:.0%} for the clouds and "
    f"{tables_measured['SGD'] / tables_measured['Adam']:.0%} for the tables; Adam in two parts "
    f"{clouds_measured['Adam, two parts'] / clouds_measured['Adam']:.0%} and "
    f"{tables_measured['Adam, two parts'] / tables_measured['Adam']:.0%}; Lion, with one slot in "
    f"place of two, {tables_measured['Lion'] / tables_measured['Adam']:.0%} for the tables."
)

# %% [markdown]
# Neither Lion nor Adafactor saves what its paper says. What do they keep, and what is there in their worst moment?


# %%
def slots_of(name):
    """Numbers in an optimizer's variables for each weight of one wide layer."""
    kernel, optimizer = keras.Variable(tf.zeros((512, 512))), OPTIMIZERS[name]()
    optimizer.build([kernel])
    return sum(np.prod(variable.shape) for variable in optimizer.variables) / 512**2


kinds = {}
for name in OPTIMIZERS:
    kinds[name] = {"kept for each weight": slots_of(name), **steps[tables][name].by("kind")}
wanted = ["kept for each weight", "weights", "optimizer slots", "gradients", "working memory"]
kinds = pd.DataFrame(kinds).T[wanted]
kinds.fillna(0).round(2)

# %% [markdown]
# The first column counts what is kept between steps; the others are MiB at the predicted peak, where new slots may
# stand beside the old. Adafactor's squares could be kept as a row and a column for each matrix. Keras keeps these,
# *and* their product, as large as the weights (`velocity` in `keras/src/optimizers/adafactor.py`). Exercise 2
# does without.
#
# **On a GPU** Keras compiles the step with XLA, which fuses the update and orders operations anew; and convolutions want
# scratch memory. Neither has been measured here: `python -m labsupport fits … --measure` tells, on one.
#
# **When it flips.** The same tables with larger batches, doubled so many times: what would SGD save?


# %%
batches = [64 * 2**doublings for doublings in range(8)]
lines = {
    name: [steps[tables][name].at(batch) / 2**20 for batch in batches] for name in ("Adam", "SGD")
}


def saved(doublings=0):
    adam, sgd = lines["Adam"][doublings], lines["SGD"][doublings]
    print(f"batch {batches[doublings]:,}: Adam {adam:,.1f} MiB, SGD {sgd:,.1f} MiB, ", end="")
    print(f"saves {1 - sgd / adam:.0%} (predicted)")


lab.explore(saved, doublings=(0, 7))

# %% [markdown]
# **Now yours.** Put the function that builds your model in place of `clouds`, its batch, and the memory that you have.
# `ranked(mine)` then ranks the changes.

# %%
mine = lab.predict(clouds, 32, optimizer="adamw", loss=LOSS)
print(f"{mine.total_mib:,.0f} MiB; largest batch in 1 GiB: {mine.largest('1 GiB'):,}")

# %% [markdown]
# In a terminal, for a function in a file, a `.keras` file or a name of `keras.applications`:
#
#     python -m labsupport fits my_file:build_model --batch 8,32 --budget "1 GiB" --optimizer adamw --measure

# %% [markdown]
# ## Verdict

# %%
figures = {
    f"{optimizer.lower()}_{build}": size
    for (build, optimizer), size in bars["measured"].items()
    if optimizer in OPTIMIZERS
}
lab.verdict("C42", "partly", **figures)

# %% [markdown]
# ## Exercises
#
# **1.** From which batch on is a lighter optimizer not worth a try? Write `flips(build)`: the smallest power of two
# for which plain SGD saves less than a tenth of Adam's peak, by prediction, with LOSS. (It is called with other models; a
# test notices if a model is really built.)


# %%
def flips(build):
    # BEGIN SOLUTION
    adam, sgd = (lab.predict(build, 32, optimizer=name, loss=LOSS) for name in ("adam", "sgd"))
    batch = 1
    while 1 - sgd.at(batch) / adam.at(batch) >= 0.1:
        batch *= 2
    return batch
    # END SOLUTION


# %%
check.flips(flips)


# %% tags=["right"]
def flips(build):
    batches = [2**power for power in reversed(range(17))]  # a batch of 65,536 is traced
    lines = [
        lab.predict(build, batches, optimizer=name, loss=LOSS).line for name in ("sgd", "adam")
    ]
    return min(batch for batch in batches if lines[0][batch] > 0.9 * lines[1][batch])


# %% tags=["wrong"]
# says: saves
def flips(build):
    adam, sgd = (lab.predict(build, 32, optimizer=name, loss=LOSS) for name in ("adam", "sgd"))
    batch = 1
    while sgd.at(batch) < 0.5 * adam.at(batch):
        batch *= 2
    return batch


# %% tags=["wrong"]
# says: power of two
def flips(build):
    adam, sgd = (lab.predict(build, 32, optimizer=name, loss=LOSS) for name in ("adam", "sgd"))
    batch = 1
    while sgd.at(batch) <= 0.9 * adam.at(batch):
        batch += 1000
    return batch


# %% tags=["wrong"]
# says: really built
def flips(build):
    layer_sizes = sum(4 * np.prod(weight.shape) for weight in build().weights)
    adam, sgd = (lab.predict(build, 32, optimizer=name, loss=LOSS) for name in ("adam", "sgd"))
    batch = 1
    while 1 - sgd.at(batch) / adam.at(batch) >= 0.1 and batch < layer_sizes:
        batch *= 2
    return batch


# %% [markdown]
# **2.** An optimizer with factored squares that are truly factored. Write `Factored`, a `keras.optimizers.Optimizer`: for
# a gradient g of a matrix it keeps running means r of g²'s rows and c of its columns,
#
#     r ← 0.9 r + 0.1 mean(g², axis 1)     c ← 0.9 c + 0.1 mean(g², axis 0)     v = r c / mean(r)
#
# and for a vector v ← 0.9 v + 0.1 g². Then w ← w − rate × g / (√v + 1e-7). `build(variables)` makes the state with
# `self.add_variable(shape=…, name=…)`, and `update_step(gradient, variable, learning_rate)` changes one variable.


# %%
class Factored(keras.optimizers.Optimizer):
    # BEGIN SOLUTION
    def build(self, variables):
        super().build(variables)
        self.means = []
        for number, variable in enumerate(variables):
            shapes = [(size,) for size in variable.shape]
            self.means.append(
                [self.add_variable(shape=shape, name=f"mean_{number}") for shape in shapes]
            )

    def update_step(self, gradient, variable, learning_rate):
        means = self.means[self._get_variable_index(variable)]
        squares = gradient**2
        if len(means) == 1:
            means[0].assign(0.9 * means[0] + 0.1 * squares)
            v = means[0].value
        else:
            for axis, mean in enumerate(means):
                mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(squares, axis=1 - axis))
            rows, columns = means
            v = rows[:, None] * columns[None, :] / tf.reduce_mean(rows)
        variable.assign_sub(learning_rate * gradient / (tf.sqrt(v) + 1e-7))

    # END SOLUTION


# %%
check.factored(Factored)


# %% tags=["right"]
class Factored(keras.optimizers.Optimizer):
    def build(self, variables):
        super().build(variables)
        self.state = [[self.add_variable(shape=(n,), name="m") for n in v.shape] for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        first, *second = self.state[self._get_variable_index(variable)]
        if second:
            (second,) = second
            self.assign(first, 0.9 * first + 0.1 * keras.ops.mean(gradient**2, -1))
            self.assign(second, 0.9 * second + 0.1 * keras.ops.mean(gradient**2, -2))
            v = keras.ops.outer(first, second) / keras.ops.mean(first)
        else:
            self.assign_add(first, 0.1 * (gradient**2 - first))
            v = first
        step = learning_rate * gradient / (keras.ops.sqrt(v) + 1e-7)
        self.assign_sub(variable, step)


# %% tags=["wrong"]
# says: updates
Factored = keras.optimizers.SGD


# %% tags=["wrong"]
# says: keeps
class Factored(keras.optimizers.Optimizer):
    def build(self, variables):
        super().build(variables)
        self.squares = [self.add_variable_from_reference(v, name="squares") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        mean = self.squares[self._get_variable_index(variable)]
        mean.assign(0.9 * mean + 0.1 * gradient**2)
        v = mean
        if len(mean.shape) == 2:
            rows, columns = tf.reduce_mean(mean, 1), tf.reduce_mean(mean, 0)
            v = rows[:, None] * columns / tf.reduce_mean(rows)
        variable.assign_sub(learning_rate * gradient / (tf.sqrt(v) + 1e-7))


# %% tags=["wrong"]
# says: updates
class Factored(keras.optimizers.Optimizer):
    def update_step(self, gradient, variable, learning_rate):
        v = gradient**2
        if len(v.shape) == 2:
            rows, columns = tf.reduce_mean(v, 1), tf.reduce_mean(v, 0)
            v = rows[:, None] * columns / tf.reduce_mean(rows)
        variable.assign_sub(learning_rate * gradient / (tf.sqrt(v) + 1e-7))


# %% tags=["wrong"]
# says: remembers
class Factored(keras.optimizers.Optimizer):
    def build(self, variables):
        super().build(variables)
        self.means = [[tf.Variable(tf.zeros([size])) for size in v.shape] for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        means = self.means[self._get_variable_index(variable)]
        for axis, mean in enumerate(means):
            other = [1 - axis] if len(means) == 2 else []
            mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(gradient**2, other))
        v = means[0] if len(means) == 1 else tf.tensordot(*means, 0) / tf.reduce_mean(means[0])
        variable.assign_sub(learning_rate * gradient / (tf.sqrt(v) + 1e-7))
