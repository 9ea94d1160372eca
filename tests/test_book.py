"""The course as a site, built as `make book` does and walked in a browser: links, errors, hosts, axe-core, narrow windows."""

import contextlib
import csv
import functools
import http.server
import io
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import RULES, chromium, launched, wait_for

from labsupport.learner.guide import search
from labsupport.lesson.catalogue import labs
from labsupport.lesson.claims import claims
from labsupport.lesson.formula import FORMULA_MIME

ROOT = Path(__file__).parents[1]
LABS = sorted((ROOT / "labs").glob("[0-9]*.ipynb"))
# Not ours: the table of Keras' model.summary() comes in colours of its own.
AXE_LEAVES = {"exclude": ["pre[style*='Menlo']"]}
OF_COLOURS = ["color-contrast", "link-in-text-block"]  # all that another theme changes
READ = r"[^/]*|labs/0[01].*"  # pages that axe-core reads; the outputs of other labs are of the same kinds
NARROW, WIDE = 400, 1280  # pixels: a telephone, a laptop


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Targets(HTMLParser):
    """What a page leads to or needs, and what can be led to in it."""

    def __init__(self, text):
        super().__init__()
        self.targets, self.names = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.names.add(attributes.get("id"))
        self.targets += [attributes[name] for name in ("href", "src") if attributes.get(name)]


