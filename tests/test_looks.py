"""What a learner sees and hears: figures in words, axe-core over all that we show, widths, colours, keys alone."""

import re
import shutil
import sys
import textwrap

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
from browser import ROOT, THEMES, finished, open_notebook, open_page, run_cells_above, set_theme, shut_out, wait_for
from eyes import BLINDNESS, alike

from labsupport.showing.palette import COLOURS, LINES, style
from labsupport.showing.words import bundle, describe

sys.path.append(str(ROOT / "tools"))
from build import without_markup
from looks import WIDTHS

SHOWN = ["02_arrays_into_datasets", "14_shapes_and_layers"]  # many verdicts, wide tables, long labels
SAMPLER = [
    """
    import matplotlib.pyplot as plt
    import labsupport as lab
    from labsupport.ground.budget import MIB
    from labsupport.ground.record import Cause
    from labsupport.ground.result import ArmError, ArmResult, Line
    from labsupport.lesson import claims
    from labsupport.lesson.exercises import exercise
    from labsupport.showing.live import NotebookPlot
    from labsupport.showing.palette import FIGURES
    from labsupport.showing.words import describe_plots
    plt.rcParams.update(FIGURES)
    describe_plots()
    """,
    """my_guess = lab.guess("Peak memory of loading every image and stacking them into one tensor?")""",
    """
    def needs(images=400, share=0.5, dtype="float32"):
        print(f"{images} images of {dtype}: {images * share:.1f} MiB " + "and a long line of words behind " * 5)

    lab.explore(needs, images=(8, 1000, 8), share=(0.0, 1.0), dtype=["float32", "uint8"])
    """,
    """
    print(my_guess.against(200.0))
    exercise(1, "halve it")(lambda answer: answer)(1)

    @exercise(2, "Cast inside the mapped function with tf.cast(image, tf.uint8), then cache(), then batch; cast back.")
    def check(answer):
        assert answer < 1, "the peak is still 2 MiB"

    check(2)
    words = {"claim": "It helps.", "because": "So it is.", "flips": "Never.", "unit": "MiB"}
    words["tests"] = {"the first": "a_long_name_of_a_figure > 1", "the second": "a_long_name_of_a_figure > 2"}
    claims.claims = lambda: {"C01": words}
    for value, expected in ((3, "holds"), (2, "partly"), (1, "fails"), (None, "not testable here")):
        lab.verdict("C01", expected, a_long_name_of_a_figure=value, b="text")
    """,
    """
    def arm(label, peak, error=None):
        result = ArmResult(label, 256 * MIB, True, value="1,626,442 weights", error=error, seconds=2.0, device="CPU:0")
        result.figures |= {"peak": peak * MIB, "end": 0, "process_peak": 300 * MIB, "process_end": None}
        result.tensors = [(0.0, 0), (1.0, peak * MIB)]
        return result

    died = arm("an eager stack of all images", 200, ArmError(Cause.OOM, "no room " * 30, [Line("Cell In[1]", 1, "x = " + "f(" * 60)], "a traceback", "a log " * 99))
    NotebookPlot(quiet=False).finish(died)
    """,
    "lab.compare(arm('a list of images', 400), died, arm('tf.data', 25))",
    "lab.predicted_vs_measured(a_list=(400, 401), nothing=(1, None))",
    "plt.plot([1, 2], [3, 4], label='growth')\nplt.show()",
    """
    def endless():
        import time
        while True:
            time.sleep(0.1)

    lab.run(endless, budget="256 MiB")
    """,
]


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    folder = tmp_path_factory.mktemp("looks")
    (folder / "labs").mkdir()
    for name in SHOWN:
        shutil.copy(ROOT / "labs" / f"{name}.ipynb", folder / "labs")
    sampler = nbformat.v4.new_notebook(
        metadata=nbformat.read(ROOT / "labs" / f"{SHOWN[0]}.ipynb", as_version=4).metadata
    )
    sampler.cells = [nbformat.v4.new_code_cell(textwrap.dedent(source).strip()) for source in SAMPLER]
    nbformat.write(sampler, folder / "labs" / "sampler.ipynb")
    return folder


@pytest.fixture(scope="module")
def page(server):
    with open_page(server) as page:
        yield page


def axe(page, **more):
    """What axe-core finds wrong in the outputs of the open notebook, one line each."""
    # JupyterLab's body has no height, and axe takes all text for hidden.
    page.add_style_tag(content="body { height: 100vh }")
    # Not ours: the handle of a slider has no name in ipywidgets, which is why explore() has a named number box of the same
    # value beside it; and the table of Keras' model.summary() comes in colours of its own, in a box that only a mouse scrolls.
    context = {"include": [".jp-Notebook .jp-OutputArea-output"], "exclude": [".noUi-handle", "pre[style*='Menlo']"]}
    return shut_out(page, context, **more)


