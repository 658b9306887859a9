"""What a run keeps: the last state to resume from, and the best weights to use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from nearfar.train import checkpoint
from nearfar.train.setting import Setting, seed_everything


class Keeper:
    """Writes and reads `checkpoints/last.pt` and `checkpoints/best.pt` of a run folder.

    Args:
        folder: the run.
        resume: the folder must hold a run; otherwise it must not.
    """

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self.folder = folder
        self.last, self.best = folder / "checkpoints" / "last.pt", folder / "checkpoints" / "best.pt"
        self.best_score, self.best_step = float("-inf"), 0
        self._kept: int | None = None
        if resume and not self.last.is_file():
            raise FileNotFoundError(f"train: {folder} holds no checkpoint to resume from; train without --resume.")
        if not resume and (folder / "checkpoints").exists():
            raise FileExistsError(
                f"train: {folder} already holds a run; go on with --resume, or choose another folder with --run."
            )

    def begin(self) -> None:
        """Make the folder, once everything that could be wrong with the configuration has been found right."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"train: cannot make {self.folder} ({error.strerror}); choose another folder with --run."
            ) from None

    def keep(self, setting: Setting, step: int) -> None:
        """Write the state after `step`, from which a run goes on as if nothing had happened."""
        machine = setting.machine
        randoms = [checkpoint.random_state()]
        if machine.num_processes > 1:
            randoms = gather_object(randoms)
        if machine.is_main_process:
            proximal, scaler = setting.step.proximal, machine.scaler
            self._save(
                self.last,
                {
                    "step": step,
                    "model": setting.bare_model.state_dict(),
                    "loss": setting.loss.state_dict(),
                    "optimiser": setting.step.optimiser.state_dict(),
                    "sampler": setting.sampler.state_dict(step=step),
                    "proximal": None if proximal is None else proximal.state_dict(),
                    "scaler": None if scaler is None else scaler.state_dict(),
                    "random": randoms,
                    "best": [self.best_score, self.best_step],
                },
            )
        self._kept = step
        machine.wait_for_everyone()

    def restore(self, setting: Setting) -> int:
        """Put everything back as it was; gives the step after which the run goes on."""
        machine = setting.machine
        state = checkpoint.load(self.last, machine.device)
        setting.bare_model.load_state_dict(state["model"])
        setting.loss.load_state_dict(state["loss"])
        setting.step.optimiser.load_state_dict(state["optimiser"])
        setting.sampler.load_state_dict(state["sampler"])
        if setting.step.proximal is not None and state["proximal"] is not None:
            setting.step.proximal.load_state_dict(state["proximal"])
        if machine.scaler is not None and state["scaler"] is not None:
            machine.scaler.load_state_dict(state["scaler"])
        step: int = state["step"]
        self.best_score, self.best_step = state["best"]
        if len(state["random"]) == machine.num_processes:
            checkpoint.set_random_state(state["random"][machine.process_index])
        else:  # another number of ranks: their generators start anew, each with its own seed
            seed_everything(setting.config.training.seed + 1000 * step + machine.process_index)
        self._kept = step
        return step

    def offer(self, setting: Setting, step: int, score: float) -> None:
        """Keep these weights if they score better than all before."""
        if score <= self.best_score:
            return
        self.best_score, self.best_step = score, step
        self._save_best(setting, score)

    def restore_best(self, setting: Setting) -> None:
        """Load the best weights; the last ones are the best where nothing was scored on the way."""
        if self.best_step:
            setting.bare_model.load_state_dict(checkpoint.load(self.best)["model"])
            return
        self.best_step = self._kept or 0
        self._save_best(setting, None)

    def _save_best(self, setting: Setting, score: float | None) -> None:
        model, inputs = setting.bare_model.state_dict(), setting.inputs
        about = {"transform": inputs.transform, "shape": list(inputs.shape)}
        self._save(self.best, {"step": self.best_step, "score": score, "model": model, "inputs": about})

    def last_good(self) -> str:
        """Where the last good checkpoint is, in words."""
        return (
            f"the last good checkpoint is {self.last} (step {self._kept})" if self._kept else "no checkpoint is there"
        )

    def _save(self, path: Path, state: dict[str, Any]) -> None:
        try:
            checkpoint.save(path, state)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            words = str(error).splitlines()[0]
            raise OSError(
                f"train: cannot write {path} ({words}); {self.last_good()}; make room, then --resume."
            ) from None
