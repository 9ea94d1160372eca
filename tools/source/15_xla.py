# %% [markdown]
# # 15 · XLA: does compiling lower memory?
#
# **Symptom:** *"I turned XLA on to save memory and ran out of it"*, *"`set_jit(True)` changes nothing"*, *"only half the batch fits after
# the upgrade"*, or a compiled step that stops for a while at every new batch shape.
#
# **Afterwards you can** check whether XLA runs at all, read from its own report what it will allocate before you blame a
# tensor, tell which networks it shrinks and which it grows, and keep its compile-time memory bounded.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C20 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes twice the batch and a deeper network
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from labsupport import (
    choose, compare, exercise, expect_oom, explore, guess, load_tensorflow, phase, predicted_vs_measured, reading, run, tensor_mib, verdict,
)  # fmt: skip
from labsupport.showing.palette import style

tf = load_tensorflow()  # import tensorflow as tf, without its start-up log

BATCH = choose(SCALE, quick=2048, full=4096)
DEPTH = choose(SCALE, quick=12, full=24)
WIDTH = 512

# %% [markdown]
# ## Predict
#
# XLA is a compiler: it takes a whole graph and fuses operations, so that an intermediate result between two of them need
# never be stored. An article therefore says that `tf.config.optimizer.set_jit(True)` lowers memory. The network: twelve matrix
# products of width 512, each followed by `relu`, batch 2048, one SGD step.

# %%
my_guess = guess("Peak memory of this training step with XLA?", GUESS_MIB)

# %% [markdown]
# Without XLA: a `relu` is written into the buffer of the product before it, so one tensor a layer is kept for the backward
# pass. On the way back there are about two more, the gradient of one layer's output and of the next.

# %%
A = tensor_mib((BATCH, WIDTH))  # one activation
weights = DEPTH * tensor_mib((WIDTH, WIDTH))
predicted_plain = weights + A + DEPTH * A + 2 * A
print(f"one activation {A:.1f} MiB, weights {weights:.1f} MiB")
print(f"weights + input + {DEPTH} activations + 2 gradients = {predicted_plain:.1f} MiB without XLA")

# %% [markdown]
# ## Failure
#
# First the step as it is, then with the article's line. How do we know whether XLA ran? A graph that was handed to XLA has
# `_XlaRun` operations in it; the arm counts them in the graphs that TensorFlow really executed.

