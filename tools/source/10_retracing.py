# %% [markdown]
# # 10 · Retracing: a graph for every call
#
# **Symptom:** *"RAM grows with every training step until the process is killed"*, while every tensor is tiny and
# TensorFlow's allocator shows nothing; *"5 out of the last 5 calls to <function> triggered tf.function retracing"*.
#
# **Afterwards you can** tell which arguments make a `tf.function` trace again, count the traces, see the memory
# that the allocator does not see, and bring any number of calls down to a few traces.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C12 |
#
# Every run below happens in a process of its own. Tracing, which is to run the Python code once and note down TensorFlow's
# operations as a graph, is slow: a run that seems to stand still is tracing.

# %% tags=["parameters"]
SCALE = "quick"  # "full" makes five times as many calls
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import retracing as check

tf = lab.load_tensorflow()

CALLS = lab.choose(SCALE, quick=100, full=500)  # each with a rate, or a length, of its own
STEPS = 60  # with each rate: an epoch
WIDTH, DEPTH = 64, 4

# %% [markdown]
# ## Predict
#
# A small network and one training step, written by hand. The learning rate falls a little with every epoch.


# %%
def make_step(counter=None):
    weights = [
        tf.Variable(0.1 * tf.random.stateless_normal((WIDTH, WIDTH), seed=(1, i)))
        for i in range(DEPTH)
    ]

    def step(x, rate):
        if counter is not None:
            counter.append("traced")  # Python code runs while TensorFlow traces, and never again
        with tf.GradientTape() as tape:
            hidden = x
            for weight in weights:
                hidden = tf.nn.relu(hidden @ weight)
            loss = tf.reduce_sum(tf.square(hidden - x))
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(rate * gradient)
        return loss

    return step


def rows(number):
    return tf.random.stateless_normal((number, WIDTH), seed=(2, 3))


def rate_at(i):
    return 0.001 / (1 + i)


# %%
my_guess = lab.guess(
    f"After the first step: by how much does the process grow in {CALLS} more epochs?", GUESS_MIB
)

# %% [markdown]
# Now the arithmetic. The shapes say that nothing can grow: a step holds the weights, as many gradients, and a few
# tensors of shape (rows, width).

# %%
weights_mib = DEPTH * lab.tensor_mib((WIDTH, WIDTH))
activations_mib = 3 * DEPTH * lab.tensor_mib((32, WIDTH))
print(f"weights and gradients {2 * weights_mib:.2f} MiB, activations {activations_mib:.2f} at most")

# %% [markdown]
# But a `tf.function` keeps a graph for every *kind* of call it has seen, for as long as it lives. Tensors, NumPy's
# arrays and numbers count by dtype and shape. Python's numbers and strings count by their **value**, other objects by
# their **identity**. A rate that is a Python number is a new kind with each new value.

# %%
predicted_traces = {
    "rate: Python number": 1 + CALLS,
    "rate: tensor": 1,
    "each length a shape": 1 + CALLS,
    "one signature": 1,
}
print(*(f"{name}: {traces}" for name, traces in predicted_traces.items()), sep=", ")

# %% [markdown]
# ## Failure
#
# The step is decorated correctly, once, outside the loop. Only the rate is a Python number.


# %%
def watch(step, calls, times=1):
    """Make each call so many times; after the first one, note how much the process has grown."""
    first, *others = calls
    step(*first)
    start, growth = lab.reading().process_mib, []
    with lab.phase("after the first call"):
        for arguments in others:
            for _ in range(times):
                step(*arguments)
            growth.append(lab.reading().process_mib - start)
    signatures = step.pretty_printed_concrete_signatures().splitlines()
    return {
        "traces": step.experimental_get_tracing_count(),
        "growth": growth,
        "operations": len(step.get_concrete_function(*first).graph.get_operations()),
        "rates": [line for line in signatures if line.startswith("  rate")][:4],
    }


def python_rates():
    step, x = tf.function(make_step()), rows(32)
    return watch(step, [(x, rate_at(epoch)) for epoch in range(CALLS + 1)], STEPS)


numbers = lab.run(python_rates, label="rate: Python number")
lab.expect_finished(numbers)

