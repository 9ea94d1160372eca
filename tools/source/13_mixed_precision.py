# %% [markdown]
# # 13 · FP32 against mixed float16 and bfloat16
#
# **Symptom:** *"I set `mixed_float16` and still get OOM"*, *"mixed precision uses more memory"*, *"loss is NaN with
# float16"*, or *"module 'mixed_precision' has no attribute 'experimental'"*.
#
# **Afterwards you can** tell which part of a network a half-precision policy shrinks and which it cannot, find where
# a processor's kernels cast float16 up to float32, see what loss scaling rescues, and choose between float16 and bfloat16.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C15, C16 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes wider layers
GUESS_MIB = 0.0  # a starting value for the guesses below

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import mixed_precision as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras  # after it, for the same reason

WIDTH = lab.choose(SCALE, quick=1024, full=2048)
LAYERS, BATCH = 5, 32


def digits():
    data = np.load("../data/digits.npz")
    images, labels = data["images"].astype("float32") / 16, data["labels"].astype("int32")
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order].reshape(-1, 64), labels[order]
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


data = digits()
print(
    len(data[0]), "images of handwriting, 8 × 8, to train with, and", len(data[2]), "to test with"
)

# %% [markdown]
# ## Predict
#
# Five wide `Dense` layers, Adam, a small batch. One part first: how large are all weights in float32?

# %%
print(f"64 pixels, {LAYERS} × Dense({WIDTH}), Dense(10), a batch of {BATCH}")
one_part = lab.guess("All weights in float32?", GUESS_MIB)

# %%
W = lab.tensor_mib((64, WIDTH)) + (LAYERS - 1) * lab.tensor_mib((WIDTH, WIDTH))
activations = LAYERS * lab.tensor_mib((BATCH, WIDTH))
print(f"W = {W:.1f} MiB (your guess: {one_part.mib:.1f}), all activations {activations:.1f} MiB")

# %% [markdown]
# One step needs weights, gradients and Adam's two running averages: 4 W and the activations. An article says that one
# line, `set_global_policy("mixed_float16")`, halves memory.

# %%
my_guess = lab.guess("Peak memory of one training step with mixed_float16?", GUESS_MIB)

# %% [markdown]
# What does the policy change? Ask one layer.

# %%
layer = keras.layers.Dense(8, activation="relu", dtype="mixed_float16")
adam = keras.optimizers.Adam()
with tf.GradientTape() as tape:
    output = layer(tf.ones([2, 8]))
    loss = tf.reduce_mean(tf.cast(output, tf.float32))
gradient = tape.gradient(loss, layer.kernel.value)
adam.build([layer.kernel])
facts = {
    "weight": layer.kernel.dtype,
    "output (an activation)": output.dtype.name,
    "gradient of the weight": gradient.dtype.name,
    "Adam's averages": adam.variables[-1].dtype,
}
print(pd.Series(facts).to_string())

# %% [markdown]
# Only activations are float16. Before each layer computes, its weights are *copied* into float16: that copy comes on top.

# %%
predicted_float32 = 4 * W + activations
predicted_mixed = 4 * W + W / 2 + activations / 2
print(f"float32: {predicted_float32:.1f} MiB, mixed_float16: {predicted_mixed:.1f} MiB")
print(f"half of float32 would be {predicted_float32 / 2:.1f} MiB")

# %% [markdown]
# ## Failure
#
# The budget is well below what float32 needs.


# %%
def train(policy, optimizer, settings, steps, train_x, train_y, test_x, test_y):
    """Train `steps` steps under a policy; return (accuracy on the test images, last loss)."""
    keras.mixed_precision.set_global_policy(policy)
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
    last = keras.layers.Dense(10, dtype="float32" if "mixed" in policy else None)
    model = keras.Sequential([keras.Input((64,)), *hidden, last])
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(getattr(keras.optimizers, optimizer)(**settings), cross_entropy)
    with lab.phase("averages"):  # notes by name what the arm holds before and after
        model.optimizer.build(model.trainable_variables)  # else the first step does it
    with lab.phase("steps"):
        for step in range(steps):
            at = BATCH * step % (len(train_x) - BATCH)
            loss = model.train_on_batch(train_x[at : at + BATCH], train_y[at : at + BATCH])
    right = np.argmax(model.predict_on_batch(test_x), axis=-1) == test_y
    return float(right.mean()), float(loss)


