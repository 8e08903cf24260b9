"""Reads files, folders, strings and records into documents, and lists what was left out and why."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from sebp_edge.basics.units import gigabytes, plural
from sebp_edge.errors import MachineError, OwnerUnknown, TextsError
from sebp_edge.reading.exports import BY_ENDING, Part, read_file
from sebp_edge.reading.exports.archives import Member, archive_faults, find_members, is_archive
from sebp_edge.reading.find_files import expand_user, find_files
from sebp_edge.reading.formats import FORMATS, MARKDOWN, text_size
from sebp_edge.reading.formats.record_files import Read, read_records
from sebp_edge.reading.not_theirs import LICENCE, is_licence
from sebp_edge.reading.pictures import without_data
from sebp_edge.reading.vaults import Vault
from sebp_edge.values.chats import Chat, Chats, Names
from sebp_edge.values.documents import (
    Content,
    Conversation,
    Document,
    LeftOut,
    NotRead,
    Unreadable,
    as_json,
    clean_content,
    num_bytes,
    pieces,
    printable,
)
from sebp_edge.values.folder import Folder
from sebp_edge.values.preparation_progress import SILENT, Progress
from sebp_edge.values.reading import Reading

# Peak memory per byte of text while it is read, compared and tokenised: the maximum over notes in one file and in 2,000
# files, and records of one sentence.
MEMORY_PER_BYTE = 45

# Bytes that a shorter document counts as: it takes 2 to 3.5 kB whatever its length; and each message of one, 1 kB.
MIN_SIZE, MIN_SIZE_OF_MESSAGE = 80, 25
# Number of records of a file that are left out for one reason, each with an entry of its own.
_MAX_ALIKE = 3
# The maximum length of a record's name, in characters.
_MAX_NAME = 200


def read_texts(texts, memory: int | None = None, progress: Progress = SILENT, me: str | Sequence[str] = ()) -> Reading:
    """Reads a user's texts.

    Args:
        texts: a text as a string, the `pathlib.Path` of a file or folder, a `Folder` with patterns, a record
            (`{"text"}`, `{"prompt", "completion"}`, `{"messages"}`, or as `read_record` takes; its "name", if it is
            a string, names the document), or an iterable of these. Strings are texts, never paths. What was read
            already is returned as it is.
        memory: the bytes of memory that reading and tokenising the texts may take; None for no limit.
        me: the names of the owner in chats and mails, of which each service may have another one.

    Raises:
        TextsError: a path does not exist, an item has another type, nothing readable was found, or `texts` is a string
            that names an existing file or folder, or see `Chats.documents`.
        OwnerUnknown: there are chats or mails, and `me` is empty.
        MachineError: the texts would take more than `memory`. Nothing was read before, if they are neither short nor in
            Word or PDF files.
    """
    if isinstance(texts, Reading):
        reading = texts
        _refuse_too_large(_counted(document.content for document in reading.documents), memory)
    else:
        reading = read_all(texts, memory, progress)
    if reading.chats:
        reading = _with_documents_of_chats(reading, (me,) if isinstance(me, str) else tuple(me), progress)
    if not reading.documents:
        raise TextsError(nothing_readable(reading.left_out))
    return reading


# What was read of a file, by its path, time and size.
Parts = list[Part]
Kept = dict[tuple, Parts]


def read_all(texts, memory: int | None = None, progress: Progress = SILENT, kept: Kept | None = None) -> Reading:
    """Reads a user's texts, and leaves chats and mails as they are, so that `Reading.authors` can be asked about.

    See `read_texts`, which makes documents of them.

    Args:
        kept: what an earlier call has read of the files, which is used for those that have not changed; then holds what
            this one has read.
    """
    reading, sources = Reading(), []
    progress.begin("reading", 0)
    for source in _sources(texts, reading):  # in this thread, which the caller's iterators may need
        sources.append(source)
        progress.advance(0)
    sources = _with_different_names(sources)
    vaults = (source.vault for source in sources if source.vault and source.path.suffix.lower() in MARKDOWN)
    found = Counter((vault.app, vault.evidence) for vault in vaults).items()
    reading.styles = tuple(f"Read as {app}'s: {plural(num, 'note')}{evidence}." for (app, evidence), num in found)
    size = sum(source.size for source in sources)
    _refuse_too_large(size, memory)
    progress.begin("reading", size)
    read_now: Kept = {}
    for num_bytes_done in progress.watch(_read_into(reading, sources, memory, kept, read_now)):
        progress.advance(num_bytes_done)
    progress.end()
    if kept is not None:
        kept.clear()
        kept.update(read_now)
    return reading


def _read_into(
    reading: Reading, sources: Sequence["_TextSource"], memory: int | None, kept: Kept | None, read_now: Kept
) -> Iterator[int]:
    """Adds what is in the sources to a reading; yields, after each piece, how many more bytes are done."""
    additions, size = _Additions(reading), sum(source.size for source in sources)
    for source in sources:
        contents, read = [], 0
        unread: Counter[str] = Counter()
        try:
            for content in source.load() if kept is None else _load_changed(source, kept, read_now):
                yield 0
                if isinstance(content, Chat | Names):
                    unread.update(content.left_out if isinstance(content, Chat) else {})
                    if isinstance(content, Chat) and not content.messages:
                        continue
                    reading.chats.add(source.name, content)
                else:
                    contents.append(content)
                # Unpacked texts, and short ones, have a size only now.
                read += _counted([content])
                _refuse_too_large(size + max(0, read - source.size), memory)
        except Unreadable as reason:
            contents, read = [reason], 0
        size += max(0, read - source.size)
        contents += [NotRead(f"{kind}: {number:,}") for kind, number in unread.items() if number]
        unread_parts = [part for part in contents if isinstance(part, NotRead)]
        reading.left_out += [LeftOut(source.name, part.reason) for part in unread_parts if part.reason]
        front_matter = "".join(part.front_matter for part in unread_parts)
        contents = [content for content in contents if not isinstance(content, NotRead)]
        if not (contents or read or unread):
            contents = [Unreadable("empty")]
        is_alone, faults = len(contents) == 1, _Faults(source.name)
        additions.path = source.path and str(source.path.absolute())
        # A large text is not kept beside its clean copy.
        content, contents = None, contents[::-1]
        for number in range(1, len(contents) + 1):
            name = source.name if is_alone else f"{source.name}, record {number}"
            additions.add(name, contents.pop(), faults, front_matter, is_named=source.is_named)
        reading.left_out += faults.left_out
        yield source.size
    reading.exports, reading.authors = reading.chats.summaries(), reading.chats.authors()


def _load_changed(source: "_TextSource", kept: Kept, read_now: Kept) -> Iterable[Part]:
    """Returns the contents of a source, those kept if it is a file that has not changed; adds them to `read_now`."""
    try:
        status = None if source.path is None else source.path.stat()
    except OSError:
        status = None  # Reading it says what is wrong.
    if status is None:
        return source.load()
    app = source.vault and source.vault.app
    key = (str(source.path), app, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
    read_now[key] = kept[key] if key in kept else list(source.load())
    return read_now[key]


def _with_documents_of_chats(reading: Reading, me: Sequence[str], progress: Progress) -> Reading:
    """Returns the reading with the documents that the owner's words in chats are."""
    if reading.chats.need_owner and not me:
        what = " and ".join(reading.exports)
        raise OwnerUnknown(f"These texts are {what}: say which names are yours, with me= or --me.", reading)
    reading = replace(
        reading, documents=[*reading.documents], left_out=[*reading.left_out], authors=reading.chats.authors(me)
    )
    additions, faults = _Additions(reading), _Faults("chats")
    for part in reading.chats.documents(me):
        progress.advance(0)
        if isinstance(part, LeftOut):
            reading.left_out.append(part)
        else:
            name, conversation = part
            additions.add(name, conversation, faults, is_named=True)
    reading.left_out += faults.left_out
    reading.chats = Chats()
    return reading


