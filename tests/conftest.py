"""Shared by all tests: one thread count, so that runs repeat to the bit; and a real browser for those that need one."""

import shutil
from pathlib import Path

import pytest
import torch

# Chromium as root needs no sandbox; nothing here may talk to the outside on its own.
CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_maker(monkeypatch):
    """Compiled products are tested on every processor, also where torch's are quicker."""
    for user in ("dense.product", "thin.compiled"):
        monkeypatch.setattr(f"attngap.ops.{user}.maker", lambda: "AuthenticAMD")


@pytest.fixture(scope="session")
def chromium():
    """A headless browser, shared; skips where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no chromium on this machine; Debian: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(CHROMIUM_FLAGS))
        yield browser
        browser.close()


class Visit:
    """A page in the browser with what it printed and asked for."""

    def __init__(self, browser, url: str, **options):
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._printed)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready]", timeout=30_000)

    def _printed(self, message) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def marks(self) -> dict[str, int]:
        """Chart to the number of visible things drawn in it."""
        return self.page.evaluate(
            """() => Object.fromEntries(Object.entries(attngap.views).map(([id, view]) => {
                const drawn = view.container().querySelectorAll('svg g.role-mark path, svg g.role-mark text');
                return [id, drawn.length];
            }))"""
        )

    def overlaps(self) -> list[str]:
        """Pairs of words in charts that lie on each other, and words that a chart cuts off."""
        return self.page.evaluate(
            """() => [...document.querySelectorAll('.canvas svg')].flatMap((svg) => {
                const words = [...svg.querySelectorAll('text')].filter((word) => word.textContent.trim() &&
                    getComputedStyle(word).opacity !== '0' && word.getBoundingClientRect().width);
                const boxes = words.map((word) => [word.textContent, word.getBoundingClientRect()]);
                const frame = svg.closest('.canvas').getBoundingClientRect();
                const name = svg.closest('[id]').id;
                const cut = boxes.filter(([, box]) => box.left < frame.left - 1 || box.right > frame.right + 1)
                    .map(([text]) => `${name}: '${text}' is cut off`);
                const on = boxes.flatMap(([a, x], i) => boxes.slice(i + 1).filter(([, y]) =>
                    Math.min(x.right, y.right) - Math.max(x.left, y.left) > 2 &&
                    Math.min(x.bottom, y.bottom) - Math.max(x.top, y.top) > 4)
                    .map(([b]) => `${name}: '${a}' on '${b}'`));
                return [...cut, ...on];
            })"""
        )

    def faults(self) -> list[str]:
        """Serious and critical accessibility faults found by axe-core."""
        import axe_playwright_python

        script = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text()
        self.page.evaluate(script)
        found = self.page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{fault['id']}: {fault['nodes'][0]['html'][:160]} {fault['nodes'][0]['failureSummary']}"
            for fault in found["violations"]
            if fault["impact"] in ("serious", "critical")
        ]


@pytest.fixture
def visit(chromium):
    """`visit(url, viewport=..., color_scheme=...)`: open a page and wait until its charts are drawn."""
    visits: list[Visit] = []

    def open_page(url: str, **options) -> Visit:
        visits.append(Visit(chromium, url, **options))
        return visits[-1]

    yield open_page
    for each in visits:
        each.context.close()


@pytest.fixture
def two_nodes(monkeypatch):
    """A real Ray cluster on this machine: a head that takes no jobs and two worker nodes of one CPU each."""
    pytest.importorskip("ray", reason="ray is not installed: pip install attngap[ray]")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")  # else workers wait for everything else on a busy machine
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    cluster.workers = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()
