# %% [markdown]
# # 30 · Fine-tuning: LoRA, int8 weights, and copies that nobody counts
#
# **Symptom:** *"OOM although LoRA trains less than one per cent of the parameters"*, *"QLoRA needs as much memory as before"*, or
# *"EarlyStopping with restore_best_weights runs out of RAM"*.
#
# **Afterwards you can** say what LoRA takes away from a training step and what it leaves, put an adapter where it costs
# least, and count the copies that averages, best weights and checkpoints make.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C41, C43, C60 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes weights, and the other model's batch, four times as large
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import gc
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import fine_tuning as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

WIDTH = lab.choose(SCALE, quick=384, full=768)
BUDGET = lab.choose(SCALE, quick="30 MiB", full="120 MiB")
BLOCKS, RANK = 4, 8
WIDE = {"width": WIDTH, "length": 4, "batch": 2}  # weights are most
LONG = {"width": 64, "length": 256, "batch": lab.choose(SCALE, quick=8, full=32)}  # outputs are
ADAM = {"optimizer": "adam", "loss": "mse"}

# %% [markdown]
# ## Predict
#
# *LoRA* (low-rank adaptation) leaves a kernel `W` of `n × m` numbers as it is, frozen, and trains two thin matrices, `A` of
# `n × r` and `B` of `r × m`: the layer works with `W + A·B`. Keras does that to a layer by `layer.enable_lora(r)`.
#
# The model is a stack of residual blocks, as in a transformer without its attention. Nothing is downloaded: random
# weights stand for pretrained ones, and take the same memory.


# %%
class Beside(keras.layers.Dense):
    """A dense layer that may have an adapter: beside its kernel. (The fix below tells why.)"""

    def call(self, x, training=None):
        outputs = keras.ops.matmul(x, self._kernel)  # Keras' `self.kernel` has the adapter in it
        if self.lora_enabled:
            outputs += keras.ops.matmul(keras.ops.matmul(x, self.lora_kernel_a), self.lora_kernel_b)
        return self.activation(outputs + self.bias)


class Block(keras.layers.Layer):
    def __init__(self, width, beside=False, recomputed=False):
        super().__init__()
        dense = Beside if beside else keras.layers.Dense
        self.up, self.down = dense(4 * width, "relu"), dense(width)
        self.recomputed = recomputed

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], self.up.units))

    def call(self, x):
        added = lambda x: self.down(self.up(x))
        return x + (tf.recompute_grad(added) if self.recomputed else added)(x)


def build(width, length, adapted=0, head_only=False, int8=False, **blocks_are):
    """The model; so many of its blocks, counted from the end, get adapters."""
    keras.utils.set_random_seed(0)
    outputs = inputs = keras.Input((length, width))
    blocks = [Block(width, **blocks_are) for _ in range(BLOCKS)]
    for block in blocks:
        outputs = block(outputs)
    model = keras.Model(inputs, keras.layers.Dense(10)(outputs))
    if int8:
        model.quantize("int8")
    for block in blocks:
        block.trainable = not head_only
    if adapted:
        for block in blocks[:-adapted]:
            block.trainable = False
        for layer in [part for block in blocks[-adapted:] for part in (block.up, block.down)]:
            layer.enable_lora(RANK)
    return model


kernels = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * BLOCKS
weights = sum(lab.tensor_mib(shape) for shape in kernels)
adapters = sum(lab.tensor_mib((n + m, RANK)) for n, m in kernels)
print(f"kernels {weights:.1f} MiB, adapters of rank {RANK} {adapters:.2f} MiB")

# %%
question = "Peak of a training step with Adam, after enable_lora() on all of these layers?"
my_guess = lab.guess(question, GUESS_MIB)

# %% [markdown]
# By hand: weights, gradients and Adam's two slots are four times the weights that are trained. Full fine-tuning has them
# for all, except that a graph frees the gradient of one layer before it makes the next. LoRA has them for the adapters.

# %%
print(f"full: weights and slots {3 * weights:.1f} MiB, and passing gradients")
print(f"LoRA: {weights:.1f} MiB and four times the adapters, {weights + 4 * adapters:.1f} MiB")

# %% [markdown]
# ## Failure
#
# Full fine-tuning, under a budget that leaves more than half as much again as the weights.


