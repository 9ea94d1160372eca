# %% [markdown]
# # 16 · Reading an OOM: the allocator and fragmentation
#
# **Symptom:** *"OOM when allocating tensor … If the cause is memory fragmentation …"* in a loop whose tensors, added
# up, would fit, and a hundred lines of `Bin (256): Total Chunks …` that nobody reads.
#
# **Afterwards you can** read the message and the dump, draw from them what lay where, tell "too much in use" from
# "enough free, but in pieces", and order work so that the pieces do not arise.
#
# | | |
# |---|---|
# | Time | about a minute to run, 25 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C23 |

# %% tags=["parameters"]
SCALE = "quick"  # "full" makes every row twice as wide
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import re

import matplotlib.pyplot as plt
import numpy as np

import labsupport as lab
from labsupport.graders import reading_an_oom as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log

COLUMNS = lab.choose(SCALE, quick=256, full=512)
KEPT = COLUMNS * 5 // 8
BUDGET = lab.choose(SCALE, quick="212 MiB", full="424 MiB")
SIZES = [1024, 4096, 16384, 65536]  # rows of a batch
print(f"batches of {SIZES} rows, budget {BUDGET}")

# %% [markdown]
# ## Predict
#
# TensorFlow does not ask the system for every tensor. Its allocator takes one large *region* (on a GPU nearly all of the
# card) and cuts *chunks* out of it. It is called *best-fit with coalescing*, BFC: a request gets the smallest free chunk
# that is large enough, and free neighbours are joined.
#
# A sweep runs a layer's activation on larger and larger batches, and keeps a part of every output to compare them later.
# What has to be there at the worst moment, in the last and largest batch? Its rows, the output, what is kept of it, and
# what was kept of the batches before.

# %%
my_guess = lab.guess("What do the tensors of the sweep need at its peak?", GUESS_MIB)

# %%
largest = SIZES[-1]
parts = {
    "rows and output": 2 * lab.tensor_mib((largest, COLUMNS)),
    "kept of it": lab.tensor_mib((largest, KEPT)),
    "kept before": sum(lab.tensor_mib((rows, KEPT)) for rows in SIZES[:-1]),
}
needed = sum(parts.values())
print(", ".join(f"{name} {size:.1f} MiB" for name, size in parts.items()))
print(f"in all {needed:.1f} MiB, budget {BUDGET}")

# %% [markdown]
# ## Failure
#
# That is less than the budget.


# %%
def batch(rows):
    return np.random.default_rng(rows).standard_normal((rows, COLUMNS), np.float32)


def sweep(sizes):
    kept = []
    for rows in sizes:
        with lab.phase(f"{rows} rows"):
            x = tf.constant(batch(rows))
            output = tf.tanh(x)
            kept.append(output[:, :KEPT])
            del x, output
    return [part.numpy() for part in kept]


def smallest_first(sizes):
    return sum(float(part.sum()) for part in sweep(sizes))


failure = lab.run(smallest_first, SIZES, budget=BUDGET, label="smallest first")
lab.expect_oom(failure)

# %% [markdown]
# Open *Log of the process* above: that is the dump. Three parts matter.
#
# * `Bin (…)` lines: free and used chunks by size class. Skip them at first.
# * `InUse at … of size …` / `Free at … of size …`: every chunk, in the order of addresses. **This is the map.**
# * `Stats`: limit, in use, the highest ever (`MaxInUse`).
#
# The map as a picture:


# %%
def chunks(log):
    """(state, bytes) of every chunk of the largest region in the last dump, by address."""
    regions = re.split(r"Next region of size \d+", log)[1:]
    found = [re.findall(r"(InUse|Free) +at [0-9a-f]+ of size (\d+)", region) for region in regions]
    largest = max(found, key=lambda region: sum(int(size) for _, size in region))
    return [(state, int(size)) for state, size in largest]


dump = failure.error.log
free = [size / 2**20 for state, size in chunks(dump) if state == "Free"]
looks = {
    "InUse": {"color": lab.COLOURS[1], "label": "in use"},
    "Free": {"color": "white", "hatch": "///", "label": "free"},
}
figure, axes = plt.subplots(figsize=(10, 1.5))
at = 0
for state, size in chunks(dump):
    axes.barh(0, size / 2**20, left=at / 2**20, edgecolor="black", **looks[state])
    at += size
