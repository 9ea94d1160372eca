# %% [markdown]
# # 26 · The GPU is full, and nothing runs
#
# **Symptom:** *"failed to allocate … from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory"*, *"Dst tensor is not
# initialized"* or *"OOM when allocating tensor"* before the first step of a small model that ran yesterday, and the advice
# to make the model smaller, or to call `set_memory_growth`.
#
# **Afterwards you can** read from the message whether your model is too large or somebody else holds the device, find out
# who, and say what memory growth changes and what it does not.
#
# | | |
# |---|---|
# | Time | about a minute to run, 25 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C50, C51 |
#
# No GPU is needed. TensorFlow cuts up a GPU's memory with an allocator that it also has for the CPU, and our runs use it.
# What only a driver can show is marked as *untestable here*, with the command that shows it.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes layers twice as wide, four times the weights
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import re
import shutil
import subprocess
import time
from functools import partial

import psutil

import labsupport as lab
from labsupport.graders import the_gpu_is_full as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

WIDTH = lab.choose(SCALE, quick=1024, full=2048)
DEVICE = lab.choose(SCALE, quick=256, full=1024)  # MiB of our device
LEFT = lab.choose(SCALE, quick=24, full=96)  # MiB that TensorFlow leaves to the driver
DEPTH, BATCH, STEPS = 4, 256, 10

# %% [markdown]
# ## Predict
#
# A notebook trained a small model, and was left open. Its kernel is idle. Now a second one is to train the same model on the
# same device. First by hand: Adam keeps two numbers a weight, its *slots*, and the step makes a gradient a weight.

# %%
by_hand = 4 * DEPTH * lab.tensor_mib((WIDTH, WIDTH))
print(f"weights, two slots, gradients: 4 × {DEPTH} × {WIDTH} × {WIDTH} × 4 B = {by_hand:.0f} MiB")
print(f"device: {DEVICE} MiB")
my_guess = lab.guess("How much of the device will the second notebook find free?", GUESS_MIB)

# %% [markdown]
# Then from the graph of the step, before anything is allocated:


