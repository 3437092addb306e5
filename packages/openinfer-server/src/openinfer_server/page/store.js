// Conversations, kept by the browser for this address: one entry of its local storage each, as JSON.
//
// { id, title, isNamed, updated, system, messages: [{ role, content, reasoning, ended }] }; `ended` says why an answer
// is not whole: "you", "error", "length" or "leaving" the page. Nothing of it leaves the browser but what is asked, and no key is ever in it.

const PREFIX = "openinfer.conversation.";
const MAX_TITLE = 60;

export class Store {
  /** The last conversation first. Entries that are not ours, or broken, are left alone. */
  list() {
    return storedKeys()
      .map((key) => readEntry(key))
      .filter(Boolean)
      .sort((one, other) => other.updated - one.updated);
  }

  get(id) {
    return readEntry(PREFIX + id);
  }

  /** Whether there was room: without, or where a browser keeps nothing, the page works on. */
  save(conversation) {
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      return true;
    } catch {
      return false;
    }
  }

  remove(id) {
    localStorage.removeItem(PREFIX + id);
  }
}

export function newConversation() {
  return { id: newId(), title: "", isNamed: false, updated: Date.now(), system: "", messages: [] };
}

/** The name that its user gave, or how the first question begins. */
export function titleOf({ title, isNamed, messages }) {
  const text = isNamed ? title : (messages[0]?.content ?? "");
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE)}…` : line || "New chat";
}

/** The turns that a new question is asked after: questions that got no answer are not told again. */
export function history(messages) {
  const isAnswered = (at) => messages[at + 1]?.role === "assistant" && messages[at + 1].content !== "";
  return messages
    .filter(({ role, content }, at) => (role === "user" ? isAnswered(at) : content !== ""))
    .map(({ role, content }) => ({ role, content }));
}

function storedKeys() {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch {
    return []; // a browser may forbid it
  }
}

function readEntry(key) {
  try {
    const read = JSON.parse(localStorage.getItem(key));
    return isConversation(read) ? read : null;
  } catch {
    return null;
  }
}

function isConversation(read) {
  const isMessage = ({ role, content }) => ["user", "assistant"].includes(role) && typeof content === "string";
  return typeof read?.id === "string" && typeof read.title === "string" && read.messages.every(isMessage);
}

/** `crypto.randomUUID` is for secure origins only, and this page is served over plain HTTP, too. */
function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