def too_wide(page):
    """What sticks out of its output: our pictures, boxes and widgets always; anything else where it cannot be scrolled."""
    return page.evaluate(
        """() => [...document.querySelectorAll('.jp-Notebook .jp-OutputArea-output')].flatMap(output => {
            const right = output.getBoundingClientRect().right + 1, name = node => node.outerHTML.slice(0, 200);
            const ours = [...output.querySelectorAll('img, svg, .widget-box, div[style*="border-left"], details')];
            const out = ours.filter(node => node.getBoundingClientRect().right > right || node.scrollWidth > node.clientWidth + 1 && node.clientWidth);
            const scrolls = node => ['auto', 'scroll'].includes(getComputedStyle(node).overflowX);
            if (output.scrollWidth > output.clientWidth + 1 && !scrolls(output)) out.push(output);
            return out.map(name);
        })"""
    )


def each_width(page):
    for width in WIDTHS:
        # As high as the whole sampler: axe judges colours on the screen only.
        page.set_viewport_size({"width": width, "height": 5000})
        page.wait_for_timeout(300)  # laid out anew
        yield width


@pytest.fixture(scope="module")
def sampler(page, server, course):
    """The code cells of the sampler; all but the last, which never ends, have run."""
    cells = open_notebook(page, server, course, "sampler.ipynb")
    run_cells_above(page, len(SAMPLER) - 1)
    return cells


def activate(page, number):
    page.evaluate("number => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = number }", number)


def tab_to(page, selector):
    """Press Tab until what has the focus matches the selector; returns it."""
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return page.locator(":focus")
    pytest.fail(f"{selector} is not reached with the Tab key")


def test_keys_alone_make_a_guess_and_move_a_slider(sampler, page):
    activate(page, 1)
    page.keyboard.press("Escape")  # from wherever the focus is into the notebook
    tab_to(page, ".widget-text input")
    page.keyboard.type("0.25 GiB")
    page.keyboard.press("Enter")
    wait_for(lambda: sampler.nth(1).get_by_text("Noted: 256 MiB").is_visible(), 10, "what the box took")
    slider = tab_to(page, "[role=slider]")
    answer = sampler.nth(2).locator("pre").last
    assert answer.inner_text().startswith("400 images of float32: 200.0 MiB")
    page.keyboard.press("ArrowRight")
    wait_for(
        lambda: answer.inner_text().startswith("408 images of float32: 204.0 MiB"), 10, "the answer to a moved slider"
    )
    named = sampler.nth(2).get_by_label("images", exact=True)
    assert (named.input_value(), slider.get_attribute("aria-valuetext")) == ("408", "408")
    tab_to(page, "select")
    page.keyboard.type("u")
    wait_for(lambda: "of uint8" in answer.inner_text(), 10, "the answer to another choice in the menu")
    for cell, folded in ((3, "Cast inside the mapped function"), (4, "a traceback")):
        tab_to(page, "summary")
        page.keyboard.press("Enter")
        assert sampler.nth(cell).get_by_text(folded).first.is_visible()
    activate(page, 3)
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Enter")
    wait_for(lambda: "256 MiB" in sampler.nth(3).locator(".jp-OutputArea").inner_text(), 10, "the guess in the kernel")


def test_all_that_we_show_is_accessible_and_fits(sampler, page):
    activate(page, len(SAMPLER) - 1)
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell') }")
    page.wait_for_selector("svg[aria-label^='Live memory plot']")
    wide, wrong = [too_wide(page) for _ in each_width(page)], {}
    for theme in THEMES:
        set_theme(page, theme)
        page.locator(".jp-WindowedPanel-outer").evaluate("panel => panel.scrollTo(0, 0)")
        wrong[theme] = axe(page)
        # Of text in an SVG axe cannot tell the ground: it is the same in every theme, nearly black on white.
        looks = page.evaluate(
            """() => {
                const text = document.querySelector("svg[aria-label^='Live'] text");
                return [getComputedStyle(text).fill, getComputedStyle(text.closest('svg')).backgroundColor];
            }"""
        )
        assert looks == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"], theme
    page.get_by_role("button", name="Stop this run").click()
    wait_for(lambda: finished(sampler.last), 10, "the end of the run")
    assert wide == [[], []] and wrong == {"light": [], "dark": []}
    pictures = sampler.locator(".jp-OutputArea img")
    # Not left to axe: JupyterLab makes an empty alt of a missing one, which stands for mere decoration.
    assert [bool(re.search(r"\d", picture.get_attribute("alt") or "")) for picture in pictures.all()] == [True] * 4


@pytest.mark.parametrize("name", SHOWN)
def test_committed_labs_fit_and_are_legible(page, server, course, name):
    open_notebook(page, server, course, f"{name}.ipynb")
    for theme in THEMES:
        set_theme(page, theme)
        assert [too_wide(page) for _ in each_width(page)] == [[], []], theme
        page.locator(".jp-OutputArea-output div[style*='border-left']").last.evaluate(
            "box => box.scrollIntoView({block: 'end'})"
        )
        # JupyterLab ignores the alt of a bare PNG; see bundle().
        assert not axe(page, rules={"image-alt": {"enabled": False}}), theme


