# %% [markdown]
# # 00 · Where memory goes in a training step
#
# **Symptom:** *"my model has 3 million parameters, that is 13 MB, so why does training run out of memory?"* — and
# the two memory columns of `top` and TensorFlow's own counter each name a different number.
#
# **Afterwards you can** split a training step into weights, optimizer slots, gradients, activations and
# intermediates, predict each from shapes, measure each, and say which of three memory counters answers which question.
#
# | | |
# |---|---|
# | Time | about a minute to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C27 |
#
# Start here: every other lab uses the words and the counters of this one.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes a batch four times as large
GUESS_MIB = 0.0  # a starting value for the guesses below

# %%
import matplotlib.pyplot as plt
import pandas as pd

import labsupport as lab
from labsupport.graders import where_memory_goes as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

BATCH = lab.choose(SCALE, quick=8192, full=32768)
WIDTH, DEPTH, INPUTS, CLASSES, STEPS = 1024, 4, 256, 10, 2


def build():
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(DEPTH)]
    return keras.Sequential([keras.Input((INPUTS,)), *hidden, keras.layers.Dense(CLASSES)])


# %% [markdown]
# ## Predict
#
# This is the model. `summary()` is the tool that most people look at first. It counts the weights and nothing else.

# %%
model = build()
model.summary(line_length=64)
weights = lab.tensor_mib((model.count_params(),))

# %% [markdown]
# One part first: the numbers that one hidden layer puts out.

# %%
layer_guess = lab.guess(f"The output of one hidden layer for a batch of {BATCH}?", GUESS_MIB)

# %% [markdown]
# A training step needs more than that:
#
# | part | how many bytes | grows with the batch | lives |
# |---|---|---|---|
# | weights | parameters × 4 | no | always |
# | optimizer slots | Adam: 2 × weights | no | always |
# | input | batch × inputs × 4 | yes | while the step runs |
# | activations kept | batch × outputs of all layers × 4 | yes | from the way forward until their gradient is computed |
# | gradients of activations | an output or two of one layer | yes | on the way back, for moments |
# | gradients | 1 × weights, in the end | no | on the way back they come one layer after the other; until the update |
# | intermediates of the update | a few copies of the largest weight | no | in the update, for moments |
#
# They are not all there at the same time. Now the whole step, which runs eagerly (not in a `tf.function`):

# %%
my_guess = lab.guess(
    f"Peak memory of one training step of this model with Adam and a batch of {BATCH}?", GUESS_MIB
)

# %%
output = lab.tensor_mib((BATCH, WIDTH))  # of one hidden layer
last = lab.tensor_mib((WIDTH + 1, CLASSES))  # the weights of the last layer, with its biases
print(f"weights: {model.count_params():,} × 4 B = {weights:.1f} MiB")
print(f"one layer's output: {BATCH} × {WIDTH} × 4 B = {output:.1f} MiB")
by_hand = pd.Series(
    {
        "weights": weights,
        "optimizer slots": 2 * weights,
        "input": lab.tensor_mib((BATCH, INPUTS)),
        "activations kept": DEPTH * output,
        # Of the last hidden layer: the gradient behind its relu, and the one before it.
        "gradients of activations": 2 * output,
        "gradients": last,
    }
)
pd.DataFrame({"MiB": [*by_hand, by_hand.sum()]}, [*by_hand.index, "peak of the step"]).round(2)

# %%
lab.note(
    "This is the worst moment, at the beginning of the way back: all activations are still kept, "
    f"and of the {weights:.1f} MiB of gradients only the last layer's {last:.2f} are there. When "
    "the update has all of them, the activations are gone."
)

# %% [markdown]
# That was the arithmetic by hand. From here on `lab.predict` does it for whole steps of any model: it wants the *function*
# that builds the model, builds it where variables have shapes and no memory, and goes through the operations of a step.
# What is there only for moments, such as gradients of activations, it calls *working memory*. Its last line lists what the
# figure does not know; here none of it matters.

# %%
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
predicted = lab.predict(build, BATCH, optimizer="adam", loss=LOSS, eager=True)
print(predicted)

# %% [markdown]
# ## Failure
#
# Somebody reads the summary, adds Adam's two slots and the gradients, doubles that to be safe, and adds the batch
# itself. That is the budget. `lab.run` runs a function in a process of its own, where tensors get no more than that; a
# `phase` names a part of the run and gets its own exact peak.


# %%
def data(batch):
    return tf.random.stateless_normal([batch, INPUTS], seed=(0, 1)), tf.range(batch) % CLASSES


