"""How often a linear memory can be right: the predicted limit drawn beside measured recall."""

import math

import numpy as np
from scipy.special import log_ndtr


def predicted_recall(pairs: int, rank: int, value_dim: int, choices: int) -> float:
    """Expected argmax recall of `pairs` random key-value pairs added up in a rank x value_dim state.

    Reading S = sum_i k_i v_i^T with the key of one pair gives its value plus crosstalk. Against a codebook of `choices`
    random unit values the right one scores 1 + sigma x with sigma^2 = (pairs - 1) / (rank value_dim); each wrong one
    scores N(0, sigma^2 + 1 / value_dim), since random values overlap too. Recall is the chance that the right one is
    the largest. It falls through one half near pairs = rank value_dim / (2 log choices): an empirical law and not a
    bound, since a trained memory may choose its keys and values better than at random.

    >>> predicted_recall(4, 64, 64, 256) > 0.99, predicted_recall(4096, 64, 64, 256) < 0.1
    (True, True)
    """
    sigma = math.sqrt((pairs - 1) / (rank * value_dim))
    wrong = math.sqrt(sigma**2 + 1 / value_dim)
    x, weight = np.polynomial.hermite_e.hermegauss(80)
    return float((weight * np.exp((choices - 1) * log_ndtr((1 + sigma * x) / wrong))).sum() / weight.sum())
