// The server's state, once a second while the page can be seen.

import { byId } from "./dom.js";

const PERIOD_MS = 1000;
const KEPT = 60;

export class Status {
  #api;
  #rates = [];
  #before = null;

  constructor(api) {
    this.#api = api;
  }

  async run() {
    for (;;) {
      if (document.visibilityState === "visible") await this.#look();
      await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
    }
  }

  async #look() {
    try {
      const now = performance.now();
      const values = parseMetrics(await (await this.#api.get("metrics")).text());
      this.#show(values, now);
    } catch {
      showHealth("bad", "the server does not answer");
      this.#before = null;
    }
  }

  #show(values, now) {
    if (values.openinfer_engine_up !== 1) {
      showHealth("bad", "the engine has ended");
      return;
    }
    const age = values.openinfer_engine_step_age_seconds;
    showHealth("ok", age > 5 ? `working on a step for ${age.toFixed(0)} s` : "serving");
    byId("running").textContent = values.openinfer_num_requests_running;
    byId("waiting").textContent = values.openinfer_num_requests_waiting;
    byId("preemptions").textContent = values.openinfer_num_preemptions_total;
    const used = values.openinfer_kv_cache_usage_perc;
    byId("kv").value = used;
    const { openinfer_kv_blocks: blocks, openinfer_kv_blocks_retained: retained } = values;
    const asked = retained ? `, ${((retained / blocks) * 100).toFixed(0)} % retained` : "";
    byId("kv-text").textContent = `${(used * 100).toFixed(1)} %${asked}`;
    const { openinfer_prefix_cache_queries_total: queries, openinfer_prefix_cache_hits_total: hits } = values;
    byId("cache").textContent = queries ? `${((hits / queries) * 100).toFixed(0)} % of prompt tokens` : "–";
    const { openinfer_spec_decode_num_drafts_total: rows, openinfer_spec_decode_num_draft_tokens_total: drafts } = values;
    const accepted = values.openinfer_spec_decode_num_accepted_tokens_total;
    byId("drafts").textContent = rows
      ? `${((accepted / drafts) * 100).toFixed(0)} %, ${(1 + accepted / rows).toFixed(2)} tokens a step`
      : "–";
    this.#showRates(values.openinfer_generation_tokens_total, values.openinfer_prompt_tokens_total, now);
  }

  #showRates(tokens, prompts, now) {
    if (this.#before !== null && tokens >= this.#before.tokens) {
      const perSecond = (count) => (count * 1000) / (now - this.#before.now);
      const rate = perSecond(tokens - this.#before.tokens);
      this.#rates = [...this.#rates, rate].slice(-KEPT);
      byId("throughput").textContent = `${rate.toFixed(1)} tokens/s`;
      byId("prompt-throughput").textContent = `${perSecond(prompts - this.#before.prompts).toFixed(1)} tokens/s`;
      const most = Math.max(1, ...this.#rates);
      const points = this.#rates.map((each, i) => `${i + KEPT - this.#rates.length},${19 - (18 * each) / most}`);
      byId("history-line").setAttribute("points", points.join(" "));
    }
    this.#before = { tokens, prompts, now };
  }
}

/** Sums of each metric over its labels; the page needs no more of Prometheus' format. */
export function parseMetrics(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const [, name, value] = /^(\w+)(?:\{.*\})? (\S+)$/.exec(line) ?? [];
    if (name) values[name] = (values[name] ?? 0) + Number(value);
  }
  return values;
}

function showHealth(state, text) {
  const health = byId("health");
  if (health.dataset.state === state && byId("health-text").textContent === text) return;
  health.dataset.state = state;
  byId("health-text").textContent = text;
}
