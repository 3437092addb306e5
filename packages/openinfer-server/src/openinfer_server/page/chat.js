// The conversation that is shown, and one answer at a time.

import { byId, say } from "./dom.js";
import { history, newConversation } from "./store.js";
import { AnswerTurn, keepingPlace, userTurn } from "./turns.js";

export class Chat {
  #api;
  #request;
  #changed;
  #abort = null;
  #writing = null; // the message that is being written

  /** `request(messages)` makes the body's fields that the controls decide; `changed(conversation)` has it kept. */
  constructor(api, request, changed) {
    this.#api = api;
    this.#request = request;
    this.#changed = changed;
    this.conversation = newConversation();
  }

  get isWriting() {
    return this.#abort !== null;
  }

  /** Shows another conversation; an answer that is being written ends. */
  open(conversation) {
    this.stop();
    this.#setWriting(null, null);
    this.conversation = conversation;
    byId("error").textContent = "";
    this.#showAll();
  }

  stop() {
    this.#abort?.abort();
  }

  /** The page is left: what there is of an answer is kept. */
  leave() {
    if (this.#writing === null) return;
    this.#writing.ended = "leaving";
    this.#changed(this.conversation);
  }

  /** Asks, and shows the answer as it comes; resolves when it has ended, however it did. */
  async ask(text) {
    const { messages } = this.conversation;
    const question = { role: "user", content: text };
    const before = history(messages);
    messages.push(question);
    byId("empty").hidden = true;
    byId("turns").append(this.#userTurn(question, messages.length - 1));
    await this.#answer([...before, question]);
  }

  /** Asks the question at `index` again, or another in its place; what came after it is forgotten. */
  async askAgain(index, text) {
    if (this.isWriting) return;
    this.conversation.messages.length = index;
    this.#showAll();
    await this.ask(text);
  }

  #showAll() {
    const { messages } = this.conversation;
    byId("empty").hidden = messages.length > 0;
    const turns = messages.map((message, index) =>
      message.role === "user" ? this.#userTurn(message, index) : this.#answerTurn(message, index).article,
    );
    byId("turns").replaceChildren(byId("empty"), ...turns);
    byId("turns").scrollTop = byId("turns").scrollHeight;
  }

  #userTurn(message, index) {
    return userTurn(message, (text) => this.askAgain(index, text));
  }

  #answerTurn(message, index) {
    return new AnswerTurn(message, () => this.askAgain(index - 1, this.conversation.messages[index - 1].content));
  }

  async #answer(messages) {
    const { conversation } = this;
    const message = { role: "assistant", content: "", reasoning: "", ended: "" };
    const turn = this.#answerTurn(message, conversation.messages.push(message) - 1);
    byId("turns").append(turn.article);
    byId("turns").scrollTop = byId("turns").scrollHeight;
    const abort = new AbortController();
    this.#setWriting(abort, message);
    this.#changed(conversation);
    turn.setWriting(true);
    byId("error").textContent = "";
    say("The answer is being written.");
    const figures = { began: performance.now(), first: 0, last: 0, usage: null, reason: "" };
    try {
      await this.#take(messages, message, figures, turn, abort.signal);
    } catch (error) {
      message.ended ||= abort.signal.aborted ? "you" : "error"; // "leaving" ends the request, too
      figures.reason = abort.signal.aborted ? "you" : "an error";
      if (!abort.signal.aborted) byId("error").textContent = error.message;
    }
    if (figures.reason === "length") message.ended = "length";
    if (this.#abort === abort) this.#setWriting(null, null); // otherwise another chat was opened
    keepingPlace(() => turn.setWriting(false));
    showFigures(figures);
    say(message.content ? `Answer: ${message.content}` : "There is no answer.");
    this.#changed(conversation);
  }

  #setWriting(abort, message) {
    this.#abort = abort;
    this.#writing = message;
    byId("stop").hidden = !abort;
    byId("send").disabled = Boolean(abort);
  }

  async #take(messages, message, figures, turn, signal) {
    const body = { ...this.#request(messages), stream: true, stream_options: { include_usage: true } };
    for await (const event of this.#api.stream("v1/chat/completions", body, signal)) {
      figures.usage = event.usage ?? figures.usage;
      for (const { delta, finish_reason } of event.choices) {
        figures.reason = finish_reason ?? figures.reason;
        if (delta.role && !delta.content) continue; // says who speaks; no token yet
        figures.last = performance.now(); // the finish counts: a stop token came with it
        figures.first ||= figures.last;
        message.reasoning += delta.reasoning_content ?? "";
        message.content += delta.content ?? "";
        turn.grow();
      }
    }
  }
}

function showFigures({ began, first, last, usage, reason }) {
  const tokens = usage?.completion_tokens;
  const seconds = (last - first) / 1000;
  byId("ttft").textContent = first ? `${(first - began).toFixed(0)} ms` : "–";
  byId("speed").textContent = tokens > 1 && seconds > 0 ? `${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "–";
  byId("prompt-tokens").textContent = usage ? promptText(usage) : "–";
  byId("answer-tokens").textContent = usage ? `${tokens} tokens` : "–";
  byId("reason").textContent = reason || "–";
}

function promptText(usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return `${usage.prompt_tokens} tokens` + (cached ? `, ${cached} cached` : "");
}
