# %% [markdown]
# # 18 · The profiler: who holds the memory at the peak
#
# **Symptom:** *"OOM in MatMul"* — but that MatMul is tiny. Which operation is the culprit? *"Use the TensorFlow profiler"*,
# say the articles, and stop there.
#
# **Afterwards you can** record a trace of a few steps, read from it which operations hold memory at the peak, open the same
# trace in TensorBoard, and say what it cannot show.
#
# | | |
# |---|---|
# | Time | about a minute to run, 25 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C24 |

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes twice as many samples, which is four times the memory
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import matplotlib.pyplot as plt
import pandas as pd

import labsupport as lab

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

SAMPLES = lab.choose(SCALE, quick=512, full=1024)
BUDGET = lab.choose(SCALE, quick="128 MiB", full="512 MiB")
INPUTS, WIDTH, CODE = 256, 512, 64

# %% [markdown]
# ## Predict
#
# A network maps samples to codes of 64 numbers. Its loss looks at the distance between *every two* codes of the batch, as
# metric learning does. The network is two dense layers; the batch is 512 samples.

# %%
my_guess = lab.guess("Largest tensor in one training step?", GUESS_MIB)

# %%
layer = lab.tensor_mib((SAMPLES, WIDTH))
differences = lab.tensor_mib((SAMPLES, SAMPLES, CODE))
print(f"a layer's output: {SAMPLES} × {WIDTH} × 4 B = {layer:.1f} MiB")
print(f"all differences of codes: {SAMPLES} × {SAMPLES} × {CODE} × 4 B = {differences:.1f} MiB")

# %% [markdown]
# ## Failure
#
# The distances are written the obvious way: subtract every code from every other.


# %%
def distances(codes):
    with tf.name_scope("distances"):
        difference = codes[:, None, :] - codes[None, :, :]
        return tf.reduce_sum(tf.square(difference), axis=-1)


def make_step(distances):
    layers = [keras.layers.Dense(WIDTH, activation="relu"), keras.layers.Dense(CODE)]
    model = keras.Sequential([keras.Input((INPUTS,)), *layers])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    x = tf.random.stateless_normal([SAMPLES, INPUTS], seed=[1, 2])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            apart = distances(model(x, training=True))
            loss = tf.reduce_mean(tf.nn.relu(1.0 - apart))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return step


def train(distances):
    step = make_step(distances)
    return [float(step()) for _ in range(3)]


failure = lab.run(train, distances, budget=BUDGET, label="all differences")
lab.expect_oom(failure)

# %% [markdown]
# The message names the operation that asked *last*. It need not be the one that holds the most.
#
# ## Fix
#
# **The article's advice:** profile. The same step runs once more with room to finish, between `start` and `stop` of the
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


def traced(distances, ballast_mib=0):
    import tempfile

    import numpy as np

    step = make_step(distances)
    step()  # tracing and the first allocations happen outside the recording
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        ballast = np.ones(ballast_mib * 2**18, np.float32)  # memory that is not TensorFlow's
        for number in range(2):
            with tf.profiler.experimental.Trace("train", step_num=number, _r=1):
                step()
        tf.profiler.experimental.stop()
        events = read_allocations(folder)
    keep = ("seconds", "freed", "tf_op", "shape", "addr", "allocation_bytes", "bytes_allocated")
    return [{name: event.get(name) for name in keep} for event in events], ballast.nbytes


profiled = lab.measure(traced, distances, 100, label="all differences, traced")

# %% [markdown]
# Now the question that the message could not answer: *who holds memory at the peak?*


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
        [
            {"operation": e["tf_op"], "shape": e["shape"], "MiB": e["allocation_bytes"] / 2**20}
            for e in alive.values()
        ]
    )
    return table.sort_values("MiB", ascending=False, ignore_index=True)


events, ballast_bytes = profiled.value
holders = holders_at_peak(events)
holders.head(6).round(1)

# %% [markdown]
# The names are those of the code: `distances/…` is the name scope above, `gradient_tape/…` its gradient. That is the
# culprit. **What works** is then a matter of algebra: ‖a−b‖² = ‖a‖² + ‖b‖² − 2a·b needs no tensor of three axes.


# %%
def distances_by_algebra(codes):
    with tf.name_scope("distances"):
        squares = tf.reduce_sum(tf.square(codes), axis=-1)
        return squares[:, None] + squares[None, :] - 2.0 * tf.matmul(codes, codes, transpose_b=True)


fix = lab.run(train, distances_by_algebra, budget=BUDGET, label="by algebra")
lab.expect_finished(fix)

# %% [markdown]
# ## Side by side

# %%
unbounded = lab.measure(train, distances, label="all differences, no tight budget")
lab.compare(unbounded, failure, fix)

# %%
lab.predicted_vs_measured(largest_tensor=(differences, holders["MiB"].max()))

# %%
print(my_guess.against(holders["MiB"].max()))
print(f"losses: {unbounded.value[0]:.4f} with all differences, {fix.value[0]:.4f} by algebra")
top = holders.head(5).set_index("operation")["MiB"]
axes = top.plot.barh(figsize=(8, 2.4), xlabel="held at the peak (MiB)", ylabel="")
axes.invert_yaxis()
axes.set_title("Largest holders of memory at the peak, from the trace")
plt.show()