# %% [markdown]
# The grey line, the process, climbs; the orange one, the tensors, lies on the floor. It ends well, because its calls
# end: no budget for tensors would ever stop this, and after enough calls the system would. Three ways to see it from
# inside:

# %%
print(f"step.experimental_get_tracing_count(): {numbers.value['traces']} for {CALLS + 1} rates")
print(
    f"growth of the process: {numbers.value['growth'][-1]:.1f} MiB; "
    f"of the tensors: {numbers.phase('after the first call').added_mib:.2f} MiB"
)
print("the kinds it keeps (step.pretty_printed_concrete_signatures()), the first ones' rates:")
print("\n".join(numbers.value["rates"]))

# %% [markdown]
# ## Fix
#
# The same calls, one change: the rate goes in as a tensor.


# %%
def tensor_rates():
    step, x = tf.function(make_step()), rows(32)
    return watch(step, [(x, tf.constant(rate_at(epoch))) for epoch in range(CALLS + 1)], STEPS)


tensors = lab.run(tensor_rates, label="rate: tensor")
lab.expect_finished(tensors)

# %% [markdown]
# **The same with shapes.** Texts, sounds and last batches have many lengths. Each new one is a new kind of call,
# tensor or not. Here the fix is a signature that leaves the length open (`None`).


# %%
def every_length():
    step = tf.function(make_step())
    return watch(step, [(rows(32 + i), tf.constant(rate_at(i))) for i in range(CALLS + 1)])


def one_signature():
    kind = [tf.TensorSpec([None, WIDTH], tf.float32), tf.TensorSpec([], tf.float32)]
    step = tf.function(make_step(), input_signature=kind)
    return watch(step, [(rows(32 + i), tf.constant(rate_at(i))) for i in range(CALLS + 1)])


lengths = lab.measure(every_length, label="each length a shape")
signature = lab.measure(one_signature, label="one signature")

# %% [markdown]
# ## Side by side

# %%
arms = (numbers, tensors, lengths, signature)
lab.compare(*arms, story="process")

# %% [markdown]
# There is no peak of tensors to take apart here: graphs are not handed out by TensorFlow's allocator, and only the process
# shows them. Every process pays for its first trace, which loads much of TensorFlow. What counts is what comes after it,
# with every new rate or length:

# %%
grown = pd.DataFrame({arm.label: arm.value["growth"] for arm in arms}, range(1, CALLS + 1))
axes = grown.plot(style=lab.LINES, xlim=(0, None), xlabel="rates or lengths after the first")
axes.set_ylabel("process memory added (MiB)")
axes.set_title("rate: tensor, and one signature, lie on the floor, one upon the other")
plt.show()

growth = grown.iloc[-1]
added = {arm.label: arm.phase("after the first call").added_mib for arm in arms}
summary = {
    "traces predicted": predicted_traces,
    "traces measured": {arm.label: arm.value["traces"] for arm in arms},
    "process MiB after the first call": growth.map("{:.1f}".format),
    "tensors MiB after the first call": {label: f"{size:.2f}" for label, size in added.items()},
}
print(pd.DataFrame(summary).to_string())
assert summary["traces measured"] == predicted_traces

# %%
print(my_guess.against(growth["rate: Python number"]))

# %% [markdown]
# ## Explain
#
# * A trace is a graph: C++ nodes, their Python wrappers, an optimized copy, kernels. All of it lies on the ordinary
#   heap, where TensorFlow's allocator does not count.
# * The function keeps every graph, since the same kind of call may come again. A rate never does.
# * The graphs die with the function. A training step lives as long as the training.
#
# Numbers and shapes are the common cases. Which others trace again, and does the advice for them work? One process,
# each case with a function of its own; a Python counter inside the step counts traces, since Python runs only then.


