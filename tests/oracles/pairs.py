"""Losses of one pair: l(s, sign), with sign = +1 for a positive pair and -1 for a negative pair."""

import numpy as np


def softplus(x):
    """log(1 + e^x), written so that no exponential overflows."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def smooth_hinge(x, smooth=0):
    """max(x, 0) for smooth = 0, and smooth * log(1 + e^(x / smooth)) otherwise."""
    return smooth * softplus(x / smooth) if smooth > 0 else np.maximum(x, 0)


def hinge(s, sign, margin=0.2, threshold=0.5, smooth=0):
    """max(margin + sign * (threshold - s), 0), or its softplus of width smooth."""
    return smooth_hinge(margin + sign * (threshold - s), smooth)


def logistic(s, sign, threshold=0.5, slope_positive=2, slope_negative=40):
    """(2/b) log(1 + e^(-b (s - t))) for positive, (2/a) log(1 + e^(a (s - t))) for negative."""
    slope = slope_positive if sign > 0 else slope_negative
    return 2 * softplus(-sign * slope * (s - threshold)) / slope


def squared(s, sign, pos_margin=0, neg_margin=1, power=2):
    """max(d - pos_margin, 0)^power for positive, max(neg_margin - d, 0)^power for negative, d = -s."""
    distance = -s
    excess = distance - pos_margin if sign > 0 else neg_margin - distance
    return np.maximum(excess, 0) ** power


def linear(s, sign, threshold=0, margin=0, scale=1):
    """scale * (margin + sign * (threshold - s))."""
    return scale * (margin + sign * (threshold - s))


def score(s, sign, scale=1):
    """scale * s, for both signs."""
    return scale * s
