# %% [markdown]
# # 11 · A new model for every trial
#
# **Symptom:** *"OOM after the fifth fold"*, *"memory leak in model.fit in a loop, clear_session() does not help"*.
# Each trial alone fits with room to spare. The search over all of them dies.
#
# **Afterwards you can** show how much a dropped model leaves behind, name the reference that keeps it, and run
# cross-validation or a parameter search in the memory of a single trial.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C28 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" makes five times as many trials
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import gc
import weakref

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import a_model_per_trial as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

TRIALS = lab.choose(SCALE, quick=4, full=20)
BUDGET_MIB = lab.choose(SCALE, quick=100, full=340)  # halfway between two trials' peaks
RATES = [0.001 * 0.8**trial for trial in range(TRIALS)]
UNITS = 1024

# %% [markdown]
# ## Predict
#
# The search tries learning rates. Each trial builds the same small network, trains it with Adam and drops it.


# %%
def build(activation="relu"):
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(UNITS, activation) for _ in range(2)]
    return keras.Sequential([keras.Input((UNITS,)), *hidden, keras.layers.Dense(1)])


def samples():
    x = np.random.default_rng(0).random((64, UNITS), np.float32)
    return x, x[:, :1]


question = f"Tensor memory in use after {TRIALS} trials, each model deleted, garbage collected?"
my_guess = lab.guess(question, GUESS_MIB)

# %% [markdown]
# The weights are counted by hand. Adam keeps two more numbers for each of them.

# %%
shapes = [(UNITS, UNITS), (UNITS,), (UNITS, UNITS), (UNITS,), (UNITS, 1), (1,)]
weights = sum(lab.tensor_mib(shape) for shape in shapes)
one_model = 3 * weights
print(f"weights {weights:.2f} MiB, with Adam's state {one_model:.2f} MiB")
print(f"after {TRIALS} trials: 0 MiB if all models are freed, {TRIALS * one_model:.0f} if none is")

# %% [markdown]
# ## Failure
#
# The search as people write it, with three popular cures already in it: `del`, `clear_session()` and `gc.collect()`.


# %%
def model_per_trial(rates, cures=True):
    x, y = samples()
    losses = []
    for number, rate in enumerate(rates, 1):
        with lab.phase(f"trial {number}"):
            model = build()
            model.compile(keras.optimizers.Adam(rate), "mse")
            history = model.fit(x, y, epochs=2, shuffle=False, verbose=0)
            losses.append(history.history["loss"][-1])
            if cures:
                del model, history
                keras.utils.clear_session()
                gc.collect()
    return losses


failure = lab.run(model_per_trial, RATES, budget=f"{BUDGET_MIB} MiB", label="a model per trial")
lab.expect_oom(failure)

# %% [markdown]
# The budget has room for two trials and more; the last one began with what dropped models had left. (It took long to
# die: several operations of its graph asked for memory, and each waited some seconds for somebody to free it.)
#
# ## Advice, tested
#
# What do the three cures free? The same search with room for all its trials, and two of them without any cure.

# %%
unbounded = lab.run(model_per_trial, RATES, label="a model per trial, no tight budget")
uncured = lab.measure(model_per_trial, RATES[:2], False, label="two trials without the cures")
lab.expect_finished(unbounded)
kept_per_trial, kept_uncured = (
    (search.phases[-1].held_mib - search.phases[0].held_mib) / (len(search.phases) - 1)
    for search in (unbounded, uncured)
)
print("in use after each trial (MiB):", *(f"{part.held_mib:.1f}" for part in unbounded.phases))
lab.note(
    f"Each trial leaves {kept_per_trial:.2f} MiB, {kept_per_trial / weights:.2f} times the "
    f"weights. Without the cures it leaves {kept_uncured:.2f} MiB."
)

# %% [markdown]
# ## Fix
#
# Two things do help, with the same trials under the same budget. The first: build **one** model, and put its weights
# and its optimizer's state back before each trial. It is traced once.


# %%
def one_model_reset(rates):
    x, y = samples()
    model = build()
    model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    start = model.get_weights()
    losses = []
    for number, rate in enumerate(rates, 1):
        with lab.phase(f"trial {number}"):
            model.set_weights(start)
            for variable in model.optimizer.variables:
                variable.assign(tf.zeros_like(variable))
            model.optimizer.learning_rate = rate
            history = model.fit(x, y, epochs=2, shuffle=False, verbose=0)
            losses.append(history.history["loss"][-1])
    return losses