# %%
def tune(model, batch, steps=3, eager=False):
    """Losses of some steps on one batch."""
    model.compile(keras.optimizers.Adam(1e-4), "mse", run_eagerly=eager)
    model.optimizer.build(model.trainable_variables)  # else the first step does it
    x = np.random.default_rng(0).random((batch, *model.input_shape[1:]), np.float32)
    y, losses = np.ones((*x.shape[:-1], 10), np.float32), []
    for _ in range(steps):
        model.reset_metrics()
        losses.append(float(model.train_on_batch(x, y)))
    return losses


def fine_tuned(options):
    return tune(build(WIDE["width"], WIDE["length"], **options), WIDE["batch"])


FULL, ENABLED, ADAPTED = {}, {"adapted": BLOCKS}, {"adapted": BLOCKS, "beside": True}
# Without oneDNN (Intel's kernels for CPUs), running out of memory is an error every time, and not
# now and then a crash.
PLAIN = {"env": lab.NO_ONEDNN}
failure = lab.run(fine_tuned, FULL, budget=BUDGET, label="full fine-tuning", **PLAIN)
lab.expect_oom(failure)

# %% [markdown]
# ## Advice, tested
#
# LoRA, as Keras has it. By hand it fits. What do both need, and what does a prediction say, which reads the graph of the
# step in place of the paper on LoRA?

# %%
unbounded = lab.measure(fine_tuned, FULL, label="full, no tight budget", **PLAIN)
enabled = lab.measure(fine_tuned, ENABLED, label="enable_lora(), no tight budget", **PLAIN)
room = lab.parse_size(BUDGET) / 2**20


def predicted(options):
    make = lambda: build(WIDE["width"], WIDE["length"], **options)
    return lab.predict(make, WIDE["batch"], **ADAM).total_mib


lab.predicted_vs_measured(
    full=(predicted(FULL), unbounded.peak_mib),
    enable_lora=(predicted(ENABLED), enabled.peak_mib),
    enable_lora_by_hand=(weights + 4 * adapters, enabled.peak_mib),
)

# %%
lab.note(
    f"`enable_lora()` takes {enabled.peak_mib:.1f} MiB, more than the budget of {room:.0f}, and "
    f"{enabled.peak_mib / weights:.1f} times the weights."
)
assert enabled.peak_mib > room, "by the budget it would fit: the fix below has nothing to do"

# %% [markdown]
# ## Fix
#
# `x·(W + A·B)` is `x·W + (x·A)·B`. Keras' `Dense` works out the left side: a matrix as large as the kernel is made in each
# layer, and kept for the way back, since the gradient of the layer's input needs it. The right side needs nothing larger
# than an output. `Beside`, above, does that; one word of the model changes.

# %%
fix = lab.run(fine_tuned, ADAPTED, budget=BUDGET, label="adapters beside kernels", **PLAIN)
lab.expect_finished(fix)

# %% [markdown]
# ## Side by side

# %%
lab.compare(unbounded, failure, enabled, fix)

# %% [markdown]
# Who held it? Three of them run once more while TensorFlow records every allocation. Most slots are gone with
# `enable_lora()`, and nearly of the size of the weights there is a second lot: kernels made anew, which count as *activations*.

# %%
lab.take_apart(failure, enabled, fix)

# %%
print(my_guess.against(enabled.peak_mib))
print("Losses, enable_lora():", *(f"{loss:.5f}" for loss in enabled.value))
print("Losses, beside:       ", *(f"{loss:.5f}" for loss in fix.value))
off = float(np.max(np.abs(np.array(enabled.value) / fix.value - 1)))
assert off < 1e-3, "both are the same training"
by_hand = (weights + 4 * adapters, fix.peak_mib)
lab.predicted_vs_measured(beside=(predicted(ADAPTED), fix.peak_mib), beside_by_hand=by_hand)

# %% [markdown]
# The highest point of the fix is not a step. It is where the model was made: while a kernel gets its first numbers, there is
# more than that kernel. The table below tells both apart.
#
# ### Where outputs are most
#
# The same blocks, narrow, with long sequences: here outputs of layers fill the memory. Each way is taken for both models; a
# step's peak counts from before the model was made.

# %%
WAYS = {
    "full": FULL,
    "head only": {"head_only": True},
    "enable_lora()": ENABLED,
    "beside": ADAPTED,
    "beside, last block": {"adapted": 1, "beside": True},
    "beside, recomputed": {**ADAPTED, "recomputed": True},
    "int8, enable_lora()": {**ENABLED, "int8": True},
    "int8, enable_lora(), eager": {**ENABLED, "int8": True},
}


