"""HTML pages: one file each that loads nothing, in light and dark, for any width, on screen and on paper.

`render` fills a template of a package in; `chart` lays out figures; `page.html` has the head and the styles that all
pages share, `macros.html` the tables that scroll and the frame of a figure.

Internal: import from `sebp_edge` or `sebp_edge.research`.
"""
