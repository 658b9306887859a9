"""`fit`: the training loop."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from nearfar._utils.files import write_arrays, write_text
from nearfar._utils.process_group import gather_objects, in_touch
from nearfar._utils.progress import Progress
from nearfar.batches import violations
from nearfar.data import DataSet, Tensors
from nearfar.doctor import Doctor, diagnose_run
from nearfar.evaluation import Evaluation
from nearfar.evaluation._preprocessing import fingerprint_of
from nearfar.runs import _journal as journal
from nearfar.runs import _parts as parts
from nearfar.runs._config import save
from nearfar.runs._sections import AUTO, Config
from nearfar.train import _processes as processes
from nearfar.train import _scores as scoring
from nearfar.train._build import describe, is_slow, open_dataset, set_data_name, set_threads
from nearfar.train._checkpoints import Checkpointer
from nearfar.train._cost import copy_state, describe_time, measure_seconds
from nearfar.train._folder import SEARCH, RunFolder
from nearfar.train._length import LENGTH, Choice, LengthSearch, read_choice, refusal, search_config, usual_steps
from nearfar.train._processes import run_on_first_rank
from nearfar.train._progress import NotFiniteError, RunProgress, ScalarQueue, catch_interrupt
from nearfar.train._state import Moment, TrainState, load_batches, prepare, take_step
from nearfar.train._trackers import check_trackers, open_trackers

CHECKS, MIN_STEPS_APART = 30, 20
"""How often the doctor checks a run, as in its calibration, and the fewest steps between two checks."""
MIN_STEPS_TIMED = 100  # the fewest steps of a run for which three more steps are spent on estimating its time

Callback = Callable[[Moment], dict[str, Any] | None]
"""Called after each step on every rank; its return value becomes a line of the journal."""


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a run.

    Attributes:
        folder: the run folder.
        step: the last step.
        best_step: the step of the checkpoint that was tested.
        test: scores on the test classes; None if the run was interrupted.
        finished: whether all steps were taken.
    """

    folder: Path
    step: int
    best_step: int
    test: Evaluation | None
    finished: bool


@in_touch("train")
def fit(
    config: Config,
    folder: Path | None = None,
    *,
    data: DataSet | None = None,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
    console: Console | None = None,
) -> Result:
    """Train a network according to a configuration, and write everything to a run folder.

    Args:
        config: the configuration.
        folder: the run folder: config.yaml, journal.jsonl, checkpoints/last.pt and best.pt, embeddings.npz; None for a
            new one under runs/, named by the time.
        data: a data set of your own instead of the one in the configuration.
        resume: continue exactly from checkpoints/last.pt, or from the start if it has not been written yet.
        overwrite: replace the files of a run in the folder; other files always stay.
        callbacks: called after each step, see `Callback`.
        console: the console to print progress to.
    """
    parts.check(config)
    check_trackers(config.training.trackers)
    config = config if data is not None else set_data_name(config)
    set_threads(config)
    machine = processes.begin(config.training.precision)
    with RunFolder(folder, resume=resume, overwrite=overwrite) as place:
        run_on_first_rank(machine, place.check)
        choice: Choice | None = None
        if config.training.steps == AUTO:
            data = data or open_dataset(config.data)
            found = _find_length(config, machine, data, place, console)
            if isinstance(found, Result):
                return found
            choice, config = found, found.apply(config)
        state, checkpointer = _open(config, machine, data, place, console=console)
        if choice is not None:
            run_on_first_rank(machine, partial(choice.write, checkpointer.folder))
        return _run(state, checkpointer, callbacks, console)


def _open(
    config: Config, machine: Any, data: DataSet | None, place: RunFolder, inner: str = "", *, console: Console | None
) -> tuple[TrainState, Checkpointer]:
    """Prepare a run in its folder, or its search in the folder `inner` in it, and read the last checkpoint."""
    if place.resume:  # claimed first, so that no other process changes the checkpoint
        checkpointer = Checkpointer(run_on_first_rank(machine, place.claim) / inner)
        return prepare(config, machine, data, fresh=not checkpointer.read(config), console=console), checkpointer
    state = prepare(config, machine, data, console=console)  # first, so that a wrong configuration leaves no folder
    return state, Checkpointer(run_on_first_rank(machine, place.claim) / inner)


