"""Decodes the bytes of a text file: UTF-8 and UTF-16 by their rules, others by detection."""

import codecs
import re
import unicodedata
from contextlib import suppress
from pathlib import Path

import charset_normalizer

from sebp_edge.values.documents import Unreadable

# The encodings of texts before Unicode; of two that fit equally well, the earlier one is taken.
LEGACY = (
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1254", "cp1255", "cp1256", "cp932", "euc_jp", "gb18030"),
    *("big5", "cp949", "mac_roman"),
)
# Number of bytes of lines beyond ASCII that are enough to detect an encoding.
SAMPLE = 200_000

# Control characters that no text has; DOS ended texts with the one left out.
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x19\x1c-\x1f]")
_NAMED_ENCODING = re.compile(
    rb"<(?:meta[^>]{0,200}?charset|\?xml[^>]{0,100}?encoding)\s{0,9}=\s{0,9}[\"']?([\w-]{1,40})", re.IGNORECASE
)
# What browsers take instead of the encodings that pages name.
_IN_BROWSERS = {
    **{"ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874"},
    **{"gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs"},
}
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Of so many bytes or characters of a page, one may be damaged.
_RARE = 1000
# Unicode's categories of control characters, of private characters and of those that are not assigned.
_IN_NO_TEXT = frozenset({"Cc", "Co", "Cn"})


def decode(path: Path) -> str:
    """Returns the text of a file, which is in UTF-8, in UTF-16, or in a detected encoding."""
    return decode_bytes(path.read_bytes())


def utf8_of(path: Path) -> bytes:
    """Returns the text of a file in UTF-8, without decoding one that is; see `decode`."""
    data = path.read_bytes()
    if b"\0" in data or not _is_utf8(data):
        return decode_bytes(data).encode(errors="replace")
    return data.removeprefix(codecs.BOM_UTF8)


def decode_html(path: Path) -> str:
    """Returns the text of a web page, in UTF-8 or the encoding that it names; if it is in neither, as `decode` does.

    Null characters and single damaged characters are no errors, as in browsers.
    """
    data = path.read_bytes()
    if data.startswith(_MARKS):
        return decode_bytes(data)
    if data.count(b"\0") * _RARE < len(data):
        data = data.replace(b"\0", b"")
    # Pages that were saved in UTF-8 often name another encoding.
    if b"\0" not in data and (data.isascii() or not _is_utf8(data)):
        named = _NAMED_ENCODING.search(data[:4096])
        if named and (encoding := _known_encoding(named[1].decode())):
            text = data.decode(encoding, errors="replace")
            if encoding != "utf-8" and text.count("\ufffd") * _RARE <= len(text):
                return _not_empty(text)
        if _is_damaged_utf8(data):
            return _not_empty(data.decode("utf-8", errors="replace"))
    return decode_bytes(data)


def _known_encoding(name: str) -> str | None:
    """Returns the encoding that a page names, as browsers read it; None if it is none, or is not ASCII below 128."""
    ascii_bytes = bytes(range(32, 127))
    try:
        encoding = codecs.lookup(name).name
        if ascii_bytes.decode(encoding) != ascii_bytes.decode("ascii"):
            return None
    except (UnicodeError, LookupError):
        return None
    return _IN_BROWSERS.get(encoding, encoding)


def decode_bytes(data: bytes) -> str:
    """Returns the text; see `decode`."""
    # UTF-32's byte order mark can begin like UTF-16's.
    has_mark = data.startswith((b"\xff\xfe", b"\xfe\xff")) and data[2:4] != b"\0\0"
    utf16 = "utf-16" if has_mark else _utf16_without_mark(data)
    if b"\0" in data and not utf16:
        raise Unreadable("binary file")
    try:
        text = data.decode(utf16 or "utf-8")
    except UnicodeDecodeError as error:
        legacy = None if utf16 or _is_damaged_utf8(data) else _detect(data)
        if legacy is None:
            encoding = "UTF-16" if utf16 else "UTF-8"
            raise Unreadable(f"not {encoding} (byte {error.start}); save it as UTF-8 to use it") from error
        text = data.decode(legacy)
    return _not_empty(text.removeprefix("\ufeff"))


def _utf16_without_mark(data: bytes) -> str | None:
    """Returns the encoding of UTF-16 without a byte order mark; None if this is not such a text.

    In such a text, each second byte of a blank is zero and no other byte is. A binary file has control characters then.
    """
    if b"\0" not in data or len(data) % 2:
        return None
    for encoding, low in (("utf-16-le", data[::2]), ("utf-16-be", data[1::2])):
        if b"\0" not in low:
            with suppress(UnicodeDecodeError):
                text = data.decode(encoding)
                known = (unicodedata.category(sign) in _IN_NO_TEXT for sign in set(text) - set("\t\n\r\f"))
                return None if any(known) else encoding
    return None


def _not_empty(text: str) -> str:
    # strip() would copy a large text.
    if not text or text.isspace():
        raise Unreadable("empty")
    return text


def _is_utf8(data: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for begin in range(0, len(data), SAMPLE):
            decoder.decode(data[begin : begin + SAMPLE], final=begin + SAMPLE >= len(data))
    except UnicodeDecodeError:
        return False
    return True


def _is_damaged_utf8(data: bytes) -> bool:
    """Returns whether this is UTF-8 with errors in it: it has the mark, or most of what is beyond ASCII is UTF-8."""
    text = data.decode("utf-8", errors="replace")
    errors = text.count("\ufffd")
    return text.startswith("\ufeff") or len(text) - len(text.encode("ascii", errors="ignore")) > 2 * errors


def _detect(data: bytes) -> str | None:
    """Returns the encoding that fits a sample best, and in which everything can be decoded; None if there is none."""
    if _CONTROL.search(data):
        return None
    matches = charset_normalizer.from_bytes(
        _sample(data), cp_isolation=list(LEGACY), preemptive_behaviour=False, enable_fallback=False
    )
    # Encodings whose texts are alike share a match. Small differences of the scores mean nothing.
    ranked = sorted(
        (round(match.chaos, 2), -round(match.coherence, 1), LEGACY.index(name))
        for match in matches
        for name in match.could_be_from_charset
        if name in LEGACY
    )
    for _, _, index in ranked:
        try:
            data.decode(LEGACY[index])
        except UnicodeDecodeError:
            continue
        return LEGACY[index]
    return None


def _sample(data: bytes) -> bytes:
    """Returns lines beyond ASCII, whole ones, since a character may be several bytes."""
    lines, size = [], 0
    for line in data.split(b"\n"):
        if not line.isascii():
            lines.append(line)
            size += len(line)
            if size >= SAMPLE:
                break
    return b"\n".join(lines)
