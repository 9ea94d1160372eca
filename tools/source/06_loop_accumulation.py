# %% [markdown]
# # 06 · Adding up in a loop
#
# **Symptom:** *"my custom layer adds up a hundred results in a Python loop; inference is fine, training runs out of
# memory"*, or *"the same graph needs far more memory in one call than in the next"*.
#
# **Afterwards you can** say who keeps the intermediate results of a loop alive, predict their memory from one shape
# for eager code, for a gradient tape and for a graph, and write the sum so that nobody keeps them.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C08, C33 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" doubles the size of every tensor
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import matplotlib.pyplot as plt
import pandas as pd

import labsupport as lab

tf = lab.load_tensorflow()

TIMES = 100
BATCH, UNITS = lab.choose(SCALE, quick=2048, full=4096), 256
BUDGET = lab.choose(SCALE, quick="384 MiB", full="640 MiB")

# %% [markdown]
# ## Predict
#
# The published example is a layer that multiplies its input, of width 1, by a weight of shape (1, units), a hundred
# times, and adds up the hundred equal products in a Python loop. Its author says that the loop wastes memory, and that
# `tf.reduce_sum(tf.stack([product] * 100), axis=0)` cures it. Here are both, and the layer that takes either.

# %%
import keras


def python_loop(x, w):
    total = tf.zeros((x.shape[0], w.shape[1]))
    for _ in range(TIMES):
        total += tf.matmul(x, w)
    return total


def article_stack(x, w):
    product = tf.matmul(x, w)
    return tf.reduce_sum(tf.stack([product] * TIMES), axis=0)


class Summed(keras.layers.Layer):
    """A1's layer: its weight of shape (1, units) is made in the constructor."""

    def __init__(self, units, way):
        super().__init__()
        random = keras.initializers.RandomNormal(seed=1)
        self.w = self.add_weight(shape=(1, units), initializer=random)
        self.way = way

    def call(self, x):
        return self.way(x, self.w)


# %%
my_guess = lab.guess(
    "Peak tensor memory of one eager training step (loss and gradient) through the Python loop?",
    GUESS_MIB,
)

# %% [markdown]
# Now the arithmetic. Everything large here has the shape of one product, (batch, units).

# %%
product = lab.tensor_mib((BATCH, UNITS))
print(f"one product: {BATCH} × {UNITS} × 4 B = {product:.1f} MiB")

# %% [markdown]
# **Eager, forward pass.** Python drops each product as soon as it was added. At the worst moment three tensors live:
# the old total, the product and the new total. The stack copies its hundred references into one block: the product,
# a hundred copies and the sum.
#
# **Eager, training.** A tape records every operation together with its inputs, because a gradient may need them. Each
# addition has two large inputs, the product and the total so far: two for each turn of the loop. The stack is recorded
# too, and its gradient is a second tensor of the same size.

# %%
predicted = {
    "forward loop": 3 * product,
    "forward stack": (1 + TIMES + 1) * product,
    "training loop": 2 * TIMES * product,
    "training stack": 2 * TIMES * product,
}
for name, size in predicted.items():
    print(f"{name:15s} {size / product:4.0f} products = {size:5.0f} MiB")

# %% [markdown]
# ## Failure
#
# One eager training step through the loop, with a mean square as the loss.


# %%
def training_step(way, training=True):
    layer, x = Summed(UNITS, way), tf.random.stateless_normal((BATCH, 1), seed=(1, 2))
    with lab.phase("forward"):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(x)))
    with lab.phase("backward"):
        gradient = tape.gradient(loss, layer.w)
    return float(tf.reduce_sum(gradient))


failure = lab.run(training_step, python_loop, budget=BUDGET, label="Python loop")
lab.expect_oom(failure)

# %% [markdown]
# ## Fix
#
# The article's fix, in the same step under the same budget:

# %%
article = lab.run(training_step, article_stack, budget=BUDGET, label="article's stack")
lab.expect_oom(article)

# %% [markdown]
# The cure dies of the same illness: the stack still fits, its gradient does not. What works is to look at the sum: a
# hundred equal products are one product times a hundred.


# %%
def one_matmul(x, w):
    return float(TIMES) * tf.matmul(x, w)


works = lab.run(training_step, one_matmul, budget=BUDGET, label="one matmul × 100")
lab.expect_finished(works)

# %% [markdown]
# Not every loop can be replaced by arithmetic. Inside a graph (`tf.function`) there are two more ways: a loop that
# *stays* a loop, one turn at a time; and the Python loop with the weight read once, before it. The second looks like
# nothing; the results below show what it does.


