"""Options are refused in one line, and say their defaults once for all verbs."""

import inspect

import pytest

from attngap.conversion.options import ConversionOptions
from attngap.diagnosis.options import DiagnosisOptions
from attngap.errors import AttngapError
from attngap.models.plan import Plan, Replacement


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (DiagnosisOptions, {"window": 0}, "window must be at least 1, got 0"),
        (DiagnosisOptions, {"contxt": 64}, "No option 'contxt'. Did you mean 'context'?"),
        (DiagnosisOptions, {"ranks": (8, 8)}, r"ranks must be distinct, from 1 to 1023, got \[8, 8\]"),
        (DiagnosisOptions, {"context": 64}, "ranks must be distinct, from 1 to 63"),
        (DiagnosisOptions, {"quick": True, "verify": 2}, "verify needs fitted replacements"),
        (DiagnosisOptions, {"context": "long"}, "context is wrong: .* got 'long'"),
        (ConversionOptions, {"granularity": "layer"}, "granularity must be 'group' or 'head', got 'layer'"),
        (ConversionOptions, {"keep": float("nan")}, "keep takes a share from 0 to 1, got nan"),
        (ConversionOptions, {"context": 64, "tokens": 100}, "tokens must be at least 128, got 100"),
        (ConversionOptions, {"keep": 0.2, "max_ppl_ratio": 1.1}, "both say how many heads to keep"),
    ],
)
def test_impossible_options_are_refused_in_one_line(kind, given, message):
    with pytest.raises(AttngapError, match=message) as caught:
        kind(**given)
    assert "\n" not in str(caught.value)


def test_a_quick_diagnosis_is_not_refused_over_ranks_it_does_not_use():
    assert DiagnosisOptions(quick=True, context=64).context == 64


def test_options_cannot_be_changed_and_changes_are_checked():
    options = ConversionOptions(seed=3)
    with pytest.raises(ValueError, match="frozen"):
        options.seed = 4
    assert options.but(steps=7).model_fields_set == {"seed", "steps"}
    with pytest.raises(AttngapError, match="steps must be at least 0, got -1"):
        options.but(steps=-1)


def test_diagnosis_plan_and_conversion_share_their_defaults():
    assert DiagnosisOptions.default("window") == Replacement().window == 256  # a plan carries its diagnosis' window
    assert ConversionOptions.default("window") == 512
    assert {kind.default("sinks") for kind in (DiagnosisOptions, ConversionOptions)} == {Replacement().sinks} == {4}
    assert ConversionOptions.default("granularity") == Plan.model_fields["granularity"].default == "group"


@pytest.mark.parametrize(("verb", "kind"), [("diagnose", DiagnosisOptions), ("linearize", ConversionOptions)])
def test_the_command_line_has_every_option_with_its_default(verb, kind):
    import importlib

    command = getattr(importlib.import_module(f"attngap.cli.{verb}"), verb)
    parameters = inspect.signature(command).parameters
    for name in kind.model_fields:
        default = parameters[name].default
        if name == "ranks":
            default = tuple(map(int, default.split(",")))
        assert default in (None, kind.default(name)), name  # None: a plan may say it
