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
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from labsupport import (
    choose, compare, exercise, expect_oom, explore, guess, load_tensorflow, phase, predicted_vs_measured, reading, run,
    tensor_mib, verdict,
)  # fmt: skip
from labsupport.showing.palette import COLOURS

tf = load_tensorflow()  # import tensorflow as tf, without its start-up log

IMAGES = choose(SCALE, quick=2000, full=10000)
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
my_guess = guess("Peak memory of the process, the array included?", GUESS_MIB)

# %%
array = tensor_mib((IMAGES, *ROW))
batch = tensor_mib((BATCH, *ROW))
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
    with phase("make the array"):
        x = images()
    with phase("from_tensor_slices"):
        dataset = tf.data.Dataset.from_tensor_slices(x)
    with phase("one epoch"):
        return mean_of(dataset.shuffle(BUFFER).batch(BATCH))


OUTSIDE = f"{1.5 * array:.0f} MiB"
failure = run(article, outside=OUTSIDE, label=f"article, {OUTSIDE} outside")
if sys.platform == "linux":  # elsewhere a process cannot be limited that sharply
    expect_oom(failure)

# %% [markdown]
# The error comes from NumPy, out of a line that reads like bookkeeping. Without that limit:

# %%
slices = run(article, label="from_tensor_slices")
slices.need();

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

    dataset = tf.data.Dataset.from_generator(one_by_one, output_signature=tf.TensorSpec(ROW, tf.float32))
    return mean_of(dataset.batch(BATCH))


generated = run(generator, label="generator")
generated.need();

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


fetched = run(index_fetch, outside=OUTSIDE, label="index fetch")
fetched.need();

# %% [markdown]
# ## Side by side
#
# Process memory, since half of the story is NumPy's.

# %%
compare(slices, failure, generated, fetched, story="process")

# %%
predicted_vs_measured(
    process_with_from_tensor_slices=(predicted_process, slices.process_peak_mib),
    tensors_while_the_pipeline_is_rewritten=(2 * array, slices.peak_mib),
)

# %%
print(my_guess.against(slices.process_peak_mib))
print(f"Mean pixel: {slices.value:.4f} from slices, {generated.value:.4f} from the generator")
assert abs(slices.value - generated.value) < 0.001
assert abs(fetched.value - 0.5) < 0.01, "the file holds other random images; their mean is a half as well"

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

    spec = tf.TensorSpec(ROW, tf.float32)
    from_generator = tf.data.Dataset.from_generator(one_by_one, output_signature=spec)
    from_file = tf.data.TFRecordDataset(records).map(parse)
    indices = tf.data.Dataset.range(IMAGES).shuffle(IMAGES).batch(BATCH)
    seconds = {}
    for name, make in {
        "index fetch": lambda: indices.map(rows_of(path)),
        "TFRecord": lambda: from_file.batch(BATCH),
        "TFRecord + shuffle": lambda: from_file.shuffle(BUFFER).batch(BATCH),
        "generator": lambda: from_generator.batch(BATCH),
        "generator + shuffle": lambda: from_generator.shuffle(BUFFER).batch(BATCH),
        "generator + cache": lambda: from_generator.cache().batch(BATCH),
        "generator, args=(x,)": lambda: tf.data.Dataset.from_generator(one_by_one, args=(x,), output_signature=spec).batch(BATCH),
        "from_tensor_slices": lambda: tf.data.Dataset.from_tensor_slices(x).shuffle(BUFFER).batch(BATCH),
    }.items():
        gc.collect()  # a generator's dataset refers to itself: only the collector frees it, cache included
        before, began = reading().tensors_mib, time.perf_counter()
        with phase(name):
            mean_of(make())
        seconds[name] = (before, time.perf_counter() - began)
    return seconds


all_feeds = run(feeds, label="feeds", quiet=True).need()
need = {p.name: p.peak / 2**20 - all_feeds.value[p.name][0] for p in all_feeds.phases}
figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained", facecolor="white")
axes.barh(list(need), list(need.values()), color=[COLOURS[0] if size > 0.4 * array else COLOURS[1] for size in need.values()])
axes.axvline(array, color="black", ls=":", label="the array")
axes.bar_label(axes.containers[0], fmt=" {:.1f}")
axes.invert_yaxis()
axes.set(xlabel="tensor memory of one epoch, beside the NumPy array (MiB)", xlim=(0, 2.3 * array))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, loc="upper right")
plt.show()
for name, size in need.items():
    print(f"{name:22} {size:7.1f} MiB   {all_feeds.value[name][1]:5.2f} s an epoch")

# %% [markdown]
# What the long bars are made of: whatever the buffer holds, and about three batches: the elements of the next one, the
# batch into which they are copied, and the one in your hands.

