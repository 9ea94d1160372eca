# %% [markdown]
# # 03 · Generators and what stands around them
#
# **Symptom:** *"I use a generator, and RAM still fills up before the first step"*, *"Filling up shuffle buffer (this
# may take a while)"*, or a `from_generator` that the training waits for.
#
# **Afterwards you can** tell what a generator keeps from what stands before and behind it, shuffle without a buffer of
# images, and say what decoding in Python costs.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 25 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C03, C30 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes twice as many images
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import gc
import time
from pathlib import Path

import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import generators as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log

IMAGES = lab.choose(SCALE, quick=800, full=1600)
BUDGET = "256 MiB"
SHAPE, BATCH, BUFFER = (224, 224, 3), 32, 1000
photos = sorted(str(path.resolve()) for path in Path("../data/photos").glob("*.jpg"))
paths = (photos * -(-IMAGES // len(photos)))[:IMAGES]
labels = list(range(IMAGES))
data, batch = lab.tensor_mib((IMAGES, *SHAPE)), lab.tensor_mib((BATCH, *SHAPE))

# %% [markdown]
# ## Predict
#
# A *generator* is a Python function that hands out one element at a time, with `yield`. This one is published: it
# gets the whole lists of paths and labels as `args`, and decodes inside.


# %%
def decode(path):
    image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
    return tf.image.resize(image, SHAPE[:2])


def decoded(paths, labels):
    for path, label in zip(paths, labels):
        yield decode(path), label


PAIR = (tf.TensorSpec(SHAPE, tf.float32), tf.TensorSpec((), tf.int64))


def dataset_of(generator, paths=paths, labels=labels):
    return tf.data.Dataset.from_generator(generator, args=(paths, labels), output_signature=PAIR)


# %% [markdown]
# Training wants the images shuffled, so the widely copied `.shuffle(1000).batch(32)` follows.

# %%
my_guess = lab.guess(
    f"Peak of the tensors in an epoch over {IMAGES} images of {SHAPE}, shuffled and batched?",
    GUESS_MIB,
)

# %% [markdown]
# `shuffle` draws each element from a buffer, and first fills it: with decoded images, or with all there are if they are
# fewer than its size.

# %%
buffered = min(BUFFER, IMAGES) * batch / BATCH
predicted = buffered + 3 * batch
print(f"buffer {buffered:.0f} MiB, and three batches: {predicted:.0f} MiB")

# %% [markdown]
# Three, because the images of the next batch, the batch into which they are copied and the one in your hands are there
# together.
#
# ## Failure


# %%
def mean_of(dataset):
    """Read one epoch, as a training loop would."""
    total = 0.0
    for images, _ in dataset:
        total += float(tf.reduce_sum(images))
    return total / (IMAGES * np.prod(SHAPE))


def shuffled_behind():
    return mean_of(dataset_of(decoded).shuffle(BUFFER).batch(BATCH))


failure = lab.run(shuffled_behind, budget=BUDGET, label="generator, shuffle")
assert not failure.ok and failure.dumps  # it ended, and TensorFlow's allocator had run out
unbounded = lab.measure(shuffled_behind, label="generator, shuffle, no tight budget")

# %% [markdown]
# How it ends is chance. If an operation in the generator finds no room, TensorFlow wraps its error in another one, an
# `UnknownError`; the box shows what is inside. If it is the code that takes an image over from Python, the whole process
# crashes: "kernel died".
#
# ## Advice, tested
#
# Is it the generator? Published advice says that one feeds data without loading all of it. Here it is as published, without
# `shuffle`, under the same budget. And since the other published examples have their images in an array, a second
# generator over such an array.


# %%
def as_published():
    return mean_of(dataset_of(decoded).batch(BATCH))


def over_an_array():
    x = np.ones((IMAGES, *SHAPE), np.float32)

    def rows():
        yield from zip(x, labels)

    return mean_of(tf.data.Dataset.from_generator(rows, output_signature=PAIR).batch(BATCH))


published = lab.run(as_published, budget=BUDGET, label="generator over files")
array = lab.run(over_an_array, budget=BUDGET, label="generator over an array")
lab.expect_finished(published, array)
lab.note(
    f"Of {data:.0f} MiB of images the generator over files held {published.peak_mib:.0f} as "
    f"tensors, and its process grew by {published.process_peak_mib:.0f}. Over the array the "
    f"process grew by {array.process_peak_mib:.0f}, which a budget for tensors does not stop: the "
    "generator loads nothing, and the array was loaded before."
)

# %% [markdown]
# ## Fix
#
# Shuffle what is small: the paths, before anything is decoded. A generator starts anew in every epoch, so the order is
# another one each time.


# %%
def decoded_in_new_order(paths, labels):
    order = np.random.permutation(len(paths))  # args arrive as NumPy arrays
    yield from decoded(paths[order], labels[order])


def shuffled_before():
    return mean_of(dataset_of(decoded_in_new_order).batch(BATCH))


fix = lab.run(shuffled_before, budget=BUDGET, label="paths shuffled, generator")
lab.expect_finished(fix)

# %% [markdown]
# ## Side by side

# %%
lab.compare(unbounded, failure, published, fix)

# %% [markdown]
# Who held it? Both run once more while TensorFlow records every allocation. The line of the first bar is the
# generator's own: what it decoded waits in the buffer of `shuffle`. In the second, it is the batch in the loop's
# hands, the one that is being filled, and the images collected for it.

# %%
lab.take_apart(failure, fix)

# %%
lab.predicted_vs_measured(
    generator_and_shuffle=(predicted, unbounded.peak_mib),
    paths_shuffled=(3 * batch, fix.peak_mib),
)

# %%
print(my_guess.against(unbounded.peak_mib))
assert abs(unbounded.value - fix.value) < 0.001 * fix.value  # the same images, in another order

# %% [markdown]
# ## Explain
#
# **What stands around a generator.** One process, small batches, several feeds; each phase shows the tensors that one
# epoch needed. The last batch and the iterator of a loop stay until their names are bound anew, or until Python's
# garbage collector comes by. So each epoch is read in a function, and a phase begins with a collection: otherwise its
# level would count what the phase before has left.

# %%
FEW, SMALL = 160, 8


def one_epoch(make):
    for _ in make():
        pass


def epoch_of(name, make):
    """Seconds of the processor."""
    gc.collect()
    begin = time.process_time()
    with lab.phase(name):
        one_epoch(make)
    return time.process_time() - begin


def feeds():
    x = np.ones((FEW, *SHAPE), np.float32)

    def rows(x=x):
        yield from x

    few = lambda: dataset_of(decoded, paths[:FEW], labels[:FEW])
    from_array = lambda **args: tf.data.Dataset.from_generator(
        rows, output_signature=PAIR[0], **args
    )
    for name, make in {
        "generator": lambda: few().batch(SMALL),
        "generator, shuffle(80)": lambda: few().shuffle(80).batch(SMALL),
        "generator, cache()": lambda: few().cache().batch(SMALL),
        "generator over an array": lambda: from_array().batch(SMALL),
        "array given as args=(x,)": lambda: from_array(args=(x,)).batch(SMALL),
    }.items():
        epoch_of(name, make)


image, small = lab.tensor_mib(SHAPE), lab.tensor_mib((SMALL, *SHAPE))
need = {phase.name: phase.rise_mib for phase in lab.measure(feeds, label="feeds").phases}
expected = [0, 80 * image, FEW * image, 0, 2 * FEW * image]
table = pd.DataFrame(
    {"predicted MiB": [3 * small + more for more in expected], "measured MiB": need.values()},
    need.keys(),
)
table.plot.barh(xlabel="tensors of one epoch (MiB)", figsize=(8, 3)).invert_yaxis()
table.round(1)

# %%
lab.note(
    f"All {FEW} images are {FEW * image:.0f} MiB. Behind the generator `shuffle` holds its "
    "buffer, `cache` everything. Given as `args` the array becomes a tensor: "
    f"{need['array given as args=(x,)'] / (FEW * image):.1f} copies of it, while a generator "
    "that finds the array in the "
    f"surrounding function held {need['generator over an array'] / (FEW * image):.2f}."
)

# %% [markdown]
# **Decoding in Python.** The published example decodes inside the generator. Beside it the same function in `map`, where
# TensorFlow runs it without Python: as many calls at once as it chooses, and as a control one at a time. By default
# `tf.data` makes a `map` parallel and adds a `prefetch`; the options keep all three as they are written.

# %%
TRIES = 5


def decoding(paths):
    as_written = tf.data.Options()
    as_written.experimental_optimization.apply_default_optimizations = False
    sources = tf.data.Dataset.from_tensor_slices((paths, labels[: len(paths)]))
    one = lambda path, label: (decode(path), label)
    ways = {
        "generator": dataset_of(decoded, paths, labels[: len(paths)]),
        "map, one at a time": sources.map(one),
        "map, in parallel": sources.map(one, num_parallel_calls=tf.data.AUTOTUNE),
    }
    return [
        epoch_of(name, lambda: dataset.batch(BATCH).with_options(as_written))
        for _ in range(TRIES + 1)
        for name, dataset in ways.items()
    ]


run = lab.measure(decoding, paths[:FEW], label="decoding")
facts = [
    (phase.name, phase.rise_mib, phase.end - phase.start, processor)
    for phase, processor in zip(run.phases, run.value)
][3:]  # the first try warms up
cost = pd.DataFrame(facts, columns=["way", "MiB", "seconds", "processor seconds"])
cost = cost.groupby("way", sort=False).agg(["median", "min", "max"])
cost.round(3)

# %%
memory, seconds = cost["MiB"]["median"], cost["seconds"]["min"]
processor = cost["processor seconds"]["min"]
lab.note(
    f"The generator takes {memory['generator'] / memory['map, in parallel']:.2f} of the memory "
    f"of `map` in parallel, and {processor['generator'] / processor['map, in parallel']:.1f} times "
    f"the processor's time (least of {TRIES}): that is the way through Python, where each "
    "operation is a call of its own and each image is handed over. What calls in parallel give "
    "on top, a generator cannot have, since it is asked for one element after the other: their "
    f"epoch lasts {seconds['map, in parallel'] / seconds['map, one at a time']:.2f} times as "
    "long as with one call at a time."
)

# %% [markdown]
# Seconds pass on the clock, and depend on what else the machine does; *processor seconds* are what all threads have
# computed. These are times of a CPU with few cores that has nothing to train meanwhile; a generator is slow enough to
# matter if the training step waits for it.
#
# **When it flips.** A buffer of images is no trouble while it is small beside your memory. Move the sliders.


# %%
def behind(thousand_images=10, side=224, shuffle_buffer=1000):
    one, count = lab.tensor_mib((side, side, 3)), 1000 * thousand_images
    buffer = min(shuffle_buffer, count) * one
    print(f"all images          {count * one:12,.1f} MiB (predicted)")
    print(f"generator           {3 * BATCH * one:12,.1f} MiB")
    print(f"generator + shuffle {3 * BATCH * one + buffer:12,.1f} MiB")
    print(f"generator + cache   {(3 * BATCH + count) * one:12,.1f} MiB")


lab.explore(behind, thousand_images=(1, 200, 1), side=(8, 512, 8), shuffle_buffer=(100, 10000, 100))

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C03",
    "partly",
    data=data,
    files_tensors=published.peak_mib,
    files_process=published.process_peak_mib,
    array_tensors=array.peak_mib,
    array_process=array.process_peak_mib,
)

# %%
lab.verdict(
    "C30",
    "partly",
    generator_peak=memory["generator"],
    map_peak=memory["map, in parallel"],
    generator_processor=processor["generator"],
    map_processor=processor["map, in parallel"],
)

# %% [markdown]
# ## Exercises
#
# **1.** Write `shuffled(paths, labels)`: a dataset of pairs (image, label), not batched, shuffled over all of them and in
# a new order in every epoch, that never holds more than a few images.


# %%
def shuffled(paths, labels):
    # BEGIN SOLUTION
    pairs = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(paths))
    return pairs.map(lambda path, label: (decode(path), label))
    # END SOLUTION


