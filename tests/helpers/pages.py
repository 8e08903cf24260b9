"""Reads HTML pages as a person or a program would."""

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """The words of a page, its tags with their attributes, and what it would load."""

    def __init__(self, html):
        super().__init__()
        self.words, self.tags, self.open = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))
