# %% [markdown]
# # 02 · NumPy arrays into datasets
#
# **Symptom:** *"MemoryError: Unable to allocate 469. MiB for an array with shape (10000, 64, 64, 3)"* or *"kernel
# died"* at `tf.data.Dataset.from_tensor_slices(x)`, although `x` itself is already loaded and fits.
#
# **Afterwards you can** count the copies that a dataset makes of an array, choose a feed that holds a few batches in
# place of the whole array, and keep arrays out of graphs.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C02, C03, C26, C30, C31, C32 |
#
# Every run below happens in a process of its own. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes the article's own 10,000 images
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import gc
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log

IMAGES = lab.choose(SCALE, quick=2000, full=10000)
ROW = (64, 64, 3)
BATCH, BUFFER = 32, 1000
photos = sorted(str(path.resolve()) for path in Path("../data/photos").glob("*.jpg"))
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
# TensorFlow may not share NumPy's memory without asking: you could change the array afterwards, and a tensor must not
# change. So it copies. In fact it copies twice: `array.copy()` in NumPy, for safety, and from there into memory of its
# own, because NumPy's large blocks are not aligned to the 64 bytes that TensorFlow wants. The first is let go soon after.
# With your own array that makes three at the worst moment.

# %%
predicted_process = 3 * array
print(f"array + NumPy's copy + the tensor = {predicted_process:.0f} MiB")

# %% [markdown]
# ## Failure
#
# The published example. Here the process may add one and a half times the array beside its tensors. That is enough
# for the array and for dozens of batches.


# %%
def images(start=0, count=IMAGES):
    return np.random.default_rng(start).random((count, *ROW), np.float32)


def mean_of(dataset):
    """Read one epoch, as a training loop would."""
    total = 0.0
    for batch in dataset:
        total += float(tf.reduce_sum(batch))
    return total / (IMAGES * np.prod(ROW))


def article():
    with lab.phase("make the array"):
        x = images()
    with lab.phase("from_tensor_slices"):
        dataset = tf.data.Dataset.from_tensor_slices(x)
    with lab.phase("one epoch"):
        return mean_of(dataset.shuffle(BUFFER).batch(BATCH))


OUTSIDE = f"{1.5 * array:.0f} MiB"
failure = lab.run(article, outside=OUTSIDE, label=f"article, {OUTSIDE} outside")
if sys.platform == "linux":  # elsewhere a process cannot be limited that sharply
    lab.expect_oom(failure)

# %% [markdown]
# The error comes from NumPy, out of a line that reads like bookkeeping. Without that limit:

# %%
slices = lab.run(article, label="from_tensor_slices")
lab.expect_finished(slices)

# %% [markdown]
# The grey line is the process: one step for the array, two more for `from_tensor_slices`. The tensor memory shows a
# further surprise. It rises to *two* arrays when the epoch begins: `tf.data` rewrites a pipeline before it runs for
# the first time, and holds one more copy of the tensor meanwhile.
#
# ## Fix
#
# The article's other advice is a generator. It hands over one image at a time.


# %%
def generator():
    x = images()

    def one_by_one():
        yield from x

    spec = tf.TensorSpec(ROW, tf.float32)
    dataset = tf.data.Dataset.from_generator(one_by_one, output_signature=spec)
    return mean_of(dataset.batch(BATCH))


generated = lab.run(generator, label="generator")
lab.expect_finished(generated)

# %% [markdown]
# It works, without shuffling, at the pace of a Python loop, and the array itself is still there. What works in full:
# leave the images in a file, shuffle *indices* of 8 bytes, and read a batch of rows when it is wanted. A memory-mapped
# `.npy` file reads only the rows that are asked for.


# %%
def write_file():
    """The images as an .npy file, written in blocks, so that they are never in memory together."""
    path = os.path.join(tempfile.mkdtemp(), "images.npy")
    np.lib.format.open_memmap(path, "w+", np.float32, (IMAGES, *ROW))
    for start in range(0, IMAGES, 100):
        np.load(path, mmap_mode="r+")[start : start + 100] = images(start, 100)
    return path


def rows_of(path):
    """A function from a batch of indices to these rows, for use in Dataset.map."""

    def read(rows):
        return np.load(path, mmap_mode="r")[rows]  # the file is mapped for this one read

    return lambda rows: tf.ensure_shape(tf.numpy_function(read, [rows], tf.float32), (None, *ROW))


def index_fetch():
    path = write_file()
    dataset = tf.data.Dataset.range(IMAGES).shuffle(IMAGES).batch(BATCH).map(rows_of(path))
    return mean_of(dataset)