FEW, STEPS = 3, 88
BUDGET = f"{int(0.7 * predicted_float32)} MiB"
usual = ("float32", "Adam", {})
failure = lab.run(train, *usual, STEPS, *data, budget=BUDGET, label="float32, Adam")
lab.expect_oom(failure)

# %% [markdown]
# ## Advice, tested
#
# So somebody sets the policy. The promise was half. (All float16 here runs without oneDNN, Intel's library of kernels: on
# processors with some float16 instructions, its kernel for `Dense` with relu hardly ends.)

# %%
plain = {"env": lab.NO_ONEDNN}
mixed = ("mixed_float16", "Adam", {})
advice = lab.run(train, *mixed, STEPS, *data, budget=BUDGET, label="mixed_float16, Adam", **plain)
lab.expect_oom(advice)

# %% [markdown]
# The flat part at the end is TensorFlow's allocator, which waits ten seconds for memory before it gives up. Neither
# training even began: weights and Adam's averages are 3 W in float32 under every mixed policy, and do not fit.
#
# What both need in a few steps without a budget that stops them; and float32 without oneDNN, as a control:

# %%
wide = {
    "float32": lab.measure(train, *usual, FEW, *data, label="float32"),
    "float32, no oneDNN": lab.measure(train, *usual, FEW, *data, label="no oneDNN", **plain),
    "mixed_float16": lab.measure(train, *mixed, FEW, *data, label="mixed_float16", **plain),
}
lab.predicted_vs_measured(
    float32=(predicted_float32, wide["float32"].peak_mib),
    float32_no_oneDNN=(predicted_float32, wide["float32, no oneDNN"].peak_mib),
    mixed_float16=(predicted_mixed, wide["mixed_float16"].peak_mib),
)

# %%
print(my_guess.against(wide["mixed_float16"].peak_mib))
beyond = wide["mixed_float16"].peak_mib - predicted_mixed
lab.note(
    f"With the policy it needs {wide['mixed_float16'].peak_mib / wide['float32'].peak_mib:.2f} of "
    f"what it needs without, and {beyond:.1f} MiB more than predicted: a CPU's float16 kernels "
    "make float32 copies, as the section Explain shows, and a graph may order its operations in "
    "more than one way."
)

# %% [markdown]
# ## Fix
#
# What is large here are weights, gradients and averages. Adam's averages are half of it: an optimizer without any, for the
# same network, data and budget.

# %%
sgd = ("float32", "SGD", {"learning_rate": 0.1})
fix = lab.run(train, *sgd, STEPS, *data, budget=BUDGET, label="float32, SGD")
lab.expect_finished(fix)

# %% [markdown]
# Or half of *everything*, with Adam: the policy `"bfloat16"` makes weights and averages in half precision, too. It needs one
# setting more; the next table says why.

# %%
half = ("bfloat16", "Adam", {"beta_2": 0.98})
halved = lab.run(train, *half, STEPS, *data, budget=BUDGET, label="bfloat16, Adam")
lab.expect_finished(halved)

# %% [markdown]
# ## Side by side

# %%
lab.compare(advice, fix, halved)

# %% [markdown]
# Who held it? Two of them run once more while TensorFlow records every allocation. Where the advice dies there are
# weights and Adam's slots, in float32, and not one activation: nothing that the *mixed* policy could halve.

# %%
lab.take_apart(advice, fix)

# %% [markdown]
# Did they learn? Beside them the rest, and half precision for everything as it comes, after one pass over the images each:

# %%
arms = {
    "float32, Adam": usual,
    "mixed_float16, Adam": mixed,
    "mixed_bfloat16, Adam": ("mixed_bfloat16", "Adam", {}),
    "float16, Adam": ("float16", "Adam", {}),
    "bfloat16, Adam": ("bfloat16", "Adam", {}),
}
rows = {"float32, SGD": fix.value, "bfloat16, Adam, beta_2 0.98": halved.value}
ONCE = len(data[0]) // BATCH  # steps
for label, arm in arms.items():
    env = lab.NO_ONEDNN if arm[0] in ("float16", "mixed_float16") else None
    rows[label] = lab.measure(train, *arm, ONCE, *data, label=label, env=env).value
learnt = pd.DataFrame(rows, index=["accuracy", "last loss"]).T
learnt.round(3)