def test_committed_pictures_have_words_and_no_second_copy():
    for path in sorted((ROOT / "labs").glob("[0-9]*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    alt = output.metadata["image/png"]["alt"]
                    assert len(alt) > 40 and re.search(r"\d", alt), f"{path.name} {cell.id}: {alt!r} tells nothing"
                    assert "text/html" not in output["data"], (
                        f"{path.name} {cell.id}: run `make labs`, which leaves the copy out"
                    )


def test_a_picture_comes_with_its_words_and_is_committed_without_its_copy():
    figure, axes = plt.subplots()
    axes.plot([1, 2], [3, 4])
    data, metadata = bundle(figure, 'a <b> & "c"')
    assert 'alt="a &lt;b&gt; &amp; &#34;c&#34;"' in data["text/html"] and data["image/png"] in data["text/html"]
    assert metadata["image/png"]["alt"] == data["text/plain"] == 'a <b> & "c"'
    table = nbformat.v4.new_output("display_data", {"text/html": "<table>"})
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("display_data", data), table])]
    )
    without_markup(book)
    assert [sorted(output["data"]) for output in book.cells[0].outputs] == [["image/png", "text/plain"], ["text/html"]]


def words(draw):
    """describe() of a figure with one pair of axes, which draw(axes) fills."""
    figure, axes = plt.subplots()
    draw(axes)
    return describe(figure)


def test_a_plot_of_lines_tells_axes_ends_extremes_and_marks():
    def draw(axes):
        axes.plot([1, 2, 3], [10, 90, 20], label="kept")
        axes.plot([1, 2, 3], [30, np.nan, 5], label="dropped")
        axes.axhline(40, label="budget")
        axes.annotate("here it dies", (2, 90))
        axes.set(xlabel="epoch", ylabel="memory (MiB)", title="Growth", yscale="log")

    assert words(draw) == (
        "Plot. Growth; memory (MiB) (logarithmic scale) over epoch; kept from 10 at 1 to 20 at 3, highest 90 at 2; "
        "dropped from 30 at 1 to 5 at 3; budget at 40; highest at the end: kept; marked: here it dies"
    )


def test_a_plot_of_bars_names_every_bar_and_the_largest():
    def grouped(axes):
        for index, name in enumerate(("forward", "training")):
            axes.bar(np.arange(2) + 0.4 * index, [index + 1, np.nan], 0.4, label=name)
        axes.set_xticks([0.2, 1.2], ["loop", "stack"])
        axes.set_ylabel("MiB")

    def stacked(axes):
        for row in (0, 1):
            axes.barh(row, 2, color="red", label="weights" if row == 0 else None)
            axes.barh(row, row + 1, left=2, color="blue", label="slots" if row == 0 else None)
        axes.set_yticks([0, 1], ["predicted", "measured"])

    assert (
        words(grouped)
        == "Plot. MiB; forward: loop = 1, stack: unavailable; training: loop = 2, stack: unavailable; largest: training, loop"
    )
    assert (
        words(stacked)
        == "Plot. weights: predicted = 2, measured = 2; slots: predicted = 1, measured = 2; largest: weights, predicted"
    )
    assert words(lambda axes: (axes.bar([0, 1], [3, 4]), axes.set_xticks([0, 1], ["1", "2"]))) == (
        "Plot. 1 = 3, 2 = 4; largest: 2"
    )
    assert (
        words(lambda axes: (axes.barh(0, 4), axes.barh(0, 3, left=4, hatch="/"), axes.set_yticks([])))
        == "Plot. 0 to 4; hatched: 4 to 7"
    )
    assert (
        words(lambda axes: (axes.bar("a", 2), axes.errorbar("a", 2, yerr=1, fmt="none", label="spread")))
        == "Plot. a = 2"
    ), "bars of error alone have no points to tell"


def test_marks_in_named_rows_are_told_by_row():
    def draw(axes):
        axes.plot([3, 1, 2], [0.1, -0.1, 0], "o")
        axes.set_yticks([0, 1], ["padded", "sliced"])

    assert words(draw) == "Plot. padded: 3 marks from 1 to 3"


def test_an_empty_figure_does_not_stop_a_lab():
    assert words(lambda axes: (axes.plot([], [], label="nothing"), axes.bar([], []))) == "Plot. nothing: unavailable"


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_arms_stay_apart_for_colour_blind_eyes(blindness):
    assert not alike(COLOURS, 10, blindness), "lines need about ten times what is just seen"


def test_arms_differ_in_line_style_too():
    assert len(set(map(str, LINES))) == len(LINES) == len(COLOURS)
    assert len({str(style(index)) for index in range(len(COLOURS))}) == len(COLOURS)
