"""The page in a browser: what its user does, with the keyboard alone, and what it must never do."""

import re
import threading

import pytest
from playwright.sync_api import Error, expect

from openinfer_server import ServerOptions
from openinfer_server.testing import ParrotLoop, wait_until


@pytest.fixture
def parrot(info) -> ParrotLoop:
    return ParrotLoop(info)


@pytest.fixture
def server(start, parrot):
    return start(parrot, ServerOptions(port=0, model_name=["parrot", "bird"]))


def say(page, text: str, tokens: int = 40) -> None:
    page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def test_answer_is_streamed_and_measured(server, parrot, visit):
    page = visit(server)
    parrot.hold()
    say(page, "the capital of France")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    parrot.go()
    answer = page.get_by_role("article").last
    expect(answer).to_contain_text("user\nthe capital of France", use_inner_text=True)
    expect(answer).to_have_attribute("aria-busy", "false")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    figures = page.get_by_role("region", name="Last answer")
    expect(figures).to_contain_text(re.compile(r"Time to first token\d+ ms"))
    expect(figures).to_contain_text(re.compile(r"Speed[\d.]+ tokens/s"))
    expect(figures).to_contain_text(re.compile(r"Prompt\d+ tokens, \d+ cached"))
    expect(figures).to_contain_text(re.compile(r"Ended by(stop|length)"))
    expect(page.get_by_role("status")).to_contain_text("Answer: ")


def test_second_question_carries_the_first_and_its_answer(server, visit, tokenizer):
    page = visit(server)
    for question in ("first question", "second question"):
        say(page, question, tokens=8)
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
    prompt = tokenizer.decode(server.engine.submitted[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.index("first question") < prompt.index("assistant") < prompt.index("second question")
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("article")).to_have_count(0)
    say(page, "third", tokens=2)
    wait_until(lambda: len(server.engine.submitted) == 3, "a third request")
    prompt = tokenizer.decode(server.engine.submitted[-1].prompt_token_ids, skip_special_tokens=False)
    assert "question" not in prompt


def test_controls_reach_the_engine(server, visit, tokenizer):
    page = visit(server)
    page.get_by_label("Model").select_option("bird")
    for label, value in (("Temperature", "0.5"), ("Top p", "0.25"), ("Top k", "3"), ("Seed", "11")):
        page.get_by_label(label).fill(value)
    page.get_by_label("Instructions").fill("Be brief.")
    page.get_by_label("Reasoning").select_option("off")
    say(page, "hello", tokens=7)
    wait_until(lambda: len(server.engine.submitted) == 1, "a request")
    (request,) = server.engine.submitted
    sampling = request.sampling
    got = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, sampling.max_tokens)
    assert got == (0.5, 0.25, 3, 11, 7)
    prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert "system\nBe brief." in prompt
    assert prompt.endswith("<think></think>")


def test_value_out_of_range_is_not_sent(server, visit):
    page = visit(server)
    page.get_by_label("Temperature").fill("9")
    say(page, "hello")
    expect(page.get_by_role("article")).to_have_count(0)
    expect(page.get_by_label("Message")).to_have_value("hello")
    assert server.engine.submitted == []


def test_everything_is_done_with_the_keyboard(server, parrot, visit):
    page = visit(server)
    expect(page.get_by_label("Model")).to_have_value("parrot")
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    parrot.hold()
    page.keyboard.press("Enter")
    wait_until(lambda: len(server.engine.submitted) == 1, "a request")
    page.keyboard.press("Escape")
    wait_until(lambda: len(server.engine.aborted) == 1, "an abort")
    parrot.go()
    expect(page.get_by_text("Ended by").locator("..")).to_contain_text("you")
    page.get_by_role("link", name="Skip to the message field").focus()
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    wanted = "model new-chat turns prompt send temperature top_p top_k max_tokens seed thinking system SUMMARY".split()
    assert [each for each in reached if each in wanted][: len(wanted)] == wanted


def test_markup_in_an_answer_is_text(server, visit):
    page = visit(server)
    say(page, "<img src=x onerror=alert(1)><script>alert(2)</script>", tokens=60)
    expect(page.get_by_role("article").last).to_contain_text("<img src=x onerror=alert(1)><script>")
    assert page.locator("article img, article script").count() == 0


def test_gauges_follow_the_server(server, parrot, visit):
    page = visit(server)
    region = page.get_by_role("region", name="Server")
    expect(page.get_by_text("serving")).to_be_visible()
    expect(region).to_contain_text(re.compile(r"Running0.*Waiting in the queue0.*Preemptions0", re.S))
    parrot.hold()
    say(page, "hello", tokens=5)
    expect(region).to_contain_text(re.compile(r"Running1"))
    expect(region.get_by_role("meter", name="KV memory in use")).to_have_js_property("value", 1 / 64)
    expect(region).to_contain_text("1.6 %")
    parrot.go()
    expect(region).to_contain_text("Running0")
    expect(region).to_contain_text(re.compile(r"All answers together[\d.]+ tokens/s"))


