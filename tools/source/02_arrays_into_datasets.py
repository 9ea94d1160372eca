# %% [markdown]
# # 02 · NumPy arrays into datasets
#
# **Symptom:** *"MemoryError: Unable to allocate 469. MiB for an array with shape (10000, 64, 64, 3)"* or *"kernel
# died"* at `tf.data.Dataset.from_tensor_slices(x)`, although `x` itself is already loaded and fits.
#
# **Afterwards you can** count the copies that a dataset makes of an array, feed the array without a copy, and say
# which of its bytes a dtype can save.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C02, C26, C31, C32 |
#
# Every run below happens in a process of its own. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes the article's own 10,000 images
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import os
import sys
import tempfile

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import arrays_into_datasets as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

IMAGES = lab.choose(SCALE, quick=2000, full=10000)
ROW = (64, 64, 3)
BATCH, BUFFER, EPOCHS = 32, 1000, 22
EXAMPLES = 2000  # in the exercises
print(f"{IMAGES} images of {ROW}, batches of {BATCH}, a shuffle buffer of {BUFFER}")

# %% [markdown]
# ## Predict
#
# The images are in memory already, as one float32 array. A dataset shuffles them and hands out batches of 32. The
# article says that only the current batch is in memory. How much does the whole process hold at its worst moment?

# %%
my_guess = lab.guess("Peak memory of the process, the array included?", GUESS_MIB)

# %%
array = lab.tensor_mib((IMAGES, *ROW))
batch = lab.tensor_mib((BATCH, *ROW))
print(f"the array: {array:.2f} MiB, one batch: {batch:.2f} MiB")

# %% [markdown]
# A tensor must not change, and you could change the array afterwards. So TensorFlow does not use the array's memory:
# NumPy makes a copy (`array.copy()`), and that is copied into memory of TensorFlow's own. NumPy's copy is let go soon
# after. With your own array that makes three at the worst moment.

# %%
predicted_process = 3 * array
print(f"array + NumPy's copy + the tensor = {predicted_process:.0f} MiB")

# %% [markdown]
# ## Failure
#
# The published example. Beside its tensors the process may add 1.8 times the array: enough for the array itself, the
# stacks of `tf.data`'s threads and many batches.


# %%
def images(start=0, count=IMAGES, row=ROW):
    return np.random.default_rng(start).random((count, *row), np.float32)


def mean_of(dataset, epochs=EPOCHS):
    """Read the epochs, as a training loop would."""
    for _ in range(epochs):
        total = 0.0
        for batch in dataset:
            total += float(tf.reduce_sum(batch))
    return total / (IMAGES * np.prod(ROW))


def article():
    with lab.phase("make the array"):
        x = images()
    with lab.phase("from_tensor_slices"):
        dataset = tf.data.Dataset.from_tensor_slices(x)
    with lab.phase("epochs"):
        return mean_of(dataset.shuffle(BUFFER).batch(BATCH))


OUTSIDE = f"{1.8 * array:.0f} MiB"
failure = lab.run(article, outside=OUTSIDE, label=f"article, {OUTSIDE} outside")
if sys.platform == "linux":  # elsewhere a process cannot be limited that sharply
    lab.expect_oom(failure)

# %% [markdown]
# The error comes from NumPy, out of a line that reads like bookkeeping. Without that limit:

# %%
slices = lab.run(article, label="from_tensor_slices")
lab.expect_finished(slices)

# %% [markdown]
# The grey line is the process: the array, then `from_tensor_slices` on top. The tensor memory shows a further step
# when the first epoch begins, of which more below.
#
# ## Fix
#
# Leave the array where it is, shuffle *indices* of 8 bytes, and copy the rows of one batch when it is wanted.


# %%
def by_index_of(rows_at):
    """Shuffled batches of images; rows_at is a function from an array of indices to these rows."""

    def fetch(indices):
        rows = tf.numpy_function(rows_at, [indices], tf.float32)
        return tf.ensure_shape(rows, (None, *ROW))

    return tf.data.Dataset.range(IMAGES).shuffle(IMAGES).batch(BATCH).map(fetch)


