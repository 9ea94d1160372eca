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

import labsupport as lab

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log

BATCH = lab.choose(SCALE, quick=2048, full=4096)
DEPTH = lab.choose(SCALE, quick=12, full=24)
WIDTH = 512

# %% [markdown]
# ## Predict
#
# XLA is a compiler: it takes a whole graph and fuses operations, so that an intermediate result between two of them need
# never be stored. An article therefore says that `tf.config.optimizer.set_jit(True)` lowers memory. The network: twelve matrix
# products of width 512, each followed by `relu`, batch 2048, one SGD step.

# %%
my_guess = lab.guess("Peak memory of this training step with XLA?", GUESS_MIB)

# %% [markdown]
# Without XLA: a `relu` is written into the buffer of the product before it, so one tensor a layer is kept for the backward
# pass. On the way back there are about two more, the gradient of one layer's output and of the next.

# %%
A = lab.tensor_mib((BATCH, WIDTH))  # one activation
weights = DEPTH * lab.tensor_mib((WIDTH, WIDTH))
predicted_plain = weights + A + DEPTH * A + 2 * A
print(f"one activation {A:.1f} MiB, weights {weights:.1f} MiB")
print(f"weights + input + {DEPTH} activations + 2 gradients = {predicted_plain:.1f} MiB")

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
    with lab.phase("first step"):
        step(x)
    executed = context.context().export_run_metadata()
    context.context().disable_run_metadata()
    with lab.phase("three more"):
        for _ in range(3):
            loss = step(x)
    assert np.isfinite(loss)
    graphs = [part for function in executed.function_graphs for part in function.partition_graphs]
    return {"XLA operations": sum(node.op == "_XlaRun" for graph in graphs for node in graph.node)}


SIZES = (DEPTH, WIDTH, BATCH)
plain = lab.measure(train, tf.nn.relu, False, *SIZES, label="relu, no XLA")
printed = lab.measure(train, tf.nn.relu, True, *SIZES, label="relu, set_jit(True) as printed")
made = printed.value["XLA operations"]
print(f"Device {printed.device}: set_jit(True) made {made} XLA operations", end="; ")
print(f"peak {plain.peak_mib:.1f} → {printed.peak_mib:.1f} MiB")

# %% [markdown]
# On a CPU nothing happens, without a word: there `set_jit` is ignored unless an environment variable allows it *before*
# TensorFlow is imported. Now with the variable, under a budget of a quarter more than the step without XLA needed:

# %%
ALLOW = {"TF_XLA_FLAGS": "--tf_xla_cpu_global_jit"}
BUDGET = f"{int(1.25 * plain.peak_mib)} MiB"
label = "relu, XLA, under the budget"
failure = lab.run(train, tf.nn.relu, True, *SIZES, budget=BUDGET, env=ALLOW, label=label)
if failure.device.startswith("CPU"):
    lab.expect_oom(failure)
    lines = failure.error.traceback.splitlines()
    print(next(line for line in lines if "trying to allocate" in line))

# %% [markdown]
# Ten seconds of waiting for memory, then a real out-of-memory error. Look at the size: XLA asks for *one block*.
#
# What it wanted, without a tight budget:

# %%
xla = lab.measure(train, tf.nn.relu, True, *SIZES, env=ALLOW, label="relu, XLA")
assert xla.value["XLA operations"] > 0, "XLA did not run"

# %% [markdown]
# ## Fix
#
# Use XLA where there is something to fuse. The same network with another activation, GELU as many model files write it
# out: nine elementwise operations in place of one. Nothing else changes.

# %%
gelu_plain = lab.measure(train, hand_written_gelu, False, *SIZES, label="GELU, no XLA")
gelu_xla = lab.measure(train, hand_written_gelu, True, *SIZES, env=ALLOW, label="GELU, XLA")

# %% [markdown]
# ## Side by side

# %%
lab.compare(plain, printed, failure, xla, gelu_plain, gelu_xla)

