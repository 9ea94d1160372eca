# %% [markdown]
# # 11 · FP32 against mixed float16 and bfloat16
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
SCALE = "quick"  # "full" takes wider and deeper networks
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras  # after it, for the same reason

WIDTH = lab.choose(SCALE, quick=1024, full=2048)
DEEP = lab.choose(SCALE, quick=16, full=24)
POLICIES = ["float32", "mixed_float16", "mixed_bfloat16"]

# %% [markdown]
# ## Predict
#
# A network of four `Dense(1024)` layers, Adam, a batch of 32. In float32 one training step needs weights, gradients
# and Adam's two running averages. An article says that one line, `set_global_policy("mixed_float16")`, halves that.

# %%
my_guess = lab.guess(
    "Peak memory of one training step of this network with mixed_float16?", GUESS_MIB
)

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
# Only activations are float16. Weights stay float32, since an update is often too small to change a float16 weight.
# Before each layer computes, its weights are *copied* into float16: that copy comes on top. With W for the weights:

# %%
W = 4 * lab.tensor_mib((WIDTH, WIDTH))
activations = 4 * lab.tensor_mib((32, WIDTH))
predicted_float32 = W + W + 2 * W + activations  # weights, gradients, averages, activations
predicted_mixed = W + W + 2 * W + W / 2 + activations / 2  # and the float16 copies of the weights
print(f"W = {W:.1f} MiB, all activations {activations:.1f} MiB")
print(f"float32: {predicted_float32:.1f} MiB, mixed_float16: {predicted_mixed:.1f} MiB")
print(f"half of float32 would be {predicted_float32 / 2:.1f} MiB")

# %% [markdown]
# ## Failure
#
# The article's line in front of an ordinary training. First without a tight budget, to have both figures. (Float16 runs
# without oneDNN: on processors with some float16 instructions, its kernel for `Dense` with relu takes hundreds of times
# as long.)


# %%
KERNELS = {"mixed_float16": lab.NO_ONEDNN, "float16": lab.NO_ONEDNN}


def train_weight_bound(policy, width):
    keras.mixed_precision.set_global_policy(policy)
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(4)]
    last = keras.layers.Dense(10, dtype="float32")
    model = keras.Sequential([keras.Input((width,)), *hidden, last])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with lab.phase("make averages"):
        model.optimizer.build(model.trainable_variables)  # else the first step does it
    with lab.phase("train"):
        for _ in range(3):
            model.train_on_batch(tf.random.normal([32, width]), tf.zeros([32], tf.int32))


weight_float32 = lab.measure(train_weight_bound, "float32", WIDTH, label="float32")
mixed_arm = (train_weight_bound, "mixed_float16", WIDTH)
weight_mixed = lab.measure(*mixed_arm, label="mixed_float16", env=lab.NO_ONEDNN)
lab.predicted_vs_measured(
    float32=(predicted_float32, weight_float32.peak_mib),
    mixed_float16=(predicted_mixed, weight_mixed.peak_mib),
)

# %% [markdown]
# Now the real situation: the budget is a third below what float32 needs, so somebody sets the policy. The promise was half.

# %%
too_little = f"{int(2 / 3 * predicted_float32)} MiB"
words = {"label": "mixed_float16, a third less", "env": lab.NO_ONEDNN}
failure = lab.run(*mixed_arm, budget=too_little, **words)
lab.expect_oom(failure)

# %% [markdown]
# The flat part at the end is TensorFlow's allocator, which waits ten seconds for memory before it gives up. The training did not
# even begin: weights and Adam's averages are 3 W in float32 under every mixed policy, and they alone do not fit.
#
# ## Fix
#
# The policy shrinks activations. It can only help where activations are most of the memory: many samples, many layers,
# few weights. Here is such a training, on real handwriting: 1437 digits, each also shifted in seven directions.