# %%
check.shuffled(shuffled, photos, SHAPE)


# %% tags=["right"]
def shuffled(paths, labels):
    def pairs():
        order = list(zip(paths, labels))
        np.random.shuffle(order)
        for path, label in order:
            yield decode(path).numpy(), label

    return tf.data.Dataset.from_generator(pairs, output_signature=PAIR)


# %% tags=["wrong"]
# says: holds images
def shuffled(paths, labels):
    return dataset_of(decoded, paths, labels).shuffle(len(paths))


# %% tags=["wrong"]
# says: same order in both epochs
def shuffled(paths, labels):
    order = np.random.permutation(len(paths))
    return dataset_of(decoded, np.array(paths)[order], np.array(labels)[order])


# %% tags=["wrong"]
# says: do not belong together
def shuffled(paths, labels):
    images = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths)).map(decode)
    return tf.data.Dataset.zip((images, tf.data.Dataset.from_tensor_slices(labels)))


# %% tags=["wrong"]
# says: only part of them
def shuffled(paths, labels):
    pairs = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(10)
    return pairs.map(lambda path, label: (decode(path), label))


# %% tags=["wrong"]
# says: are batches of images
def shuffled(paths, labels):
    pairs = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(paths))
    return pairs.map(lambda path, label: (decode(path), label)).batch(BATCH)


