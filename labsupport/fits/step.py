"""What a person gives (a builder, a name, a file, a step) as a step to trace or to run, with the tensors that it takes."""

import contextlib
import inspect
import json
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

from labsupport.fits.lowered import CannotPredict

_SPARSE_LOSS = "sparse_categorical_crossentropy"


@dataclass(frozen=True)
class Wanted:
    """A step of a batch.

    what: a function without arguments that builds a Keras model, or that returns a function step(x, y); a step(x, y) itself;
    a name of keras.applications; a .keras file (its architecture is read, its weights are not).
    input, target: ((shape without the batch, dtype), …) of x and y; None: as the model says.
    optimizer: a name of Keras, an optimizer, or None for the model's own (Adam if it has none).
    loss: as for compile(); None for the model's own. training: else model(x) alone. precision: a dtype policy, such as
    "mixed_bfloat16". frozen: all layers but the last do not learn. accumulate: micro-batches for one update of Keras' optimizer.
    eager: the step runs outside of any tf.function.
    """

    what: object
    batch: int = 32
    input: tuple | None = None
    target: tuple | None = None
    optimizer: object = None
    loss: object = None
    training: bool = True
    precision: str | None = None
    frozen: bool = False
    accumulate: int | None = None
    eager: bool = False

    def with_batch(self, batch):
        return replace(self, batch=int(batch))

    @property
    def name(self):
        return self.what if isinstance(self.what, str) else getattr(self.what, "__name__", type(self.what).__name__)


def made(wanted):
    """(step, [structure of TensorSpecs for each argument], names of layers): builds model and optimizer where it is called.

    In a graph nothing is allocated; eagerly this is the step itself. Raises CannotPredict with what to do.
    """
    import keras

    with _policy(wanted.precision):
        thing = _thing(wanted)
        if isinstance(thing, keras.Model):
            return _of_model(thing, wanted)
    if not callable(thing):
        raise CannotPredict(
            f"{wanted.name} gives {type(thing).__name__}: it must build a Keras model or return a function step(x, y)"
        )
    if wanted.input is None:
        raise CannotPredict(
            'a step(x, y) says nothing about its tensors: give input=(28, 28, 1), and target=((), "int32") for y'
        )
    specs = [_spec(wanted.input, wanted.batch)]
    if wanted.target is not None:
        specs.append(_spec(wanted.target, wanted.batch))
    return thing, specs, set()


@contextlib.contextmanager
def _policy(name):
    import keras

    before = keras.config.dtype_policy()
    if name is not None:
        keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _thing(wanted):
    """The model, or the step."""
    import keras

    what = wanted.what
    if isinstance(what, keras.Model):
        raise CannotPredict(
            "a model that is there already has its memory: give the function that builds it, such as predict(build_model), "
            "or predict(lambda: keras.models.clone_model(model))"
        )
    if isinstance(what, str) and what.endswith(".keras"):
        return _from_file(Path(what))
    if isinstance(what, str):
        kind = getattr(keras.applications, what, None)
        if kind is None or not what[:1].isupper():
            raise CannotPredict(f"{what!r} is no .keras file and no name of keras.applications, such as ResNet50")
        return kind(weights=None, **({} if wanted.input is None else {"input_shape": wanted.input[0][0]}))
    if not callable(what):
        raise CannotPredict(
            f"{type(what).__name__} is neither a function nor a name: give a function that builds the model"
        )
    needed = [
        parameter
        for parameter in inspect.signature(what).parameters.values()
        if parameter.default is parameter.empty and parameter.kind in (0, 1)
    ]
    return what if needed else what()


def _from_file(path):
    import keras

    try:
        with zipfile.ZipFile(path) as file:
            config = json.loads(file.read("config.json"))
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise CannotPredict(f"{path} cannot be read as a .keras file: {error}") from None
    compiled = config.pop("compile_config", None)  # which would build the optimizer, before it is known how
    try:
        model = keras.saving.deserialize_keras_object(config)
        if compiled:
            model.compile(**keras.saving.deserialize_keras_object(compiled))
        return model
    except (TypeError, ValueError) as error:
        raise CannotPredict(
            f"{path}: {error}".splitlines()[0] + "; give the function that builds the model instead"
        ) from None