# %%
def one_at_a_time(x, w):
    def turn(i, total):
        return i + 1, total + tf.matmul(x, w)

    start = (0, tf.zeros((x.shape[0], w.shape[1])))
    return tf.while_loop(lambda i, total: i < TIMES, turn, start, parallel_iterations=1)[1]


def weight_read_once(x, w):
    return python_loop(x, tf.convert_to_tensor(w))


# %% [markdown]
# ## Side by side

# %%
side_by_side = lab.compare(failure, article, works)
side_by_side

# %% [markdown]
# A death says only "more than the budget". One more run, without a tight budget, takes every way through four
# settings: forward pass or training, eager or graph. A graph is called five times, because its peak can differ from
# call to call.

# %%
WAYS = {
    "Python loop": python_loop,
    "article's stack": article_stack,
    "one matmul × 100": one_matmul,
    "tf.while_loop, one at a time": one_at_a_time,
    "Python loop, weight read once": weight_read_once,
}
SETTINGS = ("eager, forward", "eager, training", "graph, forward", "graph, training")


def survey(ways, calls=5):
    x, means = tf.random.stateless_normal((BATCH, 1), seed=(1, 2)), {}
    for way, function in ways.items():
        layer = Summed(UNITS, function)
        layer.w.assign(tf.random.stateless_normal((1, UNITS), seed=(3, 4)))

        def training(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(layer(x)))
            return tape.gradient(loss, layer.w)

        steps = (layer, training, tf.function(layer), tf.function(training))
        for setting, step in zip(SETTINGS, steps):
            name = f"{setting}: {way}"
            for _ in range(calls if "graph" in setting else 1):
                with lab.phase(name):
                    result = step(x)
                means[name] = float(tf.reduce_mean(tf.abs(result)))
                del result
    return means


measured = lab.measure(survey, WAYS, label="every way in every setting")

# %%
calls = [(*call.name.split(": "), call.peak_mib) for call in measured.phases]
peaks = pd.DataFrame(calls, columns=["setting", "way", "MiB"]).groupby(["way", "setting"])["MiB"]
lowest = peaks.min().unstack().loc[list(WAYS), list(SETTINGS)]
highest = peaks.max().unstack().loc[list(WAYS), list(SETTINGS)]
panels = highest.plot.barh(
    subplots=True, layout=(2, 2), sharey=True, figsize=(10, 5), legend=False, title=list(SETTINGS)
)
for axes, setting in zip(panels.flat, SETTINGS):
    low, high = lowest[setting], highest[setting]
    axes.plot(low.where(high > 1.1 * low), range(len(WAYS)), "k|", ms=16, mew=2)
    texts = [f" {b:,.0f}" if b <= 1.1 * a else f" {a:,.0f} to {b:,.0f}" for a, b in zip(low, high)]
    axes.bar_label(axes.containers[0], texts)
    axes.set_ylabel("")
    axes.margins(x=0.25)
axes.invert_yaxis()
axes.figure.supxlabel("peak tensor memory of one call (MiB); black mark: the lowest of five calls")
plt.show()

# %%
print("Highest peak of a call, MiB\n" + highest.to_string(float_format="{:,.0f}".format))

# %%
forward, training = highest["eager, forward"], highest["eager, training"]
lab.predicted_vs_measured(
    forward_loop=(predicted["forward loop"], forward["Python loop"]),
    forward_stack=(predicted["forward stack"], forward["article's stack"]),
    training_loop=(predicted["training loop"], training["Python loop"]),
    training_stack=(predicted["training stack"], training["article's stack"]),
)

# %%
print(my_guess.against(training["Python loop"]))
for setting in SETTINGS:
    values = [measured.value[f"{setting}: {way}"] for way in WAYS]
    print(f"{setting}: all ways give {values[0]:.4g}")
    assert max(values) - min(values) < 1e-3 * max(values), f"{setting}: the ways differ: {values}"

