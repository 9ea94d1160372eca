# %% [markdown]
# # 16 · Reading an OOM: the allocator and fragmentation
#
# **Symptom:** *"OOM when allocating tensor … although nvidia-smi shows free memory"*, *"If the cause is memory
# fragmentation …"*, and a hundred lines of `Bin (256): Total Chunks …` that nobody reads.
#
# **Afterwards you can** read the message and the dump, draw from them what lay where, tell "too much in use" from
# "enough free, but in pieces", and order allocations so that the pieces do not arise.
#
# | | |
# |---|---|
# | Time | about a minute to run, 25 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C23 |

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes blocks four times as large
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import re

import matplotlib.pyplot as plt

import labsupport as lab

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log

BLOCK = lab.choose(SCALE, quick=16, full=64)  # MiB
BUDGET = f"{16 * BLOCK + 2} MiB"  # the allocator keeps 2 MiB apart for small tensors
WANTED = 4 * BLOCK

# %% [markdown]
# ## Predict
#
# TensorFlow does not ask the system for every tensor. It takes one large region (on a GPU: nearly all of the card) and
# cuts tensors out of it. The allocator is called *best-fit with coalescing*: a request gets the smallest free piece that
# is large enough, and neighbouring free pieces are joined.
#
# Fifteen blocks lie in a region with room for sixteen. Every other one is freed. Then one tensor of four blocks' size
# is wanted.

# %%
free_after = 16 * BLOCK - 8 * BLOCK
print(
    f"region {16 * BLOCK} MiB, in use 8 × {BLOCK} = {8 * BLOCK} MiB, free {free_after} MiB",
    end=", ",
)
print(f"wanted {WANTED} MiB")
my_guess = lab.guess("How large is the largest tensor that fits now?", GUESS_MIB)

# %% [markdown]
# ## Failure
#
# Twice as much is free as is wanted.


# %%
def block(mebibytes):
    return tf.zeros([mebibytes * 2**18])  # float32


def free_every_other(size, wanted):
    with lab.phase("fill"):
        blocks = [block(size) for _ in range(15)]
    with lab.phase("free every other"):
        for index in range(1, 15, 2):
            blocks[index] = None
    with lab.phase("want a large one"):
        large = block(wanted)
    return int(tf.size(large))


failure = lab.run(free_every_other, BLOCK, WANTED, budget=BUDGET, label="every other block freed")
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
print(f"free: {sum(free):.0f} MiB in {len(free)} pieces, the largest {max(free):.0f} MiB", end="; ")
print(f"wanted: {WANTED} MiB")

# %% [markdown]
# ## Fix
#
# The article says that the allocator fragments and stops there. TensorFlow's own message recommends
# `TF_GPU_ALLOCATOR=cuda_malloc_async`, which exists for GPUs only. What works everywhere is to let neighbours go together,
# so that they are joined. The same seven blocks' worth is freed here; only *which* ones differs.


# %%
def free_neighbours(size, wanted):
    with lab.phase("fill"):
        blocks = [block(size) for _ in range(15)]
    with lab.phase("free neighbours"):
        for index in range(7):
            blocks[index] = None
    with lab.phase("want a large one"):
        large = block(wanted)
    return int(tf.size(large))


fix = lab.run(free_neighbours, BLOCK, WANTED, budget=BUDGET, label="seven neighbours freed")
lab.expect_finished(fix)

# %% [markdown]
# ## Side by side

# %%
lab.compare(failure, fix)

# %%
lab.predicted_vs_measured(free_in_all=(free_after, sum(free)), largest_piece=(BLOCK, max(free)))

# %%
print(my_guess.against(max(free)))
assert sum(free) > WANTED > max(free), (
    "the failure must be fragmentation: enough free in all, no piece large enough"
)

# %% [markdown]
# ## Explain
#
# * **In use** is what tensors hold. **Reserved** is the region; the system, `top` and the GPU tool see only that. After a
#   tensor is freed its memory goes back to the region, never to the system.
# * **Fragmentation** needs mixed lifetimes: something long-lived between short-lived things. Variable batch shapes, a
#   growing list between steps, or a validation pass in the middle of training do it.
# * **Rounding.** Every tensor takes a multiple of 256 bytes, so many tiny tensors cost far more than their contents.
# * **The last piece.** When a free piece is less than twice the request, and the rest would be below 128 MiB, it is handed
#   out whole. Close to the limit, in-use can therefore jump by more than was asked for.
#
# The next cell measures the last two.


# %%
def rounding():
    with lab.phase("scalars"):
        scalars = [tf.zeros([]) + index for index in range(10_000)]
    del scalars
    blocks = [block(100)]
    with lab.phase("last piece"):  # 156 MiB are left in the region; the remainder would be 56
        blocks.append(block(100))


rounded = lab.measure(rounding, budget="258 MiB", label="rounding and the last piece")
numbers, tiny = lab.tensor_mib((10_000,)), rounded.phase("scalars").added_mib
print(f"10,000 scalars of 4 bytes hold {numbers:.2f} MiB of numbers and take {tiny:.2f} MiB")
jump = rounded.phase("last piece").added_mib
print(f"a tensor of 100 MiB out of the last piece takes {jump:.0f} MiB")

# %% [markdown]
# **When it flips.** If what is wanted is no larger than one hole, nothing fails. Move the slider: how large may the largest
# tensor be, when every other of the blocks in the region is freed?


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
    free=sum(free),
    largest=max(free),
    wanted=WANTED,
    died=failure.outcome == "OOM",
    neighbours_fit=fix.ok,
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


with lab.exercise(
    1, "chunks(log) gives (state, bytes); keep the free ones, take the largest, divide by 2**20."
):
    answer = largest_free(dump)
    assert answer is not None, "largest_free() returns nothing yet: return a number of MiB."
    assert abs(answer - max(free)) < 1, f"you found {answer:.0f} MiB; look again at the map above."

# %% [markdown]
# **2.** A script needs a long-lived buffer of four blocks, and works with fifteen blocks of which every other is freed.
# Make it fit into the same budget, by the order of allocations alone: return the
# buffer's size.


# %%
def in_a_better_order(size, wanted):
    # BEGIN SOLUTION
    large = block(wanted)  # first, while the region is whole
    blocks = [block(size) for _ in range(8)]  # the eight that stay
    for _ in range(7):
        passing = block(size)  # the seven that go, one after another in the same hole
        del passing
    return int(tf.size(large)) if len(blocks) == 8 else 0
    # END SOLUTION


ordered = lab.run(in_a_better_order, BLOCK, WANTED, budget=BUDGET, label="better order", quiet=True)
with lab.exercise(
    2,
    "Allocate what lives long first; "
    "let the short-lived blocks come and go in one hole at the end.",
):
    assert ordered.ok, str(ordered.error)
    assert ordered.value is not None, (
        "in_a_better_order() returns nothing yet: return int(tf.size(large))."
    )
    assert ordered.value == WANTED * 2**18, "the buffer has not the wanted size."
    assert ordered.peak_mib > 11.5 * BLOCK, "eight blocks and the buffer must be alive together."
