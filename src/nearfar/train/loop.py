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
from nearfar.batches import violations
from nearfar.data import DataSet, Tensors
from nearfar.data.view import Batch
from nearfar.doctor import Doctor, diagnose_run
from nearfar.evaluation import Evaluation
from nearfar.evaluation.preprocessing import fingerprint_of
from nearfar.runs import journal, parts
from nearfar.runs.config import Config, save
from nearfar.train import processes
from nearfar.train.build import describe, is_slow, set_data_name, set_threads
from nearfar.train.checkpoints import Checkpointer
from nearfar.train.cost import copy_state, describe_time, measure_seconds
from nearfar.train.folder import RunFolder
from nearfar.train.processes import run_on_first_rank
from nearfar.train.progress import NotFiniteError, RunProgress, ScalarQueue, catch_interrupt
from nearfar.train.scores import (
    BASELINES,
    Score,
    chance_recall,
    describe_baselines,
    measure_baselines,
    read_baselines,
    score,
    share_evaluations,
)
from nearfar.train.state import Moment, TrainState, load_batches, prepare, take_step
from nearfar.train.trackers import Trackers, check_trackers

__all__ = ["Callback", "Result", "fit"]

CHECKS, MIN_STEPS_APART = 30, 20
"""How often the doctor checks a run, as in its calibration, and the fewest steps between two checks."""
MIN_STEPS_TIMED = 100
"""The fewest steps of a run for which three more steps are spent on estimating its time."""

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
        if resume:  # claimed first, so that no other process changes the checkpoint
            checkpointer = Checkpointer(run_on_first_rank(machine, place.claim))
            state = prepare(config, machine, data, fresh=not checkpointer.read(config), console=console)
        else:  # claimed last, so that a wrong configuration leaves no folder
            state = prepare(config, machine, data, console=console)
            checkpointer = Checkpointer(run_on_first_rank(machine, place.claim))
        return _run(state, checkpointer, callbacks, console)


def _run(
    state: TrainState, checkpointer: Checkpointer, callbacks: Sequence[Callback], console: Console | None
) -> Result:
    """Continue from the checkpoint that was read, or start; train, test and return the result."""
    config, machine, folder = state.config, state.machine, checkpointer.folder
    done, path = checkpointer.restore(state), folder / "journal.jsonl"
    run_on_first_rank(machine, checkpointer.check_best)
    progress = RunProgress(state, console, quiet=not machine.is_main_process, done=done)
    progress.tell(processes.describe(machine))
    if machine.is_main_process:
        save(config, folder / "config.yaml")
        journal.cut(path, done, checkpointer.lines)
    machine.wait_for_everyone()
    progress.tell(describe(config, state.shares, state.inputs, state.bare_model, machine.device))
    before, callbacks = journal.read(path), _with_doctor(config, progress, callbacks)
    with (
        Trackers(config, folder, quiet=not machine.is_main_process) as trackers,
        journal.Journal(path, quiet=not machine.is_main_process, on_write=trackers.log) as lines,
        catch_interrupt() as stop,
    ):
        _note_restart(state, done, lines, progress)
        state.model.train()
        _estimate_time(state, done, progress)
        first = _get_baselines(state, done, before, lines, progress)
        _begin_doctors(state, before, lines, callbacks)
        try:
            with progress:
                done = _steps(state, checkpointer, lines, progress, stop, callbacks, done, before)
        except NotFiniteError as error:
            raise NotFiniteError(
                f"{error}; {checkpointer.last_good()}; lower optimizer.lr or set optimizer.max_grad_norm, "
                "then --resume."
            ) from None
    if done < config.training.steps:
        progress.tell(f"stopped after step {done}; go on with: nearfar train --run {folder} --resume")
        return Result(folder, done, checkpointer.best_step, None, finished=False)
    scores = _test(state, checkpointer, progress)
    if first:
        progress.tell(describe_baselines({**first, "trained": scores.recall[1]}))
    if config.training.diagnose_every != 0 and machine.is_main_process:
        progress.tell(_diagnose(folder, progress.console.width))
    return Result(folder, done, checkpointer.best_step, scores, finished=True)


def _note_restart(state: TrainState, done: int, lines: journal.Journal, progress: RunProgress) -> None:
    """Record in the journal that the launcher restarted the processes after one of them died."""
    count, world = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), state.machine.num_processes
    if count.isdigit() and int(count):
        # with the number of the next step: another restart before the next checkpoint removes the line again
        lines.write({"step": done + 1, "restart": {"count": int(count), "after": done, "processes": world}})
        progress.tell(f"restart {count}: a process died, and {world} go on after step {done}")