# %%
print(my_guess.against(xla.peak_mib))
for name, without, compiled in (("relu", plain, xla), ("GELU", gelu_plain, gelu_xla)):
    print(
        f"{name}: with XLA {compiled.peak_mib / without.peak_mib:.2f} × the tensor memory", end=", "
    )
    process = compiled.process_peak_mib / without.process_peak_mib
    print(f"{process:.2f} × what the process adds")
lab.predicted_vs_measured(relu_without_XLA=(predicted_plain, plain.peak_mib))

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
    # XLA reads this when it compiles first.
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    step, x = make_step(activation, depth, width, compiled=True), tf.random.normal([batch, width])
    for _ in range(3):
        step(x)
    reports = Path(folder).glob("*memory-usage-report.txt")
    return max(reports, key=lambda path: path.stat().st_size).read_text()


reported = lab.measure(compiled_with_report, tf.nn.relu, *SIZES, label="relu, jit_compile=True")
report = reported.value.splitlines()
total = int(report[0].split()[3]) / 2**20
print("\n".join(report[:9]))
lab.predicted_vs_measured(report_of_XLA=(total, reported.peak_mib))

# %% [markdown]
# The plan is there before the step runs: a prediction that you need not make yourself.
#
# **Why more, with `relu`?** XLA fuses the gradient of `relu` with what follows. The fused loop asks "was the *product* above zero?", so
# the product is kept; the next layer's gradient needs the `relu`'s output, so that is kept too. Two tensors a layer where TensorFlow's
# executor keeps one, because it wrote the second over the first:

# %%
predicted_xla = weights + A + 2 * DEPTH * A
lab.predicted_vs_measured(relu_with_jit_compile=(predicted_xla, reported.peak_mib))

# %% [markdown]
# **Why less, with GELU?** Without XLA most of the nine operations leave a tensor for the backward pass. XLA keeps a few, and
# computes the others again inside the fused loop. Measure where it flips, with more and more `tf.sin` after each `relu`. The
# third line compiles *only the chain*, a function inside a step that is not compiled:


# %%
WAYS = ("no XLA", "step compiled", "chain compiled")


def by_chain(lengths, depth, width, batch):
    import gc

    x = tf.random.normal([batch, width])

    def measure(way, length):
        def chain(hidden):
            hidden = tf.nn.relu(hidden)
            for _ in range(length):
                hidden = tf.sin(hidden)
            return hidden

        if way == "chain compiled":
            chain = tf.function(chain, jit_compile=True)
        step = make_step(chain, depth, width, compiled=True if way == "step compiled" else None)
        step(x)
        gc.collect()  # what earlier steps left
        with lab.phase(f"{way}, {length}"):
            step(x)

    for way in WAYS:
        for length in lengths:
            measure(way, length)