fetched = lab.run(index_fetch, outside=OUTSIDE, label="index fetch")
lab.expect_finished(fetched)

# %% [markdown]
# ## Side by side
#
# Process memory, since half of the story is NumPy's.

# %%
lab.compare(slices, failure, generated, fetched, story="process")

# %%
lab.predicted_vs_measured(
    process_with_from_tensor_slices=(predicted_process, slices.process_peak_mib),
    tensors_while_the_pipeline_is_rewritten=(2 * array, slices.peak_mib),
)

# %%
print(my_guess.against(slices.process_peak_mib))
print(f"Mean pixel: {slices.value:.4f} from slices, {generated.value:.4f} from the generator")
assert abs(slices.value - generated.value) < 0.001
assert abs(fetched.value - 0.5) < 0.01, (
    "the file holds other random images; their mean is a half as well"
)

# %% [markdown]
# ## Explain
#
# **What stands behind a feed decides.** One run, several feeds; each phase shows the tensor memory it needed.


# %%
def feeds():
    x = images()
    path, records = write_file(), os.path.join(tempfile.mkdtemp(), "images.tfrecord")
    with tf.io.TFRecordWriter(records) as writer:
        for image in x:
            writer.write(image.tobytes())

    def one_by_one(array=x):
        yield from array

    def parse(record):
        return tf.reshape(tf.io.decode_raw(record, tf.float32), ROW)

    data, spec = tf.data.Dataset, tf.TensorSpec(ROW, tf.float32)
    from_generator = partial(data.from_generator, one_by_one, output_signature=spec)
    from_file = tf.data.TFRecordDataset(records).map(parse)
    indices = data.range(IMAGES).shuffle(IMAGES).batch(BATCH)
    for name, make in {
        "index fetch": lambda: indices.map(rows_of(path)),
        "TFRecord": lambda: from_file.batch(BATCH),
        "TFRecord + shuffle": lambda: from_file.shuffle(BUFFER).batch(BATCH),
        "generator": lambda: from_generator().batch(BATCH),
        "generator + shuffle": lambda: from_generator().shuffle(BUFFER).batch(BATCH),
        "generator + cache": lambda: from_generator().cache().batch(BATCH),
        "generator, args=(x,)": lambda: from_generator(args=(x,)).batch(BATCH),
        "from_tensor_slices": lambda: data.from_tensor_slices(x).shuffle(BUFFER).batch(BATCH),
    }.items():
        gc.collect()  # a generator's dataset refers to itself: only the collector frees it
        with lab.phase(name):
            mean_of(make())


all_feeds = lab.measure(feeds, label="feeds").phases
need = pd.Series({feed.name: feed.rise_mib for feed in all_feeds})
axes = need.plot.barh(xlabel="tensor memory of one epoch, beside the NumPy array (MiB)")
axes.axvline(array, color="black", ls=":", label="the array")
axes.bar_label(axes.containers[0], fmt=" {:.1f}")
axes.margins(x=0.1)
axes.invert_yaxis()
axes.legend(loc="upper right")
plt.show()
for feed in all_feeds:
    seconds = feed.end - feed.start
    print(f"{feed.name:22} {feed.rise_mib:7.1f} MiB   {seconds:5.2f} s an epoch")

# %% [markdown]
# What the long bars are made of: whatever the buffer holds, and about three batches: the elements of the next one, the
# batch into which they are copied, and the one in your hands.

# %%
one_image = lab.tensor_mib(ROW)
lab.predicted_vs_measured(
    generator_and_shuffle=(3 * batch + BUFFER * one_image, need["generator + shuffle"]),
    generator_and_cache=(3 * batch + array, need["generator + cache"]),
    from_tensor_slices=(2 * array, need["from_tensor_slices"]),
)

# %% [markdown]
# * A generator or a record file costs a batch. `shuffle` behind it adds its whole buffer, `cache` the whole data set:
#   lab 03 is about these.
# * `args=(x,)` is turned into a tensor, so the copy is back. Let the generator close over the array, as above.
# * `shuffle` behind `from_tensor_slices` costs nothing: its elements are views of the one big tensor.
# * For an array that is small beside your memory `from_tensor_slices` is the simplest choice, and a good one.
#
# **Could TensorFlow share the array?** Only if you ask for it, and if the memory is aligned. DLPack then hands over
# the same bytes, and the options below stop the rewriting. The price: whoever changes the array changes the tensor.
# Memory that is not aligned crashes the process, so allocate it as here.


# %%
def aligned(shape, boundary=64):
    spare = np.empty(int(np.prod(shape)) * 4 + boundary, np.uint8)
    start = -spare.ctypes.data % boundary
    return spare[start : start + int(np.prod(shape)) * 4].view(np.float32).reshape(shape)


