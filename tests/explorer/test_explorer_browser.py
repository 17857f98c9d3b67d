"""The explorer in a real browser."""

import contextlib
import threading

import made_up
import pytest
import uvicorn

from attngap.cli.serve import listen
from attngap.explorer.app import create
from attngap.mechanisms.catalogue import mechanism
from attngap.models.swap import swap
from attngap.theory import separation

from .test_app import Letters, Sentences, model  # noqa: F401 - model is a fixture

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address(tmp_path_factory, model):  # noqa: F811
    folder = tmp_path_factory.mktemp("results")
    made_up.diagnosis(folder / "diagnosis")
    made_up.runs(folder / "runs.sqlite")
    with served(create([folder], Sentences(model, Letters(), "letters"))) as place:
        yield place


@pytest.fixture(scope="module")
def both(tmp_path_factory, model):  # noqa: F811
    """The original beside its conversion, with a diagnosis and a plan of that model."""
    folder = tmp_path_factory.mktemp("both")
    model.config.architectures = ["LlamaForCausalLM"]
    made_up.diagnosis(folder / "diagnosis", layers=2, heads=4)
    made_up.plan(folder / "plan.json", layers=2, heads=4)
    parts = {0: (mechanism("hybrid", 4, 8, kv_heads=2, window=3, sinks=1, scale=8**-0.5), [1])}
    with served(create([folder], Sentences(model, Letters(), "letters", swap(model, parts)))) as place:
        yield place


@contextlib.contextmanager
def served(app):
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


def test_markup_in_names_and_sentences_is_shown_and_not_run(visit, model, tmp_path):  # noqa: F811
    hostile = "<img src=x onerror=alert(1)>"
    made_up.diagnosis(tmp_path / "<b>bold", name=hostile)
    with served(create([tmp_path], Sentences(model, Letters(), hostile))) as place:
        opened = visit(place)
        page = opened.page
        page.wait_for_selector("#results-table tbody a")
        assert hostile in page.locator("#results-table").inner_text()
        page.fill("#sentence-form-text", hostile)
        page.get_by_role("button", name="Show its heads").click()
        page.wait_for_function("document.querySelector('#sentence-form .status').textContent.includes(' tokens')")
        assert page.locator("img").count() == 0
        assert opened.complaints == []


def test_the_same_head_of_both_models_stands_side_by_side(visit, both):
    opened = visit(both)
    page = opened.page
    page.fill("#sentence-form-text", "attention is all")
    page.get_by_role("button", name="Show its heads").click()
    page.wait_for_function("document.querySelector('#sentence-form .status').textContent.startsWith('16 tokens')")
    page.locator("#sentence-map svg .mark-rect path").nth(2).click()
    page.wait_for_function("document.querySelector('[data-matrix=converted]').dataset.head === '0.2'")
    captions = page.locator("#sentence-head .pattern figcaption").all_inner_texts()
    assert captions[0].startswith("original, head 0.2 (softmax)")
    assert captions[1].startswith("converted, head 0.2 (replaced)")
    left, right = (page.locator(f"[data-matrix={name}] canvas").bounding_box() for name in ("original", "converted"))
    assert abs(left["y"] - right["y"]) < 2
    colors = {}
    for name in ("original", "converted"):
        page.locator(f"[data-matrix={name}] canvas").hover(position={"x": 5, "y": left["height"] - 5})
        assert page.locator("#sentence-head .words").get_attribute("data-model") == name
        assert '"<' in page.locator(f"[data-matrix={name}] .readout").inner_text()  # the tokens, not only their places
        colors[name] = page.eval_on_selector_all(
            "#sentence-head .words span", "all => all.map(one => one.style.background)"
        )
    assert colors["original"] != colors["converted"]
    dots = page.evaluate("attngap.views['sentence-map'].data('heads').filter((row) => row.verdict === 'keep').length")
    assert page.locator("#sentence-map svg .mark-symbol path").count() == dots > 0
    assert opened.complaints == []


def test_both_models_answer_side_by_side_and_one_question_at_a_time(visit, both):
    opened = visit(both)
    page = opened.page
    page.fill("#chat-form-prompt", "hello there, this is longer than sinks and window")
    page.get_by_role("button", name="Say it").click()
    page.wait_for_function("document.querySelector('#chat-form button').disabled === false")
    page.wait_for_function("Number(document.getElementById('chat-form').dataset.answered) === 1")
    sizes = [page.locator(f"[data-talk={name}] .size").inner_text() for name in ("original", "converted")]
    assert all("tokens, cache" in size for size in sizes)
    left, right = (page.locator(f"[data-talk={name}]").bounding_box() for name in ("original", "converted"))
    assert left["y"] == right["y"]
    assert opened.complaints == []


def test_a_question_that_fails_is_not_remembered(visit, both):
    page = visit(both).page
    page.route("**/api/chat*", lambda route: route.fulfill(status=422, json={"error": "no answer today"}))
    page.get_by_role("button", name="Say it").click()
    page.wait_for_selector("#chat-form.stale .status.wrong")
    page.unroute("**/api/chat*")
    asked = []
    page.on("request", lambda request: asked.append(request.post_data_json) if "api/chat" in request.url else None)
    page.fill("#chat-form-prompt", "again")
    page.get_by_role("button", name="Say it").click()
    page.wait_for_function("Number(document.getElementById('chat-form').dataset.answered) === 1")
    assert asked == [{name: [{"role": "user", "content": "again"}] for name in ("original", "converted")}]
    assert page.locator("#chat-form .status").inner_text() == ""


def test_the_choice_moves_with_its_slider(visit, both):
    opened = visit(both)
    page = opened.page
    page.locator("#choice-form-kept").focus()
    page.keyboard.press("End")
    page.wait_for_function("attngap.views['choice-recalled'].signal('chosen') === 8")
    assert page.locator("[data-fact=perplexity]").inner_text() == "1.000"
    assert "With softmax on 8 of 8 heads (100%)" in page.locator("#choice-form .status").inner_text()
    page.wait_for_function("location.hash.includes('choice.kept=8')")
    again = visit(page.url).page
    assert again.locator("#choice-form-kept").input_value() == "8"
    assert opened.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [{"width": 390, "height": 844}, {"width": 1280, "height": 900}])
def test_accessible_and_never_wider_than_the_screen(visit, both, viewport, scheme):
    opened = visit(both, viewport=viewport, color_scheme=scheme)
    assert opened.faults() == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert opened.overlaps() == []
