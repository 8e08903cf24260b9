"""Reads the structure of a note: its title, its sections, and their lines of "Key: value", lists, tables and prose."""

import re
from dataclasses import dataclass, field

from sebp_edge.questions.subjects import Subject, Words, is_common, is_english, subject_of, title_from_name, words_of
from sebp_edge.questions.word_lists import listed
from sebp_edge.texts.edits import edit
from sebp_edge.texts.formats.markdown import Syntax, find_parts

# Fences are what is cut out.
_FENCED = Syntax(marks=re.compile("`{3}|~{3}"))
# Of a longer note, only the beginning is asked about.
MAX_CHARACTERS = 60_000
# A longer key is a sentence with a colon.
MAX_KEY_WORDS = 6

_HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$|^(={1,6})\s+(\S.*?)(?:\s+=+)?$|^(\*{1,6})\s+(\S.*)$")
_UNDERLINE = re.compile(r"^(?:={3,}|-{3,}|~{3,})\s*$")
_ITEM = re.compile(r"^\s*(?:[-*+•–]|\d{1,3}[.)]|[a-z]\))\s+(?:\[[ xX]\]\s+)?(.*)$")
_PAIR = re.compile(r"^([^\W\d_][^:：|?!;\n]{0,60}?)\s?(?:[:：](?:\s+|$)|：)(.*)$")
_ROW = re.compile(r"^\s*\|.*\|\s*$")
_RULE_ROW = re.compile(r"^[\s|:+-]+$")
_SIMPLE_MARKUP = re.compile(r"(\*\*\*|\*\*|__|~~|==|``?)(?=\S)([^\n]{1,300}?)(?<=\S)\1")
_ITALIC = re.compile(r"(?<![\w*])[*_](?=[^\s*_])([^*_\n]{1,200}?)(?<=\S)[*_](?![\w*])")
_IMAGE = re.compile(r"!\[[^\[\]\n]{0,200}\]\([^()\n]{0,300}\)|<!--.{0,2000}?-->|!\[\[[^\[\]\n]{0,200}\]\]", re.DOTALL)
_LINK = re.compile(r"\[\[(?:[^\[\]|\n]{0,200}\|)?([^\[\]\n]{1,200})\]\]|\[([^\[\]\n]{1,200})\]\([^()\n]{0,300}\)")
_FOOTNOTE = re.compile(r"\[\^\w+\]:?")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufeff\u200b-\u200f\u202a-\u202e\u2066-\u2069]")
_BOLD_HEADS = re.compile(r"\*\*([^*\n]{2,60})\*\*,? ")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"”’)]?\s+(?=[\"“‘(]?[A-Z0-9À-Þ])")
ABBREVIATION = re.compile(
    r"\b(?:Dr|Mr|Mrs|Ms|Prof|St|No|Nr|approx|ca|e\.g|i\.e|vs|etc|Jan|Feb|Mar|Apr|Aug|Sept?|Oct|Nov|Dec|[A-Z]|p|pp)\.$"
)


@dataclass(slots=True)
class Pair:
    """A line "Key: value"; `in_list` if it is an item of a list."""

    key: str
    value: str
    in_list: bool = False


@dataclass(slots=True)
class Section:
    """The part of a note under one heading; the first has none.

    Attributes:
        entries: texts of items with a bold beginning, each with what follows it.
        lists: lists of short items, each with the line that introduces it, or "".
        tables: rows of cells, the header first.
    """

    heading: str
    pairs: list[Pair] = field(default_factory=list)
    entries: list[tuple[str, str]] = field(default_factory=list)
    lists: list[tuple[str, list[str]]] = field(default_factory=list)
    tables: list[list[list[str]]] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Note:
    """A note's structure.

    Attributes:
        subject: what its title says that it is about.
        text: the note without code and markup.
    """

    subject: Subject
    sections: list[Section]
    words: Words
    text: str
    is_english: bool

    def is_on_title(self, sentence: str) -> bool:
        """Whether "it" after a sentence is what the title names: if that is a thing, or the sentence speaks of it."""
        phrase = (self.subject.phrase or "").lower()
        return bool(phrase) and (is_common(phrase.split()[-1]) or self.subject.bare.lower() in sentence.lower())