# %%
def survey(calls):
    import gc

    class Schedule:
        def now(self):
            return 0.001

    def fresh(step, keep):
        function = tf.function(step)
        if keep:
            kept.append(function)
        function(x, rate)

    def process_now():
        gc.collect()
        return lab.reading().process_mib

    x, rate, schedule, kept, table = rows(32), tf.constant(0.001), Schedule(), [], {}
    now, untraced = schedule.now, lambda step: step
    relaxed = lambda step: tf.function(step, reduce_retracing=True)
    asked = lambda step: tf.function(lambda x, ask: step(x, ask()))
    cases = {  # how the step is made, and how it is called
        "number, reduce_retracing=True": (relaxed, lambda f, i: f(x, rate_at(i))),
        "number as np.float32": (tf.function, lambda f, i: f(x, np.float32(rate_at(i)))),
        "lengths, reduce_retracing=True": (relaxed, lambda f, i: f(rows(32 + i), rate)),
        "lengths padded to multiples of 32": (
            tf.function,
            lambda f, i: f(tf.pad(rows(32 + i), [[0, -i % 32], [0, 0]]), rate),
        ),
        "a new object each time": (asked, lambda f, i: f(x, Schedule().now)),
        "the same object's method": (asked, lambda f, i: f(x, schedule.now)),
        "the same method, looked up once": (asked, lambda f, i: f(x, now)),
        "the same tf.function each time": (tf.function, lambda f, i: f(x, rate)),
        "a new tf.function each time, kept": (untraced, lambda f, i: fresh(f, keep=True)),
        "a new tf.function each time, dropped": (untraced, lambda f, i: fresh(f, keep=False)),
    }
    warm = tf.function(make_step())  # what start-up left free is filled before anything is measured
    for i in range(16):
        warm(x, rate_at(i))
    gc.freeze()  # the many collections need not look at what is there by now
    for name, (made, call) in cases.items():
        counter = []
        step = made(make_step(counter))
        kept.append(step)
        for i in range(2 * calls):
            if i == calls:
                half = process_now()
            call(step, i)
        table[name] = {"traces": len(counter), "KiB a call": 1024 * (process_now() - half) / calls}
    return table


HALF = lab.choose(SCALE, quick=6, full=40)
surveyed = lab.measure(survey, HALF, label="what else traces again")
others = pd.DataFrame.from_dict(surveyed.value, orient="index").round(0)
print(f"{2 * HALF} calls each; growth of the process in their second half, when all is warm\n")
print(others.to_string())
ups = others["traces"]
assert ups["number, reduce_retracing=True"] == 2 * HALF and ups["number as np.float32"] == 1
assert ups["lengths, reduce_retracing=True"] == 2 < ups["the same object's method"]

# %% [markdown]
# * `reduce_retracing=True` relaxes **shapes**, after the second one. For Python numbers it does nothing; `np.float32`
#   is enough, since NumPy's numbers go in as tensors.
# * Padding to buckets makes one trace a bucket. Rows of zeros add nothing to this step's sum; a mean would need a mask.
# * `object.method` is a new Python object at every look-up: passed as an argument it was a new kind each time.
# * A `tf.function` made anew in each step is traced anew each time: that costs the time in any case. Its memory comes
#   back once nothing refers to it. What grows is what is kept.
#
# **A trace count of 1 is not the end.** With `jit_compile=True` XLA compiles once more for every concrete shape,
# below the trace. An array that a traced function merely *mentions* is copied into each of its graphs. An LSTM with
# `unroll=True` writes every time step into the one graph, as the Python loop of lab 08 does. And in TensorFlow 1's style
# one graph grows with every operation that the loop makes, although nothing is traced at all.


# %%
def below_the_trace(calls):
    import time

    w = tf.Variable(tf.ones((WIDTH, WIDTH)))

    @tf.function(jit_compile=True, input_signature=[tf.TensorSpec([None, WIDTH])])
    def forward(x):
        return tf.reduce_sum(tf.nn.relu(x @ w))

    forward(rows(8))
    seconds = {"a new length": [], "the same length again": []}
    for i in range(calls):
        for kind in seconds:
            x, start = rows(32 + i), time.monotonic()
            forward(x)
            seconds[kind].append(time.monotonic() - start)
    milliseconds = {kind: 1000 * float(np.median(times)) for kind, times in seconds.items()}
    return forward.experimental_get_tracing_count(), milliseconds


def session_loop(calls):
    counts = []
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        x = tf.constant(1.0)
        for _ in range(calls):
            session.run(x * 2.0)  # makes a constant and a multiplication, in every turn
            counts.append(len(graph.get_operations()))
    return counts[0], counts[-1]


