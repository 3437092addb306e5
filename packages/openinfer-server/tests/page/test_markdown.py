"""Markdown of answers: what it looks like, that it grows as it comes, and that it never becomes anything else."""

import json
import random
from pathlib import Path

import pytest

RENDER = """async ([pieces]) => {
  const { MarkdownView } = await import("/page/render.js");
  const parent = document.createElement("div");
  const view = new MarkdownView(parent);
  let text = "";
  for (const piece of pieces) view.show((text += piece));
  parent.querySelectorAll(".code-head").forEach((each) => each.remove());
  for (const each of parent.querySelectorAll("*"))
    for (const { name } of [...each.attributes])
      if (!["checked", "disabled", "href", "start", "type"].includes(name)) each.removeAttribute(name);
  return parent.innerHTML;
}"""


@pytest.fixture
def page(shared, visit):
    return visit(shared)


def rendered(page, text: str) -> str:
    return page.evaluate(RENDER, [[text]])


EXAMPLES = {
    each["markdown"]: each["html"]
    for each in json.loads(Path(__file__).with_name("markdown_examples.json").read_text(encoding="utf-8"))
}


def test_markdown_is_rendered(page):
    got = {text: rendered(page, text) for text in EXAMPLES}
    assert got == EXAMPLES


INJECTIONS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)><style>*{display:none}</style>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](java\tscript:alert(1)) [d](\x01javascript:alert(1))",
    "[a](data:text/html,<script>alert(1)</script>) [b](vbscript:x) [c](file:///etc/passwd) [d](//evil/x) [e](/admin)",
    '<javascript:alert(1)> <https://a"onmouseover=alert(1)>',
    '[a](https://x/"onmouseover="alert(1))',
    "![x](javascript:alert(1))",
    "[![x](https://i/p.png)](javascript:alert(1))",
    '```"onload=alert(1) x="\ncode\n```',
    "| <b>a</b> | b |\n|--|--|\n| <iframe src=x> | `<x>` |",
    "&lt;script&gt; &#60;b&#62; <!-- x --> <![CDATA[ x ]]>",
    "<br onload=alert(1)> </div></main><form action=x>",
]
TAGS = set("a blockquote br code del div em h4 h5 h6 hr input li ol p pre strong table tbody td th thead tr ul".split())
LOOK = """async (texts) => {
  const { MarkdownView } = await import("/page/render.js");
  const parent = document.createElement("div");
  document.body.append(parent);
  const found = [];
  for (const text of texts) {
    new MarkdownView(parent).show(text);
    parent.querySelectorAll(".code-head").forEach((each) => each.remove());
    for (const each of parent.querySelectorAll("*"))
      found.push([each.localName, [...each.attributes].map(({ name }) => name), each.getAttribute("href"), text]);
    parent.replaceChildren();
  }
  parent.remove();
  return found;
}"""
ATTRIBUTES = set("aria-label checked class disabled href referrerpolicy rel start tabindex target title type".split())


def random_texts(count: int) -> list[str]:
    generator = random.Random(20261123)
    marks = "* ** _ ~~ ` `` ``` [ ] ( ) ! < > | - + 1. # \\ a b é 🙂 : --- https://x javascript: <script> &amp;"
    parts = [*marks.split(), " ", "  ", "\t", "\n", "\n\n", "\n- ", "\n> ", "\n```\n", "\n|a|b|\n|-|-|\n"]
    parts += ["[a](https://b)", "](", *INJECTIONS]
    return ["".join(generator.choices(parts, k=generator.randint(1, 40))) for _ in range(count)]


def test_answers_become_nothing_but_text_and_its_shape(page):
    for tag, attributes, href, text in page.evaluate(LOOK, [*INJECTIONS, *random_texts(300)]):
        assert tag in TAGS, text
        assert ATTRIBUTES.issuperset(attributes), text
        assert href is None or href.startswith(("https://", "http://", "mailto:")), text


def test_links_tell_their_target_nothing(page):
    answer = page.evaluate(
        """async () => { const { MarkdownView } = await import("/page/render.js");
          const parent = document.createElement("div");
          new MarkdownView(parent).show("[a](https://x.y)");
          const { target, rel, referrerPolicy, title } = parent.querySelector("a");
          return [target, rel, referrerPolicy, title]; }"""
    )
    assert answer == ["_blank", "noopener noreferrer nofollow", "no-referrer", "https://x.y"]


def test_text_that_grows_looks_as_if_it_had_come_whole(page):
    """At every length, however it was cut, and with the nodes of what was finished left in place."""
    texts = [*EXAMPLES, "\n\n".join(EXAMPLES), *random_texts(30)]
    wrong = page.evaluate(
        """async (texts) => {
          const { MarkdownView } = await import("/page/render.js");
          const whole = (text) => { const parent = document.createElement("div");
            new MarkdownView(parent).show(text); return parent.innerHTML; };
          return texts.filter((text) => {
            const parent = document.createElement("div");
            const view = new MarkdownView(parent);
            const step = 1 + (text.length % 3);
            for (let end = 0; end <= text.length; end += step) {
              view.show(text.slice(0, end));
              if (parent.innerHTML !== whole(text.slice(0, end))) return true;
            }
            return false;
          }); }""",
        texts,
    )
    assert wrong == []


def test_finished_blocks_and_code_in_the_making_keep_their_nodes(page):
    assert page.evaluate(
        """async () => {
          const { MarkdownView } = await import("/page/render.js");
          const parent = document.createElement("div");
          const view = new MarkdownView(parent);
          let text = "one\\n\\ntwo\\n\\n```js\\nlet a;";
          view.show(text);
          const before = [...parent.children];
          const code = parent.querySelector("code").firstChild;
          for (const more of ["\\nlet b;", "\\n```", "\\n\\nend"]) view.show((text += more));
          return before.every((node, i) => parent.children[i] === node) && code.data === "let a;\\nlet b;"
            && parent.children.length === 4; }"""
    )


HOSTILE = {
    "openers": "**a *b _c ~~d " * 8000,
    "nesting": "*a " * 20000 + "a*" * 20000,
    "backticks": "".join("`" * (i % 300) + "x" for i in range(600)),
    "brackets": "[" * 50_000 + "](" * 25_000,
    "quotes": ">" * 50_000,
    "lists": "".join("  " * (i % 400) + "- a\n" for i in range(4000)),
    "spaces": "```" + " " * 50_000 + "`\n# " + " " * 50_000 + "\r#\n|-" + " " * 50_000 + "x\n",
    "cells": "|" * 20_000 + "\n" + "|-" * 20_000 + "\n" + "|" * 20_000,
    "lines": "a\n" * 50_000,
    "blanks": "- a" + "\n" * 200_000 + "b",
    "links": "https://" * 10_000 + "<https://" * 10_000,
    "words": "a*b_c`d" * 20_000,
}


def test_hostile_text_ends_and_is_shown_whole(page):
    lengths = page.evaluate(
        """async (texts) => {
          const { MarkdownView } = await import("/page/render.js");
          return texts.map((text) => { const parent = document.createElement("div");
            new MarkdownView(parent).show(text); return parent.textContent.length; }); }""",
        list(HOSTILE.values()),
    )
    assert all(length > 0 for length in lengths), dict(zip(HOSTILE, lengths, strict=True))
