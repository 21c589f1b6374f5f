// A conversation with a base model or a checkpoint, two side by side on request. Answers are
// streamed from the server's OpenAI route; each token shows its chance, and what stood beside it.

import {baseOf} from './about.js';
import {get, stream} from './api.js';
import {checkpointName} from './checkpoints.js';
import {el, seconds, short} from './dom.js';
import {partOf, Pictures, shownOf} from './pictures.js';
import {TokenText} from './tokens.js';

const KEPT = 'tinsmith-chat';  // the options, for this tab
const MODELS_MS = 5000;
const OPTIONS = [
  ['temperature', 'Temperature', {min: 0, max: 2, step: 0.1, value: 0.7}],
  ['top_p', 'Top p', {min: 0.01, max: 1, step: 0.05, value: 1}],
  ['top_k', 'Top k', {min: -1, step: 1, value: -1}],
  ['max_tokens', 'Tokens', {min: 1, step: 1, value: 256}],
  ['seed', 'Seed', {step: 1, placeholder: 'fresh'}],
];

// One token of a stream for TokenText.
const heard = entry => ({
  text: entry.token,
  logprob: entry.logprob,
  best: (entry.top_logprobs ?? []).map(top => [top.token, top.logprob, null]),
});

// The tokens of a chunk. A character that several tokens make up comes with the last of them.
function tokensOf(content, entries, waiting) {
  const all = [...waiting, ...entries];
  if (!content) return [[], all];
  if (all.map(entry => entry.token).join('') === content) return [all.map(heard), []];
  if (!all.length) return [[{text: content}], []];
  const logprob = all.reduce((sum, entry) => sum + entry.logprob, 0);
  return [[{...heard(all[all.length - 1]), text: content, logprob}], []];
}

// What has come of an answer, and how fast.
class Answer {
  constructor(text) {
    this.text = text;
    this.whole = this.end = '';
    this.waiting = [];
    this.thinks = false;
    this.tokens = this.sum = this.first = 0;
    this.began = performance.now();
  }

  hear({delta, logprobs, finish_reason: reason}) {
    const entries = logprobs?.content ?? [];
    this.tokens += entries.length;
    this.sum += entries.reduce((total, entry) => total + entry.logprob, 0);
    if (entries.length) this.first ||= performance.now();
    const thought = delta.reasoning_content;
    let shown;
    [shown, this.waiting] = tokensOf(thought ?? delta.content, entries, this.waiting);
    if (this.thinks && delta.content) this.text.add({text: '\n\n'});
    this.thinks = Boolean(thought) || (this.thinks && !delta.content);
    for (const token of shown) this.text.add(token);
    this.whole += delta.content ?? '';
    this.end = reason ?? this.end;
  }

  get about() {
    const now = performance.now(), rate = (1000 * (this.tokens - 1)) / (now - this.first);
    return [
      `${this.tokens} tokens in ${seconds((now - this.began) / 1000)}`,
      this.tokens > 1 && `${short(rate, 3)} a second`,
      `mean log-probability ${short(this.sum / (this.tokens || 1), 3)}`,
      `ended by ${this.end || 'nothing'}`,
    ].filter(Boolean)
        .join(', ');
  }
}

class Pane {
  constructor(chat) {
    this.chat = chat;
    this.messages = [];
    this.abort = null;
    this.model = el('select', {'aria-label': 'Model'});
    this.model.addEventListener('change', () => chat.show());
    const closes = {className: 'icon', title: 'Close this side', 'aria-label': 'Close this side'};
    this.close = el('button', {type: 'button', ...closes, onclick: () => chat.drop(this)}, '×');
    this.said = el('div', {className: 'said-list', role: 'log', 'aria-label': 'Conversation'});
    this.root =
        el('section', {className: 'pane card', 'aria-label': 'Conversation'},
           el('header', {}, this.model, this.close), this.said);
    this.clear();
  }

