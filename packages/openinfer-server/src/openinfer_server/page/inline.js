// Markdown inside a block: code, emphasis, links, breaks. A tree comes out, never markup.
//
// Nodes: a string, { kind: "code" | "break", text }, { kind: "strong" | "em" | "del", children },
// { kind: "link", href, children }. Time is linear in the text: answers are as long as their writer likes.

const SPECIAL = /[\\`*_~[!<]|https?:\/\//g;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const SAFE_LINK = /^(?:https?:\/\/|mailto:)[^\s]+$/i; // nothing that runs, and nothing on this server
const BARE_LINK = /https?:\/\/[^\s<>"`*|]{1,2048}/y;
const ANGLED_LINK = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2048})>/iy;
const BREAK = /<br ?\/?>/iy;
const MAX_TARGET = 2048;
const MAX_MARKS = 3; // of one run: more are a drawn line
const MAX_OPEN_MARKS = 32; // how deep emphasis may be nested

export function parseInline(text, canLink = true) {
  return new Inline(text, canLink).parse();
}

class Inline {
  #text;
  #canLink;
  #out = []; // nodes, and marks of emphasis that are still open: { mark, count }
  #openMarks = []; // where the latter stand in #out
  #numOpen = { "*": 0, _: 0, "~": 0 };
  #unclosedCode = new Set(); // lengths of backtick runs that nothing closes
  #brackets;

  constructor(text, canLink) {
    this.#text = text;
    this.#canLink = canLink;
    this.#brackets = canLink ? matchingBrackets(text) : new Map();
  }

  parse() {
    let at = 0;
    while (at < this.#text.length) {
      SPECIAL.lastIndex = at;
      const special = SPECIAL.exec(this.#text)?.index ?? this.#text.length;
      this.#add(this.#text.slice(at, special));
      at = special < this.#text.length ? this.#takeSpecial(special) : special;
    }
    return plain(this.#out);
  }

  /** Takes what begins at `at` and returns where it ends. */
  #takeSpecial(at) {
    const character = this.#text[at];
    const end = this.#specialEnd(character, at);
    if (end) return end;
    this.#add(character);
    return at + 1;
  }

  #specialEnd(character, at) {
    if (character === "\\") return this.#takeEscape(at);
    if (character === "`") return this.#takeCode(at);
    if (character === "[") return this.#takeLink(at);
    if (character === "!") return this.#text[at + 1] === "[" && this.#takeLink(at + 1); // images are links: nothing is fetched
    if (character === "<") return this.#takeAngled(at);
    if (character === "h") return this.#takeBareLink(at);
    return this.#takeMarks(at, character);
  }

