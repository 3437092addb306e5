// One turn of a conversation on the page: its text, its reasoning, and what can be done with it.

import { button, byId, copyButton, element } from "./dom.js";
import { MarkdownView } from "./render.js";

const ENDED = {
  you: "You stopped this answer.",
  error: "An error ended this answer.",
  length: "The limit of tokens ended this answer.",
  leaving: "This answer ended when its page was left.",
  unsaid: "The model ended without saying anything more.",
};

/** A question of the user; `onEdit(text)` is called with the question that is to be in its place. */
export function userTurn(message, onEdit) {
  const text = element("div", { className: "text plain" }, [message.content]);
  const article = turn("user", "You", [text]);
  const edit = button("Edit", () => editTurn(article, message.content, onEdit));
  edit.setAttribute("aria-label", "Edit this question");
  article.append(tools([copyButton(() => message.content, "Copy this question"), edit]));
  return article;
}

function editTurn(article, content, onEdit) {
  const field = element("textarea", { value: content, rows: Math.min(12, content.split("\n").length + 1) });
  field.setAttribute("aria-label", "Edit the question");
  const shown = [...article.children];
  const close = () => {
    form.remove();
    for (const each of shown) each.hidden = false;
    article.classList.remove("editing");
    article.querySelector("[aria-label='Edit this question']").focus();
  };
  const save = () => {
    if (field.value.trim()) onEdit(field.value.trim());
  };
  const note = element("p", { className: "note" }, ["What was said after it is forgotten."]);
  const form = element("form", { className: "edit" }, [
    field,
    element("div", { className: "actions" }, [
      note,
      button("Cancel", close),
      element("button", { type: "submit", className: "primary" }, ["Ask again"]),
    ]),
  ]);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    save();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation(); // it would stop an answer, too
      close();
    }
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    save();
  });
  for (const each of shown) each.hidden = true;
  article.classList.add("editing");
  article.append(form);
  field.focus();
}

/** An answer, which grows while it is written. */
export class AnswerTurn {
  #message;
  #text = element("div", { className: "text" });
  #view = new MarkdownView(this.#text);
  #reasoning = null;
  #summary = element("summary", {}, ["Reasoning"]);
  #ended = element("p", { className: "note ended", hidden: true });
  #frame = 0;

  constructor(message, onRetry) {
    this.#message = message;
    this.article = turn("assistant", "Answer", [this.#text, this.#ended]);
    const retry = button("Retry", onRetry, { className: "retry" });
    retry.setAttribute("aria-label", "Retry: ask for another answer");
    this.article.append(tools([copyButton(() => message.content, "Copy this answer"), retry]));
    this.#show();
  }

  setWriting(isWriting) {
    this.article.classList.toggle("writing", isWriting);
    this.article.setAttribute("aria-busy", String(isWriting));
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#show();
  }

  /** Shows what the message has become, once a frame however fast it comes. */
  grow() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      keepingPlace(() => this.#show());
    });
  }

  #show() {
    const { content, reasoning, ended } = this.#message;
    const isWriting = this.article.classList.contains("writing");
    if (reasoning) this.#showReasoning(reasoning, isWriting && !content);
    this.#view.show(content);
    const note = ENDED[ended || (content || isWriting ? "" : "unsaid")];
    this.#ended.hidden = !note;
    this.#ended.textContent = note ?? "";
  }

  #showReasoning(reasoning, isThinking) {
    if (!this.#reasoning) {
      const text = element("div", { className: "text" });
      this.#reasoning = new MarkdownView(text);
      this.#text.before(element("details", { className: "reasoning" }, [this.#summary, text]));
    }
    this.#summary.textContent = isThinking ? "Reasoning …" : "Reasoning";
    this.#reasoning.show(reasoning);
  }
}

/** A reader at the end of the conversation stays at its end; who has scrolled up is left alone. */
export function keepingPlace(change) {
  const turns = byId("turns");
  const followed = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 60;
  change();
  if (followed) turns.scrollTop = turns.scrollHeight;
}

function turn(kind, who, children) {
  return element("article", { className: `turn ${kind}` }, [element("h3", {}, [who]), ...children]);
}

function tools(buttons) {
  return element("div", { className: "tools" }, buttons);
}
