"""What counts as an equal arm in the tests."""

from collections import deque

import numpy as np
import pytest
from reuse import Unlike, fingerprint


def made(code, name="f"):
    namespace = {"__name__": "__main__", "np": np}
    exec(code, namespace)
    return namespace[name]


BASE = "N = 3\ndef g(x):\n    return x + N\ndef f(x, y=1):\n    return [g(i) for i in x]\n"


def test_the_same_code_in_another_place_is_equal():
    assert fingerprint(made(BASE)) == fingerprint(made("\n\n" + BASE))


@pytest.mark.parametrize("old, new", [("N = 3", "N = 4"), ("x + N", "x - N"), ("y=1", "y=2"), ("g(i)", "g(i + 1)")])
def test_a_change_anywhere_below_is_noticed(old, new):
    assert fingerprint(made(BASE)) != fingerprint(made(BASE.replace(old, new)))


def test_what_only_has_the_name_of_an_attribute_is_no_part_of_a_function():
    code = "real = 1\ndef f(x):\n    return [y.real for y in x]\n"
    assert fingerprint(made(code)) == fingerprint(made(code.replace("= 1", "= 2")))
    assert fingerprint(made(code)) != fingerprint(made(code.replace("y.real", "y.imag")))


def test_a_deque_is_compared_with_its_room():
    assert fingerprint(deque([1], 2)) == fingerprint(deque([1], 2)) != fingerprint(deque([1], 3))


def test_arguments_are_compared_by_their_content():
    assert fingerprint([np.arange(4), {"a": 1.0}]) == fingerprint([np.arange(4), {"a": 1.0}])
    assert fingerprint(np.arange(4)) != fingerprint(np.arange(4.0))
    assert fingerprint([1]) != fingerprint([True]) != fingerprint((1,))


def test_classes_of_a_notebook_are_compared_by_their_body():
    code = "class A:\n    def call(self):\n        return 1\ndef f():\n    return A()\n"
    assert fingerprint(made(code)) == fingerprint(made(code)) != fingerprint(made(code.replace("return 1", "return 2")))


def test_plain_instances_of_a_notebook_are_compared_by_class_and_attributes():
    code = "class A:\n    def __init__(self, n):\n        self.n = n\n    @property\n    def twice(self):\n        return 2 * self.n\na = A(3)\n"
    assert fingerprint(made(code, "a")) == fingerprint(made(code, "a"))
    for other in (code.replace("A(3)", "A(4)"), code.replace("2 * self.n", "3 * self.n")):
        assert fingerprint(made(code, "a")) != fingerprint(made(other, "a"))
    with pytest.raises(Unlike):  # what it holds beside its attributes is not seen
        fingerprint(made("class A(set):\n    pass\na = A([1])\n", "a"))


def test_what_a_tensor_will_be_like_is_compared_by_its_text():
    import tensorflow as tf

    assert fingerprint(tf.TensorSpec((2, None), tf.float32)) == fingerprint(tf.TensorSpec((2, None), tf.float32))
    assert fingerprint(tf.TensorSpec((2, None), tf.float32)) != fingerprint(tf.TensorSpec((2, None), tf.float16))
    assert fingerprint(tf.float32) != fingerprint(tf.float16)
    assert fingerprint(tf.ones(3)) == fingerprint(tf.ones(3)) != fingerprint(tf.zeros(3))


def test_temporary_files_are_compared_by_what_is_in_them(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    places = [tmp_path / name / "x.npy" for name in ("one", "two", "three")]
    for place, numbers in zip(places, (3, 3, 4)):
        place.parent.mkdir()
        np.save(place, np.arange(numbers))
    one, two, three = (fingerprint([str(place)]) for place in places)
    assert one == two != three


def test_random_generators_are_compared_by_their_state():
    one, two = np.random.default_rng(1), np.random.default_rng(1)
    assert fingerprint(one) == fingerprint(two) != fingerprint(np.random.default_rng(2))
    two.random()
    assert fingerprint(one) != fingerprint(two)


def test_what_cannot_be_compared_is_not_equal_to_anything():
    with pytest.raises(Unlike):
        fingerprint([object()])
