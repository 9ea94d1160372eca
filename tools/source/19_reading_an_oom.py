# %% [markdown]
# # 19 · Reading an OOM: the allocator and fragmentation
#
# **Symptom:** *"OOM when allocating tensor"* although the log of the same error shows more memory free than was asked for, *"If
# the cause is memory fragmentation …"*, and a hundred lines of `Bin (256): Total Chunks …` that nobody reads.
#
# **Afterwards you can** read the message and the dump, draw from them what lay where, tell "too much in use" from
# "enough free, but in pieces", and order a program's work so that the pieces do not arise.
#
# | | |
# |---|---|
# | Time | about a minute to run, 25 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C23 |

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes four times as many rows
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import re

import matplotlib.pyplot as plt

import labsupport as lab
from labsupport.graders import reading_an_oom as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log

ROWS = lab.choose(SCALE, quick=64, full=256)  # sentences in a batch
WIDTH = 512
LENGTHS = [16 * number for number in range(1, 13)]  # words a sentence, batch by batch
UNIT = lab.tensor_mib((ROWS, 16, WIDTH))
BUDGET = f"{112 * UNIT:.0f} MiB"
ROUNDS = 8  # over the same batches

# %% [markdown]
# ## Predict
#
# TensorFlow does not ask the system for every tensor. It takes a large *region* (on a GPU: nearly all of the card) and
# cuts tensors out of it. The allocator is called BFC, *best fit with coalescing*: a request gets the smallest free piece
# that is large enough, and neighbouring free pieces are joined.
#
# A model encodes sentences, and the outputs are kept. To save padding the batches are sorted by length, shortest first, as
# many guides advise. Each batch makes word vectors, which are gone when it is done, and an output of the same size, which
# stays.

# %%
kept = UNIT * len(LENGTHS) * (len(LENGTHS) + 1) / 2
last = UNIT * len(LENGTHS)
print(f"outputs of all {len(LENGTHS)} batches: {kept:.0f} MiB")
print(
    f"word vectors of the last batch: {last:.0f} MiB, together {kept + last:.0f}; budget {BUDGET}"
)
my_guess = lab.guess(
    "By that sum it fits. It will fail all the same: how much is free when it does?", GUESS_MIB
)

# %% [markdown]
# ## Failure


# %%
def output(words):
    table = tf.random.stateless_normal([1000, WIDTH], seed=[1, 2])
    weight = tf.random.stateless_normal([WIDTH, WIDTH], seed=[3, 4])
    vectors = tf.gather(table, words)
    return tf.matmul(vectors, weight)


def batch(length):
    return tf.random.stateless_uniform([ROWS, length], [length, 0], 0, 1000, tf.int32)


def encode(lengths):
    outputs = [output(batch(length)) for length in lengths]
    return sum(float(tf.reduce_sum(abs(one[:, 0]))) for one in outputs)


def rounds(lengths):
    for _ in range(ROUNDS):
        total = encode(lengths)
    return total


failure = lab.run(rounds, LENGTHS, budget=BUDGET, label="shortest first")
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
    """(state, bytes) of every chunk of the largest region in the dump, by address."""
    regions = re.split(r"Next region of size \d+", log)[1:]
    found = [re.findall(r"(InUse|Free) +at [0-9a-f]+ of size (\d+)", region) for region in regions]
    largest = max(found, key=lambda region: sum(int(size) for _, size in region))
    return [(state, int(size)) for state, size in largest]


dump, wanted = failure.error.log, failure.wanted_mib
free = [size / 2**20 for state, size in chunks(dump) if state == "Free"]
looks = {
    "InUse": {"color": lab.COLOURS[1], "label": "in use"},
    "Free": {"fill": False, "hatch": "///", "label": "free"},
}
figure, axes = plt.subplots(figsize=(10, 1.5))
at = 0
for state, size in chunks(dump):
    axes.barh(0, size / 2**20, left=at / 2**20, edgecolor=lab.COLOURS[-1], **looks[state])
    at += size
axes.set(yticks=[], xlabel="place in the region (MiB): blue = in use, hatched = free")
axes.set_title("The region when the allocation failed")
plt.show()
lab.note(
    f"{sum(free):.0f} MiB are free in {len(free)} pieces, the largest of {max(free):.0f} MiB; "
    f"wanted were {wanted:.0f} MiB. The larger holes are where the word vectors of a batch "
    "were. The "
    "next batch is longer and fits into none of them, and the outputs between them keep them from "
    "being joined."
)

# %% [markdown]
# ## Fix
#
# The advice says that the allocator fragments, and stops there. TensorFlow's message recommends
# `TF_GPU_ALLOCATOR=cuda_malloc_async`, which exists for GPUs only. What works everywhere is the order: the same batches,
# budget and outputs, the *longest* first. Its hole is large enough for all that come after it.

