"""Predictions against measurements of real Keras models."""

import pytest

from labsupport import measure, phase, predict_step, predicted_vs_measured, reading, tensor_mib
from labsupport.lesson.guessing import Guess


def test_tensor_bytes():
    assert tensor_mib((400, 224, 224, 3)) == pytest.approx(229.6875)
    assert tensor_mib((2**20,), "uint8") == 1
    assert tensor_mib((2**20,), "bfloat16") == tensor_mib((2**20,), "float16") == 2
    assert tensor_mib((), "float64") == 8 / 2**20


def step(kind):
    """An arm: predicts and measures one training step in eager mode and in a graph, and one inference."""
    import tensorflow as tf

    layers, models = tf.keras.layers, {}
    models["dense"] = (
        [layers.Input([1024]), layers.Dense(2048, "relu"), layers.Dense(2048, "relu"), layers.Dense(512)],
        4096,
    )
    models["conv"] = (
        [
            layers.Input([64, 64, 3]),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ],
        64,
    )
    stack, batch = models[kind]
    before = reading().tensors_mib
    model = tf.keras.Sequential(stack)
    weights = reading().tensors_mib - before
    x = tf.random.normal([batch, *model.input_shape[1:]])
    model(x, training=False)  # what is made once, such as scratch of the convolutions, is there from now on
    with phase("inference"):
        model(x, training=False)
    optimizer = tf.keras.optimizers.Adam()
    before = reading().tensors_mib
    optimizer.build(model.trainable_variables)
    state = weights + reading().tensors_mib - before

    def train():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    compiled = tf.function(train)
    train(), compiled()
    with phase("eager"):
        train()
    with phase("graph"):
        compiled()
    return state, {
        "eager": predict_step(model, batch, graph=False).parts,
        "graph": predict_step(model, batch, graph=True).parts,
        "inference": predict_step(model, batch, training=False).parts,
    }


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_a_step_is_predicted(kind):
    result = measure(step, kind, budget="4 GiB")
    state, predicted = result.value
    # The absolute margin is for counters, learning rate and random seeds beside a small model.
    assert predicted["graph"]["weights"] + predicted["graph"]["optimizer slots"] == pytest.approx(
        state, rel=0.05, abs=0.1
    )
    for measured in result.phases:
        total = sum(predicted[measured.name].values())
        assert total == pytest.approx(measured.peak_mib, rel=0.2), f"{measured.name}: {predicted[measured.name]}"


def test_optimizer_slots_are_exact_multiples_of_the_weights():
    def slots():
        import tensorflow as tf

        from labsupport.lesson.predict import SLOTS

        makers = {
            "sgd": tf.keras.optimizers.SGD,
            "momentum": lambda: tf.keras.optimizers.SGD(momentum=0.9),
            "rmsprop": tf.keras.optimizers.RMSprop,
            "adagrad": tf.keras.optimizers.Adagrad,
            "adam": tf.keras.optimizers.Adam,
            "adamw": tf.keras.optimizers.AdamW,
        }
        found, measured = {}, {}
        for name, make in makers.items():
            model = tf.keras.Sequential(
                [tf.keras.layers.Input([512]), tf.keras.layers.Dense(2048, use_bias=False)]
            )  # 4 MiB
            optimizer = make()
            before = reading().tensors_mib
            optimizer.build(model.trainable_variables)
            measured[name] = reading().tensors_mib - before
            shaped = [v for v in optimizer.variables if len(v.shape)]
            found[name] = sum(v.numpy().nbytes for v in shaped) / model.weights[0].numpy().nbytes
        return SLOTS, found, measured

    known, found, measured = measure(slots, budget="2 GiB").value
    assert found == known
    assert measured == pytest.approx({name: 4 * multiple for name, multiple in known.items()}, abs=0.01)


def test_what_has_no_rule_is_refused():
    class Layer:
        def __init__(self):
            self.name, self.weights = "attention", []

    class Model:
        layers = [Layer()]

    with pytest.raises(ValueError, match=r"no rule for layer attention \(Layer, linear\): measure it with run\(\)"):
        predict_step(Model(), 32)
    with pytest.raises(ValueError, match="no rule for the optimizer 'lion'; known are sgd"):
        predict_step(Model(), 32, optimizer="lion")


def test_predicted_against_measured():
    table = predicted_vs_measured(the_list=(110.0, 100.0), unread=(5.0, None))
    assert list(table.loc["the list"]) == [110.0, 100.0, "+10.0"]
    assert list(table.loc["unread"]) == [5.0, "unavailable", "unavailable"]


def test_a_guess_is_set_beside_the_measurement():
    assert (
        Guess("How much?", 50.0).against(100.0)
        == "You guessed 50 MiB; measured were 100.0 MiB: the guess is 0.5 × that."
    )
    assert Guess("How much?", 0.0).against(100.0).startswith("No guess was made")
    assert Guess("How much?", 50.0).against(None).endswith("unavailable here.")


@pytest.mark.parametrize(
    "typed, noted",
    [
        ("460", 460),
        ("0.5 GiB", 512),
        ("2 GB", 2e9 / 2**20),
        ("1,200 MB", 1.2e9 / 2**20),
        ("-5", 50),
        ("much", 50),
        ("", 50),
    ],
)
def test_a_guess_is_read_with_its_unit_and_told_and_kept_when_the_cell_runs_again(typed, noted):
    first = Guess(f"{typed}?", 50.0)
    box, said = first.box.children[1:]
    box.value = typed
    assert first.mib == pytest.approx(noted) and f"Noted: {noted:,.4g} MiB" in said.value
    assert ("Not a size" in said.value) == (typed in ("-5", "much", ""))
    assert Guess(f"{typed}?", 0.0).mib == (0 if "Not a size" in said.value else pytest.approx(noted))


def test_who_has_not_guessed_is_asked_once_before_the_answer(monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "labs/01_image_stacking.ipynb")
    learner = Guess("Left open?", 0.0)
    assert "100" not in learner.against(100.0)
    assert learner.against(100.0).startswith("No guess was made; measured were 100.0 MiB")
