"""What Sphinx reads: how the pages that tools/book.py has written become a site that asks no other host for anything."""

project = "Keep TensorFlow training inside its memory"
author = copyright = "the authors of this course"
extensions = ["myst_nb"]
nb_code_prompt_show = "Show the solution"
nb_code_prompt_hide = "Hide the solution"
nb_execution_mode = "off"  # every output is the committed one
# An output that only labsupport reads (a verdict's or an exercise's facts) has HTML and text beside it.
suppress_warnings = ["mystnb.unknown_mime_type", "misc.highlighting_failure"]
myst_heading_anchors = 3
html_theme = "sphinx_book_theme"
html_title = project
html_context = {"default_mode": "auto"}
html_favicon = "_static/chip.svg"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_js_files = [("symptoms.js", {"defer": "defer"}), ("formulas.js", {"defer": "defer"})]
html_theme_options = {
    "home_page_in_toc": True,
    "navbar_persistent": [],  # the search stands in the sidebar
    "show_navbar_depth": 1,
    "use_fullscreen_button": False,
    "use_download_button": False,
    "show_toc_level": 2,
}
html_show_sourcelink = False
