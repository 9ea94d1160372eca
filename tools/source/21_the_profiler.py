# %% [markdown]
# # 21 · The profiler: who holds the memory at the peak
#
# **Symptom:** *"OOM in MatMul"* — but that MatMul is tiny. Which operation is the culprit? *"Use the TensorFlow profiler"*,
# says published advice, and stop there.
#
# **Afterwards you can** record a trace of a few steps, read from it which operations hold memory at the peak, have it read by
# line, layer and kind, open the same trace in XProf, and say what it cannot show.
#
# | | |
# |---|---|
# | Time | about a minute to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C24, C58 |

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes twice as many words
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import the_profiler as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

WORDS = lab.choose(SCALE, quick=2048, full=4096)
BUDGET = lab.choose(SCALE, quick="88 MiB", full="170 MiB")
VOCABULARY, CODE, WIDTH, DEPTH, STEPS = 8192, 64, 512, 6, 12

# %% [markdown]
# ## Predict
#
# A network looks up a row of numbers for each word of a batch, and has six dense layers behind that. Six layers for all
# words, with gradients: there, one would think, the memory goes.

# %%
print(f"{WORDS} words, a table of {VOCABULARY} × {CODE}, {DEPTH} layers of {WIDTH}")
my_guess = lab.guess("Largest tensor in one training step?", GUESS_MIB)

# %%
layer = lab.tensor_mib((WORDS, WIDTH))
one_hot = lab.tensor_mib((WORDS, VOCABULARY))
print(f"a layer's output: {WORDS} × {WIDTH} × 4 B = {layer:.1f} MiB")
print(f"a row as wide as the vocabulary: {WORDS} × {VOCABULARY} × 4 B = {one_hot:.1f} MiB")

# %% [markdown]
# ## Failure
#
# The look-up is written as in many tutorials, as a product: each word is made a row of zeros with a single one, which picks
# its row out of the table.


# %%
def by_one_hot(table, words):
    with tf.name_scope("lookup"):
        return tf.matmul(tf.one_hot(words, VOCABULARY), table)


def make_step(lookup):
    start = lambda number: keras.initializers.HeNormal(seed=number)
    table = tf.Variable(start(0)([VOCABULARY, CODE]) * 64.0)
    layers = [
        keras.layers.Dense(WIDTH, "relu", kernel_initializer=start(number))
        for number in range(1, DEPTH + 1)
    ]
    model = keras.Sequential(
        [keras.Input((CODE,)), *layers, keras.layers.Dense(1, kernel_initializer=start(DEPTH + 1))]
    )
    words = tf.random.stateless_uniform([WORDS], [1, 2], 0, VOCABULARY, tf.int32)
    wanted = tf.random.stateless_normal([WORDS, 1], seed=[3, 4])
    variables = [table, *(variable.value for variable in model.trainable_variables)]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(lookup(table, words), training=True) - wanted))
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(0.0003 * tf.convert_to_tensor(gradient))
        return loss

    return step


def train(lookup):
    step = make_step(lookup)
    return [float(step()) for _ in range(STEPS)]


# With oneDNN, Intel's kernels, a product for which there is no room ends the process: without.
OPTIONS = {"env": lab.NO_ONEDNN}
failure = lab.run(train, by_one_hot, budget=BUDGET, label="one-hot product", **OPTIONS)
lab.expect_oom(failure)
assert "lookup" not in failure.error.message, "the message names the culprit: nothing to find"
lab.note(
    f"The operation in the message wanted {failure.wanted_mib:.0f} MiB of a budget of "
    f"{BUDGET}. A message names who asked *last*. Who holds the rest?"
)

# %% [markdown]
# ## Advice, tested
#
# **The published advice:** profile. The same step runs once more with room to finish, between `start` and `stop` of the
# profiler. The trace lands in a folder; `read_allocations` takes the memory events out of it.


