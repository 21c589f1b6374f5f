// The machine: what holds memory, who waits for what, and what was refused.

import {nameOf} from './about.js';
import {get} from './api.js';
import {ago, bytes, count, el, facts, moment, seconds, short, table, times} from './dom.js';

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
const REPLICA = [
  ['Replica', row => row.name],
  ['On', row => row.place, 'long'],
  ['State', row => row.state],
  ['Samples', row => count(row.samples), 'right'],
  ['Tokens drawn', row => count(row.drawn), 'right'],
  ['Parts trained', row => count(row.parts), 'right'],
  ['Gradients', row => bytes(row.gradient_bytes), 'right'],
  ['Weights sent', row => bytes(row.weights_bytes), 'right'],
  ['Memory', row => bytes(row.memory), 'right'],
];
const REFUSED = [
  ['When', row => ago(row.at)],
  ['Status', row => row.status ? String(row.status) : 'failed'],
  ['Times', row => String(row.count), 'right'],
  ['What', row => el('code', {}, row.what), 'long'],
  ['Why', row => row.detail, 'long'],
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
    const {sampler, host, host: {disk, checkpoints}} = told;
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
        el('div', {className: 'columns'}, this.work(told), panel('Processor', this.processor(host)),
           panel(
               'Disk', limit('disk', disk), limit('checkpoints', checkpoints),
               el('p', {className: 'quiet'}, host.folder)),
           panel(
               'Queues', limit('waiting for the engine', told.queue),
               limit('coming in', told.arriving), limit('results to be read', told.results)),
           panel('Sampling', facts(sampling))),
        ...(told.replicas.length ?
                [el('h2', {}, 'Replicas'), table(REPLICA, told.replicas, 'Replicas', 'stack')] :
                []),
        el('h2', {}, 'Models'), table(MODEL, told.models, 'Models'),
        el('h2', {}, 'Refused and failed'),
        told.refused.length ?
            table(REFUSED, told.refused, 'Refused requests', 'stack') :
            el('div', {className: 'empty card'}, 'No request was refused since the start.'));
  }

  // Its share is that since the last look; until then, that since the start.
  processor({devices, threads, cores, cpu_seconds: used, clock, load}) {
    const before = this.before ?? {used: 0, clock: 0};
    if (clock > before.clock) this.share = 100 * (used - before.used) / (clock - before.clock);
    const share = this.before ? `${Math.round(this.share)} % of a core, of ${cores}` : '–';
    this.before = {used, clock};
    return facts([
      ['device', devices.join(', ')],
      ['threads', String(threads)],
      ['this server takes', share],
      ['load of the machine', short(load, 3)],
    ]);
  }

  work({training, waiting, sampling, loading, who, sessions, runs}) {
    const keys = new Set(Object.values(who).filter(Boolean).map(one => one.key));
    const named = run => this.link(run, who[run] ?? training?.who, keys.size > 1);

    const rows = [];
    if (training) {
      const done = `${training.done} of ${training.count} micro-batches`;
      rows.push([named(training.run), `${training.kind}, ${done}, ${seconds(training.seconds)}`]);
    }
    for (const [run, number] of Object.entries(waiting))
      if (number) rows.push([named(run), `${times(number, 'request')} in line`]);
    for (const [base, number] of Object.entries(sampling))
      if (number) rows.push([base, `${times(number, 'sample')} under way`]);
    for (const text of loading) rows.push(['–', text]);
    return panel(
        'Who waits for what', rows.length ? facts(rows) : quiet('Nothing is under way.'),
        el('p', {className: 'quiet below'},
           `${times(sessions, 'session')}, ${times(runs, 'run')}`));
  }

  // A run's name, and whose it is: its session, and which key where there are several.
  link(id, whose, keyed) {
    const run = this.runs.get(id), href = `#/run/${encodeURIComponent(id)}`;
    const key = whose && keyed ? `, key ${whose.key}` : '';
    return el(
        'span', {}, run ? el('a', {href}, nameOf(run)) : id,
        whose && quiet(` session ${whose.session.slice(0, 8)}${key}`));
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
         held.evictions ? quiet(`, ${count(held.evictions)} evictions`) : '',
         held.offloaded ? quiet(`, idle runs of ${bytes(held.offloaded)} moved out`) : ''),
      el('div', bar,
         USES.map(([key, name,
                    ink]) => part(held[key] / (whole || 1), ink, `${name}: ${bytes(held[key])}`))),
      el('div', {className: 'legend'},
         USES.map(
             ([key, name, ink]) =>
                 el('span', {'data-use': key}, swatch(ink), `${name} `,
                    el('b', {}, bytes(held[key]))))));
}

function limit(name, {bytes: held, bytes_max: most, count: number}) {
  const requests = number === undefined ? '' : `, ${times(number, 'request')}`;
  return el(
      'div', {className: 'limit'}, `${name}: `, el('b', {}, bytes(held)),
      quiet(most ? ` of ${bytes(most)}${requests}` : requests),
      most && el('div', {className: 'bar thin'}, part(held / most, 'accent', '')));
}
