"""Reads the styles and lists of a Word file: which paragraphs are headings, hidden, or items of lists."""

from dataclasses import dataclass, field

from sebp_edge.reading.formats.xml_parts import Attributes, Handler, attribute, is_on, number

# Of letters of ASCII, and of others.
Fonts = tuple[str, str]
# Word follows fewer styles that are based on each other.
_MAX_BASES = 20


@dataclass(slots=True)
class Style:
    """A style as far as text depends on it; None if the style that it is based on decides.

    Attributes:
        level: that of a heading, 1 to 9; 0 for none.
        is_hidden: whether its text is hidden.
        list_id: the list that its paragraphs are items of; 0 for none.
        list_level: the level of these items, from 0.
    """

    level: int | None = None
    is_hidden: bool | None = None
    list_id: int | None = None
    list_level: int | None = None
    fonts: Fonts | None = None


def fonts_of(attributes: Attributes) -> Fonts | None:
    """Returns the fonts that an element names; None if others decide."""
    return fonts if any(fonts := (attribute(attributes, "ascii"), attribute(attributes, "hAnsi"))) else None


class Styles(Handler):
    """Handles the part with the styles."""

    def __init__(self):
        self._styles: dict[str, Style] = {}
        self._bases: dict[str, str] = {}
        self._resolved: dict[str, Style] = {}
        self._id, self._conditional = "", 0

    def start(self, name: str, attributes: Attributes) -> None:
        self._conditional += name == "tblStylePr"
        if name == "style":
            self._id = attribute(attributes, "styleId")
            self._styles[self._id] = Style()
        elif self._conditional or not self._id:
            return
        elif name == "basedOn":
            self._bases[self._id] = attribute(attributes)
        elif name == "name":
            kind, _, level = attribute(attributes).lower().rpartition(" ")
            if kind == "heading" and level in tuple("123456789"):
                self._styles[self._id].level = int(level)
        elif name == "vanish":
            self._styles[self._id].is_hidden = is_on(attributes)
        elif name == "rFonts":
            self._styles[self._id].fonts = fonts_of(attributes)
        elif name == "numId":
            self._styles[self._id].list_id = number(attributes)
        elif name == "ilvl":
            self._styles[self._id].list_level = number(attributes)

    def end(self, name: str) -> None:
        self._conditional -= name == "tblStylePr"
        if name == "style":
            self._id = ""

    def get(self, id: str) -> Style:
        """Returns a style with what it takes from those that it is based on."""
        if id not in self._resolved:
            found, base = Style(), id
            for _ in range(_MAX_BASES):
                style = self._styles.get(base)
                if style is None:
                    break
                for name in Style.__slots__:
                    if getattr(found, name) is None:
                        setattr(found, name, getattr(style, name))
                base = self._bases.get(base, "")
            self._resolved[id] = found
        return self._resolved[id]


# ---------------------------------------------------------------------------------------------- lists

# The levels of a list; and the length of what stands before an item, in characters.
_LEVELS, _MAX_LABEL = 9, 30
_ROMAN = ((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl"), (10, "x"),
          (9, "ix"), (5, "v"), (4, "iv"), (1, "i"))  # fmt: skip


@dataclass(slots=True)
class _Level:
    """One level of a list: its first number, how numbers are written, and what stands before an item ("%1.").

    Attributes:
        is_legal: whether the numbers of all levels are written as decimals.
    """

    start: int = 1
    format: str = "decimal"
    label: str = "%1."
    is_legal: bool = False


@dataclass(slots=True)
class _Kind:
    """A kind of lists, which share their numbers: its levels, those of styles, and the last number of each."""

    levels: dict[int, _Level] = field(default_factory=dict)
    level_of_style: dict[str, int] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)


class Lists(Handler):
    """Handles the part with the lists, and numbers their items."""

    def __init__(self):
        self._kinds: dict[str, _Kind] = {}
        self._kind_of: dict[int, str] = {}
        # Of single lists, by level: what stands for the levels of their kind, and the numbers that they start with.
        self._own: dict[int, dict[int, _Level]] = {}
        self._restarts: dict[int, dict[int, int]] = {}
        # Where the parser is.
        self._kind, self._list, self._place = _Kind(), 0, 0
        self._level: _Level | None = None

    def start(self, name: str, attributes: Attributes) -> None:
        if name == "abstractNum":
            self._kind = self._kinds[attribute(attributes, "abstractNumId")] = _Kind()
        elif name == "num":
            self._list = number(attributes, "numId")
        elif name == "abstractNumId":
            self._kind_of[self._list] = attribute(attributes)
        elif name in ("lvl", "lvlOverride"):
            self._place = min(number(attributes, "ilvl"), _LEVELS - 1)
            if name == "lvl":
                levels = self._own.setdefault(self._list, {}) if self._list else self._kind.levels
                self._level = levels[self._place] = _Level()
        elif name == "startOverride":
            self._restarts.setdefault(self._list, {})[self._place] = number(attributes, default=1)
        elif self._level is None:
            return
        elif name == "start":
            self._level.start = number(attributes, default=1)
        elif name == "numFmt":
            self._level.format = attribute(attributes)
        elif name == "lvlText":
            self._level.label = attribute(attributes)[:_MAX_LABEL]
        elif name == "isLgl":
            self._level.is_legal = is_on(attributes)
        elif name == "pStyle" and not self._list:
            self._kind.level_of_style[attribute(attributes)] = self._place

    def end(self, name: str) -> None:
        if name == "lvl":
            self._level = None
        elif name == "num":
            self._list = 0

    def label(self, list_id: int, level: int | None, style: str) -> tuple[str, int] | None:
        """Counts an item of a list.

        Args:
            level: its level, from 0; None if its style decides.

        Returns:
            What stands before it, such as "2.1", "b)" or "-", and its level. None if there is no such list.
        """
        kind = self._kinds.get(self._kind_of.get(list_id, ""))
        if kind is None:
            return None
        place = min(kind.level_of_style.get(style, 0) if level is None else level, _LEVELS - 1)
        for restarted, first in self._restarts.pop(list_id, {}).items():
            kind.numbers[restarted] = first - 1
        levels = kind.levels | self._own.get(list_id, {})
        own = levels.get(place, _Level())
        kind.numbers[place] = kind.numbers.get(place, own.start - 1) + 1
        for deeper in range(place + 1, _LEVELS):
            kind.numbers.pop(deeper, None)
        if own.format in ("bullet", "none"):
            return "-" if own.format == "bullet" else "", place
        label = own.label
        for outer in range(place + 1):
            if (mark := f"%{outer + 1}") in label:
                each = levels.get(outer, own)
                is_decimal = own.is_legal and not each.format.startswith("decimal")
                value = kind.numbers.get(outer, each.start)
                label = label.replace(mark, _written(value, "decimal" if is_decimal else each.format))
        return label, place


def _written(value: int, format: str) -> str:
    """Returns a number as a list shows it; those of rare kinds as decimals."""
    written = str(value)
    if format.endswith("Letter") and 0 < value <= 3 * 26:
        written = chr(ord("a") + (value - 1) % 26) * ((value - 1) // 26 + 1)
    elif format.endswith("Roman") and 0 < value < 4000:
        written = ""
        for size, digits in _ROMAN:
            written += digits * (value // size)
            value %= size
    elif format == "decimalZero":
        written = written.zfill(2)
    return written.upper() if format.startswith("upper") else written