# %%
def read_allocations(folder):
    """Memory events of a trace in order of time, with what TensorFlow noted of each."""
    from pathlib import Path

    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(next(Path(folder).rglob("*.xplane.pb")).read_bytes())
    rows = []
    for plane in space.planes:
        stat_names = {key: item.name for key, item in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                kind = plane.event_metadata[event.metadata_id].name
                if kind not in ("MemoryAllocation", "MemoryDeallocation"):
                    continue
                facts = {
                    "seconds": (line.timestamp_ns + event.offset_ps / 1000) / 1e9,
                    "freed": kind == "MemoryDeallocation",
                }
                for stat in event.stats:
                    value = getattr(stat, stat.WhichOneof("value"))
                    facts[stat_names[stat.metadata_id]] = (
                        stat_names[value] if stat.WhichOneof("value") == "ref_value" else value
                    )
                rows.append(facts)
    return sorted(rows, key=lambda row: row["seconds"])


def traced(lookup, before_it_is_built=True):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        if before_it_is_built:
            tf.profiler.experimental.start(folder)
            step = make_step(lookup)
        else:
            step = make_step(lookup)
            step()
            tf.profiler.experimental.start(folder)
        for number in range(2):
            with tf.profiler.experimental.Trace("train", step_num=number, _r=1):
                step()
        tf.profiler.experimental.stop()
        events = read_allocations(folder)
    keep = "seconds freed tf_op shape addr requested_bytes allocation_bytes bytes_allocated".split()
    return [{name: event.get(name) for name in keep} for event in events]


profiled = lab.measure(traced, by_one_hot, label="one-hot product, traced", **OPTIONS)

# %% [markdown]
# Now the question: *who holds memory at the peak?*


# %%
def holders_at_peak(events):
    """A table of the allocations alive at the highest point of a trace, largest first."""
    peak = max(range(len(events)), key=lambda index: events[index]["bytes_allocated"] or 0)
    alive = {}
    for event in events[: peak + 1]:
        if event["freed"]:
            alive.pop(event["addr"], None)
        else:
            alive[event["addr"]] = event
    table = pd.DataFrame(
        {
            "operation": e["tf_op"],
            "shape": e["shape"],
            "asked for, MiB": e["requested_bytes"] / 2**20,
            "held, MiB": e["allocation_bytes"] / 2**20,
        }
        for e in alive.values()
    )
    return table.sort_values("held, MiB", ascending=False, ignore_index=True)


events = profiled.value
holders = holders_at_peak(events)
holders.head(6).round(1)

# %%
largest, most = holders["operation"][0], holders["asked for, MiB"][0]
lab.note(
    f"`{largest}` asked for {most:.0f} MiB, {most / layer:.0f} times a layer's output. The name is "
    "that of the code: the name scope `lookup`, and in it the function that was called."
)

# %% [markdown]
# **The other end.** A step can have operations that compute in NumPy: a metric, an augmentation. This one builds the same
# array, in NumPy, to count the words of the batch; the look-up itself is the one of the fix below. Does the trace find it?


# %%
def by_gather(table, words):
    with tf.name_scope("lookup"):
        return tf.gather(table, words)


def counting_in_numpy(table, words):
    def count(words):
        same = (words[:, None] == np.arange(VOCABULARY)).astype(np.float32)
        return same.sum(axis=0)

    with tf.name_scope("count"):
        counts = tf.numpy_function(count, [words], tf.float32)
    with tf.control_dependencies([counts]):
        return by_gather(table, words)


plain = lab.measure(traced, by_gather, label="gather, traced", **OPTIONS)
counting = lab.measure(traced, counting_in_numpy, label="gather and NumPy, traced", **OPTIONS)
numpy_named = max(
    (
        event["allocation_bytes"] or 0
        for event in counting.value
        if "count" in (event["tf_op"] or "")
    ),
    default=0,
)
numpy_named /= 2**20
if counting.process_peak_mib is not None:
    lab.note(
        f"The array has {one_hot:.0f} MiB. With it the process's peak is "
        f"{counting.process_peak_mib - plain.process_peak_mib:.0f} MiB higher, and the trace "
        f"shows {numpy_named:.2f} MiB for that operation: only what passes TensorFlow's allocator "
        "is recorded."
    )

# %% [markdown]
# ## Fix
#
# The trace has named the look-up. The row can be fetched by its number, without the product: `by_gather`, above. The rest of
# the step, and the budget, stay as they were.

# %%
fix = lab.run(train, by_gather, budget=BUDGET, label="gather", **OPTIONS)
lab.expect_finished(fix)

# %% [markdown]
# ## Side by side

# %%
unbounded = lab.measure(train, by_one_hot, label="one-hot product, no tight budget", **OPTIONS)
lab.compare(unbounded, failure, fix)

# %% [markdown]
# Traces of the same kind, read by the lab's own tool: each arm runs once more, and lines of the code are marked in
# its trace.

# %%
lab.take_apart(failure, fix)

# %%
lab.note(
    f"The traced steps peaked at {profiled.peak_mib:.0f} MiB, those without a tight budget at "
    f"{unbounded.peak_mib:.0f}. They are the same steps; but in a later one the one-hot rows "
    "can be "
    "handed a free piece that is larger than they are, whole (lab 19)."
)
lab.predicted_vs_measured(largest_tensor=(one_hot, most))

# %%
print(my_guess.against(most))
for arm in (unbounded, fix):
    print(f"{arm.label}: first losses", ", ".join(f"{loss:.4f}" for loss in arm.value[:4]))
assert np.allclose(unbounded.value, fix.value, rtol=1e-3, atol=0), "not the same training"
assert fix.value[-1] < fix.value[0], "nothing was learnt, so equal losses would say nothing"

# %%
figure, (over_time, bars) = plt.subplots(1, 2)
begin = events[0]["seconds"]
in_use = [
    (e["seconds"] - begin, e["bytes_allocated"] / 2**20) for e in events if e["bytes_allocated"]
]
over_time.step(*zip(*in_use), where="post", lw=1, label="in use")
over_time.plot(*max(in_use, key=lambda point: point[1]), "v", ms=9, label="peak")
over_time.set(
    xlabel="time (s)", ylabel="in use (MiB)", ylim=(0, None), title="Two steps in the trace"
)
over_time.legend()
top = holders.head(5)
bars.barh(top["operation"], top["held, MiB"], color=lab.COLOURS[1])
bars.invert_yaxis()
bars.set(xlabel="held at the peak (MiB)", title="Largest holders at the peak")
plt.show()

# %% [markdown]
# ## Explain
#
# **What the trace shows.** Every allocation that passes TensorFlow's allocator while it records, with the operation that
# asked, its shape, and what was in use afterwards.
#
# **What it cannot show.** NumPy, as seen above; Python objects and graphs, for the same reason. And what was allocated
# *before* the recording began:

# %%
late = lab.measure(traced, by_one_hot, False, label="recorded after a first step", **OPTIONS)
rows = {}
for name, recorded in (("before the model is built", events), ("after a first step", late.value)):
    in_use = max(event["bytes_allocated"] or 0 for event in recorded) / 2**20
    named = holders_at_peak(recorded)["held, MiB"].sum()
    rows[name] = {
        "in use at the peak": in_use,
        "named by the trace": named,
        "without a name": in_use - named,
    }
pd.DataFrame(rows).T.round(1).rename_axis("MiB, recorded from")

# %% [markdown]
# The weights are older than a recording that starts late, so it cannot name them: start it before the model is built.
#
# **In XProf**, which was TensorBoard's profile plugin before. It brings many packages, so it gets an environment of its own.
# Record into a folder that stays (in place of the temporary one above), then
#
#     python3 -m venv xp && xp/bin/pip install xprof
#     xp/bin/xprof --logdir my_trace_folder
#
# and open the address that it prints, tool *memory_profile*. It draws the curve above and lists the operations and shapes at
# its peak; of lines, layers and kinds it knows nothing, since nobody marked them in that trace. Its charts come with a script
# from the web: without internet access the page stays empty. And while it runs, a second port of it is open to your network.
#
# **To explore it yourself**, `lab.take_apart(failure, fix).save("peak.html")` writes a page that needs no network: zoom in,
# search for a line, a layer or an operation, and read both arms side by side.
#
# **When it flips.** With a small vocabulary the one-hot rows are smaller than what the layers hold, and the culprit is
# another. Move the slider to the vocabulary at which they overtake.


# %%
def overtake(vocabulary=8192):
    rows = lab.tensor_mib((WORDS, vocabulary))
    kept = DEPTH * layer
    print(f"one-hot rows {rows:.1f} MiB, the layers' outputs together {kept:.1f} MiB (predicted)")


lab.explore(overtake, vocabulary=(64, 16384, 64))

# %% [markdown]
# ### What recording costs
#
# The trace is memory, too, and not TensorFlow's. Here small steps are recorded, and then four times as many, twice.

# %%
SHORT, LONG, OPERATIONS = 200, 800, 100


def recorded(steps, times):
    """Private MiB of the process at first, and before and after stop() of each recording."""
    import tempfile

    @tf.function
    def step(x):
        for _ in range(OPERATIONS // 2):
            x = tf.tanh(x) + 1.0
        return x

    x = tf.zeros((8, 8))
    step(x)
    private = [lab.reading().private_mib]
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            tf.profiler.experimental.start(folder)
            for _ in range(steps):
                step(x)
            private.append(lab.reading().private_mib)
            tf.profiler.experimental.stop()
        private.append(lab.reading().private_mib)
    return private


short = lab.measure(recorded, SHORT, 1, label=f"{SHORT} steps recorded")
long = lab.measure(recorded, LONG, 2, label=f"{LONG} steps recorded, twice")
start, at_stop, after_first, _, after_second = np.array(long.value, float)
first, second = after_first - start, after_second - after_first
peaks = np.array([short.process_peak_mib, long.process_peak_mib], float)

# %%
again = "found its room there" if second < 0.2 * first else "did not find all its room there"
a_kib = 1024 * np.diff(peaks)[0] / (LONG - SHORT) / OPERATIONS
lab.note(
    f"{SHORT} steps took {peaks[0]:.0f} MiB of the process at most, {LONG} steps {peaks[1]:.0f}: "
    f"{a_kib:.1f} KiB for each operation that ran, the making of the file included. Before "
    f"`stop()` {LONG} steps held {at_stop - start:.0f} MiB of events. `stop()` makes a file of all "
    f"of them at once, and {first:.0f} MiB stayed with the process. A second recording {again}: "
    f"{second:+.1f} MiB. So record a few steps, not an epoch."
)

# %% [markdown]
# **Summary writers** keep events in a queue until it is full, or somebody flushes. `tf.summary.scalar`, `histogram`, `image`
# and Keras' `TensorBoard` callback need TensorBoard's package, which is not among the requirements here; `tf.summary.write`,
# which they use, does not. The number of the step can be one of Python's, or a variable that counts.

# %%
EVENTS, SCALARS = 20, 3000
event = lab.tensor_mib((512, 512))


def summaries():
    import gc
    import tempfile
    from pathlib import Path

    def private():
        return lab.reading().private_mib or np.nan

    figures, large = {}, tf.zeros((512, 512))
    writer = tf.summary.create_file_writer(tempfile.mkdtemp())
    with writer.as_default():
        for number in range(2 * EVENTS):
            if number == EVENTS:  # by now the writer's own room is there
                writer.flush()
                before, most = private(), 0
            tf.summary.write("large", large, step=number)
            if number >= EVENTS:
                most = max(most, private() - before)
        writer.flush()
        figures["MiB in the queue"], figures["MiB when flushed"] = most, private() - before

    counter, value = tf.Variable(0, dtype=tf.int64), tf.constant(1.0)
    for name in ("a number", "a variable"):
        folder = tempfile.mkdtemp()
        with tf.summary.create_file_writer(folder).as_default():
            gc.collect()
            before = private()
            for number in range(SCALARS):
                counter.assign_add(1)
                step = number if name == "a number" else counter
                tf.summary.write("scalar", value, step=step)
            gc.collect()
            figures[f"KiB each, step is {name}"] = 1024 * (private() - before) / SCALARS
    figures["KiB each, in the file"] = sum(
        path.stat().st_size / 1024 / SCALARS for path in Path(folder).rglob("*.v2")
    )
    try:
        tf.summary.scalar("loss", 1.0, step=0)
        figures["tf.summary.scalar"] = "available"
    except Exception as error:  # TBNotInstalledError
        figures["tf.summary.scalar"] = f"unavailable: {error}".split(",")[0]
    return figures


written = lab.measure(summaries, label="summaries")
pd.Series(written.value).map(lambda each: each if isinstance(each, str) else f"{each:.2f}")

# %%
queue = written.value["MiB in the queue"]
by_number = written.value["KiB each, step is a number"]
by_variable = written.value["KiB each, step is a variable"]
lab.note(
    f"An event of {event:.0f} MiB waits with others: {queue:.0f} MiB at most, since the queue "
    "holds ten by default; `max_queue` says how many. Small summaries cost "
    f"by their step: {by_number:.2f} KiB each with a Python number, for good, "
    f"{by_variable:.2f} with a variable. Eager TensorFlow remembers each Python number that it "
    "makes a tensor of, in a cache that has no limit. A loop over steps meets a new one each time."
)

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C24",
    "partly",
    largest_holder=largest,
    largest=most,
    numpy_array=one_hot,
    numpy_named=numpy_named,
)

# %%
lab.verdict(
    "C58",
    "partly",
    short=peaks[0],
    long=peaks[1],
    first=first,
    second=second,
    event=event,
    queue=queue,
    flushed=written.value["MiB when flushed"],
    by_number=by_number,
    by_variable=by_variable,
    in_file=written.value["KiB each, in the file"],
)

# %% [markdown]
# ## Exercises
#
# **1.** From a list of events such as `events`, return the three name scopes (the text before the first `/`) that were handed
# the most bytes in all, most first, whether or not they held them at the peak. An event's `tf_op` may be None.


# %%
def busiest_scopes(events):
    # BEGIN SOLUTION
    total = {}
    for event in events:
        if not event["freed"]:
            scope = (event["tf_op"] or "").split("/")[0]
            total[scope] = total.get(scope, 0) + event["allocation_bytes"]
    return sorted(total, key=total.get, reverse=True)[:3]
    # END SOLUTION


# %%
check.busiest_scopes(busiest_scopes, events)


# %% tags=["right"]
def busiest_scopes(events):
    table = pd.DataFrame([event for event in events if not event["freed"]])
    scopes = table["tf_op"].fillna("").str.split("/").str[0]
    return table.groupby(scopes)["allocation_bytes"].sum().nlargest(3).index


# %% tags=["wrong"]
# says: held at the peak
def busiest_scopes(events):
    held = holders_at_peak(events)
    scopes = held["operation"].fillna("").str.split("/").str[0]
    return list(held.groupby(scopes)["held, MiB"].sum().nlargest(3).index)


# %% tags=["wrong"]
# says: names are wanted
def busiest_scopes(events):
    total = {}
    for event in events:
        if not event["freed"]:
            scope = (event["tf_op"] or "").split("/")[0]
            total[scope] = total.get(scope, 0) + event["allocation_bytes"]
    return sorted(total.items(), key=lambda item: -item[1])[:3]


# %% tags=["wrong"]
# says: banana
def busiest_scopes(events):
    return ["lookup", "gradient_tape", "banana"]


# %% tags=["wrong"]
# says: each allocation ends
def busiest_scopes(events):
    total = {}
    for event in events:
        scope = (event["tf_op"] or "").split("/")[0]
        total[scope] = total.get(scope, 0) + (event["allocation_bytes"] or 0)
    return sorted(total, key=total.get, reverse=True)[:3]


# %% tags=["wrong"]
# says: are operations
def busiest_scopes(events):
    return list(holders_at_peak(events)["operation"][:3])


# %% tags=["wrong"]
# says: events
def busiest_scopes(events):
    total = {}
    for event in events:
        scope = (event["tf_op"] or "").split("/")[0]
        total[scope] = total.get(scope, 0) + (not event["freed"])
    return sorted(total, key=total.get, reverse=True)[:3]


# %% [markdown]
# **2.** The same with several words at a time: for each row of `words`, of shape (n, 4), `bag(table, words)` returns the mean of
# the four rows of the table. This is how it is often written. Write it without anything as wide as the table is long.


# %%
def bag(table, words):
    # BEGIN SOLUTION
    return tf.reduce_mean(tf.gather(table, words), axis=1)
    # END SOLUTION
    return tf.matmul(tf.reduce_mean(tf.one_hot(words, table.shape[0]), axis=1), table)


# %%
check.bag(bag)


# %% tags=["right"]
def bag(table, words):
    return sum(tf.nn.embedding_lookup(table, words[:, place]) for place in range(4)) / 4


# %% tags=["right"]
def bag(table, words):
    flat = tf.gather(table, tf.reshape(words, [-1]))
    return keras.ops.mean(tf.reshape(flat, [-1, 4, table.shape[1]]), axis=1)


# %% tags=["right"]
def bag(table, words):
    rows = tf.repeat(tf.range(tf.shape(words)[0], dtype=tf.int64), 4)
    places = tf.stack([rows, tf.cast(tf.reshape(words, [-1]), tf.int64)], axis=1)
    counts = tf.SparseTensor(
        places, tf.fill([tf.size(words)], 0.25), [words.shape[0], table.shape[0]]
    )
    return tf.sparse.sparse_dense_matmul(counts, table)


# %% tags=["wrong"]
# says: gradient
def bag(table, words):
    first, *rest = [tf.gather(table, words[:, place]) for place in range(4)]
    return (first + tf.stop_gradient(tf.add_n(rest))) / 4


# %% tags=["wrong"]
# says: 32|48|64
def bag(table, words):
    counts = tf.math.bincount(words, minlength=table.shape[0], axis=-1, dtype=tf.float32)
    return tf.matmul(counts, table) / 4


# %% tags=["wrong"]
# says: not the mean
def bag(table, words):
    return tf.reduce_sum(tf.gather(table, words), axis=1)


# %% tags=["wrong"]
# says: gradient
def bag(table, words):
    return tf.constant(table.numpy()[words.numpy()].mean(axis=1))


# %% tags=["wrong"]
# says: shape
def bag(table, words):
    return tf.gather(table, words)
