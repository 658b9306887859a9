"""The checkpoints of a run: the last state to resume from, and the best weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nearfar._utils.files import atomic_write
from nearfar._utils.process_group import gather_objects
from nearfar.runs.changes import check_resumable
from nearfar.runs.config import Config, to_tree
from nearfar.train import checkpoint
from nearfar.train.folder import remove_shards
from nearfar.train.state import TrainState, seed_everything

__all__ = ["Checkpointer"]


class Checkpointer:
    """Write and read `checkpoints/last.pt` and `checkpoints/best.pt` of a run folder.

    `last.pt` records the step of the weights in `best.pt`. Between two `last.pt` a better `best.pt` may be written,
    whose step a killed run may not reach again; so the one that `last.pt` refers to stays in `best-before.pt` until
    then.

    Args:
        folder: the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last, self.best, self._before = (
            folder / "checkpoints" / f"{n}.pt" for n in ("last", "best", "best-before")
        )
        self.best_score, self.best_step = float("-inf"), 0
        self.lines = 0
        """The number of lines in the journal when the restored state was written."""
        self._kept: int | None = None
        self._recorded = 0
        """The best step recorded in last.pt."""
        self._state: dict[str, Any] | None = None

    def read(self, config: Config) -> bool:
        """Read the last state and compare the configuration with it; False if none has been written yet.

        Raises:
            ValueError: it cannot be used, or the configuration has changed.
        """
        if not self.last.is_file():
            return False
        self._state = checkpoint.load(self.last, checkpoint.LAST)
        check_resumable(self._state["config"], config, self._state["step"])
        return True

    def keep(self, state: TrainState, step: int, lines: int) -> None:
        """Save the state after `step` and `lines` of the journal, from which a run can be resumed exactly."""
        machine = state.machine
        randoms = gather_objects("train", checkpoint.random_state())
        sharded = state.sharded is not None
        learned = self._learned(state, step) if sharded or machine.is_main_process else {}
        if machine.is_main_process:
            scaler, average = machine.scaler, state.step.average
            self._save(
                self.last,
                {
                    "step": step,
                    "config": to_tree(state.config),
                    **learned,
                    "loss": state.loss.state_dict(),
                    "sampler": state.sampler.state_dict(step=step),
                    "average": None if average is None else average.state_dict(),
                    "scaler": None if scaler is None else scaler.state_dict(),
                    "random": randoms,
                    "best": [self.best_score, self.best_step],
                    "lines": lines,
                },
            )
            self._recorded = self.best_step
            self._before.unlink(missing_ok=True)
            if sharded:
                remove_shards(self.last.parent, learned["shards"])
        self._kept = step
        machine.wait_for_everyone()

    def _learned(self, state: TrainState, step: int) -> dict[str, Any]:
        """Weights, moments and anchors; or the folder where every process wrote its own part of them."""
        moves, proximal = state.step.optimizer, state.step.proximal
        if state.sharded is None:
            return {
                "model": state.bare_model.state_dict(),
                "optimizer": moves.state_dict(),
                "proximal": None if proximal is None else proximal.state_dict(),
            }
        with self._writing(self.last.parent):
            self.last.parent.mkdir(parents=True, exist_ok=True)
            anchors = [] if proximal is None else proximal.anchors
            shards = state.sharded.save(self.last.parent, step, state.loss, moves, anchors)
        return {"shards": shards, "model": None, "optimizer": None, "proximal": None}

    def restore(self, state: TrainState) -> int:
        """Restore the state that `read` read, and return the step after which the run continues."""
        if self._state is None:
            return 0
        saved, self._state = self._state, None
        try:
            self._put(saved, state)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"checkpoint: {self.last} does not fit this run ({checkpoint.first_line(error)}); train anew."
            ) from None
        step: int = saved["step"]
        self._kept = step
        return step

    def _put(self, saved: dict[str, Any], state: TrainState) -> None:
        machine, moves, proximal = state.machine, state.step.optimizer, state.step.proximal
        settings = [{key: value for key, value in group.items() if key != "params"} for group in moves.param_groups]
        state.loss.load_state_dict(saved["loss"])
        if state.sharded is not None:
            anchors = [] if proximal is None else proximal.anchors
            state.sharded.load(self.last.parent, saved["shards"], state.loss, moves, anchors)
            state.sharded.gather()
            for group, now in zip(moves.param_groups, settings, strict=True):
                group.update(now)
        else:
            state.bare_model.load_state_dict(saved["model"])
            # rates and decay as the configuration has them now, kernels as the device does: torch reads them as it
            # loads
            groups = [{**group, **now} for group, now in zip(saved["optimizer"]["param_groups"], settings, strict=True)]
            moves.load_state_dict({**saved["optimizer"], "param_groups": groups})
            if proximal is not None:
                proximal.load_state_dict(saved["proximal"])
        state.sampler.load_state_dict(saved["sampler"])
        if state.step.average is not None:
            state.step.average.load_state_dict(saved["average"])
        if machine.scaler is not None and saved["scaler"] is not None:
            machine.scaler.load_state_dict(saved["scaler"])
        self.best_score, self.best_step = saved["best"]
        self.lines = int(saved["lines"])
        self._recorded = self.best_step
        if len(saved["random"]) == machine.num_processes:
            checkpoint.set_random_state(saved["random"][machine.process_index])
        else:  # another number of ranks: their generators start anew, each with its own seed
            seed_everything(state.config.training.seed + 1000 * saved["step"] + machine.process_index)

    def check_best(self) -> None:
        """Make sure that `best.pt` is of the step that `last.pt` refers to; called on the first rank only.

        Raises:
            FileNotFoundError: it is missing.
            ValueError: it is damaged, or of another step.
        """
        if self.best_step and self._before.is_file():
            if self._of(self._before) == self.best_step:
                os.replace(self._before, self.best)
            self._before.unlink(missing_ok=True)
        if self.best_step:
            self._load_best()

    def offer(self, state: TrainState, step: int, score: float) -> None:
        """Save these weights if they score better than all before."""
        if score <= self.best_score:
            return
        if self._recorded and self.best_step == self._recorded and not self._before.is_file():
            with self._writing(self._before), atomic_write(self._before) as temporary:
                shutil.copyfile(self.best, temporary)
        self.best_score, self.best_step = score, step
        self._save_best(state, score)

    def restore_best(self, state: TrainState) -> None:
        """Load the best weights; if nothing was scored during training, the last ones."""
        if self.best_step:
            state.scored_model.load_state_dict(self._load_best()["model"])
            return
        self.best_step = self._kept or 0
        self._save_best(state, None)

    def _load_best(self) -> dict[str, Any]:
        saved = checkpoint.load(self.best, checkpoint.BEST)
        if saved["step"] != self.best_step:
            raise ValueError(
                f"checkpoint: {self.best} is of step {saved['step']}, but the best of this run was step "
                f"{self.best_step}; put back the file that this run wrote, or train anew."
            )
        return saved

    def _of(self, path: Path) -> int:
        """The step of the weights in a file."""
        step: int = checkpoint.load(path, checkpoint.BEST)["step"]
        return step

    def _save_best(self, state: TrainState, score: float | None) -> None:
        inputs = state.inputs
        self._save(
            self.best,
            {
                "step": self.best_step,
                "config": to_tree(state.config),
                "score": score,
                "model": state.scored_model.state_dict(),
                "inputs": {
                    "transform": inputs.transform,
                    "shape": list(inputs.shape),
                    "crop_pct": inputs.crop_pct,
                },
                "classes": list(state.train.classes),
            },
        )

    def last_good(self) -> str:
        """Describe where the last good checkpoint is."""
        return (
            f"the last good checkpoint is {self.last} (step {self._kept})" if self._kept else "no checkpoint is there"
        )

    def _save(self, path: Path, saved: dict[str, Any]) -> None:
        with self._writing(path):
            checkpoint.save(path, saved)

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            raise OSError(
                f"train: cannot write {path} ({checkpoint.first_line(error)}); {self.last_good()}; "
                "make room, then --resume."
            ) from None