def baked(array, calls):
    x, tensor, table = tf.ones(array.shape), tf.constant(array), {}
    for name, held in (("a tensor", tensor), ("a NumPy array", array)):
        function = tf.function(lambda x, k: tf.reduce_sum(x + held) * k)
        before = lab.reading().process_mib
        with lab.phase(name):
            for i in range(calls):
                function(x, float(i))
        table[name] = {"process MiB": lab.reading().process_mib - before}
    return table, session_loop(calls)


compiled = lab.measure(below_the_trace, 12, label="XLA")
count, milliseconds = compiled.value
times = ", ".join(f"{kind} {t:.1f} ms" for kind, t in milliseconds.items())
print(f"XLA, {count} trace for 13 lengths: {times} (median)")
an_array = np.ones((512, 512), np.float32)
constants = lab.measure(baked, an_array, 20, label="baked in")
print(f"\n20 traces of a function that mentions {an_array.nbytes / 2**20:.0f} MiB as …")
table, (first, last) = constants.value
mentioned = pd.DataFrame.from_dict(table, orient="index")
mentioned.insert(0, "tensors MiB", [part.added_mib for part in constants.phases])
print(mentioned.round(2).to_string())
print(f"\noperations in the graph after 1 and 20 turns of session.run(x * 2.0): {first}, {last}")
grown = mentioned["process MiB"]
assert grown["a NumPy array"] > 3 * grown["a tensor"] and last > first
lab.note(
    f"Each graph that mentions the array took {grown['a NumPy array'] / 20:.1f} MiB of the "
    "process: graph, copies and tensor. Mentioned as a tensor the array is there once."
)

# %% [markdown]
# The cures: pad to a few lengths for XLA; make a tensor of the array first, so that the graphs share it; leave
# `unroll` alone; make operations before the loop, and call `graph.finalize()`, which turns the next one into an error.
#
# **When it flips.** Traces do no harm where their number has an end: two values of a flag, three buckets. What they
# cost is traces × operations × the price of an operation, measured above. A large network's step has thousands of
# operations.

# %%
operations = numbers.value["operations"]
per_operation = growth["rate: Python number"] / CALLS / operations
print(f"one trace: {operations} operations of {1024 * per_operation:.0f} KiB each (this run)")


def cost(traces=10_000, operations=100):
    total, until = traces * operations * per_operation, 1024 / (operations * per_operation)
    print(f"{total:,.0f} MiB are added; 1 GiB is reached after {until:,.0f} traces (predicted)")


lab.explore(cost, traces=(1, 20_000, 1), operations=(50, 10_000, 50))

# %% [markdown]
# ## Verdict

# %%
a_call = pd.concat([1024 * growth / CALLS, others["KiB a call"]])
lab.verdict(
    "C12",
    "partly",
    number=a_call["rate: Python number"],
    tensor=a_call["rate: tensor"],
    lengths=a_call["each length a shape"],
    signature=a_call["one signature"],
    rebuilt_kept=a_call["a new tf.function each time, kept"],
    rebuilt_dropped=a_call["a new tf.function each time, dropped"],
    not_rebuilt=a_call["the same tf.function each time"],
)


# %% [markdown]
# ## Exercises
#
# **1.** This loop has two faults: it traces for every rate and for every length of a batch. Keep the calls and their
# results, and bring it down to one or two traces. (`make_step` stays as it is.)


# %%
def faulty(counter, calls):
    step = tf.function(make_step(counter))
    return [float(step(rows(20 + i), rate_at(i))) for i in range(calls)]


# %%
def repaired(counter, calls):
    # BEGIN SOLUTION
    kind = [tf.TensorSpec([None, WIDTH]), tf.TensorSpec([])]
    step = tf.function(make_step(counter), input_signature=kind)
    return [float(step(rows(20 + i), tf.constant(rate_at(i)))) for i in range(calls)]
    # END SOLUTION


# %%
check.repaired(repaired, faulty)


# %% tags=["right"]
def repaired(counter, calls):
    step = tf.function(make_step(counter), reduce_retracing=True)
    return [step(rows(20 + i), np.float32(rate_at(i))) for i in range(calls)]