axes.set(yticks=[], xlabel="place in the region (MiB): blue = in use, hatched = free")
axes.set_title("The region when the allocation failed")
plt.show()

# %%
done = len(failure.phases) - 1  # the last one ended in the error
live = sum(lab.tensor_mib((rows, KEPT)) for rows in SIZES[:done])
live += 2 * lab.tensor_mib((SIZES[done], COLUMNS))
wanted = failure.wanted / 2**20
limit = failure.budget / 2**20
in_use = failure.dumps[-1] / 2**20
lab.note(
    f"The batch of {SIZES[done]:,} rows wanted {wanted:.0f} MiB for what is to be kept of it. The tensors that were alive "
    f"have {live:.1f} MiB by their shapes, so {limit - live:.1f} of {limit:.0f} MiB were needed by nobody. Of these "
    f"{sum(free):.1f} MiB were free, in {len(free)} pieces, the largest of {max(free):.1f} MiB. The other "
    f"{in_use - live:.1f} MiB lay unused at the end of a chunk in use: a free chunk that is less than twice the "
    "request is handed out whole."
)

# %% [markdown]
# Every batch is larger than the hole that the one before it has left, so it goes behind it; and what is kept, which
# stays, lies between the holes.
#
# ## Fix
#
# TensorFlow's message recommends `TF_GPU_ALLOCATOR=cuda_malloc_async`, which exists for GPUs only. What works everywhere
# is the order: the largest batch first leaves the largest hole, and each later one fits into it. Same batches, same
# results, same budget.


# %%
def largest_first(sizes):
    return smallest_first(sizes[::-1])


fix = lab.run(largest_first, SIZES, budget=BUDGET, label="largest first")
lab.expect_finished(fix)

# %% [markdown]
# Does the order only lower what is needed? A control: smallest first again, in a region with room to spare.

# %%
control = lab.run(smallest_first, SIZES, label="smallest first, room to spare")
lab.expect_finished(control)

# %% [markdown]
# ## Side by side

# %%
lab.compare(control, failure, fix)

# %%
lab.predicted_vs_measured(smallest_first=(needed, control.peak_mib))

# %%
print(my_guess.against(control.peak_mib))
assert np.isclose(fix.value, control.value, rtol=1e-3)
assert control.peak_mib < limit, "with room to spare it must need less than the budget"
lab.note(
    f"With room to spare the same sweep peaks at {control.peak_mib:.1f} MiB, within the budget of {limit:.0f} MiB in which "
    f"it died. Largest first peaks at {fix.peak_mib:.1f} MiB: the largest batch meets nothing that was kept, and what "
    "comes later fits into its place."
)

# %% [markdown]
# ## Explain
#
# * **In use** is what chunks hold that were handed out. **Reserved** is the region; the system, `top` and the GPU tool see
#   only that, so they cannot tell fragmentation from a full region. A freed tensor's memory goes back to the region, never
#   to the system.
# * **Fragmentation** needs mixed lifetimes: something that stays between things that come and go in growing sizes. Kept
#   results of batches that grow do it; so do optimizer slots that are made in the first step (`optimizer.build`
#   before it puts them in front).
# * **Rounding.** Every tensor takes at least a quarter of a KiB, so many tiny tensors cost far more than their contents.
# * **The last piece.** A free chunk that is less than twice the request, and whose rest would be below 128 MiB, is handed
#   out whole ([bfc_allocator.cc](https://github.com/tensorflow/tensorflow/blob/v2.21.0/third_party/xla/xla/tsl/framework/bfc_allocator.cc)).
#
# The next cell measures the last two.


# %%
def rounding():
    with lab.phase("scalars"):
        scalars = [tf.zeros([]) + index for index in range(10_000)]
    del scalars
    blocks = [tf.zeros([100 * 2**18])]
    with lab.phase("last piece"):  # 156 MiB are left in the region; the remainder would be 56
        blocks.append(tf.zeros([100 * 2**18]))


