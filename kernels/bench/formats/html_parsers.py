"""Compares the text of web pages by the parser in use with their text by Lexbor, and what hostile pages cost.

    pip install selectolax==1.0.2
    python kernels/bench/formats/html_parsers.py FOLDER [--damaged 1]

FOLDER has pages of any generators, in a folder each. `--damaged` also compares so many damaged copies of each page.
"""

import argparse
import multiprocessing
import random
import resource
import time
from collections import Counter
from pathlib import Path

from sebp_edge.reading.formats import html
from sebp_edge.reading.formats.encodings import decode_html
from sebp_edge.values.documents import Unreadable

# Of a hostile page, in CPU seconds and bytes.
LIMIT, MEMORY = 60, 6_000_000_000
HOSTILE = {
    "50 MB of paragraphs": "<p>Some <b>text</b> of a page, and a <a href=x>link</a>.</p>\n" * 820_000,
    "50 MB of text": "<p>" + "word " * 10_000_000,
    "an attribute of 50 MB": f"<p title='{'word ' * 10_000_000}'>x",
    "a comment of 50 MB without end": "<p>x<!--" + "word " * 10_000_000,
    "a script of 50 MB without end": "<p>x<script>" + "a<b;" * 1_200_000,
    "4 million tags": "<i>x</i>" * 2_000_000,
    "100,000 options": "<p>x<select>" + "<option>y" * 100_000,
    "10 MB of null characters": "<p>x" + "\0" * 10_000_000,
    **{f"50,000 open {piece}": piece * 50_000 + "x" for piece in ("<div>", "<ul><li>", "<svg>")},
}


def with_lexbor(page: str, handler: html._Page) -> None:
    """Walks the tree of Lexbor as the parser in use reports its events."""
    from selectolax.lexbor import LexborDocumentOptions, LexborHTMLParser  # which is not installed with the tests

    node, tags = LexborHTMLParser(page, options=LexborDocumentOptions.WO_EVENTS).root, []
    while True:
        if node.is_text_node:
            handler.characters(node.text_content)
        elif node.is_element_node:
            handler.start_element(node.tag, node.attributes)
            if not handler._hidden and (child := node.child):
                tags.append(node.tag)
                node = child
                continue
            handler.end_element(node.tag)
        while not (sibling := node.next):
            if not tags:
                return
            node = node.parent
            handler.end_element(tags.pop())
        node = sibling


PARSERS = {"in use": html.sax_parse, "lexbor": with_lexbor}


def text_of(page: str, parser: str) -> tuple[str, float]:
    """Returns the text of a page, and the CPU seconds that it took."""
    html.sax_parse = PARSERS[parser]
    begin = time.process_time()
    return html.html_text(page), time.process_time() - begin


def damaged(page: str, numbers: random.Random) -> str:
    """Returns a page with pieces missing, repeated, or of another place."""
    for _ in range(20):
        begin, end, to = (numbers.randrange(len(page) + 1) for _ in range(3))
        page = page[:begin] + page[to : to + 40] + page[begin + numbers.choice((0, 1, (end - begin) % 60)) :]
    return page


def read_hostile(name: str, parser: str, results: multiprocessing.Queue) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text, seconds = text_of(HOSTILE[name], parser)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    results.put(f"{seconds:.2f} s, {peak / 1000:.0f} MB, {len(text)} characters, {hash(text) % 10_000}")


def main() -> None:
    """Prints what differs, the seconds per MB, and what hostile pages cost."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("--damaged", type=int, default=0, help="how many damaged copies of each page")
    args = options.parse_args()
    total, seconds = Counter(), Counter()
    for path in sorted(args.folder.rglob("*.htm*")):
        try:
            page = decode_html(path)
        except Unreadable:
            continue
        numbers = random.Random(path.name)
        for copy in [page, *(damaged(page, numbers) for _ in range(args.damaged))]:
            texts = {name: text_of(copy, name) for name in PARSERS}
            seconds.update({name: taken for name, (_, taken) in texts.items()})
            kind = "pages" if copy is page else "damaged"
            total += Counter({kind: 1, "characters": len(copy), "words": len(texts["in use"][0].split())})
            if len({text for text, _ in texts.values()}) > 1:
                total[f"{kind} that differ"] += 1
                print(f"{path}: {' / '.join(str(len(text.split())) for text, _ in texts.values())} words, {kind}")
    print(dict(total), *(f"{name}: {taken / total['characters'] * 1e6:.3f} s/MB" for name, taken in seconds.items()))
    for name in HOSTILE:
        for parser in PARSERS:
            results = multiprocessing.Queue()
            process = multiprocessing.Process(target=read_hostile, args=(name, parser, results))
            process.start()
            process.join()
            end = f"ended by {process.exitcode}" if process.exitcode else results.get()
            print(f"{name}, {parser}: {end}", flush=True)


if __name__ == "__main__":
    main()
