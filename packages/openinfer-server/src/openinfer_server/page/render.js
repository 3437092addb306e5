// Blocks of markdown.js as nodes of the page, and a view of them that follows a growing text.

import { copyButton, element } from "./dom.js";
import { parseInline } from "./inline.js";
import { parseBlocks } from "./markdown.js";

/** Shows a text that grows: what is finished stays as it is, with what its reader selected in it. */
export class MarkdownView {
  #parent;
  #shown = []; // { block, node, source } of the text
  #text = "";

  constructor(parent) {
    this.#parent = parent;
  }

  show(text) {
    const normal = text.replaceAll("\r\n", "\n");
    const isLonger = normal.startsWith(this.#text);
    const kept = isLonger ? Math.max(0, this.#shown.length - 2) : 0;
    const from = this.#shown[kept]?.block.from ?? 0;
    const blocks = parseBlocks(normal, isLonger ? from : 0);
    const before = this.#shown.splice(kept);
    this.#text = normal;
    this.#shown = this.#shown.concat(this.#placed(blocks, before, normal));
    const nodes = new Set(this.#shown.map(({ node }) => node));
    for (const { node } of before) if (!nodes.has(node)) node.remove();
  }

  #placed(blocks, before, text) {
    return blocks.map((block, i) => {
      const source = text.slice(block.from, blocks[i + 1]?.from);
      const node = reused(before[i], block, source) ?? blockNode(block);
      if (node.parentNode !== this.#parent) this.#parent.insertBefore(node, before[i]?.node ?? null);
      return { block, node, source };
    });
  }
}

/** The node that shows this block already; code that grew has its new text put in. */
function reused(shown, block, source) {
  if (!shown || shown.block.kind !== block.kind) return null;
  if (shown.source === source || (block.kind !== "code" && shown.source === source.trimEnd())) return shown.node;
  const isSameCode = block.kind === "code" && shown.block.language === block.language;
  if (!isSameCode) return null;
  showCode(shown.node.querySelector("code"), block.text);
  return shown.node;
}

function blockNode(block) {
  return BLOCKS[block.kind](block);
}

const BLOCKS = {
  paragraph: ({ text }) => filled("p", text),
  heading: ({ level, text }) => filled(`h${Math.min(6, level + 3)}`, text), // below the turn's own h3
  rule: () => element("hr"),
  quote: ({ blocks }) => element("blockquote", {}, blocks.map(blockNode)),
  list: listNode,
  code: codeNode,
  table: tableNode,
};

function listNode({ start, isTight, items }) {
  const nodes = items.map((blocks) => itemNode(blocks, isTight));
  return start === null ? element("ul", {}, nodes) : element("ol", { start }, nodes);
}

function itemNode(blocks, isTight) {
  const isBare = (block) => isTight && block.kind === "paragraph";
  const task = blocks[0]?.kind === "paragraph" && /^\[([ xX])\] /.exec(blocks[0].text);
  const shown = task ? [{ ...blocks[0], text: blocks[0].text.slice(4) }, ...blocks.slice(1)] : blocks;
  const nodes = shown.flatMap((block) => (isBare(block) ? inlineNodes(parseInline(block.text)) : [blockNode(block)]));
  if (!task) return element("li", {}, nodes);
  const box = element("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", ariaLabel: "Task" });
  return element("li", { className: "task" }, [box, ...nodes]);
}

function codeNode({ language, text }) {
  const code = element("code");
  showCode(code, text);
  const label = element("span", {}, [language || "text"]);
  const copy = copyButton(() => code.textContent, `Copy the ${language || "text"}`);
  // a code block that scrolls must be reachable with the keyboard
  const pre = element("pre", { tabIndex: 0 }, [code]);
  return element("div", { className: "code" }, [element("div", { className: "code-head" }, [label, copy]), pre]);
}

function showCode(code, text) {
  const node = code.firstChild ?? code.appendChild(document.createTextNode(""));
  if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
  else node.data = text;
}

function tableNode({ header, rows, aligns }) {
  const row = (name, texts) =>
    element(
      "tr",
      {},
      texts.map((text, i) => Object.assign(filled(name, text), { className: aligns[i] })),
    );
  const head = element("thead", {}, [row("th", header)]);
  const body = element(
    "tbody",
    {},
    rows.map((texts) => row("td", texts)),
  );
  return element("div", { className: "table", tabIndex: 0 }, [element("table", {}, [head, body])]);
}

function filled(name, text) {
  return element(name, {}, inlineNodes(parseInline(text)));
}

function inlineNodes(nodes) {
  return nodes.map((node) => (typeof node === "string" ? node : INLINE[node.kind](node)));
}

const INLINE = {
  code: ({ text }) => element("code", {}, [text]),
  break: () => element("br"),
  strong: ({ children }) => element("strong", {}, inlineNodes(children)),
  em: ({ children }) => element("em", {}, inlineNodes(children)),
  del: ({ children }) => element("del", {}, inlineNodes(children)),
  link: ({ href, children }) =>
    element(
      "a",
      { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow", referrerPolicy: "no-referrer" },
      inlineNodes(children),
    ),
};