def train(batch, steps=1):
    """Train on the same batch, so many steps; the norm of each step's gradient."""
    keras.utils.set_random_seed(0)
    with lab.phase("weights"):
        model, optimizer = build(), keras.optimizers.Adam()
    with lab.phase("optimizer slots"):
        optimizer.build(model.trainable_variables)
    with lab.phase("input"):
        x, y = data(batch)
    norms = []
    for _ in range(steps):
        with lab.phase("forward"):
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        with lab.phase("backward"):
            gradients = tape.gradient(loss, model.trainable_variables)
        with lab.phase("update"):
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        norms.append(float(tf.linalg.global_norm(gradients)))
    return norms


by_summary = 2 * (1 + 2 + 1) * weights + lab.tensor_mib((BATCH, INPUTS))
BUDGET = f"{by_summary:.0f} MiB"
failure = lab.run(train, BATCH, STEPS, budget=BUDGET, label="the batch at once")
lab.expect_oom(failure)

# %% [markdown]
# It dies on the first way forward, before there is any gradient.
#
# ## Fix
#
# The table tells where to save: activations grow with the samples that are under way together. So the same batch goes
# through in pieces, whose gradients are added up, and one update follows. The budget stays.

# %%
PIECE = 512
held = (1 + 2 + 1) * weights + lab.tensor_mib((BATCH, INPUTS))  # weights, slots, sums, the batch
# The worst moment: all of a piece's gradients, and of its first layer an output and two gradients.
predicted_fix = held + weights + 3 * lab.tensor_mib((PIECE, WIDTH))
print(f"predicted for pieces of {PIECE}: {predicted_fix:.1f} MiB, budget {BUDGET}")


# %%
def train_in_pieces(batch, steps):
    keras.utils.set_random_seed(0)
    model, optimizer = build(), keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    x, y = data(batch)
    sums = [tf.Variable(tf.zeros_like(weight)) for weight in model.trainable_variables]
    norms = []
    for _ in range(steps):
        for start in range(0, batch, PIECE):
            part = slice(start, start + PIECE)
            with tf.GradientTape() as tape:
                logits = model(x[part], training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y[part], logits)
                loss = tf.reduce_sum(losses) / batch
            for total, gradient in zip(sums, tape.gradient(loss, model.trainable_variables)):
                total.assign_add(gradient)
        optimizer.apply_gradients(zip(sums, model.trainable_variables))
        norms.append(float(tf.linalg.global_norm(sums)))
        for total in sums:
            total.assign(tf.zeros_like(total))
    return norms


fix = lab.run(train_in_pieces, BATCH, STEPS, budget=BUDGET, label=f"in pieces of {PIECE}")
lab.expect_finished(fix)

# %% [markdown]
# What one step over the whole batch needs, without a budget that stops it:

# %%
unbounded = lab.run(train, BATCH, label="one step at once, no tight budget")
lab.expect_finished(unbounded)

# %% [markdown]
# ## Side by side

# %%
lab.compare(unbounded, failure, fix)

# %% [markdown]
# Who held it, at the worst moment? Both run once more while TensorFlow records every allocation, and each bar is cut
# by kind, then by the line of the code, then by what was made. The run that died is given room, and seen where it
# first wants more than its budget. At once, one layer's output and the next one's product are most of it, before any
# gradient is there. In pieces, most is what does not depend on the batch: weights, slots, sums (*other variables*)
# and gradients. The batch itself is *held by the script* here.

# %%
lab.take_apart(failure, fix)

# %%
at_once, in_pieces = unbounded.value[0], fix.value[0]
print(f"norm of the first step's gradient: at once {at_once:.5f}, in pieces {in_pieces:.5f}")
assert abs(at_once - in_pieces) < 1e-3 * at_once, "the pieces are another step"

# %% [markdown]
# What is held at the end is the model: its parts refer to one another, so it goes only when Python's garbage collector
# comes by.
#
# Prediction and measurement, part by part. What a phase leaves behind is measured when it ends.

# %%
kinds = predicted.by("kind")
sizes = pd.DataFrame(
    {
        "by hand": by_hand[:4],
        "lab.predict": [kinds[kind] for kind in (*by_hand.index[:3], "activations")],
        "measured": [part.added_mib for part in unbounded.phases[:4]],
    }
)
peaks = [by_hand.sum(), predicted.total_mib, unbounded.peak_mib]
sizes.loc["gradients and intermediates"] = peaks - sizes.sum()

