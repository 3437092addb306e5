"""What the page does with conversations: keeps, renames and deletes them; stops, retries and edits turns."""

import json

import pytest
from playwright.sync_api import expect

from openinfer_core.sampling_defaults import SamplingDefaults
from openinfer_server import ServerOptions
from openinfer_server.testing import ParrotLoop, wait_until


@pytest.fixture
def parrot(info) -> ParrotLoop:
    return ParrotLoop(info)


@pytest.fixture
def server(start, parrot):
    return start(parrot, ServerOptions(port=0))


def say(page, text: str, tokens: int = 12) -> None:
    page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    expect(page.get_by_role("article").last).to_have_attribute("aria-busy", "false")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def chats(page):
    return page.get_by_role("navigation", name="Chats").get_by_role("listitem")


def prompts(server, tokenizer) -> list[str]:
    return [tokenizer.decode(each.prompt_token_ids, skip_special_tokens=False) for each in server.engine.submitted]


def test_chats_survive_a_reload_and_are_opened_again(server, visit, tokenizer):
    page = visit(server)
    say(page, "about stones")
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("article")).to_have_count(0)
    say(page, "about France")
    expect(chats(page)).to_have_text(["about FranceRenameDelete", "about stonesRenameDelete"])
    page.reload()
    expect(page.get_by_role("article").first).to_contain_text("about France")
    page.get_by_role("button", name="about stones", exact=True).click()
    expect(page.get_by_role("article").first).to_contain_text("about stones")
    expect(page.get_by_role("button", name="about stones", exact=True)).to_have_attribute("aria-current", "true")
    say(page, "and mountains")
    assert "about stones" in prompts(server, tokenizer)[-1]
    assert "France" not in prompts(server, tokenizer)[-1]


def test_chat_is_renamed_and_the_name_outlives_its_next_answer(server, visit):
    page = visit(server)
    say(page, "hello")
    page.get_by_role("button", name="Rename: hello").click()
    expect(page.get_by_label("Name of the chat")).to_be_focused()
    page.keyboard.type("Greetings <b>")
    page.keyboard.press("Enter")
    say(page, "again")
    page.reload()
    expect(chats(page)).to_have_text(["Greetings <b>RenameDelete"])
    page.get_by_role("button", name="Rename: Greetings").click()
    page.keyboard.type("no")
    page.keyboard.press("Escape")
    expect(chats(page)).to_have_text(["Greetings <b>RenameDelete"])


def test_deleted_chats_are_gone_and_an_answer_in_the_making_does_not_bring_them_back(server, parrot, visit):
    page = visit(server)
    page.on("dialog", lambda dialog: dialog.accept())
    say(page, "first")
    page.get_by_role("button", name="New chat").click()
    parrot.hold()
    page.get_by_label("Message").fill("second")
    page.get_by_label("Message").press("Enter")
    wait_until(lambda: len(server.engine.submitted) == 2, "a request")
    page.get_by_role("button", name="Delete: second").click()
    wait_until(lambda: len(server.engine.aborted) == 1, "an abort")
    parrot.go()
    expect(page.get_by_role("article")).to_have_count(0)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(chats(page)).to_have_text(["firstRenameDelete"])
    page.get_by_role("button", name="Delete all").click()
    expect(chats(page)).to_have_count(0)
    assert page.evaluate("localStorage.length") == 0


def test_stopped_answer_is_kept_said_and_retried(server, parrot, visit):
    page = visit(server)
    parrot.hold()
    page.get_by_label("Message").fill("hello")
    page.get_by_label("Message").press("Enter")
    wait_until(lambda: len(server.engine.submitted) == 1, "a request")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("article").last).to_contain_text("You stopped this answer.")
    parrot.go()
    page.reload()
    expect(page.get_by_role("article").last).to_contain_text("You stopped this answer.")
    page.get_by_label("Max tokens").fill("9")
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_role("article").last).to_have_attribute("aria-busy", "false")
    expect(page.get_by_role("article")).to_have_count(2)
    first, second = server.engine.submitted
    assert first.prompt_token_ids == second.prompt_token_ids
    assert json.loads(page.evaluate("Object.values(localStorage)[0]"))["messages"][1]["ended"] == "length"


def test_question_without_an_answer_is_not_told_again(server, visit, tokenizer):
    page = visit(server, may_fail="400 (Bad Request)")
    page.get_by_label("Max tokens").fill("99999")
    page.get_by_label("Message").fill("refused question")
    page.get_by_label("Message").press("Enter")
    expect(page.get_by_role("alert").first).to_contain_text("exceed")
    say(page, "another")
    assert "refused" not in prompts(server, tokenizer)[-1]


