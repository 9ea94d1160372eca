# %% [markdown]
# # 27 · What a process keeps
#
# **Symptom:** *"memory grows each time I call compile()"*, *"del and gc.collect() free nothing in Jupyter"*, *"RAM grows
# with every load of a SavedModel"*. No name leads to the memory any more, and it is not free.
#
# **Afterwards you can** say who else holds a tensor when your own name for it is gone, start an optimizer anew without
# keeping the old one, and empty what a notebook's kernel has stored.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C44, C45, C49, C57 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" trains in four times as many stages
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import contextlib
import gc
import io
import sys
import tempfile
import time

import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import what_a_process_keeps as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

STAGES = lab.choose(SCALE, quick=6, full=24)
BUDGET_MIB = lab.choose(SCALE, quick=40, full=112)  # between the fix and all stages
RATES = [0.001 * 0.8**stage for stage in range(STAGES)]
UNITS, BATCH = 1024, 32
ROWS = 256  # to answer for at once

# %% [markdown]
# ## Predict
#
# A network is trained in stages, each with a smaller learning rate. For each stage it is compiled anew, with an Adam
# that starts fresh.


# %%
def build():
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(UNITS, "relu")
    return keras.Sequential([keras.Input((UNITS,)), hidden, keras.layers.Dense(1)])


def samples():
    x = np.random.default_rng(0).random((BATCH, UNITS), np.float32)
    return x, x[:, :1]


question = f"Tensor memory in use after {STAGES} stages, garbage collected?"
my_guess = lab.guess(question, GUESS_MIB)

# %% [markdown]
# By hand: the weights, and two slots of Adam for each. One step is then predicted from its graph, before anything is
# allocated.

# %%
shapes = [(UNITS, UNITS), (UNITS,), (UNITS, 1), (1,)]
weights = sum(lab.tensor_mib(shape) for shape in shapes)
slots = 2 * weights
all_kept = weights + STAGES * slots
print(f"weights {weights:.2f} MiB, slots of one Adam {slots:.2f} MiB")
print(f"after {STAGES} stages: {weights + slots:.1f} MiB, or {all_kept:.1f} if all slots stay")


# %%
def compiled():
    model = build()
    model.compile(keras.optimizers.Adam(), "mse")
    return model


one_step = lab.predict(compiled, BATCH)
one_step

# %% [markdown]
# ## Failure
#
# The stages as people write them, with garbage collected after each.


# %%
def compiled_again(rates):
    (x, y), model, losses = samples(), build(), []
    for number, rate in enumerate(rates, 1):
        with lab.phase(f"stage {number}"):
            model.compile(keras.optimizers.Adam(rate), "mse")
            history = model.fit(x, y, epochs=2, verbose=0)
            losses.append(history.history["loss"][-1])
            gc.collect()
    return losses


budget = f"{BUDGET_MIB} MiB"
failure = lab.run(compiled_again, RATES, budget=budget, label="compiled again")
lab.expect_oom(failure)

# %% [markdown]
# There is one model, and its newest optimizer. The steps up are the slots of the others. (At its end it waited: several
# operations asked for memory, and TensorFlow's allocator gives each some seconds in which somebody might free it.)
#
# What it would have needed:

# %%
unbounded = lab.run(compiled_again, RATES, label="compiled again, no tight budget")
lab.expect_finished(unbounded)
stages = unbounded.phases
kept_per_compile = (stages[-1].held_mib - stages[0].held_mib) / (STAGES - 1)
print("in use after each stage (MiB):", *(f"{stage.held_mib:.1f}" for stage in stages))
lab.note(f"Each `compile()` leaves {kept_per_compile / weights:.2f} times the weights.")

# %% [markdown]
# ## Advice, tested
#
# Does a clean-up help, or another way to compile? Each way gets a model, and trains and compiles it a second time. What is
# shown is what the second compile leaves.


# %%
def ways_to_compile():
    (x, y), adam = samples(), keras.optimizers.Adam
    ways = {
        "a new Adam": lambda model: model.compile(adam(), "mse"),
        "clear_session(), a new Adam": lambda model: (
            keras.utils.clear_session(),
            model.compile(adam(), "mse"),
        ),
        "a new Adam, run_eagerly=True": lambda model: model.compile(
            adam(), "mse", run_eagerly=True
        ),
        "a new SGD": lambda model: model.compile("sgd", "mse"),
        "the Adam that it has": lambda model: model.compile(
            getattr(model, "optimizer", None) or adam(), "mse"
        ),
    }
    for name, way in ways.items():
        model = build()
        way(model)
        model.train_on_batch(x, y)
        gc.collect()
        with lab.phase(name):
            way(model)
            model.train_on_batch(x, y)
            gc.collect()


