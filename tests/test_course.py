"""A wrong SCALE is named, and what the labs may use is there."""

import pytest

import labsupport
from labsupport import choose


def test_scale():
    assert (choose("quick", quick=1, full=2), choose("full", quick=1, full=2)) == (1, 2)
    with pytest.raises(ValueError, match="SCALE is 'fast': write SCALE = \"quick\""):
        choose("fast", quick=1, full=2)


def test_every_name_the_labs_may_use_is_there_and_a_wrong_one_lists_them():
    assert all(getattr(labsupport, name) is not None for name in labsupport.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'mesure'; it offers .*compare.*run"):
        _ = labsupport.mesure
