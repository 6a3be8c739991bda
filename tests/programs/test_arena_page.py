"""The arena's page in a real browser: judging by mouse and keys, a phone, a restart, markup, a token.

It needs Chromium (Debian: apt-get install chromium) and playwright from requirements-dev.txt.
"""

import shutil
from collections.abc import Iterator

import pytest
from arena_fakes import MAX_BYTES, FakeModel, make_arena, real_server

from serving.arena_app import create_app

CHROMIUM = next(
    (p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), ""
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no browser: apt-get install chromium"),
]
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: requirements-dev.txt")

QUESTION = "Why do birds migrate south for the winter?"
GOOD, POOR = "Because food becomes scarce in the north.", "Birds migrate because it is cold."
MARKUP = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script> **bold**"


def serving(arena, *, token: str = "", port: int = 0):
    """Serve an arena in a thread; give its port."""
    app = create_app(arena, max_request_bytes=MAX_BYTES, token=token, is_local=True)
    return real_server(app, port)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as runner:
        # Without a sandbox of its own: it is root in most containers, and only sees this test's pages.
        launched = runner.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def models() -> dict[str, FakeModel]:
    found = {"sft": FakeModel("sft", lambda text: POOR), "ppo": FakeModel("ppo", lambda text: GOOD)}
    for model in found.values():
        model.max_length = 2000
    return found


@pytest.fixture
def arena(tmp_path, models):
    made = make_arena(tmp_path / "arena.sqlite3", **models)
    object.__setattr__(made.sampling, "max_new_tokens", 500)
    return made


@pytest.fixture
def open_page(browser):
    """Open an arena's page; every error of the page and every request elsewhere fails the test."""
    contexts, errors = [], []

    def start(port: int, **more):
        context = browser.new_context(**({"viewport": {"width": 1180, "height": 820}} | more))
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda r: r.url.startswith(f"http://127.0.0.1:{port}/") or errors.append(r.url))
        page.goto(f"http://127.0.0.1:{port}/")
        return page

    yield start
    for context in contexts:
        context.close()
    assert errors == []


def ask(page, text: str = QUESTION) -> None:
    page.fill("#text", text)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#choices:not([hidden])")


