"""What counts as an equal arm in the tests."""

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


def test_arguments_are_compared_by_their_content():
    assert fingerprint([np.arange(4), {"a": 1.0}]) == fingerprint([np.arange(4), {"a": 1.0}])
    assert fingerprint(np.arange(4)) != fingerprint(np.arange(4.0))
    assert fingerprint([1]) != fingerprint([True]) != fingerprint((1,))


def test_classes_of_a_notebook_are_compared_by_their_body():
    code = "class A:\n    def call(self):\n        return 1\ndef f():\n    return A()\n"
    assert fingerprint(made(code)) == fingerprint(made(code)) != fingerprint(made(code.replace("return 1", "return 2")))


def test_what_cannot_be_compared_is_not_equal_to_anything():
    with pytest.raises(Unlike):
        fingerprint([object()])