def every_way(width, length, batch):
    gc.freeze()  # Keras collects at each layer that it quantizes: not the libraries' objects, too
    losses = {}
    for name, options in WAYS.items():
        gc.collect()
        with lab.phase(name):
            with lab.phase(f"{name}: made"):
                model = build(width, length, **options)
            with lab.phase(f"{name}: steps"):
                losses[name] = tune(model, batch, eager=name.endswith("eager"))
            del model
    return losses


def figures(arm):
    """A row a way: MiB while the model was made, in a step, and between steps."""
    rows = {}
    for name in WAYS:
        level, steps = arm.phase(name).level_mib, arm.phase(f"{name}: steps")
        sizes = (arm.phase(f"{name}: made").peak_mib, steps.peak_mib, steps.held_mib)
        rows[name] = [size - level for size in sizes]
    return pd.DataFrame(rows, index=["made", "step", "between steps"]).T


arms = {
    "weights are most": lab.measure(every_way, *WIDE.values(), label="wide", **PLAIN),
    "outputs are most": lab.measure(every_way, *LONG.values(), label="long", **PLAIN),
}
tables = pd.concat({name: figures(arm) for name, arm in arms.items()}, axis=1)
tables.round(1)

# %%
wide, long = (tables[name] for name in arms)
figure, panels = plt.subplots(1, 2, sharey=True)
for axes, name in zip(panels, arms):
    tables[name]["step"].plot.barh(ax=axes, color=lab.COLOURS[0], title=name)
    axes.set(xlabel="peak of a step (MiB)", ylabel="")
panels[0].invert_yaxis()
plt.show()

# %%
of_full = {name: long["step"][name] / long["step"]["full"] for name in WAYS}
lab.note(
    f"Where outputs are most, adapters take {of_full['beside']:.0%} of full fine-tuning, and "
    f"`enable_lora()` {of_full['enable_lora()']:.0%}; in the last block alone "
    f"{of_full['beside, last block']:.0%}, in none {of_full['head only']:.0%}. With blocks "
    f"recomputed it is {of_full['beside, recomputed']:.0%}. Each adapter makes an output of its "
    "own, and the slots that are saved are few here."
)
assert of_full["beside, last block"] < 0.8 * of_full["beside"], "frozen blocks keep outputs"

# %% [markdown]
# ## Explain
#
# * **Frozen weights** lose slots and gradients. That is all that LoRA takes away.
# * **Which activations go?** Those *in front of* the first adapter, as of any frozen part
#   ([lab 14](14_shapes_and_layers.ipynb)). Behind it each layer keeps what it kept: `A`'s gradient needs the layer's input,
#   and the way back goes through every frozen layer. [Lab 12](12_recomputation.ipynb) recomputes them.
# * **Inside or beside?** Inside, a layer makes and keeps one more kernel; beside, it makes one more output, in passing.
#
# ### int8 weights
#
# `model.quantize("int8")`, then `enable_lora()`: kernels of one byte a number, which take no gradient, and Keras puts these
# adapters *beside* them by itself. [Lab 17](17_quantization_and_distillation.ipynb) judges such a model that only answers;
# this one trains.

# %%
int8, eager = "int8, enable_lora()", "int8, enable_lora(), eager"
losses = arms["weights are most"].value
print("Losses, int8:  ", *(f"{loss:.5f}" for loss in losses[int8]))
print("Losses, beside:", *(f"{loss:.5f}" for loss in losses["beside"]))
lab.note(
    f"Between steps it holds {wide['between steps'][int8]:.1f} MiB, where full fine-tuning holds "
    f"{wide['between steps']['full']:.1f}. But a step peaks at {wide['step'][int8]:.1f} MiB, more "
    f"than with float32 kernels and adapters beside them ({wide['step']['beside']:.1f}), and to be "
    f"quantized the model had to be made: {wide['made'][int8]:.1f}. Run eagerly, the same step "
    f"peaks at {wide['step'][eager]:.1f}."
)
assert wide["step"][eager] < 0.8 * wide["step"][int8], "it is the order of the graph"