  #takeEscape(at) {
    const next = this.#text[at + 1];
    if (next === undefined || !ESCAPABLE.test(next)) return 0;
    this.#add(next);
    return at + 2;
  }

  #takeCode(at) {
    const length = runLength(this.#text, at);
    const inside = at + length;
    const end = this.#unclosedCode.has(length) ? -1 : this.#closingCode(inside, length);
    if (end < 0) {
      this.#unclosedCode.add(length);
      this.#add("`".repeat(length));
      return inside;
    }
    const code = this.#text.slice(inside, end).replaceAll("\n", " ");
    const isPadded = code.length > 2 && code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
    this.#out.push({ kind: "code", text: isPadded ? code.slice(1, -1) : code });
    return end + length;
  }

  #closingCode(from, length) {
    for (let at = this.#text.indexOf("`", from); at >= 0; at = this.#text.indexOf("`", at)) {
      const found = runLength(this.#text, at);
      if (found === length) return at;
      at += found;
    }
    return -1;
  }

  #takeLink(bracket) {
    const close = this.#brackets.get(bracket);
    const target = close !== undefined && linkTarget(this.#text, close + 1);
    if (!target || !SAFE_LINK.test(target.href)) return 0;
    const label = this.#text.slice(bracket + 1, close);
    this.#out.push({ kind: "link", href: target.href, children: label ? parseInline(label, false) : [target.href] });
    return target.end;
  }

  #takeAngled(at) {
    const found = matchAt(BREAK, this.#text, at);
    if (found) this.#out.push({ kind: "break", text: "\n" });
    return found ? at + found[0].length : this.#takeAutolink(matchAt(ANGLED_LINK, this.#text, at), at);
  }

  #takeBareLink(at) {
    const isInWord = at > 0 && /\w/.test(this.#text[at - 1]);
    const found = isInWord ? null : matchAt(BARE_LINK, this.#text, at);
    if (!found) return 0;
    let href = found[0].replace(/[.,:;!?'_~\]]{1,64}$/, "");
    while (href.endsWith(")") && count(href, ")") > count(href, "(")) href = href.slice(0, -1);
    return this.#takeAutolink([href, href], at);
  }

  #takeAutolink(found, at) {
    if (!found || !this.#canLink) return 0;
    this.#out.push({ kind: "link", href: found[1], children: [found[1]] });
    return at + found[0].length;
  }

  /** CommonMark's runs of delimiters, without its rule of three. */
  #takeMarks(at, mark) {
    const length = runLength(this.#text, at);
    if (length > MAX_MARKS || (mark === "~" && length !== 2)) {
      this.#add(mark.repeat(length));
      return at + length;
    }
    const before = characterBefore(this.#text, at);
    const after = characterAt(this.#text, at + length);
    const opens = !isSpace(after) && (!isPunctuation(after) || isSpace(before) || isPunctuation(before));
    const closes = !isSpace(before) && (!isPunctuation(before) || isSpace(after) || isPunctuation(after));
    const canOpen = opens && (mark !== "_" || !closes || isPunctuation(before));
    const canClose = closes && (mark !== "_" || !opens || isPunctuation(after));
    const left = canClose ? this.#close(mark, length) : length;
    if (left && canOpen && this.#openMarks.length < MAX_OPEN_MARKS) {
      this.#openMarks.push(this.#out.length);
      this.#numOpen[mark]++;
      this.#out.push({ mark, count: left });
    } else if (left) this.#add(mark.repeat(left));
    return at + length;
  }

  /** Closes what `length` marks can close; returns how many are left. */
  #close(mark, length) {
    let left = length;
    while (left && this.#numOpen[mark]) {
      const index = this.#lastOpen(mark);
      const opener = this.#out[index];
      const used = mark === "~" ? 2 : Math.min(2, left, opener.count);
      const children = plain(this.#out.splice(index + 1));
      opener.count -= used;
      left -= used;
      if (!opener.count) {
        this.#out.pop();
        this.#openMarks.pop();
        this.#numOpen[mark]--;
      }
      this.#out.push({ kind: mark === "~" ? "del" : used === 2 ? "strong" : "em", children });
    }
    return left;
  }

  /** Where the last open mark of this kind stands; those after it stay open no longer. */
  #lastOpen(mark) {
    for (;;) {
      const index = this.#openMarks.at(-1);
      if (this.#out[index].mark === mark) return index;
      this.#numOpen[this.#out[index].mark]--;
      this.#openMarks.pop();
    }
  }

  #add(text) {
    if (!text) return;
    const last = this.#out.length - 1;
    if (typeof this.#out[last] === "string") this.#out[last] += text;
    else this.#out.push(text);
  }
}

/** Marks that nothing closed are text. */
function plain(nodes) {
  return nodes.map((node) => (node.mark ? node.mark.repeat(node.count) : node));
}

function matchingBrackets(text) {
  const open = [];
  const matches = new Map();
  for (let at = 0; at < text.length; at++) {
    if (text[at] === "\\") at++;
    else if (text[at] === "[") open.push(at);
    else if (text[at] === "]" && open.length) matches.set(open.pop(), at);
  }
  return matches;
}

/** `(target "title")` at `at`; parentheses in the target are balanced. */
function linkTarget(text, at) {
  if (text[at] !== "(") return null;
  const end = Math.min(text.length, at + MAX_TARGET);
  let depth = 0;
  for (let i = at; i < end; i++) {
    if (text[i] === "\n") return null;
    if (text[i] === "(") depth++;
    if (text[i] === ")" && --depth === 0) {
      const [, angled, bare] = /^\s*(?:<([^<>]*)>|(\S+))/.exec(text.slice(at + 1, i)) ?? [];
      return { href: angled ?? bare ?? "", end: i + 1 };
    }
  }
  return null;
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end++;
  return end - at;
}

function characterAt(text, at) {
  return at < text.length ? String.fromCodePoint(text.codePointAt(at)) : " ";
}

function characterBefore(text, at) {
  const isPair = at > 1 && text.charCodeAt(at - 1) >= 0xdc00 && text.charCodeAt(at - 1) < 0xe000;
  return at > 0 ? characterAt(text, isPair ? at - 2 : at - 1) : " ";
}

const isSpace = (character) => /\s/.test(character);
const isPunctuation = (character) => PUNCTUATION.test(character);
const count = (text, character) => text.split(character).length - 1;
