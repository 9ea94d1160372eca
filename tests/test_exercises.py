"""Exercises grade themselves; whatever an answer does, the notebook goes on."""

import pytest

from labsupport.lesson.exercises import EXERCISE_MIME, NotYet, exercise, try_out_once


@exercise(1, "first hint", "second hint")
def halved(answer):
    assert answer() == 1, f"it is {answer()}"


def facts(shown):
    return [bundle[EXERCISE_MIME] for bundle in shown]


def test_a_right_answer_passes(shown):
    halved(lambda: 1)
    assert facts(shown) == [{"number": 1, "passed": True, "reason": "", "hints": []}]


def raises(error):
    def answer():
        raise error

    return answer


def test_a_wrong_one_is_told_what_is_missing_with_a_hint_more_each_time(shown):
    for number, answer in enumerate([lambda: 2, raises(AssertionError()), raises(SystemExit(3))]):
        exercise(number, "first hint", "second hint")(halved.__wrapped__)(answer)
    again = exercise(3, "first hint", "second hint")(halved.__wrapped__)
    for _ in range(3):
        again(lambda: 2)
    assert not [each for each in facts(shown) if each["passed"] or not each["reason"]]
    assert facts(shown)[0]["reason"].startswith("it is 2")
    assert [len(each["hints"]) for each in facts(shown)[3:]] == [1, 2, 2]
    assert "<details><summary>Hint 2</summary>second hint</details>" in shown[-1]["text/html"]


def test_hints_follow_what_is_missing_and_begin_anew_with_it(shown):
    @exercise(4, "a hint for all")
    def both(answer):
        if "weights" in answer:
            raise NotYet("weights are left", "first on weights", "second on weights")
        assert not answer, "something else is left"

    for answer in ("weights, slots", "weights, slots", "slots", ""):
        both(answer)
    hints = [each["hints"] for each in facts(shown)]
    assert hints == [["first on weights"], ["first on weights", "second on weights"], ["a hint for all"], []]


def test_what_an_error_says_is_shown_and_does_nothing(shown):
    halved(raises(ValueError("<b>\ud800\u202e")))
    assert facts(shown)[0]["reason"] == r"<b>\ud800\u202e" and "<b>\\" not in shown[0]["text/html"]


def test_an_interrupt_is_no_wrong_answer(shown):
    with pytest.raises(KeyboardInterrupt):
        halved(raises(KeyboardInterrupt()))
    assert shown == []


def test_the_labs_own_code_is_measured_again_only_when_it_is_other_code(monkeypatch):
    runs = []
    monkeypatch.setattr("labsupport.lesson.exercises.try_out", lambda function, *args: runs.append(function(*args)))
    notebook = {"__name__": "__main__"}

    def cell(code):
        exec(code, notebook)
        try_out_once(notebook["own"], 2)

    exec("def part(x): return x", notebook)
    for code in ("def own(x): return part(x)", "own", "def own(x): return part(x)", "def part(x): return 5 * x"):
        cell(code)
    assert runs == [2, 10]
