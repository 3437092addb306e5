// OpenAI's SDK for Node, on chats or on responses.

import OpenAI from "openai";
import * as s from "./scenarios.mjs";

const connect = (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: s.KEY, maxRetries: 0 });

class Chat {
  constructor(tiny, scripted) {
    this.tiny = connect(tiny);
    this.scripted = connect(scripted);
  }

  ask(client, question, fields = {}) {
    return client.chat.completions.create({ model: s.MODEL, messages: s.turns(question), ...fields });
  }

  async plain() {
    return (await this.ask(this.tiny, s.QUESTION)).choices[0].message.content;
  }

  async *stream() {
    for await (const chunk of await this.ask(this.tiny, s.QUESTION, { stream: true })) {
      yield chunk.choices[0]?.delta.content;
    }
  }

  async tools() {
    const tool = { ...s.TOOL, function: { ...s.TOOL.function, parse: JSON.parse, function: ({ city }) => s.weather(city) } };
    const messages = s.turns(s.TOOLS_QUESTION);
    return this.scripted.chat.completions.runTools({ model: s.MODEL, messages, tools: [tool] }).finalContent();
  }

  async schema() {
    const json_schema = { name: "report", schema: s.REPORT_SCHEMA, strict: true };
    const fields = { response_format: { type: "json_schema", json_schema } };
    return JSON.parse((await this.ask(this.tiny, s.REPORT_QUESTION, fields)).choices[0].message.content);
  }

  error() {
    const fields = { temperature: s.BAD_TEMPERATURE };
    return s.caught(OpenAI.BadRequestError, () => this.ask(this.tiny, s.QUESTION, fields));
  }

  async abort() {
    const stream = await this.ask(this.scripted, s.ABORT_QUESTION, { stream: true });
    for await (const _ of stream) break;
    stream.controller.abort();
  }
}

class Responses extends Chat {
  ask(client, question, fields = {}) {
    return client.responses.create({ model: s.MODEL, input: question, ...fields });
  }

  async plain() {
    return (await this.ask(this.tiny, s.QUESTION)).output_text;
  }

  async *stream() {
    for await (const event of await this.ask(this.tiny, s.QUESTION, { stream: true })) {
      if (event.type === "response.output_text.delta") yield event.delta;
    }
  }

  async tools() {
    const tools = [{ type: "function", ...s.TOOL.function, strict: false }];
    const input = s.turns(s.TOOLS_QUESTION);
    for (;;) {
      // nothing is stored: the whole conversation goes back, as it came
      const answer = await this.ask(this.scripted, "", { input, tools, store: false });
      const calls = answer.output.filter((item) => item.type === "function_call");
      if (calls.length === 0) return answer.output_text;
      input.push(...answer.output);
      for (const call of calls) {
        const output = s.weather(JSON.parse(call.arguments).city);
        input.push({ type: "function_call_output", call_id: call.call_id, output });
      }
    }
  }

  async schema() {
    const format = { type: "json_schema", name: "report", schema: s.REPORT_SCHEMA, strict: true };
    return JSON.parse((await this.ask(this.tiny, s.REPORT_QUESTION, { text: { format } })).output_text);
  }
}

const APIS = { chat: Chat, responses: Responses };

await s.main((tiny, scripted, api) => new APIS[api](tiny, scripted));
