"""The explorer in a real browser."""

import threading

import made_up
import pytest
import uvicorn

from attngap.cli.serve import listen
from attngap.explorer.app import create
from attngap.theory import separation

from .test_app import Letters, Sentences, model  # noqa: F401 - model is a fixture

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address(tmp_path_factory, model):  # noqa: F811
    folder = tmp_path_factory.mktemp("results")
    made_up.diagnosis(folder / "diagnosis")
    made_up.runs(folder / "runs.sqlite")
    app = create([folder], Sentences(model, Letters(), "letters"))
    listening = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join(timeout=20)
    listening.close()


def test_opens_without_complaint_and_asks_only_its_own_server(visit, address):
    opened = visit(address)
    assert opened.complaints == []
    assert all(url.startswith(address) for url in opened.requests)
    opened.page.wait_for_function("attngap.views['law-curve'].data('law').length > 0")
    marks = opened.marks()
    assert marks["sentence-map"] == 8
    assert all(count > 0 for count in marks.values()), marks


def test_sliders_change_the_law_to_what_python_gives(visit, address):
    page = visit(address).page
    form = page.locator("#law-form")
    for name, value in (("needle", "0.55"), ("log10_n", "9"), ("scale", "1.2"), ("d", "258"), ("m", "25")):
        before = int(form.get_attribute("data-answered"))
        page.locator(f"#law-form-{name}").fill(value)
        page.wait_for_function(
            "before => Number(document.getElementById('law-form').dataset.answered) > before", arg=before
        )
    n = round(10**9 / 256) * 256
    for kernel in ("softmax", "linear"):
        expected = separation.law(kernel, n=n, d=258, a0=0.05, a1=0.55, b=0.5, m=25, scale=1.2).success
        assert float(form.locator(f'[data-fact="{kernel}"]').get_attribute("data-value")) == expected
    assert f"{n:,}" in form.locator(".status").inner_text()


def test_keyboard_moves_a_slider(visit, address):
    page = visit(address).page
    page.locator("#law-form-needle").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('output[for=law-form-needle]').textContent === '0.71'")


def test_mechanisms_are_drawn_beside_softmax(visit, address):
    opened = visit(address)
    page = opened.page
    page.select_option("#weights-form-name", "gated-delta")
    page.wait_for_function("document.querySelector('#weights-form .status').textContent.includes('gated-delta')")
    captions = page.locator("#weights-form figcaption").all_inner_texts()
    assert captions[0].startswith("softmax,")
    assert captions[1].startswith("gated-delta,")
    assert opened.complaints == []


def test_a_click_on_a_head_shows_it_on_the_sentence(visit, address):
    page = visit(address).page
    page.fill("#sentence-form-text", "<b>bold</b> words")
    page.get_by_role("button", name="Show its heads").click()
    page.wait_for_function("document.querySelector('#sentence-form .status').textContent.startsWith('17 tokens')")
    page.locator("#sentence-map svg .mark-rect path").nth(6).click()
    page.wait_for_function("document.querySelector('[data-matrix=original]').dataset.head === '1.2'")
    assert page.locator("#sentence-head .labels .down span").count() == 17
    page.locator("#sentence-head .words span").nth(5).hover()
    assert (
        page.locator("#sentence-head .words .here").inner_text()
        == page.locator("#sentence-head .words span").nth(5).inner_text()
    )


def test_a_view_is_in_the_address_and_opens_again(visit, address):
    page = visit(address).page
    page.fill("#sentence-form-text", "a shared sentence")
    page.get_by_role("button", name="Show its heads").click()
    page.wait_for_function("document.querySelector('#sentence-form .status').textContent.startsWith('17 tokens')")
    page.locator("#sentence-map svg .mark-rect path").nth(6).click()
    page.wait_for_function("location.hash.includes('head=1.2')")
    again = visit(page.url).page
    assert again.locator("#sentence-form-text").input_value() == "a shared sentence"
    assert again.locator("[data-matrix=original]").get_attribute("data-head") == "1.2"


def test_a_conversation_streams_with_the_size_of_its_cache(visit, address):
    opened = visit(address)
    page = opened.page
    for turn in (1, 2):
        page.fill("#chat-form-prompt", "hello there")
        page.get_by_role("button", name="Say it").click()
        page.wait_for_function("n => Number(document.getElementById('chat-form').dataset.answered) === n", arg=turn)
    assert page.locator("[data-talk=original] .reply").count() == 2
    assert "MB" in page.locator("[data-talk=original] .size").inner_text()
    assert opened.complaints == []


def test_an_error_goes_when_it_is_mended(visit, address):
    page = visit(address).page
    page.fill("#sentence-form-text", "x")
    page.get_by_role("button", name="Show its heads").click()
    page.wait_for_selector("#sentence-form.stale .status.wrong")
    page.fill("#sentence-form-text", "long enough")
    page.get_by_role("button", name="Show its heads").click()
    page.wait_for_function("document.querySelector('#sentence-form .status').textContent.startsWith('11 tokens')")
    assert page.locator("#sentence-form.stale").count() == 0


def test_a_mistake_is_shown_where_it_was_made(visit, address):
    page = visit(address).page
    page.fill("#sentence-form-text", "x")
    page.get_by_role("button", name="Show its heads").click()
    page.wait_for_selector("#sentence-form .status.wrong")
    assert "fewer than 2 tokens" in page.locator("#sentence-form .status").inner_text()


def test_stored_results_open_as_reports(visit, address):
    opened = visit(address)
    opened.page.wait_for_selector("#results-table tbody a")
    opened.page.get_by_role("link", name="diagnosis").click()
    opened.page.wait_for_selector("html[data-ready] #map svg")
    assert opened.page.locator("h1").inner_text() == "tiny"
    assert opened.complaints == []


@pytest.mark.parametrize("viewport", [{"width": 390, "height": 844}, {"width": 1280, "height": 900}])
def test_accessible_and_never_wider_than_the_screen(visit, address, viewport):
    opened = visit(address, viewport=viewport)
    assert opened.faults() == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
