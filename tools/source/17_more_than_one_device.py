# %% [markdown]
# # 17 · More than one device: replicate or split
#
# **Symptom:** *"the model just does not fit one GPU, so I added a second with MirroredStrategy, and it still runs out of
# memory"*; or the input pipeline fills the memory of the machine that trains.
#
# **Afterwards you can** say which tools copy a model to every device and which split it, check that by measurement, and move
# an input pipeline's memory to other processes.
#
# | | |
# |---|---|
# | Time | about a minute to run, 30 to work through |
# | Memory | below 3 GiB, Python and TensorFlow included |
# | Claims judged | C21 |
#
# No second GPU is needed: TensorFlow splits the CPU into *logical devices*, to which every strategy works as to cards. They
# share one allocator, so the figures are totals over all devices.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes layers twice as wide, four times the weights
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
from pathlib import Path

import labsupport as lab

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

WIDTH = lab.choose(SCALE, quick=1024, full=2048)
DEPTH, BATCH = 4, 64

# %% [markdown]
# ## Predict
#
# Four dense layers with Adam: weights and two slots, three times the weights in all. On one device that is the floor.

# %%
state = 3 * DEPTH * lab.tensor_mib((WIDTH + 1, WIDTH))
print(f"weights and slots: 3 × {DEPTH} × ({WIDTH} + 1) × {WIDTH} × 4 B = {state:.0f} MiB")
my_guess = lab.guess(
    "Weights and slots on all devices together, after a step with MirroredStrategy on two devices?",
    GUESS_MIB,
)

# %%
replicated, split = 2 * state, state
print(f"if the strategy copies: {replicated:.0f} MiB; if it splits: {split:.0f} MiB")

# %% [markdown]
# ## Failure
#
# The claim is that `MirroredStrategy` distributes the model so that it fits. The budget has room for one state, its
# gradients and half as much again, which is what somebody who believes the claim would allow for two devices.


# %%
def mirrored_step(devices):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(devices)])
    with lab.phase("build"), strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((WIDTH,)),
                *[keras.layers.Dense(WIDTH, activation="relu") for _ in range(DEPTH)],
            ]
        )
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)

    def on_each(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(batch, training=True)) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    @tf.function
    def step(batch):
        strategy.run(on_each, args=(batch,))

    batches = tf.data.Dataset.from_tensors(tf.random.stateless_normal([BATCH, WIDTH], seed=[1, 2]))
    with lab.phase("one step"):
        for batch in strategy.experimental_distribute_dataset(batches):
            step(batch)
    return lab.reading().tensors_mib


fits_one = f"{1.5 * (state + state / 3):.0f} MiB"
failure = lab.run(
    mirrored_step, 2, budget=fits_one, logical_devices=2, label="MirroredStrategy, 2 devices"
)
lab.expect_oom(failure)

# %%
single = lab.measure(mirrored_step, 1, budget=fits_one, logical_devices=1, label="one device")
mirrored = lab.measure(
    mirrored_step, 2, logical_devices=2, label="MirroredStrategy, 2 devices, no tight budget"
)
print(f"held after a step: one device {single.value:.0f} MiB, two devices {mirrored.value:.0f} MiB")

# %% [markdown]
# One device trains inside that budget; two do not. Every device holds the whole model: it *replicates*. What it divides is the
# batch.
#
# ## Fix
#
# **A second piece of advice:** Keras' `ModelParallel` with a layout map. On the TensorFlow backend it takes the map. What it
# does with it is seen from the variables.


# %%
def model_parallel(devices):
    mesh = keras.distribution.DeviceMesh(
        (1, devices), ["batch", "model"], devices=[f"cpu:{n}" for n in range(devices)]
    )
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*kernel"] = keras.distribution.TensorLayout((None, "model"), mesh)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    )
    model = keras.Sequential(
        [keras.Input((WIDTH,)), *[keras.layers.Dense(WIDTH) for _ in range(DEPTH)]]
    )
    kernel = model.trainable_variables[0].value
    return {
        "type": type(kernel).__name__,
        "on": sorted(
            {variable.value.device.rsplit("/", 1)[-1] for variable in model.trainable_variables}
        ),
        "sharded": hasattr(kernel, "layout"),
    }


parallel = lab.measure(model_parallel, 4, logical_devices=4, label="ModelParallel, 4 devices")
kernels = parallel.value
print(f"kernel: {kernels['type']}, on {', '.join(kernels['on'])}, sharded: {kernels['sharded']}")

