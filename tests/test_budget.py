"""Sizes are read or refused with what to write instead; no machine is asked for more than it has."""

import re

import psutil
import pytest

from labsupport import budget
from labsupport.budget import MIB, Budget, BudgetError, mib, parse_size


@pytest.mark.parametrize(
    "text, size",
    [("256 MiB", 256 * 2**20), ("1.5 GiB", 3 * 2**29), ("200MB", 200 * 10**6), (" 64 kib ", 2**16), ("17 B", 17)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["lots", "-5 MiB", "256", 256, "", "MiB", "nan MiB", "1,5 GiB", "2 TiBs"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(BudgetError, match=re.escape(repr(text)) + '.* write a positive number and a unit, such as "256 MiB"'):
        parse_size(text)


@pytest.mark.parametrize("text", ["0 MiB", "1 MiB"])
def test_too_small_to_start(text):
    with pytest.raises(BudgetError, match="give at least 16.0 MiB"):
        Budget.of(text, "2 GiB")


def test_more_than_the_machine_names_what_would_do():
    with pytest.raises(BudgetError, match="more than this machine has") as caught:
        Budget.of("900000 GiB", "2 GiB")
    suggested = re.search(r'for instance "([^"]+)"', str(caught.value))[1]
    assert Budget.of(suggested, "2 GiB").tensors == parse_size(suggested)


def test_no_budget_is_half_of_what_is_free():
    free = min(psutil.virtual_memory().available, budget.machine_memory())
    assert Budget.of(None, "2 GiB").tensors == pytest.approx(free / 2, rel=0.25)  # others run beside this test


def test_a_container_with_less_memory_is_the_machine(monkeypatch):
    monkeypatch.setattr(budget.Path, "read_text", lambda self: str(512 * MIB))
    assert budget.machine_memory() == 512 * MIB
    with pytest.raises(BudgetError, match="more than this machine has"):
        Budget.of("600 MiB", "2 GiB")


def test_unavailable_is_not_zero():
    assert mib(None) == "unavailable"
    assert mib(0) == "0.0 MiB"


def test_too_little_room_beside_the_tensors_is_refused():
    with pytest.raises(BudgetError, match="leaves no room for Python.*64"):
        Budget.of("64 MiB", "1 KiB")
