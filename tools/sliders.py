"""The sliders of a lab as HTML that works without a kernel: the lab's own function, run in the page by Brython (formulas.js)."""

import json

from markupsafe import Markup

from labsupport.lesson.formula import FORMULA_MIME
from labsupport.showing.cards import template

# Behind a formula, in the page's Python: what it prints is gathered and given back as text.
ANSWERING = """
from browser import window
said, kinds = [], {kinds}
def print(*words, end="\\n"):
    said.append(" ".join(str(word) for word in words) + end)
def answer(*values):
    said.clear()
    {function}(**{{name: kind(value) for (name, kind), value in zip(kinds.items(), values)}})
    return "".join(said)
setattr(window, "formula_{function}", answer)
"""
SLIDERS = template("""\
<div class="formula" role="group" aria-label="Move the sliders">
{% for control in controls %}
<div class="control"><label for="{{ id }}-{{ control.name }}">{{ control.words }}</label>
{% if control.choices %}<select id="{{ id }}-{{ control.name }}">{% for choice in control.choices %}
<option{% if choice == control.start %} selected{% endif %}>{{ choice }}</option>{% endfor %}</select>
{% else %}{% for kind in ("number", "range") %}
<input type="{{ kind }}" min="{{ control.least }}" max="{{ control.most }}" step="{{ control.step }}" value="{{ control.start }}" \
{% if kind == "number" %}id="{{ id }}-{{ control.name }}"{% else %}aria-label="{{ control.words }}, slider"{% endif %} autocomplete="off">
{% endfor %}{% endif %}</div>
{% endfor %}
<pre role="status">{{ answer }}</pre>
<p><small>Above: <span class="when">recorded when this lab was run</span>.\
{% if measured %} From the recorded run it has {{ measured }}.{% endif %} Its Python stands in the cell above.</small></p>
<script type="application/json">{{ data }}</script>
</div>""")


def sliders(data, id):
    """The controls of a saved display of explore() as HTML; data: by MIME type; id: begins the ids of its elements."""
    formula, controls = data[FORMULA_MIME], []
    kinds = {name: type(start).__name__ for name, start, _ in formula["controls"]}
    for name, start, allowed in formula["controls"]:
        control = {"name": name, "words": name.replace("_", " "), "start": start, "choices": None}
        if kinds[name] == "str":
            control["choices"] = allowed
        else:
            control |= dict(
                zip(
                    ("least", "most", "step"),
                    [*allowed, 1 if kinds[name] == "int" else (allowed[1] - allowed[0]) / 100],
                )
            )
        controls.append(control)
    measured = ", ".join(
        f"{name} = {value:.4g}" for name, value in formula["values"].items() if isinstance(value, float)
    )
    told = "{" + ", ".join(f"{name!r}: {kind}" for name, kind in kinds.items()) + "}"
    source = formula["source"] + ANSWERING.format(function=formula["function"], kinds=told)
    script = json.dumps({"source": source, "function": formula["function"]}).replace("<", "\\u003c")
    answer = data["text/plain"].rpartition("(run this cell")[0]
    return SLIDERS.render(controls=controls, id=id, answer=answer, measured=measured, data=Markup(script))
