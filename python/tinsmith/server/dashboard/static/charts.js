// Charts that share a cursor and a range of steps.

import {el, short, svg} from './dom.js';
import {LEFT, drawer} from './plots.js';

const BARS_MAX = 160;
const COLORS = {
  light: ['#b4531a', '#2f7ed8', '#1c8a5e', '#8a5bd6', '#c2407f', '#7a7f1d', '#16889c', '#6b5d4d'],
  dark: ['#f0904f', '#5b9fee', '#4cc39a', '#ab8bea', '#ee7fb0', '#c9c74f', '#4fc4d6', '#c2ad95'],
};

export const color = index => COLORS[document.documentElement.dataset.theme][index % 8];

// A name behind its colour.
export const swatch = (ink, name) =>
    el('span', {}, el('i', {className: 'swatch', style: {background: ink}}), name);

// An exponential moving average whose beginning is not drawn to zero, as TensorBoard has it.
export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, norm = 0;
  return values.map(value => {
    if (value === null || !Number.isFinite(value)) return null;
    mean = mean * weight + (1 - weight) * value;
    norm = norm * weight + (1 - weight);
    return mean / norm;
  });
}

// Bars that stand for several steps each, where there are too many: the means of their parts.
function binned(series) {
  const size = Math.ceil((series[0]?.x.length ?? 0) / BARS_MAX);
  if (size <= 1) return series;
  const mean = values => values.reduce((sum, value) => sum + (value ?? 0), 0) / values.length;
  const cut = values => Array.from(
      {length: Math.ceil(values.length / size)}, (_, i) => values.slice(i * size, (i + 1) * size));
  return series.map(one => ({...one, x: cut(one.x).map(part => part[0]), y: cut(one.y).map(mean)}));
}

// One chart: its title, a readout of the values at the cursor, and the plot.
export class Chart {
  constructor(group, title, {unit = '', large = false, stacked = false, about = ''} = {}) {
    this.group = group;
    this.stacked = stacked;
    this.series = [];
    this.at = null;
    this.readout = el('output', {'aria-live': 'off'});
    this.names = el('div', {className: 'legend', hidden: !stacked});
    this.face = el('div', {className: 'face'});
    this.line = el('div', {className: 'cursor', hidden: true});
    this.plot =
        el('div', {
          className: 'plot',
          tabIndex: 0,
          role: 'img',
          'aria-label': `${title}. Arrow keys move the cursor.`
        },
           this.face, this.line);
    this.root = el(
        'section',
        {className: `chart card${large ? ' large' : ''}`, title: about, 'data-chart': title},
        el('header', {}, el('h3', {}, title), el('span', {className: 'unit'}, unit), this.readout),
        this.plot, this.names);
    this.drawer = drawer(this.face, group);
    this.plot.addEventListener('pointermove', event => this.point(event), {capture: true});
    this.plot.addEventListener('pointerleave', () => group.cursor(null));
    this.plot.addEventListener('keydown', event => this.key(event));
  }

  point(event) {
    const value = this.drawer.value(event.clientX - this.plot.getBoundingClientRect().left);
    if (value !== null) this.group.cursor(this.nearest(value));
  }

