// What the page asks of its server. Paths are relative to the page, so it works behind a prefix.
// Where the server wants a key, the page asks for it once and keeps it for this tab.

import {byId, el} from './dom.js';

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

function askKey(wrong) {
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

// Shows something in a dialog until it is closed; whether by the button that acts, if it has one.
export function ask(title, inside, verb = '') {
  const end = (text, value, className = '') =>
      el('button', {type: 'submit', value, className}, text);
  const ends = verb ? [end('Cancel', ''), end(verb, 'yes', 'main')] : [end('Close', '')];
  const dialog =
      el('dialog', {'aria-label': title},
         el('form', {method: 'dialog'}, el('h2', {}, title), inside,
            el('div', {className: 'acts ends'}, ends)));
  document.body.append(dialog);
  return new Promise(done => {
    dialog.addEventListener('close', () => {
      dialog.remove();
      done(dialog.returnValue === 'yes');
    });
    dialog.showModal();
  });
}

function sentence(text) {
  try {
    const told = JSON.parse(text);
    return told.detail ?? told.error?.message ?? text;
  } catch {
    return text;
  }
}

export async function send(path, options = {}) {
  for (;;) {
    const sent = headers();
    const reply =
        await fetch(new URL(path, root), {...options, headers: {...sent, ...options.headers}});
    if (reply.ok) return reply;
    if (reply.status !== 401) throw new Refused(reply.status, sentence(await reply.text()));
    await askKey('X-API-Key' in sent);
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