# %%
def digits():
    data = np.load("../data/digits.npz")
    images, labels = data["images"].astype("float32") / 16, data["labels"].astype("int32")
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order]
    shifts = [(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (-1, -1), (1, -1)]
    padded = np.pad(images[:1437], ((0, 0), (1, 1), (1, 1)))
    shifted = np.concatenate([np.roll(padded, shift, (1, 2))[:, 1:-1, 1:-1] for shift in shifts])
    order = np.random.default_rng(1).permutation(len(shifted))
    train = shifted.reshape(-1, 64)[order], np.tile(labels[:1437], 8)[order]
    return *train, images[1437:].reshape(-1, 64), labels[1437:]


data = digits()
print(f"{len(data[0])} training images of 8 × 8, {len(data[2])} test images")


# %%
def train_deep(policy, depth, train_x, train_y, test_x, test_y):
    keras.mixed_precision.set_global_policy(policy)
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(96, "relu", kernel_initializer="he_normal") for _ in range(depth)]
    last = keras.layers.Dense(10, dtype=None if policy == "float16" else "float32")
    model = keras.Sequential([keras.Input((64,)), *hidden, last])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    history = model.fit(train_x, train_y, batch_size=4096, epochs=25, verbose=0).history
    accuracy = model.evaluate(test_x, test_y, verbose=0)[1]
    return {"accuracy": round(accuracy, 3), "loss": round(history["loss"][-1], 2)}


deep = {
    policy: lab.measure(train_deep, policy, DEEP, *data, label=policy, env=KERNELS.get(policy))
    for policy in POLICIES
}

# %% [markdown]
# The article does not say why the policy is *mixed*. The obvious alternative: float16 for everything, weights and averages too.

# %%
arm = (train_deep, "float16", DEEP, *data)
pure = lab.measure(*arm, label="float16 for everything", env=lab.NO_ONEDNN)

# %% [markdown]
# ## Side by side

# %%
lab.compare(*deep.values(), pure)

# %%
print(my_guess.against(weight_mixed.peak_mib))
ratio = {policy: result.peak_mib / deep["float32"].peak_mib for policy, result in deep.items()}
parts = ", ".join(f"{policy} {part:.2f}" for policy, part in ratio.items())
print(f"Peak, as a part of float32's: {parts}")
enough = deep["float32"].value["accuracy"]
assert all(deep[policy].value["accuracy"] > enough - 0.1 for policy in POLICIES)
assert np.isnan(pure.value["loss"]) or pure.value["accuracy"] < enough - 0.3

# %% [markdown]
# Both mixed policies learn as float32 does. Float16 for everything does not learn at all: Adam divides by the root of an
# average of *squared* gradients; in float16 those squares become 0, and dividing by nearly nothing gives infinity, then NaN.
#
# Why is mixed float16 not at half? That is the next section.
#
# ## Explain
#
# **The kernels.** Few processors compute matrix products in float16. TensorFlow's kernels for the others make float32 copies of
# both inputs and of the output, compute, and cast back. (Its log says: "oneDNN supports DT_HALF only on platforms with …".)
# The table shows what single operations allocate *beyond their output*, and their time. The second run switches off oneDNN,
# the library that brings bfloat16 kernels for recent processors: that is what a processor without them does.


# %%
def scratch():
    n = 1024
    for dtype in (tf.float32, tf.float16, tf.bfloat16):
        matrix = tf.cast(tf.random.normal([n, n]), dtype)
        images = tf.cast(tf.random.normal([16, 32, 32, 32]), dtype)
        kernel = tf.cast(tf.random.normal([3, 3, 32, 32]), dtype)
        operations = {
            "relu": lambda: tf.nn.relu(matrix),
            "add": lambda: matrix + matrix,
            "matmul": lambda: matrix @ matrix,
            "conv2d": lambda: tf.nn.conv2d(images, kernel, 1, "SAME"),
            "conv2d, gradient of the kernel": lambda: tf.raw_ops.Conv2DBackpropFilter(
                input=images,
                filter_sizes=kernel.shape,
                out_backprop=images,
                strides=[1, 1, 1, 1],
                padding="SAME",
            ),
        }
        for name, operation in operations.items():
            operation()  # the first call may set something up
            with lab.phase(f"{name}: {dtype.name}"):
                output = operation()
            del output


def by_operation(result, figure):
    values = {tuple(part.name.split(": ")): figure(part) for part in result.phases}
    return pd.Series(values).unstack(sort=False)


def beyond_output(part):
    return part.peak_mib - part.held_mib


