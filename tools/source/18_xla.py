# %% [markdown]
# # 18 · XLA: does compiling lower memory?
#
# **Symptom:** *"I turned XLA on to save memory and ran out of it"*, *"`set_jit(True)` changes nothing"*, *"only half the batch fits after
# the upgrade"*, or a compiled step that stops for a while at every new batch shape.
#
# **Afterwards you can** check whether XLA runs at all, read from its own report what it will allocate, tell which networks it
# shrinks and which it grows, make a compiled step fit, and keep the number of compilations small.
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
from labsupport.graders import xla as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log

BATCH = lab.choose(SCALE, quick=2048, full=4096)
DEPTH = lab.choose(SCALE, quick=12, full=24)
WIDTH = 512

# %% [markdown]
# ## Predict
#
# XLA is a compiler: it takes a whole graph and fuses operations, so that an intermediate result between two of them need
# never be stored. Published advice therefore says that `tf.config.optimizer.set_jit(True)` lowers memory. The network is a row of
# matrix products, each followed by `relu`; one SGD step.

# %%
print(f"{DEPTH} products of width {WIDTH}, batch {BATCH}")
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
# First the step as it is, then with the advised line. How do we know whether XLA ran? A graph that was handed to XLA has
# `_XlaRun` operations in it; `train` counts them in the graphs that TensorFlow really executed.