# %%
one_image = tensor_mib(ROW)
predicted_vs_measured(
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
    with phase("tf.constant"):
        tensor = tf.constant(x)
    del tensor
    with phase("DLPack"):
        tensor = tf.experimental.dlpack.from_dlpack(x.__dlpack__())
    with phase("an epoch, rewritten"):
        mean_of(tf.data.Dataset.from_tensor_slices(tensor).batch(BATCH))
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    with phase("an epoch as written"):
        mean_of(tf.data.Dataset.from_tensor_slices(tensor).batch(BATCH).with_options(options))
    x[0, 0, 0, 0] = 7
    return float(tensor[0, 0, 0, 0])


sharing = run(shared, label="shared memory", quiet=True).need()
for p in sharing.phases:
    print(f"{p.name:22} peak {p.peak / 2**20:7.1f} MiB, held {p.held / 2**20:7.1f} MiB beside the array")
print(f"the first pixel, after 7 was written into the array: {sharing.value}")

# %% [markdown]
# **An array inside a function.** Indexing with `tf.gather(x, rows)` in a `tf.function` or in `Dataset.map` looks like
# the index fetch above. But a NumPy array that a traced function meets becomes a *constant of its graph*, byte for
# byte, and graphs are copied often.

# %%
BAKED = 500


def baked():
    x = images(count=BAKED)
    before = reading().process_mib

    @tf.function
    def look(rows):
        return tf.gather(x, rows)

    look(tf.range(BATCH))
    graph = look.get_concrete_function(tf.range(BATCH)).graph.as_graph_def().ByteSize()
    return before, graph / 2**20, reading().process_mib - before


in_graph = run(baked, label="array in a graph", quiet=True).need()
_, graph_mib, grown = in_graph.value
small = tensor_mib((BAKED, *ROW))
print(f"array {small:.1f} MiB, graph {graph_mib:.1f} MiB, process + {grown:.1f} MiB: {grown / small:.1f} arrays for one trace")
assert grown > 2 * small

# %% [markdown]
# **A dataset in every epoch.** Two articles build it inside the epoch loop. Nothing leaks. But each epoch copies the
# array anew, rewrites anew, and holds the old dataset until the name is bound to the new one.

# %%
EPOCHS = 4


def epochs():
    x = images()
    seconds = {}

    def make():
        return tf.data.Dataset.from_tensor_slices(x).shuffle(BUFFER).batch(BATCH)

    def loop(name, dataset=None):
        for epoch in range(EPOCHS):
            began = time.perf_counter()
            with phase(f"{name} {epoch + 1}"):
                if name == "rebuilt":
                    dataset = make()
                mean_of(dataset)
            seconds[f"{name} {epoch + 1}"] = time.perf_counter() - began

    loop("built once", make())
    loop("rebuilt")
    return seconds


by_epoch = run(epochs, label="epochs", quiet=True).need()
peaks = {name: [p.peak / 2**20 for p in by_epoch.phases if p.name.startswith(name)] for name in ("rebuilt", "built once")}
held = {name: [p.held / 2**20 for p in by_epoch.phases if p.name.startswith(name)] for name in peaks}
figure, axes = plt.subplots(figsize=(8, 2.9), layout="constrained", facecolor="white")
for index, name in enumerate(peaks):
    axes.plot(range(1, EPOCHS + 1), peaks[name], "o-", color=COLOURS[index], label=f"{name}: peak")
    axes.plot(range(1, EPOCHS + 1), held[name], "s:", color=COLOURS[index], label=f"{name}: held at the end")
axes.set(xlabel="epoch", ylabel="tensor memory (MiB)", xticks=range(1, EPOCHS + 1), ylim=(0, 2.6 * array))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()
for name in peaks:
    times = [by_epoch.value[f"{name} {epoch + 1}"] for epoch in range(EPOCHS)]
    print(f"{name:10}  peak {peaks[name][-1]:6.1f} MiB, held {held[name][-1]:6.1f} MiB in the last epoch; {sum(times[1:]):.2f} s for epochs 2 to {EPOCHS}")

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

    spec = tf.TensorSpec((224, 224, 3), tf.float32)
    ways = {
        "generator": tf.data.Dataset.from_generator(decoded, args=(paths,), output_signature=spec).batch(BATCH),
        "map": tf.data.Dataset.from_tensor_slices(paths).map(load, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH),
    }
    cost = {name: [] for name in ways}
    for _ in range(4):
        for name, dataset in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            with phase(name):
                for _ in dataset:
                    pass
            cost[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {name: tuple(map(min, zip(*passes))) for name, passes in cost.items()}


decoded = run(decoding, (photos * 4)[: choose(SCALE, quick=160, full=1600)], label="decoding", quiet=True).need()
decode_peak = {name: min(p.peak for p in decoded.phases if p.name == name) / 2**20 for name in decoded.value}
for name, (cpu, wall) in decoded.value.items():
    print(f"{name:10} peak {decode_peak[name]:6.1f} MiB   {cpu:.3f} s of processor time, {wall:.3f} s on the clock")

# %% [markdown]
# **Which dtype, which labels.** NumPy makes float64 unless told otherwise, and TensorFlow keeps it. One-hot labels
# cost a float a class where an integer would do; the loss is the same. (Padding and buckets are in lab 12.)

# %%
CLASSES, LABELS = 1000, 10_000


def choices():
    import keras

    def cost(make):
        # An operation's result is always TensorFlow's own memory; a small constant may happen to be NumPy's.
        before = reading().tensors_mib
        kept = make()
        return reading().tensors_mib - before, kept

    numbers = np.random.default_rng(0).random((256, *ROW))
    labels = np.random.default_rng(0).integers(CLASSES, size=LABELS, dtype=np.int32)
    logits = tf.random.stateless_normal((64, CLASSES), [1, 2])
    sizes = {}
    sizes["float64"], _ = cost(lambda: tf.constant(numbers) / 2)
    sizes["float32"], _ = cost(lambda: tf.constant(numbers.astype(np.float32)) / 2)
    sizes["sparse"], sparse = cost(lambda: tf.constant(labels) % CLASSES)
    sizes["one_hot"], one_hot = cost(lambda: tf.one_hot(labels, CLASSES))
    sizes["sparse_loss"] = float(tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(sparse[:64], logits, from_logits=True)))
    sizes["one_hot_loss"] = float(tf.reduce_mean(keras.losses.categorical_crossentropy(one_hot[:64], logits, from_logits=True)))
    return sizes


chosen = run(choices, label="dtypes and labels", quiet=True).need().value
print(f"256 images: float64 {chosen['float64']:.3f} MiB, float32 {chosen['float32']:.3f} MiB")
print(f"{LABELS} labels of {CLASSES} classes: one-hot {chosen['one_hot']:.3f} MiB, sparse {chosen['sparse']:.3f} MiB")
print(f"loss {chosen['one_hot_loss']:.6f} one-hot, {chosen['sparse_loss']:.6f} sparse")

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
    without = reading().process_mib
    with tf.device("/GPU:0"):
        device = epoch()
    within = reading().process_mib
    tf.config.set_soft_device_placement(False)
    try:
        with tf.device("/GPU:0"):
            raised = epoch() and "no error"
    except (tf.errors.InvalidArgumentError, RuntimeError) as error:
        raised = type(error).__name__
    return without, within, device.rsplit("device:")[-1], raised


placed = run(under_device, label="tf.device", quiet=True).need()
without, within, device, raised = placed.value
print(f"host memory: {without:.1f} MiB without, {within:.1f} MiB under tf.device(\"/GPU:0\"); the product was computed on {device}")
print(f"with soft placement off: {raised}")

# %% [markdown]
# **When it flips.** Move the sliders: for which data sets is a whole copy no trouble?

# %%
def feeds_by_size(thousand_images=10, side=64, shuffle_buffer=1000):
    image = tensor_mib((side, side, 3))
    whole, one = 1000 * thousand_images * image, BATCH * image
    print(f"array {whole:10,.1f} MiB, one batch {one:8.2f} MiB (predicted)")
    print(f"  from_tensor_slices: process       {3 * whole:12,.1f} MiB with the array")
    print(f"  generator + shuffle: tensors      {min(shuffle_buffer, 1000 * thousand_images) * image + one:12,.1f} MiB beside the array")
    print(f"  index fetch: indices and a batch  {thousand_images * 8000 / 2**20 + 2 * one:12,.1f} MiB")


explore(feeds_by_size, thousand_images=(1, 200, 1), side=(8, 256, 8), shuffle_buffer=(100, 10000, 100))

# %% [markdown]
# ## Verdict

# %%
verdict(
    "C02",
    "fails",
    figures={"array": array, "batch": batch, "tensors_peak": slices.peak_mib, "process_peak": slices.process_peak_mib, "index_fetch": fetched.peak_mib},
    tests={
        "tensors stay below ten batches": "tensors_peak < 10 * batch",
        "the process stays below one and a half arrays": "process_peak < 1.5 * array",
    },
    because="The array is copied whole before the first batch, and once more while the pipeline is rewritten.",
    flips="With an array of a few batches; or with indices in place of the rows.",
)

# %%
verdict(
    "C03",
    "holds",
    figures={"array": array, "generator": need["generator"], "with_shuffle": need["generator + shuffle"], "with_cache": need["generator + cache"]},
    tests={"a generator needs less than a quarter of the array": "generator < 0.25 * array"},
    because="Only the batch being filled is held as tensors.",
    flips="A buffer behind it adds its elements: shuffle its whole buffer, cache the whole data set; args copy the array.",
)

# %%
ratios = {"dtype": chosen["float64"] / chosen["float32"], "labels": chosen["one_hot"] / chosen["sparse"], "classes": CLASSES}
verdict(
    "C26",
    "holds",
    figures={**ratios, "one_hot_loss": chosen["one_hot_loss"], "sparse_loss": chosen["sparse_loss"]},
    tests={
        "float32 halves what float64 takes": "1.9 < dtype < 2.1",
        "sparse labels save a factor of the number of classes": "0.9 * classes < labels < 1.1 * classes",
        "the loss does not change": "-0.0001 < one_hot_loss - sparse_loss < 0.0001",
    },
    because="Bytes are the product of the shape times the size of one element; nothing else enters.",
    flips="Labels weigh little beside images; there the dtype of the images decides.",
    unit="ratios",
)

# %%
verdict(
    "C30",
    "partly",
    figures={
        "generator_peak": decode_peak["generator"], "map_peak": decode_peak["map"],
        "generator_cpu_s": decoded.value["generator"][0], "map_cpu_s": decoded.value["map"][0],
        "array": array, "array_as_args": need["generator, args=(x,)"],
    },
    tests={
        "decoding in the generator needs no more memory": "generator_peak < 1.3 * map_peak",
        "it costs no more processor time": "generator_cpu_s < 1.2 * map_cpu_s",
        "what it gets through args is not copied": "array_as_args < 0.5 * array",
    },
    because="Memory is one batch either way; each element passes through Python one at a time, and args become tensors.",
    flips="When decoding one element takes far longer than the way through Python, and only one core is there.",
    unit="MiB, s",
)  # fmt: skip

# %%
verdict(
    "C31",
    "fails",
    figures={"without": without, "within": within, "array": array, "computed_on": device, "without_soft_placement": raised},
    tests={"host memory falls under tf.device": "within < without - 0.25 * array"},
    because="The dataset's tensor lives on the host, where it was made; the scope moves operations, not the data behind them.",
    flips="Not by the scope around the model; the GPU's own memory can be measured only with a GPU.",
)

# %%
verdict(
    "C32",
    "partly",
    figures={
        "held_first": held["rebuilt"][0], "held_last": held["rebuilt"][-1],
        "rebuilt_peak": peaks["rebuilt"][-1], "once_peak": peaks["built once"][-1],
    },
    tests={
        "memory does not grow over the epochs": "held_last < 1.1 * held_first",
        "an epoch needs no more than with a dataset built once": "rebuilt_peak < 1.2 * once_peak",
    },
    because="Each epoch copies the array and rewrites the pipeline again; the old copy goes only when the name is bound anew.",
    flips="When the dataset is made of paths or indices, building it costs next to nothing.",
)  # fmt: skip

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
    seen, right = [], True
    for pixels, labels in dataset:
        seen += labels.numpy().tolist()
        right &= bool(np.array_equal(pixels[:, 0, 0, 0], np.load(path, mmap_mode="r")[labels.numpy(), 0, 0, 0]))
    return {"every one once": sorted(seen) == list(range(IMAGES)), "shuffled": seen != sorted(seen), "right": right}


pairs = run(check_by_index, label="pairs by index", quiet=True)
with exercise(1, "Start from Dataset.range(len(labels)); the mapped function returns (rows_of(path)(rows), tf.gather(labels, rows))."):
    assert pairs.ok, str(pairs.error)
    assert pairs.value is not None, "by_index() returns nothing yet: return a dataset of (images, labels)."
    assert pairs.value["every one once"], "some images are missing or come twice."
    assert pairs.value["right"], "images and labels do not belong together."
    assert pairs.value["shuffled"], "the order is still that of the file."
    assert pairs.peak_mib < 0.25 * array, f"tensors took {pairs.peak_mib:.0f} MiB: the whole array is in there."

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
    return rows.shape == (BATCH, *ROW), look.get_concrete_function(tf.range(BATCH)).graph.as_graph_def().ByteSize() / 2**20


looked = run(check_lookup, label="lookup", quiet=True)
with exercise(2, "Before the tf.function is defined: table = tf.constant(x)."):
    assert looked.ok, str(looked.error)
    assert looked.value[0], "the rows that come back have another shape."
    assert looked.value[1] < 0.1 * small, f"the graph still holds {looked.value[1]:.1f} MiB: the array is a constant in it."
    assert looked.process_peak_mib < in_graph.process_peak_mib, "the process needs as much as before."
