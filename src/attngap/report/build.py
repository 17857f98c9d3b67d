"""The report: sections in the order a person decides, the answer first."""

from attngap.report.page import Section, render
from attngap.report.results import Results
from attngap.report.sections.answer import answer
from attngap.report.sections.conversion import conversion_sections, facts
from attngap.report.sections.heads import head_sections
from attngap.report.sections.probes import probe_sections
from attngap.report.sections.provenance import provenance_section
from attngap.report.sections.samples import sample_sections
from attngap.report.sections.theory import theory_sections


def report_page(results: Results, title: str | None = None) -> str:
    """One page from everything that was read."""
    names = list(dict.fromkeys(result.model for result in results.results if result.model))
    sections: list[Section] = [*conversion_sections(results), *sample_sections(results)]
    for number, diagnosis in enumerate(results.of("diagnosis")):
        sections += head_sections(diagnosis, f"-{number + 1}" if number else "")
    sections += [*probe_sections(results), *theory_sections(results), *provenance_section(results)]
    receipts = results.of("receipt")
    return render(
        title or ", ".join(names) or "attngap report",
        sections,
        answer=answer(results),
        facts=facts(receipts[0]) if receipts else (),
    )
