"""The pytest plugin: fixtures `memory_budget` and `assert_no_growth`, and the allocator that they need.

Loaded in every pytest run where labsupport is installed, so nothing is imported here before a test asks for it.
`-p no:labsupport` leaves it out.
"""

import os
import sys

import pytest

# On a CPU only the allocator that GPUs use counts every tensor. TensorFlow reads this when it is imported; what the user
# has set stays. Where it is too late, memory_budget finds out and says so.
if "tensorflow" not in sys.modules:
    os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")


@pytest.fixture
def memory_budget():
    """`with memory_budget("512 MiB") as spent:`, see labsupport.doctor.checks.memory_budget."""
    from labsupport.doctor import checks

    return checks.memory_budget


@pytest.fixture
def assert_no_growth():
    """`assert_no_growth(step, n=50)`, see labsupport.doctor.checks.assert_no_growth."""
    from labsupport.doctor import checks

    return checks.assert_no_growth
