"""Reads Rich Text files (.rtf): what a person sees on the page, without hidden text and tracked deletions."""

import codecs
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from sebp_edge.reading.formats.layout import Block, joined
from sebp_edge.reading.formats.signs import has_signs, in_unicode
from sebp_edge.reading.formats.xml_parts import Deadline
from sebp_edge.values.documents import NotRead, Unreadable

# Groups within each other. Their number is a limit of memory.
MAX_DEPTH = 1000
_TOKEN = re.compile(
    rb"\\([a-zA-Z]{1,32})(-?\d{1,9})? ?|\\'([0-9a-fA-F]{2})|\\(.)|([{}])|[\r\n\0]+|([^\\{}\r\n\0]+)", re.S
)
# Groups without text of the page, and properties of formulas; all others that programs may ignore are marked.
_LEFT_OUT = {
    *("fonttbl", "colortbl", "stylesheet", "info", "header", "headerl", "headerr", "headerf", "footer", "footerl"),
    *("footerr", "footerf", "fldinst", "ftnsep", "ftnsepc", "aftnsep", "aftnsepc", "annotation", "atnid", "atnauthor"),
    *("nonshppict", "pict", "sp", "xe", "tc", "rxe", "txe", "objdata", "upr", "nonesttables", "revtbl", "filetbl"),
    *("shprslt", "mmathPict"),
}
_COUNTED = {"pict": "pictures", "object": "inserted files", "annotation": "comments"}
_PROPERTIES = re.compile(r"m\w+Pr")
# What a mark does not hide: groups with text, and formatting, which is no group.
_NOT_IGNORED = re.compile(
    r"shpinst|annotation|do|ud|moMath(?:Para)?|footnote|listtext|pntext|field|fldrslt|[cdt]?s|s?caps|a?(?:f|fs|b|i|cf|up|dn"
    r"|lang\w*|ul\w*|strike\w*|caps|expnd\w*)|c[bf]|chcbpat|highlight|fcs|\w+rsid|super|sub|nosupersub|u"
    r"|kerning|charscalex|outl|shad|embo|impr|v|uc|plain|pard|par|tab|line|noproof|cgrid|q[cjlr]|[lrf]in?|s[abl]|intbl|keepn?"
    r"|(?:no)?widctlpar|itap|ilvl|ls|revised|ltr\w+|rtl\w+|loch|hich|dbch|[lr]dblquote|[lr]quote|e[mn]dash|bullet"
)
# Groups that stand within one that is left out, and are read instead of it.
_INSTEAD = {"ud": "upr", "mchr": "mnaryPr"}
# What the parts of a formula are written as.
_FORMULAS = {"mden": "/{}", "msup": "^{}", "msub": "_{}", "md": "({})"}
_ASIDE = {"footnote", "listtext", "pntext", *_FORMULAS}
_CHARACTERS = {
    **{"tab": "\t", "line": "\n", "lbr": "\n", "softline": "\n", "emspace": " ", "enspace": " ", "qmspace": " "},
    **{"emdash": "—", "endash": "–", "lquote": "‘", "rquote": "’", "ldblquote": "“", "rdblquote": "”", "bullet": "•"},
}
_SIGNS = {b"~": " ", b"_": "-", b"{": "{", b"}": "}", b"\\": "\\"}
_ENDS = {"par", "sect", "page", "column"}
_CODE_PAGES = {"ansi": "cp1252", "mac": "mac_roman", "pc": "cp437", "pca": "cp850"}
# Of fonts: Windows' numbers of alphabets.
_ALPHABETS = {
    **{77: "mac_roman", 128: "cp932", 129: "cp949", 130: "johab", 134: "gb18030", 136: "big5", 161: "cp1253"},
    **{162: "cp1254", 163: "cp1258", 177: "cp1255", 178: "cp1256", 186: "cp1257", 204: "cp1251", 222: "cp874"},
    **{238: "cp1250", 254: "cp437", 255: "cp850"},
}


def read_rtf(path: Path) -> Iterator[str | NotRead]:
    """Yields the text of a Rich Text file, and what of it was not read."""
    data = path.read_bytes()
    if not data.lstrip().startswith(b"{\\rtf"):
        raise Unreadable("damaged, or not a Rich Text file")
    text = _Text(data)
    yield joined(text.blocks)
    yield from (NotRead(f"{kind}: {count:,}") for kind, count in sorted(text.left_out.items()))
    yield from text.after