def is_scrolled_sideways(page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


def test_a_person_judges_pairs_by_mouse_and_keys(open_page, arena):
    with serving(arena) as port:
        page = open_page(port)
        ask(page)
        assert page.inner_text("#status") == "Which answer is better?"
        assert page.inner_text("#answer-a .name") == page.inner_text("#answer-b .name") == ""
        page.click("[data-choice=a]")
        page.wait_for_selector("#next:not([hidden])")
        [pair] = arena.store.judged()
        assert pair.choice == "a" and page.inner_text("#answer-a .name") == pair.model_a
        assert page.inner_text("#answer-b .name") == pair.model_b
        assert page.inner_text("#answer-a .text") == pair.answer_a
        assert "You preferred A. Saved." in page.inner_text("#status")
        for key in "1234":
            page.keyboard.press("n")
            ask(page)
            page.keyboard.press(key)
            page.wait_for_selector("#next:not([hidden])")
            page.keyboard.press("n")
            page.wait_for_selector("#composer:not([hidden])")
            assert page.evaluate("document.activeElement.id") == "text"
        assert [pair.choice for pair in arena.store.judged()] == ["a", "a", "tie", "both_bad", "b"]
        page.keyboard.type("1234 nfr")
        assert page.input_value("#text") == "1234 nfr", "keys are keys where a person writes"
        ask(page)
        page.keyboard.press("1")
        page.wait_for_selector("#next:not([hidden])")
        page.keyboard.press("f")
        ask(page, "And in spring?")
        said = page.locator("#prompt li").all_inner_texts()
        assert len(said) == 3 and QUESTION in said[0] and "And in spring?" in said[2]
        page.keyboard.press("t")
        page.wait_for_selector("#next:not([hidden])")
        judged = arena.store.judged()
        assert [pair.source for pair in judged[-2:]] == ["typed", "follow-up"]
        page.click("#show-results")
        page.wait_for_selector("#tables .bar-row")
        assert page.inner_text("#summary") == "7 judgements: 4 decided, 2 ties, 1 both bad."
        rows = page.locator("#tables .bar-head").all_inner_texts()
        share = 25 * sum(
            pair.choice in "ab" and getattr(pair, f"model_{pair.choice}") == "ppo" for pair in judged
        )
        assert len(rows) == 3 and rows[2].split()[:5] == ["ppo", "against", "sft", str(share), "%"]
        page.click("#show-judging")
        assert page.is_visible("#next")


def test_a_phone_has_no_horizontal_scroll_and_reachable_buttons(open_page, arena, models):
    with serving(arena) as port:
        phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
        page = open_page(port, **phone)
        assert not is_scrolled_sideways(page)
        ask(page)
        assert not is_scrolled_sideways(page)
        for box in (page.locator(f"[data-choice={c}]").bounding_box() for c in ("a", "b", "tie", "both_bad")):
            assert box["height"] >= 40 and box["x"] >= 0 and box["x"] + box["width"] <= 390
            assert box["y"] + box["height"] <= 844, "the buttons stay in sight"
        page.tap("[data-choice=tie]")
        page.wait_for_selector("#next:not([hidden])")
        models["sft"].say = lambda text: "x" * 300  # a word without a place to break it
        page.tap("#new")
        ask(page)
        assert not is_scrolled_sideways(page)
        page.tap("#show-results")
        page.wait_for_selector("#tables .bar-row")
        assert not is_scrolled_sideways(page)
        assert arena.store.judged()[0].choice == "tie"


def test_markup_in_prompts_and_answers_is_shown_and_not_run(open_page, arena, models):
    for model in models.values():
        model.say = lambda text: MARKUP
    with serving(arena) as port:
        page = open_page(port)
        ask(page, MARKUP)
        assert MARKUP in page.inner_text("#prompt") and page.inner_text("#answer-a .text") == MARKUP
        assert page.locator("main img, main script").count() == 0 and page.title() == "Arena"


def test_a_page_left_open_over_a_restart_is_judged(open_page, arena, models, tmp_path):
    with serving(arena) as port:
        page = open_page(port)
        ask(page)
    page.keyboard.press("1")
    page.wait_for_selector("#message:not([hidden])")
    assert "not saved yet" in page.inner_text("#message") and page.is_visible("#choices")
    again = make_arena(tmp_path / "arena.sqlite3", **models)
    with serving(again, port=port):
        page.keyboard.press("1")
        page.wait_for_selector("#next:not([hidden])")
        assert [pair.choice for pair in again.store.judged()] == ["a"]
        page.reload()
        page.wait_for_selector("#next:not([hidden])")
        assert page.inner_text("#answer-a .name") == again.store.judged()[0].model_a


def test_failures_are_said_on_the_page_and_nothing_is_lost(open_page, arena, models):
    def fail(text: str) -> str:
        raise RuntimeError("no memory")

    models["sft"].say = fail
    with serving(arena) as port:
        page = open_page(port)
        page.fill("#text", "x" * 2500)
        page.click("#composer button.primary")
        page.wait_for_selector("#message:has-text('2500 tokens')")
        assert page.input_value("#text") == "x" * 2500, "it stays written"
        page.fill("#text", "x" * MAX_BYTES)
        page.click("#composer button.primary")
        page.wait_for_selector("#message:has-text('--max_request_bytes')")
        page.fill("#text", QUESTION)
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#again:not([hidden])")
        page.wait_for_selector("#next:not([hidden])")
        assert "No answer: RuntimeError: no memory" in page.inner_text("#answers")
        assert not page.is_visible("#choices") and "nothing to judge" in page.inner_text("#status")
        models["sft"].say = lambda text: POOR
        page.keyboard.press("r")
        page.wait_for_selector("#choices:not([hidden])")


LATE_REFUSAL = """() => {
  const at_once = window.fetch;
  window.fetch = async (path, options) => {
    if (options.headers.Authorization.includes("wrong")) await new Promise((done) => setTimeout(done, 300));
    return at_once(path, options);
  };
}"""


def test_a_token_is_asked_for_and_kept_for_the_tab(open_page, arena):
    with serving(arena, token="s3cret") as port:
        page = open_page(port)
        page.wait_for_selector("#token-form:not([hidden])")
        assert not page.is_visible("#composer")
        page.evaluate(LATE_REFUSAL)
        for token in ("wrong", "s3cret"):
            page.fill("#token", token)
            page.keyboard.press("Enter")
        page.wait_for_timeout(400)  # past the late refusal
        page.wait_for_selector("#composer:not([hidden])", state="visible")
        ask(page)
        page.reload()
        page.wait_for_selector("#choices:not([hidden])", state="visible")