ways = lab.measure(ways_to_compile, label="ways to compile again")
by_way = pd.Series({way.name: way.added_mib for way in ways.phases})
pd.DataFrame({"MiB left": by_way.round(2), "× weights": (by_way / weights).round(2)})

# %% [markdown]
# It is not `compile()` that keeps anything: with the optimizer that the model has, nothing is left. It is a *traced* step
# of a Keras optimizer. Its graph stays in TensorFlow's table of gradient functions, which nothing ever empties, and so do the
# variables that it captured. [Lab 11](11_a_model_per_trial.ipynb) follows the reference from the table to the variables. That was
# not so under TensorFlow 2.16 with Keras 3.1, where a second `compile()` left nothing; before it, with Keras 2, it was as much as
# today (recorded in [data/releases.md](../data/releases.md)).
#
# ## Fix
#
# One optimizer, compiled once. What "fresh" means is said in two lines: slots and step counter at zero, and the new rate.


# %%
def optimizer_reset(rates):
    (x, y), model, losses = samples(), build(), []
    model.compile(keras.optimizers.Adam(), "mse")
    for number, rate in enumerate(rates, 1):
        with lab.phase(f"stage {number}"):
            for variable in model.optimizer.variables:
                variable.assign(tf.zeros_like(variable))
            model.optimizer.learning_rate = rate
            history = model.fit(x, y, epochs=2, verbose=0)
            losses.append(history.history["loss"][-1])
            gc.collect()
    return losses


fix = lab.run(optimizer_reset, RATES, budget=budget, label="one optimizer, reset")
lab.expect_finished(fix)

# %% [markdown]
# ## Side by side

# %%
side_by_side = lab.compare(unbounded, failure, fix)
side_by_side

# %% [markdown]
# Who held it? Both run once more while TensorFlow records every allocation.

# %%
lab.take_apart(failure, fix)

# %%
print(my_guess.against(unbounded.end_mib))
print("Losses, compiled again:", *(f"{loss:.4f}" for loss in unbounded.value))
print("Losses, reset:         ", *(f"{loss:.4f}" for loss in fix.value))
off = float(np.max(np.abs(np.array(unbounded.value) / fix.value - 1)))
assert off < 0.01, "both learn the same"
assert fix.phases[-1].held_mib - fix.phases[0].held_mib < 0.1 * weights, "the reset keeps nothing"
lab.predicted_vs_measured(
    one_step=(one_step.total_mib, fix.peak_mib),
    kept_after_all_stages=(all_kept, unbounded.end_mib),
)

# %% [markdown]
# ## Explain
#
# Memory is free when nothing refers to it. A name that you can delete is one reference; the graph of an old step was
# another. Here are four more that people suspect, each with its own advice.
#
# ### A notebook's cells
#
# `del` and `gc.collect()` are said to free a notebook's memory. Each situation makes a tensor named `big`, and ends with
# both. The cells run in an IPython shell of their own, as a kernel runs them.


# %%
def in_a_notebook():
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))

    def run(*cells):
        with contextlib.redirect_stdout(io.StringIO()):
            for cell in cells:
                shell.run_cell(cell, store_history=True)

    situations = {
        "a name of its own": [],
        "in a cycle": ["owner = [big]\nowner.append(owner)\ndel owner"],
        "last line of a cell": ["big"],
        "last line, with a semicolon": ["big;"],
        "in a function that failed": ["def fail(x):\n    raise ValueError", "fail(big)"],
    }
    run("import gc, tensorflow as tf", "tf.zeros(1)")
    for name, cells in situations.items():
        with lab.phase(name):
            run("big = tf.zeros((1024, 1024))", *cells, "del big\ngc.collect();")
    with lab.phase("then: another cell fails"):
        run("raise ValueError", "gc.collect();")
    with lab.phase("then: three more outputs, %reset -f out"):
        run("1", "2", "3", "%reset -f out", "import gc", "gc.collect();")


notebook = lab.measure(in_a_notebook, label="cells of a notebook")
in_cells = pd.Series({part.name: part.added_mib for part in notebook.phases})
pd.DataFrame({"MiB left": in_cells.round(2)})

