"""Encodes the texts of a training for the model that was loaded, which may also be the teacher."""

from dataclasses import asdict, replace
from itertools import chain

from sebp_edge.ask.general_texts import chat_examples, chat_questions
from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.engine.models.architecture import longest_sequence
from sebp_edge.engine.models.hub_cache import has_own_tokenizer
from sebp_edge.engine.models.loading import BaseModel, refuse_unknown_tokens
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training.teacher import with_teacher
from sebp_edge.events import Notice, TextsRead
from sebp_edge.lessons.learnable import refuse_unlearnable
from sebp_edge.run.preparation import PlannedTraining, Preparation, Prepared
from sebp_edge.run.replies import reply_to
from sebp_edge.run.work_ahead import REPLIES, TEACHER

# Room for the base model's replies to general questions.
CHAT_TOKENS = 48
SAVED_INACTIVE = (
    "The adapter will be saved, but not activated unless activate_anyway is set; `sebp-edge adapters activate` "
    "activates it afterwards."
)


class TrainingPreparation(Preparation):
    """Prepares the texts of one call for a training, with the model."""

    def encode(self, base: BaseModel, planned: PlannedTraining | None = None) -> Prepared:
        """Returns the dataset for a loaded model: the plan's, if that was made with the model's own tokenizer.

        Raises:
            ModelError: the tokenizer produces tokens that the model does not know.
        """
        if planned is not None and has_own_tokenizer(self._call.reference):
            prepared = planned.prepared
        else:
            prepared = self._prepare(base.tokenizer, longest_sequence(base.model))
        data = prepared.dataset
        refuse_unlearnable(data, len(self.reading.documents), base.tokenizer)
        refuse_unknown_tokens(base.model, chain.from_iterable(example.input_ids for example in data.all_examples))
        if data.unjudged_because:  # said before the training
            self._call.notify(Notice(" ".join([*data.unjudged_because, SAVED_INACTIVE])))
        left_out = tuple(asdict(item) for item in data.left_out)
        read = TextsRead(data.num_documents, len(data.examples), data.num_tokens, data.padding_share, left_out)
        self._call.notify(read)
        return prepared

    def teach(self, prepared: Prepared, base: BaseModel, options: MemoryOptions) -> Prepared:
        """Returns the dataset in which the base model, as it is now, is the teacher on general text and chat."""
        call, data = self._call, prepared.dataset
        call.job.enter(REPLIES)
        replies = reply_to(base, chat_questions(), CHAT_TOKENS, call.check)
        general = data.general + chat_examples(replies, base.tokenizer, data.context_length)
        call.job.enter(TEACHER)
        collator = Collator(data.context_length, base.pad_token_id)
        general = with_teacher(
            base.model, general, collator, base.device, call.notify, call.signal.check, options=options
        )
        return replace(prepared, dataset=replace(data, general=general))
