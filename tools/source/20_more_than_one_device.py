# %% [markdown]
# # 20 · More than one device: replicate or split
#
# **Symptom:** *"the model just does not fit one GPU, so I added a second with MirroredStrategy, and it still runs out of
# memory"*; or the input pipeline fills the memory of the machine that trains.
#
# **Afterwards you can** say which tools copy a model to every device and which split it, check that by measurement, train a
# split model, and move an input pipeline's memory to other processes.
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
from labsupport.graders import more_than_one_device as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

WIDTH = lab.choose(SCALE, quick=1024, full=2048)
DEPTH, BATCH, FEW, STEPS = 4, 64, 3, 100

# %% [markdown]
# ## Predict
#
# Four dense layers with Adam: weights and two slots (Adam's running averages), three times the weights in all. We call
# that the *state*. On one device it is the floor.

# %%
state = 3 * DEPTH * lab.tensor_mib((WIDTH, WIDTH))
print(f"weights and slots: 3 × {DEPTH} × {WIDTH} × {WIDTH} × 4 B = {state:.0f} MiB")
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
# The model does not fit one device. So a second one is added, with `MirroredStrategy`, which is said to distribute the model.
# First what one device needs:


# %%
def start(number):
    return keras.initializers.HeNormal(seed=number)  # every arm begins with the same weights


def mirrored_steps(devices, width=WIDTH, batch=BATCH, steps=FEW):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(devices)])
    with strategy.scope():
        layers = [
            keras.layers.Dense(width, "relu", use_bias=False, kernel_initializer=start(number))
            for number in range(DEPTH)
        ]
        model = keras.Sequential([keras.Input((width,)), *layers])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)

    def on_each(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True))) / (batch * width)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    @tf.function
    def step(x):
        return strategy.reduce("SUM", strategy.run(on_each, args=(x,)), axis=None)

    x = tf.random.stateless_normal([batch, width], seed=[1, 2])
    batches = tf.data.Dataset.from_tensors(x).repeat(steps)
    losses = [float(step(part)) for part in strategy.experimental_distribute_dataset(batches)]
    kernels = strategy.experimental_local_results(layers[0].kernel.value)
    parts = [tuple(kernel.shape) for kernel in kernels]
    return {"losses": losses, "held": lab.reading().tensors_mib, "parts": parts}


single = lab.measure(mirrored_steps, 1, logical_devices=1, label="one device")
EACH = int(0.75 * single.peak_mib)
lab.note(
    f"One device needs {single.peak_mib:.0f} MiB. Ours have {EACH} MiB each, so the model does "
    f"not fit. Two of them have {2 * EACH}: more than enough, if the model is shared out."
)

# %% [markdown]
# The logical devices share one allocator, so the budget is what both have together. More than that cannot be: whoever
# exceeds it has exceeded at least one of two real cards.

# %%
two = {"budget": f"{2 * EACH} MiB", "logical_devices": 2}
many = (2, WIDTH, BATCH, STEPS)
failure = lab.run(mirrored_steps, *many, label="MirroredStrategy on two", **two)
lab.expect_oom(failure)

# %%
mirrored = lab.measure(
    mirrored_steps, 2, logical_devices=2, label="MirroredStrategy on two, no tight budget"
)
lab.note(
    f"Without a tight budget it ends, and holds {mirrored.value['held']:.0f} MiB, where one "
    f"device alone held {single.value['held']:.0f}. Each device has a first kernel of shape "
    f"{mirrored.value['parts'][0]}: all of it. The strategy *replicates* the model. What it "
    "divides is the batch."
)

# %% [markdown]
# ## Advice, tested
#
# **The other end.** Where the batch is the larger part, dividing it may be enough. A narrow network, and many rows:

# %%
NARROW = (256, 8192)  # width and batch
activations_one = lab.measure(mirrored_steps, 1, *NARROW, label="one device, many rows")
activations_two = lab.measure(
    mirrored_steps, 2, *NARROW, logical_devices=2, label="MirroredStrategy on two, many rows"
)
lab.note(
    f"One device needs {activations_one.peak_mib:.0f} MiB for that, two devices "
    f"{activations_two.peak_mib / 2:.0f} each. There MirroredStrategy makes training fit, and "
    "every device still has the whole model."
)

