# %% [markdown]
# # 01 · Eager image stacking against a `tf.data` pipeline
#
# **Symptom:** *"OOM when allocating tensor with shape[400,224,224,3]"* or *"kernel died"* while a folder of images
# is being loaded, long before the first training step.
#
# **Afterwards you can** predict what a folder of images needs in memory from its shape alone, see why a list that
# is stacked needs twice that, and feed the same images from a pipeline that needs a few batches.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 25 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C01 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes four times as many images
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
from pathlib import Path

import labsupport as lab

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log

IMAGES = lab.choose(SCALE, quick=400, full=1600)
BUDGET = lab.choose(SCALE, quick="256 MiB", full="1 GiB")
SIZE = 224
photos = sorted(str(path.resolve()) for path in Path("../data/photos").glob("*.jpg"))
paths = (photos * -(-IMAGES // len(photos)))[:IMAGES]
on_disk = sum(Path(path).stat().st_size for path in paths) / 2**20
print(f"{len(paths)} JPEG files, {on_disk:.1f} MiB on disk")

# %% [markdown]
# ## Predict
#
# The files are small. Before you run anything: how much memory does loading them all as 224 × 224 float32 images take
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
# The published example: read, decode and resize each file, append, stack. It runs under a budget that lies between
# what it needs and what the data itself needs.


# %%
def load(path):
    image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
    return tf.image.resize(image, [SIZE, SIZE])


def eager_stack(paths):
    with lab.phase("decode into a list"):
        images = [load(path) for path in paths]
    with lab.phase("stack"):
        batch = tf.stack(images)
    return float(tf.reduce_mean(batch))


failure = lab.run(eager_stack, paths, budget=BUDGET, label="eager stack")
lab.expect_oom(failure)

# %% [markdown]
# The climb is the list; the flat part at the end is TensorFlow's allocator, which waits ten seconds for somebody to
# free memory before it gives up. This notebook goes on.
#
# ## Fix
#
# The article's fix: let a pipeline decode, hand over one batch at a time and forget it.


# %%
def streamed(paths):
    dataset = tf.data.Dataset.from_tensor_slices(paths)
    dataset = (
        dataset.map(load, num_parallel_calls=tf.data.AUTOTUNE).batch(32).prefetch(tf.data.AUTOTUNE)
    )
    total = 0.0
    for batch in dataset:
        total += float(tf.reduce_sum(batch))
    return total / (len(paths) * SIZE * SIZE * 3)


fix = lab.run(streamed, paths, budget=BUDGET, label="tf.data stream")
lab.expect_finished(fix)

# %% [markdown]
# How much of that is the pipeline's own choice? Without parallel calls and prefetching it holds one batch at a time,
# and the images that are on their way into it.


# %%
def streamed_frugally(paths):
    dataset = tf.data.Dataset.from_tensor_slices(paths).map(load).batch(32)
    total = 0.0
    for batch in dataset:
        total += float(tf.reduce_sum(batch))
    return total / (len(paths) * SIZE * SIZE * 3)


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
side_by_side = lab.compare(unbounded, failure, fix, frugal)
side_by_side

# %%
lab.predicted_vs_measured(eager_stack=(predicted_eager, unbounded.peak_mib))

# %%
print(my_guess.against(unbounded.peak_mib))
print(f"Both ways compute the same mean: {unbounded.value:.3f} and {fix.value:.3f}")
assert abs(unbounded.value - fix.value) < 0.01 * unbounded.value

# %% [markdown]
# ## Explain
#
# * A JPEG is compressed about a hundredfold against its float32 pixels. Size on disk predicts nothing.
# * The list keeps every image alive. `tf.stack` copies: a tensor is one contiguous block.
# * A pipeline's memory does not depend on the number of files. It is batches in flight × batch size × image size.
#
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
# ## Exercises
#
# **1.** Keep the eager style but halve its peak: fill a preallocated NumPy array of shape (n, 224, 224, 3) in place
# of a list and a stack. (NumPy's memory is outside TensorFlow's allocator: look at the process figures.)


# %%
def filled(paths):
    # BEGIN SOLUTION
    import numpy as np

    images = np.empty((len(paths), SIZE, SIZE, 3), np.float32)
    for index, path in enumerate(paths):
        images[index] = load(path)
    return float(images.mean())
    # END SOLUTION


filled_run = lab.run(filled, paths, label="filled in place", quiet=True)
with lab.exercise(
    1,
    "Allocate once with np.empty, assign images[index] = load(path), "
    "and return float(images.mean()).",
):
    assert filled_run.ok, str(filled_run.error)
    assert filled_run.value is not None, (
        "filled() returns nothing yet: return the mean of all pixels."
    )
    assert abs(filled_run.value - fix.value) < 0.01 * fix.value, (
        "the mean differs from the pipeline's: is every image in?"
    )
    assert filled_run.process_peak_mib < 1.5 * the_list, (
        f"the process grew by {filled_run.process_peak_mib:.0f} MiB: there are still two copies."
    )

# %% [markdown]
# **2.** Training reads the images again in every epoch, and `cache()` saves the decoding. Cached as float32 they are the list
# again, and do not fit the budget. Cache them as `uint8`, a quarter of the bytes, and cast each batch when it is used.


# %%
def two_epochs_cached(paths):
    # BEGIN SOLUTION
    def load_uint8(path):
        return tf.cast(load(path), tf.uint8)

    dataset = tf.data.Dataset.from_tensor_slices(paths).map(load_uint8).cache().batch(32)
    total = 0.0
    for _ in range(2):
        for batch in dataset:
            total += float(tf.reduce_sum(tf.cast(batch, tf.float32)))
    return total / (2 * len(paths) * SIZE * SIZE * 3)
    # END SOLUTION


cached_run = lab.run(two_epochs_cached, paths, budget=BUDGET, label="uint8 cache", quiet=True)
with lab.exercise(
    2,
    "Cast inside the mapped function with tf.cast(image, tf.uint8), then cache(), then batch; "
    "cast back where the batch is summed.",
):
    assert cached_run.ok, str(cached_run.error)
    assert cached_run.value is not None, (
        "two_epochs_cached() returns nothing yet: return the mean of all pixels over both epochs."
    )
    assert abs(cached_run.value - fix.value) < 0.02 * fix.value, (
        "the mean is off by more than rounding."
    )
    assert cached_run.peak_mib > 0.2 * the_list, (
        f"peak {cached_run.peak_mib:.0f} MiB: nothing seems to be cached."
    )
    assert cached_run.peak_mib < 0.7 * the_list, (
        f"peak {cached_run.peak_mib:.0f} MiB against {the_list:.0f} of float32 images: "
        "what is cached is not uint8."
    )