# %% [markdown]
# Plain variables on one device, without a word of warning. In Keras the layouts belong to the JAX backend.
#
# **What works** in TensorFlow itself is DTensor: a layout says along which axis of the device mesh a tensor is cut. The same
# kernels once replicated, once cut along their columns:


# %%
def dtensor_kernels(devices, cut):
    from tensorflow.experimental import dtensor

    mesh = dtensor.create_mesh(
        [("model", devices)], devices=[f"CPU:{number}" for number in range(devices)]
    )
    columns = "model" if cut else dtensor.UNSHARDED
    layout = dtensor.Layout([dtensor.UNSHARDED, columns], mesh)

    own_shape = [WIDTH, WIDTH // devices if cut else WIDTH]

    def kernel(number):
        parts = []
        for device in range(devices):  # every device makes its own part, or its own copy
            with tf.device(f"CPU:{device}"):
                parts.append(
                    tf.random.stateless_normal(own_shape, seed=[number, device if cut else 0])
                )
        return dtensor.DVariable(dtensor.pack(parts, layout))

    kernels = [kernel(number) for number in range(DEPTH)]
    x = dtensor.copy_to_mesh(tf.ones([BATCH, WIDTH]), dtensor.Layout.replicated(mesh, 2))
    # One matmul, to show that the cut kernels compute; each device works on its own columns.
    columns_each = [tuple(part.shape) for part in dtensor.unpack(tf.matmul(x, kernels[0]))]
    own = [tuple(part.shape) for part in dtensor.unpack(kernels[0].read_value())]
    return own, columns_each, lab.reading().tensors_mib


whole = lab.measure(dtensor_kernels, 2, False, logical_devices=2, label="DTensor, replicated on 2")
fix = lab.measure(dtensor_kernels, 2, True, logical_devices=2, label="DTensor, cut in 2")
for arm in (whole, fix):
    own, computed, held = arm.value
    print(
        f"{arm.label}: every device holds a kernel of {own[0]} and computes {computed[0]}; "
        f"all kernels and devices {held:.1f} MiB"
    )

# %% [markdown]
# ## Side by side

# %%
lab.compare(single, failure, mirrored)

# %%
lab.compare(whole, fix)

# %%
lab.predicted_vs_measured(
    one_device=(state, single.value),
    two_devices_copied=(replicated, mirrored.value),
    kernels_cut_in_two=(DEPTH * lab.tensor_mib((WIDTH, WIDTH)), fix.value[2]),
)

# %%
print(my_guess.against(mirrored.value))
assert mirrored.value > 1.5 * single.value, "two replicas must hold about twice the state of one"

# %% [markdown]
# ## Explain
#
# * **Replicate** (`MirroredStrategy`): every device holds weights, slots and gradients; the batch is divided. Activations shrink
#   with the number of devices, the state does not. Gradients are exchanged through buffers of their size.
# * **Split** (DTensor layouts; in Keras, `ModelParallel` on JAX): every device holds a part of each weight. The state shrinks,
#   and the results of one layer must be brought together for the next, which costs time.
# * A logical device on a CPU shares memory with the others. Copies that were never written can share a buffer, so only after the
#   first update do replicas show in full.
#
# **When it flips.** If activations are the larger part, dividing the batch is what helps. Move the sliders: what does each
# *device* hold?


# %%
def each_device(devices=2, state_mib=48, activations_mib=400):
    mirrored_mib = state_mib * 4 / 3 + activations_mib / devices
    split_mib = state_mib * 4 / 3 / devices + activations_mib
    print(
        f"each of {devices} devices: replicated {mirrored_mib:.0f} MiB, "
        f"split by weights {split_mib:.0f} MiB (predicted, with gradients)"
    )


lab.explore(each_device, devices=(1, 8, 1), state_mib=(16, 2048, 16), activations_mib=(0, 2048, 16))

# %% [markdown]
# ### Moving the input pipeline elsewhere: the tf.data service
#
# A shuffle buffer of decoded images fills the memory of whoever runs the pipeline. The tf.data service runs it in a *worker*
# process, here on this machine, in a cluster on others. TensorFlow's servers listen on all network interfaces without a
# token, so trainer, dispatcher and worker are started inside a network namespace of their own, which nothing outside can
# reach. Where the system has none (macOS, some containers), the figures are unavailable.


# %%
def pipeline(paths):
    def load(path):
        return tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(path), channels=3), [224, 224])

    return tf.data.Dataset.from_tensor_slices(paths).map(load).shuffle(len(paths)).batch(32)