# %% tags=["wrong"]
# says: traced 10 times
def repaired(counter, calls):
    step = tf.function(make_step(counter), reduce_retracing=True)
    return [float(step(rows(20 + i), rate_at(i))) for i in range(calls)]


# %% tags=["wrong"]
# says: losses differ
def repaired(counter, calls):
    step = tf.function(make_step(counter))
    return [float(step(rows(20), tf.constant(rate_at(i)))) for i in range(calls)]


# %% tags=["wrong"]
# says: losses differ
def repaired(counter, calls):
    step = tf.function(make_step(counter), reduce_retracing=True)
    return [float(step(rows(20 + i), tf.constant(rate_at(0) * 1000))) for i in range(calls)]


# %% tags=["wrong"]
# says: counted none
def repaired(counter, calls):
    return faulty(None, calls)


# %% tags=["wrong"]
# says: traced 10 times
def repaired(counter, calls):
    step = make_step(counter)  # runs eagerly: no trace, and the counter counts each call
    return [float(step(rows(20 + i), tf.constant(rate_at(i)))) for i in range(calls)]


# %% tags=["right"]
def repaired(counter, calls):
    step = tf.function(make_step(counter))
    longest = 20 + calls
    batches = [tf.pad(rows(20 + i), [[0, longest - 20 - i], [0, 0]]) for i in range(calls)]
    return [float(step(batch, tf.constant(rate_at(i)))) for i, batch in enumerate(batches)]


# %% tags=["wrong"]
# says: traced 10 times
def repaired(counter, calls):
    step, losses = make_step(counter), []
    for i in range(calls):
        losses.append(float(tf.function(step)(rows(20 + i), tf.constant(rate_at(i)))))
    return losses


# %% [markdown]
# **2.** A trace, and XLA's compiler, want few shapes. Write `padded(batch)`, which adds rows of zeros behind the batch:
# few different numbers of rows come out, whatever goes in, and a batch of 32 rows or more does not grow to twice its
# rows.


# %%
def padded(batch):
    # BEGIN SOLUTION
    size = 32
    while size < batch.shape[0]:
        size *= 2
    return tf.pad(batch, [[0, size - batch.shape[0]], [0, 0]])
    # END SOLUTION


# %%
check.padded(padded, make_step, WIDTH)


# %% tags=["right"]
def padded(batch):
    array = batch.numpy()
    size = max(32, 1 << (len(array) - 1).bit_length())
    return np.concatenate([array, np.zeros((size - len(array), WIDTH), array.dtype)])


# %% tags=["right"]
def padded(batch):
    size = next(size for size in (32, 63, 125, 249, 497, 993) if size >= batch.shape[0])
    return tf.concat([batch, tf.zeros((size - batch.shape[0], WIDTH))], axis=0)


# %% tags=["wrong"]
# says: traced \d+ times
def padded(batch):
    return tf.pad(batch, [[0, -batch.shape[0] % 32], [0, 0]])


# %% tags=["wrong"]
# says: smallest size that fits
def padded(batch):
    return tf.pad(batch, [[0, 1024 - batch.shape[0]], [0, 0]])


# %% tags=["wrong"]
# says: smallest size that fits
def padded(batch):
    size = 32
    while size <= batch.shape[0]:
        size *= 2
    return tf.pad(batch, [[0, size - batch.shape[0]], [0, 0]])


# %% tags=["wrong"]
# says: rows are lost
def padded(batch):
    size = 2 ** (batch.shape[0].bit_length() - 1)
    return batch[:size]


# %% tags=["wrong"]
# says: loss is off
def padded(batch):
    size = max(32, 2 ** (batch.shape[0] - 1).bit_length())
    return tf.pad(batch, [[0, size - batch.shape[0]], [0, 0]], constant_values=1.0)


# %% tags=["wrong"]
# says: shape
def padded(batch):
    return max(32, 2 ** (batch.shape[0] - 1).bit_length())


# %% tags=["wrong"]
# says: behind
def padded(batch):
    size = max(32, 2 ** (batch.shape[0] - 1).bit_length())
    return tf.pad(batch, [[size - batch.shape[0], 0], [0, 0]])