class _Additions:
    """Adds documents to a reading, but for those that it has; `path` is that of the file that they are from."""

    def __init__(self, reading: Reading):
        self._reading, self.path = reading, None
        self._seen = {_digest(document.content): document.source for document in reading.documents}

    def add(
        self, name: str, content: Content | Unreadable, faults: "_Faults", front_matter: str = "", *, is_named: bool
    ) -> None:
        """Adds a document, or what is wrong with it to the faults."""
        content, data = _cleaned(content)
        self._reading.left_out += [LeftOut(name, f"{kind}: {number:,}") for kind, number in data.items() if number]
        if isinstance(content, Unreadable):
            faults.add(name, str(content), content.reason)
        elif (key := _digest(content)) in self._seen:
            self._reading.num_equal += 1
            faults.add(name, f"the same as {self._seen[key]}", "the same as other documents")
        else:
            self._seen[key] = name
            self._reading.documents.append(Document(name, content, name if is_named else None, front_matter, self.path))


def _cleaned(content: Content | Unreadable) -> tuple[Content | Unreadable, Counter[str]]:
    """Returns the content to learn, and how many data were left out of it, by their kind."""
    data: Counter[str] = Counter()
    try:
        if not isinstance(content, Unreadable):
            content, data = without_data(clean_content(content))
            content = clean_content(content) if data.total() else content
    except Unreadable as reason:
        content = reason.with_traceback(None)
    return content, data