def indices_shuffled():
    x = images()
    return mean_of(by_index_of(lambda indices: x[indices]))


fix = lab.run(indices_shuffled, outside=OUTSIDE, label="indices, array in memory")
lab.expect_finished(fix)

# %% [markdown]
# The array need not be in memory either. A memory-mapped `.npy` file reads only the rows that are asked for.


# %%
def write_file():
    """The images as an .npy file, written in blocks, so that they are never in memory together."""
    path = os.path.join(tempfile.mkdtemp(), "images.npy")
    np.lib.format.open_memmap(path, "w+", np.float32, (IMAGES, *ROW))
    for start in range(0, IMAGES, 100):
        np.load(path, mmap_mode="r+")[start : start + 100] = images(start, 100)
    return path


def file_of_rows():
    path = write_file()
    # The file is mapped for one read and then let go, with the pages that came into memory.
    return mean_of(by_index_of(lambda indices: np.load(path, mmap_mode="r")[indices]))


from_file = lab.run(file_of_rows, outside=OUTSIDE, label="indices, array in a file")
lab.expect_finished(from_file)

# %% [markdown]
# ## Side by side
#
# Process memory, since half of the story is NumPy's.

# %%
lab.compare(slices, failure, fix, from_file, story="process")

# %% [markdown]
# Who held the tensors among it? Both run once more while TensorFlow records every allocation. The array is there
# twice as a tensor: as the constant that `from_tensor_slices` made, and once more in the iterator of an epoch.
# NumPy's own array is in neither bar: TensorFlow's allocator did not hand it out.

# %%
lab.take_apart(slices, fix)

# %%
lab.predicted_vs_measured(
    process_with_from_tensor_slices=(predicted_process, slices.process_peak_mib),
    process_with_indices=(array + 2 * batch, fix.process_peak_mib),
)

# %%
print(my_guess.against(slices.process_peak_mib))
print(f"Mean pixel: {slices.value:.4f} from slices, {fix.value:.4f} by index")
assert abs(slices.value - fix.value) < 0.001
assert abs(from_file.value - 0.5) < 0.01  # other random images, whose mean is a half as well
lab.note(
    f"By index, tensors peaked at {fix.peak_mib / batch:.1f} batches: the one in use, and those "
    f"that `tf.data` makes ready meanwhile. The process had {fix.process_peak_mib - array:.0f} MiB "
    f"beside the array, and {from_file.process_peak_mib:.0f} in all with the array in a file; that "
    "also pays for threads and code."
)

# %% [markdown]
# ## Explain
#
# **Where the tensors' second copy comes from.** `tf.data` rewrites a pipeline before it runs: it joins and reorders
# steps, and it copies the pipeline's tensors while it does. This can be switched off. And `shuffle`: does its buffer
# cost anything, when its rows are parts of one big tensor? That depends on where a row begins, so here are rows of
# two sizes.


# %%
def levels(row, rewritten):
    """MiB of tensors beside the dataset's own copy: the most, and in the middle of an epoch."""
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = rewritten
    dataset = tf.data.Dataset.from_tensor_slices(images(count=BUFFER, row=row))
    dataset = dataset.shuffle(BUFFER).batch(BATCH).with_options(options)
    own_copy = lab.reading().tensors_mib
    with lab.phase("epoch"):
        batches = iter(dataset)
        next(batches)
        return lab.reading().tensors_mib - own_copy


facts = {}
for side, rewritten in ((64, True), (64, False), (61, True)):
    row = (side, side, 3)
    name = f"rows of {side} × {side}" + ("" if rewritten else ", not rewritten")
    run = lab.measure(levels, row, rewritten, label=name)
    facts[name] = (run.phase("epoch").rise_mib, run.value)
