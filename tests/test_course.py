"""Exercises grade themselves, and a wrong SCALE is named."""

import pytest

import labsupport
from labsupport import choose, exercise
from labsupport.lesson.course import EXERCISE_MIME


@pytest.fixture
def graded(monkeypatch):
    """What exercises reported, as a list of facts."""
    facts = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: facts.append(data[EXERCISE_MIME]))
    return facts


def test_a_solved_exercise_passes(graded):
    with exercise(1, "halve it"):
        assert 1 < 2
    assert graded == [{"number": 1, "passed": True, "reason": "", "hint": "halve it"}]


def test_an_unsolved_one_says_what_is_missing_and_does_not_stop_the_notebook(graded):
    with exercise(1, "halve it"):
        assert 2 < 1, "the peak is still 2 MiB"
    with exercise(2, "use a pipeline"):
        assert None > 1
    with exercise(3, "return something"):
        raise AssertionError
    assert [facts["passed"] for facts in graded] == [False] * 3
    assert graded[0]["reason"].startswith("the peak is still 2 MiB")  # pytest adds a line of its own
    assert all(facts["reason"] and facts["hint"] for facts in graded)


def test_what_an_error_says_is_shown_and_does_nothing(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    with exercise(1, "halve it"):
        raise ValueError("<b>\ud800\u202e")
    assert shown[0][EXERCISE_MIME]["reason"] == r"<b>\ud800\u202e" and "<b>\\" not in shown[0]["text/html"]


def test_an_interrupt_is_no_wrong_answer(graded):
    with pytest.raises(KeyboardInterrupt):
        with exercise(1, "halve it"):
            raise KeyboardInterrupt
    assert graded == []


def test_scale():
    assert (choose("quick", quick=1, full=2), choose("full", quick=1, full=2)) == (1, 2)
    with pytest.raises(ValueError, match="SCALE is 'fast': write SCALE = \"quick\""):
        choose("fast", quick=1, full=2)


def test_every_name_the_labs_may_use_is_there_and_a_wrong_one_lists_them():
    assert all(getattr(labsupport, name) is not None for name in labsupport.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'mesure'; it offers .*compare.*run"):
        _ = labsupport.mesure
