"""The checkpoints of a run: the last state to resume from, the best weights, and the states of random generators."""

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearfar._utils.checkpoint import BEST, LAST, load, save
from nearfar._utils.files import atomic_write, first_line
from nearfar._utils.process_group import gather_objects
from nearfar.runs._config import to_tree
from nearfar.runs._sections import Config
from nearfar.runs.changes import check_resumable
from nearfar.train._folder import remove_shards
from nearfar.train._state import TrainState, seed_everything


class Checkpointer:
    """Write and read `checkpoints/last.pt` and `checkpoints/best.pt` of a run folder.

    `last.pt` records the step of the weights in `best.pt`. A better `best.pt` may be written before the next `last.pt`,
    and a killed run may never reach its step again; so `best-before.pt` keeps the file that `last.pt` refers to until
    the next `last.pt`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        home = folder / "checkpoints"
        self.last, self.best, self._before = (home / f"{name}.pt" for name in ("last", "best", "best-before"))
        self.best_score, self.best_step = float("-inf"), 0
        self.lines = 0  # the number of lines in the journal when the restored state was written
        self._saved_step: int | None = None
        self._recorded = 0  # the best step recorded in last.pt
        self._state: dict[str, Any] | None = None

    def read(self, config: Config) -> bool:
        """Read the last state and compare the configuration with it; False if none has been written yet."""
        if not self.last.is_file():
            return False
        self._state = load(self.last, LAST)
        check_resumable(self._state["config"], config, self._state["step"])
        return True

    def keep(self, state: TrainState, step: int, lines: int) -> None:
        """Save the state after `step` and `lines` of the journal, from which a run can be resumed exactly."""
        machine = state.machine
        randoms = gather_objects("train", random_state())
        sharded = state.sharded is not None
        network = self._network_state(state, step) if sharded or machine.is_main_process else {}
        if machine.is_main_process:
            scaler, average = machine.scaler, state.step.average
            self._save(
                self.last,
                {
                    "step": step,
                    "config": to_tree(state.config),
                    **network,
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
                remove_shards(self.last.parent, network["shards"])
        self._saved_step = step
        machine.wait_for_everyone()

    def _network_state(self, state: TrainState, step: int) -> dict[str, Any]:
        """Weights, optimizer state and proximal anchors; of a sharded run, the folder that all processes wrote to."""
        optimizer, proximal = state.step.optimizer, state.step.proximal
        if state.sharded is None:
            return {
                "model": state.bare_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "proximal": None if proximal is None else proximal.state_dict(),
            }
        with self._writing(self.last.parent):
            self.last.parent.mkdir(parents=True, exist_ok=True)
            anchors = [] if proximal is None else proximal.anchors
            shards = state.sharded.save(self.last.parent, step, state.loss, optimizer, anchors)
        return {"shards": shards, "model": None, "optimizer": None, "proximal": None}

    def restore(self, state: TrainState) -> int:
        """Restore the state that `read` read, and return the step after which the run continues."""
        if self._state is None:
            return 0
        saved, self._state = self._state, None
        try:
            self._load_into(state, saved)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"checkpoint: {self.last} does not fit this run ({first_line(error)}); train anew."
            ) from None
        step: int = saved["step"]
        self._saved_step = step
        return step

    def _load_into(self, state: TrainState, saved: dict[str, Any]) -> None:
        machine, optimizer, proximal = state.machine, state.step.optimizer, state.step.proximal
        settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        state.loss.load_state_dict(saved["loss"])
        if state.sharded is not None:
            anchors = [] if proximal is None else proximal.anchors
            state.sharded.load(self.last.parent, saved["shards"], state.loss, optimizer, anchors)
            state.sharded.gather()
            for group, now in zip(optimizer.param_groups, settings, strict=True):
                group.update(now)
        else:
            state.bare_model.load_state_dict(saved["model"])
            # hyper-parameters of the present configuration and device replace those of the checkpoint
            groups = [{**group, **now} for group, now in zip(saved["optimizer"]["param_groups"], settings, strict=True)]
            optimizer.load_state_dict({**saved["optimizer"], "param_groups": groups})
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
            set_random_state(saved["random"][machine.process_index])
        else:  # the number of ranks has changed: each generator starts from a new seed
            seed_everything(state.config.training.seed + 1000 * saved["step"] + machine.process_index)

    def check_best(self) -> None:
        """Ensure that `best.pt` is of the step that `last.pt` refers to; called on the first rank only."""
        if self.best_step and self._before.is_file():
            if load(self._before, BEST)["step"] == self.best_step:
                os.replace(self._before, self.best)
            self._before.unlink(missing_ok=True)
        if self.best_step:
            self._load_best()

    def offer(self, state: TrainState, step: int, score: float) -> None:
        """Save the present weights if their score is the best so far."""
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
        self.best_step = self._saved_step or 0
        self._save_best(state, None)

    def _load_best(self) -> dict[str, Any]:
        saved = load(self.best, BEST)
        if saved["step"] != self.best_step:
            raise ValueError(
                f"checkpoint: {self.best} is of step {saved['step']}, but the best of this run was step "
                f"{self.best_step}; put back the file that this run wrote, or train anew."
            )
        return saved

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
                    "crop_pct": inputs.data.crop_pct,
                },
                "classes": list(state.train.classes),
            },
        )

    def last_good(self) -> str:
        """Describe where the last good checkpoint is."""
        if not self._saved_step:
            return "no checkpoint is there"
        return f"the last good checkpoint is {self.last} (step {self._saved_step})"

    def _save(self, path: Path, saved: dict[str, Any]) -> None:
        with self._writing(path):
            save(path, saved)

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            raise OSError(
                f"train: cannot write {path} ({first_line(error)}); {self.last_good()}; make room, then --resume."
            ) from None


def random_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, in types that `weights_only` can read."""
    python = random.getstate()
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002  (users' code may draw from it)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [torch.from_numpy(np.asarray(keys, dtype=np.int64)), int(position), int(has_gauss), float(gauss)],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore states that `random_state` returned."""
    torch.set_rng_state(state["torch"].cpu())
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