fix = lab.run(one_model_reset, RATES, budget=f"{BUDGET_MIB} MiB", label="one model, reset")
lab.expect_finished(fix)

# %% [markdown]
# The second: a process for each trial, as `lab.run()` gives it; here the first trial's. When a process ends, everything
# it had goes back to the system. One started in the ordinary way loads TensorFlow anew, so this suits long trials, and
# models of different shape.

# %%
own = {"budget": f"{BUDGET_MIB} MiB", "label": "a process of its own"}
own_process = lab.measure(model_per_trial, RATES[:1], **own)

# %% [markdown]
# ## Side by side

# %%
side_by_side = lab.compare(unbounded, failure, fix, own_process)
side_by_side

# %% [markdown]
# Who held it? Both run once more while TensorFlow records every allocation. Of each name there are several kernels:
# those of the models that were dropped, and one of the model in training; the slots of the dropped ones are there as
# well.

# %%
lab.take_apart(failure, fix)

# %%
print(my_guess.against(unbounded.end_mib))
print("Losses, a new model each time:", *(f"{loss:.4f}" for loss in unbounded.value))
print("Losses, one model reset:      ", *(f"{loss:.4f}" for loss in fix.value))
same = np.allclose(fix.value, unbounded.value, 1e-3)
assert same and np.allclose(fix.value[:1], own_process.value, 1e-3), "all train the same models"
assert fix.phases[-1].held_mib - fix.phases[0].held_mib < 0.1 * weights, "the reset keeps nothing"
lab.predicted_vs_measured(kept_after_all_trials=(TRIALS * one_model, unbounded.end_mib))

# %% [markdown]
# ## Explain
#
# ### Which way of training keeps a model?
#
# One process, many models. Each way gets one, behind a first that warms the process up. Each is deleted, the session
# cleared, garbage collected. The counter is exact, so one shows what a model leaves.


# %%
class LocalAdam(keras.optimizers.Adam):
    """Adam that does not sum gradients over replicas: right for a single device only."""

    def _all_reduce_sum_gradients(self, grads_and_vars):
        return grads_and_vars


def registered():
    """Names in TensorFlow's table of gradient functions (a private one: for looking only)."""
    from tensorflow.python.framework import ops

    return set(ops.gradient_registry.list())


def dropped_model(way, activation="relu"):
    model = build(activation)
    way(model)
    watch = weakref.ref(model)
    del model
    keras.utils.clear_session()
    gc.collect()
    return watch


def ways():
    x, y = samples()

    def fit(model, optimizer="adam", eager=False):
        model.compile(optimizer, "mse", run_eagerly=eager)
        model.fit(x, y, verbose=0)

    def custom_step(model, optimizer=None):
        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            if optimizer:
                optimizer.apply(gradients, model.trainable_variables)
            else:
                for weight, gradient in zip(model.trainable_variables, gradients):
                    weight.assign_sub(0.01 * gradient)

        step()

    gc.freeze()  # the many collections here need not look at the libraries' objects
    rows = {}
    table = {
        "predict": lambda model: model.predict(x, verbose=0),
        "predict, silu in place of relu": lambda model: model.predict(x, verbose=0),
        "fit, run_eagerly=True": lambda model: fit(model, eager=True),
        "fit, Adam": fit,
        "fit, SGD": lambda model: fit(model, "sgd"),
        "tf.function step, Keras Adam": lambda model: custom_step(model, keras.optimizers.Adam()),
        "tf.function step, assign_sub by hand": custom_step,
        "fit, Adam without all-reduce": lambda model: fit(model, LocalAdam()),
    }
    dropped_model(fit)
    for name, way in table.items():
        activation = "silu" if "silu" in name else "relu"
        before = len(registered())
        with lab.phase(name):
            alive = dropped_model(way, activation)() is not None
        rows[name] = {"gradient functions added": len(registered()) - before, "model alive": alive}
    return rows