def serve(role):
    service = tf.data.experimental.service
    if role == "dispatcher":
        server = service.DispatchServer(service.DispatcherConfig(port=5050))
    else:
        server = service.WorkerServer(
            service.WorkerConfig("localhost:5050", worker_address="localhost:5051", port=5051)
        )
    print("ready", flush=True)
    server.join()


def train_from_service(paths):
    with lab.beside(serve, "dispatcher"), lab.beside(serve, "worker") as worker:
        counters = {"trainer": "self", "worker": worker}

        def memory(field, who):
            text = Path(f"/proc/{who}/status").read_text()
            return int(text.split(field + ":")[1].split()[0]) / 1024

        before = {name: memory("VmRSS", who) for name, who in counters.items()}
        service = tf.data.experimental.service.distribute(
            processing_mode="parallel_epochs", service="grpc://localhost:5050"
        )
        images = sum(int(batch.shape[0]) for batch in pipeline(paths).apply(service))
        grown = {name: memory("VmHWM", who) - before[name] for name, who in counters.items()}
        return {"images": images, **grown}


def with_service(paths):
    return lab.isolated(train_from_service, paths)


def local(paths):
    return sum(int(batch.shape[0]) for batch in pipeline(paths))


paths = sorted(str(path.resolve()) for path in Path("../data/photos").glob("*.jpg"))[:400]
at_home = lab.measure(local, paths, label="pipeline in the trainer")
away = lab.measure(with_service, paths, label="pipeline in a tf.data service").value
if away is None:
    print(f"trainer with its own pipeline: +{at_home.process_peak_mib or float('nan'):.0f} MiB")
    print("with the service: unavailable on this system")
else:
    print(f"{at_home.value} and {away['images']} images. Process memory added, at most:")
    print(f"  trainer with its own pipeline  {at_home.process_peak_mib:6.0f} MiB")
    print(f"  trainer fed by the service     {away['trainer']:6.0f} MiB")
    print(f"  worker of the service          {away['worker']:6.0f} MiB")

# %% [markdown]
# The buffer has not become smaller; it has moved. That helps when the worker runs on a machine with memory to spare.
#
# ## Verdict

# %%
lab.verdict(
    "C21",
    "fails",
    one_device=single.value,
    mirrored=mirrored.value,
    mirrored_fits=failure.ok,
    kernel_columns=fix.value[0][0][1],
    all_columns=WIDTH,
    model_parallel_sharded=parallel.value["sharded"],
)

# %% [markdown]
# ## Exercises
#
# **1.** A model's weights take 500 MiB; it trains with Adam, and its activations take 2,000 MiB for the whole batch. Return the
# MiB on *each* of four devices under MirroredStrategy (weights, gradients, slots, activations).


# %%
def per_device_mib():
    # BEGIN SOLUTION
    return 500 * (1 + 1 + 2) + 2000 / 4
    # END SOLUTION


with lab.exercise(
    1,
    "Everything that hangs on the weights is copied: 1 + 1 + 2 times; "
    "the batch's activations are divided by four.",
):
    answer = per_device_mib()
    assert answer is not None, "per_device_mib() returns nothing yet: return a number of MiB."
    assert answer != 625, "you divided the state as well; a mirrored state is copied."
    assert abs(answer - 2500) < 1, (
        f"{answer:.0f} MiB is not it: what is copied, and what is divided?"
    )

# %% [markdown]
# **2.** Cut the kernels along their *rows* in place of their columns. Return the layout for a kernel on this mesh; the check
# looks at the shape of each device's part.


# %%
def row_layout(dtensor, mesh):
    # BEGIN SOLUTION
    return dtensor.Layout(["model", dtensor.UNSHARDED], mesh)
    # END SOLUTION


def check_rows():
    from tensorflow.experimental import dtensor

    mesh = dtensor.create_mesh([("model", 2)], devices=["CPU:0", "CPU:1"])
    layout = row_layout(dtensor, mesh)
    if layout is None:
        return None
    kernel = dtensor.call_with_layout(tf.ones, layout, shape=[WIDTH, WIDTH])
    return [tuple(part.shape) for part in dtensor.unpack(kernel)]


rows = lab.run(check_rows, logical_devices=2, label="cut by rows", quiet=True)
with lab.exercise(
    2, "A layout lists one entry an axis: the mesh axis that cuts it, or dtensor.UNSHARDED."
):
    assert rows.ok, str(rows.error)
    assert rows.value is not None, "row_layout() returns nothing yet: return a dtensor.Layout."
    assert rows.value == [(WIDTH // 2, WIDTH)] * 2, f"the parts have the shapes {rows.value}."
