"""A window that learns its owner's notes: an example of an app that speaks the protocol of `sebp-edge serve`.

__main__         starts it
app              the window: sidebar, pages, what it says when the server has gone
backend          the protocol, in a thread of its own
pages            one file for each entry of the sidebar
ghost_text       an editor with grey words after the cursor
widgets, theme   what pages are made of, and how it looks
words            sizes, times and errors in plain words
"""