# %% [markdown]
# ## Explain
#
# * **A loop wastes nothing by itself.** In the eager forward pass the next turn frees the last one's product. Three
#   tensors, however long the loop.
# * **The tape is who keeps them.** It holds both inputs of each addition, although the gradient of an addition needs
#   only their shapes. That makes two tensors for each turn.
# * **A stack is a copy.** A hundred references cost nothing in a Python list, and a hundred tensors once stacked. In
#   the forward pass the cure turns three tensors into more than a hundred.
# * **A graph keeps only what is needed, but not in your order.** It drops the additions' inputs, so training needs
#   less than eager code. But nothing in it says that one product must be added before the next is made: each turn
#   reads the weight anew and depends only on that. Products that are ready early wait for their turn, few or up to
#   all of them, as the threads happen to run. That is why one graph can have a different peak in every call.
# * **Reading the weight once** makes the hundred products visibly equal. TensorFlow's graph optimizer then merges them
#   and does the algebra for you. It cannot see that two reads of a variable give the same.
# * **`tf.while_loop` with `parallel_iterations=1`** forces the order. The default of 10 lets up to ten turns run ahead.
#   In eager mode it is an ordinary Python loop, tape and all.
#
# **What tracing costs.** A graph is memory as well. The Python loop leaves its operations in the graph once for each
# turn; TensorFlow's allocator does not count them, the process does. The tensors here are tiny, so that only the graph
# shows.


# %%
def trace_only(turns):
    x, w = tf.ones((2, 1)), tf.Variable(tf.ones((1, 2)))

    def unrolled(n):
        def forward(x):
            total = tf.zeros((2, 2))
            for _ in range(n):
                total += tf.matmul(x, w)
            return total

        return forward

    def looped(n):
        def forward(x):
            turn = lambda i, total: (i + 1, total + tf.matmul(x, w))
            return tf.while_loop(lambda i, total: i < n, turn, (0, tf.zeros((2, 2))))[1]

        return forward

    tf.function(unrolled(5))(x)  # what only the first trace costs
    tf.function(looped(5))(x)
    kept, rows = [], []
    for kind, make in (("tf.while_loop", looped), ("Python loop", unrolled)):
        for n in turns:
            before, function = lab.reading().process_mib, tf.function(make(n))
            function(x)
            kept.append(function)
            operations = len(function.get_concrete_function(x).graph.get_operations())
            rows.append((kind, n, operations, lab.reading().process_mib - before))
    return rows


traced = lab.measure(trace_only, (100, 200, 400), label="tracing")
columns = ["loop", "turns", "operations", "process MiB"]
trace_costs = pd.DataFrame(traced.value, columns=columns).round(1)
print(trace_costs.to_string(index=False))
unrolled_costs = trace_costs[trace_costs["loop"] == "Python loop"]
per_turn = unrolled_costs["process MiB"].sum() / unrolled_costs["turns"].sum()
print(f"\nOne turn of an unrolled loop costs about {1024 * per_turn:.0f} KiB of graph (this run).")

# %% [markdown]
# **When it flips.** Eager training costs two products a turn, a graph the price of its operations a turn and at most
# one product. With small tensors the graph itself is the larger part. Find the size where the two cross; does it
# depend on the number of turns?


# %%
def crossing(batch=32, units=64, turns=100):
    one = lab.tensor_mib((batch, units))
    eager, graph, most = 2 * turns * one, turns * per_turn + 2 * one, turns * (per_turn + one)
    print(
        f"one product {1024 * one:,.0f} KiB. Training (predicted): eager {eager:,.1f} MiB, "
        f"graph {graph:,.1f} to {most:,.1f} MiB with its operations"
    )
    if graph <= eager <= most:
        print("it depends on how the threads run")
    else:
        print("eager needs more" if eager > most else "the graph needs more")


lab.explore(crossing, batch=(8, 2048, 8), units=(16, 1024, 16), turns=(10, 1000, 10))

# %% [markdown]
# Lab 08 goes on from here: what happens when the same function is traced again and again.
#
# ## Verdict

# %%
figures = highest.rename(columns=lambda setting: setting.replace(", ", "_"))
lab.verdict(
    "C08",
    "fails",
    **figures.loc["Python loop"].add_suffix("_loop"),
    **figures.loc["article's stack"].add_suffix("_stack"),
    **figures.loc["one matmul × 100"].add_suffix("_once"),
)

# %%
lab.verdict("C33", "partly", **figures.loc["Python loop"])

# %% [markdown]
# ## Exercises
#
# **1.** A real loop has different terms: column i of `x` times row i of `w`. Write this sum so that a training step
# needs a few products' worth of memory, in eager mode.


# %%
def different_terms(x, w):
    """x: (batch, 100), w: (100, units). The sum over i of x[:, i:i+1] @ w[i:i+1, :]."""
    # BEGIN SOLUTION
    return tf.matmul(x, w)
    # END SOLUTION


def check_terms(way):
    x = tf.random.stateless_normal((BATCH, TIMES), seed=(1, 2))
    w = tf.Variable(tf.random.stateless_normal((TIMES, UNITS), seed=(3, 4)))
    with lab.phase("training"):
        with tf.GradientTape() as tape:
            total = way(x, w)
            if total is None:
                return None
            loss = tf.reduce_mean(tf.square(total))
        tape.gradient(loss, w)
    wanted = sum(x[:, i : i + 1] @ w[i : i + 1] for i in range(TIMES))
    return float(tf.reduce_max(tf.abs(wanted - total)))