# %% tags=["wrong"]
# says: in runs
def shuffled(paths, labels):
    shards, size = tf.data.Dataset.range(16).shuffle(16), len(paths) // 16
    whole = tf.data.Dataset.from_tensor_slices((paths, labels))
    pairs = shards.flat_map(lambda shard: whole.skip(shard * size).take(size))
    return pairs.map(lambda path, label: (decode(path), label))


# %% [markdown]
# **2.** `rows_of(x)` is a dataset of the rows of an array that is in memory. As it stands it copies the array. Keep the
# generator, or do without, but let nothing copy the whole array.


# %%
def rows_of(x):
    def rows(x):
        yield from x

    # BEGIN SOLUTION
    def rows():  # it finds x in the function around it
        yield from x

    row = tf.TensorSpec(x.shape[1:], x.dtype)
    return tf.data.Dataset.from_generator(rows, output_signature=row)
    # END SOLUTION
    row = tf.TensorSpec(x.shape[1:], x.dtype)
    return tf.data.Dataset.from_generator(rows, args=(x,), output_signature=row)


# %%
check.rows_of(rows_of)


# %% tags=["right"]
def rows_of(x):
    def row(at):
        return tf.ensure_shape(tf.numpy_function(lambda at: x[at], [at], x.dtype), x.shape[1:])

    return tf.data.Dataset.range(len(x)).map(row)


