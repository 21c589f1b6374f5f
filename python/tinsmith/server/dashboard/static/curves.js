// A run's curves, or those of several: one chart for each figure of a step, drawn from rows, and
// one for each of the client's own numbers, its reward before all.

import {Charts, color, smoothed, swatch} from './charts.js';
import {el, inkOf, short} from './dom.js';

const PARTS = [
  ['forward_backward', 'forward and backward'],
  ['optimizer', 'optimizer'],
  ['sampling', 'sampling'],
  ['saving', 'saving'],
  ['waiting', 'waiting'],
  ['client', 'client'],
];

const LOSS =
    ['Loss per token', 'nats', row => row.loss_mean, 'The sum over what the weights sum to'];
const SPLIT = 'Seconds of a step';

export const per = (value, time) => (time > 0 ? value / time : null);

// A chart's title, its unit, what it shows of a step, and what that is. Where no step has a value,
// there is no chart.
const CURVES = [
  ['Trained tokens a second', '1/s', row => row.tokens ? per(row.tokens, row.seconds) : null],
  ['Sampled tokens a second', '1/s', row => row.drawn ? per(row.drawn, row.seconds) : null],
  [
    'KL sampler–trainer',
    'nats',
    row => row.kl?.v1,
    'Mean of the sampler’s minus the trainer’s log-probability (kl_sample_train_v1)',
  ],
  [
    'KL sampler–trainer, second order',
    'nats',
    row => row.kl?.v2,
    'Half the mean square of the same (kl_sample_train_v2)',
  ],
  ['Sampler entropy', 'nats', row => row.kl?.entropy],
  ['Gradient norm', '', row => row.optimizer?.grad_norm, 'Before clipping'],
  ['Weight norm', '', row => row.optimizer?.weight_norm],
  ['Learning rate', '', row => row.adam?.learning_rate],
  ['Tokens in a step', '', row => row.tokens || null],
  ['Failed calls', '', row => row.failed || null],
];

const OPEN_MAX = 6;  // charts of a group that is open at first
const logged = name => Object.assign(row => row.values[name], {logged: true});

// A run's curve of a figure: its steps that have a value.
function curve({name, rows: steps, logged: own, ink}, of, smoothing) {
  const rows = of.logged ? own : steps;
  const known = rows.map(row => [row.step, of(row)]).filter(([, y]) => Number.isFinite(y));
  const x = known.map(([step]) => step), y = known.map(([, value]) => value);
  return smoothing ? {name, x, y: smoothed(y, smoothing), raw: y, color: ink} :
                     {name, x, y, color: ink};
}

const names =
    (all, key) => [...new Set(all.flatMap(one => one.rows.flatMap(row => Object.keys(row[key]))))]
                      .sort();

export class Curves {
  // Settings are {smoothing, log, open: whether a group is}; they outlive the view.
  constructor(settings) {
    this.settings = settings;
    this.heads = new Map();
    this.all = [];
    this.charts = new Charts();
    this.legend = el('div', {className: 'legend'});
    this.empty = el(
        'div', {className: 'empty card'}, 'No step yet. Curves begin with the first optim_step.');
    this.root = el('div', {}, this.tools(), this.empty, this.charts.root);
  }

  tools() {
    const {settings} = this;
    const told = el('output', {}, short(settings.smoothing, 2));
    const set = (key, value) => {
      settings[key] = value;
      told.value = short(settings.smoothing, 2);
      this.again();
    };
    const slider = el('input', {
      type: 'range',
      id: 'smoothing',
      min: 0,
      max: 0.98,
      step: 0.02,
      value: settings.smoothing,
      oninput: event => set('smoothing', Number(event.target.value)),
    });
    const box = el('input', {
      type: 'checkbox',
      id: 'log',
      checked: settings.log,
      onchange: event => set('log', event.target.checked),
    });
    return el(
        'div', {className: 'tools'}, el('label', {}, 'Smoothing', slider, told),
        el('label', {}, box, 'Log scale'), this.legend);
  }

  // Draws runs: [{name, rows, logged, about}], steps and the client's rows in order.
  draw(all) {
    this.all = all;
    this.again();
  }

  again() {
    const all = this.all.map((one, i) => ({...one, ink: color(i)}));
    this.empty.hidden = all.some(one => one.rows.length || one.logged.length);
    const shown = new Set();
    const rewards = new Set(all.map(one => one.about.reward).filter(Boolean));
    for (const name of rewards)
      this.line(all, shown, [name, '', logged(name), 'Logged by the client'], true);
    if (!rewards.size) this.line(all, shown, LOSS, true);
    this.split(all, shown);
    if (rewards.size) this.line(all, shown, LOSS);
    const figures = [
      ...names(all, 'metrics').map(name => [name, '', row => row.metrics[name]]),
      ...names(all, 'forward').map(name => [`forward · ${name}`, '', row => row.forward[name]]),
      ...CURVES,
    ];
    for (const figure of figures) this.line(all, shown, figure);
    this.own(all, shown, rewards);
    this.charts.keep(shown);
    this.legend.replaceChildren(
        ...(all.length > 1 ? all.map(one => swatch(one.ink, one.name)) : []));
  }

  // The client's other numbers: those of a group "env/…" stand together, and the group can be shut.
  own(all, shown, rewards) {
    const found = new Set(all.flatMap(one => Object.keys(one.about.logged ?? {})));
    const groups = new Map();
    for (const name of [...found].filter(name => !rewards.has(name)).sort()) {
      const group = name.includes('/') ? name.split('/')[0] : '';
      groups.set(group, [...(groups.get(group) ?? []), name]);
    }
    const {open} = this.settings;
    for (const [group, names] of groups) {
      if (!open.has(group)) open.set(group, names.length <= OPEN_MAX);
      shown.add(this.heading(group, names.length));
      for (const name of open.get(group) ? names : [])
        this.line(all, shown, [shown.has(name) ? `${name}, logged` : name, '', logged(name)]);
    }
  }

  heading(group, count) {
    const open = this.settings.open;
    const head = this.heads.get(group) ?? el('button', {
                   type: 'button',
                   className: 'group',
                   'data-group': group,
                   onclick: () => {
                     open.set(group, !open.get(group));
                     this.again();
                   }
                 });
    this.heads.set(group, head);
    head.setAttribute('aria-expanded', open.get(group));
    head.textContent = `${group || 'logged by the client'} · ${count}`;
    return head;
  }

  line(all, shown, [title, unit, of, about], large = false) {
    const {log, smoothing} = this.settings;
    const series = all.map(one => curve(one, of, smoothing)).filter(one => one.y.length);
    if (!series.length) return;
    shown.add(title);
    this.charts.draw(title, series, log, {unit, about, large});
  }

  // How the seconds of the first run's steps were spent, as bars.
  split([{name: whose, rows} = {rows: []}, ...others], shown) {
    if (!rows.length) return;
    shown.add(SPLIT);
    const x = rows.map(row => row.step);
    const series = PARTS.map(([part, name]) => {
      return {name, x, y: rows.map(row => row.split[part] ?? 0), color: inkOf(part)};
    });
    const about = others.length ? `of ${whose}` : '';
    this.charts.draw(SPLIT, series, false, {unit: 's', stacked: true, large: true, about});
  }

  close() {
    this.charts.close();
  }
}
