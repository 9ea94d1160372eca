"""HTML in a notebook: boxes of text, the error of an arm, widgets. Labels and messages are strangers' text, so templates escape.

Whatever a template is given is made plain (see plain.py) and escaped, but for Markup: what another template rendered.
"""

from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from labsupport.showing.plain import plain


def _finalize(value):
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


_TEMPLATES = Environment(
    autoescape=True, finalize=_finalize, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
# {{ page_style }} in the head of any page.
_TEMPLATES.globals["page_style"] = Markup(Path(__file__).with_name("page.css").read_text(encoding="utf-8"))


def template(text):
    """A jinja2 template, of which `.render(name=value)` escapes all values."""
    return _TEMPLATES.from_string(text)


def as_html(text):
    """Text on its own as HTML, for a widget that takes nothing else."""
    return _TEXT.render(text=text)


_TEXT = template("{{ text }}")
_CARD = template(
    """\
<div role="status" style="border-left:6px solid {{ colour }};padding:4px 10px"><b>{{ title }}</b>
{%- for line in lines %}<br>{{ line }}{% endfor %}
{%- for title, text in folds %}<details><summary>{{ title }}</summary>{{ text }}</details>{% endfor %}
</div>"""
)
_ERROR = template(
    """\
<div><b>{{ error.message }}</b>
{%- for line in error.frames %}<br><code>{{ line.place }}, line {{ line.number }}: {{ line.source }}</code>{% endfor %}
{% for title, text in folds if text %}<details><summary>{{ title }}</summary>
<pre tabindex="0" role="region" aria-label="{{ title }}" style="max-height:24em;overflow:auto">{{ text }}</pre></details>{% endfor %}
</div>"""
)


def show_card(title, lines, colour, more=None, folds=()):
    """Display a card, the same as plain text beside it. more: further MIME types and their data; folds: (title, text) to open."""
    from IPython.display import display

    html = _CARD.render(title=title, lines=lines, colour=colour, folds=folds)
    text = "\n".join([title, *lines, *(f"{name}: {words}" for name, words in folds)])
    display({"text/plain": plain(text), "text/html": html, **(more or {})}, raw=True)


def show_error(error):
    """Display why an arm did not return (an ArmError): message, own lines, and folded the whole traceback and the log."""
    from IPython.display import display

    log = "Log of the process" + ", with the allocator's dump" * (
        "BFC" in error.log
    )  # it begins with "BFCAllocator dump"
    folds = [("Whole traceback", error.traceback), (log, error.log)]
    display({"text/plain": plain(str(error)), "text/html": _ERROR.render(error=error, folds=folds)}, raw=True)


def show_widget(widget, text, more=None):
    """Display a widget; a page without it shows the text in its place. more: data by MIME type. Returns the display's handle."""
    from IPython.display import display

    return display({**widget._repr_mimebundle_(), **(more or {}), "text/plain": plain(text)}, raw=True, display_id=True)
