// Puts the page together: controls, chat, status.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Status } from "./status.js";

const byId = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const NEUTRAL = { temperature: 1, top_p: 1, top_k: "all" };

const api = new Api(() => byId("key").value);
const chat = new Chat(api, requestFields);

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
    showDefaults(data[0]?.sampling_defaults ?? {});
    const chosen = select.value;
    select.replaceChildren(...data.map(({ id }) => new Option(id, id)));
    if (data.some(({ id }) => id === chosen)) select.value = chosen;
    byId("error").textContent = "";
  } catch (error) {
    if (error.status === 401) byId("key-details").open = true;
    byId("error").textContent = error.message;
  }
}

// What a request without these is sampled with; an empty field sends nothing.
function showDefaults(defaults) {
  for (const [name, neutral] of Object.entries(NEUTRAL)) byId(name).placeholder = defaults[name] ?? neutral;
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") chat.stop();
});
byId("stop").addEventListener("click", () => {
  chat.stop();
  byId("prompt").focus();
});
byId("new-chat").addEventListener("click", () => {
  chat.clear();
  byId("prompt").focus();
});
byId("key").addEventListener("change", listModels);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault(); // the key goes nowhere by itself: Enter has changed the field, which asks for the models
  byId("prompt").focus();
});

listModels();
new Status(api).run();
