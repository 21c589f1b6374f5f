// Text of which each token is coloured by its log-probability, with its chance on hover. A token is
// {text, logprob, teacher, sampler, best, live, divergence}; only text is always there.

import {byId, chance, el, short, visible} from './dom.js';

const WORST = 6;  // nats at which the colour is full

function paint(element, token, by) {
  const own = token.logprob, other = token.teacher;
  let value = by === 'teacher' ? other : own, name = '--heat', share = 0;
  if (by === 'difference') {
    value = own === null || other === null || own === undefined || other === undefined ?
        null :
        other - own;
    if (value > 0) name = '--cool';
    share = Math.abs(value ?? 0) / 3;
  } else if (by === 'divergence') {
    share = token.divergence ?? 0;
  } else
    share = -(value ?? 0) / WORST;
  const strength = Math.max(0, Math.min(1, share)) * 0.62;
  element.style.setProperty(
      'background-color',
      strength > 0.01 ? `rgba(var(${name}), ${strength.toFixed(3)})` : 'transparent');
}

function told(token, by) {
  const rows = [];
  const add = (name, value) => value !== undefined && value !== null &&
      rows.push(el(
          'tr', {}, el('th', {}, name), el('td', {}, chance(value)), el('td', {}, short(value))));
  add(token.teacher === undefined && token.sampler === undefined ? 'chance' :
          token.sampler === undefined                            ? 'student' :
                                                                   'trainer',
      token.logprob);
  add('teacher', token.teacher);
  add('sampler', token.sampler);
  const best =
      (token.best ?? [])
          .map(
              ([text, own, other]) =>
                  el('tr', {className: text === token.text ? 'own' : ''},
                     el('td', {}, visible(text)), el('td', {}, chance(own)),
                     other === null || other === undefined ? '' : el('td', {}, chance(other))));
  const paired = (token.best ?? []).some(row => row[2] !== null && row[2] !== undefined);
  return [
    el('div', {className: 'said'}, `“${visible(token.text)}”`), el('table', {}, rows),
    token.divergence !== undefined && token.divergence !== null ?
        el('div', {}, `divergence ${short(token.divergence)}`) :
        '',
    best.length ? el('table', {},
                     el('tr', {}, el('th', {}, 'instead'), el('th', {}, paired ? 'student' : ''),
                        paired ? el('th', {}, 'teacher') : ''),
                     best) :
                  '',
    by === 'difference' && token.teacher ?
        el('div', {className: 'quiet'},
           token.teacher > token.logprob ? 'the teacher likes it more' :
                                           'the teacher likes it less') :
        ''
  ];
}

export function showTip(element, token, by) {
  const tip = byId('tip');
  tip.replaceChildren(...told(token, by).filter(Boolean));
  tip.hidden = false;
  const at = element.getClientRects()[0] ?? element.getBoundingClientRect(),
        {offsetWidth: wide, offsetHeight: tall} = tip;
  tip.style.setProperty('left', `${Math.max(6, Math.min(at.left, innerWidth - wide - 8))}px`);
  tip.style.setProperty(
      'top',
      `${at.bottom + tall + 8 < innerHeight ? at.bottom + 5 : Math.max(4, at.top - tall - 5)}px`);
}

export function hideTip() {
  byId('tip').hidden = true;
}

// A text that tokens are added to. Arrow keys walk through them.
export class TokenText {
  constructor(label, by = 'own', prompt = '') {
    this.by = by;
    this.tokens = [];
    this.at = null;
    this.root =
        el('div', {
          className: 'text',
          tabIndex: 0,
          role: 'group',
          'aria-label': `${label}. Arrow keys show each token's chance.`
        },
           prompt ? el('span', {className: 'prompt'}, prompt) : '');
    this.root.addEventListener('pointerover', event => this.show(event.target));
    this.root.addEventListener('pointerout', () => this.leave());
    this.root.addEventListener('blur', () => this.leave());
    this.root.addEventListener('keydown', event => this.key(event));
  }

  add(token) {
    const made = el('span', {className: `tok${token.live === false ? ' dim' : ''}`}, token.text);
    made.dataset.place = this.tokens.length;
    this.tokens.push(token);
    paint(made, token, this.by);
    this.root.append(made);
  }

  show(element) {
    const token = this.tokens[element.dataset?.place];
    if (!token) return;
    this.leave();
    this.at = Number(element.dataset.place);
    element.classList.add('at');
    showTip(element, token, this.by);
  }

  leave() {
    this.root.querySelector('.tok.at')?.classList.remove('at');
    hideTip();
  }

  key(event) {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!by || !this.tokens.length) return;
    event.preventDefault();
    const place = Math.max(0, Math.min(this.tokens.length - 1, (this.at ?? -1) + by));
    const element = this.root.querySelector(`[data-place="${place}"]`);
    element.scrollIntoView({block: 'nearest'});
    this.show(element);
  }
}