@dataclass(slots=True)
class _Group:
    """What holds until a group ends.

    Attributes:
        kind: what the group is, such as "footnote", of those that matter.
        is_seen: whether its text is read at all.
        is_in_table: whether its paragraphs are parts of cells.
        num_fallbacks: how many characters stand for one in Unicode, for older programs.
    """

    kind: str = ""
    is_seen: bool = True
    is_hidden: bool = False
    is_in_table: bool = False
    num_fallbacks: int = 1
    font: int = -1


class _Text:
    """Reads the text of a file into blocks.

    Attributes:
        left_out: how many things of a kind are not read.
        after: says that the end of the file is missing, or that more follows.
    """

    def __init__(self, data: bytes):
        self.blocks: list[Block] = []
        self.left_out: Counter[str] = Counter()
        self.after: list[NotRead] = []
        self._group, self._outer = _Group(), []
        # The encodings of fonts, and under None that of the file; and the font that was named last.
        self._encodings, self._font = {None: "cp1252"}, -1
        self._names: defaultdict[int, str] = defaultdict(str)
        self._pieces: list[str] = []
        # What stands before an item of a list, the cells of a table's row, and the notes with what is around them.
        self._label, self._cells, self._notes, self._around = "", [], [], []
        # Bytes that are not decoded yet, and how many fallbacks are still to be skipped.
        self._bytes, self._skipped = bytearray(), 0
        self._read(data)
        self._end_row() if self._cells else self._end_paragraph()
        notes = (f"[^{place}]: {note}" for place, note in enumerate(self._notes, start=1))
        self.blocks += [(note, True) for note in notes]
        if self._outer:
            self.after.append(NotRead("the end, since the file is cut off"))

    def _read(self, data: bytes) -> None:
        """Reads until the file's only group ends."""
        at, deadline = data.index(b"{"), Deadline()
        is_first = may_be_ignored = False
        for count in range(len(data)):
            token = _TOKEN.match(data, at)
            if token is None:
                return
            at = token.end()
            if count % 10_000 == 0:
                deadline.check()
            if token.lastindex is None:
                continue  # A line break means nothing.
            word, argument, code, sign, brace, run = token.groups()
            if word:
                name, value = word.decode(), None if argument is None else int(argument)
                if name == "bin":
                    at += max(0, value or 0)
                elif not self._is_fallback():
                    self._word(name, value, may_be_ignored)
            elif brace == b"{":
                if len(self._outer) == MAX_DEPTH:
                    raise Unreadable(f"its groups are nested more than {MAX_DEPTH:,} deep; save it as .docx to use it")
                self._outer.append(self._group)
                self._group = replace(self._group, kind="fonttbl" if self._group.kind == "fonttbl" else "")
            elif brace:
                self._end_group()
                if not self._outer:
                    if data[at:].strip(b"\0 \r\n\t}"):
                        self.after.append(NotRead("all after the end of the first text in the file"))
                    return
            elif sign == b"*":
                may_be_ignored = is_first
                continue
            elif code or run:
                self._add_bytes(bytes.fromhex(code.decode()) if code else run)
            elif sign in (b"\n", b"\r"):
                self._end_paragraph()
            elif sign and not self._is_fallback():
                self._add(_SIGNS.get(sign, ""))
            is_first, may_be_ignored = brace == b"{", False

    def _is_fallback(self) -> bool:
        self._skipped -= 1
        return self._skipped >= 0

    def _word(self, name: str, value: int | None, may_be_ignored: bool) -> None:
        group = self._group
        self._skipped = 0
        if name in _COUNTED and group.is_seen:
            self.left_out[_COUNTED[name]] += 1
        is_hidden = may_be_ignored and not _NOT_IGNORED.fullmatch(name)
        if is_hidden or name in _LEFT_OUT or _PROPERTIES.fullmatch(name):
            if name == "fonttbl" or (group.is_seen and name in _INSTEAD.values()):
                group.kind = name
            elif group.kind == "fonttbl":
                group.kind = ""  # What is about a font, but its name.
            group.is_seen = False
        elif self._outer and self._outer[-1].kind == _INSTEAD.get(name):
            group.is_seen, self._outer[-1].kind = True, ""
        elif name == "u":
            self._add(chr((value or 0) & 0xFFFF), self._names[group.font])
            self._skipped = group.num_fallbacks
        elif name in _CHARACTERS:
            self._add(_CHARACTERS[name])
        elif name in _ENDS:
            self._end_paragraph()
        elif name in ("intbl", "pard"):
            group.is_in_table = name == "intbl"
        elif name == "nestcell":
            self._add(" | ")
        elif name == "cell":
            self._end_cell()
        elif name == "row":
            self._end_row()
        elif name in _ASIDE and group.is_seen:
            self._decode()
            group.kind = name
            self._around.append(self._pieces)
            self._pieces = []
        elif name in ("v", "deleted"):
            self._decode()
            group.is_hidden = value != 0
            if group.is_hidden and group.is_seen:
                self.left_out["hidden and deleted texts"] += 1
        elif name == "plain":
            self._decode()
            group.is_hidden = False
        elif name == "uc":
            group.num_fallbacks = min(value or 0, 100)
        elif name == "f":
            self._decode()
            group.font = self._font = -1 if value is None else value
        elif name == "fcharset":
            self._encodings[self._font] = _ALPHABETS.get(value, "")
        elif name in _CODE_PAGES or name == "ansicpg":
            self._encodings[None] = _CODE_PAGES.get(name) or _code_page(value or 0)

    def _end_group(self) -> None:
        self._decode()
        kind, self._group = self._group.kind, self._outer.pop()
        self._skipped = 0
        if kind == "mnaryPr":
            self._add("∫")
        elif kind in _ASIDE:
            text, self._pieces = "".join(self._pieces).strip(), self._around.pop()
            if kind == "footnote":
                self._notes.append(" ".join(text.split()))
                self._add(f"[^{len(self._notes)}]")
            elif kind in _FORMULAS:
                self._add(_FORMULAS[kind].format(text) if text else "")
            elif self._group.is_seen:
                self._label = text if any(sign.isalnum() for sign in text) else "-"

    def _add_bytes(self, data: bytes) -> None:
        skipped = min(max(0, self._skipped), len(data))
        self._skipped -= skipped
        if self._group.kind == "fonttbl":
            self._names[self._font] += data.decode("latin-1")
        if self._group.is_seen and not self._group.is_hidden:
            self._bytes += data[skipped:]

    def _decode(self) -> None:
        """Decodes the bytes so far, of which several may be one character."""
        if self._bytes:
            font = self._names[self._group.font]
            encoding = self._encodings.get(self._group.font) or self._encodings[None]
            text = self._bytes.decode("latin-1" if has_signs(font) else encoding, errors="replace")
            self._pieces.append(in_unicode(text, font, self.left_out))
            self._bytes.clear()

    def _add(self, text: str, font: str = "") -> None:
        self._decode()
        if self._group.is_seen and not self._group.is_hidden:
            self._pieces.append(in_unicode(text, font, self.left_out))

    def _paragraph(self) -> str:
        self._decode()
        text = "".join(self._pieces).encode("utf-16-le", "surrogatepass").decode("utf-16-le", errors="replace")
        self._pieces = []
        return text.strip("\n").rstrip()

    def _end_paragraph(self) -> None:
        if not self._group.is_seen:
            return
        if self._group.is_in_table or self._cells or self._around:
            self._add("\n")
            return
        text, label = self._paragraph(), self._label
        self._label = ""
        if text.strip():
            self.blocks.append((f"{label} {text.lstrip()}" if label else text, bool(label)))

    def _end_cell(self) -> None:
        if self._group.is_seen:
            self._cells.append(" ".join(self._paragraph().split()))

    def _end_row(self) -> None:
        if self._group.is_seen:
            self._end_cell()
            if line := " | ".join(self._cells).strip(" |"):
                self.blocks.append((line, True))
            self._cells = []


def _code_page(number: int) -> str:
    name = "utf-8" if number == 65001 else "mac_roman" if number == 10000 else f"cp{number}"
    try:
        codecs.lookup(name)
    except LookupError:
        return "cp1252"
    return name
