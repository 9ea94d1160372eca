"""Boxes of text in a notebook: a title, lines, and a coloured edge. Autoescaping, since labels and messages are strangers' text."""

from jinja2 import Environment

_TEMPLATES = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
_CARD = _TEMPLATES.from_string(
    '<div style="border-left:6px solid {{ colour }};padding:4px 10px"><b>{{ title }}</b>'
    "{% for line in lines %}<br>{{ line }}{% endfor %}</div>"
)


def template(text):
    """A jinja2 template that escapes whatever is put into it."""
    return _TEMPLATES.from_string(text)


def show_card(title, lines, colour, more=None):
    """Display a card, the same as plain text beside it. more: further MIME types and their data."""
    from IPython.display import display

    bundle = {"text/plain": "\n".join([title, *lines]), "text/html": _CARD.render(title=title, lines=lines, colour=colour)}
    display({**bundle, **(more or {})}, raw=True)


def show_widget(widget, text):
    """Display a widget; a saved notebook that has not been run yet shows the text in its place."""
    from IPython.display import display

    display({**widget._repr_mimebundle_(), "text/plain": text}, raw=True)
