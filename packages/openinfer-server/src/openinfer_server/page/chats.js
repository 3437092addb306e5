// The list of conversations: open, rename, delete.

import { button, byId, element, say } from "./dom.js";
import { titleOf } from "./store.js";

export class Chats {
  #store;
  #open;
  #current = "";
  #deleted = new Set(); // an answer that ends after its chat was deleted must not bring it back

  /** `open(id)` shows one, and `open(null)` a new one. */
  constructor(store, open) {
    this.#store = store;
    this.#open = open;
    byId("delete-all").addEventListener("click", () => this.#deleteAll());
    addEventListener("storage", () => this.#show()); // another tab of this page
  }

  /** The one that is shown now. */
  set current(id) {
    this.#current = id;
    this.#show();
  }

  keep(conversation) {
    if (this.#deleted.has(conversation.id)) return;
    const { title, isNamed } = this.#store.get(conversation.id) ?? conversation; // the name is the list's
    byId("not-kept").hidden = this.#store.save({ ...conversation, title, isNamed, updated: Date.now() });
    this.#show();
  }

  #show() {
    const all = this.#store.list();
    byId("chats").replaceChildren(...all.map((each) => this.#row(each)));
    byId("no-chats").hidden = all.length > 0;
    byId("delete-all").hidden = all.length === 0;
  }

  #row(conversation) {
    const title = titleOf(conversation);
    const open = button(title, () => this.#open(conversation.id), { className: "open", title });
    const isCurrent = conversation.id === this.#current;
    if (isCurrent) open.setAttribute("aria-current", "true");
    const row = element("li", { className: isCurrent ? "current" : "" }, [open]);
    const act = (text, action) => {
      const made = button(text, action);
      made.setAttribute("aria-label", `${text}: ${title}`);
      return made;
    };
    const rename = act("Rename", () => this.#rename(row, conversation));
    row.append(element("span", { className: "row-tools" }, [rename, act("Delete", () => this.#delete(conversation))]));
    return row;
  }

  #rename(row, conversation) {
    const field = element("input", { value: titleOf(conversation), maxLength: 200 });
    field.setAttribute("aria-label", "Name of the chat");
    let isOver = false; // leaving the list takes the focus away, which is no second end
    const end = (isKept) => {
      if (isOver) return;
      isOver = true;
      const title = field.value.trim();
      // as it is now: an answer may have come meanwhile
      const now = this.#store.get(conversation.id);
      if (isKept && now) this.#store.save({ ...now, title, isNamed: title !== "" });
      this.#show();
      byId("chats").querySelector("[aria-current]")?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) end(true);
      if (event.key !== "Escape") return;
      event.stopPropagation();
      end(false);
    });
    field.addEventListener("blur", () => end(true));
    row.replaceChildren(field);
    field.select();
  }

  #delete(conversation) {
    const title = titleOf(conversation);
    if (!confirm(`Delete “${title}”?`)) return;
    this.#forget([conversation]);
    say("Deleted.");
  }

  #deleteAll() {
    if (!confirm("Delete all chats that this browser keeps?")) return;
    this.#forget(this.#store.list());
    say("All chats are deleted.");
  }

  #forget(conversations) {
    for (const { id } of conversations) {
      this.#deleted.add(id);
      this.#store.remove(id);
    }
    if (this.#deleted.has(this.#current)) this.#open(null);
    this.#show();
    byId("new-chat").focus();
  }
}