here = lab.measure(scratch, label="operations")
plain = lab.measure(scratch, label="operations without oneDNN", env=lab.NO_ONEDNN)
table = {
    "MiB beyond the output": by_operation(here, beyond_output),
    "the same without oneDNN": by_operation(plain, beyond_output),
    "milliseconds": by_operation(here, lambda part: 1000 * (part.end - part.start)),
}
pd.concat(table, axis=1).round(1)

# %% [markdown]
# `relu` and `add` need nothing extra in any type. Where float16 is cast up, a `matmul` needs three float32 matrices of its
# own. Such scratch does not grow with depth; the activations kept for the backward pass do. So float16 starts higher and
# climbs half as fast:


# %%
def by_depth(policy, depths):
    for depth in depths:
        layers = [keras.layers.Dense(96, activation="relu", dtype=policy) for _ in range(depth)]
        model = keras.Sequential([keras.Input((96,)), *layers])
        inputs = tf.random.normal([4096, 96])

        @tf.function
        def gradients(inputs):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.cast(model(inputs, training=True), tf.float32) ** 2)
            return tape.gradient(loss, model.trainable_variables)

        gradients(inputs)
        with lab.phase(f"{depth} layers"):
            gradients(inputs)


DEPTHS = lab.choose(SCALE, quick=[2, 8, 16, 24], full=[2, 8, 16, 24, 32, 48])
peaks = pd.DataFrame(index=pd.Index(DEPTHS, name="layers"))
for policy in POLICIES:
    label, env = f"depth, {policy}", KERNELS.get(policy)
    arm = lab.measure(by_depth, policy, DEPTHS, label=label, env=env)
    peaks[policy] = [part.rise_mib for part in arm.phases]
lines = {policy: np.polyfit(DEPTHS, peaks[policy], 1) for policy in POLICIES}

fitted = {
    f"{policy}: {start:.1f} + {slope:.2f} MiB a layer": [start, start + slope * DEPTHS[-1]]
    for policy, (slope, start) in lines.items()
}
axes = pd.DataFrame(fitted, [0, DEPTHS[-1]]).plot(
    style=lab.LINES,
    xlabel="layers of Dense(96), batch 4096",
    ylabel="peak of a gradient step (MiB)",
    xlim=(0, None),
    ylim=(0, None),
)
axes.set_prop_cycle(None)  # the points in their lines' colours
axes.plot(peaks, "o")
plt.show()
peaks.T.round(1).rename_axis("MiB, by layers")

# %% [markdown]
# **When it flips.** Choose a depth, and a batch as a multiple of 4096 (scratch and activations both grow with it).


# %%
def crossing(layers=4, batches=1):
    mib = {policy: batches * (start + slope * layers) for policy, (slope, start) in lines.items()}
    text = "   ".join(f"{policy} {size:7.1f} MiB" for policy, size in mib.items())
    ratio = mib["mixed_float16"] / mib["float32"]
    print(f"{text}   float16 needs {ratio:.2f} × float32 (predicted from the lines)")


lab.explore(crossing, layers=(1, 60), batches=(1, 8))

# %% [markdown]
# A larger batch changes nothing in the ratio; depth does. And with few samples on large weights, as in the failing arm, the
# policy only adds.
#
# GPUs compute in float16, so the scratch should go. Without a GPU its curve is **unavailable**; no figure here stands for it. On a
# machine with one, and `tensorflow[and-cuda]` installed, this measures it: `make labs NAMES=11_mixed_precision`.
#
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

        for start in range(0, 8192, 128):
            zeros = step(train_x[start : start + 128], train_y[start : start + 128])
        right = np.argmax(model(test_x), axis=-1) == test_y
        return {"zeros in the first gradient": float(zeros), "accuracy": float(right.mean())}

    return {
        "float32": train("float32", scaled=False),
        "mixed_float16, not scaled": train("mixed_float16", scaled=False),
        "mixed_float16, scaled": train("mixed_float16", scaled=True),
    }


scaling = pd.DataFrame(lab.measure(own_loop, *data, label="loss scaling").value).T
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

