"""Learn: the plan, the progress, and what came of it."""

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QMessageBox, QProgressBar, QVBoxLayout, QWidget

from desktop.backend import NAME, Backend
from desktop.widgets import Card, Choice, Page, button, clear, quotation, row, text
from desktop.words import duration, percent, phase, sentence, size

_BUDGETS = {"All free": None, "2 GB": "2GB", "4 GB": "4GB", "8 GB": "8GB", "16 GB": "16GB", "24 GB": "24GB"}


class Learn(Page):
    """Plans, learns, pauses, goes on, and shows the words before and after."""

    def __init__(self, backend: Backend):
        super().__init__("Learn", "A language model on this computer learns to write the way your notes do.")
        self._backend, self._request = backend, None
        self._plan = _Plan(backend, self._replan, self._learn)
        self._progress = _Progress(self)
        self._result = QVBoxLayout()
        self._result.setSpacing(14)
        self.add(self._plan, self._progress)
        self.column.addLayout(self._result)
        self.column.addStretch()
        backend.state_changed.connect(self._prepare)
        backend.job_changed.connect(self._show_job)
        self._show_job()

    # ------------------------------------------------------------------------------------------------------- the plan

    def _prepare(self) -> None:
        if self._backend.state == "ready":
            self._backend.call("models", self._plan.show_models, lambda error: None)
            self._replan()

    def _replan(self) -> None:
        if self._request is not None:
            self._request.cancel()
        self._plan.show_words("", can_learn=False)
        if not self._backend.settings.folders:
            self._plan.show_words("Choose a folder under Notes first.", can_learn=False)
        elif self._backend.state == "ready" and not self._backend.is_learning:
            self._plan.show_words("Planning…", can_learn=False)
            self._request = self._backend.call(
                "plan",
                self._show_plan,
                self._inspect_or_say,
                **self._backend.source,
            )

    def _inspect_or_say(self, error) -> None:
        if error.code == "not_known":  # an inspection reads the model, once
            self._request = self._backend.call("inspect", self._show_inspected, self._say, **self._backend.source)
        else:
            self._say(error)

    def _say(self, error) -> None:
        self._plan.show_words(sentence(error), can_learn=False)

    def _show_inspected(self, found: dict) -> None:
        if found["plan"] is None:
            self._plan.show_words(found["refusal"] or found["beginning"], can_learn=False)
        else:
            self._show_plan(found["plan"])

    def _show_plan(self, plan: dict) -> None:
        # The time is known once this machine has trained.
        time = "" if plan["seconds"] is None else f"{duration(plan['seconds'])} and "
        needs = f"Takes {time}{size(plan['peak'])} of the {size(plan['budget'])} it may use."
        self._plan.show_words(needs, can_learn=True, share=plan["peak"] / plan["budget"])

    def _learn(self) -> None:
        self.trouble.say()
        clear(self._result)
        self._backend.learn(self._fail)

    # ----------------------------------------------------------------------------------------------------- the progress

    def pause(self) -> None:
        """Pauses: what is learnt so far is saved, and the memory is free."""
        self._backend.pause(self._fail)

    def go_on(self) -> None:
        """Goes on where it was paused or interrupted."""
        self.trouble.say()
        self._backend.resume(self._fail)

    def cancel(self) -> None:
        """Cancels, or drops what is paused, if the owner says so."""
        is_learning = self._backend.is_learning
        asks = "Stop learning, and throw away" if is_learning else "Throw away"
        question = QMessageBox(QMessageBox.Icon.Question, "Own Words", f"{asks} what is learnt so far?", parent=self)
        question.setInformativeText("Pause keeps it." if is_learning else "It cannot be brought back.")
        stop = question.addButton("Throw away", QMessageBox.ButtonRole.DestructiveRole)
        stay = question.addButton("Go on learning" if is_learning else "Keep it", QMessageBox.ButtonRole.RejectRole)
        question.setDefaultButton(stay)
        question.setEscapeButton(stay)
        question.buttonClicked.connect(lambda pressed: pressed is stop and self._backend.cancel(self._fail))
        question.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        question.open()  # returns at once

    def _fail(self, error) -> None:
        self.trouble.say(sentence(error))

    def _show_job(self) -> None:
        job = self._backend.job
        unfinished = job is not None and (self._backend.is_learning or job["resumable"])
        was_learning = self._progress.isVisibleTo(self)
        self._plan.setVisible(not unfinished)
        self._progress.setVisible(unfinished)
        if unfinished:
            self._progress.show_job(job)
            clear(self._result)
        elif was_learning:
            self._replan()
        if job is None or self._backend.is_learning:
            return
        if job["state"] == "done":
            self._show_result(job["result"])
        elif job["error"] is not None and job["error"]["code"] not in ("cancelled", "interrupted", "server_ended"):
            self.trouble.say(sentence(job["error"]))

    # ------------------------------------------------------------------------------------------------------- the result

    def _show_result(self, result: dict) -> None:
        clear(self._result)
        if result.get("unchanged"):
            self._result.addWidget(Card(text("Nothing is new", "head"), text("All of your notes are learnt already.")))
            return
        card = Card(text(_headline(result), "head"), text(_account(result), "muted"))
        if not result["active"] and result["version"] is not None:
            card.add(row(button("Use it anyway", lambda: self._use(result["version"]))))
        self._result.addWidget(card)
        for sample in result["samples"]:
            self._result.addWidget(_before_and_after(sample))

    def _use(self, version: int) -> None:
        self._backend.call("adapters.activate", lambda found: self._used(), self._fail, name=NAME, version=version)

    def _used(self) -> None:
        clear(self._result)
        self._result.addWidget(Card(text("It is in use now", "head"), text("Versions has the way back.", "muted")))
        self._backend.look_at_versions()


