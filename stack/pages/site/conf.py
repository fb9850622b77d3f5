# SPDX-License-Identifier: Apache-2.0
"""Sphinx's settings of the site."""

project = html_title = "DeepSeek-V4 on Intel XPU"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["datatables.css", "site.css"]
html_js_files = ["datatables.js", "chooser.js", "tables.js"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
# Code blocks may quote fragments that a lexer cannot parse.
suppress_warnings = ["misc.highlighting_failure", "toc.not_included"]
