# %% [markdown]
# # 24 · Preparing data on the host
#
# **Symptom:** *"MemoryError: Unable to allocate 3.94 GiB for an array with shape (105000, 720, 7) and data type
# float64"* or *"kernel died"* while windows are cut, sequences padded or dummies made, long before the first step.
#
# **Afterwards you can** count what a conversion in NumPy or pandas makes of your data, measure it stage by stage with
# Python's own `tracemalloc`, and say which conversion belongs before training and which into the batch.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 25 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C40 |
#
# Every run below happens in a process of its own. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes a series four times as long
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import sys
import tracemalloc

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import preparing_data as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras
from numpy.lib.stride_tricks import sliding_window_view

HOURS = lab.choose(SCALE, quick=24_000, full=96_000)
OUTSIDE = lab.choose(SCALE, quick="176 MiB", full="700 MiB")
SENSORS, WEEK, BATCH, EPOCHS = 8, 168, 64, 2


def readings():
    """A row for each hour, a column for each sensor; float64, as most of what NumPy makes."""
    day = np.sin(2 * np.pi * np.arange(HOURS) / 24)
    return day[:, np.newaxis] + np.random.default_rng(0).normal(size=(HOURS, SENSORS))


series = lab.tensor_mib(readings().shape, "float64")
print(f"{HOURS} hours of {SENSORS} sensors: {series:.2f} MiB. A window is a week, {WEEK} hours.")

# %% [markdown]
# ## Predict
#
# A model forecasts the next hour from the week before it. The series is small. How much does the process take at its worst
# moment, when every window is cut first and all are given to `fit`?

# %%
my_guess = lab.guess("Peak memory of the process: all windows, and a training?", GUESS_MIB)

# %% [markdown]
# A window begins at every hour, so each hour is in as many windows as a window is long. `fit` then makes a float32 array of
# them, of which TensorFlow makes a tensor, by way of a copy that NumPy makes.

# %%
WINDOWS = HOURS - WEEK
windows = lab.tensor_mib((WINDOWS, WEEK, SENSORS), "float64")
predicted = windows + 3 * windows / 2
print(
    f"windows: {WINDOWS} × {WEEK} × {SENSORS} × 8 B = {windows:.0f} MiB, "
    f"{windows / series:.0f} times the series"
)
print(f"with what fit makes of them {predicted:.0f} MiB")


# %% [markdown]
# And the training itself? One step of the model, predicted from its graph:


# %%
def forecaster():
    keras.utils.set_random_seed(0)
    week = keras.Input((WEEK, SENSORS))
    model = keras.Model(week, keras.layers.Dense(1)(keras.layers.Flatten()(week)))
    model.compile("adam", "mse")
    return model


lab.predict(forecaster, BATCH)

# %% [markdown]
# ## Failure
#
# The published example: slice, append, stack, train. Beside its tensors the process may add less than the windows are.


# %%
def stacked():
    table = readings()
    with lab.phase("windows"):
        x = np.stack([table[start : start + WEEK] for start in range(WINDOWS)])
    next_hour = table[WEEK:, 0]
    with lab.phase("fit"):
        model = forecaster()
        told = model.fit(x, next_hour, BATCH, EPOCHS, shuffle=False, verbose=0)
    return told.history["loss"]


failure = lab.run(stacked, outside=OUTSIDE, label=f"stacked, {OUTSIDE} outside")
if sys.platform == "linux":  # elsewhere a process cannot be limited that sharply
    lab.expect_oom(failure)

# %% [markdown]
# The list is no trouble: a slice of an array is a *view*, a few bytes that say where its numbers begin. `np.stack` copies
# them all into one block. What it would have taken without that limit:

# %%
unbounded = lab.run(stacked, label="stacked, no tight limit")
lab.expect_finished(unbounded)

# %% [markdown]
# ## Fix
#
# Keep the series, and cut the windows of one batch when it is wanted. Keras has the pipeline ready. (Neither arm shuffles,
# so that both can be compared; with `shuffle=True` the pipeline draws starts of windows, which are single numbers.)