def read_note(text: str, name: str | None) -> Note:
    text = _CONTROL.sub("", text[:MAX_CHARACTERS].replace("\r\n", "\n").replace("\r", "\n"))
    text = _IMAGE.sub("", text)
    text, _ = edit(text, [(*span, "") for span, _ in find_parts(text, _FENCED).fenced], [])
    lines = [line.rstrip() for line in text.split("\n")]
    whole = plain("\n".join(lines))
    front, lines = _front_matter(lines)
    title = next((pair.value for pair in front if pair.key.lower() == "title" and pair.value), "")
    heading, lines = _first_heading(lines)
    title = title or plain(heading) or title_from_name(name)
    body = plain("\n".join(lines))
    english = is_english(f"{title}\n{body}")
    words = words_of(body)
    sections = _sections(lines)
    sections[0].pairs[:0] = [pair for pair in front if _is_asked(pair)]
    return Note(subject_of(title, words, is_english=english), sections, words, whole, english)


def plain(text: str) -> str:
    """Returns a text without the marks of Markdown."""
    text = _FOOTNOTE.sub("", _LINK.sub(lambda match: match[1] or match[2], text))
    for _ in range(2):
        text = _SIMPLE_MARKUP.sub(r"\2", text)
    return _ITALIC.sub(r"\1", text)


def _front_matter(lines: list[str]) -> tuple[list[Pair], list[str]]:
    while lines and not lines[0].strip():
        lines = lines[1:]
    if not lines or lines[0] != "---" or "---" not in lines[1:60]:
        return [], lines
    end = lines.index("---", 1)
    pairs = [_pair(line) for line in lines[1:end]]
    return [Pair(pair.key, pair.value.strip("\"'")) for pair in pairs if pair], lines[end + 1 :]


# Keys that are for tools, not for people.
_FOR_TOOLS = listed(
    """
    title tags tag id uuid aliases alias layout permalink slug cssclass cssclasses lang language publish draft
    template created modified updated categories category type kind weight filter
    """
)


def _is_asked(pair: Pair) -> bool:
    return pair.key.lower() not in _FOR_TOOLS and not pair.value.startswith(("[", "{"))


def _first_heading(lines: list[str]) -> tuple[str, list[str]]:
    """Returns the heading at the beginning of the lines, "" if there is none, and the lines without it."""
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        if heading := _heading_of(lines, index):
            return heading[0], lines[:index] + lines[index + heading[1] :]
        following = lines[index + 1].strip() if index + 1 < len(lines) else ""
        is_short = (
            len(line) <= 70 and len(line.split()) <= 9 and not re.search(r"[.!?;,:|]$|^\s*[-*+\d|>]|https?:", line)
        )
        if is_short and not following and index + 2 < len(lines) and (not _PAIR.match(line) or line.isupper()):
            return line.strip(), lines[:index] + lines[index + 1 :]
        return "", lines
    return "", lines


def _heading_of(lines: list[str], index: int) -> tuple[str, int] | None:
    """Returns the heading that begins on a line, and how many lines it takes."""
    line = lines[index]
    if match := _HEADING.match(line):
        org = match[6] if match[6] and not _is_item_run(lines, index) else None
        text = match[2] if match[1] else match[4] or org
        return (text, 1) if text else None
    if line.strip() and index + 1 < len(lines) and _UNDERLINE.match(lines[index + 1]) and not _ROW.match(line):
        return (line.strip(), 2) if len(line) <= 80 and not _ITEM.match(line) else None
    return None


def _is_item_run(lines: list[str], index: int) -> bool:
    """Whether a line that begins with one star is an item of a list rather than a heading of Org."""
    return lines[index].startswith("* ")


def _sections(lines: list[str]) -> list[Section]:
    sections, paragraph, index = [Section("")], [], 0
    while index < len(lines):
        line = lines[index]
        if heading := _heading_of(lines, index):
            _close(sections[-1], paragraph)
            sections.append(Section(plain(heading[0]).strip()))
            index += heading[1]
        elif _ROW.match(line):
            rows = []
            while index < len(lines) and _ROW.match(lines[index]):
                rows.append(lines[index])
                index += 1
            _close(sections[-1], paragraph)
            _add_table(sections[-1], rows)
        elif _ITEM.match(line):
            index = _read_list(sections[-1], lines, index, paragraph)
        else:
            line = line.lstrip("> \t")
            pair = _pair(line)
            if (not line.strip() or pair or _UNDERLINE.match(line)) and not _introduces(paragraph, lines, index):
                _close(sections[-1], paragraph)
            if pair and pair.value:
                value, index = _continued(pair.value, lines, index)
                _add_pair(sections[-1], Pair(pair.key, value))
            elif pair:
                paragraph.append(f"{pair.key}:")
            elif line.strip() and not _UNDERLINE.match(line):
                paragraph.append(line.strip())
            index += 1
    _close(sections[-1], paragraph)
    return sections


