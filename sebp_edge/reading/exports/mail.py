"""Reads mailboxes (.mbox) and mails (.eml): each mail after the one that it answers, if that is there.

Only its author's own words are read: no quoted replies, signatures, footers of lists and attachments.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from email import message_from_bytes
from email.errors import MessageError
from email.header import decode_header, make_header
from email.message import Message
from email.utils import parseaddr, parsedate
from typing import IO

from sebp_edge.reading.formats.html import html_text
from sebp_edge.values.chats import Chat, ChatMessage
from sebp_edge.values.documents import NotRead, Unreadable, unix_newlines

# In bytes, attachments included. A longer mail is left out.
MAX_MAIL = 64_000_000
MAILS_AT_ONCE = 200
# Of the text of a mail, in characters: more is no letter.
MAX_TEXT = 1_000_000

_BLANKS = (b"\n", b"\r\n")
_ID = re.compile(r"<[^<>\s]+>")
# In the archives of public lists.
_HIDDEN_ADDRESS = re.compile(r"^\s*(\S+) at (\S+)\s*(?:\((.*)\))?\s*$", re.DOTALL)
_AUTOMATIC = re.compile(r"auto-(?:replied|generated)", re.IGNORECASE)

# What begins with one of these, to the end, is not the author's.
_ORIGINAL = (
    "original message|ursprüngliche nachricht|message d'origine|mensaje original|mensagem original|messaggio originale"
    "|oorspronkelijk bericht|forwarded message|weitergeleitete nachricht|message transféré|mensaje reenviado"
)
_HEADERS = (
    "from|date|sent|to|cc|subject|von|datum|gesendet|an|betreff|de|envoyé|à|objet|enviado|para|asunto|assunto|da|inviato|a"
    "|oggetto|van|verzonden|aan|onderwerp|от|отправлено|кому|тема|дата"
)
_SENT_FROM = "sent from|get outlook|von meinem|envoyé de|enviado desde|enviado do|inviato da|verstuurd vanaf"
_SAID = "wrote|writes|schrieb|a écrit|escribió|ha scritto|escreveu|schreef|skrev"
_END = re.compile(
    rf"^(?:(?:--|—) ?$|_{{20,}}$|-{{20,}}$(?=\n.*(?:mailing list|unsubscribe))|-{{2,}} ?(?:{_ORIGINAL}) ?-{{2,}}"
    rf"|(?:\*?(?:{_HEADERS})[ \xa0]?:\*? .*\n){{3}}|(?:-{{2,5}} )?(?:on|am|le|el|il|em|op) .{{0,150}}@[^\n]{{0,80}}"
    rf"(?:\n[^\n]{{0,60}})?(?:{_SAID})[ \xa0]?:$|you(?:'re| are)? receiv(?:ed|ing) this (?:message |mail )?because"
    rf"|(?:{_SENT_FROM}) .{{0,60}}$(?=\s*\Z))",
    re.MULTILINE | re.IGNORECASE,
)
_RULE = re.compile(r" *[-_=]{10,}")
# What stands before a quoted reply: lines that end with a colon and have an address, a time or a year.
_WROTE = re.compile(
    r"^(?![>\x02])(?=.{0,200}(?:@|\d:\d\d|\b(?:19|20)\d\d\b))[^\n]{1,300}(?:\n(?!>)[^\n\x02]{1,200}){0,2}?(?<=:)[ \t]*$"
    rf"(?=\s{{0,20}}^[>\x02])|^[^\n>]{{1,80}}(?:{_SAID}):[ \t]*$(?=\s{{0,20}}(?:^[>\x02]|\Z))",
    re.MULTILINE | re.IGNORECASE,
)
_QUOTED = re.compile(r"^(?:>(?!From )|\|\s).*\n?", re.MULTILINE)
_FLOWED = re.compile(r"^(?!>|-- \r?$)(.*) \r?\n(?!>|\s|-- )", re.MULTILINE)
# Control characters mark the quotes of HTML, whose reader lays out text only.
_BLOCKQUOTE = re.compile(r"<(/?)blockquote\b[^<>]*>", re.IGNORECASE)
_ASIDE = re.compile(
    r"<(?:div|pre)[^<>]{0,200}\b(?:gmail_signature|moz-signature|divRplyFwdMsg|appendonsend|OLK_SRC_BODY_SECTION)\b[^<>]{0,200}>",
    re.IGNORECASE,
)


def read_mailbox(file: IO[bytes]) -> Iterator[Chat | Unreadable]:
    """Yields the mails of a mailbox, each after the one that it answers."""
    yield from _answers(_mails_of(file))


def read_mail(file: IO[bytes]) -> Iterator[Chat | Unreadable]:
    """Yields a mail."""
    yield from _answers([file.read(MAX_MAIL + 1)])


def _mails_of(file: IO[bytes]) -> Iterator[bytes]:
    """Yields the mails of a mailbox; of one that is too long, its beginning."""
    lines, size, before = [], 0, _BLANKS[0]
    for line in iter(lambda: file.readline(1_000_000), b""):
        if line.startswith(b"From ") and before in _BLANKS:
            if lines:
                yield b"".join(lines)
            lines, size = [], 0
        elif size <= MAX_MAIL:
            lines.append(line)
            size += len(line)
        before = line
    if lines:
        yield b"".join(lines)


def _answers(mails: Iterable[bytes]) -> Iterator[Chat | Unreadable]:
    read: dict[str, ChatMessage] = {}
    answered: list[tuple[str, str]] = []
    names: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    for number, data in enumerate(mails):
        if number % MAILS_AT_ONCE == 0:
            # So that the reading is seen to go on, and can be stopped.
            yield Chat("mail", "", [], left_out=left_out)
            left_out = Counter()
        mail = message_from_bytes(data) if len(data) <= MAX_MAIL else None
        try:
            found = _read(mail, names, left_out) if mail else NotRead("mails that are too long")
        except (Unreadable, MessageError, ValueError, LookupError, RecursionError):
            found = NotRead("mails that are damaged")
        if isinstance(found, NotRead):
            left_out[found.reason] += 1
            continue
        id = _first_id(mail, "Message-ID") or hashlib.sha256(data).hexdigest()
        read[id] = found
        answered.append((id, _first_id(mail, "In-Reply-To") or _first_id(mail, "References", -1)))
    if not read:
        yield Unreadable("no mail in which somebody wrote something")
    for id, before in answered:
        mail, asked = read[id], read.get(before)
        messages = [asked, mail] if asked and asked.author != mail.author else [mail]
        short = hashlib.sha256(id.encode(errors="replace")).hexdigest()[:8]
        yield Chat("mail", short, messages, names, left_out=left_out, is_mail=True)
        left_out = Counter()


def _read(mail: Message, names: dict[str, str], left_out: Counter[str]) -> ChatMessage | NotRead:
    """Returns a mail, or the kind of one that is left out."""
    sender = _header(mail, "From")
    if hidden := _HIDDEN_ADDRESS.match(sender):
        name, address = hidden[3] or "", f"{hidden[1]}@{hidden[2]}"
    else:
        name, address = parseaddr(sender)
    if "@" not in address:
        # An archive may have made it unreadable, in its own way.
        name = address = sender.partition("<")[0].strip() or sender
    if _AUTOMATIC.search(_header(mail, "Auto-Submitted")):
        return NotRead("automatic mails")
    if not address:
        return NotRead("mails without a sender")
    body = None
    for part in _parts(mail):
        if part.get_content_disposition() == "attachment" or part.get_content_type() not in ("text/plain", "text/html"):
            left_out["attachments"] += part.get_content_disposition() == "attachment"
        elif body is None or (part.get_content_type() == "text/plain" != body.get_content_type()):
            body = part
    text = _text(body) if body else ""
    if len(text) > MAX_TEXT:
        return NotRead("mails that are too long")
    said = own_words(text, is_html=bool(body) and body.get_content_type() == "text/html")
    if not said:
        return NotRead("mails without own words")
    address = address.lower()
    names.setdefault(address, name or address)
    date = parsedate(_header(mail, "Date"))
    return ChatMessage(address, f"{date[0]:04}-{date[1]:02}-{date[2]:02}" if date else "", said)


def _parts(mail: Message) -> Iterator[Message]:
    """Yields the parts that hold something; a mail that is attached is one of them."""
    if mail.is_multipart() and mail.get_content_maintype() == "multipart":
        for part in mail.get_payload():
            yield from _parts(part)
    else:
        yield mail


def own_words(text: str, *, is_html: bool = False) -> str:
    """Returns what the author of a mail wrote: no replies that are quoted, no signature, no footer of a list."""
    if is_html:
        text = _ASIDE.sub(lambda found: f"<p>-- </p>{found[0]}", text)
        text = html_text(_BLOCKQUOTE.sub(lambda found: "<p>\x03</p>" if found[1] else "<p>\x02</p>", text))
    text = _without_blocks(_QUOTED.sub("", _WROTE.sub("", unix_newlines(text).replace("\xa0", " "))))
    if end := _END.search(text):
        text = text[: end.start()]
    before, _, last = text.rstrip().rpartition("\n")
    text = before if _RULE.fullmatch(last) else text
    return re.sub(r"\n{3,}", "\n\n", text.replace("\n>From ", "\nFrom ")).strip()


def _without_blocks(text: str) -> str:
    """Cuts out what is between the marks of quotes, which may be nested; one without an end goes on to the end."""
    if "\x02" not in text:
        return text
    kept, depth = [], 0
    for part in re.split("([\x02\x03])", text):
        if part in ("\x02", "\x03"):
            depth = max(0, depth + (1 if part == "\x02" else -1))
        elif not depth:
            kept.append(part)
    return "".join(kept)


def _text(part: Message) -> str:
    """Returns the text of a part; a character that is damaged is replaced, as mail programs do."""
    data = part.get_payload(decode=True) or b""
    charset = part.get_content_charset("utf-8")
    try:
        text = data.decode(charset)
    except (UnicodeDecodeError, LookupError):
        text = data.decode("cp1252", errors="replace")
    if part.get_param("format") == "flowed":
        # A line that ends with a space goes on in the next one.
        text = _FLOWED.sub(r"\1" if part.get_param("delsp") == "yes" else r"\1 ", text)
    return text


def _header(mail: Message, name: str) -> str:
    value = mail.get(name, "")
    if isinstance(value, str) and "=?" not in value:
        return " ".join(value.split())
    return " ".join(str(make_header(decode_header(value))).split())


def _first_id(mail: Message, name: str, index: int = 0) -> str:
    ids = _ID.findall(str(mail.get(name, "")))
    return ids[index] if ids else ""
