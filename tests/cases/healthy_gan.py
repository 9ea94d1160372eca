"""Nothing is wrong: two models and two optimizers in a loop of one's own, a copy of the weights, losses noted as numbers, a second thread."""

# kind: none
# budget: 256 MiB
import threading

import keras
import tensorflow as tf

images = (
    tf.data.Dataset.from_tensor_slices(tf.random.uniform([640, 784])).shuffle(640).batch(32).prefetch(tf.data.AUTOTUNE)
)
maker = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(784, "sigmoid")])
judge = keras.Sequential([keras.Input((784,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(1)])
averaged = keras.models.clone_model(maker)
optimizers = keras.optimizers.Adam(), keras.optimizers.Adam()
loss = keras.losses.BinaryCrossentropy(from_logits=True)


@tf.function
def train(real):
    noise = tf.random.normal([tf.shape(real)[0], 64])
    with tf.GradientTape() as first, tf.GradientTape() as second:
        false = maker(noise, training=True)
        on_real, on_false = judge(real, training=True), judge(false, training=True)
        judge_loss = loss(tf.ones_like(on_real), on_real) + loss(tf.zeros_like(on_false), on_false)
        maker_loss = loss(tf.ones_like(on_false), on_false)
    optimizers[0].apply_gradients(zip(first.gradient(judge_loss, judge.trainable_variables), judge.trainable_variables))
    optimizers[1].apply_gradients(
        zip(second.gradient(maker_loss, maker.trainable_variables), maker.trainable_variables)
    )
    return judge_loss, maker_loss


losses = []
watcher = threading.Thread(target=lambda: [tf.reduce_sum(tf.random.normal([256, 256])).numpy() for _ in range(50)])
watcher.start()
for epoch in range(4):
    for real in images:
        judge_loss, maker_loss = train(real)
        losses.append((float(judge_loss), float(maker_loss)))
    for average, weight in zip(averaged.variables, maker.variables):
        average.assign(0.9 * average + 0.1 * weight)
    averaged(tf.random.normal([16, 64]))
watcher.join()
