// Markdown as models write it: blocks of text as a tree, never markup. inline.js has what is inside of a paragraph.
//
// Blocks: { kind, ... } with `from`, the offset of the block's first line, for blocks of the text itself.
//   paragraph, heading: text (level)     code: language, text, isOpen     table: header, rows, aligns
//   list: start (null: bullets), isTight, items of blocks               quote: blocks               rule
//
// Departures from CommonMark, all of them because of what models write: HTML is text, line breaks are kept, nested lists
// need two spaces, indented text is no code. A block depends on nothing before it, and the line in
// which a longer text goes on may join the block before: so that text changes the last two blocks only, which makes
// streaming cheap.

const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+([^]*))?$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,8})([-*+]|(\d{1,9})[.)])(?: +|$)/;
const DELIMITERS = /^ {0,3}\|?(?:[ \t]*:?-+:?[ \t]*\|)*[ \t]*:?-+:?[ \t]*\|?$/; // of a line without spaces at its end
const MAX_DEPTH = 12;

/** The blocks of `text` from offset `from` on, where one begins. */
export function parseBlocks(text, from = 0) {
  return new Blocks(text.slice(from).split("\n"), 0).parse(from);
}

class Blocks {
  #lines;
  #depth;
  #at = 0;

  constructor(lines, depth) {
    this.#lines = lines;
    this.#depth = depth;
  }

