// Anthropic's SDK for Node.

import Anthropic from "@anthropic-ai/sdk";
import * as s from "./scenarios.mjs";

const connect = (url) => new Anthropic({ baseURL: url, apiKey: s.KEY, maxRetries: 0 });
const fields = (question, more = {}) => ({ model: s.MODEL, max_tokens: 200, messages: s.turns(question), ...more });
const textOf = (message) => message.content.map((block) => block.text ?? "").join("");

class Messages {
  constructor(tiny, scripted) {
    this.tiny = connect(tiny);
    this.scripted = connect(scripted);
  }

  async plain() {
    return textOf(await this.tiny.messages.create(fields(s.QUESTION)));
  }

  async *stream() {
    for await (const event of this.tiny.messages.stream(fields(s.QUESTION))) {
      if (event.type === "content_block_delta") yield event.delta.text;
    }
  }

  async tools() {
    const tools = [{ name: "get_weather", description: s.TOOL_DESCRIPTION, input_schema: s.TOOL_SCHEMA }];
    const messages = s.turns(s.TOOLS_QUESTION);
    for (;;) {
      // streamed, put together by the SDK, and sent back as it is
      const answer = await this.scripted.messages.stream(fields("", { messages, tools })).finalMessage();
      if (answer.stop_reason !== "tool_use") return textOf(answer);
      messages.push({ role: "assistant", content: answer.content });
      const calls = answer.content.filter((block) => block.type === "tool_use");
      const content = calls.map(({ id, input }) => ({
        type: "tool_result",
        tool_use_id: id,
        content: s.weather(input.city),
      }));
      messages.push({ role: "user", content });
    }
  }

  async schema() {
    const output_config = { format: { type: "json_schema", schema: s.REPORT_SCHEMA } };
    return JSON.parse(textOf(await this.tiny.messages.create(fields(s.REPORT_QUESTION, { output_config }))));
  }

  error() {
    const asked = fields(s.QUESTION, { temperature: s.BAD_TEMPERATURE });
    return s.caught(Anthropic.BadRequestError, () => this.tiny.messages.create(asked));
  }

  async abort() {
    const stream = this.scripted.messages.stream(fields(s.ABORT_QUESTION, { max_tokens: 20000 }));
    for await (const event of stream) if (event.type === "content_block_delta") break;
    stream.abort();
  }
}

await s.main((tiny, scripted) => new Messages(tiny, scripted));