# %%
fix = lab.run(rounds, LENGTHS[::-1], budget=BUDGET, label="longest first")
lab.expect_finished(fix)

# %% [markdown]
# What one round, shortest first, would have needed without a tight budget, and the control: is it the outputs between the
# holes? Shortest first once more, with nothing kept.


# %%
def encode_and_forget(lengths):
    return sum(float(tf.reduce_sum(abs(output(batch(length))[:, 0]))) for length in lengths)


unbounded = lab.measure(encode, LENGTHS, label="shortest first, no tight budget")
control = lab.measure(encode_and_forget, LENGTHS, budget=BUDGET, label="shortest first, not kept")

# %% [markdown]
# ## Side by side

# %%
lab.compare(unbounded, failure, fix, control)

# %% [markdown]
# Who held it? Both run once more while TensorFlow records every allocation. The first holds less than the second, and
# died: there was room enough, but in pieces. A size is the piece that was handed out, and can be larger than its
# tensor.

# %%
lab.take_apart(failure, fix)

# %%
number = round(wanted / UNIT)  # the batch that had no room
lab.predicted_vs_measured(
    free_in_all=(UNIT * number * (number - 1) / 2, sum(free)),
    largest_piece=(UNIT * (number - 1), max(free)),
)

# %%
print(my_guess.against(sum(free)))
assert sum(free) > wanted > max(free), "enough free in all, no piece large enough"
for arm in (fix, control):
    assert abs(arm.value - unbounded.value) < 1e-4 * unbounded.value, "not the same outputs"
lab.note(
    f"All arms compute the same outputs. Longest first peaks at {fix.peak_mib:.0f} MiB, shortest "
    f"first at {unbounded.peak_mib:.0f}, both below the budget of {BUDGET}: not the sum of the "
    "tensors decides, but where they lie."
)

# %% [markdown]
# ## Explain
#
# * **In use** is what tensors hold. **Reserved** is the region; the system, `top` and `nvidia-smi` see only that, so they
#   cannot show fragmentation. After a tensor is freed its memory goes back to the region, never to the system.
# * **Fragmentation** needs mixed lifetimes: something long-lived between short-lived things, and requests that grow.
# * **Rounding.** Every tensor takes a multiple of 256 bytes, so many tiny tensors cost far more than their contents.
# * **The last piece.** When a free piece is less than twice the request, and the rest would be below 128 MiB, it is handed
#   out whole, as to the last chunk of the map above. Close to the limit, in-use can jump by more than was asked for.
#
# The next cells measure who keeps freed memory, and the last two.

# %%
# The same outputs from the C library's allocator. (oneDNN, Intel's kernels, would bring an
# allocator of its own.)
malloc = {"TF_CPU_ALLOCATOR_USE_BFC": "0", **lab.NO_ONEDNN}
c_library = lab.measure(encode, LENGTHS, env=malloc, label="shortest first, C library")
assert unbounded.end_mib < 1, "the tensors are gone at the end"
if c_library.process_end_mib is not None:
    lab.note(
        f"When all tensors are gone, the process keeps {unbounded.process_end_mib:.0f} of "
        f"{unbounded.process_peak_mib:.0f} MiB with BFC, and {c_library.process_end_mib:.0f} of "
        f"{c_library.process_peak_mib:.0f} with the C library: it is the allocator that keeps them."
    )


# %%
def rounding():
    with lab.phase("scalars"):
        scalars = [tf.zeros([]) + index for index in range(10_000)]
    del scalars
    blocks = [tf.zeros([100 * 2**18])]
    # 156 MiB are left in the region; the rest would be 56, and is split off from 128 MiB on.
    with lab.phase("last piece"):
        blocks.append(tf.zeros([100 * 2**18]))


rounded = lab.measure(rounding, budget="258 MiB", label="rounding and the last piece")
numbers, tiny = lab.tensor_mib((10_000,)), rounded.phase("scalars").added_mib
jump = rounded.phase("last piece").added_mib
lab.note(
    f"10,000 scalars of 4 bytes hold {numbers:.2f} MiB of numbers and take {tiny:.2f} MiB. "
    f"A tensor of 100 MiB out of the last piece takes {jump:.0f} MiB."
)

# %% [markdown]
# **When it flips.** With equal lengths every hole fits the next batch, and the order does not matter. Move the sliders: in
# which room do the batches fit, by the sum of what lies where?


# %%
def room(batches=12, first_length=16, growth=16):
    sizes = [
        lab.tensor_mib((ROWS, first_length + growth * number, WIDTH)) for number in range(batches)
    ]
    longest_first = sum(sizes) + sizes[-1]
    shortest_first = 2 * sum(sizes) if growth else longest_first
    print(f"longest first {longest_first:.0f} MiB, shortest first {shortest_first:.0f} (predicted)")