def _find_length(
    config: Config, machine: Any, data: DataSet, place: RunFolder, console: Console | None
) -> Choice | Result:
    """Choose the length of a run on held-out classes; the result of the interrupted run if that was stopped."""
    known = run_on_first_rank(machine, lambda: read_choice(place)) or refusal(config, data)
    if known is not None:
        return known
    state, checkpointer = _open(search_config(config, data), machine, data, place, SEARCH, console=console)
    home = checkpointer.folder.parent
    if machine.is_main_process:
        save(config, home / "config.yaml")
    search = LengthSearch(usual_steps(config, data))
    run = _train(state, checkpointer, [search], console)
    if machine.num_processes > 1:
        machine.free_memory()  # accelerate keeps the networks that it prepared
    if search.choice is None:
        run.progress.tell(f"stopped at step {run.done} of the search; go on with: nearfar train --run {home} --resume")
        return Result(home, run.done, 0, None, finished=False)
    return search.choice


def _run(
    state: TrainState, checkpointer: Checkpointer, callbacks: Sequence[Callback], console: Console | None
) -> Result:
    """Continue from the checkpoint that was read, or start; train, test and return the result."""
    config, machine, folder = state.config, state.machine, checkpointer.folder
    run = _train(state, checkpointer, callbacks, console)
    progress = run.progress
    if run.done < config.training.length:
        progress.tell(f"stopped after step {run.done}; go on with: nearfar train --run {folder} --resume")
        return Result(folder, run.done, checkpointer.best_step, None, finished=False)
    scores = _test(state, checkpointer, progress)
    if run.baselines:
        progress.tell(scoring.describe_baselines({**run.baselines, "trained": scores.recall[1]}))
    if config.training.diagnose_every != 0 and machine.is_main_process:
        found = diagnose_run(folder)
        follow = "" if found.healthy else f"\nto follow the first remedy: nearfar train --apply-remedy {folder}"
        progress.tell(f"doctor: {found.text(min(progress.console.width, 100))}{follow}")
    return Result(folder, run.done, checkpointer.best_step, scores, finished=True)


def _train(
    state: TrainState, checkpointer: Checkpointer, callbacks: Sequence[Callback], console: Console | None
) -> "_Training":
    """Take the steps of a run or a search, as many as Ctrl-C lets, and write its journal and checkpoints."""
    config, machine, folder = state.config, state.machine, checkpointer.folder
    done, path = checkpointer.restore(state), folder / "journal.jsonl"
    run_on_first_rank(machine, checkpointer.check_best)
    search = next((each for each in callbacks if isinstance(each, LengthSearch)), None)
    progress = RunProgress(state, console, quiet=not machine.is_main_process, done=done, search=search is not None)
    progress.tell(processes.describe(machine))
    if machine.is_main_process:
        folder.mkdir(exist_ok=True)
        save(config, folder / "config.yaml")
        journal.cut(path, done, checkpointer.lines)
    machine.wait_for_everyone()
    if state.data.about:
        progress.tell(state.data.about)
    progress.tell(describe(config, state.shares, state.inputs, state.bare_model, machine.device))
    before = journal.read(path)
    with (
        open_trackers(config, folder, quiet=not machine.is_main_process) as log,
        journal.Journal(path, quiet=not machine.is_main_process, on_write=log) as lines,
        catch_interrupt() as stop,
    ):
        callbacks = _with_doctor(config, progress, callbacks)
        run = _Training(state, checkpointer, progress, lines, before, callbacks, done, search)
        run.begin()
        try:
            with progress.bar:
                run.take_steps(stop)
        except NotFiniteError as error:
            raise NotFiniteError(
                f"{error}; {checkpointer.last_good()}; lower optimizer.lr or set optimizer.max_grad_norm, "
                "then --resume."
            ) from None
    return run


