// The machine: what holds memory, who waits for what, and what was refused.

import {nameOf} from './about.js';
import {get} from './api.js';
import {ago, bytes, count, el, facts, moment, seconds, short, table} from './dom.js';

const USES = [
  ['weights', 'base models', 'forward_backward'],
  ['adapters', 'adapters of runs', 'optimizer'],
  ['arenas', 'training steps', 'saving'],
  ['snapshots', 'sampling sessions', 'waiting'],
  ['cache', 'keys and values', 'sampling'],
];

const MODEL = [
  ['Model', row => row.name, 'long'],
  ['Weights', row => bytes(row.bytes), 'right'],
  ['Context', row => count(row.context), 'right'],
];
const REFUSED = [
  ['When', row => ago(row.at)],
  ['What', row => el('code', {}, row.what), 'long'],
  ['Status', row => row.status ? String(row.status) : 'failed'],
  ['Why', row => row.detail, 'long'],
  ['Times', row => String(row.count), 'right'],
];

const quiet = text => el('span', {className: 'quiet'}, text);
const panel = (title, ...inside) =>
    el('section', {className: 'panel card'}, el('h2', {}, title), inside);
const part = (share, ink, title) => el('span', {
  title,
  style: {width: `${Math.min(100, 100 * share)}%`, background: `var(--${ink})`},
});

export class Machine {
  constructor(runs) {
    this.runs = runs;
    this.root = el('div', {});
  }

  async refresh() {
    const told = await get('page/data/machine');
    const {sampler} = told;
    const sampling = [
      ['steps', count(sampler.steps)],
      ['tokens drawn', count(sampler.tokens)],
      ['tokens a step', short(sampler.tokens / (sampler.steps || 1), 3)],
      ['tokens a second', short(sampler.tokens / (sampler.seconds || 1), 3)],
    ];
    this.root.replaceChildren(
        el('div', {className: 'head'}, el('h1', {}, 'Machine'),
           quiet(`up since ${moment(told.started)}`)),
        memory(told.memory),
        el('div', {className: 'columns'}, this.work(told),
           panel(
               'Queues', limit('waiting for the engine', told.queue),
               limit('coming in', told.arriving), limit('results to be read', told.results)),
           panel('Sampling', facts(sampling))),
        el('h2', {}, 'Models'), table(MODEL, told.models, 'Models'),
        el('h2', {}, 'Refused and failed'),
        told.refused.length ?
            table(REFUSED, told.refused, 'Refused requests') :
            el('div', {className: 'empty card'}, 'No request was refused since the start.'));
  }

  work({training, waiting, sampling, loading, sessions, runs}) {
    const rows = [];
    if (training) {
      const done = `${training.done} of ${training.count} micro-batches`;
      rows.push([training.run, `${training.kind}, ${done}, ${seconds(training.seconds)}`]);
    }
    for (const [run, times] of Object.entries(waiting))
      if (times) rows.push([run, `${times} requests wait for their turn`]);
    for (const [base, times] of Object.entries(sampling))
      if (times) rows.push([base, `${times} samples under way`]);
    for (const text of loading) rows.push(['–', text]);
    return panel(
        'Who waits for what',
        rows.length ? facts(rows.map(([who, what]) => [this.link(who), what])) :
                      quiet('Nothing is under way.'),
        el('p', {className: 'quiet'}, `${sessions} sessions, ${runs} runs`));
  }

  link(who) {
    const run = this.runs.get(who);
    return run ? el('a', {href: `#/run/${encodeURIComponent(who)}`}, nameOf(run)) : who;
  }
}

function memory(held) {
  if (!held) return panel('Memory', quiet('The engine has not said yet.'));
  const used = USES.reduce((sum, [key]) => sum + held[key], 0), whole = held.limit ?? used;
  const told = `${bytes(used)} of ${bytes(whole)} used`;
  const bar = {className: 'bar', role: 'img', 'aria-label': told};
  const swatch = ink => el('i', {className: 'swatch', style: {background: `var(--${ink})`}});
  return panel(
      'Memory',
      el('p', {}, el('b', {}, bytes(used)), held.limit ? ` of ${bytes(held.limit)}` : ', no limit',
         held.evictions ? quiet(`, ${count(held.evictions)} evictions`) : ''),
      el('div', bar,
         USES.map(([key, name,
                    ink]) => part(held[key] / (whole || 1), ink, `${name}: ${bytes(held[key])}`))),
      el('div', {className: 'legend'},
         USES.map(
             ([key, name, ink]) =>
                 el('span', {'data-use': key}, swatch(ink), `${name} `,
                    el('b', {}, bytes(held[key]))))));
}

function limit(name, {bytes: held, bytes_max: most, count: times}) {
  const requests = times === undefined ? '' : `, ${times} requests`;
  return el(
      'div', {className: 'limit'}, `${name}: `, el('b', {}, bytes(held)),
      quiet(` of ${bytes(most)}${requests}`),
      el('div', {className: 'bar thin'}, part(held / (most || 1), 'accent', '')));
}