def _spec(shapes, batch):
    import tensorflow as tf

    specs = [tf.TensorSpec((batch, *shape), dtype) for shape, dtype in shapes]
    return specs[0] if len(specs) == 1 else specs


def _of_model(model, wanted):
    import keras

    if wanted.frozen:
        if _own_step(model):
            raise CannotPredict("the model's own train_step decides what it trains")
        for layer in model.layers[:-1]:
            layer.trainable = False
    inputs, outputs = _ends(model, wanted)
    names = {layer.name for layer in model._flatten_layers()} if hasattr(model, "_flatten_layers") else set()
    x = keras.tree.map_structure(lambda tensor: _concrete(tensor, wanted.batch), inputs)
    if not wanted.training:
        return (lambda x: model(x, training=False)), [x], names
    _compile(model, wanted)
    if wanted.target is not None:
        y = _spec(wanted.target, wanted.batch)
    else:
        y = _targets(model, outputs, wanted.batch)
    model.optimizer.build(model.trainable_variables)
    return (lambda x, y: model.train_step((x, y))), [x, y], names


def _ends(model, wanted):
    """Symbolic inputs and outputs of a model."""
    import keras

    if wanted.input is None:
        try:
            return model.input, model.output
        except (AttributeError, ValueError):
            pass
        try:
            only = lambda tensors: tensors[0] if len(tensors) == 1 else tensors
            return only(model.inputs), only(model.outputs)  # of a Sequential that was not called yet
        except (AttributeError, ValueError, TypeError):
            raise CannotPredict(
                f"{model.name} does not say what it takes: give input=(224, 224, 3), the shape of one example"
            ) from None
    inputs = [keras.Input(shape, dtype=dtype) for shape, dtype in wanted.input]
    inputs = inputs[0] if len(inputs) == 1 else inputs
    return inputs, model(inputs)


def _concrete(tensor, batch):
    import tensorflow as tf

    shape = tuple(tensor.shape)[1:]
    if None in shape:
        raise CannotPredict(
            f"{tensor.name} has the shape {(None, *shape)}: give input=… with a number for each dimension"
        )
    return tf.TensorSpec((batch, *shape), tensor.dtype)


def _compile(model, wanted):
    import keras
    import tensorflow as tf

    had = getattr(model, "optimizer", None)
    if had is None and not model.compiled and wanted.optimizer is None:
        optimizer = "adam"
    else:
        optimizer = wanted.optimizer if wanted.optimizer is not None else had
    if not isinstance(optimizer, str) and optimizer is not had:
        with tf.init_scope():  # its numbers can only be read eagerly; the one that is traced gets variables of its own
            optimizer = keras.optimizers.serialize(optimizer)
    optimizer = keras.optimizers.get(optimizer)
    if wanted.accumulate:
        optimizer.gradient_accumulation_steps = wanted.accumulate
    loss = wanted.loss or getattr(model, "loss", None)
    if loss is None and not _own_step(model):
        loss = _SPARSE_LOSS if isinstance(wanted.what, str) and not wanted.what.endswith(".keras") else "mse"
    if model.compiled and optimizer is had and wanted.loss is None:
        return
    try:
        model.compile(optimizer=optimizer, loss=loss)
    except TypeError as error:
        raise CannotPredict(
            f"{model.name} has a compile() of its own ({error}): give it another optimizer there"
        ) from None


def _own_step(model):
    import keras

    return type(model).train_step is not keras.Model.train_step


def _targets(model, outputs, batch):
    """What the losses compare outputs with: class numbers for a sparse loss, else tensors like the outputs."""
    import keras

    loss = getattr(model, "loss", None)
    if isinstance(loss, dict) and isinstance(outputs, dict):
        return {name: _target(output, loss.get(name), batch) for name, output in outputs.items()}
    if isinstance(loss, dict):
        loss = [loss.get(name) for name in model.output_names]
    if isinstance(loss, (list, tuple)):
        return [_target(output, one, batch) for output, one in zip(outputs, loss)]
    return keras.tree.map_structure(lambda output: _target(output, loss, batch), outputs)


def _target(output, loss, batch):
    import tensorflow as tf

    name = loss if isinstance(loss, str) else getattr(loss, "__name__", getattr(loss, "name", ""))
    shape = _concrete(output, batch).shape
    if "sparse" in str(name).lower():
        return tf.TensorSpec(shape[:-1], "int32")
    return tf.TensorSpec(shape, "float32")