ways_run = lab.measure(ways, label="ways of training")
kept = pd.Series({part.name: part.added_mib for part in ways_run.phases})
table = pd.DataFrame.from_dict(ways_run.value, orient="index")
table.insert(0, "MiB kept", kept.round(2))
keeps, registers = kept > 0.1 * weights, table["gradient functions added"] > 0
assert (keeps == registers).all() and not table["model alive"].any()
print(table.to_string())

# %%
axes = (kept / weights).plot.barh(xlabel="kept of a dropped model, × its weights")
axes.bar_label(axes.containers[0], fmt="%.1f", padding=6)
axes.invert_yaxis()
plt.show()

# %% [markdown]
# No model object is alive (a weak reference to it is dead). The rows that keep memory are those that add gradient
# functions to a table. Follow that.
#
# ### The reference that keeps it
#
# TensorFlow has one table for the whole process that maps names to gradient functions. Whenever a function made with
# `tf.custom_gradient` is *traced*, a new entry `CustomGradient-<number>` is written there. Nothing ever removes it.
# The next cell follows one entry down to the variables. Then it does the experiment: it removes the new entries and
# nothing else.


# %%
def who_keeps_it():
    import inspect

    from tensorflow.python.framework import ops

    table, before, (x, y) = ops.gradient_registry, registered(), samples()
    with lab.phase("trained"):
        model = build()
        model.compile("adam", "mse")
        model.fit(x, y, verbose=0)
    with lab.phase("deleted, cleared, collected"):
        del model
        keras.utils.clear_session()
        gc.collect()

    entries = sorted(registered() - before)
    function = table.lookup(entries[0])
    inner = inspect.getclosurevars(function).nonlocals["tape_grad_fn"]
    result = tf.nest.flatten(inspect.getclosurevars(inner).nonlocals["result"])
    graph = result[0].graph
    handles = [outside for outside, _ in graph.captures if outside.dtype == tf.resource]
    sizes = [handle._handle_data.shape_and_type[0].shape.dim for handle in handles]
    behind = sum(lab.tensor_mib([dim.size for dim in size]) for size in sizes)
    chain = [
        f"table of gradient functions, entry {entries[0]!r}",
        f"  → {function.__qualname__}, and in its closure {inner.__name__}",
        f"  → in its closure 'result': {len(result)} tensors of the graph {graph.name!r}",
        f"  → its captured inputs: {len(handles)} variable handles, {behind:.2f} MiB behind them",
    ]
    del function, inner, result, graph, handles
    with lab.phase(f"{len(entries)} entries removed from the table"):
        for entry in entries:
            table._registry.pop(entry)
        gc.collect()
    return chain


keeper = lab.measure(who_keeps_it, label="who keeps it")
print(*keeper.value, sep="\n")
pd.DataFrame({"MiB in use": {part.name: part.held_mib for part in keeper.phases}}).round(2)

# %% [markdown]
# A variable lives as long as its handle. The graph of the training step captured the handles, the registered gradient
# function holds tensors of that graph, and no collection touches the table. `clear_session()` clears Keras' own state.
#
# Who asks for a custom gradient here? Keras' optimizer sums the gradients over all replicas before it applies them,
# also when there is just one device, and that sum is a `tf.custom_gradient`. Hence the pattern in the table of ways:
#
# * Eager execution registers nothing, nor does `predict` of a network of `relu`, in which no custom gradient is traced.
#   `silu` is a custom gradient itself: to predict with such a network is enough to keep it.
# * `fit` and your own step keep the model as soon as a Keras optimizer is traced: Adam with its state, three times as
#   much as plain SGD, whose state is small.
# * Without the sum over replicas (`LocalAdam`) nothing is kept. It overrides a private method: a proof, and at most a
#   stopgap for a single device.
#
# ### Other versions
#
# **Recorded, not measured in this run:** MiB that stay for each model.

# %%
pd.read_csv("../data/recorded/model_per_trial.csv", keep_default_na=False)

# %% [markdown]
# The cause is issue 97697 of tensorflow/tensorflow. Pull request 109334, merged but not part of 2.21.0, makes the
# gradient function no longer capture `result`. The row *result not captured* is 2.21.0 with that one line changed by
# hand: a Keras optimizer then keeps nothing. `silu`, whose own gradient function captures its input, keeps its model in
# every row, without any Keras optimizer. `data/recorded/model_per_trial.py` asks another version.
#
# ### When it flips
#
# The leak matters when trials × kept is more than the room beside one trial (figures of this run, scaled: predicted).


