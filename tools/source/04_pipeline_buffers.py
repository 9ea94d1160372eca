# %% [markdown]
# # 04 · Pipeline buffers: shuffle, cache, prefetch, and their order
#
# **Symptom:** *"Filling up shuffle buffer (this may take a while)"* and then *"kernel died"* or *"OOM"*, before the
# first training step, from a pipeline that was meant to save memory.
#
# **Afterwards you can** read a `tf.data` pipeline line by line and say how many bytes each stage holds, and put the
# stages into an order that holds few.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 25 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C04 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes four times as many images
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import gc
import os
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import labsupport as lab
from labsupport.graders import pipeline_buffers as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log

IMAGES = lab.choose(SCALE, quick=800, full=3200)
BUDGET = lab.choose(SCALE, quick="96 MiB", full="384 MiB")
SIZE, BATCH, EPOCHS = 128, 16, 8
photos = sorted(str(path.resolve()) for path in Path("../data/photos").glob("*.jpg"))
paths = (photos * -(-IMAGES // len(photos)))[:IMAGES]
on_disk = sum(Path(path).stat().st_size for path in paths) / 2**20
print(f"{len(paths)} JPEG files, {on_disk:.1f} MiB on disk")

# %% [markdown]
# ## Predict
#
# The pipeline decodes the files to 128 × 128 float32 images, shuffles them well, with a buffer as large as the data
# set, and batches them by 16. How much tensor memory does it hold at its worst moment?

# %%
my_guess = lab.guess("Peak tensor memory of decode, shuffle all, batch?", GUESS_MIB)

# %% [markdown]
# A stage holds *elements*. What an element weighs depends on where the stage stands: a path weighs next to nothing, a
# decoded image height × width × channels × 4 bytes, a batch 16 times that. Behind every pipeline a few batches are
# alive: the elements collected for the next batch, the batch they are copied into, one that `tf.data` may compute ahead
# on its own, and the one in your hands. An element is in one place at a time: a buffer that holds them all leaves
# nothing to collect.


# %%
def resident(stages, count):
    """MiB that each stage of a pipeline holds when its buffers are full, by its name.

    stages: (name, number) in order. "decode": MiB of one decoded element. "shuffle", "prefetch",
    "batch": elements. "interleave": elements buffered in all open inner pipelines together.
    "cache": None. count: elements in all.
    """
    parts, size, free = {}, 0.0, count  # free: elements of this size that no stage holds yet
    for name, number in stages:
        if name == "decode":
            size, free = number, count
        elif name == "batch":
            held = min(number, free) + min(number, count)  # collected, copied
            parts[name] = parts.get(name, 0.0) + held * size
            size, count = min(number, count) * size, -(-count // number)
            free = count - 1
        else:
            held = free if name == "cache" else min(number, free)
            parts[name] = parts.get(name, 0.0) + held * size
            free -= held
    parts["computed ahead"] = min(1, free) * size
    parts["in your hands"] = min(1, max(free - 1, 0)) * size
    return parts


one_image = lab.tensor_mib((SIZE, SIZE, 3))
decoded_first = resident([("decode", one_image), ("shuffle", IMAGES), ("batch", BATCH)], IMAGES)
paths_first = resident([("shuffle", IMAGES), ("decode", one_image), ("batch", BATCH)], IMAGES)
predicted_failure, predicted_fix = sum(decoded_first.values()), sum(paths_first.values())
print(f"one image: {SIZE} × {SIZE} × 3 × 4 B = {one_image:.4f} MiB")
for order, parts in {"decode, shuffle": decoded_first, "shuffle, decode": paths_first}.items():
    sizes = {name: round(size, 1) for name, size in parts.items()}
    print(f"{order}: {sizes} = {sum(parts.values()):.1f} MiB")

# %% [markdown]
# ## Failure
#
# The published form: map, then a shuffle buffer "at least as large as the data set, for a good shuffle".


# %%
def decode(data):
    return tf.image.resize(tf.io.decode_jpeg(data, channels=3), [SIZE, SIZE])


def load(path):
    return decode(tf.io.read_file(path))


def epochs_of(dataset):
    iterator = iter(dataset)
    # After an error, letting it go would wait for its second thread: ten more seconds.
    epochs_of.kept = iterator
    with lab.phase("wait for the first batch"):
        means = [float(tf.reduce_mean(next(iterator)))]
    with lab.phase("the rest of all epochs"):
        means += [float(tf.reduce_mean(batch)) for batch in iterator]
        for _ in range(EPOCHS - 1):
            means += [float(tf.reduce_mean(batch)) for batch in dataset]
    return sum(means) / len(means)


def decode_then_shuffle():
    dataset = tf.data.Dataset.from_tensor_slices(paths)
    return epochs_of(dataset.map(load).shuffle(IMAGES).batch(BATCH))


failure = lab.run(decode_then_shuffle, budget=BUDGET, label="decode, then shuffle")
lab.expect_oom(failure)
assert [phase.name for phase in failure.phases] == ["wait for the first batch"]

# %% [markdown]
# It dies in the first phase, waiting for the first batch. No training step has run.
#
# ## Advice, tested
#
# Three things are said to help with memory: `prefetch(AUTOTUNE)`, `num_parallel_calls=AUTOTUNE` and `cache()`. Here each
# is added to the same plain pipeline, for two epochs: where files arrive slowly, as from a busy disk, and where the
# training step is slow. There is a control, too: before it runs a pipeline, `tf.data` *rewrites* it, and by default it
# makes `map` parallel and puts a prefetch at the end (the error's last line, under "Whole traceback" above, names both).
# The control runs without that.

# %%
AUTOTUNE = tf.data.AUTOTUNE
COUNT, REPEATS = 64, 3
WHERE = {
    "slow files": {"file_seconds": 0.002},
    "slow step": {"step_seconds": 0.02},
    "slow step, not rewritten": {"step_seconds": 0.02, "rewritten": False},
}


def said_to_help(file_seconds=0.0, step_seconds=0.0, rewritten=True):
    def arrive(path):
        time.sleep(file_seconds)
        return path

    def from_busy_disk(path):
        return load(tf.ensure_shape(tf.numpy_function(arrive, [path], tf.string), ()))

    def images(calls=None):
        function = from_busy_disk if file_seconds else load
        dataset = tf.data.Dataset.from_tensor_slices(paths[:COUNT])
        return dataset.map(function, num_parallel_calls=calls)

    ways = {
        "plain": lambda: images().batch(BATCH),
        "prefetch": lambda: images().batch(BATCH).prefetch(AUTOTUNE),
        "parallel": lambda: images(AUTOTUNE).batch(BATCH),
        "cache": lambda: images().cache().batch(BATCH),
        "all three": lambda: images(AUTOTUNE).cache().batch(BATCH).prefetch(AUTOTUNE),
    }
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = rewritten

    def epoch(dataset):
        start = time.perf_counter()
        for _ in dataset:
            time.sleep(step_seconds)
        return time.perf_counter() - start

    epoch(images().batch(BATCH))  # the first decoding of a process is slow
    gc.freeze()  # the collections need not look at the libraries' objects
    fastest = []
    for _ in range(REPEATS):
        for name, make in ways.items():
            gc.collect()
            dataset = make().with_options(options)
            with lab.phase(name):
                fastest.append(min(epoch(dataset), epoch(dataset)))
            del dataset
    return fastest


rows = []
for where, options in WHERE.items():
    arm = lab.measure(lambda options=options: said_to_help(**options), label=where)
    rows += [(where, way.name, way.rise_mib, time) for way, time in zip(arm.phases, arm.value)]
advice = pd.DataFrame(rows, columns=["where", "way", "peak MiB", "epoch s"])
by_way = advice.groupby(["where", "way"], sort=False)
spread = by_way["peak MiB"].agg(["median", "min", "max"])
spread = spread.apply("{0[median]:.1f} ({0[min]:.1f} to {0[max]:.1f}) MiB, ".format, axis=1)
shortest = by_way["epoch s"].min()
(spread + shortest.map("{:.2f} s".format)).unstack("where", sort=False)

# %%
middle = by_way["peak MiB"].median().unstack("where", sort=False)
more = ((middle - middle.loc["plain"]).round(1) + 0.0).map("{:+.1f}".format)
seconds = shortest.map("{:.2f}".format)
control = "slow step, not rewritten"
lab.note(
    f"A cell tells the median peak of {REPEATS} tries, their range, and the fastest epoch. Against "
    "the plain pipeline, in MiB, column by column: "
    f"`prefetch` {', '.join(more.loc['prefetch'])}; parallel calls "
    f"{', '.join(more.loc['parallel'])}; `cache()` {', '.join(more.loc['cache'])}. A batch has "
    f"{BATCH * one_image:.1f}, all {COUNT} images have {COUNT * one_image:.1f}. What they change "
    f"is time: with slow files an epoch took {seconds['slow files', 'plain']} s plain, "
    f"{seconds['slow files', 'parallel']} with parallel calls and {seconds['slow files', 'cache']} "
    f"from the cache. `prefetch` by itself is seen in the control ({seconds[control, 'plain']} s "
    f"without, {seconds[control, 'prefetch']} with it); elsewhere `tf.data` had put one there."
)

# %% [markdown]
# None of them lets an element go earlier. What does help is to hold smaller elements.
#
# ## Fix
#
# Change places: shuffle the paths, then decode. The order that comes out is just as random.


# %%
def shuffle_then_decode():
    dataset = tf.data.Dataset.from_tensor_slices(paths)
    return epochs_of(dataset.shuffle(IMAGES).map(load).batch(BATCH))


fix = lab.run(shuffle_then_decode, budget=BUDGET, label="shuffle, then decode")
lab.expect_finished(fix)

# %% [markdown]
# What the first order would have needed:

# %%
unbounded = lab.run(decode_then_shuffle, label="decode, then shuffle; no tight budget")
lab.expect_finished(unbounded)

# %% [markdown]
# ## Side by side

# %%
lab.compare(unbounded, failure, fix)

# %% [markdown]
# Who held it? Both run once more while TensorFlow records every allocation. The number before a tensor says how many
# of them are alive: all the images that the buffer had taken up; with the order changed, the few batches that are on
# their way.

# %%
lab.take_apart(failure, fix)

# %%
lab.predicted_vs_measured(
    decode_then_shuffle=(predicted_failure, unbounded.peak_mib),
    shuffle_then_decode=(predicted_fix, fix.peak_mib),
)

# %% [markdown]
# `resident` tells what a pipeline *can* hold, with every buffer full. Whether the batch computed ahead is there at the
# worst moment is a matter of timing.

# %%
print(my_guess.against(unbounded.peak_mib))
print(f"Both orders read the same images: mean {unbounded.value:.3f} and {fix.value:.3f}")
assert abs(unbounded.value - fix.value) < 0.01 * unbounded.value

# %% [markdown]
# ## Explain
#
# **Every stage, measured.** A training step that takes a while lets the buffers fill, so the first batch below is
# followed by a pause. The diamonds are what `resident` predicts.

# %%
MANY, PAUSE = 256, 0.3
some = paths[:MANY]
D, S, B = ("decode", one_image), ("shuffle", 128), ("batch", BATCH)


def source():
    return tf.data.Dataset.from_tensor_slices(some)


def decoded():
    return source().map(load)


def batches():
    return decoded().batch(BATCH)


def from_folders(open_at_once):
    """Sixteen inner pipelines of sixteen images, each with a buffer of eight of its own."""

    def folder(number):
        return source().skip(16 * number).take(16).map(load).prefetch(8)

    numbers = tf.data.Dataset.range(16)
    images = numbers.interleave(folder, cycle_length=open_at_once, block_length=1)
    return images.batch(BATCH)


def windows(keys):
    """Groups of eight by key: a window stays open until it is full or the data ends."""

    def eight(key, window):
        return window.batch(8)

    grouped = decoded().enumerate().group_by_window(lambda i, image: i % keys, eight, window_size=8)
    return grouped.map(lambda i, image: image).unbatch().batch(BATCH)


PIPELINES = {
    "batch(16)": (batches, [D, B]),
    "shuffle(128) before decode": (lambda: source().shuffle(128).map(load).batch(BATCH), [S, D, B]),
    "shuffle(128) after decode": (lambda: decoded().shuffle(128).batch(BATCH), [D, S, B]),
    "shuffle(128) after batch": (lambda: batches().shuffle(128), [D, B, S]),
    "prefetch(8) after batch": (lambda: batches().prefetch(8), [D, B, ("prefetch", 8)]),
    "cache before decode": (
        lambda: source().map(tf.io.read_file).cache().map(decode).batch(BATCH),
        [("cache", None), D, B],
    ),
    "cache after decode": (lambda: decoded().cache().batch(BATCH), [D, ("cache", None), B]),
    "cache(file) after decode": (
        lambda: decoded().cache(os.path.join(tempfile.mkdtemp(), "cache")).batch(BATCH),
        [D, B],
    ),
    "batch twice": (lambda: batches().batch(BATCH), [D, B, B]),
    "interleave 2 at once": (lambda: from_folders(2), [D, ("interleave", 2 * 8), B]),
    "interleave 16 at once": (lambda: from_folders(16), [D, ("interleave", 16 * 8), B]),
    "group_by_window, 8 keys": (lambda: windows(8), None),
    "group_by_window, all keys new": (lambda: windows(MANY), None),
}


def each_stage(pipelines):
    def epoch(make):
        for number, _ in enumerate(make()):
            time.sleep(0 if number else PAUSE)

    # The first decoding of a process is slow; it would keep the first buffers empty.
    epoch(pipelines["batch(16)"])
    gc.freeze()  # the collections need not look at the libraries' objects
    for name, make in pipelines.items():
        gc.collect()
        with lab.phase(name):
            epoch(make)


makers = {name: make for name, (make, _) in PIPELINES.items()}
stages = lab.measure(each_stage, makers, label="every stage").phases
peaks = pd.Series({stage.name: stage.rise_mib for stage in stages}, name="measured")
holds = {name: resident(parts, MANY) for name, (_, parts) in PIPELINES.items() if parts}
predicted = pd.DataFrame(holds).sum()
axes = peaks.plot.barh(
    figsize=(10, 4.6), xlabel=f"peak tensor memory of one epoch over {MANY} images (MiB)"
)
axes.plot(predicted, peaks.index.get_indexer(predicted.index), "kD", label="predicted")
for place, (name, peak) in enumerate(peaks.items()):
    axes.text(max(peak, predicted.get(name, 0)) + 1.5, place, f"{peak:.1f}", va="center")
axes.axvline(MANY * one_image, color=lab.COLOURS[-1], ls=":", label="the decoded data set")
axes.margins(x=0.12)
axes.invert_yaxis()
lab.legend_below(axes)
plt.show()

# %%
off = (predicted - peaks).dropna()
lab.note(
    f"Of the diamonds, the one of `{off.abs().idxmax()}` is the farthest from its bar's end: "
    f"{off.abs().max():.1f} MiB, where a batch, such as the one computed ahead, has "
    f"{BATCH * one_image:.1f}."
)

# %% [markdown]
# * **shuffle** holds buffer × element. The same 128 are nothing before the decoder, 128 images behind it, and 128
#   *batches* behind `batch`, here the whole data set.
# * **cache** holds every element that passes. Before the decoder that is the JPEG files' bytes; these are strings,
#   which the allocator does not count, but the disk told their size above. With a file it holds no image.
# * **prefetch** behind `batch` holds finished batches, so its number counts batches.
# * **batch twice** makes batches of batches, here one of the whole data set, collected and copied. Look at
#   `dataset.element_spec` when a shape has one dimension too many.
# * **interleave** multiplies whatever its inner pipelines buffer by the number that is open at once.
# * **group_by_window** keeps a window open for each key it has met. Keys without an end hold the whole data set.
#
# **When it flips.** A pipeline over 10,000 images by sliders; the arithmetic is `resident`. With which `shuffle` does each
# place of the buffer go beyond your memory?


# %%
PLACES = ["paths", "decoded images", "batches"]


def calculator(shuffle_at="decoded images", shuffle=1000, batch=32, prefetch=2, side=224):
    image = lab.tensor_mib((side, side, 3))
    pipeline = [("decode", image), ("batch", batch), ("prefetch", prefetch)]
    pipeline.insert(PLACES.index(shuffle_at), ("shuffle", shuffle))
    parts = resident(pipeline, 10000)
    for name, size in {**parts, "in all": sum(parts.values())}.items():
        print(f"{name:16} {size:12,.1f} MiB (predicted)")


sizes = {"batch": (1, 256, 1), "prefetch": (0, 16, 1), "side": (32, 512, 32)}
lab.explore(calculator, shuffle_at=PLACES, shuffle=(0, 10000, 100), **sizes)

# %% [markdown]
# **Who owns a buffer?** `del dataset` frees nothing while an iterator is alive, and a second iterator fills a second
# shuffle buffer. A cache is another matter.


# %%
def owners():
    seen = {}

    def see(moment):
        gc.collect()
        seen[moment] = lab.reading().tensors_mib

    dataset = decoded().shuffle(128).batch(BATCH)
    iterator = iter(dataset)
    next(iterator)
    see("shuffle: after the first batch")
    second = iter(dataset)
    next(second)
    see("shuffle: with a second iterator")
    del dataset, second
    see("shuffle: dataset and second deleted")
    del iterator
    see("shuffle: iterator deleted")
    cached = decoded().take(128).cache().batch(BATCH)
    for _ in cached:
        pass
    del _
    see("cache: after an epoch, no iterator")
    del cached
    see("cache: dataset deleted")
    return seen


owned = pd.Series(lab.measure(owners, label="who owns the buffer").value, name="MiB")
owned.round(1).to_frame()

# %%
shuffled, _, no_dataset, no_iterator, cached, deleted = owned
assert no_iterator < 0.2 * shuffled and 0.8 * shuffled < no_dataset, "whose is the buffer?"
lab.note(
    f"The shuffle buffer is the iterator's: {no_dataset:.0f} MiB stayed without a dataset, "
    f"{no_iterator:.0f} without an iterator. The cache is the dataset's, which is what lets the "
    f"next epoch find it: {cached:.0f} MiB without any iterator, {deleted:.0f} without the dataset."
)

# %% [markdown]
# ## Verdict

# %%
figures = {
    f"{short}_{way.split()[0]}": middle.loc[way, where]
    for short, where in {"files": "slow files", "step": "slow step"}.items()
    for way in middle.index
}
lab.verdict("C04", "fails", **figures)

# %% [markdown]
# ## Exercises
#
# **1.** This pipeline works and needs far too much. Put it in order: the images of *all* files mixed, anew in each epoch,
# batches of 16 as before, and a small fraction of the memory.


# %%
def tidy(paths):
    dataset = tf.data.Dataset.from_tensor_slices(paths)
    dataset = dataset.map(load).batch(BATCH).shuffle(64).prefetch(16)
    # BEGIN SOLUTION
    dataset = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths))
    dataset = dataset.map(load).batch(BATCH).prefetch(2)
    # END SOLUTION
    return dataset


# %%
check.tidy(tidy, one_image, BATCH)


# %% tags=["right"]
def tidy(paths):
    order = tf.data.Dataset.range(len(paths)).shuffle(1000)
    images = order.map(lambda place: load(tf.gather(paths, place)), num_parallel_calls=2)
    return images.batch(BATCH)


# %% tags=["right"]
def tidy(paths):
    files = tf.data.Dataset.from_tensor_slices(paths).map(tf.io.read_file).cache()
    return files.shuffle(len(paths)).map(decode).batch(BATCH).prefetch(1)


# %% tags=["right"]
def tidy(paths):
    # list_files shuffles all names, anew in each epoch
    return tf.data.Dataset.list_files(paths).map(load).batch(BATCH)


# %% tags=["wrong"]
# says: more than the 250 images
def tidy(paths):
    files = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths))
    return files.map(load).batch(BATCH).repeat().prefetch(2)