# %%
lab.verdict(
    "C15",
    "partly",
    weights_float32=weight_float32.peak_mib,
    weights_mixed=weight_mixed.peak_mib,
    deep_float32=deep["float32"].peak_mib,
    deep_mixed=deep["mixed_float16"].peak_mib,
    deep_bfloat16=deep["mixed_bfloat16"].peak_mib,
)

# %%
lab.verdict("C16", "fails", old_call_works=old_call_works)

# %% [markdown]
# ## Exercises
#
# **1.** Predict the step of a network under Adam from two sizes: its weights in float32 and its activations in float32, in MiB. Return
# the float32 and the mixed peak (no scratch).


# %%
def predict_peaks(weights, activations):
    # BEGIN SOLUTION
    state_and_gradients = weights + 2 * weights + weights
    return state_and_gradients + activations, state_and_gradients + weights / 2 + activations / 2
    # END SOLUTION


answer = predict_peaks(W, activations)
with lab.exercise(
    1,
    "Weights, two averages and gradients stay float32: 4 × weights. "
    "What is copied, and what is halved?",
):
    assert answer is not None, (
        "predict_peaks() returns nothing yet: return two numbers, float32 and mixed."
    )
    plain, mixed = answer
    measured = weight_float32.peak_mib
    assert abs(plain - measured) < 0.1 * measured, (
        f"float32: {plain:.1f} predicted, {measured:.1f} measured."
    )
    assert mixed > plain, "mixed: the float16 copies of the weights are missing."
    plain, mixed = predict_peaks(0, 100)
    assert (plain, mixed) == (100, 50), "without weights, mixed must be half of float32."

# %% [markdown]
# **2.** Write loss scaling by hand: `scaled_gradient(weights, inputs)` returns the float32 gradient of `small_loss` for
# `weights`, without underflow. The function below it casts to float16 inside; do not change it.


# %%
def small_loss(weights, inputs):
    outputs = tf.cast(inputs, tf.float16) @ tf.cast(weights, tf.float16)
    return 1e-7 * tf.reduce_mean(tf.cast(outputs, tf.float32))


def scaled_gradient(weights, inputs):
    # BEGIN SOLUTION
    scale = 2.0**15
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = scale * small_loss(weights, inputs)
    return tape.gradient(loss, weights) / scale
    # END SOLUTION


inputs, weights = tf.ones([4, 8]), tf.ones([8, 2])
answer = scaled_gradient(weights, inputs)
with lab.exercise(
    2,
    "Multiply the loss by 2.0**15 inside the tape (and tape.watch(weights)); "
    "divide the gradient afterwards.",
):
    assert answer is not None, "scaled_gradient() returns nothing yet: return the gradient."
    assert answer.dtype == tf.float32, f"the gradient is {answer.dtype.name}: divide it in float32."
    assert float(tf.reduce_min(tf.abs(answer))) > 0, "the gradient is 0: it still underflows."
    assert np.allclose(answer, 1e-7 * 4 / 8, rtol=0.05), (
        "the gradient is not 0, but wrong: is it divided by the same scale?"
    )

# %% [markdown]
# **3.** Where does a policy pay in *this* network: one `Dense(2048)` on 8 inputs, then ten `Dense(16)`, batch 4096? Return the
# outputs' MiB in float32 as a list, layer by layer, and the index of the layer where half precision saves most.


# %%
def outputs_by_layer():
    # BEGIN SOLUTION
    sizes = [lab.tensor_mib((4096, 2048))] + [lab.tensor_mib((4096, 16))] * 10
    return sizes, sizes.index(max(sizes))
    # END SOLUTION


answer = outputs_by_layer()
with lab.exercise(
    3,
    "lab.tensor_mib((4096, units)) for each of the eleven layers; the weights do not matter here.",
):
    assert answer is not None, (
        "outputs_by_layer() returns nothing yet: return the list and the index."
    )
    sizes, largest = answer
    assert len(sizes) == 11, f"there are 11 layers, the list has {len(sizes)}."
    assert abs(sizes[0] - 32) < 0.01 and abs(sizes[5] - 0.25) < 0.01, (
        "the sizes are off: batch × units × 4 bytes."
    )
    assert largest == 0, "the first layer keeps more than the ten others together."