# %% [markdown]
# The way forward multiplies int8 by int8, after each input was rounded, too. For the way back Keras turns a kernel into
# float32 again. That needs nothing but the kernel, so in a graph it is ready to run from the beginning: all kernels are
# there in float32 at once. Eagerly one comes after the other; but where outputs are most, an eager step keeps far more of
# those (the table above).
#
# ### Averages, best weights, checkpoints
#
# What do they add to full fine-tuning with Adam? Tensors have their counter; what lies in NumPy shows in the process alone.


# %%
def kept_beside(way):
    model, folder = build(WIDE["width"], WIDE["length"]), Path(tempfile.mkdtemp())
    model.compile(keras.optimizers.Adam(1e-4, use_ema=way == "use_ema=True"), "mse")
    make = {
        "restore_best_weights": lambda: keras.callbacks.EarlyStopping(
            "loss", patience=9, restore_best_weights=True
        ),
        "checkpoint .keras": lambda: keras.callbacks.ModelCheckpoint(folder / "all.keras"),
        "checkpoint .weights.h5": lambda: keras.callbacks.ModelCheckpoint(
            folder / "all.weights.h5", save_weights_only=True
        ),
    }.get(way)
    x = np.random.default_rng(0).random((8, *model.input_shape[1:]), np.float32)
    y, callbacks = np.ones((*x.shape[:-1], 10), np.float32), [make()] if make else []
    model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=callbacks)
    return sum(file.stat().st_size for file in folder.iterdir()) / 2**20


COPIES = ["use_ema=True", "restore_best_weights", "checkpoint .keras", "checkpoint .weights.h5"]
kept = {
    way: lab.measure(kept_beside, way, label=way, **PLAIN) for way in ["nothing beside", *COPIES]
}
columns = ["tensors", "process", "files"]
most = {way: [arm.peak_mib, arm.process_peak_mib, arm.value] for way, arm in kept.items()}
extra = pd.DataFrame.from_dict(most, "index", float, columns)
extra -= extra.loc["nothing beside"]
extra.rename_axis("MiB more, at the peak").round(1)

# %%
# Averages are tensors, which are counted; of the rest the process alone tells.
times = extra["process"].where(extra.index != "use_ema=True", extra["tensors"]) / weights
lab.note(
    f"In times the weights: `use_ema=True` {times['use_ema=True']:.1f}, `restore_best_weights` "
    f"{times['restore_best_weights']:.1f}, a checkpoint of the whole model "
    f"{times['checkpoint .keras']:.1f}, of its weights {times['checkpoint .weights.h5']:.1f}."
)

# %% [markdown]
# * **`use_ema=True`** is one more slot, and the update makes averages of all weights side by side.
# * **`restore_best_weights`** is a copy in NumPy, from the first epoch on. At an improvement the new copy is there before
#   the old one goes.
# * **`.keras`** is put together in memory: weights and slots. Keras writes by way of the disk only if that is a large
#   part of what is free on the *machine*; a container's limit it does not know.
# * **`.weights.h5`** goes to disk a layer at a time. Slots are in that file, too.
#
# **On a GPU** it has not been measured here. What lies in NumPy is in the machine's memory there, not in the device's;
# and XLA, which Keras turns on there, orders the step anew, so that the figures of int8 may differ.
#
# **When it flips.** One dense layer, as many positions as batch × length; predicted. What does its adapter cost inside and
# beside, and is there a saving at all?


# %%
def one_layer(width=4096, positions=2048, rank=8):
    kernel, output = lab.tensor_mib((width, width)), lab.tensor_mib((positions, width))
    adapter = 4 * lab.tensor_mib((2 * width, rank))
    ways = {
        "full": 4 * kernel + output,
        "inside": 2 * kernel + adapter + output,
        "beside": kernel + adapter + output + output,
    }
    for name, size in ways.items():
        print(f"{name:6} {size:10,.1f} MiB, {size / ways['full']:4.0%} of full (predicted)")


lab.explore(one_layer, width=(256, 16384, 256), positions=(64, 131072, 64), rank=(1, 256))

# %% [markdown]
# ## Verdict

# %%
steps = {"wide": wide["step"], "long": long["step"]}
shown = {"full": "full", "enabled": "enable_lora()", "beside": "beside"}
lab.verdict(
    "C41",
    "partly",
    **{
        f"{short}_{size}": step[way] for size, step in steps.items() for short, way in shown.items()
    },
)

# %%
lab.verdict(
    "C43",
    "partly",
    weights=weights,
    ema=times["use_ema=True"] * weights,
    best=times["restore_best_weights"] * weights,
    whole_model=times["checkpoint .keras"] * weights,
    weights_alone=times["checkpoint .weights.h5"] * weights,
)