  // Offers models. The choice stays, unless another is wanted.
  fill({bases, checkpoints}) {
    const option = (value, text) => el('option', {value, title: value}, text);
    const group = (label, options) => options.length ? [el('optgroup', {label}, options)] : [];
    const before = this.wanted || this.model.value;
    const offered = JSON.stringify([before, bases, checkpoints.map(row => row.path)]);
    if (offered === this.offered) return;
    this.offered = offered;
    this.model.replaceChildren(
        ...group('Base models', bases.map(name => option(name, baseOf(name)))),
        ...group('Checkpoints', checkpoints.map(row => option(row.path, checkpointName(row)))));
    if ([...this.model.options].some(one => one.value === before)) {
      this.model.value = before;
      this.wanted = '';
    }
  }

  clear() {
    this.abort?.abort();
    this.messages = [];
    this.said.replaceChildren(
        el('p', {className: 'quiet'},
           'Say something below. Point at a token of the answer to see its chance.'));
  }

  turn(kind, ...inside) {
    if (!this.messages.length) this.said.replaceChildren();
    const made = el('div', {className: `turn ${kind}`}, inside);
    this.said.append(made);
    this.said.scrollTop = this.said.scrollHeight;
    return made;
  }

  async send(text, pictures, options) {
    const mine = this.messages;  // a new chat has others
    const parts = [...pictures.map(partOf), ...(text ? [{type: 'text', text}] : [])];
    const seen = pictures.length ? [el('div', {className: 'seen'}, pictures.map(shownOf))] : [];
    this.turn('user', seen, text);
    mine.push({role: 'user', content: pictures.length ? parts : text});
    const answer = new TokenText('The answer');
    const about = el('div', {className: 'about'}, 'waiting …');
    this.turn('assistant', answer.root, about);
    const abort = this.abort = new AbortController();
    const system = options.system ? [{role: 'system', content: options.system}] : [];
    const said = new Answer(answer);
    try {
      const request = {
        model: this.model.value,
        messages: [...system, ...mine],
        stream: true,
        logprobs: true,
        top_logprobs: 5,
        ...options.body,
      };
      for await (const told of stream('v1/chat/completions', request, abort.signal)) {
        const low = this.said.scrollHeight - this.said.scrollTop - this.said.clientHeight < 60;
        for (const choice of told.choices) said.hear(choice);
        about.textContent = `${said.tokens} tokens …`;
        if (low) this.said.scrollTop = this.said.scrollHeight;
      }
      about.textContent = said.about;
    } catch (error) {
      const stopped = error.name === 'AbortError';
      about.textContent = stopped ? `stopped after ${said.tokens} tokens` : error.message;
      about.classList.toggle('bad', !stopped);
    }
    if (this.abort === abort) this.abort = null;
    if (said.whole)
      mine.push({role: 'assistant', content: said.whole});
    else
      mine.pop();
  }
}