  parse(from = 0) {
    const blocks = [];
    let offset = from;
    while (this.#at < this.#lines.length) {
      const first = this.#at;
      const block = this.#next();
      if (block) blocks.push({ ...block, from: offset });
      for (let i = first; i < this.#at; i++) offset += this.#lines[i].length + 1;
    }
    return blocks;
  }

  #next() {
    const line = this.#lines[this.#at];
    if (isBlank(line)) return this.#skip(null);
    const fence = FENCE.exec(line);
    if (fence) return this.#code(fence);
    const heading = HEADING.exec(line);
    if (heading) return this.#skip({ kind: "heading", level: heading[1].length, text: withoutClosing(heading[2] ?? "") });
    if (RULE.test(line)) return this.#skip({ kind: "rule" });
    if (this.#depth < MAX_DEPTH && QUOTE.test(line)) return this.#quote();
    if (this.#depth < MAX_DEPTH && ITEM.test(line)) return this.#list();
    return this.#beginsTable(this.#at) ? this.#table() : this.#paragraph();
  }

  #skip(block) {
    this.#at++;
    return block;
  }

  #code([, indent, marks, info]) {
    const closing = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}[ \\t]*$`);
    const lines = [];
    let isOpen = true;
    for (this.#at++; this.#at < this.#lines.length && isOpen; this.#at++) {
      const line = this.#lines[this.#at];
      isOpen = !closing.test(line);
      if (isOpen) lines.push(line.slice(Math.min(indent.length, indentOf(line))));
    }
    return { kind: "code", language: info.trim().split(/\s/)[0], text: lines.join("\n"), isOpen };
  }

  #quote() {
    const lines = [];
    for (; this.#at < this.#lines.length && QUOTE.test(this.#lines[this.#at]); this.#at++) {
      lines.push(this.#lines[this.#at].replace(QUOTE, ""));
    }
    return { kind: "quote", blocks: this.#inside(lines) };
  }

  #list() {
    const first = ITEM.exec(this.#lines[this.#at]);
    const indent = first[1].length;
    const items = [];
    let isTight = true;
    for (;;) {
      const blanks = this.#skipBlanks();
      const item = this.#at < this.#lines.length && ITEM.exec(this.#lines[this.#at]);
      const continues = item && sameKind(item, first) && item[1].length < indent + 2 && !RULE.test(this.#lines[this.#at]);
      if (!continues && items.length) break;
      if (blanks) isTight = false;
      items.push(this.#item(item));
      isTight &&= !items.at(-1).isLoose;
    }
    return { kind: "list", start: first[3] ? Number(first[3]) : null, isTight, items: items.map(({ blocks }) => blocks) };
  }

  #item([marker, spaces]) {
    const enough = spaces.length + 2; // models nest by two spaces, whatever the marker's width
    const lines = [this.#lines[this.#at].slice(marker.length)];
    let isLoose = false;
    for (this.#at++; this.#at < this.#lines.length; ) {
      const begun = this.#at;
      const blanks = this.#skipBlanks();
      const line = this.#lines[this.#at];
      const belongs = line !== undefined && (indentOf(line) >= enough || (!blanks && !this.#beginsBlock(this.#at, true)));
      if (!belongs) {
        this.#at = begun;
        break;
      }
      isLoose ||= blanks > 0;
      for (let i = 0; i < blanks; i++) lines.push("");
      lines.push(line.slice(Math.min(marker.length, indentOf(line))));
      this.#at++;
    }
    return { blocks: this.#inside(lines), isLoose };
  }

  #table() {
    const header = cells(this.#lines[this.#at]);
    const aligns = cells(this.#lines[this.#at + 1]).map(alignOf);
    const rows = [];
    for (this.#at += 2; this.#at < this.#lines.length; this.#at++) {
      if (isBlank(this.#lines[this.#at]) || this.#beginsBlock(this.#at)) break;
      const row = cells(this.#lines[this.#at]);
      rows.push(header.map((_, i) => row[i] ?? ""));
    }
    return { kind: "table", header, aligns, rows };
  }

  #paragraph() {
    const lines = [this.#lines[this.#at].trim()];
    for (this.#at++; this.#at < this.#lines.length; this.#at++) {
      const line = this.#lines[this.#at];
      if (isBlank(line) || this.#beginsBlock(this.#at) || this.#beginsTable(this.#at)) break;
      lines.push(line.trim());
    }
    return { kind: "paragraph", text: lines.join("\n") };
  }

  /** Whether this line ends a paragraph. Outside of lists a number other than 1 does not: "in\n1984. Then". */
  #beginsBlock(at, isInList = false) {
    const line = this.#lines[at];
    const item = ITEM.exec(line);
    const isItem = item && (isInList || !item[3] || item[3] === "1");
    return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || Boolean(isItem);
  }

  #beginsTable(at) {
    const next = this.#lines[at + 1];
    if (next === undefined || !this.#lines[at].includes("|") || !next.includes("-") || !DELIMITERS.test(next.trimEnd())) return false;
    return cells(this.#lines[at]).length === cells(next).length;
  }

  #skipBlanks() {
    const first = this.#at;
    while (this.#at < this.#lines.length && isBlank(this.#lines[this.#at])) this.#at++;
    return this.#at - first;
  }

  #inside(lines) {
    return new Blocks(lines, this.#depth + 1).parse();
  }
}

/** The cells of a table's line: `|` divides them, but not after a backslash and not in code. */
function cells(line) {
  const found = [];
  let [cell, isCode] = ["", false];
  for (let at = 0; at < line.length; at++) {
    if (line[at] === "\\" && line[at + 1] === "|") cell += line[++at];
    else if (line[at] === "|" && !isCode) {
      found.push(cell.trim());
      cell = "";
    } else {
      if (line[at] === "`") isCode = !isCode && line.includes("`", at + 1);
      cell += line[at];
    }
  }
  found.push(cell.trim());
  if (found[0] === "") found.shift();
  if (found.at(-1) === "") found.pop();
  return found;
}

function alignOf(delimiter) {
  if (delimiter.endsWith(":")) return delimiter.startsWith(":") ? "center" : "right";
  return "left";
}

function withoutClosing(heading) {
  const text = heading.trimEnd();
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return end === 0 || text[end - 1] === " " ? text.slice(0, end).trim() : text;
}

const sameKind = (one, other) => one[2].slice(-1) === other[2].slice(-1);
const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;