# %% tags=["wrong"]
# says: holds the whole array
def rows_of(x):
    return tf.data.Dataset.from_tensor_slices(x)


# %% tags=["wrong"]
# says: a copy of the whole array
def rows_of(x):
    rows = [row.copy() for row in x]
    return tf.data.Dataset.from_generator(
        lambda: rows, output_signature=tf.TensorSpec(x.shape[1:], x.dtype)
    )


# %% tags=["wrong"]
# says: not float32
def rows_of(x):
    row = tf.TensorSpec(x.shape[1:], tf.float64)
    return tf.data.Dataset.from_generator(lambda: iter(x), output_signature=row)


# %% tags=["wrong"]
# says: holds the whole array
def rows_of(x):
    return tf.data.Dataset.range(len(x)).map(lambda at: tf.gather(x, at))


# %% tags=["wrong"]
# says: second epoch
def rows_of(x):
    rows = iter(x)
    row = tf.TensorSpec(x.shape[1:], x.dtype)
    return tf.data.Dataset.from_generator(lambda: rows, output_signature=row)


# %% [markdown]
# **3.** A stream of (path, label) comes out of a generator function that you cannot change, and nobody knows how long it
# is. `decoded_stream(records)` decodes in Python. Return the same pairs in the same order, decoded by the pipeline.


# %%
def decoded_stream(records):
    def pairs():
        for path, label in records():
            yield decode(path), label

    # BEGIN SOLUTION
    names = (tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.int64))
    stream = tf.data.Dataset.from_generator(records, output_signature=names)
    one = lambda path, label: (decode(path), label)
    return stream.map(one, num_parallel_calls=tf.data.AUTOTUNE)
    # END SOLUTION
    return tf.data.Dataset.from_generator(pairs, output_signature=PAIR)


# %%
check.decoded_stream(decoded_stream, photos, SHAPE)


# %% tags=["right"]
def decoded_stream(records):
    stream = tf.data.Dataset.from_generator(records, output_types=(tf.string, tf.int64))

    @tf.function
    def one(path, label):
        return decode(tf.reshape(path, ())), label

    return stream.prefetch(8).map(one)


# %% tags=["wrong"]
# says: before the first image
def decoded_stream(records):
    paths, labels = zip(*records())
    pairs = tf.data.Dataset.from_tensor_slices((list(paths), list(labels)))
    return pairs.map(lambda path, label: (decode(path), label))


# %% tags=["wrong"]
# says: from Python
def decoded_stream(records):
    names = (tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.int64))
    stream = tf.data.Dataset.from_generator(records, output_signature=names)
    return stream.map(lambda path, label: (tf.py_function(decode, [path], tf.float32), label))


# %% tags=["wrong"]
# says: another order
def decoded_stream(records):
    names = (tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.int64))
    stream = tf.data.Dataset.from_generator(records, output_signature=names).shuffle(8)
    return stream.map(lambda path, label: (decode(path), label))


# %% tags=["wrong"]
# says: from Python
def decoded_stream(records):
    in_graph = tf.function(decode)

    def pairs():
        for path, label in records():
            yield in_graph(tf.constant(path)), label

    return tf.data.Dataset.from_generator(pairs, output_signature=PAIR)