def shared():
    x = aligned((IMAGES, *ROW))
    x[:] = 0.5
    with lab.phase("tf.constant"):
        tensor = tf.constant(x)
    del tensor
    with lab.phase("DLPack"):
        tensor = tf.experimental.dlpack.from_dlpack(x.__dlpack__())
    with lab.phase("an epoch, rewritten"):
        mean_of(tf.data.Dataset.from_tensor_slices(tensor).batch(BATCH))
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    with lab.phase("an epoch as written"):
        mean_of(tf.data.Dataset.from_tensor_slices(tensor).batch(BATCH).with_options(options))
    x[0, 0, 0, 0] = 7
    return float(tensor[0, 0, 0, 0])


sharing = lab.measure(shared, label="shared memory")
for way in sharing.phases:
    print(f"{way.name:22} peak {way.peak_mib:7.1f}, held {way.held_mib:7.1f} MiB beside the array")
print(f"the first pixel, after 7 was written into the array: {sharing.value}")

# %% [markdown]
# **An array inside a function.** Indexing with `tf.gather(x, rows)` in a `tf.function` or in `Dataset.map` looks like
# the index fetch above. But a NumPy array that a traced function meets becomes a *constant of its graph*, byte for
# byte, and graphs are copied often.

# %%
BAKED = 500


def baked():
    x = images(count=BAKED)
    before = lab.reading().process_mib

    @tf.function
    def look(rows):
        return tf.gather(x, rows)

    look(tf.range(BATCH))
    graph = look.get_concrete_function(tf.range(BATCH)).graph.as_graph_def().ByteSize()
    return graph / 2**20, lab.reading().process_mib - before


in_graph = lab.measure(baked, label="array in a graph")
graph_mib, grown = in_graph.value
small = lab.tensor_mib((BAKED, *ROW))
print(f"array {small:.1f} MiB, graph {graph_mib:.1f} MiB, process + {grown:.1f} MiB")
print(f"that is {grown / small:.1f} arrays for one trace")
assert grown > 2 * small

# %% [markdown]
# **A dataset in every epoch.** Two articles build it inside the epoch loop. Nothing leaks. But each epoch copies the
# array anew, rewrites anew, and holds the old dataset until the name is bound to the new one.

# %%
EPOCHS = 4


def epochs():
    x = images()

    def make():
        return tf.data.Dataset.from_tensor_slices(x).shuffle(BUFFER).batch(BATCH)

    dataset = make()
    for _ in range(EPOCHS):
        with lab.phase("built once"):
            mean_of(dataset)
    del dataset
    for _ in range(EPOCHS):
        with lab.phase("rebuilt"):
            dataset = make()
            mean_of(dataset)


passes = lab.measure(epochs, label="epochs").phases
once, rebuilt = passes[:EPOCHS], passes[EPOCHS:]
figure, axes = plt.subplots(figsize=(8, 2.9))
at = range(1, EPOCHS + 1)
for name, parts, colour in zip(("rebuilt", "built once"), (rebuilt, once), lab.COLOURS):
    axes.plot(at, [p.peak_mib for p in parts], "o-", color=colour, label=f"{name}: peak")
    axes.plot(at, [p.held_mib for p in parts], "s:", color=colour, label=f"{name}: held at the end")
axes.set(xlabel="epoch", ylabel="tensor memory (MiB)", xticks=at, ylim=(0, 2.6 * array))
axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()
for parts in (rebuilt, once):
    last, seconds = parts[-1], sum(p.end - p.start for p in parts[1:])
    print(
        f"{last.name:10}  peak {last.peak_mib:6.1f} MiB, held {last.held_mib:6.1f} MiB "
        f"in the last epoch; {seconds:.2f} s for epochs 2 to {EPOCHS}"
    )

# %% [markdown]
# **Decoding inside the generator.** Another article passes the paths as `args` and decodes in Python. Beside it the
# same function under `map`. Processor time is what the work costs, however busy the machine is.


# %%
def decoding(paths):
    def load(path):
        return tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(path), channels=3), [224, 224])

    def decoded(paths):
        for path in paths:
            yield load(path)

    data, spec = tf.data.Dataset, tf.TensorSpec((224, 224, 3), tf.float32)
    in_python = data.from_generator(decoded, args=(paths,), output_signature=spec)
    in_map = data.from_tensor_slices(paths).map(load, num_parallel_calls=tf.data.AUTOTUNE)
    ways, cpu = {"generator": in_python.batch(BATCH), "map": in_map.batch(BATCH)}, []
    for _ in range(4):
        for name, dataset in ways.items():
            began = time.process_time()
            with lab.phase(name):
                for _ in dataset:
                    pass
            cpu.append(time.process_time() - began)
    return cpu