class _Plan(Card):
    """What is learnt with, and what it takes."""

    def __init__(self, backend: Backend, replan, learn):
        super().__init__()
        self._backend, self._replan = backend, replan
        self.model, self.budget = Choice("Model"), Choice("Memory it may use")
        for words, value in _BUDGETS.items():
            self.budget.addItem(words, value)
        self.budget.setCurrentIndex(max(0, self.budget.findData(backend.settings.budget)))
        self.model.addItem(backend.settings.model, backend.settings.model)
        self.model.activated.connect(self._choose)
        self.budget.activated.connect(self._choose)
        self.words = text("", "muted")
        self.bar = QProgressBar(objectName="thin", textVisible=False, maximum=100)
        self.start = button("Learn", learn, primary=True)
        choices = row(_labelled(self.model), _labelled(self.budget), end=False)
        choices.setStretch(0, 3)  # a model's name is long
        choices.setStretch(1, 2)
        self.add(choices, self.words, self.bar, row(self.start))

    def show_models(self, found: dict) -> None:
        """Offers the models that are known, and others that are on this computer."""
        chosen = self._backend.settings.model
        offers = {one["name"]: _described(one) for one in found["known"]} | {name: name for name in found["local"]}
        self.model.clear()
        for name, words in ({chosen: chosen} | offers).items():
            self.model.addItem(words, name)
        self.model.setCurrentIndex(self.model.findData(chosen))

    def show_words(self, words: str, *, can_learn: bool, share: float = 0.0) -> None:
        """Says what the plan is, and shows its share of the memory."""
        self.words.setText(words)
        self.bar.setVisible(share > 0)
        self.bar.setValue(round(100 * share))
        self.start.setEnabled(can_learn)

    def _choose(self) -> None:
        settings = self._backend.settings
        before = (settings.model, settings.budget)
        model, budget = self.model.currentData(), self.budget.currentData()
        self._backend.change(model=model, budget=budget)
        if budget != before[1]:
            self._backend.restart()  # a server keeps the budget that it was started with
        elif model != before[0]:
            self._replan()


class _Progress(Card):
    """One progress figure, the time left, and what can be done."""

    def __init__(self, page: Learn):
        super().__init__()
        self.head, self.words = text("", "head"), text("", "muted")
        self.bar = QProgressBar(textVisible=False, maximum=1000)
        self.pause = button("Pause", page.pause)
        self.go_on = button("Go on", page.go_on, primary=True)
        self.cancel = button("Cancel", page.cancel, link=True)
        # Apart, and without focus, which Qt would give it when the button before it goes: Space would press it.
        self.cancel.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.cancel.setToolTip("Alt+C")
        buttons = row(self.go_on, self.pause)
        buttons.addWidget(self.cancel)
        self.add(self.head, self.bar, self.words, buttons)

    def show_job(self, job: dict) -> None:
        """Shows the state of a job."""
        share = percent(job["progress"])
        is_waiting = job["resumable"] and job["state"] in ("paused", "interrupted")
        self.bar.setRange(0, 0 if job["progress"] == 0 and not is_waiting else 1000)
        self.bar.setValue(round(1000 * job["progress"]))
        self.go_on.setVisible(is_waiting)
        self.pause.setVisible(not is_waiting)
        self.pause.setEnabled(job["state"] == "running")
        self.cancel.setText("Discard" if is_waiting else "Cancel")
        self.cancel.setShortcut("Alt+C")  # which a new text takes away
        self.cancel.setEnabled(job["state"] not in ("pausing", "cancelling"))
        if is_waiting:
            self.head.setText(f"{'Paused' if job['state'] == 'paused' else 'Interrupted'} at {share}")
            self.words.setText("Nothing is lost: it goes on where it was. Its memory is free until then.")
            return
        doing = {"pausing": "Pausing", "cancelling": "Cancelling", "queued": "Starting", "starting": "Starting"}
        self.head.setText(f"{doing.get(job['state']) or phase(job['phase'])} · {share}")
        left = job["seconds_left"]
        self.words.setText("You can go on working." if left is None else f"{duration(left).capitalize()} left.")


def _labelled(choice: Choice) -> QWidget:
    whole = QWidget()
    column = QVBoxLayout(whole)
    column.setContentsMargins(0, 0, 0, 6)
    column.setSpacing(4)
    column.addWidget(text(choice.accessibleName(), "small"))
    column.addWidget(choice)
    return whole


def _described(model: dict) -> str:
    if model["repository"] is None:
        return f"{model['name']} (included; only to try this out)"
    account = ", needs an account" if "gated" in model["description"] else ""
    return f"{model['name']} ({size(2e9 * model['parameters'])} to download{account})"


def _headline(result: dict) -> str:
    if result["active"]:
        return f"Version {result['version']} is in use"
    return f"Version {result['version']} is saved, but not in use"


def _account(result: dict) -> str:
    if result["gain"] is None:
        return "There were too few notes to test whether it is better. The samples below, if any, show what changed."
    change = f"{abs(result['gain']):.0%} {'less' if result['gain'] > 0 else 'more'}"
    words = f"Of notes that it had not seen, each next word surprised it {change} than before."
    return words if result["active"] else f"{words} That is not enough to say that it is better."


def _before_and_after(sample: dict) -> Card:
    before = sample["base"] if sample["before"] is None else sample["before"]
    card = Card(text(sample["document"], "small"), quotation(f"{_line(sample['beginning'])} …", "muted"))
    card.column.setSpacing(2)
    for words, kind, line in (("BEFORE", "small", before), ("AFTER", "accent", sample["after"])):
        card.column.addSpacing(8)
        card.add(text(words, kind), quotation(_line(line)))
    return card


def _line(words: str) -> str:
    return " ".join(words.split())
