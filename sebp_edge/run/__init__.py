"""One call: its texts, its training, its assessment, and what is saved and returned.

Internal: import from `sebp_edge` or `sebp_edge.research`.

adapting          adapts a model to texts: from reading them to a saved version
live_training     the training of a call while it runs, and what is done between its steps
adaptation_job, resuming
                  an adaptation as a job of the store: its beginning, its end, and going on with it
call              what a call works with that reads texts; imports no torch
model_call        the same with a model; begins one call at a time, stops and pauses it
conditions        the model and the machine that a training is planned for; imports no torch
job               one call as a job: the id of its events, how far the whole is, and its clock
work_ahead        lays out the phases of a call that are ahead
preparation       prepares texts: decides how the training begins, makes schedules, plans the memory; imports no torch
encoding          the same here, with the loaded model, which may also be the teacher
model_in_use      the base model in memory, and the adapter on it
texts_comparison  the texts, model and recipe beside those of the active version; proposes another name for others
unchanged         the result if there is nothing new; imports no torch
start             the version that a training learns on from, its lessons, or why there is none
version_texts     what a version knows of its texts, for the next one
assessment        the active version, the quiz, and what an adaptation writes, repeats and forgets
known_losses      the test losses that are known from versions
samples           continues the beginnings of a few documents, before and after
without_torch     plans and inspects without torch
replies           asks a model the questions of a quiz, and those whose replies it teaches
saving            saves the adapter; if that fails, saves it elsewhere
forgetting, remaining
                  makes an adapter forget documents: what has to go, and what a new version is trained on
verify_forgotten  trains a version again to check what it has forgotten
result            AdaptResult: the result of an adaptation
base_models       finds the base model that an adapter was made for; imports no torch
asking            finds passages, quotes an answer, and finds the adapter that reads; imports no torch
downloading       downloads a base model
generating        generates text, and answers questions from texts, with the model in use
expectations      says what to expect of an adapted model of this size
fitting_recipe    reads what a recipe trains on, and chooses the recipe that fits; imports no torch
inspection        inspects texts before a training, and shows examples as the model gets them
"""