# %%
def hand_written_gelu(x):
    return 0.5 * x * (1.0 + tf.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def make_step(activation, depth, width, compiled=None, segments=1):
    weights = [
        tf.Variable(tf.random.stateless_normal([width, width], seed=[number, 0]) / 20)
        for number in range(depth)
    ]

    def layers(first, last):
        def run(hidden):
            for weight in weights[first:last]:
                hidden = activation(hidden @ weight)
            return hidden

        return run

    @tf.function(jit_compile=compiled)
    def step(x):
        with tf.GradientTape() as tape:
            hidden, size = x, depth // segments
            for first in range(0, depth, size):
                part = layers(first, first + size)
                hidden = (part if segments == 1 else tf.recompute_grad(part))(hidden)
            loss = tf.reduce_mean(hidden * hidden)
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(0.01 * gradient)
        return loss

    return step


def train(activation, use_set_jit, depth, width, batch, segments=1):
    from tensorflow.python.eager import context  # no public name shows the executed graphs

    if use_set_jit:
        tf.config.optimizer.set_jit(True)
    step = make_step(activation, depth, width, segments=segments)
    x = tf.random.stateless_normal([batch, width], seed=[1, 2])
    context.context().enable_run_metadata()
    losses = [float(step(x))]
    executed = context.context().export_run_metadata()
    context.context().disable_run_metadata()
    losses += [float(step(x)) for _ in range(3)]
    graphs = [part for function in executed.function_graphs for part in function.partition_graphs]
    return sum(node.op == "_XlaRun" for graph in graphs for node in graph.node), losses


SIZES = (DEPTH, WIDTH, BATCH)
plain = lab.measure(train, tf.nn.relu, False, *SIZES, label="relu, no XLA")
printed = lab.measure(train, tf.nn.relu, True, *SIZES, label="relu, set_jit(True) as printed")
lab.note(
    f"On {printed.device} `set_jit(True)` made {printed.value[0]} XLA operations. The peak was "
    f"{plain.peak_mib:.0f} MiB without the line and {printed.peak_mib:.0f} with it: where no "
    "XLA is "
    "made, both run the same graph. What two runs differ by (one activation has "
    f"{A:.0f} MiB) comes from operations that may run in any order."
)

# %% [markdown]
# On a CPU nothing happens, without a word: there `set_jit` is ignored unless an environment variable allows it *before*
# TensorFlow is imported. Now with the variable, in a budget that leaves the step without XLA some room:

# %%
ALLOW = {"TF_XLA_FLAGS": "--tf_xla_cpu_global_jit"}
BUDGET = f"{int(1.3 * plain.peak_mib)} MiB"
label = "relu, XLA, under the budget"
failure = lab.run(train, tf.nn.relu, True, *SIZES, budget=BUDGET, env=ALLOW, label=label)
if failure.device.startswith("CPU"):
    lab.expect_oom(failure)
    lab.note(
        f"A real out-of-memory error. {failure.peak_mib:.0f} MiB were in use, and XLA asks for "
        "*one block* of "
        f"{failure.wanted_mib:.0f} MiB; the budget is {BUDGET}."
    )

# %% [markdown]
# What it wanted, without a tight budget:

# %%
xla = lab.measure(train, tf.nn.relu, True, *SIZES, env=ALLOW, label="relu, XLA")
assert xla.value[0] > 0, "XLA did not run"

# %% [markdown]
# ## Fix
#
# The first fix is to take the line out again: the step without XLA fits. Who wants XLA all the same lets it
# compute again what it would keep: the same step, XLA and budget, but the layers are wrapped in `tf.recompute_grad`, three
# at a time (lab 12).

# %%
label = "relu, XLA, recomputing"
fix = lab.run(train, tf.nn.relu, True, *SIZES, DEPTH // 3, budget=BUDGET, env=ALLOW, label=label)
lab.expect_finished(fix)
assert fix.value[0] > 0 or not fix.device.startswith("CPU"), "XLA did not run"

# %% [markdown]
# **The other end.** XLA is made for networks in which there is something to fuse. The same layers with another activation,
# GELU as many model files write it out: nine elementwise operations in place of one.

# %%
gelu_plain = lab.measure(train, hand_written_gelu, False, *SIZES, label="GELU, no XLA")
gelu_xla = lab.measure(train, hand_written_gelu, True, *SIZES, env=ALLOW, label="GELU, XLA")

# %% [markdown]
# ## Side by side

# %%
lab.compare(plain, failure, xla, fix, gelu_plain, gelu_xla)

# %% [markdown]
# Who held it? Two of them run once more while TensorFlow records every allocation. Without XLA each product asks for
# a tensor of its own; XLA's program asks once, for one block in which it keeps what it computes on the way. What lies
# where in that block only the compiler knows.

# %%
lab.take_apart(plain, failure)

# %%
print(my_guess.against(xla.peak_mib))
for arm in (printed, xla, fix):
    assert np.allclose(arm.value[1], plain.value[1], rtol=0.01, atol=0), "not the same training"
lab.note(
    "All relu arms compute the same losses. With XLA the relu step takes "
    f"{xla.peak_mib / plain.peak_mib:.2f} times the "
    f"tensor memory, with GELU {gelu_xla.peak_mib / gelu_plain.peak_mib:.2f} times. What the "
    "process adds, compiler included, "
    f"is {xla.process_peak_mib / plain.process_peak_mib:.2f} and "
    f"{gelu_xla.process_peak_mib / gelu_plain.process_peak_mib:.2f} times as much. (The prediction "
    f"leaves out the gradients of the weights, {weights:.0f} MiB in all: some wait for their "
    "update.)"
)
lab.predicted_vs_measured(relu_without_XLA=(predicted_plain, plain.peak_mib))

# %% [markdown]
# ## Explain
#
# **One block.** XLA knows all shapes when it compiles. It plans every intermediate of the step into *one* temporary block,
# then takes that block from TensorFlow's allocator for the whole step. So it is counted, it obeys the budget, and it needs a
# free gap of that size. XLA can write its plan down. Compile the whole step with `jit_compile=True` (no environment variable
# needed) and read it:


# %%
def compiled_with_report(depth, width, batch):
    import os
    import tempfile
    from pathlib import Path

    folder = tempfile.mkdtemp()
    # XLA reads this when it compiles first.
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    step, x = make_step(tf.nn.relu, depth, width, compiled=True), tf.ones([batch, width])
    for _ in range(3):
        float(step(x))  # waits until XLA is done
    reports = Path(folder).glob("*memory-usage-report.txt")
    return max(reports, key=lambda path: path.stat().st_size).read_text()


reported = lab.measure(compiled_with_report, *SIZES, label="relu, jit_compile=True")
report = reported.value.splitlines()
total = int(report[0].split()[3]) / 2**20
print("\n".join(report[:9]))
lab.predicted_vs_measured(report_of_XLA=(total, reported.peak_mib))

# %% [markdown]
# The plan is there before the step runs: a prediction that you need not make yourself.
#
# **Why more, with `relu`?** XLA fuses the gradient of `relu` with what follows. The fused loop asks "was the *product* above zero?", so
# the product is kept; the next layer's gradient needs the `relu`'s output, so that is kept too. Two tensors a layer where TensorFlow
# without XLA keeps one, because it wrote the second over the first:

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

    x = tf.ones([batch, width])

    def measure(way, length):
        def chain(hidden):
            hidden = tf.nn.relu(hidden)
            for _ in range(length):
                hidden = tf.sin(hidden)
            return hidden

        if way == "chain compiled":
            chain = tf.function(chain, jit_compile=True)
        step = make_step(chain, depth, width, compiled=True if way == "step compiled" else None)
        float(step(x))  # waits until XLA is done
        gc.collect()  # what earlier steps left
        with lab.phase(f"{way}, {length}"):
            float(step(x))

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

# %%
most = LENGTHS[-1]
step, chain, none = (rise[most][way] for way in ("step compiled", "chain compiled", "no XLA"))
lab.note(
    f"With {most} operations after each `relu` the compiled step peaks at {step / none:.2f} of "
    "what it takes without XLA, and "
    f"with only the chain compiled at {chain / none:.2f}: then the forward half must hand its "
    "intermediates over to the "
    "backward half. Both must be in *one* compiled function."
)

# %% [markdown]
# Move the sliders to find the flip for other sizes:

# %%
lines = {way: np.polyfit(LENGTHS, row, 1) for way, row in peaks.iterrows()}


def flip(chain_length=2, layers=4, batch=1024):
    scale = layers / 4 * batch / (BATCH // 2)
    without, compiled, _ = (scale * (lines[way][0] * chain_length + lines[way][1]) for way in WAYS)
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
    for name in ("new", "again"):
        with lab.phase(name):
            for length in lengths:
                step(tf.ones([length, 64]))
    return lab.reading().process_mib - before


LENGTHS_SEEN = list(range(2, lab.choose(SCALE, quick=18, full=98)))
exact = lab.measure(new_shapes, LENGTHS_SEEN, label="a shape each")
new, again = (exact.phase(name).end - exact.phase(name).start for name in ("new", "again"))
lab.note(
    f"One trace, {len(LENGTHS_SEEN)} shapes: {new:.2f} s when they are new and {again:.2f} s "
    "when they come again; the "
    f"process grew by {exact.value:.1f} MiB."
)

# %% [markdown]
# **Who turns it on?** `compile(jit_compile="auto")` is Keras' default: yes on an accelerator, no on a machine with only a CPU.
# That alone can change what fits after an upgrade or a move.

# %%
import keras

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
print("jit_compile without being asked, with the devices that this kernel uses:", model.jit_compile)

# %% [markdown]
# The verdict below is for the device of this run. On a GPU `set_jit` needs no variable and kernels fuse differently. On a
# machine with one, and `tensorflow[and-cuda]` installed: `make labs NAMES=18_xla`.

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
)

# %% [markdown]
# ## Exercises
#
# **1.** Keep the number of compilations small: `bucket(length)` returns the padded length for a sequence of that many rows.
# Never shorter than the length, never more than 16 rows longer, and at most three shapes for any 16 lengths in a row.


# %%
def bucket(length):
    # BEGIN SOLUTION
    return -(-length // 8) * 8
    # END SOLUTION


# %%
check.bucket(bucket)


# %% tags=["right"]
def bucket(length):
    steps = np.arange(12, 100_000, 12)
    return steps[np.searchsorted(steps, length)]


# %% tags=["wrong"]
# says: 63 to 78 there are 16 shapes
def bucket(length):
    return max(17, length)


# %% tags=["right"]
def bucket(length):
    import math

    return 10 * math.ceil(length / 10)


# %% tags=["wrong"]
# says: shorter than
def bucket(length):
    return length // 8 * 8


# %% tags=["wrong"]
# says: 5 shapes
def bucket(length):
    return 1 << (length - 1).bit_length()


# %% tags=["wrong"]
# says: more than 16
def bucket(length):
    return max(64, length)


# %% tags=["wrong"]
# says: more than 16
def bucket(length):
    return length + 17 if length > 17 else 17


# %% [markdown]
# **2.** XLA takes its temporary block in one piece. Read its size out of a report like the one above (`report` is a list of
# lines; the block is the allocation called `preallocated-temp`), and return it in MiB. The check has reports of its own, too.


# %%
def temporary_mib(report):
    # BEGIN SOLUTION
    line = next(line for line in report if "preallocated-temp" in line)
    size = line.split(" size ")[1].split(",")[0]  # such as 65.01MiB
    return float(size[:-3]) * {"GiB": 1024, "MiB": 1, "KiB": 1 / 1024}[size[-3:]]
    # END SOLUTION


# %%
check.temporary_mib(temporary_mib, report)


# %% tags=["right"]
def temporary_mib(report):
    line = next(line for line in report if line.endswith("preallocated-temp:"))
    return lab.parse_size(line.split("size ")[-1].split(",")[0]) / 2**20


# %% tags=["wrong"]
# says: its line
def temporary_mib(report):
    size = report[6].split(" size ")[1].split(",")[0]
    return float(size[:-3]) * {"GiB": 1024, "MiB": 1, "KiB": 1 / 1024}[size[-3:]]


# %% tags=["wrong"]
# says: behind the word size
def temporary_mib(report):
    import re

    line = next(line for line in report if "preallocated-temp" in line)
    number, unit = re.search(r"([\d.]+)(.)iB", line).groups()
    return float(number) / 1024 ** ("GMK".index(unit) - 1)


# %% tags=["wrong"]
# says: in MiB
def temporary_mib(report):
    line = next(line for line in report if "preallocated-temp" in line)
    return line.split(" size ")[1].split(",")[0]


# %% tags=["right"]
def temporary_mib(report):
    import re

    number, unit = re.search(r"size ([\d.]+)(.)iB, preallocated-temp", "\n".join(report)).groups()
    return float(number) / 1024 ** ("GMK".index(unit) - 1)


# %% tags=["wrong"]
# says: is not always
def temporary_mib(report):
    line = next(line for line in report if "preallocated-temp" in line)
    return float(line.split("MiB")[-2].split(" size ")[1]) if "MiB" in line else 0.0


# %% tags=["wrong"]
# says: of everything
def temporary_mib(report):
    return int(report[0].split()[3]) / 2**20


# %% [markdown]
# **3.** This step compiles only its activation. Change it so that compiling saves memory: the same training step, for
# whatever weights and rows it is given, with a peak clearly below that of the step without XLA.


# %%
def compiled_step(weights):
    activation = tf.function(hand_written_gelu, jit_compile=True)
    # BEGIN SOLUTION
    activation = hand_written_gelu

    @tf.function(jit_compile=True)
    # END SOLUTION
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


# %%
check.compiled_step(compiled_step)


# %% tags=["right"]
def compiled_step(weights):
    @tf.function(jit_compile=True)
    def loss_and_gradients(x):
        with tf.GradientTape() as tape:
            for weight in weights:
                x = hand_written_gelu(x @ weight)
            loss = tf.reduce_mean(x * x)
        return loss, tape.gradient(loss, weights)

    def step(x):
        loss, gradients = loss_and_gradients(x)
        for weight, gradient in zip(weights, gradients):
            weight.assign_sub(0.01 * gradient)
        return loss

    return step


# %% tags=["right"]
def compiled_step(weights):
    import keras

    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(weights)

    @tf.function(jit_compile=True)
    def step(x):
        with tf.GradientTape() as tape:
            hidden = x
            for weight in weights:
                hidden = keras.activations.gelu(hidden @ weight, approximate=True)
            loss = tf.reduce_mean(hidden**2)
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    return step


# %% tags=["wrong"]
# says: nothing in it is compiled
def compiled_step(weights):
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            hidden = x
            for weight in weights:
                layer = tf.recompute_grad(lambda x, weight=weight: hand_written_gelu(x @ weight))
                hidden = layer(hidden)
            loss = tf.reduce_mean(hidden * hidden)
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(0.01 * gradient)
        return loss

    return step


# %% tags=["right"]
def compiled_step(weights):
    def loss_of(x):
        for weight in weights:
            x = hand_written_gelu(tf.matmul(x, weight))
        return tf.reduce_mean(tf.square(x))

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x)
        gradients = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, gradients):
            weight.assign(weight - gradient / 100)
        return loss

    return tf.function(step, jit_compile=True)


# %% tags=["wrong"]
# says: same loss
def compiled_step(weights):
    @tf.function(jit_compile=True)
    def step(x):
        with tf.GradientTape() as tape:
            hidden = x[: len(x) // 2]
            for weight in weights:
                hidden = hand_written_gelu(hidden @ weight)
            loss = tf.reduce_mean(hidden * hidden)
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(0.01 * gradient)
        return loss

    return step


# %% tags=["wrong"]
# says: same loss
def compiled_step(weights):
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            hidden = x
            for weight in weights:
                hidden = tf.nn.relu(hidden @ weight)
            loss = tf.reduce_mean(hidden * hidden)
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(0.01 * gradient)
        return loss

    return step


# %% tags=["wrong"]
# says: weights.*differ
def compiled_step(weights):
    @tf.function(jit_compile=True)
    def step(x):
        for weight in weights:
            x = hand_written_gelu(x @ weight)
        return tf.reduce_mean(x * x)

    return step


# %% tags=["wrong"]
# says: forward and backward
def compiled_step(weights):
    @tf.function(jit_compile=True)
    def forward(x):
        for weight in weights:
            x = hand_written_gelu(x @ weight)
        return tf.reduce_mean(x * x)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = forward(x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(0.01 * gradient)
        return loss

    return step