# %% tags=["wrong"]
# says: gives 240 images
def tidy(paths):
    files = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths))
    return files.map(load).batch(BATCH, drop_remainder=True).prefetch(2)


# %% tags=["wrong"]
# says: shape
def tidy(paths):
    def small(path):
        return tf.io.decode_jpeg(tf.io.read_file(path), channels=3)

    dataset = tf.data.Dataset.from_tensor_slices(paths).map(small)
    return dataset.shuffle(len(paths)).batch(BATCH).prefetch(2)


# %% tags=["wrong"]
# says: buffer .* holds about 2 images
def tidy(paths):
    dataset = tf.data.Dataset.from_tensor_slices(paths).shuffle(2)
    return dataset.map(load).batch(BATCH).prefetch(2)


# %% tags=["wrong"]
# says: which stage holds decoded images
def tidy(paths):
    dataset = tf.data.Dataset.from_tensor_slices(paths).map(load)
    return dataset.shuffle(len(paths)).batch(BATCH).prefetch(2)


# %% tags=["wrong"]
# says: which stage holds decoded images
def tidy(paths):
    dataset = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths))
    return dataset.map(load).batch(BATCH).prefetch(16)


# %% tags=["wrong"]
# says: neighbours
def tidy(paths):
    dataset = tf.data.Dataset.from_tensor_slices(paths).batch(BATCH).shuffle(64)
    return dataset.map(lambda some: tf.map_fn(load, some, tf.float32)).prefetch(2)


