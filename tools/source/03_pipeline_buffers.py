# %% [markdown]
# # 03 · Pipeline buffers: shuffle, cache, prefetch, and their order
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

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log

IMAGES = lab.choose(SCALE, quick=800, full=3200)
BUDGET = lab.choose(SCALE, quick="96 MiB", full="384 MiB")
SIZE, BATCH = 128, 16
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


def first_step_and_epoch(dataset):
    total = count = 0.0
    iterator = iter(dataset)
    # After an error, letting it go would wait for its second thread: ten more seconds.
    first_step_and_epoch.kept = iterator
    with lab.phase("wait for the first batch"):
        total, count = float(tf.reduce_mean(next(iterator))), 1
    with lab.phase("the rest of the epoch"):
        for batch in iterator:
            total, count = total + float(tf.reduce_mean(batch)), count + 1
    return total / count


def decode_then_shuffle():
    dataset = tf.data.Dataset.from_tensor_slices(paths)
    return first_step_and_epoch(dataset.map(load).shuffle(IMAGES).batch(BATCH))


failure = lab.run(decode_then_shuffle, budget=BUDGET, label="decode, then shuffle")
lab.expect_oom(failure)

# %% [markdown]
# It dies in the first phase, waiting for the first batch. No training step has run.
#
# ## Fix
#
# Change places: shuffle the paths, then decode. The order that comes out is just as random.


# %%
def shuffle_then_decode():
    dataset = tf.data.Dataset.from_tensor_slices(paths)
    return first_step_and_epoch(dataset.shuffle(IMAGES).map(load).batch(BATCH))


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

# %%
lab.predicted_vs_measured(
    decode_then_shuffle=(predicted_failure, unbounded.peak_mib),
    shuffle_then_decode=(predicted_fix, fix.peak_mib),
)

# %%
print(my_guess.against(unbounded.peak_mib))
print(f"Both orders read the same images: mean {unbounded.value:.3f} and {fix.value:.3f}")
assert abs(unbounded.value - fix.value) < 0.01 * unbounded.value

# %% [markdown]
# ## Explain
#
# **Every stage, measured.** A training step that takes a while lets the buffers fill, so each batch below is followed
# by a pause. The marks are what `resident` predicts.

# %%
COUNT, STEP = 256, 0.01
some = paths[:COUNT]
D, S, B = ("decode", one_image), ("shuffle", 128), ("batch", BATCH)
AUTOTUNE = tf.data.AUTOTUNE


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
    "prefetch(2) after batch": (lambda: batches().prefetch(2), [D, B, ("prefetch", 2)]),
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
    "group_by_window, all keys new": (lambda: windows(COUNT), None),
}


def each_stage(pipelines):
    def epoch(make):
        for _ in make():
            time.sleep(STEP)

    # The first decoding of a process is slow; it would keep the first buffers empty.
    epoch(pipelines["batch(16)"])
    for name, make in pipelines.items():
        gc.collect()
        with lab.phase(name):
            epoch(make)


makers = {name: make for name, (make, _) in PIPELINES.items()}
stages = lab.measure(each_stage, makers, label="every stage").phases
peaks = pd.Series({stage.name: stage.rise_mib for stage in stages}, name="measured")
holds = {name: resident(parts, COUNT) for name, (_, parts) in PIPELINES.items() if parts}
predicted = pd.DataFrame(holds).sum()
axes = peaks.plot.barh(
    figsize=(10, 4.6), xlabel=f"peak tensor memory of one epoch over {COUNT} images (MiB)"
)
axes.bar_label(axes.containers[0], fmt="{:.1f}", padding=20)
axes.plot(predicted, peaks.index.get_indexer(predicted.index), "kD", label="predicted")
axes.axvline(COUNT * one_image, color="black", ls=":", label="the decoded data set")
axes.margins(x=0.2)
axes.invert_yaxis()
axes.legend(loc="upper right")
plt.show()

# %%
lab.predicted_vs_measured(**{name: (predicted[name], peaks[name]) for name in predicted.index})