some = (photos * 4)[: lab.choose(SCALE, quick=160, full=1600)]
decoded = lab.measure(decoding, some, label="decoding")
rows = [(p.name, p.peak_mib, s, p.end - p.start) for p, s in zip(decoded.phases, decoded.value)]
columns = ["way", "peak MiB", "s of processor time", "s on the clock"]
cost = pd.DataFrame(rows, columns=columns).groupby("way").min()
cost.round(3)

# %% [markdown]
# **Which dtype, which labels.** NumPy makes float64 unless told otherwise, and TensorFlow keeps it. One-hot labels
# cost a float a class where an integer would do; the loss is the same. (Padding and buckets are in lab 12.)

# %%
CLASSES, LABELS = 1000, 10_000


def choices():
    from keras import losses

    numbers = np.random.default_rng(0).random((256, *ROW))
    labels = np.random.default_rng(0).integers(CLASSES, size=LABELS, dtype=np.int32)
    logits, kept = tf.random.stateless_normal((64, CLASSES), [1, 2]), {}
    # An operation's result is TensorFlow's own memory; a small constant may happen to be NumPy's.
    for name, make in {
        "float64": lambda: tf.constant(numbers) / 2,
        "float32": lambda: tf.constant(numbers.astype(np.float32)) / 2,
        "one-hot": lambda: tf.one_hot(labels, CLASSES),
        "sparse": lambda: tf.constant(labels) % CLASSES,
    }.items():
        with lab.phase(name):
            kept[name] = make()
    one_hot = losses.CategoricalCrossentropy(from_logits=True)(kept["one-hot"][:64], logits)
    sparse = losses.SparseCategoricalCrossentropy(from_logits=True)(kept["sparse"][:64], logits)
    return float(one_hot), float(sparse)


chosen = lab.measure(choices, label="dtypes and labels")
float64, float32, one_hot, sparse = (part.added_mib for part in chosen.phases)
one_hot_loss, sparse_loss = chosen.value
print(f"256 images: float64 {float64:.3f} MiB, float32 {float32:.3f} MiB")
print(f"{LABELS} labels of {CLASSES} classes: one-hot {one_hot:.3f} MiB, sparse {sparse:.3f} MiB")
print(f"loss {one_hot_loss:.6f} one-hot, {sparse_loss:.6f} sparse")

# %% [markdown]
# **`tf.device("/GPU:0")`.** It chooses where operations run. The dataset's copy is made before that, on the host, and
# stays there. Without a GPU TensorFlow quietly takes the CPU; only with soft placement off does it raise.


# %%
def under_device():
    x = images()
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(BATCH).prefetch(tf.data.AUTOTUNE)
    weights = tf.Variable(tf.ones((int(np.prod(ROW)), 8)))

    def epoch():
        for batch in dataset:
            result = tf.reshape(batch, (len(batch), -1)) @ weights
        return result.device

    epoch()
    without = lab.reading().process_mib
    with tf.device("/GPU:0"):
        device = epoch()
    within = lab.reading().process_mib
    tf.config.set_soft_device_placement(False)
    try:
        with tf.device("/GPU:0"):
            raised = epoch() and "no error"
    except (tf.errors.InvalidArgumentError, RuntimeError) as error:
        raised = type(error).__name__
    return without, within, device.rsplit("device:")[-1], raised


placed = lab.measure(under_device, label="tf.device")
without, within, device, raised = placed.value
print(f'host memory: {without:.1f} MiB without, {within:.1f} MiB under tf.device("/GPU:0")')
print(f"the product was computed on {device}; with soft placement off: {raised}")

# %% [markdown]
# **When it flips.** Move the sliders: for which data sets is a whole copy no trouble?


# %%
def feeds_by_size(thousand_images=10, side=64, shuffle_buffer=1000):
    image = lab.tensor_mib((side, side, 3))
    count = 1000 * thousand_images
    whole, one, buffer = count * image, BATCH * image, min(shuffle_buffer, count) * image
    fetch = lab.tensor_mib((count,), "int64") + 2 * one
    print(f"array {whole:10,.1f} MiB, one batch {one:8.2f} MiB (predicted)")
    print(f"  from_tensor_slices: process       {3 * whole:12,.1f} MiB with the array")
    print(f"  generator + shuffle: tensors      {buffer + one:12,.1f} MiB beside the array")
    print(f"  index fetch: indices and a batch  {fetch:12,.1f} MiB")