axes = sizes.T.plot.barh(stacked=True, figsize=(8, 3.2), xlabel="peak of one training step (MiB)")
axes.bar_label(axes.containers[-1], [f" {total:.0f} MiB" for total in sizes.sum()])
axes.invert_yaxis()
axes.grid(False)
axes.margins(x=0.15)
lab.legend_below(axes)
plt.show()

# %%
lab.predicted_vs_measured(
    **{name.replace(" ", "_"): (hand, found) for name, hand, _, found in sizes.itertuples()},
    peak_by_hand=(by_hand.sum(), unbounded.peak_mib),
    peak_by_lab_predict=(predicted.total_mib, unbounded.peak_mib),
    peak_in_pieces_by_hand=(predicted_fix, fix.peak_mib),
)

# %%
print("The whole step:", my_guess.against(unbounded.peak_mib))
measured = sizes["measured"]
print("One layer:", layer_guess.against(measured["activations kept"] / DEPTH))
assert measured["activations kept"] > 3 * measured["weights"], (
    "at this batch size activations must outweigh weights"
)

# %% [markdown]
# ### How much state an optimizer keeps
#
# In this model, in one of convolutions, and in this model with all layers but the last frozen, as in fine-tuning.


# %%
def convolutions():
    shapes = [keras.layers.Conv2D(units, 3, activation="relu") for units in (64, 256, 512)]
    head = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((32, 32, 3)), *shapes, *head])


def frozen():
    model = build()
    for layer in model.layers[:-1]:
        layer.trainable = False
    return model


MODELS = {"dense": build, "convolutions": convolutions, "frozen": frozen}


def slots_of_each():
    def mib(variables):
        return sum(variable.numpy().nbytes for variable in variables) / 2**20

    rows = []
    for kind, make in MODELS.items():
        model = make()
        for name in ("SGD", "RMSprop", "Adam"):
            with lab.phase(name):
                optimizer = getattr(keras.optimizers, name)()
                optimizer.build(model.trainable_variables)
            rows.append((kind, name, mib(model.weights), mib(optimizer.variables)))
            del optimizer
        del model
    return rows


states = lab.measure(slots_of_each, label="state of three optimizers")
columns = ["model", "optimizer", "weights MiB", "state MiB"]
slots = pd.DataFrame(states.value, columns=columns)
slots["× weights"] = slots["state MiB"] / slots["weights MiB"]
slots["allocator MiB"] = [phase.added_mib for phase in states.phases]
slots = slots.set_index(["model", "optimizer"])
slots.round(2)

# %%
frozen_adam, conv_adam = slots.loc[("frozen", "Adam")], slots.loc[("convolutions", "Adam")]
lab.note(
    f"What is not trained needs no state: beside {frozen_adam['weights MiB']:.1f} MiB of weights, "
    f"nearly all frozen, Adam keeps {frozen_adam['state MiB']:.2f} MiB. The allocator may give "
    f"more than it is asked for (in the convolutions {conv_adam['allocator MiB']:.1f} MiB for "
    f"{conv_adam['state MiB']:.1f}): it hands out a free piece whole that is less than twice as "
    "large as the tensor."
)

# %% [markdown]
# ## Explain
#
# **Why the summary misleads.** Weights, slots and gradients have one size whatever the batch is. Activations are kept
# because the way back needs each layer's output, for every sample. Find the batch at which the batch and its
# activations overtake everything that follows the weights, and the one at which the *peak* begins to grow.

# %%
one_sample = lab.tensor_mib((INPUTS + DEPTH * WIDTH + CLASSES,))
by_weights = (1 + 2 + 1) * weights  # weights, Adam's slots, gradients
widths = [INPUTS] + [WIDTH] * DEPTH + [CLASSES]
sizes = [lab.tensor_mib((ins + 1, outs)) for ins, outs in zip(widths, widths[1:])]  # with biases


def moments(batch):
    """What comes on top of weights, slots and input: in the update, and on the way back."""
    kept = [batch * lab.tensor_mib((width,)) for width in widths[1:]]
    # Gradients and three intermediates; or what is kept, a gradient on its way, those behind.
    update = sum(sizes) + 3 * lab.tensor_mib((WIDTH, WIDTH))
    back = max(sum(kept[:i]) + 3 * kept[i] + sum(sizes[i + 1 :]) for i in range(len(kept)))
    return update, back