# %% [markdown]
# `resident` tells what a pipeline can hold. Most lie within one batch of that: whether the batch computed ahead is
# there at the worst moment is a matter of timing.
#
# * **shuffle** holds buffer × element. The same 128 are nothing before the decoder, 128 images behind it, and 128
#   *batches* behind `batch`, here the whole data set.
# * **cache** holds every element that passes. Before the decoder that is the JPEG files' bytes; these are strings,
#   which the allocator does not count, but the disk told their size above. With a file it holds nothing.
# * **prefetch** holds finished batches, so its number counts batches: 2 are enough to keep a device busy.
# * **batch twice** makes batches of batches. Look at `dataset.element_spec` when a shape has one dimension too many.
# * **interleave** multiplies whatever its inner pipelines buffer by the number that is open at once.
# * **group_by_window** keeps a window open for each key it has met. Keys without an end hold the whole data set.
#
# **When it flips.** A pipeline by sliders; the arithmetic is `resident`, in predicted MiB. Where does each place of the
# shuffle buffer stop to fit?


# %%
def calculator(
    shuffle_at="decoded images",
    shuffle=1000,
    cache="none",
    batch=32,
    prefetch=2,
    side=224,
    thousand_images=10,
):
    image = lab.tensor_mib((side, side, 3))
    pipeline = [("decode", image), ("batch", batch), ("prefetch", prefetch)]
    if cache == "decoded images":
        pipeline.insert(1, ("cache", None))
    place = pipeline.index(("batch", batch))
    at = {"paths": 0, "decoded images": place, "batches": place + 1}
    pipeline.insert(at[shuffle_at], ("shuffle", shuffle))
    parts = resident(pipeline, 1000 * thousand_images)
    for name, size in parts.items():
        print(f"{name:16} {size:12,.1f} MiB")
    print(f"{'in all':16} {sum(parts.values()):12,.1f} MiB (predicted)")


lab.explore(
    calculator,
    shuffle_at=["paths", "decoded images", "batches"],
    shuffle=(0, 10000, 100),
    cache=["none", "decoded images"],
    batch=(1, 256, 1),
    prefetch=(0, 16, 1),
    side=(32, 512, 32),
    thousand_images=(1, 200, 1),
)

# %% [markdown]
# **The three that are said to help.** `prefetch(AUTOTUNE)`, `num_parallel_calls=AUTOTUNE` and `cache()`, each added to
# the same plain pipeline, for two epochs. Time is what they are for, so each file takes two milliseconds to arrive, as
# from a busy disk.


# %%
def said_to_help():
    def arrive(path):
        time.sleep(0.002)
        return path

    def slow(path):
        return load(tf.ensure_shape(tf.numpy_function(arrive, [path], tf.string), ()))

    def images(calls=None):
        return source().map(slow, num_parallel_calls=calls)

    ways = {
        "plain": lambda: images().batch(BATCH),
        "prefetch(AUTOTUNE)": lambda: images().batch(BATCH).prefetch(AUTOTUNE),
        "parallel map(AUTOTUNE)": lambda: images(AUTOTUNE).batch(BATCH),
        "cache()": lambda: images().cache().batch(BATCH),
        "all three": lambda: images(AUTOTUNE).cache().batch(BATCH).prefetch(AUTOTUNE),
    }

    def two_epochs(name, dataset):
        with lab.phase(name):
            for _ in range(2):
                with lab.phase("epoch"):
                    for _ in dataset:
                        time.sleep(STEP)

    for name, make in ways.items():
        gc.collect()
        two_epochs(name, make())


helpers = lab.measure(said_to_help, label="said to help").phases
rows = {}
for first, second, both in zip(helpers[::3], helpers[1::3], helpers[2::3]):
    fastest = min(first.end - first.start, second.end - second.start)
    rows[both.name] = [both.rise_mib, both.added_mib, fastest]
columns = ["peak MiB", "held after an epoch MiB", "fastest epoch s"]
table = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
table.round(2)

# %% [markdown]
# **Who owns a buffer?** The iterator, not the dataset. `del dataset` frees nothing while an iterator is alive, and a
# second one fills a second buffer.


# %%
def owners():
    def make():
        return decoded().shuffle(128).batch(BATCH)

    seen = {}
    dataset = make()
    iterator = iter(dataset)
    seen["a dataset and its iterator"] = lab.reading().tensors_mib
    next(iterator)
    seen["after the first batch"] = lab.reading().tensors_mib
    del dataset
    gc.collect()
    seen["after del dataset"] = lab.reading().tensors_mib
    second = iter(make())
    next(second)
    seen["with a second one"] = lab.reading().tensors_mib
    del iterator
    gc.collect()
    seen["after del iterator"] = lab.reading().tensors_mib
    return seen