rounded = lab.measure(rounding, budget="258 MiB", label="rounding and the last piece")
numbers, tiny = lab.tensor_mib((10_000,)), rounded.phase("scalars").added_mib
jump = rounded.phase("last piece").added_mib
lab.note(
    f"10,000 scalars of 4 bytes hold {numbers:.2f} MiB of numbers and take {tiny:.2f} MiB. "
    f"A tensor of 100 MiB out of the last piece takes {jump:.0f} MiB."
)

# %% [markdown]
# **When it flips.** If what is wanted fits into the largest hole, nothing fails. In the simplest case blocks fill a region,
# and every other one is freed: how large may the largest tensor be?


# %%
def holes(block_mib=16, wanted_mib=64, region_mib=256):
    free_mib = region_mib / 2
    fits = wanted_mib <= block_mib
    print(f"{free_mib:.0f} MiB free in pieces of {block_mib} MiB", end=": ")
    print(f"{wanted_mib} MiB {'fit' if fits else 'do not fit'} (predicted)")


lab.explore(holes, block_mib=(1, 128, 1), wanted_mib=(1, 128, 1), region_mib=(64, 1024, 64))

# %% [markdown]
# On a GPU, three settings change the picture. They cannot be measured without one; each line is the command to try there:
#
# * `TF_GPU_ALLOCATOR=cuda_malloc_async python train.py`: the driver's allocator, which can move freed pages together.
# * `tf.config.experimental.set_memory_growth(gpu, True)`: the region grows in pieces, which are never joined. Others can use
#   the rest of the card; fragmentation gets worse.
# * `tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=4096)])`: one
#   region of a fixed size.
#
# ## Verdict

# %%
lab.verdict(
    "C23",
    "holds",
    died=failure.outcome == "OOM",
    not_needed=limit - live,
    wanted=wanted,
    largest=max(free),
    room_to_spare=control.peak_mib,
    budget=limit,
    tensors_at_end=fix.end_mib,
    process_at_end=fix.process_end_mib,
)

# %% [markdown]
# ## Exercises
#
# **1.** Write `largest_free(log)`: the MiB of the largest free piece in a dump. You may use `chunks()`.


# %%
def largest_free(log):
    # BEGIN SOLUTION
    return max(size for state, size in chunks(log) if state == "Free") / 2**20
    # END SOLUTION


# %%
check.largest_free(largest_free, dump, free)


# %% tags=["right"]
def largest_free(log):
    sizes = re.findall(r"Free +at \w+ of size (\d+)", log)
    return np.max([int(size) for size in sizes]) / 2**20


# %% tags=["wrong"]
# says: in bytes
def largest_free(log):
    return max(size for state, size in chunks(log) if state == "Free")


# %% tags=["wrong"]
# says: free ones only
def largest_free(log):
    return max(size for state, size in chunks(log)) / 2**20


# %% tags=["wrong"]
# says: in pieces
def largest_free(log):
    return sum(size for state, size in chunks(log) if state == "Free") / 2**20


# %% [markdown]
# **2.** Sometimes the order is given: the batches come from a queue, smallest first. Write `in_order(sizes)`: the same
# batches in the same order as in `sweep`, inside the budget in which it died. Return what is kept, one NumPy array a batch.


# %%
def in_order(sizes):
    # BEGIN SOLUTION
    return [tf.tanh(tf.constant(batch(rows)))[:, :KEPT].numpy() for rows in sizes]
    # END SOLUTION


# %%
check.in_order(in_order, sweep, SIZES, BUDGET)


# %% tags=["right"]
def in_order(sizes):
    room = tf.Variable(tf.zeros([sum(sizes), KEPT]))  # at its full size, before the first batch
    at = 0
    for rows in sizes:
        for part in np.array_split(batch(rows), 4):
            room[at : at + len(part)].assign(tf.tanh(part)[:, :KEPT])
            at += len(part)
    return np.split(room.numpy(), np.cumsum(sizes)[:-1])


# %% tags=["wrong"]
# says: out of memory
def in_order(sizes):
    return sweep(sizes)


# %% tags=["wrong"]
# says: another's place
def in_order(sizes):
    return sweep(sizes[::-1])


# %% tags=["wrong"]
# says: lost
def in_order(sizes):
    return sweep(sizes[:1])