def test_server_that_is_gone_is_said(server, visit):
    page = visit(server, may_fail="Failed to load resource")
    expect(page.get_by_text("serving")).to_be_visible()
    server.stop()
    server.join()
    expect(page.get_by_text("the server does not answer")).to_be_visible()
    say(page, "is anyone there?")
    expect(page.get_by_role("alert")).not_to_be_empty()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_answer_that_breaks_off_is_kept_and_said(start, info, visit):
    parrot = ParrotLoop(info, step_s=0.1)
    server = start(parrot)
    page = visit(server, may_fail="Failed to load resource")
    say(page, "once upon a time " * 20, tokens=1000)
    expect(page.get_by_role("article").last).to_contain_text("once upon")
    parrot.die()
    expect(page.get_by_role("alert")).to_contain_text("the engine failed")
    expect(page.get_by_role("region", name="Last answer")).to_contain_text("Ended byan error")
    expect(page.get_by_role("article").last).to_contain_text("once upon")
    assert server.join() == 1


def test_refusal_is_shown_as_the_server_words_it(server, visit):
    page = visit(server, may_fail="400 (Bad Request)")
    say(page, "hello", tokens=100_000)
    expect(page.get_by_role("alert")).to_contain_text("exceed the model's context of 2048")


@pytest.mark.parametrize("ending", ["Tab", "Enter"])
def test_key_is_asked_for_sent_and_kept_nowhere(start, parrot, visit, tmp_path, ending):
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text('[[keys]]\ntenant = "acme"\nkey = "a-key-of-the-tests"\n')
    server = start(parrot, ServerOptions(port=0, api_keys_file=str(keys)))
    page = visit(server, may_fail="401 (Unauthorized)")
    expect(page.get_by_role("alert")).to_contain_text("key")
    page.get_by_label("Key, kept in this page alone").fill("a-key-of-the-tests")
    page.keyboard.press(ending)
    expect(page.get_by_label("Model")).to_have_value("parrot")
    assert page.url == f"{server.url}/"
    expect(page.get_by_role("alert")).to_be_empty()
    say(page, "hello", tokens=5)
    expect(page.get_by_role("article").last).to_contain_text("user")
    assert [request.tenant for request in server.engine.submitted] == ["acme"]
    kept = page.evaluate("JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie])")
    assert "hello" in kept
    assert "a-key-of-the-tests" not in kept
    page.reload()
    expect(page.get_by_label("Key, kept in this page alone")).to_have_value("")


def test_everything_has_a_name_a_screen_reader_can_say(server, visit):
    page = visit(server)
    say(page, "hello", tokens=5)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, select, textarea, button, meter, section, [role=img]")]
          .filter((each) => !(each.labels?.length || each.textContent.trim() && each.tagName === "BUTTON"
            || each.getAttribute("aria-label") || document.getElementById(each.getAttribute("aria-labelledby"))))
          .map((each) => each.id || each.tagName)"""
    )
    assert nameless == []
    assert page.locator("h1").count() == page.locator("main").count() == page.locator("header").count() == 1
    assert page.locator("html").get_attribute("lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(server, visit, scheme):
    """WCAG 2's contrast of 4.5 for every element with text of its own."""
    page = visit(server)
    page.emulate_media(color_scheme=scheme)
    say(page, "`code` [link](https://x.y)\n\n> quote\n\n|a|b|\n|-|-|\n|c|d|\n\n```js\nblock\n```", tokens=60)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    faint = page.evaluate(
        """() => {
          const parse = (color) => color.match(/[\\d.]+/g).map(Number);
          const part = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
          const luminance = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
          const ground = (each) => { for (let at = each; at; at = at.parentElement) {
            const color = parse(getComputedStyle(at).backgroundColor); if (color[3] !== 0) return color; }
            return [255, 255, 255]; };
          const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
            return (x + 0.05) / (y + 0.05); };
          const own = (each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
          return [...document.body.querySelectorAll("*")].filter((each) => own(each) && each.checkVisibility())
            .map((each) => [each.id || each.tagName, contrast(parse(getComputedStyle(each).color), ground(each))])
            .filter(([, ratio]) => ratio < 4.5); }"""
    )
    assert faint == []


def test_narrow_screen_has_no_sideways_scrolling(server, visit):
    page = visit(server)
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    expect(page.get_by_label("Message")).to_be_visible()


def test_policy_stops_what_is_not_in_the_servers_files(server, visit):
    page = visit(server, may_fail="violates the following Content Security Policy")
    refused = page.evaluate(
        """() => new Promise((resolve) => {
          document.addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
          const style = document.createElement("style"); style.textContent = "body { display: none }";
          document.head.append(style); })"""
    )
    assert refused == "style-src-elem"


def test_text_cannot_become_markup_even_by_a_mistake_of_ours(server, visit):
    page = visit(server, may_fail="requires 'TrustedHTML' assignment")
    with pytest.raises(Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>markup</b>'")


def test_several_pages_share_the_server(server, visit):
    pages = [visit(server) for _ in range(3)]
    for number, page in enumerate(pages):
        say(page, f"page number {number}", tokens=30)
    for number, page in enumerate(pages):
        expect(page.get_by_role("article").last).to_contain_text(f"page number {number}")
    assert threading.active_count() < 50