# %% [markdown]
# ## Explain
#
# **What the trace shows.** Every allocation that passes TensorFlow's allocator, with the operation that asked, its shape,
# and what was in use afterwards. On a CPU too, since the labs use the allocator that GPUs use.
#
# **What it cannot show.** Three things, and the first two are measured in the next cell:
#
# * NumPy, Python objects and graphs: the traced function held an array of 100 MiB that appears nowhere.
# * What was allocated *before* the recording began. Weights and slots have no event. TensorBoard's memory page calls that
#   part "unused preallocated device memory", although it is in use.
# * On a CPU, time by device operation (`op_profile` stays empty): that page is for accelerators.

# %%
named = holders["MiB"].sum()
at_peak = max(event["bytes_allocated"] or 0 for event in events) / 2**20
anonymous = at_peak - named
numpy_events = [event for event in events if event["allocation_bytes"] == ballast_bytes]
print(
    f"in use at the peak {at_peak:.1f} MiB: {named:.1f} MiB named by the trace, "
    f"{anonymous:.1f} MiB older than the recording"
)
print(
    f"NumPy array of {ballast_bytes / 2**20:.0f} MiB: {len(numpy_events)} events in the trace; "
    f"process peak {profiled.process_peak_mib or float('nan'):.0f} MiB, "
    f"tensor peak {profiled.peak_mib:.0f} MiB"
)

# %% [markdown]
# **In TensorBoard.** The profile plugin brings many packages of its own, some in versions that the labs cannot use, so it
# gets an environment of its own. Record into a folder that stays (in place of the temporary one above), then
#
#     python3 -m venv tb && tb/bin/pip install tensorboard tensorboard-plugin-profile
#     tb/bin/tensorboard --logdir my_trace_folder
#
# and open *Profile → memory_profile*. This is that page for the trace of this lab's failing step:
#
# ![TensorBoard's memory profile page: a summary with the number of allocations and a peak heap usage of 135.01 MiB; the timeline beside it is empty](images/tensorboard_memory_profile.png)
#
# *Recorded once with TensorFlow 2.21 on a CPU and tensorboard-plugin-profile 2.24. Its peak agrees with the counter. The page
# draws its timeline and its table with a script from the web; without internet access that half stays empty, as here.*
#
# **When it flips.** With few samples the distances are smaller than the layers and the culprit is another. Move the slider
# to the batch at which they overtake.


# %%
def overtake(samples=512):
    pairs, dense = lab.tensor_mib((samples, samples, CODE)), lab.tensor_mib((samples, WIDTH))
    print(
        f"{samples} samples: one layer {dense:.2f} MiB, all differences {pairs:.2f} MiB (predicted)"
    )


lab.explore(overtake, samples=(2, 512, 2))

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C24",
    "partly",
    largest_holder=holders["operation"][0],
    largest=holders["MiB"][0],
    one_layer=layer,
    named_by_trace=named,
    in_use_at_peak=at_peak,
    numpy_events=len(numpy_events),
)

# %% [markdown]
# ## Exercises
#
# **1.** From `events`, return the three name scopes (the text before the first `/`) that were handed the most bytes in all,
# whether or not they held them at the peak.


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


with lab.exercise(
    1,
    "Add up allocation_bytes by event['tf_op'].split('/')[0], skipping events that are freed; "
    "sort; take three.",
):
    scopes = busiest_scopes(events)
    assert scopes is not None, "busiest_scopes() returns nothing yet: return a list of three names."
    assert len(scopes) == 3, f"three scopes are wanted, you return {len(scopes)}."
    assert {"distances", "gradient_tape"} <= set(scopes), (
        f"{scopes} cannot be right: which scope made the large tensors above?"
    )

# %% [markdown]
# **2.** Cosine distances need no differences either. Write `cosine_distances(codes)`, 1 − cos of the angle between every
# two codes, and let it train under the budget.


# %%
def cosine_distances(codes):
    # BEGIN SOLUTION
    unit = tf.math.l2_normalize(codes, axis=-1)
    return 1.0 - tf.matmul(unit, unit, transpose_b=True)
    # END SOLUTION


def try_cosine():
    codes = tf.constant([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    small = cosine_distances(codes)
    return None if small is None else (small.numpy().round(3).tolist(), train(cosine_distances))


cosine = lab.run(try_cosine, budget=BUDGET, label="cosine", quiet=True)
with lab.exercise(
    2, "Normalize with tf.math.l2_normalize(codes, axis=-1); one matmul gives all cosines."
):
    assert cosine.ok, str(cosine.error)
    assert cosine.value is not None, (
        "cosine_distances() returns nothing yet: return a tensor of shape (n, n)."
    )
    assert cosine.value[0] == [[0, 1, 0], [1, 0, 1], [0, 1, 0]], (
        f"for three test codes it gives {cosine.value[0]}."
    )
    assert cosine.peak_mib < 0.3 * unbounded.peak_mib, "there is still a tensor of three axes."
