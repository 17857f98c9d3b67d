"""The report: sections in the order a person decides, the answer first."""

from attngap.report.page import Section, render
from attngap.report.results import Results
from attngap.report.sections.heads import head_sections
from attngap.report.sections.probes import probe_sections
from attngap.report.sections.provenance import provenance_section


def report_page(results: Results, title: str | None = None) -> str:
    """One page from everything that was read."""
    names = list(dict.fromkeys(result.model for result in results.results if result.model))
    sections: list[Section] = []
    for number, diagnosis in enumerate(results.of("diagnosis")):
        sections += head_sections(diagnosis, f"-{number + 1}" if number else "")
    sections += [*probe_sections(results), *provenance_section(results)]
    return render(title or ", ".join(names) or "attngap report", sections)
