"""Make the pictures of README and docs: `python tools/pictures.py REPORT.html`, a report of the README's conversion."""

import shutil
import sys
from pathlib import Path

import vl_convert
from playwright.sync_api import sync_playwright

from attngap.charts.law import success_curves
from attngap.theory.separation import law

IMAGES = Path(__file__).parents[1] / "docs" / "images"


def draw_law(path: Path) -> None:
    """Success against the needle for softmax and linear, at one length."""
    n = round(10**6 / 512) * 512
    points = [
        {"needle": step / 50, "kernel": name, "success": _success(kernel, n, step / 50)}
        for name, kernel in (("softmax", "softmax"), ("linear", "linear"), ("polynomial", ("polynomial", 4.0)))
        for step in range(5, 76)
    ]
    chart = success_curves(points, needle=0.543, critical=0.618).properties(width=560, height=260, background="white")
    path.write_text(vl_convert.vegalite_to_svg(chart.to_dict()), encoding="utf-8")


def _success(kernel, n: int, needle: float) -> float:
    return law(kernel, n=n, d=514, a0=0.05, a1=needle, b=0.5, m=40).success


def photograph(report: Path, path: Path) -> None:
    """The top of a report: the answer, the numbers one decides on, and quality against length."""
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser_path is None:
        sys.exit("pictures: no chromium on this machine; Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1180, "height": 1092}, color_scheme="light")
        page.goto(report.absolute().as_uri())
        page.wait_for_selector("html[data-ready]")
        page.wait_for_timeout(500)  # charts have drawn
        page.screenshot(path=str(path))
        browser.close()


if __name__ == "__main__":
    IMAGES.mkdir(parents=True, exist_ok=True)
    draw_law(IMAGES / "law.svg")
    if len(sys.argv) > 1:
        photograph(Path(sys.argv[1]), IMAGES / "report.png")
