# %% [markdown]
# # 01 · Eager image stacking against a `tf.data` pipeline
#
# **Symptom:** *"OOM when allocating tensor with shape[400,224,224,3]"* or *"kernel died"* while a folder of images
# is being loaded, long before the first training step.
#
# **Afterwards you can** predict what a folder of images needs in memory from its shape alone, see what stacking a list
# adds to that, and feed the same images from a pipeline that needs a few batches.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 25 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C01 |
#
# Every run below happens in a process of its own under a memory budget, a limit that TensorFlow itself keeps. When it runs
# out of memory, nothing else does. We call such a run an *arm*, and a named part of it a *phase*; a *control* is an arm
# that shows what a cause is not. Shift+Enter runs a cell.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes four times as many images
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
from pathlib import Path

import numpy as np

import labsupport as lab
from labsupport.graders import image_stacking as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log

IMAGES = lab.choose(SCALE, quick=400, full=1600)
BUDGET = lab.choose(SCALE, quick="256 MiB", full="1 GiB")
SIZE, BATCH, EPOCHS = 224, 32, 7
photos = sorted(str(path.resolve()) for path in Path("../data/photos").glob("*.jpg"))
paths = (photos * -(-IMAGES // len(photos)))[:IMAGES]
on_disk = sum(Path(path).stat().st_size for path in paths) / 2**20
print(f"{len(paths)} JPEG files, {on_disk:.1f} MiB on disk")

# %% [markdown]
# ## Predict
#
# The files are small. Before you go on: how much memory does loading them all as 224 × 224 float32 images take
# at its worst moment?

# %%
my_guess = lab.guess(
    "Peak memory of loading every image and stacking them into one tensor?", GUESS_MIB
)

# %% [markdown]
# Now the arithmetic. One decoded image is height × width × channels × 4 bytes; what the file weighs does not matter.

# %%
one_image = lab.tensor_mib((SIZE, SIZE, 3))
print(f"one image: {SIZE} × {SIZE} × 3 × 4 B = {one_image:.3f} MiB")

# %% [markdown]
# The list holds all of them. `tf.stack` then makes *one more* tensor of the same total size while the list is still
# alive: two copies at the worst moment.

# %%
the_list = IMAGES * one_image
predicted_eager = 2 * the_list
print(f"list: {the_list:.0f} MiB, list + stack: {predicted_eager:.0f} MiB")

# %% [markdown]
# ## Failure
#
# The published example: read, decode and resize each file, append, stack; and then the epochs, which here only add up
# the pixels. It runs under a budget that lies between what it needs and what the data itself needs.


# %%
def load(path):
    image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
    return tf.image.resize(image, [SIZE, SIZE])


def eager_stack(paths):
    with lab.phase("decode into a list"):
        images = [load(path) for path in paths]
    with lab.phase("stack"):
        batch = tf.stack(images)
    for _ in range(EPOCHS):
        mean = float(tf.reduce_mean(batch))
    return mean


failure = lab.run(eager_stack, paths, budget=BUDGET, label="eager stack")
lab.expect_oom(failure)

# %% [markdown]
# The climb is the list. While it ran, the curve then stood still: TensorFlow's allocator waits for somebody to free memory
# before it gives up (the picture leaves that out). The cross is what the stack would have needed. This notebook goes on.
#
# ## Fix
#
# The published fix: let a pipeline decode, hand over one batch at a time and forget it, anew in each epoch. `AUTOTUNE`
# leaves to `tf.data` how many images are decoded at once, and how many batches made ready.


# %%
def mean_of(batches):
    """Read all epochs, as a training loop would; the mean of the last."""
    for _ in range(EPOCHS):
        total = 0.0
        for batch in batches:
            total += float(tf.reduce_sum(batch))
    return total / (IMAGES * SIZE * SIZE * 3)


def streamed(paths):
    dataset = tf.data.Dataset.from_tensor_slices(paths)
    dataset = dataset.map(load, num_parallel_calls=tf.data.AUTOTUNE)
    return mean_of(dataset.batch(BATCH).prefetch(tf.data.AUTOTUNE))


fix = lab.run(streamed, paths, budget=BUDGET, label="tf.data stream")
lab.expect_finished(fix)

# %% [markdown]
# Is it `tf.data` that cures? A control: the same eager loop, without a pipeline, that stacks 32 images, sums them and
# forgets them.


# %%
def eager_batches(paths):
    for _ in range(EPOCHS):
        total = 0.0
        for start in range(0, len(paths), BATCH):
            batch = tf.stack([load(path) for path in paths[start : start + BATCH]])
            total += float(tf.reduce_sum(batch))
    return total / (len(paths) * SIZE * SIZE * 3)


control = lab.run(eager_batches, paths, budget=BUDGET, label="eager, a batch at a time")
lab.expect_finished(control)

# %% [markdown]
# And what do the pipeline's own queues take? Here it works off one batch after the other. To be sure of that, the options
# switch off what `tf.data` would add by itself: by default it *rewrites* a pipeline before it runs, makes `map` parallel
# and puts a prefetch at the end.


# %%
def streamed_frugally(paths):
    dataset = tf.data.Dataset.from_tensor_slices(paths).map(load).batch(BATCH)
    as_written = tf.data.Options()
    as_written.experimental_optimization.apply_default_optimizations = False
    return mean_of(dataset.with_options(as_written))


frugal = lab.run(streamed_frugally, paths, budget=BUDGET, label="tf.data, nothing in parallel")
lab.expect_finished(frugal)

# %% [markdown]
# What the eager version would have needed, without a budget that stops it:

# %%
unbounded = lab.run(eager_stack, paths, label="eager stack, no tight budget")
lab.expect_finished(unbounded)

# %% [markdown]
# ## Side by side

# %%
side_by_side = lab.compare(unbounded, failure, fix, frugal, control)
side_by_side

# %% [markdown]
# Who held it, at the worst moment? Both run once more, while TensorFlow records every allocation with its operation and
# shape. Each bar is cut by kind, then by the line of the code, then by what was made.

# %%
lab.take_apart(failure, fix)

# %%
lab.predicted_vs_measured(eager_stack=(predicted_eager, unbounded.peak_mib))

# %%
print(my_guess.against(unbounded.peak_mib))
print(f"Both ways compute the same mean: {unbounded.value:.3f} and {fix.value:.3f}")
assert abs(unbounded.value - fix.value) < 0.01 * unbounded.value

# %% [markdown]
# ## Explain
#
# * The files are compressed, and resizing enlarges some of them. Size on disk predicts nothing.
# * The list keeps every image alive. `tf.stack` copies: a tensor is one contiguous block.
# * Neither way of streaming keeps what it has used. That is the cure; a pipeline adds parallel reading to it.

# %%
a_batch = BATCH * one_image
lab.note(
    f"The float32 images have {the_list / on_disk:.0f} times the bytes of the files. A batch has "
    f"{a_batch:.1f} MiB, and the pipeline peaked at {fix.peak_mib / a_batch:.1f} batches "
    f"({fix.seconds:.1f} s), without its queues at {frugal.peak_mib / a_batch:.1f} "
    f"({frugal.seconds:.1f} s). The eager loop that forgets its batches peaked at "
    f"{control.peak_mib / a_batch:.1f} ({control.seconds:.1f} s): a list of images and their "
    "stack, while the batch before is still alive."
)

# %% [markdown]
# **When it flips.** With few images there is nothing to save: the pipeline holds its batches either way. Move the
# slider to find where the two cross for this image size.


# %%
def crossing(images=400, batch=32, batches_in_flight=3):
    eager, stream = 2 * images * one_image, batches_in_flight * batch * one_image
    smaller = "the stream" if stream < eager else "the list"
    print(f"eager {eager:7.1f} MiB   stream {stream:7.1f} MiB   {smaller} is smaller (predicted)")


lab.explore(crossing, images=(8, 1000, 8), batch=(8, 128, 8), batches_in_flight=(1, 10, 1))

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C01",
    "holds",
    eager=unbounded.peak_mib,
    stream=fix.peak_mib,
    eager_died=failure.outcome == "OOM",
    stream_finished=fix.ok,
)

# %% [markdown]
# The claim holds, and its reason is another one than it suggests: see the control.

# %% [markdown]
# ## Exercises
#
# **1.** Keep the eager style but halve its peak: fill a preallocated NumPy array of shape (n, 224, 224, 3) in place
# of a list and a stack, and return the mean of all pixels. (NumPy's memory is outside TensorFlow's allocator: look at the
# process figures.)


# %%
def filled(paths):
    # BEGIN SOLUTION
    images = np.empty((len(paths), SIZE, SIZE, 3), np.float32)
    for index, path in enumerate(paths):
        images[index] = load(path)
    return float(images.mean())
    # END SOLUTION


# %%
check.filled(filled, paths, fix.value, the_list)


# %% tags=["right"]
def filled(paths):
    images = np.zeros((len(paths), SIZE, SIZE, 3), "float32")
    for image, path in zip(images, paths):
        image[:] = load(path).numpy()
    return images.mean(dtype="float64")


# %% tags=["wrong"]
# says: two copies
def filled(paths):
    images = np.empty((len(paths), SIZE, SIZE, 3))
    for index, path in enumerate(paths):
        images[index] = load(path)
    return float(images.mean())


# %% tags=["wrong"]
# says: two copies
def filled(paths):
    return float(np.stack([load(path).numpy() for path in paths]).mean())


# %% tags=["wrong"]
# says: not all held
def filled(paths):
    return sum(float(tf.reduce_mean(load(path))) for path in paths) / len(paths)


# %% tags=["wrong"]
# says: images were decoded
def filled(paths):
    images = np.zeros((len(paths), SIZE, SIZE, 3), np.float32)
    for index in range(len(paths) - 1):
        images[index] = load(paths[index])
    return float(images.mean())


# %% tags=["wrong"]
# says: two copies
def filled(paths):
    images = np.empty((len(paths), SIZE, SIZE, 3), np.float32)
    for index, path in enumerate(paths):
        images[index] = load(path)
    return float(tf.reduce_mean(images))


# %% tags=["wrong"]
# says: not all held as float32
def filled(paths):
    images = np.empty((len(paths), SIZE, SIZE, 3), np.uint8)
    for index, path in enumerate(paths):
        images[index] = load(path)
    return float(images.mean())


# %% [markdown]
# **2.** Training reads the images again in every epoch, and `cache()` saves the decoding. Cached as float32 they are the list
# again, and do not fit the budget. Cache them as `uint8`, a quarter of the bytes, and cast each batch when it is used.
# Return the mean of each of the two epochs. (The grader calls it with three times as many files.)


# %%
def two_epochs_cached(paths):
    # BEGIN SOLUTION
    def load_uint8(path):
        return tf.cast(load(path), tf.uint8)

    dataset = tf.data.Dataset.from_tensor_slices(paths).map(load_uint8).cache().batch(32)
    means = []
    for _ in range(2):
        total = sum(float(tf.reduce_sum(tf.cast(batch, tf.float32))) for batch in dataset)
        means.append(total / (len(paths) * SIZE * SIZE * 3))
    return means
    # END SOLUTION


# %%
check.cached(two_epochs_cached, paths, fix.value, the_list)


# %% tags=["right"]
def two_epochs_cached(paths):
    small = tf.data.Dataset.from_tensor_slices(paths).map(
        lambda path: tf.saturate_cast(tf.round(load(path)), "uint8")
    )
    small = small.cache().map(lambda image: tf.reduce_mean(tf.cast(image, "float32")))
    return tuple(sum(map(float, small)) / len(paths) for epoch in range(2))


# %% tags=["wrong"]
# says: nothing is cached
def two_epochs_cached(paths):
    dataset = tf.data.Dataset.from_tensor_slices(paths).map(load).batch(32).prefetch(2)
    sums = [sum(float(tf.reduce_sum(batch)) for batch in dataset) for _ in range(2)]
    return [total / (len(paths) * SIZE * SIZE * 3) for total in sums]


# %% tags=["wrong"]
# says: nothing is cached
def two_epochs_cached(paths):
    files = tf.data.Dataset.from_tensor_slices(paths).map(tf.io.read_file).cache()
    images = files.map(lambda data: tf.cast(tf.io.decode_jpeg(data, channels=3), tf.float32))
    images = images.map(lambda image: tf.image.resize(image, [SIZE, SIZE]))
    return [sum(float(tf.reduce_mean(image)) for image in images) / len(paths) for _ in range(2)]


# %% tags=["wrong"]
# says: not uint8
def two_epochs_cached(paths):
    dataset = tf.data.Dataset.from_tensor_slices(paths).map(load).cache().batch(32)
    sums = [sum(float(tf.reduce_sum(batch)) for batch in dataset) for _ in range(2)]
    return [total / (len(paths) * SIZE * SIZE * 3) for total in sums]


# %% tags=["wrong"]
# says: not uint8
def two_epochs_cached(paths):
    dataset = tf.data.Dataset.from_tensor_slices(paths)
    dataset = dataset.map(lambda path: tf.cast(load(path), tf.float16)).cache()
    dataset = dataset.map(lambda image: tf.reduce_mean(tf.cast(image, tf.float32)))
    return [sum(map(float, dataset)) / len(paths) for _ in range(2)]


# %% tags=["wrong"]
# says: two epochs
def two_epochs_cached(paths):
    dataset = tf.data.Dataset.from_tensor_slices(paths)
    dataset = dataset.map(lambda path: tf.cast(load(path), tf.uint8)).cache().batch(32)
    total = sum(float(tf.reduce_sum(tf.cast(batch, tf.float32))) for batch in dataset)
    return total / (len(paths) * SIZE * SIZE * 3)


# %% tags=["right"]
def two_epochs_cached(paths):
    images = np.empty((len(paths), SIZE, SIZE, 3), np.uint8)
    for index, path in enumerate(paths):
        images[index] = load(path)
    return [float(images.mean()) for _ in range(2)]


# %% tags=["wrong"]
# says: not uint8
def two_epochs_cached(paths):
    dataset = tf.data.Dataset.from_tensor_slices(paths).map(load).cache()
    dataset = dataset.map(lambda image: tf.cast(image, tf.uint8)).batch(32)
    means = []
    for _ in range(2):
        total = sum(float(tf.reduce_sum(tf.cast(batch, tf.float32))) for batch in dataset)
        means.append(total / (len(paths) * SIZE * SIZE * 3))
    return means