class _Faults:
    """What was left out of a file; many records with faults of one kind have one entry."""

    def __init__(self, name: str):
        self._name = name
        self._first: dict[str, list[LeftOut]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, name: str, reason: str, kind: str) -> None:
        """Adds a record by its name, with the reason, and the reason that it has in common with others."""
        self._counts[kind] += 1
        if self._counts[kind] <= _MAX_ALIKE:
            self._first.setdefault(kind, []).append(LeftOut(name, reason))

    @property
    def left_out(self) -> list[LeftOut]:
        found = []
        for kind, first in self._first.items():
            if (number := self._counts[kind]) <= _MAX_ALIKE:
                found += first
            else:
                found.append(LeftOut(self._name, f"{kind} ({number:,} records, the first one is {first[0].source})"))
        return found


def _refuse_too_large(size: int, memory: int | None) -> None:
    if memory is not None and MEMORY_PER_BYTE * size > memory:
        raise MachineError(
            f"Reading these texts would take more than the {gigabytes(max(0, memory))} of memory left for them; "
            "give fewer texts or raise the memory budget."
        )


def _counted(contents: Iterable[Part]) -> int:
    """Returns the bytes of texts that count towards the memory."""
    total = 0
    for content in contents:
        if not isinstance(content, Unreadable | NotRead):
            num_messages = len(content.messages) if isinstance(content, Conversation | Chat) else 0
            size = content.num_bytes if isinstance(content, Chat) else 0
            size = size if isinstance(content, Chat | Names) else num_bytes(content)
            total += max(MIN_SIZE, MIN_SIZE_OF_MESSAGE * num_messages, size)
    return total


def _digest(content: Content) -> tuple[type, bytes]:
    digest = hashlib.sha256()
    for piece in pieces(content if isinstance(content, str) else as_json(content)):
        digest.update(piece.encode())
    return type(content), digest.digest()


def nothing_readable(left_out: list[LeftOut]) -> str:
    """Returns a sentence that says that there is nothing to read, and why."""
    endings = " ".join(sorted(FORMATS.keys() | BY_ENDING))
    if not left_out:
        return f"Nothing to read: no files were found; give texts, or a folder with files that end in {endings}."
    examples = "; ".join(f"{item.source}: {item.reason}" for item in left_out[:3])
    more = f"; and {len(left_out) - 3} more" if len(left_out) > 3 else ""
    return f"Nothing readable was found ({examples}{more}); supported files end in {endings}."


# ---------------------------------------------------------------------------------------------- where texts come from


class _TextSource(NamedTuple):
    """A file, a string or a record.

    Attributes:
        size: the size of its text, in bytes.
        load: reads its contents, and what of it was not read; raises Unreadable if it cannot be used.
        is_named: whether its owner knows it by this name.
        folder: the folder that the name of a file is relative to.
        path: of a file that is no archive.
        vault: the vault that the file is in, if any.
    """

    name: str
    size: int
    load: Callable[[], Iterable[Part]]
    is_named: bool = False
    folder: Path | None = None
    path: Path | None = None
    vault: Vault | None = None