def _with_doctor(config: Config, progress: RunProgress, callbacks: Sequence[Callback]) -> list[Callback]:
    """Add a doctor to the callbacks, unless they contain one or the configuration wants none."""
    every = config.training.diagnose_every
    if every == 0 or any(isinstance(each, Doctor) for each in callbacks):
        return list(callbacks)
    every = every or max(MIN_STEPS_APART, config.training.length // CHECKS)
    return [Doctor(every=every, tell=lambda words: progress.tell(f"doctor: {words}")), *callbacks]


@dataclass(eq=False)
class _Training:
    """A run in progress, after `done` steps; `before` holds the journal of a resumed run."""

    state: TrainState
    checkpointer: Checkpointer
    progress: RunProgress
    lines: journal.Journal
    before: Sequence[dict[str, Any]]
    callbacks: Sequence[Callback]
    done: int
    search: LengthSearch | None = None  # the callback that ends it, if it is a search for the length
    baselines: Mapping[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Do what comes before the first step: the estimate of the time, the choice of the length, scores, looks."""
        self.note_restart()
        self.state.model.train()
        self.estimate_time()
        self.note_length()
        self.baselines = self.get_baselines()
        self.begin_callbacks()

    def note_length(self) -> None:
        """Record in the journal how the length was chosen, if it was not given."""
        found = None if self.done else Choice.read(self.checkpointer.folder)
        if found is not None:
            self.lines.write({"step": 0, LENGTH: asdict(found)})
            self.progress.tell(f"length: {found.steps:,} steps; {found.why}")

    @property
    def doctors(self) -> list[Doctor]:
        return [each for each in self.callbacks if isinstance(each, Doctor)]

    def note_restart(self) -> None:
        """Record in the journal that the launcher restarted the processes after one of them died."""
        count, world = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), self.state.machine.num_processes
        if count.isdigit() and int(count):
            restart = {"count": int(count), "after": self.done, "processes": world}
            # with the number of the next step: another restart before the next checkpoint removes the line again
            self.lines.write({"step": self.done + 1, "restart": restart})
            self.progress.tell(f"restart {count}: a process died, and {world} go on after step {self.done}")

    def estimate_time(self) -> None:
        """Estimate how long a run on photographs takes on a CPU, if it is long enough to be worth three steps."""
        state, plan = self.state, self.state.config.training
        alone = state.machine.num_processes == 1 and state.sharded is None and plan.compile == "none"
        slow = is_slow(state.inputs, state.machine.device)
        if alone and slow and not self.done and plan.length >= MIN_STEPS_TIMED:
            with Progress("measuring two steps", console=self.progress.console):
                seconds = measure_seconds(copy_state(state))
            self.progress.tell(f"time on this CPU: {describe_time(None if self.search else plan.length, seconds)}")

    def get_baselines(self) -> dict[str, float]:
        """The baselines: measured before the first step, or read from the journal of a resumed run."""
        state, progress = self.state, self.progress
        if not state.config.training.baselines:
            return {}
        found = run_on_first_rank(state.machine, lambda: scoring.read_baselines(self.before))
        if found is None and self.done == 0:
            bar = Progress("scoring the untrained network", console=progress.console)
            with scoring.share_evaluations(state, state.bare_model), bar as watch:
                found = scoring.measure_baselines(state, watch)
            self.lines.write({"step": 0, scoring.BASELINES: found})
            progress.tell(scoring.describe_baselines(found))
        return found or {}

    def begin_callbacks(self) -> None:
        """Let doctors and a search look at the untrained network, or continue from the journal of a resumed run."""
        for each in (*self.doctors, *([self.search] if self.search else ())):
            if found := each.begin(self.state, self.before):
                self.lines.write({"step": 0, **found})

    def take_steps(self, stop: Callable[[], bool]) -> None:
        """Take the remaining steps, or as many as `stop` lets, with evaluations, callbacks and checkpoints."""
        state, plan, lines = self.state, self.state.config.training, self.lines
        if self.done >= plan.length or self._found_length():
            return
        earlier = [float(x["time"]) for x in self.before if isinstance(x.get("time"), int | float)]
        queue, start = ScalarQueue(self.done), time.monotonic() - max(earlier, default=0.0)
        for step, batch in load_batches(state, self.done, workers=state.config.data.workers):
            moment = take_step(state, step, batch)
            evaluating = step == plan.length or step % plan.evaluate_every == 0
            if state.sharded is not None and (evaluating or any(step % each.every == 0 for each in self.doctors)):
                state.sharded.gather()
            queue.put({"step": step, "lr": moment.lr, "time": round(time.monotonic() - start, 3)}, moment.scalars)
            self._write(queue.take())
            for found in _extra_entries(moment, self.callbacks):
                lines.write({"step": step, **found})
            scoring.refresh_negatives(state, step, self.progress.bar.aside)
            last = step == plan.length or self._found_length() or _should_stop(state, step, stop)
            saving = last or step % plan.checkpoint_every == 0
            if saving or evaluating:
                self._write(queue.take(all_of_them=True))  # raises before a network that diverged is saved
            if evaluating:
                lines.write({"step": step, **self._evaluate(moment)})
            if saving:
                lines.sync()
                self.checkpointer.keep(state, step, len(self.before) + lines.lines)
            self.done = step
            if last:
                return

    def _found_length(self) -> bool:
        return self.search is not None and self.search.choice is not None

    def _write(self, entries: Iterable[dict[str, Any]]) -> None:
        for entry in entries:
            self.lines.write(entry)
            self.progress.step(entry)

    def _evaluate(self, moment: Moment) -> dict[str, Any]:
        """Score the held-out classes (or the test classes, under the papers' protocol), and save the best weights."""
        state, plan = self.state, self.state.config.training
        paper, found = plan.protocol == "paper", dict[str, Any]()
        samples, gallery = (state.data.test, state.data.gallery) if paper else (state.validation, None)
        if samples is not None:
            model, options = state.scored_model, {"watch": self.progress.bar.aside, **state.evaluating}
            with scoring.share_evaluations(state, model):
                scores = scoring.score(model, samples, state.plain, gallery=gallery, **options).evaluation
            word = "test" if paper else "validation"
            found = {f"{word} recall@{k}": value for k, value in scores.recall.items()}
            found[f"{word} map_at_r"] = scores.map_at_r
            if state.machine.is_main_process:
                self.checkpointer.offer(state, moment.step, scores.recall[1])
        if state.machine.is_main_process:
            near, far = plan.max_positive_distance, plan.min_negative_distance
            broken = violations(moment.embeddings, moment.labels, max_positive_distance=near, min_negative_distance=far)
            found["violation"] = float(broken.share)
            self.progress.scores(moment.step, found)
        state.machine.wait_for_everyone()
        return found


def _extra_entries(moment: Moment, callbacks: Sequence[Callback]) -> Iterator[dict[str, Any]]:
    """Yield the statistics of the pair weights, if they are due, and the results of the callbacks."""
    every = moment.state.config.training.explain_every
    if every and moment.step % every == 0:
        why = moment.state.loss.explain(moment.embeddings, moment.target, ids=moment.state.ids(moment.indices))
        yield {
            "active_positives": why.active_positives,
            "active_negatives": why.active_negatives,
            "effective_pairs": round(why.effective_pairs, 3),
        }
    for callback in callbacks:
        if found := callback(moment):
            yield found


def _should_stop(state: TrainState, step: int, stop: Callable[[], bool]) -> bool:
    """Whether to stop; several processes communicate every tenth step, so that all stop together."""
    if state.machine.num_processes == 1:
        return stop()
    return step % 10 == 0 and any(gather_objects("train", stop()))


def _test(state: TrainState, checkpointer: Checkpointer, progress: RunProgress) -> Evaluation:
    """Score the best checkpoint on the test classes, once, and save its vectors."""
    model, data = state.scored_model, state.data
    run_on_first_rank(state.machine, lambda: checkpointer.restore_best(state))
    options: dict[str, Any] = {"gallery": data.gallery, "ks": data.ks, "resamples": 2000, **state.evaluating}
    with scoring.share_evaluations(state, model), Progress("testing", console=progress.console) as watch:
        found = scoring.score(model, data.test, state.plain, watch=watch, **options)
    if state.machine.is_main_process:
        _write_test(state, checkpointer, progress, found)
    return found.evaluation


def _write_test(state: TrainState, checkpointer: Checkpointer, progress: RunProgress, found: scoring.Score) -> None:
    """Save the vectors and the scores of the test, and print the scores."""
    model, data = state.scored_model, state.data
    scores, names = found.evaluation, [data.test.names[row] for row in found.rows.tolist()]
    arrays = {"x": found.x.cpu().numpy(), "y": data.test.labels[found.rows], "name": np.array(names, dtype=np.str_)}
    arrays["classes"] = np.array(data.test.classes, dtype=np.str_)
    arrays["fingerprint"] = np.array(fingerprint_of(model, state.plain))
    if isinstance(data.test, Tensors) and data.test.x.dtype == torch.uint8:
        arrays["images"] = data.test.x.numpy()
    write_arrays(checkpointer.folder / "embeddings.npz", arrays)
    y, asked = arrays["y"], scoring.queries_of(data.test, found.rows)
    if asked is None:
        chance = scoring.chance_recall(y, None if data.gallery is None else data.gallery.labels)
    else:
        chance = scoring.chance_recall(y[asked], y[~asked])
    about = {"best_step": checkpointer.best_step, "left_out": list(found.left_out), "chance": round(chance, 6)}
    write_text(checkpointer.folder / "scores.json", json.dumps(scores.to_dict() | about) + "\n")
    progress.final(scores, checkpointer.best_step, paper=state.config.training.protocol == "paper")
    if found.left_out:
        progress.tell(found.notice())
