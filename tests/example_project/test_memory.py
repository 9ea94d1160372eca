"""The tests of this repository. It needs `pip install labsupport` (this project) and nothing else: the fixtures come with it."""

import train


def test_training_does_not_grow(assert_no_growth):
    assert_no_growth(train.step, n=16)


def test_an_epoch_fits(memory_budget):
    with memory_budget("8 MiB") as spent:
        train.epoch()
    assert 3.9 < spent.peak_mib < 4.5