# %%
one_trial = unbounded.phases[0].peak_mib


def lifetime(budget_gib=8.0, weights_mib=250):
    scale = weights_mib / weights
    room = budget_gib * 1024 - one_trial * scale
    fits = int(room // (kept_per_trial * scale)) + 1 if room >= 0 else 0
    reset = "any number" if fits else 0
    print(f"{fits} trials with a model each, {reset} with one that is reset (predicted)")


lab.explore(lifetime, budget_gib=(1.0, 80.0, 1.0), weights_mib=(10, 2000, 10))

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C28",
    "partly",
    weights=weights,
    fit=kept_per_trial,
    fit_eagerly=kept["fit, run_eagerly=True"],
    predict_relu=kept["predict"],
    predict_silu=kept["predict, silu in place of relu"],
)


# %% [markdown]
# ## Exercises
#
# **1.** These models have different widths, so that none can be reset, and each trains for two steps, too few for a
# process of its own. Write `widths_kept_apart(widths)`: the same losses, and nothing is left of the models.


# %%
def widths_searched(widths):
    x, y = samples()
    losses = []
    for width in widths:
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(width, "relu")
        model = keras.Sequential([keras.Input((UNITS,)), hidden, keras.layers.Dense(1)])
        model.compile("adam", "mse")
        history = model.fit(x, y, batch_size=len(x), epochs=2, verbose=0)
        losses.append(history.history["loss"][-1])
    return losses


# %%
def widths_kept_apart(widths):
    # BEGIN SOLUTION
    x, y = samples()
    losses = []
    for width in widths:
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(width, "relu")
        model = keras.Sequential([keras.Input((UNITS,)), hidden, keras.layers.Dense(1)])
        model.compile("adam", "mse", run_eagerly=True)
        history = model.fit(x, y, batch_size=len(x), epochs=2, verbose=0)
        losses.append(history.history["loss"][-1])
    return losses
    # END SOLUTION


# %%
check.widths(widths_kept_apart, widths_searched, [512, 1024])


# %% tags=["right"]
def widths_kept_apart(widths):
    tf.config.run_functions_eagerly(True)
    try:
        return widths_searched(widths)
    finally:
        tf.config.run_functions_eagerly(False)


# %% tags=["right"]
def widths_kept_apart(widths):
    x, y = samples()
    losses = []
    for width in widths:
        keras.utils.set_random_seed(0)
        layers = [keras.Input((UNITS,)), keras.layers.Dense(width, "relu"), keras.layers.Dense(1)]
        model, optimizer = keras.Sequential(layers), keras.optimizers.Adam()
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            last = float(loss)
        losses.append(last)
    return losses


# %% tags=["wrong"]
# says: models are still kept
def widths_kept_apart(widths):
    losses = []
    for width in widths:
        losses += widths_searched([width])
        keras.utils.clear_session()
        gc.collect()
    return losses