lab.explore(
    feeds_by_size, thousand_images=(1, 200, 1), side=(8, 256, 8), shuffle_buffer=(100, 10000, 100)
)

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C02",
    "fails",
    array=array,
    batch=batch,
    tensors_peak=slices.peak_mib,
    process_peak=slices.process_peak_mib,
    index_fetch=fetched.peak_mib,
)

# %%
lab.verdict(
    "C03",
    "holds",
    array=array,
    generator=need["generator"],
    with_shuffle=need["generator + shuffle"],
    with_cache=need["generator + cache"],
)

# %%
lab.verdict(
    "C26",
    "holds",
    dtype=float64 / float32,
    labels=one_hot / sparse,
    classes=CLASSES,
    one_hot_loss=one_hot_loss,
    sparse_loss=sparse_loss,
)

# %%
lab.verdict(
    "C30",
    "partly",
    generator_peak=cost.loc["generator", "peak MiB"],
    map_peak=cost.loc["map", "peak MiB"],
    generator_cpu_s=cost.loc["generator", "s of processor time"],
    map_cpu_s=cost.loc["map", "s of processor time"],
    array=array,
    array_as_args=need["generator, args=(x,)"],
)

# %%
lab.verdict(
    "C31",
    "fails",
    without=without,
    within=within,
    array=array,
    computed_on=device,
    without_soft_placement=raised,
)

# %%
lab.verdict(
    "C32",
    "partly",
    held_first=rebuilt[0].held_mib,
    held_last=rebuilt[-1].held_mib,
    rebuilt_peak=rebuilt[-1].peak_mib,
    once_peak=once[-1].peak_mib,
)

# %% [markdown]
# ## Exercises
#
# **1.** Feed images *and labels* by index: `by_index` returns a dataset of (images, labels) in batches of 32, shuffled
# over all of them, each pair once. Labels are small: `tf.gather(labels, rows)` is fine for them.


# %%
def by_index(path, labels):
    # BEGIN SOLUTION
    fetch = rows_of(path)
    indices = tf.data.Dataset.range(len(labels)).shuffle(len(labels)).batch(BATCH)
    return indices.map(lambda rows: (fetch(rows), tf.gather(labels, rows)))
    # END SOLUTION


def check_by_index():
    path = write_file()
    dataset = by_index(path, np.arange(IMAGES))
    if dataset is None:
        return None
    file, seen, right = np.load(path, mmap_mode="r"), [], True
    for pixels, labels in dataset:
        seen += labels.numpy().tolist()
        right &= np.array_equal(pixels[:, 0, 0, 0], file[labels.numpy(), 0, 0, 0])
    once, mixed = sorted(seen) == list(range(IMAGES)), seen != sorted(seen)
    return {"every one once": once, "shuffled": mixed, "right": right}


pairs = lab.run(check_by_index, label="pairs by index", quiet=True)
with lab.exercise(
    1,
    "Start from Dataset.range(len(labels)); the mapped function returns "
    "(rows_of(path)(rows), tf.gather(labels, rows)).",
):
    assert pairs.ok, str(pairs.error)
    assert pairs.value is not None, (
        "by_index() returns nothing yet: return a dataset of (images, labels)."
    )
    assert pairs.value["every one once"], "some images are missing or come twice."
    assert pairs.value["right"], "images and labels do not belong together."
    assert pairs.value["shuffled"], "the order is still that of the file."
    assert pairs.peak_mib < 0.25 * array, (
        f"tensors took {pairs.peak_mib:.0f} MiB: the whole array is in there."
    )

# %% [markdown]
# **2.** Take the array out of the graph. `lookup(x)` returns a `tf.function` that gives the rows asked for. As it
# stands the graph holds the whole array. Keep one tensor outside, which the function refers to.


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


def check_lookup():
    look = lookup(images(count=BAKED))
    rows = look(tf.range(BATCH))
    graph = look.get_concrete_function(tf.range(BATCH)).graph.as_graph_def().ByteSize()
    return rows.shape == (BATCH, *ROW), graph / 2**20


looked = lab.run(check_lookup, label="lookup", quiet=True)
with lab.exercise(2, "Before the tf.function is defined: table = tf.constant(x)."):
    assert looked.ok, str(looked.error)
    assert looked.value[0], "the rows that come back have another shape."
    assert looked.value[1] < 0.1 * small, (
        f"the graph still holds {looked.value[1]:.1f} MiB: the array is a constant in it."
    )
    assert looked.process_peak_mib < in_graph.process_peak_mib, (
        "the process needs as much as before."
    )
