"""Sizes are read or refused with what to write instead; no machine is asked for more than it has."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from labsupport.ground import budget
from labsupport.ground.budget import MIB, Budget, BudgetError, mib, parse_size

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "text, size",
    [("256 MiB", 256 * 2**20), ("1.5 GiB", 3 * 2**29), ("200MB", 200 * 10**6), (" 64 kib ", 2**16), ("17 B", 17)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["lots", "-5 MiB", "256", 256, "", "MiB", "nan MiB", "1,5 GiB", "2 TiBs"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(
        BudgetError, match=re.escape(repr(text)) + '.* write a positive number and a unit, such as "256 MiB"'
    ):
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


@pytest.mark.parametrize("limit, total", [(str(2048 * MIB), 2048 * MIB), ("", None), ("unlimited", None)])
def test_a_learner_of_a_hub_has_what_the_hub_gives(monkeypatch, limit, total):
    monkeypatch.delenv("MEM_LIMIT", raising=False)
    without = budget.machine_memory()
    monkeypatch.setenv("MEM_LIMIT", limit)
    assert budget.machine_memory() == (min(total, without) if total else without)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits memory only on Linux")
def test_an_arm_lives_within_the_limit_of_its_process():
    """Without a budget it takes half, which fits although it is reserved at once; and it does not lift the limit, even as root."""
    import resource

    limit = 2048 * MIB
    code = """
        import resource
        from labsupport import measure, run
        result = measure(resource.getrlimit, resource.RLIMIT_DATA)
        print(result.budget, *result.value)
        try:
            run(print, budget="2 GiB")
        except Exception as error:
            print(type(error).__name__, error)
    """
    narrow = lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], preexec_fn=narrow, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    *_, first, last = done.stdout.splitlines()
    tensors, soft, hard = map(int, first.split())
    assert tensors <= limit / 2 and soft <= limit and hard <= limit
    assert re.match("BudgetError a budget of .* more than this machine has for you: 2,048.0 MiB", last)


def test_unavailable_is_not_zero():
    assert mib(None) == "unavailable"
    assert [*map(mib, (0, 8, 12 * 2**10, MIB))] == ["0.0 MiB", "8 B", "12.0 KiB", "1.0 MiB"]


def test_too_little_room_beside_the_tensors_is_refused():
    with pytest.raises(BudgetError, match="leaves no room for Python.*64"):
        Budget.of("64 MiB", "1 KiB")
