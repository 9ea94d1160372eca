"""Text of strangers (labels, names, messages) on its way to HTML, a picture or a terminal: nothing in it acts or breaks."""

import codecs
import re
import sys

# Control characters but newline and tab; lone surrogates, which no encoding takes; and the marks that turn the direction
# of the text around them (property Bidi_Control of Unicode's annex 9, which can make a line read as another one).
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# Our own signs in readable ASCII; any other character is written by its number.
_ASCII = dict(zip("…·–─│└×÷±≠→", ["...", "-", "-", "-", "|", "+", "x", "/", "+-", "!=", "->"]))
_ASCII |= {"✔": "[yes]", "✘": "[no]", "◐": "[partly]", "✎": "[to do]"}


def plain(text):
    """The text with every character that could act written as its number: "\\u202e" for a right-to-left override."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def for_matplotlib(text):
    """The text as a label of a picture: plain, and without mathtext, which a lone or unknown "$\\bad$" would break."""
    return plain(text).replace("$", r"\$")


def _readable(error):
    """An error handler of encodings: one of our own signs as ASCII, any other character as its number."""
    character = error.object[error.start]
    return _ASCII.get(character, character.encode("ascii", "backslashreplace").decode()), error.start + 1


codecs.register_error("labsupport.readable", _readable)


def say(text, end="\n", file=None):
    """print() that never raises UnicodeEncodeError: what the stream's encoding lacks (LANG=C) is written in readable ASCII.

    file: sys.stdout if None. Control characters pass, since a script's own progress bars are made of them.
    """
    stream = file or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(text.encode(encoding, "labsupport.readable").decode(encoding), end=end, file=stream, flush=True)
