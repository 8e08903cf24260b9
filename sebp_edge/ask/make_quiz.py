"""Makes the quiz that decides whether an adapter reads better, about notes that it was not trained on.

Those are the practice notes of the test split, and the quiz's own: with the former alone, a quiz of 63 questions misses
a gain of 10 points more often than not (kernels/bench/how-the-gate-decides.md, "Questions of the quiz").
"""

from collections.abc import Collection, Sequence

from sebp_edge.ask.answer import NUM_PASSAGES, is_found
from sebp_edge.ask.general_texts import general_questions
from sebp_edge.ask.index import Index
from sebp_edge.ask.passages import passages_of
from sebp_edge.ask.practice import QUIZ, practice_questions, practice_reading
from sebp_edge.ask.wording import prompt_for, shown
from sebp_edge.values.answers import stands_in
from sebp_edge.values.dataset import Quiz, QuizQuestion
from sebp_edge.values.documents import Document

# Room for a reply.
REPLY_TOKENS = 24


def make_quiz(documents: Sequence[Document], tested: Collection[int], tokenizer, context_length: int) -> Quiz:
    """Makes the quiz.

    Args:
        documents: the practice notes, all of which are searched, beside the quiz's own.
        tested: the numbers of those that are asked about.
        context_length: questions that leave no room for a reply in it are left out.
    """
    own, questions = practice_reading(QUIZ).documents, practice_questions() | practice_questions(QUIZ)
    index = Index([*documents, *own])
    others = Index(document for number, document in enumerate(documents) if number not in tested)
    asked, refused, rightly_refused = [], 0, 0
    notes = [documents[number] for number in sorted(tested)]
    for document, question in [(note, each) for note in notes + own for each in questions[note.content]]:
        wording, answers = question.wordings[0], (question.answer,)
        hits = index.search(wording, NUM_PASSAGES)
        refused += not is_found(hits)
        rightly_refused += not is_found(others.search(wording, NUM_PASSAGES))
        found = shown(hit.passage for hit in hits) or None
        right = shown([next(each for each in passages_of(document) if stands_in(answers[0], each.text))])
        # The passage that is found is the right one mostly.
        prompts = {each: tuple(prompt_for(wording, tokenizer, each).input_ids) for each in {None, found, right}}
        if max(map(len, prompts.values())) + REPLY_TOKENS <= context_length:
            # Practice notes show whether what is not learnt is known; replies without a passage take longest.
            alone = prompts[None] if document in notes else ()
            asked.append(QuizQuestion(wording, answers, alone, prompts[found], prompts[right]))
    general = tuple(
        QuizQuestion(question, answers, tuple(prompt_for(question, tokenizer).input_ids))
        for question, answers in general_questions()
    )
    return Quiz(tuple(asked), general, refused, rightly_refused)
