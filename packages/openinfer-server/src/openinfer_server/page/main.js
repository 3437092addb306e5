// Puts the page together: controls, chat, the list of chats, status.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Chats } from "./chats.js";
import { byId } from "./dom.js";
import { Status } from "./status.js";
import { newConversation, Store } from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const NEUTRAL = { temperature: 1, top_p: 1, top_k: "all" };
const CURRENT = "openinfer.current"; // of this tab: what a reload shows again
const PANELS = { "show-chats": "chats-panel", "show-settings": "settings-panel" };

const api = new Api(() => byId("key").value);
const store = new Store();
const chats = new Chats(store, open);
const chat = new Chat(api, requestFields, (conversation) => chats.keep(conversation));

function open(id) {
  const conversation = (id && store.get(id)) || newConversation();
  chat.open(conversation);
  byId("system").value = conversation.system ?? "";
  remember(conversation.id);
  chats.current = conversation.id;
  showPanel(null);
  byId("prompt").focus();
}

function requestFields(messages) {
  const system = byId("system").value.trim();
  const fields = { model: byId("model").value || undefined, messages };
  if (system) fields.messages = [{ role: "system", content: system }, ...messages];
  for (const name of NUMBERS) if (byId(name).value !== "") fields[name] = Number(byId(name).value);
  if (byId("thinking").value) fields.chat_template_kwargs = { enable_thinking: byId("thinking").value === "true" };
  return fields;
}

async function send() {
  const prompt = byId("prompt");
  const text = prompt.value.trim();
  const wrong = NUMBERS.map(byId).find((input) => !input.reportValidity());
  if (!text || chat.isWriting || wrong) return;
  prompt.value = "";
  await chat.ask(text);
}

async function listModels() {
  const select = byId("model");
  try {
    const { data } = await (await api.get("v1/models")).json();
    showModel(data[0]);
    const chosen = select.value;
    select.replaceChildren(...data.map(({ id }) => new Option(id, id)));
    if (data.some(({ id }) => id === chosen)) select.value = chosen;
    byId("error").textContent = "";
  } catch (error) {
    if (error.status === 401) {
      byId("key-details").open = true;
      showPanel("settings-panel");
    }
    byId("error").textContent = error.message;
  }
}

// What a request without these is sampled with: an empty field sends nothing.
function showModel({ sampling_defaults: defaults = {}, max_model_len: context } = {}) {
  for (const [name, neutral] of Object.entries(NEUTRAL)) byId(name).placeholder = defaults[name] ?? neutral;
  const given = Object.entries(defaults).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
  byId("defaults").textContent = given.length ? `The model's own: ${given.join(", ")}.` : "The model brings none.";
  if (context) byId("max_tokens").placeholder = `up to ${context.toLocaleString("en")}`;
}

function remember(id) {
  try {
    sessionStorage.setItem(CURRENT, id);
  } catch {
    // a browser that keeps nothing shows a new chat after a reload
  }
}

function remembered() {
  try {
    return sessionStorage.getItem(CURRENT);
  } catch {
    return null;
  }
}

/** On a narrow screen the panels lie over the chat, one at a time. */
function showPanel(shown) {
  for (const [name, panel] of Object.entries(PANELS)) {
    byId(panel).classList.toggle("shown", panel === shown);
    byId(name).setAttribute("aria-expanded", String(panel === shown));
  }
}

for (const [name, panel] of Object.entries(PANELS)) {
  byId(name).addEventListener("click", () => showPanel(byId(panel).classList.contains("shown") ? null : panel));
}
byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("prompt").addEventListener("focus", () => showPanel(null));
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  const isPanel = document.querySelector(".panel.shown") !== null;
  if (isPanel) showPanel(null);
  else chat.stop();
});
byId("stop").addEventListener("click", () => {
  chat.stop();
  byId("prompt").focus();
});
byId("new-chat").addEventListener("click", () => open(null));
byId("system").addEventListener("change", () => {
  chat.conversation.system = byId("system").value;
  if (chat.conversation.messages.length) chats.keep(chat.conversation);
});
byId("key").addEventListener("change", listModels);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault(); // the key goes nowhere by itself: Enter has changed the field, which asks for the models
  byId("prompt").focus();
});
addEventListener("pagehide", () => chat.leave());

open(remembered());
listModels();
new Status(api).run();