# %%
def hand_written_gelu(x):
    return 0.5 * x * (1.0 + tf.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def make_step(activation, depth, width, compiled=None):
    weights = [tf.Variable(tf.random.normal([width, width], stddev=0.05)) for _ in range(depth)]

    @tf.function(jit_compile=compiled)
    def step(x):
        with tf.GradientTape() as tape:
            hidden = x
            for weight in weights:
                hidden = activation(hidden @ weight)
            loss = tf.reduce_mean(hidden * hidden)
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(0.01 * gradient)
        return loss

    return step


def train(activation, use_set_jit, depth, width, batch):
    from tensorflow.python.eager import context  # no public name shows the executed graphs

    if use_set_jit:
        tf.config.optimizer.set_jit(True)
    step, x = make_step(activation, depth, width), tf.random.normal([batch, width])
    context.context().enable_run_metadata()
    with phase("first step"):
        step(x)
    executed = context.context().export_run_metadata()
    context.context().disable_run_metadata()
    with phase("three more"):
        for _ in range(3):
            loss = step(x)
    assert np.isfinite(loss)
    graphs = [part for function in executed.function_graphs for part in function.partition_graphs]
    return {"XLA operations": sum(node.op == "_XlaRun" for graph in graphs for node in graph.node)}


SIZES = (DEPTH, WIDTH, BATCH)
plain = run(train, tf.nn.relu, False, *SIZES, label="relu, no XLA", quiet=True).need()
printed = run(train, tf.nn.relu, True, *SIZES, label="relu, set_jit(True) as printed", quiet=True).need()
print(f"Device {printed.device}: set_jit(True) made {printed.value['XLA operations']} XLA operations; peak {plain.peak_mib:.1f} → {printed.peak_mib:.1f} MiB")

# %% [markdown]
# On a CPU nothing happens, without a word: there `set_jit` is ignored unless an environment variable allows it *before*
# TensorFlow is imported. Now with the variable, under a budget of a quarter more than the step without XLA needed:

# %%
ALLOW = {"TF_XLA_FLAGS": "--tf_xla_cpu_global_jit"}
BUDGET = f"{int(1.25 * plain.peak_mib)} MiB"
failure = run(train, tf.nn.relu, True, *SIZES, budget=BUDGET, env=ALLOW, label="relu, XLA, under the budget")
if failure.device.startswith("CPU"):
    expect_oom(failure)
    print(next(line for line in failure.error.traceback.splitlines() if "trying to allocate" in line))

# %% [markdown]
# Ten seconds of waiting for memory, then a real out-of-memory error. Look at the size: XLA asks for *one block*.
#
# What it wanted, without a tight budget:

# %%
xla = run(train, tf.nn.relu, True, *SIZES, env=ALLOW, label="relu, XLA", quiet=True).need()
assert xla.value["XLA operations"] > 0, "XLA did not run"

# %% [markdown]
# ## Fix
#
# Use XLA where there is something to fuse. The same network with another activation, GELU as many model files write it
# out: nine elementwise operations in place of one. Nothing else changes.

# %%
gelu_plain = run(train, hand_written_gelu, False, *SIZES, label="GELU, no XLA", quiet=True).need()
gelu_xla = run(train, hand_written_gelu, True, *SIZES, env=ALLOW, label="GELU, XLA", quiet=True).need()

# %% [markdown]
# ## Side by side

# %%
compare(plain, printed, failure, xla, gelu_plain, gelu_xla)

# %%
print(my_guess.against(xla.peak_mib))
for name, without, compiled in (("relu", plain, xla), ("GELU", gelu_plain, gelu_xla)):
    tensors, process = compiled.peak_mib / without.peak_mib, compiled.process_peak_mib / without.process_peak_mib
    print(f"{name}: with XLA {tensors:.2f} × the tensor memory, {process:.2f} × what the process adds")
predicted_vs_measured(relu_without_XLA=(predicted_plain, plain.peak_mib))

# %% [markdown]
# ## Explain
#
# **One block.** XLA knows all shapes when it compiles. It plans every intermediate of the step into *one* temporary block,
# then takes that block from TensorFlow's allocator for the whole step. So it is counted, it obeys the budget, and it needs a
# free gap of that size. XLA can write its plan down. Compile the whole step with `jit_compile=True` (no environment variable needed) and read it:

# %%
def compiled_with_report(activation, depth, width, batch):
    import os
    import tempfile
    from pathlib import Path

    folder = tempfile.mkdtemp()
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"  # read when XLA compiles first
    step, x = make_step(activation, depth, width, compiled=True), tf.random.normal([batch, width])
    for _ in range(3):
        step(x)
    return max(Path(folder).glob("*memory-usage-report.txt"), key=lambda path: path.stat().st_size).read_text()


reported = run(compiled_with_report, tf.nn.relu, *SIZES, label="relu, jit_compile=True", quiet=True).need()
report = reported.value.splitlines()
total = int(report[0].split()[3]) / 2**20
print("\n".join(report[:9]))
predicted_vs_measured(report_of_XLA=(total, reported.peak_mib))

# %% [markdown]
# The plan is there before the step runs: a prediction that you need not make yourself.
#
# **Why more, with `relu`?** XLA fuses the gradient of `relu` with what follows. The fused loop asks "was the *product* above zero?", so
# the product is kept; the next layer's gradient needs the `relu`'s output, so that is kept too. Two tensors a layer where TensorFlow's
# executor keeps one, because it wrote the second over the first:

# %%
predicted_xla = weights + A + 2 * DEPTH * A
predicted_vs_measured(relu_with_jit_compile=(predicted_xla, reported.peak_mib))

# %% [markdown]
# **Why less, with GELU?** Without XLA most of the nine operations leave a tensor for the backward pass. XLA keeps a few, and
# computes the others again inside the fused loop. Measure where it flips, with more and more `tf.sin` after each `relu`. The
# third line compiles *only the chain*, a function inside a step that is not compiled:

# %%
def by_chain(lengths, depth, width, batch):
    import gc

    x = tf.random.normal([batch, width])

    def gradient_peak(what, length):
        def chain(hidden):
            hidden = tf.nn.relu(hidden)
            for _ in range(length):
                hidden = tf.sin(hidden)
            return hidden

        if what == "chain compiled":
            chain = tf.function(chain, jit_compile=True)
        step = make_step(chain, depth, width, compiled=True if what == "step compiled" else None)
        step(x)
        gc.collect()  # what earlier steps left
        before = reading().tensors_mib
        with phase(f"{what}, {length}"):
            step(x)
        return before

    return {(what, length): gradient_peak(what, length) for what in ("no XLA", "step compiled", "chain compiled") for length in lengths}


LENGTHS = choose(SCALE, quick=[0, 1, 2, 4], full=[0, 1, 2, 4, 8, 16])
chains = run(by_chain, LENGTHS, 4, WIDTH, BATCH // 2, label="chains", quiet=True).need()
peaks = {key: part.peak / 2**20 - before for part, (key, before) in zip(chains.phases, chains.value.items())}
series = pd.Series(peaks).unstack().loc[["no XLA", "step compiled", "chain compiled"]]

figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained", facecolor="white")
for index, (name, row) in enumerate(series.iterrows()):
    axes.plot(row.index, row, marker="o", label=name, **style(index))
axes.set(xlabel="tf.sin operations after each of the 4 relu", ylabel="peak of one step (MiB)", ylim=(0, None))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
plt.show()
series.round(1).rename_axis("MiB, by chain length")

# %% [markdown]
# Compiling only the chain saves nothing: its forward half must hand every intermediate over to its backward half. Both must be in *one*
# compiled function. Move the sliders to find the flip for other sizes:

# %%
lines = {name: np.polyfit(LENGTHS, row, 1) for name, row in series.iterrows()}


def flip(chain_length=2, layers=4, batch=1024):
    scale = layers / 4 * batch / (BATCH // 2)
    without, compiled = (scale * np.polyval(lines[name], chain_length) for name in ("no XLA", "step compiled"))
    print(f"no XLA {without:8.1f} MiB   XLA {compiled:8.1f} MiB   {'XLA' if compiled < without else 'no XLA'} is smaller (predicted from the lines)")


explore(flip, chain_length=(0, 20), layers=(1, 48), batch=(128, 8192, 128))

# %% [markdown]
# **Compile-time memory.** XLA's compiler lives in the process, outside the allocator and outside every tensor budget. And it
# compiles again for *each concrete shape*, even where the `tf.function` has `None` in its signature and was traced once:

# %%
def new_shapes(lengths):
    step = make_step(tf.nn.relu, 3, 64, compiled=True).get_concrete_function(tf.TensorSpec([None, 64]))
    step(tf.ones([1, 64]))  # what the first compilation sets up is not counted
    before = reading().process_mib
    with phase("all lengths"):
        for length in lengths:
            step(tf.ones([length, 64]))
    return reading().process_mib - before


LENGTHS_SEEN = list(range(2, choose(SCALE, quick=18, full=98)))
exact = run(new_shapes, LENGTHS_SEEN, label="a shape each", quiet=True).need()
seconds = exact.phases[0].end - exact.phases[0].start
print(f"one trace, {len(LENGTHS_SEEN)} shapes: process +{exact.value:.1f} MiB, {seconds:.1f} s")

# %% [markdown]
# **Who turns it on?** Keras does, by itself, where it finds an accelerator: `compile(jit_compile="auto")` is the default. That
# alone can change what fits after an upgrade.

# %%
import keras

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
print("jit_compile without being asked, with the devices that this kernel uses:", model.jit_compile)

# %% [markdown]
# **By device.** The verdict below is for the device of this run. On a GPU `set_jit` needs no variable and kernels fuse
# differently: its figures must be measured. On a machine with one, and `tensorflow[and-cuda]` installed: `make labs NAMES=15_xla`.

# %%
rows = {}
for device in dict.fromkeys([plain.device, "CPU:0", "GPU:0"]):
    measured = device == plain.device
    rows[device] = {
        f"{name} MiB": f"{result.peak_mib:.1f}" if measured else "unavailable: run make labs NAMES=15_xla there"
        for name, result in (("relu", plain), ("relu, XLA", xla), ("GELU", gelu_plain), ("GELU, XLA", gelu_xla))
    }
pd.DataFrame(rows)

# %% [markdown]
# ## Verdict

# %%
verdict(
    "C20",
    "partly",
    figures={
        "relu": plain.peak_mib, "relu_as_printed": printed.peak_mib, "relu_xla": xla.peak_mib,
        "gelu": gelu_plain.peak_mib, "gelu_xla": gelu_xla.peak_mib,
        "relu_process": plain.process_peak_mib, "relu_xla_process": xla.process_peak_mib,
    },
    tests={
        "the line as printed lowers the peak of the relu network": "relu_as_printed < 0.9 * relu",
        "XLA, really on, lowers the peak of the relu network": "relu_xla < 0.9 * relu",
        "XLA, really on, lowers the peak of the GELU network": "gelu_xla < 0.9 * gelu",
        "the process with the relu network gets smaller": "relu_xla_process < relu_process",
    },
    because="On a CPU the line alone does nothing; switched on, XLA saves where it fuses long elementwise chains and costs where there are none.",
    flips="With the number of elementwise operations between matrix products, and with the device: a GPU has to be measured.",
)  # fmt: skip

# %% [markdown]
# ## Exercises
#
# **1.** Keep the number of executables small: `bucket(length)` returns the padded length for a sequence of that many rows, so
# that the lengths above give at most three shapes. Never shorter than the length, and never more than 16 rows longer.

# %%
def bucket(length):
    # BEGIN SOLUTION
    return -(-length // 8) * 8
    # END SOLUTION


padded = [bucket(length) for length in LENGTHS_SEEN[:16]]
bucketed = run(new_shapes, padded, label="buckets", quiet=True) if None not in padded and ... not in padded else None
with exercise(1, "Round up to a multiple of 8: -(-length // 8) * 8."):
    assert bucketed is not None, "bucket() returns nothing yet: return a length."
    assert all(0 <= after - length <= 16 for length, after in zip(LENGTHS_SEEN, padded)), "a padded length is too short, or too long."
    assert len(set(padded)) <= 3, f"{len(set(padded))} shapes are {len(set(padded))} executables: pad to fewer lengths."
    assert bucketed.ok, str(bucketed.error)
    took = bucketed.phases[0].end - bucketed.phases[0].start
    assert took < seconds, f"the buckets took {took:.1f} s, one shape each took {seconds:.1f} s."

# %% [markdown]
# **2.** XLA takes its temporary block in one piece. Read its size out of XLA's report (`report` is a list of lines; the block is
# the allocation called `preallocated-temp`), and return which part of the whole, `total` MiB, it is (0 to 1).

# %%
def temporary_part(report):
    # BEGIN SOLUTION
    line = next(line for line in report if "preallocated-temp" in line)
    size = line.split(" size ")[1].split(",")[0]  # such as 65.01MiB
    return float(size[:-3]) * {"GiB": 1024, "MiB": 1, "KiB": 1 / 1024}[size[-3:]] / total
    # END SOLUTION


answer = temporary_part(report)
with exercise(2, "Find the line with \"preallocated-temp\"; the text after \" size \" up to the comma is the size, such as 65.01MiB."):
    assert isinstance(answer, float), "temporary_part() returns nothing yet: return a number."
    assert 0 < answer < 1, f"{answer:.2f} is no part of the whole: divide by `total`."
    expected = (reported.peak_mib - weights - A) / reported.peak_mib
    assert abs(answer - expected) < 0.05, f"{answer:.2f}: what is not weights and input is about {expected:.2f}."

# %% [markdown]
# **3.** The step below compiles only its activation. Change it so that XLA saves memory with the hand-written GELU: its peak
# must be clearly below that of the step without XLA.

# %%
def gelu_step(depth, width, batch):
    activation = tf.function(hand_written_gelu, jit_compile=True)
    step = make_step(activation, depth, width)
    # BEGIN SOLUTION
    step = make_step(hand_written_gelu, depth, width, compiled=True)
    # END SOLUTION
    x = tf.random.normal([batch, width])
    for _ in range(2):
        step(x)


yours = run(gelu_step, *SIZES, label="your GELU step", quiet=True)
with exercise(3, "Forward and backward must be in one compiled function: make_step(..., compiled=True)."):
    assert yours.ok, str(yours.error)
    against = f"peak {yours.peak_mib:.0f} MiB against {gelu_plain.peak_mib:.0f} without XLA"
    assert yours.peak_mib < 0.8 * gelu_plain.peak_mib, f"{against}: is it still only the activation that is compiled?"