# %%
def cut_in_pipeline():
    table = readings()
    batches = keras.utils.timeseries_dataset_from_array(
        table[:-1], table[WEEK:, 0], sequence_length=WEEK, batch_size=BATCH
    )
    with lab.phase("fit"):
        told = forecaster().fit(batches, epochs=EPOCHS, verbose=0)
    return told.history["loss"]


fix = lab.run(cut_in_pipeline, outside=OUTSIDE, label="cut in the pipeline")
lab.expect_finished(fix)

# %% [markdown]
# Is `np.stack` to blame? A control: `sliding_window_view` gives the same windows as one view, for which nothing is copied.


# %%
def as_view():
    table = readings()
    with lab.phase("windows"):
        x = sliding_window_view(table[:-1], WEEK, axis=0).swapaxes(1, 2)
    with lab.phase("fit"):
        model = forecaster()
        told = model.fit(x, table[WEEK:, 0], BATCH, EPOCHS, shuffle=False, verbose=0)
    return told.history["loss"]


control = lab.measure(as_view, label="a view, given to fit")

# %% [markdown]
# ## Side by side
#
# Process memory, since most of the story is NumPy's.

# %%
lab.compare(unbounded, failure, fix, control, story="process")

# %% [markdown]
# Who held the tensors among it? Both run once more while TensorFlow records every allocation. The windows that NumPy made
# are in neither bar, since TensorFlow's allocator did not hand them out; what `fit` made of them is.

# %%
lab.take_apart(unbounded, fix)

# %%
lab.predicted_vs_measured(
    stacked=(predicted, unbounded.process_peak_mib),
    a_view=(windows / 2, control.peak_mib),
)

# %%
print(my_guess.against(unbounded.process_peak_mib))
assert np.allclose(unbounded.value, fix.value, rtol=1e-3)
assert np.allclose(unbounded.value, control.value, rtol=1e-3)
lab.note(
    f"The same batches reached the model: the losses of the {EPOCHS} epochs are "
    f"{', '.join(f'{loss:.4f}' for loss in unbounded.value)} and "
    f"{', '.join(f'{loss:.4f}' for loss in fix.value)}. Cut in the pipeline, tensors peaked at "
    f"{fix.peak_mib:.1f} MiB, against {unbounded.peak_mib:.0f}. The view kept NumPy from copying, "
    f"and `fit` copied it nevertheless: {control.peak_mib:.0f} MiB of tensors."
)

# %% [markdown]
# ## Explain
#
# Windows are one of many conversions. Python's own `tracemalloc` counts what Python and NumPy allocate, and pandas through
# NumPy, to the byte: `reset_peak()` before a stage, `get_traced_memory()` behind it. Tensors it does not see.