# %%
accuracy, rounded = learnt["accuracy"], float(tf.cast(0.999, tf.bfloat16))
square = float(tf.cast(1e-3**2 * 1e-3, tf.float16))
lab.note(
    f"Of the test images {accuracy['float32, Adam']:.0%} are right with float32 and Adam, "
    f"{accuracy['mixed_float16, Adam']:.0%} and {accuracy['mixed_bfloat16, Adam']:.0%} with the "
    f"mixed policies after {ONCE} steps, {accuracy['float32, SGD']:.0%} with SGD after {STEPS}. "
    f"Half precision for everything, as it comes: {accuracy['float16, Adam']:.0%} in float16 "
    f"(loss {learnt['last loss']['float16, Adam']:.1f}) and {accuracy['bfloat16, Adam']:.0%} in "
    "bfloat16, where one in ten is chance."
)
lab.note(
    "In float16, Adam's average of *squared* gradients underflows, becomes 0: a gradient of 0.001 "
    f"adds {square:g}. Dividing by its root plus a tiny epsilon is then dividing by nearly "
    f"nothing. In bfloat16, Adam's 0.999 is {rounded:g}, its correction for a young average 1 − "
    f"{rounded:g}, and every update 0; with 0.98, which does not round to 1, it learns "
    f"({accuracy['bfloat16, Adam, beta_2 0.98']:.0%}). That is why the policy is *mixed*."
)
assert accuracy["mixed_float16, Adam"] > accuracy["float32, Adam"] - 0.05
assert accuracy["float32, SGD"] > accuracy["float32, Adam"] - 0.2
assert max(accuracy["float16, Adam"], accuracy["bfloat16, Adam"]) < 0.5
assert accuracy["bfloat16, Adam, beta_2 0.98"] > 0.7

# %% [markdown]
# ## Explain
#
# **Where the policy does help**: where activations are nearly everything, with many samples, many layers and few
# weights. The peak of a gradient step by depth, layers of 16 units and a large batch, five steps each:


# %%
def by_depth(policy, depths):
    for depth in depths:
        layers = [keras.layers.Dense(16, activation="relu", dtype=policy) for _ in range(depth)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        inputs = tf.random.normal([16384, 16])

        @tf.function
        def gradients(inputs):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.cast(model(inputs, training=True), tf.float32) ** 2)
            return tape.gradient(loss, model.trainable_variables)

        gradients(inputs)
        for _ in range(5):
            with lab.phase(f"{depth}"):
                gradients(inputs)


DEPTHS = [4, 24, 96]
kernels = {"float32": lab.NO_ONEDNN, "mixed_float16": lab.NO_ONEDNN, "mixed_bfloat16": None}
least, spread = {}, {}
for policy, env in kernels.items():
    arm = lab.measure(by_depth, policy, DEPTHS, label=f"depth, {policy}", env=env)
    layers_of = [int(part.name) for part in arm.phases]
    steps = pd.Series([part.rise_mib for part in arm.phases], layers_of).groupby(level=0)
    least[policy], spread[policy] = steps.min(), steps.max() - steps.min()
deep, spread = pd.DataFrame(least).rename_axis("layers"), pd.DataFrame(spread)
_, axes = plt.subplots()
for policy, line in zip(deep, ("o-", "s--", "^-.")):
    above = [0 * spread[policy], spread[policy]]
    axes.errorbar(DEPTHS, deep[policy], above, fmt=line, label=policy)
axes.set(xlabel="layers", ylabel="peak of a gradient step (MiB)", xlim=(0, None), ylim=(0, None))
axes.legend()
plt.show()
deep.round(1)

# %%
ratio = deep["mixed_float16"] / deep["float32"]
lab.note(
    f"MiB; drawn are the least of five steps and the spread, up to {spread.max().max():.1f}: a "
    f"graph can run its operations in another order each time. At {DEPTHS[0]} layers mixed_float16 "
    f"needs {ratio[DEPTHS[0]]:.2f} of float32's peak, at {DEPTHS[-1]} {ratio[DEPTHS[-1]]:.2f}."
)

# %% [markdown]
# **The kernels.** Why not half from the start? Few processors compute matrix products in float16. TensorFlow's kernels for
# the others make float32 copies of both inputs and of the output, compute, and cast back. What the product of two
# matrices of 4 MiB in float32 allocates *beyond its output*, with oneDNN and without:


# %%
def scratch():
    for dtype in (tf.float32, tf.float16, tf.bfloat16):
        matrix = tf.cast(tf.random.normal([1024, 1024]), dtype)
        matrix @ matrix  # the first call may set something up
        with lab.phase(dtype.name):
            output = matrix @ matrix
        del output


