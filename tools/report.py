"""The claims report: `python tools/report.py` runs all labs and writes build/report.html.

`--readme` writes parts of the README and of the site's pages, data/verdicts.md, data/zoo.md and data/releases.md from the committed notebooks and what is recorded,
`--check` fails if they have drifted. Page, parts and table come from the verdicts that the notebooks left in their outputs, never from a list by hand.
"""

import argparse
import base64
import sys
from collections import Counter
from pathlib import Path

import nbformat
import papermill
import rehearsal
import releases_table
import zoo_table

from labsupport.lesson.catalogue import labs, paths
from labsupport.lesson.claims import SIGNS, UNTESTABLE, VERDICT_MIME, claims, figures_text, judge, otherwise
from labsupport.showing import apart
from labsupport.showing.cards import template

ROOT = Path(__file__).parents[1]
README, PAGES = ROOT / "README.md", ROOT / "tools" / "book" / "pages"
GUIDE = ROOT / "tools" / "classroom" / "TEACHING.md"
TABLE, ZOO = ROOT / "data" / "verdicts.md", ROOT / "data" / "zoo.md"
RELEASES = ROOT / "data" / "releases.md"
SURPRISING = ("C13", "C02", "C29", "C17", "C21")  # told in the README, whatever their verdicts are
PAGE = template("""\
<!doctype html><html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
{{ page_style }}
td:nth-child(3){white-space:nowrap}
</style>
<h1>{{ title }}</h1>
{% for note in notes %}
<p><b>{{ note }}</b></p>
{% endfor %}
<table><tr><th>id<th>claim<th>verdict<th>lab</tr>
{% for entry, claim in judged %}
<tr><td><a href="#{{ entry.id }}">{{ entry.id }}</a><td>{{ claim.claim }}<td>{{ signs[entry.verdict] }} {{ entry.verdict }}
<td>{{ entry.lab }}</tr>
{% endfor %}
</table>
{% for entry, claim in judged %}
<h2 id="{{ entry.id }}">{{ entry.id }} {{ signs[entry.verdict] }} {{ entry.verdict }}</h2>
<p><i>{{ claim.claim }}</i> ({{ claim.articles | join(", ") }})</p>
{% if entry.picture %}
<img src="data:image/png;base64,{{ entry.picture }}" alt="{{ entry.alt }}">
{% endif %}
<p>{{ entry.because }}</p><ul>
{% for words, truth in entry.outcomes.items() %}
<li>{{ "yes" if truth else "no" }}: {{ words }} <code>{{ entry.tests[words] }}</code></li>
{% endfor %}
</ul><p>Measured: {{ figures_text(entry.figures, entry.unit) }}</p><p>{{ otherwise(claim) }}</p>
{% endfor %}
</html>
""")


def verdicts(path):
    """The verdicts of an executed notebook, each with the last picture of arms above it: [{id, verdict, …, lab, picture, alt}]."""
    found, picture, alt = [], None, ""
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            # A peak taken apart is of one moment, and of some of the arms.
            if "image/png" in data and not data.get("text/plain", "").startswith(apart.TITLE):
                picture, alt = data["image/png"], data.get("text/plain", "")
            if VERDICT_MIME in data:
                found.append({**data[VERDICT_MIME], "lab": path.stem, "picture": picture, "alt": alt})
    return found


def contradiction(entry):
    """Why a verdict does not follow from its own figures; "" if it does."""
    if entry["verdict"] == UNTESTABLE:
        return ""
    found, _ = judge(entry["figures"], entry["tests"])
    return "" if found == entry["verdict"] else f"{entry['id']} says {entry['verdict']}, its figures say {found}"


def _verdict(entry):
    return f"{SIGNS[entry['verdict']]} {entry['verdict']}"


def surprises(ledger):
    """The README's few verdicts in Markdown, with the count of all."""
    found = Counter(entry["verdict"] for entry in ledger)
    counts = ", ".join(f"{number} {SIGNS[verdict]} {verdict}" for verdict, number in found.most_common())
    by_id = {entry["id"]: entry for entry in ledger}
    rows = []
    for entry in (by_id[name] for name in SURPRISING):
        told = f"**{_verdict(entry)}**: “{claims()[entry['id']]['claim']}” {entry['because']}"
        rows.append(f"* {told} ([{entry['lab'][3:].replace('_', ' ')}](labs/{entry['lab']}.ipynb))")
    return "\n".join([*rows, "", f"Of {len(ledger)} claims: {counts}. [All of them](data/verdicts.md)."])


def table(ledger):
    """The page of all verdicts in Markdown, in the order of the claims."""
    rows = [
        "# All verdicts",
        "",
        "Made from the committed notebooks by `make labs`, never by hand. `holds`: every test of the claim came out true in",
        "that run; `fails`: none did; `partly`: some did, the lab says which, with the figures, and when it changes. Tests",
        "compare only ratios and orderings; sizes on your machine will differ.",
        "",
        "| | claim | verdict | why | lab |",
        "|---|---|---|---|---|",
    ]
    for entry in sorted(ledger, key=lambda e: e["id"]):
        link = f"[{entry['lab'][:2]}](../labs/{entry['lab']}.ipynb)"
        told = f"{claims()[entry['id']]['claim']} | {_verdict(entry)} | {entry['because']}"
        rows.append(f"| {entry['id']} | {told} | {link} |")
    return "\n".join(rows) + "\n"