def _sources(texts, reading: Reading) -> Iterator[_TextSource]:
    """Yields the sources in `texts` without reading them; adds the folders, and what is left out, to the reading."""
    if isinstance(texts, str) and (path := _existing_path(texts)):
        kind = "folder" if path.is_dir() else "file"
        raise TextsError(
            f"The string {texts!r} is the path of a {kind}; pass Path({texts!r}) to train on the {kind}, or "
            f"[{texts!r}] to train on the string itself."
        )
    if isinstance(texts, (str, Path, Folder, dict)):
        texts = [texts]
    if not isinstance(texts, Iterable) or isinstance(texts, (bytes, bytearray)):
        raise TextsError(
            f"Texts must be strings, pathlib.Paths or records, or a list of these, but are of type {_kind(texts)}."
        )
    for number, item in enumerate(texts, start=1):
        if isinstance(item, str):
            yield _TextSource(f"text {number}", num_bytes(item), partial(iter, [item]))
        elif isinstance(item, dict):
            yield _record_source(number, item)
        elif isinstance(item, Folder | Path):
            folder = item if isinstance(item, Folder) else Folder(item)
            yield from _folder_sources(folder, reading.left_out)
            reading.folders += (replace(folder, path=expand_user(Path(folder.path)).absolute()),)
        else:
            raise TextsError(
                f"Text {number} must be a string, a pathlib.Path or a record, but is of type {_kind(item)}."
            )


def _kind(value) -> str:
    return type(value).__name__


def _record_source(number: int, record: dict) -> _TextSource:
    name = record.get("name")
    name = printable(name.strip())[:_MAX_NAME] if isinstance(name, str) else ""
    found: list[Read] = list(read_records([record]))
    size = sum(num_bytes(content) for content in found if not isinstance(content, Unreadable | NotRead))
    return _TextSource(name or f"record {number}", size, partial(iter, found), is_named=bool(name))


def _existing_path(text: str) -> Path | None:
    """Returns the file or folder that a string names, if it exists."""
    try:
        path = expand_user(Path(text))
        return path if text and path.exists() else None
    except (OSError, ValueError):
        return None  # The name is too long, the folder cannot be opened, or the path is not valid.


def _folder_sources(folder: Folder, left_out: list[LeftOut]) -> Iterator[_TextSource]:
    path = expand_user(Path(folder.path))
    if is_archive(path):
        yield from _archive_sources(path, left_out)
        return
    for file in find_files(folder, left_out):
        root = (path if path.is_dir() else path.parent).absolute()
        load = partial(_read_found if path.is_dir() else read_file, file.path, file.vault)
        yield _TextSource(
            file.name, text_size(file.path), load, is_named=True, folder=root, path=file.path, vault=file.vault
        )


def _archive_sources(path: Path, left_out: list[LeftOut]) -> Iterator[_TextSource]:
    try:
        for file in find_members(path, left_out):
            name = printable(str(file.path))
            yield _TextSource(name, text_size(file), partial(_read_member, file), is_named=True, folder=path.absolute())
    except Unreadable as reason:
        left_out.append(LeftOut(printable(path.name), str(reason)))


def _read_member(member: Member) -> Iterator[Part]:
    with archive_faults():
        yield from _read_found(member, None)


def _read_found(path: Path, vault: Vault | None) -> Iterator[Part]:
    """Reads a file that was found in a folder, where it may be a licence that others wrote."""
    for content in read_file(path, vault):
        if isinstance(content, str) and is_licence(path.name, content):
            raise Unreadable(LICENCE)
        yield content


def _with_different_names(sources: list[_TextSource]) -> list[_TextSource]:
    """Puts the last parts of the given folders before files' names, as many as it takes to tell the files apart."""
    names = [source.name for source in sources]
    for depth in count(1):
        found = {(name, source.folder) for name, source in zip(names, sources, strict=True) if source.folder}
        folders_of = Counter(name for name, _ in found)
        longer = [
            index
            for index, source in enumerate(sources)
            if folders_of[names[index]] > 1 and source.folder and depth < len(source.folder.parts)
        ]
        if not longer:
            return [source._replace(name=name) for source, name in zip(sources, names, strict=True)]
        for index in longer:
            names[index] = printable("/".join([*sources[index].folder.parts[-depth:], sources[index].name]))