# %% [markdown]
# **A second piece of advice:** Keras' `ModelParallel` with a layout map, which says along which axis a weight is cut. On the
# TensorFlow backend it takes the map. What it does with it is seen from the variables.


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
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH)])
    kernel = model.trainable_variables[0].value
    return tuple(kernel.shape), kernel.device.split("device:")[-1], hasattr(kernel, "layout")


parallel = lab.measure(model_parallel, 4, logical_devices=4, label="ModelParallel, 4 devices")
shape, device, cut = parallel.value
lab.note(
    f"The kernel is {'cut by a layout' if cut else f'not cut: all {shape} of it lie on {device}'}. "
    "In Keras the layouts belong to the JAX backend."
)

# %% [markdown]
# ## Fix
#
# **What splits a model** in TensorFlow itself is DTensor: a *layout* says along which axis of a *mesh* of devices a tensor is
# cut. The same layers, weights, batches and optimizer, in the budget of the failure. The kernels are cut by columns and by
# rows in turn: columns give each device a part of the outputs, and rows are what takes such a part as it lies.


# %%
def split_steps(devices, width, batch, steps):
    from tensorflow.experimental import dtensor

    mesh = dtensor.create_mesh([("model", devices)], devices=[f"CPU:{n}" for n in range(devices)])
    columns = dtensor.Layout([dtensor.UNSHARDED, "model"], mesh)
    rows = dtensor.Layout(["model", dtensor.UNSHARDED], mesh)

    def whole(value):
        return dtensor.copy_to_mesh(value, dtensor.Layout.replicated(mesh, value.shape.rank))

    def variable(value, layout):
        return dtensor.DVariable(dtensor.relayout(whole(value), layout))

    layouts = [rows if number % 2 else columns for number in range(DEPTH)]
    shape = [width, width]
    kernels = [variable(start(number)(shape), layout) for number, layout in enumerate(layouts)]
    slots = [[variable(tf.zeros(shape), layout) for _ in range(2)] for layout in layouts]

    @tf.function
    def step(x, rate):  # Adam as Keras computes it
        with tf.GradientTape() as tape:
            hidden = x
            for kernel in kernels:
                hidden = tf.nn.relu(tf.matmul(hidden, kernel))
            loss = tf.reduce_sum(tf.square(hidden)) / (batch * width)
        gradients = tape.gradient(loss, kernels)
        for kernel, (mean, squares), gradient in zip(kernels, slots, gradients):
            mean.assign_add(0.1 * (gradient - mean))
            squares.assign_add(0.001 * (tf.square(gradient) - squares))
            kernel.assign_sub(rate * mean / (tf.sqrt(squares) + 1e-7))
        return loss

    x, losses = whole(tf.random.stateless_normal([batch, width], seed=[1, 2])), []
    for number in range(1, steps + 1):
        rate = tf.constant(0.001 * (1 - 0.999**number) ** 0.5 / (1 - 0.9**number))
        losses.append(float(dtensor.unpack(step(x, whole(rate)))[0]))
        if number == FEW:
            held = lab.reading().tensors_mib  # where the others end
    parts = [tuple(part.shape) for part in dtensor.unpack(kernels[0].read_value())]
    return {"losses": losses, "held": held, "parts": parts}


fix = lab.run(split_steps, *many, label="split by DTensor on two", **two)
lab.expect_finished(fix)

# %% [markdown]
# ## Side by side
#
# Totals over both devices.

# %%
lab.compare(single, failure, mirrored, fix)

# %% [markdown]
# Who held it? Both run once more while TensorFlow records every allocation, on both devices. MirroredStrategy dies in
# its first update: kernels and slots still share one buffer, but the gradients are there for each device, and are
# packed into buffers of their own to be added up. DTensor calls its graphs in threads of their own, so that where a
# step ends, and with it what is kept, cannot be seen: most of the weights and slots are within *unknown*, under the
# operation that wrote them last.

# %%
lab.take_apart(failure, fix)

# %%
lab.predicted_vs_measured(
    one_device=(state, single.value["held"]),
    two_devices_copied=(replicated, mirrored.value["held"]),
    two_devices_split=(split, fix.value["held"]),
)

# %%
print(my_guess.against(mirrored.value["held"]))
for arm in (single, mirrored, fix):
    losses = arm.value["losses"][:FEW]
    print(f"{arm.label}: first losses", ", ".join(f"{loss:.4f}" for loss in losses))
    close = zip(losses, single.value["losses"])
    assert all(abs(loss - alone) < 0.01 * alone for loss, alone in close), "not the same training"
