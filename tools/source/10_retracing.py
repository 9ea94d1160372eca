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

CALLS = lab.choose(SCALE, quick=100, full=500)
WIDTH, DEPTH = 64, 4

# %% [markdown]
# ## Predict
#
# A small network and one training step, written by hand. The learning rate falls a little with every step, as a
# schedule makes it do.


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
    f"After the first step: by how much does the process grow in {CALLS} more steps?", GUESS_MIB
)

# %% [markdown]
# Now the arithmetic. The shapes say that nothing can grow: a step holds the weights, as many gradients, and a few
# tensors of shape (rows, width).

# %%
weights_mib = DEPTH * lab.tensor_mib((WIDTH, WIDTH))
activations_mib = 3 * DEPTH * lab.tensor_mib((32, WIDTH))
print(
    f"weights and gradients {2 * weights_mib:.2f} MiB, "
    f"activations at most {activations_mib:.2f} MiB, growth 0 MiB"
)

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
for name, traces in predicted_traces.items():
    print(f"{name:20s} {traces:3d} traces")

# %% [markdown]
# ## Failure
#
# The step is decorated correctly, once, outside the loop. Only the rate is a Python number.


# %%
def watch(step, calls):
    """Make the calls; after the first one, note how much the process has grown (MiB)."""
    first, *others = calls
    step(*first)
    start, growth = lab.reading().process_mib, []
    with lab.phase("after the first call"):
        for arguments in others:
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
    return watch(step, [(x, rate_at(i)) for i in range(CALLS + 1)])


numbers = lab.run(python_rates, label="rate: Python number")
lab.expect_finished(numbers)

# %% [markdown]
# The grey line, the process, climbs; the orange one, the tensors, lies on the floor. It ends well, because its calls
# end: no budget for tensors would ever stop this, and after enough calls the system would. Three ways to see it from
# inside:

# %%
traces = numbers.value["traces"]
print(f"traces (step.experimental_get_tracing_count()): {traces} for {CALLS + 1} calls")
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
    return watch(step, [(x, tf.constant(rate_at(i))) for i in range(CALLS + 1)])


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
side_by_side = lab.compare(*arms, story="process")
side_by_side

# %% [markdown]
# Every process pays for its first trace, which loads much of TensorFlow. What counts is what comes after it, call by
# call:

# %%
grown = pd.DataFrame({arm.label: arm.value["growth"] for arm in arms}, range(1, CALLS + 1))
words = {"xlabel": "calls after the first", "ylabel": "process memory added (MiB)"}
axes = grown.plot(style=lab.LINES, xlim=(0, None), **words)
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

# %% [markdown]
# Is a trace's price steady? Then a quarter of the calls predicts the whole.

