"""A wrong SCALE is named, and what the labs may use is there."""

import numpy as np
import pytest

import labsupport as lab
from labsupport import choose
from labsupport.lesson.formula import NoFormula, formula

FACTOR = np.float64(1.5)
LENGTHS = {"short": np.array([3, 4])}


def test_scale():
    assert (choose("quick", quick=1, full=2), choose("full", quick=1, full=2)) == (1, 2)
    with pytest.raises(ValueError, match="SCALE is 'fast': write SCALE = \"quick\""):
        choose("fast", quick=1, full=2)


def test_every_name_the_labs_may_use_is_there_and_a_wrong_one_lists_them():
    assert all(getattr(lab, name) is not None for name in lab.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'mesure'; it offers .*compare.*run"):
        _ = lab.mesure


def longer(count):
    return FACTOR * count + sum(length for length in LENGTHS["short"])


def told(count=2, kind="a"):
    print(f"{kind}: {longer(count):,.2f}, {lab.tensor_mib((count, 1024, 3)):.4f} MiB")


def with_an_array(count=2):
    print(np.ones(count).sum())


def with_more_of_the_course(count=2):
    print(lab.predict("ResNet50", count))


def test_a_formula_says_the_same_without_all_that_it_used(capsys):
    told(7, "b")
    here = capsys.readouterr().out
    source, values = formula(told)
    assert values == {"FACTOR": 1.5, "LENGTHS": {"short": [3, 4]}} and "import" not in source
    names = {}
    exec(source, names)
    names["told"](7, "b")
    assert capsys.readouterr().out == here


@pytest.mark.parametrize("function", [with_an_array, with_more_of_the_course])
def test_what_no_page_could_work_out_is_no_formula(function):
    with pytest.raises(NoFormula):
        formula(function)
