"""What a version knows of its texts, so that the next adaptation can learn on from it."""

from collections import Counter
from dataclasses import dataclass, field

from sebp_edge.engine.models.files_digest import files_digest
from sebp_edge.run.start import StartingPoint
from sebp_edge.store.known_texts import KnownTexts
from sebp_edge.store.version_documents import Entry
from sebp_edge.store.where import Where
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.model_reference import ModelReference
from sebp_edge.values.reading import Reading
from sebp_edge.values.remembered import SplitHistory
from sebp_edge.values.training_facts import LearntOn


@dataclass(frozen=True)
class VersionTexts:
    """What a version knows of its texts; nothing outside the store, whose salt is in it.

    Attributes:
        history: the documents that it knows, and those whose split it remembers.
        known: the texts that it has learnt; None if its training was stopped.
        entries: what the list of documents says of each, by the key of its fingerprint.
        learnt_on: what it learnt on top of another version; None if it began at the base model.
    """

    history: SplitHistory | None = None
    known: KnownTexts | None = None
    entries: dict[int, Entry] = field(default_factory=dict)
    learnt_on: LearntOn | None = None
    where: Where = field(default_factory=Where)

    @classmethod
    def of(
        cls, reading: Reading, dataset: Dataset, starting_point: StartingPoint, reference: ModelReference
    ) -> "VersionTexts":
        """Returns what a version in the store knows."""
        salt = dataset.draw.history.salt
        keys = {number: f"{fingerprint.key:016x}" for number, fingerprint in dataset.draw.fingerprints.items()}
        texts = {document.hash(salt): keys.get(number, "") for number, document in enumerate(reading.documents)}
        history, gone, entries, learnt_on = dataset.draw.history, {}, {}, None
        groups = (reading.folders,)
        if starting_point.start is not None:
            history = history.learnt_on_from(starting_point.start.history)
            entries |= starting_point.start.entries
            event, known = starting_point.event, starting_point.start.comparison.known
            learnt_on = LearntOn(event.version, event.new, event.changed, event.replayed, event.gone)
            gone = known.still_known(texts, (f"{key:016x}" for key in starting_point.lessons.gone))
            if gone:
                groups += starting_point.start.where.earlier_than(reading.folders)
        elif starting_point.forgets:
            history = SplitHistory(history.known, history.salt)
        tokens = Counter()
        for example in dataset.examples:
            tokens[example.document] += len(example.input_ids)
        entries |= {
            fingerprint.key: Entry(number + 1, tokens[number], dataset.names.get(number))
            for number, fingerprint in dataset.draw.fingerprints.items()
        }
        known = KnownTexts(salt, files_digest(reference) or "", texts, gone)
        where = Where(texts=tuple(filter(None, groups)))
        return cls(history, known, entries, learnt_on, where)