def pages_of(site):
    """The pages of the site, but for templates of its theme."""
    names = (path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    return sorted(name for name in names if not name.startswith("_static/"))


@pytest.fixture(scope="module")
def site():
    subprocess.run([sys.executable, ROOT / "tools" / "book.py"], check=True)
    return ROOT / "build" / "book"


@pytest.fixture(scope="module")
def browser(site):
    """(browser, address of the site)."""
    path = chromium()
    server = http.server.ThreadingHTTPServer(("localhost", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with launched(path) as started:
        yield started, f"http://localhost:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_every_lab_has_its_page_and_every_link_its_target(site):
    pages = {name: Targets((site / name).read_text()) for name in pages_of(site)}
    assert {f"labs/{lab.name}.html" for lab in labs().values()} <= pages.keys()
    broken = []
    for name, page in pages.items():
        for target in page.targets:
            path, _, part = target.partition("#")
            if ":" in path or target == "#":  # another host, data
                continue
            file = ((site / name).parent / path.partition("?")[0]).resolve() if path else site / name
            there = pages.get(file.relative_to(site).as_posix()) if file.suffix == ".html" else None
            if not file.exists() or (part and there and part not in there.names):
                broken.append(f"{name}: {target}")
    assert not broken


def walk(browser, site, looks):
    """look(page, name) at each page of a pattern, from {look: pattern}; their sentences, and those on errors and other hosts."""
    started, address = browser
    context = started.new_context(viewport={"width": WIDE, "height": 900}, reduced_motion="reduce")
    page, trouble = context.new_page(), []
    page.on("console", lambda said: trouble.append(f"{page.url}: {said.text}") if said.type == "error" else None)
    page.on("pageerror", lambda error: trouble.append(f"{page.url}: {error}"))
    here = (address, "data:", "blob:")
    page.on("request", lambda asked: None if asked.url.startswith(here) else trouble.append(asked.url))
    for name in pages_of(site):
        if wanted := [look for look, pattern in looks.items() if re.fullmatch(pattern, name)]:
            page.goto(f"{address}/{name}", wait_until="networkidle")  # else axe sees colours on their way to others
            trouble += [said for look in wanted for said in look(page, name)]
    context.close()
    return trouble


def too_wide(page, name):
    page.set_viewport_size({"width": NARROW, "height": 900})
    width = page.evaluate("document.documentElement.scrollWidth")
    page.set_viewport_size({"width": WIDE, "height": 900})
    return [f"{name} is {width} pixels wide in a window of {NARROW}"] * (width > NARROW)


def shut_out(rules, page, name):
    """What axe-core finds, a sentence each."""
    options = {"runOnly": rules, "resultTypes": ["violations"], "preload": False}
    found = Axe().run(page, AXE_LEAVES, options).response["violations"]
    places = lambda rule: "; ".join(" ".join(map(str, node["target"])) for node in rule["nodes"][:3])
    return [f"{name}: {rule['id']}: {rule['help']}: {places(rule)}" for rule in found]


def shut_out_by_night(page, name):
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    page.wait_for_timeout(300)  # colours on their way to others
    found = shut_out(OF_COLOURS, page, f"{name}, dark")
    page.emulate_media(color_scheme="light")
    return found


def test_no_page_has_errors_asks_another_host_or_is_wider_than_a_telephone_and_all_can_read_it(browser, site):
    looks = {too_wide: ".*", functools.partial(shut_out, RULES): READ, shut_out_by_night: READ}
    assert not walk(browser, site, looks)


def test_the_start_page_finds_the_labs_that_the_notebook_finds(browser):
    started, address = browser
    page = started.new_page()
    page.goto(f"{address}/index.html")
    page.fill("#symptom", "OOM after three epochs")
    page.wait_for_selector("#found a")
    assert page.inner_text("#found a >> nth=0") == "09 What leaks over epochs"
    typed = [row["typed"] for row in csv.DictReader((ROOT / "tests" / "symptoms.csv").open())]
    ask = "typed => typed.map(text => makeSearch(SYMPTOMS, w => new EnglishStemmer().stemWord(w))(text).rows[0]?.name)"
    here = page.evaluate(ask, typed)
    there = [rows[0][0].name if (rows := search(text).rows) else None for text in typed]
    other = [(text, one, two) for text, one, two in zip(typed, here, there) if one != two]
    assert len(other) <= 0.05 * len(typed), other  # the notebook also finds misspelt words
    page.close()


def test_verdicts_are_filtered_by_what_is_typed(browser):
    started, address = browser
    page = started.new_page()
    page.goto(f"{address}/verdicts.html")
    page.wait_for_selector(".dt-search input")
    rows = page.locator(".dt-container tbody tr:visible")
    assert rows.count() == len(claims())
    page.fill(".dt-search input", "recomputation")
    assert 1 <= rows.count() < len(claims()) / 3
    page.close()


def formulas(lab):
    """Formulas of a lab's committed notebook."""
    outputs = [output for cell in nbformat.read(lab, as_version=4).cells for output in cell.get("outputs", [])]
    return [output["data"][FORMULA_MIME] for output in outputs if FORMULA_MIME in output.get("data", {})]


def printed(formula, values):
    """What a formula says, by this Python."""
    names, said = {}, io.StringIO()
    exec(formula["source"], names)
    with contextlib.redirect_stdout(said):
        names[formula["function"]](**values)
    return said.getvalue()


def alike(one, other):
    """The same words and numbers, these to one unit of their last digit: the page's Python rounds a half up, this one to even."""
    number = re.compile(r"\d[\d,]*(?:\.(\d+))?")
    pairs = zip(number.finditer(one), number.finditer(other))
    value = lambda match: float(match[0].replace(",", ""))
    near = all(abs(value(a) - value(b)) < 1.5 * 10 ** -len(b[1] or "") for a, b in pairs)
    words = [" ".join(number.sub("#", text).split()) for text in (one, other)]
    return near and words[0] == words[1]


@pytest.mark.parametrize("lab", [path for path in LABS if formulas(path)], ids=lambda path: path.stem)
def test_sliders_say_in_the_page_what_python_says(browser, lab):
    """At the recorded values, then at each control's ends, set by its number box or menu."""
    started, address = browser
    page = started.new_page()
    page.goto(f"{address}/labs/{lab.stem}.html")
    (formula,) = formulas(lab)
    values = {name: start for name, start, _ in formula["controls"]}
    answer = page.locator(".formula [role=status]")
    assert answer.inner_text().strip() == printed(formula, values).strip()
    for name, start, allowed in formula["controls"]:
        control = page.get_by_label(name.replace("_", " "), exact=True)
        for value in allowed[:2]:
            values[name] = value
            control.select_option(value) if isinstance(start, str) else control.fill(str(value))
            expected = printed(formula, values).strip()
            wait_for(lambda expected=expected: alike(answer.inner_text().strip(), expected), 10, expected)
    page.close()


def test_keys_alone_move_a_slider(browser):
    started, address = browser
    page = started.new_page()
    page.goto(f"{address}/labs/01_image_stacking.html")
    slider, box = page.get_by_label("images, slider"), page.get_by_label("images", exact=True)
    slider.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.formula .when').textContent.includes('in this page')")
    assert (slider.input_value(), box.input_value()) == ("408", "408")
    page.close()
