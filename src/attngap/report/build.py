"""The report: sections in the order a person decides, the answer first."""

from attngap.errors import AttngapError
from attngap.report.page import Section, render
from attngap.report.results import Results
from attngap.report.sections.answer import answer
from attngap.report.sections.conversion import conversion_sections
from attngap.report.sections.heads import head_sections
from attngap.report.sections.probes import probe_sections
from attngap.report.sections.provenance import provenance_section
from attngap.report.sections.receipts import facts, limit
from attngap.report.sections.samples import sample_sections
from attngap.report.sections.theory import theory_sections


def report_page(results: Results, title: str | None = None) -> str:
    """One page from everything that was read; a file that says it is ours and is not as we write it is one line."""
    try:
        return _page(results, title)
    except AttngapError:
        raise
    except Exception as error:  # of any kind: Altair has its own for what cannot be drawn
        why = (str(error).splitlines() or [""])[0]
        files = ", ".join(f"'{result.path}'" for result in results.results)
        raise AttngapError(
            f"A result is not as attngap writes it ({type(error).__name__}: {why}), one of {files}. "
            "Run the command that wrote it again"
        ) from error


def _page(results: Results, title: str | None) -> str:
    names = list(dict.fromkeys(result.model for result in results.results if result.model))
    sections: list[Section] = [*conversion_sections(results), *sample_sections(results)]
    receipts = results.of("receipt")
    for number, diagnosis in enumerate(results.of("diagnosis")):
        conversion = next((receipt for receipt in receipts if receipt.model == diagnosis.model), None)
        sections += head_sections(diagnosis, f"-{number + 1}" if number else "", conversion)
    sections += [*probe_sections(results), *theory_sections(results), *provenance_section(results)]
    return render(
        title or ", ".join(names) or "attngap report",
        sections,
        answer=answer(results),
        limit=(limit(receipts[0].content) or "") if receipts else "",
        facts=facts(receipts[0]) if receipts else (),
    )