def overtaking(batch=1024):
    print(f"batch {batch}: follows the weights {by_weights:.0f} MiB, ", end="")
    print(f"input and activations {batch * one_sample:.0f} MiB (predicted)")
    update, back = moments(batch)
    moment = "update" if update >= back else "way back"
    there = 3 * weights + batch * lab.tensor_mib((INPUTS,))
    print(f"peak {there + max(update, back):.0f} MiB, in the {moment}")


lab.explore(overtaking, batch=(32, 8192, 32))

# %%
way_back_is_worst = 32
while moments(way_back_is_worst)[0] >= moments(way_back_is_worst)[1]:
    way_back_is_worst += 32
lab.note(
    f"The two are equal at a batch of {by_weights / one_sample:,.0f}. Below {way_back_is_worst:,} "
    "the worst moment is the update. By then all activations are gone: a smaller batch saves "
    "nothing but its own input (predicted)."
)

# %% [markdown]
# **Three counters, three stories.** TensorFlow's allocator takes memory from the system as a *pool* and cuts tensors
# from it. (It is called BFC, "best fit with coalescing": it picks the smallest free piece that is large enough, and
# joins free neighbours.) A freed tensor goes back to the pool, not to the system. NumPy's memory is not in the pool.
# Here is one process, asked three ways at four moments. The resident set counts what is in the machine's memory (RES in
# `top`), the virtual size all addresses that were asked for (VIRT).


# %%
def three_stories():
    import numpy as np
    import psutil

    def ask():
        now, virtual = lab.reading(), psutil.Process().memory_info().vms
        return now.tensors_mib, now.process_mib, virtual / 2**20

    rows = {"at the start": ask()}
    tensor = tf.ones([200 * 2**18])
    rows["a 200 MiB tensor"] = ask()
    del tensor
    rows["the tensor deleted"] = ask()
    array = np.ones(100 * 2**18, np.float32)
    rows["then a 100 MiB NumPy array"] = ask()
    return rows, float(array[0])


stories, _ = lab.measure(three_stories, budget="1 GiB", label="three counters").value
counters = ["allocator, added (MiB)", "resident set, added (MiB)", "virtual size (MiB)"]
stories = pd.DataFrame(stories, index=counters).T
stories.round(0)

# %%
tensors, resident, virtual = (stories[counter].tolist() for counter in counters)
lab.note(
    "When the tensor was deleted, the allocator's figure fell by "
    f"{tensors[1] - tensors[2]:.0f} MiB and the resident set by {resident[1] - resident[2]:.0f}. "
    f"The tensor moved the virtual size by {virtual[1] - virtual[0]:.0f} MiB: the pool's addresses "
    "had been asked for before."
)

# %% [markdown]
# The allocator answers *what do my tensors need*. The resident set answers *what will the system kill me for*; that it
# does not fall with the tensors, many people take for a leak. Virtual size answers neither. The labs take
# every peak from counters of these two, and use samples only to draw the curve between.
#
# ## Verdict


# %%
def figures(kind):
    """The figures of one model as the claim names them."""
    of_model = slots.loc[kind]
    found = {f"{kind}_{name.lower()}": mib for name, mib in of_model["state MiB"].items()}
    return {kind: of_model["weights MiB"].iloc[0], **found}


lab.verdict("C27", "partly", **figures("dense"), **figures("convolutions"), **figures("frozen"))

# %% [markdown]
# ## Exercises
#
# **1.** Predict from shapes alone. `my_parts` gets a model of dense layers (other ones than above), a batch size, and
# how many copies of the weights its optimizer keeps. Return MiB as a dictionary: `"weights"`, `"optimizer slots"`,
# `"input"` and `"activations kept"`. Each is then measured. (A layer tells `layer.units`, a model `model.input_shape`.)


# %%
def my_parts(model, batch, copies):
    # BEGIN SOLUTION
    weights = lab.tensor_mib((model.count_params(),))
    return {
        "weights": weights,
        "optimizer slots": copies * weights,
        "input": lab.tensor_mib((batch, *model.input_shape[1:])),
        "activations kept": lab.tensor_mib((batch, sum(layer.units for layer in model.layers))),
    }
    # END SOLUTION


# %%
check.parts(my_parts)


# %% tags=["right"]
def my_parts(model, batch, copies):
    parameters = sum(weight.shape.num_elements() for weight in model.weights)
    outputs = [batch * layer.output.shape[-1] for layer in model.layers]
    floats = [parameters, copies * parameters, batch * model.inputs[0].shape[-1], sum(outputs)]
    names = ["weights", "optimizer slots", "input", "activations kept"]
    return {name: number * 4 / 1024**2 for name, number in zip(names, floats)}


