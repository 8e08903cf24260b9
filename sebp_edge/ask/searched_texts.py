"""Keeps texts that were read and their index in memory, and reads again only files that have changed."""

from sebp_edge.ask.index import Index
from sebp_edge.errors import TextsError
from sebp_edge.reading.readers import Parts, nothing_readable, read_all
from sebp_edge.values.documents import Document
from sebp_edge.values.preparation_progress import SILENT, Progress
from sebp_edge.values.reading import Reading


class SearchedTexts:
    """The texts that were asked about last."""

    def __init__(self):
        self._kept: dict[tuple, Parts] = {}
        self._index: Index | None = None

    def index(self, texts, progress: Progress = SILENT) -> Index:
        """Returns the index of texts as they are now; see `read_texts`. All that people write in chats is in it.

        An index is returned as it is.
        """
        if isinstance(texts, Index):
            return texts
        reading = texts if isinstance(texts, Reading) else read_all(texts, progress=progress, kept=self._kept)
        documents = [*reading.documents, *(Document(name, text, name) for name, text in reading.chats.talks())]
        if not documents:
            raise TextsError(nothing_readable(reading.left_out))
        # An update that fails leaves an index that holds a part of the texts.
        index, self._index = self._index or Index(), None
        index.update(documents)
        self._index = index
        return index
