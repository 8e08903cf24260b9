"""What was read of a user's texts."""

from dataclasses import dataclass, field

from sebp_edge.values.chats import Author, Chats
from sebp_edge.values.documents import Document, LeftOut
from sebp_edge.values.folder import Folder


@dataclass
class Reading:
    """The documents that were read, in a stable order, and what was left out.

    Attributes:
        num_equal: how many documents were left out since they equal others.
        folders: the files and folders that were given, with absolute paths.
        exports: what chats and mails were found, such as "a WhatsApp chat with 3 people, 12,345 messages".
        authors: whose words the chats and mails hold.
        chats: those that are no documents yet, since it is not known who of the authors the owner is.
        styles: as which programs' notes Markdown was read, a sentence each.
    """

    documents: list[Document] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    num_equal: int = 0
    folders: tuple[Folder, ...] = ()
    exports: tuple[str, ...] = ()
    authors: tuple[Author, ...] = ()
    chats: Chats = field(default_factory=Chats)
    styles: tuple[str, ...] = ()