export class Chat {
  constructor() {
    this.models = {bases: [], thinking: [], seeing: [], checkpoints: []};
    this.asked = 0;  // when the models were
    this.panes = [new Pane(this)];
    this.pictures = new Pictures(() => this.someIs(this.models.seeing));
    const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? '{}');
    const field = ([key, , facts]) => {
      const value = kept[key] ?? facts.value ?? '';
      return [key, el('input', {type: 'number', ...facts, value, name: key})];
    };
    this.inputs = Object.fromEntries(OPTIONS.map(field));
    this.think = el('input', {type: 'checkbox', name: 'think', checked: kept.think ?? true});
    this.thinks = el('label', {title: 'enable_thinking of the chat template'}, this.think, 'Think');
    const system = {type: 'text', placeholder: 'none', name: 'system', value: kept.system ?? ''};
    this.system = el('input', system);
    this.text = el('textarea', {
      id: 'message',
      rows: 1,
      placeholder: 'Ask something. Enter sends.',
      'aria-label': 'Message',
      onkeydown: event => this.key(event),
      oninput: () => this.grow(),
    });
    const button = (text, onclick, facts) =>
        el('button', {type: 'button', onclick, ...facts}, text);
    this.go = button('Send', () => this.act(), {className: 'main', id: 'send'});
    this.two = button('Side by side', () => this.split(), {id: 'two'});
    this.holder = el('div', {className: 'panes'}, this.panes[0].root);
    const options =
        el('div', {className: 'options'},
           OPTIONS.map(([key, name]) => el('label', {}, name, this.inputs[key])), this.thinks,
           el('div', {className: 'grow'}, el('label', {className: 'grow'}, 'System', this.system),
              this.two, button('New chat', () => this.clear())));
    this.root =
        el('div', {className: 'chat'}, this.holder, options, this.pictures.root,
           el('div', {className: 'compose'}, this.text, this.pictures.button, this.go));
    this.pictures.listen(this.root);
    this.show();
  }

  // Takes names or paths of the models on both sides from an address.
  open({a, b}) {
    if (b && this.panes.length < 2) this.split();
    this.panes.forEach((pane, i) => {
      pane.wanted = [a, b][i] || pane.wanted;
    });
    this.asked = 0;
  }

  async refresh() {
    if (Date.now() - this.asked < MODELS_MS) return;
    const first = !this.models.bases.length;
    this.models = await get('page/data/models');
    this.asked = Date.now();
    for (const pane of this.panes) pane.fill(this.models);
    this.show();
    if (first) this.text.focus();
  }

  split() {
    const pane = new Pane(this);
    this.panes.push(pane);
    this.holder.append(pane.root);
    pane.wanted = this.models.checkpoints[0]?.path ?? '';
    pane.fill(this.models);
    this.show();
  }

  drop(pane) {
    pane.abort?.abort();
    this.panes = this.panes.filter(one => one !== pane);
    pane.root.remove();
    this.show();
  }

  clear() {
    this.panes.forEach(pane => pane.clear());
    this.pictures.take();
    this.text.focus();
  }

  show() {
    this.two.hidden = this.panes.length > 1;
    for (const pane of this.panes) pane.close.hidden = this.panes.length < 2;
    this.thinks.hidden = !this.someIs(this.models.thinking);
    this.pictures.show();
  }

  // Whether a model that is talked to, or a checkpoint's base model, is among these.
  someIs(names) {
    const own = name => this.models.checkpoints.find(row => row.path === name)?.base ?? name;
    return this.panes.some(pane => names.includes(own(pane.model.value)));
  }

  grow() {
    this.text.style.setProperty('height', 'auto');
    this.text.style.setProperty('height', `${this.text.scrollHeight + 2}px`);
  }

  key(event) {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.busy) this.act();
    }
  }

  options() {
    const fields = Object.entries(this.inputs).map(([key, input]) => [key, input.value]);
    const think = this.think.checked, system = this.system.value.trim();
    sessionStorage.setItem(KEPT, JSON.stringify({...Object.fromEntries(fields), think, system}));
    const set =
        fields.filter(([, value]) => value !== '').map(([key, value]) => [key, Number(value)]);
    const template =
        think || this.thinks.hidden ? {} : {chat_template_kwargs: {enable_thinking: false}};
    return {system, body: {...Object.fromEntries(set), ...template}};
  }

  async act() {
    if (this.busy) {
      this.panes.forEach(pane => pane.abort?.abort());
      return;
    }
    const text = this.text.value.trim();
    if (!text && !this.pictures.all.length) return;
    const pictures = this.pictures.take();
    this.busy = true;
    this.go.textContent = 'Stop';
    this.text.value = '';
    this.grow();
    const options = this.options();
    await Promise.all(this.panes.map(pane => pane.send(text, pictures, options)));
    this.busy = false;
    this.go.textContent = 'Send';
  }
}
