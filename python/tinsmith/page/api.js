// What the page asks of its server. Paths are relative to the page, so it works behind a prefix.
// Where the server wants a key, the page asks for it once and keeps it for this tab.

import {byId} from './dom.js';

const KEY = 'tinsmith-key';
const root = new URL('.', document.baseURI);
let asking = null;

export class Refused extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? {'X-API-Key': key} : {};
}

function ask(wrong) {
  asking ??= new Promise(done => {
    const dialog = byId('ask');
    byId('ask-wrong').hidden = !wrong;
    dialog.addEventListener('close', () => {
      sessionStorage.setItem(KEY, byId('ask-key').value.trim());
      byId('ask-key').value = '';
      asking = null;
      done();
    }, {once: true});
    dialog.oncancel = event => event.preventDefault();
    dialog.showModal();
    byId('ask-key').focus();
  });
  return asking;
}

function sentence(text) {
  try {
    const told = JSON.parse(text);
    return told.detail ?? told.error?.message ?? text;
  } catch {
    return text;
  }
}

async function send(path, options = {}) {
  for (;;) {
    const sent = headers();
    const reply =
        await fetch(new URL(path, root), {...options, headers: {...sent, ...options.headers}});
    if (reply.ok) return reply;
    if (reply.status !== 401) throw new Refused(reply.status, sentence(await reply.text()));
    await ask('X-API-Key' in sent);
  }
}

export const get = async path => (await send(path)).json();
export const runPath = (run, rest = '') => `page/data/runs/${encodeURIComponent(run)}${rest}`;

// The events of a streamed answer, each an object, until it ends or is aborted.
export async function* stream(path, body, signal) {
  const reply = await send(path, {
    method: 'POST',
    body: JSON.stringify(body),
    signal,
    headers: {'Content-Type': 'application/json'},
  });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    rest += value;
    const events = rest.split('\n\n');
    rest = events.pop();
    for (const event of events) {
      const data = event.startsWith('data: ') ? event.slice(6) : '';
      if (data === '[DONE]') return;
      if (!data) continue;
      const told = JSON.parse(data);
      if (told.error) throw new Refused(400, told.error.message);
      yield told;
    }
  }
}
