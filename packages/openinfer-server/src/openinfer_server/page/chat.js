// The conversation: turns on the page, and one answer at a time.

const byId = (id) => document.getElementById(id);

export class Chat {
  #api;
  #request;
  #messages = [];
  #abort = null;

  /** `request()` makes the fields of the body that the controls decide. */
  constructor(api, request) {
    this.#api = api;
    this.#request = request;
  }

  get isWriting() {
    return this.#abort !== null;
  }

  clear() {
    this.stop();
    this.#messages = [];
    byId("turns").replaceChildren(byId("empty"));
    byId("empty").hidden = false;
    byId("error").textContent = "";
  }

  stop() {
    this.#abort?.abort();
  }

  /** Asks, and shows the answer as it comes; resolves when it has ended, however it did. */
  async ask(text) {
    const messages = [...this.#messages, { role: "user", content: text }];
    addTurn("user", "You").text.textContent = text;
    const turn = addTurn("assistant", "Answer");
    const abort = new AbortController();
    this.#abort = abort;
    this.#messages = messages;
    byId("error").textContent = "";
    setWriting(turn, true);
    say("The answer is being written.");
    const answer = { text: "", reasoning: "", began: performance.now(), first: 0, last: 0, usage: null, reason: "" };
    try {
      await this.#take(answer, turn, abort.signal);
    } catch (error) {
      answer.reason = abort.signal.aborted ? "you" : "an error";
      if (!abort.signal.aborted) byId("error").textContent = error.message;
    }
    const isCurrent = this.#messages === messages; // otherwise a new chat has begun
    if (isCurrent && answer.text) this.#messages = [...messages, { role: "assistant", content: answer.text }];
    if (isCurrent && !answer.text) this.#messages = messages.slice(0, -1);
    this.#abort = null;
    setWriting(turn, false);
    showFigures(answer);
    say(answer.text ? `Answer: ${answer.text}` : "There is no answer.");
  }

  async #take(answer, turn, signal) {
    const body = { ...this.#request(this.#messages), stream: true, stream_options: { include_usage: true } };
    for await (const event of this.#api.stream("v1/chat/completions", body, signal)) {
      answer.usage = event.usage ?? answer.usage;
      for (const { delta, finish_reason } of event.choices) {
        answer.reason = finish_reason ?? answer.reason;
        if (delta.role && !delta.content) continue; // says who speaks; no token yet
        answer.last = performance.now(); // the finish counts: a stop token came with it
        answer.first ||= answer.last;
        append(turn, answer, delta);
      }
    }
  }
}

function append(turn, answer, delta) {
  const turns = byId("turns");
  const followed = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
  if (delta.reasoning_content) {
    turn.reasoning ??= addReasoning(turn);
    turn.reasoning.append(delta.reasoning_content);
    answer.reasoning += delta.reasoning_content;
  }
  if (delta.content) {
    turn.text.append(delta.content);
    answer.text += delta.content;
  }
  if (followed) turns.scrollTop = turns.scrollHeight;
}

function addTurn(kind, who) {
  byId("empty").hidden = true;
  const article = element("article", `turn ${kind}`);
  const heading = element("h3");
  heading.textContent = who;
  const text = element("div", "text");
  article.append(heading, text);
  byId("turns").append(article);
  byId("turns").scrollTop = byId("turns").scrollHeight;
  return { article, text, reasoning: null };
}

function addReasoning(turn) {
  const details = element("details");
  const summary = element("summary");
  summary.textContent = "Reasoning";
  const text = element("div", "text");
  details.append(summary, text);
  turn.text.before(details);
  return text;
}

function setWriting(turn, isWriting) {
  turn.article.classList.toggle("writing", isWriting);
  turn.article.setAttribute("aria-busy", String(isWriting));
  byId("stop").hidden = !isWriting;
  byId("send").disabled = isWriting;
}

function showFigures(answer) {
  const tokens = answer.usage?.completion_tokens;
  const seconds = (answer.last - answer.first) / 1000;
  byId("ttft").textContent = answer.first ? `${(answer.first - answer.began).toFixed(0)} ms` : "–";
  byId("speed").textContent = tokens > 1 && seconds > 0 ? `${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "–";
  byId("prompt-tokens").textContent = answer.usage ? promptText(answer.usage) : "–";
  byId("answer-tokens").textContent = answer.usage ? `${tokens} tokens` : "–";
  byId("reason").textContent = answer.reason || "–";
}

function promptText(usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return `${usage.prompt_tokens} tokens` + (cached ? `, ${cached} cached` : "");
}

/** Screen readers hear the beginning and the whole answer, not every token. */
function say(text) {
  byId("announcer").textContent = text;
}

function element(name, className = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  return made;
}