# %%
lab.note(
    f"The tensor has {lab.tensor_mib((1024, 1024)):.0f} MiB. A cycle is what `gc.collect()` is "
    "for. The last line of a cell is kept in `Out[n]` and `_n`, and until three more outputs in "
    "`_`, `__` and `___`: a semicolon stores nothing. `%reset -f out` empties the first two, so "
    "show three other values before it. A traceback holds the frames of the functions that "
    "failed, with all their names, until the next error."
)

# %% [markdown]
# ### Calls and loads, again and again
#
# `predict()` in a loop is said to leak, `model(x)` not to; a SavedModel that is loaded in a loop is said to be freed. One
# process, so often each; what counts is growth in the second half, when pools and caches are full.


# %%
def per_call(way, calls):
    """{what: figure} of one call of way(): time, and what stays of it, garbage collected."""
    for _ in range(calls):
        way()
    gc.collect()
    before, begin = lab.reading(), time.monotonic()
    for _ in range(calls):
        way()
    seconds = time.monotonic() - begin
    gc.collect()
    after = lab.reading()
    return {
        "ms": 1000 * seconds / calls,
        "MiB of tensors kept": (after.tensors_mib - before.tensors_mib) / calls,
        "MiB of the process kept": (after.process_mib - before.process_mib) / calls,
    }


def exported(activation):
    hidden = keras.layers.Dense(UNITS, activation)
    model = keras.Sequential([keras.Input((UNITS,)), hidden, keras.layers.Dense(1)])
    folder = tempfile.mkdtemp()
    model.export(folder, verbose=False)
    return folder


def again_and_again(calls, loads):
    from tensorflow.python.framework import ops

    model, x = build(), np.ones((ROWS, UNITS), np.float32)
    traced = tf.function(model)
    folders = {activation: exported(activation) for activation in ("relu", "silu")}

    def load(activation):
        loaded = tf.saved_model.load(folders[activation])  # its variables live as long as the name
        return loaded.serve(tf.constant(x)).numpy()

    ways = {
        "model.predict(x)": (lambda: model.predict(x, verbose=0), calls),
        "model(x)": (lambda: model(x).numpy(), calls),
        "tf.function(model)(x)": (lambda: traced(tf.constant(x)).numpy(), calls),
        "load a SavedModel, relu": (lambda: load("relu"), loads),
        "load a SavedModel, silu": (lambda: load("silu"), loads),
    }
    rows, before = {}, set(ops.gradient_registry.list())
    for name, (way, times) in ways.items():
        with lab.phase(name):
            rows[name] = per_call(way, times)
    with lab.phase("new gradient functions removed"):
        for entry in set(ops.gradient_registry.list()) - before:
            ops.gradient_registry._registry.pop(entry)
        gc.collect()
    return rows


repeated = lab.measure(again_and_again, 20, 4, label="calls and loads")
each = pd.DataFrame.from_dict(repeated.value, orient="index")
each.round(2)

# %%
removed = repeated.phase("new gradient functions removed").added_mib
silu = each["MiB of tensors kept"]["load a SavedModel, silu"]
slow, fast = each["ms"]["model.predict(x)"], each["ms"]["model(x)"]
lab.note(
    f"`predict()` makes a dataset and callbacks for each call: it costs {slow:.0f} ms where "
    f"`model(x)` costs {fast:.0f}, and keeps no tensor. A model of relu is freed as soon as the "
    "collector has been: what is loaded refers to itself. Of silu each load keeps "
    f"{silu / weights:.2f} times the weights. silu has a gradient function of its own, which "
    "loading writes into TensorFlow's table. With the new entries taken out of it, "
    f"{-removed:.0f} MiB were free."
)
assert -removed > weights, "it is the table that keeps what was loaded"

# %% [markdown]
# So load once and keep the model, or load in a process that ends; and call `model(x)` in a loop for its time, if that
# counts, not for memory.
#
# **On a GPU** it has not been measured here. What holds a tensor are Python's names and TensorFlow's graphs, which know
# nothing of the device; the times are those of this machine.
#
# **When it flips:** how many stages fit, each with a new optimizer's slots (figures of this run, scaled: predicted)?


# %%
one_stage = fix.peak_mib