# %%
def taken(convert, *data):
    """What convert(*data) gives; MiB that it takes at its worst moment, and that it leaves."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    made = convert(*data)
    now, peak = tracemalloc.get_traced_memory()
    return made, (peak - before) / 2**20, (now - before) / 2**20


def to_float32(rows):
    return rows.astype("float32")


def normalised(rows):
    return (rows - rows.mean(axis=0)) / rows.std(axis=0)


def whitened(rows):
    values, vectors = np.linalg.eigh(np.cov(rows, rowvar=False))
    return (rows - rows.mean(axis=0)) @ (vectors / np.sqrt(values)).astype(rows.dtype)


def cut(hours):
    return np.stack([hours[i : i + WEEK] for i in range(len(hours) - WEEK + 1)])


def padded(sentences):
    return keras.utils.pad_sequences(sentences, padding="post")


def dummies(column):
    return pd.get_dummies(column).to_numpy("float32")


# %% [markdown]
# Six data sets of a few MiB, and what is often done to each.

# %%
random = np.random.default_rng(0)
ROWS, CLASSES = 50_000, 100
STAGES = {
    "float32": (to_float32, lambda: random.normal(size=(ROWS, 32))),
    "normalising": (normalised, lambda: random.normal(size=(ROWS, 32)).astype("float32")),
    "whitening": (whitened, lambda: random.normal(size=(ROWS, 32)).astype("float32")),
    "windows": (cut, lambda: random.normal(size=(ROWS // 10, SENSORS))),
    "padding": (
        padded,
        lambda: [np.ones(min(int(length), 2000), "int32") for length in lengths],
    ),
    "dummies": (dummies, lambda: pd.Series(random.integers(CLASSES, size=ROWS), dtype="category")),
}
lengths = random.lognormal(np.log(40), 1.1, ROWS // 10)  # of sentences, in tokens


def conversions():
    tracemalloc.start()
    facts = {}
    for name, (convert, make) in STAGES.items():
        with lab.phase(name):
            data, _, size = taken(make)
            _, most, left = taken(convert, data)
        facts[name] = {"data": size, "converted": left, "worst moment": size + most}
    return facts


stages = pd.DataFrame(lab.measure(conversions, label="conversions").value).T
axes = stages.div(stages["data"], axis=0).plot.barh(width=0.8, logx=True)
for bars, hatch in zip(axes.containers, ("", "//", "..")):
    plt.setp(bars, hatch=hatch)
axes.invert_yaxis()
axes.set(xlabel="times the data (logarithmic)", xlim=(0.1, None))
axes.xaxis.set_major_formatter("{x:g}")  # 10, not 10¹
plt.show()
stages.assign(times=stages["worst moment"] / stages["data"]).round(1)

# %%
times = stages["worst moment"] / stages["data"]
lab.note(
    f"The worst moment, the data included: to float32 {times['float32']:.1f} times the data, for "
    f"the result is smaller than what it is made of. Normalising gives as much as it gets, and "
    f"takes {times['normalising']:.1f}: `rows - mean` is an array of its own beside the result. "
    f"Whitening takes {times['whitening']:.1f}: np.cov makes float64 of what it is given. "
    f"Windows take {times['windows']:.0f}, one for each hour of a week; padding "
    f"{times['padding']:.0f}, for the longest sentence decides for all; dummies "
    f"{times['dummies']:.0f}, for a class of one byte becomes {CLASSES} floats of four, beside "
    f"{CLASSES} columns of a byte that pandas makes first."
)

# %% [markdown]
# So count what a conversion gives out for a byte that goes in. What makes data **smaller** is done first, once. What makes
# them **larger** goes behind `batch`, where it is done for one batch, and again in each epoch, which costs time. Between
# them, what keeps the size is done in place. The number of bytes does not depend on a GPU: all of this is host memory.
#
# **When it flips.** Windows need not overlap. Where the next begins when one ends, all of them are one copy of the series.


# %%
def all_windows(thousand_hours=24, length=168, stride=1):
    first = (1000 * thousand_hours - length) // stride + 1
    size = lab.tensor_mib((first, length, SENSORS), "float64")
    whole = lab.tensor_mib((1000 * thousand_hours, SENSORS), "float64")
    print(
        f"series {whole:6.2f} MiB, all windows {size:9.2f} MiB: "
        f"{size / whole:5.1f} times (predicted)"
    )


lab.explore(all_windows, thousand_hours=(1, 200, 1), length=(8, 720, 8), stride=(1, 720, 1))

# %% [markdown]
# ## Verdict
#
# The advice names no conversion, so each of the six is held against it. Whoever converts first has the data and their
# converted form at one time: that much the advice itself says.

# %%
lab.verdict("C40", "partly", **times.to_dict())

# %% [markdown]
# ## Exercises
#
# **1.** Dummies in the batch: `rows_of(numbers, codes, classes)` gets an array of float32 columns and the class of each row
# as a number, and returns a dataset of float32 batches of 64 rows, in order: the columns of `numbers`, then a column for
# each class, 1 for the row's own and 0 otherwise. As it stands all rows are made at once.


# %%
def rows_of(numbers, codes, classes):
    # BEGIN SOLUTION
    def with_dummies(some_numbers, some_codes):
        return tf.concat([some_numbers, tf.one_hot(some_codes, classes)], axis=1)

    return tf.data.Dataset.from_tensor_slices((numbers, codes)).batch(64).map(with_dummies)
    # END SOLUTION
    rows = np.concatenate([numbers, np.eye(classes, dtype="float32")[codes]], axis=1)
    return tf.data.Dataset.from_tensor_slices(rows).batch(64)


# %%
check.rows_of(rows_of)


# %% tags=["right"]
def rows_of(numbers, codes, classes):
    def batches():
        for start in range(0, len(codes), 64):
            known = pd.Categorical(codes[start : start + 64], categories=range(classes))
            yield np.hstack([numbers[start : start + 64], pd.get_dummies(known).to_numpy("f4")])

    width = numbers.shape[1] + classes
    return tf.data.Dataset.from_generator(
        batches, output_signature=tf.TensorSpec((None, width), tf.float32)
    )


# %% tags=["wrong"]
# says: at once
def rows_of(numbers, codes, classes):
    table = pd.get_dummies(pd.Categorical(codes, categories=range(classes))).to_numpy()

    def together(start):
        rows = [numbers[start : start + 64], table[start : start + 64].astype("float32")]
        return np.concatenate(rows, axis=1)

    starts = tf.data.Dataset.range(0, len(codes), 64)
    return starts.map(lambda start: tf.numpy_function(together, [start], tf.float32))


# %% tags=["wrong"]
# says: at once
def rows_of(numbers, codes, classes):
    rows = tf.concat([numbers, tf.one_hot(codes, classes)], axis=1)
    return tf.data.Dataset.from_tensor_slices(rows).batch(64)


# %% tags=["wrong"]
# says: 1 for the row's own class
def rows_of(numbers, codes, classes):
    batches = tf.data.Dataset.from_tensor_slices((numbers, codes)).batch(64)

    def with_dummies(some_numbers, some_codes):
        seen, places = tf.unique(some_codes)
        return tf.concat([some_numbers, tf.one_hot(places, classes)], axis=1)

    return batches.map(with_dummies)


# %% tags=["wrong"]
# says: float64
def rows_of(numbers, codes, classes):
    def with_dummies(some_numbers, some_codes):
        dummies = tf.one_hot(some_codes, classes, dtype=tf.float64)
        return tf.concat([tf.cast(some_numbers, tf.float64), dummies], axis=1)

    return tf.data.Dataset.from_tensor_slices((numbers, codes)).batch(64).map(with_dummies)


# %% [markdown]
# **2.** Normalise in place: `normalise(x)` gets a float32 array and returns one of the same shape in which each column has
# the mean 0 and the deviation 1. It may use up `x`, and takes less than a quarter of `x` beside it. (Try what
# `x -= x.mean(axis=0)` and `x /= x.std(axis=0)` take. Which of them makes an array as large as `x`?)


# %%
def normalise(x):
    # BEGIN SOLUTION
    for column in x.T:  # views: what is written into them stands in x
        column -= column.mean(dtype="float64")
        column /= column.std(dtype="float64")
    return x
    # END SOLUTION
    return (x - x.mean(axis=0)) / x.std(axis=0)


# %%
check.normalise(normalise)


# %% tags=["right"]
def normalise(x):
    blocks = np.array_split(x, 50)
    mean = sum(block.sum(axis=0, dtype="float64") for block in blocks) / len(x)
    variance = sum(((block - mean) ** 2).sum(axis=0) for block in blocks) / len(x)
    for block in blocks:
        block[:] = (block - mean) / np.sqrt(variance)
    return x


# %% tags=["wrong"]
# says: beside
def normalise(x):
    x -= x.mean(axis=0)
    x /= x.std(axis=0)
    return x


# %% tags=["wrong"]
# says: beside
def normalise(x):
    layer = keras.layers.Normalization()
    layer.adapt(x)
    return layer(x).numpy()


# %% tags=["wrong"]
# says: each column
def normalise(x):
    for block in np.array_split(x, 50):
        block -= block.mean(axis=0)
        block /= block.std(axis=0)
    return x


# %% tags=["wrong"]
# says: float16
def normalise(x):
    small = np.empty(x.shape, "float16")
    for to, column in zip(small.T, x.T):
        to[:] = (column - column.mean()) / column.std()
    return small
