"""Sizes of tensors, tables of predictions, and a learner's guesses. What predicts a step is tried in test_fits.py."""

import pytest

from labsupport import predicted_vs_measured, tensor_mib
from labsupport.lesson.guessing import Guess


def test_tensor_bytes():
    assert tensor_mib((400, 224, 224, 3)) == pytest.approx(229.6875)
    assert tensor_mib((2**20,), "uint8") == 1
    assert tensor_mib((2**20,), "bfloat16") == tensor_mib((2**20,), "float16") == 2
    assert tensor_mib((), "float64") == 8 / 2**20


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