# %%
lab.verdict(
    "C60",
    "partly",
    full_wide=wide["step"]["full"],
    int8_wide=wide["step"][int8],
    full_between=wide["between steps"]["full"],
    int8_between=wide["between steps"][int8],
    quantizing=wide["made"][int8],
    full_long=long["step"]["full"],
    int8_long=long["step"][int8],
    learns=losses[int8][-1] < losses[int8][0],
)

# %% [markdown]
# ## Exercises
#
# **1.** `enable_lora()` on an `Embedding` makes `table + A·B` for each batch, to look up a few rows of it. Write
# `look_up(table, a, b, ids)`: the same rows, for integers `ids` of any shape, and nothing as large as the table, on the way
# back neither. `a` and `b` are trained.


# %%
def look_up(table, a, b, ids):
    # BEGIN SOLUTION
    return tf.gather(table, ids) + tf.tensordot(tf.gather(a, ids), b, 1)
    # END SOLUTION


# %%
check.look_up(look_up)


# %% tags=["right"]
def look_up(table, a, b, ids):
    rows = tf.reshape(ids, [-1])
    found = tf.nn.embedding_lookup(table, rows) + tf.nn.embedding_lookup(a, rows) @ b
    return tf.reshape(found, [*ids.shape, b.shape[-1]])


# %% tags=["wrong"]
# says: as large as the table
def look_up(table, a, b, ids):
    return tf.gather(table + a @ b, ids)


# %% tags=["wrong"]
# says: as large as the table
def look_up(table, a, b, ids):
    return tf.gather(table, ids) + tf.gather(a @ b, ids)


# %% tags=["wrong"]
# says: as large as the table
def look_up(table, a, b, ids):
    picked = tf.one_hot(ids, table.shape[0])
    return tf.tensordot(picked, table, 1) + tf.tensordot(tf.tensordot(picked, a, 1), b, 1)


# %% tags=["wrong"]
# says: cannot be trained
def look_up(table, a, b, ids):
    return table.numpy()[ids] + a.numpy()[ids] @ b.numpy()


# %% [markdown]
# **2.** Write `best(path)`. It returns a Keras callback; when training ends, the model has the weights of the epoch with the
# lowest `logs["val_loss"]`, as `restore_best_weights` would give it, and there was never a copy of all weights in memory.
# `path` is a file for it, and ends in `.weights.h5`.


# %%
def best(path):
    # BEGIN SOLUTION
    class Best(keras.callbacks.ModelCheckpoint):
        def on_train_end(self, logs=None):
            self.model.load_weights(path)

    return Best(path, "val_loss", save_best_only=True, save_weights_only=True)
    # END SOLUTION


# %%
check.best(best)


# %% tags=["right"]
def best(path):
    class Best(keras.callbacks.Callback):
        least = np.inf

        def on_epoch_end(self, epoch, logs=None):
            if logs["val_loss"] < self.least:
                self.least = logs["val_loss"]
                for number, weight in enumerate(self.model.weights):
                    np.save(f"{path}{number}.npy", weight.numpy())

        def on_train_end(self, logs=None):
            for number, weight in enumerate(self.model.weights):
                weight.assign(np.load(f"{path}{number}.npy"))

    return Best()


# %% tags=["wrong"]
# says: copies of the weights
def best(path):
    return keras.callbacks.EarlyStopping("val_loss", patience=99, restore_best_weights=True)


# %% tags=["wrong"]
# says: not those of the epoch
def best(path):
    return keras.callbacks.ModelCheckpoint(path, save_best_only=True, save_weights_only=True)


# %% tags=["wrong"]
# says: not those of the epoch
def best(path):
    class Last(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.save_weights(path)

        def on_train_end(self, logs=None):
            self.model.load_weights(path)

    return Last()


# %% tags=["wrong"]
# says: copies of the weights
def best(path):
    class InTensors(keras.callbacks.Callback):
        least = float("inf")

        def on_epoch_end(self, epoch, logs=None):
            if logs["val_loss"] < self.least:
                self.least = logs["val_loss"]
                self.kept = [weight.value + 0 for weight in self.model.weights]

        def on_train_end(self, logs=None):
            for weight, value in zip(self.model.weights, self.kept):
                weight.assign(value)

    return InTensors()