def list_of_labs():
    """The list of labs in Markdown, and the ways through them, for the page on labs."""
    link = lambda lab, words: f"[{words}](../../../labs/{lab.name}.ipynb)"
    rows = ["| | lab | to work through |", "|---|---|---|"]
    for lab in labs().values():
        rows.append(f"| {lab.number} | {link(lab, lab.title)} | {lab.minutes}{' minutes' * lab.minutes.isdigit()} |")
    first = labs()["where_memory_goes"]
    rows += ["", f"Ways through them, each after {link(first, first.title)}:", ""]
    for words, path in paths().items():
        rows.append(f"* **{words}**: {' → '.join(link(lab, f'{lab.number} {lab.title}') for lab in path)}")
    return "\n".join(rows)


def page(ledger, failed):
    """The whole report as one HTML page with its pictures inside. failed: {lab: why it did not finish}."""
    judged = [(entry, claims()[entry["id"]]) for entry in sorted(ledger, key=lambda e: e["id"])]
    missing = sorted(claims().keys() - {entry["id"] for entry in ledger})
    notes = [f"{lab} did not finish: {why}" for lab, why in failed.items()]
    notes += [f"No verdict yet: {', '.join(missing)}"] if missing else []
    title = "Popular advice on TensorFlow memory, measured"
    return PAGE.render(
        title=title, notes=notes, judged=judged, signs=SIGNS, figures_text=figures_text, otherwise=otherwise
    )


def run_all(paths, scale):
    """Execute labs into build/report; returns (ledger, {lab: why it failed})."""
    folder = ROOT / "build" / "report"
    folder.mkdir(parents=True, exist_ok=True)
    ledger, failed = [], {}
    for number, lab in enumerate(paths, 1):
        print(f"{number} of {len(paths)}: {lab.stem}", flush=True)
        try:
            papermill.execute_notebook(
                lab,
                folder / lab.name,
                parameters={"SCALE": scale},
                cwd=ROOT / "labs",
                kernel_name="python3",
                execution_timeout=1800,
            )
        except Exception as error:  # the report goes on and tells what is missing
            failed[lab.stem] = str(error).strip().splitlines()[-1]
        ledger += verdicts(folder / lab.name)
    return ledger, failed


def _with(text, name, part):
    """A text with what stands between the marks of this name put in anew."""
    begin, end = f"<!-- {name}: made by tools/report.py -->", f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n{part}\n{end}{rest.split(end)[1]}"


def update_readme(ledger, only_check):
    """Write what is made from notebooks and zoo, and the README's picture; or, to check, exit with a message where it has drifted."""
    zoo, releases = zoo_table.read(), releases_table.with_committed(ledger)
    new = {path: path.read_text() for path in (README, PAGES / "labs.md", PAGES / "fits.md", GUIDE)}
    for path, name, part in (
        (README, "verdicts", surprises(ledger)),
        (PAGES / "labs.md", "labs", list_of_labs()),
        (PAGES / "fits.md", "zoo", zoo_table.summary(zoo)),
        (PAGES / "fits.md", "largest", zoo_table.largest()),
        (GUIDE, "rehearsal", rehearsal.table()),
    ):
        new[path] = _with(new[path], name, part)
    new |= {TABLE: table(ledger), ZOO: zoo_table.page(zoo), RELEASES: releases_table.page(releases)}
    drifted = [path.name for path, text in new.items() if not path.exists() or path.read_text() != text]
    if only_check:
        if drifted:
            sys.exit(f"{', '.join(drifted)}: drifted from the notebooks, or from data/recorded: run `make labs`")
        return
    for path, text in new.items():
        path.write_text(text)
    releases_table.draw(releases)
    picture = next(entry["picture"] for entry in ledger if entry["id"] == "C01")
    (ROOT / "labs" / "images" / "side_by_side.png").write_bytes(base64.b64decode(picture))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--readme",
        action="store_true",
        help="write what the README, the site's pages and data/ tell of the committed notebooks",
    )
    parser.add_argument("--check", action="store_true", help="fail if they have drifted; write nothing")
    parser.add_argument("--scale", default="quick", choices=("quick", "full"))
    options = parser.parse_args()
    notebooks, failed = sorted((ROOT / "labs").glob("[0-9]*.ipynb")), {}
    if options.readme or options.check:
        ledger = [entry for path in notebooks for entry in verdicts(path)]
        update_readme(ledger, options.check)
    else:
        ledger, failed = run_all(notebooks, options.scale)
        target = ROOT / "build" / "report.html"
        target.write_text(page(ledger, failed))
        print(f"{target.relative_to(ROOT)}: {len(ledger)} verdicts")
    wrong = [why for why in map(contradiction, ledger) if why] + [f"{lab}: {why}" for lab, why in failed.items()]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
