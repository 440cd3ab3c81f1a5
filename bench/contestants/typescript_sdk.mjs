// The official TypeScript SDK's runner, whose tool posts to the webhook with fetch:
// `node typescript_sdk.mjs URL SESSION…`. One process serves all sessions over one client.
import Anthropic from '@anthropic-ai/sdk';

const [url, ...sessionIds] = process.argv.slice(2);
const client = new Anthropic({ apiKey: 'any', baseURL: url, maxRetries: 0, timeout: 60_000 });
const lookupOrder = {
  type: 'custom',
  name: 'lookup_order',
  description: 'Look up one order.',
  input_schema: { type: 'object', properties: { order_id: { type: 'string' } } },
  parse: (input) => input,
  run: async (input) => {
    const answer = await fetch(`${url}/tool`, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify(input),
    });
    return (await answer.json()).content;
  },
};

await Promise.all(
  sessionIds.map(async (id) => {
    for await (const _ of client.beta.sessions.events.toolRunner(id, { tools: [lookupOrder], maxIdleMs: 1_000 })) {
      // the report of a call; nothing to do
    }
  }),
);