table = {}
for kind, env in {"with oneDNN": None, "without": lab.NO_ONEDNN}.items():
    result = lab.measure(scratch, label=f"matmul, {kind}", env=env)
    table[kind] = {part.name: part.peak_mib - part.held_mib for part in result.phases}
table = pd.DataFrame(table).T.rename_axis("MiB beyond the output")
table.round(1)

# %%
without = table.loc["without"]
lab.note(
    f"Without oneDNN a float16 product takes {without['float16']:.0f} MiB more than its output, a "
    f"float32 one {without['float32']:.0f}. Such scratch does not grow with depth, and the "
    "activations kept for the way back do. It is a CPU's effect; what a GPU's kernels take has to "
    "be measured on one, and is **unavailable** here."
)

# %% [markdown]
# **When it flips.** Weights or activations? Predicted for equal layers, without scratch:


# %%
def halves(width=1024, layers=5, batch=32):
    weights = layers * lab.tensor_mib((width, width))
    kept = layers * lab.tensor_mib((batch, width))
    float32, mixed = 4 * weights + kept, 4.5 * weights + kept / 2
    print(f"float32 {float32:8.1f} MiB   mixed {mixed:8.1f} MiB = {mixed / float32:.2f} × that")


lab.explore(halves, width=(16, 4096, 16), layers=(1, 128), batch=(16, 32768, 16))

# %% [markdown]
# **Loss scaling.** The smallest float16 above zero is about 6e-8. A smaller gradient becomes 0. Multiply the loss by 2¹⁵, and every
# gradient grows as much; divide afterwards in float32, and nothing is lost:

# %%
tiny = 1e-8
print("float16 of the gradient:", float(tf.cast(tiny, tf.float16)))
scaled = tf.cast(tiny * 2**15, tf.float16)
print("scaled, float16, scaled back in float32:", float(tf.cast(scaled, tf.float32)) / 2**15)

# %% [markdown]
# `compile()` wraps the optimizer in a `LossScaleOptimizer` when the policy is `mixed_float16`. **A training loop of your own
# does not**: there you must. Here a loss term of small weight, the same loop three times:


# %%
def own_loop(train_x, train_y, test_x, test_y):
    def train(policy, scaled):
        keras.utils.set_random_seed(3)
        hidden = [keras.layers.Dense(64, activation="relu", dtype=policy) for _ in range(2)]
        last = keras.layers.Dense(10, dtype=policy)
        model = keras.Sequential([keras.Input((64,)), *hidden, last])
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(3e-3, epsilon=1e-12)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = 1e-5 * cross_entropy(y, tf.cast(model(x, training=True), tf.float32))
                if scaled:
                    loss = optimizer.scale_loss(loss)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return tf.reduce_mean(tf.cast(gradients[0] == 0, tf.float32))

        for number in range(64):
            at = 128 * number % (len(train_x) - 128)
            zeros = step(train_x[at : at + 128], train_y[at : at + 128])
        right = np.argmax(model(test_x), axis=-1) == test_y
        return {"zeros in the first gradient": float(zeros), "accuracy": float(right.mean())}

    return {
        "float32": train("float32", scaled=False),
        "mixed_float16, not scaled": train("mixed_float16", scaled=False),
        "mixed_float16, scaled": train("mixed_float16", scaled=True),
    }


scaling = pd.DataFrame(lab.measure(own_loop, *data, label="loss scaling", **plain).value).T
accuracy = scaling["accuracy"]
assert accuracy["mixed_float16, not scaled"] < accuracy["mixed_float16, scaled"] - 0.2
scaling.round(3)

# %% [markdown]
# bfloat16 keeps float32's range with fewer digits: it needs no loss scaling.
#
# **The call.** One article sets the policy as it was done before TensorFlow 2.4:

# %%
try:
    experimental = tf.keras.mixed_precision.experimental
    experimental.set_policy(experimental.Policy("mixed_float16"))
    old_call_works = True
except AttributeError as error:
    old_call_works = False
    print(f"AttributeError: {error}")

# %% [markdown]
# Today's call is one line. It is global and stays: set it before layers are made, and set it back if something else follows.

# %%
keras.mixed_precision.set_global_policy("mixed_float16")
todays_policy = keras.layers.Dense(1).dtype_policy.name
keras.mixed_precision.set_global_policy("float32")
print("A new layer got the policy", todays_policy)
assert todays_policy == "mixed_float16"

