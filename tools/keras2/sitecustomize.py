"""What is only spelt otherwise in Keras 2. A Python whose path has this folder reads it when it starts (tools/releases.py)."""

import importlib.abc
import importlib.util
import sys


class _Keras(importlib.abc.MetaPathFinder):
    """Finds keras, to go on when it has been loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)  # again: some only ask whether there is a Keras
        if spec:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), _bridge(module))
        return spec


class _Variable:
    """Is made around each variable of a layer, as Keras 3's own are."""

    def __init__(self, make):
        self.made = make()


def _with_workers(keras):
    """A Sequence that is told how many workers it has; in Keras 2 that is told to fit()."""
    fit = keras.Model.fit

    class PyDataset(keras.utils.Sequence):
        def __init__(self, workers=1, use_multiprocessing=False, max_queue_size=10):
            self._of_fit = {
                "workers": workers,
                "use_multiprocessing": use_multiprocessing,
                "max_queue_size": max_queue_size,
            }

    def fit_with(model, x=None, *given, **named):
        return fit(model, x, *given, **getattr(x, "_of_fit", {}), **named)

    keras.Model.fit = fit_with
    return PyDataset


def _bridge(keras):
    if not keras.__version__.startswith("2."):
        return
    public = importlib.import_module("keras.api._v2.keras.optimizers")  # tf.keras.optimizers
    for name in [name for name in dir(public) if name[0].isupper()]:
        setattr(keras.optimizers, name, getattr(public, name))  # until 2.12 the package's own were the old ones
    keras.utils.clear_session = keras.backend.clear_session
    keras.utils.PyDataset = _with_workers(keras)
    keras.optimizers.Optimizer.apply = lambda self, gradients, variables: self.apply_gradients(
        zip(gradients, variables)
    )
    keras.Variable, add = _Variable, keras.layers.Layer.add_weight
    keras.layers.Layer.add_weight = lambda *given, **named: _Variable(lambda: add(*given, **named)).made


sys.meta_path.insert(0, _Keras())
