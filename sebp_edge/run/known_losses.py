"""The file tested.json of a version: its test losses by document, which a later version need not compute again.

They hold while a document's examples, the base model, its precision, the libraries and the version's weights are the
same; all are compared. A document is known by a salted hash of its examples.
"""

import math
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from hashlib import blake2b

from sebp_edge.basics.files import read_checked_json
from sebp_edge.basics.version import __version__
from sebp_edge.engine.models.loading import BaseModel
from sebp_edge.engine.training.evaluation import HeldOutLoss
from sebp_edge.engine.training.gate import GateResult
from sebp_edge.errors import StorageError
from sebp_edge.machine.packages import package_versions
from sebp_edge.store.saved import SavedAdapter
from sebp_edge.values.dataset import Dataset

TESTED = "tested.json"
# The size limit of the file, in bytes; a document takes 800.
_MAX_BYTES = 2**28


class KnownLosses:
    """The test losses of a dataset's documents that versions tell.

    Attributes:
        base: those of the base model.
    """

    def __init__(self, base: BaseModel, dataset: Dataset):
        self._conditions = {"base": base.fingerprint, "precision": base.precision, "device": base.device.type}
        self._conditions |= {"sebp-edge": __version__} | package_versions()
        digests = defaultdict(partial(blake2b, digest_size=16, key=dataset.draw.history.salt))
        for example in dataset.examples:
            for part in (example.input_ids.tobytes(), example.labels.tobytes(), example.in_boilerplate):
                digests[example.document].update(f"{len(part)};".encode() + part)
        self._digest_of = {number: digest.hexdigest() for number, digest in digests.items()}
        self._draw, self.base = dataset.draw, HeldOutLoss()

    def values(self, result: GateResult) -> dict:
        """Returns what the file says of a version's test, but for the hash of its weights."""
        folds = self._draw.fold_of
        judged = [
            result.after.only(number for number in result.after.nats if folds.get(number, 0) == state)
            for state in range(max(1, self._draw.num_folds))
        ]
        base, *judged = (asdict(each.renumbered(self._digest_of)) for each in (result.before, *judged))
        return self._conditions | {"tested": {"base": base, "judged": judged}}

    def read(self, saved: SavedAdapter, num_states: int) -> list[HeldOutLoss]:
        """Returns what the file tells of a version's judged states, and adds what it tells of the base model."""
        number_of = {digest: number for number, digest in self._digest_of.items()}
        # It may be missing, damaged, or not written by sebp-edge.
        with suppress(OSError, LookupError, TypeError, ValueError, AttributeError, StorageError):
            values = read_checked_json(saved.path / TESTED, _MAX_BYTES)
            tested, weights = values.pop("tested"), values.pop("weights")
            losses = [HeldOutLoss(**each) for each in (tested["base"], *tested["judged"])]
            is_valid = len(losses) == 1 + num_states and all(map(_is_whole, losses))
            if is_valid and values == self._conditions and weights == saved.weights_hash():
                base, *judged = (each.renumbered(number_of) for each in losses)
                self.base = HeldOutLoss.merged([self.base, base])
                return judged
        return num_states * [HeldOutLoss()]


def _is_whole(losses: HeldOutLoss) -> bool:
    are_finite = all(math.isfinite(value) for part in vars(losses).values() for value in part.values())
    return are_finite and losses.nats.keys() == losses.tokens.keys()
