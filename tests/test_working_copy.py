"""A learner's copy of the labs: without answers, and never overwritten."""

import nbformat
import pytest
import working_copy

LABS = working_copy.LABS


@pytest.fixture
def course(tmp_path, monkeypatch):
    """(labs as committed, of which two are enough; the folder of the learner's)."""
    committed = tmp_path / "labs"
    for name in ("start_here.ipynb", "01_image_stacking.ipynb", "solutions/01_image_stacking.ipynb"):
        (committed / name).parent.mkdir(parents=True, exist_ok=True)
        (committed / name).write_bytes((LABS / name).read_bytes())
    (committed / "images").mkdir()
    monkeypatch.setattr(working_copy, "LABS", committed)
    return committed, tmp_path / "mine"


def test_it_has_every_cell_and_no_answer(course):
    committed, mine = course
    assert working_copy.bring_up_to_date(mine) == []
    ours, theirs = (nbformat.read(folder / "01_image_stacking.ipynb", as_version=4) for folder in (committed, mine))
    assert [cell.source for cell in theirs.cells] == [cell.source for cell in ours.cells]
    assert any(cell.get("outputs") for cell in ours.cells) and not any(cell.get("outputs") for cell in theirs.cells)
    start = nbformat.read(mine / "start_here.ipynb", as_version=4)
    assert any(cell.get("outputs") for cell in start.cells), "the table of labs is no answer"
    assert (mine / "solutions" / "01_image_stacking.ipynb").exists()


def test_what_the_learner_wrote_stays_and_a_changed_lab_comes_beside_it_once(course):
    committed, mine = course
    working_copy.bring_up_to_date(mine)
    lab = mine / "01_image_stacking.ipynb"
    lab.write_text("what the learner wrote")
    assert working_copy.bring_up_to_date(mine) == []
    book = nbformat.read(committed / lab.name, as_version=4)
    book.cells[0].source += "\nA new sentence."
    nbformat.write(book, committed / lab.name)
    (said,) = working_copy.bring_up_to_date(mine)
    assert "01_image_stacking-new.ipynb, beside yours" in said
    assert lab.read_text() == "what the learner wrote"
    assert "A new sentence." in (mine / "01_image_stacking-new.ipynb").read_text()
    assert working_copy.bring_up_to_date(mine) == [] and len(list(mine.glob("01*"))) == 2
    lab.unlink()  # to begin anew
    assert working_copy.bring_up_to_date(mine) == [] and "A new sentence." in lab.read_text()
