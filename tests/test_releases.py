"""The page of verdicts through the releases, on rows made by hand."""

import releases_table

OLD = {
    "versions": {"tensorflow": "2.15.1", "keras": "2.15.0", "numpy": "1.26.4"},
    "claims": {
        "C08": {"verdict": "partly", "figures": {"eager_forward_loop": 6.0}},
        "C56": {"verdict": "does not run there", "why": "AttributeError: no remat | anywhere"},
    },
}
NEW = {
    "versions": {"tensorflow": "2.9.3", "keras": "2.9.0", "numpy": "1.20.0"},
    "claims": {"C08": {"verdict": "fails", "figures": {"eager_forward_loop": 9.0}}},
}


def test_changes_are_of_claims_that_both_have():
    assert releases_table.changes(OLD["claims"], OLD["claims"]) == []
    (line,) = releases_table.changes(OLD["claims"], NEW["claims"])
    assert line.startswith("C08: partly → fails  ")


def test_the_page_tells_every_verdict_in_the_order_of_releases():
    page = releases_table.page({"a": OLD, "b": NEW})
    assert page.index("2.9 (Keras 2.9)") < page.index("2.15 (Keras 2.15)")
    assert "| ✘ fails | ◐ partly |" in page
    assert "| not tried | – does not run there |" in page
    assert "* 2.15 (Keras 2.15): partly; eager_forward_loop = 6" in page  # it came out in more than one way


def test_why_a_claim_does_not_run_cannot_break_the_table():
    both = {"a": OLD, "b": {**NEW, "claims": {"C56": {"verdict": "partly", "figures": {}}}}}
    assert "no remat \\| anywhere" in releases_table.page(both)