# %%
def build(width=WIDTH, depth=DEPTH):
    layers = [keras.layers.Dense(width, "relu") for _ in range(depth)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    model.compile("adam", "mse")
    return model


predicted = lab.predict(build, BATCH, target=(WIDTH,)).total_mib
lab.note(
    f"One step is predicted to need {predicted:.0f} MiB. Twice that is below {DEVICE} MiB: there "
    "is room for both."
)

# %% [markdown]
# ## Failure
#
# TensorFlow asks the driver once, at its start, how much of the device is free, and that is its *limit*. By default it then
# *reserves* all of it as one region, and cuts its tensors out of that. Here no driver counts for two processes. So the two
# run one after the other, and the second gets as its limit what the first has not reserved. The variables of the
# environment make the allocator tell in its log what it reserves, as they do on a GPU.

# %%
TELL = {"TF_CPP_VMODULE": "bfc_allocator=1", **lab.NO_ONEDNN}


def train(batch=BATCH, steps=STEPS, *size):
    model = build(*size)
    x = tf.random.stateless_normal([batch, *model.input_shape[1:]], seed=[1, 2])
    history = model.fit(tf.data.Dataset.from_tensors((x, x)).repeat(steps), verbose=0)
    return history.history["loss"][-1]


first = lab.measure(train, budget=f"{DEVICE - LEFT} MiB", env=TELL, label="first notebook")
free = DEVICE - first.reserved_mib
lab.note(
    f"The first notebook's tensors need {first.peak_mib:.0f} MiB. Reserved are "
    f"{first.reserved_mib:.0f}, and stay so until its kernel ends."
)

# %%
failure = lab.run(train, budget=f"{free:.0f} MiB", env=TELL, label="second notebook")
lab.expect_oom(failure)

# %% [markdown]
# The same model, the same device, and it dies before its first step. What does the error say? Three of the four figures that
# count are in the *Log of the process* above. The fourth, the device, is known.


# %%
def figures(log):
    """MiB: what was asked for when memory ran out, in use by this process, and its limit."""
    asked = re.findall(r"ran out of memory trying to allocate ([\d.]+\w+)", log)[-1]
    stats = r"^Limit: +([\d.]+\w+)\s^InUse: +([\d.]+\w+)"
    limit, in_use = re.findall(stats, log, re.MULTILINE)[-1]
    sizes = [size if size.endswith("B") else f"{size} B" for size in (asked, in_use, limit)]
    return [lab.parse_size(size) / 2**20 for size in sizes]


asked, in_use, limit = figures(failure.error.log)
lab.note(
    f"Asked for were {asked:.1f} MiB, with {in_use:.1f} in use. The limit is {limit:.0f} MiB, and "
    f"the device has {DEVICE}. **A limit far below the device is the sign:** when this process "
    "started, the rest was not free. Its own model has nothing to do with that."
)

# %% [markdown]
# | on a GPU you read | how to read it |
# |---|---|
# | `Created device … with … MB memory` | the limit, when the process starts: the first line to look at |
# | `failed to allocate … from device: CUDA_ERROR_OUT_OF_MEMORY` | the size of a *region*, not of a tensor or a model. It tries again with nine tenths; if that ends without an error, all is well |
# | `OOM when allocating tensor with shape […]` | what was asked for: product of the shape × bytes of the type |
# | `Limit:`, `InUse:` | the limit, and what this process's tensors hold |
# | `Dst tensor is not initialized` | the place for a copy from host to GPU could not be had. It tells no size: look for the lines above |
#
# The first, second and last come from the GPU's part of TensorFlow and are **untestable here**. In a
# [public report](https://github.com/tensorflow/models/issues/9809) of *Dst tensor is not initialized* the dump reads,
# in bytes as until TensorFlow 2.19, `Limit: 55115776` and `InUse: 2048`: 53 MiB on a card of many GiB, and no model in it yet.
#
# ## Advice, tested
#
# *"Call `tf.config.experimental.set_memory_growth(gpu, True)`."* Then regions are reserved as they are needed, small ones
# first, then larger ones. From outside, the same is set by `TF_FORCE_GPU_ALLOW_GROWTH=true`; our runs heed it on a
# CPU, too. It goes where one sees the error, into the second notebook:

# %%
GROWTH = {**TELL, "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
advice = lab.run(train, budget=f"{free:.0f} MiB", env=GROWTH, label="second, growth in it alone")
lab.expect_oom(advice)

# %% [markdown]
# What is not free cannot be reserved, in one region or in many.
#
# ## Fix
#
# Growth in *both*: the first then reserves what it needs and the rest of its last region, and the second finds what is
# left. The model, device and second notebook are those of the last run.

# %%
grown = lab.measure(train, budget=f"{DEVICE - LEFT} MiB", env=GROWTH, label="first, growth")
rest = DEVICE - grown.reserved_mib
fix = lab.run(train, budget=f"{rest:.0f} MiB", env=GROWTH, label="second, growth in both")
lab.expect_finished(fix)

# %% [markdown]
# Ending the idle kernel is the other cure, and the better one: it leaves the second notebook the whole device, where
# the first has run as a control.
#
# ## Side by side

# %%
lab.compare(first, failure, advice, grown, fix)

# %% [markdown]
# Who held it? Both run once more, while TensorFlow records every allocation.

# %%
lab.take_apart(failure, fix)

# %%
lab.predicted_vs_measured(one_step=(predicted, first.peak_mib))

# %%
print(my_guess.against(free))
lab.note(
    f"In one region the first notebook needs {first.peak_mib:.0f} MiB and reserves "
    f"{first.reserved_mib:.0f}; in regions that grow {grown.peak_mib:.0f} and "
    f"{grown.reserved_mib:.0f}. What changes is what others find: {free:.0f} MiB, or {rest:.0f}. "
    f"With the second beside it, {rest - fix.reserved_mib:.0f} are still free."
)

# %% [markdown]
# The tensors are the same either way. In use can differ a little: a piece may be larger than its tensor, and the order of a
# graph's operations is another in every run.
#
# ## Explain
#
# * **Asked for** is one tensor. **In use** is what this process's tensors hold. **Reserved** is what its regions take from
#   the device; that is what the driver counts and `nvidia-smi` shows. **The limit** is what was free at its start.
# * A kernel that idles gives nothing back. A tensor that is deleted goes back to its region, a region to nobody.
# * Growth in one process helps the *others*. One with growth starves behind one without, as it did above.
#
# ### What holds the device, in three steps
#
# **1. Ask the driver.** `nvidia-smi` knows each process and what it has reserved. This cell asks it, where there is one:

# %%
QUESTION = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv"]
if shutil.which("nvidia-smi"):
    print(subprocess.run(QUESTION, capture_output=True, text=True).stdout)
else:
    print("untestable here, where no GPU is; the command is:", " ".join(QUESTION))

# %% [markdown]
# **2. Look for old kernels.** Closing a tab does not end one. JupyterLab lists them under *Running Terminals and Kernels*, and
# they can be found as processes. Is one of these numbers in the driver's list, and not yours? Shut it down. (In a container
# the driver's list may be empty though the device is full. `fuser -v /dev/nvidia*` on the host, as root, names them all.)

# %%
for process in psutil.process_iter(["pid", "cmdline", "create_time"]):
    if "ipykernel_launcher" in (process.info["cmdline"] or []):
        hours = (time.time() - process.info["create_time"]) / 3600
        print(f"kernel: process {process.info['pid']}, open for {hours:.1f} hours")

# %% [markdown]
# **3. If both shall stay, set growth in *both*,** or better a share for each, which also holds when one of them needs more:
# `tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=4096)])`. Either must
# stand before the first tensor.
#
# ### What growth costs
#
# Another model, alone on a device that is a little larger: narrow layers and a large batch, so that its tensors are large
# beside the regions. In one region, and in regions that grow; nothing else differs.

# %%
ROWS, NARROW = lab.choose(SCALE, quick=33792, full=135168), 256
narrow = (train, ROWS, 2, NARROW, 2)  # two steps of two layers
larger = DEVICE * 9 // 8
alone = {"budget": f"{larger} MiB"}
needed = lab.predict(partial(build, NARROW, 2), ROWS, target=(NARROW,))
one_region = lab.measure(*narrow, env=TELL, label="large tensors, one region", **alone)
grown_alone = lab.run(*narrow, env=GROWTH, label="large tensors, growth", **alone)
lab.expect_oom(grown_alone)

# %%
asked, in_use, limit = figures(grown_alone.error.log)


def idle_mib(log):
    """MiB of regions in which nothing is in use."""
    parts = re.split(r"Next region of size (\d+)", log)[1:]
    return sum(int(size) for size, part in zip(parts[::2], parts[1::2]) if "InUse at" not in part)


idle = limit - grown_alone.reserved_mib + idle_mib(grown_alone.error.log) / 2**20
regions = [size / 2**20 for size in grown_alone.regions]
whole = [size for size in regions if asked <= size < 2 * asked]
lab.note(
    f"A step is predicted to need {needed.lowest_mib:.0f} to {needed.total_mib:.0f} MiB of "
    f"{larger}, as the order of operations falls out. In one region the steps end, "
    f"with a peak of {one_region.peak_mib:.0f}, the rest of a last piece included. In regions of "
    f"{', '.join(f'{size:.0f}' for size in regions)} MiB they fail, with {in_use:.0f} in use, when "
    f"{asked:.0f} more are asked for. A tensor lies within one region. {len(whole)} of the regions "
    "have room for one such tensor and not for two, and the rest is handed out with it: it counts "
    "as in use, and nobody can have it."
)
lab.note(f"Not reserved, or in regions without a tensor, are {idle:.0f} MiB.")

# %% [markdown]
# The last figure counts, since a GPU's allocator gives regions without a tensor back before it fails, and reserves anew. The
# CPU's does not. Only if that figure were above what was asked for could a GPU have gone on.
#
# **When it flips.** Where the need is far below the device, those rests do not matter. Move the sliders: how many such
# processes find room?


# %%
def how_many(device_mib=16384, need_mib=3000):
    reserved, size = 0, 2
    while reserved < need_mib:
        reserved, size = reserved + size, 2 * size
    print(
        f"one region each: 1 process; regions that double: {device_mib // reserved}, with "
        f"{reserved} MiB each; a limit of {need_mib} MiB: {device_mib // need_mib} (predicted)"
    )


lab.explore(how_many, device_mib=(1024, 81920, 1024), need_mib=(100, 20000, 100))

# %% [markdown]
# **What does not carry over to a GPU.** cuDNN and cuBLAS take memory *beside* TensorFlow's region. Where that region is all
# of the device they find none (`CUDNN_STATUS_INTERNAL_ERROR`), and growth leaves them some: that is when the advice works in
# the process that failed. It is **untestable here**; on a GPU run a script that fails so with and without
# `TF_FORCE_GPU_ALLOW_GROWTH=true`, alone in the list of step 1.
#
# ## Verdict

# %%
lab.verdict(
    "C50",
    "partly",
    need_one_region=first.peak_mib,
    need_growth=grown.peak_mib,
    fits_where_it_failed=advice.ok,
    fits_set_in_both=fix.ok,
)
lab.verdict(
    "C51",
    "fails",
    need=first.peak_mib,
    device=DEVICE,
    limit=figures(failure.error.log)[2],
    died=failure.outcome == "OOM",
    died_alone=not first.ok,
    wording_of_a_gpu=None,
)

# %% [markdown]
# ## Exercises
#
# **1.** Write `cause(log, device)`: from a log and the MiB of the device, return `"in pieces"` if what was asked for was free
# within the limit, `"another process"` if it was not, but would have been within the device, and `"too large"` if not even
# that. You may use `figures()`.


# %%
def cause(log, device):
    # BEGIN SOLUTION
    asked, in_use, limit = figures(log)
    if in_use + asked <= limit:
        return "in pieces"
    return "another process" if in_use + asked <= device else "too large"
    # END SOLUTION


# %%
check.cause(cause, failure.error.log, DEVICE)


# %% tags=["right"]
def cause(log, device):
    last = log[log.rindex("ran out of memory trying to allocate") :]
    names = ("trying to allocate", "Limit:", "InUse:")
    sizes = [re.search(rf"{name} +([\d.]+[KMG]?i?B)", last)[1] for name in names]
    wanted, limit, used = map(lab.parse_size, sizes)
    if used + wanted > device * 2**20:
        return "too large"
    return "in pieces" if used + wanted <= limit else "another process"


# %% tags=["wrong"]
# says: too large
def cause(log, device):  # a limit below the device alone says nothing: some is always left
    asked, in_use, limit = figures(log)
    if in_use + asked <= limit:
        return "in pieces"
    return "another process" if limit < device else "too large"


# %% tags=["wrong"]
# says: another process
def cause(log, device):  # forgets what is in use
    asked, in_use, limit = figures(log)
    if asked <= limit:
        return "in pieces"
    return "another process" if asked <= device else "too large"


# %% tags=["wrong"]
# says: in pieces
def cause(log, device):
    asked, in_use, limit = figures(log)
    return "another process" if in_use + asked <= device else "too large"


# %% [markdown]
# **2.** Write `others(report, me)`: from what step 1 prints, return `(process, MiB)` of every process but `me`, the largest
# first. Where the driver does not tell a size, it prints `[N/A]`: give `None` for it, behind all others.

# %%
REPORT = """pid, used_gpu_memory [MiB]
4012, 310 MiB
3555, 14832 MiB
4777, [N/A]
4801, 96 MiB
"""


# %%
def others(report, me):
    # BEGIN SOLUTION
    found = []
    for line in report.splitlines()[1:]:
        process, size = line.split(", ")
        if int(process) != me:
            found.append((int(process), None if "N/A" in size else int(size.split()[0])))
    return sorted(found, key=lambda one: -1 if one[1] is None else one[1], reverse=True)
    # END SOLUTION


# %%
check.others(others, REPORT)


# %% tags=["right"]
def others(report, me):
    rows = re.findall(r"^(\d+), (?:(\d+) MiB|\[N/A\])", report, re.MULTILINE)
    sizes = {int(process): int(size) if size else None for process, size in rows}
    sizes.pop(me, None)
    told = [(process, size) for process, size in sizes.items() if size is not None]
    told.sort(key=lambda row: row[1])
    return told[::-1] + [(process, None) for process in sizes if sizes[process] is None]


# %% tags=["wrong"]
# says: largest first
def others(report, me):  # sorts text
    rows = [line.split(", ") for line in report.splitlines()[1:]]
    rows = [(int(process), size) for process, size in rows if int(process) != me]
    rows.sort(key=lambda row: row[1], reverse=True)
    return [(process, None if "N/A" in size else int(size.split()[0])) for process, size in rows]


# %% tags=["wrong"]
# says: your own
def others(report, me):
    rows = [line.split(", ") for line in report.splitlines()[1:]]
    sizes = [(int(process), None if "N/A" in size else int(size[:-4])) for process, size in rows]
    return sorted(sizes, key=lambda row: row[1] or 0, reverse=True)


# %% tags=["wrong"]
# says: does not tell
def others(report, me):
    rows = re.findall(r"^(\d+), (\d+) MiB", report, re.MULTILINE)
    found = [(int(process), int(size)) for process, size in rows if int(process) != me]
    return sorted(found, key=lambda row: -row[1])
