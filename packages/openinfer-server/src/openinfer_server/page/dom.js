// The few ways in which the page makes nodes. None of them takes markup: text becomes text nodes.

export const byId = (id) => document.getElementById(id);

/** An element with properties and children, which are nodes or text. */
export function element(name, properties = {}, children = []) {
  const made = Object.assign(document.createElement(name), properties);
  for (const child of children) made.append(child); // one by one: there can be more than a call takes arguments
  return made;
}

export function button(text, action, properties = {}) {
  const made = element("button", { type: "button", ...properties }, [text]);
  made.addEventListener("click", action);
  return made;
}

/** Screen readers hear the beginning and the end of things, not every token. */
export function say(text) {
  byId("announcer").textContent = text;
}

/** Puts text on the clipboard, also where browsers have no clipboard for a page: plain HTTP on another machine. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = element("textarea", { value: text, className: "hidden" });
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  if (!copied) throw new Error("the browser does not let this page copy");
}

/** A button that copies what `text()` says at that time, and says that it did. */
export function copyButton(text, label) {
  const made = button("Copy", async () => {
    let said = "Copied";
    try {
      await copyText(text());
    } catch {
      said = "Not copied";
    }
    made.textContent = said;
    say(said);
    setTimeout(() => (made.textContent = "Copy"), 1500);
  });
  made.setAttribute("aria-label", label);
  return made;
}