pd.DataFrame(facts, ["worst moment (MiB)", "in an epoch (MiB)"]).T.round(1)

# %%
(worst, even), (bare, _), (_, uneven) = facts.values()
lab.note(
    f"MiB beside the dataset's copy of {lab.tensor_mib((BUFFER, *ROW)):.0f}. Rewritten, the worst "
    f"moment is {worst:.0f} MiB more, otherwise {bare:.1f}: that is the second copy, and it goes "
    f"before the first batch. While the shuffle buffer is full, {even:.1f} MiB are held with rows "
    f"of 64 × 64 and {uneven:.1f} with rows of 61 × 61. TensorFlow wants tensors to begin at "
    f"multiples of 64 bytes. A row of the first has {64 * 64 * 3 * 4 / 64:.2f} times 64 bytes, so "
    "each can be a view into the one big tensor; a row of the second has "
    f"{61 * 61 * 3 * 4 / 64:.2f} times, so it is copied."
)

# %% [markdown]
# **A dataset in every epoch.** Two articles build it inside the epoch loop. Here is that loop, beside one that builds
# it once. An epoch here only reads; a model's own time would come on top of either.

# %%
TIMES = 6


def epochs():
    x = images()

    def make():
        return tf.data.Dataset.from_tensor_slices(x).batch(BATCH).prefetch(tf.data.AUTOTUNE)

    dataset = make()
    for _ in range(TIMES):
        with lab.phase("built once"):
            mean_of(dataset, 1)
    del dataset
    for _ in range(TIMES):
        with lab.phase("built in every epoch"):
            dataset = make()
            mean_of(dataset, 1)


parts = lab.measure(epochs, label="epochs").phases
facts = [(part.name, part.peak_mib, part.held_mib, part.end - part.start) for part in parts]
passes = pd.DataFrame(facts, columns=["dataset", "peak MiB", "end MiB", "seconds"])
number = passes.groupby("dataset").cumcount() + 1
by_epoch = passes.pivot_table("peak MiB", number, "dataset")
axes = by_epoch.plot(style=["o-", "s--"], ylim=(0, 2.2 * array), figsize=(8, 3))
axes.set(xlabel="epoch", ylabel="most tensors in an epoch (MiB)")
plt.show()

# %%
middle = passes.groupby("dataset").median()
once, rebuilt = middle.loc["built once"], middle.loc["built in every epoch"]
ends = passes["end MiB"][TIMES:].tolist()
lab.note(
    f"Nothing leaks: at the end of the first and the last epoch {ends[0]:.1f} and {ends[-1]:.1f} "
    "MiB are held. But a new dataset is copied and rewritten anew, while the name still holds the "
    f"old one: {rebuilt['peak MiB']:.0f} MiB at the worst moment against {once['peak MiB']:.0f}, "
    f"and {rebuilt['seconds']:.3f} s against {once['seconds']:.3f} (medians of {TIMES} epochs). "
    "Built once, only the first epoch pays."
)

# %% [markdown]
# **Which dtype, which labels.** Every copy has the array's dtype, and NumPy makes float64 unless told otherwise.
# One-hot labels hold a float a class where one integer would do. Is it worth caring? One epoch of training a linear
# model, the peak of the whole process.


# %%
def training(count, row, classes, dtype="float32", one_hot=False):
    random = np.random.default_rng(0)
    x = random.random((count, *row), dtype)
    y = random.integers(classes, size=count, dtype=np.int32)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if one_hot:
        y = np.eye(classes, dtype=np.float32)[y]
        loss_of = keras.losses.CategoricalCrossentropy(from_logits=True)
    weights = tf.Variable(tf.zeros((np.prod(row), classes)))
    for inputs, wanted in tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH):
        with tf.GradientTape() as tape:
            flat = tf.reshape(tf.cast(inputs, tf.float32), (len(inputs), -1))
            loss = loss_of(wanted, flat @ weights)
        weights.assign_sub(0.001 * tape.gradient(loss, weights))
    return float(loss)