lab.note(
    "Three ways, one training. Each of the two devices has a part of shape "
    f"{fix.value['parts'][0]} of the first kernel, and both together held "
    f"{fix.value['held']:.0f} MiB after {FEW} steps."
)

# %% [markdown]
# ## Explain
#
# * **Replicate** (`MirroredStrategy`): every device holds weights, slots and gradients; the batch is divided. Activations shrink
#   with the number of devices, the state does not. Gradients are packed into buffers on every device to be exchanged.
# * **Split** (DTensor layouts; in Keras, `ModelParallel` on JAX): every device holds a part of each weight. The state shrinks,
#   and partial results must be brought together after every second layer, which costs time.
# * A logical device on a CPU shares memory with the others. Copies that were never written can share a buffer, so only after
#   the first update do replicas show in full.
#
# **When it flips.** Move the sliders: what does each *device* hold?


# %%
def each_device(devices=2, state_mib=48, activations_mib=400):
    mirrored_mib = state_mib * 4 / 3 + activations_mib / devices
    split_mib = state_mib * 4 / 3 / devices + activations_mib
    print(
        f"each of {devices} devices: replicated {mirrored_mib:.0f} MiB, "
        f"only the weights split {split_mib:.0f} MiB (predicted, with gradients)"
    )


lab.explore(each_device, devices=(1, 8, 1), state_mib=(16, 2048, 16), activations_mib=(0, 2048, 16))

# %% [markdown]
# ### Moving the input pipeline elsewhere: the tf.data service
#
# A shuffle buffer of decoded images fills the memory of whoever runs the pipeline. The tf.data service runs it in a *worker*
# process, here on this machine, in a cluster on others. TensorFlow's servers listen on all network interfaces without a
# token, so trainer, dispatcher (which tells the trainer who works) and worker are started inside a network of their own,
# which nothing outside can reach. Where the system has none (macOS, some containers), the figures are unavailable.


# %%
def pipeline(paths):
    def load(path):
        return tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(path), channels=3), [224, 224])

    return tf.data.Dataset.from_tensor_slices(paths).map(load).shuffle(len(paths)).batch(8)


def local(paths):
    return sum(int(batch.shape[0]) for batch in pipeline(paths))


def serve(role):
    service = tf.data.experimental.service
    if role == "dispatcher":
        server = service.DispatchServer(service.DispatcherConfig(port=5050))
    else:
        addresses = {"worker_address": "localhost:5051", "port": 5051}
        server = service.WorkerServer(service.WorkerConfig("localhost:5050", **addresses))
    print("ready", flush=True)
    server.join()