def _earlier_seconds(before: Iterable[dict[str, Any]]) -> float:
    """The seconds that a resumed run was trained before."""
    return max((float(entry["time"]) for entry in before if isinstance(entry.get("time"), int | float)), default=0.0)


def _with_doctor(config: Config, progress: RunProgress, callbacks: Sequence[Callback]) -> list[Callback]:
    """Add a doctor to the callbacks, unless they contain one or the configuration wants none."""
    every = config.training.diagnose_every
    if every == 0 or any(isinstance(each, Doctor) for each in callbacks):
        return list(callbacks)
    every = every or max(MIN_STEPS_APART, config.training.steps // CHECKS)
    return [Doctor(every=every, tell=lambda words: progress.tell(f"doctor: {words}")), *callbacks]


def _estimate_time(state: TrainState, done: int, progress: RunProgress) -> None:
    """Estimate how long a run on photographs takes on a CPU, if it is long enough to be worth three steps."""
    plan = state.config.training
    alone = state.machine.num_processes == 1 and state.sharded is None and plan.compile == "none"
    if done or plan.steps < MIN_STEPS_TIMED or not alone or not is_slow(state.inputs, state.machine.device):
        return
    with Progress("measuring two steps", console=progress.console):
        seconds = measure_seconds(copy_state(state))
    progress.tell(f"time on this CPU: {describe_time(plan.steps, seconds)}")


def _get_baselines(
    state: TrainState, done: int, before: Sequence[dict[str, Any]], lines: journal.Journal, progress: RunProgress
) -> dict[str, float]:
    """The baselines of the run: measured before the first step, or read from the journal if it is resumed."""
    if not state.config.training.baselines:
        return {}
    found = run_on_first_rank(state.machine, lambda: read_baselines(before))
    if found is None and done == 0:
        with (
            share_evaluations(state, state.bare_model),
            Progress("scoring the untrained network", console=progress.console) as watch,
        ):
            found = measure_baselines(state, watch)
        lines.write({"step": 0, BASELINES: found})
        progress.tell(describe_baselines(found))
    return found or {}


def _begin_doctors(
    state: TrainState, before: Sequence[dict[str, Any]], lines: journal.Journal, callbacks: Sequence[Callback]
) -> None:
    """Let doctors check the untrained network, or continue from their entries in the journal of a resumed run."""
    for each in callbacks:
        if isinstance(each, Doctor):
            found = each.begin(state, before)
            if found:
                lines.write({"step": 0, **found})


def _diagnose(folder: Path, width: int) -> str:
    """The doctor's diagnosis of the whole run as text, and the command that applies its remedy."""
    found = diagnose_run(folder)
    follow = "" if found.healthy else f"\nto follow the first remedy: nearfar train --apply-remedy {folder}"
    return f"doctor: {found.text(min(width, 100))}{follow}"


def _steps(
    state: TrainState,
    checkpointer: Checkpointer,
    lines: journal.Journal,
    progress: RunProgress,
    stop: Callable[[], bool],
    callbacks: Sequence[Callback],
    done: int,
    before: Sequence[dict[str, Any]],
) -> int:
    """Take the steps done + 1 ... steps, with evaluations, callbacks and checkpoints; return the last step."""
    plan = state.config.training
    queue, start = ScalarQueue(done), time.monotonic() - _earlier_seconds(before)
    for step, batch in _batches(state, done):
        moment = take_step(state, step, batch)
        evaluating = step == plan.steps or step % plan.evaluate_every == 0
        if state.sharded is not None and (evaluating or _is_doctor_due(step, callbacks)):
            state.sharded.gather()
        queue.put({"step": step, "lr": moment.lr, "time": round(time.monotonic() - start, 3)}, moment.scalars)
        _write(lines, progress, queue.take())
        for found in _extra_entries(moment, callbacks):
            lines.write({"step": step, **found})
        last = step == plan.steps or _should_stop(state, step, stop)
        if last or evaluating or step % plan.checkpoint_every == 0:
            _write(lines, progress, queue.take(all_of_them=True))  # raises before a network that diverged is saved
        if evaluating:
            lines.write({"step": step, **_evaluate(state, checkpointer, moment, progress)})
        if last or step % plan.checkpoint_every == 0:
            lines.sync()
            checkpointer.keep(state, step, len(before) + lines.lines)
        done = step
        if last:
            break
    return done


def _is_doctor_due(step: int, callbacks: Sequence[Callback]) -> bool:
    """Whether a doctor checks the network after this step."""
    return any(step % each.every == 0 for each in callbacks if isinstance(each, Doctor))


def _batches(state: TrainState, done: int) -> Iterator[tuple[int, Batch]]:
    if done >= state.config.training.steps:
        return iter(())
    return load_batches(state, done, workers=state.config.data.workers)


def _write(lines: journal.Journal, progress: RunProgress, entries: Iterable[dict[str, Any]]) -> None:
    for entry in entries:
        lines.write(entry)
        progress.step(entry)


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
        found = callback(moment)
        if found:
            yield found


def _should_stop(state: TrainState, step: int, stop: Callable[[], bool]) -> bool:
    """Whether to stop; several processes ask one another every tenth step, so that all stop together."""
    machine = state.machine
    if machine.num_processes == 1:
        return stop()
    if step % 10:
        return False
    return any(gather_objects("train", stop()))


def _evaluate(state: TrainState, checkpointer: Checkpointer, moment: Moment, progress: RunProgress) -> dict[str, Any]:
    """Score the held-out classes (under the papers' protocol, the test classes), and save the best weights."""
    plan = state.config.training
    paper, found = plan.protocol == "paper", {}
    samples, gallery = (state.data.test, state.data.gallery) if paper else (state.validation, None)
    if samples is not None:
        model = state.scored_model
        with share_evaluations(state, model):
            result = score(model, samples, state.plain, gallery=gallery, watch=progress.watch, **state.evaluating)
        scores = result.evaluation
        word = "test" if paper else "validation"
        found = {f"{word} recall@{k}": value for k, value in scores.recall.items()}
        found[f"{word} map_at_r"] = scores.map_at_r
        if state.machine.is_main_process:
            checkpointer.offer(state, moment.step, scores.recall[1])
    if state.machine.is_main_process:
        near, far = plan.max_positive_distance, plan.min_negative_distance
        broken = violations(moment.embeddings, moment.labels, max_positive_distance=near, min_negative_distance=far)
        found["violation"] = float(broken.share)
        progress.scores(moment.step, found)
    state.machine.wait_for_everyone()
    return found


def _test(state: TrainState, checkpointer: Checkpointer, progress: RunProgress) -> Evaluation:
    """Score the best checkpoint on the test classes, once, and save its vectors."""
    model, data = state.scored_model, state.data
    run_on_first_rank(state.machine, lambda: checkpointer.restore_best(state))
    options: dict[str, Any] = {"gallery": data.gallery, "ks": data.ks, "resamples": 2000, **state.evaluating}
    with share_evaluations(state, model), Progress("testing", console=progress.console) as watch:
        found = score(model, data.test, state.plain, watch=watch, **options)
    if state.machine.is_main_process:
        _write_test(state, checkpointer, progress, found)
    return found.evaluation


def _write_test(state: TrainState, checkpointer: Checkpointer, progress: RunProgress, found: Score) -> None:
    """Save the vectors and the scores of the test, and print the scores."""
    model, data = state.scored_model, state.data
    scores, names = found.evaluation, [data.test.names[row] for row in found.rows.tolist()]
    arrays = {"x": found.x.cpu().numpy(), "y": data.test.labels[found.rows], "name": np.array(names, dtype=np.str_)}
    arrays["classes"] = np.array(data.test.classes, dtype=np.str_)
    arrays["fingerprint"] = np.array(fingerprint_of(model, state.plain))
    if isinstance(data.test, Tensors) and data.test.x.dtype == torch.uint8:
        arrays["images"] = data.test.x.numpy()
    write_arrays(checkpointer.folder / "embeddings.npz", arrays)
    chance = chance_recall(arrays["y"], None if data.gallery is None else data.gallery.labels)
    about = {"best_step": checkpointer.best_step, "left_out": list(found.left_out), "chance": round(chance, 6)}
    write_text(checkpointer.folder / "scores.json", json.dumps(scores.to_dict() | about) + "\n")
    progress.final(scores, checkpointer.best_step, paper=state.config.training.protocol == "paper")
    if found.left_out:
        progress.tell(found.notice())