def _introduces(paragraph: list[str], lines: list[str], index: int) -> bool:
    """Whether a paragraph such as "Bring:" leads to a list after this empty line."""
    following = index + 1 < len(lines) and _ITEM.match(lines[index + 1])
    return bool(following and not lines[index].strip() and paragraph and paragraph[-1].endswith(":"))


def _continued(value: str, lines: list[str], index: int) -> tuple[str, int]:
    """Returns a value with the lines that it is wrapped over, and the number of its last line."""
    while len(lines[index]) >= 60 and index + 1 < len(lines) and re.match(r"\s*[a-z]", lines[index + 1]):
        index += 1
        value = f"{value} {lines[index].strip()}"
    return value, index


def _pair(line: str) -> Pair | None:
    clean = plain(line).strip()
    match = _PAIR.match(clean)
    if not match or len(match[1].split()) > MAX_KEY_WORDS or re.search(r"[,.\"“(]|https?$", match[1]):
        return None
    return Pair(match[1].strip(), match[2].strip())


def _add_pair(section: Section, pair: Pair) -> None:
    section.pairs.append(pair)
    if len(pair.value.split()) > 7:
        section.sentences += sentences_of(pair.value)


def _read_list(section: Section, lines: list[str], index: int, paragraph: list[str]) -> int:
    """Reads a list that begins on a line; returns the number of the line after it."""
    introduction = paragraph.pop() if paragraph and paragraph[-1].endswith(":") else ""
    _close(section, paragraph)
    items = []
    while index < len(lines):
        match, line = _ITEM.match(lines[index]), lines[index]
        if match:
            items.append(match[1])
        elif line.strip() and line[0] in " \t" and items:
            items[-1] += " " + line.strip()
        elif line.strip() or index + 1 >= len(lines) or not _ITEM.match(lines[index + 1]):
            break
        index += 1
    _add_items(section, plain(introduction).rstrip(":"), items)
    return index


def _add_items(section: Section, introduction: str, items: list[str]) -> None:
    short = []
    for item in items:
        heads = list(_BOLD_HEADS.finditer(item))
        pair = _pair(item)
        if pair and pair.value:
            pair.in_list = True
            _add_pair(section, pair)
        elif heads and heads[0].start() == 0:
            ends = [head.start() for head in heads[1:]] + [len(item)]
            for head, end in zip(heads, ends, strict=True):
                section.entries.append((head[1].strip(" ,:."), plain(item[head.end() : end]).strip()))
                section.sentences += sentences_of(item[head.start() : end].strip())
        else:
            text = plain(item).strip()
            if len(text.split()) <= 8:
                short.append(text.rstrip(".;,"))
            if len(text.split()) >= 3:
                section.sentences += sentences_of(text)
    if len(short) == len(items) and short:
        section.lists.append((introduction, short))


def _add_table(section: Section, rows: list[str]) -> None:
    cells = [[plain(cell).strip() for cell in row.strip().strip("|").split("|")] for row in rows]
    table = [row for row, source in zip(cells, rows, strict=True) if not _RULE_ROW.match(source)]
    if len(table) >= 2 and len(table) < len(rows):
        section.tables.append(table)


def _close(section: Section, paragraph: list[str]) -> None:
    """Adds the sentences of a paragraph, and empties it."""
    text = ""
    for line in paragraph:
        is_wrapped = text and (line[:1].islower() or (len(text) >= 60 and not re.search(r"[.!?:]$", text)))
        if text and not is_wrapped:
            section.sentences += sentences_of(text)
            text = ""
        text = f"{text} {line}".strip()
    if text:
        section.sentences += sentences_of(text)
    paragraph.clear()


def sentences_of(text: str) -> list[str]:
    """Splits plain prose into sentences; "Dr." ends none."""
    sentences, begin = [], ""
    for part in _SENTENCE_END.split(plain(text)):
        whole = f"{begin} {part}".strip()
        if ABBREVIATION.search(whole) and len(whole) < 400:
            begin = whole
            continue
        sentences.append(whole)
        begin = ""
    return sentences + ([begin] if begin else [])