# %% tags=["wrong"]
# says: activations kept.* as measured.*: does it count every layer, for every sample
def my_parts(model, batch, copies):
    weights = lab.tensor_mib((model.count_params(),))
    largest = max(layer.units for layer in model.layers)
    return {
        "weights": weights,
        "optimizer slots": copies * weights,
        "input": lab.tensor_mib((batch, model.input_shape[1])),
        "activations kept": lab.tensor_mib((batch, largest)),
    }


# %% tags=["wrong"]
# says: optimizer slots.*copies
def my_parts(model, batch, copies):
    weights = lab.tensor_mib((model.count_params(),))
    return {
        "weights": weights,
        "optimizer slots": 2 * weights,
        "input": lab.tensor_mib((batch, model.input_shape[1])),
        "activations kept": lab.tensor_mib((batch, sum(layer.units for layer in model.layers))),
    }


# %% tags=["wrong"]
# says: weights.*2\*\*20 bytes
def my_parts(model, batch, copies):
    outputs = batch * sum(layer.units for layer in model.layers)
    parameters, inputs = model.count_params(), batch * model.input_shape[1]
    floats = [parameters, copies * parameters, inputs, outputs]
    names = ["weights", "optimizer slots", "input", "activations kept"]
    return {name: number * 4 / 1e6 for name, number in zip(names, floats)}


# %% tags=["wrong"]
# says: dictionary
def my_parts(model, batch, copies):
    return 2 * lab.tensor_mib((model.count_params(),))


# %% tags=["wrong"]
# says: activations kept.*every layer
def my_parts(model, batch, copies):
    weights = lab.tensor_mib((model.count_params(),))
    hidden = sum(layer.units for layer in model.layers[:-1])
    return {
        "weights": weights,
        "optimizer slots": copies * weights,
        "input": lab.tensor_mib((batch, model.input_shape[1])),
        "activations kept": lab.tensor_mib((batch, hidden)),
    }


# %% tags=["wrong"]
# says: bytes, not MiB
def my_parts(model, batch, copies):
    weights = 4 * model.count_params()
    return {
        "weights": weights,
        "optimizer slots": copies * weights,
        "input": 4 * batch * model.input_shape[1],
        "activations kept": 4 * batch * sum(layer.units for layer in model.layers),
    }


# %% [markdown]
# **2.** Which batch fits a budget? Return the largest power of two whose step (`train`, one step at once) stays within
# `budget_mib`. It is measured, and so is twice that batch, for two budgets.


# %%
def my_batch(budget_mib):
    # BEGIN SOLUTION
    prediction = lab.predict(build, 1024, optimizer="adam", loss=LOSS, eager=True)
    batch = 1
    while prediction.at(2 * batch) < 0.95 * budget_mib * 2**20:
        batch *= 2
    return batch
    # END SOLUTION


# %%
check.largest_batch(my_batch, train, (6 * weights, 17 * weights), one_sample)


# %% tags=["right"]
def my_batch(budget_mib):
    import math

    two_gradients = lab.tensor_mib((2 * WIDTH,))
    left = budget_mib - 3 * weights
    return 2.0 ** math.floor(math.log2(left / (one_sample + two_gradients)))


# %% tags=["wrong"]
# says: a batch of 2 would fit, too
def my_batch(budget_mib):
    return 1


# %% tags=["wrong"]
# says: does not fit
def my_batch(budget_mib):
    batch = 1
    while 2 * batch * one_sample < budget_mib:
        batch *= 2
    return batch


# %% tags=["wrong"]
# says: does not fit: its peak
def my_batch(budget_mib):
    return 2048


# %% tags=["wrong"]
# says: outputs of its layers alone
def my_batch(budget_mib):
    return 2**30


# %% tags=["wrong"]
# says: power of two
def my_batch(budget_mib):
    return int(budget_mib / one_sample)


# %% tags=["wrong"]
# says: does not fit
def my_batch(budget_mib):
    a_sample, batch = unbounded.peak_mib / BATCH, 1
    while 2 * batch * a_sample < budget_mib:
        batch *= 2
    return batch


# %% tags=["wrong"]
# says: power of two
def my_batch(budget_mib):
    prediction = lab.predict(build, 1024, optimizer="adam", loss=LOSS, eager=True)
    return prediction.largest(f"{budget_mib} MiB")
