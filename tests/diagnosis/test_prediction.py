"""Predictions are right where the law they assume is the truth, and their intervals hold what they promise."""

import numpy as np
import pytest

from attngap.diagnosis.prediction import Joint, PowerLaw, Predictor

EXPONENT, LEVEL, DECAY = 0.8, 1.5, 1.7
DAMAGES = (0.3, 0.1, 0.03, 0.008)


def measured(rng, kind: str, between: float = 0.0, noise: float = 0.0, passages: int = 4) -> list[Joint]:
    rows = []
    for passage in range(passages):
        level = LEVEL * np.exp(between * rng.standard_normal())
        for damage in DAMAGES:
            divergence = level * damage**EXPONENT * np.exp(noise * rng.standard_normal())
            recall = {"original": 0.5, "recalled": 0.5 * np.exp(-DECAY * divergence)} if kind == "recall" else {}
            scatter = np.sqrt(2 * divergence)
            ratio = divergence + scatter * rng.standard_normal() / np.sqrt(1024)
            rows.append(
                Joint(
                    kind=kind,
                    passage=passage,
                    kept=0,
                    damage=damage,
                    divergence=divergence,
                    log_ratio=ratio,
                    deviation=scatter,
                    **recall,
                )
            )
    return rows


def test_a_law_without_noise_is_found_and_its_interval_is_the_tokens_alone():
    rows = [*measured(np.random.default_rng(0), "text"), *measured(np.random.default_rng(0), "recall")]
    law = PowerLaw(rows[:16])
    assert law.exponent == pytest.approx(EXPONENT, abs=0.02)
    found = Predictor(rows, context=1024, passages=4)(0.05, 0.05)
    divergence = LEVEL * 0.05**EXPONENT
    assert np.log(found["perplexity_ratio"].value) == pytest.approx(divergence, rel=0.02)
    assert found["recalled"].value == pytest.approx(np.exp(-DECAY * divergence), rel=0.02)
    half = np.log(found["perplexity_ratio"].high) - np.log(found["perplexity_ratio"].value)
    assert half == pytest.approx(1.76 * np.sqrt(2 * divergence / 4096), rel=0.1)  # 1.76: Student's t of 14


def test_nine_of_ten_measurements_fall_inside():
    """Simulated: the law is fitted to four passages, then measured on four others. The exponent is not given."""
    inside, trials = 0, 300
    for trial in range(trials):
        rng = np.random.default_rng(trial)
        expected = Predictor(measured(rng, "text", 0.4, 0.15), 1024, 4)(0.05, 0.05)["perplexity_ratio"]
        levels = LEVEL * np.exp(0.4 * rng.standard_normal(4)) * np.exp(0.15 * rng.standard_normal(4))
        means = levels * 0.05**EXPONENT
        ratio = np.exp((means + np.sqrt(2 * means) * rng.standard_normal(4) / np.sqrt(1024)).mean())
        inside += expected.low <= ratio <= expected.high
    assert 0.86 <= inside / trials <= 0.97


def test_nothing_replaced_loses_nothing():
    rows = [*measured(np.random.default_rng(1), "text", 0.3, 0.1), *measured(np.random.default_rng(2), "recall")]
    found = Predictor(rows, 1024, 4)(0.0, 0.0)
    for each in found.values():
        assert (each.value, each.low, each.high) == (1.0, 1.0, 1.0)


def test_too_few_replacements_predict_nothing():
    rows = measured(np.random.default_rng(3), "text", passages=1)[:3]
    assert Predictor(rows, 1024, 4)(0.1, 0.1) == {"perplexity_ratio": None, "recalled": None}
    silent = [row.model_copy(update={"divergence": 0.0}) for row in measured(np.random.default_rng(3), "text")]
    assert Predictor(silent, 1024, 4)(0.1, 0.1)["perplexity_ratio"] is None


def test_what_the_original_cannot_recall_is_not_predicted():
    rows = [row.model_copy(update={"original": 0.0}) for row in measured(np.random.default_rng(4), "recall")]
    assert Predictor(rows, 1024, 4)(0.1, 0.1)["recalled"] is None