photos, short_rows = (IMAGES // 4, ROW, 10), (10_000, (32,), 1000)
chosen = {
    "float64": (*photos, "float64"),
    "float32": (*photos, "float32"),
    "many_classes_one_hot": (*short_rows, "float32", True),
    "many_classes_integers": (*short_rows, "float32", False),
    "few_classes_one_hot": (*photos, "float32", True),
    "few_classes_integers": (*photos, "float32", False),
}
runs = {name: lab.measure(training, *args, label=name) for name, args in chosen.items()}
_, _, *losses = (run.value for run in runs.values())
assert np.allclose(losses[::2], losses[1::2], rtol=1e-4)  # one-hot or integer: the same loss
dtypes = {name: run.process_peak_mib for name, run in runs.items()}
share = lambda less, more: dtypes[less] / dtypes[more]
lab.note(
    f"float32 takes {share('float32', 'float64'):.2f} of float64's peak. Integers for one-hot "
    f"labels take {share('many_classes_integers', 'many_classes_one_hot'):.2f} of the peak with "
    "1,000 classes and rows of 32 numbers, where the labels are the larger part, and "
    f"{share('few_classes_integers', 'few_classes_one_hot'):.2f} with 10 classes of images: a "
    "dtype saves where the bytes are, so count first."
)

# %% [markdown]
# **An array inside a function.** `tf.gather(x, rows)` in a `tf.function` or in `Dataset.map` looks like the fix above.
# But TensorFlow runs such a function once with placeholders and writes down the operations, as a *graph*: that is
# *tracing*. A NumPy array that it meets there becomes a constant of the graph, byte for byte, and graphs are copied.

# %%
BAKED = 500


def baked():
    x = images(count=BAKED)
    before = lab.reading().process_mib

    look = tf.function(lambda rows: tf.gather(x, rows))
    look(tf.range(BATCH))
    graph = look.get_concrete_function(tf.range(BATCH)).graph.as_graph_def().ByteSize()
    return graph / 2**20, lab.reading().process_mib - before


graph_mib, grown = lab.measure(baked, label="array in a graph").value
small = lab.tensor_mib((BAKED, *ROW))
lab.note(
    f"The array has {small:.1f} MiB and the graph {graph_mib:.1f}; one trace made the process "
    f"grow by {grown:.0f} MiB, which is {grown / small:.1f} arrays. Exercise 2 takes it out."
)

# %% [markdown]
# **`tf.device("/GPU:0")`**, an article says, frees CPU memory. Whether it does takes a GPU to see. What can be seen
# anywhere is whether the scope had an effect at all:


# %%
def scope():
    with tf.device("/GPU:0"):
        device = (tf.ones((2, 2)) + 1).device.rsplit("device:")[-1]
    tf.config.set_soft_device_placement(False)  # do not take another device quietly
    try:
        with tf.device("/GPU:0"):
            tf.ones((2, 2)) + 1
    except (tf.errors.InvalidArgumentError, RuntimeError) as error:
        return device, type(error).__name__
    return device, "no error"


device, raised = lab.measure(scope, label="tf.device").value
print(f"under /GPU:0 a sum was computed on {device}; without soft placement: {raised}")

# %% [markdown]
# **When it flips.** For an array that is small beside your memory `from_tensor_slices` is the simplest choice, and a
# good one. Move the sliders: for which data sets is it no trouble?


# %%
def feeds_by_size(thousand_images=10, side=64):
    image, count = lab.tensor_mib((side, side, 3)), 1000 * thousand_images
    print(f"array {count * image:10,.1f} MiB, one batch {BATCH * image:8.2f} MiB (predicted)")
    print(f"  from_tensor_slices: process {3 * count * image:12,.1f} MiB with the array")
    print(f"  by index: process           {(count + 2 * BATCH) * image:12,.1f} MiB with the array")


lab.explore(feeds_by_size, thousand_images=(1, 200, 1), side=(8, 256, 8))

# %% [markdown]
# ## Verdict

# %%
peaks = {"tensors_peak": slices.peak_mib, "process_peak": slices.process_peak_mib}
lab.verdict("C02", "fails", array=array, batch=batch, **peaks)

# %%
lab.verdict("C26", "partly", **dtypes)

# %%
lab.verdict("C31", "not testable here", computed_on=device, without_soft_placement=raised)

# %%
lab.verdict(
    "C32",
    "partly",
    held_first=ends[0],
    held_last=ends[-1],
    rebuilt_peak=rebuilt["peak MiB"],
    once_peak=once["peak MiB"],
    rebuilt_seconds=rebuilt["seconds"],
    once_seconds=once["seconds"],
)

# %% [markdown]
# ## Exercises
#
# **1.** Feed images *and labels* by index from the file: `by_index` returns a dataset of (images, labels) in batches of
# 32, shuffled over all of them, each pair once. `labels` is a NumPy array, and small.


# %%
def by_index(path, labels):
    # BEGIN SOLUTION
    def rows_at(indices):
        return np.load(path, mmap_mode="r")[indices]

    def fetch(indices):
        rows = tf.numpy_function(rows_at, [indices], tf.float32)
        return tf.ensure_shape(rows, (None, *ROW)), tf.gather(labels, indices)

    return tf.data.Dataset.range(len(labels)).shuffle(len(labels)).batch(BATCH).map(fetch)
    # END SOLUTION


# %%
check.by_index(by_index, EXAMPLES, ROW, BATCH)


# %% tags=["right"]
def by_index(path, labels):
    file = np.load(path, mmap_mode="r")

    def pairs():
        order = np.random.permutation(len(labels))
        for start in range(0, len(labels), BATCH):
            rows = order[start : start + BATCH]
            yield file[rows], labels[rows]

    pixels, numbers = tf.TensorSpec((None, *ROW)), tf.TensorSpec((None,), tf.int64)
    return tf.data.Dataset.from_generator(pairs, output_signature=(pixels, numbers))


# %% tags=["wrong"]
# says: in memory
def by_index(path, labels):
    x = np.load(path)
    dataset = tf.data.Dataset.from_tensor_slices((x, labels))
    return dataset.shuffle(len(labels)).batch(BATCH)


# %% tags=["wrong"]
# says: only part of them
def by_index(path, labels):
    def rows_at(indices):
        return np.load(path, mmap_mode="r")[indices]

    def fetch(indices):
        return tf.numpy_function(rows_at, [indices], tf.float32), tf.gather(labels, indices)

    return tf.data.Dataset.range(len(labels)).shuffle(2).batch(BATCH).map(fetch)


# %% tags=["wrong"]
# says: do not belong together
def by_index(path, labels):
    def fetch(indices):
        rows = tf.numpy_function(
            lambda rows: np.load(path, mmap_mode="r")[rows], [indices], tf.float32
        )
        return rows, indices

    return tf.data.Dataset.range(len(labels)).shuffle(len(labels)).batch(BATCH).map(fetch)


# %% tags=["wrong"]
# says: mmap_mode
def by_index(path, labels):
    def fetch(indices):
        rows = tf.numpy_function(lambda at: np.load(path)[at], [indices], tf.float32)
        return tf.ensure_shape(rows, (None, *ROW)), tf.gather(labels, indices)

    return tf.data.Dataset.range(len(labels)).shuffle(len(labels)).batch(BATCH).map(fetch)


# %% tags=["wrong"]
# says: whole batches are shuffled
def by_index(path, labels):
    def fetch(indices):
        rows = tf.numpy_function(lambda at: np.load(path, mmap_mode="r")[at], [indices], tf.float32)
        return tf.ensure_shape(rows, (None, *ROW)), tf.gather(labels, indices)

    return tf.data.Dataset.range(len(labels)).batch(BATCH).shuffle(len(labels)).map(fetch)


# %% [markdown]
# **2.** Take the array out of the graph. `lookup(x)` returns a `tf.function` that gives the rows asked for. As it
# stands the graph holds the whole array.


# %%
def lookup(x):
    table = x
    # BEGIN SOLUTION
    table = tf.constant(x)  # an eager tensor is passed into the graph, not written into it
    # END SOLUTION

    @tf.function
    def look(rows):
        return tf.gather(table, rows)

    return look


# %%
check.lookup(lookup, BAKED, ROW, BATCH)


# %% tags=["right"]
def lookup(x):
    from functools import partial

    return partial(tf.function(tf.gather), tf.Variable(x, trainable=False))


# %% tags=["wrong"]
# says: graph still holds
def lookup(x):
    @tf.function
    def look(rows):
        table = tf.constant(x)
        return tf.gather(table, rows)

    return look


# %% tags=["wrong"]
# says: nothing was traced
def lookup(x):
    return lambda rows: tf.constant(x[rows.numpy()])


# %% tags=["wrong"]
# says: traced 3 times
def lookup(x):
    table = tf.constant(x)

    def look(rows):
        return tf.function(lambda: tf.gather(table, rows))()

    return look


# %% tags=["right"]
def lookup(x):
    @tf.function
    def look(table, rows):
        return tf.gather(table, rows)

    return lambda rows: look(x, rows)


# %% tags=["wrong"]
# says: symbolic
def lookup(x):
    @tf.function
    def look(rows):
        return x[rows]

    return look


# %% [markdown]
# **3.** Pixels come as bytes. `scaled_batches` gets a uint8 array and returns a dataset of float32 batches of 32, in
# order, with pixels between 0 and 1. As it stands it makes eight bytes of each. Make floats of a batch at a time.


# %%
def scaled_batches(pixels):
    # BEGIN SOLUTION
    batches = tf.data.Dataset.from_tensor_slices(pixels).batch(32)
    return batches.map(lambda batch: tf.cast(batch, tf.float32) / 255)
    # END SOLUTION
    return tf.data.Dataset.from_tensor_slices(pixels / 255).batch(32)


# %%
check.scaled_batches(scaled_batches, EXAMPLES, ROW, BATCH)


# %% tags=["right"]
def scaled_batches(pixels):
    images = tf.data.Dataset.from_tensor_slices(pixels)
    return images.map(lambda image: tf.image.convert_image_dtype(image, tf.float32)).batch(32)


# %% tags=["wrong"]
# says: all of them as floats
def scaled_batches(pixels):
    small = pixels.astype(np.float32) / 255
    return tf.data.Dataset.from_tensor_slices(small).batch(32)


# %% tags=["wrong"]
# says: between 0 and 1
def scaled_batches(pixels):
    return tf.data.Dataset.from_tensor_slices(pixels).batch(32).map(lambda x: tf.cast(x, "float32"))


# %% tags=["wrong"]
# says: float64
def scaled_batches(pixels):
    doubles = tf.data.Dataset.from_tensor_slices(pixels).map(lambda x: tf.cast(x, "float64") / 255)
    return doubles.batch(32)


# %% tags=["wrong"]
# says: as floats
def scaled_batches(pixels):
    floats = np.float32(pixels) / np.float32(255)
    starts = tf.data.Dataset.range(0, len(floats), 32)
    return starts.map(lambda at: tf.numpy_function(lambda i: floats[i : i + 32], [at], tf.float32))


# %% tags=["right"]
def scaled_batches(pixels):
    return tf.data.Dataset.from_tensor_slices(pixels).batch(32).map(lambda batch: batch / 255)


# %% tags=["wrong"]
# says: all of them as floats
def scaled_batches(pixels):
    images = tf.data.Dataset.from_tensor_slices(pixels)
    return images.map(lambda image: tf.cast(image, tf.float32) / 255).cache().batch(32)