# %% [markdown]
# ## Verdict
#
# "Halves memory" leaves open whose: both ends are tried, weights and activations.

# %%
lab.verdict(
    "C15",
    "partly",
    weights_float32=wide["float32"].peak_mib,
    weights_mixed=wide["mixed_float16"].peak_mib,
    activations_float32=deep["float32"].iloc[-1],
    activations_mixed=deep["mixed_float16"].iloc[-1],
)

# %%
lab.verdict("C16", "fails", old_call_works=old_call_works)

# %% [markdown]
# ## Exercises
#
# **1.** Where does it pay? Choose width, depth and batch of a network of equal `Dense` layers, so that a whole step **with
# Adam** needs at most 0.65 of float32's peak under mixed_float16, and at most a quarter of a GiB in float32. Both are measured.


# %%
def where_it_pays():
    # BEGIN SOLUTION
    return {"width": 16, "depth": 60, "batch": 8192}
    # END SOLUTION


# %%
check.where_it_pays(where_it_pays)


# %% tags=["right"]
def where_it_pays():
    return {"width": np.int64(24), "depth": 60, "batch": 2**12 + 1}


# %% tags=["wrong"]
# says: weights
def where_it_pays():
    return {"width": 512, "depth": 3, "batch": 32}


# %% tags=["wrong"]
# says: scratch
def where_it_pays():
    return {"width": 16, "depth": 4, "batch": 2**14}


# %% tags=["wrong"]
# says: MiB in float32
def where_it_pays():
    return {"width": 96, "depth": 64, "batch": 16384}


# %% tags=["wrong"]
# says: width, depth and batch
def where_it_pays():
    return 16, 100, 16384


# %% [markdown]
# **2.** Write loss scaling by hand: `scaled_gradient(weights, inputs)` returns the float32 gradient of `small_loss` for
# `weights`, without underflow. `small_loss` casts to float16 inside; do not change it.


# %%
def small_loss(weights, inputs):
    outputs = tf.cast(inputs, tf.float16) @ tf.cast(weights, tf.float16)
    return 1e-7 * tf.reduce_mean(tf.cast(outputs, tf.float32))


# %%
def scaled_gradient(weights, inputs):
    # BEGIN SOLUTION
    scale = 2.0**15
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = scale * small_loss(weights, inputs)
    return tape.gradient(loss, weights) / scale
    # END SOLUTION


# %%
check.scaled_gradient(scaled_gradient)


# %% tags=["right"]
def scaled_gradient(weights, inputs):
    variable = tf.Variable(weights)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2**16)
    optimizer.build([variable])
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(small_loss(variable, inputs))
    return tape.gradient(loss, variable).numpy() / 2**16


# %% tags=["right"]
def scaled_gradient(weights, inputs):
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = small_loss(weights, inputs)
    return tape.gradient(loss, weights, output_gradients=tf.constant(1e6)) * 1e-6


# %% tags=["wrong"]
# says: goes through float16
def scaled_gradient(weights, inputs):
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = 1e-7 * tf.reduce_mean(inputs @ weights)
    return tape.gradient(loss, weights)


# %% tags=["wrong"]
# says: infinite
def scaled_gradient(weights, inputs):
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = 2.0**50 * small_loss(weights, inputs)
    return tape.gradient(loss, weights) / 2.0**50


# %% tags=["wrong"]
# says: underflow
def scaled_gradient(weights, inputs):
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = small_loss(weights, inputs)
    return tape.gradient(loss, weights)


# %% tags=["wrong"]
# says: underflow
def scaled_gradient(weights, inputs):
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = small_loss(weights, inputs)
    return tape.gradient(loss, weights) * 2.0**15 / 2.0**15


# %% tags=["wrong"]
# says: times the right one
def scaled_gradient(weights, inputs):
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = 40000 * small_loss(weights, inputs)
    return tape.gradient(loss, weights) / 2.0**15


# %% tags=["wrong"]
# says: times the right one
def scaled_gradient(weights, inputs):
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = 2.0**15 * small_loss(weights, inputs)
    return tape.gradient(loss, weights)


# %% tags=["wrong"]
# says: float16
def scaled_gradient(weights, inputs):
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = 2.0**15 * small_loss(weights, inputs)
    return tf.cast(tape.gradient(loss, weights), tf.float16) / 2.0**15