LENGTHS = lab.choose(SCALE, quick=[0, 1, 2, 4], full=[0, 1, 2, 4, 8, 16])
chains = lab.measure(by_chain, LENGTHS, 4, WIDTH, BATCH // 2, label="chains")
rise = {n: {way: chains.phase(f"{way}, {n}").rise_mib for way in WAYS} for n in LENGTHS}
peaks = pd.DataFrame(rise)

axes = peaks.T.plot(marker="o", style=lab.LINES[:3], ylim=(0, None))
axes.set(xlabel="tf.sin operations after each of the 4 relu", ylabel="peak of one step (MiB)")
plt.show()
peaks.round(1).rename_axis("MiB, by chain length")

# %% [markdown]
# Compiling only the chain saves nothing: its forward half must hand every intermediate over to its backward half. Both must be in *one*
# compiled function. Move the sliders to find the flip for other sizes:

# %%
lines = {way: np.polyfit(LENGTHS, row, 1) for way, row in peaks.iterrows()}


def flip(chain_length=2, layers=4, batch=1024):
    scale = layers / 4 * batch / (BATCH // 2)
    without, compiled, _ = (scale * np.polyval(lines[way], chain_length) for way in WAYS)
    print(f"no XLA {without:8.1f} MiB   XLA {compiled:8.1f} MiB", end="   ")
    print(f"{'XLA' if compiled < without else 'no XLA'} is smaller (predicted from the lines)")


lab.explore(flip, chain_length=(0, 20), layers=(1, 48), batch=(128, 8192, 128))

# %% [markdown]
# **Compile-time memory.** XLA's compiler lives in the process, outside the allocator and outside every tensor budget. And it
# compiles again for *each concrete shape*, even where the `tf.function` has `None` in its signature and was traced once:


# %%
def new_shapes(lengths):
    step = make_step(tf.nn.relu, 3, 64, compiled=True)
    step = step.get_concrete_function(tf.TensorSpec([None, 64]))
    step(tf.ones([1, 64]))  # what the first compilation sets up is not counted
    before = lab.reading().process_mib
    with lab.phase("all lengths"):
        for length in lengths:
            step(tf.ones([length, 64]))
    return lab.reading().process_mib - before


LENGTHS_SEEN = list(range(2, lab.choose(SCALE, quick=18, full=98)))
exact = lab.measure(new_shapes, LENGTHS_SEEN, label="a shape each")
seconds = exact.phase("all lengths").end - exact.phase("all lengths").start
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
arms = {"relu": plain, "relu, XLA": xla, "GELU": gelu_plain, "GELU, XLA": gelu_xla}
here = {f"{name} MiB": f"{arm.peak_mib:.1f}" for name, arm in arms.items()}
elsewhere = dict.fromkeys(here, "unavailable: run make labs NAMES=15_xla there")
devices = dict.fromkeys([plain.device, "CPU:0", "GPU:0"], elsewhere)
pd.DataFrame(devices | {plain.device: here})

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C20",
    "partly",
    relu=plain.peak_mib,
    relu_as_printed=printed.peak_mib,
    relu_xla=xla.peak_mib,
    gelu=gelu_plain.peak_mib,
    gelu_xla=gelu_xla.peak_mib,
    relu_process=plain.process_peak_mib,
    relu_xla_process=xla.process_peak_mib,
)

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
bucketed = None
if None not in padded:
    bucketed = lab.run(new_shapes, padded, label="buckets", quiet=True)
with lab.exercise(1, "Round up to a multiple of 8: -(-length // 8) * 8."):
    assert bucketed is not None, "bucket() returns nothing yet: return a length."
    assert all(0 <= after - length <= 16 for length, after in zip(LENGTHS_SEEN, padded)), (
        "a padded length is too short, or too long."
    )
    assert len(set(padded)) <= 3, (
        f"{len(set(padded))} shapes are {len(set(padded))} executables: pad to fewer lengths."
    )
    assert bucketed.ok, str(bucketed.error)
    took = bucketed.phase("all lengths").end - bucketed.phase("all lengths").start
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
with lab.exercise(
    2,
    'Find the line with "preallocated-temp"; the text after " size " up to the comma is the size, '
    "such as 65.01MiB.",
):
    assert isinstance(answer, float), "temporary_part() returns nothing yet: return a number."
    assert 0 < answer < 1, f"{answer:.2f} is no part of the whole: divide by `total`."
    expected = (reported.peak_mib - weights - A) / reported.peak_mib
    assert abs(answer - expected) < 0.05, (
        f"{answer:.2f}: what is not weights and input is about {expected:.2f}."
    )

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


yours = lab.run(gelu_step, *SIZES, label="your GELU step", quiet=True)
with lab.exercise(
    3, "Forward and backward must be in one compiled function: make_step(..., compiled=True)."
):
    assert yours.ok, str(yours.error)
    against = f"peak {yours.peak_mib:.0f} MiB against {gelu_plain.peak_mib:.0f} without XLA"
    assert yours.peak_mib < 0.8 * gelu_plain.peak_mib, (
        f"{against}: is it still only the activation that is compiled?"
    )