# %% tags=["wrong"]
# says: same order
def tidy(paths):
    files = tf.data.Dataset.from_tensor_slices(paths)
    files = files.shuffle(len(paths), reshuffle_each_iteration=False)
    return files.map(load).batch(BATCH)


# %% [markdown]
# **2.** Sometimes only decoded images can be shuffled. Then size the buffer by bytes: return the largest number of
# images for `shuffle` between `map` and `batch` with which the peak stays within `budget_mib`. It is tried with two
# sizes of images and batches, one batch computed ahead (`prefetch(1)`) and a pause after each.


# %%
def largest_buffer(budget_mib, image_mib, batch):
    # BEGIN SOLUTION
    batches = 4 * batch * image_mib  # collected, copied, computed ahead, in your hands
    return int((budget_mib - batches) / image_mib)
    # END SOLUTION


# %%
check.largest_buffer(largest_buffer)


# %% tags=["right"]
def largest_buffer(budget_mib, image_mib, batch):
    count = 1
    stages = [("decode", image_mib), ("shuffle", count), ("batch", batch)]
    while sum(resident(stages, 10**6).values()) <= budget_mib:
        count += 1
        stages[1] = ("shuffle", count)
    return count - 1


# %% tags=["wrong"]
# says: what about the batches
def largest_buffer(budget_mib, image_mib, batch):
    return int(budget_mib / image_mib)


# %% tags=["wrong"]
# says: which batches
def largest_buffer(budget_mib, image_mib, batch):
    return int(budget_mib / image_mib) - 2 * batch


# %% tags=["wrong"]
# says: would still fit
def largest_buffer(budget_mib, image_mib, batch):
    return int(0.5 * budget_mib / image_mib)


# %% tags=["wrong"]
# says: within 20 MiB.* would still fit
def largest_buffer(budget_mib, image_mib, batch):
    return 192