terms_run = lab.run(check_terms, different_terms, label="different terms", quiet=True)
with lab.exercise(
    1,
    "Write out one entry of the sum: the sum over i of x[b, i] · w[i, u]. "
    "Which single operation is that?",
):
    assert terms_run.ok, str(terms_run.error)
    assert terms_run.value is not None, (
        "different_terms() returns nothing yet: return the sum, of shape (batch, units)."
    )
    assert terms_run.value < 1e-2, (
        f"the result is off by {terms_run.value:.3g}: is it the sum over i of column i times row i?"
    )
    used = terms_run.phase("training").peak_mib / product
    assert used < 20, (
        f"the training step holds {used:.0f} products: the tape still keeps every term."
    )

# %% [markdown]
# **2.** Now the terms cannot be merged: a `tanh` stands around each. Stay in eager mode and halve what the tape keeps:
# it needs the terms, but not the totals in between. (Is there one operation that adds up a whole list?)


# %%
def tanh_loop(x, w):
    total = tf.zeros((BATCH, UNITS))
    for i in range(TIMES):
        total += tf.tanh(x[:, i : i + 1] @ w[i : i + 1])
    return total


def tanh_without_totals(x, w):
    # BEGIN SOLUTION
    return tf.add_n([tf.tanh(x[:, i : i + 1] @ w[i : i + 1]) for i in range(TIMES)])
    # END SOLUTION


def check_tanh(ways):
    x = tf.random.stateless_normal((BATCH, TIMES), seed=(1, 2))
    w = tf.Variable(tf.random.stateless_normal((TIMES, UNITS), seed=(3, 4)))
    means = []
    for way in ways:
        with lab.phase(way.__name__):
            with tf.GradientTape() as tape:
                total = way(x, w)
                loss = None if total is None else tf.reduce_mean(tf.square(total))
            if loss is not None:
                gradient = tape.gradient(loss, w)
        means.append(None if loss is None else float(tf.reduce_mean(tf.abs(gradient))))
        del tape, total
    return means


tanh_run = lab.run(
    check_tanh, [tanh_loop, tanh_without_totals], label="tanh of each term", quiet=True
)
with lab.exercise(
    2,
    "Collect the terms in a list and give it to tf.add_n: one operation, "
    "so the tape sees no totals.",
):
    assert tanh_run.ok, str(tanh_run.error)
    wanted, got = tanh_run.value
    assert got is not None, (
        "tanh_without_totals() returns nothing yet: return the sum of the hundred tanh terms."
    )
    assert abs(got - wanted) < 1e-3 * abs(wanted), (
        "the gradient differs from the loop's: are all hundred terms in?"
    )
    before, after = (part.peak_mib for part in tanh_run.phases)
    assert after < 0.75 * before, (
        f"the step still needs {after / before:.0%} of the loop's peak: "
        "the totals are still on the tape."
    )

# %% [markdown]
# **3.** Predict before you run: the peak of an eager training step through a Python loop of `turns` turns, for any size.


# %%
def predict_training_loop(batch, units, turns):
    """MiB, from the shapes alone."""
    # BEGIN SOLUTION
    return 2 * turns * lab.tensor_mib((batch, units))
    # END SOLUTION


def measure_training_loop(batch, units, turns):
    x, w = tf.ones((batch, 1)), tf.Variable(tf.ones((1, units)))
    with tf.GradientTape() as tape:
        total = tf.zeros((batch, units))
        for _ in range(turns):
            total += tf.matmul(x, w)
        loss = tf.reduce_mean(tf.square(total))
    tape.gradient(loss, w)


other_run = lab.run(
    measure_training_loop, 1024, 512, 60, label="60 turns, another size", quiet=True
)
with lab.exercise(
    3, "tensor_mib((batch, units)) is one product; the tape keeps both inputs of each addition."
):
    assert other_run.ok, str(other_run.error)
    answer = predict_training_loop(1024, 512, 60)
    assert isinstance(answer, (int, float)), (
        "predict_training_loop() returns nothing yet: return a number of MiB."
    )
    error = answer / other_run.peak_mib - 1
    assert abs(error) < 0.1, (
        f"predicted {answer:.0f} MiB, measured {other_run.peak_mib:.0f}: "
        f"{error:+.0%}, more than 10 % off."
    )
