"""The largest step that fits, plain and wrapped, compared: see memscale.verify."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from memscale._C import InternalError
from memscale.estimation.oom_place import read_traceback
from memscale.model.inputs import Call
from memscale.verify.blocks import verify_layers
from memscale.verify.differing_layer import LayerLog, find_suspects, watch_layers
from memscale.verify.fit import check_host, predict, shorter, smaller
from memscale.verify.report import BLOCK_BY_BLOCK, FULL_STEP, VerifyReport
from memscale.verify.state import State, unchanged
from memscale.verify.step import (
    Comparison,
    Result,
    Step,
    compare,
    gradient_of,
    said,
    without_noise,
)

__all__ = ["verify_step"]

_NO_GRADIENT = "no gradient, plain or wrapped"


@dataclass(frozen=True)
class _Refused:
    """A step of this size cannot be compared."""

    why: str
    too_large: bool  # else the model does not take such a call


def verify_step(step: Step, tolerance: float = 0.0) -> VerifyReport:
    """Compare ``step`` plain and wrapped; a smaller one if the plain does not fit."""
    check_host(step)
    with unchanged(*step.roots().values()) as state:
        return _Search(step, state, tolerance).run()


class _Search:
    """From the full step down to one that fits."""

    def __init__(self, step: Step, state: State, tolerance: float) -> None:
        self.step = step
        self.state = state
        self.tolerance = tolerance
        # The smallest call so far that the model takes.
        self.taken, self.cuts = step.call, ""
        self.notes: list[str] = []

    def run(self) -> VerifyReport:
        report = self._attempt(self.step.call, FULL_STEP)
        if isinstance(report, VerifyReport):
            return report
        found = self._first_of(smaller(self.taken)) or self._first_of(
            shorter(self.taken)
        )
        if found is None:
            found = self._block_by_block()
        found.why = report.why
        found.notes += self.notes
        return found

    def _first_of(self, calls: Iterable[tuple[str, Call]]) -> VerifyReport | None:
        before = self.cuts
        for size, call in calls:
            how = f"{before}, {size}" if before else size
            report = self._attempt(call, how)
            if isinstance(report, VerifyReport):
                return report
            if not report.too_large:
                self.notes.append(f"the model does not take {how}: {report.why}")
                break
            self.taken, self.cuts = call, how
        return None

    def _attempt(self, call: Call, how: str) -> VerifyReport | _Refused:
        step = replace(self.step, call=call)
        full = how == FULL_STEP
        fit = predict(step)
        if fit.fits is False:
            return _Refused(str(fit), too_large=True)
        if fit.rejected and not full:
            return _Refused(fit.rejected, too_large=False)
        try:
            report = _compare_steps(step, self.state, self.tolerance)
        except torch.OutOfMemoryError:
            report = None
        except Exception as error:
            if full:
                raise  # the sample is wrong, or the model is
            return _Refused(said(error), too_large=False)
        if report is None:
            gc.collect()  # the error's traceback held tensors
            return _Refused("the step ran out of memory", too_large=True)
        report.how = how
        if fit.unknown:
            report.notes.append(f"its memory was not predicted: {fit.unknown}")
        return report

    def _block_by_block(self) -> VerifyReport:
        step = self.step
        before = _dropped(step)
        found = verify_layers(step, self.state, self.tolerance)
        report = VerifyReport(
            how=BLOCK_BY_BLOCK,
            call=str(step.call),
            tolerance=self.tolerance,
            num_compared=found.num_compared,
            differing=found.differing,
            missing=found.missing,
            error="; ".join(found.errors[:1]),
            first_differing_layer=next(iter(found.layers), None),
            unchecked=found.unchecked,
        )
        covered = {
            parameter
            for name in found.compared
            for parameter in step.model.get_submodule(name).parameters()
        }
        for name, parameter in step.parameters():
            if not parameter.requires_grad:
                continue
            if parameter not in covered:
                report.unchecked.append(f"parameter {name}: in no layer that was run")
            elif name not in found.trained:
                report.untrained[name] = _NO_GRADIENT
        report.notes.append("the loss and ops outside of layers were not compared")
        _note_dropped(report, before, _dropped(step))
        return report


def _compare_steps(step: Step, state: State, tolerance: float) -> VerifyReport:
    """Raises what the plain step raises; of the wrapped one, out of memory only."""
    before = _dropped(step)
    plain = step.run(state, plain=True)
    between = _dropped(step)
    if between != before:
        raise InternalError("the model is not plain while its executor is paused")
    report = VerifyReport(
        call=str(step.call), tolerance=tolerance, loss_source=plain.loss_source
    )
    _note_untrained(step, plain, report)
    try:
        wrapped = step.run(state, plain=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        phase, layer = read_traceback(error.__traceback__, step.model)
        report.error = said(error)
        report.first_differing_layer = layer
    if report.error:
        if phase == "backward":
            report.first_differing_layer = _layer_that_raises(step, state, report)
        return report
    _note_dropped(report, between, _dropped(step))
    found = compare(plain, wrapped, tolerance)
    report.num_compared = found.num_compared
    report.differing, report.missing = found.differing, found.missing
    if not found.equal:
        _explain(step, state, report, plain, found)
    if "loss" in plain.tensors:
        report.loss = float(plain.tensors["loss"])
        report.loss_equal = all(entry.name != "loss" for entry in report.differing)
    return report


def _note_untrained(step: Step, plain: Result, report: VerifyReport) -> None:
    trained = set(plain.trained)
    for name, parameter in step.parameters():
        if parameter.requires_grad and name not in trained:
            report.untrained[name] = _NO_GRADIENT


# ---- what the executor says of itself ----


def _dropped(step: Step) -> tuple[int, int] | None:
    """Saves and bytes that it has dropped so far."""
    ask = getattr(step.executor, "stats", None)
    if ask is None:
        return None
    stats = ask()
    return stats.saves_dropped, stats.bytes_dropped


def _note_dropped(
    report: VerifyReport, before: tuple[int, int] | None, after: tuple[int, int] | None
) -> None:
    if before is None or after is None:
        return
    report.saves_dropped = after[0] - before[0]
    report.bytes_dropped = after[1] - before[1]
    if report.saves_dropped == 0:
        report.notes.append("the wrapped step dropped nothing: it shows nothing")


# ---- a difference ----


def _explain(
    step: Step, state: State, report: VerifyReport, plain: Result, found: Comparison
) -> None:
    """Find the layer; take back what the plain step does by itself."""
    try:
        log = LayerLog()
        with watch_layers(step.model, log):
            again = step.run(state, plain=True)
        noise = compare(plain, again)
        report.differing, noisy = without_noise(found, noise)
        if noisy:
            report.unchecked += noisy
            report.notes.append("what is not checked differs between plain steps, too")
        if not report.passed:
            report.first_differing_layer = _find_layer(step, state, report, again, log)
    except Exception as error:
        # The difference stands, whatever is wrong with looking for its cause.
        report.notes.append(f"the layer was not found: {said(error)}")


def _layer_that_raises(step: Step, state: State, report: VerifyReport) -> str | None:
    """Backward knows no layers: run each by itself. The last is the first there."""
    try:
        found = verify_layers(step, state, report.tolerance).layers
    except Exception as error:
        report.notes.append(f"the layer was not found: {said(error)}")
        return None
    return found[-1] if found else None


def _find_layer(
    step: Step, state: State, report: VerifyReport, plain: Result, log: LayerLog
) -> str | None:
    compared = LayerLog(plain=log, tolerance=report.tolerance)
    with watch_layers(step.model, compared):
        wrapped = step.run(state, plain=False)
    found = compare(plain, wrapped, report.tolerance)
    if found.equal:
        report.notes.append("a second wrapped step did not differ")
        return None
    differs = found.names() | set(map(gradient_of, found.missing))
    parameters = {p for name, p in step.parameters() if gradient_of(name) in differs}
    suspects = find_suspects(step.model, compared, parameters)
    if len(suspects) > 1:
        alone = verify_layers(step, state, report.tolerance, suspects).layers
        suspects = [name for name in suspects if name in alone] or suspects
    return next(iter(suspects), None)
