"""The page to explore a peak: one file, tried in a real browser, with keys alone, and by axe-core."""

import pytest
from browser import chromium, launched, shut_out

from labsupport.ground.budget import MIB
from labsupport.ground.result import Line
from labsupport.peak.parts import Parts, Row
from labsupport.showing.apart import Apart

WEIGHTS, LEAK = Line("Cell In[1]", 3, "model = build()"), Line("Cell In[1]", 7, 'kept.append("</script><img src=x>")')


def arm(label, kept):
    """An arm that holds weights, and some gradients that it has kept."""
    rows = [Row("weights", WEIGHTS, "net/dense", "net/dense/kernel", "[1024,1024]", "float32", 4 * MIB, 1)]
    if kept:
        rows.insert(0, Row("gradients", LEAK, "", "MatMul", "[1024,1024]", "float32", kept * 4 * MIB, kept))
    curve = [[0.0, {}], [0.5, {"weights": 4 * MIB}], [1.0, {"weights": 4 * MIB, "gradients": kept * 4 * MIB}]]
    level = (kept + 1) * 4 * MIB
    return Parts(label, rows, None, level, level, curve, None, "", 0, [])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    shown = Apart([arm("gradients <i>kept</i>", 9), arm("norms kept", 0)], [64 * MIB])
    return shown.save(tmp_path_factory.mktemp("page") / "peak.html")


@pytest.fixture
def page(saved):
    with launched(chromium()) as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 2400})
        asked, errors = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(saved.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=30_000)
        yield page
        assert not errors
        assert {url.partition(":")[0] for url in asked} <= {"file", "data", "blob"}, "it asks the network"


def pieces(page):
    """The words in the nested bars of the first arm."""
    return page.locator(".bars").first.locator(".slicetext").all_text_contents()


def test_saving_tells_path_and_size_and_escapes_what_strangers_wrote(saved, capsys):
    Apart([arm("x", 1)], []).save(saved.with_name("other.html"))
    assert "other.html" in (said := capsys.readouterr().out) and " MB" in said and said.count("\n") == 1
    text = saved.read_text()
    assert "<img src=x>" not in text and "<i>kept</i>" not in text
    assert "second run of the same function" in text


def test_both_arms_are_drawn_and_cut_as_wished_by_keys_alone(page):
    page.wait_for_function("document.querySelectorAll('.bars .slicetext').length >= 6")
    assert (
        any("gradients" in words for words in pieces(page)) and page.locator(".time .scatterlayer .trace").count() == 4
    )
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.name") == "order"
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.value") == "layer"
    page.wait_for_function(
        "[...document.querySelectorAll('.slicetext')].some(one => one.textContent.includes('net/dense'))"
    )
    page.keyboard.press("Tab")
    page.keyboard.type("append img")
    page.wait_for_function("document.getElementById('found').textContent.startsWith('1 of 3 rows, 36.0 MiB')")
    assert page.locator("tr[data-row]:visible").count() == 1
    page.wait_for_function(
        "![...document.querySelectorAll('.slicetext')].some(one => one.textContent.includes('kernel'))"
    )
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("(document.activeElement.getAttribute('aria-label') || '').startsWith('Zoom in')"):
            break
    else:
        pytest.fail("the button that zooms in is not reached with the Tab key")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('.bars .pathbar .slicetext') !== null")
    page.locator(".whole").first.focus()
    page.keyboard.press("Space")
    page.wait_for_function("document.querySelector('.bars .pathbar .slicetext') === null")


def test_code_is_shown_as_it_is_written(page):
    page.get_by_label("line", exact=True).check()
    page.wait_for_function(
        "[...document.querySelectorAll('.slicetext')].some(one => one.textContent.includes('</script><img'))"
    )
    assert page.locator("main img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible_and_fits(page, scheme):
    page.emulate_media(color_scheme=scheme)
    for width in (1280, 480):
        page.set_viewport_size({"width": width, "height": 2400})
        page.wait_for_timeout(300)  # laid out anew
        assert not shut_out(page)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
