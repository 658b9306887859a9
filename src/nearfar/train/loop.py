"""`fit`: the training loop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from nearfar._utils.files import write_arrays, write_text
from nearfar._utils.process_group import gather_objects, in_touch
from nearfar._utils.progress import Progress
from nearfar.data import DataSet, Tensors
from nearfar.data.loading import Batch
from nearfar.doctor import Doctor, diagnose_run
from nearfar.evaluation import Evaluation
from nearfar.evaluation.preprocessing import fingerprint_of
from nearfar.runs import journal, parts
from nearfar.runs.config import Config, save
from nearfar.train import baselines, processes
from nearfar.train.checkpointer import Checkpointer
from nearfar.train.feed import feed
from nearfar.train.folder import RunFolder, agreed
from nearfar.train.moment import Moment, take_step
from nearfar.train.pace import copy_of, estimate, seconds
from nearfar.train.readings import NotFiniteError, Readings
from nearfar.train.room import use_threads
from nearfar.train.scores import Score, chance, score, violation
from nearfar.train.shared import shared
from nearfar.train.show import Show, stopping
from nearfar.train.source import named
from nearfar.train.state import TrainState, prepare
from nearfar.train.suited import describe, is_slow
from nearfar.train.trackers import Trackers
from nearfar.train.trackers import check as check_trackers

__all__ = ["Callback", "Result", "fit"]

LOOKS, LEAST_APART = 30, 20
"""Number of looks of the doctor in a run, as in its calibration, and the least steps between two."""
WORTHWHILE = 100
"""Steps of a run from which three are worth an estimate of its time."""


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
    """Train a network as the configuration says, and write everything to a run folder.

    Args:
        config: the configuration.
        folder: the run folder: config.yaml, journal.jsonl, checkpoints/last.pt and best.pt, embeddings.npz; None for a
            new one under runs/, named by the time.
        data: a data set of your own instead of the one in the configuration.
        resume: continue exactly from checkpoints/last.pt; from the start, if none has been written yet.
        overwrite: replace the files of a run in the folder; files that no run wrote always stay.
        callbacks: see `Callback`.
        console: where progress is printed.
    """
    parts.check(config)
    check_trackers(config.training.trackers)
    config = config if data is not None else named(config)
    use_threads(config)
    machine = processes.begin(config.training.precision)
    with RunFolder(folder, resume=resume, overwrite=overwrite) as place:
        agreed(machine, place.check)
        if resume:  # nobody else may change it from here on
            checkpointer = Checkpointer(agreed(machine, place.claim))
            state = prepare(config, machine, data, fresh=not checkpointer.read(config), console=console)
        else:  # made once everything that could be wrong with the configuration has been found right
            state = prepare(config, machine, data, console=console)
            checkpointer = Checkpointer(agreed(machine, place.claim))
        return _run(state, checkpointer, callbacks, console)


def _run(
    state: TrainState, checkpointer: Checkpointer, callbacks: Sequence[Callback], console: Console | None
) -> Result:
    """Continue from the checkpoint that was read, or start; train, test and return the result."""
    config, machine, folder = state.config, state.machine, checkpointer.folder
    done, path = checkpointer.restore(state), folder / "journal.jsonl"
    agreed(machine, checkpointer.check_best)
    show = Show(state, console, quiet=not machine.is_main_process, done=done)
    show.tell(processes.words(machine))
    if machine.is_main_process:
        save(config, folder / "config.yaml")
        journal.cut(path, done, checkpointer.lines)
    machine.wait_for_everyone()
    show.tell(describe(config, state.shares, state.inputs, state.bare_model, machine.device))
    before, callbacks = journal.read(path), _with_doctor(config, show, callbacks)
    with (
        Trackers(config, folder, quiet=not machine.is_main_process) as trackers,
        journal.Journal(path, quiet=not machine.is_main_process, heard=trackers.log) as lines,
        stopping() as stop,
    ):
        _note_restart(state, done, lines, show)
        state.model.train()
        _say_time(state, done, show)
        first = _baselines(state, done, before, lines, show)
        _first_looks(state, before, lines, callbacks)
        try:
            with show:
                done = _steps(state, checkpointer, lines, show, stop, callbacks, done, before)
        except NotFiniteError as error:
            raise NotFiniteError(
                f"{error}; {checkpointer.last_good()}; lower optimizer.lr or set optimizer.max_grad_norm, "
                "then --resume."
            ) from None
    if done < config.training.steps:
        show.tell(f"stopped after step {done}; go on with: nearfar train --run {folder} --resume")
        return Result(folder, done, checkpointer.best_step, None, finished=False)
    scores = _test(state, checkpointer, show)
    if first:
        show.tell(baselines.describe({**first, "trained": scores.recall[1]}))
    if config.training.diagnose_every != 0 and machine.is_main_process:
        show.tell(_verdict(folder, show.console.width))
    return Result(folder, done, checkpointer.best_step, scores, finished=True)


def _note_restart(state: TrainState, done: int, lines: journal.Journal, show: Show) -> None:
    """Write down that the launcher started the processes again, after one of them died."""
    count, world = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), state.machine.num_processes
    if count.isdigit() and int(count):
        # of the next step: another restart before the next checkpoint takes the line out with that step's
        lines.write({"step": done + 1, "restart": {"count": int(count), "after": done, "processes": world}})
        show.tell(f"restart {count}: a process died, and {world} go on after step {done}")


def _spent(before: Iterable[dict[str, Any]]) -> float:
    """Seconds that a resumed run was trained before."""
    return max((float(entry["time"]) for entry in before if isinstance(entry.get("time"), int | float)), default=0.0)


def _with_doctor(config: Config, show: Show, callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks, with the run's own doctor unless one was passed."""
    every = config.training.diagnose_every
    if every == 0 or any(isinstance(each, Doctor) for each in callbacks):
        return list(callbacks)
    every = every or max(LEAST_APART, config.training.steps // LOOKS)
    return [Doctor(every=every, tell=lambda words: show.tell(f"doctor: {words}")), *callbacks]


def _say_time(state: TrainState, done: int, show: Show) -> None:
    """Say how long a run on photographs takes on a CPU, where its steps outnumber those that this takes by far."""
    plan = state.config.training
    alone = state.machine.num_processes == 1 and state.sharded is None and plan.compile == "none"
    if done or plan.steps < WORTHWHILE or not alone or not is_slow(state.inputs, state.machine.device):
        return
    with Progress("measuring two steps", console=show.console):
        each = seconds(copy_of(state))
    show.tell(f"time on this CPU: {estimate(plan.steps, each)}")


def _baselines(
    state: TrainState, done: int, before: Sequence[dict[str, Any]], lines: journal.Journal, show: Show
) -> dict[str, float]:
    """The baselines of the run: measured before its first step, or read from the journal when it is resumed."""
    if not state.config.training.baselines:
        return {}
    found = agreed(state.machine, lambda: baselines.kept(before))
    if found is None and done == 0:
        with shared(state, state.bare_model), Progress("scoring the untrained network", console=show.console) as watch:
            found = baselines.measured(state, watch)
        lines.write({"step": 0, baselines.KEY: found})
        show.tell(baselines.describe(found))
    return found or {}


def _first_looks(
    state: TrainState, before: Sequence[dict[str, Any]], lines: journal.Journal, callbacks: Sequence[Callback]
) -> None:
    """Let doctors take their first look, or continue from their looks before the run was resumed."""
    for each in callbacks:
        if isinstance(each, Doctor):
            found = each.begin(state, before)
            if found:
                lines.write({"step": 0, **found})


def _verdict(folder: Path, width: int) -> str:
    """The doctor's diagnosis of the whole run, and the command that applies its remedy."""
    found = diagnose_run(folder)
    follow = "" if found.healthy else f"\nto follow the first remedy: nearfar train --apply-remedy {folder}"
    return f"doctor: {found.text(min(width, 100))}{follow}"


def _steps(
    state: TrainState,
    checkpointer: Checkpointer,
    lines: journal.Journal,
    show: Show,
    stop: Callable[[], bool],
    callbacks: Sequence[Callback],
    done: int,
    before: Sequence[dict[str, Any]],
) -> int:
    """Take the steps done + 1 ... steps, with evaluations, looks and checkpoints; return the last step."""
    plan = state.config.training
    readings, start = Readings(done), time.monotonic() - _spent(before)  # not the clock on the wall, which may go back
    for step, batch in _batches(state, done):
        moment = take_step(state, step, batch)
        evaluating = step == plan.steps or step % plan.evaluate_every == 0
        if state.sharded is not None and (evaluating or _doctor_looks(step, callbacks)):
            state.sharded.gather()
        readings.put({"step": step, "lr": moment.lr, "time": round(time.monotonic() - start, 3)}, moment.scalars)
        _write(lines, show, readings.take())
        for found in _closer_looks(moment, callbacks):
            lines.write({"step": step, **found})
        last = step == plan.steps or _agreed(state, step, stop)
        if last or evaluating or step % plan.checkpoint_every == 0:
            _write(lines, show, readings.take(all_of_them=True))  # nothing is kept before its losses are known
        if evaluating:
            lines.write({"step": step, **_evaluate(state, checkpointer, moment, show)})
        if last or step % plan.checkpoint_every == 0:
            lines.sync()
            checkpointer.keep(state, step, len(before) + lines.lines)
        done = step
        if last:
            break
    return done


def _doctor_looks(step: int, callbacks: Sequence[Callback]) -> bool:
    """Whether a doctor looks at the network after this step."""
    return any(step % each.every == 0 for each in callbacks if isinstance(each, Doctor))


def _batches(state: TrainState, done: int) -> Iterator[tuple[int, Batch]]:
    if done >= state.config.training.steps:
        return iter(())
    workers, pin = state.config.data.workers, state.machine.device.type == "cuda"
    return feed(state.view, state.sampler, after=done, workers=workers, pin=pin)


def _write(lines: journal.Journal, show: Show, entries: Iterable[dict[str, Any]]) -> None:
    for entry in entries:
        lines.write(entry)
        show.step(entry)


def _closer_looks(moment: Moment, callbacks: Sequence[Callback]) -> Iterator[dict[str, Any]]:
    """The pair weights, if a look is due, and the results of the callbacks."""
    every = moment.state.config.training.explain_every
    if every and moment.step % every == 0:
        why = moment.state.loss.explain(moment.embeddings, moment.target, ids=moment.state.ids(moment.indices))
        yield {
            "active_positives": why.active_positives,
            "active_negatives": why.active_negatives,
            "effective_pairs": round(why.effective_pairs, 3),
        }
    for callback in callbacks:
        found = callback(moment)
        if found:
            yield found


def _agreed(state: TrainState, step: int, stop: Callable[[], bool]) -> bool:
    """Whether to stop; several processes agree on it every tenth step, so that all stop at once."""
    machine = state.machine
    if machine.num_processes == 1:
        return stop()
    if step % 10:
        return False
    return any(gather_objects("train", stop()))


def _evaluate(state: TrainState, checkpointer: Checkpointer, moment: Moment, show: Show) -> dict[str, Any]:
    """Score the held-out classes (by the papers' protocol, the test classes), and save the best weights."""
    plan = state.config.training
    paper, found = plan.protocol == "paper", {}
    samples, gallery = (state.data.test, state.data.gallery) if paper else (state.validation, None)
    if samples is not None:
        model = state.scored_model
        with shared(state, model):
            result = score(model, samples, state.plain, gallery=gallery, watch=show.watch, **state.evaluating)
        scores = result.evaluation
        word = "test" if paper else "validation"
        found = {f"{word} recall@{k}": value for k, value in scores.recall.items()}
        found[f"{word} map_at_r"] = scores.map_at_r
        if state.machine.is_main_process:
            checkpointer.offer(state, moment.step, scores.recall[1])
    if state.machine.is_main_process:
        found["violation"] = violation(
            moment.embeddings,
            moment.labels,
            max_positive_distance=plan.max_positive_distance,
            min_negative_distance=plan.min_negative_distance,
        )
        show.scores(moment.step, found)
    state.machine.wait_for_everyone()
    return found


def _test(state: TrainState, checkpointer: Checkpointer, show: Show) -> Evaluation:
    """Score the best checkpoint on the test classes, once, and save its vectors."""
    model, data = state.scored_model, state.data
    agreed(state.machine, lambda: checkpointer.restore_best(state))
    options: dict[str, Any] = {"gallery": data.gallery, "ks": data.ks, "resamples": 2000, **state.evaluating}
    with shared(state, model), Progress("testing", console=show.console) as watch:
        found = score(model, data.test, state.plain, watch=watch, **options)
    if state.machine.is_main_process:
        _write_test(state, checkpointer, show, found)
    return found.evaluation


def _write_test(state: TrainState, checkpointer: Checkpointer, show: Show, found: Score) -> None:
    """Save vectors and scores of the test, and show them."""
    model, data = state.scored_model, state.data
    scores, names = found.evaluation, [data.test.names[row] for row in found.rows.tolist()]
    arrays = {"x": found.x.cpu().numpy(), "y": data.test.labels[found.rows], "name": np.array(names, dtype=np.str_)}
    arrays["classes"] = np.array(data.test.classes, dtype=np.str_)
    arrays["fingerprint"] = np.array(fingerprint_of(model, state.plain))
    if isinstance(data.test, Tensors) and data.test.x.dtype == torch.uint8:
        arrays["images"] = data.test.x.numpy()
    write_arrays(checkpointer.folder / "embeddings.npz", arrays)
    by_luck = chance(arrays["y"], None if data.gallery is None else data.gallery.labels)
    about = {"best_step": checkpointer.best_step, "left_out": list(found.left_out), "chance": round(by_luck, 6)}
    write_text(checkpointer.folder / "scores.json", json.dumps(scores.to_dict() | about) + "\n")
    show.final(scores, checkpointer.best_step, paper=state.config.training.protocol == "paper")
    if found.left_out:
        show.tell(found.notice())
