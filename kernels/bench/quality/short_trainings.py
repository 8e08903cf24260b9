"""Trains a little at several learning rates, beside whole trainings; a study that patches the run: FOLDER NOTES SEED MODEL OUT RATES."""

import sys, json, tempfile, random, time, copy
from pathlib import Path
from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.training import run as R
from sebp_edge.training.loop import Trainer, learning_rates, TrainingProgress
from sebp_edge.training.evaluation import evaluate
from sebp_edge.models.adaptation import snapshot, restore
from sebp_edge.texts.formats import FORMATS

folder, n, seed, model, out = sys.argv[1:6]
n, seed = int(n), int(seed)
FULL = [float(x) for x in sys.argv[6].split(",")]
RATES = [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]
SHORT = float(sys.argv[7]) if len(sys.argv) > 7 else 0


class Done(Exception):
    pass


def train(self, gate):
    rec = self.task.recipe
    self.adaptation = self._attach(self.base, rec, self.task.seed)
    results = []
    with R.precise_sums(), self._make_learner() as learner:
        fresh = snapshot(self.adaptation)
        sch = self._judged[0]
        assert len(self._judged) == 1
        learner.prepare(sch, self.task.schedules[1:])
        steps = [s for e in sch.epochs for s in e]
        last = self.task.schedules[-1]
        base_t = evaluate(learner, sch.test).mean
        base_v = evaluate(learner, sch.validation).mean
        head = dict(
            folder=Path(folder).name,
            n=n,
            seed=seed,
            model=Path(model).name,
            steps=len(steps),
            epoch=len(sch.epochs[0]),
            last=last.num_steps,
            vdocs=sch.num_documents[1],
            tdocs=sch.num_documents[2],
            tokens=sch.num_tokens,
            last_tokens=last.num_tokens,
            vtokens=sch.validation.num_tokens,
            base_t=base_t,
            base_v=base_v,
        )
        print(head, flush=True)
        for r in RATES:

            def note(e):
                if type(e).__name__ == "StepDone" and e.step in (3, 5, 8):
                    shorts[f"p{e.step}"] = evaluate(learner, sch.validation).mean

            t0 = time.process_time()
            rr = rec.replace(learning_rate=r)
            shorts = {}
            for k in (3, 5):
                learner.start_again(fresh)
                for st, rate in zip(steps[:k], learning_rates(rr, k)):
                    learner.step(st, rate)
                shorts[f"c{k}"] = evaluate(learner, sch.validation).mean
            full = {}
            if r in FULL:
                learner.start_again(fresh)
                p = TrainingProgress("train")
                Trainer(learner, rr, lambda e: note(e), "train", p).train(sch)
                full = dict(
                    best_v=p.best_loss,
                    best_epoch=p.best_epoch,
                    vals=p.validations,
                    test=evaluate(learner, sch.test).mean,
                )
                restore(self.adaptation, fresh)
            line = head | dict(rate=r, shorts=shorts, **full)
            with open(out, "a") as f:
                f.write(json.dumps(line) + "\n")
            print(
                r,
                full.get("test"),
                full.get("best_v"),
                full.get("best_epoch"),
                {k: round(v, 4) for k, v in shorts.items()},
                round(time.process_time() - t0, 1),
                flush=True,
            )
    raise Done


R.TrainingRun.train = train
files = sorted(p for p in Path(folder).rglob("*") if p.suffix in FORMATS and 400 <= p.stat().st_size <= 1300)
files = random.Random(seed).sample(files, min(n, len(files)))
with tempfile.TemporaryDirectory() as store:
    try:
        Personalizer(model, recipe=Recipe.load("notes"), device="cpu", seed=seed, store=AdapterStore(store)).adapt(
            files
        )
    except Done:
        pass