def stages_that_fit(budget_gib=8.0, weights_mib=250):
    scale = weights_mib / weights
    room = budget_gib * 1024 - one_stage * scale
    fits = int(room // (kept_per_compile * scale)) + 1 if room >= 0 else 0
    reset = "any number" if fits else 0
    print(f"{fits} stages compiled anew, {reset} of one that is reset (predicted)")


lab.explore(stages_that_fit, budget_gib=(1.0, 80.0, 1.0), weights_mib=(10, 2000, 10))

# %% [markdown]
# ## Verdict

# %%
lab.verdict("C44", "partly", weights=weights, kept=kept_per_compile, off=off)

# %%
lab.verdict(
    "C49",
    "partly",
    tensor=lab.tensor_mib((1024, 1024)),
    named=in_cells["a name of its own"],
    cycle=in_cells["in a cycle"],
    shown=in_cells["last line of a cell"],
    failed=in_cells["in a function that failed"],
)

# %%
kept = each["MiB of tensors kept"] + each["MiB of the process kept"]
lab.verdict(
    "C45",
    "fails",
    batch=lab.tensor_mib((ROWS, UNITS)),
    predict=kept["model.predict(x)"],
    call=kept["model(x)"],
)

# %%
lab.verdict(
    "C57",
    "partly",
    weights=weights,
    relu=each["MiB of tensors kept"]["load a SavedModel, relu"],
    silu=silu,
)

# %% [markdown]
# ## Exercises
#
# **1.** The second half of a training shall use another loss. Write `another_loss(model, loss)`, after which the model
# trains on with it. Its Adam goes on with the slots that it has, and no second set is made.


# %%
def another_loss(model, loss):
    # BEGIN SOLUTION
    model.compile(model.optimizer, loss)
    # END SOLUTION


# %%
check.another_loss(another_loss, build, samples, slots)


# %% tags=["right"]
def another_loss(model, loss):
    model.compile(loss=keras.losses.get(loss), optimizer=model.optimizer, run_eagerly=True)


# %% tags=["wrong"]
# says: begins anew
def another_loss(model, loss):
    model.compile(keras.optimizers.Adam(0.01), loss)


# %% tags=["wrong"]
# says: two sets
def another_loss(model, loss):
    old = [variable.numpy() for variable in model.optimizer.variables]
    model.compile(keras.optimizers.Adam(0.01), loss)
    model.optimizer.build(model.trainable_variables)
    for variable, value in zip(model.optimizer.variables, old):
        variable.assign(value)
    gc.collect()


# %% tags=["wrong"]
# says: rate and slots
def another_loss(model, loss):
    for variable in model.optimizer.variables[2:]:
        variable.assign(tf.zeros_like(variable))
    model.compile(model.optimizer, loss)


# %% tags=["wrong"]
# says: has to be the new one
def another_loss(model, loss):
    model.loss = loss


# %% [markdown]
# **2.** A kernel has run for days. Write `emptied(shell)`, which gets the kernel's shell (`get_ipython()` in a notebook). It
# frees what the shell holds in its outputs and of its last error, and leaves every name where it is.


# %%
def emptied(shell):
    # BEGIN SOLUTION
    for _ in range(3):
        shell.run_cell("0", store_history=True)  # take the places of _, __ and ___
    shell.run_line_magic("reset", "-f out")
    shell.run_cell("raise ValueError")  # takes the place of the error that holds the frames
    gc.collect()
    # END SOLUTION


# %%
check.emptied(emptied, lab.tensor_mib((1024, 1024)))


# %% tags=["right"]
def emptied(shell):
    shell.displayhook.flush()
    shell.user_ns_hidden.update({"_": "", "__": "", "___": ""})
    sys.last_type = sys.last_value = sys.last_traceback = None
    shell.InteractiveTB.tb = None


# %% tags=["wrong"]
# says: stay of
def emptied(shell):
    shell.user_ns["Out"].clear()
    shell.run_cell("raise ValueError")
    gc.collect()


# %% tags=["wrong"]
# says: stay of
def emptied(shell):
    shell.run_line_magic("reset", "-f out")
    shell.run_cell("raise ValueError")
    gc.collect()


# %% tags=["wrong"]
# says: names of the person's own
def emptied(shell):
    shell.run_line_magic("reset", "-f")
    shell.run_cell("raise ValueError")


# %% tags=["wrong"]
# says: stay of
def emptied(shell):
    shell.displayhook.flush()
    sys.last_type = sys.last_value = sys.last_traceback = None
    gc.collect()