owned = lab.measure(owners, label="who owns the buffer").value
for moment, size in owned.items():
    print(f"{moment:28} {size:6.1f} MiB  {'█' * round(size)}")
assert owned["after del dataset"] > 0.8 * owned["after the first batch"], (
    "the buffer went with the dataset"
)
assert owned["after del iterator"] < 0.8 * owned["with a second one"], (
    "the buffer stayed although its iterator is gone"
)

# %% [markdown]
# ## Verdict

# %%
lowest = table["peak MiB"]
lab.verdict(
    "C04",
    "fails",
    plain=lowest["plain"],
    prefetch=lowest["prefetch(AUTOTUNE)"],
    parallel=lowest["parallel map(AUTOTUNE)"],
    cache=lowest["cache()"],
    all_three=lowest["all three"],
)

# %% [markdown]
# ## Exercises
#
# **1.** This pipeline works and needs far too much. Put it in order: shuffled over all images, batches of 16, some
# prefetching, and a small fraction of the memory.


# %%
def tidy(paths):
    dataset = tf.data.Dataset.from_tensor_slices(paths)
    dataset = dataset.map(load).batch(BATCH).shuffle(64).prefetch(16)
    # BEGIN SOLUTION
    dataset = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths))
    dataset = dataset.map(load).batch(BATCH).prefetch(2)
    # END SOLUTION
    return dataset


def check_tidy():
    orders, count = [], 0
    for _ in range(2):
        means = []
        for batch in tidy(some):
            means.append(round(float(tf.reduce_mean(batch)), 3))
            count += len(batch)
            time.sleep(STEP)
        orders.append(means)
    size, mixed = max(map(len, orders)), sorted(orders[0]) != sorted(orders[1])
    return {"count": count, "size": size, "mixed": mixed}


tidied = lab.run(check_tidy, label="tidy", quiet=True)
with lab.exercise(1, "shuffle the paths, then map, then batch, then prefetch(2)."):
    assert tidied.ok, str(tidied.error)
    assert tidied.value["count"] == 2 * COUNT, "some images are missing or come twice."
    assert tidied.value["size"] == COUNT // BATCH, "the batches have another size."
    assert tidied.value["mixed"], (
        "the same images sit together in a batch in each epoch: batches are shuffled, not images."
    )
    assert tidied.peak_mib < 0.5 * COUNT * one_image, (
        f"peak {tidied.peak_mib:.0f} MiB: which stage holds decoded images?"
    )

# %% [markdown]
# **2.** Sometimes only decoded images can be shuffled. Then size the buffer by bytes: return the largest number of
# images for `shuffle` between `map` and `batch`, so that the pipeline stays within `budget_mib`. Leave a fifth of the
# budget free.


# %%
def largest_buffer(budget_mib, image_mib, batch):
    # BEGIN SOLUTION
    batches = 4 * batch * image_mib  # collected, copied, computed ahead, in your hands
    return int((0.8 * budget_mib - batches) / image_mib)
    # END SOLUTION


ALLOWED = 48
buffer = largest_buffer(ALLOWED, one_image, BATCH)


def check_buffer():
    for _ in tf.data.Dataset.from_tensor_slices(some).map(load).shuffle(buffer).batch(BATCH):
        time.sleep(STEP)


with lab.exercise(2, "buffer × image + 4 × batch × image = 0.8 × budget; solve for the buffer."):
    assert buffer is not None, "largest_buffer() returns nothing yet: return a number of images."
    assert 0 < buffer * one_image < ALLOWED, (
        f"{buffer} images take {buffer * one_image:.1f} MiB of {ALLOWED}."
    )
    buffered = lab.run(check_buffer, budget=f"{ALLOWED} MiB", label="buffer by bytes", quiet=True)
    assert buffered.ok, str(buffered.error)
    assert buffered.peak_mib > 0.6 * ALLOWED, (
        f"peak {buffered.peak_mib:.0f} MiB: a larger buffer would still fit."
    )
