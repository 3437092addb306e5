// Vercel's AI SDK, over its provider for OpenAI-compatible servers or the one for Anthropic's API.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import * as s from "./scenarios.mjs";

const PROVIDERS = {
  "openai-compatible": (url) =>
    createOpenAICompatible({
      name: "openinfer",
      baseURL: `${url}/v1`,
      apiKey: s.KEY,
      includeUsage: true,
      supportsStructuredOutputs: true,
    }),
  anthropic: (url) => createAnthropic({ baseURL: `${url}/v1`, apiKey: s.KEY }),
};

class AI {
  constructor(tiny, scripted, provider) {
    [this.tiny, this.scripted] = [tiny, scripted].map((url) => PROVIDERS[provider](url)(s.MODEL));
    // its provider for Anthropic clips a temperature to what Anthropic takes
    this.refused = provider === "anthropic" ? { topP: -1 } : { temperature: s.BAD_TEMPERATURE };
  }

  async plain() {
    return (await generateText({ model: this.tiny, prompt: s.QUESTION, maxRetries: 0 })).text;
  }

  async *stream() {
    yield* streamText({ model: this.tiny, prompt: s.QUESTION, maxRetries: 0 }).textStream;
  }

  async tools() {
    const get_weather = tool({
      description: s.TOOL_DESCRIPTION,
      inputSchema: jsonSchema(s.TOOL_SCHEMA),
      execute: async ({ city }) => s.weather(city),
    });
    const answer = streamText({
      model: this.scripted,
      prompt: s.TOOLS_QUESTION,
      tools: { get_weather },
      stopWhen: stepCountIs(5),
      maxRetries: 0,
    });
    return answer.text;
  }

  async schema() {
    const output = Output.object({ schema: jsonSchema(s.REPORT_SCHEMA) });
    return (await generateText({ model: this.tiny, prompt: s.REPORT_QUESTION, output, maxRetries: 0 })).output;
  }

  async error() {
    const error = await s.caught(APICallError, () =>
      generateText({ model: this.tiny, prompt: s.QUESTION, maxRetries: 0, ...this.refused }),
    );
    if (error.statusCode !== 400) throw error;
    return error;
  }

  async abort() {
    const leaving = new AbortController();
    const asked = { model: this.scripted, prompt: s.ABORT_QUESTION, maxRetries: 0, abortSignal: leaving.signal };
    for await (const part of streamText({ ...asked, onAbort() {}, onError() {} }).fullStream) {
      if (part.type === "text-delta" || part.type === "reasoning-delta") leaving.abort();
    }
  }
}

await s.main((tiny, scripted, provider) => new AI(tiny, scripted, provider));