# %% tags=["wrong"]
# says: losses differ
def widths_kept_apart(widths):
    x, y = samples()
    losses = []
    for width in widths:
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(width, "relu")
        model = keras.Sequential([keras.Input((UNITS,)), hidden, keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        losses.append(model.fit(x, y, epochs=2, verbose=0).history["loss"][-1])
    return losses


# %% tags=["wrong"]
# says: models are still kept
def widths_kept_apart(widths):
    x, y = samples()
    losses = []
    for width in widths:
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(width, "relu")
        model = keras.Sequential([keras.Input((UNITS,)), hidden, keras.layers.Dense(1)])
        model.compile("adam", "mse")
        model.train_on_batch(x, y)
        model.reset_metrics()
        losses.append(model.train_on_batch(x, y))
        del model
        gc.collect()
    return losses


# %% tags=["right"]
def widths_kept_apart(widths):
    x, y = samples()
    losses = []
    for width in widths:
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(width, "relu")
        model = keras.Sequential([keras.Input((UNITS,)), hidden, keras.layers.Dense(1)])
        model.compile(LocalAdam(), "mse")
        losses.append([model.train_on_batch(x, y) for _ in range(2)][-1])
    return losses


# %% tags=["wrong"]
# says: batches
def widths_kept_apart(widths):
    x, y = samples()
    losses = []
    for width in widths:
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(width, "relu")
        model = keras.Sequential([keras.Input((UNITS,)), hidden, keras.layers.Dense(1)])
        model.compile("adam", "mse", run_eagerly=True)
        losses.append(model.fit(x, y, epochs=2, verbose=0).history["loss"][-1])
    return losses


# %% tags=["right"]
def widths_kept_apart(widths):
    return [lab.measure(widths_searched, [width]).value[0] for width in widths]


# %% [markdown]
# **2.** This search has its own training step and the same leak. Write `reused_step(rates)`, which returns the same
# losses from one model, one optimizer and one traced step.


# %%
def fresh_step(rates):
    x, y = samples()
    losses = []
    for rate in rates:
        model, optimizer = build(), keras.optimizers.Adam(rate)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        losses.append([float(step()) for _ in range(3)])
    return losses


# %%
def reused_step(rates):
    # BEGIN SOLUTION
    x, y = samples()
    model, optimizer = build(), keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    variables = model.variables + optimizer.variables
    start = [variable.numpy() for variable in variables]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    losses = []
    for rate in rates:
        for variable, value in zip(variables, start):
            variable.assign(value)
        optimizer.learning_rate = rate
        losses.append([float(step()) for _ in range(3)])
    return losses
    # END SOLUTION


# %%
check.reused(reused_step, fresh_step, RATES[:3], one_model)


# %% tags=["right"]
def reused_step(rates):
    x, y = samples()
    model, optimizer, losses, step = build(), keras.optimizers.Adam(), [], None
    start = model.get_weights()
    for rate in rates:
        model.set_weights(start)
        for variable in optimizer.variables:
            variable.assign(tf.zeros_like(variable))
        optimizer.learning_rate = rate
        if step is None:

            @tf.function
            def step(x, y):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x) - y) ** 2)
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply(gradients, model.trainable_variables)
                return loss

            optimizer.build(model.trainable_variables)
        losses.append([step(tf.constant(x), tf.constant(y)).numpy() for _ in range(3)])
    return np.array(losses)


# %% tags=["wrong"]
# says: something is still made in the loop
def reused_step(rates):
    losses = []
    for rate in rates:
        losses += fresh_step([rate])
        keras.utils.clear_session()
    return losses


# %% tags=["wrong"]
# says: losses differ .* state
def reused_step(rates):
    x, y = samples()
    model, optimizer = build(), keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    start = model.get_weights()

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    losses = []
    for rate in rates:
        model.set_weights(start)
        optimizer.learning_rate = rate
        losses.append([float(step()) for _ in range(3)])
    return losses


# %% tags=["wrong"]
# says: no step was traced
def reused_step(rates):
    tf.config.run_functions_eagerly(True)
    losses = fresh_step(rates)
    tf.config.run_functions_eagerly(False)
    return losses


# %% tags=["wrong"]
# says: return losses
def reused_step(rates):
    return dict(zip(rates, fresh_step(rates)))


# %% tags=["right"]
def reused_step(rates):
    x, y = samples()
    model, optimizer = build(), LocalAdam()
    optimizer.build(model.trainable_variables)
    start, fresh = model.get_weights(), [variable.numpy() for variable in optimizer.variables]

    @tf.function
    def step(rate):
        optimizer.learning_rate.assign(rate)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    losses = []
    for rate in rates:
        model.set_weights(start)
        for variable, value in zip(optimizer.variables, fresh):
            variable.assign(value)
        losses.append([float(step(tf.constant(rate))) for _ in range(3)])
    return losses


# %% tags=["wrong"]
# says: more than once
def reused_step(rates):
    x, y = samples()
    model, optimizer = build(), keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    variables = model.variables + optimizer.variables
    start = [variable.numpy() for variable in variables]

    @tf.function
    def step(rate):
        optimizer.learning_rate = rate
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    losses = []
    for rate in rates:
        for variable, value in zip(variables, start):
            variable.assign(value)
        losses.append([float(step(rate)) for _ in range(3)])
    return losses