lab.explore(room, batches=(1, 40), first_length=(16, 256, 16), growth=(0, 64, 4))

# %% [markdown]
# On a GPU, three settings change the picture. Each line is the command to try there. The second is measured without one, too,
# in [lab 26](26_the_gpu_is_full.ipynb), with what it does for others on the same device:
#
# * `TF_GPU_ALLOCATOR=cuda_malloc_async python train.py`: the driver's allocator, which can move freed pages together.
# * `tf.config.experimental.set_memory_growth(gpu, True)`: the region grows in pieces, which are never joined. Others can use
#   the rest of the card; more of it can be lost in rests.
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
    wanted=wanted,
    died=failure.outcome == "OOM",
    process_peak=unbounded.process_peak_mib,
    process_at_end=unbounded.process_end_mib,
)

# %% [markdown]
# ## Exercises
#
# **1.** Write `cause(log, wanted)`: from a dump, and the MiB that had no room, return `"in pieces"` if enough was free in all,
# and `"in use"` if not. You may use `chunks()`. The check has dumps of its own, too.


# %%
def cause(log, wanted):
    # BEGIN SOLUTION
    free = sum(size for state, size in chunks(log) if state == "Free")
    return "in pieces" if free >= wanted * 2**20 else "in use"
    # END SOLUTION


# %%
check.cause(cause, dump, wanted)


# %% tags=["right"]
def cause(log, wanted):
    lines = re.findall(r"Free +at \w+ of size (\d+)", log)
    return ("in use", "in pieces")[sum(map(int, lines)) / 2**20 > wanted]


# %% tags=["right"]
def cause(log, wanted):  # from the last lines of the dump
    size = float(re.search(r"Total size in pool: ([\d.]+)MiB", log)[1])
    used = float(re.search(r"in-use chunks: ([\d.]+)MiB", log)[1])
    return "in use" if size - used < wanted else "in pieces"


# %% tags=["wrong"]
# says: too much was in use
def cause(log, wanted):
    largest = max((size for state, size in chunks(log) if state == "Free"), default=0)
    return "in pieces" if largest < wanted * 2**20 else "in use"


# %% tags=["wrong"]
# says: too much was in use
def cause(log, wanted):
    return "in pieces" if sum(size for state, size in chunks(log) if state == "Free") else "in use"


# %% tags=["wrong"]
# says: too much was in use
def cause(log, wanted):
    free = sum(size for state, size in chunks(log) if state == "Free")
    return "in pieces" if free >= wanted else "in use"


# %% tags=["wrong"]
# says: too much was in use
def cause(log, wanted):
    free = sum(size for state, size in chunks(log) if state == "Free")
    return "in pieces" if free >= wanted * 10**6 else "in use"


# %% tags=["wrong"]
# says: in pieces
def cause(log, wanted):
    return "fragmented"


# %% [markdown]
# **2.** The batches come shortest first, from a generator, and the caller wants the outputs as a list in that order.
# Write `encode_all(batches, output)`, which calls `output(words)` for each of them, so that it fits the budget.


# %%
def encode_all(batches, output):
    outputs = []
    for words in batches:
        one = output(words)
        # BEGIN SOLUTION
        one = one.numpy()  # a copy outside the region
        # END SOLUTION
        outputs.append(one)
    return outputs


# %%
check.encode_all(encode_all, output, batch, LENGTHS, BUDGET)


# %% tags=["right"]
def encode_all(batches, output):
    words = list(batches)
    done = {}
    for place in sorted(range(len(words)), key=lambda place: -words[place].shape[1]):
        done[place] = output(words[place])
    return [done[place] for place in range(len(words))]


# %% tags=["wrong"]
# says: another batch
def encode_all(batches, output):
    return [output(words) for words in reversed(list(batches))]


# %% tags=["wrong"]
# says: a list of outputs is wanted
def encode_all(batches, output):
    for words in batches:
        yield output(words).numpy()


# %% tags=["wrong"]
# says: values of output
def encode_all(batches, output):
    return [tf.cast(output(words), tf.float16).numpy() for words in batches]


# %% tags=["wrong"]
# says: no room
def encode_all(batches, output):
    import numpy as np

    return [np.asarray(output(words)) for words in batches]


# %% tags=["wrong"]
# says: a list of outputs is wanted
def encode_all(batches, output):
    for words in batches:
        last = output(words)
    return last


# %% tags=["wrong"]
# says: has the shape
def encode_all(batches, output):
    return [tf.reduce_mean(output(words), axis=1) for words in batches]
