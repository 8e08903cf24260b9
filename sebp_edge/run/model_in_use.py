"""The base model in memory, and the adapter on it."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

import torch

from sebp_edge.basics.stopping import Check
from sebp_edge.engine.memory.refusal import refuse_if_too_big
from sebp_edge.engine.memory.this_machine import kernels_problem
from sebp_edge.engine.models.adaptation import Adaptation, load, take
from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.engine.models.encoders import is_encoder, load_encoder
from sebp_edge.engine.models.loading import BaseModel, load_base_model
from sebp_edge.engine.models.sampling import NonFiniteLogits
from sebp_edge.errors import AdapterError, BaseModelMismatch, ModelError, OptionError
from sebp_edge.events import ModelLoaded, Notice, Sink
from sebp_edge.machine import devices
from sebp_edge.recipe import Recipe
from sebp_edge.store.record import AdapterRecord
from sebp_edge.values.model_reference import ModelReference


class Current(Enum):
    """What stands for the adapter in use."""

    ADAPTER = "the adapter in use"


@dataclass(frozen=True)
class AdapterChoice:
    """The adapter that a call writes with: see `Personalizer`. Raises an OptionError for a version without one."""

    adapter: str | Path | Current | None
    version: int | None

    def __post_init__(self):
        if self.version is not None and not self.is_named:
            raise OptionError(f"version={self.version!r} was given without an adapter; name one with adapter=.")

    @property
    def is_named(self) -> bool:
        """Whether it may be another one than the adapter in use."""
        return self.adapter not in (None, Current.ADAPTER)


class ModelInUse:
    """The model of a Personalizer: a base model, loaded when it is first needed, and the adapter in use.

    Attributes:
        base: the base model; None until it is loaded.
        adaptation: the adapter in use; None if there is none, or if the base model was loaded again without it.
        adapter_folder: where the adapter in use is saved; None if there is none.
        prompts: how that adapter's prompts are rendered (see `AdapterRecord.prompts`).
        owners: the folder and prompts of the adapter that comes back, if the one in use is for one call only.
    """

    def __init__(self, reference: ModelReference, recipe: Recipe, device: torch.device):
        self.reference, self.recipe, self.device = reference, recipe, device
        self.base: BaseModel | None = None
        self.adaptation: Adaptation | None = None
        self.adapter_folder: Path | None = None
        self.prompts = "text"
        self.owners: tuple[Path | None, str] | None = None
        # Of the model with the adapter in use, and of the base model, by whether it is with one.
        self._decoders: dict[bool, Decoder] = {}

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the base model's weights in the device's memory; 0 until it is loaded."""
        if self.base is None:
            return 0
        # Streamed blocks share two buffers.
        weights = (weight for weight in self.base.model.parameters() if not getattr(weight, "is_on_host", False))
        storages = (weight.untyped_storage() for weight in weights)
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values())

    def load(
        self,
        on_event: Sink,
        recipe: Recipe | None = None,
        watch: Callable[[Callable[[Check], BaseModel]], BaseModel] = lambda load: load(lambda: None),
        streamed: int | None = None,
    ) -> BaseModel:
        """Returns the base model; loads it if necessary.

        With a recipe to train: loads it again, without the adapter in use, if the recipe has another precision or
        places lookup tables elsewhere, or another number of blocks is to be streamed. Without one: puts the adapter in
        use on it, unless it is there already. `watch` runs the loading.

        Args:
            streamed: of how many blocks the frozen matrices are to be in host memory; None for those that must be.
        """
        if recipe is not None:
            self._decoders.clear()
        if recipe is not None and self.base is not None:
            is_as_wanted = streamed in (None, self.base.streamed_blocks)
            is_as_wanted &= self.base.placed_for in (None, recipe.method)
            if self.base.in_4bit != recipe.load_in_4bit or not is_as_wanted:
                self.release()
        if self.base is None:
            unused_gpu = devices.driver_problem() if self.device.type == "cpu" else None
            for problem in filter(None, (unused_gpu, kernels_problem(self.device))):
                on_event(Notice(problem))
            recipe_to_load = recipe or self.recipe
            needed = refuse_if_too_big(self.reference, recipe_to_load, self.device)
            streamed = needed if streamed is None else streamed
            load = partial(load_base_model, self.reference, recipe_to_load, self.device, streamed_blocks=streamed)
            self.base = watch(load)
            self._announce(self.base, on_event)
        if recipe is None and self.adaptation is None:
            self.restore_adapter(on_event)
        return self.base

    def release(self) -> None:
        """Frees the model's memory; it is loaded again, with the adapter in use, when it is next needed."""
        self._decoders.clear()
        self.base = self.adaptation = None
        gc.collect()  # a layer in 4 bits and its weight refer to each other
        devices.release_memory(self.device)

    def close(self) -> None:
        """Frees the model's memory for good."""
        self.adapter_folder = None
        self.release()

    def load_analyzed(self, on_event: Sink, seed: int) -> BaseModel:
        """Returns the base model, or the encoder in its place, which is not kept."""
        if not is_encoder(self.reference):
            return self.load(on_event)
        base = load_encoder(self.reference, self.device, seed)
        self._announce(base, on_event)
        return base

    def _announce(self, base: BaseModel, on_event: Sink) -> None:
        on_event(ModelLoaded(self.reference.name, base.num_parameters, self.device.type, base.precision))
        if base.streamed_blocks:
            on_event(
                Notice(
                    f"The weights of {base.streamed_blocks} blocks stay in host memory, and every pass copies them to "
                    "the GPU; a reply copies them for each of its tokens."
                )
            )
        if base.in_4bit and self.reference.is_gguf:
            on_event(
                Notice(
                    f"The weights of {self.reference.name!r} were rounded to NF4, so they differ from the file's; load "
                    "them in 16 bits to train on what other programs run."
                )
            )

    def load_adapter(self, folder: Path, record: AdapterRecord, on_event: Sink) -> None:
        """Puts a saved adapter on the loaded base model instead of the one in use; restores that on an error."""
        if record.fingerprint != self.base.fingerprint:
            name = self.base.reference.public_name
            if record.base_model == name:
                raise BaseModelMismatch(f"The adapter was made for other weights of {name}; adapt again.")
            raise BaseModelMismatch(
                f"The adapter was made for {record.base_model}, not for {name}; use it with {record.model!r}."
            )
        if take(self.adaptation, self.base, folder):
            if True in self._decoders:
                self._decoders[True].forget_texts()
            self.use_adapter(self.adaptation, folder, record)
            return
        self.detach_adapter()
        try:
            self.use_adapter(load(self.base, folder), folder, record)
        except BaseException:
            self.restore_adapter(on_event)
            raise

    def use_adapter(self, adaptation: Adaptation, folder: Path, record: AdapterRecord) -> None:
        """Makes an adapter that is attached to the base model, and saved in `folder`, the one in use."""
        if adaptation is not self.adaptation:
            self._decoders.clear()
        self.adaptation, self.adapter_folder = adaptation, folder
        self.prompts, self.owners = record.prompts, None

    def take_back(self) -> None:
        """Uses the owner's adapter again, or none, after one that was for one call only."""
        if self.owners is not None:
            self.detach_adapter()
            (self.adapter_folder, self.prompts), self.owners = self.owners, None

    def detach_adapter(self) -> None:
        """Takes the adapter in use, if any, off the base model, until `restore_adapter` or `use_adapter`."""
        self._decoders.clear()
        if self.adaptation is not None:
            self.adaptation.detach()
            self.adaptation = None

    def restore_adapter(self, on_event: Sink) -> None:
        """Puts the adapter in use back on the base model, unless there is none or it was deleted."""
        self._decoders.clear()
        self.adaptation = None
        try:
            if self.adapter_folder is not None:
                self.adaptation = load(self.base, self.adapter_folder)
        except AdapterError as error:
            self.adapter_folder, self.prompts = None, "text"
            on_event(Notice(f"{error} The base model is used from now on."))

    def leave_deleted_adapter(self, on_event: Sink) -> None:
        """Uses the base model from now on if the adapter in use was deleted."""
        if self.adapter_folder is not None and not self.adapter_folder.exists():
            self.detach_adapter()
            self.restore_adapter(on_event)

    @contextmanager
    def generating(self, *, with_adapter: bool) -> Iterator[tuple[Decoder, str]]:
        """Context in which the model has the adapter in use, or none; returns a decoder, and how prompts are rendered.

        The decoder keeps beginnings of prompts until the base model is another one, or the adapter, or is trained.
        """
        used = self.adaptation if with_adapter else None
        try:
            with nullcontext() if used is self.adaptation else self.adaptation.disabled():
                if (key := used is not None) not in self._decoders:
                    self._decoders[key] = Decoder(self.base.model, keeps=True)
                yield self._decoders[key], self.prompts if key else "text"
        except NonFiniteLogits as error:
            fault = "computes NaN or infinite logits"
            if used is None:
                raise ModelError(f"The model {self.reference.name!r} {fault}; its weights are damaged.") from error
            raise AdapterError(f"With this adapter, the model {fault}; use another version or adapt again.") from error