def from_service(paths):
    def mib(who, field):  # VmRSS is what a process has in memory, VmHWM the most it ever had
        lines = Path(f"/proc/{who}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

    local(paths[:1])  # what TensorFlow sets up at first use is not counted
    with lab.beside(serve, "dispatcher"), lab.beside(serve, "worker") as worker:
        before = mib("self", "VmRSS"), mib(worker, "VmRSS")
        distribute = tf.data.experimental.service.distribute
        fed = pipeline(paths).apply(distribute("parallel_epochs", "grpc://localhost:5050"))
        images = sum(int(batch.shape[0]) for batch in fed)
        return images, mib("self", "VmHWM") - before[0], mib(worker, "VmHWM") - before[1]


paths = sorted(str(path.resolve()) for path in Path("../data/photos").glob("*.jpg"))[:400]
at_home = lab.measure(local, paths, label="pipeline in the trainer")
away = lab.measure(lab.isolated, from_service, paths, label="pipeline in a tf.data service").value
if away is None or at_home.process_peak_mib is None:
    print("unavailable on this system")
else:
    images, trainer, worker = away
    lab.note(
        f"{at_home.value} and {images} images were read. The trainer with its own pipeline added "
        f"{at_home.process_peak_mib:.0f} MiB of process memory, the trainer fed by the service "
        f"{trainer:.0f}, and the service's worker {worker:.0f}."
    )

# %% [markdown]
# The buffer has not become smaller; it has moved. The trainer holds some batches, and the messages that they came in. That
# helps when the worker runs on a machine with memory to spare.
#
# ## Verdict

# %%
lab.verdict(
    "C21",
    "partly",
    one_device=single.value["held"],
    mirrored_each=mirrored.value["held"] / 2,
    mirrored_fits=failure.ok,
    activations_one=activations_one.peak_mib,
    activations_each=activations_two.peak_mib / 2,
)

# %% [markdown]
# ## Exercises
#
# **1.** A model can also be split without DTensor, layer by layer. Write `placed(shapes)`: for each shape make a kernel and its
# two slots with `tf.Variable(tf.zeros(shape))`, on `"CPU:0"` or on `"CPU:1"`, and return a list of (kernel, slot, slot).
# Slots lie beside their kernel, and no device may hold more than `ROOM` MiB.

# %%
SHAPES = [(512, 1024), (512, 1024), (1024, 1024), (1024, 1024), (1024, 2048)]
ROOM = 38


# %%
def placed(shapes):
    # BEGIN SOLUTION
    made, held = [], [0, 0]
    for rows, columns in sorted(shapes, reverse=True):
        number = held.index(min(held))
        held[number] += rows * columns
        with tf.device(f"CPU:{number}"):
            made.append(tuple(tf.Variable(tf.zeros((rows, columns))) for _ in range(3)))
    return made
    # END SOLUTION


# %%
check.placed(placed, SHAPES, ROOM)


# %% tags=["right"]
def placed(shapes):
    made = []
    for number, shape in enumerate(
        shapes
    ):  # the first three on one device, in the order of the layers
        with tf.device("CPU:0" if number < 3 else "/device:CPU:1"):
            kernel = tf.Variable(tf.zeros(shape))
            made.append([kernel, tf.Variable(tf.zeros_like(kernel)), tf.Variable(tf.zeros(shape))])
    return made


# %% tags=["wrong"]
# says: CPU:0 holds 60
def placed(shapes):
    return [tuple(tf.Variable(tf.zeros(shape)) for _ in range(3)) for shape in shapes]


# %% tags=["wrong"]
# says: CPU:0 holds 42
def placed(shapes):
    made, held = [], [0, 0]
    for rows, columns in shapes:
        number = held.index(min(held))
        held[number] += rows * columns
        with tf.device(f"CPU:{number}"):
            made.append([tf.Variable(tf.zeros((rows, columns))) for _ in range(3)])
    return made


# %% tags=["wrong"]
# says: float16
def placed(shapes):
    return [[tf.Variable(tf.zeros(shape, "float16")) for _ in range(3)] for shape in shapes]


# %% tags=["wrong"]
# says: twice
def placed(shapes):
    made = []
    for number, shape in enumerate(shapes):
        with tf.device(f"CPU:{number // 4}"):
            made.append([tf.Variable(tf.zeros(shape))] * 3)
    return made


# %% tags=["wrong"]
# says: tf.Variable
def placed(shapes):
    made = []
    for number, shape in enumerate(shapes):
        with tf.device(f"CPU:{number // 4}"):
            made.append([tf.zeros(shape) for _ in range(3)])
    return made


# %% tags=["wrong"]
# says: not beside
def placed(shapes):
    made = []
    for shape in shapes:
        parts = []
        for device in ("CPU:0", "CPU:1", "CPU:1" if shape[1] > 1024 else "CPU:0"):
            with tf.device(device):
                parts.append(tf.Variable(tf.zeros(shape)))
        made.append(parts)
    return made


# %% [markdown]
# **2.** Cut a kernel along its *rows* in place of its columns: return the layout for it on this mesh, whose one axis is called
# `"model"`. The check looks at the part that each device gets.


# %%
def row_layout(dtensor, mesh):
    # BEGIN SOLUTION
    return dtensor.Layout(["model", dtensor.UNSHARDED], mesh)
    # END SOLUTION


# %%
check.row_layout(row_layout)


# %% tags=["right"]
def row_layout(dtensor, mesh):
    return dtensor.Layout.batch_sharded(mesh, "model", rank=2)


# %% tags=["wrong"]
# says: has two
def row_layout(dtensor, mesh):
    return dtensor.Layout(["model"], mesh)


# %% tags=["wrong"]
# says: its columns
def row_layout(dtensor, mesh):
    return dtensor.Layout([dtensor.UNSHARDED, "model"], mesh)


# %% tags=["wrong"]
# says: the whole kernel
def row_layout(dtensor, mesh):
    return dtensor.Layout.replicated(mesh, rank=2)


# %% tags=["wrong"]
# says: no layout
def row_layout(dtensor, mesh):
    return ["model", dtensor.UNSHARDED]