def test_edited_turn_is_asked_anew_and_what_came_after_is_forgotten(server, visit, tokenizer):
    page = visit(server)
    say(page, "first question")
    say(page, "second question")
    page.get_by_role("button", name="Edit this question").first.click()
    field = page.get_by_label("Edit the question")
    expect(field).to_have_value("first question")
    field.press("Escape")
    expect(page.get_by_role("button", name="Edit this question").first).to_be_focused()
    page.get_by_role("button", name="Edit this question").first.click()
    field.fill("better question")
    field.press("Enter")
    expect(page.get_by_role("article")).to_have_count(2)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    assert prompts(server, tokenizer)[-1].count("question") == 1
    assert "better question" in prompts(server, tokenizer)[-1]


def test_page_that_is_left_keeps_what_there_is_of_an_answer(start, info, visit):
    server = start(ParrotLoop(info, step_s=0.05), ServerOptions(port=0))
    page = visit(server)
    page.get_by_label("Message").fill("once upon a time " * 20)
    page.get_by_label("Message").press("Enter")
    expect(page.get_by_role("article").last).to_contain_text("once upon")
    page.reload()
    expect(page.get_by_role("article").last).to_contain_text("once upon")
    expect(page.get_by_role("article").last).to_contain_text("ended when its page was left")


def test_instructions_belong_to_their_chat(server, visit, tokenizer):
    page = visit(server)
    page.get_by_label("Instructions").fill("Be brief.")
    say(page, "hello")
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_label("Instructions")).to_have_value("")
    page.reload()
    page.get_by_role("button", name="hello", exact=True).click()
    expect(page.get_by_label("Instructions")).to_have_value("Be brief.")


def test_broken_and_foreign_entries_of_the_storage_do_no_harm(server, visit):
    page = visit(server)
    page.evaluate(
        """() => { for (const [key, text] of [["openinfer.conversation.a", "{"], ["openinfer.conversation.b", "null"],
          ["openinfer.conversation.c", '{"id": "c", "title": "", "messages": [{"role": "system"}]}'], ["other", "x"]])
          localStorage.setItem(key, text); sessionStorage.setItem("openinfer.current", "a"); }"""
    )
    page.reload()
    expect(chats(page)).to_have_count(0)
    say(page, "hello")
    expect(chats(page)).to_have_count(1)
    assert page.evaluate("localStorage.getItem('other')") == "x"


def test_storage_without_room_is_said_and_the_chat_goes_on(server, visit):
    page = visit(server)
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); }; }")
    say(page, "hello")
    expect(page.get_by_text("no room for this chat")).to_be_visible()
    expect(page.get_by_role("article")).to_have_count(2)


def test_answer_is_shown_as_markdown_and_code_is_copied(server, visit):
    page = visit(server)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    say(page, "**bold**\n\n```python\nprint(1)\n```", tokens=40)
    answer = page.get_by_role("article").last
    expect(answer.locator("strong").first).to_have_text("bold")
    answer.get_by_role("button", name="Copy the python").first.click()
    expect(answer.get_by_text("Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)"
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as over plain HTTP
    page.get_by_role("button", name="Copy this question").click()
    expect(page.get_by_role("article").first.get_by_text("Copied")).to_be_visible()


def test_reasoning_is_folded_and_not_told_again(server, visit, tokenizer):
    page = visit(server)
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "a *thought*"}, {"content": "said"}]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    completions = f"{server.url}/v1/chat/completions"
    page.route(completions, lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    say(page, "hello")
    answer = page.get_by_role("article").last
    thought = answer.locator("details em")
    expect(thought).to_be_hidden()
    answer.get_by_text("Reasoning").press("Enter")
    expect(thought).to_be_visible()
    page.unroute(completions)
    say(page, "and then?")
    assert "said" in prompts(server, tokenizer)[-1]
    assert "thought" not in prompts(server, tokenizer)[-1]


def test_models_own_sampling_and_context_are_shown(server, visit):
    server.service.sampling_defaults = SamplingDefaults(values={"temperature": 0.6, "top_k": 20})
    page = visit(server)
    expect(page.get_by_text("The model's own: temperature 0.6, top k 20.")).to_be_visible()
    expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "0.6")
    expect(page.get_by_label("Max tokens")).to_have_attribute("placeholder", "up to 2,048")


def test_panels_of_a_narrow_screen_open_over_the_chat_and_close(server, visit):
    page = visit(server)
    page.set_viewport_size({"width": 390, "height": 780})
    say_field = page.get_by_label("Message")
    expect(page.get_by_role("navigation", name="Chats")).to_be_hidden()
    toggle = page.get_by_role("button", name="Settings")
    toggle.click()
    expect(toggle).to_have_attribute("aria-expanded", "true")
    expect(page.get_by_label("Temperature")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_label("Temperature")).to_be_hidden()
    page.get_by_role("button", name="Chats").click()
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("navigation", name="Chats")).to_be_hidden()
    expect(say_field).to_be_focused()