  key(event) {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!by) return;
    event.preventDefault();
    const xs = this.steps();
    const place = this.at === null ?
        xs.length - 1 :
        Math.max(0, Math.min(xs.length - 1, xs.indexOf(this.nearest(this.at)) + by));
    if (xs.length) this.group.cursor(xs[place]);
  }

  steps = () => [...new Set(this.series.flatMap(one => one.x))].sort((a, b) => a - b);

  nearest(value) {
    let best = null;
    for (const one of this.series)
      for (const x of one.x)
        if (best === null || Math.abs(x - value) < Math.abs(best - value)) best = x;
    return best;
  }

  draw(series, log) {
    this.log = log;
    this.series = this.stacked ? binned(series) : series;
    this.drawer.draw(this.series, {log, stacked: this.stacked});
    if (this.stacked) this.names.replaceChildren(...series.map(one => swatch(one.color, one.name)));
    this.cursor(this.at);
  }

  cursor(x) {
    this.at = x;
    const place = x === null ? null : this.drawer.place(x);
    this.line.hidden = place === null || place < LEFT - 1;
    if (place !== null) this.line.style.setProperty('left', `${place}px`);
    const told = this.series.map(one => [one, this.value(one, x)])
                     .filter(([, value]) => value !== null && !(this.stacked && !value));
    const whole = this.stacked ? told.reduce((sum, [, value]) => sum + value, 0) : null;
    this.readout.replaceChildren(
        x === null ? '' : el('span', {className: 'step'}, `step ${x}`),
        ...told.map(([one, value]) => this.shown(one, value)),
        whole ? el('b', {}, `${short(whole, 3)} s`) : '');
  }

  // A curve's value at a step (a bar's may stand for several), or its last.
  value(one, x) {
    const bar = () => one.x.findLastIndex(from => from <= x);
    const where = x === null ? one.x.length - 1 : this.stacked ? bar() : one.x.indexOf(x);
    return (one.raw ?? one.y)[where] ?? null;
  }

  shown(one, value) {
    const mark = {className: 'swatch', title: one.name, style: {background: one.color}};
    const digits = this.stacked ? 3 : 4;
    return el('span', {}, this.series.length > 1 && el('i', mark), short(value, digits));
  }
}

// The charts of a view. They are made once for each title, and drawn again with new values.
export class Charts {
  constructor() {
    this.charts = new Map();
    this.range = null;
    this.root = el('div', {}, el('div', {className: 'charts'}));
    this.watch = new ResizeObserver(() => this.resized());
    this.watch.observe(this.root);
  }

  draw(title, series, log, options) {
    let chart = this.charts.get(title);
    if (!chart) {
      chart = new Chart(this, title, options);
      this.charts.set(title, chart);
      this.root.lastElementChild.append(chart.root);  // a chart is drawn where it has a size
    }
    chart.draw(series, log);
  }

  // Drops all charts but these, and puts them in this order. An element begins a grid of its own.
  keep(titles) {
    for (const [title, chart] of this.charts) {
      if (titles.has(title)) continue;
      chart.drawer.close();
      this.charts.delete(title);
    }
    const grids = [[]];
    for (const one of titles) {
      if (one instanceof Element) grids.push([]);
      grids.at(-1).push(this.charts.get(one)?.root ?? one);
    }
    const now = [...this.root.children].flatMap(grid => [...grid.children]), wanted = grids.flat();
    if (wanted.length === now.length && wanted.every((one, i) => one === now[i])) return;
    this.root.replaceChildren(...grids.map(inside => el('div', {className: 'charts'}, inside)));
    this.resized();
  }

  cursor(x) {
    for (const chart of this.charts.values()) chart.cursor(x);
  }

  zoom(range) {
    if (String(range) === String(this.range)) return;
    this.range = range;
    for (const chart of this.charts.values()) chart.drawer.zoom(range);
  }

  resized() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => {
      for (const chart of this.charts.values())
        if (chart.face.clientWidth && !chart.drawer.resize()) chart.draw(chart.series, chart.log);
    });
  }

  close() {
    this.watch.disconnect();
    for (const chart of this.charts.values()) chart.drawer.close();
  }
}

// The small curve of a list.
export function spark(values, ink) {
  const seen = values.filter(Number.isFinite);
  if (!seen.length) return svg('svg', {'aria-hidden': 'true'});
  const low = Math.min(...seen), high = Math.max(...seen), across = Math.max(seen.length - 1, 1);
  const points = seen.map(
      (value, i) => `${(2 + (i / across) * 72).toFixed(1)},${
          (high === low ? 17 : 31 - ((value - low) / (high - low)) * 28).toFixed(1)}`);
  return svg('svg', {viewBox: '0 0 76 34', 'aria-hidden': 'true'}, svg('polyline', {
               points: points.join(' '),
               fill: 'none',
               stroke: ink,
               'stroke-width': 1.6,
               'stroke-linejoin': 'round'
             }));
}
