"""Which way a loss takes, and thresholds that bring small batches to an engine."""

from __future__ import annotations

from nearfar.engines import auto, make_plan


def lower_thresholds(monkeypatch, operators, generic):
    """Let "auto" leave the dense engine from so many pairs on, for the operators and for the generic strips."""
    least = auto.Least(operators, generic)
    monkeypatch.setattr(auto, "LEAST", {"cpu": least, "cuda": least})


def takes_operators(product, relation):
    """Whether the operators in PyTorch compute a product of these pairs."""
    return make_plan(product).refused is None and relation.sorted_layout() is not None


def untiled(product):
    """Why engine="tiled" refuses a product; None where it serves."""
    plan = make_plan(product.at(1))
    return None if plan.refused is None else plan.refused_strips
