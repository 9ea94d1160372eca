"""The start page leads from a symptom to the right lab, and builds on nothing that is not there; so does `see_lab`."""

import csv
import re
from graphlib import TopologicalSorter
from pathlib import Path

import nbformat
import pytest

from labsupport.learner.guide import search, table
from labsupport.lesson.catalogue import labs, paths, see_lab

LABS = Path(__file__).parents[1] / "labs"


def test_the_saved_start_page_is_up_to_date_and_links_every_lab():
    book = nbformat.read(LABS / "start_here.ipynb", as_version=4)
    pages = [
        output["data"]["text/html"]
        for cell in book.cells
        for output in cell.get("outputs", [])
        if "text/html" in output.get("data", {})
    ]
    assert pages[0] == table(""), "labs or data/map.toml have changed: run `make labs NAMES=start_here`"
    assert set(re.findall(r'href="(\w+\.ipynb)"', pages[0])) == {path.name for path in LABS.glob("[0-9]*.ipynb")}
    assert all(cell.execution_count for cell in book.cells if cell.cell_type == "code"), (
        "committed without having been run"
    )


def test_prerequisites_exist_and_come_in_an_order():
    TopologicalSorter({slug: lab.needs for slug, lab in labs().items()}).prepare()  # raises CycleError
    assert all(set(lab.needs) <= labs().keys() for lab in labs().values())
    assert all(
        lab.symptom and lab.title and lab.time and len(lab.exercises) >= 2 and len(lab.symptoms) >= 2
        for lab in labs().values()
    )


def test_every_lab_stands_on_a_path_behind_what_it_builds_on():
    assert {lab.slug for path in paths().values() for lab in path} == labs().keys() - {"where_memory_goes"}
    for path in paths().values():
        for place, lab in enumerate(path):
            later = {other.slug for other in path[place:]}
            assert not later & set(lab.needs), f"{lab.slug} stands before {later & set(lab.needs)}"


@pytest.mark.parametrize(
    "typed, lab",
    [
        ("OOM when allocating tensor", "batch_size"),
        ("kernel died", "image_stacking"),
        ("memory grows every epoch", "leaks_over_epochs"),
        ("memory increases each epoch", "leaks_over_epochs"),
        ("out of memory after few epochs", "leaks_over_epochs"),
        ("OOM when allocating tensor with shape[64,224,224,64]", "batch_size"),
        (
            "OOM when allocating tensor with shape[64,224,224,64] and type float on "
            "/job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu [Op:Conv2D]",
            "batch_size",
        ),
        ("model.fit out of memory", "batch_size"),
        ("retracing warning", "retracing"),
        ("retrcing", "retracing"),
        ("Retra", "retracing"),
        ("shuffle buffer", "pipeline_buffers"),
        (
            "WARNING:tensorflow:5 out of the last 5 calls to <function f at 0x7f> triggered tf.function retracing.",
            "retracing",
        ),
        ("IndexedSlices", "long_sequences"),
        ("MultiHeadAttention OOM", "long_sequences"),
        ("embedding", "long_sequences"),
        ("histogram_freq", "the_profiler"),
        ("evaluation OOM", "batch_size"),
        ("val_loss OOM", "batch_size"),
        ("nvidia-smi full after clear_session", "leaks_over_epochs"),
        ("Dst tensor is not initialized", "the_gpu_is_full"),
        ("CUDA_ERROR_OUT_OF_MEMORY", "the_gpu_is_full"),
        ("h5 file too large", "large_files"),
        ("pandas to tensor memory", "arrays_into_datasets"),
        ("Allocator (GPU_0_bfc) ran out of memory", "reading_an_oom"),
        ("could not create cudnn handle", "reading_an_oom"),
        ("exit code 137", "image_stacking"),
        ("colab crash", "image_stacking"),
        ("TFRecord", "pipeline_buffers"),
    ],
)
def test_a_symptom_leads_to_its_lab(typed, lab):
    found = search(typed)
    assert found.rows[0][0].slug == lab and found.well


def test_what_others_would_type_leads_to_a_lab_that_helps(record_property):
    """tests/symptoms.csv was written by somebody who knew the labs and not the search; it was tuned on every other row."""
    rows = list(csv.DictReader((Path(__file__).parent / "symptoms.csv").open()))
    for half, least in ((0, 0.8), (1, 0.65)):
        part = [(row["typed"], row["labs"].split()) for row in rows[half::2] if row["labs"] != "none"]
        first = [wanted for typed, wanted in part if search(typed).rows[0][0].slug in wanted]
        told = f"{len(first)} of {len(part)} first"
        record_property("kept out" if half else "tuned on", told)
        assert len(first) >= least * len(part), told
    others = [row["typed"] for row in rows if row["labs"] == "none"]
    assert sum(not search(typed).well for typed in others) >= len(others) / 2


def test_without_words_all_labs_and_for_nonsense_none_but_advice():
    assert [lab.slug for lab, _ in search(" 12 ").rows] == list(labs())
    assert search("xyzzy") == ([], False) and "doctor your_script.py" in table("xyzzy")


def test_see_lab_tells_the_title_and_the_file_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.chdir(LABS.parent)
    assert see_lab("leaks_over_epochs") == 'see lab 09, "What leaks over epochs" (labs/09_leaks_over_epochs.ipynb)'
    assert see_lab("leaks_over_epochs", "shapes_and_layers", "retracing").endswith(
        '.ipynb); also 14 "Shapes, layers and smaller models", 10 "Retracing: a graph for every call"'
    )
    monkeypatch.chdir(tmp_path)
    assert see_lab("leaks_over_epochs").endswith(f"({LABS / '09_leaks_over_epochs.ipynb'})")
    with pytest.raises(KeyError):
        see_lab("leaks_over_epochs", "no_such_lab")