# %%
quarter = CALLS // 4
lab.predicted_vs_measured(
    Python_numbers=(4 * numbers.value["growth"][quarter - 1], growth["rate: Python number"]),
    each_length_a_shape=(4 * lengths.value["growth"][quarter - 1], growth["each length a shape"]),
)

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
def taken_by(call, times, counter, graph_type):
    """What `times` calls trace, leave alive, and add to the process in their second half."""
    import gc

    def graphs_alive():
        gc.collect()
        return sum(type(thing) is graph_type for thing in gc.get_objects())

    def process_now():
        gc.collect()
        return lab.reading().process_mib

    alive = graphs_alive()
    for i in range(times):
        if i == times // 2:
            half = process_now()
        call(i)
    grown = process_now() - half
    return {
        "calls": times,
        "traces": len(counter),
        "graphs left alive": graphs_alive() - alive,
        "KiB a call": 1024 * grown / (times - times // 2),
    }


def survey(calls):
    import gc

    x = rows(32)

    class Schedule:
        def now(self):
            return 0.001

    schedule, one_kind, kept = Schedule(), tf.constant(0.001), []
    now = schedule.now

    def fresh(step, keep):
        function = tf.function(step)
        if keep:
            kept.append(function)
        return function(x, one_kind)

    def asked(step):
        return tf.function(lambda x, ask: step(x, ask()))

    def relaxed(step):
        return tf.function(step, reduce_retracing=True)

    def untraced(step):
        return step

    def padded(number):
        return tf.pad(rows(number), [[0, -number % 32], [0, 0]])

    cases = {
        "number, reduce_retracing=True": (relaxed, lambda f, i: f(x, rate_at(i))),
        "number as np.float32": (tf.function, lambda f, i: f(x, np.float32(rate_at(i)))),
        "lengths, reduce_retracing=True": (relaxed, lambda f, i: f(rows(32 + i), one_kind)),
        "lengths padded to multiples of 32": (
            tf.function,
            lambda f, i: f(padded(32 + i), one_kind),
        ),
        "a new object each time": (asked, lambda f, i: f(x, Schedule().now)),
        "the same object's method": (asked, lambda f, i: f(x, schedule.now)),
        "the same method, looked up once": (asked, lambda f, i: f(x, now)),
        "the same tf.function each time": (tf.function, lambda f, i: f(x, one_kind)),
        "a new tf.function each time, kept": (untraced, lambda f, i: fresh(f, keep=True)),
        "a new tf.function each time, dropped": (untraced, lambda f, i: fresh(f, keep=False)),
    }
    warm = tf.function(make_step())  # what start-up left free is filled before anything is measured
    for i in range(16):
        warm(x, rate_at(i))
    gc.freeze()  # leaves what is there, all of TensorFlow, out of later collections: fast ones
    graph_type = type(warm.get_concrete_function(x, rate_at(0)).graph)

    table = {}
    for name, (prepare, call) in cases.items():
        counter = []
        function = prepare(make_step(counter))
        kept.append(function)
        times = calls * (3 if "tf.function each time" in name else 1)
        table[name] = taken_by(lambda i: call(function, i), times, counter, graph_type)
    return table


SURVEY_CALLS = lab.choose(SCALE, quick=8, full=40)
surveyed = lab.measure(survey, SURVEY_CALLS, label="what else traces again")
others = pd.DataFrame.from_dict(surveyed.value, orient="index").round(0)
print("KiB a call: growth of the process in the second half of the calls, when all is warm\n")
print(others.to_string())
ups = others["traces"]
assert ups["number, reduce_retracing=True"] == SURVEY_CALLS and ups["number as np.float32"] == 1
assert ups["lengths, reduce_retracing=True"] == 2 and ups["the same method, looked up once"] == 1
assert ups["the same object's method"] > 1 and ups["a new object each time"] == SURVEY_CALLS

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
# `unroll=True` writes every time step into the one graph. And in TensorFlow 1's style one graph grows with every
# operation that the loop makes, although nothing is traced at all.


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


def lstm_operations(lengths):
    import keras

    def count(length, unroll):
        layer = keras.layers.LSTM(12, unroll=unroll)
        traced = tf.function(layer).get_concrete_function(tf.TensorSpec((4, length, 3)))
        return len(traced.graph.get_operations())

    return [(count(length, True), count(length, False)) for length in lengths]


def baked(array, calls):
    x, tensor, table = tf.ones(array.shape), tf.constant(array), {}
    for name, held in (("a tensor", tensor), ("a NumPy array", array)):
        function = tf.function(lambda x, k: tf.reduce_sum(x + held) * k)
        before = lab.reading().process_mib
        with lab.phase(name):
            for i in range(calls):
                function(x, float(i))
        grown = lab.reading().process_mib - before
        one = function.get_concrete_function(x, 0.0).graph.as_graph_def().ByteSize() / 2**20
        table[name] = {"one graph, serialized MiB": one, "process MiB": grown}
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
mentioned.insert(1, "tensors MiB", [part.added_mib for part in constants.phases])
print(mentioned.round(2).to_string())
print(
    f"\nsession.run(x * 2.0) in a loop: {first} operations in the graph after the first turn, "
    f"{last} after the 20th"
)
lstm = lab.measure(lstm_operations, (10, 20), label="LSTM")
print(
    "\noperations of an LSTM's graph, over 10 and over 20 steps, as (unrolled, loop):", *lstm.value
)
grown = mentioned["process MiB"]
assert grown["a NumPy array"] > 3 * grown["a tensor"] and last > first
lab.note(
    f"Each graph that mentions the array of {an_array.nbytes / 2**20:.0f} MiB took "
    f"{grown['a NumPy array'] / 20:.1f} MiB of the process: the array stands in the graph, in the "
    "copies that TensorFlow makes of it, and as a tensor. Mentioned as a tensor it is there once."
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


def cost(calls=10_000, different_values=10_000, operations=100):
    traces = min(calls, different_values)
    total = traces * operations * per_operation
    until = 1024 / (operations * per_operation)
    print(f"{traces:,} traces add {total:,.0f} MiB (predicted)")
    print(f"1 GiB is reached after {until:,.0f} traces (predicted)")


many = (1, 10_000, 1)
lab.explore(cost, calls=(100, 20_000, 100), different_values=many, operations=(50, 10_000, 50))

# %% [markdown]
# ## Verdict

# %%
a_call = others["KiB a call"]
lab.verdict(
    "C12",
    "partly",
    number=growth["rate: Python number"],
    tensor=growth["rate: tensor"],
    lengths=growth["each length a shape"],
    signature=growth["one signature"],
    rebuilt_kept=a_call["a new tf.function each time, kept"] * CALLS / 1024,
    rebuilt_dropped=a_call["a new tf.function each time, dropped"] * CALLS / 1024,
    not_rebuilt=a_call["the same tf.function each time"] * CALLS / 1024,
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
